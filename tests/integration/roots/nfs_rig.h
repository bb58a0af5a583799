/* A root nfs:// as the daemon has it: ucmd-backend-nfs in its sandbox. For tests of a backend's
 * promises (shared_contract_rig.h). */
#ifndef UCMD_TESTS_NFS_RIG_H
#define UCMD_TESTS_NFS_RIG_H

#include "tests/integration/roots/nfs_relay.h"
#include "tests/integration/roots/nfs_server.h"
#include "tests/unit/shared/shared_contract_rig.h"

#include "daemon/shared/process/process.h"
#include "daemon/shared/shared.h"

#include <signal.h>

static struct nfs_server nfs_rig_server;
static struct config_process nfs_rig_process;
static struct nfs_relay relay; /* of tests that begin by it */

/* Before the backend is opened. */
static inline void nfs_rig_target(struct contract *c, const char *target)
{
    char program[256];

    built("ucmd-backend-nfs", program);
    snprintf(c->target, sizeof(c->target), "%s", target);
    snprintf(nfs_rig_process.command, sizeof(nfs_rig_process.command), "%s %s %u %u", program,
             target, (unsigned)geteuid(), (unsigned)getegid());
}

static inline void nfs_rig_server_begin(void)
{
    const char *lacks = nfs_server_lacks();

    signal(SIGPIPE, SIG_IGN); /* as the daemon does */
    if (lacks)
        cr_skip("%s", lacks);
    nfs_server_open(&nfs_rig_server);
}

static inline void nfs_rig_server_away(struct contract *c)
{
    (void)c;
    nfs_server_kill(&nfs_rig_server);
}

static inline void nfs_rig_server_back(struct contract *c)
{
    (void)c;
    nfs_server_start(&nfs_rig_server);
}

static inline void nfs_rig_begin(struct contract *c)
{
    nfs_rig_server_begin();
    nfs_rig_process = (struct config_process){
        .buffer_bytes = 8u << 20, .memory_bytes = CONFIG_MEMORY, .network = true, .pause_ms = 10};
    built("ucmd", c->launcher);
    nfs_rig_target(c, nfs_rig_server.url);
    c->process = &nfs_rig_process;
    c->ops = &shared_process;
    strcpy(c->directory, nfs_rig_server.export);
    c->root_away = nfs_rig_server_away;
    c->root_back = nfs_rig_server_back;
}

static inline void nfs_rig_end(struct contract *c)
{
    (void)c;
    nfs_server_close(&nfs_rig_server);
}

/* The same with the relay between process and server. */
static inline void nfs_rig_relay_begin(struct contract *c)
{
    char target[160];

    nfs_rig_begin(c);
    nfs_relay_open(&relay, NFS_SERVER_PORT);
    snprintf(target, sizeof(target), "nfs://127.0.0.1:%d/kv?mountport=%d", NFS_RELAY_PORT,
             NFS_SERVER_MOUNT_PORT);
    nfs_rig_target(c, target);
}

static inline void nfs_rig_relay_end(struct contract *c)
{
    nfs_relay_close(&relay);
    nfs_rig_end(c);
}

static inline void nfs_rig_turn_for(struct contract *c, uint64_t ms)
{
    uint64_t until = uv_hrtime() + ms * 1000000;

    while (uv_hrtime() < until) {
        uv_run(&c->loop, UV_RUN_NOWAIT);
        usleep(500);
    }
}

#endif
