/* Stops a process, for tests that need it to stand still. */
#ifndef UCM_TESTS_HALT_H
#define UCM_TESTS_HALT_H

#include <sys/types.h>

/* Sends SIGSTOP, and returns when none of its threads runs. After kill() alone, threads run on
 * until the one that got the signal gets a core. SIGCONT lets it run again. */
void halt(pid_t pid);

#endif
