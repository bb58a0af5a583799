/* What the NVMe tier's tests share: a tier in directories of its own, and a small model of its
 * caller. The model knows which bytes every part must have. */
#ifndef UCMD_TESTS_NVME_RIG_H
#define UCMD_TESTS_NVME_RIG_H

#include "daemon/config/config.h"
#include "daemon/format/nvme_format.h"
#include "daemon/tier/tier.h"
#include "proto/errors.h"
#include "tests/runner/bytes.h"
#include "tests/runner/wipe.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <uv.h>

#define MIB (1ull << 20)
#define RIG_FILES_MAX 4
#define RIG_PARTS_MAX 4608
#define PENDING 1 /* no status: 0 and -errno are */

struct rig_part {
    struct tier_io io;
    uint32_t number;
    bool stored; /* what an index would know */
    bool pinned; /* drop says no */
    unsigned heat;
    struct tier_place place;
    int status;
    unsigned order; /* when it was done */
};

struct rig {
    uv_loop_t loop;
    struct config config;
    struct metrics metrics;
    struct tier *tier;
    struct ucm_error error;
    char directories[RIG_FILES_MAX][64];
    char *items[RIG_FILES_MAX];
    char *memory; /* one slot a part */
    uint64_t slot_bytes;
    struct rig_part parts[RIG_PARTS_MAX];
    unsigned n, drops, moves, losses, done, under_way;
    bool close_when_done;
    bool recovers; /* each part that is found has its order then */
};
static struct rig rig;
static unsigned rig_queue_depth = 16; /* set before rig_init */

static inline bool rig_drop_cb(void *ctx, uint64_t owner, uint64_t loc)
{
    struct rig_part *p = &rig.parts[owner - 1];

    (void)ctx;
    cr_assert(p->stored, "asked for a part that was never said to be stored");
    cr_assert_eq(p->place.loc, loc);
    if (p->pinned)
        return false;
    p->stored = false;
    rig.drops++;
    return true;
}

static inline unsigned rig_heat_cb(void *ctx, uint64_t owner)
{
    (void)ctx;
    return rig.parts[owner - 1].heat;
}

static inline bool rig_describe_cb(void *ctx, uint64_t owner, struct tier_described *out)
{
    const struct rig_part *p = &rig.parts[owner - 1];

    (void)ctx;
    cr_assert(p->stored);
    *out = (struct tier_described){.name = p->io.name,
                                   .bytes = p->io.bytes,
                                   .checksum = p->place.checksum,
                                   .encrypted = p->place.encrypted,
                                   .layer_bytes = p->io.layer_bytes};
    return true;
}

static inline bool rig_moved_cb(void *ctx, uint64_t owner, uint64_t from,
                                const struct tier_place *to)
{
    struct rig_part *p = &rig.parts[owner - 1];

    (void)ctx;
    if (!p->stored || p->place.loc != from)
        return false;
    cr_assert_eq(p->place.checksum, to->checksum);
    p->place = *to;
    rig.moves++;
    return true;
}

static inline void rig_lost_cb(void *ctx, uint64_t owner, uint64_t loc)
{
    struct rig_part *p = &rig.parts[owner - 1];

    (void)ctx;
    cr_assert(p->stored && p->place.loc == loc);
    p->stored = false;
    rig.losses++;
    tier_nvme.forget(rig.tier, &p->place, p->io.bytes);
}

static inline bool rig_ns_known_cb(void *ctx, const uint8_t *fingerprint)
{
    (void)ctx;
    (void)fingerprint;
    return true;
}

static inline uint64_t rig_restore_cb(void *ctx, const struct tier_found *f)
{

    for (unsigned i = 0; i < rig.n; i++) {
        struct rig_part *p = &rig.parts[i];

        (void)ctx;
        if (memcmp(p->io.name.key, f->name->key, 32) == 0) {
            cr_assert_eq(p->place.loc, f->place.loc);
            p->order = rig.done++;
            return i + 1;
        }
    }
    return 0;
}

static inline void rig_recovered_cb(void *ctx)
{
    (void)ctx;
}

static inline const char *rig_base(void)
{
    const char *base = getenv("TMPDIR");

    if (base)
        return base;
    (void)mkdir("build", 0755);
    (void)mkdir("build/tmp", 0755);
    return "build/tmp";
}

/* Directories and a config; the tier is not open yet. */
static inline void rig_init(unsigned files, uint64_t size, uint64_t segment, enum config_io io)
{
    memset(&rig, 0, sizeof(rig));
    cr_assert_eq(uv_loop_init(&rig.loop), 0);
    for (unsigned i = 0; i < files; i++) {
        snprintf(rig.directories[i], sizeof(rig.directories[i]), "%.40s/nvme-XXXXXX", rig_base());
        cr_assert_not_null(mkdtemp(rig.directories[i]));
        rig.items[i] = rig.directories[i];
    }
    rig.config.nvme_paths = (struct config_list){.item = rig.items, .n = files};
    rig.config.nvme_size = size;
    rig.config.nvme_segment = segment;
    rig.config.nvme_queue_depth = rig_queue_depth;
    rig.config.nvme_io = io;
    rig.config.nvme_threads = 4;
    rig.config.nvme_write_queue_size = 1024 * MIB;
}

static inline int rig_try_open(void)
{
    const struct tier_callbacks callbacks = {.drop_cb = rig_drop_cb,
                                             .heat_cb = rig_heat_cb,
                                             .describe_cb = rig_describe_cb,
                                             .lost_cb = rig_lost_cb,
                                             .moved_cb = rig_moved_cb,
                                             .ns_known_cb = rig_ns_known_cb,
                                             .restore_cb = rig.recovers ? rig_restore_cb : NULL,
                                             .recovered_cb = rig_recovered_cb,
                                             .ctx = NULL};

    memset(&rig.error, 0, sizeof(rig.error));
    return tier_nvme.open(&rig.loop, &rig.config, &callbacks, &rig.metrics, &rig.tier, &rig.error);
}

static inline void rig_open(void)
{
    int rc = rig_try_open();

    if (rc == -EPERM || rc == -ENOSYS)
        cr_skip("io_uring is not allowed here");
    cr_assert_eq(rc, 0, "%s", rig.error.text);
}

/* Memory for n parts of at most slot_bytes, as one registered buffer. */
static inline void rig_memory(unsigned n, uint64_t slot_bytes)
{
    rig.n = n;
    rig.slot_bytes = nvme_padded(slot_bytes);
    rig.memory = bytes_pages(n * rig.slot_bytes);
    bytes_set(rig.memory, n * rig.slot_bytes, 0x5a);
    if (rig.tier)
        tier_nvme.buffer_add(rig.tier, 0, rig.memory, n * rig.slot_bytes);
}

/* The last three together, with the rest of the configuration as rig_init has it. */
static inline void rig_start(unsigned files, uint64_t size, uint64_t segment, enum config_io io,
                             unsigned n, uint64_t slot_bytes)
{
    rig_init(files, size, segment, io);
    rig_open();
    rig_memory(n, slot_bytes);
}

static inline void rig_close_tier(void)
{
    tier_nvme.close(rig.tier);
    rig.tier = NULL;
    cr_assert_eq(uv_run(&rig.loop, UV_RUN_DEFAULT), 0);
}

/* Valid until the next call. */
static inline const char *rig_file(unsigned file, const char *name)
{
    static char path[128];

    snprintf(path, sizeof(path), "%s/%s", rig.directories[file], name);
    return path;
}

static inline const char *rig_path(unsigned file)
{
    return rig_file(file, NVME_CACHE_FILE);
}

/* Closes what is open. Also runs at the end of a test that asks for it. */
static inline void rig_close(void)
{
    if (rig.config.nvme_paths.n == 0)
        return;
    rig_close_tier();
    cr_assert_eq(uv_loop_close(&rig.loop), 0);
    for (unsigned i = 0; i < rig.config.nvme_paths.n; i++)
        cr_assert_eq(wipe(rig.directories[i]), 0);
    free(rig.memory);
    memset(&rig, 0, sizeof(rig));
}

static inline void rig_done_cb(struct tier_io *io, int status)
{
    struct rig_part *p = LIST_ENTRY(io, struct rig_part, io);

    cr_assert_eq(p->status, PENDING, "done twice");
    p->status = status;
    p->order = rig.done++;
    if (io->op == TIER_WRITE && status == 0) {
        p->stored = true;
        p->place = io->place;
    }
    if (--rig.under_way == 0 && rig.close_when_done) {
        tier_nvme.close(rig.tier);
        rig.tier = NULL;
    }
}

static inline char *part_data(unsigned number)
{
    return rig.memory + number * rig.slot_bytes;
}

static inline int part_submit(unsigned number, enum tier_op op)
{
    struct rig_part *p = &rig.parts[number];
    int rc;

    p->number = number;
    p->status = PENDING;
    p->io.op = op;
    p->io.data = part_data(number);
    p->io.buffer = 0;
    p->io.done_cb = rig_done_cb;
    p->io.place = p->place;
    rig.under_way++;
    rc = tier_nvme.submit(rig.tier, &p->io);
    if (rc < 0)
        rig.under_way--;
    return rc;
}

/* The second one skips the rest where it is not allowed. */
static const enum config_io rig_engines[]
    __attribute__((unused)) = {CONFIG_IO_THREADS, CONFIG_IO_URING};

#define RIG_FINGERPRINT 0xf0 /* each byte of it */

static inline void rig_named_cb(struct tier_ns_record *n, int status)
{
    cr_assert_eq(status, 0, "%s", strerror(-status));
    n->identity = NULL; /* done */
}

/* Names the namespace of all parts, or purges what was stored for it so far. n is in use until that
 * is done. */
static inline void rig_name(struct tier_ns_record *n, bool forget)
{
    static const uint8_t identity[16] = "the only one";
    static uint8_t fingerprint[UCM_FINGERPRINT_BYTES];

    memset(fingerprint, RIG_FINGERPRINT, sizeof(fingerprint));
    *n = (struct tier_ns_record){.fingerprint = fingerprint,
                                 .identity = identity,
                                 .identity_bytes = sizeof(identity),
                                 .forget = forget,
                                 .done_cb = rig_named_cb};
    tier_nvme.ns_record(rig.tier, n);
}

static inline int part_write(unsigned number, uint64_t bytes)
{
    struct rig_part *p = &rig.parts[number];

    p->io.bytes = bytes;
    p->io.name.owner = number + 1;
    p->io.name.key_bytes = 32;
    p->io.name.part = number % 8;
    memset(p->io.name.fingerprint, RIG_FINGERPRINT, sizeof(p->io.name.fingerprint));
    bytes_random(p->io.name.key, 32, number);
    bytes_put(part_data(number), bytes, number);
    return part_submit(number, TIER_WRITE);
}

static inline int part_read(unsigned number, uint8_t priority)
{
    rig.parts[number].io.priority = priority;
    memset(part_data(number), 0xee, nvme_padded(rig.parts[number].io.bytes));
    return part_submit(number, TIER_READ);
}

static inline void rig_run(void)
{
    cr_assert_eq(uv_run(&rig.loop, UV_RUN_DEFAULT), 0);
    cr_assert_eq(rig.under_way, 0, "%u operations never ended", rig.under_way);
}

static inline bool part_right(unsigned number)
{
    return bytes_are(part_data(number), rig.parts[number].io.bytes, number);
}

/* Writes parts [from, to) of `bytes` each and waits; how many were stored. */
static inline unsigned rig_write(unsigned from, unsigned to, uint64_t bytes)
{
    unsigned stored = 0;

    for (unsigned i = from; i < to; i++)
        cr_assert_eq(part_write(i, bytes), 0);
    rig_run();
    for (unsigned i = from; i < to; i++)
        stored += rig.parts[i].status == 0;
    return stored;
}

/* Reads all parts that are stored and checks each of them. */
static inline unsigned rig_verify(void)
{
    unsigned n = 0;

    for (unsigned i = 0; i < rig.n; i++)
        if (rig.parts[i].stored)
            cr_assert_eq(part_read(i, (uint8_t)(i % 8)), 0);
    rig_run();
    for (unsigned i = 0; i < rig.n; i++) {
        if (!rig.parts[i].stored)
            continue;
        cr_assert_eq(rig.parts[i].status, 0, "part %u: %s", i, strerror(-rig.parts[i].status));
        cr_assert(part_right(i), "part %u has wrong bytes", i);
        n++;
    }
    return n;
}

static inline void rig_read(unsigned from, unsigned to, uint8_t priority)
{
    for (unsigned i = from; i < to; i++)
        cr_assert_eq(part_read(i, priority), 0);
    rig_run();
}

/* Its status. */
static inline int rig_read_one(unsigned number)
{
    rig_read(number, number + 1, 0);
    return rig.parts[number].status;
}

static inline void rig_ended(unsigned from, unsigned to, int status)
{
    for (unsigned i = from; i < to; i++)
        cr_assert_eq(rig.parts[i].status, status, "part %u: %s", i, strerror(-rig.parts[i].status));
}

static inline struct tier_stats rig_stats(void)
{
    struct tier_stats stats;

    tier_nvme.stats(rig.tier, &stats);
    return stats;
}

static inline int rig_fd(unsigned file)
{
    int fd = open(rig_path(file), O_RDWR | O_CLOEXEC);

    cr_assert_geq(fd, 0);
    return fd;
}

static inline off_t place_offset(const struct tier_place *place)
{
    return (off_t)(nvme_loc_page(place->loc) * NVME_PAGE);
}

/* Another bit at this byte of the part's record, in the first file. */
static inline void part_flip(unsigned number, off_t at)
{
    int fd = rig_fd(0);
    char c;

    at += place_offset(&rig.parts[number].place);
    cr_assert_eq(pread(fd, &c, 1, at), 1);
    c ^= 4;
    cr_assert_eq(pwrite(fd, &c, 1, at), 1);
    close(fd);
}

#endif
