/* Limits, io_uring, NUMA, huge pages, memory. */
#include "client/ctl/doctor.h"

#include <errno.h>
#include <inttypes.h>
#include <linux/io_uring.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#define GIB (UINT64_C(1) << 30)
#define DESCRIPTORS 8192 /* connections, regions, files: what a busy host has */
#define UNLIMITED UINT64_MAX

/* ---- limits ---- */

/* A hard limit in /proc/PID/limits, by its title there. false: not known. */
static bool limit_read(pid_t pid, const char *title, uint64_t *out)
{
    char path[64], line[256];
    bool found = false;
    FILE *f;

    if (pid > 0)
        snprintf(path, sizeof path, "/proc/%d/limits", (int)pid);
    else
        snprintf(path, sizeof path, "/proc/self/limits");
    f = fopen(path, "r");
    while (f != NULL && !found && fgets(line, sizeof line, f) != NULL) {
        char soft[32], hard[32];

        if (strncmp(line, title, strlen(title)) != 0 ||
            sscanf(line + strlen(title), "%31s %31s", soft, hard) != 2)
            continue;
        *out = strcmp(hard, "unlimited") == 0 ? UNLIMITED : strtoull(hard, NULL, 10);
        found = true;
    }
    if (f != NULL)
        fclose(f);
    return found;
}

static void check_memlock(struct doctor *d)
{
    const char *whose = d->pid > 0 ? "the daemon's" : "this shell's";
    char a[HUMAN_BYTES];
    uint64_t limit;

    if (!limit_read(d->pid, "Max locked memory", &limit))
        doctor_add(d, DOCTOR_SKIP, "memlock", NULL, "the limit can't be read");
    else if (limit == UNLIMITED || (d->arena > 0 && limit >= d->arena))
        doctor_add(d, DOCTOR_OK, "memlock", NULL, "%s limit is %s", whose,
                   limit == UNLIMITED ? "unlimited" : human_bytes(a, limit));
    else
        doctor_add(d, d->pid > 0 ? DOCTOR_WARN : DOCTOR_SKIP, "memlock",
                   "LimitMEMLOCK=infinity in the unit, --ulimit memlock=-1 for a container, or "
                   "ulimit -l unlimited",
                   "%s limit is %s: a daemon under it can't pin its memory for the disks and the "
                   "GPUs",
                   whose, human_bytes(a, limit));
}

static void check_descriptors(struct doctor *d)
{
    uint64_t limit;

    if (!limit_read(d->pid, "Max open files", &limit))
        doctor_add(d, DOCTOR_SKIP, "descriptors", NULL, "the limit can't be read");
    else if (limit < DESCRIPTORS)
        doctor_add(d, DOCTOR_WARN, "descriptors", "LimitNOFILE=65536 in the unit",
                   "%" PRIu64 " files may be open: with many workers connections are refused",
                   limit);
    else
        doctor_add(d, DOCTOR_OK, "descriptors", NULL, "%" PRIu64 " files may be open", limit);
}

/* ---- io_uring ---- */

/* A ring as the tier sets it up. Returns its descriptor or -errno. */
static int ring_open(struct io_uring_params *p, uint32_t flags)
{
    long fd;

    memset(p, 0, sizeof *p);
    p->flags = flags;
    fd = syscall(SYS_io_uring_setup, 8, p);
    return fd < 0 ? -errno : (int)fd;
}

#define OPERATIONS 64 /* that the probe asks for */

/* Whether all operations of the tier are there. */
static bool ring_operations(int fd)
{
    static const uint8_t needed[] = {IORING_OP_READ_FIXED, IORING_OP_WRITE_FIXED, IORING_OP_FSYNC,
                                     IORING_OP_READ, IORING_OP_WRITE};
    struct io_uring_probe *probe =
        calloc(1, sizeof *probe + OPERATIONS * sizeof(struct io_uring_probe_op));
    bool all = probe != NULL &&
               syscall(SYS_io_uring_register, fd, IORING_REGISTER_PROBE, probe, OPERATIONS) >= 0;

    for (size_t i = 0; all && i < sizeof needed; i++)
        all = needed[i] <= probe->last_op &&
              (probe->ops[needed[i]].flags & IO_URING_OP_SUPPORTED) != 0;
    free(probe);
    return all;
}

static void refused(struct doctor *d, int rc)
{
    if (rc == -ENOSYS)
        doctor_add(d, DOCTOR_WARN, "io_uring", "a kernel of 5.6 or later, with CONFIG_IO_URING",
                   "this kernel has none: the daemon uses threads, which cost processor time");
    else
        doctor_add(d, DOCTOR_WARN, "io_uring",
                   "sysctl kernel.io_uring_disabled=0; in a container a seccomp profile that "
                   "allows it; else raise nvme.threads",
                   "refused here (%s): the daemon uses threads, which cost processor time",
                   strerror(-rc));
}

static void check_uring(struct doctor *d)
{
    const msgpack_object *tier = answer_at(d->stats, "tiers", 0);
    struct io_uring_params params;
    struct utsname host;
    int fd = ring_open(&params, 0), modern;
    char engine[64];
    bool all;

    if (fd < 0) {
        refused(d, fd);
        return;
    }
    all = ring_operations(fd);
    close(fd);
    modern = ring_open(&params, IORING_SETUP_COOP_TASKRUN);
    if (modern >= 0)
        close(modern);
    uname(&host);
    answer_text(tier, "engine", engine, sizeof engine);
    if (tier != NULL && strstr(engine, "thread") != NULL)
        doctor_add(d, DOCTOR_WARN, "io_uring", "see io-uring-refused in the daemon's log",
                   "allowed here, but the daemon uses threads");
    else if (!all)
        doctor_add(d, DOCTOR_WARN, "io_uring", "a kernel of 5.6 or later",
                   "Linux %s lacks operations that the tier uses", host.release);
    else
        doctor_add(d, DOCTOR_OK, "io_uring", NULL,
                   "allowed: fixed reads and writes, features 0x%x%s", params.features,
                   modern >= 0 ? ", completions without interrupts" : "");
}

/* ---- NUMA and pages ---- */

/* "0-1,4" has 3. */
static unsigned nodes_count(const char *list)
{
    unsigned n = 0;

    while (*list != '\0') {
        char *end;
        unsigned long from = strtoul(list, &end, 10), to = from;

        if (end == list)
            break;
        if (*end == '-')
            to = strtoul(end + 1, &end, 10);
        n += to >= from && to - from < 4096 ? (unsigned)(to - from) + 1 : 0;
        list = *end == ',' ? end + 1 : end;
        if (*end != ',')
            break;
    }
    return n;
}

static void check_numa(struct doctor *d)
{
    unsigned n, spread = answer_count(d->stats, "nodes");
    char line[128];

    if (!doctor_line("/sys/devices/system/node/online", line, sizeof line)) {
        doctor_add(d, DOCTOR_OK, "numa", NULL, "the kernel shows no nodes: one");
        return;
    }
    n = nodes_count(line);
    if (n > 1 && d->stats != NULL && spread == 0)
        doctor_add(
            d, DOCTOR_WARN, "numa",
            "arena.numa: auto, and no numactl or NUMAPolicy= around the daemon; see numa-off "
            "in its log",
            "%u nodes, and the daemon leaves them to the kernel: copies may cross them", n);
    else if (spread > 0)
        doctor_add(d, DOCTOR_OK, "numa", NULL, "%u nodes; the arena is spread over %u", n, spread);
    else
        doctor_add(d, DOCTOR_OK, "numa", NULL, "%u node%s", n, n == 1 ? "" : "s");
}

static void check_pages(struct doctor *d)
{
    char line[128];

    if (!doctor_line("/sys/kernel/mm/transparent_hugepage/enabled", line, sizeof line))
        doctor_add(
            d, DOCTOR_WARN, "huge pages", "a kernel with CONFIG_TRANSPARENT_HUGEPAGE",
            "the kernel has no transparent ones: copies and lookups miss the TLB more often");
    else if (strstr(line, "[never]") != NULL)
        doctor_add(d, DOCTOR_WARN, "huge pages",
                   "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
                   "transparent ones are off: copies and lookups miss the TLB more often");
    else
        doctor_add(d, DOCTOR_OK, "huge pages", NULL, "transparent: %s", line);
}

void doctor_host(struct doctor *d)
{
    check_memlock(d);
    check_descriptors(d);
    check_uring(d);
    check_numa(d);
    check_pages(d);
}

/* ---- memory ---- */

static uint64_t meminfo(const char *title)
{
    FILE *f = fopen("/proc/meminfo", "r");
    char line[128];
    uint64_t kib = 0;

    while (f != NULL && fgets(line, sizeof line, f) != NULL)
        if (strncmp(line, title, strlen(title)) == 0)
            kib = strtoull(line + strlen(title), NULL, 10);
    if (f != NULL)
        fclose(f);
    return kib << 10;
}

/* The smallest bound from the cgroup at path upwards, in both hierarchies' files. */
static uint64_t bound_above(const char *root, char *path, const char *file)
{
    uint64_t bound = UNLIMITED;

    for (;;) {
        char name[4096], line[64], *slash;

        snprintf(name, sizeof name, "%s%s/%s", root, path, file);
        if (doctor_line(name, line, sizeof line) && line[0] >= '0' && line[0] <= '9') {
            uint64_t v = strtoull(line, NULL, 10);

            bound = v < bound ? v : bound;
        }
        slash = strrchr(path, '/');
        if (slash == NULL)
            return bound;
        *slash = '\0';
    }
}

static uint64_t cgroup_bound(pid_t pid)
{
    char path[64], line[2048];
    uint64_t bound = UNLIMITED;
    FILE *f;

    snprintf(path, sizeof path, pid > 0 ? "/proc/%d/cgroup" : "/proc/self/cgroup", (int)pid);
    f = fopen(path, "r");
    while (f != NULL && fgets(line, sizeof line, f) != NULL) {
        char *name = strrchr(line, ':');
        uint64_t v = UNLIMITED;

        line[strcspn(line, "\n")] = '\0';
        if (name == NULL)
            continue;
        if (strncmp(line, "0::", 3) == 0)
            v = bound_above("/sys/fs/cgroup", name + 1, "memory.max");
        else if (strstr(line, ":memory:") != NULL)
            v = bound_above("/sys/fs/cgroup/memory", name + 1, "memory.limit_in_bytes");
        bound = v < bound ? v : bound;
    }
    if (f != NULL)
        fclose(f);
    return bound;
}

void doctor_memory(struct doctor *d)
{
    uint64_t total = meminfo("MemTotal:"), available = meminfo("MemAvailable:");
    uint64_t bound = cgroup_bound(d->pid), room = bound < total ? bound : total;
    char a[HUMAN_BYTES], b[HUMAN_BYTES], c[HUMAN_BYTES];

    if (d->arena > room)
        doctor_add(d, DOCTOR_FAIL, "memory", "a smaller arena.size, or a larger MemoryMax=",
                   "arena.size of %s is more than %s that %s: the kernel will kill the daemon",
                   human_bytes(a, d->arena), human_bytes(b, room),
                   bound < total ? "its cgroup allows" : "there are");
    else if (d->arena > 0 && room - d->arena < GIB)
        doctor_add(d, DOCTOR_WARN, "memory", "a smaller arena.size, or a larger MemoryMax=",
                   "arena.size of %s leaves less than 1 GiB of %s for index, requests and drivers",
                   human_bytes(a, d->arena), human_bytes(b, room));
    else
        doctor_add(d, DOCTOR_OK, "memory", NULL, "%s free of %s; %s%s", human_bytes(a, available),
                   human_bytes(b, total),
                   bound < total ? "the cgroup allows " : "no bound of a cgroup",
                   bound < total ? human_bytes(c, bound) : "");
}
