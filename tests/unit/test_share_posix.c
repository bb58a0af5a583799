/* A root in a folder: the contract of all backends, and what only folders do. */
#include "tests/unit/share_contract.h"

static int wipe_cb(const char *path, const struct stat *st, int type, struct FTW *at)
{
    (void)st, (void)type, (void)at;
    return remove(path);
}

static void folder_begin(struct contract *c)
{
    snprintf(c->folder, sizeof(c->folder), "/tmp/ucm-test-share-XXXXXX");
    cr_assert(mkdtemp(c->folder));
    strcpy(c->target, c->folder);
    c->ops = &share_posix;
}

static void folder_end(struct contract *c)
{
    cr_assert_eq(nftw(c->folder, wipe_cb, 16, FTW_DEPTH | FTW_PHYS), 0);
}

SHARE_CONTRACT(share_posix, folder_begin, folder_end)
