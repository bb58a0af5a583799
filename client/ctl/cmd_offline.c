/* verify --offline: walks the files of the NVMe tier and prints what it found; cmd_salvage.c
 * repairs. */
#include "client/ctl/ctl.h"
#include "client/ctl/offline.h"
#include "client/ctl/table.h"
#include "daemon/checkpoint/format.h"
#include "daemon/checkpoint/read.h"
#include "daemon/format/bytes.h"
#include "daemon/format/checksum.h"
#include "daemon/format/io.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NAMESPACES_MAX 65536u /* a message says so */
#define INDEX_BUFFER (1u << 20)

/* ---- namespaces ---- */

/* NULL: there is no memory for another one, and the walk ends. */
static struct space *space_of(struct offline *o, const uint8_t *fingerprint)
{
    struct space *p;

    for (uint32_t i = 0; i < o->spaces; i++)
        if (memcmp(o->space[i].fingerprint, fingerprint, UCM_FINGERPRINT_BYTES) == 0)
            return &o->space[i];
    if (o->spaces == NAMESPACES_MAX) {
        o->halt = "more than 65536 namespaces";
        return NULL;
    }
    p = realloc(o->space, (o->spaces + 1) * sizeof(*p));
    if (!p) {
        o->halt = "no memory";
        return NULL;
    }
    o->space = p;
    p = &o->space[o->spaces++];
    memset(p, 0, sizeof(*p));
    memcpy(p->fingerprint, fingerprint, UCM_FINGERPRINT_BYTES);
    return p;
}

/* The identity is: 16 bytes of domain, then tenant and model, each with its length before it. */
static void model_take(struct space *s, const uint8_t *identity, uint32_t n)
{
    uint32_t tenant = n >= 20 ? get32(identity + 16) : 0, model;

    if (n < 24 || tenant > n - 24)
        return;
    model = get32(identity + 20 + tenant);
    if (model > UCM_MAX_NAME_BYTES || model > n - 24 - tenant)
        return;
    memcpy(s->model, identity + 24 + tenant, model);
}

static void unread(struct offline *o, const char *name, int rc)
{
    if (o->error != 0)
        return;
    o->error = rc;
    o->unread = name;
}

static void spaces_read(struct offline *o)
{
    struct nvme_ns_record r;
    char path[PATH_BYTES];
    int fd, rc = 0;

    offline_path(o, NVME_NS_FILE, path);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) { /* the parts then show as of namespaces without a name */
        if (errno != ENOENT)
            unread(o, NVME_NS_FILE, -errno);
        return;
    }
    for (uint64_t i = 0; i < NVME_NS_RECORDS_MAX && (rc == 0 || rc == -EBADMSG) && !o->halt; i++) {
        struct space *s;

        rc = nvme_ns_record_read(fd, i, &r);
        o->corrupt_spaces += rc == -EBADMSG;
        s = rc == 0 ? space_of(o, r.fingerprint) : NULL;
        if (!s)
            continue;
        s->named = true;
        if (r.from_sequence > s->from_sequence)
            s->from_sequence = r.from_sequence;
        model_take(s, r.identity, r.identity_bytes);
    }
    if (rc < 0 && rc != -EBADMSG && rc != -ENODATA)
        unread(o, NVME_NS_FILE, rc);
    close(fd);
}

static void index_read(struct offline *o)
{
    struct checkpoint_reader r = {.capacity = INDEX_BUFFER};
    struct checkpoint_span span;
    char path[PATH_BYTES];

    offline_path(o, NVME_INDEX_FILE, path);
    r.fd = open(path, O_RDONLY | O_CLOEXEC);
    o->index_there = r.fd >= 0 || errno != ENOENT;
    if (r.fd < 0 && o->index_there)
        unread(o, NVME_INDEX_FILE, -errno);
    r.buffer = malloc(r.capacity);
    if (!r.buffer)
        o->halt = "no memory";
    while (r.fd >= 0 && r.buffer && !r.end) {
        checkpoint_read(&r);
        for (size_t at = 0; at < r.good; at += checkpoint_span_bytes(span.entries)) {
            (void)checkpoint_span_decode(r.buffer + at, r.good - at, &span); /* it passes */
            o->index_spans++;
        }
    }
    o->index_damaged = r.damaged;
    if (r.fd >= 0)
        close(r.fd);
    free(r.buffer);
}

/* ---- records ---- */

/* Whether the record may stay. It does when the walk ends here: nothing is known against it. */
static bool record_check(struct offline *o, const struct nvme_record_header *h, uint64_t at,
                         uint64_t stride)
{
    struct space *s = space_of(o, h->fingerprint);
    uint64_t bytes = h->payload_bytes;

    if (!s)
        return true;
    if (bytes > stride - NVME_PAGE) {
        o->corrupt_headers++;
    } else if (at + NVME_PAGE + bytes > o->size) {
        o->cut++;
    } else if (io_read(o->fd, o->payload, bytes, at + NVME_PAGE) < 0) {
        o->unreadable++;
    } else if (!h->encrypted && checksum_of(o->payload, bytes) != h->checksum) {
        o->corrupt_payloads++;
        s->corrupt++;
    } else if (h->sequence < s->from_sequence) {
        s->purged++;
        return true;
    } else {
        o->live++;
        o->bytes += bytes;
        o->encrypted += h->encrypted;
        s->parts++;
        s->bytes += bytes;
        return true;
    }
    return false;
}

/* A segment that passed, and where its records of this opening end. */
struct look {
    struct nvme_segment_header segment;
    uint64_t base;
    uint32_t end;
};

static uint64_t record_at(const struct look *l, uint32_t record)
{
    return l->base + nvme_record_offset(l->segment.stride, record);
}

/* 0 and its header; as nvme_record_header_decode, or as io_read. */
static int record_read(const struct offline *o, uint64_t at, uint8_t *page,
                       struct nvme_record_header *h)
{
    int rc = io_read(o->fd, page, NVME_PAGE, at);

    return rc < 0 ? rc : nvme_record_header_decode(page, h);
}

static bool record_passes(const struct offline *o, const struct look *l, uint32_t record,
                          const struct nvme_record_header *h)
{
    return nvme_record_belongs(h, o->super.uuid, l->segment.segment, record, l->segment.sequence);
}

/* Whether the record may stay as it is. */
static bool record_judge(struct offline *o, const struct look *l, uint32_t record, int rc,
                         const uint8_t *page, const struct nvme_record_header *h)
{
    bool good;

    if (rc == -EILSEQ) { /* never written in this opening, unless others after it were */
        good = record >= l->end || nvme_page_blank(page);
        o->corrupt_headers += !good;
        return good;
    }
    if (rc < 0) {
        o->corrupt_headers += rc == -EBADMSG || rc == -EPROTONOSUPPORT;
        o->unreadable += rc != -EBADMSG && rc != -EPROTONOSUPPORT;
        return false;
    }
    if (record_passes(o, l, record, h))
        return record_check(o, h, record_at(l, record), l->segment.stride);
    if (h->generation == l->segment.sequence &&
        (record < l->end || memcmp(h->uuid, o->super.uuid, sizeof(h->uuid)) == 0)) {
        o->misplaced++;
        return false;
    }
    /* of an earlier opening: a lost write when later ones are there */
    good = record >= l->end;
    o->stale += !good;
    return good;
}

/* Records are written front to back: the last one of this opening. */
static uint32_t records_end(const struct offline *o, const struct look *l, uint32_t records)
{
    struct nvme_record_header h;
    uint8_t page[NVME_PAGE];

    while (records > 0 && !(record_read(o, record_at(l, records - 1), page, &h) == 0 &&
                            record_passes(o, l, records - 1, &h)))
        records--;
    return records;
}

/* Does the first record show that the segment had a header? */
static bool header_missing(const struct offline *o, uint32_t number)
{
    struct nvme_record_header h;
    uint8_t page[NVME_PAGE];

    return record_read(o, offline_segment_at(o, number) + NVME_PAGE, page, &h) == 0 &&
           nvme_record_belongs(&h, o->super.uuid, number, 0, h.generation);
}

/* Whether the header passes, or does so now. */
static bool segment_header(struct offline *o, uint32_t number, struct nvme_segment_header *out)
{
    uint8_t page[NVME_PAGE];
    int rc = io_read(o->fd, page, NVME_PAGE, offline_segment_at(o, number));
    bool ours;

    if (rc < 0) {
        o->unreadable++;
        return salvage_segment(o, number, out);
    }
    rc = nvme_segment_header_decode(page, out);
    ours = rc == 0 && memcmp(out->uuid, o->super.uuid, sizeof(out->uuid)) == 0;
    if ((rc == -EILSEQ || (rc == 0 && !ours)) && !header_missing(o, number)) {
        o->empty++; /* or of a cache that was on the device before */
        return false;
    }
    if (ours && out->segment == number && out->stride <= o->super.segment_bytes)
        return true;
    o->corrupt_headers += rc < 0;
    o->misplaced += rc == 0;
    return salvage_segment(o, number, out);
}

static void segment_look(struct offline *o, uint32_t number)
{
    struct look l = {.base = offline_segment_at(o, number)};
    struct nvme_record_header h;
    uint8_t page[NVME_PAGE];
    uint32_t records;

    if (l.base + NVME_PAGE > o->size || !segment_header(o, number, &l.segment))
        return;
    records = (uint32_t)nvme_records(o->super.segment_bytes, l.segment.stride);
    l.end = records_end(o, &l, records);
    if (o->states.good != 3 && l.segment.sequence >> (64 - NVME_EPOCH_BITS) > o->state.epoch)
        o->state.epoch = l.segment.sequence >> (64 - NVME_EPOCH_BITS);
    o->segments++;
    for (uint32_t i = 0; i < records && record_at(&l, i) + NVME_PAGE <= o->size && !o->halt; i++) {
        int rc = record_read(o, record_at(&l, i), page, &h);

        if (!record_judge(o, &l, i, rc, page, &h))
            salvage_record(o, record_at(&l, i));
    }
}

/* ---- the file ---- */

static unsigned copies_n(unsigned bits)
{
    return (bits & 1) + (bits >> 1 & 1);
}

/* The pages between the superblock and the segments. */
static void own_pages_read(struct offline *o)
{
    struct nvme_quarantine q = {0};

    o->states = nvme_state_read(o->fd, o->super.uuid, &o->state);
    o->quarantines = nvme_quarantine_read(o->fd, o->super.uuid, &q);
    o->corrupt_headers += copies_n(o->states.damaged) + copies_n(o->quarantines.damaged);
    o->unreadable += copies_n(o->states.unreadable) + copies_n(o->quarantines.unreadable);
    o->quarantined = q.count;
    o->short_file = o->super.data_offset + o->state.segments * o->super.segment_bytes > o->size;
}

static bool anything_wrong(const struct offline *o)
{
    return o->corrupt_headers + o->corrupt_payloads + o->corrupt_spaces + o->misplaced + o->stale +
                   o->unreadable + o->cut >
               0 ||
           o->index_damaged || o->short_file;
}

static void fingerprint_hex(const struct space *s, char out[17])
{
    for (unsigned i = 0; i < 8; i++)
        snprintf(out + 2 * i, 3, "%02x", s->fingerprint[i]);
}

static cJSON *salvaged_json(const struct offline *o)
{
    cJSON *j = cJSON_CreateObject();

    cJSON_AddItemToObject(j, "slots_dropped", answer_json_u64(o->dropped));
    cJSON_AddItemToObject(j, "segments_rebuilt", answer_json_u64(o->rebuilt));
    cJSON_AddItemToObject(j, "segments_emptied", answer_json_u64(o->emptied));
    cJSON_AddItemToObject(j, "pages_rewritten", answer_json_u64(o->pages_written));
    cJSON_AddBoolToObject(j, "names_rewritten", o->spaces_rewritten);
    cJSON_AddBoolToObject(j, "checkpoint_removed", o->index_removed);
    cJSON_AddBoolToObject(j, "file_grown", o->grown);
    cJSON_AddItemToObject(j, "quarantine_lifted", answer_json_u64(o->lifted));
    return j;
}

static int print_json(const struct offline *o)
{
    cJSON *j = cJSON_CreateObject(), *list = cJSON_AddArrayToObject(j, "namespaces");
    char hex[17];

    for (uint32_t i = 0; i < o->spaces; i++) {
        const struct space *s = &o->space[i];
        cJSON *n = cJSON_CreateObject();

        fingerprint_hex(s, hex);
        cJSON_AddStringToObject(n, "fingerprint", hex);
        cJSON_AddStringToObject(n, "model", s->model);
        cJSON_AddBoolToObject(n, "named", s->named);
        cJSON_AddItemToObject(n, "parts", answer_json_u64(s->parts));
        cJSON_AddItemToObject(n, "bytes", answer_json_u64(s->bytes));
        cJSON_AddItemToObject(n, "corrupt", answer_json_u64(s->corrupt));
        cJSON_AddItemToObject(n, "purged", answer_json_u64(s->purged));
        cJSON_AddItemToArray(list, n);
    }
    cJSON_AddItemToObject(j, "segments", answer_json_u64(o->segments));
    cJSON_AddItemToObject(j, "segments_empty", answer_json_u64(o->empty));
    cJSON_AddItemToObject(j, "slots", answer_json_u64(o->live));
    cJSON_AddItemToObject(j, "encrypted", answer_json_u64(o->encrypted));
    cJSON_AddItemToObject(j, "bytes", answer_json_u64(o->bytes));
    cJSON_AddItemToObject(j, "corrupt_headers", answer_json_u64(o->corrupt_headers));
    cJSON_AddItemToObject(j, "corrupt_payloads", answer_json_u64(o->corrupt_payloads));
    cJSON_AddItemToObject(j, "misplaced", answer_json_u64(o->misplaced));
    cJSON_AddItemToObject(j, "stale", answer_json_u64(o->stale));
    cJSON_AddItemToObject(j, "cut", answer_json_u64(o->cut));
    cJSON_AddItemToObject(j, "unreadable", answer_json_u64(o->unreadable));
    cJSON_AddItemToObject(j, "corrupt_names", answer_json_u64(o->corrupt_spaces));
    cJSON_AddItemToObject(j, "checkpoint_records", answer_json_u64(o->index_spans));
    cJSON_AddBoolToObject(j, "checkpoint_damaged", o->index_damaged);
    cJSON_AddBoolToObject(j, "file_cut", o->short_file);
    cJSON_AddItemToObject(j, "segments_quarantined", answer_json_u64(o->quarantined));
    if (o->salvage || o->lift)
        cJSON_AddItemToObject(j, "salvaged", salvaged_json(o));
    return ctl_print_json(j, false);
}

static void print_salvaged(const struct offline *o)
{
    printf("salvaged: %" PRIu64 " records dropped, %" PRIu64 " segment headers made again, %" PRIu64
           " segments emptied, %" PRIu64 " other pages written\n",
           o->dropped, o->rebuilt, o->emptied, o->pages_written);
    if (o->spaces_rewritten)
        printf("salvaged: ucmd.namespaces rewritten with %" PRIu64 " records\n", o->spaces_kept);
    if (o->index_removed)
        printf("salvaged: ucmd.index removed; the next start reads the records' headers instead\n");
    if (o->grown)
        printf("salvaged: ucmd.cache has its length again\n");
    if (o->lifted > 0)
        printf("salvaged: the quarantine of %" PRIu64 " segments is lifted\n", o->lifted);
}

static int print_text(const struct offline *o)
{
    static const char *const titles[] = {"FINGERPRINT", "MODEL",   ">PARTS", ">BYTES",
                                         ">CORRUPT",    ">PURGED", NULL};
    struct table t;
    char a[HUMAN_BYTES], hex[17];

    printf("%" PRIu64 " segments in use, %" PRIu64 " empty; %" PRIu64 " records live, %s\n",
           o->segments, o->empty, o->live, human_bytes(a, o->bytes));
    printf("%" PRIu64 " headers corrupt, %" PRIu64 " payloads corrupt, %" PRIu64
           " misplaced, %" PRIu64 " stale, %" PRIu64 " cut, %" PRIu64 " unreadable\n",
           o->corrupt_headers, o->corrupt_payloads, o->misplaced, o->stale, o->cut, o->unreadable);
    printf("namespaces: %" PRIu64 " records corrupt; checkpoint: %" PRIu64 " records, %s%s\n",
           o->corrupt_spaces, o->index_spans,
           !o->index_there    ? "not there"
           : o->index_damaged ? "damaged after them"
                              : "sound",
           o->short_file ? "; the cache file is shorter than it was" : "");
    if (o->encrypted > 0)
        printf("%" PRIu64
               " records live are encrypted: without their keys only their headers were checked\n",
               o->encrypted);
    if (o->quarantined > 0)
        printf("%" PRIu64 " segments in quarantine\n", o->quarantined);
    if (o->salvage || o->lift)
        print_salvaged(o);
    table_begin(&t, titles);
    for (uint32_t i = 0; i < o->spaces; i++) {
        const struct space *s = &o->space[i];

        fingerprint_hex(s, hex);
        table_cell(&t, "%s", hex);
        table_cell(&t, "%s", s->named ? s->model : "(not in ucmd.namespaces)");
        table_cell(&t, "%" PRIu64, s->parts);
        table_cell(&t, "%s", human_bytes(a, s->bytes));
        table_cell(&t, "%" PRIu64, s->corrupt);
        table_cell(&t, "%" PRIu64, s->purged);
    }
    return ctl_table_end(&t);
}

static void walk(struct offline *o)
{
    own_pages_read(o);
    spaces_read(o);
    index_read(o);
    for (uint64_t i = 0; offline_segment_at(o, (uint32_t)i) < o->size && !o->halt; i++)
        segment_look(o, (uint32_t)i);
    salvage_rest(o);
}

int offline_verify(const char *path, const char *state, bool json, bool salvage, bool lift)
{
    struct offline o = {.salvage = salvage, .lift = lift};
    int rc = offline_open(&o, path, state);

    if (rc == CTL_OK) {
        walk(&o);
        if (o.halt)
            rc = program_fail(CTL_ERROR, "%s: verify ended before the end of the file", o.halt);
        else
            rc = json ? print_json(&o) : print_text(&o);
    }
    if (rc == CTL_OK && o.unread)
        rc = program_fail(CTL_ERROR, "%s could not be read: %s", o.unread, strerror(-o.error));
    else if (rc == CTL_OK && o.error != 0)
        rc = program_fail(CTL_ERROR, "not all could be repaired: %s", strerror(-o.error));
    else if (rc == CTL_OK && anything_wrong(&o))
        rc = CTL_CORRUPT;
    offline_close(&o);
    return rc;
}
