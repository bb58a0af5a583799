/* For the studies of a shared root: a folder full of block files of 1 MiB each, without blocks on
 * the disk, of one namespace of one part, numbered, last read at some time of ten days. */
#ifndef UCM_BENCH_SHARE_LAY_H
#define UCM_BENCH_SHARE_LAY_H

#include "daemon/format/bytes.h"
#include "daemon/share/block_file.h"

#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define LAY_BYTES (1u << 20)
#define LAY_KEY_BYTES 16u
#define LAY_FINGERPRINT 1 /* each byte of it */

static inline int lay_unlink_cb(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st;
    (void)type;
    return ftw->level == 0 ? 0 : remove(path);
}

static inline void lay_fail(const char *what)
{
    perror(what);
    exit(1);
}

static inline void lay_key(uint32_t number, uint8_t key[LAY_KEY_BYTES])
{
    memset(key, 0, LAY_KEY_BYTES);
    put32(key, number);
}

static inline void lay_file(const char *folder, unsigned number, time_t now)
{
    struct block_file_id id = {.key_bytes = LAY_KEY_BYTES};
    uint8_t identity[BLOCK_FILE_IDENTITY_BYTES];
    char name[BLOCK_FILE_NAME_CAP], path[512];
    struct timespec times[2] = {{.tv_sec = now - 600 - (number * 2654435761u) % 864000}};
    int fd;

    lay_key(number, id.key);
    memset(id.fingerprint, LAY_FINGERPRINT, sizeof(id.fingerprint));
    if (block_file_locate(&id, identity, name) < 0)
        exit(1);
    snprintf(path, sizeof(path), "%s/blocks/%02x/%s", folder, identity[0], name);
    fd = open(path, O_WRONLY | O_CREAT | O_EXCL, 0600);
    times[1] = times[0];
    if (fd < 0 || ftruncate(fd, LAY_BYTES) < 0 || futimens(fd, times) < 0)
        lay_fail(path);
    close(fd);
}

static inline void lay_files(const char *folder, unsigned n)
{
    time_t now = time(NULL);
    char path[512];

    snprintf(path, sizeof(path), "%s/blocks", folder);
    if (mkdir(path, 0700) < 0)
        lay_fail(path);
    for (unsigned b = 0; b < BLOCK_FILE_BUCKETS; b++) {
        snprintf(path, sizeof(path), "%s/blocks/%02x", folder, b);
        if (mkdir(path, 0700) < 0)
            lay_fail(path);
    }
    for (unsigned i = 0; i < n; i++)
        lay_file(folder, i, now);
}

/* What is below the folder goes. */
static inline int lay_clear(const char *folder)
{
    return nftw(folder, lay_unlink_cb, 16, FTW_DEPTH | FTW_PHYS);
}

#endif
