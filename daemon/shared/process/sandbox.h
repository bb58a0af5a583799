/* What a process of a root may do, which it is bound to before its program runs (docs/backends.md,
 * "The sandbox"). The daemon executes itself for this, with the first word PROCESS_SANDBOX: what
 * follows happens in a process of its own, with one thread. */
#ifndef UCMD_SHARED_PROCESS_SANDBOX_H
#define UCMD_SHARED_PROCESS_SANDBOX_H

#define PROCESS_SANDBOX "--backend"
#define PROCESS_USER "ucmd-backend"
#define PROCESS_ABSENT 66 /* exit status: a path that "read=" or "write=" names is not there */

/* words: "network", "memory=BYTES", "read=PATH", "write=PATH", as many as there are, then "--" and
 * the command, then NULL. Returns only on failure, with a line on standard error: the exit
 * status. */
int process_sandbox_main(char **words);

#endif
