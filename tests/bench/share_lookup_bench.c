/* share_lookup_bench FOLDER FEW MANY: how long it takes to find out that 8,192 keys are on a posix
 * root, with FEW block files there and with MANY, by turns: as a chain, and each key by itself. The
 * names are not in the memory of the room, the folders are open. FOLDER must be there, and is left
 * empty. FEW is at least 8,192. */
#include "daemon/share/share_internal.h"
#include "tests/bench/share_lay.h"

#include <errno.h>

#define KEYS 8192u
#define ROUNDS 21u
#define PATIENCE_MS 10000u

struct root {
    char path[400];
    uint32_t files;
    double ms[2][ROUNDS]; /* as a chain, each */
};

struct bench {
    uv_loop_t *loop;
    struct deadlines deadlines;
    struct metrics metrics;
    uint8_t keys[KEYS * LAY_KEY_BYTES];
    uint8_t answers[KEYS];
    bool done;
};

static struct bench bench;

static void done_cb(struct share_lookup *p)
{
    (void)p;
    bench.done = true;
}

static uint64_t bytes_of(const struct share_lookup *p, uint32_t part)
{
    (void)p;
    (void)part;
    return LAY_BYTES - BLOCK_FILE_HEADER_BYTES;
}

/* The prefix of `first` and those behind it that is there, and how long that took. */
static uint32_t lookup(struct share *share, uint32_t first, bool each, double *ms)
{
    struct share_lookup p = {.key_bytes = LAY_KEY_BYTES,
                             .keys = bench.keys,
                             .n = KEYS,
                             .bytes_of = bytes_of,
                             .each = each,
                             .answers = bench.answers,
                             .done_cb = done_cb};
    uint64_t began_ns;
    uint32_t n = 0;

    for (uint32_t i = 0; i < KEYS; i++)
        lay_key(first + i, bench.keys + (size_t)i * LAY_KEY_BYTES);
    memset(p.fingerprint, LAY_FINGERPRINT, sizeof(p.fingerprint));
    bench.done = false;
    uv_update_time(bench.loop);
    p.deadline_ms = uv_now(bench.loop) + PATIENCE_MS;
    began_ns = uv_hrtime();
    if (share_lookup(share, &p) < 0)
        lay_fail("share_lookup");
    while (!bench.done)
        uv_run(bench.loop, UV_RUN_ONCE);
    *ms = (double)(uv_hrtime() - began_ns) / 1e6;
    while (n < KEYS && bench.answers[n] != SHARE_UNKNOWN && bench.answers[n] != SHARE_MISSING)
        n++;
    return n;
}

/* A host that has asked for other keys before, so that it has each bucket open. */
static void round_run(struct root *root, unsigned round)
{
    uint32_t first = (uint32_t)(round * 2654435761u % (root->files - KEYS + 1));
    struct share_settings settings = {
        .loop = bench.loop,
        .deadlines = &bench.deadlines,
        .metrics = &bench.metrics,
        .host = "bench",
        .negative_ms = 2000,
        .deadline_ms = PATIENCE_MS,
        .touch_ms = 3600000,
        .n = 1,
        .roots = {{.ops = &share_posix, .target = root->path, .depth = 16, .read_only = true}}};
    struct share *share;
    double ms;

    if (share_new(&settings, &share) < 0)
        lay_fail("share_new");
    if (lookup(share, root->files, true, &ms) != 0)
        lay_fail("keys that are nowhere were found");
    for (unsigned each = 0; each < 2; each++)
        if (lookup(share, first, each, &root->ms[each][round]) != KEYS)
            lay_fail("keys that are there were not found");
    share_stop(share);
    while (share_busy(share) > 0)
        uv_run(bench.loop, UV_RUN_ONCE);
    share_close(share);
}

static int order_cb(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double median(double *v)
{
    qsort(v, ROUNDS, sizeof(*v), order_cb);
    return v[ROUNDS / 2];
}

static int root_lay(struct root *root, const char *folder, const char *files)
{
    root->files = (uint32_t)strtoul(files, NULL, 10);
    if (root->files < KEYS)
        return -EINVAL;
    snprintf(root->path, sizeof(root->path), "%s/%u", folder, root->files);
    if (mkdir(root->path, 0700) < 0)
        return -errno;
    lay_files(root->path, root->files);
    return 0;
}

int main(int argc, char **argv)
{
    static const char *const names[] = {"as a chain", "each by itself"};
    static struct root roots[2];

    bench.loop = uv_default_loop();
    if (argc != 4 || root_lay(&roots[0], argv[1], argv[2]) < 0 ||
        root_lay(&roots[1], argv[1], argv[3]) < 0) {
        fprintf(stderr, "usage: share_lookup_bench FOLDER FEW MANY, both at least %u\n", KEYS);
        return 2;
    }
    if (deadlines_init(&bench.deadlines, bench.loop) < 0)
        lay_fail("deadlines_init");
    for (unsigned i = 0; i < ROUNDS; i++)
        for (unsigned r = 0; r < 2; r++)
            round_run(&roots[r], i);
    for (unsigned each = 0; each < 2; each++) {
        double few = median(roots[0].ms[each]), many = median(roots[1].ms[each]);

        printf("lookup: %u keys %s: %.2f ms of %u files, %.2f ms of %u: %.2f times\n", KEYS,
               names[each], few, roots[0].files, many, roots[1].files, many / few);
    }
    deadlines_close(&bench.deadlines);
    uv_run(bench.loop, UV_RUN_DEFAULT);
    return lay_clear(argv[1]) == 0 ? 0 : 1;
}
