/* Operations in a directory: the page cache, durability, and what another host does meanwhile. */
#include "daemon/backend/directory/directory.h"
#include "daemon/backend/directory/uncached.h"
#include "tests/runner/bytes.h"
#include "tests/runner/wipe.h"

#include <criterion/criterion.h>
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define BUCKET "blocks/44"
#define MEMORY (4u << 20)

static char root[128];
static uint8_t *memory;

static void root_make(const char *below)
{
    snprintf(root, sizeof(root), "%s/ucm-test-directory-XXXXXX", below);
    cr_assert(mkdtemp(root));
    memory = aligned_alloc(UNCACHED_ALIGN, MEMORY);
    cr_assert(memory);
}

static void begin(void)
{
    root_make("/tmp");
}

static void end(void)
{
    cr_assert_eq(wipe(root), 0);
    free(memory);
}

TestSuite(directory, .init = begin, .fini = end, .timeout = 60);

static struct directory_file file(const char *name, uint64_t bytes)
{
    return (struct directory_file){.root = root,
                                   .bucket = BUCKET,
                                   .name = name,
                                   .temp = ".tmp-host-000000000000000a",
                                   .bytes = bytes,
                                   .memory = memory};
}

static int write_it(const char *name, uint64_t bytes, bool sync)
{
    struct directory_file f = file(name, bytes);

    f.sync = sync;
    bytes_put(memory, bytes, 7);
    return directory_write(&f);
}

static int read_it(const char *name, uint64_t bytes)
{
    struct directory_file f = file(name, bytes);
    int err;

    memset(memory, 0xee, bytes);
    err = directory_read(&f);
    cr_assert(err < 0 || bytes_are(memory, bytes, 7));
    return err;
}

static const char *path_of(const char *name)
{
    static char path[256];

    snprintf(path, sizeof(path), "%s/" BUCKET "/%s", root, name);
    return path;
}

/* ---- calls that fail ---- */

static unsigned unreadable;    /* files whose name is below this one */
static unsigned stale_renames; /* renames still to fail; each leaves its file there */
static unsigned stale_reads;   /* of directories */
static unsigned directories_synced;

int fstatat(int directory, const char *name, struct stat *st, int flags)
{
    unsigned number;

    if (unreadable > 0 && sscanf(name, "%2x", &number) == 1 && number < unreadable) {
        errno = EIO;
        return -1;
    }
    return (int)syscall(SYS_newfstatat, directory, name, st, flags);
}

int renameat(int from_directory, const char *from, int to_directory, const char *to)
{
    if (stale_renames > 0) {
        errno = ESTALE;
        return -1;
    }
    return (int)syscall(SYS_renameat2, from_directory, from, to_directory, to, 0);
}

int unlinkat(int directory, const char *name, int flags)
{
    if (stale_renames > 0) {
        stale_renames--;
        errno = ESTALE;
        return -1;
    }
    return (int)syscall(SYS_unlinkat, directory, name, flags);
}

/* Ends with an error after the third entry. */
struct dirent *readdir(DIR *dir)
{
    static struct dirent *(*real)(DIR *);
    static unsigned entries;

    if (!real)
        *(void **)&real = dlsym(RTLD_NEXT, "readdir64"); /* the same one */
    if (stale_reads > 0 && ++entries == 4) {
        entries = 0;
        stale_reads--;
        errno = ESTALE;
        return NULL;
    }
    return real(dir);
}

int fsync(int fd)
{
    struct stat st;

    directories_synced += fstat(fd, &st) == 0 && S_ISDIR(st.st_mode);
    return (int)syscall(SYS_fsync, fd);
}

static void files_lay(unsigned n)
{
    char name[12];

    for (unsigned i = 0; i < n; i++) {
        snprintf(name, sizeof(name), "%02x", i);
        cr_assert_eq(write_it(name, 100, false), 0);
    }
}

Test(directory, files_of_which_nothing_can_be_learnt_are_counted)
{
    struct directory_listing l = {.root = root, .bucket = BUCKET};

    files_lay(20);
    unreadable = 3;
    cr_assert_eq(directory_list(&l), 0);
    cr_assert_eq(l.n, 17);
    cr_assert_eq(l.unread, 3);
    free(l.files);
}

/* Another host removed the bucket, and made it again, while it was read: no file is there twice. */
Test(directory, a_list_that_went_stale_is_read_again)
{
    struct directory_listing l = {.root = root, .bucket = BUCKET};

    files_lay(20);
    stale_reads = 2;
    cr_assert_eq(directory_list(&l), 0);
    cr_assert_eq(l.n, 20);
    stale_reads = 3;
    cr_assert_eq(directory_list(&l), -ESTALE);
    free(l.files);
}

/* A temporary file that an attempt could not remove is not in the next one's way. No other file's
 * attempt uses its name. */
Test(directory, each_attempt_has_a_temporary_name_of_its_own)
{
    stale_renames = 2;
    cr_assert_eq(write_it("aa", 5000, false), 0);
    cr_assert_eq(stale_renames, 0);
    cr_assert_eq(access(path_of(".tmp-host-000000000000000a"), F_OK), 0);
    cr_assert_eq(access(path_of(".tmp-host-000000000000000q"), F_OK), 0);
    cr_assert_eq(read_it("aa", 5000), 0);
    stale_renames = 3;
    cr_assert_eq(write_it("bb", 5000, false), -EIO, "the first name is taken");
    stale_renames = 0;
}

/* A synced file is lost all the same if its name is not synced. */
Test(directory, a_synced_write_syncs_the_name)
{
    cr_assert_eq(write_it("aa", 5000, false), 0);
    cr_assert_eq(directories_synced, 0);
    cr_assert_eq(write_it("bb", 5000, true), 0);
    cr_assert_eq(directories_synced, 1);
}

/* ---- the page cache ---- */

/* A file system may refuse O_DIRECT itself. One that wants another alignment refuses the first
 * transfer with it. */
static enum { DIRECT_TAKEN, DIRECT_REFUSED, DIRECT_FAILS } direct;
static unsigned direct_transfers;

int fcntl(int fd, int command, ...)
{
    va_list args;
    long argument;

    va_start(args, command);
    argument = va_arg(args, long);
    va_end(args);
    if (command == F_SETFL && (argument & O_DIRECT) && direct == DIRECT_REFUSED) {
        errno = EINVAL;
        return -1;
    }
    return (int)syscall(SYS_fcntl, fd, command, argument);
}

static bool transfer_fails(int fd)
{
    if (!(syscall(SYS_fcntl, fd, F_GETFL, 0) & O_DIRECT))
        return false;
    direct_transfers++;
    errno = EINVAL;
    return direct == DIRECT_FAILS;
}

ssize_t pwrite(int fd, const void *data, size_t n, off_t at)
{
    return transfer_fails(fd) ? -1 : (ssize_t)syscall(SYS_pwrite64, fd, data, n, at);
}

ssize_t pread(int fd, void *data, size_t n, off_t at)
{
    return transfer_fails(fd) ? -1 : (ssize_t)syscall(SYS_pread64, fd, data, n, at);
}

static unsigned pages_cached(const char *path)
{
    static unsigned char in[4096];
    struct stat st;
    int fd = open(path, O_RDONLY);
    unsigned n = 0, pages;
    void *p;

    cr_assert_geq(fd, 0);
    cr_assert_eq(fstat(fd, &st), 0);
    pages = (unsigned)((st.st_size + 4095) / 4096);
    p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
    cr_assert_neq(p, MAP_FAILED);
    cr_assert_eq(mincore(p, (size_t)st.st_size, in), 0);
    for (unsigned i = 0; i < pages; i++)
        n += in[i] & 1;
    munmap(p, (size_t)st.st_size);
    close(fd);
    return n;
}

/* Sizes about those of pages; a last page may wait to be written. */
static void nothing_stays_cached(void)
{
    const uint64_t sizes[] = {1000, 4096 - 1, 4096, 65536 + 64, (1 << 20) - 64, (3 << 20) + 777};
    const char *disk = getenv("UCM_TEST_DISK");
    struct statfs fs;

    end();
    root_make(disk ? disk : "/var/tmp");
    cr_assert_eq(statfs(root, &fs), 0);
    if (fs.f_type == TMPFS_MAGIC)
        cr_skip_test("a tmpfs has its files nowhere else");
    for (unsigned i = 0; i < 2 * sizeof(sizes) / sizeof(sizes[0]); i++) {
        uint64_t bytes = sizes[i / 2];
        char name[12];

        snprintf(name, sizeof(name), "%02x", i);
        cr_assert_eq(write_it(name, bytes, i % 2), 0);
        cr_assert_leq(pages_cached(path_of(name)), 1, "%llu bytes were written",
                      (unsigned long long)bytes);
        cr_assert_eq(read_it(name, bytes), 0);
        cr_assert_leq(pages_cached(path_of(name)), 1, "%llu bytes were read",
                      (unsigned long long)bytes);
    }
}

Test(directory, the_page_cache_holds_nothing)
{
    nothing_stays_cached();
    cr_assert_gt(direct_transfers, 0);
}

Test(directory, the_page_cache_holds_nothing_without_o_direct)
{
    direct = DIRECT_REFUSED;
    nothing_stays_cached();
    cr_assert_eq(direct_transfers, 0);
}

Test(directory, the_page_cache_holds_nothing_where_direct_transfers_fail)
{
    direct = DIRECT_FAILS;
    nothing_stays_cached();
    cr_assert_gt(direct_transfers, 0);
}

/* ---- what lies there ---- */

/* Each call walks from the root: a mount or its end takes effect at once. */
Test(directory, mounted_late)
{
    struct directory_file f = file("cc", 1000);

    if (unshare(CLONE_NEWNS) < 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
        cr_skip_test("no mounts of its own");
    cr_assert_eq(write_it("aa", 1000, false), 0);
    cr_assert_eq(mount("none", root, "tmpfs", 0, "size=1m"), 0);
    cr_assert_eq(read_it("aa", 1000), -ENOENT);
    cr_assert_eq(write_it("bb", 1000, false), 0);
    cr_assert_eq(umount2(root, MNT_DETACH), 0);
    cr_assert_eq(directory_find(&f), -ENOENT);
    cr_assert_eq(read_it("bb", 1000), -ENOENT);
    cr_assert_eq(read_it("aa", 1000), 0, "the directory below");
}

Test(directory, a_device_is_no_file)
{
    const mode_t kinds[] = {S_IFCHR, S_IFBLK, S_IFSOCK, S_IFIFO};
    struct directory_file f = file("aa", 500);

    cr_assert_eq(write_it("bb", 500, false), 0);
    for (unsigned i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        if (mknod(path_of("aa"), kinds[i] | 0600, makedev(240, 0)) < 0)
            continue;
        cr_assert_eq(directory_find(&f), -EBADMSG);
        cr_assert_eq(directory_read(&f), -EBADMSG);
        cr_assert_eq(write_it("aa", 500, false), 0);
        cr_assert_eq(directory_remove(&f), 0);
    }
}
