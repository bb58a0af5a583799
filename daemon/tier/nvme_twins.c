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
#define TWINS_MAX (1u << 18)

struct twin {
    struct list link;
    struct segment *segment; /* held as if read */
    uint32_t slot;
    struct nvme_slot_header header;
};

struct twin_read {
    struct tier_io io;
    struct tier *tier;
    struct twin *twin;
};

static void twin_free(struct tier *t, struct twin *w)
{
    segment_read_end(&t->segments, w->segment);
    free(w);
    t->recovery.twins_n--;
}

void nvme_twin_add(struct tier *t, struct segment *s, uint32_t slot,
                   const struct nvme_slot_header *h)
{
    struct twin *w =
        t->recovery.twins_n < TWINS_MAX && t->callbacks.lost ? malloc(sizeof(*w)) : NULL;

    if (!w)
        return; /* the place that was taken over has to do */
    *w = (struct twin){.segment = s, .slot = slot, .header = *h};
    segment_read_begin(s);
    list_push_back(&t->recovery.twins, &w->link);
    t->recovery.twins_n++;
}

/* ---- one that is read ---- */

static void read_done_cb(struct tier_io *io, int status)
{
    struct twin_read *r = (struct twin_read *)io;
    struct tier *t = r->tier;
    struct tier_twin other;
    struct segment *s;
    uint32_t slot;

    t->recovery.twin_reads--;
    if (!t->closing && status < 0 && status != -ESTALE) {
        if (segment_find(&t->segments, io->place.loc, io->bytes, &s, &slot) == 0)
            t->callbacks.lost(t->callbacks.ctx, io->name.owner, io->place.loc);
        (void)nvme_recover_twin(t, r->twin->segment, r->twin->slot, &r->twin->header, &other);
    }
    twin_free(t, r->twin);
    free(io->data);
    free(r);
    nvme_recover_go_on(t);
    nvme_release(t);
}

static int read_start(struct tier *t, struct twin *w, const struct tier_twin *other)
{
    struct twin_read *r = calloc(1, sizeof(*r));
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
        r->twin = w;
        rc = nvme_read(t, &r->io);
    }
    if (rc < 0) {
        free(data);
        free(r);
        return rc;
    }
    t->recovery.twin_reads++;
    nvme_hold(t);
    return 0;
}

/* ---- one after the other ---- */

bool nvme_twins_step(struct tier *t)
{
    struct nvme_recovery *k = &t->recovery;

    while (k->twin_reads < READS && !list_empty(&k->twins)) {
        struct twin *w = LIST_ENTRY(k->twins.next, struct twin, link);
        struct tier_twin other;
        int rc = 0;

        /* Asked again: the other place may be known to be bad by now, or have been replaced. */
        if (!nvme_recover_twin(t, w->segment, w->slot, &w->header, &other) && other.owner != 0)
            rc = read_start(t, w, &other);
        if (rc == -EAGAIN && k->twin_reads > 0)
            break;
        list_remove(&w->link);
        if (rc < 0)
            log_warn("tier", "copy-not-compared", "error=%s", strerror(-rc));
        if (rc < 0 || other.owner == 0)
            twin_free(t, w);
    }
    return k->twin_reads > 0 || !list_empty(&k->twins);
}

void nvme_twins_drop(struct tier *t)
{
    struct list *node;

    while ((node = list_pop_front(&t->recovery.twins)) != NULL)
        twin_free(t, LIST_ENTRY(node, struct twin, link));
}
