/* The gather from memory of the host that changes meanwhile. Bytes tell their place and sequence
 * number. */
#include "tests/gpu/entries.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#define LAYERS 3u
#define HEADS 2u
#define NUMBERS 48u
#define ROWS 4u
#define ROW 272u /* bytes */

/* ---- blocks of two planes: [plane][layer][row][head][ROW], as an engine has tokens and heads ---- */

#define PLANE ((uint64_t)LAYERS * ROWS * HEADS * ROW)
#define BLOCK (2 * PLANE)

static uint32_t word_of(uint32_t number, uint64_t seq, uint32_t word)
{
    return number * 2654435761u ^ (uint32_t)seq * 40503u ^ word * 97u;
}

static void fill(uint8_t *block, uint32_t number, uint64_t seq)
{
    for (uint32_t i = 0; i < BLOCK / 4; i++) {
        uint32_t word = word_of(number, seq, i);

        memcpy(block + 4 * i, &word, 4);
    }
}

struct scene {
    struct mapping mapping, table; /* blocks; sequence numbers */
    struct ucm_entries_place place[NUMBERS];
    struct ucm_entries_gather gather;
    CUdeviceptr places, pool_bytes;
    struct pool pool;
    _Atomic bool stop;
    pthread_t writer;
};

static _Atomic uint64_t *seq_of(struct scene *t, uint32_t number)
{
    return (_Atomic uint64_t *)(void *)(t->table.bytes + 8 * number);
}

static void scene_open(struct scene *t, uint32_t entries)
{
    struct ucm_entries_shape shape = {.layer_heads = LAYERS * HEADS,
                                      .numbers = NUMBERS,
                                      .entries = entries,
                                      .requests = 1,
                                      .misses = 1024};

    memset(t, 0, sizeof(*t));
    mapping_open(&t->mapping, NUMBERS * BLOCK);
    mapping_open(&t->table, 4096);
    for (uint32_t i = 0; i < NUMBERS; i++) {
        fill(t->mapping.bytes + i * BLOCK, i, 2);
        *seq_of(t, i) = 2;
        t->place[i] =
            (struct ucm_entries_place){t->mapping.gpu + i * BLOCK, t->table.gpu + 8 * i, 2};
    }
    t->places = gpu_put(0, t->place, sizeof(t->place));
    t->pool_bytes = gpu_new(entries * 2ull * ROWS * ROW);
    t->gather = (struct ucm_entries_gather){.places = t->places, .heads = HEADS, .planes = 2};
    for (uint32_t i = 0; i < 2; i++)
        t->gather.plane[i] = (struct ucm_entries_plane){.entries = t->pool_bytes + i * ROWS * ROW,
                                                        .entry_stride = 2 * ROWS * ROW,
                                                        .first = i * PLANE,
                                                        .layer_stride = ROWS * HEADS * ROW,
                                                        .head_stride = ROW,
                                                        .pitch = HEADS * ROW,
                                                        .rows = ROWS,
                                                        .row_bytes = ROW};
    pool_open(&t->pool, &shape);
}

static void scene_close(struct scene *t)
{
    mapping_close(&t->mapping);
    mapping_close(&t->table);
    memory_end();
}

/* All keys of these numbers. */
static void want_numbers(struct scene *t, uint32_t first, uint32_t n)
{
    uint32_t keys[LAYERS * HEADS * NUMBERS], requests[LAYERS * HEADS * NUMBERS] = {0}, all = 0;
    CUdeviceptr at, zero;

    for (uint32_t layer_head = 0; layer_head < LAYERS * HEADS; layer_head++)
        for (uint32_t i = first; i < first + n; i++)
            keys[all++] = layer_head * NUMBERS + i;
    at = gpu_put(0, keys, all * sizeof(*keys));
    zero = gpu_put(0, requests, all * sizeof(*requests));
    gpu_launch("ucm_entries_want_keys", 2, 128, 0, (void *[]){&t->pool.gpu, &at, &zero, &all});
    gpu_sync();
}

/* -> keys that are resident. Checks that their bytes are the promised ones. */
static uint32_t check_resident(struct scene *t, const char *when)
{
    struct ucm_entries *s = &t->pool.host;
    size_t bytes = s->shape.entries * 2ull * ROWS * ROW;
    uint32_t *pool = fresh(bytes), there = 0, wrong = 0;

    gpu_get(pool, t->pool_bytes, bytes);
    for (uint32_t key = 0; key < LAYERS * HEADS * NUMBERS; key++) {
        uint32_t number = key % NUMBERS, layer_head = key / NUMBERS;

        if (s->entry_of[key] < 0)
            continue;
        there++;
        for (uint32_t i = 0; i < 2 * ROWS * ROW / 4; i++) {
            uint32_t plane = i / (ROWS * ROW / 4), row = i % (ROWS * ROW / 4) / (ROW / 4);
            uint64_t at = plane * PLANE + layer_head / HEADS * (ROWS * HEADS * ROW) +
                          row * (HEADS * ROW) + layer_head % HEADS * ROW + i % (ROW / 4) * 4;

            wrong += pool[(size_t)s->entry_of[key] * (2 * ROWS * ROW / 4) + i] !=
                     word_of(number, t->place[number].told, (uint32_t)(at / 4));
        }
    }
    check(wrong == 0, "%s: %u words of %u entries are wrong", when, wrong, there);
    return there;
}

static void test_still(const char *kernel, uint32_t blocks)
{
    struct scene t;

    scene_open(&t, 400);
    t.place[3].bytes = 0; /* not in the mapping */
    t.place[4].told = 4;  /* another sequence number */
    *seq_of(&t, 5) = 3;   /* its bytes are changing */
    gpu_put(t.places, t.place, sizeof(t.place));
    pool_next(&t.pool);
    want_numbers(&t, 0, NUMBERS);
    pool_gather(&t.pool, kernel, blocks, &t.gather);
    pool_read(&t.pool, kernel);
    check(check_resident(&t, kernel) == (NUMBERS - 3) * LAYERS * HEADS, "%s: resident", kernel);
    check(t.pool.host.step->unserved == 3 * LAYERS * HEADS, "%s: not served", kernel);
    check(t.pool.host.step->flags == UCM_ENTRIES_UNSERVED, "%s: flags", kernel);
    scene_close(&t);
}

/* ---- bytes that change ---- */

static void *keep_changing(void *arg)
{
    struct scene *t = arg;
    uint64_t seq[NUMBERS];
    uint32_t number = 0;

    for (uint32_t i = 0; i < NUMBERS; i++)
        seq[i] = *seq_of(t, i);
    while (!t->stop) {
        number = (number + 7) % (NUMBERS / 2); /* the other half stays */
        atomic_store_explicit(seq_of(t, number), seq[number] + 1, memory_order_relaxed);
        atomic_thread_fence(memory_order_seq_cst);
        seq[number] += 2;
        fill(t->mapping.bytes + number * BLOCK, number, seq[number]);
        atomic_store_explicit(seq_of(t, number), seq[number], memory_order_release);
    }
    return NULL;
}

static void test_changing(const char *kernel, uint32_t rounds)
{
    uint32_t served = 0, lost = 0;
    struct scene t;

    scene_open(&t, 400);
    must(pthread_create(&t.writer, NULL, keep_changing, &t) == 0 ? CUDA_SUCCESS
                                                                 : CUDA_ERROR_UNKNOWN,
         "a thread");
    for (uint32_t round = 0; round < rounds; round++) {
        uint32_t all[NUMBERS], n = NUMBERS;
        CUdeviceptr numbers;

        for (uint32_t i = 0; i < NUMBERS; i++) { /* what the daemon would tell now */
            all[i] = i;
            t.place[i].told = atomic_load(seq_of(&t, i)) & ~1ull;
        }
        gpu_put(t.places, t.place, sizeof(t.place));
        pool_next(&t.pool);
        want_numbers(&t, 0, NUMBERS);
        pool_gather(&t.pool, kernel, 4, &t.gather);
        pool_read(&t.pool, "a gather of what changes");
        served += check_resident(&t, "what changes");
        lost += t.pool.host.step->unserved;
        numbers = gpu_put(0, all, sizeof(all));
        gpu_launch("ucm_entries_forget_numbers", 2, 64, 0, (void *[]){&t.pool.gpu, &numbers, &n});
        gpu_sync();
    }
    t.stop = true;
    pthread_join(t.writer, NULL);
    check(served >= rounds * LAYERS * HEADS * NUMBERS / 2, "%s: what stayed was served", kernel);
    check(few || lost > 0, "%s: nothing changed meanwhile: the test tests nothing", kernel);
    scene_close(&t);
}

void test_gather(void)
{
    test_still("warp", 3);
    test_still("block", 5);
    test_changing("warp", few ? 3 : 200);
    test_changing("block", few ? 3 : 200);
}
