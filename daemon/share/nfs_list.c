#include "daemon/share/nfs_task.h"

#include <errno.h>
#include <string.h>

#define MAX_PAGES (1u << 18) /* bounds a server that never ends its listing */
#define NO_TIME UINT64_MAX   /* of a file without attributes so far */

static int entry_add(struct nfs_task *t, const struct nfs_entry *e)
{
    const struct nfs_attributes *a = &e->attributes;

    if (!share_listing_wants(e->name))
        return 0;
    if (!a->known)
        return share_listing_add(&t->listing, e->name, 0, NO_TIME);
    if (a->type != NFS_TYPE_FILE)
        return 0;
    return share_listing_add(&t->listing, e->name, a->bytes, a->mtime_ns);
}

/* ---- attributes that READDIRPLUS left out ---- */

static void blanks_step(struct nfs_task *t);

static void blank_reply_cb(struct nfs_task *t, const struct nfs_reply *r)
{
    struct share_listing *l = &t->listing;
    struct share_file *file = &l->files[t->blank];
    const struct nfs_attributes *a = &r->attributes;
    bool gone = r->status == NFS_ERR_NOENT || r->status == NFS_ERR_STALE ||
                (r->status == NFS_OK && (!a->known || a->type != NFS_TYPE_FILE));

    if (r->status == NFS_OK && !gone) {
        file->bytes = a->bytes;
        file->mtime_ns = a->mtime_ns;
    } else if (gone || ++l->unread <= SHARE_LISTING_UNREAD) {
        *file = l->files[--l->n];
    } else {
        nfs_task_end(t, nfs_status_errno(r->status));
        return;
    }
    nfs_task_next(t, blanks_step);
}

static void blanks_step(struct nfs_task *t)
{
    struct share_listing *l = &t->listing;

    while (t->blank < l->n && l->files[t->blank].mtime_ns != NO_TIME)
        t->blank++;
    if (t->blank == l->n) {
        nfs_task_end(t, 0);
        nfs_task_settle(t);
        return;
    }
    nfs_ask(t, NFS_LOOKUP, &t->folder, l->files[t->blank].name, blank_reply_cb);
}

/* ---- pages ---- */

static void page_reply_cb(struct nfs_task *t, const struct nfs_reply *r)
{
    struct nfs_xdr entries = r->entries;
    struct nfs_entry e;
    bool last, any = false;
    int err = nfs_status_errno(r->status);

    if (err == 0 && nfs_missing_errno(-ENOENT, &r->folder) != -ENOENT)
        err = -ESTALE;
    if (err < 0) {
        nfs_task_end(t, err);
        return;
    }
    while (err == 0 && nfs_entry_next(&entries, &e, &last)) {
        err = entry_add(t, &e);
        t->cookie = e.cookie;
        any = true;
    }
    memcpy(t->cookie_verifier, r->verifier, sizeof(t->cookie_verifier));
    if (err < 0)
        nfs_task_end(t, err);
    else if (last || t->listing.cut)
        nfs_task_next(t, blanks_step);
    else if (!any || ++t->pages == MAX_PAGES)
        nfs_task_end(t, -EPROTO);
    else
        nfs_task_next(t, nfs_list_step);
}

void nfs_list_step(struct nfs_task *t)
{
    const struct nfs_args args = {
        .handle = &t->folder, .at = t->cookie, .verifier = t->cookie_verifier};

    nfs_request(t, NFS_READDIRPLUS, &args, page_reply_cb);
}
