#include "daemon/base/text_file.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

ssize_t text_file_read(int directory, const char *path, int flags, char *text, size_t cap)
{
    int fd = openat(directory, path, O_RDONLY | O_CLOEXEC | flags);
    size_t have = 0;
    ssize_t n = 0;

    if (fd < 0)
        return -errno;
    while (have < cap - 1) {
        n = read(fd, text + have, cap - 1 - have);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            break;
        have += (size_t)n;
    }
    if (n < 0)
        n = -errno;
    close(fd);
    text[have] = '\0';
    return n < 0 ? n : (ssize_t)have;
}
