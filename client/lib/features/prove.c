/* Registering memory by CUDA IPC handle. The daemon gives a nonce, and the user's callbacks write
 * it over the memory's first bytes. Then the library sends the register. When that is answered, the
 * callbacks put the bytes back.
 *
 * A client has one nonce, so it proves for one handle at a time. Regions of several clients may
 * share memory, so only one client of the process proves at a time. Whichever thread is there does
 * the next step, so a short deadline loses nothing. Callbacks run without the lock: a thread that
 * forks takes the lock, and may hold what they need (Python's lock). */
#include "client/lib/internal.h"

#include <string.h>

/* A nonce that was asked for longer ago is not used, since ucmd forgets it after 10 s. */
#define FRESH_NS INT64_C(5000000000)
/* After that others no longer wait for a client that nobody calls. */
#define CLAIM_NS INT64_C(20000000000)
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

static int challenge_take_cb(struct client_call *call, const union proto_any *any)
{
    memcpy(call->client->prover.nonce, any->challenge_r.nonce.p, UCM_NONCE_BYTES);
    return 0;
}

static void challenge_done_cb(struct client_call *call)
{
    struct client_handle *h = call->client->prover.handle;

    if (call->status == 0)
        return;
    call->client->prover.nonce_ns = 0;
    if (!h || !client_proves(h))
        return;
    h->call.error = call->error;
    client_call_finish(&h->call, call->status, NULL);
}

void client_prove_init(struct ucm_client *c)
{
    client_call_init(&c->prover.challenge, c, challenge_take_cb, challenge_done_cb);
}

/* ---- what becomes of it with the client ---- */

static struct ucm_client *client_of(struct client_hook *hook)
{
    return (struct ucm_client *)((char *)hook - offsetof(struct ucm_client, prover.hook));
}

static void prove_down_cb(struct client_hook *hook)
{
    struct ucm_client *c = client_of(hook);

    if (client_proves(c->prover.handle))
        client_call_finish(&c->prover.handle->call, c->why, c->why_text);
}

static void prove_forked_cb(struct client_hook *hook)
{
    claim_end(client_of(hook));
}

static void prove_rest_cb(struct ucm_client *c);

static const struct client_feature proving = {.down_cb = prove_down_cb,
                                              .forked_cb = prove_forked_cb};

/* ---- proving ---- */

bool client_prove_begin(struct client_handle *h)
{
    struct ucm_client *c = h->client;

    if (c->prover.handle || !claim(c))
        return false;
    client_handle_ref(h);
    c->prover.handle = h;
    c->prover.over = c->prover.written = false;
    client_hook_open(c, &c->prover.hook, &proving);
    c->rest_cb = prove_rest_cb;
    c->prover.nonce_ns = 0;
    h->state = HANDLE_PENDING;
    client_call_reset(&h->call);
    return true;
}

bool client_proves(const struct client_handle *h)
{
    return h->client->prover.handle == h && !h->client->prover.over && !h->call.linked;
}

static int prove_call(struct ucm_client *c, const uint8_t *nonce)
{
    int r;

    c->prover.calls = true;
    pthread_mutex_unlock(&c->lock);
    r = c->prover.handle->prove_cb(c->prover.handle, nonce);
    pthread_mutex_lock(&c->lock);
    c->prover.calls = false;
    c->prover.written = nonce && r == 0;
    pthread_cond_broadcast(&c->idle);
    return r;
}

static void prover_end(struct ucm_client *c)
{
    struct client_handle *h = c->prover.handle;

    c->prover.handle = NULL;
    client_hook_close(&c->prover.hook);
    c->rest_cb = NULL;
    claim_end(c);
    if (c->prover.challenge.linked)
        client_call_finish(&c->prover.challenge, -UCM_ECANCELLED, "its registration has ended");
    pthread_cond_broadcast(&c->idle);
    client_handle_unref(h);
}

/* Puts back the bytes that an ended registration has overwritten. */
static void prove_rest_cb(struct ucm_client *c)
{
    if (!c->prover.handle || !c->prover.over || c->prover.calls)
        return;
    if (c->prover.written)
        (void)prove_call(c, NULL);
    prover_end(c);
}

void client_prove_settle(struct client_handle *h)
{
    struct ucm_client *c = h->client;

    while (c->prover.handle == h && c->prover.over)
        if (c->prover.calls)
            (void)client_cond_wait(c, &c->idle, INT64_MAX);
        else
            prove_rest_cb(c);
}

/* For both, the caller holds the writer's token, and they give it back. */
static int nonce_ask(struct ucm_client *c, int64_t deadline_ns)
{
    int r;

    if (c->prover.written)
        (void)prove_call(c, NULL);
    c->prover.nonce_ns = client_now_ns();
    r = client_request(&c->prover.challenge,
                       &(struct client_request){.method = UCM_METHOD_REGION_CHALLENGE},
                       deadline_ns);
    if (r)
        c->prover.nonce_ns = 0;
    return r;
}

static int register_send(struct client_handle *h, int64_t deadline_ns)
{
    struct ucm_client *c = h->client;

    if (c->prover.written || prove_call(c, c->prover.nonce) == 0) {
        if (client_proves(h))
            return client_request(&h->call, &h->request, deadline_ns);
        client_writer_release(c); /* it has ended meanwhile */
        return 0;
    }
    client_writer_release(c);
    return client_fail(UCM_EDEVICE, "prove_cb could not write to the memory that is registered");
}

/* Does the next step. 0, also when it has ended, or -UCM_EDEADLINE, which loses nothing. */
static int prove_step(struct client_handle *h, int64_t deadline_ns)
{
    struct ucm_client *c = h->client;
    bool asks = c->prover.nonce_ns == 0 || client_now_ns() - c->prover.nonce_ns > FRESH_NS;
    int r;

    if (c->prover.challenge.linked)
        return client_call_wait(&c->prover.challenge, deadline_ns);
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

    if (c->prover.handle != h || c->prover.over)
        return;
    c->prover.over = true;
    if (!c->prover.written && !c->prover.calls)
        prover_end(c);
}

int client_handle_wait(struct client_handle *h, int64_t deadline_ns)
{
    int r = 0;

    client_handle_ref(h);
    while (r == 0 && client_proves(h))
        r = prove_step(h, deadline_ns);
    if (r == 0)
        r = client_call_wait(&h->call, deadline_ns);
    client_handle_unref(h);
    return r;
}

int client_prove_turn(struct ucm_client *c, int64_t deadline_ns)
{
    int64_t now = client_now_ns(), look = now + LOOK_NS;

    if (c->prover.handle && !c->prover.over)
        return client_handle_wait(c->prover.handle, deadline_ns);
    prove_rest_cb(c);
    if (!c->prover.handle && claimable(atomic_load(&claimed)))
        return 0;
    if (now >= deadline_ns)
        return client_fail(UCM_EDEADLINE, "another client of this process registers GPU memory");
    (void)client_cond_wait(c, &c->idle, look < deadline_ns ? look : deadline_ns);
    return 0;
}
