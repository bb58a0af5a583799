/* Two NUMA nodes on a host that may have one: a directory that stands for /sys, and memory that
 * lies where the test says. */
#ifndef UCMD_TESTS_FAKE_NUMA_H
#define UCMD_TESTS_FAKE_NUMA_H

#include "daemon/base/numa.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* ---- sysfs ---- */

static char fake_sys[64];

static inline void fake_sys_make(void)
{
    snprintf(fake_sys, sizeof(fake_sys), "/tmp/ucm-test-sys-XXXXXX");
    cr_assert(mkdtemp(fake_sys));
}

/* path: below the directory; its own directories are made. */
static inline void fake_sys_write(const char *path, const char *text)
{
    char full[320];
    FILE *f;

    snprintf(full, sizeof(full), "%s/%s", fake_sys, path);
    for (char *p = full + strlen(fake_sys) + 1; (p = strchr(p, '/')) != NULL; *p++ = '/') {
        *p = '\0';
        cr_assert(mkdir(full, 0700) == 0 || errno == EEXIST);
    }
    f = fopen(full, "w");
    cr_assert(f && fputs(text, f) >= 0 && fclose(f) == 0);
}

static inline int fake_sys_remove_cb(const char *path, const struct stat *st, int kind,
                                     struct FTW *at)
{
    (void)st, (void)kind, (void)at;
    return remove(path);
}

static inline void fake_sys_remove(void)
{
    cr_assert_eq(nftw(fake_sys, fake_sys_remove_cb, 8, FTW_DEPTH | FTW_PHYS), 0);
}

/* ---- memory ---- */

static struct {
    int preferred;    /* what the growing thread prefers */
    unsigned prefers; /* how often it said so */
    int refuse;       /* the kernel's answer to everything, 0: does as asked */
    int full;         /* its memory comes from `instead`; NUMA_NONE: none is */
    int instead;
    const int *lies; /* one a slab, asked in their order, instead of all that */
    unsigned asked;
} fake_memory = {.preferred = NUMA_NONE, .full = NUMA_NONE};

static inline int fake_prefer(int node)
{
    fake_memory.prefers++;
    if (fake_memory.refuse == 0)
        fake_memory.preferred = node;
    return fake_memory.refuse;
}

static inline int fake_where(const void *memory)
{
    (void)memory;
    if (fake_memory.refuse != 0)
        return fake_memory.refuse;
    if (fake_memory.lies)
        return fake_memory.lies[fake_memory.asked++];
    return fake_memory.preferred == fake_memory.full ? fake_memory.instead : fake_memory.preferred;
}

/* Node numbers with gaps, as some hosts have them. */
#define NODE_A 0
#define NODE_B 8

static const struct numa fake_numa = {
    .sys = fake_sys, .n = 2, .node = {NODE_A, NODE_B}, .prefer = fake_prefer, .where = fake_where};

#endif
