/* A full screen on a terminal, by ECMA-48 sequences that every terminal since the VT100 has: the
 * alternate screen, without a cursor, and keys without Enter.
 *
 * Promise: the terminal is as before after screen_close, after exit(), after SIGINT, SIGTERM, SIGHUP and
 * SIGQUIT, and while the process is suspended. One screen a process, one thread. */
#ifndef UCM_CTL_SCREEN_H
#define UCM_CTL_SCREEN_H

#include <stdbool.h>

/* 0 or -errno: standard input and output are no terminal. */
int screen_open(void);
void screen_close(void); /* also of one that is not open */
/* Shows the first lines of the text, as many and as wide as the terminal has space for. */
void screen_show(const char *text);
/* Waits for a key, for another size, or for the end of the time. The key; 0: none came. */
int screen_wait(int timeout_ms);

#endif
