/* Records that recovery has found, and its last step: parts that were found twice with one
 * sequence. One is the moved copy of the other. The run that moved it may have ended while it wrote
 * the copy, or over the original. So either may be torn, and headers don't show which. So the place
 * that was taken over is read, and where its bytes are wrong or can't be read the other one takes
 * its place. */
#include "daemon/tier/nvme.h"

#include "daemon/base/kill_point.h"
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
    struct tier_duplicate other; /* the place that was taken over, while it is read */
};

/* Offers the caller a record whose header is known. False: the part is known already, at `other`,
 * or, with owner 0, not wanted. */
static bool record_offer(struct tier *t, struct segment *s, uint32_t record,
                         const struct nvme_record_header *h, struct tier_duplicate *other)
{
    const struct nvme_ns_record *known = ns_records_find(&t->ns_records, h->fingerprint);
    struct tier_name name = {.key_bytes = h->key_bytes, .part = h->part};
    struct tier_found found = {
        .name = &name,
        .bytes = h->payload_bytes,
        .sequence = h->sequence,
        .place = {.loc = segment_loc(&t->segments, s, record),
                  .checksum = h->checksum,
                  .encrypted = h->encrypted},
        .duplicate = other,
    };
    uint64_t owner = 0;

    *other = (struct tier_duplicate){.owner = 0};
    KILL_POINT("recover-record");
    s->unknown |= !known && t->ns_records.unread;
    if (known && !h->encrypted && !nvme_plaintext_allowed(t, known)) {
        t->recovery.plaintext++;
    } else if (known && h->sequence >= known->from_sequence) {
        memcpy(name.fingerprint, h->fingerprint, sizeof(name.fingerprint));
        memcpy(name.key, h->key, h->key_bytes);
        found.identity = known->identity;
        found.identity_bytes = known->identity_bytes;
        found.ns_record_unsynced = t->ns_records.unsynced;
        owner = t->callbacks.restore_cb(t->callbacks.ctx, &found);
    }
    if (owner == 0)
        return false;
    segment_tag_set(s, record, h->encrypted ? segment_tag(h->key_id) : 0);
    segment_restore(&t->segments, s, record, owner, h->sequence);
    t->metrics->nvme_recovered_parts++;
    t->metrics->nvme_bytes_used = t->segments.used_bytes;
    return true;
}

static void duplicate_free(struct tier *t, struct duplicate *w)
{
    segment_read_end(&t->segments, w->segment);
    free(w);
    t->recovery.duplicates_n--;
}

static void duplicate_add(struct tier *t, struct segment *s, uint32_t record,
                          const struct nvme_record_header *h)
{
    struct duplicate *w = t->recovery.duplicates_n < DUPLICATES_MAX ? malloc(sizeof(*w)) : NULL;

    if (!w)
        return; /* keeps the place that was taken over */
    *w = (struct duplicate){.segment = s, .record = record, .header = *h};
    segment_read_begin(s);
    list_push_back(&t->recovery.duplicates, &w->link);
    t->recovery.duplicates_n++;
}

void nvme_record_found(struct tier *t, struct segment *s, uint32_t record,
                       const struct nvme_record_header *h)
{
    struct tier_duplicate other;

    if (record_offer(t, s, record, h, &other))
        return;
    t->recovery.refused++;
    if (other.owner != 0)
        duplicate_add(t, s, record, h);
}

/* ---- one that is read ---- */

static void check_done_cb(struct tier *t, void *ctx, int status, bool bad_header)
{
    struct duplicate *w = ctx;
    struct tier_duplicate other;
    struct segment *s;
    uint32_t record;

    (void)bad_header; /* none was looked at */
    t->recovery.duplicate_reads--;
    if (!t->closing && status < 0 && status != -ESTALE && status != -ENOKEY) {
        if (segment_find(&t->segments, w->other.place.loc, w->header.payload_bytes, &s, &record) ==
            0)
            t->callbacks.lost_cb(t->callbacks.ctx, w->other.owner, w->other.place.loc);
        (void)record_offer(t, w->segment, w->record, &w->header, &other);
    }
    duplicate_free(t, w);
    nvme_iteration_want(t, NVME_TURN_RECOVERY);
}

static int check_start(struct tier *t, struct duplicate *w, const struct tier_duplicate *other)
{
    int rc = nvme_check(t, &(struct nvme_check){.owner = other->owner,
                                                .part = w->header.part,
                                                .bytes = w->header.payload_bytes,
                                                .place = other->place,
                                                .done_cb = check_done_cb,
                                                .ctx = w});

    w->other = *other;
    t->recovery.duplicate_reads += rc == 0;
    return rc;
}

/* ---- one after the other ---- */

bool nvme_duplicates_go_on(struct tier *t)
{
    struct nvme_recovery *k = &t->recovery;

    while (k->duplicate_reads < READS && !list_empty(&k->duplicates)) {
        struct duplicate *w = LIST_ENTRY(k->duplicates.next, struct duplicate, link);
        struct tier_duplicate other;
        int rc = 0;

        /* Once more: the other place may be known to be bad by now, or have been replaced. */
        if (!record_offer(t, w->segment, w->record, &w->header, &other) && other.owner != 0)
            rc = check_start(t, w, &other);
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
