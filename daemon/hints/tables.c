/* Tables of hints: each follows what lookups of its namespace would find.
 *
 *   first use --> FILLING: memory, then blocks, some of both an iteration --> LIVE --crowded-->
 *   SUPERSEDED by another one, which was filled beside it
 *
 * A table that gets blocks follows changes already. So a block that the scan has passed, or that
 * came behind it, is there when the scan ends. */
#include "daemon/hints/tables.h"

#include "daemon/base/chore.h"
#include "daemon/base/log.h"
#include "daemon/hints/table.h"
#include "daemon/window/loan.h"
#include "proto/messages.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <uv.h>

#define MAX_TABLES 1024u

/* About 50 us of an iteration of the event loop. */
#define SCANNED_PER_TURN 256u
/* Between two tries to get memory for a table. */
#define RETRY_MS 10000u

struct hint_tables {
    struct hint_tables_config config;
    struct cache_follower follower;
    struct chores chores;
    struct chore filling;
    struct list all;  /* struct ns_hints */
    struct list kept; /* struct ending: tables that ended, and that workers may still have */
    uint32_t n;
};

struct ns_hints {
    struct list link; /* in hint_tables.all */
    struct ns *ns;
    struct limit_owner *owner; /* borrowed; NULL: nobody's */
    uint32_t refs;
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

/* Until no worker has it, the table counts as its owner's. Then a thread of libuv's pool gives the
 * memory back; the tables may be gone by then. */
struct ending {
    struct list link; /* in hint_tables.kept */
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
    struct hint_tables *t = l->ctx;

    ending_settle(e);
    if (hints_bytes(e->table) > THREAD_BYTES &&
        uv_queue_work(t->config.loop, &e->work, ending_run_cb, ending_done_cb) == 0)
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

static void table_end(struct hint_tables *t, const struct ns_hints *h, struct hints *table,
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
    if (h->owner) {
        e->owner = limit_owner_ref(h->owner);
        limit_add(e->owner, LIMIT_KEPT, kept_bytes(table));
        limit_add(e->owner, LIMIT_DESCRIPTORS, 1);
    }
    list_push_back(&t->kept, &e->link);
    loan_end(&e->loan, t->config.deadlines, hints_fd(table), &loan_calls, t);
}

/* ---- filling ---- */

/* There was no memory: the first table waits for some, and one that should be larger stays as it
 * is. */
static void postpone(struct hint_tables *t, struct ns_hints *h, int rc)
{
    log_warn("hints", "no-memory", "ns=%u error=%s", h->ns->id, strerror(-rc));
    h->retry_ms = now_ms() + RETRY_MS;
    if (!h->filling || h->filling == h->table)
        return;
    table_end(t, h, h->filling, UCM_HINT_ENDED);
    h->filling = NULL;
}

static void grow(struct hint_tables *t, struct ns_hints *h)
{
    int rc;

    if (h->filling || h->retry_ms > now_ms())
        return;
    rc = hints_new(h->ns->identity.key_bytes, h->ns->blocks, now_ms(), &h->filling);
    if (rc < 0) {
        postpone(t, h, rc);
        return;
    }
    h->reserved = false;
    h->cursor = 0;
    chore_wake(&t->filling);
}

static void fill_end(struct hint_tables *t, struct ns_hints *h)
{
    hints_begin(h->filling);
    if (h->filling != h->table) {
        table_end(t, h, h->table, UCM_HINT_SUPERSEDED);
        h->table = h->filling;
    }
    h->filling = NULL;
}

/* False: it waits. */
static bool fill(struct hint_tables *t, struct ns_hints *h)
{
    block_ref refs[SCANNED_PER_TURN];
    uint32_t n;

    if (!h->filling || h->retry_ms > now_ms())
        return false;
    if (!h->reserved) {
        int rc = hints_reserve(h->filling);

        if (rc < 0)
            postpone(t, h, rc);
        h->reserved = rc == 0;
        return rc >= 0;
    }
    h->cursor = index_scan(t->config.index, h->ns, h->cursor, SCANNED_PER_TURN, refs, &n);
    for (uint32_t i = 0; i < n; i++) {
        uint8_t is = cache_status(t->config.cache, refs[i]);

        if (is != 0)
            hints_set(h->filling, index_block(t->config.index, refs[i])->key, 0, is);
    }
    if (h->cursor == 0)
        fill_end(t, h);
    return h->cursor != 0;
}

static bool fill_cb(void *ctx)
{
    struct hint_tables *t = ctx;
    bool more = false;

    for (struct list *node = t->all.next; node != &t->all; node = node->next)
        more = fill(t, LIST_ENTRY(node, struct ns_hints, link)) || more;
    return more;
}

/* ---- following ---- */

static void changed_cb(struct cache_follower *f, const struct ns *ns, const uint8_t *key,
                       uint8_t was, uint8_t is)
{
    struct hint_tables *t = LIST_ENTRY(f, struct hint_tables, follower);
    struct ns_hints *h = ns->follower;

    if (!h)
        return;
    if (h->table != h->filling)
        hints_set(h->table, key, was, is);
    if (h->filling && h->reserved)
        hints_set(h->filling, key, was, is);
    if (h->table != h->filling && hints_crowded(h->table))
        grow(t, h);
}

/* ---- use ---- */

/* A table has one descriptor, and two while it is filled. The others are for connections. */
uint32_t hint_tables_max(void)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur / 4 > MAX_TABLES)
        return MAX_TABLES;
    return (uint32_t)(limit.rlim_cur / 4);
}

int hint_tables_ref(struct hint_tables *t, struct ns *ns, struct limit_owner *owner)
{
    struct ns_hints *h = ns->follower;
    int rc;

    if (h) {
        h->refs++;
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
    h->owner = owner;
    h->refs = 1;
    h->filling = h->table;
    list_push_back(&t->all, &h->link);
    t->n++;
    ns->follower = h;
    chore_wake(&t->filling);
    return 0;
}

struct limit_owner *hint_tables_unref(struct hint_tables *t, struct ns *ns)
{
    struct ns_hints *h = ns->follower;
    struct limit_owner *owner = h->owner;

    if (--h->refs > 0)
        return NULL;
    ns->follower = NULL;
    list_remove(&h->link);
    t->n--;
    if (h->filling && h->filling != h->table)
        table_end(t, h, h->filling, UCM_HINT_ENDED);
    table_end(t, h, h->table, UCM_HINT_ENDED);
    free(h);
    return owner;
}

int hint_tables_fd(const struct ns *ns, uint64_t *bytes)
{
    const struct ns_hints *h = ns->follower;

    *bytes = hints_bytes(h->table);
    return hints_fd(h->table);
}

void hint_tables_beat(struct hint_tables *t)
{
    for (struct list *node = t->all.next; node != &t->all; node = node->next) {
        struct ns_hints *h = LIST_ENTRY(node, struct ns_hints, link);

        hints_beat(h->table, now_ms());
        if (h->filling && h->filling != h->table)
            hints_beat(h->filling, now_ms());
        if (h->filling && h->retry_ms > 0 && h->retry_ms <= now_ms())
            chore_wake(&t->filling); /* it waits for memory */
    }
}

void hint_tables_stats(const struct hint_tables *t, struct hint_tables_stats *out)
{
    *out = (struct hint_tables_stats){.tables = t->n};
    for (const struct list *node = t->all.next; node != &t->all; node = node->next) {
        const struct ns_hints *h = LIST_ENTRY(node, struct ns_hints, link);

        out->bytes += hints_bytes(h->table);
        if (h->filling && h->filling != h->table)
            out->bytes += hints_bytes(h->filling);
        out->left_out += hints_left_out(h->table);
    }
    for (const struct list *node = t->kept.next; node != &t->kept; node = node->next)
        out->bytes += hints_bytes(LIST_ENTRY(node, struct ending, link)->table);
}

/* ---- life ---- */

int hint_tables_new(const struct hint_tables_config *config, struct hint_tables **out)
{
    struct hint_tables *t = calloc(1, sizeof(*t));
    int rc = t ? chores_init(&t->chores, config->loop) : -ENOMEM;

    if (rc != 0) {
        free(t);
        return rc;
    }
    t->config = *config;
    t->chores.idle.data = t;
    chore_add(&t->chores, &t->filling, fill_cb, NULL, t);
    list_init(&t->all);
    list_init(&t->kept);
    t->follower.changed_cb = changed_cb;
    cache_follow(config->cache, &t->follower);
    *out = t;
    return 0;
}

static void closed_cb(uv_handle_t *handle)
{
    free(handle->data);
}

void hint_tables_free(struct hint_tables *t)
{
    if (!t)
        return;
    assert(t->n == 0);
    cache_unfollow(&t->follower);
    while (!list_empty(&t->kept)) {
        struct ending *e = LIST_ENTRY(t->kept.next, struct ending, link);

        ending_settle(e);
        hints_free(e->table, e->last);
        free(e);
    }
    chores_close(&t->chores, closed_cb);
}
