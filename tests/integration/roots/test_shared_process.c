/* A root that is a process, of a directory: what every backend promises, through the real
 * boundary. */
#include "tests/unit/shared/shared_contract.h"

static struct config_process process;

static void begin(struct contract *c)
{
    contract_directory_begin(c, "/tmp");
    shared_directory_process(&process, c->directory);
    built("ucmd", c->launcher);
    strcpy(c->target, c->directory);
    c->process = &process;
    c->ops = &shared_process;
}

SHARED_CONTRACT(shared_process, begin, contract_directory_end)
