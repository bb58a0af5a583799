/* Reads the configuration again while the daemon runs, for `config.reload` and for SIGHUP.
 *
 * Promise: a mistake anywhere changes nothing; otherwise every key that is reloadable has its new
 * value when the call returns, and the log names the others that differ. Connections keep the
 * tenant and the rights that they had when they connected. It asks nothing of disks or servers but
 * for the file itself.
 * Thread: the event loop only. */
#ifndef UCMD_RELOAD_H
#define UCMD_RELOAD_H

#include "daemon/config/config.h"

struct reload {
    struct config *config;
    struct config next; /* what the last reload read; without a file: there was none */
    const struct config_sources *sources;
    struct index *index;
    struct cache *cache;
    struct requests *requests;
};

/* ctx: a struct reload. As request_modules has it. */
int reload_cb(void *ctx, struct config_changes *changes, struct config_error *e);
void reload_by_signal(struct reload *r);

#endif
