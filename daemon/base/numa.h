/* NUMA: which nodes memory may lie on, where a PCI device hangs, and where a thread's memory comes
 * from. The topology is sysfs', read when it is asked for; the rest are calls of the kernel, which
 * a container may refuse: whoever asks goes on without. Threads: any; prefer and numa_stay act on
 * the calling thread alone. */
#ifndef UCMD_BASE_NUMA_H
#define UCMD_BASE_NUMA_H

#include <stdint.h>

#define NUMA_NODES_MAX 64 /* nodes after these are left to the kernel */
#define NUMA_NONE (-1)    /* no node in particular */

struct numa {
    const char *sys;          /* where sysfs is mounted; borrowed */
    uint32_t n;               /* nodes below; with fewer than two there is nothing to place */
    int node[NUMA_NODES_MAX]; /* as the kernel numbers them, rising */
    /* Memory that the calling thread touches first comes from the node from now on, from others
     * when that is full. 0 or -errno. */
    int (*prefer)(int node);
    /* The node of the page at this address, which was touched; or -errno. */
    int (*where)(const void *memory);
};

/* The nodes that have memory and processors: a node of memory alone may be a GPU's own, or slow. */
void numa_read(const char *sys, struct numa *out);
/* Leaves those that this process may use. 0; or -errno and there are none: -EBUSY, somebody has
 * given the process a memory policy, which is not to be overruled; or the kernel's refusal. */
int numa_allow(struct numa *n);
/* The node of a PCI device, "0000:3b:00.0"; NUMA_NONE when it has none, or nobody knows. */
int numa_of_pci(const struct numa *n, const char *address);
/* The calling thread runs on the node's processors from now on, those that it might use before. 0
 * or -errno. */
int numa_stay(const struct numa *n, int node);

#endif
