/* Registering memory by CUDA IPC handle. The daemon gives a nonce, the user's callbacks write it over the memory's first
 * bytes, and the register is sent; when that is answered, they put the bytes back.
 *
 * A client proves for one handle at a time, as it has one nonce. Regions of several clients may share memory, so one
 * client of the process does at a time, too. Each step is done by whichever thread is there, so a short deadline loses
 * nothing. Callbacks run without the lock, as a thread that forks takes it and may have what they need (Python's). */
#include "client/lib/internal.h"

#include <string.h>

#define FRESH_NS                                                                                   \
    INT64_C(                                                                                       \
        5000000000) /* a nonce that was asked for longer ago is not used: ucmd forgets it after 10 s */
#define CLAIM_NS                                                                                   \
    INT64_C(20000000000) /* after that others don't wait any more for a client that nobody calls */
#define LOOK_NS 1000000

static _Atomic(struct ucm_client *) claimed; /* by this client */
static _Atomic int64_t claimed_ns;           /* since then */

static bool claimable(struct ucm_client *by)
{
    return !by || client_now_ns() - atomic_load(&claimed_ns) >= CLAIM_NS;
}

static bool claim(struct ucm_client *c)
{
    struct ucm_client *by = atomic_load(&claimed);

    if (!claimable(by) || !atomic_compare_exchange_strong(&claimed, &by, c))
        return false;
    atomic_store(&claimed_ns, client_now_ns());
    return true;
}

static void claim_end(struct ucm_client *c)
{
    (void)atomic_compare_exchange_strong(&claimed, &c, NULL);
}

void client_prove_forked(void)
{
    atomic_store(&claimed, NULL);
}

static int challenge_take_cb(struct client_call *call, const union proto_any *any)
{
    memcpy(call->client->nonce, any->challenge_r.nonce.p, UCM_NONCE_BYTES);
    return 0;
}

static void challenge_done_cb(struct client_call *call)
{
    struct client_handle *h = call->client->prover;

    if (call->status == 0)
        return;
    call->client->nonce_ns = 0;
    if (!h || !client_proves(h))
        return;
    h->call.error = call->error;
    client_call_finish(&h->call, call->status, NULL);
}

void client_prove_init(struct ucm_client *c)
{
    client_call_init(&c->challenge, c, challenge_take_cb, challenge_done_cb);
}

bool client_prove_needed(const struct client_handle *h)
{
    return h->prove_cb && h->client->version >= 5;
}

bool client_prove_begin(struct client_handle *h)
{
    struct ucm_client *c = h->client;

    if (c->prover || !claim(c))
        return false;
    client_handle_ref(h);
    c->prover = h;
    c->prove_over = c->prove_written = false;
    c->nonce_ns = 0;
    h->state = HANDLE_PENDING;
    client_call_reset(&h->call);
    return true;
}

bool client_proves(const struct client_handle *h)
{
    return h->client->prover == h && !h->client->prove_over && !h->call.linked;
}

static int prove_call(struct ucm_client *c, const uint8_t *nonce)
{
    int r;

    c->prove_calls = true;
    pthread_mutex_unlock(&c->lock);
    r = c->prover->prove_cb(c->prover, nonce);
    pthread_mutex_lock(&c->lock);
    c->prove_calls = false;
    c->prove_written = nonce && r == 0;
    pthread_cond_broadcast(&c->idle);
    return r;
}

static void prover_end(struct ucm_client *c)
{
    struct client_handle *h = c->prover;

    c->prover = NULL;
    claim_end(c);
    if (c->challenge.linked)
        client_call_finish(&c->challenge, -UCM_ECANCELLED, "its registration has ended");
    pthread_cond_broadcast(&c->idle);
    client_handle_unref(h);
}

void client_prove_restore(struct ucm_client *c)
{
    if (!c->prover || !c->prove_over || c->prove_calls)
        return;
    if (c->prove_written)
        (void)prove_call(c, NULL);
    prover_end(c);
}

void client_prove_settle(struct client_handle *h)
{
    struct ucm_client *c = h->client;

    while (c->prover == h && c->prove_over)
        if (c->prove_calls)
            (void)client_cond_wait(c, &c->idle, INT64_MAX);
        else
            client_prove_restore(c);
}

int client_prove_turn(struct ucm_client *c, int64_t deadline_ns)
{
    int64_t now = client_now_ns(), look = now + LOOK_NS;

    if (c->prover && !c->prove_over)
        return client_handle_wait(c->prover, deadline_ns);
    client_prove_restore(c);
    if (!c->prover && claimable(atomic_load(&claimed)))
        return 0;
    if (now >= deadline_ns)
        return client_fail(UCM_EDEADLINE, "another client of this process registers GPU memory");
    (void)client_cond_wait(c, &c->idle, look < deadline_ns ? look : deadline_ns);
    return 0;
}

/* Both: the writer's token is held, and given back. */
static int nonce_ask(struct ucm_client *c, int64_t deadline_ns)
{
    int r;

    if (c->prove_written)
        (void)prove_call(c, NULL);
    c->nonce_ns = client_now_ns();
    r = client_request(&c->challenge,
                       &(struct client_request){.method = UCM_METHOD_REGION_CHALLENGE},
                       deadline_ns);
    if (r)
        c->nonce_ns = 0;
    return r;
}

static int register_send(struct client_handle *h, int64_t deadline_ns)
{
    struct ucm_client *c = h->client;

    if (c->prove_written || prove_call(c, c->nonce) == 0) {
        if (client_proves(h))
            return client_request(&h->call, &h->request, deadline_ns);
        client_writer_release(c); /* it has ended meanwhile */
        return 0;
    }
    client_writer_release(c);
    return client_fail(UCM_EDEVICE, "prove_cb could not write to the memory that is registered");
}

int client_prove_step(struct client_handle *h, int64_t deadline_ns)
{
    struct ucm_client *c = h->client;
    bool asks = c->nonce_ns == 0 || client_now_ns() - c->nonce_ns > FRESH_NS;
    int r;

    if (c->challenge.linked)
        return client_call_wait(&c->challenge, deadline_ns);
    if (c->link != LINK_UP)
        return client_link_settle(c, deadline_ns);
    if (c->writing)
        return client_writer_wait(c, deadline_ns);
    c->writing = true;
    r = asks ? nonce_ask(c, deadline_ns) : register_send(h, deadline_ns);
    if (r && r != -UCM_EDEADLINE && client_proves(h))
        client_call_finish(&h->call, r, ucm_errmsg());
    return r == -UCM_EDEADLINE ? r : 0;
}

void client_prove_end(struct client_handle *h)
{
    struct ucm_client *c = h->client;

    if (c->prover != h || c->prove_over)
        return;
    c->prove_over = true;
    if (!c->prove_written && !c->prove_calls)
        prover_end(c);
}

void client_prove_break(struct ucm_client *c)
{
    if (c->prover && client_proves(c->prover))
        client_call_finish(&c->prover->call, c->why, c->why_text);
}
