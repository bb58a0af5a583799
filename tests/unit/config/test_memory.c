/* How much memory a daemon may take, from files as kernels of both cgroup versions show them. */
#include "daemon/config/memory.h"
#include "tests/runner/wipe.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define MIB (1ull << 20)

static char root[] = "/tmp/ucmd-test-memory-XXXXXX";

static void file_of(const char *path, const char *bytes, size_t n)
{
    char whole[256];
    FILE *f;

    snprintf(whole, sizeof(whole), "%s%s", root, path);
    for (char *p = strchr(whole + sizeof(root), '/'); p; p = strchr(p + 1, '/')) {
        *p = '\0';
        mkdir(whole, 0700);
        *p = '/';
    }
    f = fopen(whole, "w");
    cr_assert_not_null(f, "%s", whole);
    cr_assert_eq(fwrite(bytes, 1, n, f), n);
    cr_assert_eq(fclose(f), 0);
}

static void file(const char *path, const char *text)
{
    file_of(path, text, strlen(text));
}

static void setup(void)
{
    cr_assert_not_null(mkdtemp(root));
    file("/proc/meminfo",
         "MemTotal:       8388608 kB\nMemFree:  1 kB\nMemAvailable:    4194304 kB\n");
}

static void teardown(void)
{
    wipe(root);
}

TestSuite(memory, .init = setup, .fini = teardown, .timeout = 10);

static struct memory_room room(void)
{
    struct memory_room r;

    cr_assert_eq(memory_room(root, UINT64_MAX, &r), 0);
    return r;
}

Test(memory, without_limits)
{
    cr_assert_eq(room().host_bytes, 4096 * MIB);
    cr_assert_eq(room().cgroup_bytes, UINT64_MAX);
    file("/proc/self/cgroup", "0::/system.slice/ucmd.service\n");
    file("/sys/fs/cgroup/system.slice/ucmd.service/memory.max", "max\n");
    cr_assert_eq(room().cgroup_bytes, UINT64_MAX);
}

Test(memory, the_tightest_of_a_cgroup_and_those_above_it)
{
    file("/proc/self/cgroup", "0::/a/b\n");
    file("/sys/fs/cgroup/a/b/memory.max", "1073741824\n");
    file("/sys/fs/cgroup/a/b/memory.current", "104857600\n");
    file("/sys/fs/cgroup/a/b/memory.stat",
         "anon 1\ninactive_file 20971520\nactive_file 31457280\n");
    cr_assert_eq(room().cgroup_bytes, 974 * MIB, "page cache gives way");
    file("/sys/fs/cgroup/a/memory.max", "536870912\n");
    cr_assert_eq(room().cgroup_bytes, 512 * MIB);
    file("/sys/fs/cgroup/memory.max", "1048576\n");
    file("/sys/fs/cgroup/memory.current", "2097152\n");
    cr_assert_eq(room().cgroup_bytes, 0, "a container sees its own limit at the top");
}

Test(memory, version_1)
{
    file("/proc/self/cgroup", "9:name=systemd:/x\n4:memory:/jobs\n1:cpu:/y\n0::/\n");
    file("/sys/fs/cgroup/memory/jobs/memory.limit_in_bytes", "536870912\n");
    file("/sys/fs/cgroup/memory/jobs/memory.usage_in_bytes", "104857600\n");
    file("/sys/fs/cgroup/memory/jobs/memory.stat",
         "inactive_file 1\ntotal_inactive_file 104857600\n");
    file("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    cr_assert_eq(room().cgroup_bytes, 512 * MIB);
}

Test(memory, a_running_daemon_gives_its_memory_back)
{
    file("/proc/17/comm", "ucmd\n");
    file("/proc/17/status", "Name:\tucmd\nRssAnon:\t  1048576 kB\nRssFile:\t 5 kB\n");
    file("/proc/18/comm", "engine\n");
    file("/proc/18/status", "RssAnon:\t  1048576 kB\n");
    cr_assert_eq(room().host_bytes, 5120 * MIB);
}

Test(memory, where_enough_is_available_no_process_is_looked_at)
{
    struct memory_room r;

    file("/proc/17/comm", "ucmd\n");
    file("/proc/17/status", "RssAnon:\t  1048576 kB\n");
    cr_assert_eq(memory_room(root, 4096 * MIB, &r), 0);
    cr_assert_eq(r.host_bytes, 4096 * MIB);
    cr_assert_eq(memory_room(root, 4096 * MIB + 1, &r), 0);
    cr_assert_eq(r.host_bytes, 5120 * MIB);
}

static void daemon_run(const char *pid, const char *words, size_t n)
{
    char path[64];

    snprintf(path, sizeof(path), "/proc/%s/comm", pid);
    file(path, "ucmd\n");
    snprintf(path, sizeof(path), "/proc/%s/status", pid);
    file(path, "RssAnon:\t  1048576 kB\n");
    snprintf(path, sizeof(path), "/proc/%s/cmdline", pid);
    file_of(path, words, n);
}

#define RUN(pid, words) daemon_run(pid, words, sizeof(words))

Test(memory, another_daemons_memory_is_not_this_ones)
{
    RUN("self", "ucmd\0--check\0--config\0/etc/ucmd/ucmd.yaml");
    RUN("17", "/usr/bin/ucmd\0--config\0/etc/ucmd/second.yaml");
    RUN("18", "/usr/bin/ucmd\0--config=/etc/ucmd/ucmd.yaml\0--set\0socket=/run/other");
    RUN("19", "/usr/bin/ucmd");
    cr_assert_eq(room().host_bytes, 4096 * MIB);
    RUN("20", "/usr/bin/ucmd\0--config=/etc/ucmd/ucmd.yaml\0--set\0arena.size=1GiB");
    cr_assert_eq(room().host_bytes, 5120 * MIB);
    RUN("20", "/usr/bin/ucmd\0--config");
    cr_assert_eq(room().host_bytes, 4096 * MIB);
}

Test(memory, a_kernel_that_does_not_say)
{
    struct memory_room r;

    file("/proc/meminfo", "MemTotal: 1 kB\n");
    cr_assert_eq(memory_room(root, UINT64_MAX, &r), -ENODATA);
}

Test(memory, huge_pages_that_are_free_and_not_promised)
{
    cr_assert_eq(memory_huge_room(root, 2 * MIB), 0);
    file("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "100\n");
    file("/sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages", "40\n");
    cr_assert_eq(memory_huge_room(root, 2 * MIB), 120 * MIB);
}
