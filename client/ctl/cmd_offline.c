/* verify --offline: reads the files of the NVMe tier without a daemon. Made from
 * docs/storage-format.md alone, so that it checks the daemon and the text. Never writes. */
#include "client/ctl/ctl.h"
#include "client/ctl/table.h"
#include "proto/limits.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#define PAGE 4096u
#define SEGMENT_MIN (1ull << 20)
#define SEGMENT_MAX (1ull << 30)
#define NAMESPACES_MAX 65536u
#define NAME_PAGES_MAX 65536u

struct space {
    uint8_t fingerprint[UCM_FINGERPRINT_BYTES];
    char model[UCM_MAX_NAME_BYTES + 1]; /* empty: not known */
    bool named;
    uint64_t from_sequence, parts, bytes, corrupt, purged;
};

struct offline {
    int fd;
    uint64_t size, segment_bytes, data_offset;
    uint8_t uuid[16];
    struct space *space;
    uint32_t spaces;
    uint8_t *payload;
    uint64_t segments, empty, live, bytes, corrupt_headers, corrupt_payloads, foreign, unreadable;
};

static uint32_t u32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static uint64_t u64(const uint8_t *p)
{
    return u32(p) | (uint64_t)u32(p + 4) << 32;
}

static bool read_at(int fd, void *p, size_t n, uint64_t at)
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

/* Magic and checksum of a header page; what else must hold is the caller's. */
enum page_kind { PAGE_NONE, PAGE_DAMAGED, PAGE_GOOD };

static enum page_kind page_kind(const uint8_t *page, const char *magic)
{
    size_t n = strlen(magic);

    if (memcmp(page, magic, n) != 0)
        return PAGE_NONE;
    return u32(page + n) == 1 && u64(page + PAGE - 8) == XXH3_64bits(page, PAGE - 8) ? PAGE_GOOD
                                                                                     : PAGE_DAMAGED;
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
    uint32_t tenant = n >= 20 ? u32(identity + 16) : 0, model;

    if (n < 24 || tenant > n - 24)
        return;
    model = u32(identity + 20 + tenant);
    if (model > UCM_MAX_NAME_BYTES || model > n - 24 - tenant)
        return;
    memcpy(s->model, identity + 24 + tenant, model);
}

static void names_read(struct offline *o, const char *folder)
{
    uint8_t page[PAGE];
    char path[4096];
    int fd;

    snprintf(path, sizeof(path), "%s/ucmd.namespaces", folder);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return; /* the parts then show as of namespaces without a name */
    for (uint64_t i = 0; i < NAME_PAGES_MAX && read_at(fd, page, PAGE, i * PAGE); i++) {
        struct space *s;

        if (page_kind(page, "UCMN") != PAGE_GOOD || u32(page + 8) > 4000) {
            o->corrupt_headers++;
            continue;
        }
        s = space_of(o, page + 32);
        if (!s)
            continue;
        s->named = true;
        if (u64(page + 64) > s->from_sequence)
            s->from_sequence = u64(page + 64);
        model_take(s, page + 72, u32(page + 8));
    }
    close(fd);
}

/* ---- slots ---- */

static void slot_check(struct offline *o, const uint8_t *page, uint64_t at, uint64_t stride)
{
    struct space *s = space_of(o, page + 32);
    uint64_t bytes = u64(page + 104);

    if (!s || bytes == 0 || bytes > stride - PAGE) {
        o->corrupt_headers++;
    } else if (!read_at(o->fd, o->payload, bytes, at + PAGE)) {
        o->unreadable++;
    } else if (XXH3_64bits(o->payload, bytes) != u64(page + 128)) {
        o->corrupt_payloads++;
        s->corrupt++;
    } else if (u64(page + 120) < s->from_sequence) {
        s->purged++;
    } else {
        o->live++;
        o->bytes += bytes;
        s->parts++;
        s->bytes += bytes;
    }
}

static void slot_look(struct offline *o, uint32_t number, uint32_t slot, uint64_t at,
                      uint64_t sequence, uint64_t stride)
{
    uint8_t page[PAGE];

    if (!read_at(o->fd, page, PAGE, at)) {
        o->unreadable++;
        return;
    }
    switch (page_kind(page, "UCMS")) {
    case PAGE_NONE:
        break; /* never written in this opening of the segment */
    case PAGE_DAMAGED:
        o->corrupt_headers++;
        break;
    case PAGE_GOOD:
        if (u64(page + 112) != sequence)
            break; /* of an earlier opening */
        if (memcmp(page + 16, o->uuid, sizeof(o->uuid)) != 0 || u32(page + 8) != number ||
            u32(page + 12) != slot)
            o->foreign++;
        else
            slot_check(o, page, at, stride);
    }
}

static void segment_look(struct offline *o, uint32_t number)
{
    uint64_t base = o->data_offset + number * o->segment_bytes, sequence, stride;
    uint8_t page[PAGE];

    if (!read_at(o->fd, page, PAGE, base)) {
        o->unreadable++;
        return;
    }
    stride = u64(page + 40);
    sequence = u64(page + 32);
    if (page_kind(page, "UCMG") != PAGE_GOOD) {
        o->corrupt_headers += page_kind(page, "UCMG") == PAGE_DAMAGED;
        o->empty++;
        return;
    }
    if (memcmp(page + 16, o->uuid, sizeof(o->uuid)) != 0 || u32(page + 8) != number ||
        stride < 2 * PAGE || stride > o->segment_bytes || stride % PAGE != 0) {
        o->foreign++;
        return;
    }
    o->segments++;
    for (uint64_t i = 0; i < (o->segment_bytes - PAGE) / stride; i++)
        slot_look(o, number, (uint32_t)i, base + PAGE + i * stride, sequence, stride);
}

/* ---- the file ---- */

static int super_read(struct offline *o, const char *path)
{
    uint8_t page[PAGE];
    struct stat st;

    if (fstat(o->fd, &st) < 0 || !S_ISREG(st.st_mode))
        return ctl_fail(CTL_ERROR, "%s is not a regular file", path);
    o->size = (uint64_t)st.st_size;
    if (!read_at(o->fd, page, PAGE, 0) || page_kind(page, "UCMDNVME") == PAGE_NONE)
        return ctl_fail(CTL_ERROR, "%s is not a file of ucmd's NVMe tier", path);
    if (page_kind(page, "UCMDNVME") == PAGE_DAMAGED)
        return ctl_fail(CTL_CORRUPT,
                        "%s: version %u, or a damaged superblock; this reads version 1", path,
                        u32(page + 8));
    o->segment_bytes = u64(page + 32);
    o->data_offset = u64(page + 40);
    memcpy(o->uuid, page + 16, sizeof(o->uuid));
    if (o->segment_bytes < SEGMENT_MIN || o->segment_bytes > SEGMENT_MAX ||
        o->data_offset > o->size)
        return ctl_fail(CTL_CORRUPT, "%s: the superblock's sizes can't be", path);
    o->payload = malloc(o->segment_bytes);
    return o->payload ? CTL_OK : ctl_fail(CTL_ERROR, "no memory");
}

static void fingerprint_hex(const struct space *s, char out[17])
{
    for (unsigned i = 0; i < 8; i++)
        snprintf(out + 2 * i, 3, "%02x", s->fingerprint[i]);
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
    cJSON_AddItemToObject(j, "unreadable", answer_json_u64(o->unreadable));
    return ctl_print_json(j, false);
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
           " misplaced, %" PRIu64 " unreadable\n",
           o->corrupt_headers, o->corrupt_payloads, o->foreign, o->unreadable);
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

int offline_verify(const char *folder, bool json)
{
    struct offline o = {0};
    char path[4096];
    int rc;

    snprintf(path, sizeof(path), "%s/ucmd.cache", folder);
    o.fd = open(path, O_RDONLY | O_CLOEXEC);
    if (o.fd < 0)
        return ctl_fail(CTL_ERROR, "%s: %s", path, strerror(errno));
    if (flock(o.fd, LOCK_SH | LOCK_NB) < 0)
        fprintf(stderr, "%s is in use: what is being written now may seem corrupt\n", path);
    rc = super_read(&o, path);
    if (rc == CTL_OK) {
        names_read(&o, folder);
        for (uint64_t i = 0; i < (o.size - o.data_offset) / o.segment_bytes; i++)
            segment_look(&o, (uint32_t)i);
        rc = json ? print_json(&o) : print_text(&o);
    }
    if (rc == CTL_OK && o.corrupt_headers + o.corrupt_payloads + o.foreign + o.unreadable > 0)
        rc = CTL_CORRUPT;
    close(o.fd);
    free(o.space);
    free(o.payload);
    return rc;
}
