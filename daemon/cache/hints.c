/* Tables of hints: each follows what lookups of its namespace would find.
 *
 *   first use --> FILLING: memory, then blocks, some of both a turn --> LIVE --crowded--> SUPERSEDED by another one, which
 *   was filled beside it
 *
 * A table that gets blocks follows changes already. So a block that the scan has passed, or that came behind it, is there
 * when the scan ends. */
#include "daemon/cache/cache.h"

#include "daemon/base/limit.h"
#include "daemon/base/loan.h"
#include "daemon/base/log.h"
#include "daemon/cache/internal.h"
#include "daemon/hints/table.h"
#include "proto/messages.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <uv.h>

#define MAX_TABLES 1024u

/* About 50 us of a turn of the loop. */
#define SCANNED_PER_TURN 256u
/* Between two tries to get memory for a table. */
#define RETRY_MS 10000u

struct ns_hints {
    struct list link; /* in cache.hints.all */
    struct ns *ns;
    uint32_t uses;
    struct hints *table;   /* what readers get */
    struct hints *filling; /* the same, or what will take its place, or NULL */
    bool reserved;         /* it has all of its memory */
    uint64_t cursor;       /* of its scan */
    uint64_t retry_ms;     /* no memory before */
};

static uint64_t now_ms(void)
{
    return uv_hrtime() / 1000000;
}

/* ---- the end of a table ---- */

/* Smaller ones are freed at once. */
#define THREAD_BYTES (1u << 20)
#define KEPT_BYTES_MIN (64u << 10)

/* Until no worker has it, the table counts as its owner's. Then a thread of libuv's pool gives the memory back; the cache
 * may be gone by then. */
struct ending {
    struct list link; /* in cache.hints.kept */
    struct loan loan;
    struct limit_owner *owner; /* NULL: nobody's */
    uv_work_t work;
    struct hints *table;
    enum ucm_hint_state last;
};

static void ending_run_cb(uv_work_t *work)
{
    struct ending *e = LIST_ENTRY(work, struct ending, work);

    hints_free(e->table, e->last);
}

static void ending_done_cb(uv_work_t *work, int status)
{
    struct ending *e = LIST_ENTRY(work, struct ending, work);

    if (status != 0) /* it did not run, as the daemon stops */
        hints_free(e->table, e->last);
    free(e);
}

/* A small one holds a descriptor all the same. */
static uint64_t kept_bytes(const struct hints *table)
{
    return hints_bytes(table) > KEPT_BYTES_MIN ? hints_bytes(table) : KEPT_BYTES_MIN;
}

static void ending_settle(struct ending *e)
{
    list_remove(&e->link);
    loan_cancel(&e->loan);
    if (e->owner) {
        limit_give(e->owner, LIMIT_KEPT, kept_bytes(e->table));
        limit_give(e->owner, LIMIT_DESCRIPTORS, 1);
        limit_owner_unref(e->owner);
    }
}

static void unlent_cb(struct loan *l)
{
    struct ending *e = LIST_ENTRY(l, struct ending, loan);
    struct cache *c = l->ctx;

    ending_settle(e);
    if (hints_bytes(e->table) > THREAD_BYTES &&
        uv_queue_work(c->config.loop, &e->work, ending_run_cb, ending_done_cb) == 0)
        return;
    hints_free(e->table, e->last);
    free(e);
}

static void kept_cb(struct loan *l)
{
    const struct ending *e = LIST_ENTRY(l, struct ending, loan);

    log_info("hints", "table-kept", "bytes=%llu", (unsigned long long)hints_bytes(e->table));
}

static const struct loan_calls loan_calls = {unlent_cb, kept_cb};

static void table_end(struct cache *c, const struct ns *ns, struct hints *table,
                      enum ucm_hint_state last)
{
    struct ending *e = calloc(1, sizeof(*e));

    if (!e) {
        hints_free(table, last);
        return;
    }
    hints_end(table, last);
    e->table = table;
    e->last = last;
    if (ns->hints_owner) {
        e->owner = limit_owner_ref(ns->hints_owner);
        limit_add(e->owner, LIMIT_KEPT, kept_bytes(table));
        limit_add(e->owner, LIMIT_DESCRIPTORS, 1);
    }
    list_push_back(&c->hints.kept, &e->link);
    loan_end(&e->loan, c->config.deadlines, hints_fd(table), &loan_calls, c);
}

void cache_hints_close(struct cache *c)
{
    while (!list_empty(&c->hints.kept)) {
        struct ending *e = LIST_ENTRY(c->hints.kept.next, struct ending, link);

        ending_settle(e);
        hints_free(e->table, e->last);
        free(e);
    }
}

/* ---- filling ---- */

/* There was no memory: the first table waits for some, and one that should be larger stays as it is. */
static void postpone(struct cache *c, struct ns_hints *h, int rc)
{
    log_warn("hints", "no-memory", "ns=%u error=%s", h->ns->id, strerror(-rc));
    h->retry_ms = now_ms() + RETRY_MS;
    if (!h->filling || h->filling == h->table)
        return;
    table_end(c, h->ns, h->filling, UCM_HINT_ENDED);
    h->filling = NULL;
}

static void grow(struct cache *c, struct ns_hints *h)
{
    int rc;

    if (h->filling || h->retry_ms > now_ms())
        return;
    rc = hints_new(h->ns->identity.key_bytes, h->ns->blocks, now_ms(), &h->filling);
    if (rc < 0) {
        postpone(c, h, rc);
        return;
    }
    h->reserved = false;
    h->cursor = 0;
    cache_wake(c, CHORE_HINTS);
}

static void fill_end(struct cache *c, struct ns_hints *h)
{
    hints_begin(h->filling);
    if (h->filling != h->table) {
        table_end(c, h->ns, h->table, UCM_HINT_SUPERSEDED);
        h->table = h->filling;
    }
    h->filling = NULL;
}

/* False: it waits. */
static bool fill(struct cache *c, struct ns_hints *h)
{
    block_ref refs[SCANNED_PER_TURN];
    uint32_t n;

    if (!h->filling || h->retry_ms > now_ms())
        return false;
    if (!h->reserved) {
        int rc = hints_reserve(h->filling);

        if (rc < 0)
            postpone(c, h, rc);
        h->reserved = rc == 0;
        return rc >= 0;
    }
    h->cursor = index_scan(c->config.index, h->ns, h->cursor, SCANNED_PER_TURN, refs, &n);
    for (uint32_t i = 0; i < n; i++) {
        uint8_t is = cache_status(c, refs[i]);

        if (is != 0)
            hints_set(h->filling, index_block(c->config.index, refs[i])->key, 0, is);
    }
    if (h->cursor == 0)
        fill_end(c, h);
    return h->cursor != 0;
}

bool cache_hints_run(void *ctx)
{
    struct cache *c = ctx;
    bool more = false;

    for (struct list *node = c->hints.all.next; node != &c->hints.all; node = node->next)
        more = fill(c, LIST_ENTRY(node, struct ns_hints, link)) || more;
    return more;
}

/* ---- following ---- */

static void table_changed(struct cache *c, struct ns *ns, block_ref ref, uint8_t was, uint8_t is)
{
    struct ns_hints *h = ns->hints;
    const uint8_t *key = index_block(c->config.index, ref)->key;

    if (h->table != h->filling)
        hints_set(h->table, key, was, is);
    if (h->filling && h->reserved)
        hints_set(h->filling, key, was, is);
    if (h->table != h->filling && hints_crowded(h->table))
        grow(c, h);
}

/* ---- use ---- */

/* A table has one descriptor, and two while it is filled. The others are for connections. */
uint32_t cache_hints_max(void)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur / 4 > MAX_TABLES)
        return MAX_TABLES;
    return (uint32_t)(limit.rlim_cur / 4);
}

int cache_hints_use(struct cache *c, struct ns *ns)
{
    struct ns_hints *h = ns->hints;
    int rc;

    if (h) {
        h->uses++;
        return 0;
    }
    h = calloc(1, sizeof(*h));
    if (!h)
        return -ENOMEM;
    rc = hints_new(ns->identity.key_bytes, ns->blocks, now_ms(), &h->table);
    if (rc < 0) {
        free(h);
        return rc;
    }
    h->ns = ns;
    h->uses = 1;
    h->filling = h->table;
    list_push_back(&c->hints.all, &h->link);
    c->hints.n++;
    c->hints.changed_cb = table_changed;
    ns->hints = h;
    cache_wake(c, CHORE_HINTS);
    return 0;
}

void cache_hints_unuse(struct cache *c, struct ns *ns)
{
    struct ns_hints *h = ns->hints;

    if (--h->uses > 0)
        return;
    ns->hints = NULL;
    list_remove(&h->link);
    c->hints.n--;
    if (h->filling && h->filling != h->table)
        table_end(c, ns, h->filling, UCM_HINT_ENDED);
    table_end(c, ns, h->table, UCM_HINT_ENDED);
    free(h);
}

int cache_hints_table(const struct ns *ns, uint64_t *bytes)
{
    *bytes = hints_bytes(ns->hints->table);
    return hints_fd(ns->hints->table);
}

void cache_hints_beat(struct cache *c)
{
    for (struct list *node = c->hints.all.next; node != &c->hints.all; node = node->next) {
        struct ns_hints *h = LIST_ENTRY(node, struct ns_hints, link);

        hints_beat(h->table, now_ms());
        if (h->filling && h->filling != h->table)
            hints_beat(h->filling, now_ms());
        if (h->filling && h->retry_ms > 0 && h->retry_ms <= now_ms())
            cache_wake(c, CHORE_HINTS); /* it waits for memory */
    }
}

void cache_hints_stats(const struct cache *c, struct cache_hints_stats *out)
{
    *out = (struct cache_hints_stats){.tables = c->hints.n};
    for (const struct list *node = c->hints.all.next; node != &c->hints.all; node = node->next) {
        const struct ns_hints *h = LIST_ENTRY(node, struct ns_hints, link);

        out->bytes += hints_bytes(h->table);
        if (h->filling && h->filling != h->table)
            out->bytes += hints_bytes(h->filling);
        out->left_out += hints_left_out(h->table);
    }
    for (const struct list *node = c->hints.kept.next; node != &c->hints.kept; node = node->next)
        out->bytes += hints_bytes(LIST_ENTRY(node, struct ending, link)->table);
}
