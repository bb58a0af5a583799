/* The table of commands. */
#include "client/ctl/ctl.h"

#include "proto/build.h"

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
    {"nonzero", ARG_FLAG, NULL, "leave out what is 0 (in the table)", NULL, 0, 0},
    {"prometheus", ARG_FLAG, NULL, "the text format that Prometheus scrapes", NULL, 0, 0},
    {"watch", ARG_SECONDS, "SECONDS", "print what changed, at this interval", NULL, 10, 86400000},
    {"count", ARG_NUMBER, "N", "stop after N lines (with --watch)", NULL, 1, UINT32_MAX},
};

static const struct arg_option ls_options[] = {
    {"limit", ARG_NUMBER, "N", "list at most N blocks", "100", 1, UINT32_MAX},
    {"cursor", ARG_NUMBER, "N", "start where an earlier list ended", NULL, 0, UINT64_MAX},
};

static const struct arg_option evict_options[] = {
    {"tier", ARG_TEXT, "TIER", "all, dram (other copies stay), nvme or share (for all hosts)",
     "all", 0, 0},
    {"yes", ARG_FLAG, NULL, "do not ask", NULL, 0, 0},
};

static const struct arg_option purge_options[] = {
    {"yes", ARG_FLAG, NULL, "do not ask", NULL, 0, 0},
};

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
    {"status", "", "Health, memory, tiers, devices and hit rate on one screen",
     "Example:\n  ucmctl status\n", NULL, 0, 0, 0, cmd_status},
    {"stats", "", "Every counter and gauge",
     "With --watch it prints one line an interval: counters as rates, gauges as they are.\n"
     "With --watch and --json each line is a JSON document.\n\n"
     "Examples:\n"
     "  ucmctl stats\n"
     "  ucmctl stats --watch 1 --count 10\n"
     "  ucmctl stats --prometheus > /var/lib/node_exporter/textfile/ucmd.prom\n"
     "  ucmctl stats --json | jq .metrics.lookup_hits\n",
     OPTIONS(stats_options), 0, 0, cmd_stats},
    {"namespaces", "", "The namespaces and what each holds",
     "Other commands name a namespace by its number or by the first digits of its\n"
     "fingerprint. A restart of the daemon changes the number, never the fingerprint.\n\n"
     "Example:\n"
     "  ucmctl namespaces\n",
     NULL, 0, 0, 0, cmd_namespaces},
    {"tenants", "", "What each tenant's namespaces hold in sum",
     "Example:\n"
     "  ucmctl tenants --json | jq '.tenants[] | {tenant, nvme_bytes}'\n",
     NULL, 0, 0, 0, cmd_tenants},
    {"ls", "NS", "The blocks of a namespace, in no particular order",
     "Examples:\n  ucmctl ls 1\n  ucmctl ls 3fa94c --limit 1000 --json | jq -r '.blocks[].key'\n",
     OPTIONS(ls_options), 1, 1, cmd_ls},
    {"inspect", "NS KEY", "One block: its parts, where they are, its leases",
     "KEY is in hexadecimal, as 'ls' prints it.\n\n"
     "Example:\n"
     "  ucmctl inspect 1 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08\n",
     NULL, 0, 2, 2, cmd_inspect},
    {"evict", "NS [KEY...]", "Drop blocks that are neither pinned nor in use",
     "Without keys it drops every block of the namespace, and asks first; without a\n"
     "terminal it needs --yes. The tiers all and share remove files that other hosts\n"
     "use, too.\n\n"
     "Examples:\n"
     "  ucmctl evict 1 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08\n"
     "  ucmctl evict 1 --tier dram --yes\n",
     OPTIONS(evict_options), 1, MAX_KEY_WORDS, cmd_evict},
    {"pin", "NS [KEY...]", "Keep blocks from ever being evicted",
     "Without keys: every complete block of the namespace. Pinned blocks take memory from\n"
     "all others: see 'pinned' in 'ucmctl status'.\n\n"
     "Example:\n"
     "  ucmctl pin 1 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08\n",
     NULL, 0, 1, MAX_KEY_WORDS, cmd_pin},
    {"unpin", "NS [KEY...]", "Let pinned blocks be evicted again",
     "Without keys: every block of the namespace.\n\nExample:\n  ucmctl unpin 1\n", NULL, 0, 1,
     MAX_KEY_WORDS, cmd_unpin},
    {"purge", "NS [KEY...]", "Drop blocks from every tier, pinned ones too",
     "Without keys: the whole namespace. It asks first; without a terminal it needs\n"
     "--yes. Lookups no longer find a block that a worker is using, and it goes with its\n"
     "last user.\n\n"
     "Example:\n"
     "  ucmctl purge 3fa94c --yes\n",
     OPTIONS(purge_options), 1, MAX_KEY_WORDS, cmd_purge},
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
     OPTIONS(verify_options), 0, 1, cmd_verify},
    {"format", "PATH", "Prepare a block device, or a file, for ucmd",
     "PATH is an entry of nvme.paths that is no folder, and no daemon may use it. A device\n"
     "that holds something is refused; --force destroys the contents, after asking.\n\n"
     "Example:\n"
     "  ucmctl format /dev/nvme1n1\n",
     OPTIONS(format_options), 1, 1, cmd_format},
    {"share", "[collect [ROOT]]", "The roots of the shared tier: health, use, latency, failures",
     "collect starts a garbage collection now, on ROOT (its number or name in the list) or\n"
     "on all roots that take writes. It runs in the background. For operators.\n\n"
     "Examples:\n"
     "  ucmctl share\n"
     "  ucmctl share collect 1\n",
     NULL, 0, 0, 2, cmd_share},
    {"health", "", "ok, recovering, degraded or failing, and why; for monitoring",
     "The exit status is 0 for ok and recovering, and 4 for degraded or failing.\n\n"
     "Example:\n"
     "  ucmctl health --timeout 2 || systemctl restart ucmd\n",
     NULL, 0, 0, 0, cmd_health},
    {"version", "", "Versions of ucmctl, its library and the daemon",
     "Example:\n  ucmctl version --json\n", NULL, 0, 0, 0, cmd_version},
};

static const struct program ucmctl = {
    .name = "ucmctl",
    .version = UCM_VERSION,
    .commit = ucm_build_commit,
    .built_with = ucm_build_options,
    .summary = "Shows and controls ucmd, the KV cache daemon of this host",
    OPTIONS(common_options),
    .commands = commands,
    .n_commands = COUNT(commands),
    .help = "Exit status:\n"
            "  0  done\n"
            "  1  the daemon returned an error, or something failed here\n"
            "  2  the command line is wrong\n"
            "  3  no daemon listens, or it does not answer\n"
            "  4  health: the daemon is degraded or failing\n"
            "  5  verify: corrupt or unreadable blocks were found\n\n"
            "Examples:\n"
            "  ucmctl status                     is it running and healthy?\n"
            "  ucmctl stats --watch 1            what is it doing?\n"
            "  ucmctl namespaces                 whose cache is this?\n"
            "  ucmctl ls 1 --limit 20            what is in namespace 1?\n"
            "  ucmctl purge 1 --yes              new weights under an old name: drop all\n"
            "  ucmctl COMMAND --help             more about a command\n",
};

int main(int argc, char **argv)
{
    struct ctl ctl = {.client = NULL};
    int rc = program_main(&ucmctl, argc, argv, &ctl);

    ucm_close(ctl.client);
    return rc;
}
