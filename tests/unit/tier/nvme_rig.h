/* What the NVMe tier's tests share: a tier in folders of its own, and a small model of its caller
 * that knows which bytes every part must have. */
#ifndef UCMD_TESTS_NVME_RIG_H
#define UCMD_TESTS_NVME_RIG_H

#include "daemon/config/config.h"
#include "daemon/format/nvme_format.h"
#include "daemon/tier/tier.h"
#include "proto/errors.h"
#include "tests/runner/bytes.h"

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

struct rig;

struct rig_part {
    struct tier_io io;
    struct rig *rig;
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
    char folders[RIG_FILES_MAX][64];
    char *items[RIG_FILES_MAX];
    char *memory; /* one slot a part */
    uint64_t slot_bytes;
    struct rig_part parts[RIG_PARTS_MAX];
    unsigned n, drops, moves, losses, done, under_way;
    bool close_when_done;
    bool recovers; /* each part that is found has its order then */
};

static inline uint64_t rig_random(uint64_t *state)
{
    *state += 0x9e3779b97f4a7c15ull;
    uint64_t z = *state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

static inline bool rig_drop_cb(void *ctx, uint64_t owner, uint64_t loc)
{
    struct rig *r = ctx;
    struct rig_part *p = &r->parts[owner - 1];

    cr_assert(p->stored, "asked for a part that was never said to be stored");
    cr_assert_eq(p->place.loc, loc);
    if (p->pinned)
        return false;
    p->stored = false;
    r->drops++;
    return true;
}

static inline unsigned rig_heat_cb(void *ctx, uint64_t owner)
{
    struct rig *r = ctx;

    return r->parts[owner - 1].heat;
}

static inline bool rig_describe_cb(void *ctx, uint64_t owner, struct tier_described *out)
{
    struct rig *r = ctx;
    const struct rig_part *p = &r->parts[owner - 1];

    cr_assert(p->stored);
    *out = (struct tier_described){.name = p->io.name,
                                   .bytes = p->io.bytes,
                                   .checksum = p->place.checksum,
                                   .sealed = p->place.sealed,
                                   .shard_bytes = p->io.shard_bytes};
    return true;
}

static inline bool rig_moved_cb(void *ctx, uint64_t owner, uint64_t from,
                                const struct tier_place *to)
{
    struct rig *r = ctx;
    struct rig_part *p = &r->parts[owner - 1];

    if (!p->stored || p->place.loc != from)
        return false;
    cr_assert_eq(p->place.checksum, to->checksum);
    p->place = *to;
    r->moves++;
    return true;
}

static inline void rig_lost_cb(void *ctx, uint64_t owner, uint64_t loc)
{
    struct rig *r = ctx;
    struct rig_part *p = &r->parts[owner - 1];

    cr_assert(p->stored && p->place.loc == loc);
    p->stored = false;
    r->losses++;
    tier_nvme.forget(r->tier, &p->place, p->io.bytes);
}

static inline bool rig_ns_known_cb(void *ctx, const uint8_t *fingerprint)
{
    (void)ctx;
    (void)fingerprint;
    return true;
}

static inline uint64_t rig_restore_cb(void *ctx, const struct tier_found *f)
{
    struct rig *r = ctx;

    for (unsigned i = 0; i < r->n; i++) {
        struct rig_part *p = &r->parts[i];

        if (memcmp(p->io.name.key, f->name->key, 32) == 0) {
            cr_assert_eq(p->place.loc, f->place.loc);
            p->order = r->done++;
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

/* Folders and a config; the tier is not open yet. */
static inline void rig_init(struct rig *r, unsigned files, uint64_t size, uint64_t segment,
                            enum config_io io)
{
    memset(r, 0, sizeof(*r));
    cr_assert_eq(uv_loop_init(&r->loop), 0);
    for (unsigned i = 0; i < files; i++) {
        snprintf(r->folders[i], sizeof(r->folders[i]), "%.40s/nvme-XXXXXX", rig_base());
        cr_assert_not_null(mkdtemp(r->folders[i]));
        r->items[i] = r->folders[i];
    }
    r->config.nvme_paths = (struct config_list){.item = r->items, .n = files};
    r->config.nvme_size = size;
    r->config.nvme_segment = segment;
    r->config.nvme_depth = 16;
    r->config.nvme_io = io;
    r->config.nvme_threads = 4;
    r->config.nvme_backlog = 1024 * MIB;
}

static inline int rig_try_open(struct rig *r)
{
    const struct tier_callbacks callbacks = {.drop_cb = rig_drop_cb,
                                             .heat_cb = rig_heat_cb,
                                             .describe_cb = rig_describe_cb,
                                             .lost_cb = rig_lost_cb,
                                             .moved_cb = rig_moved_cb,
                                             .ns_known_cb = rig_ns_known_cb,
                                             .restore_cb = r->recovers ? rig_restore_cb : NULL,
                                             .recovered_cb = rig_recovered_cb,
                                             .ctx = r};

    memset(&r->error, 0, sizeof(r->error));
    return tier_nvme.open(&r->loop, &r->config, &callbacks, &r->metrics, &r->tier, &r->error);
}

static inline void rig_open(struct rig *r)
{
    int rc = rig_try_open(r);

    if (rc == -EPERM || rc == -ENOSYS)
        cr_skip("io_uring is not allowed here");
    cr_assert_eq(rc, 0, "%s", r->error.text);
}

/* Memory for n parts of at most slot_bytes, as one registered buffer. */
static inline void rig_memory(struct rig *r, unsigned n, uint64_t slot_bytes)
{
    r->n = n;
    r->slot_bytes = nvme_padded(slot_bytes);
    r->memory = aligned_alloc(NVME_PAGE, n * r->slot_bytes);
    cr_assert_not_null(r->memory);
    bytes_set(r->memory, n * r->slot_bytes, 0x5a);
    if (r->tier)
        tier_nvme.buffer_add(r->tier, 0, r->memory, n * r->slot_bytes);
}

static inline void rig_close_tier(struct rig *r)
{
    tier_nvme.close(r->tier);
    r->tier = NULL;
    cr_assert_eq(uv_run(&r->loop, UV_RUN_DEFAULT), 0);
}

static inline void rig_path(const struct rig *r, unsigned file, char out[128])
{
    snprintf(out, 128, "%s/%s", r->folders[file], NVME_CACHE_FILE);
}

static inline void rig_close(struct rig *r)
{
    char path[128];

    rig_close_tier(r);
    cr_assert_eq(uv_loop_close(&r->loop), 0);
    for (unsigned i = 0; i < r->config.nvme_paths.n; i++) {
        rig_path(r, i, path);
        unlink(path);
        snprintf(path, sizeof(path), "%s/%s", r->folders[i], NVME_INDEX_FILE);
        unlink(path);
        snprintf(path, sizeof(path), "%s/%s", r->folders[i], NVME_NS_FILE);
        unlink(path);
        rmdir(r->folders[i]);
    }
    free(r->memory);
}

static inline void rig_done_cb(struct tier_io *io, int status)
{
    struct rig_part *p = LIST_ENTRY(io, struct rig_part, io);
    struct rig *r = p->rig;

    cr_assert_eq(p->status, PENDING, "done twice");
    p->status = status;
    p->order = r->done++;
    if (io->op == TIER_WRITE && status == 0) {
        p->stored = true;
        p->place = io->place;
    }
    if (--r->under_way == 0 && r->close_when_done) {
        tier_nvme.close(r->tier);
        r->tier = NULL;
    }
}

static inline char *part_data(struct rig *r, unsigned number)
{
    return r->memory + number * r->slot_bytes;
}

static inline int part_submit(struct rig *r, unsigned number, enum tier_op op)
{
    struct rig_part *p = &r->parts[number];
    int rc;

    p->rig = r;
    p->number = number;
    p->status = PENDING;
    p->io.op = op;
    p->io.data = part_data(r, number);
    p->io.buffer = 0;
    p->io.done_cb = rig_done_cb;
    p->io.place = p->place;
    r->under_way++;
    rc = tier_nvme.submit(r->tier, &p->io);
    if (rc < 0)
        r->under_way--;
    return rc;
}

#define RIG_FINGERPRINT 0xf0 /* each byte of it */

static inline void rig_named_cb(struct tier_ns_record *n, int status)
{
    cr_assert_eq(status, 0, "%s", strerror(-status));
    n->identity = NULL; /* done */
}

/* The namespace of all parts is named, or what was stored for it so far purged. n: until it is
 * done. */
static inline void rig_name(struct rig *r, struct tier_ns_record *n, bool forget)
{
    static const uint8_t identity[16] = "the only one";
    static uint8_t fingerprint[UCM_FINGERPRINT_BYTES];

    memset(fingerprint, RIG_FINGERPRINT, sizeof(fingerprint));
    *n = (struct tier_ns_record){.fingerprint = fingerprint,
                                 .identity = identity,
                                 .identity_bytes = sizeof(identity),
                                 .forget = forget,
                                 .done_cb = rig_named_cb};
    tier_nvme.ns_record(r->tier, n);
}

static inline int part_write(struct rig *r, unsigned number, uint64_t bytes)
{
    struct rig_part *p = &r->parts[number];
    uint64_t seed = number;

    p->io.bytes = bytes;
    p->io.name.owner = number + 1;
    p->io.name.key_bytes = 32;
    p->io.name.part = number % 8;
    memset(p->io.name.fingerprint, RIG_FINGERPRINT, sizeof(p->io.name.fingerprint));
    for (unsigned i = 0; i < 32; i += 8) {
        uint64_t v = rig_random(&seed);

        memcpy(p->io.name.key + i, &v, 8);
    }
    bytes_put(part_data(r, number), bytes, number);
    return part_submit(r, number, TIER_WRITE);
}

static inline int part_read(struct rig *r, unsigned number, uint8_t priority)
{
    r->parts[number].io.priority = priority;
    memset(part_data(r, number), 0xee, nvme_padded(r->parts[number].io.bytes));
    return part_submit(r, number, TIER_READ);
}

static inline void rig_run(struct rig *r)
{
    cr_assert_eq(uv_run(&r->loop, UV_RUN_DEFAULT), 0);
    cr_assert_eq(r->under_way, 0, "%u operations never ended", r->under_way);
}

static inline bool part_right(struct rig *r, unsigned number)
{
    return bytes_are(part_data(r, number), r->parts[number].io.bytes, number);
}

/* Writes parts [from, to) of `bytes` each and waits; how many were stored. */
static inline unsigned rig_write(struct rig *r, unsigned from, unsigned to, uint64_t bytes)
{
    unsigned stored = 0;

    for (unsigned i = from; i < to; i++)
        cr_assert_eq(part_write(r, i, bytes), 0);
    rig_run(r);
    for (unsigned i = from; i < to; i++)
        stored += r->parts[i].status == 0;
    return stored;
}

/* Reads all parts that are stored and checks each of them. */
static inline unsigned rig_verify(struct rig *r)
{
    unsigned n = 0;

    for (unsigned i = 0; i < r->n; i++)
        if (r->parts[i].stored)
            cr_assert_eq(part_read(r, i, (uint8_t)(i % 8)), 0);
    rig_run(r);
    for (unsigned i = 0; i < r->n; i++) {
        if (!r->parts[i].stored)
            continue;
        cr_assert_eq(r->parts[i].status, 0, "part %u: %s", i, strerror(-r->parts[i].status));
        cr_assert(part_right(r, i), "part %u has wrong bytes", i);
        n++;
    }
    return n;
}

static inline int rig_fd(const struct rig *r, unsigned file)
{
    char path[128];
    int fd;

    rig_path(r, file, path);
    fd = open(path, O_RDWR | O_CLOEXEC);
    cr_assert_geq(fd, 0);
    return fd;
}

static inline off_t place_offset(const struct tier_place *place)
{
    return (off_t)(nvme_loc_page(place->loc) * NVME_PAGE);
}

#endif
