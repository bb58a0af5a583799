#include "tests/fault/disk/volatile_real.h"

#include "tests/fault/disk/volatile_journal.h"

#include <dlfcn.h>
#include <string.h>

struct volatile_real real;

static void real_find(void *slot, const char *name)
{
    void *f = dlsym(RTLD_NEXT, name);

    if (!f)
        volatile_refuse(name);
    memcpy(slot, &f, sizeof(f));
}

void real_find_all(void)
{
    if (real.mmap)
        return;
    real_find(&real.open, "open");
    real_find(&real.close, "close");
    real_find(&real.pread, "pread");
    real_find(&real.preadv, "preadv");
    real_find(&real.write, "write");
    real_find(&real.pwrite, "pwrite");
    real_find(&real.pwritev, "pwritev");
    real_find(&real.writev, "writev");
    real_find(&real.pwritev2, "pwritev2");
    real_find(&real.fsync, "fsync");
    real_find(&real.fdatasync, "fdatasync");
    real_find(&real.ftruncate, "ftruncate");
    real_find(&real.fallocate, "fallocate");
    real_find(&real.rename, "rename");
    real_find(&real.renameat2, "renameat2");
    real_find(&real.linkat, "linkat");
    real_find(&real.link, "link");
    real_find(&real.unlink, "unlink");
    real_find(&real.mmap, "mmap");
}
