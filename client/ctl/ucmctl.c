/* The table of commands. */
#include "client/ctl/ctl.h"

#define COUNT(table) (sizeof(table) / sizeof((table)[0]))
#define OPTIONS(table) .options = (table), .n_options = COUNT(table)
#define MAX_KEY_WORDS 16384

static const struct arg_option common_options[] = {
    {"socket", ARG_TEXT, "PATH", "the daemon's socket ($UCM_SOCKET, else " UCM_DEFAULT_SOCKET ")",
     NULL, 0, 0},
    {"json", ARG_FLAG, NULL, "print one JSON document for programs", NULL, 0, 0},
    {"timeout", ARG_SECONDS, "SECONDS", "how long one call may take", "30s", 1, 3600000},
};

static const struct arg_option stats_options[] = {
    {"nonzero", ARG_FLAG, NULL, "in the table: leave out what is 0", NULL, 0, 0},
    {"prometheus", ARG_FLAG, NULL, "the text format that Prometheus scrapes", NULL, 0, 0},
    {"watch", ARG_SECONDS, "SECONDS", "print what changed, every so often", NULL, 10, 86400000},
    {"count", ARG_NUMBER, "N", "with --watch: stop after N lines", NULL, 1, UINT32_MAX},
};

static const struct arg_option ls_options[] = {
    {"limit", ARG_NUMBER, "N", "blocks to list at most", "100", 1, UINT32_MAX},
    {"cursor", ARG_NUMBER, "N", "go on where an earlier listing ended", NULL, 0, UINT64_MAX},
};

static const struct arg_option evict_options[] = {
    {"tier", ARG_TEXT, "TIER", "all, dram (a copy below stays), nvme or share (of all hosts)",
     "all", 0, 0},
    {"yes", ARG_FLAG, NULL, "do not ask", NULL, 0, 0},
};

static const struct arg_option purge_options[] = {
    {"yes", ARG_FLAG, NULL, "do not ask", NULL, 0, 0},
};

static const struct arg_option verify_options[] = {
    {"page", ARG_NUMBER, "N", "blocks that one call checks", "64", 1, 4096},
    {"offline", ARG_TEXT, "PATH", "read this entry of nvme.paths, without a daemon", NULL, 0, 0},
    {"state", ARG_TEXT, "FOLDER", "nvme.state, when that entry is a device or a file", NULL, 0, 0},
    {"salvage", ARG_FLAG, NULL, "with --offline: repair what was found", NULL, 0, 0},
    {"lift-quarantine", ARG_FLAG, NULL, "with --offline: let bad segments be written to again",
     NULL, 0, 0},
};

static const struct arg_option format_options[] = {
    {"force", ARG_FLAG, NULL, "also when something lies there, which is destroyed", NULL, 0, 0},
    {"yes", ARG_FLAG, NULL, "do not ask", NULL, 0, 0},
};

static const struct program_command commands[] = {
    {"status", "", "One screen: health, memory, tiers, devices, hit rate",
     "Example:\n  ucmctl status\n", NULL, 0, 0, 0, cmd_status},
    {"stats", "", "Every counter and gauge",
     "With --watch, a line an interval: counters as rates, gauges as they are. With\n"
     "--watch and --json, one JSON document a line.\n\n"
     "Examples:\n"
     "  ucmctl stats\n"
     "  ucmctl stats --watch 1 --count 10\n"
     "  ucmctl stats --prometheus > /var/lib/node_exporter/textfile/ucmd.prom\n"
     "  ucmctl stats --json | jq .metrics.lookup_hits\n",
     OPTIONS(stats_options), 0, 0, cmd_stats},
    {"namespaces", "", "The namespaces and what each holds",
     "Other commands take a namespace by its number or by the first digits of its\n"
     "fingerprint. The number changes when the daemon starts again, the fingerprint\n"
     "never does.\n\n"
     "Example:\n"
     "  ucmctl namespaces\n",
     NULL, 0, 0, 0, cmd_namespaces},
    {"tenants", "", "What each tenant's namespaces hold together",
     "Example:\n"
     "  ucmctl tenants --json | jq '.tenants[] | {tenant, nvme_bytes}'\n",
     NULL, 0, 0, 0, cmd_tenants},
    {"ls", "NS", "The blocks of a namespace, in no particular order",
     "Examples:\n  ucmctl ls 1\n  ucmctl ls 3fa94c --limit 1000 --json | jq -r '.blocks[].key'\n",
     OPTIONS(ls_options), 1, 1, cmd_ls},
    {"inspect", "NS KEY", "One block: its parts, where they lie, who holds it",
     "KEY is written in hexadecimal, as 'ls' shows it.\n\n"
     "Example:\n"
     "  ucmctl inspect 1 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08\n",
     NULL, 0, 2, 2, cmd_inspect},
    {"evict", "NS [KEY...]", "Drop blocks from the cache, but for those in use or pinned",
     "Without keys every block of the namespace is dropped, and you are asked first;\n"
     "where nobody can be asked, --yes is needed. 'all' and 'share' remove files that\n"
     "other hosts use, too.\n\n"
     "Examples:\n"
     "  ucmctl evict 1 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08\n"
     "  ucmctl evict 1 --tier dram --yes\n",
     OPTIONS(evict_options), 1, MAX_KEY_WORDS, cmd_evict},
    {"pin", "NS [KEY...]", "Keep blocks from ever being evicted",
     "Without keys: every complete block of the namespace. Pinned blocks take room that\n"
     "others can not use: see 'pinned' in 'ucmctl status'.\n\n"
     "Example:\n"
     "  ucmctl pin 1 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08\n",
     NULL, 0, 1, MAX_KEY_WORDS, cmd_pin},
    {"unpin", "NS [KEY...]", "Let pinned blocks be evicted again",
     "Without keys: every block of the namespace.\n\nExample:\n  ucmctl unpin 1\n", NULL, 0, 1,
     MAX_KEY_WORDS, cmd_unpin},
    {"purge", "NS [KEY...]", "Drop blocks from every tier, pinned ones too",
     "Without keys: the whole namespace. You are asked first; where nobody can be asked,\n"
     "--yes is needed. A block that a worker is using is no longer found, and goes when\n"
     "the worker lets go.\n\n"
     "Example:\n"
     "  ucmctl purge 3fa94c --yes\n",
     OPTIONS(purge_options), 1, MAX_KEY_WORDS, cmd_purge},
    {"verify", "[NS]", "Read what lies on NVMe again and check it",
     "Without a namespace: all of them. Corrupt parts are dropped by the daemon, never\n"
     "served. The exit code is 5 when any was corrupt or unreadable.\n\n"
     "With --offline the files of a daemon that does not run are walked: a folder of\n"
     "nvme.paths, or a device or file of it, with --state for whose the parts are. Told are\n"
     "live slots, corrupt headers and payloads. After a kill a few that were being written\n"
     "then may be corrupt: they were acknowledged to nobody as durable.\n"
     "Nothing is written, but with --salvage: that drops what is corrupt, makes damaged\n"
     "segment headers again where the slots tell how they were, writes the namespaces\n"
     "anew without damaged records and removes a checkpoint that tells of any of it. The\n"
     "exit code tells what was found; run it again to see that it is gone.\n\n"
     "Examples:\n"
     "  ucmctl verify && echo sound\n"
     "  ucmctl verify --offline /var/lib/ucmd/nvme0\n"
     "  ucmctl verify --offline /var/lib/ucmd/nvme0 --salvage\n"
     "  ucmctl verify --offline /dev/nvme1n1 --state /var/lib/ucmd/state\n",
     OPTIONS(verify_options), 0, 1, cmd_verify},
    {"format", "PATH", "Let ucmd use a block device, or a file, as it is",
     "For an entry of nvme.paths that is no folder. A device that holds something is\n"
     "refused; --force destroys that, and you are asked first. The daemon must not run\n"
     "on it. Needs no daemon.\n\n"
     "Example:\n"
     "  ucmctl format /dev/nvme1n1\n",
     OPTIONS(format_options), 1, 1, cmd_format},
    {"share", "[collect [ROOT]]", "The roots of the shared tier: health, room, latency, failures",
     "With collect, a collection begins now: of ROOT, by its place or its name in the list,\n"
     "or of all that take writes. It goes on in the background; for operators.\n\n"
     "Examples:\n"
     "  ucmctl share\n"
     "  ucmctl share collect 1\n",
     NULL, 0, 0, 2, cmd_share},
    {"health", "", "ok, recovering, degraded or failing, and why; for probes",
     "The exit code is 0 for ok and recovering, and 4 for degraded or failing.\n\n"
     "Example:\n"
     "  ucmctl health --timeout 2 || systemctl restart ucmd\n",
     NULL, 0, 0, 0, cmd_health},
    {"version", "", "Versions of ucmctl, its library and the daemon",
     "Example:\n  ucmctl version --json\n", NULL, 0, 0, 0, cmd_version},
};

static const struct program ucmctl = {
    .name = "ucmctl",
    .version = UCM_VERSION,
    .summary = "Looks at and steers ucmd, the KV cache daemon of this host",
    OPTIONS(common_options),
    .commands = commands,
    .n_commands = COUNT(commands),
    .help =
        "Exit codes:\n"
        "  0  done\n"
        "  1  the daemon answered with an error, or something failed here\n"
        "  2  the command line is wrong\n"
        "  3  no daemon is there, or it does not answer\n"
        "  4  health: the daemon is degraded or failing\n"
        "  5  verify: corrupt or unreadable blocks were found\n\n"
        "Examples:\n"
        "  ucmctl status                     is it there, and is it well?\n"
        "  ucmctl stats --watch 1            what is it doing?\n"
        "  ucmctl namespaces                 whose cache is this?\n"
        "  ucmctl ls 1 --limit 20            what is in namespace 1?\n"
        "  ucmctl purge 1 --yes              a new set of weights under an old name: drop it all\n"
        "  ucmctl COMMAND --help             more about a command\n",
};

int main(int argc, char **argv)
{
    return program_main(&ucmctl, argc, argv);
}
