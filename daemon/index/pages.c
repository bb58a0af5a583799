/* Memory of the index. At the first touch of a huge page the kernel clears 2 MiB, and a virtual
 * machine's host may have to find them first. That is too long for an iteration of the event loop,
 * so a thread touches some pieces ahead. */
#include "daemon/index/internal.h"

#include <sys/mman.h>

static void *map(size_t size_bytes)
{
    void *p = mmap(NULL, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    return p == MAP_FAILED ? NULL : p;
}

static uint8_t *map_aligned(void)
{
    uint8_t *p = map(2 * (size_t)PAGES_HUGE), *aligned;

    if (!p)
        return NULL;
    aligned = (uint8_t *)(((uintptr_t)p + PAGES_HUGE - 1) & ~(uintptr_t)(PAGES_HUGE - 1));
    if (aligned > p)
        munmap(p, (size_t)(aligned - p));
    munmap(aligned + PAGES_HUGE, (size_t)(p + PAGES_HUGE - aligned));
    return aligned;
}

/* Where huge pages are off this fails, and small ones serve. */
static void ask_huge(uint8_t *p)
{
    (void)madvise(p, PAGES_HUGE, MADV_HUGEPAGE);
}

/* ---- the thread ---- */

static void *ahead_thread(void *arg)
{
    struct pages *s = arg;

    pthread_mutex_lock(&s->lock);
    while (!s->stop) {
        uint8_t *p;

        if (s->n == PAGES_AHEAD) {
            pthread_cond_wait(&s->taken, &s->lock);
            continue;
        }
        pthread_mutex_unlock(&s->lock);
        p = map_aligned();
        if (p) {
            ask_huge(p);
            *(volatile uint8_t *)p = 0;
        }
        pthread_mutex_lock(&s->lock);
        if (!p) /* no memory: not again before a piece is asked for */
            pthread_cond_wait(&s->taken, &s->lock);
        else
            s->ahead[s->n++] = p;
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

static uint8_t *ahead_take(struct pages *s)
{
    uint8_t *p = NULL;

    if (!s->threaded)
        s->threaded = pthread_create(&s->thread, NULL, ahead_thread, s) == 0;
    pthread_mutex_lock(&s->lock);
    if (s->n > 0)
        p = s->ahead[--s->n];
    pthread_cond_signal(&s->taken);
    pthread_mutex_unlock(&s->lock);
    return p;
}

/* ---- for the index ---- */

void pages_init(struct pages *s)
{
    *s = (struct pages){.n = 0};
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->taken, NULL);
}

void pages_close(struct pages *s)
{
    if (s->threaded) {
        pthread_mutex_lock(&s->lock);
        s->stop = true;
        pthread_cond_signal(&s->taken);
        pthread_mutex_unlock(&s->lock);
        pthread_join(s->thread, NULL);
    }
    while (s->n > 0)
        pages_free(s->ahead[--s->n], PAGES_HUGE);
    pthread_cond_destroy(&s->taken);
    pthread_mutex_destroy(&s->lock);
}

void *pages_new(struct pages *s, size_t size_bytes)
{
    uint8_t *p;

    if (size_bytes != PAGES_HUGE)
        return map(size_bytes);
    p = ahead_take(s);
    if (p)
        return p;
    p = map_aligned();
    if (!p)
        return map(size_bytes);
    /* Touched before madvise, so that this touch brings a small page and not a huge one. */
    *(volatile uint8_t *)p = 0;
    ask_huge(p);
    return p;
}

void pages_free(void *p, size_t size_bytes)
{
    if (p)
        munmap(p, size_bytes);
}
