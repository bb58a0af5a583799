#include "daemon/gc/quota.h"

#include "daemon/base/log.h"
#include "daemon/gc/sweep.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TRIES 8u /* entries that a namespace may have */

/* ---- bytes by tenant ---- */

static struct gc_space *space_of(const struct gc_quota *q,
                                 const uint8_t namespace[BLOCK_FILE_NAMESPACE_BYTES], bool make)
{
    uint32_t hash; /* a fingerprint's bytes are as good as random */

    if (!q->spaces)
        return NULL;
    memcpy(&hash, namespace, sizeof(hash));
    for (unsigned i = 0; i < TRIES; i++) {
        struct gc_space *s = &q->spaces[(hash + i) % GC_SPACES];

        if (!s->used && !make)
            return NULL;
        if (!s->used) {
            memcpy(s->namespace, namespace, sizeof(s->namespace));
            s->used = true;
            return s;
        }
        if (memcmp(s->namespace, namespace, sizeof(s->namespace)) == 0)
            return s;
    }
    return NULL;
}

static void left_out(struct gc_quota *q)
{
    if (!q->left_out)
        log_warn("shared", "gc-quotas-left-out", "root=%u tenants=%u namespaces=%u",
                 q->root->number, GC_OWNERS, GC_SPACES);
    q->left_out = true;
}

/* Its number, or 0. */
static uint16_t owner_number(struct gc_quota *q, const char *tenant)
{
    struct gc_owner *o;
    uint32_t i = 0;

    while (i < q->n_owners && strcmp(q->owners[i]->tenant, tenant) != 0)
        i++;
    if (i < q->n_owners)
        return (uint16_t)(i + 1);
    o = q->n_owners < GC_OWNERS ? calloc(1, sizeof(*o)) : NULL;
    if (!o) {
        left_out(q);
        return 0;
    }
    snprintf(o->tenant, sizeof(o->tenant), "%s", tenant);
    q->owners[q->n_owners++] = o;
    return (uint16_t)q->n_owners;
}

void gc_quota_free(struct gc_quota *q)
{
    for (uint32_t i = 0; i < q->n_owners; i++) {
        free(q->owners[i]->cells);
        free(q->owners[i]);
    }
    free(q->spaces);
    shared_listing_free(&q->listing);
}

/* ---- learning whose namespaces are ---- */

static void ask(struct gc_quota *q);

static void learned(struct gc_quota *q, int status)
{
    shared_listing_free(&q->listing);
    q->learned_cb(q, status);
}

static void note_tenant(struct gc_quota *q, const uint8_t namespace[BLOCK_FILE_NAMESPACE_BYTES])
{
    char tenant[UCM_MAX_NAME_BYTES + 1] = "";
    struct gc_space *s = space_of(q, namespace, true);

    memcpy(tenant, q->name, sizeof(q->name));
    if (!s)
        left_out(q);
    else if (tenant[0] != '\0')
        s->owner = owner_number(q, tenant);
}

static void answered_cb(struct shared_task *t)
{
    struct gc_quota *q = LIST_ENTRY(t, struct gc_quota, task);
    uint8_t namespace[BLOCK_FILE_NAMESPACE_BYTES];

    if (t->op.verb == SHARED_LIST) {
        q->listing = t->op.listing;
        if (t->status < 0) {
            learned(q, t->status);
            return;
        }
    } else if (t->op.verb == SHARED_READ && t->status == 0) {
        if (block_file_tenant_parse(t->op.name, namespace))
            note_tenant(q, namespace);
    } else if (t->op.verb == SHARED_READ && t->status == -EBADMSG) {
        q->removing = true; /* no writer would replace it */
        ask(q);
        return;
    } else if (t->op.verb == SHARED_READ && !shared_status_missing(t->status)) {
        learned(q, t->status);
        return;
    }
    q->removing = false;
    ask(q);
}

/* The next file to be read. False: there is none. */
static bool next_file(struct gc_quota *q)
{
    uint8_t namespace[BLOCK_FILE_NAMESPACE_BYTES];

    for (; q->at < q->listing.n; q->at++) {
        const struct shared_file *file = &q->listing.files[q->at];

        if (block_file_tenant_parse(file->name, namespace) && !space_of(q, namespace, false) &&
            file->bytes == BLOCK_FILE_HEADER_BYTES + sizeof(q->name))
            return true;
    }
    return false;
}

static void ask(struct gc_quota *q)
{
    struct shared_op *op = &q->task.op;
    char name[BLOCK_FILE_NAME_CAP];
    int err;

    if (q->cancelled) {
        learned(q, -ECANCELED);
        return;
    }
    if (q->removing)
        memcpy(name, op->name, sizeof(name));
    else if (next_file(q))
        memcpy(name, q->listing.files[q->at++].name, sizeof(name));
    else {
        learned(q, 0);
        return;
    }
    memset(&q->task, 0, sizeof(q->task));
    op->verb = q->removing ? SHARED_REMOVE : SHARED_READ;
    op->by_name = op->note = true;
    op->bucket = BLOCK_FILE_TENANT_BUCKET;
    memcpy(op->name, name, sizeof(op->name));
    op->data = q->name;
    op->bytes = sizeof(q->name);
    err = gc_submit(q->root, &q->task, answered_cb);
    if (err < 0)
        learned(q, err);
}

void gc_quota_learn(struct gc_quota *q, struct shared_root *root,
                    void (*learned_cb)(struct gc_quota *q, int status))
{
    int err;

    q->root = root;
    q->learned_cb = learned_cb;
    q->at = 0;
    q->removing = false;
    if (!q->quota_cb || !q->quota_cb(q->ctx, NULL, NULL, NULL)) {
        learned(q, 0);
        return;
    }
    if (!q->spaces)
        q->spaces = calloc(GC_SPACES, sizeof(*q->spaces));
    memset(&q->task, 0, sizeof(q->task));
    q->task.op.verb = SHARED_LIST;
    q->task.op.bucket = BLOCK_FILE_TENANT_BUCKET;
    err = q->spaces ? gc_submit(root, &q->task, answered_cb) : -ENOMEM;
    if (err < 0)
        learned(q, err);
}

bool gc_quota_busy(const struct gc_quota *q)
{
    return q->task.state != SHARED_TASK_NONE;
}

bool gc_quota_cancel(struct gc_quota *q)
{
    if (!gc_quota_busy(q))
        return false;
    q->cancelled = true;
    if (!shared_root_cancel(q->root, &q->task))
        return false;
    shared_listing_free(&q->listing);
    return true;
}

/* ---- a pass ---- */

static void owner_begin(struct gc_quota *q, struct gc_owner *o)
{
    free(o->cells);
    o->cells = NULL;
    memset(&o->guaranteed, 0, sizeof(*o) - offsetof(struct gc_owner, guaranteed));
    if (!q->quota_cb || !q->quota_cb(q->ctx, o->tenant, &o->guaranteed, &o->most))
        return;
    o->cells = calloc(GC_OWNER_CELLS, sizeof(*o->cells));
    if (!o->cells)
        left_out(q);
}

void gc_quota_begin(struct gc_quota *q)
{
    for (uint32_t i = 0; i < q->n_owners; i++)
        owner_begin(q, q->owners[i]);
    for (uint32_t i = 0; q->spaces && i < GC_SPACES; i++) {
        q->spaces[i].last = q->spaces[i].files;
        q->spaces[i].files = 0;
    }
}

struct gc_owner *gc_quota_owner(struct gc_quota *q,
                                const uint8_t namespace[BLOCK_FILE_NAMESPACE_BYTES], bool counts)
{
    struct gc_space *s = space_of(q, namespace, false);
    struct gc_owner *o = s && s->owner > 0 ? q->owners[s->owner - 1] : NULL;

    if (s && counts)
        s->files++;
    return o && o->cells ? o : NULL;
}

/* Classes 1 to 8 are the first of an owner, and so on; files of class 0 never go. */
static uint32_t owner_cell(uint32_t cell)
{
    uint32_t class = cell / GC_GROUPS;

    return (class + 7) / 8 * GC_GROUPS + cell % GC_GROUPS;
}

static uint32_t root_cell(uint32_t owner_cell)
{
    uint32_t class = owner_cell / GC_GROUPS;

    return (class > 0 ? (class - 1) * 8 + 1 : 0) * GC_GROUPS + owner_cell % GC_GROUPS;
}

uint32_t gc_quota_cell(uint32_t cell)
{
    return root_cell(owner_cell(cell));
}

void gc_quota_add(struct gc_owner *o, uint32_t cell, uint64_t bytes)
{
    o->bytes += bytes;
    o->cells[owner_cell(cell)] += bytes;
}

/* The lowest cell from which on all cells hold together at least `bytes`, or (spare) at most that.
 * GC_CELLS: none. */
static uint32_t cut_of(const struct gc_owner *o, uint64_t bytes, bool spare)
{
    uint32_t i = GC_OWNER_CELLS, cut = GC_CELLS;
    uint64_t sum = 0;

    for (; i > GC_GROUPS && (spare || sum < bytes); i--) {
        sum += o->cells[i - 1];
        if (spare && sum > bytes)
            break;
        if (o->cells[i - 1] > 0)
            cut = root_cell(i - 1);
    }
    return cut;
}

uint64_t gc_quota_cut(struct gc_quota *q, unsigned low, struct gc_ages *ages)
{
    uint64_t go = 0;

    for (uint32_t n = 0; n < q->n_owners; n++) {
        struct gc_owner *o = q->owners[n];
        bool much = o->cells && o->most > 0 && o->bytes > o->most;
        uint64_t spare = o->bytes > o->guaranteed ? o->bytes - o->guaranteed : 0;

        if (!o->cells)
            continue;
        o->target = much ? o->most / 100 * low + o->most % 100 * low / 100 : UINT64_MAX;
        o->most_cut = much ? cut_of(o, o->bytes - o->target, false) : GC_CELLS;
        o->spare_cut = cut_of(o, spare, true);
        go += much ? o->bytes - o->target : 0;
        for (uint32_t i = GC_GROUPS; i < GC_OWNER_CELLS; i++)
            if (root_cell(i) >= o->spare_cut && root_cell(i) < o->most_cut)
                ages->bytes[root_cell(i)] += o->cells[i];
        if (much)
            log_info("shared", "gc-tenant-much", "root=%u tenant=%s bytes=%llu most=%llu",
                     q->root->number, o->tenant, (unsigned long long)o->bytes,
                     (unsigned long long)o->most);
    }
    return go;
}

bool gc_quota_goes(const struct gc_owner *o, uint32_t cell)
{
    return cell >= o->most_cut && o->bytes - o->pending > o->target;
}

bool gc_quota_spares(const struct gc_owner *o, uint32_t cell, uint64_t bytes)
{
    return cell >= o->spare_cut && o->bytes - o->pending >= o->guaranteed + bytes;
}

bool gc_quota_stale(const struct gc_quota *q, const char *name, uint64_t age_ns)
{
    uint8_t namespace[BLOCK_FILE_NAMESPACE_BYTES];
    const struct gc_space *s;

    if (!q->listed || age_ns < GC_TENANT_AGE_NS || !block_file_tenant_parse(name, namespace))
        return false;
    s = space_of(q, namespace, false);
    return s && s->last == 0;
}

void gc_quota_ended(struct gc_quota *q, bool complete)
{
    q->listed = complete && q->spaces;
}
