/* The bare libnfs client. It makes a file with nfs_creat, writes it with nfs_pwrite, opens it with
 * nfs_open, reads it with nfs_pread. A file that was written is closed when it is removed: libnfs
 * has the server sync it on close, which the shared tier does not ask for. */
#include "client/bench/disk.h"
#include "client/bench/figure.h"
#include "client/bench/plain.h"

#include <errno.h>
#include <fcntl.h>
#include <nfsc/libnfs.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ROUND_TRIPS 200u
#define ANSWER_MS 10000
#define SETS_MAX 64u

struct mount {
    struct plain *plain;
    struct nfs_context *nfs;
    struct nfsfh *one; /* PLAIN_ONE_FILE's */
    uint32_t n;        /* blocks */
};

static int mount_open(struct plain *p, struct mount *m)
{
    struct nfs_url *url;
    int rc;

    *m = (struct mount){
        .plain = p, .nfs = nfs_init_context(), .n = (uint32_t)(p->total_bytes / p->block_bytes)};
    if (!m->nfs)
        return plain_fail(p, -ENOMEM, p->target, NULL);
    url = nfs_parse_url_dir(m->nfs, p->target);
    if (!url) {
        rc = plain_fail(p, -EINVAL, p->target, nfs_get_error(m->nfs));
    } else {
        rc = nfs_mount(m->nfs, url->server, url->path);
        if (rc < 0)
            (void)plain_fail(p, rc, p->target, nfs_get_error(m->nfs));
        nfs_destroy_url(url);
    }
    if (rc < 0)
        nfs_destroy_context(m->nfs);
    return rc;
}

static int one_open(struct mount *m)
{
    int rc = nfs_open(m->nfs, PLAIN_FILE_NAME, O_RDWR, &m->one);

    if (rc == -ENOENT)
        rc = nfs_creat(m->nfs, PLAIN_FILE_NAME, 0600, &m->one);
    return rc < 0 ? plain_fail(m->plain, rc, PLAIN_FILE_NAME, nfs_get_error(m->nfs)) : 0;
}

static void mount_close(struct mount *m)
{
    if (m->one)
        (void)nfs_close(m->nfs, m->one);
    nfs_destroy_context(m->nfs);
}

static void block_name(uint32_t number, char out[64])
{
    snprintf(out, 64, PLAIN_FILE_NAME ".%u", number);
}

/* ---- blocks under way ---- */

struct stream;

struct lane {
    struct stream *stream;
    struct nfsfh *file;
    char *bytes; /* where a block is written from, and to where one is read */
    uint32_t number;
};

struct stream {
    struct mount *mount;
    enum plain_shape shape;
    bool write;
    struct lane *lanes;
    struct nfsfh **written; /* PLAIN_FILES: not closed yet */
    char *bytes;
    uint32_t at, end; /* the next block, and where to stop */
    uint64_t end_ns;  /* the same by the clock, or 0 */
    uint32_t moved;
    double cpu_s;
    unsigned under_way;
    int failed;
};

static void lane_next(struct lane *l);

static void lane_failed(struct lane *l, int err)
{
    l->stream->failed = err;
    l->stream->under_way--;
}

static void closed_cb(int err, struct nfs_context *nfs, void *data, void *private_data)
{
    struct lane *l = private_data;

    (void)nfs;
    (void)data;
    if (err < 0)
        lane_failed(l, err);
    else
        lane_next(l);
}

static void moved_cb(int err, struct nfs_context *nfs, void *data, void *private_data)
{
    struct lane *l = private_data;
    struct stream *s = l->stream;
    uint64_t block = s->mount->plain->block_bytes;

    if (err < 0 || (uint64_t)err < block) {
        lane_failed(l, err < 0 ? err : -ENODATA);
        return;
    }
    if (!s->write)
        memcpy(l->bytes, data, block); /* to where it is wanted, as any client must */
    s->moved++;
    if (s->shape == PLAIN_FILES && !s->write) {
        err = nfs_close_async(nfs, l->file, closed_cb, l);
        if (err < 0)
            lane_failed(l, err);
        return;
    }
    if (s->shape == PLAIN_FILES)
        s->written[l->number] = l->file;
    lane_next(l);
}

static void lane_move(struct lane *l, uint64_t at)
{
    struct stream *s = l->stream;
    struct plain *p = s->mount->plain;
    struct nfs_context *nfs = s->mount->nfs;
    int rc = s->write ? nfs_pwrite_async(nfs, l->file, at, p->block_bytes, l->bytes, moved_cb, l)
                      : nfs_pread_async(nfs, l->file, at, p->block_bytes, moved_cb, l);

    if (rc < 0)
        lane_failed(l, rc);
}

static void opened_cb(int err, struct nfs_context *nfs, void *data, void *private_data)
{
    struct lane *l = private_data;

    (void)nfs;
    l->file = data;
    if (err < 0)
        lane_failed(l, err);
    else
        lane_move(l, 0);
}

static void lane_next(struct lane *l)
{
    struct stream *s = l->stream;
    struct mount *m = s->mount;
    char name[64];
    int rc;

    if (s->failed < 0 || s->at == s->end || (s->end_ns > 0 && clock_ns() >= s->end_ns)) {
        s->under_way--;
        return;
    }
    l->number = s->at++ % m->n;
    if (s->shape == PLAIN_ONE_FILE) {
        l->file = m->one;
        lane_move(l, l->number * m->plain->block_bytes);
        return;
    }
    block_name(l->number, name);
    rc = s->write ? nfs_creat_async(m->nfs, name, 0600, opened_cb, l)
                  : nfs_open_async(m->nfs, name, O_RDONLY, opened_cb, l);
    if (rc < 0)
        lane_failed(l, rc);
}

static int stream_turn(struct stream *s)
{
    struct nfs_context *nfs = s->mount->nfs;
    struct pollfd poll_one = {.fd = nfs_get_fd(nfs), .events = (short)nfs_which_events(nfs)};
    int n = poll(&poll_one, 1, ANSWER_MS);

    if (n <= 0)
        return n == 0 ? -ETIMEDOUT : -errno;
    return nfs_service(nfs, poll_one.revents) < 0 ? -EIO : 0;
}

/* What is under way when the connection fails is told to nobody: the mount goes with it. */
static int stream_run(struct stream *s)
{
    unsigned depth = s->mount->plain->depth;
    double cpu = disk_cpu_s();
    int rc = 0;

    s->under_way = depth;
    for (unsigned i = 0; i < depth; i++)
        lane_next(&s->lanes[i]);
    while (rc == 0 && s->under_way > 0)
        rc = stream_turn(s);
    s->cpu_s += disk_cpu_s() - cpu;
    return rc < 0 ? rc : s->failed;
}

/* ---- slices ---- */

static int stream_open(struct stream *s)
{
    struct plain *p = s->mount->plain;

    s->bytes = malloc(p->depth * p->block_bytes);
    s->lanes = calloc(p->depth, sizeof(s->lanes[0]));
    s->written = calloc(s->mount->n, sizeof(struct nfsfh *));
    if (!s->bytes || !s->lanes || !s->written)
        return plain_fail(p, -ENOMEM, "memory of the plain client", NULL);
    memset(s->bytes, 7, p->depth * p->block_bytes);
    for (unsigned i = 0; i < p->depth; i++)
        s->lanes[i] = (struct lane){.stream = s, .bytes = s->bytes + i * p->block_bytes};
    return 0;
}

static void stream_close(struct stream *s)
{
    free(s->written);
    free(s->lanes);
    free(s->bytes);
}

/* Their data is of no use any more, so what closing says is not looked at. */
static void files_remove(struct stream *s)
{
    struct mount *m = s->mount;
    char name[64];

    for (uint32_t i = 0; i < m->n; i++) {
        block_name(i, name);
        (void)nfs_unlink(m->nfs, name);
        if (s->written[i])
            (void)nfs_close(m->nfs, s->written[i]);
        s->written[i] = NULL;
    }
}

/* Closes what was written, and leaves it there for being read. */
static int files_close(struct stream *s)
{
    int rc = 0;

    for (uint32_t i = 0; i < s->mount->n; i++) {
        int err = s->written[i] ? nfs_close(s->mount->nfs, s->written[i]) : 0;

        rc = rc < 0 ? rc : err;
    }
    return rc;
}

/* There may have been no time to write all of it. */
static int one_shorten(struct mount *m)
{
    struct nfs_stat_64 st;
    int rc = nfs_fstat64(m->nfs, m->one, &st);

    if (rc < 0)
        return rc;
    if (st.nfs_size / m->plain->block_bytes < m->n)
        m->n = (uint32_t)(st.nfs_size / m->plain->block_bytes);
    return m->n > 0 ? 0 : -ENODATA;
}

static int one_rate(struct stream *s, double seconds, double *rate)
{
    uint64_t start;
    int rc = one_open(s->mount);

    if (rc == 0 && !s->write)
        rc = one_shorten(s->mount);
    if (rc < 0)
        return rc;
    start = clock_ns();
    s->end_ns = start + (uint64_t)(seconds * 1e9);
    s->end = UINT32_MAX;
    rc = stream_run(s);
    *rate = (double)s->moved * (double)s->mount->plain->block_bytes * 1e9 /
            (double)(clock_ns() - start);
    return rc;
}

static int files_rate(struct stream *s, double seconds, double *rate)
{
    uint64_t spent_ns = 0;
    int rc = 0;

    for (unsigned i = 0; rc == 0 && i < SETS_MAX && (double)spent_ns < seconds * 1e9; i++) {
        uint64_t start;

        if (s->write)
            files_remove(s);
        s->at = 0;
        s->end = s->mount->n;
        start = clock_ns();
        rc = stream_run(s);
        spent_ns += clock_ns() - start;
    }
    *rate = (double)s->moved * (double)s->mount->plain->block_bytes * 1e9 / (double)spent_ns;
    return rc < 0 ? rc : files_close(s);
}

int plain_nfs_rate(struct plain *p, enum plain_shape shape, bool write, double seconds,
                   double *rate)
{
    struct mount m;
    struct stream s = {.mount = &m, .shape = shape, .write = write};
    int rc = mount_open(p, &m);

    if (rc < 0)
        return rc;
    rc = stream_open(&s);
    if (rc == 0)
        rc = shape == PLAIN_FILES ? files_rate(&s, seconds, rate) : one_rate(&s, seconds, rate);
    if (rc < 0 && p->why[0] == '\0')
        (void)plain_fail(p, rc, p->target, nfs_get_error(m.nfs));
    p->cpu_s_per_gb = s.cpu_s * 1e9 / ((double)s.moved * (double)p->block_bytes);
    mount_close(&m);
    stream_close(&s);
    return rc;
}

int plain_round_trip(struct plain *p, double *us)
{
    struct samples samples = {.n = 0};
    struct nfs_stat_64 st;
    struct mount m;
    int rc = mount_open(p, &m);

    if (rc < 0)
        return rc;
    rc = one_open(&m);
    for (unsigned i = 0; rc == 0 && i < ROUND_TRIPS; i++) {
        uint64_t start = clock_ns();

        rc = nfs_fstat64(m.nfs, m.one, &st);
        if (rc < 0)
            (void)plain_fail(p, rc, p->target, nfs_get_error(m.nfs));
        else
            rc = samples_add(&samples, (double)(clock_ns() - start) / 1e3);
    }
    *us = samples_at(&samples, 0.5);
    samples_free(&samples);
    mount_close(&m);
    return rc;
}

void plain_nfs_remove(struct plain *p)
{
    struct mount m;
    char name[64];

    if (mount_open(p, &m) < 0)
        return;
    for (uint32_t i = 0; i < m.n; i++) {
        block_name(i, name);
        (void)nfs_unlink(m.nfs, name);
    }
    (void)nfs_unlink(m.nfs, PLAIN_FILE_NAME);
    mount_close(&m);
}
