/* What `ucmctl --help` shows; commands_*.c have the commands, by group. pages.py makes the manual
 * page and the shells' completion of it. */
#include "client/ctl/ctl.h"

#include "proto/build.h"

static const struct arg_option common_options[] = {
    {"socket", ARG_TEXT, "PATH", "the daemon's socket ($UCM_SOCKET, else " UCM_DEFAULT_SOCKET ")",
     NULL, 0, 0},
    {"json", ARG_FLAG, NULL, "print one JSON document", NULL, 0, 0},
    {"timeout", ARG_SECONDS, "SECONDS", "how long one call may take", "30s", 1, 3600000},
};

static const struct program_group *const groups[] = {&commands_show, &commands_change,
                                                     &commands_host};

const struct program ctl_program = {
    .name = "ucmctl",
    .version = UCM_VERSION,
    .commit = ucm_build_commit,
    .built_with = ucm_build_options,
    .summary = "Shows and controls ucmd, the KV cache daemon of this host",
    PROGRAM_OPTIONS(common_options),
    .groups = groups,
    .n_groups = PROGRAM_COUNT(groups),
    .help = "Exit status:\n"
            "  0  done\n"
            "  1  the daemon returned an error, or something failed here\n"
            "  2  the command line is wrong\n"
            "  3  no daemon listens, or it does not answer\n"
            "  4  health: the daemon is degraded; doctor: something wants attention\n"
            "  5  verify: corrupt or unreadable blocks were found\n"
            "  6  health: the daemon is failing\n\n"
            "Examples:\n"
            "  ucmctl status                     is it running and healthy?\n"
            "  ucmctl stats --watch 1            what is it doing?\n"
            "  ucmctl namespace list             whose cache is this?\n"
            "  ucmctl ls 1 --limit 20            what is in namespace 1?\n"
            "  ucmctl purge 1 --yes              new weights under an old name: drop all\n"
            "  ucmctl COMMAND --help             more about a command\n",
};
