#include "client/lib/internal.h"

#include <assert.h>
#include <stdlib.h>
#include <unistd.h>

void client_handle_ref(struct client_handle *h)
{
    h->refs++;
}

void client_handle_unref(struct client_handle *h)
{
    struct client_handle *parent = h->request.handle;

    assert(h->refs > 0);
    if (--h->refs > 0)
        return;
    client_call_close(&h->call);
    while (h->request.n_fds > 0)
        close(h->fds[--h->request.n_fds]);
    if (h->free_cb)
        h->free_cb(h);
    free(h);
    if (parent)
        client_handle_unref(parent);
}

void client_handle_list(struct client_handle *h)
{
    if (!h->listed)
        TAILQ_INSERT_TAIL(&h->client->handles, h, node);
    h->listed = true;
}

void client_handle_unlist(struct client_handle *h)
{
    if (h->listed)
        TAILQ_REMOVE(&h->client->handles, h, node);
    h->listed = false;
}
