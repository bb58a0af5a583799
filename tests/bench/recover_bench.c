/* How fast the index comes back after a restart: makes files as if a daemon had stored BLOCKS parts
 * of PART bytes, then opens tier, cache and index on them. From a checkpoint, or with "tail" from
 * the slots' headers alone.
 *
 *   recover_bench FOLDER [BLOCKS [PART [tail]]]
 *
 * Prints blocks a second and how long the turns of the loop were, which is what a request may have
 * to wait for recovery: by the clock, and by the time that the thread ran, which leaves out what
 * others took of a shared processor. The file is sparse: nothing but headers is written to it. */
#include "daemon/cache/cache.h"
#include "daemon/config/config.h"
#include "daemon/format/checkpoint_format.h"
#include "daemon/index/policy.h"
#include "proto/errors.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <uv.h>

#define SEGMENT (64ull << 20)
#define RECORD_SLOTS 64u   /* as the daemon writes them */
#define EPOCH (1ull << 40) /* sequences of the first start */

/* Turns of the loop by their length: up to 125 us, and twice that in each next one. */
#define TURNS 10u
struct turns {
    uint64_t last_ns, longest_ns, n[TURNS];
};

struct bench {
    uv_loop_t loop;
    struct config config;
    struct metrics metrics;
    struct ns_identity identity;
    uint8_t fingerprint[UCM_FINGERPRINT_BYTES];
    struct index *index;
    struct policy *policy;
    struct cache *cache;
    struct tier *tier;
    uint64_t blocks, segments, slots, part;
    bool tail;
    uv_check_t check;
    uv_idle_t spin;
    struct turns clock, thread;
    uint64_t start_ns, first_ns, end_ns;
};

static struct bench b;
static uint32_t one_shard = 1;

static void die(const char *what, int rc)
{
    fprintf(stderr, "recover_bench: %s: %s\n", what, strerror(-rc));
    exit(1);
}

static void must(ssize_t got, size_t n, const char *what)
{
    if (got != (ssize_t)n)
        die(what, got < 0 ? -errno : -EIO);
}

/* ---- files as a daemon would have left them ---- */

static int file_open(const char *name, int flags)
{
    char path[4096];
    int fd;

    snprintf(path, sizeof(path), "%s/%s", b.config.nvme_paths.item[0], name);
    fd = open(path, flags | O_CLOEXEC, 0600);
    if (fd < 0)
        die(path, -errno);
    return fd;
}

static void ns_records_make(void)
{
    static struct nvme_ns_record name;
    static uint8_t page[NVME_PAGE];
    int fd = file_open(NVME_NS_FILE, O_WRONLY | O_CREAT | O_TRUNC);

    name.identity_bytes =
        (uint32_t)ns_identity_encode(&b.identity, name.identity, NVME_IDENTITY_BYTES);
    memcpy(name.fingerprint, b.fingerprint, sizeof(name.fingerprint));
    nvme_ns_record_encode(&name, page);
    must(write(fd, page, sizeof(page)), sizeof(page), "names");
    close(fd);
}

static void slot_make(uint64_t segment, uint32_t slot, struct nvme_record_header *h)
{
    uint64_t number = segment * b.slots + slot;

    *h = (struct nvme_record_header){.segment = (uint32_t)segment,
                                     .record = slot,
                                     .payload_bytes = b.part,
                                     .key_bytes = 32,
                                     .generation = EPOCH + segment,
                                     .sequence = EPOCH + number};
    for (unsigned i = 0; i < 4; i++) {
        uint64_t v = (number + 1) * (0x9e3779b97f4a7c15ull + 2 * i);

        memcpy(h->key + 8 * i, &v, 8);
    }
    memcpy(h->fingerprint, b.fingerprint, sizeof(h->fingerprint));
}

static void record_make(int fd, const struct nvme_super *super, uint64_t segment, uint32_t from)
{
    static uint8_t record[CHECKPOINT_HEAD_BYTES + RECORD_SLOTS * CHECKPOINT_ENTRY_BYTES +
                          CHECKPOINT_TAIL_BYTES];
    struct checkpoint_span r = {.segment = (uint32_t)segment,
                                .from = from,
                                .to = from + RECORD_SLOTS,
                                .sequence = EPOCH + segment,
                                .stride = nvme_stride(b.part)};
    struct nvme_record_header h;

    if (r.to > b.slots)
        r.to = (uint32_t)b.slots;
    memcpy(r.uuid, super->uuid, sizeof(r.uuid));
    for (uint32_t slot = from; slot < r.to && segment * b.slots + slot < b.blocks; slot++) {
        slot_make(segment, slot, &h);
        checkpoint_entry_encode(record, r.entries++, &h);
    }
    checkpoint_span_seal(record, &r);
    must(write(fd, record, checkpoint_span_bytes(r.entries)), checkpoint_span_bytes(r.entries),
         "checkpoint");
}

static void slots_make(int fd, const struct nvme_super *super, uint64_t segment)
{
    static uint8_t page[NVME_PAGE];
    struct nvme_record_header h;

    for (uint32_t slot = 0; slot < b.slots && segment * b.slots + slot < b.blocks; slot++) {
        off_t at = (off_t)(NVME_DATA_OFFSET + segment * SEGMENT +
                           nvme_record_offset(nvme_stride(b.part), slot));

        slot_make(segment, slot, &h);
        memcpy(h.uuid, super->uuid, sizeof(h.uuid));
        nvme_record_header_encode(&h, page);
        must(pwrite(fd, page, sizeof(page), at), sizeof(page), "slot");
    }
}

static void cache_make(int fd, const struct nvme_super *super)
{
    static uint8_t page[NVME_PAGE];
    struct nvme_state state = {.epoch = 1, .segments = b.segments + 2};

    if (ftruncate(fd, (off_t)b.config.nvme_size) < 0)
        die("cache", -errno);
    nvme_super_encode(super, page);
    must(pwrite(fd, page, sizeof(page), NVME_SUPER_OFFSET), sizeof(page), "superblock");
    memcpy(state.uuid, super->uuid, sizeof(state.uuid));
    nvme_state_encode(&state, page);
    must(pwrite(fd, page, sizeof(page), NVME_STATE_OFFSET(0)), sizeof(page), "state");
}

static void files_make(void)
{
    static uint8_t page[NVME_PAGE];
    struct nvme_super super = {
        .uuid = "recover_bench", .segment_bytes = SEGMENT, .data_offset = NVME_DATA_OFFSET};
    int cache = file_open(NVME_CACHE_FILE, O_RDWR | O_CREAT | O_TRUNC);
    int index = file_open(NVME_INDEX_FILE, O_WRONLY | O_CREAT | O_TRUNC);

    cache_make(cache, &super);
    for (uint64_t s = 0; s < b.segments; s++) {
        struct nvme_segment_header h = {
            .segment = (uint32_t)s, .sequence = EPOCH + s, .stride = nvme_stride(b.part)};

        memcpy(h.uuid, super.uuid, sizeof(h.uuid));
        nvme_segment_header_encode(&h, page);
        must(pwrite(cache, page, sizeof(page), (off_t)(NVME_DATA_OFFSET + s * SEGMENT)),
             sizeof(page), "segment");
        if (b.tail)
            slots_make(cache, &super, s);
        for (uint32_t from = 0; !b.tail && from < b.slots; from += RECORD_SLOTS)
            record_make(index, &super, s, from);
    }
    fsync(cache);
    fsync(index);
    close(cache);
    close(index);
}

/* ---- opening ---- */

static void tier_open(const struct tier_callbacks *callbacks)
{
    struct ucm_error e = {0};
    int rc = tier_nvme.open(&b.loop, &b.config, callbacks, &b.metrics, &b.tier, &e);

    if (rc < 0)
        die(e.text, rc);
}

static uint64_t thread_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void turn_ended(struct turns *t, uint64_t now)
{
    uint64_t ns = now - t->last_ns;
    unsigned i = 0;

    while (i < TURNS - 1 && ns > 125000ull << i)
        i++;
    t->n[i]++;
    if (ns > t->longest_ns)
        t->longest_ns = ns;
    t->last_ns = now;
}

static void turns_print(const char *by, const struct turns *t)
{
    printf("turns of the loop by %s, longest %.2f ms:", by, (double)t->longest_ns / 1e6);
    for (unsigned i = 0; i < TURNS; i++)
        if (i < TURNS - 1)
            printf(" <%.3gms %" PRIu64, 0.125 * (1 << i), t->n[i]);
        else
            printf(" more %" PRIu64 "\n", t->n[i]);
}

static void check_cb(uv_check_t *check)
{
    uint64_t now = uv_hrtime();
    struct tier_stats stats;

    turn_ended(&b.clock, now);
    turn_ended(&b.thread, thread_ns());
    if (b.first_ns == 0)
        b.first_ns = now;
    tier_nvme.stats(b.tier, &stats);
    if (stats.recovering)
        return;
    b.end_ns = now;
    uv_check_stop(check);
    uv_idle_stop(&b.spin);
}

static void spin_cb(uv_idle_t *idle)
{
    (void)idle; /* so that the loop never sleeps and each of its turns is seen */
}

static void recover(void)
{
    struct cache_config cc = {.loop = &b.loop, .metrics = &b.metrics};
    struct tier_callbacks callbacks;
    int rc = index_new(b.blocks * 2, 16, &b.index);

    if (rc == 0)
        rc = policy_new(b.index, 1024, &b.policy);
    cc.index = b.index;
    cc.policy = b.policy;
    if (rc == 0)
        rc = cache_new(&cc, &b.cache);
    if (rc < 0)
        die("index", rc);
    callbacks = cache_tier_callbacks(b.cache);
    b.start_ns = uv_hrtime();
    tier_open(&callbacks);
    cache_tier_attach(b.cache, &tier_nvme, b.tier);
    b.clock.last_ns = uv_hrtime();
    b.thread.last_ns = thread_ns();
    uv_check_init(&b.loop, &b.check);
    uv_check_start(&b.check, check_cb);
    uv_idle_init(&b.loop, &b.spin);
    uv_idle_start(&b.spin, spin_cb);
    uv_run(&b.loop, UV_RUN_DEFAULT);
}

int main(int argc, char **argv)
{
    uint8_t canonical[NS_CANONICAL_MAX];
    double seconds;
    int n;

    if (argc < 2 || argc > 5 || (argc == 5 && strcmp(argv[4], "tail") != 0)) {
        fprintf(stderr, "usage: recover_bench FOLDER [BLOCKS [PART [tail]]]\n");
        return 2;
    }
    config_init(&b.config);
    b.blocks = argc > 2 ? strtoull(argv[2], NULL, 10) : 2000000;
    b.part = argc > 3 ? strtoull(argv[3], NULL, 10) : 4096;
    b.tail = argc > 4;
    b.slots = nvme_records(SEGMENT, nvme_stride(b.part));
    if (b.blocks == 0 || b.part == 0 || b.slots == 0)
        die("BLOCKS, PART", -EINVAL);
    b.segments = (b.blocks + b.slots - 1) / b.slots;
    b.config.nvme_paths = (struct config_list){.item = argv + 1, .n = 1};
    b.config.nvme_size = NVME_DATA_OFFSET + (b.segments + 2) * SEGMENT;
    b.config.nvme_segment = SEGMENT;
    b.identity = (struct ns_identity){.tenant = "bench",
                                      .model = "bench",
                                      .revision = "",
                                      .dtype = "bf16",
                                      .layout = "bench/1",
                                      .block_tokens = 16,
                                      .key_bytes = 32,
                                      .parts = 1,
                                      .shards = &one_shard,
                                      .shard_bytes = b.part};
    n = ns_identity_encode(&b.identity, canonical, sizeof(canonical));
    if (n < 0 || ns_fingerprint(canonical, (size_t)n, b.fingerprint) < 0 ||
        uv_loop_init(&b.loop) < 0)
        die("start", -ENOMEM);
    ns_records_make();
    files_make();
    recover();
    seconds = (double)(b.end_ns - b.start_ns) / 1e9;
    printf("recovered %" PRIu64 " of %" PRIu64 " blocks (%.1f GiB) in %.3f s: %.2f million a "
           "second; index %.0f bytes a block; the loop ran after %.1f ms\n",
           b.metrics.nvme_recovered_parts, b.blocks,
           (double)(b.segments * SEGMENT) / (double)(1ull << 30), seconds,
           (double)b.metrics.nvme_recovered_parts / seconds / 1e6,
           (double)index_bytes(b.index) / (double)b.blocks,
           (double)(b.first_ns - b.start_ns) / 1e6);
    turns_print("the clock", &b.clock);
    turns_print("the thread's time", &b.thread);
    return b.metrics.nvme_recovered_parts == b.blocks ? 0 : 1;
}
