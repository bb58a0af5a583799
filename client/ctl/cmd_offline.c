/* verify --offline: walks the files of the NVMe tier and tells what it found; repairs are
 * cmd_salvage.c's. */
#include "client/ctl/ctl.h"
#include "client/ctl/offline.h"
#include "client/ctl/table.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#define NAMESPACES_MAX 65536u
#define NAME_PAGES_MAX 65536u

#define INDEX_ENTRIES_MAX 2048u
#define INDEX_HEAD 56u
#define INDEX_ENTRY 96u

uint32_t offline_u32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

uint64_t offline_u64(const uint8_t *p)
{
    return offline_u32(p) | (uint64_t)offline_u32(p + 4) << 32;
}

bool offline_read(int fd, void *p, size_t n, uint64_t at)
{
    size_t done = 0;

    while (done < n) {
        ssize_t got = pread(fd, (char *)p + done, n - done, (off_t)(at + done));

        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return false;
        done += (size_t)got;
    }
    return true;
}

enum page_kind offline_page_kind(const uint8_t *page, const char *magic)
{
    size_t n = strlen(magic);

    if (memcmp(page, magic, n) != 0)
        return PAGE_NONE;
    return offline_u32(page + n) == FORMAT_VERSION &&
                   offline_u64(page + PAGE - 8) == XXH3_64bits(page, PAGE - 8)
               ? PAGE_GOOD
               : PAGE_DAMAGED;
}

static bool page_blank(const uint8_t *page)
{
    return page[0] == 0 && memcmp(page, page + 1, PAGE - 1) == 0;
}

/* ---- namespaces ---- */

static struct space *space_of(struct offline *o, const uint8_t *fingerprint)
{
    struct space *p;

    for (uint32_t i = 0; i < o->spaces; i++)
        if (memcmp(o->space[i].fingerprint, fingerprint, UCM_FINGERPRINT_BYTES) == 0)
            return &o->space[i];
    if (o->spaces == NAMESPACES_MAX)
        return NULL;
    p = realloc(o->space, (o->spaces + 1) * sizeof(*p));
    if (!p)
        return NULL;
    o->space = p;
    p = &o->space[o->spaces++];
    memset(p, 0, sizeof(*p));
    memcpy(p->fingerprint, fingerprint, UCM_FINGERPRINT_BYTES);
    return p;
}

/* The identity is: 16 bytes of domain, then tenant and model, each with its length before it. */
static void model_take(struct space *s, const uint8_t *identity, uint32_t n)
{
    uint32_t tenant = n >= 20 ? offline_u32(identity + 16) : 0, model;

    if (n < 24 || tenant > n - 24)
        return;
    model = offline_u32(identity + 20 + tenant);
    if (model > UCM_MAX_NAME_BYTES || model > n - 24 - tenant)
        return;
    memcpy(s->model, identity + 24 + tenant, model);
}

static void names_read(struct offline *o)
{
    uint8_t page[PAGE];
    struct stat st;
    char path[PATH_BYTES];
    int fd;

    offline_path(o, "ucmd.namespaces", path);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return; /* the parts then show as of namespaces without a name */
    o->corrupt_names += fstat(fd, &st) == 0 && st.st_size % PAGE != 0;
    for (uint64_t i = 0; i < NAME_PAGES_MAX && offline_read(fd, page, PAGE, i * PAGE); i++) {
        struct space *s;

        if (offline_page_kind(page, "UCMN") != PAGE_GOOD || offline_u32(page + 8) > 4000) {
            o->corrupt_names++;
            continue;
        }
        s = space_of(o, page + 32);
        if (!s)
            continue;
        s->named = true;
        if (offline_u64(page + 64) > s->from_sequence)
            s->from_sequence = offline_u64(page + 64);
        model_take(s, page + 72, offline_u32(page + 8));
    }
    close(fd);
}

/* ---- the checkpoint ---- */

/* One record at `at`, read into `buffer`; its length, 0 when it does not pass. */
static size_t record_read(int fd, uint8_t *buffer, uint64_t at)
{
    uint32_t entries;
    size_t n;

    if (!offline_read(fd, buffer, INDEX_HEAD, at) || memcmp(buffer, "UCMI", 4) != 0 ||
        offline_u32(buffer + 4) != FORMAT_VERSION)
        return 0;
    entries = offline_u32(buffer + 48);
    n = INDEX_HEAD + (size_t)entries * INDEX_ENTRY;
    if (entries > INDEX_ENTRIES_MAX ||
        !offline_read(fd, buffer + INDEX_HEAD, n + 8 - INDEX_HEAD, at + INDEX_HEAD))
        return 0;
    return XXH3_64bits(buffer, n) == offline_u64(buffer + n) ? n + 8 : 0;
}

static void index_read(struct offline *o)
{
    uint8_t *buffer = malloc(INDEX_HEAD + (size_t)INDEX_ENTRIES_MAX * INDEX_ENTRY + 8);
    uint64_t at = 0;
    struct stat st;
    char path[PATH_BYTES];
    size_t n;
    int fd;

    offline_path(o, "ucmd.index", path);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    o->index_there = fd >= 0;
    while (fd >= 0 && buffer && (n = record_read(fd, buffer, at)) > 0) {
        o->index_records++;
        at += n;
    }
    o->index_damaged = fd >= 0 && (fstat(fd, &st) < 0 || at != (uint64_t)st.st_size);
    if (fd >= 0)
        close(fd);
    free(buffer);
}

/* ---- slots ---- */

/* Whether the slot is to stay. */
static bool slot_check(struct offline *o, const uint8_t *page, uint64_t at, uint64_t stride)
{
    struct space *s = space_of(o, page + 32);
    uint64_t bytes = offline_u64(page + 104);

    if (!s || bytes == 0 || bytes > stride - PAGE) {
        o->corrupt_headers++;
    } else if (at + PAGE + bytes > o->size) {
        o->cut++;
    } else if (!offline_read(o->fd, o->payload, bytes, at + PAGE)) {
        o->unreadable++;
    } else if (XXH3_64bits(o->payload, bytes) != offline_u64(page + 128)) {
        o->corrupt_payloads++;
        s->corrupt++;
    } else if (offline_u64(page + 120) < s->from_sequence) {
        s->purged++;
        return true;
    } else {
        o->live++;
        o->bytes += bytes;
        s->parts++;
        s->bytes += bytes;
        return true;
    }
    return false;
}

/* A segment that passed, and where its slots of this opening end. */
struct look {
    uint32_t number, end;
    uint64_t base, sequence, stride;
};

static bool slot_passes(const struct offline *o, const struct look *l, uint32_t slot,
                        const uint8_t *page)
{
    return memcmp(page + 16, o->uuid, sizeof(o->uuid)) == 0 && offline_u32(page + 8) == l->number &&
           offline_u32(page + 12) == slot && offline_u64(page + 112) == l->sequence;
}

static void slot_look(struct offline *o, const struct look *l, uint32_t slot)
{
    uint64_t at = l->base + PAGE + slot * l->stride;
    uint8_t page[PAGE];
    bool good = true;

    if (at + PAGE > o->size)
        return;
    if (!offline_read(o->fd, page, PAGE, at)) {
        o->unreadable++;
        salvage_slot(o, at);
        return;
    }
    switch (offline_page_kind(page, "UCMS")) {
    case PAGE_NONE: /* never written in this opening, unless others behind it were */
        good = slot >= l->end || page_blank(page);
        o->corrupt_headers += !good;
        break;
    case PAGE_DAMAGED:
        good = false;
        o->corrupt_headers++;
        break;
    case PAGE_GOOD:
        if (slot_passes(o, l, slot, page)) {
            good = slot_check(o, page, at, l->stride);
        } else if (offline_u64(page + 112) == l->sequence &&
                   (slot < l->end || memcmp(page + 16, o->uuid, sizeof(o->uuid)) == 0)) {
            good = false;
            o->foreign++;
        } else { /* of an earlier opening: a lost write when later ones are there */
            good = slot >= l->end;
            o->stale += !good;
        }
    }
    if (!good)
        salvage_slot(o, at);
}

/* Slots are written front to back: the last one of this opening. */
static uint32_t slots_end(const struct offline *o, const struct look *l, uint32_t slots)
{
    uint8_t page[PAGE];

    while (slots > 0 &&
           !(offline_read(o->fd, page, PAGE, l->base + PAGE + (slots - 1) * l->stride) &&
             offline_page_kind(page, "UCMS") == PAGE_GOOD && slot_passes(o, l, slots - 1, page)))
        slots--;
    return slots;
}

/* Without a header of the segment: does its first slot tell that there was one? */
static bool header_missing(const struct offline *o, uint32_t number, uint64_t base)
{
    uint8_t page[PAGE];

    return offline_read(o->fd, page, PAGE, base + PAGE) &&
           offline_page_kind(page, "UCMS") == PAGE_GOOD &&
           memcmp(page + 16, o->uuid, sizeof(o->uuid)) == 0 && offline_u32(page + 8) == number &&
           offline_u32(page + 12) == 0;
}

/* Whether the header passes, or does so now. */
static bool segment_header(struct offline *o, uint32_t number, uint64_t base, uint8_t page[PAGE])
{
    uint64_t stride;
    bool ours;

    if (!offline_read(o->fd, page, PAGE, base)) {
        o->unreadable++;
        return salvage_segment(o, number, page);
    }
    stride = offline_u64(page + 40);
    switch (offline_page_kind(page, "UCMG")) {
    case PAGE_NONE:
        if (!header_missing(o, number, base)) {
            o->empty++;
            return false;
        }
        o->corrupt_headers++;
        return salvage_segment(o, number, page);
    case PAGE_DAMAGED:
        o->corrupt_headers++;
        return salvage_segment(o, number, page);
    case PAGE_GOOD:
        break;
    }
    ours = memcmp(page + 16, o->uuid, sizeof(o->uuid)) == 0;
    if (!ours && !header_missing(o, number, base)) {
        o->empty++; /* of a cache that was on the device before */
        return false;
    }
    if (ours && offline_u32(page + 8) == number && stride >= 2 * PAGE &&
        stride <= o->segment_bytes && stride % PAGE == 0)
        return true;
    o->foreign++;
    return salvage_segment(o, number, page);
}

static void segment_look(struct offline *o, uint32_t number)
{
    struct look l = {.number = number, .base = o->data_offset + number * o->segment_bytes};
    uint8_t page[PAGE];
    uint32_t slots;

    if (l.base + PAGE > o->size || !segment_header(o, number, l.base, page))
        return;
    l.sequence = offline_u64(page + 32);
    l.stride = offline_u64(page + 40);
    slots = (uint32_t)((o->segment_bytes - PAGE) / l.stride);
    l.end = slots_end(o, &l, slots);
    if (o->state_damaged && l.sequence >> 40 > o->epoch)
        o->epoch = l.sequence >> 40;
    o->segments++;
    for (uint32_t i = 0; i < slots; i++)
        slot_look(o, &l, i);
}

/* ---- the file ---- */

/* The pages between the superblock and the segments. */
static void own_pages_read(struct offline *o)
{
    uint64_t change = 0;
    uint8_t page[PAGE];

    for (unsigned copy = 0; copy < 2; copy++) {
        if (!offline_read(o->fd, page, PAGE, STATE_AT(copy))) {
            o->unreadable++;
            o->state_damaged = true;
        } else if (offline_page_kind(page, "UCMDSTAT") == PAGE_GOOD &&
                   memcmp(page + 16, o->uuid, sizeof(o->uuid)) == 0 &&
                   offline_u64(page + 40) <= SEGMENTS_MAX) {
            if (offline_u64(page + 32) >= o->epoch) {
                o->epoch = offline_u64(page + 32);
                o->state_segments = offline_u64(page + 40);
            }
        } else if (!page_blank(page)) { /* the second copy is written at the first start */
            o->corrupt_headers++;
            o->state_damaged = true;
        }
        if (!offline_read(o->fd, page, PAGE, QUARANTINE_AT(copy)))
            o->unreadable++;
        else if (offline_page_kind(page, "UCMQ") == PAGE_DAMAGED)
            o->corrupt_headers++;
        else if (offline_page_kind(page, "UCMQ") == PAGE_GOOD && offline_u64(page + 32) > change) {
            change = offline_u64(page + 32);
            o->quarantined = offline_u32(page + 8);
        }
    }
    o->short_file = o->data_offset + o->state_segments * o->segment_bytes > o->size;
}

static bool anything_wrong(const struct offline *o)
{
    return o->corrupt_headers + o->corrupt_payloads + o->corrupt_names + o->foreign + o->stale +
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
    cJSON_AddBoolToObject(j, "names_rewritten", o->names_rewritten);
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
    cJSON_AddItemToObject(j, "bytes", answer_json_u64(o->bytes));
    cJSON_AddItemToObject(j, "corrupt_headers", answer_json_u64(o->corrupt_headers));
    cJSON_AddItemToObject(j, "corrupt_payloads", answer_json_u64(o->corrupt_payloads));
    cJSON_AddItemToObject(j, "misplaced", answer_json_u64(o->foreign));
    cJSON_AddItemToObject(j, "stale", answer_json_u64(o->stale));
    cJSON_AddItemToObject(j, "cut", answer_json_u64(o->cut));
    cJSON_AddItemToObject(j, "unreadable", answer_json_u64(o->unreadable));
    cJSON_AddItemToObject(j, "corrupt_names", answer_json_u64(o->corrupt_names));
    cJSON_AddItemToObject(j, "checkpoint_records", answer_json_u64(o->index_records));
    cJSON_AddBoolToObject(j, "checkpoint_damaged", o->index_damaged);
    cJSON_AddBoolToObject(j, "file_cut", o->short_file);
    cJSON_AddItemToObject(j, "segments_quarantined", answer_json_u64(o->quarantined));
    if (o->salvage || o->lift)
        cJSON_AddItemToObject(j, "salvaged", salvaged_json(o));
    return ctl_print_json(j, false);
}

static void print_salvaged(const struct offline *o)
{
    printf("salvaged: %" PRIu64 " slots dropped, %" PRIu64 " segment headers made again, %" PRIu64
           " segments emptied, %" PRIu64 " other pages written\n",
           o->dropped, o->rebuilt, o->emptied, o->pages_written);
    if (o->names_rewritten)
        printf("salvaged: ucmd.namespaces written anew with %" PRIu64 " records\n", o->names_kept);
    if (o->index_removed)
        printf("salvaged: ucmd.index removed; the next start reads the slots' headers instead\n");
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

    printf("%" PRIu64 " segments in use, %" PRIu64 " empty; %" PRIu64 " slots live, %s\n",
           o->segments, o->empty, o->live, human_bytes(a, o->bytes));
    printf("%" PRIu64 " headers corrupt, %" PRIu64 " payloads corrupt, %" PRIu64
           " misplaced, %" PRIu64 " stale, %" PRIu64 " cut, %" PRIu64 " unreadable\n",
           o->corrupt_headers, o->corrupt_payloads, o->foreign, o->stale, o->cut, o->unreadable);
    printf("namespaces: %" PRIu64 " records corrupt; checkpoint: %" PRIu64 " records, %s%s\n",
           o->corrupt_names, o->index_records,
           !o->index_there    ? "not there"
           : o->index_damaged ? "damaged behind them"
                              : "sound",
           o->short_file ? "; the cache file is shorter than it was" : "");
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
    return table_end(&t, stdout) == 0 ? CTL_OK : ctl_fail(CTL_ERROR, "no memory");
}

static void walk(struct offline *o)
{
    own_pages_read(o);
    names_read(o);
    index_read(o);
    for (uint64_t i = 0; o->data_offset + i * o->segment_bytes < o->size; i++)
        segment_look(o, (uint32_t)i);
    salvage_state(o);
    salvage_quarantine(o);
    salvage_size(o);
    salvage_sync(o);
    salvage_names(o);
    salvage_index(o);
}

int offline_verify(const char *path, const char *state, bool json, bool salvage, bool lift)
{
    struct offline o = {.salvage = salvage, .lift = lift};
    int rc = offline_open(&o, path, state);

    if (rc == CTL_OK) {
        walk(&o);
        rc = json ? print_json(&o) : print_text(&o);
    }
    if (rc == CTL_OK && o.error != 0)
        rc = ctl_fail(CTL_ERROR, "not all could be repaired: %s", strerror(o.error));
    else if (rc == CTL_OK && anything_wrong(&o))
        rc = CTL_CORRUPT;
    offline_close(&o);
    return rc;
}
