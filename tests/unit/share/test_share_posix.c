/* A root in a folder: the contract of all backends, and what only folders and threads do. */
/* Sanitizers: thread */
#include "tests/unit/share/share_contract.h"

#include <linux/magic.h>
#include <linux/userfaultfd.h>
#include <sched.h>
#include <stdarg.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>

#define BYTES 8192u /* whole pages, of what holds a thread */

static void folder_begin(struct contract *c)
{
    contract_folder_begin(c, "/tmp");
    strcpy(c->target, c->folder);
    c->ops = &share_posix;
}

/* ---- files of which nothing can be learnt ---- */

static unsigned unreadable; /* those whose name is below this one */

int fstatat(int folder, const char *name, struct stat *st, int flags)
{
    unsigned number;

    if (unreadable > 0 && sscanf(name, "%2x", &number) == 1 && number < unreadable) {
        errno = EIO;
        return -1;
    }
    return (int)syscall(SYS_newfstatat, folder, name, st, flags);
}

static void root_with_unreadable_files(struct contract *c)
{
    enum { FILES = SHARE_LISTING_UNREAD + 4 };
    struct contract_op o = {.op = {.verb = SHARE_LIST, .bucket = 0x44}};
    char name[BLOCK_FILE_NAME_CAP], path[512];
    struct share_listing l;

    contract_bucket_make(c, 0x44);
    for (unsigned i = 0; i < FILES; i++) {
        contract_bucket(i, name);
        contract_path_in(c, 0x44, name, path);
        contract_put(path, "x", 1);
    }
    unreadable = 3;
    l = contract_list(c, 0x44);
    cr_assert_eq(l.n, FILES - 3);
    cr_assert_eq(l.unread, 3);
    share_listing_free(&l);
    unreadable = FILES;
    cr_assert_eq(contract_run(c, &o), -EIO, "so many are no listing");
    unreadable = 0;
}

SHARE_CONTRACT(share_posix, folder_begin, contract_folder_end)

/* ---- what is durable ---- */

static atomic_uint folders_synced;

int fsync(int fd)
{
    struct stat st;

    folders_synced += fstat(fd, &st) == 0 && S_ISDIR(st.st_mode);
    return (int)syscall(SYS_fsync, fd);
}

/* A file that is synced is lost all the same where its name is not. */
static void names_synced(struct contract *c)
{
    uint8_t *data = contract_data(5000, 1);
    struct contract_op o = {.op = contract_of(SHARE_WRITE, 1, data, 5000)};

    cr_assert_eq(contract_run(c, &o), 0);
    cr_assert_eq(folders_synced, 0);
    o.op = contract_of(SHARE_WRITE, 2, data, 5000);
    o.op.sync = true;
    cr_assert_eq(contract_run(c, &o), 0);
    cr_assert_eq(folders_synced, 1);
    free(data);
}

Test(share_posix, a_synced_write_syncs_the_name)
{
    contract_case(folder_begin, contract_folder_end, names_synced);
}

/* ---- the page cache ---- */

/* What a file system refuses: O_DIRECT itself, or the first transfer with it, as one that wants another alignment does. */
static enum { DIRECT_TAKEN, DIRECT_REFUSED, DIRECT_FAILS } direct;
static atomic_uint direct_transfers;

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
    cr_assert_leq(pages, sizeof(in));
    p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
    cr_assert_neq(p, MAP_FAILED);
    cr_assert_eq(mincore(p, (size_t)st.st_size, in), 0);
    for (unsigned i = 0; i < pages; i++)
        n += in[i] & 1;
    munmap(p, (size_t)st.st_size);
    close(fd);
    return n;
}

/* Sizes about those of pages and of what a thread moves at a time; a last page may wait to be written. */
static void nothing_stays_cached(struct contract *c)
{
    const uint64_t sizes[] = {1000,           4096 - 64, 4096,           65536,
                              (1 << 20) - 64, 1 << 20,   (3 << 20) + 777};
    char path[512];

    for (unsigned i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        for (unsigned sync = 0; sync < 2; sync++) {
            unsigned number = 2 * i + sync;
            uint8_t *data = contract_data(sizes[i], number);
            struct contract_op o = {.op = contract_of(SHARE_WRITE, number, data, sizes[i])};

            o.op.sync = sync;
            cr_assert_eq(contract_run(c, &o), 0);
            contract_path(c, number, path);
            cr_assert_leq(pages_cached(path), 1, "%llu bytes were written",
                          (unsigned long long)sizes[i]);
            cr_assert_eq(contract_read(c, number, sizes[i]), 0);
            cr_assert_leq(pages_cached(path), 1, "%llu bytes were read",
                          (unsigned long long)sizes[i]);
            free(data);
        }
    }
}

static void disk_begin(struct contract *c)
{
    const char *disk = getenv("UCM_TEST_DISK");
    struct statfs fs;

    contract_folder_begin(c, disk ? disk : "/var/tmp");
    strcpy(c->target, c->folder);
    c->ops = &share_posix;
    cr_assert_eq(statfs(c->folder, &fs), 0);
    if (fs.f_type == TMPFS_MAGIC) {
        contract_folder_end(c);
        cr_skip_test("a tmpfs has its files nowhere else");
    }
}

Test(share_posix, the_page_cache_holds_nothing)
{
    contract_case(disk_begin, contract_folder_end, nothing_stays_cached);
    cr_assert_gt(direct_transfers, 0);
}

Test(share_posix, the_page_cache_holds_nothing_without_o_direct)
{
    direct = DIRECT_REFUSED;
    contract_case(disk_begin, contract_folder_end, nothing_stays_cached);
    cr_assert_eq(direct_transfers, 0);
}

Test(share_posix, the_page_cache_holds_nothing_where_direct_transfers_fail)
{
    direct = DIRECT_FAILS;
    contract_case(disk_begin, contract_folder_end, nothing_stays_cached);
    cr_assert_gt(direct_transfers, 0);
}

Test(share_posix, unreadable_files)
{
    contract_case(folder_begin, contract_folder_end, root_with_unreadable_files);
}

Test(share_posix, a_target_is_an_absolute_path)
{
    uv_loop_t loop;
    struct share_backend_config config = {
        .loop = &loop, .target = "nfs://server/export", .host = "host", .depth = 4};
    struct share_backend *b = NULL;

    cr_assert_eq(uv_loop_init(&loop), 0);
    cr_assert_eq(share_posix.open(&config, &b), -EINVAL);
    config.target = "relative";
    cr_assert_eq(share_posix.open(&config, &b), -EINVAL);
    cr_assert_null(b);
    cr_assert_eq(uv_loop_close(&loop), 0);
}

/* ---- file systems of the test's own, where the kernel lets it ---- */

static void mount_begin(struct contract *c)
{
    folder_begin(c);
    if (unshare(CLONE_NEWNS) < 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0) {
        contract_folder_end(c);
        cr_skip_test("no mounts of its own");
    }
}

/* The daemon began before the mount: what it writes from then on goes to the mount. */
static void root_mounted_late(struct contract *c)
{
    cr_assert_eq(contract_write(c, 1, 1000), 0);
    cr_assert_eq(mount("none", c->folder, "tmpfs", 0, "size=1m"), 0);
    cr_assert_eq(contract_write(c, 1, 1000), 0, "it is not there");
    cr_assert_eq(contract_files(c->folder), 1);
    cr_assert_eq(contract_write(c, 2, 1000), 0);
    cr_assert_eq(contract_files(c->folder), 2);
    cr_assert_eq(umount2(c->folder, MNT_DETACH), 0);
    cr_assert_eq(contract_do(c, SHARE_FIND, 3, NULL, 1000), -ENOENT);
    cr_assert_eq(contract_read(c, 2, 1000), -ENOENT);
    cr_assert_eq(contract_read(c, 1, 1000), 0, "the folder below");
}

Test(share_posix, mounted_late)
{
    contract_case(mount_begin, contract_folder_end, root_mounted_late);
}

/* ---- devices ---- */

static void device_in_place(struct contract *c)
{
    const mode_t kinds[] = {S_IFCHR, S_IFBLK, S_IFSOCK};
    char name[BLOCK_FILE_NAME_CAP], path[512];

    contract_bucket_make(c, contract_bucket(1, name));
    contract_path(c, 1, path);
    for (unsigned i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        if (mknod(path, kinds[i] | 0600, makedev(240, 0)) < 0)
            continue;
        cr_assert_eq(contract_do(c, SHARE_FIND, 1, NULL, 500), -EBADMSG);
        cr_assert_eq(contract_read(c, 1, 500), -EBADMSG);
        cr_assert_eq(contract_write(c, 1, 500), 0);
        cr_assert_eq(contract_do(c, SHARE_REMOVE, 1, NULL, 0), 0);
    }
}

Test(share_posix, a_device_is_no_file)
{
    contract_case(folder_begin, contract_folder_end, device_in_place);
}

/* ---- threads ---- */

/* Memory whose first touch holds a thread until it is let go, as a mount that hangs does. */
struct stuck {
    int fd;
    uint8_t *memory; /* of BYTES */
};

/* flags: UFFD_USER_MODE_ONLY, which holds no thread that is reading, or 0, which needs privilege.
 */
static void stuck_open(struct stuck *s, int flags)
{
    struct uffdio_api api = {.api = UFFD_API};
    struct uffdio_register range = {.mode = UFFDIO_REGISTER_MODE_MISSING};

    s->fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | flags);
    cr_assert_geq(s->fd, 0);
    s->memory = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    cr_assert_neq(s->memory, MAP_FAILED);
    cr_assert_eq(ioctl(s->fd, UFFDIO_API, &api), 0);
    range.range.start = (uintptr_t)s->memory;
    range.range.len = BYTES;
    cr_assert_eq(ioctl(s->fd, UFFDIO_REGISTER, &range), 0);
}

/* Before anything is there to be left behind. */
static void stuck_or_skip(int flags)
{
    int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | flags);

    if (fd < 0)
        cr_skip_test("no userfaultfd");
    close(fd);
}

static void stuck_let_go(struct stuck *s, const uint8_t *data)
{
    struct uffdio_copy copy = {.dst = (uintptr_t)s->memory, .src = (uintptr_t)data, .len = BYTES};

    cr_assert_eq(ioctl(s->fd, UFFDIO_COPY, &copy), 0);
}

static void stuck_close(struct stuck *s)
{
    munmap(s->memory, BYTES);
    close(s->fd);
}

/* Until a thread has it. */
static void start_for_good(struct contract *c, struct contract_op *o)
{
    unsigned tries = 0;

    do {
        cr_assert_lt(tries++, 5000);
        contract_start(c, o);
        uv_sleep(1);
    } while (c->ops->cancel(c->b, &o->op));
}

static void wide_begin(struct contract *c)
{
    stuck_or_skip(UFFD_USER_MODE_ONLY);
    folder_begin(c);
}

/* All operations that a root may have under way hang: its health check is still answered, and what
 * waits behind that can be taken back. */
static void threads_stuck(struct contract *c)
{
    enum { WRITERS = 8 };
    static uint8_t data[BYTES];
    struct contract_op ops[WRITERS + 2] = {0};
    struct stuck s;
    uint64_t now;

    stuck_open(&s, UFFD_USER_MODE_ONLY);
    cr_assert_eq(c->depth, WRITERS);
    for (unsigned i = 0; i < WRITERS + 2; i++)
        ops[i].op = contract_of(SHARE_WRITE, 100 + i, s.memory, BYTES);
    for (unsigned i = 0; i < WRITERS; i++)
        start_for_good(c, &ops[i]);
    for (unsigned i = 0; i < 20; i++)
        cr_assert_eq(contract_check(c, false, &now), 0);
    cr_assert_eq(c->done, 20);
    start_for_good(c, &ops[WRITERS]);
    contract_start(c, &ops[WRITERS + 1]);
    cr_assert(c->ops->cancel(c->b, &ops[WRITERS + 1].op));

    bytes_put(data, sizeof(data), 100);
    stuck_let_go(&s, data);
    contract_wait(c, 20 + WRITERS + 1);
    for (unsigned i = 0; i <= WRITERS; i++)
        cr_assert_eq(ops[i].status, 0);
    cr_assert_eq(ops[WRITERS + 1].status, PENDING);
    cr_assert_eq(contract_read(c, 100, sizeof(data)), 0);
    stuck_close(&s);
}

Test(share_posix, threads_that_hang_hold_only_themselves)
{
    contract_case(wide_begin, contract_folder_end, threads_stuck);
}
