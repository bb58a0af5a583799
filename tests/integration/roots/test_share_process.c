/* A root that is a process: what every backend promises, through the real boundary. */
#include "tests/unit/share/share_contract.h"

#include "daemon/config/roots.h"

#include <signal.h>

static struct config_process process;

static void begin(struct contract *c)
{
    char program[256];

    contract_built("ucmd-backend-folder", program);
    signal(SIGPIPE, SIG_IGN); /* as the daemon does */
    contract_folder_begin(c, "/tmp");
    snprintf(process.command, sizeof(process.command), "%s %s", program, c->folder);
    process.buffer_bytes = 8u << 20;
    strcpy(process.folder, c->folder); /* what it may write to, and no more */
    contract_built("ucmd", c->launcher);
    strcpy(c->target, CONFIG_PROCESS "folder");
    c->process = &process;
    c->ops = &share_process;
}

SHARE_CONTRACT(share_process, begin, contract_folder_end)
