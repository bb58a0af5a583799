#include "daemon/shared/backend.h"

#include "daemon/format/checksum.h"

#include <errno.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

int shared_op_resolve(struct shared_op *op)
{
    struct block_file_name name;
    int err;

    if (op->verb == SHARED_CHECK || op->verb == SHARED_LIST)
        return 0;
    op->file.payload_bytes = shared_op_file_bytes(op) - BLOCK_FILE_HEADER_BYTES;
    if (op->by_name) {
        memcpy(op->file.identity, op->identity, sizeof(op->identity));
        if (block_file_name_parse(op->name, &name) < 0)
            return shared_listing_wants(op->name) ? 0 : -EINVAL;
        op->file.part = name.part;
        return 0;
    }
    op->file.part = op->id.part;
    err = block_file_locate(&op->id, op->file.identity, op->name);
    if (err == 0)
        op->bucket = op->file.identity[0];
    return err;
}

/* What the header's checksum is of. A copy of an encrypted file has the encryption header in front
 * of its data. */
static uint64_t sum_of(const struct shared_op *op, bool encrypted)
{
    if (op->encrypted)
        return checksum_of(op->header + BLOCK_FILE_HEADER_BYTES, BLOCK_FILE_ENCRYPTION_BYTES);
    return checksum_of(op->data, encrypted ? BLOCK_FILE_ENCRYPTION_BYTES : op->bytes);
}

/* All but the payload, whose checksum it says. */
static bool header_take(struct shared_op *op, bool encrypted, uint64_t *checksum)
{
    if (op->by_name) {
        block_file_identity(op->header, op->file.identity);
        memcpy(op->identity, op->file.identity, sizeof(op->identity));
        if (op->identity[0] != op->bucket)
            return false;
    }
    return block_file_decode(op->header, &op->file, checksum) == 0 &&
           (op->by_name || encrypted == op->encrypted) &&
           (!encrypted || op->file.payload_bytes >= BLOCK_FILE_ENCRYPTION_BYTES);
}

int shared_op_verify(struct shared_op *op)
{
    bool encrypted = block_file_is_encrypted(op->header);
    uint64_t checksum;

    if (!header_take(op, encrypted, &checksum) || sum_of(op, encrypted) != checksum)
        return -EBADMSG;
    op->copy_encrypted = op->by_name && encrypted;
    return 0;
}

void shared_op_pack(struct shared_op *op, uint8_t *file)
{
    uint64_t head = shared_op_head_bytes(op);

    op->file.encrypted = op->encrypted || op->copy_encrypted;
    if (op->file.encrypted) {
        op->file.checksum = sum_of(op, true);
        memcpy(file + head, op->data, op->bytes);
    } else {
        op->file.checksum = checksum_copy(file + head, op->data, op->bytes, false);
    }
    block_file_encode(&op->file, op->header);
    memcpy(file, op->header, head);
}

int shared_op_unpack(struct shared_op *op, const uint8_t *file)
{
    uint64_t head = shared_op_head_bytes(op), sum, checksum;

    memcpy(op->header, file, head);
    if (op->encrypted || block_file_is_encrypted(op->header)) {
        memcpy(op->data, file + head, op->bytes);
        return shared_op_verify(op);
    }
    sum = checksum_copy(op->data, file + head, op->bytes, true);
    op->copy_encrypted = false;
    return header_take(op, false, &checksum) && sum == checksum ? 0 : -EBADMSG;
}

void shared_listing_free(struct shared_listing *l)
{
    free(l->files);
    *l = (struct shared_listing){0};
}

bool shared_listing_wants(const char *name)
{
    uint8_t namespace[BLOCK_FILE_NAMESPACE_BYTES];

    return block_file_name_valid(name) || block_file_temp_valid(name) ||
           block_file_tenant_parse(name, namespace);
}

int shared_listing_add(struct shared_listing *l, const char *name, uint64_t bytes,
                       uint64_t mtime_ns)
{
    struct shared_file *file;

    if (l->n == SHARED_LISTING_FILES) {
        l->cut = true;
        return 0;
    }
    if (l->n == l->cap) {
        uint32_t cap = l->cap ? 2 * l->cap : 256;
        struct shared_file *files = realloc(l->files, cap * sizeof(*files));

        if (!files)
            return -ENOMEM;
        l->files = files;
        l->cap = cap;
    }
    file = &l->files[l->n++];
    file->bytes = bytes;
    file->mtime_ns = mtime_ns;
    snprintf(file->name, sizeof(file->name), "%s", name);
    return 0;
}

_Static_assert(BLOCK_FILE_TEMP_CAP <= BLOCK_FILE_NAME_CAP, "a listing has names of both kinds");

void shared_temp_init(struct shared_temp *t, const char *host)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    block_file_temp_prefix(host, (uint32_t)getpid(),
                           (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec, t->prefix);
}

void shared_temp_next(const struct shared_temp *t, char out[BLOCK_FILE_TEMP_CAP])
{
    /* of the process, so that two roots in one directory differ */
    static atomic_uint_fast64_t number;

    snprintf(out, BLOCK_FILE_TEMP_CAP, "%.*s%016" PRIx64, BLOCK_FILE_TEMP_CAP - 17, t->prefix,
             atomic_fetch_add_explicit(&number, 1, memory_order_relaxed));
}
