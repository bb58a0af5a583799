/* Moves whole files past the page cache: a block that has been read lies in the daemon's memory, and a second copy of it, in the
 * kernel's, takes room from engines.
 *
 * Directly (O_DIRECT, open(2)) where the file system can; else through the page cache, which is told to drop the pages
 * (posix_fadvise(3)). What it keeps of a file is a last page that is not on stable storage yet. Any thread. */
#ifndef UCM_BACKEND_UNCACHED_H
#define UCM_BACKEND_UNCACHED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

/* No file system here wants more, of offsets, lengths and memory; one that does is read and written through the page cache. */
#define UNCACHED_ALIGN 4096u

/* Memory of the caller between the file and pieces that lie askew: aligned to, and a multiple of, UNCACHED_ALIGN. */
struct uncached_bounce {
    uint8_t *memory;
    size_t bytes;
};

#define UNCACHED_SHORT 1

/* The file from its beginning, as `n` pieces of memory behind each other. fd: a regular file, which nothing else uses; its flags
 * change. 0; -errno;
 * UNCACHED_SHORT: the file ends before that. */
int uncached_read(int fd, const struct iovec *pieces, unsigned n,
                  const struct uncached_bounce *bounce);
/* The same into a new, empty file. sync: it is on stable storage when this returns 0; its name may not be. */
int uncached_write(int fd, const struct iovec *pieces, unsigned n,
                   const struct uncached_bounce *bounce, bool sync);

#endif
