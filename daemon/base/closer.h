/* close() of a descriptor that came from others, or of a socket in which some of theirs lie. They
 * can make it wait: by a socket that lingers, or by a file of a file system that they serve. The
 * wait of the first kind ends soon: a socket is told not to linger; one that lies unread in another
 * can't be, and a signal to the thread, first after CLOSER_POKE_NS and then every CLOSER_POKE_MS,
 * ends that wait, and nothing else that matters. The second kind ends when the file system answers.
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

/* Of the calling thread. */
void closer_init(struct closer *c);
void closer_end(struct closer *c);
void closer_close(struct closer *c, int fd);

/* One descriptor, closed by a thread of its own. */
struct closing;

/* Takes fd. NULL: it is closed. */
struct closing *closing_begin(int fd);
/* NULL: true. */
bool closing_done(const struct closing *c);
/* NULL-safe; what is not closed yet will be. */
void closing_free(struct closing *c);

#endif
