/* A clock of the test's own. */
#ifndef UCMD_TESTS_SHARED_CLOCK_H
#define UCMD_TESTS_SHARED_CLOCK_H

#include <stdint.h>

/* The servers are in memory, so only timers end a wait of the event loop. The clock stands still
 * while the test runs, and jumps when the event loop would sleep. So no test depends on how busy
 * the machine is. 0: the machine's clock. */
extern uint64_t rig_clock_ns;

#endif
