/* How fast the index comes back from a checkpoint: makes files as if a daemon had stored BLOCKS
 * parts of 4 KiB, then opens tier, cache and index on them.
 *
 *   recover_bench FOLDER [BLOCKS]
 *
 * Prints blocks a second, and the longest time that the loop was kept from other work. The folder
 * needs room for the parts; nothing but headers is written to it. */
#include "daemon/base/config.h"
#include "daemon/cache/cache.h"
#include "daemon/tier/checkpoint_format.h"
#include "proto/errors.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <uv.h>

#define SEGMENT (64ull << 20)
#define PART 4096u

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
    uint64_t blocks, segments, slots;
    uv_check_t check;
    uv_idle_t spin;
    uint64_t last_ns, longest_ns, start_ns, end_ns;
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

static void names_make(void)
{
    static struct nvme_name name;
    static uint8_t page[NVME_PAGE];
    int fd = file_open(CONFIG_NVME_NAMES, O_WRONLY | O_CREAT | O_TRUNC);

    name.identity_bytes = (uint32_t)ns_identity_encode(&b.identity, name.identity, NVME_NAME_BYTES);
    memcpy(name.fingerprint, b.fingerprint, sizeof(name.fingerprint));
    nvme_name_encode(&name, page);
    must(write(fd, page, sizeof(page)), sizeof(page), "names");
    close(fd);
}

static void record_make(int fd, const struct nvme_super *super, uint64_t segment, uint32_t from)
{
    static uint8_t record[CHECKPOINT_HEAD_BYTES + CHECKPOINT_SLOTS * CHECKPOINT_ENTRY_BYTES +
                          CHECKPOINT_TAIL_BYTES];
    struct checkpoint_record r = {.segment = (uint32_t)segment,
                                  .from = from,
                                  .to = from + CHECKPOINT_SLOTS,
                                  .sequence = (1ull << 40) + segment,
                                  .stride = nvme_stride(PART)};

    if (r.to > b.slots)
        r.to = (uint32_t)b.slots;
    memcpy(r.uuid, super->uuid, sizeof(r.uuid));
    for (uint32_t slot = from; slot < r.to; slot++) {
        uint64_t number = segment * b.slots + slot;
        struct nvme_slot_header h = {.slot = slot,
                                     .payload_bytes = PART,
                                     .key_bytes = 32,
                                     .sequence = (1ull << 40) + number};

        if (number >= b.blocks)
            break;
        for (unsigned i = 0; i < 4; i++) {
            uint64_t v = (number + 1) * (0x9e3779b97f4a7c15ull + 2 * i);

            memcpy(h.key + 8 * i, &v, 8);
        }
        memcpy(h.fingerprint, b.fingerprint, sizeof(h.fingerprint));
        checkpoint_entry_encode(record, r.entries++, &h);
    }
    checkpoint_record_seal(record, &r);
    must(write(fd, record, checkpoint_record_bytes(r.entries)), checkpoint_record_bytes(r.entries),
         "checkpoint");
}

static void files_make(void)
{
    static uint8_t page[NVME_PAGE];
    struct nvme_super super;
    int cache = file_open(CONFIG_NVME_FILE, O_RDWR), index;

    must(pread(cache, page, sizeof(page), 0), sizeof(page), "superblock");
    if (nvme_super_decode(page, &super) < 0)
        die("superblock", -EBADMSG);
    index = file_open(CONFIG_NVME_INDEX, O_WRONLY | O_CREAT | O_TRUNC);
    for (uint64_t s = 0; s < b.segments; s++) {
        struct nvme_segment_header h = {
            .segment = (uint32_t)s, .sequence = (1ull << 40) + s, .stride = nvme_stride(PART)};

        memcpy(h.uuid, super.uuid, sizeof(h.uuid));
        nvme_segment_header_encode(&h, page);
        must(pwrite(cache, page, sizeof(page), (off_t)(NVME_DATA_OFFSET + s * SEGMENT)),
             sizeof(page), "segment");
        for (uint32_t from = 0; from < b.slots; from += CHECKPOINT_SLOTS)
            record_make(index, &super, s, from);
    }
    fsync(cache);
    fsync(index);
    close(cache);
    close(index);
}

/* ---- opening ---- */

static bool no_drop(void *ctx, uint64_t owner, uint64_t loc)
{
    (void)ctx, (void)owner, (void)loc;
    return false;
}

static unsigned no_heat(void *ctx, uint64_t owner)
{
    (void)ctx, (void)owner;
    return 0;
}

static void tier_open(const struct tier_callbacks *callbacks)
{
    struct ucm_error e = {0};
    int rc = tier_nvme.open(&b.loop, &b.config, callbacks, &b.metrics, &b.tier, &e);

    if (rc < 0)
        die(e.text, rc);
}

static void check_cb(uv_check_t *check)
{
    uint64_t now = uv_hrtime();
    struct tier_stats stats;

    if (now - b.last_ns > b.longest_ns)
        b.longest_ns = now - b.last_ns;
    b.last_ns = now;
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
    b.start_ns = b.last_ns = uv_hrtime();
    tier_open(&callbacks);
    cache_tier_attach(b.cache, &tier_nvme, b.tier);
    b.last_ns = uv_hrtime();
    uv_check_init(&b.loop, &b.check);
    uv_check_start(&b.check, check_cb);
    uv_idle_init(&b.loop, &b.spin);
    uv_idle_start(&b.spin, spin_cb);
    uv_run(&b.loop, UV_RUN_DEFAULT);
}

int main(int argc, char **argv)
{
    struct tier_callbacks none = {.drop = no_drop, .heat = no_heat};
    double seconds;

    if (argc < 2) {
        fprintf(stderr, "usage: recover_bench FOLDER [BLOCKS]\n");
        return 2;
    }
    config_init(&b.config);
    b.blocks = argc > 2 ? strtoull(argv[2], NULL, 10) : 2000000;
    b.slots = nvme_slots(SEGMENT, nvme_stride(PART));
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
                                      .shard_bytes = PART};
    if (ns_fingerprint(&b.identity, b.fingerprint) < 0 || uv_loop_init(&b.loop) < 0)
        die("start", -ENOMEM);
    tier_open(&none);
    tier_nvme.close(b.tier);
    uv_run(&b.loop, UV_RUN_DEFAULT);
    names_make();
    files_make();
    b.metrics = (struct metrics){0};
    recover();
    seconds = (double)(b.end_ns - b.start_ns) / 1e9;
    printf("recovered %llu of %llu blocks in %.3f s: %.2f million a second; index %.0f bytes a "
           "block; longest turn of the loop %.2f ms\n",
           (unsigned long long)b.metrics.nvme_recovered_parts, (unsigned long long)b.blocks,
           seconds, (double)b.metrics.nvme_recovered_parts / seconds / 1e6,
           (double)index_bytes(b.index) / (double)b.blocks, (double)b.longest_ns / 1e6);
    return b.metrics.nvme_recovered_parts == b.blocks ? 0 : 1;
}
