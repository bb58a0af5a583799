/* Files that are known from a listing only. Their names don't have the whole fingerprint of the
 * namespace. They are read and written as they are. Included by shared_contract.h. */
#ifndef UCMD_TESTS_SHARED_CONTRACT_NAMES_H
#define UCMD_TESTS_SHARED_CONTRACT_NAMES_H

#include "tests/unit/shared/shared_contract_rig.h"

static inline void contract_by_name(struct contract *c)
{
    uint64_t bytes = 70000;
    struct contract_op o = {
        .op = {.verb = SHARED_READ, .by_name = true, .data = malloc(bytes), .bytes = bytes}};
    char *path = contract_path(c, 16), elsewhere[512];

    o.op.bucket = contract_bucket(16, o.op.name);
    cr_assert_eq(contract_run(c, &o), -ENOENT);
    cr_assert_eq(contract_write(c, 16, bytes), 0);
    cr_assert_eq(contract_run(c, &o), 0);
    cr_assert_eq(o.op.identity[0], o.op.bucket);

    /* Writing what was read makes the same file again. */
    cr_assert_eq(contract_do(c, SHARED_REMOVE, 16, NULL, 0), 0);
    o.op.verb = SHARED_FIND;
    cr_assert_eq(contract_run(c, &o), -ENOENT);
    o.op.verb = SHARED_WRITE;
    cr_assert_eq(contract_run(c, &o), 0);
    cr_assert_eq(contract_read(c, 16, bytes), 0);
    cr_assert_eq(contract_run(c, &o), -EEXIST);
    o.op.verb = SHARED_FIND;
    cr_assert_eq(contract_run(c, &o), 0);

    /* A damaged file is not read, nor one that lies in another file's bucket. */
    o.op.verb = SHARED_READ;
    contract_flip(path, 40, 1);
    cr_assert_eq(contract_run(c, &o), -EBADMSG);
    contract_flip(path, 40, 1);
    contract_flip(path, BLOCK_FILE_HEADER_BYTES + 500, 1);
    cr_assert_eq(contract_run(c, &o), -EBADMSG);
    contract_flip(path, BLOCK_FILE_HEADER_BYTES + 500, 1);
    cr_assert_eq(contract_run(c, &o), 0);
    o.op.bucket ^= 1;
    contract_bucket_make(c, o.op.bucket);
    contract_path_in(c, o.op.bucket, o.op.name, elsewhere);
    contract_move(path, elsewhere);
    cr_assert_eq(contract_run(c, &o), -EBADMSG);
    free(o.op.data);
}

#endif
