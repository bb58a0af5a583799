/* Positioned reading and writing, and what belongs to it. Any thread; all of it blocks. 0 or
 * -errno unless said otherwise; EINTR is retried. */
#ifndef UCMD_FORMAT_IO_H
#define UCMD_FORMAT_IO_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* All of it; -ENODATA when the file ends before. */
int io_read(int fd, void *p, size_t bytes, uint64_t at);
/* Up to the end of the file. How many bytes, or -errno. */
ssize_t io_read_some(int fd, void *p, size_t bytes, uint64_t at);
/* All of it; a device that takes only a part of it is -EIO. */
int io_write(int fd, const void *p, size_t bytes, uint64_t at);
/* Length of a file, or size of a block device. */
int io_length(int fd, uint64_t *out);
/* Makes the names in a directory durable. */
int io_directory_sync(const char *directory);

#endif
