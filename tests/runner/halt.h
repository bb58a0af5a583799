/* Stops a process, for tests that must know it still. */
#ifndef UCM_TESTS_HALT_H
#define UCM_TESTS_HALT_H

#include <sys/types.h>

/* By SIGSTOP; returns when none of its threads runs. After kill() alone they go on for as long as
 * the one that the signal was given to waits for a core. SIGCONT lets it run again. */
void halt(pid_t pid);

#endif
