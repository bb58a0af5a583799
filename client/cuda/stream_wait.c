#include "client/cuda/stream_wait.h"

#include "client/cuda/context.h"
#include "client/cuda/copy_agent.h"
#include "client/include/ucmclient.h"

#include <sys/prctl.h>

/* The client library waits for one task at a time: for so long for the oldest wait's task, before
 * the others are polled. */
#define TURN_MS 1
#define MS_NS INT64_C(1000000)

/* ---- entries; under the mutex ---- */

static struct stream_wait *entry_find(struct stream_waits *w)
{
    for (unsigned i = 0; i < STREAM_WAITS; i++)
        if (w->entries[i].state == STREAM_WAIT_FREE)
            return &w->entries[i];
    return NULL;
}

/* Release: the stream then sees everything that the client library saw. */
static void let_go(struct stream_waits *w, struct stream_wait *wait)
{
    TAILQ_REMOVE(&w->pending, wait, node);
    atomic_store_explicit(&w->words[wait - w->entries], wait->value, memory_order_release);
}

static void entry_free(struct stream_waits *w, struct stream_wait *wait)
{
    if (wait->state == STREAM_WAIT_PENDING)
        let_go(w, wait);
    wait->state = STREAM_WAIT_FREE;
    wait->task = NULL;
}

static void give_up(struct stream_waits *w, struct stream_wait *wait)
{
    let_go(w, wait);
    wait->state = STREAM_WAIT_GIVEN_UP;
}

static void give_up_until(struct stream_waits *w, int64_t until_ns)
{
    struct stream_wait *next;

    for (struct stream_wait *wait = TAILQ_FIRST(&w->pending); wait; wait = next) {
        next = TAILQ_NEXT(wait, node);
        if (wait->deadline_ns <= until_ns)
            give_up(w, wait);
    }
}

/* ---- the thread; the mutex is held where nothing else is said ---- */

/* Whether an older wait for at most as many layers of the same task ends first. */
static bool is_covered(struct stream_waits *w, const struct stream_wait *wait)
{
    const struct stream_wait *older = TAILQ_FIRST(&w->pending);

    while (older != wait && (older->task != wait->task || older->layers > wait->layers))
        older = TAILQ_NEXT(older, node);
    return older != wait;
}

/* NULL: this round is over. */
static struct stream_wait *next_to_poll(struct stream_waits *w)
{
    struct stream_wait *wait;

    TAILQ_FOREACH(wait, &w->pending, node) {
        if (wait->round == w->round)
            continue;
        wait->round = w->round;
        if (!is_covered(w, wait))
            return wait;
    }
    return NULL;
}

/* Have the layers landed, or has the task failed? EDEADLINE means "not yet", or that the task failed
 * by the daemon's deadline; only in the latter case does the wait for 0 layers fail, too. */
static bool over(struct ucm_task *task, uint32_t layers, int timeout_ms)
{
    return ucm_task_wait_layers(task, layers, timeout_ms, NULL) != -UCM_EDEADLINE ||
           ucm_task_wait_layers(task, 0, 0, NULL) != 0;
}

static void poll_task(struct stream_waits *w, struct stream_wait *wait)
{
    int timeout_ms = wait == TAILQ_FIRST(&w->pending) ? TURN_MS : 0;
    struct ucm_task *task = wait->task;
    uint32_t layers = wait->layers, value = wait->value;
    bool ended;

    w->polled = task;
    pthread_mutex_unlock(&w->mutex);
    ended = over(task, layers, timeout_ms);
    pthread_mutex_lock(&w->mutex);
    w->polled = NULL;
    pthread_cond_broadcast(&w->changed);
    if (ended && wait->state == STREAM_WAIT_PENDING && wait->value == value)
        entry_free(w, wait);
}

static void *thread_run(void *arg)
{
    struct stream_waits *w = arg;

    (void)prctl(PR_SET_NAME, "ucm-streams");
    pthread_mutex_lock(&w->mutex);
    while (!w->quit) {
        struct stream_wait *wait = next_to_poll(w);

        if (wait) {
            poll_task(w, wait);
        } else if (TAILQ_EMPTY(&w->pending)) {
            pthread_cond_wait(&w->changed, &w->mutex);
        } else {
            w->round++;
            give_up_until(w, copy_agent_now_ns());
        }
    }
    pthread_mutex_unlock(&w->mutex);
    return NULL;
}

static int thread_start(struct stream_waits *w)
{
    int rc;

    if (w->runs)
        return 0;
    w->quit = false;
    rc = pthread_create(&w->thread, NULL, thread_run, w);
    w->runs = rc == 0;
    return rc;
}

/* ---- waits ---- */

static int entry_begin(struct stream_waits *w, struct ucm_task *task, uint32_t layers,
                       int64_t deadline_ns, struct stream_wait **out, uint32_t *value)
{
    struct stream_wait *wait;

    pthread_mutex_lock(&w->mutex);
    wait = entry_find(w);
    if (!wait || thread_start(w) != 0) {
        pthread_mutex_unlock(&w->mutex);
        return wait ? -UCM_ENOMEMORY : -UCM_EBUSY;
    }
    wait->state = STREAM_WAIT_PENDING;
    wait->task = task;
    wait->layers = layers;
    wait->deadline_ns = deadline_ns;
    wait->round = w->round - 1;
    *value = ++wait->value;
    *out = wait;
    TAILQ_INSERT_TAIL(&w->pending, wait, node);
    w->used = true;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->mutex);
    return 0;
}

/* Enqueues the stream's wait without the mutex: if the stream's queue is full of work behind earlier
 * waits, enqueuing blocks until the thread has ended one of them. */
int stream_waits_add(struct stream_waits *w, struct ucm_task *task, uint32_t layers,
                     CUstream stream, int timeout_ms, CUresult *error)
{
    int64_t deadline_ns = copy_agent_now_ns() + timeout_ms * MS_NS;
    struct stream_wait *wait;
    uint32_t value;
    CUresult rc;
    int r;

    if (over(task, layers, 0))
        return 0;
    r = entry_begin(w, task, layers, deadline_ns, &wait, &value);
    if (r != 0)
        return r;
    rc = cuStreamWaitValue32(stream, w->words_gpu + (size_t)(wait - w->entries) * sizeof *w->words,
                             value, CU_STREAM_WAIT_VALUE_GEQ);
    if (rc == CUDA_SUCCESS)
        return 0;
    pthread_mutex_lock(&w->mutex);
    if (wait->value == value)
        entry_free(w, wait);
    pthread_mutex_unlock(&w->mutex);
    *error = rc;
    return -UCM_EDEVICE;
}

int stream_waits_end(struct stream_waits *w, struct ucm_task *task)
{
    int r = 0;

    pthread_mutex_lock(&w->mutex);
    for (unsigned i = 0; i < STREAM_WAITS; i++) {
        struct stream_wait *wait = &w->entries[i];
        uint32_t layers = wait->layers, value = wait->value;
        bool landed;

        if (wait->task != task)
            continue;
        pthread_mutex_unlock(&w->mutex); /* over() may have to end a broken connection */
        landed = over(task, layers, 0);
        pthread_mutex_lock(&w->mutex);
        if (wait->task != task || wait->value != value)
            continue; /* the thread ended it */
        if (wait->state == STREAM_WAIT_GIVEN_UP || !landed)
            r = -UCM_EDEADLINE;
        entry_free(w, wait);
    }
    while (w->polled == task) /* for TURN_MS at most */
        pthread_cond_wait(&w->changed, &w->mutex);
    pthread_mutex_unlock(&w->mutex);
    return r;
}

/* ---- life ---- */

static CUresult words_create(struct stream_waits *w)
{
    void *words;
    CUresult r = cuMemHostAlloc(&words, STREAM_WAITS * sizeof *w->words, CU_MEMHOSTALLOC_DEVICEMAP);

    if (r != CUDA_SUCCESS)
        return r;
    r = cuMemHostGetDevicePointer(&w->words_gpu, words, 0);
    if (r != CUDA_SUCCESS) {
        (void)cuMemFreeHost(words);
        return r;
    }
    w->words = words;
    for (unsigned i = 0; i < STREAM_WAITS; i++)
        atomic_init(&w->words[i], 0);
    return r;
}

CUresult stream_waits_init(struct stream_waits *w, CUcontext context)
{
    CUresult r = ucm_context_enter(context);

    if (r != CUDA_SUCCESS)
        return r;
    *w = (struct stream_waits){.context = context,
                               .mutex = PTHREAD_MUTEX_INITIALIZER,
                               .changed = PTHREAD_COND_INITIALIZER};
    TAILQ_INIT(&w->pending);
    r = words_create(w);
    ucm_context_leave();
    return r;
}

void stream_waits_stop(struct stream_waits *w)
{
    bool runs;

    pthread_mutex_lock(&w->mutex);
    give_up_until(w, INT64_MAX);
    w->quit = true;
    runs = w->runs;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->mutex);
    if (runs)
        (void)pthread_join(w->thread, NULL);
    w->runs = false;
}

/* A context that can't be synchronized may have streams that will still poll a word: then the words
 * stay as long as the context. */
void stream_waits_close(struct stream_waits *w)
{
    if (ucm_context_enter(w->context) == CUDA_SUCCESS) {
        if (!w->used || cuCtxSynchronize() == CUDA_SUCCESS)
            (void)cuMemFreeHost(w->words);
        ucm_context_leave();
    }
    (void)pthread_mutex_destroy(&w->mutex);
    (void)pthread_cond_destroy(&w->changed);
}
