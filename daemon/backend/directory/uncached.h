/* Moves whole files past the page cache: the daemon has the block in its memory, and a second copy
 * in the kernel's would take memory from engines.
 *
 * It uses O_DIRECT (open(2)) if the file system supports it; else the page cache, whose pages it
 * drops with posix_fadvise(3). Only a last page that is not yet on stable storage stays there. Any
 * thread. */
#ifndef UCM_BACKEND_DIRECTORY_UNCACHED_H
#define UCM_BACKEND_DIRECTORY_UNCACHED_H

#include <stdbool.h>
#include <stdint.h>

/* No file system here wants more, of offsets, lengths and memory; one that does is read and written
 * through the page cache. */
#define UNCACHED_ALIGN 4096u

#define UNCACHED_SHORT 1

/* The file from its beginning. memory: aligned to UNCACHED_ALIGN, and so is its room. fd: a regular
 * file, which nothing else uses; its flags change. 0; -errno; UNCACHED_SHORT: the file ends before
 * that. */
int uncached_read(int fd, void *memory, uint64_t bytes);
/* The same into a new, empty file. sync: it is on stable storage when this returns 0; its name may
 * not be. */
int uncached_write(int fd, void *memory, uint64_t bytes, bool sync);

#endif
