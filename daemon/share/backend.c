#include "daemon/share/backend.h"

#include "daemon/format/checksum.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

int share_op_place(struct share_op *op)
{
    struct block_file_name name;
    int err;

    if (op->verb == SHARE_CHECK || op->verb == SHARE_LIST)
        return 0;
    op->file.payload_bytes = op->bytes;
    if (op->by_name) {
        memcpy(op->file.identity, op->identity, sizeof(op->identity));
        if (block_file_name_parse(op->name, &name) < 0)
            return block_file_temp_valid(op->name) ? 0 : -EINVAL;
        op->file.part = name.part;
        return 0;
    }
    op->file.part = op->id.part;
    err = block_file_place(&op->id, op->file.identity, op->name);
    if (err == 0)
        op->bucket = op->file.identity[0];
    return err;
}

void share_op_seal(struct share_op *op)
{
    op->file.checksum = checksum_of(op->data, op->bytes);
    block_file_encode(&op->file, op->header);
}

int share_op_verify(struct share_op *op)
{
    uint64_t checksum;

    if (op->by_name) {
        block_file_identity(op->header, op->file.identity);
        memcpy(op->identity, op->file.identity, sizeof(op->identity));
        if (op->identity[0] != op->bucket)
            return -EBADMSG;
    }
    if (block_file_decode(op->header, &op->file, &checksum) < 0 ||
        checksum_of(op->data, op->bytes) != checksum)
        return -EBADMSG;
    return 0;
}

void share_listing_free(struct share_listing *l)
{
    free(l->files);
    free(l->names);
    *l = (struct share_listing){0};
}

bool share_lister_wants(const char *name)
{
    return block_file_name_valid(name) || block_file_temp_valid(name);
}

static int files_grow(struct share_lister *l)
{
    uint32_t cap = l->files_cap ? 2 * l->files_cap : 256;
    struct share_file *files = realloc(l->out.files, cap * sizeof(*files));

    if (!files)
        return -ENOMEM;
    l->out.files = files;
    l->files_cap = cap;
    return 0;
}

static int names_grow(struct share_lister *l)
{
    size_t cap = l->names_cap ? 2 * l->names_cap : 256 * BLOCK_FILE_NAME_CAP;
    char *names = realloc(l->out.names, cap);

    if (!names)
        return -ENOMEM;
    l->out.names = names;
    l->names_cap = cap;
    return 0;
}

int share_lister_add(struct share_lister *l, const char *name, uint64_t bytes, uint64_t mtime_ns)
{
    size_t n = strlen(name) + 1;
    int err = 0;

    if (l->out.n == SHARE_LISTING_FILES) {
        l->out.cut = true;
        return 0;
    }
    if (l->out.n == l->files_cap)
        err = files_grow(l);
    if (err == 0 && l->names_cap - l->names_bytes < n)
        err = names_grow(l);
    if (err < 0)
        return err;
    l->out.files[l->out.n++] = (struct share_file){bytes, mtime_ns, (uint32_t)l->names_bytes};
    memcpy(l->out.names + l->names_bytes, name, n);
    l->names_bytes += n;
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
