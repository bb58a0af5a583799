/* Removals by key. The next file is determined once a root has room for it. So a request of many
 * keys and parts takes only the memory of its keys. Each root goes through them on its own, highest
 * parts first: lookups ask for these, so without them the others are not read. Tenants take turns
 * at each root. */
#include "daemon/shared/shared_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* What a root has of them at a time, queued or begun: the rest of its queue is for what else goes
 * in the background. */
#define REMOVING_MAX 64u
#define OPERATION_COST 4096u
#define BURST_BYTES (16u * OPERATION_COST)
#define ALONE_MAX 4096u /* of shared_remove, under way */

/* Removals at one root. */
struct remover {
    struct fair_queue queue; /* of shared_removal_way.link */
    uint32_t under_way;
};

/* One file at one root. Outlives its removal when that is cancelled. */
struct removing {
    struct shared_task task;
    struct shared *shared;
    struct shared_removal *removal; /* NULL: nobody waits for it any more */
    struct list link;               /* in removal.under_way */
    uint32_t root, key;
};

/* ---- a removal ---- */

static void ended_cb(struct deadline *d)
{
    struct shared_removal *r = LIST_ENTRY(d, struct shared_removal, ended);

    list_remove(&r->link);
    r->shared = NULL;
    r->done_cb(r, r->status);
}

/* Never from inside the call that asked, nor in that of another one. */
static void removal_end(struct shared_removal *r, int status)
{
    const struct shared *s = r->shared;

    if (r->status == 0)
        r->status = status;
    deadline_arm(s->settings.deadlines, &r->ended, shared_now(s), ended_cb);
}

static void way_end(struct shared_removal *r)
{
    if (--r->ways == 0)
        removal_end(r, 0);
}

/* ---- which file is next ---- */

static bool way_finds(const struct shared_removal *r, struct shared_removal_way *way, uint32_t root)
{
    uint32_t others = r->alone ? 0 : r->part;

    for (; way->rest && way->key < r->n && (way->part == 0 || !(r->whole[way->key] >> root & 1));
         way->key++)
        way->part = others;
    return way->key < r->n;
}

/* Names the file that way_finds has found. */
static void way_file(const struct shared_removal *r, const struct shared_removal_way *way,
                     struct block_file_id *id)
{
    *id = (struct block_file_id){.key_bytes = r->key_bytes,
                                 .part = way->rest ? way->part - 1 : r->part};
    memcpy(id->fingerprint, r->name, sizeof(id->fingerprint));
    memcpy(id->key, r->keys + (size_t)way->key * r->key_bytes, r->key_bytes);
}

static void way_passes(struct shared_removal_way *way)
{
    if (way->rest)
        way->part--;
    else
        way->key++;
}

/* It waits in its tenant's lane while there is a file to remove. Else it waits for answers: those
 * about the highest parts say where others are. */
static void way_go_on(struct shared_removal *r, uint32_t root)
{
    struct shared_removal_way *way = &r->way[root];
    bool more = way_finds(r, way, root);

    if (!more && !way->rest && way->under_way == 0) {
        way->rest = true;
        way->key = 0;
        way->part = r->alone ? 0 : r->part;
        more = way_finds(r, way, root);
    }
    if (more && list_empty(&way->link))
        fair_queue_push(&r->shared->removers[root].queue, &r->who, 0, &way->link, false);
    else if (!more && way->under_way == 0)
        way_end(r);
}

/* ---- one file ---- */

static void pump(struct shared *s, uint32_t root);

static void removing_tell(struct removing *e, int status)
{
    struct shared_removal *r = e->removal;
    const struct block_file_id *id = &e->task.op.id;

    e->shared->removers[e->root].under_way--;
    if (!r)
        return;
    e->removal = NULL;
    list_remove(&e->link);
    r->way[e->root].under_way--;
    if (status == 0 && id->part == r->part)
        r->whole[e->key] |= 1u << e->root;
    else if (status < 0 && !shared_status_missing(status) && r->status == 0)
        r->status = status;
    way_go_on(r, e->root);
}

static void released_cb(struct shared_task *t)
{
    struct removing *e = LIST_ENTRY(t, struct removing, task);
    struct shared *s = e->shared;
    uint32_t root = e->root;
    bool gone = t->status == 0 || shared_status_missing(t->status);

    /* A file that could not be removed blocks the writes of its part: do not call it missing. */
    shared_remember(s, &t->op.id, root, false, gone ? s->settings.negative_ms : 0);
    s->removed++;
    removing_tell(e, t->status);
    free(e);
    pump(s, root);
}

static int removing_begin(struct shared *s, struct shared_removal *r, uint32_t root)
{
    struct removing *e = calloc(1, sizeof(*e));
    int err;

    if (!e)
        return -ENOMEM;
    e->shared = s;
    e->removal = r;
    e->root = root;
    e->key = r->way[root].key;
    way_file(r, &r->way[root], &e->task.op.id);
    e->task.op.verb = SHARED_REMOVE;
    e->task.class = SHARED_BACKGROUND;
    e->task.who = r->who;
    e->task.deadline_ms = shared_now(s) + s->settings.timeout_ms;
    e->task.released_cb = released_cb;
    err = shared_root_submit(s->roots[root], &e->task);
    if (err < 0) {
        free(e);
        return err;
    }
    /* Until the removal has ended, which may take longer. */
    shared_remember(s, &e->task.op.id, root, false, SHARED_DAMAGED_MS);
    list_push_back(&r->under_way, &e->link);
    r->way[root].under_way++;
    s->removers[root].under_way++;
    return 0;
}

/* A root that refuses is left out, as it would refuse all. */
static void pump(struct shared *s, uint32_t root)
{
    struct remover *m = &s->removers[root];
    struct list *node;

    while (m->under_way < REMOVING_MAX && (node = fair_queue_first(&m->queue)) != NULL) {
        struct shared_removal_way *way = LIST_ENTRY(node, struct shared_removal_way, link);
        struct shared_removal *r = way->removal;
        int err = removing_begin(s, r, root);

        if (err == -EAGAIN)
            return; /* it is the first of its lane when the root has room */
        list_remove(&way->link);
        if (err < 0) {
            r->status = r->status == 0 ? err : r->status;
            way->key = r->n;
            way->rest = true;
        } else {
            way_passes(way);
            fair_queue_charge(&m->queue, &r->who, OPERATION_COST, NULL);
        }
        way_go_on(r, root);
    }
}

/* ---- begin and end ---- */

static void removal_start(struct shared_removal *r)
{
    struct shared *s = r->shared;
    int err =
        s->stopped ? -ECANCELED : shared_file_fingerprint(s, r->fingerprint, r->encrypted, r->name);

    list_push_back(err == -EAGAIN ? &s->unnamed : &s->removals, &r->link);
    if (err == -EAGAIN)
        return;
    r->ways = 1; /* until all have begun */
    for (uint32_t i = 0; err == 0 && r->n > 0 && i < s->n; i++) {
        if (s->roots[i]->config.read_only)
            continue;
        r->ways++;
        way_go_on(r, i);
        pump(s, i);
    }
    if (--r->ways == 0)
        removal_end(r, err);
}

void shared_removal_begin(struct shared *s, struct shared_removal *r)
{
    r->shared = s;
    r->status = 0;
    r->ended = (struct deadline){0};
    list_init(&r->under_way);
    for (uint32_t i = 0; i < s->n; i++) {
        r->way[i] = (struct shared_removal_way){.removal = r};
        list_init(&r->way[i].link);
    }
    removal_start(r);
}

static void removal_leave(struct shared_removal *r)
{
    struct shared *s = r->shared;
    struct list *node;

    for (uint32_t i = 0; i < s->n; i++)
        list_remove(&r->way[i].link);
    while ((node = list_pop_front(&r->under_way)) != NULL) {
        struct removing *e = LIST_ENTRY(node, struct removing, link);

        e->removal = NULL;
        if (e->task.state == SHARED_TASK_QUEUED &&
            shared_root_cancel(s->roots[e->root], &e->task)) {
            shared_remember(s, &e->task.op.id, e->root, false, 0); /* it may be there still */
            s->removers[e->root].under_way--;
            free(e);
        }
    }
}

void shared_removal_cancel(struct shared *s, struct shared_removal *r)
{
    if (!r->shared)
        return;
    removal_leave(r);
    deadline_disarm(s->settings.deadlines, &r->ended);
    list_remove(&r->link);
    r->shared = NULL;
    for (uint32_t i = 0; i < s->n; i++)
        pump(s, i);
}

void shared_removals_go_on(struct shared *s)
{
    struct list waiting, *node;

    list_init(&waiting);
    list_splice_front(&waiting, &s->unnamed);
    while ((node = list_pop_front(&waiting)) != NULL)
        removal_start(LIST_ENTRY(node, struct shared_removal, link));
    for (uint32_t i = 0; i < s->n; i++)
        pump(s, i);
}

void shared_removals_stop(struct shared *s)
{
    list_splice_front(&s->removals, &s->unnamed);
    for (struct list *node = s->removals.next; node != &s->removals; node = node->next) {
        struct shared_removal *r = LIST_ENTRY(node, struct shared_removal, link);

        removal_leave(r);
        if (!deadline_armed(&r->ended))
            removal_end(r, -ECANCELED);
    }
}

int shared_removals_init(struct shared *s, uint32_t roots)
{
    list_init(&s->removals);
    list_init(&s->unnamed);
    s->removers = calloc(roots > 0 ? roots : 1, sizeof(*s->removers));
    for (uint32_t i = 0; s->removers && i < roots; i++)
        fair_queue_init(&s->removers[i].queue, BURST_BYTES);
    return s->removers ? 0 : -ENOMEM;
}

/* ---- one part that nobody waits for ---- */

struct alone {
    struct shared_removal r;
    struct shared *shared;
    uint8_t key[UCM_MAX_KEY_BYTES];
    uint32_t whole;
};

static void alone_done_cb(struct shared_removal *r, int status)
{
    struct alone *a = LIST_ENTRY(r, struct alone, r);

    a->shared->settings.metrics->shared_remove_dropped += status < 0;
    a->shared->alone--;
    free(a);
}

void shared_remove(struct shared *s, const struct block_file_id *id, const struct fair_who *who)
{
    struct alone *a = s->alone < ALONE_MAX ? calloc(1, sizeof(*a)) : NULL;

    for (uint32_t i = 0; i < s->n; i++)
        if (!s->roots[i]->config.read_only)
            shared_remember(s, id, i, false, SHARED_DAMAGED_MS);
    if (!a) {
        s->settings.metrics->shared_remove_dropped++;
        return;
    }
    a->shared = s;
    a->r = (struct shared_removal){.who = *who,
                                   .key_bytes = id->key_bytes,
                                   .part = id->part,
                                   .alone = true,
                                   .n = 1,
                                   .keys = a->key,
                                   .whole = &a->whole,
                                   .done_cb = alone_done_cb};
    memcpy(a->r.fingerprint, id->fingerprint, sizeof(a->r.fingerprint));
    memcpy(a->key, id->key, id->key_bytes);
    s->alone++;
    shared_removal_begin(s, &a->r);
}
