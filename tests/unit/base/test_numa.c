/* NUMA topology as sysfs tells it, on hosts that are not this one. */
#include "daemon/base/numa.h"
#include "tests/unit/fake_numa.h"

#include <sched.h>
#include <sys/mman.h>

#define NODES "devices/system/node/"
#define PCI "bus/pci/devices/"

TestSuite(numa, .init = fake_sys_make, .fini = fake_sys_remove);

static uint32_t nodes_of(const char *memory, const char *cpu, struct numa *n)
{
    fake_sys_write(NODES "has_memory", memory);
    fake_sys_write(NODES "has_cpu", cpu);
    numa_read(fake_sys, n);
    cr_expect_str_eq(n->sys, fake_sys);
    return n->n;
}

Test(numa, nodes_have_memory_and_processors)
{
    struct numa n;

    cr_assert_eq(nodes_of("0-1,3\n", "0-3\n", &n), 3u);
    cr_expect(n.node[0] == 0 && n.node[1] == 1 && n.node[2] == 3);
    cr_assert_eq(nodes_of("0,8,252-255\n", "0,8\n", &n), 2u, "252 to 255 are GPUs' memory");
    cr_expect(n.node[0] == 0 && n.node[1] == 8);
    cr_assert_eq(nodes_of("0", "0", &n), 1u);
    cr_assert_eq(nodes_of("0-1\n", "\n", &n), 0u);
    cr_assert_eq(nodes_of("1022-2000\n", "1023-99999999999999999999\n", &n), 1u);
    cr_expect_eq(n.node[0], 1023);
    cr_assert_eq(nodes_of("0-1023\n", "0-1023\n", &n), (uint32_t)NUMA_NODES_MAX);
}

Test(numa, what_is_no_list_is_no_node)
{
    static const char *const bad[] = {"a\n", "0-\n", "-1\n", "0 1\n", "0,x\n", "0--1\n"};
    struct numa n;

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        cr_expect_eq(nodes_of(bad[i], "0-1\n", &n), 0u, "%s", bad[i]);
        cr_expect_eq(nodes_of("0-1\n", bad[i], &n), 0u, "%s", bad[i]);
    }
    cr_expect_eq(nodes_of("3-1\n", "0-3\n", &n), 0u, "an empty range");
}

Test(numa, without_sysfs_there_is_no_node)
{
    struct numa n;

    numa_read(fake_sys, &n);
    cr_expect_eq(n.n, 0u);
    cr_expect_eq(numa_of_pci(&n, "0000:3b:00.0"), NUMA_NONE);
    cr_expect_eq(numa_stay(&n, 0), -ENOENT);
}

Test(numa, a_pci_device_has_a_node_or_none)
{
    struct numa n;

    numa_read(fake_sys, &n);
    fake_sys_write(PCI "0000:3b:00.0/numa_node", "1\n");
    fake_sys_write(PCI "10000:3b:00.0/numa_node", "-1\n");
    fake_sys_write(PCI "0000:3c:00.0/numa_node", "\n");
    fake_sys_write(PCI "0000:3d:00.0/numa_node", "4000000000\n");
    cr_expect_eq(numa_of_pci(&n, "0000:3b:00.0"), 1);
    cr_expect_eq(numa_of_pci(&n, "10000:3b:00.0"), NUMA_NONE);
    cr_expect_eq(numa_of_pci(&n, "0000:3c:00.0"), NUMA_NONE);
    cr_expect_eq(numa_of_pci(&n, "0000:3d:00.0"), NUMA_NONE);
    cr_expect_eq(numa_of_pci(&n, ""), NUMA_NONE);
}

Test(numa, a_thread_keeps_to_those_processors_that_it_may_use)
{
    cpu_set_t before, after;
    char list[32];
    int first = 0;
    struct numa n;

    numa_read(fake_sys, &n);
    cr_assert_eq(sched_getaffinity(0, sizeof(before), &before), 0);
    while (!CPU_ISSET(first, &before))
        first++;
    fake_sys_write(NODES "node2/cpulist", "1000-1010\n"); /* of more processors than hosts have */
    cr_expect_eq(numa_stay(&n, 2), -ENOENT);
    cr_assert_eq(sched_getaffinity(0, sizeof(after), &after), 0);
    cr_expect(CPU_EQUAL(&before, &after), "as it was");
    snprintf(list, sizeof(list), "%d,1010\n", first);
    fake_sys_write(NODES "node3/cpulist", list);
    cr_assert_eq(numa_stay(&n, 3), 0);
    cr_assert_eq(sched_getaffinity(0, sizeof(after), &after), 0);
    cr_expect(CPU_COUNT(&after) == 1 && CPU_ISSET(first, &after));
}

/* This host's kernel does as asked, or refuses, as in a container. */
Test(numa, the_kernel_answers)
{
    struct numa n;
    char *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uint32_t all;
    int rc;

    cr_assert_neq(page, MAP_FAILED);
    numa_read("/sys", &n);
    all = n.n;
    rc = numa_allow(&n);
    cr_assert(rc == 0 || rc == -EPERM || rc == -ENOSYS || rc == -EBUSY, "%s", strerror(-rc));
    cr_assert(rc == 0 ? n.n <= all : n.n == 0);
    if (n.n == 0)
        cr_skip_test("the kernel does not tell of nodes here");
    cr_assert_eq(n.prefer(n.node[n.n - 1]), 0);
    page[0] = 1;
    cr_expect_geq(n.where(page), 0);
    cr_expect_neq(n.prefer(1023), 0, "no host has that");
    cr_expect_eq(numa_allow(&n), -EBUSY, "a policy that was given stays");
    cr_expect_eq(n.n, 0u);
    munmap(page, 4096);
}
