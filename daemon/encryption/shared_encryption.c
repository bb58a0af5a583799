/* Parts of tenants with keys, encrypted before they go to a root and opened when they come from
 * one, in libuv's threads.
 *
 * A write is encrypted into memory of its own, since its slot serves meanwhile; a read is opened in
 * its slot. */
#include "daemon/shared/shared_internal.h"

#include "daemon/format/bytes.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#define ENCRYPTED_BYTES (64ull << 20) /* of memory for writes, all together */
#define ALIGN 4096u
#define CONTEXT_BYTES 104u

static uint64_t padded(const struct shared_io *io)
{
    return (io->bytes + ALIGN - 1) / ALIGN * ALIGN;
}

/* What the part is: the record's key depends on all of it. */
static int box_begin(struct shared_encryption *x, const struct block_file_encryption *encryption,
                     struct encryption_box *out)
{
    const struct block_file_id *id = &x->io->id;
    uint8_t context[CONTEXT_BYTES] = {0};

    memcpy(context, encryption->salt, sizeof(encryption->salt));
    memcpy(context + 24, id->fingerprint, UCM_FINGERPRINT_BYTES);
    memcpy(context + 56, id->key, id->key_bytes);
    put32(context + 88, id->key_bytes);
    put32(context + 92, id->part);
    put64(context + 96, x->io->bytes);
    return encryption_box_begin(out, x->key->secret, context, sizeof(context), x->io->write);
}

static int part_encryption(struct shared_encryption *x)
{
    struct block_file_encryption encryption = {.key_id = {0}};
    struct encryption_box box = {NULL};
    int rc = encryption_random(encryption.salt, sizeof(encryption.salt));

    memcpy(encryption.key_id, x->key->id, sizeof(encryption.key_id));
    if (rc == 0) {
        x->cipher = encryption_memory_take(padded(x->io));
        rc = x->cipher ? box_begin(x, &encryption, &box) : -ENOMEM;
    }
    if (rc == 0)
        rc = encryption_box_encrypt(&box, 0, NULL, 0, x->io->data, x->cipher, x->io->bytes,
                                    encryption.tag);
    encryption_box_close(&box);
    block_file_encryption_encode(&encryption, x->encryption);
    return rc;
}

static int part_open(struct shared_encryption *x)
{
    struct block_file_encryption encryption;
    struct encryption_box box = {NULL};
    int rc;

    block_file_encryption_decode(x->encryption, &encryption);
    rc = box_begin(x, &encryption, &box);
    if (rc == 0)
        rc = encryption_box_decrypt(&box, 0, NULL, 0, x->io->data, x->io->data, x->io->bytes,
                                    encryption.tag);
    encryption_box_close(&box);
    return rc;
}

static void work_cb(uv_work_t *work)
{
    struct shared_encryption *x = work->data;

    if (x->key)
        x->status = x->io->write ? part_encryption(x) : part_open(x);
}

static void worked_cb(uv_work_t *work, int status)
{
    struct shared_encryption *x = work->data;

    assert(status == 0); /* nobody cancels */
    (void)status;
    x->shared->encrypting--;
    x->done_cb(x, x->status);
}

int shared_encryption_begin(struct shared_encryption *x)
{
    struct shared *s = x->shared;
    struct block_file_encryption encryption;
    int rc;

    if (x->io->write && s->encrypted_bytes > 0 &&
        s->encrypted_bytes + padded(x->io) > ENCRYPTED_BYTES) {
        s->encryption_full = true;
        return -EAGAIN;
    }
    if (!x->io->write)
        block_file_encryption_decode(x->encryption, &encryption);
    rc = s->settings.encryption
             ? encryption_key_take(s->settings.encryption, &x->space,
                                   x->io->write ? NULL : encryption.key_id, &x->key)
             : -ENOKEY;
    if (rc < 0 && x->io->write)
        return rc;
    x->status = rc; /* of a read without a key: the thread does nothing */
    x->work.data = x;
    s->encrypting++;
    s->encrypted_bytes += x->io->write ? padded(x->io) : 0;
    rc = uv_queue_work(s->settings.loop, &x->work, work_cb, worked_cb);
    assert(rc == 0); /* refuses a missing callback only */
    (void)rc;
    return 0;
}

void shared_encryption_end(struct shared_encryption *x)
{
    if (!x->key)
        return;
    encryption_key_drop(x->shared->settings.encryption, x->key);
    x->key = NULL;
    if (!x->io->write)
        return;
    encryption_memory_give(x->cipher, padded(x->io));
    x->cipher = NULL;
    x->shared->encrypted_bytes -= padded(x->io);
}
