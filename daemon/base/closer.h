/* close() of a client's descriptor, or of a socket with unread descriptors. A client can make it
 * block: with a socket that lingers, or with a file of a file system that the client serves. The
 * first kind ends soon: the closer turns SO_LINGER off. It can't for a socket that lies unread in
 * another one; there a signal to the thread, after CLOSER_POKE_NS and then every CLOSER_POKE_MS,
 * interrupts only that wait. The second kind ends when the file system answers.
 *
 * Threads: a closer is its thread's own. */
#ifndef UCMD_BASE_CLOSER_H
#define UCMD_BASE_CLOSER_H

#include <stdbool.h>
#include <time.h>

#define CLOSER_POKE_NS 250000 /* of a uid's refused sockets more are closed than it may connect */
#define CLOSER_POKE_MS 5

struct closer {
    timer_t timer;
    bool poked; /* there is a timer */
};

/* Initializes the calling thread's closer. */
void closer_init(struct closer *c);
void closer_end(struct closer *c);
void closer_close(struct closer *c, int fd);

/* A descriptor at a time, closed by a thread of its own. */
struct closing;

/* NULL: no memory. */
struct closing *closing_new(void);
/* Takes fd, when closing_done. NULL: closes it here. */
void closing_begin(struct closing *c, int fd);
/* Is that over, and no other holder left? */
bool closing_done(const struct closing *c);
/* Another holder, of any thread. */
struct closing *closing_hold(struct closing *c);
/* NULL-safe; what is not closed yet will be. */
void closing_drop(struct closing *c);

#endif
