#include "client/lib/sparse/internal.h"
#include "client/lib/sparse/prefetch_queue.h"

#include <stdlib.h>
#include <string.h>

#define PENDING_MAX 64
#define AHEAD_DEFAULT 2
#define CACHE_DEFAULT (UINT64_C(1) << 30)
#define DEADLINE_DEFAULT_MS 10000

struct ucm_prefetcher {
    struct ucm_client *client;
    struct client_door door;
    struct prefetch_queue queue;
    TAILQ_HEAD(prefetch_list, ucm_prefetch) all; /* that the user has not freed */
    struct ucm_prefetcher_stats stats;
};

/* The call is linked while the prefetch is SENT, and done when it has ended. */
struct ucm_prefetch {
    struct client_call call;
    struct prefetch_item item;
    struct ucm_prefetcher *prefetcher; /* NULL: freed by the user, a thread still sends it */
    struct ucm_chain *chain;           /* referenced */
    unsigned refs;                     /* of the user, of the thread that sends it */
    TAILQ_ENTRY(ucm_prefetch) node;
    uint64_t bytes; /* read */
    uint32_t came, n;
    uint8_t *result; /* n, behind index */
    uint32_t index[];
};

static struct ucm_prefetch *prefetch_of(struct prefetch_item *item)
{
    return (struct ucm_prefetch *)((char *)item - offsetof(struct ucm_prefetch, item));
}

enum ucm_prefetch_priority ucm_prefetch_priority(uint32_t place)
{
    if (place == 0)
        return UCM_PREFETCH_URGENT;
    if (place <= 4)
        return UCM_PREFETCH_HIGH;
    return place <= 16 ? UCM_PREFETCH_NORMAL : UCM_PREFETCH_LOW;
}

/* ---- one prefetch ---- */

static void prefetch_unref(struct ucm_prefetch *p)
{
    if (--p->refs > 0)
        return;
    client_call_unlink(&p->call);
    client_call_close(&p->call);
    client_chain_unref(p->chain);
    free(p);
}

static int prefetch_take_cb(struct client_call *call, const union proto_any *any)
{
    struct ucm_prefetch *p = (struct ucm_prefetch *)call;
    const struct msg_blocks_r *m = &any->blocks_r;

    if (m->status.n != p->n)
        return ucm_error_set(&call->error, UCM_EPROTOCOL, "ucmd answered for %u blocks of %u",
                             m->status.n, p->n);
    memcpy(p->result, m->status.p, p->n);
    for (uint32_t i = 0; i < p->n; i++)
        p->came += p->result[i] == UCM_BLOCK_IS_OK || p->result[i] == UCM_BLOCK_IS_EXISTS;
    p->bytes = m->bytes;
    return 0;
}

static void prefetch_done_cb(struct client_call *call)
{
    struct ucm_prefetch *p = (struct ucm_prefetch *)call;
    struct ucm_prefetcher_stats *stats;

    if (call->status == -UCM_ENOTFOUND)
        client_chain_forget(p->chain);
    if (!p->prefetcher)
        return;
    prefetch_queue_end(&p->prefetcher->queue, &p->item);
    stats = &p->prefetcher->stats;
    stats->ended++;
    stats->came += p->came;
    stats->missing += p->n - p->came;
    stats->bytes += p->bytes;
    call->client->tasks_done++;
    client_signal(call->client);
}

/* Ends one that has not left: nothing came, which is no error. */
static void prefetch_leave_out(struct ucm_prefetch *p)
{
    client_call_finish(&p->call, 0, NULL);
}

static struct ucm_prefetch *prefetch_new(struct ucm_prefetcher *f,
                                         const struct ucm_prefetch_blocks *b)
{
    struct ucm_prefetch *p = calloc(1, sizeof *p + b->n * (sizeof *p->index + 1));

    if (!p)
        return NULL;
    client_call_init(&p->call, f->client, prefetch_take_cb, prefetch_done_cb);
    p->refs = 1;
    p->prefetcher = f;
    p->chain = b->chain;
    client_chain_ref(p->chain);
    p->n = b->n;
    memcpy(p->index, b->index, b->n * sizeof *p->index);
    p->result = (uint8_t *)(p->index + b->n);
    memset(p->result, UCM_BLOCK_IS_CANCELLED, b->n);
    return p;
}

/* On the wire more is more urgent. */
static uint64_t wire_priority(const struct ucm_prefetch *p)
{
    return PREFETCH_PRIORITIES - 1 - (unsigned)p->item.priority;
}

/* It may have ended, or its chain may have been closed, while the lock was dropped. */
static bool still_wanted(const struct ucm_prefetch *p)
{
    return p->item.state == PREFETCH_SENT && !p->chain->closed;
}

/* 0 also if nobody wants it any more. */
static int prefetch_send(struct ucm_prefetch *p, int64_t deadline_ns)
{
    struct msg_chain_prefetch m = {
        .index = {(const uint8_t *)p->index, p->n * (uint32_t)sizeof *p->index},
        .priority = wire_priority(p)};
    struct client_request q = {.method = UCM_METHOD_CHAIN_PREFETCH, .params = &m};
    int r = CLIENT_AGAIN;

    while (r == CLIENT_AGAIN && still_wanted(p)) {
        r = client_chains_begin(&p->chain, 1, NULL, deadline_ns);
        if (r == 0 && !still_wanted(p)) {
            client_writer_release(p->chain->client);
        } else if (r == 0) {
            int64_t left_ms = (p->item.deadline_ns - client_now_ns()) / 1000000;

            m.chain = p->chain->id;
            m.deadline_ms = left_ms < 1 ? 1 : (uint64_t)left_ms;
            r = client_request(&p->call, &q, deadline_ns);
        }
    }
    return r < 0 ? r : 0;
}

/* ---- the queue ---- */

/* Sends one that prefetch_queue_next returned. False: no more can be sent now. */
static bool send_one(struct ucm_prefetcher *f, struct ucm_prefetch *p, int64_t deadline_ns)
{
    bool more = true;
    int r;

    p->refs++;
    r = prefetch_send(p, deadline_ns);
    if (p->item.state == PREFETCH_SENT && !p->call.linked && !p->call.done) {
        if (r == -UCM_EDEADLINE) {
            prefetch_queue_unsend(&f->queue, &p->item);
            more = false;
        } else if (r) {
            client_call_finish(&p->call, r, ucm_errmsg());
        } else {
            prefetch_leave_out(p);
        }
    }
    prefetch_unref(p);
    return more;
}

/* Ends what came too late, and sends what may be sent. Drops the lock meanwhile. */
static void pump(struct ucm_prefetcher *f, int64_t deadline_ns)
{
    struct prefetch_item *item;

    while ((item = prefetch_queue_expire(&f->queue, client_now_ns())) != NULL) {
        f->stats.late++;
        prefetch_leave_out(prefetch_of(item));
    }
    while (client_link_live(f->client) && (item = prefetch_queue_next(&f->queue)) != NULL)
        if (!send_one(f, prefetch_of(item), deadline_ns))
            return;
}

/* The user's reference ends. */
static void prefetch_drop(struct ucm_prefetch *p, uint32_t used)
{
    struct ucm_prefetcher *f = p->prefetcher;

    if (p->call.linked)
        client_followup(f->client, UCM_METHOD_CANCEL, p->call.msgid);
    if (!p->call.done) {
        f->stats.ended++;
        f->stats.missing += p->n;
    }
    if (used > p->came)
        used = p->came;
    f->stats.useful += used;
    f->stats.useless += p->came - used;
    client_call_unlink(&p->call);
    prefetch_queue_remove(&f->queue, &p->item);
    TAILQ_REMOVE(&f->all, p, node);
    p->prefetcher = NULL;
    prefetch_unref(p);
}

static void prefetcher_delete(struct ucm_prefetcher *f)
{
    struct ucm_prefetch *p;

    while ((p = TAILQ_FIRST(&f->all)) != NULL)
        prefetch_drop(p, 0);
    client_door_close(&f->door);
    free(f);
}

/* ---- what becomes of it with the client ---- */

static struct ucm_prefetcher *prefetcher_of(struct client_door *d)
{
    return (struct ucm_prefetcher *)((char *)d - offsetof(struct ucm_prefetcher, door));
}

/* All that wait end. */
static void prefetcher_down_cb(struct client_door *d)
{
    struct ucm_prefetcher *f = prefetcher_of(d);
    struct ucm_prefetch *p;

    TAILQ_FOREACH(p, &f->all, node)
        if (!p->call.done)
            client_call_finish(&p->call, f->client->why, f->client->why_text);
}

static void prefetcher_closed_cb(struct client_door *d)
{
    prefetcher_delete(prefetcher_of(d));
}

static const struct client_feature prefetchers = {.down_cb = prefetcher_down_cb,
                                                  .closed_cb = prefetcher_closed_cb};

/* ---- API ---- */

int ucm_prefetcher_open(struct ucm_client *c, const struct ucm_prefetcher_options *options,
                        struct ucm_prefetcher **out)
{
    struct ucm_prefetcher_options o = {0};
    struct ucm_prefetcher *f;
    int r;

    if (!c || !out)
        return client_fail(UCM_EINVALID, "client or out is NULL");
    if (options)
        o = *options;
    if (o.max_pending_prefetch > PENDING_MAX)
        return client_fail(UCM_EINVALID, "max_pending_prefetch is %u, at most %d",
                           o.max_pending_prefetch, PENDING_MAX);
    r = client_enter(c);
    if (r)
        return r;
    f = calloc(1, sizeof *f);
    if (!f)
        return client_leave(c, client_fail(UCM_ENOMEMORY, "no memory for a prefetcher"));
    f->client = c;
    TAILQ_INIT(&f->all);
    prefetch_queue_init(&f->queue, o.max_pending_prefetch ? o.max_pending_prefetch : PENDING_MAX,
                        o.prefetch_cache_size ? o.prefetch_cache_size : CACHE_DEFAULT,
                        o.prefetch_ahead ? o.prefetch_ahead : AHEAD_DEFAULT);
    client_door_open(c, &f->door, &prefetchers);
    *out = f;
    return client_leave(c, 0);
}

void ucm_prefetcher_close(struct ucm_prefetcher *f)
{
    struct ucm_client *c;

    if (!f)
        return;
    c = f->client;
    if (client_enter(c) != 0)
        return;
    prefetcher_delete(f);
    client_leave(c, 0);
}

/* Of one block, in the base. */
static uint64_t block_bytes(const struct ucm_chain *chain)
{
    const struct ucm_namespace *base =
        (const struct ucm_namespace *)chain->ns->handle.request.handle;
    const struct proto_u32s *shards = &base->open.shards;

    return base->open.shard_bytes * shards->p[shards->n > 1 ? chain->part : 0];
}

static int submit_check(const struct ucm_prefetcher *f, const struct ucm_prefetch_blocks *b)
{
    uint64_t bytes;
    int r = client_chain_index_check(b->chain, b->index, b->n);

    if (r)
        return r;
    bytes = b->n * block_bytes(b->chain);
    if (bytes > f->queue.bytes_max)
        return client_fail(UCM_EINVALID, "%u blocks have %llu bytes; prefetch_cache_size is %llu",
                           b->n, (unsigned long long)bytes, (unsigned long long)f->queue.bytes_max);
    if (b->deadline_ms > UCM_DEADLINE_MS)
        return client_fail(UCM_EINVALID, "deadline_ms is %u, at most %u", b->deadline_ms,
                           (unsigned)UCM_DEADLINE_MS);
    return 0;
}

/* Into the queue. The link is up. */
static int enqueue(struct ucm_prefetcher *f, const struct ucm_prefetch_blocks *b,
                   struct ucm_prefetch **out)
{
    uint32_t ms = b->deadline_ms ? b->deadline_ms : DEADLINE_DEFAULT_MS;
    enum ucm_prefetch_priority priority = ucm_prefetch_priority(b->place);
    struct prefetch_item *displaced = NULL;
    struct ucm_prefetch *p = prefetch_new(f, b);
    int r;

    if (!p)
        return client_fail(UCM_ENOMEMORY, "no memory for a prefetch");
    r = prefetch_queue_make_room(&f->queue, priority, &displaced);
    if (r < 0) {
        prefetch_unref(p);
        return client_fail(-r, "%u prefetches have not ended, and none that waits is less urgent",
                           f->queue.n_pending);
    }
    if (displaced) {
        f->stats.displaced++;
        prefetch_leave_out(prefetch_of(displaced));
    }
    p->item.priority = priority;
    p->item.batch = b->batch;
    p->item.bytes = b->n * block_bytes(b->chain);
    p->item.deadline_ns = client_now_ns() + (int64_t)ms * 1000000;
    prefetch_queue_add(&f->queue, &p->item);
    TAILQ_INSERT_TAIL(&f->all, p, node);
    f->stats.submitted++;
    *out = p;
    return 0;
}

static int submit(struct ucm_prefetcher *f, const struct ucm_prefetch_blocks *b,
                  int64_t deadline_ns, struct ucm_prefetch **out)
{
    struct ucm_prefetch *p = NULL;
    int r = submit_check(f, b);

    if (r)
        return r;
    /* What waits relies on a link: it ends when that breaks. */
    r = client_chains_begin(&b->chain, 1, NULL, deadline_ns);
    if (r)
        return r;
    client_writer_release(f->client);
    r = enqueue(f, b, &p);
    if (r)
        return r;
    pump(f, deadline_ns);
    if (p->call.done && p->call.status) {
        r = client_call_status(&p->call);
        prefetch_drop(p, 0);
        return r;
    }
    *out = p;
    return 0;
}

int ucm_prefetcher_submit(struct ucm_prefetcher *f, const struct ucm_prefetch_blocks *blocks,
                          int timeout_ms, struct ucm_prefetch **out)
{
    struct ucm_client *c;
    int r;

    if (!f || !blocks || !blocks->chain || !out)
        return client_fail(UCM_EINVALID, "prefetcher, blocks, chain or out is NULL");
    c = f->client;
    if (blocks->chain->client != c)
        return client_fail(UCM_EINVALID, "the chain is of another client than the prefetcher");
    r = client_enter(c);
    if (r)
        return r;
    do
        r = submit(f, blocks, client_deadline(c, timeout_ms), out);
    while (r == CLIENT_AGAIN);
    return client_leave(c, r);
}

int ucm_prefetcher_advance(struct ucm_prefetcher *f, uint64_t batch)
{
    struct ucm_client *c;
    int r;

    if (!f)
        return client_fail(UCM_EINVALID, "prefetcher is NULL");
    c = f->client;
    r = client_enter(c);
    if (r)
        return r;
    if (batch < f->queue.batch)
        return client_leave(c, client_fail(UCM_EINVALID, "batch %llu runs already",
                                           (unsigned long long)f->queue.batch));
    f->queue.batch = batch;
    client_read_ready(c);
    pump(f, 0);
    return client_leave(c, 0);
}

static int prefetch_report(const struct ucm_prefetch *p, struct ucm_prefetched *out)
{
    if (p->call.status)
        return client_call_status(&p->call);
    *out = (struct ucm_prefetched){p->n, p->came, p->n - p->came, p->bytes, p->result};
    return 0;
}

int ucm_prefetch_check(struct ucm_prefetch *p, struct ucm_prefetched *out)
{
    struct ucm_client *c;
    int r;

    if (!p || !out)
        return client_fail(UCM_EINVALID, "prefetch or out is NULL");
    c = p->call.client;
    r = client_enter(c);
    if (r)
        return r;
    if (!p->call.done)
        client_read_ready(c);
    if (!p->call.done)
        pump(p->prefetcher, 0);
    if (!p->call.done)
        return client_leave(c, client_fail(UCM_EPENDING, "the prefetch has not ended"));
    return client_leave(c, prefetch_report(p, out));
}

int ucm_prefetch_wait(struct ucm_prefetch *p, int timeout_ms, struct ucm_prefetched *out)
{
    struct ucm_client *c;
    int64_t deadline_ns;
    int r;

    if (!p || !out)
        return client_fail(UCM_EINVALID, "prefetch or out is NULL");
    c = p->call.client;
    r = client_enter(c);
    if (r)
        return r;
    deadline_ns = client_deadline(c, timeout_ms);
    for (;;) {
        int64_t until = deadline_ns;

        pump(p->prefetcher, deadline_ns);
        if (p->call.done)
            return client_leave(c, prefetch_report(p, out));
        if (p->item.state == PREFETCH_WAITING && p->item.deadline_ns < until)
            until = p->item.deadline_ns;
        if (client_call_wait(&p->call, until) != 0 && until == deadline_ns)
            return client_leave(c, client_fail(UCM_EDEADLINE, "the prefetch did not end in time"));
    }
}

int ucm_prefetch_move(struct ucm_prefetch *p, uint32_t place)
{
    struct ucm_client *c;
    int r;

    if (!p)
        return client_fail(UCM_EINVALID, "prefetch is NULL");
    c = p->call.client;
    r = client_enter(c);
    if (r)
        return r;
    prefetch_queue_move(&p->prefetcher->queue, &p->item, ucm_prefetch_priority(place));
    pump(p->prefetcher, 0);
    return client_leave(c, 0);
}

int ucm_prefetch_cancel(struct ucm_prefetch *p, int timeout_ms)
{
    struct ucm_client *c;
    int r;

    if (!p)
        return client_fail(UCM_EINVALID, "prefetch is NULL");
    c = p->call.client;
    r = client_enter(c);
    if (r)
        return r;
    if (!p->call.done && !p->call.linked)
        prefetch_leave_out(p);
    else
        r = client_call_cancel(&p->call, client_deadline(c, timeout_ms));
    return client_leave(c, r);
}

void ucm_prefetch_free(struct ucm_prefetch *p, uint32_t used)
{
    struct ucm_prefetcher *f;
    struct ucm_client *c;

    if (!p)
        return;
    c = p->call.client;
    if (client_enter(c) != 0)
        return;
    f = p->prefetcher;
    prefetch_drop(p, used);
    pump(f, 0);
    client_leave(c, 0);
}

int ucm_prefetcher_stats(struct ucm_prefetcher *f, struct ucm_prefetcher_stats *out)
{
    struct ucm_client *c;
    int r;

    if (!f || !out)
        return client_fail(UCM_EINVALID, "prefetcher or out is NULL");
    c = f->client;
    r = client_enter(c);
    if (r)
        return r;
    *out = f->stats;
    out->pending = f->queue.n_pending;
    out->held_bytes = f->queue.bytes_used;
    return client_leave(c, 0);
}
