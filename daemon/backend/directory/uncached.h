/* Moves whole files past the page cache: a block that has been read lies in the daemon's memory,
 * and a second copy of it, in the kernel's, takes room from engines.
 *
 * Directly (O_DIRECT, open(2)) where the file system can; else through the page cache, which is
 * told to drop the pages (posix_fadvise(3)). What it keeps of a file is a last page that is not on
 * stable storage yet. Any thread. */
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
