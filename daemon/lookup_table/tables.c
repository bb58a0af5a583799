/* Lookup tables: each follows what lookups of its namespace would find.
 *
 *   first use --> FILLING: memory, then blocks, some of both an iteration --> LIVE --crowded-->
 *   SUPERSEDED by another one, which was filled alongside it
 *
 * A table that gets blocks follows changes already. So a block that the scan has passed, or that
 * came after it, is there when the scan ends. */
#include "daemon/lookup_table/tables.h"

#include "daemon/base/chore.h"
#include "daemon/base/log.h"
#include "daemon/lookup_table/table.h"
#include "daemon/mapping/loan.h"
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

struct lookup_tables {
    struct lookup_tables_config config;
    struct cache_follower follower;
    struct chores chores;
    struct chore filling;
    struct list all;  /* struct ns_lookup_table */
    struct list kept; /* struct ending: tables that ended, and that workers may still have */
    uint32_t n;
};

struct ns_lookup_table {
    struct list link; /* in lookup_tables.all */
    struct ns *ns;
    struct limit_owner *owner; /* borrowed; NULL: nobody's */
    uint32_t refs;
    struct lookup_table *table;   /* what readers get */
    struct lookup_table *filling; /* the same, or what will take its place, or NULL */
    bool reserved;                /* it has all of its memory */
    uint64_t cursor;              /* of its scan */
    uint64_t retry_ms;            /* no memory before */
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
    struct list link; /* in lookup_tables.kept */
    struct loan loan;
    struct limit_owner *owner; /* NULL: nobody's */
    uv_work_t work;
    struct lookup_table *table;
    enum ucm_lookup_table_state last;
};

static void ending_run_cb(uv_work_t *work)
{
    struct ending *e = LIST_ENTRY(work, struct ending, work);

    lookup_table_free(e->table, e->last);
}

static void ending_done_cb(uv_work_t *work, int status)
{
    struct ending *e = LIST_ENTRY(work, struct ending, work);

    if (status != 0) /* it did not run, as the daemon stops */
        lookup_table_free(e->table, e->last);
    free(e);
}

/* A small one holds a descriptor all the same. */
static uint64_t kept_bytes(const struct lookup_table *table)
{
    return lookup_table_bytes(table) > KEPT_BYTES_MIN ? lookup_table_bytes(table) : KEPT_BYTES_MIN;
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

static void ungranted_cb(struct loan *l)
{
    struct ending *e = LIST_ENTRY(l, struct ending, loan);
    struct lookup_tables *t = l->ctx;

    ending_settle(e);
    if (lookup_table_bytes(e->table) > THREAD_BYTES &&
        uv_queue_work(t->config.loop, &e->work, ending_run_cb, ending_done_cb) == 0)
        return;
    lookup_table_free(e->table, e->last);
    free(e);
}

static void kept_cb(struct loan *l)
{
    const struct ending *e = LIST_ENTRY(l, struct ending, loan);

    log_info("lookup-table", "table-kept", "bytes=%llu",
             (unsigned long long)lookup_table_bytes(e->table));
}

static const struct loan_calls loan_calls = {ungranted_cb, kept_cb};

static void table_end(struct lookup_tables *t, const struct ns_lookup_table *h,
                      struct lookup_table *table, enum ucm_lookup_table_state last)
{
    struct ending *e = calloc(1, sizeof(*e));

    if (!e) {
        lookup_table_free(table, last);
        return;
    }
    lookup_table_end(table, last);
    e->table = table;
    e->last = last;
    if (h->owner) {
        e->owner = limit_owner_ref(h->owner);
        limit_add(e->owner, LIMIT_KEPT, kept_bytes(table));
        limit_add(e->owner, LIMIT_DESCRIPTORS, 1);
    }
    list_push_back(&t->kept, &e->link);
    loan_end(&e->loan, t->config.deadlines, lookup_table_fd(table), &loan_calls, t);
}

/* ---- filling ---- */

/* There was no memory: the first table waits for some, and one that should be larger stays as it
 * is. */
static void postpone(struct lookup_tables *t, struct ns_lookup_table *h, int rc)
{
    log_warn("lookup-table", "no-memory", "ns=%u error=%s", h->ns->id, strerror(-rc));
    h->retry_ms = now_ms() + RETRY_MS;
    if (!h->filling || h->filling == h->table)
        return;
    table_end(t, h, h->filling, UCM_LOOKUP_TABLE_ENDED);
    h->filling = NULL;
}

static void grow(struct lookup_tables *t, struct ns_lookup_table *h)
{
    int rc;

    if (h->filling || h->retry_ms > now_ms())
        return;
    rc = lookup_table_new(h->ns->identity.key_bytes, h->ns->blocks, now_ms(), &h->filling);
    if (rc < 0) {
        postpone(t, h, rc);
        return;
    }
    h->reserved = false;
    h->cursor = 0;
    chore_wake(&t->filling);
}

static void fill_end(struct lookup_tables *t, struct ns_lookup_table *h)
{
    lookup_table_begin(h->filling);
    if (h->filling != h->table) {
        table_end(t, h, h->table, UCM_LOOKUP_TABLE_SUPERSEDED);
        h->table = h->filling;
    }
    h->filling = NULL;
}

/* False: it waits. */
static bool fill(struct lookup_tables *t, struct ns_lookup_table *h)
{
    block_ref refs[SCANNED_PER_TURN];
    uint32_t n;

    if (!h->filling || h->retry_ms > now_ms())
        return false;
    if (!h->reserved) {
        int rc = lookup_table_reserve(h->filling);

        if (rc < 0)
            postpone(t, h, rc);
        h->reserved = rc == 0;
        return rc >= 0;
    }
    h->cursor = index_scan(t->config.index, h->ns, h->cursor, SCANNED_PER_TURN, refs, &n);
    for (uint32_t i = 0; i < n; i++) {
        uint8_t is = cache_status(t->config.cache, refs[i]);

        if (is != 0)
            lookup_table_set(h->filling, index_block(t->config.index, refs[i])->key, 0, is);
    }
    if (h->cursor == 0)
        fill_end(t, h);
    return h->cursor != 0;
}

static bool fill_cb(void *ctx)
{
    struct lookup_tables *t = ctx;
    bool more = false;

    for (struct list *node = t->all.next; node != &t->all; node = node->next)
        more = fill(t, LIST_ENTRY(node, struct ns_lookup_table, link)) || more;
    return more;
}

/* ---- following ---- */

static void changed_cb(struct cache_follower *f, const struct ns *ns, const uint8_t *key,
                       uint8_t was, uint8_t is)
{
    struct lookup_tables *t = LIST_ENTRY(f, struct lookup_tables, follower);
    struct ns_lookup_table *h = ns->follower;

    if (!h)
        return;
    if (h->table != h->filling)
        lookup_table_set(h->table, key, was, is);
    if (h->filling && h->reserved)
        lookup_table_set(h->filling, key, was, is);
    if (h->table != h->filling && lookup_table_crowded(h->table))
        grow(t, h);
}

/* ---- use ---- */

/* A table has one descriptor, and two while it is filled. The others are for connections. */
uint32_t lookup_tables_max(void)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur / 4 > MAX_TABLES)
        return MAX_TABLES;
    return (uint32_t)(limit.rlim_cur / 4);
}

int lookup_tables_ref(struct lookup_tables *t, struct ns *ns, struct limit_owner *owner)
{
    struct ns_lookup_table *h = ns->follower;
    int rc;

    if (h) {
        h->refs++;
        return 0;
    }
    h = calloc(1, sizeof(*h));
    if (!h)
        return -ENOMEM;
    rc = lookup_table_new(ns->identity.key_bytes, ns->blocks, now_ms(), &h->table);
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

struct limit_owner *lookup_tables_unref(struct lookup_tables *t, struct ns *ns)
{
    struct ns_lookup_table *h = ns->follower;
    struct limit_owner *owner = h->owner;

    if (--h->refs > 0)
        return NULL;
    ns->follower = NULL;
    list_remove(&h->link);
    t->n--;
    if (h->filling && h->filling != h->table)
        table_end(t, h, h->filling, UCM_LOOKUP_TABLE_ENDED);
    table_end(t, h, h->table, UCM_LOOKUP_TABLE_ENDED);
    free(h);
    return owner;
}

int lookup_tables_fd(const struct ns *ns, uint64_t *bytes)
{
    const struct ns_lookup_table *h = ns->follower;

    *bytes = lookup_table_bytes(h->table);
    return lookup_table_fd(h->table);
}

void lookup_tables_beat(struct lookup_tables *t)
{
    for (struct list *node = t->all.next; node != &t->all; node = node->next) {
        struct ns_lookup_table *h = LIST_ENTRY(node, struct ns_lookup_table, link);

        lookup_table_beat(h->table, now_ms());
        if (h->filling && h->filling != h->table)
            lookup_table_beat(h->filling, now_ms());
        if (h->filling && h->retry_ms > 0 && h->retry_ms <= now_ms())
            chore_wake(&t->filling); /* it waits for memory */
    }
}

void lookup_tables_stats(const struct lookup_tables *t, struct lookup_tables_stats *out)
{
    *out = (struct lookup_tables_stats){.tables = t->n};
    for (const struct list *node = t->all.next; node != &t->all; node = node->next) {
        const struct ns_lookup_table *h = LIST_ENTRY(node, struct ns_lookup_table, link);

        out->bytes += lookup_table_bytes(h->table);
        if (h->filling && h->filling != h->table)
            out->bytes += lookup_table_bytes(h->filling);
        out->left_out += lookup_table_left_out(h->table);
    }
    for (const struct list *node = t->kept.next; node != &t->kept; node = node->next)
        out->bytes += lookup_table_bytes(LIST_ENTRY(node, struct ending, link)->table);
}

/* ---- life ---- */

int lookup_tables_new(const struct lookup_tables_config *config, struct lookup_tables **out)
{
    struct lookup_tables *t = calloc(1, sizeof(*t));
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

void lookup_tables_free(struct lookup_tables *t)
{
    if (!t)
        return;
    assert(t->n == 0);
    cache_unfollow(&t->follower);
    while (!list_empty(&t->kept)) {
        struct ending *e = LIST_ENTRY(t->kept.next, struct ending, link);

        ending_settle(e);
        lookup_table_free(e->table, e->last);
        free(e);
    }
    chores_close(&t->chores, closed_cb);
}
