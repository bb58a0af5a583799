/* Status, stats, namespaces and their kin: what the daemon does and holds. */
#include "client/ctl/ctl.h"

static const struct arg_option stats_options[] = {
    {"nonzero", ARG_FLAG, NULL, "leave out what is 0 (in the table)", NULL, 0, 0},
    {"prometheus", ARG_FLAG, NULL, "the text format that Prometheus scrapes", NULL, 0, 0},
    {"watch", ARG_SECONDS, "SECONDS", "print what changed, at this interval", NULL, 10, 86400000},
    {"count", ARG_NUMBER, "N", "stop after N lines (with --watch)", NULL, 1, UINT32_MAX},
};

static const struct arg_option top_options[] = {
    {"interval", ARG_SECONDS, "SECONDS", "from one frame to the next", "1", 100, 3600000},
    {"count", ARG_NUMBER, "N", "stop after N frames; default without a terminal: 1", NULL, 1,
     UINT32_MAX},
};

static const struct arg_option ls_options[] = {
    {"limit", ARG_NUMBER, "N", "list at most N blocks", "100", 1, UINT32_MAX},
    {"cursor", ARG_NUMBER, "N", "start where an earlier list ended", NULL, 0, UINT64_MAX},
};

static const struct arg_option trace_options[] = {
    {"out", ARG_TEXT, "FILE", "where to write the trace; required", NULL, 0, 0},
    {"seconds", ARG_SECONDS, "SECONDS", "how long", "10s", 100, 86000000},
    {"slower", ARG_SECONDS, "TIME", "only requests that take at least so long", NULL, 1, 4000000},
    {"request", ARG_TEXT, "ID", "only those whose engine's request id begins so", NULL, 0, 0},
    {"tenant", ARG_TEXT, "NAME", "only those of this tenant", NULL, 0, 0},
    {"sample", ARG_NUMBER, "N", "only one in N of these", NULL, 1, UINT32_MAX},
    {"ring", ARG_SIZE, "SIZE", "memory that the daemon takes meanwhile", "4MiB", 65536, 268435456},
};

static const struct arg_option events_options[] = {
    {"follow", ARG_FLAG, NULL, "go on; without --since from now on", NULL, 0, 0},
    {"since", ARG_NUMBER, "N", "those after number N", NULL, 0, UINT64_MAX},
    {"count", ARG_NUMBER, "N", "stop after N events", NULL, 1, UINT64_MAX},
    {"tenant", ARG_TEXT, "NAME", "of this tenant, for operators", NULL, 0, 0},
    {"tokens", ARG_FLAG, NULL, "with each block's parent and tokens, where they are known", NULL, 0,
     0},
};

static const struct arg_option config_options[] = {
    {"changed", ARG_FLAG, NULL, "only keys that are not the default, or wait for a restart", NULL,
     0, 0},
    {"import", ARG_TEXT, "FILE", "print UCM's ucm_config.yaml as a file of ucmd; needs no daemon",
     NULL, 0, 0},
};

static const struct arg_option health_options[] = {
    {"live", ARG_FLAG, NULL, "0 if the daemon answers at all, else 3: restart it", NULL, 0, 0},
    {"ready", ARG_FLAG, NULL, "0 if it serves, degraded too; 6 if it is failing", NULL, 0, 0},
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
     PROGRAM_OPTIONS(stats_options), 0, 0, cmd_stats},
    {"top", "", "What happens now, by tenant and namespace, on a live screen",
     "GB/s, hits, times, what DRAM and the other tiers hold, evictions, and waits for\n"
     "DRAM. Rates are of the last interval; busiest first; \"-\" is not known. q ends it.\n"
     "Without a terminal it prints one frame. With --json each frame is one line.\n\n"
     "Examples:\n"
     "  ucmctl top\n"
     "  ucmctl top --json --interval 10 --count 6\n",
     PROGRAM_OPTIONS(top_options), 0, 0, cmd_top},
    {"namespace", "[list]", "The namespaces and what each holds",
     "Other commands name a namespace by its number or by the first digits of its\n"
     "fingerprint. A restart of the daemon changes the number, never the fingerprint.\n"
     "RATIO is how much smaller the blocks of an encoded namespace are than those of its\n"
     "base. The end of LAYOUT names the encoding.\n\n"
     "Example:\n"
     "  ucmctl namespace list\n",
     NULL, 0, 0, 1, cmd_namespace},
    {"ls", "NS", "The blocks of a namespace, in no particular order",
     "Examples:\n  ucmctl ls 1\n  ucmctl ls 3fa94c --limit 1000 --json | jq -r '.blocks[].key'\n",
     PROGRAM_OPTIONS(ls_options), 1, 1, cmd_ls},
    {"inspect", "NS KEY", "One block: its parts, where they are, its leases",
     "KEY is in hexadecimal, as 'ls' prints it.\n\n"
     "Example:\n"
     "  ucmctl inspect 1 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08\n",
     NULL, 0, 2, 2, cmd_inspect},
    {"shared", "[gc [ROOT]]", "The roots of the shared tier: health, use, latency, failures",
     "USED and FILES are those of the last garbage collection.\n\n"
     "gc starts a garbage collection now, on ROOT (its number or name in the list) or\n"
     "on all roots that take writes. It runs in the background. For operators.\n\n"
     "Examples:\n"
     "  ucmctl shared\n"
     "  ucmctl shared gc 1\n",
     NULL, 0, 0, 2, cmd_shared},
    {"trace", "", "What requests wait for, as a file for Perfetto (ui.perfetto.dev)",
     "The file has a row for each lookup, load, gather, dump and prefetch, below the id of the\n"
     "engine's request. Gathers, which serve many requests, are below their process. A row\n"
     "shows the request's queue, lookups, reads, waits for DRAM, copies and answer. The trace\n"
     "ends after --seconds or with Ctrl-C; the file is complete either way. For operators, one\n"
     "at a time.\n\n"
     "Examples:\n"
     "  ucmctl trace --out slow.json --slower 50ms --seconds 60\n"
     "  ucmctl trace --out one.json --request cmpl-7f3a\n",
     PROGRAM_OPTIONS(trace_options), 0, 0, cmd_trace},
    {"events", "", "Cache events: blocks stored, moved between tiers, evicted",
     "One line an event, with its number, namespace and key. Without --follow it prints what the\n"
     "daemon still has. At a gap it says how many events were lost. The daemon keeps events\n"
     "only if events.memory is set, and those of a tenant from the first request for them on.\n"
     "With --json each line is a JSON document.\n\n"
     "Examples:\n"
     "  ucmctl events --follow\n"
     "  ucmctl events --since 4000 --json --tokens\n",
     PROGRAM_OPTIONS(events_options), 0, 0, cmd_events},
    {"health", "", "ok, recovering, degraded or failing, and why; for monitoring",
     "The exit status is 0 for ok and recovering, 4 for degraded, and 6 for failing. It is 3\n"
     "without an answer, and 1 if this user may not connect. Degraded means that there is less\n"
     "cache: a disk or a shared root is lost, or a bypass is on. The reasons say what to do.\n\n"
     "--live and --ready are the questions of supervisors: 'must it be restarted?' and 'may\n"
     "engines use it?'. Both are 0 while it is degraded.\n\n"
     "Examples:\n"
     "  ucmctl health\n"
     "  ucmctl health --live --timeout 10 || systemctl restart ucmd\n"
     "  ucmctl health --ready && systemctl start engine\n",
     PROGRAM_OPTIONS(health_options), 0, 0, cmd_health},
    {"config", "[reload]", "What the daemon runs with, and where each value came from",
     "A value's source is the default, FILE:LINE, a variable such as UCMD_ARENA_SIZE, or\n"
     "--set. A key that a reload can't change shows what the next start will take. For\n"
     "operators.\n\n"
     "reload: reads the configuration again. It lists what changed and what needs a restart. A\n"
     "mistake anywhere in the file changes nothing: the exit status is 1, with the file, the\n"
     "line and what would be right. Connections keep their tenant and rights.\n\n"
     "--import reads a configuration of UCM. It prints the settings that both have, and a\n"
     "comment for each line that has no counterpart.\n\n"
     "Examples:\n"
     "  ucmctl config --changed\n"
     "  ucmctl config reload\n"
     "  ucmctl config --import ucm_config.yaml > ucmd.yaml\n"
     "  ucmctl config --json | jq -r '.keys[] | select(.key == \"arena.size\") | .value'\n",
     PROGRAM_OPTIONS(config_options), 0, 1, cmd_config},
    {"version", "", "Versions of ucmctl, its library and the daemon",
     "Example:\n  ucmctl version --json\n", NULL, 0, 0, 0, cmd_version},
};

const struct program_group commands_show = {
    .title = "Commands that show", .commands = commands, .n_commands = PROGRAM_COUNT(commands)};
