/* A choice from a long list in steps, whose units several threads share. It is the radix selection
 * of choose.c, with sums for each chunk of the list. They are added up between two steps. */
#include "kernels/sparse/choose.h"

#include <stddef.h>
#include <string.h>

enum step { STEP_TOP, STEP_DIGIT_1, STEP_DIGIT_2, STEP_DIGIT_3, STEP_PUT };

/* State of blocks [first, first + n), between the windows. */
struct ucm_choose_chunk {
    uint32_t first, n;
    float top;           /* mass */
    uint64_t weight;     /* mass: of its blocks */
    uint32_t poisoned;   /* of them */
    uint32_t above;      /* of them, above the digits that the cut is known to have */
    uint32_t ties, take; /* blocks of the cut's key, and blocks, that it gives */
    uint32_t at;         /* where these go in the answer */
    struct choose_sums sums;
};

static bool weighed(const struct ucm_choose_job *job)
{
    return job->spec->policy == UCM_CHOOSE_MASS;
}

static size_t aligned(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

static uint32_t chunks_of(uint32_t between, uint32_t chunk)
{
    return between / chunk + (between % chunk != 0);
}

size_t ucm_choose_job_bytes(const struct ucm_choose_spec *spec, uint32_t n, uint32_t chunk)
{
    size_t arrays = spec->policy == UCM_CHOOSE_MASS ? 2 : 1;

    return aligned(sizeof(struct choose_sums)) +
           aligned(chunks_of(n, chunk) * sizeof(struct ucm_choose_chunk)) +
           arrays * aligned(n * sizeof(uint32_t));
}

static void chunks_make(struct ucm_choose_job *job, uint32_t chunk)
{
    for (uint32_t i = 0; i < job->units; i++) {
        struct ucm_choose_chunk *k = &job->chunks[i];

        memset(k, 0, offsetof(struct ucm_choose_chunk, sums));
        k->first = job->begin + i * chunk;
        k->n = choose_least(chunk, job->end - k->first);
    }
}

uint32_t ucm_choose_begin(struct ucm_choose_job *job, const struct ucm_choose_spec *spec,
                          const struct ucm_choose_list *list, uint32_t chunk, void *scratch)
{
    uint32_t n = list->n, windows = choose_windows(spec, n);
    uint8_t *at = scratch;

    *job = (struct ucm_choose_job){.spec = spec, .list = *list, .ops = score_ops()};
    job->list.room = choose_least(list->room, ucm_choose_limit(spec, n));
    job->begin = choose_least(spec->sink_blocks, n);
    job->end = n - (windows - job->begin);
    job->step = weighed(job) ? STEP_TOP : STEP_DIGIT_1;
    job->sums = (struct choose_sums *)(void *)at;
    at += aligned(sizeof(*job->sums));
    job->chunks = (struct ucm_choose_chunk *)(void *)at;
    at += aligned(chunks_of(n, chunk) * sizeof(*job->chunks));
    job->keys = (uint32_t *)(void *)at;
    if (weighed(job))
        job->weights = (uint32_t *)(void *)(at + aligned(n * sizeof(uint32_t)));
    if (job->list.room > windows)
        job->units = chunks_of(job->end - job->begin, chunk);
    chunks_make(job, chunk);
    if (job->units == 0)
        job->step = STEP_PUT;
    return job->units;
}

/* ---- units of steps, on any thread ---- */

/* Scores lie close together, and a counter that is raised again at once makes the processor wait.
 * So two counters take turns. */
static void count_first(const uint32_t *keys, uint32_t n, uint32_t count[DIGITS])
{
    uint32_t odd[DIGITS] = {0}, i = 0;

    for (; i + 2 <= n; i += 2) {
        count[keys[i] >> FIRST_SHIFT]++;
        odd[keys[i + 1] >> FIRST_SHIFT]++;
    }
    if (i < n)
        count[keys[i] >> FIRST_SHIFT]++;
    for (uint32_t d = 0; d < DIGITS; d++)
        count[d] += odd[d];
}

static void digits_1(struct ucm_choose_job *job, struct ucm_choose_chunk *k)
{
    const float *scores = job->list.scores + k->first;
    uint32_t *keys = job->keys + k->first;
    uint32_t *weights = weighed(job) ? job->weights + k->first : NULL;

    memset(k->sums.count, 0, sizeof(k->sums.count));
    if (weights)
        memset(k->sums.mass, 0, sizeof(k->sums.mass));
    choose_keys(scores, keys, k->n);
    k->poisoned = choose_poisoned(keys, k->n);
    if (weights)
        k->weight = job->ops->weigh(scores, k->n, job->top, job->spec->beta, weights);
    count_first(keys, k->n, k->sums.count);
    for (uint32_t i = 0; weights && i < k->n; i++)
        k->sums.mass[keys[i] >> FIRST_SHIFT] += weights[i];
    k->sums.count[POISON_KEY >> FIRST_SHIFT] = 0; /* they are no candidates */
}

/* Counts the next digit of keys that begin with job->prefix, without branches that depend on
 * scores. */
static void digits_more(struct ucm_choose_job *job, struct ucm_choose_chunk *k, uint32_t above,
                        uint32_t shift)
{
    const uint32_t *keys = job->keys + k->first;
    const uint32_t *weights = weighed(job) ? job->weights + k->first : NULL;
    uint32_t mask = (1u << (above - shift)) - 1, prefix = job->prefix;

    memset(k->sums.count, 0, sizeof(k->sums.count));
    for (uint32_t i = 0; i < k->n; i++)
        k->sums.count[keys[i] >> shift & mask] += keys[i] >> above == prefix;
    if (!weights)
        return;
    memset(k->sums.mass, 0, sizeof(k->sums.mass));
    for (uint32_t i = 0; i < k->n; i++)
        k->sums.mass[keys[i] >> shift & mask] += keys[i] >> above == prefix ? weights[i] : 0;
}

static void put(const struct ucm_choose_job *job, const struct ucm_choose_chunk *k)
{
    uint32_t *index = job->list.index + k->at;

    if (k->take == 0)
        return;
    (void)job->ops->put(job->keys + k->first, k->n, job->cut, k->ties, k->first, index, k->take);
    for (uint32_t i = 0; job->list.chosen && i < k->take; i++)
        job->list.chosen[k->at + i] = job->list.scores[index[i]];
}

void ucm_choose_run(struct ucm_choose_job *job, uint32_t unit)
{
    struct ucm_choose_chunk *k = &job->chunks[unit];

    switch (job->step) {
    case STEP_TOP:
        k->top = job->ops->top(job->list.scores + k->first, k->n);
        break;
    case STEP_DIGIT_1:
        digits_1(job, k);
        break;
    case STEP_DIGIT_2:
        digits_more(job, k, FIRST_SHIFT, 10);
        break;
    case STEP_DIGIT_3:
        digits_more(job, k, 10, 0);
        break;
    default:
        put(job, k);
    }
}

/* ---- between steps, on one ---- */

static void top_end(struct ucm_choose_job *job)
{
    const float *scores = job->list.scores;
    float last = job->ops->top(scores + job->end, job->list.n - job->end);

    job->top = ucm_max(job->ops->top(scores, job->begin), last);
    for (uint32_t i = 0; i < job->units; i++)
        job->top = ucm_max(job->chunks[i].top, job->top);
    job->step = STEP_DIGIT_1;
}

/* Where each chunk's blocks go. Ties are the first ones. */
static void put_begin(struct ucm_choose_job *job, uint32_t ties)
{
    uint32_t at = job->begin;

    for (uint32_t i = 0; i < job->units; i++) {
        struct ucm_choose_chunk *k = &job->chunks[i];

        k->ties = choose_least(k->ties, ties);
        k->take = k->above + k->ties;
        k->at = at;
        at += k->take;
        ties -= k->ties;
    }
    job->put = at;
    job->step = STEP_PUT;
}

/* Takes only poisoned blocks, as far as they fit. */
static void put_poisoned(struct ucm_choose_job *job)
{
    job->cut = POISON_KEY;
    for (uint32_t i = 0; i < job->units; i++) {
        job->chunks[i].above = 0;
        job->chunks[i].ties = job->chunks[i].poisoned;
    }
    put_begin(job, job->list.room - choose_windows(job->spec, job->list.n));
}

/* Adds up the chunks' sums, and takes the digits above the one in which the taking ends. */
static uint32_t digits_end(struct ucm_choose_job *job)
{
    struct choose_sums *sums = job->sums;
    struct choose_need need = {job->need_count, job->need_mass};
    uint32_t digit;

    memset(sums, 0, sizeof(*sums));
    for (uint32_t i = 0; i < job->units; i++) {
        const struct choose_sums *of = &job->chunks[i].sums;

        for (uint32_t d = 0; d < DIGITS; d++)
            sums->count[d] += of->count[d];
        for (uint32_t d = 0; weighed(job) && d < DIGITS; d++)
            sums->mass[d] += of->mass[d];
    }
    digit = choose_walk(sums, weighed(job), &need);
    job->need_count = need.count;
    job->need_mass = need.mass;
    for (uint32_t i = 0; i < job->units; i++)
        for (uint32_t d = digit + 1; d < DIGITS; d++)
            job->chunks[i].above += job->chunks[i].sums.count[d];
    return digit;
}

static void digit_1_end(struct ucm_choose_job *job)
{
    const struct ucm_choose_list *l = &job->list;
    struct choose_need need;
    uint64_t mass = UINT64_MAX, have = 0, total;
    uint32_t poisoned = 0;

    for (uint32_t i = 0; i < job->units; i++)
        poisoned += job->chunks[i].poisoned;
    if (weighed(job)) {
        have = job->ops->weigh(l->scores, job->begin, job->top, job->spec->beta, job->weights) +
               job->ops->weigh(l->scores + job->end, l->n - job->end, job->top, job->spec->beta,
                               job->weights + job->end);
        total = have;
        for (uint32_t i = 0; i < job->units; i++)
            total += job->chunks[i].weight;
        mass = choose_mass(job->spec, total, have);
    }
    need = choose_need(job->spec, l->n, l->room, poisoned, mass);
    job->need_count = need.count;
    job->need_mass = need.mass;
    if (need.count == 0 || need.mass == 0) {
        put_poisoned(job);
        return;
    }
    for (uint32_t i = 0; i < job->units; i++)
        job->chunks[i].above = job->chunks[i].poisoned;
    job->prefix = digits_end(job);
    job->step = STEP_DIGIT_2;
}

static void digit_3_end(struct ucm_choose_job *job)
{
    uint32_t digit = digits_end(job);
    struct choose_need need = {job->need_count, job->need_mass};

    job->cut = job->prefix << 10 | digit;
    for (uint32_t i = 0; i < job->units; i++)
        job->chunks[i].ties = job->chunks[i].sums.count[digit];
    put_begin(job, choose_ties(job->sums->count[digit], weighed(job) ? job->sums->mass[digit] : 0,
                               &need));
}

static uint32_t window_put(const struct ucm_choose_job *job, uint32_t at, uint32_t begin,
                           uint32_t end)
{
    const struct ucm_choose_list *l = &job->list;

    for (uint32_t b = begin; b < end && at < l->room; b++, at++) {
        l->index[at] = b;
        if (l->chosen)
            l->chosen[at] = l->scores[b];
    }
    return at;
}

bool ucm_choose_next(struct ucm_choose_job *job, uint32_t *n)
{
    switch (job->step) {
    case STEP_TOP:
        top_end(job);
        return true;
    case STEP_DIGIT_1:
        digit_1_end(job);
        return true;
    case STEP_DIGIT_2:
        job->prefix = job->prefix << 11 | digits_end(job);
        job->step = STEP_DIGIT_3;
        return true;
    case STEP_DIGIT_3:
        digit_3_end(job);
        return true;
    default:
        *n = window_put(job, 0, 0, job->begin);
        if (job->units > 0)
            *n = job->put;
        *n = window_put(job, *n, job->end, job->list.n);
        return false;
    }
}
