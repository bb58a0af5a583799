#include "client/lib/sparse/internal.h"

#include <stdlib.h>
#include <string.h>

#define APPENDS "appends to the sequence" /* as a message says it */

/* ---- the object ---- */

void client_sequence_ref(struct ucm_sequence *sequence)
{
    sequence->refs++;
}

void client_sequence_unref(struct ucm_sequence *sequence)
{
    if (--sequence->refs > 0)
        return;
    client_handle_unref(&sequence->ns->handle);
    free(sequence->keys);
    free(sequence);
}

static struct ucm_sequence *sequence_new(struct ucm_namespace *ns, uint32_t part, uint32_t lease_ms)
{
    struct ucm_sequence *sequence = calloc(1, sizeof *sequence);

    if (!sequence)
        return NULL;
    sequence->client = ns->handle.client;
    sequence->ns = ns;
    client_handle_ref(&ns->handle);
    sequence->refs = 1;
    sequence->part = part;
    sequence->lease_ms = lease_ms;
    return sequence;
}

static bool sequence_known(const struct ucm_sequence *sequence)
{
    return sequence->attempts != 0 && sequence->attempts == sequence->client->attempts;
}

void client_sequence_forget(struct ucm_sequence *sequence)
{
    sequence->attempts = 0;
}

/* It is unknown what the daemon appended. So that sequence ends, and the next call opens another
 * one. */
static void sequence_abandon(struct ucm_sequence *sequence)
{
    if (sequence_known(sequence) && client_link_live(sequence->client))
        client_followup(sequence->client, UCM_METHOD_SEQUENCE_CLOSE, sequence->id);
    client_sequence_forget(sequence);
}

static void sequence_closed_cb(struct client_hook *hook)
{
    client_hook_close(hook);
    client_sequence_unref(
        (struct ucm_sequence *)((char *)hook - offsetof(struct ucm_sequence, hook)));
}

static const struct client_feature sequences_feature = {.closed_cb = sequence_closed_cb};

/* ---- its requests ---- */

struct open_call {
    struct client_call call;
    struct ucm_sequence *sequence;
};

static int open_take_cb(struct client_call *call, const union proto_any *any)
{
    struct ucm_sequence *sequence = ((struct open_call *)call)->sequence;

    sequence->id = (uint32_t)any->sequence.sequence;
    sequence->attempts = call->client->attempts;
    return 0;
}

static int sequence_send_open(struct ucm_sequence *sequence, int64_t deadline_ns)
{
    struct msg_sequence_open m = {.part = sequence->part, .lease_ms = sequence->lease_ms};
    struct client_request q = {UCM_METHOD_SEQUENCE_OPEN, &m, &sequence->ns->handle,
                               .handle_id = &m.ns};
    struct open_call open = {.sequence = sequence};

    return client_exchange(&open.call, sequence->client, open_take_cb, &q, deadline_ns);
}

struct append_call {
    struct client_call call;
    uint32_t had; /* blocks of the sequence before */
    uint32_t n_keys;
    uint8_t *status; /* n_keys, or NULL */
    struct ucm_sequence_result result;
};

static int append_take_cb(struct client_call *call, const union proto_any *any)
{
    struct append_call *a = (struct append_call *)call;
    const struct msg_sequence_append_r *m = &any->sequence_append_r;
    uint32_t n = 0;

    while (n < m->status.n && m->status.p[n] % UCM_SEQUENCE_HAS_SUMMARY != UCM_FOUND_NOT)
        n++;
    if (m->status.n != a->n_keys || m->missing != a->n_keys - n ||
        m->blocks != (uint64_t)a->had + n || m->summaries > n || m->dram + m->nvme + m->shared != n)
        return ucm_error_set(&call->error, UCM_EPROTOCOL,
                             "ucmd's answer to sequence.append does not fit the question");
    a->result = (struct ucm_sequence_result){
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
    return left_ms < UCM_TIMEOUT_MS ? (uint64_t)left_ms : UCM_TIMEOUT_MS;
}

/* One request, on the connection that knows the sequence; CLIENT_AGAIN if it is another one by now.
 * a->had and a->status are set. */
static int sequence_send_append(struct ucm_sequence *sequence, const struct ucm_sequence_keys *keys,
                                const uint8_t *p, uint32_t n, int64_t deadline_ns,
                                struct append_call *a)
{
    struct ucm_client *c = sequence->client;
    struct msg_sequence_append m = {.keys = {p, n * (uint32_t)sequence->ns->open.key_bytes},
                                    .build = sequence->build,
                                    .priority = keys->priority};
    struct client_request q = {.method = UCM_METHOD_SEQUENCE_APPEND, .params = &m};
    int r;

    client_call_init(&a->call, c, append_take_cb, NULL);
    a->n_keys = n;
    r = client_begin(c, &sequence->ns->handle, deadline_ns);
    if (r == 0 && !sequence_known(sequence)) {
        client_writer_release(c);
        r = CLIENT_AGAIN;
    }
    if (r == 0) {
        m.sequence = sequence->id;
        m.timeout_ms = client_answer_ms(keys->daemon_timeout_ms, deadline_ns);
        r = client_request_wait(&a->call, &q, deadline_ns);
    }
    client_call_close(&a->call);
    if (r == -UCM_ENOTFOUND)
        client_sequence_forget(sequence);
    else if (r < 0 && r != -UCM_EBUSY && r != -UCM_EINVALID)
        sequence_abandon(sequence);
    return r;
}

static uint32_t append_piece(const struct ucm_sequence *sequence, uint32_t left)
{
    return left < sequence->client->info.max_keys ? left : sequence->client->info.max_keys;
}

/* ---- opening it again ---- */

/* Appends the keys that the library kept. */
static int sequence_refill(struct ucm_sequence *sequence, int64_t deadline_ns)
{
    static const struct ucm_sequence_keys quiet;
    size_t key_bytes = sequence->ns->open.key_bytes;
    uint32_t had = sequence->n_blocks;
    struct append_call a = {0};

    while (a.had < had && a.result.missing == 0) {
        int r = sequence_send_append(sequence, &quiet, sequence->keys + a.had * key_bytes,
                                     append_piece(sequence, had - a.had), deadline_ns, &a);

        if (r) {
            sequence_abandon(sequence);
            return r;
        }
        a.had = a.result.blocks;
    }
    if (a.had == had)
        return 0;
    sequence->n_blocks = a.had;
    return client_fail(
        UCM_EDISCONNECTED,
        "the connection broke, or no call named the sequence for too long, and %u of "
        "its %u blocks are not cached any more",
        had - a.had, had);
}

/* The sequence is busy. */
static int sequence_reopen(struct ucm_sequence *sequence, int64_t deadline_ns)
{
    int r = 0;

    sequence->reopening = true;
    while (r == 0 && !sequence_known(sequence)) {
        r = sequence_send_open(sequence, deadline_ns);
        if (r == 0)
            r = sequence_refill(sequence, deadline_ns);
        if (r == CLIENT_AGAIN)
            r = 0;
    }
    sequence->reopening = false;
    return r;
}

int client_sequences_begin(struct ucm_sequence *const *sequences, uint32_t n,
                           struct client_handle *h, int64_t deadline_ns)
{
    struct ucm_client *c = sequences[0]->client;

    for (;;) {
        int r = client_begin(c, h ? h : &sequences[0]->ns->handle, deadline_ns);
        uint32_t i = 0;

        if (r)
            return r;
        while (i < n && sequence_known(sequences[i]) && !sequences[i]->reopening)
            i++;
        if (i == n)
            return 0;
        client_writer_release(c);
        client_sequence_ref(sequences[i]);
        r = client_turn(c, &sequences[i]->busy, APPENDS, deadline_ns);
        if (r == 0) {
            r = sequence_reopen(sequences[i], deadline_ns);
            client_turn_end(c, &sequences[i]->busy);
        }
        client_sequence_unref(sequences[i]);
        if (r)
            return r;
    }
}

/* ---- API ---- */

int ucm_sequence_open(struct ucm_namespace *ns, uint32_t part, uint32_t lease_ms, int timeout_ms,
                      struct ucm_sequence **out)
{
    struct ucm_sequence *sequence;
    struct ucm_client *c;
    int r;

    if (!ns || !out)
        return client_fail(UCM_EINVALID, "namespace or out is NULL");
    if (!ns->summary)
        return client_fail(UCM_EINVALID, "a sequence needs a namespace of ucm_sparse_summary_open");
    if (part >= ns->open.parts)
        return client_fail(UCM_EINVALID, "part is %u of %u", part, (unsigned)ns->open.parts);
    c = ns->handle.client;
    r = client_enter(c);
    if (r)
        return r;
    sequence = sequence_new(ns, part, lease_ms);
    if (!sequence)
        return client_leave(c, client_fail(UCM_ENOMEMORY, "no memory for a sequence"));
    r = sequence_send_open(sequence, client_deadline(c, timeout_ms));
    if (r) {
        client_sequence_unref(sequence);
        return client_leave(c, r);
    }
    client_hook_open(c, &sequence->hook, &sequences_feature);
    *out = sequence;
    return client_leave(c, 0);
}

void ucm_sequence_close(struct ucm_sequence *sequence)
{
    struct ucm_client *c = sequence ? sequence->client : NULL;

    if (!c || client_enter(c) != 0)
        return;
    sequence_abandon(sequence);
    sequence->closed = true;
    client_hook_close(&sequence->hook);
    client_sequence_unref(sequence);
    client_leave(c, 0);
}

static int append_check(const struct ucm_sequence *sequence, const struct ucm_sequence_keys *keys)
{
    if (!keys->keys || keys->n_keys == 0)
        return client_fail(UCM_EINVALID, "no keys to append");
    if (keys->priority > 7)
        return client_fail(UCM_EINVALID, "priority is %u, at most 7", keys->priority);
    if (keys->n_keys > UCM_SEQUENCE_BLOCKS_MAX - sequence->n_blocks)
        return client_fail(UCM_EINVALID,
                           "a sequence has at most %d blocks; this one has %u, and %u "
                           "keys are to be appended",
                           UCM_SEQUENCE_BLOCKS_MAX, sequence->n_blocks, keys->n_keys);
    return 0;
}

static int keys_reserve(struct ucm_sequence *sequence, uint32_t more)
{
    uint32_t room = sequence->room ? sequence->room : 64;
    uint8_t *keys;

    while (room < sequence->n_blocks + more)
        room *= 2;
    if (room == sequence->room)
        return 0;
    keys = realloc(sequence->keys, (size_t)room * sequence->ns->open.key_bytes);
    if (!keys)
        return client_fail(UCM_ENOMEMORY, "no memory for a sequence's keys");
    sequence->keys = keys;
    sequence->room = room;
    return 0;
}

/* Appends one piece and keeps its keys. A sequence that the daemon ended is opened again, once. */
static int append_some(struct ucm_sequence *sequence, const struct ucm_sequence_keys *keys,
                       const uint8_t *p, uint32_t n, int64_t deadline_ns, struct append_call *a)
{
    size_t key_bytes = sequence->ns->open.key_bytes;
    int r, ended = 0;

    do {
        r = sequence_reopen(sequence, deadline_ns);
        if (r == 0)
            r = sequence_send_append(sequence, keys, p, n, deadline_ns, a);
    } while (r == CLIENT_AGAIN || (r == -UCM_ENOTFOUND && ended++ == 0));
    if (r)
        return r;
    memcpy(sequence->keys + sequence->n_blocks * key_bytes, p,
           (a->result.blocks - sequence->n_blocks) * key_bytes);
    sequence->n_blocks = a->result.blocks;
    return 0;
}

static void result_add(struct ucm_sequence_result *sum, const struct ucm_sequence_result *more)
{
    sum->blocks = more->blocks;
    sum->missing = more->missing;
    sum->in_dram += more->in_dram;
    sum->nvme += more->nvme;
    sum->shared += more->shared;
    sum->summaries += more->summaries;
    sum->built += more->built;
}

static int append(struct ucm_sequence *sequence, const struct ucm_sequence_keys *keys,
                  int64_t deadline_ns, struct ucm_sequence_result *sum)
{
    size_t key_bytes = sequence->ns->open.key_bytes;
    uint32_t at = 0;
    int r = append_check(sequence, keys);

    if (r == 0)
        r = keys_reserve(sequence, keys->n_keys);
    if (r == 0 && keys->build)
        sequence->build = true;
    while (r == 0 && at < keys->n_keys && sum->missing == 0) {
        uint32_t n = append_piece(sequence, keys->n_keys - at);
        struct append_call a = {.had = sequence->n_blocks,
                                .status = keys->status ? keys->status + at : NULL};

        r = append_some(sequence, keys, (const uint8_t *)keys->keys + at * key_bytes, n,
                        deadline_ns, &a);
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

int ucm_sequence_append(struct ucm_sequence *sequence, const struct ucm_sequence_keys *keys,
                        int timeout_ms, struct ucm_sequence_result *result)
{
    struct ucm_sequence_result sum = {0};
    struct ucm_client *c = sequence && keys ? sequence->client : NULL;
    int64_t deadline_ns;
    int r = client_enter_given(c, "sequence or keys");

    if (r)
        return r;
    deadline_ns = client_deadline(c, timeout_ms);
    r = client_turn(c, &sequence->busy, APPENDS, deadline_ns);
    if (r == 0) {
        r = append(sequence, keys, deadline_ns, &sum);
        client_turn_end(c, &sequence->busy);
    }
    if (r == 0 && result)
        *result = sum;
    return client_leave(c, r);
}

uint32_t ucm_sequence_blocks(struct ucm_sequence *sequence)
{
    uint32_t n;

    if (!sequence || client_enter(sequence->client) != 0)
        return 0;
    n = sequence->n_blocks;
    client_leave(sequence->client, 0);
    return n;
}

static int index_check(const struct ucm_sequence *sequence, const uint32_t *index, uint32_t n)
{
    if (!index || n == 0 || n > sequence->client->info.max_keys)
        return client_fail(UCM_EINVALID, "a prefetch has 1 to %u blocks, not %u%s",
                           sequence->client->info.max_keys, n, index ? "" : " at NULL");
    for (uint32_t i = 0; i < n; i++)
        if (index[i] >= sequence->n_blocks)
            return client_fail(UCM_EINVALID, "index %u is block %u of a sequence of %u blocks", i,
                               index[i], sequence->n_blocks);
    return 0;
}

/* ---- tasks ---- */

struct sequence_task {
    struct ucm_sequence *sequence;
    uint64_t *id; /* the field of the request that receives the sequence's id; until it was sent */
};

static int task_begin_cb(void *of, const struct client_request *q, int64_t deadline_ns)
{
    struct sequence_task *t = of;
    int r = client_sequences_begin(&t->sequence, 1, q->handle, deadline_ns);

    if (r == 0)
        *t->id = t->sequence->id;
    return r;
}

static void task_done_cb(void *of, int status)
{
    if (status == -UCM_ENOTFOUND)
        client_sequence_forget(((struct sequence_task *)of)->sequence);
}

static void task_free_cb(void *of)
{
    client_sequence_unref(((struct sequence_task *)of)->sequence);
    free(of);
}

int client_sequence_task(struct ucm_sequence *sequence, uint64_t *sequence_id,
                         const struct client_request *q, uint32_t n, int64_t deadline_ns,
                         struct ucm_task **out)
{
    static const struct client_task_kind kind = {task_begin_cb, task_done_cb, task_free_cb};
    struct sequence_task *t = malloc(sizeof *t);

    if (!t)
        return client_fail(UCM_ENOMEMORY, "no memory for a task");
    *t = (struct sequence_task){sequence, sequence_id};
    client_sequence_ref(sequence);
    return client_task_run(sequence->client, q, n, &kind, t, deadline_ns, out);
}

int ucm_sequence_prefetch(struct ucm_sequence *sequence, const uint32_t *index, uint32_t n,
                          uint32_t priority, uint32_t daemon_timeout_ms, int timeout_ms,
                          struct ucm_task **out)
{
    struct msg_sequence_prefetch m = {.index = {(const uint8_t *)index, n * 4},
                                      .priority = priority,
                                      .timeout_ms = daemon_timeout_ms};
    struct client_request q = {.method = UCM_METHOD_SEQUENCE_PREFETCH, .params = &m};
    struct ucm_client *c = sequence && out ? sequence->client : NULL;
    int r = client_enter_given(c, "sequence or out");

    if (r)
        return r;
    r = index_check(sequence, index, n);
    if (r == 0)
        r = client_sequence_task(sequence, &m.sequence, &q, n, client_deadline(c, timeout_ms), out);
    return client_leave(c, r);
}
