/* Calls of the kernel that a process of a root may make. */
#ifndef UCMD_SHARED_PROCESS_FILTER_H
#define UCMD_SHARED_PROCESS_FILTER_H

#include <stdbool.h>

/* For this process and what it executes. Needs no_new_privs. signals_scoped: Landlock keeps signals
 * inside; else the first process may signal itself and its group, and its children nobody. 0 or
 * -errno. */
int process_filter_enter(bool network, bool signals_scoped);

#endif
