/* Handles that are kept: of directories, and of files that were found or written. A read of such a
 * file asks for its bytes at once. */
#include "daemon/backend/nfs/nfs.h"

#include <string.h>

/* ---- files ---- */

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

const struct nfs_known *nfs_known_of(const struct nfs_task *t)
{
    const struct nfs_known *k = place_of(t->nfs, t);

    return is_of(k, t) ? k : NULL;
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

/* ---- directories ---- */

void nfs_directories_forget(struct nfs *n)
{
    n->blocks.n = 0;
    for (unsigned i = 0; i < NFS_BUCKETS; i++)
        n->buckets[i].n = 0;
}

void nfs_directory_stale(struct nfs_task *t)
{
    struct nfs_handle *bucket = &t->nfs->buckets[t->bucket];

    t->nfs->blocks.n = 0;
    if (bucket->n == t->directory.n && memcmp(bucket->bytes, t->directory.bytes, bucket->n) == 0)
        bucket->n = 0; /* unless another task has looked it up again */
}
