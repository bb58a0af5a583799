/* A worker that attends to a part of its context: it stores blocks, asks which of them a query wants,
 * and loads only those. Run it twice: the second run finds blocks and summaries.
 *
 * Build it against an installed library:
 *     cc select_blocks.c $(pkg-config --cflags --libs libucmclient) -o select_blocks */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <ucmclient_sparse.h>
#include <unistd.h>

enum {
    TOKENS = 16, /* of a block */
    HEADS = 2,   /* KV heads */
    Q_HEADS = 4,
    DIM = 64,     /* of a head */
    CONTEXT = 64, /* blocks of the context; this example's paged memory holds them all */
    LAYER = TOKENS * HEADS * DIM * (int)sizeof(float), /* K of one block in the one layer */
};

struct worker {
    struct ucm_client *client;
    struct ucm_namespace *ns, *summaries;
    struct ucm_region *region;
    struct ucm_sequence *sequence;
    uint8_t keys[CONTEXT][32];
    float (*kv)[TOKENS][HEADS][DIM];
    int fd;
};

static int failed(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, ucm_errmsg());
    return -1;
}

static int open_namespaces(struct worker *w)
{
    uint32_t layers = 1;
    struct ucm_identity identity = {
        .model = "example/select",
        .dtype = "f32",
        .layout = "example/1",
        .block_tokens = TOKENS,
        .key_bytes = 32,
        .parts = 1,
        .layers = &layers,
        .n_layers = 1,
        .layer_bytes = LAYER,
    };
    struct ucm_sparse_summary mean = {
        .method = UCM_SPARSE_MEAN,
        .shape = {.dtype = UCM_SPARSE_F32,
                  .tokens = TOKENS,
                  .kv_heads = HEADS,
                  .head_dim = DIM,
                  .k_token_stride = HEADS * DIM * sizeof(float),
                  .k_head_stride = DIM * sizeof(float)},
    };

    if (ucm_namespace_open(w->client, &identity, -1, &w->ns) < 0)
        return failed("namespace");
    if (ucm_sparse_summary_open(w->ns, &mean, 0, -1, &w->summaries) < 0)
        return failed("summaries");
    return 0;
}

static int register_region(struct worker *w)
{
    struct ucm_memory memory = {.kind = UCM_MEMORY_MEMFD, .bytes = CONTEXT * LAYER, .fd = w->fd};
    struct ucm_plane plane = {.stride = LAYER, .block_bytes = LAYER};
    struct ucm_region_spec spec = {
        .blocks = CONTEXT,
        .device = "cpu",
        .memory = &memory,
        .n_memory = 1,
        .planes = &plane,
        .n_planes = 1,
    };

    return ucm_region_register(w->ns, &spec, -1, &w->region) < 0 ? failed("region") : 0;
}

static int move(struct worker *w, const uint32_t *blocks, uint32_t n, bool load)
{
    uint8_t keys[CONTEXT][32];
    struct ucm_transfer transfer = {.keys = keys, .blocks = blocks, .n_keys = n};
    struct ucm_result result;
    struct ucm_task *task;

    for (uint32_t i = 0; i < n; i++)
        memcpy(keys[i], w->keys[blocks[i]], sizeof keys[i]);
    if ((load ? ucm_load : ucm_dump)(w->region, &transfer, -1, &task) < 0 ||
        ucm_task_wait(task, -1, &result) < 0)
        return failed(load ? "load" : "dump");
    printf("%s %u of %u blocks, %llu bytes\n", load ? "loaded" : "stored", result.n_ok, n,
           (unsigned long long)result.bytes);
    ucm_task_free(task);
    return 0;
}

/* In place of a model: the keys of block b point into a direction of its own. */
static int store(struct worker *w)
{
    uint32_t tokens[CONTEXT * TOKENS], blocks[CONTEXT];

    for (uint32_t i = 0; i < CONTEXT * TOKENS; i++)
        tokens[i] = i;
    ucm_keys_sha256(NULL, tokens, TOKENS, CONTEXT, w->keys[0]);
    for (uint32_t b = 0; b < CONTEXT; b++) {
        blocks[b] = b;
        for (int t = 0; t < TOKENS; t++)
            for (int g = 0; g < HEADS; g++)
                w->kv[b][t][g][b % DIM] = 1;
    }
    return move(w, blocks, CONTEXT, false);
}

static int select_and_load(struct worker *w)
{
    float q[Q_HEADS][DIM] = {[0][40] = 1, [1][40] = 1, [2][7] = 1, [3][7] = 1};
    uint32_t layer = 0, counts[HEADS], index[HEADS * CONTEXT], union_of[CONTEXT], n = 0;
    struct ucm_sequence_keys keys = {.keys = w->keys, .n_keys = CONTEXT, .build = 1};
    struct ucm_sparse_select select = {
        .sequences = &w->sequence, .layers = &layer, .n_rows = 1, .q = q, .score.q_heads = Q_HEADS};
    struct ucm_sparse_selected chosen = {
        .counts = counts, .index = index, .counts_room = HEADS, .index_room = HEADS * CONTEXT};
    struct ucm_sequence_result result;
    uint8_t in[CONTEXT] = {0};

    ucm_sparse_choose_defaults(&select.choose);
    select.choose.sparse_ratio = 0.1; /* of the context */
    if (ucm_sequence_open(w->summaries, 0, 0, -1, &w->sequence) < 0 ||
        ucm_sequence_append(w->sequence, &keys, -1, &result) < 0)
        return failed("sequence");
    if (ucm_sparse_select(w->client, &select, -1, &chosen) < 0)
        return failed("select");
    printf("%u blocks, %u with a summary, %u of these new; %u chosen by %u KV heads\n",
           result.blocks, result.summaries, result.built, chosen.n_blocks, chosen.n_lists);
    for (uint32_t i = 0; i < chosen.n_blocks; i++)
        in[index[i]] = 1;
    for (uint32_t b = 0; b < CONTEXT; b++)
        if (in[b])
            union_of[n++] = b;
    return move(w, union_of, n, true);
}

static int run(struct worker *w)
{
    int r = open_namespaces(w);

    if (r == 0)
        r = register_region(w);
    if (r < 0)
        return r;
    r = store(w);
    if (r == 0)
        r = select_and_load(w);
    ucm_region_unregister(w->region, -1); /* only then may the memory go */
    return r;
}

int main(void)
{
    struct worker w = {0};
    void *memory;
    int r;

    if (ucm_connect(NULL, -1, &w.client) < 0) { /* $UCM_SOCKET, or /run/ucmd/ucmd.sock */
        failed("connect");
        return 1;
    }
    if (ucm_shared_memory(CONTEXT * LAYER, &w.fd, &memory) < 0) {
        failed("memory");
        ucm_close(w.client);
        return 1;
    }
    w.kv = memory;
    r = run(&w);
    ucm_close(w.client);
    munmap(memory, CONTEXT * LAYER);
    close(w.fd);
    return r < 0;
}
