/* Bandwidth of DRAM and of directories, space in directories. */
#include "client/ctl/doctor.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define SECONDS 0.5 /* of reading, and as long of writing */
#define DISK_THREADS 8
#define DISK_CHUNK (1u << 20)
#define DISK_FILE (512u << 20)
#define DISK_FREE_MIN (128u << 20)
#define DIRECTORIES 16
#define DRAM_BYTES (256u << 20)

/* Below this a tier gives less than many a GPU computes again. */
#define SLOW_DISK 200e6
#define SLOW_DRAM 3e9

/* ---- DRAM ---- */

static void measure_dram(struct doctor *d)
{
    char *from = malloc(DRAM_BYTES), *to = malloc(DRAM_BYTES);
    double start, seconds = 0;
    uint64_t bytes = 0;

    if (from == NULL || to == NULL) {
        doctor_add(d, DOCTOR_SKIP, "dram speed", NULL, "memory ran out");
    } else {
        memset(from, 1, DRAM_BYTES);
        memset(to, 2, DRAM_BYTES);
        for (start = doctor_now(); seconds < SECONDS; seconds = doctor_now() - start) {
            memcpy(to, from, DRAM_BYTES);
            __asm__ volatile("" ::"r"(to) : "memory"); /* so that it is done */
            bytes += DRAM_BYTES;
        }
        doctor_add(d, (double)bytes / seconds < SLOW_DRAM ? DOCTOR_WARN : DOCTOR_OK, "dram speed",
                   (double)bytes / seconds < SLOW_DRAM ? "is the host busy, or its memory remote?"
                                                       : NULL,
                   "one thread copies %.1f GB/s", (double)bytes / seconds / 1e9);
    }
    free(from);
    free(to);
}

/* ---- a directory ---- */

struct disk {
    int fd;
    bool write;
    uint64_t chunks;
    double end;
    atomic_uint_fast64_t next, done;
    atomic_int error;
};

static void *disk_thread(void *arg)
{
    struct disk *k = arg;
    void *buffer = NULL;

    if (posix_memalign(&buffer, 4096, DISK_CHUNK) != 0) {
        atomic_store(&k->error, ENOMEM);
        return NULL;
    }
    memset(buffer, 0x5a, DISK_CHUNK);
    while (doctor_now() < k->end && atomic_load(&k->error) == 0) {
        off_t at = (off_t)(atomic_fetch_add(&k->next, 1) % k->chunks * DISK_CHUNK);
        ssize_t n =
            k->write ? pwrite(k->fd, buffer, DISK_CHUNK, at) : pread(k->fd, buffer, DISK_CHUNK, at);

        if (n < 0)
            atomic_store(&k->error, errno);
        else if (n == 0)
            break; /* nothing was written there */
        else
            atomic_fetch_add(&k->done, (uint64_t)n);
    }
    free(buffer);
    return NULL;
}

/* Bytes a second; negative: -errno. */
static double disk_run(struct disk *k, bool write)
{
    pthread_t thread[DISK_THREADS];
    double start = doctor_now();
    unsigned n = 0;

    k->write = write;
    k->end = start + SECONDS;
    atomic_store(&k->next, 0);
    atomic_store(&k->done, 0);
    while (n < DISK_THREADS && pthread_create(&thread[n], NULL, disk_thread, k) == 0)
        n++;
    while (n > 0)
        pthread_join(thread[--n], NULL);
    if (write && atomic_load(&k->error) == 0 && fdatasync(k->fd) != 0)
        atomic_store(&k->error, errno);
    if (atomic_load(&k->error) != 0)
        return -atomic_load(&k->error);
    return (double)atomic_load(&k->done) / (doctor_now() - start);
}

/* A file without a name, so that it goes with its descriptor whatever happens. direct: past the
 * page cache, where the file system can. A descriptor or -errno. */
static int file_without_name(const char *directory, bool *direct)
{
    static const int flags[] = {O_TMPFILE | O_DIRECT, O_TMPFILE};
    char name[4096];
    int fd = -1;

    for (int i = 0; fd < 0 && i < 2; i++) {
        fd = open(directory, flags[i] | O_RDWR | O_CLOEXEC, 0600);
        *direct = i == 0;
    }
    if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL))
        return fd >= 0 ? fd : -errno;
    /* An older file system: the name is there for a moment. */
    *direct = false;
    snprintf(name, sizeof name, "%s/.ucmctl-doctor-XXXXXX", directory);
    fd = mkostemp(name, O_CLOEXEC);
    if (fd < 0)
        return -errno;
    unlink(name);
    return fd;
}

static void measure_directory(struct doctor *d, const char *directory, uint64_t free_bytes)
{
    uint64_t size = free_bytes / 10 < DISK_FILE ? free_bytes / 10 : DISK_FILE;
    double written, read = 0;
    struct disk k = {.chunks = size / DISK_CHUNK};
    bool direct, slow;

    k.fd = file_without_name(directory, &direct);
    if (k.fd < 0) {
        doctor_add(d, DOCTOR_SKIP, "disk speed", "run it as root, or as the daemon's user",
                   "%s: a file can't be made: %s", directory, strerror(-k.fd));
        return;
    }
    written = disk_run(&k, true);
    if (written >= 0)
        read = disk_run(&k, false);
    close(k.fd);
    if (written < 0 || read < 0) {
        doctor_add(d, DOCTOR_FAIL, "disk speed", "look at the disk: dmesg, smartctl -a", "%s: %s",
                   directory, strerror((int)-(written < 0 ? written : read)));
        return;
    }
    slow = read < SLOW_DISK || written < SLOW_DISK;
    doctor_add(d, slow ? DOCTOR_WARN : DOCTOR_OK, "disk speed",
               slow ? "a faster disk: a load from this one may take longer than to compute" : NULL,
               "%s: %.2f GB/s read, %.2f GB/s written%s", directory, read / 1e9, written / 1e9,
               direct ? "" : ", through the page cache");
}

static void check_directory(struct doctor *d, const char *directory)
{
    char a[HUMAN_BYTES], b[HUMAN_BYTES];
    uint64_t free_bytes, total;
    struct statvfs fs;

    if (statvfs(directory, &fs) != 0) {
        doctor_add(d, DOCTOR_FAIL, "space", "mount the disk, or correct the path", "%s: %s",
                   directory, strerror(errno));
        return;
    }
    free_bytes = (uint64_t)fs.f_bavail * fs.f_frsize;
    total = (uint64_t)fs.f_blocks * fs.f_frsize;
    if (free_bytes < DISK_FREE_MIN) {
        doctor_add(d, DOCTOR_WARN, "space",
                   "nothing, if the cache file has taken it; else make space",
                   "%s: %s free of %s; too little to measure", directory,
                   human_bytes(a, free_bytes), human_bytes(b, total));
        return;
    }
    doctor_add(d, DOCTOR_OK, "space", NULL, "%s: %s free of %s", directory,
               human_bytes(a, free_bytes), human_bytes(b, total));
    if (d->measure)
        measure_directory(d, directory, free_bytes);
}

/* ---- which directories ---- */

/* The directories in which the daemon has ucmd.cache open, as /proc shows them. Entries that are
 * devices or files have no directory to measure in: *others counts them. */
static unsigned cache_directories(pid_t pid, char directory[DIRECTORIES][4096])
{
    static const char name[] = "/ucmd.cache";
    char fds[64], path[4096];
    unsigned n = 0;
    struct dirent *e;
    DIR *dir;

    snprintf(fds, sizeof fds, "/proc/%d/fd", (int)pid);
    dir = opendir(fds);
    while (dir != NULL && n < DIRECTORIES && (e = readdir(dir)) != NULL) {
        ssize_t bytes = readlinkat(dirfd(dir), e->d_name, path, sizeof path - 1);
        size_t tail = sizeof name - 1;
        bool known = false;

        if (bytes <= (ssize_t)tail || memcmp(path + bytes - tail, name, tail) != 0)
            continue;
        path[bytes - (ssize_t)tail] = '\0';
        for (unsigned i = 0; i < n; i++)
            known = known || strcmp(directory[i], path) == 0;
        if (!known)
            snprintf(directory[n++], sizeof directory[0], "%s", path);
    }
    if (dir != NULL)
        closedir(dir);
    return n;
}

static void check_roots(struct doctor *d)
{
    for (uint32_t i = 0; i < answer_count(d->stats, "shared_roots"); i++) {
        const msgpack_object *o = answer_at(d->stats, "shared_roots", i);
        char name[512], health[32], reason[160];

        answer_text(o, "name", name, sizeof name);
        answer_text(o, "health", health, sizeof health);
        if (strcmp(health, "up") != 0)
            doctor_add(d, DOCTOR_WARN, "shared root", "see 'ucmctl shared'", "%s: %s: %s", name,
                       health, answer_text(o, "reason", reason, sizeof reason));
        else
            doctor_add(d, DOCTOR_OK, "shared root", NULL, "%s: up, %.1f ms", name,
                       (double)answer_u64(o, "latency_us") / 1000);
        if (name[0] == '/' && strcmp(health, "up") == 0)
            check_directory(d, name);
    }
}

void doctor_disks(struct doctor *d)
{
    static char directory[DIRECTORIES][4096];
    const char *named = args_text(d->a, "dir");
    unsigned n = named == NULL && d->pid > 0 ? cache_directories(d->pid, directory) : 0;

    if (d->measure)
        measure_dram(d);
    if (named != NULL)
        check_directory(d, named);
    else if (n == 0)
        doctor_add(d, DOCTOR_SKIP, "disk speed", "name a directory on it with --dir",
                   "no directory of the NVMe tier is known%s",
                   answer_count(d->stats, "tiers") > 0
                       ? ": it may be a device, or this user may not look at the daemon"
                       : "");
    for (unsigned i = 0; i < n; i++)
        check_directory(d, directory[i]);
    check_roots(d);
}
