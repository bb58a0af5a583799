/* The NFS root against a real server: what every backend promises, and what servers do to it. */
#include "nfs_server.h"
#include "tests/unit/share_contract.h"

#include <signal.h>

static struct nfs_server server;

static void server_begin(void)
{
    const char *lacks = nfs_server_lacks();

    signal(SIGPIPE, SIG_IGN); /* as the daemon does */
    if (lacks)
        cr_skip("%s", lacks);
    nfs_server_open(&server);
}

static void server_away(struct contract *c)
{
    (void)c;
    nfs_server_kill(&server);
}

static void server_back(struct contract *c)
{
    (void)c;
    nfs_server_start(&server);
}

static void begin(struct contract *c)
{
    server_begin();
    c->ops = &share_nfs;
    strcpy(c->folder, server.export);
    strcpy(c->target, server.url);
    c->root_away = server_away;
    c->root_back = server_back;
}

static void end(struct contract *c)
{
    (void)c;
    nfs_server_close(&server);
}

SHARE_CONTRACT(share_nfs, begin, end)
