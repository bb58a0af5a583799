/* GPUs on two NUMA nodes. */
#include "tests/unit/cuda/cuda_rig.h"
#include "tests/unit/fake_numa.h"

#include <dirent.h>
#include <sched.h>

/* Threads of this process that run on this processor alone. */
static unsigned threads_on(int cpu)
{
    DIR *d = opendir("/proc/self/task");
    struct dirent *entry;
    unsigned n = 0;

    cr_assert(d);
    while ((entry = readdir(d)) != NULL) {
        cpu_set_t may;
        pid_t tid = (pid_t)atoi(entry->d_name);

        if (tid > 0 && sched_getaffinity(tid, sizeof(may), &may) == 0)
            n += CPU_COUNT(&may) == 1 && CPU_ISSET(cpu, &may);
    }
    closedir(d);
    return n;
}

static void sys_write(int cpu)
{
    char list[32];

    snprintf(list, sizeof(list), "%d\n", cpu);
    fake_sys_make();
    fake_sys_write("devices/system/node/node0/cpulist", list);
    fake_sys_write("devices/system/node/node8/cpulist", "1010\n"); /* none that this host has */
    fake_sys_write("bus/pci/devices/10000:3b:00.0/numa_node", "0\n");
    fake_sys_write("bus/pci/devices/10000:3c:00.0/numa_node", "8\n");
}

Test(cuda_node, gpus_belong_to_the_node_of_their_slot, .timeout = 60)
{
    int cpu = 0;
    cpu_set_t may;
    unsigned before;

    cr_assert_eq(sched_getaffinity(0, sizeof(may), &may), 0);
    while (!CPU_ISSET(cpu, &may))
        cpu++;
    before = threads_on(cpu);
    sys_write(cpu);
    numa = &fake_numa;
    daemon_begin(COPY_AUTO, 1 * MIB);
    cr_expect_eq(device_set_at(set, 0)->node, NUMA_NONE, "cpu");
    cr_expect_eq(device_set_at(set, 1)->node, NODE_A);
    cr_expect_eq(device_set_at(set, 2)->node, NODE_B);
    for (int i = 0; i < 5000 && threads_on(cpu) == before; i++)
        uv_sleep(1);
    if (CPU_COUNT(&may) > 1)
        cr_expect_eq(threads_on(cpu), before + 1, "one GPU's node has processors here");
    daemon_end();
    fake_sys_remove();
}

Test(cuda_node, without_nodes_gpus_have_none, .timeout = 60)
{
    daemon_begin(COPY_AUTO, 1 * MIB);
    for (uint32_t i = 0; i < device_set_count(set); i++)
        cr_expect_eq(device_set_at(set, i)->node, NUMA_NONE);
    daemon_end();
}
