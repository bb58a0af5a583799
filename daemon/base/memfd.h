/* Files of memory that the daemon shares with other processes, which can read them and nothing
 * else. Any thread. */
#ifndef UCMD_BASE_MEMFD_H
#define UCMD_BASE_MEMFD_H

#include <stdint.h>

/* A memory file that can't grow once it is shared. 0 or -errno. */
int memfd_new(const char *name, uint64_t bytes, int *out);
/* Takes the space of [offset, offset + bytes) of the file, which is mapped at p: a page that is
 * missing later ends the process. 0 or -errno. */
int memfd_populate(int fd, uint64_t offset, char *p, uint64_t bytes);
/* From now on nobody can write to it but through what is mapped, and it can't shrink. The daemon's
 * own descriptor to read it, or -errno. */
int memfd_share(int fd);
/* From that one, a descriptor for a client: one with a file description of its own, so that
 * memfd_granted can tell. Or -errno. */
int memfd_grant(int own);
/* Does anybody still have the memory open or mapped by a descriptor of memfd_grant? 1 or 0, or
 * -errno: the kernel can't tell (fs.leases-enable is 0). Pages that a process holds by other means,
 * in a pipe or pinned for a device, are not seen. */
int memfd_granted(int own);

#endif
