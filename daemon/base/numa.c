#include "daemon/base/numa.h"

#include <ctype.h>
#include <errno.h>
#include <linux/mempolicy.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LIST_BYTES 8192

/* A cpu_set_t holds nodes here too: a kernel has at most CPU_SETSIZE of them. Processors beyond
 * that number are not used. */

/* ---- sysfs ---- */

/* The first line of a file of sysfs. */
static int line_read(const char *path, char *out, int size)
{
    FILE *f = fopen(path, "re");
    int rc = 0;

    if (!f)
        return -errno;
    if (!fgets(out, size, f))
        rc = -EIO;
    fclose(f);
    return rc;
}

/* "0-1,3": numbers and ranges; an empty line is the empty set. */
static int list_parse(const char *p, cpu_set_t *out)
{
    CPU_ZERO(out);
    while (*p != '\0' && *p != '\n') {
        unsigned long first, last;
        char *end;

        if (!isdigit((unsigned char)*p))
            return -EINVAL;
        first = last = strtoul(p, &end, 10);
        if (*end == '-') {
            if (!isdigit((unsigned char)end[1]))
                return -EINVAL;
            last = strtoul(end + 1, &end, 10);
        }
        for (unsigned long i = first; i <= last && i < CPU_SETSIZE; i++)
            CPU_SET(i, out);
        p = *end == ',' ? end + 1 : end;
    }
    return 0;
}

static int list_read(const char *path, cpu_set_t *out)
{
    char line[LIST_BYTES];
    int rc = line_read(path, line, sizeof(line));

    return rc == 0 ? list_parse(line, out) : rc;
}

static int nodes_read(const char *sys, const char *which, cpu_set_t *out)
{
    char path[256];

    snprintf(path, sizeof(path), "%.200s/devices/system/node/%s", sys, which);
    return list_read(path, out);
}

int numa_of_pci(const struct numa *n, const char *address)
{
    char path[320], line[32], *end;
    long node;

    snprintf(path, sizeof(path), "%.200s/bus/pci/devices/%.32s/numa_node", n->sys, address);
    if (line_read(path, line, sizeof(line)) < 0)
        return NUMA_NONE;
    node = strtol(line, &end, 10);
    return end != line && node >= 0 && node < CPU_SETSIZE ? (int)node : NUMA_NONE;
}

/* ---- the kernel ---- */

/* The kernel expects the number of bits plus one. */
static int policy_get(int *mode, cpu_set_t *nodes, unsigned long flags)
{
    return syscall(SYS_get_mempolicy, mode, nodes, CPU_SETSIZE + 1, NULL, flags) == 0 ? 0 : -errno;
}

static int prefer(int node)
{
    cpu_set_t nodes;

    CPU_ZERO(&nodes);
    CPU_SET(node, &nodes);
    return syscall(SYS_set_mempolicy, MPOL_PREFERRED, &nodes, CPU_SETSIZE + 1) == 0 ? 0 : -errno;
}

static int where(const void *memory)
{
    int node;

    if (syscall(SYS_get_mempolicy, &node, NULL, 0ul, memory,
                (unsigned long)(MPOL_F_NODE | MPOL_F_ADDR)) != 0)
        return -errno;
    return node;
}

void numa_read(const char *sys, struct numa *out)
{
    cpu_set_t memory, cpu;

    *out = (struct numa){.sys = sys, .prefer = prefer, .where = where};
    if (nodes_read(sys, "has_memory", &memory) < 0 || nodes_read(sys, "has_cpu", &cpu) < 0)
        return;
    CPU_AND(&memory, &memory, &cpu);
    for (int i = 0; i < CPU_SETSIZE && out->n < NUMA_NODES_MAX; i++)
        if (CPU_ISSET(i, &memory))
            out->node[out->n++] = i;
}

int numa_allow(struct numa *n)
{
    cpu_set_t set;
    uint32_t had = n->n;
    int mode = MPOL_DEFAULT;
    int rc;

    CPU_ZERO(&set);
    rc = policy_get(&mode, &set, 0);
    n->n = 0;
    if (rc == 0 && mode != MPOL_DEFAULT)
        rc = -EBUSY;
    if (rc == 0)
        rc = policy_get(&mode, &set, MPOL_F_MEMS_ALLOWED);
    for (uint32_t i = 0; rc == 0 && i < had; i++)
        if (CPU_ISSET(n->node[i], &set))
            n->node[n->n++] = n->node[i];
    return rc;
}

int numa_stay(const struct numa *n, int node)
{
    cpu_set_t may, stay;
    char path[256];
    int rc;

    snprintf(path, sizeof(path), "%.200s/devices/system/node/node%d/cpulist", n->sys, node);
    rc = list_read(path, &stay);
    if (rc < 0)
        return rc;
    if (sched_getaffinity(0, sizeof(may), &may) < 0)
        return -errno;
    CPU_AND(&stay, &stay, &may);
    if (CPU_COUNT(&stay) == 0)
        return -ENOENT;
    return sched_setaffinity(0, sizeof(stay), &stay) == 0 ? 0 : -errno;
}
