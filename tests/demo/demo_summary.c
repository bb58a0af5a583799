#include "tests/demo/demo.h"

#include "client/bench/figure.h"

#include <stdio.h>

struct sum {
    uint64_t requests, looked_up, hit, hit_dram, load_bytes, load_ns, lost;
    uint64_t dump_bytes, dump_ns, not_stored, differing_bytes, checked_bytes;
};

static void add_up(const struct demo *d, struct sum *s)
{
    *s = (struct sum){.requests = 0};
    for (unsigned e = 0; e < DEMO_ENGINES; e++) {
        for (unsigned k = 0; k < DEMO_RANKS; k++) {
            const struct demo_rank *r = &d->shared->rank[e][k];

            s->requests += r->requests;
            s->looked_up += r->looked_up;
            s->hit += r->hit;
            s->hit_dram += r->hit_dram;
            s->load_bytes += r->load_bytes;
            s->load_ns += r->load_ns;
            s->lost += r->lost;
            s->dump_bytes += r->dump_bytes;
            s->dump_ns += r->dump_ns;
            s->not_stored += r->not_stored;
            s->differing_bytes += r->differing_bytes;
            s->checked_bytes += r->checked_bytes;
        }
    }
}

static double share(uint64_t part, uint64_t of)
{
    return of > 0 ? 100.0 * (double)part / (double)of : 0;
}

static double rate(uint64_t bytes, uint64_t ns)
{
    return ns > 0 ? (double)bytes / (double)ns : 0;
}

void demo_show_progress(const struct demo *d, double seconds, bool terminal)
{
    struct sum s;

    add_up(d, &s);
    printf("%s%5.1f s  %llu requests  hit %.1f %% (dram %.1f %%, nvme %.1f %%)  loaded %.2f GB  "
           "dumped "
           "%.2f GB  differing %llu%s",
           terminal ? "\r\033[K" : "", seconds, (unsigned long long)s.requests,
           share(s.hit, s.looked_up), share(s.hit_dram, s.looked_up),
           share(s.hit - s.hit_dram, s.looked_up), (double)s.load_bytes / 1e9,
           (double)s.dump_bytes / 1e9, (unsigned long long)s.differing_bytes, terminal ? "" : "\n");
    fflush(stdout);
}

static void print_latency(const struct demo *d)
{
    struct samples us = {.n = 0};

    for (unsigned e = 0; e < DEMO_ENGINES; e++) {
        uint32_t n = d->shared->n_lookups[e];

        for (uint32_t i = 0; i < n; i++)
            if (samples_add(&us, d->shared->lookup_us[e][i]) < 0)
                break;
    }
    printf("  lookup latency   p50 %.0f us, p99 %.0f us (%zu lookups with a lease)\n",
           samples_at(&us, 0.5), samples_at(&us, 0.99), us.n);
    samples_free(&us);
}

static void print_sum(const struct demo *d, const struct sum *s)
{
    const struct demo_options *o = &d->options;

    printf("\nSummary\n");
    printf("  played           %llu requests in %.1f s by %d engines of %d ranks, device %s\n",
           (unsigned long long)s->requests, d->played_seconds, DEMO_ENGINES, DEMO_RANKS, d->device);
    printf("  blocks           %llu KiB in %d parts of %llu fragments; arena %llu MiB, NVMe %llu "
           "MiB\n",
           (unsigned long long)(o->part_bytes * DEMO_RANKS / 1024), DEMO_RANKS,
           (unsigned long long)(o->part_bytes / o->fragment_bytes),
           (unsigned long long)(o->arena_bytes >> 20), (unsigned long long)(o->nvme_bytes >> 20));
    printf("  hit rate         %.1f %% of %llu blocks: %.1f %% in DRAM, %.1f %% on NVMe\n",
           share(s->hit, s->looked_up), (unsigned long long)s->looked_up,
           share(s->hit_dram, s->looked_up), share(s->hit - s->hit_dram, s->looked_up));
    printf("  load             %.2f GB, %.2f GB/s a rank\n", (double)s->load_bytes / 1e9,
           rate(s->load_bytes, s->load_ns));
    printf("  dump             %.2f GB, %.2f GB/s a rank\n", (double)s->dump_bytes / 1e9,
           rate(s->dump_bytes, s->dump_ns));
    print_latency(d);
    if (s->lost + s->not_stored > 0)
        printf("  not moved        %llu parts promised and not loaded, %llu not stored for want of "
               "room\n",
               (unsigned long long)s->lost, (unsigned long long)s->not_stored);
    printf("  checked          %.2f GB, %llu bytes differed\n", (double)s->checked_bytes / 1e9,
           (unsigned long long)s->differing_bytes);
}

static int print_errors(const struct demo *d)
{
    int n = 0;

    for (unsigned e = 0; e < DEMO_ENGINES; e++) {
        for (unsigned k = 0; k < DEMO_RANKS; k++) {
            const char *text = d->shared->rank[e][k].error;

            if (text[0] == '\0')
                continue;
            fprintf(stderr, "ucm-demo: engine %u, rank %u: %s\n", e, k, text);
            n++;
        }
    }
    return n;
}

int demo_summary(const struct demo *d)
{
    struct sum s;
    int errors;

    add_up(d, &s);
    print_sum(d, &s);
    fflush(stdout);
    errors = print_errors(d);
    if (s.differing_bytes > 0)
        fprintf(stderr, "ucm-demo: FAILED: loaded bytes differ from what was stored\n");
    else if (s.hit == 0)
        fprintf(stderr, "ucm-demo: FAILED: nothing was hit\n");
    return s.differing_bytes > 0 || s.hit == 0 || errors > 0 ? -1 : 0;
}
