/* Beneath shared_contract.h: a backend, operations on it one by one, and the files on its root.
 *
 * begin(c) of a test fills in `ops`, `target` and `directory`. `directory` is the same root as
 * `target`, seen as a directory here: tests write and damage files there directly. A server that
 * stands between must not remember attributes of files. A root that can't be seen as a directory
 * has `contract_remote`, and `directory` is "". Every test is a process, with a begin and an end of
 * its own. */
#ifndef UCMD_TESTS_SHARED_CONTRACT_RIG_H
#define UCMD_TESTS_SHARED_CONTRACT_RIG_H

#include "daemon/format/bytes.h"
#include "daemon/format/checksum.h"
#include "daemon/shared/backend.h"
#include "tests/runner/bytes.h"
#include "tests/runner/wipe.h"
#include "tests/unit/shared/shared_directory.h"

#include <criterion/criterion.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <uv.h>

#define CONTRACT_OPS 64
#define CONTRACT_DEADLINE_MS 60000
#define PENDING 1 /* no real status, which is 0 or -errno */

/* Files of a root that is not a directory, by their paths. Any thread. */
struct contract_remote {
    uint8_t *(*get)(const char *path, uint64_t *bytes);              /* NULL: there is none */
    void (*put)(const char *path, const void *data, uint64_t bytes); /* in one step */
    void (*remove)(const char *path);
    unsigned (*count)(void);
    bool removes_blind; /* removing an object that is not there gives no error */
    bool objects_only;  /* objects have no time and are never empty; there is no listing */
};
static const struct contract_remote *contract_remote;

struct contract {
    const struct shared_backend_ops *ops;
    char directory[128], target[256];
    const struct config_process *process; /* NULL: it is none */
    char launcher[256];                   /* its ucmd; "": no sandbox */
    unsigned depth;                       /* 8 unless begin says otherwise; at least 2 */
    /* The root goes away, as the backend sees it, and comes back. NULL: the directory is renamed. */
    void (*root_away)(struct contract *c);
    void (*root_back)(struct contract *c);
    uv_loop_t loop;
    struct deadlines deadlines;
    uv_timer_t deadline;
    struct shared_backend *b;
    bool starting;
    unsigned done;
};

struct contract_op {
    struct shared_op op; /* first */
    struct contract *c;
    int status;
};

/* ---- where a root lies ---- */

/* A directory of the test's own, below that one; contract_directory_end removes it. */
static inline void contract_directory_begin(struct contract *c, const char *below)
{
    snprintf(c->directory, sizeof(c->directory), "%s/ucm-test-shared-XXXXXX", below);
    cr_assert(mkdtemp(c->directory));
}

static inline void contract_directory_end(struct contract *c)
{
    cr_assert_eq(wipe(c->directory), 0);
}

/* ---- running operations ---- */

static inline void contract_late_cb(uv_timer_t *timer)
{
    (void)timer;
    cr_assert_fail("not done by the deadline");
}

static inline void contract_open(struct contract *c)
{
    struct shared_backend_config config = {.loop = &c->loop,
                                           .deadlines = &c->deadlines,
                                           .target = c->target,
                                           .host = "host",
                                           .depth = c->depth,
                                           .process = c->process,
                                           .launcher = c->launcher[0] ? c->launcher : NULL};

    cr_assert_eq(c->ops->open(&config, &c->b), 0);
}

static inline void contract_close(struct contract *c)
{
    c->ops->close(c->b);
    c->b = NULL;
    cr_assert_eq(uv_run(&c->loop, UV_RUN_DEFAULT), 0, "close ends on the event loop");
}

static inline void contract_done_cb(struct shared_op *op, int status)
{
    struct contract_op *o = (struct contract_op *)op;

    cr_assert_not(o->c->starting, "done from inside start");
    cr_assert_eq(o->status, PENDING, "done twice");
    o->status = status;
    o->c->done++;
}

static inline void contract_start(struct contract *c, struct contract_op *o)
{
    o->c = c;
    o->status = PENDING;
    o->op.done_cb = contract_done_cb;
    c->starting = true;
    c->ops->start(c->b, &o->op);
    c->starting = false;
}

/* Until `n` operations are done in all. */
static inline void contract_wait(struct contract *c, unsigned n)
{
    uv_update_time(&c->loop);
    uv_timer_start(&c->deadline, contract_late_cb, CONTRACT_DEADLINE_MS, 0);
    while (c->done < n)
        uv_run(&c->loop, UV_RUN_ONCE);
    uv_timer_stop(&c->deadline);
    cr_assert_eq(c->done, n);
}

static inline int contract_run(struct contract *c, struct contract_op *o)
{
    contract_start(c, o);
    contract_wait(c, c->done + 1);
    return o->status;
}

static inline struct block_file_id contract_id(unsigned number)
{
    struct block_file_id id = {.key_bytes = 16, .part = number % 3};

    memset(id.fingerprint, 0xf1, sizeof(id.fingerprint));
    put32(id.key, number);
    return id;
}

static inline struct shared_op contract_of(enum shared_verb verb, unsigned number, void *data,
                                           uint64_t bytes)
{
    return (struct shared_op){
        .verb = verb, .id = contract_id(number), .data = data, .bytes = bytes};
}

static inline int contract_do(struct contract *c, enum shared_verb verb, unsigned number,
                              void *data, uint64_t bytes)
{
    struct contract_op o = {.op = contract_of(verb, number, data, bytes)};

    return contract_run(c, &o);
}

static inline int contract_check(struct contract *c, bool sync, uint64_t *now_ns)
{
    struct contract_op o = {.op = {.verb = SHARED_CHECK, .sync = sync}};
    int status = contract_run(c, &o);

    *now_ns = o.op.now_ns;
    return status;
}

static inline struct shared_listing contract_list(struct contract *c, uint8_t bucket)
{
    struct contract_op o = {.op = {.verb = SHARED_LIST, .bucket = bucket}};

    cr_assert_eq(contract_run(c, &o), 0);
    return o.op.listing;
}

static inline bool contract_answer(int status)
{
    return status == 0 || status == -ENOENT || status == -ESTALE || status == -EEXIST ||
           status == -EBADMSG || status == -EINVAL;
}

/* ---- the files themselves ---- */

static inline uint8_t *contract_data(uint64_t bytes, unsigned number)
{
    uint8_t *data = malloc(bytes);

    cr_assert(data);
    bytes_fill(data, bytes, number);
    return data;
}

/* Fails at the first byte that is wrong. */
static inline void contract_right(const uint8_t *data, uint64_t bytes, unsigned number)
{
    cr_assert(bytes_are(data, bytes, number), "file %u: byte %zu is wrong", number,
              bytes_right(data, bytes, number));
}

/* Reads into memory of its own. The status may be 0 only if all bytes are right. */
static inline int contract_read(struct contract *c, unsigned number, uint64_t bytes)
{
    uint8_t *data = malloc(bytes);
    int status;

    cr_assert(data);
    memset(data, 0xee, bytes);
    status = contract_do(c, SHARED_READ, number, data, bytes);
    if (status == 0)
        contract_right(data, bytes, number);
    free(data);
    return status;
}

static inline int contract_write(struct contract *c, unsigned number, uint64_t bytes)
{
    uint8_t *data = contract_data(bytes, number);
    int status = contract_do(c, SHARED_WRITE, number, data, bytes);

    free(data);
    return status;
}

static inline uint8_t contract_bucket(unsigned number, char name[BLOCK_FILE_NAME_CAP])
{
    struct block_file_id id = contract_id(number);
    uint8_t identity[BLOCK_FILE_IDENTITY_BYTES];

    cr_assert_eq(block_file_locate(&id, identity, name), 0);
    return identity[0];
}

static inline void contract_path_in(const struct contract *c, uint8_t bucket, const char *name,
                                    char path[512])
{
    int n = snprintf(path, 512, "%s/blocks/%02x/%s", c->directory, bucket, name);

    cr_assert_lt(n, 512);
}

/* Valid until this thread's next call. */
static inline char *contract_path(const struct contract *c, unsigned number)
{
    static _Thread_local char path[512];
    char name[BLOCK_FILE_NAME_CAP];
    uint8_t bucket = contract_bucket(number, name);

    contract_path_in(c, bucket, name, path);
    return path;
}

static inline void contract_bucket_make(const struct contract *c, uint8_t bucket)
{
    char path[512];

    if (contract_remote)
        return;
    snprintf(path, sizeof(path), "%s/blocks", c->directory);
    cr_assert(mkdir(path, 0700) == 0 || errno == EEXIST);
    contract_path_in(c, bucket, "", path);
    cr_assert(mkdir(path, 0700) == 0 || errno == EEXIST);
}

static inline void contract_put(const char *path, const void *data, uint64_t bytes)
{
    int fd;

    if (contract_remote) {
        contract_remote->put(path, data, bytes);
        return;
    }
    fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    cr_assert_geq(fd, 0);
    cr_assert_eq(write(fd, data, bytes), (ssize_t)bytes);
    cr_assert_eq(close(fd), 0);
}

/* All of a file; it is there. */
static inline uint8_t *contract_get(const char *path, uint64_t *bytes)
{
    uint8_t *data = contract_remote ? contract_remote->get(path, bytes) : NULL;
    struct stat st;
    int fd;

    if (contract_remote) {
        cr_assert(data, "%s", path);
        return data;
    }
    fd = open(path, O_RDONLY);
    cr_assert_geq(fd, 0);
    cr_assert_eq(fstat(fd, &st), 0);
    *bytes = (uint64_t)st.st_size;
    data = malloc(*bytes + 1);
    cr_assert(data);
    cr_assert_eq(read(fd, data, *bytes), (ssize_t)*bytes);
    close(fd);
    return data;
}

static inline bool contract_exists(const char *path)
{
    uint8_t *data;
    uint64_t bytes;

    if (!contract_remote)
        return access(path, F_OK) == 0;
    data = contract_remote->get(path, &bytes);
    free(data);
    return data != NULL;
}

static inline void contract_unlink(const char *path)
{
    if (contract_remote)
        contract_remote->remove(path);
    else
        cr_assert_eq(unlink(path), 0);
}

static inline void contract_move(const char *from, const char *to)
{
    uint64_t bytes;
    uint8_t *data = contract_get(from, &bytes);

    contract_put(to, data, bytes);
    contract_unlink(from);
    free(data);
}

static inline void contract_truncate(const char *path, uint64_t to)
{
    uint64_t bytes;
    uint8_t *data = realloc(contract_get(path, &bytes), to + 1);

    cr_assert(data);
    if (to > bytes)
        memset(data + bytes, 0, to - bytes);
    contract_put(path, data, to);
    free(data);
}

/* False: the root has no such times. */
static inline bool contract_age(const char *path, const struct timespec times[2])
{
    if (!contract_remote)
        cr_assert_eq(utimensat(AT_FDCWD, path, times, 0), 0);
    return !contract_remote;
}

/* A file of this length, with the mode of block files. */
static inline void contract_stored(const char *path, uint64_t bytes)
{
    char directory[512];
    struct stat st;
    uint64_t n;

    if (contract_remote) {
        free(contract_get(path, &n));
        cr_assert_eq(n, bytes);
        return;
    }
    cr_assert_eq(lstat(path, &st), 0);
    cr_assert_eq(st.st_mode, S_IFREG | 0600u);
    cr_assert_eq((uint64_t)st.st_size, bytes);
    snprintf(directory, sizeof(directory), "%.*s", (int)(strrchr(path, '/') - path), path);
    cr_assert_eq(lstat(directory, &st), 0);
    cr_assert_eq(st.st_mode, S_IFDIR | 0700u);
}

/* A whole file of part `number`, with content that says `content`. */
static inline void contract_lay(const char *path, unsigned number, unsigned content, uint64_t bytes)
{
    uint8_t *file = malloc(BLOCK_FILE_HEADER_BYTES + bytes), *data = file + BLOCK_FILE_HEADER_BYTES;
    struct block_file_id id = contract_id(number);
    struct block_file_header h = {.payload_bytes = bytes, .part = id.part};
    char name[BLOCK_FILE_NAME_CAP];

    cr_assert(file);
    bytes_put(data, bytes, content);
    h.checksum = checksum_of(data, bytes);
    cr_assert_eq(block_file_locate(&id, h.identity, name), 0);
    block_file_encode(&h, file);
    contract_put(path, file, BLOCK_FILE_HEADER_BYTES + bytes);
    free(file);
}

static inline void contract_flip(const char *path, off_t at, uint8_t bits)
{
    uint64_t bytes;
    uint8_t *data = contract_get(path, &bytes);

    cr_assert_lt((uint64_t)at, bytes);
    data[at] ^= bits;
    contract_put(path, data, bytes);
    free(data);
}

static unsigned contract_files_n;
static inline int contract_files_cb(const char *path, const struct stat *st, int type,
                                    struct FTW *at)
{
    (void)path, (void)st, (void)at;
    contract_files_n += type != FTW_D;
    return 0;
}

/* All that is not a directory below this one, temporary files among it. */
static inline unsigned contract_files(const char *directory)
{
    if (contract_remote)
        return contract_remote->count();
    contract_files_n = 0;
    cr_assert_eq(nftw(directory, contract_files_cb, 16, FTW_PHYS), 0);
    return contract_files_n;
}

static inline uint64_t contract_clock_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static uint64_t contract_began_ns; /* of the case */

/* Expects a time from when the case ran, however long it takes. Clocks differ a little. */
static inline void contract_near_now(uint64_t ns)
{
    uint64_t now = contract_clock_ns(), slack = 10000000000u;

    cr_assert(ns > contract_began_ns - slack && ns < now + slack);
}

static inline void contract_rename_root(struct contract *c, bool away)
{
    char beside[160];

    snprintf(beside, sizeof(beside), "%s.away", c->directory);
    cr_assert_eq(rename(away ? c->directory : beside, away ? beside : c->directory), 0);
}

static inline const struct shared_file *contract_listed(const struct shared_listing *l,
                                                        const char *name)
{
    for (uint32_t i = 0; i < l->n; i++)
        if (strcmp(l->files[i].name, name) == 0)
            return &l->files[i];
    return NULL;
}

/* ---- one test ---- */

static inline void contract_case(void (*begin)(struct contract *), void (*end)(struct contract *),
                                 void (*body)(struct contract *))
{
    struct contract *c = calloc(1, sizeof(*c));

    cr_assert(c);
    contract_began_ns = contract_clock_ns();
    c->depth = 8;
    cr_assert_eq(uv_loop_init(&c->loop), 0);
    cr_assert_eq(deadlines_init(&c->deadlines, &c->loop), 0);
    uv_timer_init(&c->loop, &c->deadline);
    uv_unref((uv_handle_t *)&c->deadline);
    begin(c);
    contract_open(c);
    body(c);
    contract_close(c);
    end(c);
    deadlines_close(&c->deadlines);
    uv_close((uv_handle_t *)&c->deadline, NULL);
    uv_run(&c->loop, UV_RUN_DEFAULT);
    cr_assert_eq(uv_loop_close(&c->loop), 0);
    free(c);
}

#endif
