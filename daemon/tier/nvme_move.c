/* Parts that were read since they were written, and guaranteed parts, are moved before their
 * segment is reused. So the log does not drop them. If at most half of a segment is live, all its
 * parts are moved: a start closes the segments that were being filled, so that few parts, the
 * newest, would occupy many segments.
 *
 * When few segments are free, one is emptied ahead of need: a sparse one if there is any, else the
 * oldest of the least warm. Up to a percentage of its records (those that were read), all
 * guaranteed ones, or all of a sparse segment are read, written to the head of the log, and synced;
 * then the rest is dropped. Until then the segment is held as if read and not reused, so a whole
 * copy lies on storage at every moment. Where the sync fails the segment is not reused at all.
 * Writes that need its space wait meanwhile. That wait is bounded: a move that finds no space, or
 * fails, is given up. */
#include "daemon/tier/nvme.h"

#include "daemon/base/kill_point.h"

#include <errno.h>
#include <stdlib.h>

#define MOVES 8u               /* read and written at a time, */
#define MOVE_BYTES (16u << 20) /* and of this many bytes, or one */
#define MOVED_MAX 4096u        /* of one segment */
#define SEGMENTS_TURN 4u       /* emptied in one go when nothing in them is to be moved */

struct move {
    struct tier_io io;
    struct list link; /* in mover->moved */
    struct nvme_mover *mover;
    uint32_t record;
    uint64_t from;
};

static void pump(struct nvme_mover *m);

static void move_free(struct move *v)
{
    if (v->io.data)
        v->mover->bytes -= nvme_padded(v->io.bytes);
    nvme_sums_drop(&v->io);
    free(v->io.data);
    free(v);
}

static void move_end(struct move *v)
{
    struct nvme_mover *m = v->mover;

    move_free(v);
    m->active--;
    pump(m);
}

/* ---- one part ---- */

static bool still_there(const struct move *v)
{
    return !v->mover->tier->closing && v->mover->segment->states[v->record] == RECORD_LIVE;
}

static void written_cb(struct tier_io *io, int status)
{
    struct move *v = LIST_ENTRY(io, struct move, io);
    struct nvme_mover *m = v->mover;
    struct tier *t = m->tier;

    if (status < 0) {
        move_end(v);
        return;
    }
    KILL_POINT("move-written");
    if (!still_there(v) ||
        !t->callbacks.moved_cb(t->callbacks.ctx, io->name.owner, v->from, &io->place)) {
        nvme_forget(t, &io->place, io->bytes);
        move_end(v);
        return;
    }
    segment_forget(&t->segments, m->segment, v->record); /* held: it is not freed by this */
    t->metrics->nvme_rewritten++;
    m->bytes -= nvme_padded(io->bytes);
    free(io->data);
    io->data = NULL;
    list_push_back(&m->moved, &v->link);
    m->active--;
    pump(m);
}

static void read_cb(struct tier_io *io, int status)
{
    struct move *v = LIST_ENTRY(io, struct move, io);

    KILL_POINT("move-read");
    if (status == -EBADMSG && still_there(v))
        v->mover->tier->callbacks.lost_cb(v->mover->tier->callbacks.ctx, io->name.owner,
                                          io->place.loc);
    if (status < 0 || !still_there(v)) {
        move_end(v);
        return;
    }
    v->from = io->place.loc;
    io->op = TIER_WRITE;
    io->done_cb = written_cb;
    /* With the sequence of its first write, which a purge of its namespace goes by. */
    if (nvme_write_moved(v->mover->tier, io, v->mover->segment->record_sequences[v->record]) < 0)
        move_end(v);
}

static int move_start(struct nvme_mover *m, uint32_t record)
{
    struct tier *t = m->tier;
    uint64_t owner = m->segment->owners[record];
    struct tier_described d;
    struct move *v;
    int rc;

    if (!nvme_describe(t, m->segment, record, &d))
        return -ENOENT;
    v = calloc(1, sizeof(*v));
    if (!v)
        return -ENOMEM;
    v->mover = m;
    v->record = record;
    v->io = (struct tier_io){
        .op = TIER_READ,
        .data = aligned_alloc(NVME_PAGE, nvme_padded(d.bytes)),
        .bytes = d.bytes,
        .buffer = UINT32_MAX,
        .check = true,
        .layer_bytes = d.layer_bytes,
        .name = d.name,
        .place = {.loc = segment_loc(&t->segments, m->segment, record),
                  .checksum = d.checksum,
                  .encrypted = d.encrypted},
        .encryption = nvme_encryption_wanted(t, d.name.fingerprint),
        .done_cb = read_cb,
    };
    v->io.name.owner = owner;
    nvme_sums_reserve(&v->io);
    m->bytes += v->io.data ? nvme_padded(d.bytes) : 0;
    rc = v->io.data ? nvme_read(t, &v->io, false) : -ENOMEM;
    if (rc < 0)
        move_free(v);
    else
        m->active++;
    return rc;
}

/* ---- one segment ---- */

static void synced_cb(struct tier_io *io, int status)
{
    struct move *v = LIST_ENTRY(io, struct move, io);

    v->mover->unsynced |= status < 0 && status != -ESTALE; /* it was forgotten, or purged */
    KILL_POINT("move-synced");
    move_end(v);
}

/* The copies are on stable storage before the originals can be written over. */
static void sync_all(struct nvme_mover *m)
{
    struct list *node;
    int rc;

    m->active++; /* so that none that ends at once is taken for the last */
    while ((node = list_pop_front(&m->moved)) != NULL) {
        struct move *v = LIST_ENTRY(node, struct move, link);

        v->io.op = TIER_SYNC;
        v->io.done_cb = synced_cb;
        m->active++;
        rc = m->tier->closing ? -ECANCELED : nvme_sync_part(m->tier, &v->io);
        if (rc < 0) {
            m->unsynced |= rc != -ESTALE;
            m->active--;
            move_free(v);
        }
    }
    m->active--;
}

/* Drops what is left. False: the next iteration of the event loop goes on. A withheld segment gives
 * no space: its sound parts stay. */
static bool rest_dropped(struct nvme_mover *m)
{
    struct tier *t = m->tier;
    uint64_t dropped;
    bool over = segment_take(&t->segments, m->segment, &t->callbacks,
                             NVME_ITERATION_DROPS - t->iteration.drops, &dropped);

    nvme_iteration_dropped(t, dropped);
    if (!over)
        nvme_iteration_want(t, NVME_TURN_MOVE);
    return over;
}

static void segment_end(struct nvme_mover *m)
{
    struct tier *t = m->tier;
    struct segment *s = m->segment;

    if (m->unsynced)
        segment_withhold(&t->segments, s);
    if (!t->closing && !rest_dropped(m))
        return;
    m->segment = NULL;
    segment_read_end(&t->segments, s);
    t->metrics->nvme_reclaimed_segments += s->state == SEGMENT_FREE && !s->withheld;
    t->metrics->nvme_bytes_used = t->segments.used_bytes;
    t->stalled = false; /* the caller pumps the writes */
    nvme_move_check(t);
    nvme_release(t);
}

static bool is_kept(const struct nvme_mover *m, uint32_t record)
{
    const struct tier_callbacks *cb = &m->tier->callbacks;
    const struct segment *s = m->segment;

    return s->states[record] == RECORD_LIVE && s->owners[record] &&
           cb->heat_cb(cb->ctx, s->owners[record]) == TIER_HEAT_KEPT;
}

static void parts_start(struct nvme_mover *m)
{
    const struct segment *s = m->segment;

    while (!m->tier->closing && !s->withheld && m->moves > 0 && m->record < s->records &&
           m->active < MOVES && (m->active == 0 || m->bytes < MOVE_BYTES)) {
        uint32_t record = m->record++;
        bool kept = m->sparse || is_kept(m, record);
        int rc;

        if (!kept && (!s->used[record] || m->left == 0))
            continue;
        rc = move_start(m, record);
        if (rc == -ENOMEM || rc == -EAGAIN)
            m->moves = 0; /* the rest is dropped */
        m->moves -= rc == 0;
        m->left -= rc == 0 && !kept;
    }
}

static void pump(struct nvme_mover *m)
{
    parts_start(m);
    if (m->active == 0)
        sync_all(m);
    if (m->active == 0)
        segment_end(m);
}

void nvme_move_go_on(struct tier *t)
{
    pump(&t->mover);
}

void nvme_move_check(struct tier *t)
{
    struct nvme_mover *m = &t->mover;

    if (m->percent == 0 || m->segment || m->checking || t->closing || nvme_recovering(t))
        return;
    m->checking = true;
    for (unsigned i = 0; i < SEGMENTS_TURN && !m->segment && segment_short(&t->segments); i++) {
        struct segment *s = segment_victim(&t->segments, &t->callbacks, &m->sparse);

        if (!s)
            break;
        nvme_hold(t);
        segment_read_begin(s);
        m->segment = s;
        m->unsynced = false;
        m->record = 0;
        m->left = (uint32_t)((uint64_t)s->records * m->percent / 100);
        m->moves = MOVED_MAX;
        pump(m);
    }
    m->checking = false;
}
