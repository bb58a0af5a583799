/* A forked child inherits the connection and the regions' descriptors. If they stayed open, the
 * daemon would keep the worker's memory mapped after the worker has died. So the child closes them
 * at once. */
#include "client/lib/internal.h"

#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* taken before any client's lock */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int init_error;
static TAILQ_HEAD(client_list, ucm_client) clients = TAILQ_HEAD_INITIALIZER(clients);

static void prepare(void)
{
    struct ucm_client *c;

    pthread_mutex_lock(&lock);
    TAILQ_FOREACH(c, &clients, node)
        pthread_mutex_lock(&c->lock);
}

static void unlock_all(void)
{
    struct ucm_client *c;

    TAILQ_FOREACH(c, &clients, node)
        pthread_mutex_unlock(&c->lock);
    pthread_mutex_unlock(&lock);
}

static void drop(struct ucm_client *c)
{
    struct client_handle *h;

    c->forked = true;
    client_hooks_forked(c);
    TAILQ_FOREACH(h, &c->handles, node)
        while (h->request.n_fds > 0)
            close(h->fds[--h->request.n_fds]);
    client_fds_close(c);
    client_close_descriptors(c); /* if it forks again, the numbers may belong to other files */
}

static void in_child(void)
{
    struct ucm_client *c;

    TAILQ_FOREACH(c, &clients, node)
        drop(c);
    unlock_all();
}

static void init_once(void)
{
    init_error = pthread_atfork(prepare, unlock_all, in_child);
}

int client_fork_init(void)
{
    (void)pthread_once(&once, init_once); /* can't fail */
    return init_error ? client_fail(UCM_ENOMEMORY, "no memory for the library's set-up") : 0;
}

void client_fork_watch(struct ucm_client *c)
{
    pthread_mutex_lock(&lock);
    TAILQ_INSERT_TAIL(&clients, c, node);
    pthread_mutex_unlock(&lock);
}

void client_fork_forget(struct ucm_client *c)
{
    pthread_mutex_lock(&lock);
    TAILQ_REMOVE(&clients, c, node);
    pthread_mutex_unlock(&lock);
}
