/* NUMA: which nodes memory may lie on, which node a PCI device belongs to, and which node a
 * thread's memory comes from. Reads the topology from sysfs at each call. The other calls ask the
 * kernel, which may refuse in a container; the caller then does without. Threads: any; prefer and
 * numa_stay act on the calling thread alone. */
#ifndef UCMD_BASE_NUMA_H
#define UCMD_BASE_NUMA_H

#include <stdint.h>

#define NUMA_NODES_MAX 64 /* nodes after these are left to the kernel */
#define NUMA_NONE (-1)    /* no node in particular */

struct numa {
    const char *sys;          /* where sysfs is mounted; borrowed */
    uint32_t n;               /* nodes below; with fewer than two there is nothing to place */
    int node[NUMA_NODES_MAX]; /* the kernel's numbers, rising */
    /* From now on, memory that the calling thread touches first comes from the node, and from
     * others when that is full. 0 or -errno. */
    int (*prefer)(int node);
    /* The node of the page at this address, which was touched; or -errno. */
    int (*where)(const void *memory);
};

/* The nodes that have memory and processors: a node of memory alone may be a GPU's own, or slow. */
void numa_read(const char *sys, struct numa *out);
/* Removes the nodes that this process may not use. 0; or -errno and no nodes: -EBUSY when the
 * process was given a memory policy, which the daemon keeps; otherwise the kernel's refusal. */
int numa_allow(struct numa *n);
/* The node of a PCI device, "0000:3b:00.0"; NUMA_NONE when it has none or none is known. */
int numa_of_pci(const struct numa *n, const char *address);
/* Restricts the calling thread to those of its processors that belong to the node. 0 or -errno. */
int numa_stay(const struct numa *n, int node);

#endif
