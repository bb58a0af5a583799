/* Calls of NFSv3 by libnfs: arguments out of struct nfs_args. */
#include "daemon/backend/nfs/nfs.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define PAGE_BYTES 65536u      /* of READDIRPLUS's reply, attributes and handles included */
#define PAGE_NAMES_BYTES 8192u /* of which names and cookies */

static void replied(struct rpc_context *rpc, int status, void *data, void *ctx)
{
    struct nfs_call *c = ctx;
    struct nfs_task *t = c->task;
    struct nfs *n = t->nfs;
    struct nfs_reply r = {.at = c->at, .n = c->n};
    bool came = status == RPC_STATUS_SUCCESS && n->conn.rpc == rpc;

    TAILQ_REMOVE(&n->calls, c, link);
    n->n_calls--;
    n->n_write_calls -= t->verb == WIRE_WRITE;
    t->awaiting--;
    if (came && nfs_reply_take(c->proc, data, &r) == 0) {
        n->conn.heard_ms = n->now_ms;
        if (t->request && !t->over && c->replied_cb)
            c->replied_cb(t, &r);
    } else {
        /* What can't be decoded loses the connection, and with it all other replies. */
        if (n->conn.rpc == rpc)
            nfs_conn_drop(n, came ? -EPROTO : -ECONNRESET,
                          status == RPC_STATUS_ERROR ? data : NULL);
        nfs_task_end(t, -ECONNRESET);
    }
    free(c);
    nfs_task_settle(t);
    if (nfs_conn_up(n)) /* not while libnfs ends all calls */
        nfs_pump(n);
}

static nfs_fh3 handle_of(const struct nfs_handle *h)
{
    return (nfs_fh3){{h->n, (char *)h->bytes}};
}

static diropargs3 place_of(const struct nfs_handle *h, const char *name)
{
    return (diropargs3){handle_of(h), (char *)name};
}

static sattr3 mode_of(uint32_t mode)
{
    sattr3 s = {.mode = {.set_it = 1}};

    s.mode.set_mode3_u.mode = mode;
    return s;
}

/* A mode that the server has to make the file with; the size empties one that is there. */
static createhow3 how_of(const struct nfs_args *a)
{
    createhow3 how = {.mode = a->anew ? UNCHECKED : GUARDED};
    sattr3 s = mode_of(0600);

    if (a->anew) {
        s.size.set_it = 1;
        how.createhow3_u.obj_attributes = s;
    } else {
        how.createhow3_u.g_obj_attributes = s;
    }
    return how;
}

static int page_send(struct rpc_context *rpc, const struct nfs_args *a, struct nfs_call *c)
{
    READDIRPLUS3args args = {.dir = handle_of(a->handle),
                             .cookie = a->at,
                             .dircount = PAGE_NAMES_BYTES,
                             .maxcount = PAGE_BYTES};

    memcpy(args.cookieverf, a->verifier, NFS_VERIFIER_BYTES);
    return rpc_nfs3_readdirplus_async(rpc, replied, &args, c);
}

/* Both times become the server's. */
static int touch_send(struct rpc_context *rpc, nfs_fh3 handle, struct nfs_call *c)
{
    SETATTR3args args = {.object = handle};

    args.new_attributes.atime.set_it = SET_TO_SERVER_TIME;
    args.new_attributes.mtime.set_it = SET_TO_SERVER_TIME;
    return rpc_nfs3_setattr_async(rpc, replied, &args, c);
}

/* libnfs encodes the arguments before it returns. */
static int call_send(struct rpc_context *rpc, enum nfs_proc proc, const struct nfs_args *a,
                     struct nfs_call *c)
{
    nfs_fh3 handle = handle_of(a->handle);
    diropargs3 place = place_of(a->handle, a->name);
    RENAME3args rename = {place, place_of(a->handle, a->new_name)};
    READ3args read = {.file = handle, .offset = a->at, .count = a->n};
    WRITE3args write = {.file = handle,
                        .offset = a->at,
                        .count = a->n,
                        .stable = a->sync ? FILE_SYNC : UNSTABLE,
                        .data = {a->n, (char *)a->data}};

    switch (proc) {
    case NFS_GETATTR:
        return rpc_nfs3_getattr_async(rpc, replied, &(GETATTR3args){handle}, c);
    case NFS_SETATTR:
        return touch_send(rpc, handle, c);
    case NFS_LOOKUP:
        return rpc_nfs3_lookup_async(rpc, replied, &(LOOKUP3args){place}, c);
    case NFS_READ:
        return rpc_nfs3_read_async(rpc, replied, &read, c);
    case NFS_WRITE:
        return rpc_nfs3_write_async(rpc, replied, &write, c);
    case NFS_CREATE:
        return rpc_nfs3_create_async(rpc, replied, &(CREATE3args){place, how_of(a)}, c);
    case NFS_MKDIR:
        return rpc_nfs3_mkdir_async(rpc, replied, &(MKDIR3args){place, mode_of(0700)}, c);
    case NFS_REMOVE:
        return rpc_nfs3_remove_async(rpc, replied, &(REMOVE3args){place}, c);
    case NFS_RENAME:
        return rpc_nfs3_rename_async(rpc, replied, &rename, c);
    case NFS_READDIRPLUS:
        return page_send(rpc, a, c);
    case NFS_FSINFO:
        return rpc_nfs3_fsinfo_async(rpc, replied, &(FSINFO3args){handle}, c);
    default:
        return rpc_nfs3_commit_async(rpc, replied, &(COMMIT3args){.file = handle}, c);
    }
}

void nfs_ask(struct nfs_task *t, enum nfs_proc proc, const struct nfs_args *args,
             nfs_replied_cb *replied_cb)
{
    struct nfs *n = t->nfs;
    struct nfs_call *c = calloc(1, sizeof(*c));

    if (c) {
        *c = (struct nfs_call){.task = t,
                               .proc = proc,
                               .replied_cb = replied_cb,
                               .at = args->at,
                               .n = args->n,
                               .sent_ms = n->now_ms};
        if (call_send(n->conn.rpc, proc, args, c) == 0) {
            if (n->n_calls == 0) /* the server was not asked before */
                n->conn.heard_ms = n->now_ms;
            TAILQ_INSERT_TAIL(&n->calls, c, link);
            n->n_calls++;
            n->unsent++;
            n->n_write_calls += t->verb == WIRE_WRITE;
            t->awaiting++;
            return;
        }
        free(c);
    }
    nfs_task_end(t, -ENOMEM);
    nfs_task_settle(t);
}
