/* Preloaded into a daemon: while the file $UCM_HANG exists, who opens a folder with `.hangs` at the end of its name does
 * not come back, as in a mount whose server does not answer. */
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define ENDING ".hangs"

static void hang(const char *path)
{
    const char *flag = getenv("UCM_HANG");
    size_t n = strlen(path), ending = sizeof(ENDING) - 1;

    if (!flag || n < ending || strcmp(path + n - ending, ENDING) != 0)
        return;
    while (access(flag, F_OK) == 0)
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
}

__attribute__((visibility("default"))) int open(const char *path, int flags, ...)
{
    va_list args;
    mode_t mode;

    va_start(args, flags);
    mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(args, mode_t) : 0;
    va_end(args);
    hang(path);
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

__attribute__((visibility("default"))) int open64(const char *path, int flags, ...)
    __attribute__((alias("open")));
