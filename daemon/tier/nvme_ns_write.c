/* Namespaces become known to later starts. Records that wait are written together, in the thread
 * pool, with one sync; of more than fit tenants take turns. */
#include "daemon/tier/nvme.h"

#include "daemon/base/log.h"
#include "daemon/encryption/encryption.h"

#include <assert.h>
#include <string.h>

static void write_next(struct tier *t);

static void write_run(struct nvme_job *job)
{
    struct nvme_ns_writer *n = LIST_ENTRY(job, struct nvme_ns_writer, job);

    n->status = ns_records_write(&n->tier->ns_records, n->writes, n->n_writes, &n->any);
}

/* In memory, too. Returns the status of what was asked. */
static int one_done(struct tier *t, const struct nvme_ns_one *one, bool written)
{
    const struct nvme_ns_writer *n = &t->ns_writer;
    int rc = one->status == 0 && written ? n->status : one->status;

    if (rc == 0)
        rc = ns_records_set(&t->ns_records, &one->record);
    /* Where one of several directories has a purge's new secret, the next start goes by that. */
    if (rc == 0 || (written && n->any && one->asked->forget))
        ns_records_secret(&t->ns_records, one->record.fingerprint, one->record.secret);
    return rc;
}

static void write_done(struct nvme_job *job)
{
    struct nvme_ns_writer *n = LIST_ENTRY(job, struct nvme_ns_writer, job);
    struct tier_ns_record *asked[NVME_NS_BATCH];
    int status[NVME_NS_BATCH];
    struct tier *t = job->tier;
    unsigned count = n->n, writes = 0;

    for (unsigned i = 0; i < count; i++) {
        bool written = writes < n->n_writes && n->writes[writes] == &n->batch[i].record;

        writes += written;
        asked[i] = n->batch[i].asked;
        status[i] = one_done(t, &n->batch[i], written);
    }
    n->busy = false; /* a callback may ask for more */
    for (unsigned i = 0; i < count; i++)
        asked[i]->done_cb(asked[i], status[i]);
    write_next(t);
    for (unsigned i = 0; i < count; i++)
        nvme_release(t); /* the request's */
}

static void restore_done(struct nvme_job *job)
{
    struct nvme_ns_writer *n = LIST_ENTRY(job, struct nvme_ns_writer, job);
    struct tier *t = job->tier;

    n->busy = false;
    n->batch[0].asked->done_cb(n->batch[0].asked, n->status);
    write_next(t);
    nvme_release(t); /* the request's */
}

static void restore_run(struct nvme_job *job)
{
    struct nvme_ns_writer *n = LIST_ENTRY(job, struct nvme_ns_writer, job);

    n->status = ns_records_restore(&n->tier->ns_records);
}

/* A purge replaces the secret, so that the keys of what was stored before can't be derived any
 * more. */
static int secret_choose(struct tier *t, const struct tier_ns_record *asked,
                         const struct nvme_ns_record *known, uint8_t secret[NVME_SECRET_BYTES])
{
    if (known && nvme_ns_has_secret(known) && !asked->forget) {
        memcpy(secret, known->secret, NVME_SECRET_BYTES);
        return 0;
    }
    memset(secret, 0, NVME_SECRET_BYTES);
    return encryption_wanted_by(t->callbacks.encryption, asked->identity, asked->identity_bytes)
               ? encryption_random(secret, NVME_SECRET_BYTES)
               : 0;
}

static struct tier_ns_record *first(struct nvme_ns_writer *n)
{
    struct list *node = fair_queue_first(&n->queue);

    return node ? LIST_ENTRY(node, struct tier_ns_record, link) : NULL;
}

static void take(struct nvme_ns_writer *n, struct tier_ns_record *asked)
{
    list_remove(&asked->link);
    fair_queue_charge(&n->queue, &asked->who, NVME_PAGE, NULL);
    n->batch[n->n++].asked = asked;
}

/* A later record of a namespace goes by what an earlier one has made of it. */
static bool in_batch(const struct nvme_ns_writer *n, const uint8_t *fingerprint)
{
    for (unsigned i = 0; i < n->n; i++)
        if (memcmp(n->batch[i].asked->fingerprint, fingerprint, UCM_FINGERPRINT_BYTES) == 0)
            return true;
    return false;
}

static void record_make(struct tier *t, struct nvme_ns_one *one)
{
    struct nvme_ns_writer *n = &t->ns_writer;
    const struct tier_ns_record *asked = one->asked;
    const struct nvme_ns_record *known =
        asked->forget ? NULL : ns_records_find(&t->ns_records, asked->fingerprint);

    memcpy(one->record.fingerprint, asked->fingerprint, sizeof(one->record.fingerprint));
    memcpy(one->record.identity, asked->identity, asked->identity_bytes);
    one->record.identity_bytes = asked->identity_bytes;
    one->record.from_sequence = known ? known->from_sequence : asked->from_sequence;
    one->status = secret_choose(t, asked, known, one->record.secret);
    if (one->status == 0 && (!known || t->ns_records.unsynced ||
                             memcmp(known->secret, one->record.secret, NVME_SECRET_BYTES) != 0))
        n->writes[n->n_writes++] = &one->record;
}

/* Through the pool also when nothing needs to be written: done never runs inside the call. */
static void write_next(struct tier *t)
{
    struct nvme_ns_writer *n = &t->ns_writer;
    struct tier_ns_record *asked = n->busy ? NULL : first(n);

    if (!asked)
        return;
    n->busy = true;
    n->any = false;
    n->status = 0;
    n->n = n->n_writes = 0;
    if (!asked->fingerprint) {
        take(n, asked);
        nvme_job_start(t, &n->job, restore_run, restore_done);
        return;
    }
    if (ns_records_crowded(&t->ns_records) && !nvme_recovering(t))
        ns_records_prune(&t->ns_records, t->callbacks.ns_known_cb, t->callbacks.ctx);
    while (asked && asked->fingerprint && n->n < NVME_NS_BATCH &&
           !in_batch(n, asked->fingerprint)) {
        take(n, asked);
        record_make(t, &n->batch[n->n - 1]);
        asked = first(n);
    }
    nvme_job_start(t, &n->job, n->n_writes > 0 ? write_run : NULL, write_done);
}

static void push(struct tier *t, struct tier_ns_record *asked)
{
    nvme_hold(t);
    fair_queue_push(&t->ns_writer.queue, &asked->who, 0, &asked->link, false);
    write_next(t);
}

void nvme_ns_write(struct tier *t, struct tier_ns_record *asked)
{
    assert(asked->identity_bytes > 0 && asked->identity_bytes <= NVME_IDENTITY_BYTES);
    /* Also of one that is new: a former record of it may have been dropped with a purge in it. */
    if (asked->forget || asked->from_sequence == 0)
        asked->from_sequence = t->record_sequence;
    if (asked->forget)
        ns_records_forget(&t->ns_records, asked->fingerprint,
                          t->record_sequence); /* recovery may be under way */
    push(t, asked);
}

void nvme_ns_restore(struct tier *t, struct tier_ns_record *asked)
{
    asked->fingerprint = NULL;
    asked->who = (struct fair_who){0};
    push(t, asked);
}

/* Namespaces from before their tenant had keys get their secret. Where it can't be written, nothing
 * of them is stored. */
static void secrets_add(struct tier *t)
{
    for (uint32_t i = 0; i < t->ns_records.count; i++) {
        struct nvme_ns_record r = *ns_records_at(&t->ns_records, i);
        const struct nvme_ns_record *one = &r;
        bool any;
        int rc;

        if (nvme_ns_has_secret(&r) ||
            !encryption_wanted_by(t->callbacks.encryption, r.identity, r.identity_bytes))
            continue;
        rc = encryption_random(r.secret, sizeof(r.secret));
        if (rc == 0)
            rc = ns_records_write(&t->ns_records, &one, 1, &any);
        if (rc == 0)
            ns_records_secret(&t->ns_records, r.fingerprint, r.secret);
        else
            log_error("tier", "secret-not-written", "error=%s", strerror(-rc));
    }
}

/* After the records that may not be on the disk, the same once more. */
static bool ns_records_renew(struct tier *t)
{
    bool any;

    for (uint32_t i = 0; i < t->ns_records.count; i++) {
        const struct nvme_ns_record *one = ns_records_at(&t->ns_records, i);

        if (ns_records_write(&t->ns_records, &one, 1, &any) < 0)
            return false;
    }
    return true;
}

int nvme_ns_records_open(struct tier *t)
{
    const char *directories[NVME_LOC_FILES]; /* NULL: of a device that is not there */
    int rc;

    t->ns_writer.tier = t;
    for (unsigned i = 0; i < t->files; i++)
        directories[i] = t->devices[i].file.directory;
    rc = ns_records_open(&t->ns_records, directories, t->files);
    if (rc == 0 && t->ns_records.unsynced)
        t->ns_records.unsynced = !ns_records_renew(t);
    if (rc == 0 && t->callbacks.encryption)
        secrets_add(t);
    t->metrics->nvme_damaged_pages += t->ns_records.damaged;
    return rc;
}
