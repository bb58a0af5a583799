/* select on this host's CPU. Digests lie as they do in the daemon's arena: all layers of a block
 * together in a slot, slots wherever there was room. */
#include "client/bench/select.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define SLOT_ALIGN 4096u
#define SPINS 20000 /* before a waiting thread lets others run */

enum phase { PHASE_SCORE, PHASE_CHOOSE, PHASE_READ, PHASE_STOP };

struct rig;

struct worker {
    struct rig *rig;
    pthread_t thread;
    unsigned number;
    void *scratch; /* of a choice */
    uint64_t sum;  /* so that reads are not left out */
};

struct rig {
    const struct select_case *c;
    uint8_t *memory;
    size_t memory_bytes, slot_bytes, layer_bytes;
    const void **slots;
    float *q, *scores;
    uint32_t *index;
    void *scratch;
    struct worker *workers; /* the first is the caller */
    unsigned begun;

    /* The phase under way: the caller writes it, then raises `turn`; workers count `done`. */
    enum phase phase;
    uint32_t step, layer;
    struct ucm_score_job job;
    _Atomic uint32_t turn, done;
};

/* ---- a thread's part of a phase ---- */

static uint32_t part(uint32_t n, unsigned i, unsigned of)
{
    return (uint32_t)((uint64_t)n * i / of);
}

static void choose_lists(struct rig *r, struct worker *w)
{
    const struct select_case *c = r->c;
    uint32_t lists = ucm_score_lists(&c->plan, &c->score), n = c->blocks;

    for (uint32_t list = part(lists, w->number, c->threads);
         list < part(lists, w->number + 1, c->threads); list++)
        ucm_choose(&c->choose, r->scores + (size_t)list * n, n, w->scratch,
                   r->index + (size_t)list * n, NULL, n);
}

typedef uint64_t line __attribute__((vector_size(64)));

/* As many bytes as the layer's digests, in one piece. */
static void read_memory(struct rig *r, struct worker *w)
{
    size_t lines = r->layer_bytes / sizeof(line);
    size_t first = lines * w->number / r->c->threads, end = lines * (w->number + 1) / r->c->threads;
    const line *p = (const line *)(r->memory + r->layer * r->layer_bytes / 64 * 64);
    line a = {0}, b = {0}, c = {0}, d = {0};

    for (size_t i = first; i + 4 <= end; i += 4) {
        a ^= p[i];
        b ^= p[i + 1];
        c ^= p[i + 2];
        d ^= p[i + 3];
    }
    a ^= b ^ c ^ d;
    w->sum ^= a[0] ^ a[1] ^ a[2] ^ a[3] ^ a[4] ^ a[5] ^ a[6] ^ a[7];
}

static void work(struct rig *r, struct worker *w)
{
    uint32_t units;

    switch (r->phase) {
    case PHASE_SCORE:
        units = ucm_score_units(&r->job, r->step);
        ucm_score_run(&r->job, r->step, part(units, w->number, r->c->threads),
                      part(units, w->number + 1, r->c->threads));
        break;
    case PHASE_CHOOSE:
        choose_lists(r, w);
        break;
    case PHASE_READ:
        read_memory(r, w);
        break;
    case PHASE_STOP:
        break;
    }
}

/* ---- threads ---- */

static void pause_for(unsigned *spins)
{
    if (++*spins > SPINS)
        sched_yield();
#if defined(__x86_64__)
    else
        __builtin_ia32_pause();
#endif
}

static void *worker_run(void *arg)
{
    struct worker *w = arg;
    struct rig *r = w->rig;
    uint32_t seen = 0;
    bool stop = false;

    while (!stop) {
        unsigned spins = 0;

        while (atomic_load_explicit(&r->turn, memory_order_acquire) == seen)
            pause_for(&spins);
        seen++;
        stop = r->phase == PHASE_STOP;
        work(r, w);
        atomic_fetch_add_explicit(&r->done, 1, memory_order_release);
    }
    return NULL;
}

/* All threads' parts of a phase; returns when the last has ended. */
static void run(struct rig *r, enum phase phase)
{
    unsigned spins = 0, others = r->begun - 1;

    r->phase = phase;
    atomic_store_explicit(&r->done, 0, memory_order_relaxed);
    atomic_fetch_add_explicit(&r->turn, 1, memory_order_release);
    work(r, &r->workers[0]);
    while (atomic_load_explicit(&r->done, memory_order_acquire) < others)
        pause_for(&spins);
}

static int start_workers(struct rig *r)
{
    const struct select_case *c = r->c;

    for (r->begun = 0; r->begun < c->threads; r->begun++) {
        struct worker *w = &r->workers[r->begun];

        *w = (struct worker){.rig = r, .number = r->begun};
        w->scratch = malloc(ucm_choose_scratch_bytes(&c->choose, c->blocks));
        if (w->scratch == NULL)
            return -ENOMEM;
        if (r->begun > 0 && pthread_create(&w->thread, NULL, worker_run, w) != 0) {
            free(w->scratch);
            return -EAGAIN;
        }
    }
    return 0;
}

static void stop_workers(struct rig *r)
{
    if (r->begun > 1)
        run(r, PHASE_STOP);
    for (unsigned i = 0; i < r->begun; i++) {
        if (i > 0)
            pthread_join(r->workers[i].thread, NULL);
        free(r->workers[i].scratch);
    }
}

/* ---- memory ---- */

static void fill(struct rig *r)
{
    const struct select_case *c = r->c;

    for (uint32_t b = 0; b < c->blocks; b++)
        r->slots[b] = r->memory + (size_t)b * r->slot_bytes;
    for (uint32_t b = c->blocks - 1; b > 0; b--) { /* in any order */
        uint32_t other = (uint32_t)(((uint64_t)b * 2654435761u >> 7) % (b + 1));
        const void *slot = r->slots[b];

        r->slots[b] = r->slots[other];
        r->slots[other] = slot;
    }
    for (uint32_t b = 0; b < c->blocks; b++)
        for (uint32_t l = 0; l < c->layers; l++)
            select_fill_digest(&c->plan, ((uint64_t)b << 32) + l,
                               r->memory + (size_t)b * r->slot_bytes + (size_t)l * c->plan.bytes);
}

static int allocate(struct rig *r, char why[SELECT_WHY])
{
    const struct select_case *c = r->c;
    size_t queries = (size_t)c->score.rows * c->score.q_heads * c->plan.spec.shape.head_dim;
    size_t scores = (size_t)ucm_score_lists(&c->plan, &c->score) * c->blocks;

    r->layer_bytes = (size_t)c->blocks * c->plan.bytes;
    r->slot_bytes = ((size_t)c->layers * c->plan.bytes + SLOT_ALIGN - 1) / SLOT_ALIGN * SLOT_ALIGN;
    r->memory_bytes = r->slot_bytes * c->blocks;
    r->memory =
        mmap(NULL, r->memory_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (r->memory == MAP_FAILED) {
        snprintf(why, SELECT_WHY, "%zu MiB of digests: %s", r->memory_bytes >> 20, strerror(errno));
        return -ENOMEM;
    }
    (void)madvise(r->memory, r->memory_bytes, MADV_HUGEPAGE); /* as the arena has it */
    r->slots = malloc(c->blocks * sizeof(*r->slots));
    r->q = malloc(queries * sizeof(*r->q));
    r->scores = malloc(scores * sizeof(*r->scores));
    r->index = malloc(scores * sizeof(*r->index));
    r->workers = calloc(c->threads, sizeof(*r->workers));
    r->scratch =
        aligned_alloc(64, (ucm_score_scratch_bytes(&c->plan, &c->score, c->blocks) + 63) / 64 * 64);
    return r->slots == NULL || r->q == NULL || r->scores == NULL || r->index == NULL ||
                   r->workers == NULL || r->scratch == NULL
               ? -ENOMEM
               : 0;
}

static void release(struct rig *r)
{
    if (r->memory != MAP_FAILED)
        munmap(r->memory, r->memory_bytes);
    free(r->slots);
    free(r->q);
    free(r->scores);
    free(r->index);
    free(r->workers);
    free(r->scratch);
}

/* ---- measuring ---- */

static double ms_since(uint64_t begin)
{
    return (double)(clock_ns() - begin) / 1e6;
}

static int measure_layer(struct rig *r, struct select_result *out)
{
    const struct select_case *c = r->c;
    struct ucm_score_blocks blocks = {.at = r->slots, .n = c->blocks};
    uint64_t begin = clock_ns();
    int rc;

    blocks.offset = (uint64_t)r->layer * c->plan.bytes;
    ucm_score_begin(&r->job, &c->plan, &c->score, &blocks, r->q, r->scratch, r->scores);
    for (r->step = 0; r->step < ucm_score_steps(&r->job); r->step++)
        run(r, PHASE_SCORE);
    rc = samples_add(&out->score, ms_since(begin));
    run(r, PHASE_CHOOSE);
    return rc < 0 ? rc : samples_add(&out->select, ms_since(begin));
}

static int measure_read(struct rig *r, struct select_result *out)
{
    uint64_t begin = clock_ns();

    run(r, PHASE_READ);
    return samples_add(&out->read, ms_since(begin));
}

/* In turn with the baseline, step by step; the first round warms up. */
static int measure_rounds(struct rig *r, struct select_result *out)
{
    int rc = 0;

    for (unsigned round = 0; rc == 0 && round <= r->c->rounds; round++) {
        if (round == 1) {
            samples_clear(&out->select);
            samples_clear(&out->score);
            samples_clear(&out->read);
        }
        for (r->layer = 0; rc == 0 && r->layer < r->c->layers; r->layer++)
            rc = measure_layer(r, out);
        for (r->layer = 0; rc == 0 && r->layer < r->c->layers; r->layer++)
            rc = measure_read(r, out);
    }
    return rc;
}

int select_measure_cpu(const struct select_case *c, struct select_result *out, char why[SELECT_WHY])
{
    struct rig *r = calloc(1, sizeof(*r));
    int rc;

    if (r == NULL)
        return -ENOMEM;
    r->c = c;
    rc = allocate(r, why);
    if (rc == 0) {
        fill(r);
        select_fill_queries(c, r->q);
        rc = start_workers(r);
        if (rc == 0)
            rc = measure_rounds(r, out);
        stop_workers(r);
    }
    release(r);
    free(r);
    return rc;
}
