/* What tests of a shared root's garbage collection share: roots in directories of their own, and
 * files written there with any age. There are one or two hosts, and a server that fails or has
 * another clock. */
#ifndef UCMD_TESTS_SHARED_GC_RIG_H
#define UCMD_TESTS_SHARED_GC_RIG_H

#include "daemon/format/bytes.h"
#include "daemon/gc/gc.h"
#include "daemon/shared/shared_internal.h"
#include "tests/runner/bytes.h"
#include "tests/runner/wipe.h"
#include "tests/unit/random.h"
#include "tests/unit/shared/shared_directory.h"

#include <criterion/criterion.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <uv.h>

#define RIG_HOSTS 2
#define RIG_FILES 4096
#define RIG_WAIT_MS 60000
#define RIG_UNDER_WAY 256
#define NS 1000000000ull

struct rig_host {
    struct metrics metrics;
    struct shared_root *root;
    struct gc *gc;
    struct gc_config config;
    uint64_t seen; /* passes that the test waited for */
};

struct rig {
    uv_loop_t *loop, own_loop;
    struct deadlines *deadlines, own_deadlines;
    uv_timer_t timer;
    char directory[64];
    struct rig_host hosts[RIG_HOSTS];
    struct {
        char path[256];
        uint64_t mtime_s, bytes;
    } files[RIG_FILES]; /* block files that were laid */
    unsigned n;
    bool timed_out;
};

/* ---- a directory with faults ---- */

static struct rig_fault {
    struct shared_backend *b;
    int fail[SHARED_CHECK + 1];
    uint64_t behind_s;
    unsigned bad_lists; /* so many LISTs of this bucket fail */
    uint8_t bad_bucket;
    bool hold_lists;
    struct shared_op *held; /* a LIST that has not begun */
} rig_faults[4];

static struct {
    struct shared_op *op;
    void (*done_cb)(struct shared_op *op, int status);
    struct rig_fault *fault;
} rig_under_way[RIG_UNDER_WAY];

static inline struct rig_fault *rig_fault_of(const struct shared_backend *b)
{
    unsigned i = 0;

    while (rig_faults[i].b != b)
        cr_assert_lt(++i, 4, "no such backend");
    return &rig_faults[i];
}

/* What a test sets. */
static inline struct rig_fault *rig_fault(struct rig *g)
{
    return rig_fault_of(g->hosts[0].root->backend);
}

static inline void rig_op_done(struct shared_op *op, int status)
{
    struct rig_fault *fault;
    uint64_t behind;
    unsigned i = 0;

    while (rig_under_way[i].op != op)
        cr_assert_lt(++i, RIG_UNDER_WAY);
    fault = rig_under_way[i].fault;
    behind = fault->behind_s * NS;
    rig_under_way[i].op = NULL;
    op->done_cb = rig_under_way[i].done_cb;
    if (status == 0 && op->verb == SHARED_CHECK && op->sync)
        op->now_ns -= behind;
    if (status == 0 && op->verb == SHARED_READ)
        op->mtime_ns -= behind;
    for (uint32_t f = 0; status == 0 && op->verb == SHARED_LIST && f < op->listing.n; f++)
        op->listing.files[f].mtime_ns -= behind;
    if (op->verb == SHARED_LIST && fault->bad_lists > 0 && op->bucket == fault->bad_bucket) {
        fault->bad_lists--;
        status = -EIO;
    }
    op->done_cb(op, fault->fail[op->verb] ? fault->fail[op->verb] : status);
}

/* An operation that is to fail is made a CHECK, so that nothing happens to the root. */
static inline void rig_op_start(struct shared_backend *b, struct shared_op *op)
{
    struct rig_fault *fault = rig_fault_of(b);
    unsigned i = 0;

    while (rig_under_way[i].op)
        cr_assert_lt(++i, RIG_UNDER_WAY);
    rig_under_way[i].op = op;
    rig_under_way[i].done_cb = op->done_cb;
    rig_under_way[i].fault = fault;
    op->done_cb = rig_op_done;
    if (fault->fail[op->verb] && op->verb != SHARED_LIST)
        op->id.key_bytes = 0, op->by_name = false; /* no place has such a part */
    if (fault->hold_lists && op->verb == SHARED_LIST)
        fault->held = op;
    else
        shared_process.start(b, op);
}

static inline bool rig_op_cancel(struct shared_backend *b, struct shared_op *op)
{
    bool cancelled = shared_process.cancel(b, op);

    for (unsigned i = 0; cancelled && i < RIG_UNDER_WAY; i++)
        if (rig_under_way[i].op == op)
            rig_under_way[i].op = NULL;
    return cancelled;
}

static inline int rig_backend_open(const struct shared_backend_config *config,
                                   struct shared_backend **out)
{
    int err = shared_process.open(config, out);

    *rig_fault_of(NULL) = (struct rig_fault){.b = *out};
    return err;
}

static inline void rig_backend_close(struct shared_backend *b)
{
    rig_fault_of(b)->b = NULL;
    shared_process.close(b);
}

static const struct shared_backend_ops rig_backend = {.open = rig_backend_open,
                                                      .close = rig_backend_close,
                                                      .start = rig_op_start,
                                                      .cancel = rig_op_cancel};

/* LISTs do not begin until `hold` is false again. */
static inline void rig_hold_lists(struct rig *g, bool hold)
{
    struct rig_fault *fault = rig_fault(g);
    struct shared_op *held = fault->held;

    fault->hold_lists = hold;
    fault->held = NULL;
    if (held && !hold)
        shared_process.start(fault->b, held);
}

/* ---- hosts ---- */

static inline void rig_directory(struct rig *g)
{
    char path[96];

    memset(g, 0, sizeof(*g));
    /* In memory where there is such a place: thousands of files are made and removed. */
    strcpy(g->directory, access("/dev/shm", W_OK) == 0 ? "/dev/shm/ucm-test-gc-XXXXXX"
                                                       : "/tmp/ucm-test-gc-XXXXXX");
    cr_assert_not_null(mkdtemp(g->directory));
    snprintf(path, sizeof(path), "%s/blocks", g->directory);
    cr_assert_eq(mkdir(path, 0700), 0);
}

/* With passes every `collect_ms`; the first within 1.5 times `first_ms`. */
static inline void rig_host_first(struct rig *g, unsigned host, uint64_t collect_ms,
                                  uint64_t first_ms)
{
    struct rig_host *h = &g->hosts[host];

    gc_free(h->gc);
    h->config.root = h->root;
    h->config.low = 90;
    h->config.collect_ms = collect_ms;
    h->config.first_ms = first_ms;
    cr_assert_eq(gc_new(&h->config, &h->gc), 0);
}

static inline void rig_host_config(struct rig *g, unsigned host, uint64_t collect_ms)
{
    rig_host_first(g, host, collect_ms, collect_ms);
}

static inline void rig_ready_cb(void *ctx)
{
    (void)ctx;
}

static inline void rig_host(struct rig *g, unsigned host)
{
    struct config_process process;
    struct shared_root_config config = {.loop = g->loop,
                                        .deadlines = g->deadlines,
                                        .metrics = &g->hosts[host].metrics,
                                        .ops = &rig_backend,
                                        .target = g->directory,
                                        .host = host ? "b" : "a",
                                        .process = &process,
                                        .depth = 4,
                                        .timeout_ms = 5000,
                                        .ready_cb = rig_ready_cb};

    shared_directory_process(&process, g->directory);
    cr_assert_eq(shared_root_open(&config, &g->hosts[host].root), 0);
    rig_host_config(g, host, 3600000);
}

static inline void rig_open_on(struct rig *g, uv_loop_t *loop, struct deadlines *deadlines,
                               uint64_t capacity)
{
    g->loop = loop;
    g->deadlines = deadlines;
    cr_assert_eq(uv_timer_init(g->loop, &g->timer), 0);
    g->timer.data = g;
    rig_host(g, 0);
    g->hosts[0].root->config.capacity_bytes = capacity;
}

static inline void rig_open(struct rig *g, uint64_t capacity)
{
    cr_assert_eq(uv_loop_init(&g->own_loop), 0);
    cr_assert_eq(deadlines_init(&g->own_deadlines, &g->own_loop), 0);
    rig_open_on(g, &g->own_loop, &g->own_deadlines, capacity);
}

static inline void rig_begin(struct rig *g, uint64_t capacity)
{
    rig_directory(g);
    rig_open(g, capacity);
}

/* Another root of the same daemon; ends first. */
static inline void rig_begin_beside(struct rig *g, struct rig *first)
{
    rig_directory(g);
    rig_open_on(g, first->loop, first->deadlines, 0);
}

static inline void rig_timer_cb(uv_timer_t *timer)
{
    ((struct rig *)timer->data)->timed_out = true;
}

static inline void rig_timer(struct rig *g, uint64_t ms)
{
    g->timed_out = false;
    uv_update_time(g->loop);
    uv_timer_start(&g->timer, rig_timer_cb, ms, 0);
}

/* Runs the event loop while `condition` holds. */
#define RIG_WAIT_WHILE(g, condition)                                                               \
    do {                                                                                           \
        rig_timer(g, RIG_WAIT_MS);                                                                 \
        while (condition) {                                                                        \
            uv_run((g)->loop, UV_RUN_ONCE);                                                        \
            cr_assert_not((g)->timed_out);                                                         \
        }                                                                                          \
        uv_timer_stop(&(g)->timer);                                                                \
    } while (0)

static inline void rig_sleep(struct rig *g, uint64_t ms)
{
    for (rig_timer(g, ms); !g->timed_out;)
        uv_run(g->loop, UV_RUN_ONCE);
}

/* Until the present pass of the host has ended, well or not. */
static inline void rig_wait(struct rig *g, unsigned host)
{
    struct rig_host *h = &g->hosts[host];

    RIG_WAIT_WHILE(g, h->metrics.shared_gc_passes + h->metrics.shared_gc_failed == h->seen ||
                          gc_busy(h->gc));
    h->seen = h->metrics.shared_gc_passes + h->metrics.shared_gc_failed;
}

static inline void rig_pass(struct rig *g, unsigned host)
{
    uint64_t passes = g->hosts[host].metrics.shared_gc_passes;

    cr_assert_eq(gc_run(g->hosts[host].gc), 0);
    rig_wait(g, host);
    cr_assert_eq(g->hosts[host].metrics.shared_gc_passes, passes + 1);
}

static inline void rig_next(struct rig *g, unsigned host, struct shared_root *next)
{
    g->hosts[host].config.next = next;
    rig_host_config(g, host, 3600000);
}

static inline void rig_host_end(struct rig *g, struct rig_host *h)
{
    if (!h->root)
        return;
    gc_stop(h->gc);
    shared_root_stop(h->root);
    RIG_WAIT_WHILE(g, gc_busy(h->gc) || shared_root_busy(h->root) > 0);
    gc_free(h->gc);
    shared_root_close(h->root);
}

static inline void rig_end(struct rig *g)
{
    for (unsigned i = 0; i < RIG_HOSTS; i++)
        rig_host_end(g, &g->hosts[i]);
    uv_close((uv_handle_t *)&g->timer, NULL);
    if (g->loop == &g->own_loop) {
        deadlines_close(g->deadlines);
        cr_assert_eq(uv_run(g->loop, UV_RUN_DEFAULT), 0);
        cr_assert_eq(uv_loop_close(g->loop), 0);
    } else {
        uv_run(g->loop, UV_RUN_NOWAIT); /* what was closed ends in one turn */
    }
    (void)wipe(g->directory);
}

/* ---- files ---- */

static inline struct block_file_id rig_id(unsigned namespace, unsigned number, unsigned part)
{
    struct block_file_id id = {.key_bytes = 16, .part = part};

    memset(id.fingerprint, (int)namespace, sizeof(id.fingerprint));
    put32(id.key, number);
    return id;
}

/* Valid until the next call. */
static inline const char *rig_path(const struct rig *g, unsigned bucket, const char *name)
{
    static char path[256];

    snprintf(path, sizeof(path), "%s/blocks/%02x", g->directory, bucket);
    cr_assert(mkdir(path, 0700) == 0 || errno == EEXIST);
    snprintf(path, sizeof(path), "%s/blocks/%02x/%s", g->directory, bucket, name);
    return path;
}

static inline void rig_age(const char *path, uint64_t age_s)
{
    struct timespec times[2];

    clock_gettime(CLOCK_REALTIME, &times[0]);
    times[0].tv_sec -= (time_t)age_s;
    times[1] = times[0];
    cr_assert_eq(utimensat(AT_FDCWD, path, times, 0), 0);
}

static inline void rig_put_at(const char *path, uint64_t age_s, uint64_t bytes)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL, 0600);

    cr_assert_geq(fd, 0);
    cr_assert_eq(ftruncate(fd, (off_t)bytes), 0);
    close(fd);
    rig_age(path, age_s);
}

static inline void rig_put_name(struct rig *g, unsigned bucket, const char *name, uint64_t age_s,
                                uint64_t bytes)
{
    rig_put_at(rig_path(g, bucket, name), age_s, bytes);
}

static inline const char *rig_place(struct rig *g, unsigned namespace, unsigned number,
                                    unsigned part)
{
    struct block_file_id id = rig_id(namespace, number, part);
    uint8_t identity[BLOCK_FILE_IDENTITY_BYTES];
    char name[BLOCK_FILE_NAME_CAP];

    cr_assert_eq(block_file_locate(&id, identity, name), 0);
    return rig_path(g, identity[0], name);
}

/* `bytes` includes the header's, but there is no header. */
static inline uint64_t rig_put(struct rig *g, unsigned namespace, unsigned number, unsigned part,
                               uint64_t age_s, uint64_t bytes)
{
    cr_assert_lt(g->n, RIG_FILES);
    strcpy(g->files[g->n].path, rig_place(g, namespace, number, part));
    rig_put_at(g->files[g->n].path, age_s, bytes);
    g->files[g->n].mtime_s = UINT32_MAX - age_s;
    g->files[g->n++].bytes = bytes;
    return bytes;
}

static inline bool rig_has(struct rig *g, unsigned namespace, unsigned number, unsigned part)
{
    return access(rig_place(g, namespace, number, part), F_OK) == 0;
}

static inline bool rig_has_name(struct rig *g, unsigned bucket, const char *name)
{
    return access(rig_path(g, bucket, name), F_OK) == 0;
}

/* Bytes of everything in the buckets. */
static inline uint64_t rig_used(const struct rig *g)
{
    uint64_t used = 0;

    for (unsigned bucket = 0; bucket < BLOCK_FILE_BUCKETS; bucket++) {
        char path[320];
        struct dirent *e;
        struct stat st;
        DIR *dir;

        snprintf(path, sizeof(path), "%s/blocks/%02x", g->directory, bucket);
        dir = opendir(path);
        while (dir && (e = readdir(dir)))
            if (fstatat(dirfd(dir), e->d_name, &st, 0) == 0 && S_ISREG(st.st_mode))
                used += (uint64_t)st.st_size;
        if (dir)
            closedir(dir);
    }
    return used;
}

/* Bytes of the files that are still there, although they are older than the youngest that went. */
static inline uint64_t rig_inversion(const struct rig *g)
{
    uint64_t youngest = 0, bytes = 0;

    for (unsigned i = 0; i < g->n; i++)
        if (access(g->files[i].path, F_OK) < 0 && g->files[i].mtime_s > youngest)
            youngest = g->files[i].mtime_s;
    for (unsigned i = 0; i < g->n; i++)
        if (access(g->files[i].path, F_OK) == 0 && g->files[i].mtime_s < youngest)
            bytes += g->files[i].bytes;
    return bytes;
}

/* ---- whole block files, through the root ---- */

struct rig_task {
    struct shared_task task;
    bool released;
};

static inline void rig_released_cb(struct shared_task *t)
{
    ((struct rig_task *)t)->released = true;
}

static inline int rig_do(struct rig *g, enum shared_verb verb, const struct block_file_id *id,
                         void *data, uint64_t bytes)
{
    struct rig_task t = {.task = {.op = {.verb = verb, .id = *id, .data = data, .bytes = bytes},
                                  .class = SHARED_LOAD,
                                  .deadline_ms = uv_now(g->loop) + RIG_WAIT_MS,
                                  .released_cb = rig_released_cb}};

    cr_assert_eq(shared_root_submit(g->hosts[0].root, &t.task), 0);
    RIG_WAIT_WHILE(g, !t.released);
    return t.task.status;
}

static inline uint8_t *rig_pattern(const struct block_file_id *id, uint64_t bytes)
{
    uint8_t *data = malloc(bytes);

    bytes_random(data, bytes, get32(id->key) * 256ull + id->part);
    return data;
}

/* `bytes` of payload. */
static inline void rig_write(struct rig *g, unsigned namespace, unsigned number, unsigned part,
                             uint64_t age_s, uint64_t bytes)
{
    struct block_file_id id = rig_id(namespace, number, part);
    uint8_t *data = rig_pattern(&id, bytes);

    cr_assert_eq(rig_do(g, SHARED_WRITE, &id, data, bytes), 0);
    rig_age(rig_place(g, namespace, number, part), age_s);
    free(data);
}

/* -ENOENT, or 0 and what was written. */
static inline int rig_read(struct rig *g, unsigned namespace, unsigned number, unsigned part,
                           uint64_t bytes)
{
    struct block_file_id id = rig_id(namespace, number, part);
    uint8_t *expected = rig_pattern(&id, bytes), *data = malloc(bytes);
    int status = rig_do(g, SHARED_READ, &id, data, bytes);

    cr_assert(status == 0 || status == -ENOENT, "%d", status);
    cr_assert(status < 0 || memcmp(data, expected, bytes) == 0);
    free(expected);
    free(data);
    return status;
}

/* ---- purges ---- */

struct rig_purge {
    struct shared_purge purge;
    int status;
    uint64_t files;
    unsigned reports;
};

static inline void rig_purged_cb(struct shared_purge *p, int status, uint64_t files)
{
    struct rig_purge *purge = (struct rig_purge *)p;

    purge->status = status;
    purge->files = files;
    purge->reports++;
}

static inline void rig_purge_begin(struct rig *g, struct rig *other, unsigned namespace,
                                   struct rig_purge *p, struct shared *shared)
{
    *shared = (struct shared){.settings = {.loop = g->loop, .deadlines = g->deadlines},
                              .n = 2,
                              .roots = {g->hosts[0].root, other->hosts[0].root}};
    *p = (struct rig_purge){.purge = {.done_cb = rig_purged_cb}};
    memset(p->purge.fingerprint, (int)namespace, sizeof(p->purge.fingerprint));
    list_init(&shared->purges);
    cr_assert_eq(shared_purge(shared, &p->purge), 0);
    cr_assert_eq(p->reports, 0);
}

/* Purges at both roots. Returns the number of removed files. */
static inline uint64_t rig_purge(struct rig *g, struct rig *other, unsigned namespace, int *status)
{
    struct rig_purge p;
    struct shared shared;

    rig_purge_begin(g, other, namespace, &p, &shared);
    RIG_WAIT_WHILE(g, !list_empty(&shared.purges));
    cr_assert_eq(p.reports, 1);
    *status = p.status;
    return p.files;
}

#endif
