/* A shared tier in memory for the cache's tests. A test sees its files, and decides when and how an
 * operation ends. shared_fake.c has the module's functions over it, which replace the module's own
 * when a program is linked. */
#ifndef UCMD_TESTS_SHARED_FAKE_H
#define UCMD_TESTS_SHARED_FAKE_H

#include "daemon/shared/shared.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define FAKE_FILES_MAX 8192

struct fake_file {
    struct block_file_id id;
    shared_root_id root; /* 0: none */
    uint64_t bytes;
    uint8_t *data;
};

struct shared {
    struct fake_file file[FAKE_FILES_MAX];
    uint32_t files;
    struct list pending; /* of shared_io.link: accepted, not reported */
    unsigned n_pending, submits, removes, lookups;
    int refuse;        /* what submit answers; 0: accepts */
    unsigned refuse_n; /* so often */
    bool refused;      /* ready_cb is owed */
    shared_root_id to; /* where writes go if the caller names no root */
    struct shared_lookup *lookup;
    int lookup_error;
    struct shared_purge *purge;
    struct shared_removal *removal;
    /* the fingerprint of a namespace whose secret is being read, or NULL */
    const uint8_t *without_secret;
    void (*ready_cb)(void *ctx);
    void (*secrets_cb)(void *ctx);
    void *ctx;
};

static inline bool fake_id_equal(const struct block_file_id *a, const struct block_file_id *b)
{
    return a->part == b->part && a->key_bytes == b->key_bytes &&
           memcmp(a->key, b->key, a->key_bytes) == 0 &&
           memcmp(a->fingerprint, b->fingerprint, sizeof(a->fingerprint)) == 0;
}

/* The file of a part, on that root or (0) on any. */
static inline struct fake_file *fake_file_find(struct shared *s, const struct block_file_id *id,
                                               shared_root_id root)
{
    for (uint32_t i = 0; i < s->files; i++)
        if (s->file[i].root != 0 && (root == 0 || s->file[i].root == root) &&
            fake_id_equal(&s->file[i].id, id))
            return &s->file[i];
    return NULL;
}

static inline void fake_file_put(struct shared *s, const struct block_file_id *id,
                                 shared_root_id root, const void *data, uint64_t bytes)
{
    struct fake_file *f = fake_file_find(s, id, root);
    uint32_t at = 0;

    if (f)
        return; /* files are never changed */
    while (at < s->files && s->file[at].root != 0)
        at++;
    cr_assert_lt(at, FAKE_FILES_MAX);
    s->files = at == s->files ? at + 1 : s->files;
    f = &s->file[at];
    *f = (struct fake_file){.id = *id, .root = root, .bytes = bytes, .data = malloc(bytes)};
    cr_assert(f->data);
    memcpy(f->data, data, bytes);
}

static inline void fake_file_remove(struct fake_file *f)
{
    free(f->data);
    *f = (struct fake_file){0};
}

static inline bool fake_without_secret(const struct shared *s, const uint8_t *fingerprint)
{
    return s->without_secret && memcmp(s->without_secret, fingerprint, UCM_FINGERPRINT_BYTES) == 0;
}

/* Its secret has been read, and that of another one is being read. */
static inline void fake_shared_has_secret(struct shared *s, const uint8_t *without_secret)
{
    s->without_secret = without_secret;
    s->secrets_cb(s->ctx);
    s->ready_cb(s->ctx);
}

static inline void fake_shared_ready(struct shared *s)
{
    if (!s->refused)
        return;
    s->refused = false;
    s->ready_cb(s->ctx);
}

static inline void fake_file_erase(struct shared *s, const struct block_file_id *id)
{
    struct fake_file *f;

    while ((f = fake_file_find(s, id, 0)) != NULL)
        fake_file_remove(f);
}

/* With 0 the files are gone. */
static inline void fake_removal_end(struct shared *s, int status)
{
    struct shared_removal *r = s->removal;
    struct block_file_id id = {.key_bytes = r->key_bytes};

    memcpy(id.fingerprint, r->fingerprint, sizeof(id.fingerprint));
    for (uint32_t i = 0; status == 0 && i < r->n; i++) {
        memcpy(id.key, r->keys + (size_t)i * r->key_bytes, r->key_bytes);
        for (id.part = 0; id.part <= r->part; id.part++)
            fake_file_erase(s, &id);
    }
    s->removal = NULL;
    r->status = status;
    r->done_cb(r, status);
}

static inline struct shared_io *fake_shared_at(struct shared *s, unsigned i)
{
    struct list *n = s->pending.next;

    while (i-- > 0)
        n = n->next;
    cr_assert(n != &s->pending, "nothing is under way");
    return LIST_ENTRY(n, struct shared_io, link);
}

/* What a read finds, or a write leaves there. A read that fails leaves wrong bytes in the slot. */
static inline int fake_shared_do(struct shared *s, struct shared_io *io, int status)
{
    struct fake_file *f = io->write ? NULL : fake_file_find(s, &io->id, io->root);

    if (!io->write && !f)
        f = fake_file_find(s, &io->id, 0);
    if (!io->write && status == 0 && !f)
        status = -ENOENT;
    if (!io->write && status != 0) {
        memset(io->data, 0xEE, io->bytes);
    } else if (!io->write) {
        cr_assert_eq(f->bytes, io->bytes);
        memcpy(io->data, f->data, io->bytes);
        io->root = f->root;
    } else if (status == 0) {
        io->root = s->to;
        fake_file_put(s, &io->id, io->root, io->data, io->bytes);
    }
    return status;
}

static inline void fake_shared_finish(struct shared *s, struct shared_io *io, int status)
{
    list_remove(&io->link);
    s->n_pending--;
    io->done_cb(io, fake_shared_do(s, io, status));
}

static inline void fake_shared_next(struct shared *s, int status)
{
    fake_shared_finish(s, fake_shared_at(s, 0), status);
}

static inline void fake_shared_close(struct shared *s)
{
    for (uint32_t i = 0; i < s->files; i++)
        free(s->file[i].data);
}

#endif
