#include "daemon/tier/ns_records.h"

#include "daemon/base/kill_point.h"
#include "daemon/base/log.h"
#include "daemon/format/io.h"
#include "daemon/format/nvme_read.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define SPARE_PAGES 64u /* besides two for each namespace: a file is allowed that many */
#define REWRITE_SUFFIX ".tmp"

/* ---- in memory ---- */

struct ns_entry {
    struct nvme_ns_record r;
    bool kept; /* whatever `wanted` of ns_records_prune says */
};

/* The first record that is not before the fingerprint. */
static uint32_t record_index(const struct ns_records *n, const uint8_t *fingerprint)
{
    uint32_t low = 0, high = n->count;

    while (low < high) {
        uint32_t mid = low + (high - low) / 2;

        if (memcmp(n->record[mid]->r.fingerprint, fingerprint, UCM_FINGERPRINT_BYTES) < 0)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

static struct ns_entry *entry_of(const struct ns_records *n, const uint8_t *fingerprint)
{
    uint32_t i = record_index(n, fingerprint);

    return i < n->count &&
                   memcmp(n->record[i]->r.fingerprint, fingerprint, UCM_FINGERPRINT_BYTES) == 0
               ? n->record[i]
               : NULL;
}

static struct nvme_ns_record *record_of(const struct ns_records *n, const uint8_t *fingerprint)
{
    struct ns_entry *e = entry_of(n, fingerprint);

    return e ? &e->r : NULL;
}

void ns_records_keep(struct ns_records *n, const uint8_t *fingerprint)
{
    struct ns_entry *e = entry_of(n, fingerprint);

    if (e)
        e->kept = true;
}

const struct nvme_ns_record *ns_records_find(const struct ns_records *n, const uint8_t *fingerprint)
{
    return record_of(n, fingerprint);
}

bool ns_records_purged(const struct ns_records *n, const uint8_t *fingerprint, uint64_t sequence)
{
    const struct nvme_ns_record *known = ns_records_find(n, fingerprint);

    return known && sequence < known->from_sequence;
}

const struct nvme_ns_record *ns_records_at(const struct ns_records *n, uint32_t i)
{
    return &n->record[i]->r;
}

void ns_records_forget(struct ns_records *n, const uint8_t *fingerprint, uint64_t from_sequence)
{
    struct ns_entry *e = entry_of(n, fingerprint);
    struct nvme_ns_record *known = e ? &e->r : NULL;

    /* A rewrite that runs meanwhile takes the one number or the other. */
    if (!known || known->from_sequence >= from_sequence)
        return;
    __atomic_store_n(&known->from_sequence, from_sequence, __ATOMIC_RELAXED);
    e->kept = false;
}

void ns_records_secret(struct ns_records *n, const uint8_t *fingerprint,
                       const uint8_t secret[NVME_SECRET_BYTES])
{
    struct nvme_ns_record *known = record_of(n, fingerprint);

    if (known)
        memcpy(known->secret, secret, NVME_SECRET_BYTES);
}

int ns_records_set(struct ns_records *n, const struct nvme_ns_record *r)
{
    uint32_t i = record_index(n, r->fingerprint);
    struct nvme_ns_record *known = record_of(n, r->fingerprint);
    struct ns_entry *fresh;

    if (known) {
        /* A later record without a secret is of a purge, when the tenant had no keys any more. */
        if (r->from_sequence > known->from_sequence ||
            (r->from_sequence == known->from_sequence && nvme_ns_has_secret(r)))
            memcpy(known->secret, r->secret, NVME_SECRET_BYTES);
        ns_records_forget(n, r->fingerprint, r->from_sequence);
        return 0;
    }
    if (n->count == n->cap) {
        uint32_t cap = n->cap ? 2 * n->cap : 16;
        struct ns_entry **p = realloc(n->record, cap * sizeof(*p));

        if (!p)
            return -ENOMEM;
        n->record = p;
        n->cap = cap;
    }
    fresh = calloc(1, sizeof(*fresh));
    if (!fresh)
        return -ENOMEM;
    fresh->r = *r;
    memmove(n->record + i + 1, n->record + i, (n->count - i) * sizeof(n->record[0]));
    n->record[i] = fresh;
    n->count++;
    return 0;
}

uint64_t ns_records_last_sequence(const struct ns_records *n)
{
    uint64_t last = 0;

    for (uint32_t i = 0; i < n->count; i++)
        if (n->record[i]->r.from_sequence > last)
            last = n->record[i]->r.from_sequence;
    return last;
}

bool ns_records_crowded(const struct ns_records *n)
{
    for (unsigned i = 0; i < n->n_files && !n->unread; i++)
        if (n->files[i].path && n->files[i].pages >= n->files[i].check_at)
            return true;
    return false;
}

void ns_records_prune(struct ns_records *n, bool (*wanted)(void *ctx, const uint8_t *fingerprint),
                      void *ctx)
{
    uint64_t enough;
    uint32_t left = 0;

    for (uint32_t i = 0; i < n->count; i++) {
        if (n->record[i]->kept || wanted(ctx, n->record[i]->r.fingerprint))
            n->record[left++] = n->record[i];
        else
            free(n->record[i]);
    }
    n->count = left;
    enough = SPARE_PAGES + 2 * (uint64_t)left;
    if (enough > NVME_NS_RECORDS_MAX)
        enough = NVME_NS_RECORDS_MAX;
    for (unsigned i = 0; i < n->n_files; i++) {
        n->files[i].rewrite = n->files[i].path && n->files[i].pages >= enough;
        n->files[i].check_at = enough;
    }
}

/* ---- reading ---- */

static int file_read(struct ns_records *n, struct ns_file *f, int fd)
{
    struct nvme_ns_record r;
    uint64_t damaged = 0;
    int rc = 0;

    for (uint64_t i = 0; i < NVME_NS_RECORDS_MAX && (rc == 0 || rc == -EBADMSG); i++) {
        rc = nvme_ns_record_read(fd, i, &r);
        damaged += rc == -EBADMSG;
        if (rc < 0)
            continue;
        if (ns_records_set(n, &r) < 0)
            return -ENOMEM;
        f->pages = i + 1;
    }
    n->damaged += damaged;
    if (rc < 0 && rc != -EBADMSG && rc != -ENODATA) {
        log_error("tier", "ns-records-not-read", "path=%s error=%s", f->path, strerror(-rc));
        n->unread = true;
        f->trouble = rc;
    }
    if (damaged > 0)
        log_warn("tier", "ns-records-damaged", "path=%s records=%" PRIu64, f->path, damaged);
    return 0;
}

static int record_write(int fd, const uint8_t page[NVME_PAGE], uint64_t i)
{
    return io_write(fd, page, NVME_PAGE, i * NVME_PAGE);
}

/* ---- secrets ---- */

/* Records that are written together. */
struct batch {
    const struct nvme_ns_record *const *r;
    unsigned n;
};

static const struct nvme_ns_record *batch_find(const struct batch *b, const uint8_t *fingerprint)
{
    for (unsigned i = 0; i < b->n; i++)
        if (memcmp(b->r[i]->fingerprint, fingerprint, UCM_FINGERPRINT_BYTES) == 0)
            return b->r[i];
    return NULL;
}

static bool secret_current(const struct ns_records *n, const struct batch *written,
                           const struct nvme_ns_record *r)
{
    const struct nvme_ns_record *known = batch_find(written, r->fingerprint);

    if (!known)
        known = ns_records_find(n, r->fingerprint);
    return known && memcmp(known->secret, r->secret, NVME_SECRET_BYTES) == 0;
}

/* Overwrites secrets that are not current any more, or all. Each such page is of no use but for its
 * sequence, which a later page has, too: one that is cut off is a damaged page, and is skipped.
 * written: counts more than what is known in memory. */
static int secrets_wipe(const struct ns_records *n, int fd, const struct batch *written, bool all)
{
    struct nvme_ns_record r;
    uint8_t page[NVME_PAGE];
    bool any = false;
    int rc = 0;

    for (uint64_t i = 0; i < NVME_NS_RECORDS_MAX && (rc == 0 || rc == -EBADMSG); i++) {
        rc = nvme_ns_record_read(fd, i, &r);
        if (rc < 0 || !nvme_ns_has_secret(&r) || (!all && secret_current(n, written, &r)))
            continue;
        memset(r.secret, 0, sizeof(r.secret));
        nvme_ns_record_encode(&r, page);
        KILL_POINT_WITH("ns-wipe-torn",
                        if (pwrite(fd, page, 512, (off_t)(i * NVME_PAGE)) < 0) abort());
        rc = record_write(fd, page, i);
        any = true;
    }
    if (rc == -ENODATA || rc == -EBADMSG)
        rc = 0;
    if (any && fdatasync(fd) < 0)
        rc = -errno;
    KILL_POINT("ns-wipe-done");
    return rc;
}

static int path_wipe(const struct ns_records *n, const char *path, bool all)
{
    int fd = open(path, O_RDWR | O_CLOEXEC), rc;

    if (fd < 0)
        return errno == ENOENT ? 0 : -errno;
    rc = secrets_wipe(n, fd, &(struct batch){.n = 0}, all);
    close(fd);
    return rc;
}

/* Removes what a daemon that died while it rewrote the file has left. */
static void rewrite_remove(const struct ns_file *f)
{
    char *path;

    if (asprintf(&path, "%s" REWRITE_SUFFIX, f->path) < 0)
        return;
    (void)path_wipe(NULL, path, true); /* a file that can't be read has no secret that can be */
    if (unlink(path) < 0 && errno != ENOENT)
        log_warn("tier", "ns-records-left", "path=%s error=%s", path, strerror(errno));
    free(path);
}

static int file_init(struct ns_records *n, struct ns_file *f, const char *directory)
{
    int fd, rc;

    f->check_at = SPARE_PAGES;
    f->directory = strdup(directory);
    if (!f->directory || asprintf(&f->path, "%s/" NVME_NS_FILE, directory) < 0) {
        f->path = NULL;
        return -ENOMEM;
    }
    rewrite_remove(f);
    fd = open(f->path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        n->unread |= errno != ENOENT;
        f->trouble = errno != ENOENT ? -errno : 0;
        if (errno != ENOENT)
            log_error("tier", "ns-records-not-read", "path=%s error=%s", f->path, strerror(errno));
        return 0;
    }
    f->linked = true;
    rc = file_read(n, f, fd);
    /* The run that wrote the last of them may have ended before they were synced. */
    if (rc == 0 && (fdatasync(fd) < 0 || io_directory_sync(directory) < 0)) {
        log_error("tier", "ns-records-not-synced", "path=%s error=%s", f->path, strerror(errno));
        n->unsynced = true;
    }
    close(fd);
    return rc;
}

int ns_records_open(struct ns_records *n, const char *const *directories, unsigned count)
{
    int rc = 0;

    *n = (struct ns_records){.n_files = count};
    n->files = calloc(count, sizeof(n->files[0]));
    if (!n->files)
        return -ENOMEM;
    for (unsigned i = 0; i < count && rc == 0; i++)
        if (directories[i])
            rc = file_init(n, &n->files[i], directories[i]);
    for (unsigned i = 0; i < count && rc == 0; i++) {
        int one = n->files[i].linked ? path_wipe(n, n->files[i].path, false) : 0;

        if (one < 0)
            log_error("tier", "secrets-not-wiped", "path=%s error=%s", n->files[i].path,
                      strerror(-one));
    }
    if (rc < 0)
        ns_records_close(n);
    return rc;
}

void ns_records_close(struct ns_records *n)
{
    for (unsigned i = 0; n->files && i < n->n_files; i++) {
        free(n->files[i].directory);
        free(n->files[i].path);
    }
    for (uint32_t i = 0; i < n->count; i++)
        free(n->record[i]);
    free(n->files);
    free(n->record);
    *n = (struct ns_records){0};
}

/* ---- writing ---- */

/* The file is under its name, also after a power failure. */
static int file_link(struct ns_file *f)
{
    int rc = f->linked ? 0 : io_directory_sync(f->directory);

    if (rc == 0)
        f->linked = true;
    return rc;
}

static int file_append(struct ns_file *f, const struct batch *b)
{
    int fd = open(f->path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    uint8_t page[NVME_PAGE];
    int rc = f->pages + b->n <= NVME_NS_RECORDS_MAX ? 0 : -ENOSPC;

    if (fd < 0)
        return -errno;
    KILL_POINT("ns-append-begin");
    for (unsigned i = 0; i < b->n && rc == 0; i++) {
        nvme_ns_record_encode(b->r[i], page);
        KILL_POINT_WITH("ns-append-torn",
                        if (pwrite(fd, page, 512, (off_t)((f->pages + i) * NVME_PAGE)) < 0)
                            abort());
        rc = record_write(fd, page, f->pages + i);
    }
    if (rc == 0 && fdatasync(fd) < 0)
        rc = -errno;
    close(fd);
    KILL_POINT("ns-append-done");
    if (rc == 0)
        rc = file_link(f);
    if (rc == 0)
        f->pages += b->n;
    return rc;
}

/* All records, and the new ones in their places or after them. Returns how many, or -errno. */
static int64_t all_write(const struct ns_records *n, const struct batch *b, int fd)
{
    uint8_t page[NVME_PAGE];
    struct nvme_ns_record one;
    uint32_t pages = n->count;
    int rc = 0;

    for (uint32_t i = 0; i < n->count && rc == 0; i++) {
        const struct nvme_ns_record *own = &n->record[i]->r,
                                    *fresh = batch_find(b, own->fingerprint);
        uint64_t from = __atomic_load_n(&own->from_sequence, __ATOMIC_RELAXED);

        memcpy(one.fingerprint, own->fingerprint, sizeof(one.fingerprint));
        one.identity_bytes = own->identity_bytes;
        memcpy(one.identity, own->identity, one.identity_bytes);
        one.from_sequence = fresh && fresh->from_sequence > from ? fresh->from_sequence : from;
        memcpy(one.secret, fresh ? fresh->secret : own->secret, sizeof(one.secret));
        nvme_ns_record_encode(&one, page);
        KILL_POINT_WITH("ns-rewrite-torn",
                        if (pwrite(fd, page, 512, (off_t)i * NVME_PAGE) < 0) abort());
        rc = record_write(fd, page, i);
    }
    for (unsigned i = 0; i < b->n && rc == 0; i++) {
        if (ns_records_find(n, b->r[i]->fingerprint))
            continue;
        nvme_ns_record_encode(b->r[i], page);
        rc = record_write(fd, page, pages++);
    }
    return rc < 0 ? rc : (int64_t)pages;
}

/* Until the rename the old file is the file, from then on the new one; both are whole. */
static int file_rewrite(const struct ns_records *n, struct ns_file *f, const struct batch *b)
{
    uint64_t before = f->pages;
    char *path = NULL;
    int64_t pages;
    int fd, rc;

    if (asprintf(&path, "%s" REWRITE_SUFFIX, f->path) < 0)
        return -ENOMEM;
    KILL_POINT("ns-rewrite-begin");
    fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    pages = fd < 0 ? -errno : all_write(n, b, fd);
    rc = pages < 0 ? (int)pages : 0;
    KILL_POINT("ns-rewrite-written");
    if (rc == 0 && fsync(fd) < 0)
        rc = -errno;
    if (fd >= 0)
        close(fd);
    if (rc == 0 && rename(path, f->path) < 0)
        rc = -errno;
    if (rc < 0)
        unlink(path);
    free(path);
    if (rc < 0)
        return rc;
    KILL_POINT("ns-rewrite-renamed");
    f->linked = false;
    f->pages = (uint64_t)pages;
    log_info("tier", "ns-records-rewritten", "path=%s records=%" PRIu64 " before=%" PRIu64, f->path,
             f->pages, before);
    return 0;
}

/* Somebody removed or cut it. */
static bool file_lost(const struct ns_file *f)
{
    struct stat st;

    return f->pages > 0 && (stat(f->path, &st) < 0 || (uint64_t)st.st_size < f->pages * NVME_PAGE);
}

static int file_put(const struct ns_records *n, struct ns_file *f, const struct batch *b,
                    bool *rewritten)
{
    bool lost = file_lost(f);
    int rc;

    if (!f->rewrite && !lost)
        return file_append(f, b);
    f->rewrite = false;
    rc = file_rewrite(n, f, b);
    *rewritten = rc == 0;
    if (rc == 0)
        return file_link(f);
    /* The old one does as long as it has space; the next time that it is due comes later. */
    log_warn("tier", "ns-records-not-rewritten", "path=%s error=%s", f->path, strerror(-rc));
    if (lost)
        return rc;
    f->check_at = f->pages + SPARE_PAGES;
    return file_append(f, b);
}

/* The new records are on stable storage before a former secret goes. */
static int file_write(const struct ns_records *n, struct ns_file *f, const struct batch *b,
                      bool *any)
{
    int old = open(f->path, O_RDWR | O_CLOEXEC); /* a rewrite takes its name away */
    bool rewritten = false;
    int rc = file_put(n, f, b, &rewritten);

    *any |= rc == 0;
    KILL_POINT("ns-wipe-begin");
    if (rc == 0 && old >= 0)
        rc = secrets_wipe(n, old, b, rewritten);
    if (old >= 0)
        close(old);
    return rc;
}

int ns_records_write(struct ns_records *n, const struct nvme_ns_record *const *r, unsigned count,
                     bool *any)
{
    const struct batch b = {r, count};
    int rc = 0;

    *any = false;
    for (unsigned i = 0; i < n->n_files; i++) {
        int one = n->files[i].path ? file_write(n, &n->files[i], &b, any) : 0;

        n->files[i].trouble = one;
        if (one == 0)
            continue;
        log_error("tier", "ns-record-not-written", "path=%s error=%s", n->files[i].path,
                  strerror(-one));
        rc = one;
    }
    return rc;
}

bool ns_records_removed(const struct ns_records *n, unsigned file)
{
    const char *path = n->files[file].path;

    return path && access(path, F_OK) < 0 && errno == ENOENT;
}

bool ns_records_trouble(const struct ns_records *n, char *text, size_t bytes)
{
    for (unsigned i = 0; i < n->n_files; i++) {
        int trouble = n->files[i].trouble;

        if (trouble == 0)
            continue;
        snprintf(text, bytes, "%s: %s", n->files[i].path, strerror(-trouble));
        return true;
    }
    return false;
}

int ns_records_restore(struct ns_records *n)
{
    int rc = 0;

    for (unsigned i = 0; i < n->n_files && n->count > 0; i++) {
        struct ns_file *f = &n->files[i];
        int one = 0;

        if (!f->path || !file_lost(f))
            continue;
        one = file_rewrite(n, f, &(struct batch){.n = 0});
        if (one == 0)
            one = file_link(f);
        f->trouble = one;
        log_error("tier", "ns-records-removed", "path=%s restored=%s", f->path,
                  one == 0 ? "yes" : strerror(-one));
        rc = one < 0 ? one : rc;
    }
    return rc;
}
