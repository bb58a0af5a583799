#include "tests/runner/wipe.h"

#include <ftw.h>
#include <stdio.h>
#include <unistd.h>

static int remove_cb(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st, (void)type, (void)ftw;
    return remove(path);
}

int wipe(const char *directory)
{
    return access(directory, F_OK) != 0 ? 0 : nftw(directory, remove_cb, 16, FTW_DEPTH | FTW_PHYS);
}
