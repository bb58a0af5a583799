/* What every tier below DRAM promises, whatever it stores parts on: the NVMe tier with each of its
 * engines, and the shared tier. A new tier is a struct contract_tier and a line in `tiers`. Numbers
 * name parts; a part's bytes follow from its number (nvme_rig.h). */
#include "tests/unit/tier/nvme_rig.h"

#include "daemon/share/share_internal.h"

#include <ftw.h>
#include <limits.h>

#define PARTS 300u
#define SLOT_BYTES (256u << 10)

struct contract_tier {
    const char *name;
    void (*open)(void); /* empty */
    void (*close)(void);
    /* Begin to store a part, or to load it into part_data. 0, or what the tier refused it with; a
     * refused one ends at once. */
    int (*store)(unsigned number, uint64_t bytes);
    int (*load)(unsigned number);
    int (*status)(unsigned number); /* PENDING until its callback has run, which runs once */
    void (*run)(void);              /* until all that was begun has ended */
    bool (*lookup)(unsigned number);
    void (*erase)(unsigned number);
    void (*damage)(unsigned number); /* flips a bit of its bytes on storage */
    void (*stop)(void);              /* as the daemon does before it closes the tier */
    bool bounded; /* stores parts up to its size, and no more while all of them are in use */
};

static struct rig rig;

/* ---- the NVMe tier ---- */

static void nvme_open_with(enum config_io io, unsigned files)
{
    rig_init(&rig, files, 9 * MIB, MIB, io);
    rig.config.nvme_backlog = 64 * SLOT_BYTES;
    rig_open(&rig);
    rig_memory(&rig, PARTS, SLOT_BYTES);
    for (unsigned i = 0; i < PARTS; i++) {
        rig.parts[i].pinned = true; /* nothing is dropped to make room */
        rig.parts[i].heat = TIER_HEAT_BUSY;
    }
}

static void uring_open_cb(void)
{
    nvme_open_with(CONFIG_IO_URING, 1);
}

static void threads_open_cb(void)
{
    nvme_open_with(CONFIG_IO_THREADS, 1);
}

static void files_open_cb(void)
{
    nvme_open_with(CONFIG_IO_AUTO, 4);
}

static void nvme_close_cb(void)
{
    rig_close(&rig);
}

static int nvme_store(unsigned number, uint64_t bytes)
{
    return part_write(&rig, number, bytes);
}

static int nvme_load(unsigned number)
{
    return part_read(&rig, number, (uint8_t)(number % 16));
}

static int nvme_status(unsigned number)
{
    return rig.parts[number].status;
}

static void nvme_run(void)
{
    rig_run(&rig);
}

static bool nvme_lookup(unsigned number)
{
    const struct rig_part *p = &rig.parts[number];

    return p->place.loc != 0 && tier_nvme.sequence(rig.tier, p->place.loc) != 0;
}

static void nvme_erase(unsigned number)
{
    struct rig_part *p = &rig.parts[number];

    p->stored = false;
    tier_nvme.forget(rig.tier, &p->place, p->io.bytes);
}

static void byte_flip(int fd, off_t at)
{
    uint8_t byte;

    cr_assert_geq(fd, 0);
    cr_assert_eq(pread(fd, &byte, 1, at), 1);
    byte ^= 0x10;
    cr_assert_eq(pwrite(fd, &byte, 1, at), 1);
    close(fd);
}

static void nvme_damage(unsigned number)
{
    const struct tier_place *place = &rig.parts[number].place;

    byte_flip(rig_fd(&rig, nvme_loc_file(place->loc)), place_offset(place) + NVME_PAGE);
}

static void nvme_stop(void)
{
    cr_assert_eq(tier_nvme.sync(rig.tier), 0);
}

/* ---- the shared tier, on a root in a folder ---- */

struct shared_part {
    struct share_io io;
    int status;
    bool released;
};

static struct {
    struct deadlines deadlines;
    struct share *share;
    char folder[64];
    struct shared_part parts[PARTS];
} shared;

static bool shared_idle(void)
{
    for (unsigned i = 0; i < PARTS; i++)
        if (shared.parts[i].io.data && !shared.parts[i].released)
            return false;
    return share_busy(shared.share) == 0;
}

static void shared_run(void)
{
    while (!shared_idle())
        uv_run(&rig.loop, UV_RUN_ONCE);
}

static void shared_open(void)
{
    struct share_settings s = {.loop = &rig.loop,
                               .deadlines = &shared.deadlines,
                               .metrics = &rig.metrics,
                               .host = "h",
                               .negative_ms = 2000,
                               .deadline_ms = 60000,
                               .collect_ms = 600000,
                               .touch_ms = 3600000,
                               .n = 1};
    struct share_root_stats stats;
    char target[PATH_MAX];

    memset(&rig, 0, sizeof(rig));
    memset(&shared, 0, sizeof(shared));
    cr_assert_eq(uv_loop_init(&rig.loop), 0);
    cr_assert_eq(deadlines_init(&shared.deadlines, &rig.loop), 0);
    snprintf(shared.folder, sizeof(shared.folder), "%.40s/share-XXXXXX", rig_base());
    cr_assert_not_null(mkdtemp(shared.folder));
    cr_assert_not_null(realpath(shared.folder, target));
    s.roots[0] = (struct share_root_config){.ops = &share_posix, .target = target, .depth = 16};
    cr_assert_eq(share_new(&s, &shared.share), 0);
    rig_memory(&rig, PARTS, SLOT_BYTES);
    do { /* until the first health check has ended */
        uv_run(&rig.loop, UV_RUN_ONCE);
        share_stats(shared.share, 0, &stats);
    } while (stats.health != SHARE_UP);
}

static int wipe_cb(const char *path, const struct stat *st, int type, struct FTW *at)
{
    (void)st, (void)type, (void)at;
    return remove(path);
}

static void shared_close(void)
{
    share_stop(shared.share);
    shared_run();
    share_close(shared.share);
    deadlines_close(&shared.deadlines);
    uv_run(&rig.loop, UV_RUN_DEFAULT);
    cr_assert_eq(uv_loop_close(&rig.loop), 0);
    cr_assert_eq(nftw(shared.folder, wipe_cb, 16, FTW_DEPTH | FTW_PHYS), 0);
    free(rig.memory);
}

static void shared_done_cb(struct share_io *io, int status)
{
    struct shared_part *p = LIST_ENTRY(io, struct shared_part, io);

    cr_assert_eq(p->status, PENDING, "done twice");
    p->status = status;
}

static void shared_released_cb(struct share_io *io)
{
    struct shared_part *p = LIST_ENTRY(io, struct shared_part, io);

    cr_assert_neq(p->status, PENDING, "released before it is done");
    cr_assert_not(p->released, "released twice");
    p->released = true;
}

static struct block_file_id shared_id(unsigned number)
{
    struct block_file_id id = {.key_bytes = 32};

    memset(id.fingerprint, RIG_FINGERPRINT, sizeof(id.fingerprint));
    memcpy(id.key, &number, sizeof(number));
    return id;
}

static int shared_submit(unsigned number, uint64_t bytes, bool write)
{
    struct shared_part *p = &shared.parts[number];
    int rc;

    *p = (struct shared_part){.status = PENDING,
                              .io = {.write = write,
                                     .id = shared_id(number),
                                     .data = part_data(&rig, number),
                                     .bytes = bytes,
                                     .done_cb = shared_done_cb,
                                     .released_cb = shared_released_cb}};
    rc = share_submit(shared.share, &p->io);
    p->released = rc < 0;
    return rc;
}

static int shared_store(unsigned number, uint64_t bytes)
{
    bytes_put(part_data(&rig, number), bytes, number);
    rig.parts[number].io.bytes = bytes;
    return shared_submit(number, bytes, true);
}

static int shared_load(unsigned number)
{
    uint64_t bytes = rig.parts[number].io.bytes;

    memset(part_data(&rig, number), 0xee, bytes);
    return shared_submit(number, bytes, false);
}

static int shared_status(unsigned number)
{
    return shared.parts[number].status;
}

static bool looked_up;

static void looked_up_cb(struct share_lookup *p)
{
    (void)p;
    looked_up = true;
}

static uint64_t looked_bytes;

static uint64_t shared_bytes_of(const struct share_lookup *p, uint32_t part)
{
    cr_assert_eq(part, p->part);
    return looked_bytes;
}

static bool shared_lookup(unsigned number)
{
    struct block_file_id id = shared_id(number);
    uint8_t answer = SHARE_MISSING;
    struct share_lookup p = {.key_bytes = id.key_bytes,
                             .keys = id.key,
                             .n = 1,
                             .bytes_of = shared_bytes_of,
                             .each = true,
                             .deadline_ms = uv_now(&rig.loop) + 60000,
                             .answers = &answer,
                             .done_cb = looked_up_cb};
    int rc;

    memcpy(p.fingerprint, id.fingerprint, sizeof(p.fingerprint));
    looked_up = false;
    looked_bytes = rig.parts[number].io.bytes;
    rc = share_lookup(shared.share, &p);
    cr_assert(rc == 0 || rc == -ENOENT, "%s", strerror(-rc));
    while (rc == 0 && !looked_up)
        uv_run(&rig.loop, UV_RUN_ONCE);
    return answer != SHARE_MISSING && answer != SHARE_UNKNOWN;
}

static void shared_erase(unsigned number)
{
    struct block_file_id id = shared_id(number);

    share_remove(shared.share, &id, &(struct fair_who){.tenant = 1});
    shared_run();
}

static void shared_damage(unsigned number)
{
    struct block_file_id id = shared_id(number);
    uint8_t identity[BLOCK_FILE_IDENTITY_BYTES];
    char name[BLOCK_FILE_NAME_CAP], path[512];

    cr_assert_eq(block_file_locate(&id, identity, name), 0);
    snprintf(path, sizeof(path), "%s/blocks/%02x/%s", shared.folder, identity[0], name);
    byte_flip(open(path, O_RDWR | O_CLOEXEC), BLOCK_FILE_HEADER_BYTES);
}

static void shared_stop(void)
{
    share_stop(shared.share);
}

/* ---- the table ---- */

#define NVME(what)                                                                                 \
    .close = nvme_close_cb, .store = nvme_store, .load = nvme_load, .status = nvme_status,         \
    .run = nvme_run, .lookup = nvme_lookup, .erase = nvme_erase, .damage = nvme_damage,            \
    .stop = nvme_stop, .bounded = true, .open = what

static const struct contract_tier tiers[] = {
    {.name = "nvme, threads", NVME(threads_open_cb)},
    {.name = "nvme, four files", NVME(files_open_cb)},
    {.name = "shared, posix",
     .open = shared_open,
     .close = shared_close,
     .store = shared_store,
     .load = shared_load,
     .status = shared_status,
     .run = shared_run,
     .lookup = shared_lookup,
     .erase = shared_erase,
     .damage = shared_damage,
     .stop = shared_stop},
    /* the last: rig_open skips what follows where io_uring is not allowed */
    {.name = "nvme, io_uring", NVME(uring_open_cb)},
};

static const struct contract_tier *t;

/* ---- the checks ---- */

/* What became of an operation: of its refusal, or of its end. */
static int ended(unsigned number, int rc)
{
    if (rc < 0) {
        cr_assert_eq(t->status(number), PENDING, "%s: a refused operation ended", t->name);
        return rc;
    }
    cr_assert_eq(rc, 0);
    cr_assert_eq(t->status(number), PENDING, "%s: it ended inside submit", t->name);
    t->run();
    cr_assert_neq(t->status(number), PENDING, "%s: it never ended", t->name);
    return t->status(number);
}

static int store(unsigned number, uint64_t bytes)
{
    return ended(number, t->store(number, bytes));
}

static int load(unsigned number)
{
    return ended(number, t->load(number));
}

static void expect_right(unsigned number)
{
    cr_assert_eq(load(number), 0, "%s: part %u: %s", t->name, number, strerror(-t->status(number)));
    cr_assert(part_right(&rig, number), "%s: part %u has wrong bytes", t->name, number);
}

static void sizes(void)
{
    static const uint64_t bytes[] = {1, 511, 512, 4095, 4096, 4097, 16384, 16385, SLOT_BYTES};
    unsigned n = sizeof(bytes) / sizeof(bytes[0]);

    for (unsigned i = 0; i < n; i++)
        cr_assert_eq(store(i, bytes[i]), 0, "%s: %u bytes", t->name, (unsigned)bytes[i]);
    for (unsigned i = 0; i < n; i++)
        expect_right(i);
}

static void lookup(void)
{
    rig.parts[3].io.bytes = 5000;
    cr_assert_not(t->lookup(3), "%s", t->name);
    cr_assert_lt(load(3), 0, "%s: never stored", t->name);
    cr_assert_eq(store(3, 5000), 0);
    cr_assert(t->lookup(3), "%s", t->name);
}

static void erase(void)
{
    for (unsigned i = 0; i < 3; i++)
        cr_assert_eq(store(i, 5000), 0);
    t->erase(1);
    cr_assert_not(t->lookup(1), "%s", t->name);
    cr_assert_lt(load(1), 0, "%s: erased", t->name);
    expect_right(0);
    expect_right(2);
    cr_assert_eq(store(1, 6000), 0, "%s: stored again", t->name);
    expect_right(1);
}

/* Every one with bytes of its own; what is refused meanwhile is stored later. */
static void many_at_once(void)
{
    bool accepted[100];
    unsigned left = 0;

    for (unsigned i = 0; i < 100; i++) {
        int rc = t->store(i, 20000 + i);

        cr_assert(rc == 0 || rc == -EAGAIN, "%s: %s", t->name, strerror(-rc));
        cr_assert_eq(t->status(i), PENDING, "%s", t->name);
        accepted[i] = rc == 0;
    }
    t->run();
    for (unsigned i = 0; i < 100; i++) {
        cr_assert_eq(t->status(i), accepted[i] ? 0 : PENDING, "%s: part %u", t->name, i);
        if (!accepted[i])
            cr_assert_eq(store(i, 20000 + i), 0, "%s: part %u", t->name, i);
    }
    for (unsigned i = 0; i < 100; i++) {
        accepted[i] = t->load(i) == 0;
        left += !accepted[i];
    }
    t->run();
    cr_assert_lt(left, 100u, "%s", t->name);
    for (unsigned i = 0; i < 100; i++)
        if (!accepted[i])
            expect_right(i);
        else
            cr_assert(t->status(i) == 0 && part_right(&rig, i), "%s: part %u", t->name, i);
}

/* Wrong bytes are an error, its own only, and nothing that lasts. */
static void damage(void)
{
    for (unsigned i = 0; i < 3; i++)
        cr_assert_eq(store(i, 30000), 0);
    t->damage(1);
    cr_assert_lt(load(1), 0, "%s: damaged", t->name);
    expect_right(0);
    expect_right(2);
    t->erase(1);
    cr_assert_eq(store(1, 30000), 0, "%s", t->name);
    expect_right(1);
}

/* When all is in use, what comes then fails, and what is there stays; what is erased makes room. */
static void full(void)
{
    unsigned n = 0;
    int rc = 0;

    if (!t->bounded)
        return;
    while (rc == 0 && n < PARTS)
        rc = store(n++, SLOT_BYTES);
    cr_assert_eq(rc, -ENOSPC, "%s: %s", t->name, strerror(-rc));
    cr_assert_eq(store(n, SLOT_BYTES), -ENOSPC, "%s", t->name);
    for (unsigned i = 0; i + 1 < n; i++)
        expect_right(i);
    for (unsigned i = 0; i + 1 < n; i++)
        t->erase(i);
    for (unsigned i = 0; i < n / 2; i++)
        cr_assert_eq(store(i, SLOT_BYTES), 0, "%s: after erasing", t->name);
    expect_right(0);
}

/* Each of them ends once, well or not, and a load that succeeds has the right bytes. */
static void stop_with_work(void)
{
    bool accepted[60];

    for (unsigned i = 0; i < 20; i++)
        cr_assert_eq(store(i, 50000), 0);
    for (unsigned i = 0; i < 60; i++)
        accepted[i] = (i < 20 ? t->load(i) : t->store(i, 50000)) == 0;
    t->stop();
    t->run();
    for (unsigned i = 0; i < 60; i++) {
        cr_assert_eq(t->status(i) == PENDING, !accepted[i], "%s: part %u", t->name, i);
        if (i < 20 && t->status(i) == 0)
            cr_assert(part_right(&rig, i), "%s: part %u", t->name, i);
    }
}

static void check_all(void (*check)(void))
{
    for (unsigned i = 0; i < sizeof(tiers) / sizeof(tiers[0]); i++) {
        t = &tiers[i];
        t->open();
        check();
        t->close();
    }
}

TestSuite(tier_contract, .timeout = 60);

Test(tier_contract, what_is_stored_is_loaded)
{
    check_all(sizes);
}

Test(tier_contract, what_is_not_stored_is_not_found)
{
    check_all(lookup);
}

Test(tier_contract, what_is_erased_is_not_found)
{
    check_all(erase);
}

Test(tier_contract, many_at_once)
{
    check_all(many_at_once);
}

Test(tier_contract, damaged_bytes_are_an_error)
{
    check_all(damage);
}

Test(tier_contract, a_full_tier_keeps_what_it_has)
{
    check_all(full);
}

Test(tier_contract, all_work_ends_when_it_stops)
{
    check_all(stop_with_work);
}
