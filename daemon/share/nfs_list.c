#include "daemon/share/nfs_task.h"

#include <errno.h>
#include <string.h>

#define PAGE_BYTES 65536u    /* of a reply, attributes and handles included */
#define NAMES_BYTES 8192u    /* of which names and cookies */
#define MAX_PAGES (1u << 18) /* a server may say for ever that there is more */
#define NO_TIME UINT64_MAX   /* of a file whose attributes did not come */

static int entry_add(struct nfs_task *t, const entryplus3 *e)
{
    const fattr3 *a = &e->name_attributes.post_op_attr_u.attributes;

    if (!e->name || !share_lister_wants(e->name))
        return 0;
    if (!e->name_attributes.attributes_follow)
        return share_lister_add(&t->lister, e->name, 0, NO_TIME);
    if (a->type != NF3REG)
        return 0;
    return share_lister_add(&t->lister, e->name, a->size, nfs_time_ns(&a->mtime));
}

/* ---- attributes that did not come with the names ---- */

static void blanks_step(struct nfs_task *t);

static void blank_reply(struct nfs_task *t, const struct nfs_call *call, const void *res)
{
    struct share_listing *l = &t->lister.out;
    struct share_file *file = &l->files[t->blank];
    const LOOKUP3res *found = res;
    const post_op_attr *a = &found->LOOKUP3res_u.resok.obj_attributes;

    (void)call;
    if (found->status == NFS3ERR_NOENT || found->status == NFS3ERR_STALE ||
        (found->status == NFS3_OK &&
         (!a->attributes_follow || a->post_op_attr_u.attributes.type != NF3REG))) {
        *file = l->files[--l->n]; /* gone, or not to be known */
    } else if (found->status == NFS3_OK) {
        file->bytes = a->post_op_attr_u.attributes.size;
        file->mtime_ns = nfs_time_ns(&a->post_op_attr_u.attributes.mtime);
    } else {
        nfs_task_end(t, nfs_status_errno(found->status));
        return;
    }
    nfs_task_next(t, blanks_step);
}

static void blanks_step(struct nfs_task *t)
{
    struct share_listing *l = &t->lister.out;
    struct nfs_call *call;
    LOOKUP3args args;

    while (t->blank < l->n && l->files[t->blank].mtime_ns != NO_TIME)
        t->blank++;
    if (t->blank == l->n) {
        nfs_task_end(t, 0);
        nfs_task_settle(t);
        return;
    }
    call = nfs_call_new(t, blank_reply);
    if (!call)
        return;
    args.what = nfs_in_bucket(t, l->names + l->files[t->blank].name);
    nfs_call_sent(call, rpc_nfs3_lookup_async(nfs_conn_rpc(&t->b->conn), nfs_call_cb, &args, call));
}

/* ---- pages ---- */

static void page_reply(struct nfs_task *t, const struct nfs_call *call, const void *res)
{
    const READDIRPLUS3res *page = res;
    const READDIRPLUS3resok *ok = &page->READDIRPLUS3res_u.resok;
    const void *at;
    int err = nfs_status_errno(page->status);

    (void)call;
    if (err == 0 && nfs_missing_errno(-ENOENT, &ok->dir_attributes) != -ENOENT)
        err = -ESTALE;
    if (err < 0) {
        nfs_task_end(t, err);
        return;
    }
    for (at = ok->reply.entries; at && err == 0;) {
        entryplus3 e;

        memcpy(&e, at, sizeof(e)); /* libnfs does not align them */
        err = entry_add(t, &e);
        t->cookie = e.cookie;
        at = e.nextentry;
    }
    memcpy(t->cookie_verifier, ok->cookieverf, sizeof(t->cookie_verifier));
    if (err < 0)
        nfs_task_end(t, err);
    else if (ok->reply.eof || t->lister.out.cut)
        nfs_task_next(t, blanks_step);
    else if (!ok->reply.entries || ++t->pages == MAX_PAGES)
        nfs_task_end(t, -EPROTO);
    else
        nfs_task_next(t, nfs_list_step);
}

void nfs_list_step(struct nfs_task *t)
{
    struct nfs_call *call = nfs_call_new(t, page_reply);
    READDIRPLUS3args args = {.dir = nfs_fh(&t->folder),
                             .cookie = t->cookie,
                             .dircount = NAMES_BYTES,
                             .maxcount = PAGE_BYTES};

    if (!call)
        return;
    memcpy(args.cookieverf, t->cookie_verifier, sizeof(args.cookieverf));
    nfs_call_sent(call,
                  rpc_nfs3_readdirplus_async(nfs_conn_rpc(&t->b->conn), nfs_call_cb, &args, call));
}
