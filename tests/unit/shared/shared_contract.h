/* The promises of daemon/shared/backend.h, as tests for any backend. A test program says where a
 * root is (shared_contract_rig.h), then SHARED_CONTRACT(suite, begin, end) makes the tests. */
#ifndef UCMD_TESTS_SHARED_CONTRACT_H
#define UCMD_TESTS_SHARED_CONTRACT_H

#include "tests/unit/shared/shared_contract_rig.h"

static inline void contract_round_trip(struct contract *c)
{
    static const uint64_t sizes[] = {
        1, 2, 63, 64, 65, 4031, 4032, 4033, 4096, 65536, 1 << 20, (1 << 20) + 1, 3000001, 6 << 20};

    for (unsigned i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        struct contract_op o = {
            .op = contract_of(SHARED_WRITE, i, contract_data(sizes[i], i), sizes[i])};

        o.op.sync = i % 2;
        cr_assert_eq(contract_run(c, &o), 0, "size %llu", (unsigned long long)sizes[i]);
        cr_assert_eq(contract_do(c, SHARED_FIND, i, NULL, sizes[i]), 0);
        cr_assert_eq(contract_read(c, i, sizes[i]), 0);
        cr_assert_eq(contract_run(c, &o), -EEXIST, "not written again");
        contract_stored(contract_path(c, i), BLOCK_FILE_HEADER_BYTES + sizes[i]);
        free(o.op.data);
    }
    cr_assert_eq(contract_files(c->directory), sizeof(sizes) / sizeof(sizes[0]), "temporary files");
}

/* An encrypted part comes back with its encryption header. A copy by name has that header in front
 * of its data, and is encrypted as the original is. */
static inline void contract_encrypted(struct contract *c)
{
    const uint64_t bytes = 300001, whole = bytes + BLOCK_FILE_ENCRYPTION_BYTES;
    uint8_t *data = contract_data(bytes, 3), *copy = malloc(whole);
    struct contract_op o = {.op = contract_of(SHARED_WRITE, 3, data, bytes)};
    struct contract_op by_name = {
        .op = {.verb = SHARED_READ, .by_name = true, .data = copy, .bytes = whole}};
    uint8_t *encryption = o.op.header + BLOCK_FILE_HEADER_BYTES;
    char *path = contract_path(c, 3);

    o.op.encrypted = true;
    memset(encryption, 0x5a, BLOCK_FILE_ENCRYPTION_BYTES);
    cr_assert_eq(contract_run(c, &o), 0);
    cr_assert_eq(contract_do(c, SHARED_FIND, 3, NULL, whole), 0);
    cr_assert_eq(contract_do(c, SHARED_FIND, 3, NULL, bytes), -EBADMSG);
    cr_assert_eq(contract_read(c, 3, whole), -EBADMSG, "for a plain one it is none");
    by_name.op.bucket = contract_bucket(3, by_name.op.name);
    cr_assert_eq(contract_run(c, &by_name), 0);
    cr_assert(by_name.op.copy_encrypted);
    cr_assert(copy[0] == 0x5a && memcmp(copy + BLOCK_FILE_ENCRYPTION_BYTES, data, bytes) == 0);
    contract_unlink(path);
    by_name.op.verb = SHARED_WRITE;
    cr_assert_eq(contract_run(c, &by_name), 0);
    o.op.verb = SHARED_READ;
    memset(encryption, 0, BLOCK_FILE_ENCRYPTION_BYTES);
    memset(data, 0, bytes);
    cr_assert_eq(contract_run(c, &o), 0);
    cr_assert(encryption[0] == 0x5a && encryption[BLOCK_FILE_ENCRYPTION_BYTES - 1] == 0x5a);
    cr_assert_eq(memcmp(copy + BLOCK_FILE_ENCRYPTION_BYTES, data, bytes), 0);
    contract_flip(path, BLOCK_FILE_HEADER_BYTES + 9, 1);
    cr_assert_eq(contract_run(c, &o), -EBADMSG, "of the encryption");
    free(data);
    free(copy);
}

/* Times are the server's, because a file's age may decide about its removal. */
static inline void contract_read_tells_time(struct contract *c)
{
    struct timespec times[2] = {{.tv_sec = 1}, {.tv_sec = 1600000000}};
    uint8_t data[700];
    struct contract_op o = {.op = contract_of(SHARED_READ, 2, data, sizeof(data))};
    char *path = contract_path(c, 2);
    bool aged;

    cr_assert_eq(contract_write(c, 2, sizeof(data)), 0);
    aged = contract_age(path, times);
    cr_assert_eq(contract_run(c, &o), 0);
    if (aged)
        cr_assert(o.op.mtime_ns == 1600000000000000000u || o.op.mtime_ns == 0);
    else
        contract_near_now(o.op.mtime_ns);
}

/* As after a restart, or on another host: the next backend reads what one backend wrote. */
static inline void contract_read_by_another(struct contract *c)
{
    cr_assert_eq(contract_write(c, 1, 5000), 0);
    contract_close(c);
    contract_open(c);
    cr_assert_eq(contract_read(c, 1, 5000), 0);
}

/* More operations at once than the backend does at once, each with bytes of its own. */
static inline void contract_many_at_once(struct contract *c)
{
    struct contract_op *ops = calloc(CONTRACT_OPS, sizeof(*ops));
    uint64_t bytes = 70000;

    for (unsigned i = 0; i < CONTRACT_OPS; i++) {
        ops[i].op = contract_of(SHARED_WRITE, i, contract_data(bytes, i), bytes);
        contract_start(c, &ops[i]);
    }
    contract_wait(c, CONTRACT_OPS);
    for (unsigned i = 0; i < CONTRACT_OPS; i++) {
        cr_assert_eq(ops[i].status, 0);
        memset(ops[i].op.data, 0xee, bytes);
        ops[i].op.verb = SHARED_READ;
        contract_start(c, &ops[i]);
    }
    contract_wait(c, 2 * CONTRACT_OPS);
    for (unsigned i = 0; i < CONTRACT_OPS; i++) {
        cr_assert_eq(ops[i].status, 0);
        contract_right(ops[i].op.data, bytes, i);
        free(ops[i].op.data);
    }
    free(ops);
}

static inline bool contract_objects_only(void)
{
    return contract_remote && contract_remote->objects_only;
}

static inline int contract_nothing_removed(void)
{
    return contract_remote && contract_remote->removes_blind ? 0 : -ENOENT;
}

/* Reads on a root without any directory, in a bucket without the file, and of a file of another
 * length. */
static inline void contract_missing(struct contract *c)
{
    uint8_t byte;

    for (unsigned i = 0; i < 2; i++) {
        cr_assert_eq(contract_do(c, SHARED_FIND, 7, NULL, 100), -ENOENT);
        cr_assert_eq(contract_do(c, SHARED_READ, 7, &byte, 1), -ENOENT);
        cr_assert_eq(contract_do(c, SHARED_REMOVE, 7, NULL, 0), contract_nothing_removed());
        cr_assert_eq(contract_do(c, SHARED_TOUCH, 7, NULL, 0),
                     contract_objects_only() ? 0 : -ENOENT);
        cr_assert_eq(contract_files(c->directory), 0, "looking makes nothing");
        cr_assert_eq(contract_write(c, 7, 100), 0);
        cr_assert_eq(contract_do(c, SHARED_REMOVE, 7, NULL, 0), 0);
    }
}

static inline void contract_damage(struct contract *c)
{
    uint64_t bytes = 3 * 4096 + 5;
    unsigned in_header = contract_remote ? 13 : 1, behind = contract_remote ? 4001 : 509;
    char *path = contract_path(c, 3);

    cr_assert_eq(contract_write(c, 3, bytes), 0);
    for (off_t at = 0; at < (off_t)(BLOCK_FILE_HEADER_BYTES + bytes);
         at += at < (off_t)BLOCK_FILE_HEADER_BYTES ? in_header : behind) {
        contract_flip(path, at, 0x10);
        cr_assert_eq(contract_read(c, 3, bytes), -EBADMSG, "byte %lld", (long long)at);
        contract_flip(path, at, 0x10);
    }
    contract_flip(path, (off_t)(BLOCK_FILE_HEADER_BYTES + bytes) - 1, 0x80);
    cr_assert_eq(contract_read(c, 3, bytes), -EBADMSG, "the last byte");
    contract_flip(path, (off_t)(BLOCK_FILE_HEADER_BYTES + bytes) - 1, 0x80);
    cr_assert_eq(contract_read(c, 3, bytes), 0);
}

/* Whole files that are not this part: of another key, of a later version. */
static inline void contract_other_part(struct contract *c)
{
    uint64_t bytes;
    uint8_t *h;
    char *path = contract_path(c, 3);

    cr_assert_eq(contract_write(c, 3, 1000), 0);
    contract_lay(path, 4, 4, 1000);
    cr_assert_eq(contract_read(c, 3, 1000), -EBADMSG);

    contract_lay(path, 3, 3, 1000);
    cr_assert_eq(contract_read(c, 3, 1000), 0);
    h = contract_get(path, &bytes);
    put32(h + 4, BLOCK_FILE_VERSION + 1);
    put64(h + BLOCK_FILE_HEADER_BYTES - 8, checksum_of(h, BLOCK_FILE_HEADER_BYTES - 8));
    contract_put(path, h, bytes);
    free(h);
    cr_assert_eq(contract_read(c, 3, 1000), -EBADMSG);
}

static inline void contract_wrong_length(struct contract *c)
{
    uint64_t bytes = 9000;
    const off_t lengths[] = {0, 1, 63, 64, BLOCK_FILE_HEADER_BYTES + 8999, 9065, 1 << 20};
    char *path = contract_path(c, 5);

    for (unsigned i = contract_objects_only(); i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        cr_assert_eq(contract_write(c, 5, bytes), 0, "takes the place of one of another length");
        cr_assert_eq(contract_read(c, 5, bytes), 0);
        contract_truncate(path, (uint64_t)lengths[i]);
        cr_assert_eq(contract_do(c, SHARED_FIND, 5, NULL, bytes), -EBADMSG);
        cr_assert_eq(contract_read(c, 5, bytes), -EBADMSG, "length %lld", (long long)lengths[i]);
    }
    cr_assert_eq(contract_files(c->directory), 1);
}

static inline void contract_lay_odd(const char *path, const char *beside, unsigned kind)
{
    if (kind == 1)
        contract_lay(beside, 6, 6, 500);
    cr_assert_eq(kind == 0   ? mkfifo(path, 0600)
                 : kind == 1 ? symlink(beside, path)
                 : kind == 2 ? symlink(path, path)
                             : mkdir(path, 0700),
                 0);
}

/* A FIFO without a writer: opening it as a file would block for ever. */
static inline void contract_not_a_file(struct contract *c)
{
    char *path = contract_path(c, 6), beside[512];

    snprintf(beside, sizeof(beside), "%s/beside", c->directory);
    for (unsigned kind = 0; kind < 4; kind++) {
        char name[BLOCK_FILE_NAME_CAP];

        contract_bucket_make(c, contract_bucket(6, name));
        contract_lay_odd(path, beside, kind);
        cr_assert_eq(contract_do(c, SHARED_FIND, 6, NULL, 500), -EBADMSG, "kind %u", kind);
        cr_assert_eq(contract_read(c, 6, 500), -EBADMSG, "kind %u", kind);
        if (kind < 3) {
            cr_assert_eq(contract_write(c, 6, 500), 0, "kind %u", kind);
            cr_assert_eq(contract_read(c, 6, 500), 0);
            cr_assert_eq(contract_do(c, SHARED_REMOVE, 6, NULL, 0), 0);
        } else {
            cr_assert_eq(contract_write(c, 6, 500), -EBADMSG, "a directory stays");
            cr_assert_eq(contract_do(c, SHARED_REMOVE, 6, NULL, 0), -EBADMSG);
        }
    }
    cr_assert_eq(contract_files(c->directory), 1, "`beside` is left, and no temporary file");
}

/* Nothing is read, written, listed or removed beyond a link that stands in a bucket's place. */
static inline void contract_linked_bucket(struct contract *c)
{
    char name[BLOCK_FILE_NAME_CAP], bucket[512], outside[512], inside[700];
    uint8_t number = contract_bucket(8, name);
    struct shared_listing listing;
    int status;

    snprintf(outside, sizeof(outside), "%s/outside", c->directory);
    cr_assert_eq(mkdir(outside, 0700), 0);
    snprintf(inside, sizeof(inside), "%s/%s", outside, name);
    contract_lay(inside, 8, 8, 500);
    contract_bucket_make(c, number);
    contract_path_in(c, number, "", bucket);
    bucket[strlen(bucket) - 1] = '\0';
    cr_assert_eq(rmdir(bucket), 0);
    cr_assert_eq(symlink(outside, bucket), 0);

    cr_assert_lt(contract_read(c, 8, 500), 0);
    cr_assert_lt(contract_do(c, SHARED_FIND, 8, NULL, 500), 0);
    cr_assert_lt(contract_do(c, SHARED_REMOVE, 8, NULL, 0), 0);
    listing = contract_list(c, number);
    cr_assert_eq(listing.n, 0);
    shared_listing_free(&listing);
    cr_assert_eq(unlink(inside), 0, "it was not removed");
    status = contract_write(c, 8, 500);
    cr_assert(status < 0 && status != -EEXIST);
    cr_assert_eq(contract_files(outside), 0);
}

/* Several hosts dump one block at once. All succeed, and one file is left. */
static inline void contract_writers_of_one(struct contract *c)
{
    struct contract_op *ops = calloc(CONTRACT_OPS, sizeof(*ops));
    uint8_t *data = contract_data(300000, 9);
    unsigned wrote = 0;

    for (unsigned i = 0; i < CONTRACT_OPS; i++) {
        ops[i].op = contract_of(SHARED_WRITE, 9, data, 300000);
        contract_start(c, &ops[i]);
    }
    contract_wait(c, CONTRACT_OPS);
    for (unsigned i = 0; i < CONTRACT_OPS; i++) {
        cr_assert(ops[i].status == 0 || ops[i].status == -EEXIST);
        wrote += ops[i].status == 0;
    }
    cr_assert_geq(wrote, 1);
    cr_assert_eq(contract_read(c, 9, 300000), 0);
    cr_assert_eq(contract_files(c->directory), 1, "temporary files");
    free(data);
    free(ops);
}

struct contract_renamer {
    struct contract *c;
    unsigned number;
    uint64_t bytes;
    atomic_bool stop;
};

static inline void *contract_renamer_main(void *arg)
{
    struct contract_renamer *r = arg;
    char *path = contract_path(r->c, r->number), beside[512];

    snprintf(beside, sizeof(beside), "%s/beside", r->c->directory);
    for (unsigned i = 0; !atomic_load(&r->stop); i++) {
        contract_lay(contract_remote ? path : beside, r->number, r->number + i % 2, r->bytes);
        if (!contract_remote)
            cr_assert_eq(rename(beside, path), 0);
    }
    return NULL;
}

/* Two contents of one name, which no host would write, show that a read takes from one file only.
 */
static inline void contract_read_while_renamed(struct contract *c)
{
    struct contract_renamer r = {.c = c, .number = 10, .bytes = 400000};
    uint8_t *data = malloc(r.bytes);
    unsigned whole = 0, rounds = contract_remote ? 12 : 300;
    pthread_t thread;

    cr_assert_eq(contract_write(c, r.number, r.bytes), 0);
    cr_assert_eq(pthread_create(&thread, NULL, contract_renamer_main, &r), 0);
    for (unsigned i = 0; i < rounds; i++) {
        int status = contract_do(c, SHARED_READ, r.number, data, r.bytes);

        cr_assert(status == 0 || status == -ESTALE || status == -ENOENT, "%s", strerror(-status));
        cr_assert(status != 0 || bytes_are(data, r.bytes, r.number) ||
                      bytes_are(data, r.bytes, r.number + 1),
                  "bytes of two files: %zu of one, or %zu of the other",
                  bytes_right(data, r.bytes, r.number), bytes_right(data, r.bytes, r.number + 1));
        whole += status == 0;
    }
    atomic_store(&r.stop, true);
    pthread_join(thread, NULL);
    cr_assert_gt(whole, 0);
    free(data);
}

#define CONTRACT_TEMP BLOCK_FILE_TEMP_PREFIX "other.host-00000001-0000000000000002-0000000000000003"

static inline void contract_listing(struct contract *c)
{
    static const char *const others[] = {"readme", ".tmp", ".nfs0001", "abc-def-00", "UPPER"};
    struct timespec times[2] = {{.tv_sec = 1}, {.tv_sec = 1600000000, .tv_nsec = 123456000}};
    char name[BLOCK_FILE_NAME_CAP], directory[BLOCK_FILE_NAME_CAP], path[512];
    uint8_t bucket = contract_bucket(11, name);
    const struct shared_file *f;
    struct shared_listing l;
    bool aged;

    l = contract_list(c, bucket);
    cr_assert_eq(l.n, 0, "a bucket that is not there");
    shared_listing_free(&l);
    cr_assert_eq(contract_write(c, 11, 700), 0);
    for (unsigned i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        contract_path_in(c, bucket, others[i], path);
        contract_put(path, "x", 1);
    }
    contract_path_in(c, bucket, CONTRACT_TEMP, path);
    contract_put(path, "12345", 5);
    strcpy(directory, name);
    directory[0] ^= 1; /* another digit: a good name, but of a directory, and of a link */
    contract_path_in(c, bucket, directory, path);
    if (!contract_remote)
        cr_assert_eq(mkdir(path, 0700), 0);
    directory[0] ^= 2;
    contract_path_in(c, bucket, directory, path);
    if (!contract_remote)
        cr_assert_eq(symlink("readme", path), 0);
    aged = contract_age(contract_path(c, 11), times);

    l = contract_list(c, bucket);
    cr_assert_eq(l.n, 2);
    cr_assert_not(l.cut);
    f = contract_listed(&l, name);
    cr_assert(f);
    cr_assert_eq(f->bytes, BLOCK_FILE_HEADER_BYTES + 700);
    if (aged)
        cr_assert_eq(f->mtime_ns, 1600000000123456000u);
    else
        contract_near_now(f->mtime_ns);
    f = contract_listed(&l, CONTRACT_TEMP);
    cr_assert(f);
    cr_assert_eq(f->bytes, 5);
    shared_listing_free(&l);
}

/* More names than one answer of a server has room for; each is listed once. */
static inline void contract_long_listing(struct contract *c)
{
    const unsigned files = contract_remote ? 45 : 1000; /* pages of 20 there, of some 400 here */
    char name[BLOCK_FILE_NAME_CAP], path[512];
    bool *seen = calloc(files, sizeof(*seen));
    struct shared_listing l;

    contract_bucket_make(c, 0x33);
    for (unsigned i = 0; i < files; i++) {
        contract_bucket(i, name);
        contract_path_in(c, 0x33, name, path);
        contract_put(path, "x", 1);
    }
    l = contract_list(c, 0x33);
    cr_assert_eq(l.n, files);
    for (uint32_t i = 0; i < l.n; i++) {
        unsigned b[4];

        cr_assert_eq(l.files[i].bytes, 1);
        cr_assert_eq(sscanf(l.files[i].name, "%2x%2x%2x%2x", b, b + 1, b + 2, b + 3), 4);
        cr_assert_not(seen[b[0] | b[1] << 8]);
        seen[b[0] | b[1] << 8] = true;
    }
    shared_listing_free(&l);
    free(seen);
}

/* The time that a listing gives. */
static inline uint64_t contract_mtime(struct contract *c, uint8_t bucket, const char *name)
{
    struct shared_listing l = contract_list(c, bucket);
    const struct shared_file *f = contract_listed(&l, name);
    uint64_t ns = f ? f->mtime_ns : 0;

    cr_assert(f);
    shared_listing_free(&l);
    return ns;
}

/* If a store's clock ticks seldom, the file is touched until it has ticked. */
static inline void contract_touch(struct contract *c)
{
    struct timespec times[2] = {{.tv_sec = 1000}, {.tv_sec = 1000}};
    struct contract_op o = {.op = {.verb = SHARED_TOUCH, .by_name = true}};
    char *path = contract_path(c, 12);

    cr_assert_eq(contract_write(c, 12, 700), 0);
    for (unsigned by_name = 0; by_name < 2; by_name++) {
        uint8_t bucket = contract_bucket(12, o.op.name);
        uint64_t before, after;

        (void)contract_age(path, times);
        before = contract_mtime(c, bucket, o.op.name);
        do {
            o.op.bucket = bucket;
            cr_assert_eq(
                by_name ? contract_run(c, &o) : contract_do(c, SHARED_TOUCH, 12, NULL, 700), 0);
            after = contract_mtime(c, bucket, o.op.name);
        } while (contract_remote && after <= before);
        cr_assert_gt(after, before);
        contract_near_now(after);
    }
    cr_assert_eq(contract_read(c, 12, 700), 0);
}

static inline int contract_remove_by_name(struct contract *c, uint8_t bucket, const char *name)
{
    struct contract_op o = {.op = {.verb = SHARED_REMOVE, .by_name = true, .bucket = bucket}};

    snprintf(o.op.name, sizeof(o.op.name), "%s", name);
    return contract_run(c, &o);
}

static inline void contract_remove(struct contract *c)
{
    char name[BLOCK_FILE_NAME_CAP], path[512];
    uint8_t bucket = contract_bucket(13, name);

    cr_assert_eq(contract_write(c, 13, 700), 0);
    contract_path_in(c, bucket, CONTRACT_TEMP, path);
    contract_put(path, "12345", 5);
    cr_assert_eq(contract_do(c, SHARED_REMOVE, 13, NULL, 0), 0);
    cr_assert_eq(contract_do(c, SHARED_REMOVE, 13, NULL, 0), contract_nothing_removed(),
                 "gone is gone");
    cr_assert_eq(contract_do(c, SHARED_FIND, 13, NULL, 700), -ENOENT);
    cr_assert_eq(contract_read(c, 13, 700), -ENOENT);
    cr_assert_eq(contract_write(c, 13, 700), 0);
    cr_assert_eq(contract_remove_by_name(c, bucket, name), 0);
    cr_assert_eq(contract_remove_by_name(c, bucket, CONTRACT_TEMP), 0);
    cr_assert_eq(contract_remove_by_name(c, bucket, name), contract_nothing_removed());
    cr_assert_eq(contract_files(c->directory), 0);
}

/* A server may say what it likes in a listing. */
static inline void contract_names_lead_nowhere(struct contract *c)
{
    static const char *const names[] = {
        "", ".", "..", "../precious", "readme", BLOCK_FILE_TEMP_PREFIX "/../../../precious"};
    char path[512];

    snprintf(path, sizeof(path), "%s/precious", c->directory);
    contract_put(path, "x", 1);
    contract_bucket_make(c, 0);
    contract_path_in(c, 0, "readme", path);
    contract_put(path, "x", 1);
    for (unsigned i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        cr_assert_eq(contract_remove_by_name(c, 0, names[i]), -EINVAL, "%s", names[i]);
    cr_assert_eq(contract_files(c->directory), 2);
}

/* Files that are known from a listing only. Their names don't have the whole fingerprint of the
 * namespace. They are read and written as they are. */
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

/* On a root without directories, and on one with them. */
static inline void contract_checks(struct contract *c)
{
    uint64_t first, second;

    cr_assert_eq(contract_check(c, false, &first), 0);
    cr_assert_eq(contract_check(c, true, &first), 0);
    contract_near_now(first);
    cr_assert_eq(contract_files(c->directory), 0, "it leaves nothing");
    cr_assert_eq(contract_write(c, 14, 10), 0);
    cr_assert_eq(contract_check(c, false, &second), 0);
    cr_assert_eq(contract_check(c, true, &second), 0);
    cr_assert_geq(second, first);
    cr_assert_eq(contract_files(c->directory), 1);
}

/* A server that was away may first have to handle what was sent to it meanwhile. */
static inline void contract_until_up(struct contract *c)
{
    uint64_t now, end_ns = uv_hrtime() + CONTRACT_DEADLINE_MS * 1000000ull;
    int status;

    while ((status = contract_check(c, true, &now)) != 0)
        cr_assert_lt(uv_hrtime(), end_ns, "still %s", strerror(-status));
}

/* No operation may succeed, although directories were open before. */
static inline void contract_root_gone(struct contract *c)
{
    uint64_t now;

    cr_assert_eq(contract_write(c, 15, 700), 0);
    cr_assert_eq(contract_do(c, SHARED_FIND, 16, NULL, 700), -ENOENT);
    if (c->root_away)
        c->root_away(c);
    else
        contract_rename_root(c, true);
    cr_assert_not(contract_answer(contract_check(c, false, &now)));
    cr_assert_not(contract_answer(contract_check(c, true, &now)));
    cr_assert_not(contract_answer(contract_do(c, SHARED_FIND, 16, NULL, 700)));
    cr_assert_not(contract_answer(contract_read(c, 16, 700)));
    cr_assert_not(contract_answer(contract_write(c, 16, 700)));
    cr_assert_not(contract_answer(contract_do(c, SHARED_REMOVE, 16, NULL, 0)));
    if (c->root_back)
        c->root_back(c);
    else
        contract_rename_root(c, false);
    contract_until_up(c);
    cr_assert_eq(contract_do(c, SHARED_FIND, 16, NULL, 700), -ENOENT);
    cr_assert_eq(contract_read(c, 15, 700), 0, "noticed by itself");
}

/* Directories may go while they are in use, because an operator empties the root. */
static inline void contract_directories_gone(struct contract *c)
{
    char *path;

    for (unsigned i = 0; i < 3; i++) {
        cr_assert_eq(contract_write(c, 17, 700), 0);
        cr_assert_eq(contract_read(c, 17, 700), 0);
        path = contract_path(c, 17);
        contract_unlink(path);
        *strrchr(path, '/') = '\0';
        if (!contract_remote)
            cr_assert_eq(rmdir(path), 0);
        if (i == 0)
            continue; /* it is made again by a write, */
        cr_assert_eq(contract_do(c, SHARED_FIND, 17, NULL, 700), -ENOENT);
        if (i == 1)
            continue;
        if (!contract_remote)
            cr_assert_eq(mkdir(path, 0700), 0); /* or by another host, which writes the file too */
        path = contract_path(c, 17);
        contract_lay(path, 17, 17, 700);
        cr_assert_eq(contract_read(c, 17, 700), 0);
    }
}

/* Operations that could be taken back are never done. The others are done, each once. */
static inline void contract_cancel(struct contract *c)
{
    struct contract_op *ops = calloc(CONTRACT_OPS, sizeof(*ops));
    uint8_t *data = contract_data(1 << 20, 18);
    unsigned left = CONTRACT_OPS;

    cr_assert_eq(contract_write(c, 18, 700), 0, "until the backend is up, all of them wait");
    c->done = 0;
    for (unsigned i = 0; i < CONTRACT_OPS; i++) {
        ops[i].op = contract_of(SHARED_WRITE, 1000 + i, data, 1 << 20);
        contract_start(c, &ops[i]);
    }
    for (unsigned i = CONTRACT_OPS; i-- > 0;)
        if (c->ops->cancel(c->b, &ops[i].op)) {
            ops[i].status = PENDING + 1;
            left--;
        }
    cr_assert_lt(left, CONTRACT_OPS, "none of those that wait");
    contract_wait(c, left);
    for (unsigned i = 0; i < CONTRACT_OPS; i++) {
        cr_assert(ops[i].status == 0 || ops[i].status == PENDING + 1);
        /* A write that was under way may have got as far as its name. */
        cr_assert(ops[i].status != 0 || contract_exists(contract_path(c, 1000 + i)));
    }
    contract_close(c); /* nothing is under way */
    contract_open(c);
    free(data);
    free(ops);
}

/* open does no I/O, so the root need not be there. */
static inline void contract_open_close(struct contract *c)
{
    contract_close(c);
    c->ops->close(NULL);
    contract_open(c);
}

/* ---- making tests of them ---- */

#define SHARED_CONTRACT_CASE(suite, name, begin, end)                                              \
    Test(suite, name)                                                                              \
    {                                                                                              \
        contract_case(begin, end, contract_##name);                                                \
    }

/* Cases of what a directory can have in a file's place. */
#define SHARED_CONTRACT_DIRECTORY(suite, begin, end)                                               \
    SHARED_CONTRACT_CASE(suite, not_a_file, begin, end)                                            \
    SHARED_CONTRACT_CASE(suite, linked_bucket, begin, end)

/* Cases of what any store keeps under a name. */
#define SHARED_CONTRACT_OBJECTS(suite, begin, end)                                                 \
    SHARED_CONTRACT_CASE(suite, round_trip, begin, end)                                            \
    SHARED_CONTRACT_CASE(suite, encrypted, begin, end)                                             \
    SHARED_CONTRACT_CASE(suite, read_by_another, begin, end)                                       \
    SHARED_CONTRACT_CASE(suite, many_at_once, begin, end)                                          \
    SHARED_CONTRACT_CASE(suite, missing, begin, end)                                               \
    SHARED_CONTRACT_CASE(suite, damage, begin, end)                                                \
    SHARED_CONTRACT_CASE(suite, other_part, begin, end)                                            \
    SHARED_CONTRACT_CASE(suite, wrong_length, begin, end)                                          \
    SHARED_CONTRACT_CASE(suite, writers_of_one, begin, end)                                        \
    SHARED_CONTRACT_CASE(suite, remove, begin, end)                                                \
    SHARED_CONTRACT_CASE(suite, names_lead_nowhere, begin, end)                                    \
    SHARED_CONTRACT_CASE(suite, by_name, begin, end)                                               \
    SHARED_CONTRACT_CASE(suite, checks, begin, end)                                                \
    SHARED_CONTRACT_CASE(suite, root_gone, begin, end)                                             \
    SHARED_CONTRACT_CASE(suite, directories_gone, begin, end)                                      \
    SHARED_CONTRACT_CASE(suite, cancel, begin, end)                                                \
    SHARED_CONTRACT_CASE(suite, open_close, begin, end)

/* Cases of a store that also has times and listings, and that replaces an object in one step. */
#define SHARED_CONTRACT_STORE(suite, begin, end)                                                   \
    SHARED_CONTRACT_OBJECTS(suite, begin, end)                                                     \
    SHARED_CONTRACT_CASE(suite, read_tells_time, begin, end)                                       \
    SHARED_CONTRACT_CASE(suite, read_while_renamed, begin, end)                                    \
    SHARED_CONTRACT_CASE(suite, listing, begin, end)                                               \
    SHARED_CONTRACT_CASE(suite, long_listing, begin, end)                                          \
    SHARED_CONTRACT_CASE(suite, touch, begin, end)

#define SHARED_CONTRACT(suite, begin, end)                                                         \
    SHARED_CONTRACT_STORE(suite, begin, end)                                                       \
    SHARED_CONTRACT_DIRECTORY(suite, begin, end)

#endif
