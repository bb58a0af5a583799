#include "tests/fault/disk/volatile_journal.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct volatile_journal *journal;
pthread_mutex_t journal_lock = PTHREAD_MUTEX_INITIALIZER;

void volatile_refuse(const char *what)
{
    fprintf(stderr, "volatile disk: %s is not supported\n", what);
    abort();
}

static struct volatile_record *record_at(uint64_t at)
{
    return (struct volatile_record *)((uint8_t *)journal + VOLATILE_HEAD + at);
}

uint64_t journal_now(void)
{
    return atomic_fetch_add(&journal->clock, 1) + 1;
}

/* A killed daemon has nothing in flight. By now, pages that the kernel dropped after a failed sync
 * are read from disk again, and may be synced. */
void journal_begin(void *memory)
{
    uint64_t used;

    journal = memory;
    used = atomic_load(&journal->used);
    for (uint64_t at = 0; at < used; at += record_at(at)->bytes) {
        if (atomic_load(&record_at(at)->done) == 0)
            atomic_store(&record_at(at)->done, journal_now());
        record_at(at)->doomed = 0;
    }
    atomic_store(&journal->doomed, 0);
}

void journal_step(void)
{
    uint64_t n = atomic_fetch_add(&journal->steps, 1) + 1;

    if (n == atomic_load(&journal->kill_at))
        kill(getpid(), SIGKILL);
}

/* Records at the end that are no longer live need no room. */
static void records_trim(void)
{
    uint64_t end = 0, used = atomic_load(&journal->used);

    for (uint64_t at = 0; at < used; at += record_at(at)->bytes)
        if (atomic_load(&record_at(at)->live))
            end = at + record_at(at)->bytes;
    atomic_store(&journal->used, end);
}

/* Bytes that are final now lie over those that were given up before. The same holds for the file's
 * length. */
static void deleting_cover(const struct volatile_record *r)
{
    uint64_t used = atomic_load(&journal->used);

    for (uint64_t at = 0; at < used && record_at(at) != r; at += record_at(at)->bytes) {
        struct volatile_record *old = record_at(at);

        if (!old->doomed || old->ino != r->ino || old->dev != r->dev)
            continue;
        if (r->kind == VOLATILE_WRITE && old->old_size < r->offset + r->length)
            old->old_size = r->offset + r->length;
        if (old->offset < r->offset + r->length && r->offset < old->offset + old->length)
            atomic_store(&old->live, 0);
    }
}

static void record_final(struct volatile_record *r)
{
    atomic_store(&r->live, 0);
    if (atomic_load(&journal->doomed) > 0)
        deleting_cover(r);
    if (r->kind >= VOLATILE_MADE && r->saved[0] && unlink(r->saved) < 0 && errno != ENOENT)
        volatile_refuse("this directory for names");
}

static bool record_in(const struct volatile_record *r, uint64_t dev, uint64_t ino, uint64_t before)
{
    uint64_t done = atomic_load(&r->done);

    return atomic_load(&r->live) && !r->doomed && (ino == 0 || (r->ino == ino && r->dev == dev)) &&
           done > 0 && done < before;
}

void records_sync(uint64_t dev, uint64_t ino, uint64_t before)
{
    uint64_t used = atomic_load(&journal->used);

    for (uint64_t at = 0; at < used; at += record_at(at)->bytes)
        if (record_in(record_at(at), dev, ino, before))
            record_final(record_at(at));
    records_trim();
}

void records_mark_deleting(uint64_t dev, uint64_t ino, uint64_t before)
{
    uint64_t used = atomic_load(&journal->used);

    for (uint64_t at = 0; at < used; at += record_at(at)->bytes) {
        if (!record_in(record_at(at), dev, ino, before))
            continue;
        record_at(at)->doomed = 1;
        atomic_fetch_add(&journal->doomed, 1);
    }
}

void records_drop(uint64_t dev, uint64_t ino)
{
    uint64_t used = atomic_load(&journal->used);

    for (uint64_t at = 0; at < used; at += record_at(at)->bytes)
        if (record_at(at)->ino == ino && record_at(at)->dev == dev)
            atomic_store(&record_at(at)->live, 0);
    records_trim();
}

struct volatile_record *record_new(enum volatile_kind kind, const struct stat *st, uint64_t length)
{
    uint64_t bytes = (sizeof(struct volatile_record) + length + 63) / 64 * 64;
    struct volatile_record *r;

    if (VOLATILE_HEAD + atomic_load(&journal->used) + bytes > VOLATILE_BYTES)
        records_sync(0, 0, journal_now()); /* a drive writes its cache when that is full */
    if (VOLATILE_HEAD + atomic_load(&journal->used) + bytes > VOLATILE_BYTES)
        volatile_refuse("so much at once");
    r = record_at(atomic_load(&journal->used));
    memset(r, 0, sizeof(*r));
    r->bytes = bytes;
    r->kind = kind;
    r->live = 1;
    r->dev = st->st_dev;
    r->ino = st->st_ino;
    r->length = length;
    r->old_size = (uint64_t)st->st_size;
    return r;
}

void record_add(const struct volatile_record *r)
{
    atomic_store(&journal->used, atomic_load(&journal->used) + r->bytes);
}
