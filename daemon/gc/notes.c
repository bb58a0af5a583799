/* Tenant files: for each namespace that this host writes, a note on each root whose it is, for the
 * host that collects (quota.h). Its name has the namespace's fingerprint, its payload the tenant's
 * name, zeros after it. Written again after a while, as a collector removes the notes of
 * namespaces without files; a file that is there already is left as it is. */
#include "daemon/shared/shared_internal.h"

#include <stdlib.h>
#include <string.h>

#define NOTED_MS 3600000u

struct note {
    struct shared_task task;
    struct shared *shared;
    uint8_t tenant[UCM_MAX_NAME_BYTES];
};

static void noted_cb(struct shared_task *t)
{
    struct note *n = LIST_ENTRY(t, struct note, task);

    n->shared->noting--;
    free(n);
}

static bool note_write(struct shared *s, struct shared_root *r, const struct shared_io *io)
{
    struct note *n = calloc(1, sizeof(*n));
    struct shared_op *op;

    if (!n)
        return false;
    n->shared = s;
    memcpy(n->tenant, io->tenant, strnlen(io->tenant, sizeof(n->tenant)));
    op = &n->task.op;
    op->verb = SHARED_WRITE;
    op->by_name = op->note = true;
    op->bucket = BLOCK_FILE_TENANT_BUCKET;
    block_file_tenant_name(io->id.fingerprint, op->name);
    /* In the header's place for it; only the first byte is looked at. */
    memcpy(op->identity + 1, io->id.fingerprint, sizeof(op->identity) - 1);
    op->identity[0] = BLOCK_FILE_TENANT_BUCKET;
    op->data = n->tenant;
    op->bytes = sizeof(n->tenant);
    op->sync = s->settings.sync;
    n->task.class = SHARED_BACKGROUND;
    n->task.deadline_ms = shared_now(s) + s->settings.timeout_ms;
    n->task.released_cb = noted_cb;
    if (shared_root_submit(r, &n->task) < 0) {
        free(n);
        return false;
    }
    s->noting++;
    return true;
}

void shared_tenant_note(struct shared *s, const struct shared_io *io)
{
    struct shared_noted *at;
    uint32_t hash; /* a fingerprint's bytes are as good as random */

    if (!io->tenant || s->noting >= SHARED_NOTES_MAX)
        return;
    memcpy(&hash, io->id.fingerprint, sizeof(hash));
    at = &s->noted[hash % SHARED_NOTED];
    if (memcmp(at->fingerprint, io->id.fingerprint, sizeof(at->fingerprint)) != 0 ||
        shared_now(s) >= at->until_ms) {
        memcpy(at->fingerprint, io->id.fingerprint, sizeof(at->fingerprint));
        at->until_ms = shared_now(s) + NOTED_MS;
        at->roots = 0;
    }
    for (uint32_t i = 0; i < s->n; i++)
        if (!(at->roots >> i & 1) && shared_root_takes_writes(s->roots[i]) &&
            note_write(s, s->roots[i], io))
            at->roots |= 1u << i;
}
