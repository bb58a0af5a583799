/* Verify, format: disks and the host itself. */
#include "client/ctl/ctl.h"

static const struct arg_option verify_options[] = {
    {"page", ARG_NUMBER, "N", "check N blocks in one call", "64", 1, 4096},
    {"offline", ARG_TEXT, "PATH", "check this entry of nvme.paths, without a daemon", NULL, 0, 0},
    {"state", ARG_TEXT, "FOLDER", "nvme.state, if PATH is a device or a file", NULL, 0, 0},
    {"salvage", ARG_FLAG, NULL, "repair what is found (with --offline)", NULL, 0, 0},
    {"lift-quarantine", ARG_FLAG, NULL, "allow writes to bad segments again (with --offline)", NULL,
     0, 0},
};

static const struct arg_option format_options[] = {
    {"force", ARG_FLAG, NULL, "also if it holds something; destroys that", NULL, 0, 0},
    {"yes", ARG_FLAG, NULL, "do not ask", NULL, 0, 0},
};

static const struct program_command commands[] = {
    {"verify", "[NS]", "Read what is on NVMe and check it",
     "Without a namespace: all of them. The daemon drops corrupt parts and never serves\n"
     "them. The exit status is 5 if any was corrupt or unreadable.\n\n"
     "--offline checks the files of a daemon that does not run. PATH is an entry of\n"
     "nvme.paths: a folder, or a device or file; for these --state names the folder with\n"
     "the namespaces. It counts live records, corrupt headers and corrupt payloads. After\n"
     "a kill, records that were being written may be corrupt; none of these had been\n"
     "acknowledged as durable.\n\n"
     "Only --salvage writes. It drops what is corrupt, restores damaged segment headers\n"
     "from the records behind them, writes the list of namespaces again without damaged\n"
     "entries, and removes a checkpoint that names anything damaged. The exit status is for\n"
     "what it found; run it again to see that the damage is gone.\n\n"
     "Examples:\n"
     "  ucmctl verify && echo sound\n"
     "  ucmctl verify --offline /var/lib/ucmd/nvme0\n"
     "  ucmctl verify --offline /var/lib/ucmd/nvme0 --salvage\n"
     "  ucmctl verify --offline /dev/nvme1n1 --state /var/lib/ucmd/state\n",
     PROGRAM_OPTIONS(verify_options), 0, 1, cmd_verify},
    {"format", "PATH", "Prepare a block device, or a file, for ucmd",
     "PATH is an entry of nvme.paths that is no folder, and no daemon may use it. A device\n"
     "that holds something is refused; --force destroys the contents, after asking.\n\n"
     "Example:\n"
     "  ucmctl format /dev/nvme1n1\n",
     PROGRAM_OPTIONS(format_options), 1, 1, cmd_format},
};

const struct program_group commands_host = {.title = "Commands for disks and hosts",
                                            .commands = commands,
                                            .n_commands = PROGRAM_COUNT(commands)};
