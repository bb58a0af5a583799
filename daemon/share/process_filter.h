/* Calls of the kernel that a process of a root may not make. */
#ifndef UCMD_SHARE_PROCESS_FILTER_H
#define UCMD_SHARE_PROCESS_FILTER_H

#include <stdbool.h>

/* For this process and what it executes. Needs no_new_privs. 0 or -errno. */
int process_filter_enter(bool network);

#endif
