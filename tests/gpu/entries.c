/* test_entries [--few]: the pool's kernels against the C reference; a part of the cases only. */
#include "tests/gpu/entries.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern const unsigned char ucm_entries_fatbin[];

/* ---- a pool ---- */

void pool_open(struct pool *p, const struct ucm_entries_shape *shape)
{
    char why[UCM_ENTRIES_WHY] = "";

    check(ucm_entries_check(shape, why) == 0, "a shape: %s", why);
    p->bytes = ucm_entries_bytes(shape);
    /* zeroed: also unused items of lists are compared */
    ucm_entries_layout(&p->host, shape, fresh(p->bytes));
    ucm_entries_init(&p->host);
    p->memory = gpu_new(p->bytes);
    ucm_entries_layout(&p->gpu, shape, (void *)(uintptr_t)p->memory);
    pool_write(p);
}

void pool_write(struct pool *p)
{
    gpu_put(p->memory, p->host.stamp, p->bytes);
}

void pool_read(struct pool *p, const char *when)
{
    char why[UCM_ENTRIES_WHY] = "";

    gpu_get(p->host.stamp, p->memory, p->bytes);
    check(ucm_entries_verify(&p->host, why) == 0, "%s: %s", when, why);
    check(p->host.step->done == 0, "%s: done is %u", when, p->host.step->done);
}

void pool_next(struct pool *p)
{
    CUdeviceptr attended = 0;

    gpu_launch("ucm_entries_next", 1, 1, 0, (void *[]){&p->gpu, &attended});
}

void pool_gather(struct pool *p, const char *kernel, uint32_t blocks,
                 const struct ucm_entries_gather *g)
{
    struct ucm_entries_gather by_value = *g;
    char name[64];

    snprintf(name, sizeof(name), "ucm_entries_gather_%s", kernel);
    gpu_launch(name, blocks, UCM_ENTRIES_CUDA_GATHER, 0, (void *[]){&p->gpu, &by_value});
}

/* ---- one miss at a time: the same arrays as in C ---- */

#define NUMBERS 40u
#define LAYER_HEADS 3u
#define REQUESTS 4u

static const struct ucm_entries_shape small = {.layer_heads = LAYER_HEADS,
                                               .numbers = NUMBERS,
                                               .entries = 70,
                                               .requests = REQUESTS,
                                               .misses = 256};

static void same(struct pool *p, const struct ucm_entries *model, const char *when)
{
    pool_read(p, when);
    check(memcmp(p->host.stamp, model->stamp, p->bytes) == 0, "%s: other arrays than in C", when);
}

static void want_both(struct pool *p, struct ucm_entries *model, CUdeviceptr words)
{
    uint32_t key_request[2] = {rnd_below(LAYER_HEADS * NUMBERS), rnd_below(REQUESTS)}, n = 1;
    CUdeviceptr request = words + 4;
    uint8_t arrived = rnd_below(8) > 0;

    gpu_put(words, key_request, sizeof(key_request));
    gpu_launch("ucm_entries_want_keys", 1, 32, 0, (void *[]){&p->gpu, &words, &request, &n});
    ucm_entries_want(model, key_request[0], key_request[1]);
    same(p, model, "want");
    gpu_launch("ucm_entries_take_all", 2, 64, 0, (void *[]){&p->gpu});
    ucm_entries_take(model);
    same(p, model, "take");
    gpu_put(words, &arrived, 1);
    gpu_launch("ucm_entries_publish_all", 2, 64, 0, (void *[]){&p->gpu, &words});
    ucm_entries_publish(model, &arrived);
    same(p, model, "publish");
}

static void between_both(struct pool *p, struct ucm_entries *model, CUdeviceptr words)
{
    uint32_t request = rnd_below(REQUESTS), floor = rnd_below(25), n = 2;
    uint32_t numbers[2] = {rnd_below(NUMBERS), rnd_below(NUMBERS)};

    if (rnd_below(3) == 0) {
        gpu_launch("ucm_entries_leave_request", 2, 32, 0, (void *[]){&p->gpu, &request});
        ucm_entries_leave(model, request);
        same(p, model, "leave");
        if (ucm_entries_enter(model, request, floor) == 0)
            gpu_put((CUdeviceptr)(uintptr_t)&p->gpu.floor[request], &floor, 4);
    }
    if (rnd_below(3) == 0) {
        gpu_put(words, numbers, sizeof(numbers));
        gpu_launch("ucm_entries_forget_numbers", 2, 32, 0, (void *[]){&p->gpu, &words, &n});
        ucm_entries_forget(model, numbers, 2);
        same(p, model, "forget");
    }
    pool_next(p);
    ucm_entries_begin(model, model->step->now + 1);
    same(p, model, "next");
}

static void test_one_by_one(void)
{
    struct ucm_entries model;
    struct pool p, q;
    CUdeviceptr words = gpu_new(64);

    pool_open(&p, &small);
    pool_open(&q, &small); /* its host copy is the model's memory */
    model = q.host;
    pool_next(&p);
    ucm_entries_begin(&model, 1);
    for (uint32_t step = 0; step < (few ? 6u : 60u); step++) {
        for (uint32_t i = rnd_below(40); i > 0; i--)
            want_both(&p, &model, words);
        between_both(&p, &model, words);
    }
    memory_end();
}

/* ---- many at once: what must hold in any order ---- */

#define SEQUENCES 3u
#define LISTS 4u
#define ROOM 24u

struct choice {
    uint32_t index[SEQUENCES][LISTS][ROOM], count[SEQUENCES][LISTS], request[SEQUENCES];
    int32_t table[SEQUENCES][64];
};

static void choose(struct choice *c, uint32_t numbers)
{
    for (uint32_t sequence = 0; sequence < SEQUENCES; sequence++) {
        c->request[sequence] = sequence;
        for (uint32_t i = 0; i < 64; i++)
            c->table[sequence][i] = (int32_t)((i < 16 ? i : i + sequence * 48) % numbers);
        for (uint32_t l = 0; l < LISTS; l++) {
            c->count[sequence][l] = rnd_below(ROOM + 1);
            for (uint32_t i = 0; i < ROOM; i++)
                c->index[sequence][l][i] = rnd_below(64);
        }
    }
}

static struct ucm_entries_lists lists_at(const void *memory, uint32_t apart)
{
    const struct choice *c = memory;

    return (struct ucm_entries_lists){.sequences = SEQUENCES,
                                      .lists = LISTS,
                                      .room = ROOM,
                                      .apart = apart,
                                      .index = &c->index[0][0][0],
                                      .count = &c->count[0][0],
                                      .table = &c->table[0][0],
                                      .table_stride = 64,
                                      .request = c->request};
}

static int by_key(const void *a, const void *b)
{
    uint32_t x = ((const struct ucm_entries_miss *)a)->key,
             y = ((const struct ucm_entries_miss *)b)->key;

    return (x > y) - (x < y);
}

/* model: the same in C, from the same arrays. Another request may be the first that wants a miss,
 * so an unclaimed entry may count for another one. */
static void same_resolve(struct pool *p, struct ucm_entries *model)
{
    struct ucm_entries *s = &p->host;
    uint32_t n = model->step->misses, keys = s->shape.layer_heads * s->shape.numbers;

    pool_read(p, "resolve");
    check(s->step->misses == n && s->step->flags == model->step->flags, "resolve: %u misses, C %u",
          s->step->misses, n);
    check(memcmp(s->entry_of, model->entry_of, keys * sizeof(*s->entry_of)) == 0,
          "resolve: the table");
    check(memcmp(s->stamp, model->stamp, s->shape.entries * sizeof(*s->stamp)) == 0,
          "resolve: stamps");
    if (n != s->step->misses || n > s->shape.misses)
        return;
    qsort(s->miss, n, sizeof(*s->miss), by_key);
    qsort(model->miss, n, sizeof(*s->miss), by_key);
    for (uint32_t i = 0; i < n; i++)
        check(s->miss[i].key == model->miss[i].key, "resolve: other misses");
}

/* before: after the resolve. */
static void check_taken(const struct ucm_entries *before, const struct ucm_entries *s,
                        const uint8_t *lost)
{
    uint64_t now = s->step->now;
    uint32_t unserved = 0;

    for (uint32_t entry = 0; entry < s->shape.entries; entry++)
        if (before->stamp[entry] == now)
            check(s->key[entry] == before->key[entry], "entry %u of this step was taken", entry);
    for (uint32_t i = 0; i < before->step->misses; i++) {
        uint32_t key = before->miss[i].key;
        bool there = s->entry_of[key] >= 0;

        unserved += !there;
        if ((s->step->flags & UCM_ENTRIES_FULL) == 0)
            check(there == !lost[key % s->shape.numbers], "key %u: there %d", key, there);
    }
    check(s->step->unserved == before->step->unserved + unserved, "%u not served, %u counted",
          unserved, s->step->unserved);
    if (s->step->floors_broken == before->step->floors_broken)
        for (uint32_t r = 0; r < s->shape.requests; r++) {
            uint32_t least = before->held[r] < s->floor[r] ? before->held[r] : s->floor[r];

            check(s->held[r] >= least || unserved > 0, "request %u has %u entries, floor %u", r,
                  s->held[r], s->floor[r]);
        }
}

static void one_layer(struct pool *p, struct pool *q, CUdeviceptr lists, uint32_t layer_head)
{
    static struct choice choice;
    uint32_t apart = rnd_below(2), n = p->host.shape.numbers;
    uint8_t *lost = fresh(n), *arrived = fresh(p->host.shape.misses);
    struct ucm_entries_lists there = lists_at((const void *)(uintptr_t)lists, apart),
                             here = lists_at(&choice, apart);
    CUdeviceptr flags;

    choose(&choice, n);
    gpu_put(lists, &choice, sizeof(choice));
    memcpy(q->host.stamp, p->host.stamp, p->bytes); /* the model begins where the GPU does */
    layer_head = apart ? 0 : layer_head;
    gpu_launch("ucm_entries_resolve", SEQUENCES * LISTS, UCM_ENTRIES_CUDA_RESOLVE, 0,
               (void *[]){&p->gpu, &layer_head, &there});
    ucm_entries_resolve(&q->host, layer_head, &here);
    same_resolve(p, &q->host);
    gpu_get(q->host.stamp, p->memory, p->bytes);
    for (uint32_t i = 0; i < n; i++)
        lost[i] = rnd_below(10) == 0;
    for (uint32_t i = 0; i < q->host.step->misses && i < p->host.shape.misses; i++)
        arrived[i] = !lost[q->host.miss[i].key % n];
    flags = gpu_put(0, arrived, p->host.shape.misses);
    gpu_launch("ucm_entries_take_all", 4, 256, 0, (void *[]){&p->gpu});
    pool_read(p, "take");
    gpu_launch("ucm_entries_publish_all", 4, 64, 0, (void *[]){&p->gpu, &flags});
    pool_read(p, "publish");
    check_taken(&q->host, &p->host, lost);
}

static void test_at_once(uint32_t entries, uint32_t floor)
{
    struct ucm_entries_shape shape = {.layer_heads = LISTS,
                                      .numbers = 200,
                                      .entries = entries,
                                      .requests = SEQUENCES,
                                      .misses = 1024};
    CUdeviceptr lists = gpu_new(sizeof(struct choice));
    struct pool p, q;

    pool_open(&p, &shape);
    pool_open(&q, &shape);
    for (uint32_t r = 0; r < SEQUENCES; r++)
        check(ucm_entries_enter(&p.host, r, floor) == 0, "floors fit");
    pool_write(&p);
    for (uint32_t step = 0; step < (few ? 5u : 100u); step++) {
        pool_next(&p);
        pool_read(&p, "next");
        for (uint32_t layer_head = 0; layer_head < LISTS; layer_head++)
            one_layer(&p, &q, lists, layer_head);
    }
    memory_end();
}

int main(int argc, char **argv)
{
    gpu_begin(argc, argv);
    gpu_load(ucm_entries_fatbin);
    test_one_by_one();
    test_at_once(2000, 300); /* there is room for all */
    test_at_once(700, 200);
    test_at_once(300, 100); /* steps that don't fit */
    test_gather();
    return gpu_end();
}
