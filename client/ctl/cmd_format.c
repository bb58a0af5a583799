/* format: marks a block device, or a file, as one that ucmd may take as an entry of nvme.paths.
 * What the mark looks like is in docs/design/storage-format.md, "Devices and files". */
#include "client/ctl/ctl.h"
#include "client/ctl/offline.h"
#include "daemon/format/io.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define ENDS (1u << 20) /* looked at, and cleared, at the beginning and at the end */

struct target {
    int fd;
    uint64_t bytes;
    uint8_t *first, *last; /* ENDS bytes each; what there is of them */
    size_t ends;
};

static const struct {
    uint32_t at;
    const char *bytes;
    uint32_t n;
    const char *what;
} signatures[] = {
    {0, "UCMDNVME", 8, "a cache of ucmd"},          {0x438, "\x53\xef", 2, "an ext file system"},
    {0, "XFSB", 4, "an XFS file system"},           {0x10040, "_BHRfS_M", 8, "a btrfs file system"},
    {0, "LUKS\xba\xbe", 6, "a LUKS volume"},        {512, "LABELONE", 8, "an LVM volume"},
    {512, "EFI PART", 8, "a GPT partition table"},  {4086, "SWAPSPACE2", 10, "swap space"},
    {4096, "\xfc\x4e\x2b\xa9", 4, "a RAID member"}, {510, "\x55\xaa", 2, "a partition table"},
};

static bool all_zero(const uint8_t *p, size_t n)
{
    return n == 0 || (p[0] == 0 && memcmp(p, p + 1, n - 1) == 0);
}

/* What lies there, or NULL. */
static const char *found(const struct target *t)
{
    for (size_t i = 0; i < sizeof(signatures) / sizeof(signatures[0]); i++)
        if (signatures[i].at + signatures[i].n <= t->ends &&
            memcmp(t->first + signatures[i].at, signatures[i].bytes, signatures[i].n) == 0)
            return signatures[i].what;
    if (t->ends >= NVME_PAGE && nvme_mark_decode(t->first) == 0)
        return NULL;
    return all_zero(t->first, t->ends) && all_zero(t->last, t->ends) ? NULL : "something";
}

static int ends_transfer(const struct target *t, bool write)
{
    const uint64_t at[] = {0, t->bytes - t->ends};
    uint8_t *const p[] = {t->first, t->last};
    int rc = 0;

    for (unsigned i = 0; i < 2 && rc == 0; i++)
        rc = write ? io_write(t->fd, p[i], t->ends, at[i]) : io_read(t->fd, p[i], t->ends, at[i]);
    return rc;
}

static int mark_write(const struct target *t)
{
    uint8_t page[NVME_PAGE];
    int rc;

    nvme_mark_encode(page);
    rc = io_write(t->fd, page, NVME_PAGE, 0);
    return rc == 0 && fsync(t->fd) < 0 ? -errno : rc;
}

static int target_open(struct target *t, const char *path)
{
    struct stat st;
    int rc;

    if (stat(path, &st) < 0)
        return program_fail(CTL_ERROR, "%s: %s", path, strerror(errno));
    if (!S_ISREG(st.st_mode) && !S_ISBLK(st.st_mode))
        return program_fail(CTL_ERROR, "%s is neither a block device nor a file", path);
    t->fd = offline_take(path, S_ISBLK(st.st_mode));
    if (t->fd == -EBUSY || t->fd == -EWOULDBLOCK)
        return program_fail(
            CTL_ERROR, "%s is in use: mounted, part of something else, or a daemon has it", path);
    rc = t->fd < 0 ? t->fd : io_length(t->fd, &t->bytes);
    if (rc < 0)
        return program_fail(CTL_ERROR, "%s: %s", path, strerror(-rc));
    t->ends = t->bytes < ENDS ? (size_t)t->bytes : ENDS;
    t->first = calloc(1, ENDS);
    t->last = calloc(1, ENDS);
    if (!t->first || !t->last)
        return program_fail(CTL_ERROR, "no memory");
    rc = ends_transfer(t, false);
    if (rc < 0)
        return program_fail(CTL_ERROR, "%s can't be read: %s", path, strerror(-rc));
    return CTL_OK;
}

static int format_print(const struct args *a, const struct target *t, const char *path,
                        const char *destroyed)
{
    char human[HUMAN_BYTES];
    cJSON *j;

    if (!args_given(a, "json")) {
        printf("%s is ready: %s\n", path, human_bytes(human, t->bytes));
        return CTL_OK;
    }
    j = cJSON_CreateObject();
    cJSON_AddStringToObject(j, "path", path);
    ctl_json_u64(j, "bytes", t->bytes);
    cJSON_AddItemToObject(j, "destroyed",
                          destroyed ? cJSON_CreateString(destroyed) : cJSON_CreateNull());
    return ctl_print_json(j, false);
}

static int target_format(struct target *t, const struct args *a, const char *path)
{
    const char *what = found(t);
    int rc = CTL_OK;

    if (what && !args_given(a, "force"))
        return program_fail(CTL_ERROR, "%s holds %s: nothing was done; --force destroys it", path,
                            what);
    if (what)
        rc = ctl_confirm(a, "%s holds %s. Destroy it?", path, what);
    if (rc != CTL_OK)
        return rc;
    memset(t->first, 0, ENDS);
    memset(t->last, 0, ENDS);
    /* No other's signature may outlive it: of a partition table there is a copy at the end. */
    rc = what ? ends_transfer(t, true) : 0;
    if (rc == 0)
        rc = mark_write(t);
    if (rc < 0)
        return program_fail(CTL_ERROR, "%s can't be written: %s", path, strerror(-rc));
    return format_print(a, t, path, what);
}

int cmd_format(const struct args *a)
{
    struct target t = {.fd = -1};
    int rc = target_open(&t, a->word[0]);

    if (rc == CTL_OK)
        rc = target_format(&t, a, a->word[0]);
    if (t.fd >= 0)
        close(t.fd);
    free(t.first);
    free(t.last);
    return rc;
}
