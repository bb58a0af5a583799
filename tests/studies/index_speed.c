/* How long the index takes to find 8192 keys as it grows, what an insert costs, bytes a block; docs/performance.md has the answer.
 * Usage: index_speed [--small-pages] [max blocks, 10000000] */
#include "daemon/index/index.h"
#include "tests/studies/key_batch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#define ROUNDS 100

static block_ref refs[BATCH];

enum how { HIT, HIT_AND_READ, MISS, ONE_BY_ONE };

static uint64_t batch_find(struct index *ix, struct ns *ns, enum how how)
{
    uint64_t start = now_ns(), sum = 0;

    if (how == ONE_BY_ONE) {
        for (uint32_t i = 0; i < BATCH; i++)
            refs[i] = index_find(ix, ns, keys + (size_t)i * KEY_BYTES);
    } else {
        index_find_many(ix, ns, keys, BATCH, false, refs);
    }
    for (uint32_t i = 0; how == HIT_AND_READ && i < BATCH; i++)
        sum += index_block(ix, refs[i])->whole_parts;
    if (sum > 0)
        abort();
    return now_ns() - start;
}

/* Times of a batch, ns. On a machine that has other work to do the fast tenth tells more. */
struct find_time {
    double median, tenth;
};

static struct find_time find_time(struct index *ix, struct ns *ns, uint64_t blocks, enum how how)
{
    static uint64_t took[ROUNDS];

    for (int r = 0; r < ROUNDS; r++) {
        batch_draw(blocks, how != MISS);
        took[r] = batch_find(ix, ns, how);
        for (uint32_t i = 0; i < BATCH; i++)
            if ((refs[i] == 0) != (how == MISS))
                abort();
    }
    qsort(took, ROUNDS, sizeof(took[0]), by_value);
    return (struct find_time){(double)took[ROUNDS / 2], (double)took[ROUNDS / 10]};
}

struct insert_time {
    uint64_t total_ns, worst_ns, over_100us;
};

static struct insert_time fill(struct index *ix, struct ns *ns, uint64_t from, uint64_t to)
{
    struct insert_time t = {0};
    uint8_t key[KEY_BYTES];

    for (uint64_t i = from; i < to; i++) {
        uint64_t start, took;

        key_make(key, i);
        start = now_ns();
        if (index_insert(ix, ns, key) == 0)
            abort();
        took = now_ns() - start;
        t.total_ns += took;
        t.worst_ns = took > t.worst_ns ? took : t.worst_ns;
        t.over_100us += took > 100000;
    }
    return t;
}

int main(int argc, char **argv)
{
    uint32_t shards = 32;
    struct ns_identity id = {"bench",   "model", "",      "bf16", "nhd/1", 16,
                             KEY_BYTES, 1,       &shards, 4096,   NULL,    0};
    uint64_t max = 10000000, blocks = 0;
    struct find_time base = {0};
    struct index *ix;
    struct ns *ns;

    if (argc > 1 && strcmp(argv[1], "--small-pages") == 0) {
        prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
        argc--, argv++;
    }
    if (argc > 1)
        max = strtoull(argv[1], NULL, 10);
    if (index_new(max, 1, &ix) != 0 || index_ns_open(ix, &id, NULL, &ns, NULL) != 0)
        return 1;
    printf("%10s | %8s %8s %7s | %8s %8s %7s | %9s %8s %8s | %7s %9s %7s | %7s\n", "blocks",
           "8192, us", "ns/key", "to 10k", "tenth,us", "ns/key", "to 10k", "and state", "missing",
           "singly", "insert", "worst,us", ">100us", "B/block");
    for (uint64_t size = 10000; size <= max; size *= 10) {
        struct insert_time t = fill(ix, ns, blocks, size);
        struct find_time f = find_time(ix, ns, size, HIT);

        if (size == 10000)
            base = f;
        printf("%10lu | %8.0f %8.1f %7.2f | %8.0f %8.1f %7.2f | %9.1f %8.1f %8.1f | %7.1f %9.0f "
               "%7lu | %7.1f\n",
               (unsigned long)size, f.median / 1000, f.median / BATCH, f.median / base.median,
               f.tenth / 1000, f.tenth / BATCH, f.tenth / base.tenth,
               find_time(ix, ns, size, HIT_AND_READ).median / BATCH,
               find_time(ix, ns, size, MISS).median / BATCH,
               find_time(ix, ns, size, ONE_BY_ONE).median / BATCH,
               (double)t.total_ns / (double)(size - blocks), (double)t.worst_ns / 1000,
               (unsigned long)t.over_100us, (double)index_bytes(ix) / (double)size);
        blocks = size;
    }
    index_free(ix);
    return 0;
}
