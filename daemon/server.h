/* The server owns every module, connects them, starts and stops them in order.
 *
 * Start:
 * - devices, keys, index, policy, cache, tier, arena (which grows on in the background), shared
 *   tier
 * - requests, then the front: the socket comes after them, so that every client that connects is
 *   served; and what observes
 *
 * Stop:
 * - the front accepts nobody, running requests have shutdown.drain to finish, the rest are stopped
 * - connections end, the snapshot of DRAM is written, the tier is synced
 * - the modules close, each before those that it uses
 *
 * Thread: the one that calls server_run is the event loop. */
#ifndef UCMD_SERVER_H
#define UCMD_SERVER_H

#include "daemon/config/config.h"

struct server;
struct ucm_error;

/* What the program was built from, and where its configuration came from, to be read again by a
 * reload. Borrowed for the server's life. */
struct server_sources {
    const char *commit;
    struct config_sources config;
};

/* Everything that server_new would refuse of the configuration, but for what another process has in
 * use now, and changes nothing. warn_cb runs with what is odd, and no reason not to start. Blocks.
 * 0 or -EINVAL with *e, which names file and line. */
int server_check(const struct config *config, void (*warn_cb)(const char *text),
                 struct config_error *e);
/* config is taken over, and freed with the server. 0, or a negative code with *e. */
int server_new(struct config *config, const struct server_sources *sources, struct server **out,
               struct ucm_error *e);
/* Serves until SIGTERM, SIGINT or a device that failed for good. The process's exit status. */
int server_run(struct server *s);
void server_free(struct server *s);

#endif
