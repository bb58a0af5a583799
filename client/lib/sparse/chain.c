#include "client/lib/sparse/internal.h"

#include <stdlib.h>
#include <string.h>

#define APPENDS "appends to the chain" /* as a message says it */

/* ---- the object ---- */

void client_chain_ref(struct ucm_chain *chain)
{
    chain->refs++;
}

void client_chain_unref(struct ucm_chain *chain)
{
    if (--chain->refs > 0)
        return;
    client_handle_unref(&chain->ns->handle);
    free(chain->keys);
    free(chain);
}

static struct ucm_chain *chain_new(struct ucm_namespace *ns, uint32_t part, uint32_t lease_ms)
{
    struct ucm_chain *chain = calloc(1, sizeof *chain);

    if (!chain)
        return NULL;
    chain->client = ns->handle.client;
    chain->ns = ns;
    client_handle_ref(&ns->handle);
    chain->refs = 1;
    chain->part = part;
    chain->lease_ms = lease_ms;
    return chain;
}

static bool chain_known(const struct ucm_chain *chain)
{
    return chain->attempts != 0 && chain->attempts == chain->client->attempts;
}

void client_chain_forget(struct ucm_chain *chain)
{
    chain->attempts = 0;
}

/* What the daemon appended is unknown: that chain ends, and the next call opens another one. */
static void chain_abandon(struct ucm_chain *chain)
{
    if (chain_known(chain) && client_link_live(chain->client))
        client_followup(chain->client, UCM_METHOD_CHAIN_CLOSE, chain->id);
    client_chain_forget(chain);
}

static void chain_closed_cb(struct client_door *d)
{
    client_door_close(d);
    client_chain_unref((struct ucm_chain *)((char *)d - offsetof(struct ucm_chain, door)));
}

static const struct client_feature chains_feature = {.closed_cb = chain_closed_cb};

/* ---- its requests ---- */

struct open_call {
    struct client_call call;
    struct ucm_chain *chain;
};

static int open_take_cb(struct client_call *call, const union proto_any *any)
{
    struct ucm_chain *chain = ((struct open_call *)call)->chain;

    chain->id = (uint32_t)any->chain.chain;
    chain->attempts = call->client->attempts;
    return 0;
}

static int chain_send_open(struct ucm_chain *chain, int64_t deadline_ns)
{
    struct msg_chain_open m = {.part = chain->part, .lease_ms = chain->lease_ms};
    struct client_request q = {UCM_METHOD_CHAIN_OPEN, &m, &chain->ns->handle, .handle_id = &m.ns};
    struct open_call open = {.chain = chain};

    return client_exchange(&open.call, chain->client, open_take_cb, &q, deadline_ns);
}

struct append_call {
    struct client_call call;
    uint32_t had; /* blocks of the chain before */
    uint32_t n_keys;
    uint8_t *status; /* n_keys, or NULL */
    struct ucm_chain_result result;
};

static int append_take_cb(struct client_call *call, const union proto_any *any)
{
    struct append_call *a = (struct append_call *)call;
    const struct msg_chain_append_r *m = &any->chain_append_r;
    uint32_t n = 0;

    while (n < m->status.n && m->status.p[n] % UCM_CHAIN_HAS_SUMMARY != UCM_FOUND_NOT)
        n++;
    if (m->status.n != a->n_keys || m->missing != a->n_keys - n ||
        m->blocks != (uint64_t)a->had + n || m->summaries > n || m->dram + m->nvme + m->shared != n)
        return ucm_error_set(&call->error, UCM_EPROTOCOL,
                             "ucmd's answer to chain.append does not fit the question");
    a->result = (struct ucm_chain_result){
        .blocks = (uint32_t)m->blocks,
        .missing = (uint32_t)m->missing,
        .in_dram = (uint32_t)m->dram,
        .nvme = (uint32_t)m->nvme,
        .shared = (uint32_t)m->shared,
        .summaries = (uint32_t)m->summaries,
        .built = (uint32_t)m->built,
    };
    if (a->status)
        memcpy(a->status, m->status.p, m->status.n);
    return 0;
}

uint64_t client_answer_ms(uint32_t asked_ms, int64_t deadline_ns)
{
    int64_t left_ms = (deadline_ns - client_now_ns()) / 1000000 * 7 / 8;

    if (left_ms < 1)
        left_ms = 1;
    if (asked_ms > 0 && asked_ms < left_ms)
        return asked_ms;
    return left_ms < UCM_DEADLINE_MS ? (uint64_t)left_ms : UCM_DEADLINE_MS;
}

/* One request, on the connection that knows the chain; CLIENT_AGAIN if it is another one by now.
 * a->had and a->status are set. */
static int chain_send_append(struct ucm_chain *chain, const struct ucm_chain_keys *keys,
                             const uint8_t *p, uint32_t n, int64_t deadline_ns,
                             struct append_call *a)
{
    struct ucm_client *c = chain->client;
    struct msg_chain_append m = {.keys = {p, n * (uint32_t)chain->ns->open.key_bytes},
                                 .build = chain->build,
                                 .priority = keys->priority};
    struct client_request q = {.method = UCM_METHOD_CHAIN_APPEND, .params = &m};
    int r;

    client_call_init(&a->call, c, append_take_cb, NULL);
    a->n_keys = n;
    r = client_begin(c, &chain->ns->handle, deadline_ns);
    if (r == 0 && !chain_known(chain)) {
        client_writer_release(c);
        r = CLIENT_AGAIN;
    }
    if (r == 0) {
        m.chain = chain->id;
        m.deadline_ms = client_answer_ms(keys->deadline_ms, deadline_ns);
        r = client_request_wait(&a->call, &q, deadline_ns);
    }
    client_call_close(&a->call);
    if (r == -UCM_ENOTFOUND)
        client_chain_forget(chain);
    else if (r < 0 && r != -UCM_EBUSY && r != -UCM_EINVALID)
        chain_abandon(chain);
    return r;
}

static uint32_t append_piece(const struct ucm_chain *chain, uint32_t left)
{
    return left < chain->client->info.max_keys ? left : chain->client->info.max_keys;
}

/* ---- opening it again ---- */

/* Appends the keys that the library kept. */
static int chain_refill(struct ucm_chain *chain, int64_t deadline_ns)
{
    static const struct ucm_chain_keys quiet;
    size_t key_bytes = chain->ns->open.key_bytes;
    uint32_t had = chain->n_blocks;
    struct append_call a = {0};

    while (a.had < had && a.result.missing == 0) {
        int r = chain_send_append(chain, &quiet, chain->keys + a.had * key_bytes,
                                  append_piece(chain, had - a.had), deadline_ns, &a);

        if (r) {
            chain_abandon(chain);
            return r;
        }
        a.had = a.result.blocks;
    }
    if (a.had == had)
        return 0;
    chain->n_blocks = a.had;
    return client_fail(UCM_EDISCONNECTED,
                       "the connection broke, or no call named the chain for too long, and %u of "
                       "its %u blocks are not cached any more",
                       had - a.had, had);
}

/* The chain is busy. */
static int chain_reopen(struct ucm_chain *chain, int64_t deadline_ns)
{
    int r = 0;

    chain->reopening = true;
    while (r == 0 && !chain_known(chain)) {
        r = chain_send_open(chain, deadline_ns);
        if (r == 0)
            r = chain_refill(chain, deadline_ns);
        if (r == CLIENT_AGAIN)
            r = 0;
    }
    chain->reopening = false;
    return r;
}

int client_chains_begin(struct ucm_chain *const *chains, uint32_t n, struct client_handle *h,
                        int64_t deadline_ns)
{
    struct ucm_client *c = chains[0]->client;

    for (;;) {
        int r = client_begin(c, h ? h : &chains[0]->ns->handle, deadline_ns);
        uint32_t i = 0;

        if (r)
            return r;
        while (i < n && chain_known(chains[i]) && !chains[i]->reopening)
            i++;
        if (i == n)
            return 0;
        client_writer_release(c);
        client_chain_ref(chains[i]);
        r = client_turn(c, &chains[i]->busy, APPENDS, deadline_ns);
        if (r == 0) {
            r = chain_reopen(chains[i], deadline_ns);
            client_turn_end(c, &chains[i]->busy);
        }
        client_chain_unref(chains[i]);
        if (r)
            return r;
    }
}

/* ---- API ---- */

int ucm_chain_open(struct ucm_namespace *ns, uint32_t part, uint32_t lease_ms, int timeout_ms,
                   struct ucm_chain **out)
{
    struct ucm_chain *chain;
    struct ucm_client *c;
    int r;

    if (!ns || !out)
        return client_fail(UCM_EINVALID, "namespace or out is NULL");
    if (!ns->summary)
        return client_fail(UCM_EINVALID, "a chain needs a namespace of ucm_sparse_summary_open");
    if (part >= ns->open.parts)
        return client_fail(UCM_EINVALID, "part is %u of %u", part, (unsigned)ns->open.parts);
    c = ns->handle.client;
    r = client_enter(c);
    if (r)
        return r;
    chain = chain_new(ns, part, lease_ms);
    if (!chain)
        return client_leave(c, client_fail(UCM_ENOMEMORY, "no memory for a chain"));
    r = chain_send_open(chain, client_deadline(c, timeout_ms));
    if (r) {
        client_chain_unref(chain);
        return client_leave(c, r);
    }
    client_door_open(c, &chain->door, &chains_feature);
    *out = chain;
    return client_leave(c, 0);
}

void ucm_chain_close(struct ucm_chain *chain)
{
    struct ucm_client *c;

    if (!chain)
        return;
    c = chain->client;
    if (client_enter(c) != 0)
        return;
    chain_abandon(chain);
    chain->closed = true;
    client_door_close(&chain->door);
    client_chain_unref(chain);
    client_leave(c, 0);
}

static int append_check(const struct ucm_chain *chain, const struct ucm_chain_keys *keys)
{
    if (!keys->keys || keys->n_keys == 0)
        return client_fail(UCM_EINVALID, "no keys to append");
    if (keys->priority > 7)
        return client_fail(UCM_EINVALID, "priority is %u, at most 7", keys->priority);
    if (keys->n_keys > UCM_CHAIN_BLOCKS_MAX - chain->n_blocks)
        return client_fail(UCM_EINVALID,
                           "a chain has at most %d blocks; this one has %u, and %u "
                           "keys are to be appended",
                           UCM_CHAIN_BLOCKS_MAX, chain->n_blocks, keys->n_keys);
    return 0;
}

static int keys_reserve(struct ucm_chain *chain, uint32_t more)
{
    uint32_t room = chain->room ? chain->room : 64;
    uint8_t *keys;

    while (room < chain->n_blocks + more)
        room *= 2;
    if (room == chain->room)
        return 0;
    keys = realloc(chain->keys, (size_t)room * chain->ns->open.key_bytes);
    if (!keys)
        return client_fail(UCM_ENOMEMORY, "no memory for a chain's keys");
    chain->keys = keys;
    chain->room = room;
    return 0;
}

/* Appends one piece and keeps its keys. A chain that the daemon ended is opened again, once. */
static int append_some(struct ucm_chain *chain, const struct ucm_chain_keys *keys, const uint8_t *p,
                       uint32_t n, int64_t deadline_ns, struct append_call *a)
{
    size_t key_bytes = chain->ns->open.key_bytes;
    int r, ended = 0;

    do {
        r = chain_reopen(chain, deadline_ns);
        if (r == 0)
            r = chain_send_append(chain, keys, p, n, deadline_ns, a);
    } while (r == CLIENT_AGAIN || (r == -UCM_ENOTFOUND && ended++ == 0));
    if (r)
        return r;
    memcpy(chain->keys + chain->n_blocks * key_bytes, p,
           (a->result.blocks - chain->n_blocks) * key_bytes);
    chain->n_blocks = a->result.blocks;
    return 0;
}

static void result_add(struct ucm_chain_result *sum, const struct ucm_chain_result *more)
{
    sum->blocks = more->blocks;
    sum->missing = more->missing;
    sum->in_dram += more->in_dram;
    sum->nvme += more->nvme;
    sum->shared += more->shared;
    sum->summaries += more->summaries;
    sum->built += more->built;
}

static int append(struct ucm_chain *chain, const struct ucm_chain_keys *keys, int64_t deadline_ns,
                  struct ucm_chain_result *sum)
{
    size_t key_bytes = chain->ns->open.key_bytes;
    uint32_t at = 0;
    int r = append_check(chain, keys);

    if (r == 0)
        r = keys_reserve(chain, keys->n_keys);
    if (r == 0 && keys->build)
        chain->build = true;
    while (r == 0 && at < keys->n_keys && sum->missing == 0) {
        uint32_t n = append_piece(chain, keys->n_keys - at);
        struct append_call a = {.had = chain->n_blocks,
                                .status = keys->status ? keys->status + at : NULL};

        r = append_some(chain, keys, (const uint8_t *)keys->keys + at * key_bytes, n, deadline_ns,
                        &a);
        if (r)
            break;
        result_add(sum, &a.result);
        at += n;
    }
    if (r)
        return r;
    sum->missing += keys->n_keys - at;
    if (keys->status)
        memset(keys->status + at, UCM_FOUND_NOT, keys->n_keys - at);
    return 0;
}

int ucm_chain_append(struct ucm_chain *chain, const struct ucm_chain_keys *keys, int timeout_ms,
                     struct ucm_chain_result *result)
{
    struct ucm_chain_result sum = {0};
    struct ucm_client *c;
    int64_t deadline_ns;
    int r;

    if (!chain || !keys)
        return client_fail(UCM_EINVALID, "chain or keys is NULL");
    c = chain->client;
    r = client_enter(c);
    if (r)
        return r;
    deadline_ns = client_deadline(c, timeout_ms);
    r = client_turn(c, &chain->busy, APPENDS, deadline_ns);
    if (r == 0) {
        r = append(chain, keys, deadline_ns, &sum);
        client_turn_end(c, &chain->busy);
    }
    if (r == 0 && result)
        *result = sum;
    return client_leave(c, r);
}

uint32_t ucm_chain_blocks(struct ucm_chain *chain)
{
    uint32_t n;

    if (!chain || client_enter(chain->client) != 0)
        return 0;
    n = chain->n_blocks;
    client_leave(chain->client, 0);
    return n;
}

static int index_check(const struct ucm_chain *chain, const uint32_t *index, uint32_t n)
{
    if (!index || n == 0 || n > chain->client->info.max_keys)
        return client_fail(UCM_EINVALID, "a prefetch has 1 to %u blocks, not %u%s",
                           chain->client->info.max_keys, n, index ? "" : " at NULL");
    for (uint32_t i = 0; i < n; i++)
        if (index[i] >= chain->n_blocks)
            return client_fail(UCM_EINVALID, "index %u is block %u of a chain of %u blocks", i,
                               index[i], chain->n_blocks);
    return 0;
}

/* ---- tasks ---- */

struct chain_task {
    struct ucm_chain *chain;
    uint64_t *id; /* the field of the request that receives the chain's id; until it was sent */
};

static int task_begin_cb(void *of, const struct client_request *q, int64_t deadline_ns)
{
    struct chain_task *t = of;
    int r = client_chains_begin(&t->chain, 1, q->handle, deadline_ns);

    if (r == 0)
        *t->id = t->chain->id;
    return r;
}

static void task_done_cb(void *of, int status)
{
    if (status == -UCM_ENOTFOUND)
        client_chain_forget(((struct chain_task *)of)->chain);
}

static void task_free_cb(void *of)
{
    client_chain_unref(((struct chain_task *)of)->chain);
    free(of);
}

int client_chain_task(struct ucm_chain *chain, uint64_t *chain_id, const struct client_request *q,
                      uint32_t n, int64_t deadline_ns, struct ucm_task **out)
{
    static const struct client_task_kind kind = {task_begin_cb, task_done_cb, task_free_cb};
    struct chain_task *t = malloc(sizeof *t);

    if (!t)
        return client_fail(UCM_ENOMEMORY, "no memory for a task");
    *t = (struct chain_task){chain, chain_id};
    client_chain_ref(chain);
    return client_task_run(chain->client, q, n, &kind, t, deadline_ns, out);
}

int ucm_chain_prefetch(struct ucm_chain *chain, const uint32_t *index, uint32_t n,
                       uint32_t priority, uint32_t deadline_ms, int timeout_ms,
                       struct ucm_task **out)
{
    struct msg_chain_prefetch m = {
        .index = {(const uint8_t *)index, n * 4}, .priority = priority, .deadline_ms = deadline_ms};
    struct client_request q = {.method = UCM_METHOD_CHAIN_PREFETCH, .params = &m};
    struct ucm_client *c;
    int r;

    if (!chain || !out)
        return client_fail(UCM_EINVALID, "chain or out is NULL");
    c = chain->client;
    r = client_enter(c);
    if (r)
        return r;
    r = index_check(chain, index, n);
    if (r == 0)
        r = client_chain_task(chain, &m.chain, &q, n, client_deadline(c, timeout_ms), out);
    return client_leave(c, r);
}
