/* The file of namespaces: what it keeps, how long it grows, what damage does to it. */
#include "daemon/format/nvme_read.h"
#include "daemon/tier/ns_records.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char directory[2][64];
static const char *const directories[2] = {directory[0], directory[1]};
static struct ns_records names;

static const char *path_of(unsigned i)
{
    static char path[2][128];

    snprintf(path[i], sizeof(path[i]), "%.64s/ucmd.namespaces", directory[i]);
    return path[i];
}

static void open_names(void)
{
    cr_assert_eq(ns_records_open(&names, directories, 2), 0);
}

static void open_all(void)
{
    const char *base = getenv("TMPDIR");

    for (unsigned i = 0; i < 2; i++) {
        snprintf(directory[i], sizeof(directory[i]), "%.40s/names-XXXXXX", base ? base : "/tmp");
        cr_assert_not_null(mkdtemp(directory[i]));
    }
    open_names();
}

static void close_all(void)
{
    ns_records_close(&names);
    for (unsigned i = 0; i < 2; i++) {
        unlink(path_of(i));
        rmdir(path_of(i)); /* of the test that put a directory there */
        cr_expect_eq(rmdir(directory[i]), 0, "something was left in %s", directory[i]);
    }
}

TestSuite(nvme_ns_records, .init = open_all, .fini = close_all);

static void reopen(void)
{
    ns_records_close(&names);
    open_names();
}

static struct nvme_ns_record name_make(unsigned number, uint64_t from_sequence)
{
    struct nvme_ns_record name = {.from_sequence = from_sequence};

    memset(name.fingerprint, 0x40, sizeof(name.fingerprint));
    memcpy(name.fingerprint, &number, sizeof(number));
    name.identity_bytes = (uint32_t)snprintf((char *)name.identity, 64, "namespace %u", number);
    return name;
}

/* As the tier does it. */
static int keep(unsigned number, uint64_t from_sequence)
{
    struct nvme_ns_record name = name_make(number, from_sequence);
    const struct nvme_ns_record *one = &name;
    bool any;
    int rc = ns_records_write(&names, &one, 1, &any);

    return rc < 0 ? rc : ns_records_set(&names, &name);
}

/* The first n, each from its number. */
static void keep_all(unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        cr_assert_eq(keep(i, i), 0);
}

static void expect(unsigned number, uint64_t from_sequence)
{
    struct nvme_ns_record name = name_make(number, 0);
    const struct nvme_ns_record *known = ns_records_find(&names, name.fingerprint);

    cr_assert_not_null(known, "namespace %u", number);
    cr_expect_eq(known->from_sequence, from_sequence, "namespace %u: from %llu", number,
                 (unsigned long long)known->from_sequence);
    cr_assert_eq(known->identity_bytes, name.identity_bytes);
    cr_expect_eq(memcmp(known->identity, name.identity, name.identity_bytes), 0);
}

static bool is_known(void *ctx, const uint8_t *fingerprint)
{
    (void)ctx;
    (void)fingerprint;
    return true;
}

static bool is_even(void *ctx, const uint8_t *fingerprint)
{
    (void)ctx;
    return fingerprint[0] % 2 == 0;
}

static long long file_pages(unsigned i)
{
    struct stat st;

    cr_assert_eq(stat(path_of(i), &st), 0);
    return st.st_size / NVME_PAGE;
}

static void damage(unsigned i, long long page, const void *with, size_t n)
{
    int fd = open(path_of(i), O_RDWR | O_CLOEXEC);

    cr_assert_geq(fd, 0);
    cr_assert_eq(pwrite(fd, with, n, (off_t)page * NVME_PAGE + 100), (ssize_t)n);
    close(fd);
}

Test(nvme_ns_records, a_start_finds_all_of_them)
{
    for (unsigned i = 0; i < 50; i++)
        cr_assert_eq(keep(i * 7919 % 50, i), 0);
    reopen();
    for (unsigned i = 0; i < 50; i++)
        expect(i * 7919 % 50, i);
    cr_expect_eq(names.count, 50u);
}

Test(nvme_ns_records, the_highest_sequence_counts)
{
    cr_assert_eq(keep(1, 10), 0);
    cr_assert_eq(keep(1, 30), 0);
    cr_assert_eq(keep(1, 20), 0);
    expect(1, 30);
    reopen();
    expect(1, 30);
}

/* However often it is purged: 64 records and two for each namespace. */
Test(nvme_ns_records, a_file_does_not_grow_for_ever)
{
    for (unsigned i = 0; i < 500; i++) {
        if (ns_records_crowded(&names))
            ns_records_prune(&names, is_known, NULL);
        cr_assert_eq(keep(i % 5, i), 0);
        cr_assert_leq(file_pages(0), 64 + 2 * 5 + 1);
        cr_assert_leq(file_pages(1), 64 + 2 * 5 + 1);
    }
    reopen();
    cr_expect_eq(names.count, 5u);
    for (unsigned i = 495; i < 500; i++)
        expect(i % 5, i);
}

Test(nvme_ns_records, what_waits_for_a_key_is_kept_whoever_wants_it)
{
    struct nvme_ns_record odd = name_make(7, 0);

    keep_all(100);
    for (unsigned i = 0; i < 70; i++)
        cr_assert_eq(keep(2, 200 + i), 0);
    ns_records_keep(&names, odd.fingerprint);
    ns_records_prune(&names, is_even, NULL);
    cr_expect_eq(names.count, 51u);
    cr_assert_eq(keep(2, 1000), 0); /* rewrites the files */
    reopen();
    expect(7, 7);
    cr_expect_eq(names.count, 51u);
}

/* One directory has the record, so the caller uses it, as the next start will. */
Test(nvme_ns_records, a_record_that_one_directory_takes)
{
    struct nvme_ns_record one = name_make(1, 10);
    const struct nvme_ns_record *writes = &one;
    bool any;

    memset(one.secret, 1, sizeof(one.secret));
    cr_assert_eq(ns_records_write(&names, &writes, 1, &any), 0);
    cr_assert(any);
    cr_assert_eq(ns_records_set(&names, &one), 0);
    cr_assert_eq(unlink(path_of(1)), 0);
    cr_assert_eq(mkdir(path_of(1), 0700), 0); /* nothing can be written there */
    memset(one.secret, 2, sizeof(one.secret));
    one.from_sequence = 20;
    cr_assert_lt(ns_records_write(&names, &writes, 1, &any), 0);
    cr_assert(any);
    cr_assert_eq(rmdir(path_of(1)), 0);
    reopen();
    cr_assert_arr_eq(ns_records_find(&names, one.fingerprint)->secret, one.secret,
                     sizeof(one.secret));
}

static bool holds(unsigned i, const uint8_t *bytes, size_t n)
{
    static uint8_t file[64 * NVME_PAGE];
    int fd = open(path_of(i), O_RDONLY | O_CLOEXEC);
    ssize_t got;

    cr_assert_geq(fd, 0);
    got = read(fd, file, sizeof(file));
    close(fd);
    cr_assert_geq(got, 0);
    return memmem(file, (size_t)got, bytes, n) != NULL;
}

/* One that is new, one whose secret is replaced, one that is known; at the end of a file, and in one that is
 * rewritten. */
Test(nvme_ns_records, several_are_written_at_once)
{
    struct nvme_ns_record batch[3] = {name_make(1, 10), name_make(2, 20), name_make(3, 30)};
    const struct nvme_ns_record *writes[3] = {&batch[0], &batch[1], &batch[2]};
    uint8_t old[NVME_SECRET_BYTES];
    bool any;

    memset(old, 0xa5, sizeof(old));
    memcpy(batch[1].secret, old, sizeof(old));
    cr_assert_eq(ns_records_write(&names, &writes[1], 2, &any), 0);
    for (unsigned i = 1; i < 3; i++)
        cr_assert_eq(ns_records_set(&names, &batch[i]), 0);
    cr_assert(holds(0, old, sizeof(old)) && holds(1, old, sizeof(old)));
    for (unsigned i = 0; i < 3; i++)
        batch[i].from_sequence += 100;
    memset(batch[1].secret, 0x5a, sizeof(batch[1].secret));
    names.files[1].rewrite = true;
    cr_assert_eq(ns_records_write(&names, writes, 3, &any), 0);
    cr_expect(any);
    cr_expect_eq(file_pages(0), 5u);
    cr_expect_eq(file_pages(1), 3u);
    for (unsigned i = 0; i < 2; i++)
        cr_expect(!holds(i, old, sizeof(old)) && holds(i, batch[1].secret, sizeof(old)));
    reopen();
    cr_expect_eq(names.count, 3u);
    for (unsigned i = 0; i < 3; i++)
        expect(1 + i, 10 * (1 + i) + 100);
}

Test(nvme_ns_records, what_nobody_wants_goes)
{
    keep_all(100);
    cr_assert(ns_records_crowded(&names));
    ns_records_prune(&names, is_even, NULL);
    cr_expect_eq(names.count, 50u);
    cr_expect_not(ns_records_crowded(&names), "100 records for 50 namespaces are not too many");
    for (unsigned i = 100; i < 164; i++)
        cr_assert_eq(keep(i, i), 0);
    cr_assert(ns_records_crowded(&names));
    ns_records_prune(&names, is_even, NULL);
    cr_expect_eq(names.count, 82u);
    for (unsigned i = 0; i < 70; i++)
        cr_assert_eq(keep(2, 2000 + i), 0);
    ns_records_prune(&names, is_even, NULL);
    cr_assert_eq(keep(400, 1000), 0); /* with this one it is written again */
    cr_expect_eq(file_pages(0), 83);
    cr_expect_eq(file_pages(1), 83);
    reopen();
    cr_expect_eq(names.count, 83u);
    expect(400, 1000);
    expect(2, 2069);
    for (unsigned i = 4; i < 164; i += 2)
        expect(i, i);
}

Test(nvme_ns_records, a_damaged_record_is_passed_over_and_a_damaged_tail_written_over)
{
    keep_all(6);
    for (unsigned f = 0; f < 2; f++) {
        damage(f, 2, "damage", 6);
        damage(f, 5, "damage", 6);
    }
    reopen();
    cr_expect_eq(names.count, 4u);
    cr_assert_eq(keep(7, 7), 0);
    cr_expect_eq(file_pages(0), 6);
    reopen();
    cr_expect_eq(names.count, 5u);
    expect(4, 4);
    expect(7, 7);
}

Test(nvme_ns_records, each_directory_is_enough)
{
    keep_all(6);
    damage(0, 1, "damage", 6);
    damage(1, 2, "damage", 6);
    reopen();
    cr_expect_eq(names.count, 6u);
    cr_assert_eq(unlink(path_of(0)), 0);
    reopen();
    cr_expect_eq(names.count, 5u);
}

/* A start removes the temporary file. A file that can't be rewritten goes on growing. */
Test(nvme_ns_records, a_rewrite_that_fails_loses_nothing)
{
    char left[160];
    int fd;

    snprintf(left, sizeof(left), "%s.tmp", path_of(0));
    for (unsigned i = 0; i < 70; i++)
        cr_assert_eq(keep(1, i), 0);
    cr_assert_eq(mkdir(left, 0700), 0);
    ns_records_prune(&names, is_known, NULL);
    cr_assert_eq(keep(2, 5), 0);
    cr_expect_eq(file_pages(0), 71);
    cr_expect_eq(file_pages(1), 2);
    cr_assert_eq(rmdir(left), 0);
    fd = open(left, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    cr_assert_eq(write(fd, "left", 4), 4);
    close(fd);
    reopen();
    cr_expect_neq(access(left, F_OK), 0);
    expect(1, 69);
    expect(2, 5);
}

/* Both hold all of them afterwards, whatever else is written. */
Test(nvme_ns_records, a_file_that_is_removed_or_cut_is_written_again)
{
    cr_expect(ns_records_removed(&names, 0), "there has been none");
    keep_all(6);
    cr_expect_not(ns_records_removed(&names, 0));
    cr_assert_eq(unlink(path_of(0)), 0);
    cr_assert_eq(truncate(path_of(1), 2 * NVME_PAGE), 0);
    cr_expect(ns_records_removed(&names, 0));
    cr_assert_eq(keep(6, 6), 0);
    for (unsigned i = 0; i < 2; i++)
        cr_expect_eq(file_pages(i), 7, "no hole in front of the new one");
    cr_assert_eq(unlink(path_of(1)), 0);
    cr_assert_eq(ns_records_restore(&names), 0);
    cr_assert_eq(unlink(path_of(0)), 0);
    reopen();
    for (unsigned i = 0; i < 7; i++)
        expect(i, i);
    cr_expect_eq(names.damaged, 0u);
}
