/* Namespaces become known to later starts: one at a time, in the thread pool. */
#include "daemon/tier/nvme.h"

#include "daemon/base/log.h"
#include "daemon/seal/seal.h"

#include <assert.h>
#include <string.h>

static void write_next(struct tier *t);

static void write_run(struct nvme_job *job)
{
    struct nvme_ns_writer *n = LIST_ENTRY(job, struct nvme_ns_writer, job);

    n->status = ns_records_write(&n->tier->ns_records, &n->record, &n->any);
}

static void write_done(struct nvme_job *job)
{
    struct nvme_ns_writer *n = LIST_ENTRY(job, struct nvme_ns_writer, job);
    struct tier *t = job->tier;
    struct tier_ns_record *asked =
        LIST_ENTRY(list_pop_front(&n->queue), struct tier_ns_record, link);

    n->busy = false;
    if (n->status == 0 && asked->fingerprint)
        n->status = ns_records_set(&t->ns_records, &n->record);
    /* Where one of several folders has a purge's new seed, the next start goes by that. */
    if ((n->status == 0 || (n->any && asked->forget)) && asked->fingerprint)
        ns_records_seed(&t->ns_records, n->record.fingerprint, n->record.seed);
    asked->done_cb(asked, n->status);
    write_next(t);
    nvme_release(t); /* the request's */
}

static void restore_run(struct nvme_job *job)
{
    struct nvme_ns_writer *n = LIST_ENTRY(job, struct nvme_ns_writer, job);

    n->status = ns_records_restore(&n->tier->ns_records);
}

/* A purge replaces the seed, so that the keys of what was stored before can't be derived any more. */
static int seed_choose(struct tier *t, const struct tier_ns_record *asked,
                       const struct nvme_ns_record *known, uint8_t seed[NVME_SEED_BYTES])
{
    if (known && nvme_ns_seeded(known) && !asked->forget) {
        memcpy(seed, known->seed, NVME_SEED_BYTES);
        return 0;
    }
    memset(seed, 0, NVME_SEED_BYTES);
    return seal_wanted_by(t->callbacks.seal, asked->identity, asked->identity_bytes)
               ? seal_random(seed, NVME_SEED_BYTES)
               : 0;
}

/* Through the pool also when nothing needs to be written: done never runs inside the call. */
static void write_next(struct tier *t)
{
    struct nvme_ns_writer *n = &t->ns_writer;
    const struct tier_ns_record *asked;
    const struct nvme_ns_record *known;
    bool there;

    if (n->busy || list_empty(&n->queue))
        return;
    asked = LIST_ENTRY(n->queue.next, struct tier_ns_record, link);
    if (!asked->fingerprint) {
        n->busy = true;
        nvme_job_start(t, &n->job, restore_run, write_done);
        return;
    }
    if (ns_records_crowded(&t->ns_records) && !nvme_recovering(t))
        ns_records_prune(&t->ns_records, t->callbacks.ns_known_cb, t->callbacks.ctx);
    known = asked->forget ? NULL : ns_records_find(&t->ns_records, asked->fingerprint);
    memcpy(n->record.fingerprint, asked->fingerprint, sizeof(n->record.fingerprint));
    memcpy(n->record.identity, asked->identity, asked->identity_bytes);
    n->record.identity_bytes = asked->identity_bytes;
    n->record.from_sequence = known ? known->from_sequence : asked->from_sequence;
    n->busy = true;
    n->any = false;
    n->status = seed_choose(t, asked, known, n->record.seed);
    there = known && !t->ns_records.unsynced &&
            memcmp(known->seed, n->record.seed, NVME_SEED_BYTES) == 0;
    nvme_job_start(t, &n->job, there || n->status < 0 ? NULL : write_run, write_done);
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
    nvme_hold(t);
    list_push_back(&t->ns_writer.queue, &asked->link);
    write_next(t);
}

void nvme_ns_restore(struct tier *t, struct tier_ns_record *asked)
{
    asked->fingerprint = NULL;
    nvme_hold(t);
    list_push_back(&t->ns_writer.queue, &asked->link);
    write_next(t);
}

/* Namespaces from before their tenant had keys get their seed. Where it can't be written, nothing of them is stored. */
static void seeds_add(struct tier *t)
{
    for (uint32_t i = 0; i < t->ns_records.count; i++) {
        struct nvme_ns_record r = *ns_records_at(&t->ns_records, i);
        bool any;
        int rc;

        if (nvme_ns_seeded(&r) || !seal_wanted_by(t->callbacks.seal, r.identity, r.identity_bytes))
            continue;
        rc = seal_random(r.seed, sizeof(r.seed));
        if (rc == 0)
            rc = ns_records_write(&t->ns_records, &r, &any);
        if (rc == 0)
            ns_records_seed(&t->ns_records, r.fingerprint, r.seed);
        else
            log_error("tier", "seed-not-written", "error=%s", strerror(-rc));
    }
}

/* Behind the records that may not be on the disk, the same once more. */
static bool ns_records_renew(struct tier *t)
{
    bool any;

    for (uint32_t i = 0; i < t->ns_records.count; i++)
        if (ns_records_write(&t->ns_records, ns_records_at(&t->ns_records, i), &any) < 0)
            return false;
    return true;
}

int nvme_ns_records_open(struct tier *t)
{
    const char *folders[NVME_LOC_FILES]; /* NULL: of a device that is not there */
    int rc;

    t->ns_writer.tier = t;
    for (unsigned i = 0; i < t->files; i++)
        folders[i] = t->devices[i].file.folder;
    rc = ns_records_open(&t->ns_records, folders, t->files);
    if (rc == 0 && t->ns_records.unsynced)
        t->ns_records.unsynced = !ns_records_renew(t);
    if (rc == 0 && t->callbacks.seal)
        seeds_add(t);
    t->metrics->nvme_damaged_pages += t->ns_records.damaged;
    return rc;
}
