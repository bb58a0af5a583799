/* A root that is a process, of a directory: what every backend promises, through the real
 * boundary. */
#include "tests/unit/share/share_contract.h"

static struct config_process process;

static void begin(struct contract *c)
{
    contract_directory_begin(c, "/tmp");
    share_directory_process(&process, c->directory);
    share_built("ucmd", c->launcher);
    strcpy(c->target, c->directory);
    c->process = &process;
    c->ops = &share_process;
}

SHARE_CONTRACT(share_process, begin, contract_directory_end)
