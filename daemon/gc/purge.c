/* An operator's purge: removes all files of a namespace from every root, side by side. A root that
 * is down or refuses is reported, and the others are swept all the same. */
#include "daemon/encryption/secrets.h"
#include "daemon/gc/sweep.h"
#include "daemon/shared/shared_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define STALL_MS 90000u /* more than one operation may take */

struct purge;
struct purge_root {
    struct purge *purge;
    struct gc_sweep sweep;
};

struct purge {
    struct list link;
    struct shared_purge *request; /* NULL: its done_cb has run, or it cancelled */
    uint8_t fingerprint[UCM_FINGERPRINT_BYTES];
    bool encrypted, waits; /* waits: for the secret, of which its encrypted files have their name */
    uint8_t name[UCM_FINGERPRINT_BYTES]; /* what these have in place of the fingerprint */
    struct shared *shared;
    struct secrets_purge secret; /* while it is queued it counts in `active` */
    struct deadline stall;       /* when no root has made progress for STALL_MS */
    uint64_t files;
    int status;
    uint32_t n, active;
    struct purge_root roots[UCM_MAX_ROOTS];
};

static struct purge *purge_of(struct gc_sweep *s)
{
    return LIST_ENTRY(s, struct purge_root, sweep)->purge;
}

static int first_failure(int a, int b)
{
    return a < 0 ? a : b;
}

static void report(struct purge *p, int status)
{
    struct shared_purge *request = p->request;

    p->request = NULL;
    deadline_disarm(p->shared->settings.deadlines, &p->stall);
    if (!request)
        return;
    request->op = NULL;
    request->done_cb(request, status, p->files);
}

static void sweep_ended(struct purge *p)
{
    if (--p->active > 0)
        return;
    report(p, p->status);
    list_remove(&p->link);
    p->shared->hash_seed++; /* and those that are on their way */
    free(p);
}

/* May free the purge. */
static void purge_stop(struct purge *p)
{
    p->active++; /* keeps the last sweep that ends from freeing it too early */
    if (p->waits)
        p->status = first_failure(p->status, -ECANCELED);
    p->waits = false;
    if (p->secret.queued) {
        secrets_cancel(p->shared->secrets, &p->secret);
        p->active--;
    }
    for (uint32_t i = 0; i < p->n; i++)
        gc_sweep_stop(&p->roots[i].sweep);
    sweep_ended(p);
}

static void stalled_cb(struct deadline *d)
{
    struct purge *p = LIST_ENTRY(d, struct purge, stall);

    report(p, first_failure(p->status, -ETIMEDOUT));
    purge_stop(p);
}

static void stall_arm(struct purge *p)
{
    deadline_arm(p->shared->settings.deadlines, &p->stall, shared_now(p->shared) + STALL_MS,
                 stalled_cb);
}

static void progressed(struct gc_sweep *s)
{
    struct purge *p = purge_of(s);

    if (p->request)
        stall_arm(p);
}

static void listed_cb(struct gc_sweep *s, const struct shared_listing *l)
{
    if (l->unable)
        purge_of(s)->status = first_failure(purge_of(s)->status, -EOPNOTSUPP);
    if (l->cut)
        purge_of(s)->status = first_failure(purge_of(s)->status, -EOVERFLOW);
    if (l->unread > 0)
        purge_of(s)->status = first_failure(purge_of(s)->status, -EIO);
    progressed(s);
}

static bool wanted_cb(struct gc_sweep *s, const struct shared_file *file)
{
    struct block_file_name parsed;

    return block_file_name_parse(file->name, &parsed) == 0 &&
           (memcmp(parsed.namespace, purge_of(s)->fingerprint, sizeof(parsed.namespace)) == 0 ||
            memcmp(parsed.namespace, purge_of(s)->name, sizeof(parsed.namespace)) == 0);
}

static void removed_cb(struct gc_sweep *s, const struct shared_file *file, int status)
{
    (void)file;
    if (status == 0)
        purge_of(s)->files++;
    progressed(s);
}

static void sweep_done_cb(struct gc_sweep *s, int status)
{
    struct purge *p = purge_of(s);

    p->status = first_failure(p->status, status);
    sweep_ended(p);
}

static void secret_replaced_cb(struct secrets_purge *secret, int status)
{
    struct purge *p = LIST_ENTRY(secret, struct purge, secret);

    p->status = first_failure(p->status, status);
    sweep_ended(p);
}

/* Without its secret, a file that is still there or copied by a server can't be opened. */
static void secret_replace(struct purge *p)
{
    if (!p->shared->secrets || !p->encrypted)
        return;
    p->active++;
    p->secret.done_cb = secret_replaced_cb;
    memcpy(p->secret.fingerprint, p->fingerprint, sizeof(p->secret.fingerprint));
    secrets_purge(p->shared->secrets, &p->secret);
}

static const struct gc_sweep_ops sweep_ops = {.listed_cb = listed_cb,
                                              .wanted_cb = wanted_cb,
                                              .removed_cb = removed_cb,
                                              .done_cb = sweep_done_cb};

/* Once the secret is replaced nobody finds the names of its files any more: they are taken first.
 * Where the secret is unavailable, files that are not encrypted go all the same. */
static void start(struct purge *p)
{
    struct shared *s = p->shared;
    int rc = shared_file_fingerprint(s, p->fingerprint, p->encrypted, p->name);

    p->waits = rc == -EAGAIN;
    if (p->waits)
        return;
    p->status = first_failure(p->status, rc);
    for (uint32_t i = 0; i < s->n; i++) {
        struct purge_root *root = &p->roots[p->n];

        if (s->roots[i]->config.read_only)
            continue;
        root->purge = p;
        gc_sweep_init(&root->sweep, s->roots[i], NULL, false, &sweep_ops);
        gc_sweep_start(&root->sweep);
        p->n++;
        p->active++;
    }
    secret_replace(p);
}

static bool has_work(const struct shared *s, const struct shared_purge *request)
{
    for (uint32_t i = 0; i < s->n; i++)
        if (!s->roots[i]->config.read_only)
            return true;
    return s->secrets && request->encrypted;
}

int shared_purge(struct shared *s, struct shared_purge *request)
{
    struct purge *p;

    if (s->stopped)
        return -ECANCELED;
    if (!has_work(s, request))
        return -EROFS;
    p = calloc(1, sizeof(*p));
    if (!p)
        return -ENOMEM;
    p->shared = s;
    memcpy(p->fingerprint, request->fingerprint, sizeof(p->fingerprint));
    p->encrypted = request->encrypted;
    s->hash_seed++; /* invalidates all answers in the cache, */
    p->request = request;
    request->op = p;
    list_push_back(&s->purges, &p->link);
    stall_arm(p);
    start(p);
    return 0;
}

void shared_purges_go_on(struct shared *s)
{
    for (struct list *node = s->purges.next; node != &s->purges; node = node->next) {
        struct purge *p = LIST_ENTRY(node, struct purge, link);

        if (p->waits)
            start(p);
    }
}

void shared_purge_cancel(struct shared *s, struct shared_purge *request)
{
    struct purge *p = request->op;

    if (!p)
        return;
    p->request = NULL;
    request->op = NULL;
    deadline_disarm(s->settings.deadlines, &p->stall);
    purge_stop(p);
}

void shared_purges_stop(struct shared *s)
{
    for (struct list *node = s->purges.next, *next; node != &s->purges; node = next) {
        next = node->next;
        purge_stop(LIST_ENTRY(node, struct purge, link));
    }
}
