/* The bytes of a file, in calls of equal size that are under way side by side. */
#include "daemon/backend/nfs/nfs.h"

#include <errno.h>
#include <string.h>

#define CHUNK_ALIGN 4096u

/* Bytes of one call when `all` are divided into equal calls of at most `max`. */
static uint32_t chunk_bytes(uint64_t all, uint32_t max)
{
    uint64_t n = (all + max - 1) / max, chunk = n ? (all + n - 1) / n : 0;

    chunk = (chunk + CHUNK_ALIGN - 1) / CHUNK_ALIGN * CHUNK_ALIGN;
    return chunk < max ? (uint32_t)chunk : max;
}

/* ---- all bytes were written ---- */

/* A new verifier: the server was restarted and may have lost unstable writes. */
static void verifier_check(struct nfs_task *t, const char verifier[NFS_VERIFIER_BYTES])
{
    if (!t->verifier_known)
        memcpy(t->verifier, verifier, sizeof(t->verifier));
    else if (memcmp(t->verifier, verifier, sizeof(t->verifier)) != 0)
        t->verifier_changed = true;
    t->verifier_known = true;
}

static void committed_cb(struct nfs_task *t, const struct nfs_reply *r)
{
    if (r->err < 0) {
        nfs_task_end(t, r->err);
        return;
    }
    verifier_check(t, r->verifier);
    if (t->verifier_changed)
        nfs_task_end(t, -ECONNRESET);
    else
        nfs_task_next(t, t->then);
}

static void commit_step(struct nfs_task *t)
{
    nfs_ask(t, NFS_COMMIT, &(struct nfs_args){.handle = &t->file}, committed_cb);
}

static void all_written(struct nfs_task *t)
{
    if (t->verifier_changed)
        nfs_task_end(t, -ECONNRESET);
    else
        nfs_task_next(t, t->request->sync ? commit_step : t->then);
}

/* ---- calls ---- */

static void data_send(struct nfs_task *t, uint64_t at, uint32_t n);

/* What a lookup would have told. */
static bool known_fits(struct nfs_task *t, const struct nfs_attributes *a)
{
    if (!a->known)
        return true;
    t->result.mtime_ns = a->mtime_ns;
    return a->file && a->bytes == t->request->bytes;
}

static void data_cb(struct nfs_task *t, const struct nfs_reply *r)
{
    bool write = t->verb == WIRE_WRITE;

    if (r->err < 0 || r->count == 0) {
        nfs_task_end(t, r->err == 0 ? (write ? -EIO : -EBADMSG)
                        : write     ? r->err
                                    : nfs_gone_errno(r));
        return;
    }
    if (t->by_known && !known_fits(t, &r->attributes)) {
        nfs_task_end(t, -EBADMSG);
        return;
    }
    if (write)
        verifier_check(t, r->verifier);
    else
        memcpy((char *)t->request->data + r->at, r->data, r->count);
    t->moved += r->count;
    if (r->count < r->n) { /* a part of it: the rest */
        data_send(t, r->at + r->count, r->n - r->count);
    } else if (t->moved == t->request->bytes) {
        if (write)
            all_written(t);
        else
            nfs_task_end(t, 0);
    }
}

static void data_send(struct nfs_task *t, uint64_t at, uint32_t n)
{
    bool write = t->verb == WIRE_WRITE;

    nfs_ask(t, write ? NFS_WRITE : NFS_READ,
            &(struct nfs_args){
                .handle = &t->file, .at = at, .n = n, .data = (const char *)t->request->data + at},
            data_cb);
}

static void data_step(struct nfs_task *t)
{
    uint64_t at = t->at, left = t->request->bytes - at;
    uint32_t n = left < t->chunk ? (uint32_t)left : t->chunk;

    t->at += n;
    if (left > n)
        nfs_task_next(t, data_step);
    data_send(t, at, n);
}

void nfs_data_begin(struct nfs_task *t, nfs_step *then)
{
    const struct nfs_conn *c = &t->nfs->conn;

    t->then = then;
    t->chunk =
        chunk_bytes(t->request->bytes, t->verb == WIRE_WRITE ? c->write_bytes : c->read_bytes);
    nfs_task_next(t, data_step);
}
