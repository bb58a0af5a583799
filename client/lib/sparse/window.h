/* A window's calls, for window.c and window_pin.c. With the client's lock, as all of internal.h. */
#ifndef UCM_CLIENT_WINDOW_H
#define UCM_CLIENT_WINDOW_H

#include "client/lib/internal.h"

/* The daemon of the present connection knows it. */
bool client_window_known(const struct ucm_window *w);
/* Nothing that the daemon said of it is worth anything any more. */
void client_window_abandon(struct ucm_window *w);
/* One try to open it at the daemon; CLIENT_AGAIN as client_request_wait. */
int client_window_send_open(struct ucm_window *w, int64_t deadline_ns);
/* Whether n descriptors came with the answer. 0 or -code with call->error. */
int client_window_fds_check(struct client_call *call, uint32_t n);
/* 0: the caller has entered the client and has its turn, until client_window_leave, which returns the status. */
int client_window_enter(struct ucm_window *w, int timeout_ms, int64_t *deadline_ns);
int client_window_leave(struct ucm_window *w, int status);

#endif
