#include "daemon/observe/published.h"

#include "proto/clock.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>

#define FRESH 4u /* besides an index: the reader has not seen it */

struct buffer {
    struct observe_snapshot snapshot;
    uint64_t number, at_ms;
};

struct published {
    struct buffer buffer[3];
    atomic_uint newest;    /* an index, and FRESH */
    unsigned filling;      /* the event loop's */
    unsigned reading;      /* the reader's */
    uint64_t publications; /* the event loop's */
};

int published_new(struct published **out)
{
    struct published *p = calloc(1, sizeof(*p));

    if (!p)
        return -ENOMEM;
    for (int i = 0; i < 3; i++)
        p->buffer[i].at_ms = clock_ms();
    p->filling = 1;
    p->reading = 2;
    *out = p;
    return 0;
}

void published_free(struct published *p)
{
    free(p);
}

struct observe_snapshot *published_begin(struct published *p)
{
    return &p->buffer[p->filling].snapshot;
}

/* Each exchange releases the buffer that this thread gives away and acquires the one that it
 * gets. */
void published_commit(struct published *p)
{
    p->buffer[p->filling].number = ++p->publications;
    p->buffer[p->filling].at_ms = clock_ms();
    p->filling =
        atomic_exchange_explicit(&p->newest, p->filling | FRESH, memory_order_acq_rel) & ~FRESH;
}

struct published_view published_latest(struct published *p)
{
    const struct buffer *b;

    if (atomic_load_explicit(&p->newest, memory_order_relaxed) & FRESH)
        p->reading =
            atomic_exchange_explicit(&p->newest, p->reading, memory_order_acq_rel) & ~FRESH;
    b = &p->buffer[p->reading];
    return (struct published_view){&b->snapshot, b->number, b->at_ms};
}
