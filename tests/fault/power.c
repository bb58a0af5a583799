#include "tests/fault/power.h"

#include "tests/runner/environment.h"

#include <criterion/criterion.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define SECTOR 512u
#define PAGE 4096u
#define FILES 64u /* that changes were made to */

/* ---- life ---- */

void power_open(struct power *p, const char *dir, unsigned n)
{
    char list[POWER_DIRECTORIES * (VOLATILE_NAME + 1)] = "", fd[16];

    *p = (struct power){.n = n, .fd = memfd_create("journal", 0)};
    cr_assert_geq(p->fd, 0);
    cr_assert_eq(ftruncate(p->fd, VOLATILE_BYTES), 0);
    p->journal = mmap(NULL, VOLATILE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, p->fd, 0);
    cr_assert_neq(p->journal, MAP_FAILED);
    for (unsigned i = 0; i < n; i++) {
        snprintf(p->directories[i], sizeof(p->directories[i]), "%s/disk%u", dir, i);
        cr_assert_eq(mkdir(p->directories[i], 0700), 0);
        strcat(list, i ? ":" : "");
        strcat(list, p->directories[i]);
    }
    snprintf(p->saved, sizeof(p->saved), "%s/saved", dir);
    cr_assert_eq(mkdir(p->saved, 0700), 0);
    snprintf(fd, sizeof(fd), "%d", p->fd);
    setenv(VOLATILE_JOURNAL, fd, 1);
    setenv(VOLATILE_DIRECTORIES, list, 1);
    setenv(VOLATILE_SAVED, p->saved, 1);
    preload("volatile_disk.so");
}

void power_close(struct power *p)
{
    unsetenv("LD_PRELOAD");
    munmap(p->journal, VOLATILE_BYTES);
    close(p->fd);
}

/* ---- the records ---- */

static struct volatile_record **records_live(struct power *p, unsigned *n)
{
    uint64_t used = p->journal->used;
    struct volatile_record **list;

    *n = 0;
    for (uint64_t at = 0; at < used; (*n)++)
        at += ((struct volatile_record *)((uint8_t *)p->journal + VOLATILE_HEAD + at))->bytes;
    list = calloc(*n + 1, sizeof(list[0]));
    cr_assert(list);
    *n = 0;
    for (uint64_t at = 0; at < used; at += list[*n]->bytes, *n += list[*n]->live) {
        list[*n] = (struct volatile_record *)((uint8_t *)p->journal + VOLATILE_HEAD + at);
        cr_assert_gt(list[*n]->bytes, 0u);
    }
    return list;
}

/* ---- names: those of a directory are lost from some moment on ---- */

static bool is_name(const struct volatile_record *r)
{
    return r->kind >= VOLATILE_MADE;
}

static void name_undo(const struct volatile_record *r)
{
    if (r->kind != VOLATILE_REMOVED) {
        struct stat st;

        if (stat(r->to, &st) < 0 || st.st_ino != r->other)
            return; /* a later change that no record names was not complete */
        cr_assert_eq(r->kind == VOLATILE_MADE ? unlink(r->to) : rename(r->to, r->from), 0);
    }
    if (r->saved[0])
        cr_assert_eq(rename(r->saved, r->kind == VOLATILE_REMOVED ? r->from : r->to), 0);
}

static void names_fail(struct power *p, struct oracle *o, struct volatile_record **list, unsigned n,
                       struct power_loss *loss)
{
    for (unsigned f = 0; f < p->n; f++) {
        unsigned all = 0, keep;
        struct stat st;

        cr_assert_eq(stat(p->directories[f], &st), 0);
        for (unsigned i = 0; i < n; i++)
            all += is_name(list[i]) && list[i]->ino == st.st_ino;
        keep = o ? oracle_below(o, all + 1) : 0;
        loss->names += all - keep;
        for (unsigned i = n; i > 0; i--) {
            const struct volatile_record *r = list[i - 1];

            if (!is_name(r) || r->ino != st.st_ino)
                continue;
            if (all-- > keep)
                name_undo(r);
            else if (r->saved[0])
                (void)unlink(r->saved);
        }
    }
}

/* ---- bytes ---- */

/* Opens the file of that number, whatever it is called now; -1: it is gone. */
static int file_find(const struct power *p, uint64_t ino)
{
    for (unsigned i = 0; i < p->n; i++) {
        DIR *directory = opendir(p->directories[i]);
        struct dirent *e;
        int fd = -1;

        cr_assert(directory);
        while (fd < 0 && (e = readdir(directory)) != NULL)
            if (e->d_ino == ino && e->d_name[0] != '.')
                fd = openat(dirfd(directory), e->d_name, O_RDWR | O_CLOEXEC);
        closedir(directory);
        if (fd >= 0)
            return fd;
    }
    return -1;
}

/* How the cache of the drive behaved this time. */
struct mood {
    unsigned lost_of_256;
    unsigned grain;      /* bytes that are lost or kept together; 0: whole writes */
    unsigned cut_of_256; /* so many writes are torn in two instead */
};

static struct mood mood_pick(struct oracle *o)
{
    static const unsigned lost[] = {0, 8, 64, 128, 192, 248, 256};
    static const unsigned grains[] = {SECTOR, SECTOR, PAGE, 0};

    if (!o)
        return (struct mood){.lost_of_256 = 256};
    return (struct mood){.lost_of_256 = lost[oracle_below(o, 7)],
                         .grain = grains[oracle_below(o, 4)],
                         .cut_of_256 = oracle_below(o, 2) ? 64 : 0};
}

static void write_undo(struct oracle *o, const struct mood *mood, int fd,
                       const struct volatile_record *r, uint8_t *settled, struct power_loss *loss)
{
    uint64_t grain = mood->grain ? mood->grain : r->length + SECTOR;
    bool torn = o && oracle_below(o, 256) < mood->cut_of_256, lost = !o;
    uint64_t cut = torn ? oracle_random(o) % (r->length / SECTOR + 1) * SECTOR : 0;
    bool first = torn && oracle_below(o, 2); /* torn: which end was lost */

    for (uint64_t at = 0; at < r->length;) {
        uint64_t from = r->offset + at, n = SECTOR - from % SECTOR, s = from / SECTOR;

        n = n < r->length - at ? n : r->length - at;
        if (torn)
            lost = at < cut ? first : !first;
        else if (o && (at == 0 || from % grain == 0))
            lost = oracle_below(o, 256) < mood->lost_of_256;
        if (!settled[s] && lost) {
            cr_assert_eq(pwrite(fd, r->old + at, n, (off_t)from), (ssize_t)n);
            loss->sectors++;
        } else if (!settled[s]) {
            settled[s] = 1; /* what was before it no longer matters */
            loss->kept++;
        }
        at += n;
    }
}

static uint64_t size_pick(struct oracle *o, struct volatile_record **list, unsigned n, uint64_t ino,
                          uint64_t now_bytes)
{
    unsigned all = 0, pick;

    for (unsigned i = 0; i < n; i++)
        all += !is_name(list[i]) && list[i]->ino == ino;
    pick = !o ? 0 : oracle_below(o, 2) ? oracle_below(o, all + 1) : all;
    for (unsigned i = 0; i < n; i++)
        if (!is_name(list[i]) && list[i]->ino == ino && pick-- == 0)
            return list[i]->old_size;
    return now_bytes;
}

static void file_fail(struct power *p, struct oracle *o, struct volatile_record **list, unsigned n,
                      uint64_t ino, struct power_loss *loss)
{
    struct mood mood = mood_pick(o);
    int fd = file_find(p, ino);
    uint64_t most, bytes;
    uint8_t *settled;
    struct stat st;

    if (fd < 0)
        return;
    cr_assert_eq(fstat(fd, &st), 0);
    most = (uint64_t)st.st_size;
    bytes = size_pick(o, list, n, ino, most);
    for (unsigned i = 0; i < n; i++)
        if (!is_name(list[i]) && list[i]->ino == ino && list[i]->offset + list[i]->length > most)
            most = list[i]->offset + list[i]->length;
    settled = calloc(most / SECTOR + 2, 1);
    cr_assert(settled);
    for (unsigned i = n; i > 0; i--) {
        if (is_name(list[i - 1]) || list[i - 1]->ino != ino)
            continue;
        loss->writes++;
        write_undo(o, &mood, fd, list[i - 1], settled, loss);
    }
    free(settled);
    loss->sizes += bytes != (uint64_t)st.st_size;
    cr_assert_eq(ftruncate(fd, (off_t)bytes), 0);
    close(fd);
}

void power_fail(struct power *p, struct oracle *o, struct power_loss *loss)
{
    uint64_t done[FILES];
    unsigned n, n_done = 0;
    struct volatile_record **list = records_live(p, &n);

    names_fail(p, o, list, n, loss);
    for (unsigned i = 0; i < n; i++) {
        bool is_done = is_name(list[i]);

        for (unsigned k = 0; k < n_done; k++)
            is_done |= done[k] == list[i]->ino;
        if (is_done)
            continue;
        cr_assert_lt(n_done, FILES);
        done[n_done++] = list[i]->ino;
        file_fail(p, o, list, n, list[i]->ino, loss);
    }
    free(list);
    p->journal->used = 0;
}
