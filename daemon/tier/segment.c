#include "daemon/tier/segment.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

/* Strides that may be open in one file at a time, unless the file is small. */
#define OPEN_MAX_STRIDES 64u

/* Free segments that a file should have: a 1/SHORT_FRACTION of all, between SHORT_MIN and
 * SHORT_MAX. A file of fewer than SHORT_SMALL segments needs one. */
#define SHORT_FRACTION 32u
#define SHORT_MIN 2u
#define SHORT_MAX 4u
#define SHORT_SMALL 8u

uint64_t segment_offset(const struct segment_table *t, const struct segment *s)
{
    return NVME_DATA_OFFSET + s->number * t->segment_bytes;
}

uint64_t segment_record_offset(const struct segment_table *t, const struct segment *s,
                               uint32_t record)
{
    return segment_offset(t, s) + nvme_record_offset(segment_stride(s), record);
}

uint64_t segment_loc(const struct segment_table *t, const struct segment *s, uint32_t record)
{
    return nvme_loc(s->file, segment_record_offset(t, s, record) / NVME_PAGE, s->sequence);
}

/* ---- the table ---- */

static int file_init(struct segment_table *t, uint32_t file, uint64_t count)
{
    struct segment_file *f = &t->file[file];

    list_init(&f->free);
    list_init(&f->open);
    f->segments = calloc(count ? count : 1, sizeof(f->segments[0]));
    if (!f->segments)
        return -ENOMEM;
    f->count = f->free_count = (uint32_t)count;
    f->writable = count > 0;
    for (uint32_t i = 0; i < f->count; i++) {
        f->segments[i].file = file;
        f->segments[i].number = i;
        list_push_back(&f->free, &f->segments[i].link);
    }
    t->capacity_bytes += count * t->segment_bytes;
    return 0;
}

int segment_table_init(struct segment_table *t, uint64_t segment_bytes, uint64_t sequence,
                       const uint64_t *counts, uint32_t files)
{
    *t = (struct segment_table){
        .segment_bytes = segment_bytes, .sequence = sequence, .files = files};
    t->file = calloc(files, sizeof(t->file[0]));
    t->keyed =
        calloc(SEGMENT_TAGS, sizeof(t->keyed[0])); /* 1 MiB, of which few pages are touched */
    if (!t->file || !t->keyed) {
        segment_table_close(t);
        return -ENOMEM;
    }
    for (unsigned i = 0; i < SEGMENT_RANKS; i++)
        list_init(&t->closed[i]);
    for (uint32_t i = 0; i < files; i++) {
        int rc = file_init(t, i, counts[i]);

        if (rc < 0) {
            segment_table_close(t);
            return rc;
        }
    }
    return 0;
}

void segment_table_close(struct segment_table *t)
{
    for (uint32_t i = 0; t->file && i < t->files; i++) {
        struct segment_file *f = &t->file[i];

        for (uint32_t k = 0; k < f->count; k++)
            free(f->segments[k].owners);
        free(f->segments);
    }
    free(t->file);
    free(t->keyed);
    t->file = NULL;
    t->keyed = NULL;
}

bool segment_writable(const struct segment_table *t)
{
    for (uint32_t i = 0; i < t->files; i++)
        if (t->file[i].writable)
            return true;
    return false;
}

/* ---- a segment is free, open, closed, free again ---- */

static uint8_t segment_rank(const struct segment *s)
{
    return (uint8_t)((uint64_t)s->live * SEGMENT_RANKS / (s->records + 1));
}

/* Reclaim looks at t->closed only: a withheld segment is in no list, nor is a closed one of a file
 * that takes no writes. */
void segment_list(struct segment_table *t, struct segment *s)
{
    struct segment_file *f = &t->file[s->file];

    list_remove(&s->link);
    if (s->withheld)
        return;
    if (s->state == SEGMENT_FREE)
        list_push_back(&f->free, &s->link);
    else if (s->state == SEGMENT_OPEN)
        list_push_back(&f->open, &s->link);
    else if (f->writable)
        list_push_back(&t->closed[s->rank], &s->link);
}

static void segment_change(struct segment_table *t, struct segment *s, enum segment_state state,
                           bool withheld)
{
    struct segment_file *f = &t->file[s->file];

    f->free_count -= s->state == SEGMENT_FREE && !s->withheld;
    f->open_count -= s->state == SEGMENT_OPEN;
    s->state = state;
    s->withheld = withheld;
    s->rank = segment_rank(s);
    f->free_count += s->state == SEGMENT_FREE && !s->withheld;
    f->open_count += s->state == SEGMENT_OPEN;
    segment_list(t, s);
}

/* A closed segment takes the list of its rank, or is free at once when nothing in it counts. */
static void segment_settle(struct segment_table *t, struct segment *s)
{
    if (s->state != SEGMENT_CLOSED)
        return;
    if (s->live == 0 && s->reads == 0 && s->writes == 0) {
        free(s->owners);
        s->owners = s->record_sequences = NULL;
        s->states = s->used = NULL;
        s->tags = NULL;
        segment_change(t, s, SEGMENT_FREE, s->withheld);
    } else if (segment_rank(s) != s->rank) {
        segment_change(t, s, SEGMENT_CLOSED, s->withheld);
    }
}

static void segment_finish(struct segment_table *t, struct segment *s)
{
    if (s->state != SEGMENT_OPEN)
        return;
    segment_change(t, s, SEGMENT_CLOSED, s->withheld);
    segment_settle(t, s);
}

uint32_t segment_open_max(const struct segment_file *f)
{
    uint32_t n = f->count / 4;

    return n < 1 ? 1 : n > OPEN_MAX_STRIDES ? OPEN_MAX_STRIDES : n;
}

static uint64_t *records_new(uint32_t records)
{
    return calloc(records, 2 * sizeof(uint64_t) + sizeof(uint16_t) + 2);
}

static void segment_begin(struct segment *s, uint64_t *owners, uint64_t sequence, uint64_t stride,
                          uint32_t records)
{
    s->owners = owners;
    s->record_sequences = owners + records;
    s->tags = (uint16_t *)(owners + 2 * (size_t)records);
    s->states = (uint8_t *)(s->tags + records);
    s->used = s->states + records;
    s->sequence = sequence;
    s->stride_pages = (uint32_t)(stride / NVME_PAGE);
    s->records = records;
    s->next = s->live = s->reads = s->writes = 0;
    s->covered = s->scans = 0;
    s->seen_to = 0;
    s->newest = 0;
    s->unknown = false;
    s->header = SEGMENT_HEADER_NOT_YET;
}

static int segment_open(struct segment_table *t, uint32_t file, uint64_t stride,
                        struct segment **out)
{
    struct segment_file *f = &t->file[file];
    uint32_t records = (uint32_t)nvme_records(t->segment_bytes, stride);
    struct segment *s;
    uint64_t *owners;

    if (list_empty(&f->free))
        return -ENOSPC;
    owners = records_new(records);
    if (!owners)
        return -ENOMEM;
    if (f->open_count >= segment_open_max(f))
        segment_finish(t, LIST_ENTRY(f->open.next, struct segment, link));
    s = LIST_ENTRY(f->free.next, struct segment, link);
    segment_begin(s, owners, t->sequence++, stride, records);
    segment_change(t, s, SEGMENT_OPEN, false);
    *out = s;
    return 0;
}

/* The open segment that a record of `stride` should lie in; NULL: one should be opened. If no
 * further segment may be open, it takes the next longer stride rather than close a segment that has
 * just been begun. */
static struct segment *segment_fit(const struct segment_file *f, uint64_t stride)
{
    bool may_open = !list_empty(&f->free) && f->open_count < segment_open_max(f);
    struct segment *best = NULL;

    for (struct list *n = f->open.next; n != &f->open; n = n->next) {
        struct segment *s = LIST_ENTRY(n, struct segment, link);

        if (segment_stride(s) == stride)
            return s;
        if (segment_stride(s) > stride && segment_stride(s) <= 2 * stride &&
            (!best || s->stride_pages < best->stride_pages))
            best = s;
    }
    return may_open ? NULL : best;
}

static void open_finish(struct segment_table *t, struct segment_file *f)
{
    while (!list_empty(&f->open))
        segment_finish(t, LIST_ENTRY(f->open.next, struct segment, link));
}

static void file_writable(struct segment_table *t, struct segment_file *f, bool writable)
{
    f->writable = writable;
    for (uint32_t i = 0; i < f->count; i++)
        if (f->segments[i].state == SEGMENT_CLOSED)
            segment_list(t, &f->segments[i]);
}

void segment_file_stop(struct segment_table *t, uint32_t file)
{
    open_finish(t, &t->file[file]);
    file_writable(t, &t->file[file], false);
}

void segment_file_start(struct segment_table *t, uint32_t file)
{
    file_writable(t, &t->file[file], t->file[file].count > 0);
}

void segment_file_distrust(struct segment_table *t, uint32_t file)
{
    struct segment_file *f = &t->file[file];

    open_finish(t, f);
    for (uint32_t i = 0; i < f->count; i++)
        f->segments[i].header = SEGMENT_HEADER_FAILED; /* a free one gets a new header */
}

static void withhold(struct segment_table *t, struct segment *s)
{
    segment_change(t, s, s->state == SEGMENT_OPEN ? SEGMENT_CLOSED : s->state, true);
    segment_settle(t, s);
}

bool segment_quarantine(struct segment_table *t, struct segment *s)
{
    if (s->quarantined)
        return false;
    s->quarantined = true;
    t->file[s->file].quarantined++;
    t->capacity_bytes -= t->segment_bytes;
    withhold(t, s);
    return true;
}

void segment_withhold(struct segment_table *t, struct segment *s)
{
    s->unknown = true;
    withhold(t, s);
}

static uint32_t free_wanted(const struct segment_file *f)
{
    uint32_t wanted = f->count / SHORT_FRACTION;

    if (f->count < SHORT_SMALL)
        return 1;
    return wanted < SHORT_MIN ? SHORT_MIN : wanted > SHORT_MAX ? SHORT_MAX : wanted;
}

bool segment_short(const struct segment_table *t)
{
    uint64_t free = 0, wanted = 0;

    for (uint32_t i = 0; i < t->files; i++) {
        const struct segment_file *f = &t->file[i];

        free += f->writable ? f->free_count : 0;
        wanted += f->writable ? free_wanted(f) : 0;
    }
    return free < wanted;
}

bool segment_has_space(const struct segment_table *t, uint32_t file, uint64_t stride, uint32_t keep)
{
    const struct segment_file *f = &t->file[file];

    return f->writable && f->free_count >= keep && (f->free_count > keep || segment_fit(f, stride));
}

/* By its key, and all; adds one record, or takes it away. */
static void keyed_count(struct segment_table *t, const struct segment *s, uint32_t record, bool add)
{
    struct segment_keyed *k[] = {&t->keyed[s->tags[record]], &t->keyed[0]};

    for (unsigned i = 0; s->tags[record] != 0 && i < 2; i++) {
        k[i]->records += add ? 1 : UINT64_MAX;
        k[i]->bytes += add ? segment_stride(s) : -segment_stride(s);
    }
}

static void record_live(struct segment_table *t, struct segment *s, uint32_t record)
{
    s->states[record] = RECORD_LIVE;
    s->live++;
    t->used_bytes += segment_stride(s);
    keyed_count(t, s, record, true);
}

/* ---- records of an earlier run ---- */

int segment_adopt(struct segment_table *t, uint32_t file, uint32_t number, uint64_t sequence,
                  uint64_t stride, struct segment **out)
{
    struct segment *s = &t->file[file].segments[number];
    uint64_t records = nvme_records(t->segment_bytes, stride);
    uint64_t *owners;

    if (s->state != SEGMENT_FREE || records == 0)
        return -EINVAL;
    owners = records_new((uint32_t)records);
    if (!owners)
        return -ENOMEM;
    segment_begin(s, owners, sequence, stride, (uint32_t)records);
    s->next = s->records;
    s->reads = 1;
    s->header = SEGMENT_HEADER_WRITTEN;
    segment_change(t, s, SEGMENT_CLOSED, s->withheld);
    *out = s;
    return 0;
}

void segment_restore(struct segment_table *t, struct segment *s, uint32_t record, uint64_t owner,
                     uint64_t sequence)
{
    assert((s->states[record] == RECORD_EMPTY || s->states[record] == RECORD_DEAD) && s->reads > 0);
    s->owners[record] = owner;
    segment_sequence_set(s, record, sequence);
    record_live(t, s, record);
}

void segment_sequence_set(struct segment *s, uint32_t record, uint64_t sequence)
{
    s->record_sequences[record] = sequence;
    if (sequence > s->newest)
        s->newest = sequence;
}

static int newest_compare(const void *left, const void *right)
{
    const struct segment *a = *(struct segment *const *)left, *b = *(struct segment *const *)right;

    return a->newest < b->newest ? -1 : a->newest > b->newest;
}

/* Recovery finds segments in the order of their places. Without memory that order stays. */
void segment_restored(struct segment_table *t)
{
    size_t most = 0, n;
    struct segment **all;

    for (uint32_t i = 0; i < t->files; i++)
        most += t->file[i].count;
    all = malloc((most + 1) * sizeof(struct segment *));
    for (unsigned rank = 0; all && rank < SEGMENT_RANKS; rank++) {
        struct list *node;

        n = 0;
        while ((node = list_pop_front(&t->closed[rank])) != NULL)
            all[n++] = LIST_ENTRY(node, struct segment, link);
        qsort(all, n, sizeof(struct segment *), newest_compare);
        for (size_t i = 0; i < n; i++)
            list_push_back(&t->closed[rank], &all[i]->link);
    }
    free(all);
}

/* ---- records ---- */

void segment_tag_set(struct segment *s, uint32_t record, uint16_t tag)
{
    assert(s->states[record] != RECORD_LIVE);
    s->tags[record] = tag;
}

int segment_reserve(struct segment_table *t, uint32_t file, uint64_t stride, uint64_t owner,
                    struct segment **out, uint32_t *record)
{
    struct segment *s = segment_fit(&t->file[file], stride);

    if (!s) {
        int rc = segment_open(t, file, stride, &s);

        if (rc < 0)
            return rc;
    }
    *record = s->next++;
    s->owners[*record] = owner;
    s->states[*record] = RECORD_WRITING;
    s->writes++;
    *out = s;
    if (s->next == s->records)
        segment_finish(t, s);
    else
        segment_list(t, s);
    return 0;
}

bool segment_has_next(const struct segment *s, uint32_t record, uint64_t stride)
{
    return s->state == SEGMENT_OPEN && s->next == record + 1 && segment_stride(s) == stride;
}

void segment_written(struct segment_table *t, struct segment *s, uint32_t record, bool ok)
{
    assert(s->writes > 0 && s->states[record] == RECORD_WRITING);
    s->writes--;
    s->states[record] = RECORD_DEAD;
    if (ok)
        record_live(t, s, record);
    else
        segment_finish(t, s);
    segment_settle(t, s);
}

int segment_find(const struct segment_table *t, uint64_t loc, uint64_t bytes, struct segment **out,
                 uint32_t *record)
{
    uint64_t offset = nvme_loc_page(loc) * NVME_PAGE, inside;
    uint32_t file = nvme_loc_file(loc);
    struct segment *s;

    if (file >= t->files || offset < NVME_DATA_OFFSET)
        return -ESTALE;
    offset -= NVME_DATA_OFFSET;
    if (offset / t->segment_bytes >= t->file[file].count)
        return -ESTALE;
    s = &t->file[file].segments[offset / t->segment_bytes];
    inside = offset % t->segment_bytes;
    if (s->state == SEGMENT_FREE || nvme_generation(s->sequence) != nvme_loc_generation(loc) ||
        inside < NVME_PAGE || (inside - NVME_PAGE) % segment_stride(s) != 0)
        return -ESTALE;
    inside = (inside - NVME_PAGE) / segment_stride(s);
    if (inside >= s->records || s->states[inside] != RECORD_LIVE ||
        bytes > segment_stride(s) - NVME_PAGE)
        return -ESTALE;
    *out = s;
    *record = (uint32_t)inside;
    return 0;
}

void segment_read_begin(struct segment *s)
{
    s->reads++;
}

void segment_read_end(struct segment_table *t, struct segment *s)
{
    assert(s->reads > 0);
    s->reads--;
    segment_settle(t, s);
}

void segment_record_kill(struct segment_table *t, struct segment *s, uint32_t record)
{
    s->states[record] = RECORD_DEAD;
    s->live--;
    t->used_bytes -= segment_stride(s);
    keyed_count(t, s, record, false);
}

void segment_forget(struct segment_table *t, struct segment *s, uint32_t record)
{
    assert(s->states[record] == RECORD_LIVE);
    segment_record_kill(t, s, record);
    segment_settle(t, s);
}
