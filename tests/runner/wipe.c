#include "tests/runner/wipe.h"

#include <ftw.h>
#include <stdio.h>
#include <unistd.h>

static int remove_cb(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st, (void)type, (void)ftw;
    return remove(path);
}

int wipe(const char *folder)
{
    return access(folder, F_OK) != 0 ? 0 : nftw(folder, remove_cb, 16, FTW_DEPTH | FTW_PHYS);
}
