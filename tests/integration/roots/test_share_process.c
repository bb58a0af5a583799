/* A root that is a process, of a folder: what every backend promises, through the real boundary. */
#include "tests/unit/share/share_contract.h"

static struct config_process process;

static void begin(struct contract *c)
{
    contract_folder_begin(c, "/tmp");
    share_folder_process(&process, c->folder);
    share_built("ucmd", c->launcher);
    strcpy(c->target, c->folder);
    c->process = &process;
    c->ops = &share_process;
}

SHARE_CONTRACT(share_process, begin, contract_folder_end)
