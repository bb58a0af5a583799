#include "daemon/share/backend.h"

#include "daemon/tier/checksum.h"

#include <errno.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

int share_op_place(struct share_op *op)
{
    op->file.payload_bytes = op->bytes;
    op->file.part = op->id.part;
    return block_file_place(&op->id, op->file.identity, op->name);
}

void share_op_seal(struct share_op *op)
{
    op->file.checksum = checksum_of(op->data, op->bytes);
    block_file_encode(&op->file, op->header);
}

int share_op_verify(const struct share_op *op)
{
    uint64_t checksum;

    if (block_file_decode(op->header, &op->file, &checksum) < 0 ||
        checksum_of(op->data, op->bytes) != checksum)
        return -EBADMSG;
    return 0;
}

void share_temp_init(struct share_temp *t, const char *host)
{
    struct timespec now;

    block_file_host(host, t->host);
    clock_gettime(CLOCK_REALTIME, &now);
    t->started = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void share_temp_next(const struct share_temp *t, char out[BLOCK_FILE_TEMP_CAP])
{
    static atomic_uint_fast64_t
        counter; /* of the process, so that two roots in one folder differ */

    block_file_temp_name(t->host, (uint32_t)getpid(), t->started,
                         atomic_fetch_add_explicit(&counter, 1, memory_order_relaxed), out);
}
