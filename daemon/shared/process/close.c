/* A process's socket, in which descriptors may lie that it sent, as no process may. It can make
 * their close() wait, by a socket that lingers or a file of a mount that hangs. So a thread closes
 * it that nothing waits for but the next start. */
#include "daemon/shared/process/process.h"

#include "daemon/base/closer.h"
#include "daemon/base/detached.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>

struct process_closing {
    atomic_uint owners; /* the backend, and threads that close, or read what a process says */
    int socket;
};

struct process_closing *process_closing_hold(struct shared_backend *b)
{
    atomic_fetch_add(&b->closing_fds->owners, 1);
    return b->closing_fds;
}

void process_closing_drop(struct process_closing *c)
{
    if (atomic_fetch_sub(&c->owners, 1) == 1)
        free(c);
}

static void *close_cb(void *arg)
{
    struct process_closing *c = arg;
    struct closer closer;

    closer_init(&closer);
    closer_close(&closer, c->socket);
    closer_end(&closer);
    process_closing_drop(c);
    return NULL;
}

int process_closing_new(struct shared_backend *b)
{
    b->closing_fds = calloc(1, sizeof(*b->closing_fds));
    if (!b->closing_fds)
        return -ENOMEM;
    atomic_init(&b->closing_fds->owners, 1);
    return 0;
}

void process_closing_begin(struct process_run *run)
{
    struct process_closing *c = run->b->closing_fds;

    if (run->socket < 0)
        return;
    c->socket = run->socket;
    run->socket = -1;
    (void)process_closing_hold(run->b);
    if (detached_start(DETACHED_STACK_BYTES, close_cb, c) < 0)
        (void)close_cb(c); /* without threads much else has stopped */
}

bool process_closing_done(const struct shared_backend *b)
{
    return atomic_load(&b->closing_fds->owners) == 1;
}

void process_closing_free(struct shared_backend *b)
{
    if (b->closing_fds)
        process_closing_drop(b->closing_fds);
}
