/* Parts of tenants with keys, sealed before they go to a root and opened when they come from one,
 * in libuv's threads.
 *
 * A write is sealed into memory of its own, since its slot serves meanwhile; a read is opened in
 * its slot. */
#include "daemon/share/share_internal.h"

#include "daemon/format/bytes.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#define SEALED_BYTES (64ull << 20) /* of memory for writes, all together */
#define ALIGN 4096u
#define CONTEXT_BYTES 104u

static uint64_t padded(const struct share_io *io)
{
    return (io->bytes + ALIGN - 1) / ALIGN * ALIGN;
}

/* What the part is: the record's key depends on all of it. */
static int box_begin(struct share_seal *x, const struct block_file_seal *seal, struct seal_box *out)
{
    const struct block_file_id *id = &x->io->id;
    uint8_t context[CONTEXT_BYTES] = {0};

    memcpy(context, seal->salt, sizeof(seal->salt));
    memcpy(context + 24, id->fingerprint, UCM_FINGERPRINT_BYTES);
    memcpy(context + 56, id->key, id->key_bytes);
    put32(context + 88, id->key_bytes);
    put32(context + 92, id->part);
    put64(context + 96, x->io->bytes);
    return seal_box_begin(out, x->key->secret, context, sizeof(context), x->io->write);
}

static int part_seal(struct share_seal *x)
{
    struct block_file_seal seal = {.key_id = {0}};
    struct seal_box box = {NULL};
    int rc = seal_random(seal.salt, sizeof(seal.salt));

    memcpy(seal.key_id, x->key->id, sizeof(seal.key_id));
    if (rc == 0) {
        x->cipher = seal_memory_take(padded(x->io));
        rc = x->cipher ? box_begin(x, &seal, &box) : -ENOMEM;
    }
    if (rc == 0)
        rc = seal_box_seal(&box, 0, NULL, 0, x->io->data, x->cipher, x->io->bytes, seal.tag);
    seal_box_close(&box);
    block_file_seal_encode(&seal, x->seal);
    return rc;
}

static int part_open(struct share_seal *x)
{
    struct block_file_seal seal;
    struct seal_box box = {NULL};
    int rc;

    block_file_seal_decode(x->seal, &seal);
    rc = box_begin(x, &seal, &box);
    if (rc == 0)
        rc = seal_box_open(&box, 0, NULL, 0, x->io->data, x->io->data, x->io->bytes, seal.tag);
    seal_box_close(&box);
    return rc;
}

static void work_cb(uv_work_t *work)
{
    struct share_seal *x = work->data;

    if (x->key)
        x->status = x->io->write ? part_seal(x) : part_open(x);
}

static void worked_cb(uv_work_t *work, int status)
{
    struct share_seal *x = work->data;

    assert(status == 0); /* nobody cancels */
    (void)status;
    x->share->sealing--;
    x->done_cb(x, x->status);
}

int share_seal_begin(struct share_seal *x)
{
    struct share *s = x->share;
    struct block_file_seal seal;
    int rc;

    if (x->io->write && s->sealed_bytes > 0 && s->sealed_bytes + padded(x->io) > SEALED_BYTES) {
        s->seal_full = true;
        return -EAGAIN;
    }
    if (!x->io->write)
        block_file_seal_decode(x->seal, &seal);
    rc = s->settings.seal ? seal_key_take(s->settings.seal, &x->space,
                                          x->io->write ? NULL : seal.key_id, &x->key)
                          : -ENOKEY;
    if (rc < 0 && x->io->write)
        return rc;
    x->status = rc; /* of a read without a key: the thread does nothing */
    x->work.data = x;
    s->sealing++;
    s->sealed_bytes += x->io->write ? padded(x->io) : 0;
    rc = uv_queue_work(s->settings.loop, &x->work, work_cb, worked_cb);
    assert(rc == 0); /* refuses a missing callback only */
    (void)rc;
    return 0;
}

void share_seal_end(struct share_seal *x)
{
    if (!x->key)
        return;
    seal_key_drop(x->share->settings.seal, x->key);
    x->key = NULL;
    if (!x->io->write)
        return;
    seal_memory_give(x->cipher, padded(x->io));
    x->cipher = NULL;
    x->share->sealed_bytes -= padded(x->io);
}
