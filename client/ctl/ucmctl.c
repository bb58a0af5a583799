#include "client/ctl/ctl.h"

int main(int argc, char **argv)
{
    struct ctl ctl = {.client = NULL};
    int rc = program_main(&ctl_program, argc, argv, &ctl);

    ucm_close(ctl.client);
    return rc;
}
