/* Inside of volatile_disk.so: the journal of changes that are not final yet
 * (tests/fault/volatile_disk.h). All functions but journal_now and journal_step need the lock. */
#ifndef UCM_TESTS_VOLATILE_JOURNAL_H
#define UCM_TESTS_VOLATILE_JOURNAL_H

#include "tests/fault/volatile_disk.h"

#include <pthread.h>
#include <stdbool.h>
#include <sys/stat.h>

extern struct volatile_journal *journal; /* NULL: this process is not watched */
extern pthread_mutex_t journal_lock;

/* Ends a process that makes a call which this disk does not know. */
_Noreturn void volatile_refuse(const char *what);

/* Takes over the journal of the daemon before. */
void journal_begin(void *memory);
uint64_t journal_now(void);
/* Counts one more beginning or end of a change. The process may die here. */
void journal_step(void);

/* Not yet part of the journal: that is record_add. */
struct volatile_record *record_new(enum volatile_kind kind, const struct stat *st, uint64_t length);
void record_add(const struct volatile_record *r);

/* A sync of a file or a directory that began at `before` has succeeded, */
void records_sync(uint64_t dev, uint64_t ino, uint64_t before);
/* or has failed. */
void records_mark_deleting(uint64_t dev, uint64_t ino, uint64_t before);
/* A new file may have the number of one that is gone. */
void records_drop(uint64_t dev, uint64_t ino);

#endif
