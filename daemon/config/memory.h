/* How much memory this process may still take before the kernel swaps, or ends somebody. Reads
 * /proc and the cgroup file systems, version 2 and 1. The main thread. */
#ifndef UCMD_CONFIG_MEMORY_H
#define UCMD_CONFIG_MEMORY_H

#include <stdint.h>

struct memory_room {
    /* Available on the host; where that is not enough, with what this daemon's earlier run would
     * give back. */
    uint64_t host_bytes;
    uint64_t cgroup_bytes; /* the least that this process's cgroups allow; UINT64_MAX: no limit */
};

/* root: "" or, for tests, what stands before /proc and /sys. enough: bytes; a host that has them
 * available is looked at no further, as it may have thousands of processes. 0, or -errno when the
 * kernel does not say. */
int memory_room(const char *root, uint64_t enough, struct memory_room *out);

/* The host's memory, whatever uses it. */
uint64_t memory_total(void);

/* Bytes in huge pages of this size that are set aside and promised to nobody. root: as above. */
uint64_t memory_huge_room(const char *root, uint64_t page_bytes);

#endif
