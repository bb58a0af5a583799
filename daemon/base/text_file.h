/* A small file as one text: of /proc, or one that this daemon wrote. Threads: any. */
#ifndef UCMD_BASE_TEXT_FILE_H
#define UCMD_BASE_TEXT_FILE_H

#include <stddef.h>
#include <sys/types.h>

/* Reads at most `cap` - 1 bytes, and a zero byte ends them. directory: openat's; flags: of open,
 * besides those for reading. Returns how many they are, cap - 1 also of a file that has more; or
 * -errno. */
ssize_t text_file_read(int directory, const char *path, int flags, char *text, size_t cap);

#endif
