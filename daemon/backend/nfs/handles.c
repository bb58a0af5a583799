/* Handles of files that were found or written: a read of such a file asks for its bytes at once. */
#include "daemon/backend/nfs/nfs.h"

#include <string.h>

static struct nfs_known *place_of(struct nfs *n, const struct nfs_task *t)
{
    uint32_t hash = 2166136261u ^ t->bucket;

    for (const char *c = t->name; *c; c++)
        hash = (hash ^ (uint8_t)*c) * 16777619u;
    return &n->known[(hash ^ hash >> 16) % NFS_KNOWN];
}

static bool is_of(const struct nfs_known *k, const struct nfs_task *t)
{
    return k->handle.n > 0 && k->bucket == t->bucket && strcmp(k->name, t->name) == 0;
}

void nfs_known_put(struct nfs_task *t, const struct nfs_handle *handle, uint64_t bytes)
{
    struct nfs_known *k = place_of(t->nfs, t);

    *k = (struct nfs_known){.handle = *handle, .bucket = t->bucket, .bytes = bytes};
    memcpy(k->name, t->name, sizeof(k->name));
}

void nfs_known_forget(struct nfs_task *t)
{
    struct nfs_known *k = place_of(t->nfs, t);

    if (is_of(k, t))
        k->handle.n = 0;
}

void nfs_known_forget_all(struct nfs *n)
{
    for (uint32_t i = 0; i < NFS_KNOWN; i++)
        n->known[i].handle.n = 0;
}

/* Whether the handle still means the file shows when it is read: a task that fails by it begins anew without it. */
void nfs_read_step(struct nfs_task *t)
{
    const struct nfs_known *k = place_of(t->nfs, t);

    t->by_known = t->attempts == 0 && t->turns == 0 && is_of(k, t) && k->bytes == t->request->bytes;
    if (!t->by_known) {
        nfs_folder_step(t);
        return;
    }
    t->file = k->handle;
    t->result.bytes = k->bytes;
    nfs_data_begin(t);
}
