/* Namespaces become known to later starts: one at a time, in the thread pool. */
#include "daemon/tier/nvme.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

static void name_next(struct tier *t);

static void write_run(struct nvme_job *job)
{
    struct nvme_ns_writer *n = LIST_ENTRY(job, struct nvme_ns_writer, job);

    n->status = ns_records_write(&n->tier->names, &n->name);
}

static void write_done(struct nvme_job *job)
{
    struct nvme_ns_writer *n = LIST_ENTRY(job, struct nvme_ns_writer, job);
    struct tier *t = job->tier;
    struct tier_ns_record *asked =
        LIST_ENTRY(list_pop_front(&n->queue), struct tier_ns_record, link);

    n->busy = false;
    if (n->status == 0)
        n->status = ns_records_set(&t->names, &n->name);
    asked->done(asked, n->status);
    name_next(t);
    nvme_release(t); /* the request's */
}

/* Through the pool also when nothing needs to be written: done never runs inside the call. */
static void name_next(struct tier *t)
{
    struct nvme_ns_writer *n = &t->naming;
    const struct tier_ns_record *asked;
    const struct nvme_ns_record *known;
    bool kept;

    if (n->busy || list_empty(&n->queue))
        return;
    asked = LIST_ENTRY(n->queue.next, struct tier_ns_record, link);
    if (ns_records_crowded(&t->names) && !nvme_recovering(t))
        ns_records_prune(&t->names, t->callbacks.ns_known, t->callbacks.ctx);
    known = asked->forget ? NULL : ns_records_find(&t->names, asked->fingerprint);
    kept = known && !t->names.doubtful;
    memcpy(n->name.fingerprint, asked->fingerprint, sizeof(n->name.fingerprint));
    memcpy(n->name.identity, asked->identity, asked->identity_bytes);
    n->name.identity_bytes = asked->identity_bytes;
    n->name.from_sequence = known ? known->from_sequence : asked->from_sequence;
    n->busy = true;
    n->status = 0;
    nvme_job_start(t, &n->job, kept ? NULL : write_run, write_done);
}

void nvme_ns_write(struct tier *t, struct tier_ns_record *asked)
{
    assert(asked->identity_bytes > 0 && asked->identity_bytes <= NVME_IDENTITY_BYTES);
    /* Also of one that is new: a former record of it may have been dropped with a purge in it. */
    if (asked->forget || asked->from_sequence == 0)
        asked->from_sequence = t->record_sequence;
    if (asked->forget)
        ns_records_forget(&t->names, asked->fingerprint,
                          t->record_sequence); /* recovery may be under way */
    nvme_hold(t);
    list_push_back(&t->naming.queue, &asked->link);
    name_next(t);
}

/* Behind the records that may not be on the disk, the same once more. */
static bool ns_records_renew(struct tier *t)
{
    for (uint32_t i = 0; i < t->names.count; i++)
        if (ns_records_write(&t->names, t->names.name[i]) < 0)
            return false;
    return true;
}

int nvme_ns_records_open(struct tier *t)
{
    const char *folders[NVME_LOC_FILES];
    int rc;

    list_init(&t->naming.queue);
    t->naming.tier = t;
    for (unsigned i = 0; i < t->files; i++)
        folders[i] = t->devices[i].file.fd < 0 ? NULL : t->devices[i].folder;
    rc = ns_records_open(&t->names, folders, t->files);
    if (rc == 0 && t->names.doubtful)
        t->names.doubtful = !ns_records_renew(t);
    t->metrics->nvme_damaged_pages += t->names.damaged;
    return rc;
}
