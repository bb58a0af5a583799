/* What encryption costs: the NVMe tier with a key against the same tier without one, in slices by turns. */
#include "client/bench/alone.h"
#include "client/bench/tier.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define READ_TARGET 0.90
#define PLAIN "the same without a key"

static const uint64_t block_sizes[] = {512u << 10, 1u << 20, 4u << 20};

struct sealed {
    struct tier_bench *bench;
    struct alone *side[2]; /* plain, sealed */
    char folder[2][DISK_PATH_BYTES / 2];
    uint64_t block_bytes;
    struct pair pair[2], cpu[2]; /* reads, writes */
};

static int side_open(struct sealed *s, unsigned which)
{
    struct alone_options o = {.folder = s->folder[which],
                              .part_bytes = s->block_bytes,
                              .total_bytes = s->bench->total_bytes,
                              .depth = s->bench->depth,
                              .io = args_text(s->bench->args, "io"),
                              .sealed = which == 1};
    char why[256];

    if (snprintf(s->folder[which], sizeof(s->folder[which]), "%s/%s", s->bench->folder,
                 which ? "sealed" : "plain") >= (int)sizeof(s->folder[which]))
        return bench_fail(BENCH_FAILED, "%s: the path is too long", s->bench->folder);
    if (mkdir(s->folder[which], 0700) < 0 && errno != EEXIST)
        return bench_fail(BENCH_FAILED, "%s: %s", s->folder[which], strerror(errno));
    return alone_open(&o, &s->side[which], why, sizeof(why)) < 0
               ? bench_fail(BENCH_FAILED, "%s", why)
               : 0;
}

static void side_close(struct sealed *s, unsigned which)
{
    struct tier_bench inner = {0};

    if (s->side[which])
        alone_close(s->side[which]);
    snprintf(inner.folder, sizeof(inner.folder), "%s", s->folder[which]);
    tier_folder_empty(&inner);
    (void)rmdir(s->folder[which]);
}

static int slice(struct sealed *s, bool write, unsigned first)
{
    double rate[2] = {0}, cpu[2] = {0};
    int rc = 0;

    for (unsigned i = 0; i < 2 && rc == 0; i++) {
        unsigned which = (first + i) % 2;

        if (alone_run(s->side[which], write, s->bench->seconds, &rate[which], &cpu[which]) < 0)
            rc = bench_fail(BENCH_FAILED, "the tier's operations failed");
    }
    if (rc == 0)
        rc = pair_add(&s->pair[write], rate[1], rate[0]);
    return rc == 0 ? pair_add(&s->cpu[write], cpu[1], cpu[0]) : rc;
}

static void report(struct sealed *s, bool write)
{
    char name[96];

    pair_report(s->bench, &s->pair[write], write ? "encrypted, write" : "encrypted, read",
                s->block_bytes, PLAIN, write ? 0 : READ_TARGET);
    snprintf(name, sizeof(name), "  CPU of it");
    report_figure(&s->bench->report,
                  &(struct figure){.name = name,
                                   .unit = "s/GB",
                                   .value = samples_at(&s->cpu[write].own, 0.5),
                                   .baseline_name = PLAIN,
                                   .baseline = samples_at(&s->cpu[write].base, 0.5)});
}

static int measure(struct tier_bench *b, uint64_t block_bytes)
{
    struct sealed s = {.bench = b, .block_bytes = block_bytes};
    int rc = side_open(&s, 0);

    if (rc == 0)
        rc = side_open(&s, 1);
    for (unsigned i = 0; rc == 0 && i < b->rounds; i++) {
        if (progress_due(&b->progress))
            progress_show(&b->progress, "encrypted, %llu KiB, round %u",
                          (unsigned long long)block_bytes >> 10, i + 1);
        rc = slice(&s, false, i);
        if (rc == 0)
            rc = slice(&s, true, i);
    }
    if (rc == 0) {
        report(&s, false);
        report(&s, true);
    }
    for (unsigned i = 0; i < 2; i++) {
        side_close(&s, i);
        pair_free(&s.pair[i]);
        pair_free(&s.cpu[i]);
    }
    return rc;
}

int tier_sealed(struct tier_bench *b)
{
    int rc = 0;

    for (unsigned i = 0; rc == 0 && i < sizeof(block_sizes) / sizeof(block_sizes[0]); i++)
        rc = measure(b, block_sizes[i]);
    return rc;
}
