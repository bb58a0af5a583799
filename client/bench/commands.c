/* The table of commands. The manual page and the shells' completion are made from it, too. */
#include "client/bench/bench.h"

#include "proto/build.h"

static const struct arg_option common_options[] = {
    {"socket", ARG_TEXT, "PATH", "the daemon's socket ($UCM_SOCKET, else " UCM_DEFAULT_SOCKET ")",
     NULL, 0, 0},
    {"json", ARG_FLAG, NULL, "print one JSON document", NULL, 0, 0},
    {"timeout", ARG_SECONDS, "SECONDS", "how long one call may take", "30s", 1, 3600000},
    {"quiet", ARG_FLAG, NULL, "no progress on standard error", NULL, 0, 0},
};

static const struct arg_option replay_options[] = {
    {"trace", ARG_TEXT, "FILE", "of ucm-bench record, or in Mooncake's format; else generated",
     NULL, 0, 0},
    {"limit", ARG_NUMBER, "N", "stop after N requests; 0: at the trace's end", "0", 0, UINT32_MAX},
    {"speed", ARG_NUMBER, "PERCENT", "pace of the trace's timestamps; 0: as fast as can be", "0", 0,
     1000000},
    {"block-bytes", ARG_SIZE, "SIZE", "bytes of a block", "64KiB", 64, 1u << 26},
    {"fragment", ARG_SIZE, "SIZE", "bytes of a block that lie together", "16KiB", 8, 1u << 26},
    {"model", ARG_TEXT, "NAME", "of the namespace: the same name finds the same blocks again",
     "ucm-bench replay", 0, 0},
    {"seed", ARG_NUMBER, "N", "of a generated workload", "1", 0, UINT64_MAX},
};

static const struct arg_option record_options[] = {
    {"out", ARG_TEXT, "FILE", "where to write the trace; required", NULL, 0, 0},
    {"seconds", ARG_SECONDS, "SECONDS", "how long", "1min", 100, 86000000},
    {"tenant", ARG_TEXT, "NAME", "only what this tenant does", NULL, 0, 0},
    {"ring", ARG_SIZE, "SIZE", "memory that the daemon takes meanwhile", "16MiB", 65536, 268435456},
};

static const struct arg_option serve_options[] = {
    {"tokens", ARG_TEXT, "LIST", "tokens of a prompt", "1024,8192", 0, 0},
    {"concurrency", ARG_TEXT, "LIST", "requests under way at once", "1,8", 0, 0},
    {"hits", ARG_TEXT, "LIST", "of each prompt, percent that was served before", "0,50,90", 0, 0},
    {"output", ARG_NUMBER, "N", "tokens to ask for", "32", 1, 1000000},
    {"requests", ARG_NUMBER, "N", "requests of a round", "16", 1, 1000000},
    {"rounds", ARG_NUMBER, "N", "rounds; two endpoints take turns", "3", 1, 1000},
    {"model", ARG_TEXT, "NAME", "the model; else the first of /v1/models", NULL, 0, 0},
    {"text", ARG_FLAG, NULL, "prompts are words, about a token each, and no ids", NULL, 0, 0},
    {"ignore-eos", ARG_FLAG, NULL, "ask for all tokens (vLLM and kin)", NULL, 0, 0},
    {"seed", ARG_NUMBER, "N", "of the prompts; else another one each time", NULL, 0,
     UINT64_C(1) << 52},
};

static const struct arg_option lookup_options[] = {
    {"blocks", ARG_NUMBER, "N", "blocks to store before measuring", "16384", 1, 100000000},
    {"keys", ARG_NUMBER, "N", "keys of the long prefix", "8192", 2, 16384},
    {"calls", ARG_NUMBER, "N", "one-key lookups a round", "1000", 20, 1000000},
    {"rounds", ARG_NUMBER, "N", "rounds", "11", 1, 1000},
    {"block-bytes", ARG_SIZE, "SIZE", "bytes of a block; it takes 4 KiB of the arena at least",
     "64", 64, 1u << 20},
    {"fragment", ARG_SIZE, "SIZE", "bytes of a block that lie together", "64", 8, 1u << 20},
};

static const struct arg_option move_options[] = {
    BENCH_COPY_OPTIONS,
    {"threads", ARG_NUMBER, "N", "threads of the memcpy baseline; the daemon's device.cpu_threads",
     "2", 1, 64},
};

static const struct arg_option tier_options[] = {
    {"ucmd", ARG_TEXT, "PATH", "the daemon's program", "build/ucmd", 0, 0},
    {"dir", ARG_TEXT, "DIR", "a directory on the disk; takes --total about four times", "/var/tmp",
     0, 0},
    {"total", ARG_SIZE, "SIZE", "bytes that are written and read", "1GiB", 64u << 20,
     BENCH_MAX_BYTES},
    {"depth", ARG_NUMBER, "N", "operations at the disk at once", "32", 1, 256},
    {"rounds", ARG_NUMBER, "N", "rounds", "7", 1, 1000},
    {"slice", ARG_SECONDS, "SECONDS", "how long each measures before it is the other's turn", "1s",
     50, 60000},
};

static const struct arg_option copy_options[] = {
    {"ucmd", ARG_TEXT, "PATH", "the daemon's program", "build/ucmd", 0, 0},
    {"strategies", ARG_TEXT, "LIST",
     "of copy.strategy, +ring: with a copy agent; the last is compared with the targets",
     "dma,sm,staged,auto,auto+ring", 0, 0},
    {"fragments", ARG_TEXT, "LIST", "bytes of a block that lie together",
     "4KiB,16KiB,32KiB,64KiB,256KiB,512KiB,2MiB,4MiB", 0, 0},
    {"encoding", ARG_TEXT, "LIST",
     "instead of strategies: blocks stored as fp8, int8, q4 or lossless, with a copy agent", NULL,
     0, 0},
    {"time", ARG_SECONDS, "SECONDS", "how long to measure each figure", "300ms", 50, 60000},
    {"nvme-dir", ARG_TEXT, "DIR", "measure loads from NVMe too, in a directory below this one",
     NULL, 0, 0},
};

static const struct program_command commands[] = {
    {"replay", "", "Play a workload, check every loaded byte, count hits",
     "Each request looks its prefix up with a lease and loads the hits into the blocks of a\n"
     "region. It checks them against the pattern that their keys name, and dumps the rest.\n"
     "Ends with one line of counts; the exit code is 4 when a loaded block differed.\n"
     "docs/capacity.md says what the other lines mean. The blocks belong to the tenant of\n"
     "the user who runs it.\n\n"
     "Examples:\n"
     "  ucm-bench replay --limit 500\n"
     "  ucm-bench replay --trace conversation_trace.jsonl --block-bytes 16KiB --json\n",
     PROGRAM_OPTIONS(replay_options), 0, 0, bench_replay},
    {"record", "", "Write what this host's engines look up and store, as a trace without keys",
     "Blocks become numbers in the order of their first appearance, tenants and namespaces\n"
     "too, and times count from the start. Ends after --seconds, or with Ctrl-C. What the\n"
     "daemon's ring could not hold is counted in the file. For operators. replay reads\n"
     "the file; docs/capacity.md has its format.\n\n"
     "Examples:\n"
     "  ucm-bench record --out site.jsonl --seconds 1h\n"
     "  ucm-bench replay --trace site.jsonl --speed 100\n",
     PROGRAM_OPTIONS(record_options), 0, 0, bench_record},
    {"serve", "URL [URL]", "What requests to an OpenAI endpoint wait for, by hits; needs no daemon",
     "Times to the first token and for each further one, over streamed /v1/completions. In\n"
     "each cell all prompts share their beginning, which one request sends first. An error,\n"
     "a timeout (--timeout) and a stream that breaks are counted and are no figure. With\n"
     "two URLs, such as an engine with ucmd and one without, both are measured by turns.\n"
     "$OPENAI_API_KEY is sent if it is set.\n\n"
     "Examples:\n"
     "  ucm-bench serve http://localhost:8000 --tokens 8192 --hits 0,90\n"
     "  ucm-bench serve http://localhost:8000 http://localhost:8001 --json\n",
     PROGRAM_OPTIONS(serve_options), 1, 2, bench_serve},
    {"lookup", "", "Latency of lookups: one key, and a long prefix with a lease",
     "The baseline is an echo of frames of the same size between two processes over a\n"
     "Unix socket. The same keys are also looked up in the lookup table, in turn with these\n"
     "round trips.\n\n"
     "Example:\n"
     "  ucm-bench lookup --blocks 100000\n",
     PROGRAM_OPTIONS(lookup_options), 0, 0, bench_lookup},
    {"load", "", "GB/s of loads from DRAM into scattered fragments, every byte checked",
     "The baseline is memcpy of the same fragments.\n\n"
     "Example:\n  ucm-bench load --fragment 4KiB\n",
     PROGRAM_OPTIONS(move_options), 0, 0, bench_load},
    {"dump", "", "GB/s of dumps out of scattered fragments",
     "Example:\n  ucm-bench dump --total 128MiB\n", PROGRAM_OPTIONS(move_options), 0, 0,
     bench_dump},
    {"tier", "", "The NVMe tier against its disk: loads, prefetches, writes; needs no daemon",
     "Starts daemons of its own in a directory on the disk. Compares their reads and writes,\n"
     "with checksums, with a simple io_uring loop on the same disk. Both use the same block\n"
     "size and depth, and take turns in short slices.\n\n"
     "Examples:\n"
     "  ucm-bench tier --dir /var/cache/ucmd\n"
     "  ucm-bench tier --json\n",
     PROGRAM_OPTIONS(tier_options), 0, 0, bench_tier},
    {"copy", "",
     "Loads and dumps of a GPU, by strategy and fragment size, idle and next to a worker",
     "Starts a daemon for each strategy, in a temporary directory, and plays a worker. The\n"
     "worker's GPU does nothing, multiplies matrices without pause, or runs a chain of short\n"
     "kernels. Baselines are one large DMA transfer, and the worker alone. Two GPUs are\n"
     "measured side by side where there are two. The last example plots what --json prints.\n"
     "The copy agent is libucmclient_cuda's; staged always has one.\n\n"
     "Examples:\n"
     "  ucm-bench copy --nvme-dir /var/cache/ucmd\n"
     "  ucm-bench copy --encoding fp8,q4,lossless\n"
     "  ucm-bench copy --json >copy.json && docs/design/plot_copy.py copy.json >copy.svg\n",
     PROGRAM_OPTIONS(copy_options), 0, 0, bench_copy},
};

static const struct program_group all = {
    .title = "Commands", .commands = commands, .n_commands = PROGRAM_COUNT(commands)};
static const struct program_group *const groups[] = {&all};

const struct program bench_program = {
    .name = "ucm-bench",
    .version = UCM_VERSION,
    .commit = ucm_build_commit,
    .built_with = ucm_build_options,
    .summary = "Measures ucmd, the KV cache daemon of this host, against what the machine can do",
    PROGRAM_OPTIONS(common_options),
    .groups = groups,
    .n_groups = PROGRAM_COUNT(groups),
    .help =
        "Every figure that depends on the machine stands next to its baseline and their ratio.\n"
        "One run measures both, in turn. Figures are medians over rounds.\n\n"
        "Exit codes:\n"
        "  0  measured\n"
        "  1  something failed\n"
        "  2  the command line is wrong\n"
        "  3  no daemon is there\n"
        "  4  a loaded block differed from what was stored\n",
};
