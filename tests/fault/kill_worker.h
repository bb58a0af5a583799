/* The worker of tests in which the daemon dies: it dumps, loads, and reports to the oracle. Every
 * function that returns bool returns false when the daemon is gone. */
#ifndef UCM_TESTS_KILL_WORKER_H
#define UCM_TESTS_KILL_WORKER_H

#include "tests/fault/kill_oracle.h"
#include "tests/integration/harness.h"

#include <pthread.h>

#define KILL_BATCH 32u
#define KILL_CLIENT_MS 500 /* also what a call takes to give up a daemon that is gone */

struct kill_worker {
    struct worker w;
    struct oracle *oracle;
    bool disk_fails; /* so a dump may be answered as not durable */
    bool full;       /* likewise: all segments may be in use */
    bool patient;    /* nobody kills the daemon, so the worker waits for late answers */
    unsigned durable_checked, found, absent, not_durable;
};

struct killer {
    unsigned after_us;
    int signal;
    bool may_fail; /* a stop may say that something was not synced */
    pthread_t thread;
    pid_t pid;
};

/* Sends the daemon its signal after a while, if it is still there. */
void killer_start(struct killer *k, const struct host *h);
/* Waits for the daemon's end, by that signal or SIGKILL, and reports to the oracle. */
void killer_reap(struct killer *k, struct host *h, struct oracle *o);

/* Starts it; false: it was killed before it answered. */
bool kill_restarted(struct host *h);
/* Of daemons: UCM_KILL_LOG=1 asks for more. */
const char *kill_log_level(void);

/* The result of the task that a call gave; `rc`: the call's own. Its statuses, one a key. */
int kill_task_run(int rc, struct ucm_task *task, uint32_t n, uint8_t *status);

bool kill_worker_connect(struct kill_worker *k, const struct host *h);
/* New keys, durable or not by chance. */
bool kill_worker_dump(struct kill_worker *k, uint32_t n);
/* Keys that were dumped before. */
bool kill_worker_dump_again(struct kill_worker *k, uint32_t n, bool durable);
/* Purges a namespace without blocks so often. Each purge writes a record, besides that of the keys'
 * namespace. */
void kill_worker_purges(struct kill_worker *k, unsigned n);
/* Every key, and some that were never dumped. */
bool kill_worker_check(struct kill_worker *k);
/* Waits for the end of recovery. */
bool kill_worker_recovered(struct kill_worker *k);

/* Says what a whole test has counted, also to the file that UCM_KILL_REPORT names. */
void kill_report(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
