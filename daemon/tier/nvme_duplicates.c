/* Recovery's last step: parts that were found twice under one number of a write. One is the copy of
 * the other: the end of the run that moved it may have cut the move off, so that the copy is not
 * whole, or have come while the original was being written over, so that this one is not. Headers
 * don't tell. So the place that was taken over is read, and where its bytes are wrong, or can't be
 * read, the other one takes over. */
#include "daemon/tier/nvme.h"

#include "daemon/base/log.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define READS 8u
#define DUPLICATES_MAX (1u << 18)

struct duplicate {
    struct list link;
    struct segment *segment; /* held as if read */
    uint32_t record;
    struct nvme_record_header header;
};

struct duplicate_read {
    struct tier_io io;
    struct tier *tier;
    struct duplicate *duplicate;
};

static void duplicate_free(struct tier *t, struct duplicate *w)
{
    segment_read_end(&t->segments, w->segment);
    free(w);
    t->recovery.duplicates_n--;
}

void nvme_duplicate_add(struct tier *t, struct segment *s, uint32_t record,
                        const struct nvme_record_header *h)
{
    struct duplicate *w =
        t->recovery.duplicates_n < DUPLICATES_MAX && t->callbacks.lost ? malloc(sizeof(*w)) : NULL;

    if (!w)
        return; /* the place that was taken over has to do */
    *w = (struct duplicate){.segment = s, .record = record, .header = *h};
    segment_read_begin(s);
    list_push_back(&t->recovery.duplicates, &w->link);
    t->recovery.duplicates_n++;
}

/* ---- one that is read ---- */

static void read_done_cb(struct tier_io *io, int status)
{
    struct duplicate_read *r = (struct duplicate_read *)io;
    struct tier *t = r->tier;
    struct tier_duplicate other;
    struct segment *s;
    uint32_t record;

    t->recovery.duplicate_reads--;
    if (!t->closing && status < 0 && status != -ESTALE) {
        if (segment_find(&t->segments, io->place.loc, io->bytes, &s, &record) == 0)
            t->callbacks.lost(t->callbacks.ctx, io->name.owner, io->place.loc);
        (void)nvme_recover_duplicate(t, r->duplicate->segment, r->duplicate->record,
                                     &r->duplicate->header, &other);
    }
    duplicate_free(t, r->duplicate);
    free(io->data);
    free(r);
    nvme_recover_go_on(t);
    nvme_release(t);
}

static int read_start(struct tier *t, struct duplicate *w, const struct tier_duplicate *other)
{
    struct duplicate_read *r = calloc(1, sizeof(*r));
    uint64_t bytes = w->header.payload_bytes;
    void *data = r ? aligned_alloc(NVME_PAGE, nvme_padded(bytes)) : NULL;
    int rc = -ENOMEM;

    if (data) {
        r->io = (struct tier_io){.op = TIER_READ,
                                 .data = data,
                                 .bytes = bytes,
                                 .buffer = UINT32_MAX,
                                 .check = true,
                                 .place = other->place,
                                 .done = read_done_cb};
        r->io.name.part = w->header.part;
        r->io.name.owner = other->owner;
        r->tier = t;
        r->duplicate = w;
        rc = nvme_read(t, &r->io);
    }
    if (rc < 0) {
        free(data);
        free(r);
        return rc;
    }
    t->recovery.duplicate_reads++;
    nvme_hold(t);
    return 0;
}

/* ---- one after the other ---- */

bool nvme_duplicates_step(struct tier *t)
{
    struct nvme_recovery *k = &t->recovery;

    while (k->duplicate_reads < READS && !list_empty(&k->duplicates)) {
        struct duplicate *w = LIST_ENTRY(k->duplicates.next, struct duplicate, link);
        struct tier_duplicate other;
        int rc = 0;

        /* Asked again: the other place may be known to be bad by now, or have been replaced. */
        if (!nvme_recover_duplicate(t, w->segment, w->record, &w->header, &other) &&
            other.owner != 0)
            rc = read_start(t, w, &other);
        if (rc == -EAGAIN && k->duplicate_reads > 0)
            break;
        list_remove(&w->link);
        if (rc < 0)
            log_warn("tier", "copy-not-compared", "error=%s", strerror(-rc));
        if (rc < 0 || other.owner == 0)
            duplicate_free(t, w);
    }
    return k->duplicate_reads > 0 || !list_empty(&k->duplicates);
}

void nvme_duplicates_drop(struct tier *t)
{
    struct list *node;

    while ((node = list_pop_front(&t->recovery.duplicates)) != NULL)
        duplicate_free(t, LIST_ENTRY(node, struct duplicate, link));
}
