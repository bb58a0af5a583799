/* The table of commands. The manual page and the shells' completion are made from it, too. */
#include "client/bench/bench.h"

#include "proto/build.h"

static const struct arg_option common_options[] = {
    {"socket", ARG_TEXT, "PATH", "the daemon's socket ($UCM_SOCKET, else " UCM_DEFAULT_SOCKET ")",
     NULL, 0, 0},
    {"json", ARG_FLAG, NULL, "print one JSON document for programs", NULL, 0, 0},
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
    {"chunk", ARG_SIZE, "SIZE", "bytes of a block that lie together", "16KiB", 8, 1u << 26},
    {"verify", ARG_FLAG, NULL, "check every loaded byte; this is the default", NULL, 0, 0},
    {"no-verify", ARG_FLAG, NULL, "do not", NULL, 0, 0},
    {"model", ARG_TEXT, "NAME", "of the namespace: the same name finds the same blocks again",
     "ucm-bench replay", 0, 0},
    {"seed", ARG_NUMBER, "N", "of a generated workload", "1", 0, UINT64_MAX},
    {"conversations", ARG_NUMBER, "N", "going on at once in a generated workload", "32", 1, 65536},
    {"keep-going", ARG_FLAG, NULL, "when the daemon is lost: count it, connect again, go on", NULL,
     0, 0},
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
    {"chunk", ARG_SIZE, "SIZE", "bytes of a block that lie together", "64", 8, 1u << 20},
};

static const struct arg_option load_options[] = {
    BENCH_COPY_OPTIONS,
    {"tier", ARG_CHOICE, "dram|nvme", "where the blocks come from", "dram", 0, 0},
    {"threads", ARG_NUMBER, "N", "threads of the memcpy baseline; the daemon's device.cpu_threads",
     "2", 1, 64},
    {"file-dir", ARG_TEXT, "DIR", "nvme: a folder on the file system of nvme.paths, for raw reads",
     NULL, 0, 0},
    {"depth", ARG_NUMBER, "N", "raw reads under way at once; 0: batch times in-flight, up to 128",
     "0", 0, 1024},
};

static const struct arg_option fetch_options[] = {
    {"block-bytes", ARG_SIZE, "SIZE", "bytes of a block", "2MiB", 64, 1u << 30},
    {"chunk", ARG_SIZE, "SIZE", "bytes of a layer of a block: of a piece", "64KiB", 8, 1u << 28},
    {"total", ARG_SIZE, "SIZE", "bytes of the blocks that are stored", "512MiB", 4096,
     BENCH_MAX_BYTES},
    {"items", ARG_NUMBER, "N", "pieces of one request", "256", 1, 65536},
    {"rounds", ARG_NUMBER, "N", "rounds", "101", 1, 100000},
    {"device", ARG_CHOICE, "cpu|gpu", "where the pool lies", "cpu", 0, 0},
};

static const struct arg_option dump_options[] = {
    BENCH_COPY_OPTIONS,
    {"threads", ARG_NUMBER, "N", "threads of the memcpy baseline; the daemon's device.cpu_threads",
     "2", 1, 64},
};

static const struct arg_option prefetch_options[] = {
    BENCH_COPY_OPTIONS,
    {"file-dir", ARG_TEXT, "DIR", "a folder on the file system of nvme.paths, for raw reads", NULL,
     0, 0},
    {"depth", ARG_NUMBER, "N", "raw reads under way at once; 0: batch times in-flight, up to 128",
     "0", 0, 1024},
};

static const struct arg_option echo_options[] = {
    BENCH_COPY_OPTIONS,
    {"calls", ARG_NUMBER, "N", "round trips", "10000", 20, 10000000},
    {"threads", ARG_NUMBER, "N", "threads of memcpy", "2", 1, 64},
    {"file-dir", ARG_TEXT, "DIR", "read a file there too, with O_DIRECT", NULL, 0, 0},
    {"depth", ARG_NUMBER, "N", "reads under way at once", "32", 1, 1024},
};

static const struct arg_option start_options[] = {
    {"ucmd", ARG_TEXT, "PATH", "the daemon's program", "build/ucmd", 0, 0},
    {"arena", ARG_TEXT, "SIZE", "arena.size of the daemon that is started", "16GiB", 0, 0},
    {"rounds", ARG_NUMBER, "N", "starts", "7", 1, 1000},
    {"idle", ARG_NUMBER, "MS", "how long to watch an idle daemon", "5000", 1, 600000},
};

static const struct arg_option tier_options[] = {
    {"ucmd", ARG_TEXT, "PATH", "the daemon's program", "build/ucmd", 0, 0},
    {"dir", ARG_TEXT, "DIR", "a folder on the disk; takes --total about four times", "/var/tmp", 0,
     0},
    {"total", ARG_SIZE, "SIZE", "bytes that are written and read", "1GiB", 64u << 20,
     BENCH_MAX_BYTES},
    {"depth", ARG_NUMBER, "N", "operations at the disk at once", "32", 1, 1024},
    {"rounds", ARG_NUMBER, "N", "rounds", "7", 1, 1000},
    {"slice", ARG_SECONDS, "SECONDS", "how long each measures before it is the other's turn", "1s",
     50, 60000},
    {"baseline", ARG_CHOICE, "auto|fio|loop",
     "loop: a plain io_uring loop; auto: fio if it is there", "auto", 0, 0},
    {"io", ARG_TEXT, "IO", "nvme.io of the tier alone", "auto", 0, 0},
    {"only", ARG_CHOICE, "alone|daemon|hits|encrypted", "measure just this", NULL, 0, 0},
};

static const struct arg_option share_options[] = {
    {"root", ARG_TEXT, "TARGET", "as in share.roots: a folder or nfs://SERVER/EXPORT?...", NULL, 0,
     0},
    {"ucmd", ARG_TEXT, "PATH", "the daemon's program", "build/ucmd", 0, 0},
    {"total", ARG_SIZE, "SIZE", "bytes that are stored and loaded", "256MiB", 16u << 20,
     BENCH_MAX_BYTES},
    {"depth", ARG_NUMBER, "N", "requests at the root at once", "16", 1, 256},
    {"rounds", ARG_NUMBER, "N", "rounds", "5", 1, 1000},
    {"slice", ARG_SECONDS, "SECONDS", "how long each measures before it is the other's turn", "1s",
     50, 60000},
    {"hung", ARG_SECONDS, "SECONDS", "how long the server hangs", "1min", 100, 600000},
    {"block", ARG_SIZE, "SIZE", "speed: of blocks of this size only", NULL, 64u << 10, 16u << 20},
    {"only", ARG_CHOICE, "speed|lookup|hung", "measure just this", NULL, 0, 0},
};

static const struct arg_option copy_options[] = {
    {"ucmd", ARG_TEXT, "PATH", "the daemon's program", "build/ucmd", 0, 0},
    {"strategies", ARG_TEXT, "LIST",
     "of copy.strategy, +ring: with a companion; the last is held against the aims",
     "dma,sm,staged,auto,auto+ring", 0, 0},
    {"chunks", ARG_TEXT, "LIST", "bytes of a block that lie together",
     "4KiB,16KiB,32KiB,64KiB,256KiB,512KiB,2MiB,4MiB", 0, 0},
    {"encoding", ARG_TEXT, "LIST",
     "instead of strategies: blocks stored as fp8, int8, q4 or lossless, with a companion", NULL, 0,
     0},
    {"time", ARG_SECONDS, "SECONDS", "how long to measure each figure", "300ms", 50, 60000},
    {"nvme-dir", ARG_TEXT, "DIR", "measure loads from NVMe too, in a folder of this one", NULL, 0,
     0},
};

static const struct arg_option step_options[] = {
    {"ucmd", ARG_TEXT, "PATH", "the daemon's program", "build/ucmd", 0, 0},
    {"strategies", ARG_TEXT, "LIST", "as those of copy; the last is held against the aims",
     "auto,auto+ring", 0, 0},
    {"chunk", ARG_SIZE, "SIZE", "bytes of a block that lie together", "64KiB", 4096, 4u << 20},
    {"beside", ARG_TEXT, "LIST", "of copy.beside: percent of the bus beside the steps", "100,85", 0,
     0},
    {"time", ARG_SECONDS, "SECONDS", "how long to measure each figure", "2s", 500, 60000},
};

static const struct arg_option fair_options[] = {
    {"ucmd", ARG_TEXT, "PATH", "the daemon's program", "build/ucmd", 0, 0},
    {"tenants", ARG_TEXT, "LIST", "how many load at the same time", "2,10", 0, 0},
    {"tier", ARG_CHOICE, "dram|nvme|share", "where the blocks come from", "dram", 0, 0},
    {"dir", ARG_TEXT, "DIR", "where a folder for the daemon, its disk and its root is made", "/tmp",
     0, 0},
    {"device", ARG_CHOICE, "cpu|gpu", "where they go", "cpu", 0, 0},
    {"companion", ARG_FLAG, NULL, "gpu: copies may go through slices, by libucmclient_cuda", NULL,
     0, 0},
    {"large", ARG_NUMBER, "N", "blocks of 1 MiB that every second tenant has", "64", 16, 4096},
    {"small", ARG_NUMBER, "N", "blocks of 128 KiB that the others have", "256", 16, 4096},
    {"shares", ARG_FLAG, NULL, "measure shares only, and not how long a neighbour waits", NULL, 0,
     0},
    {"check", ARG_FLAG, NULL, "then load once more, as many at a time, and compare all bytes", NULL,
     0, 0},
    {"time", ARG_SECONDS, "SECONDS", "how long to measure each figure", "2s", 100, 60000},
    {"set", ARG_TEXT, "KEY=VALUE", "one more setting of the daemon", NULL, 0, 0},
};

static const struct arg_option select_options[] = {
    {"device", ARG_TEXT, "NAME", "what selects: cpu, or gpu with libucmclient_cuda", "cpu", 0, 0},
    {"blocks", ARG_TEXT, "LIST", "blocks of the sequence", "8192", 0, 0},
    {"heads", ARG_NUMBER, "N", "KV heads", "8", 1, 1024},
    {"q-heads", ARG_NUMBER, "N", "query heads, a multiple of --heads", "32", 1, 65536},
    {"dim", ARG_NUMBER, "N", "channels of a head", "128", 4, 1024},
    {"tokens", ARG_NUMBER, "N", "tokens of a block", "16", 1, 1024},
    {"rows", ARG_NUMBER, "N", "queries: the last so many tokens", "1", 1, 64},
    {"methods", ARG_TEXT, "LIST",
     "digests: mean, submean, box, hash64, hash128, hash256, stats, tokens, "
     "rest (tokens of 3 with rest)",
     "mean,box,hash64,hash128", 0, 0},
    {"reduce", ARG_CHOICE, "max|mean|softmax", "over a KV head's query heads", "max", 0, 0},
    {"topk-tokens", ARG_NUMBER, "N", "tokens to choose; 0: three tenths of the blocks", "0", 0,
     UINT32_MAX},
    {"mass", ARG_FLAG, NULL, "choose by mass, 0.95 of it", NULL, 0, 0},
    {"threads", ARG_TEXT, "LIST", "threads that share the work", "1,2", 0, 0},
    {"layers", ARG_NUMBER, "N", "layers in turn, so that digests come from memory", "32", 1, 256},
    {"rounds", ARG_NUMBER, "N", "rounds over the layers", "7", 1, 1000},
};

static const struct arg_option chain_options[] = {
    {"ucmd", ARG_TEXT, "PATH", "the daemon's program", "build/ucmd", 0, 0},
    {"blocks", ARG_TEXT, "LIST", "blocks of the sequence", "8192,65536", 0, 0},
    {"layers", ARG_NUMBER, "N", "layers of a block; one is asked", "1", 1, 256},
    {"threads", ARG_NUMBER, "N", "the daemon's device.cpu_threads", "2", 1, 64},
    {"rounds", ARG_NUMBER, "N", "chains that are opened", "15", 1, 1000},
};

static const struct program_command commands[] = {
    {"replay", "", "Play a workload, check every loaded byte, count hits",
     "Each request looks its prefix up with a lease, loads the hits into the blocks of a\n"
     "region, checks them against the pattern that their keys name, and dumps the rest.\n"
     "Ends with one line of counts; the exit code is 4 when a loaded block differed.\n\n"
     "Examples:\n"
     "  ucm-bench replay --limit 500\n"
     "  ucm-bench replay --trace conversation_trace.jsonl --block-bytes 16KiB --json\n",
     PROGRAM_OPTIONS(replay_options), 0, 0, bench_replay},
    {"record", "", "Write what this host's engines look up and store, as a trace without keys",
     "Blocks become numbers in the order of their first appearance, tenants and namespaces\n"
     "too, and times count from the start. Ends after --seconds, or with Ctrl-C. What the\n"
     "daemon's ring could not hold is counted in the file. For operators. replay reads\n"
     "the file; docs/measuring.md has its format.\n\n"
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
     "Unix socket. The same keys are looked up in the table of hints, too, beside these\n"
     "round trips.\n\n"
     "Example:\n"
     "  ucm-bench lookup --blocks 100000\n",
     PROGRAM_OPTIONS(lookup_options), 0, 0, bench_lookup},
    {"load", "", "GB/s of loads into scattered chunks, every byte checked",
     "The baseline is memcpy of the same chunks; with --tier nvme, io_uring O_DIRECT\n"
     "reads of as many blocks of that size.\n\n"
     "Examples:\n"
     "  ucm-bench load --chunk 4KiB\n"
     "  ucm-bench load --tier nvme --file-dir /var/cache/ucmd\n",
     PROGRAM_OPTIONS(load_options), 0, 0, bench_load},
    {"fetch", "", "Single layers of blocks into slots of a pool, out of DRAM",
     "Each request names random layers of random blocks. In turns with it, as many bytes\n"
     "are loaded in whole blocks, and copied in the same pieces by one thread of this\n"
     "process; to a GPU, in one large copy.\n\n"
     "Examples:\n"
     "  ucm-bench fetch --items 4096\n"
     "  ucm-bench fetch --device gpu\n",
     PROGRAM_OPTIONS(fetch_options), 0, 0, bench_fetch},
    {"dump", "", "GB/s of dumps out of scattered chunks",
     "Example:\n  ucm-bench dump --total 128MiB\n", PROGRAM_OPTIONS(dump_options), 0, 0,
     bench_dump},
    {"prefetch", "", "GB/s from NVMe into the daemon's DRAM",
     "Stores a set of blocks, waits until they are on NVMe, and reads them back each\n"
     "round. The baseline is io_uring O_DIRECT reads of as many blocks of that size in\n"
     "--file-dir.\n\n"
     "Example:\n"
     "  ucm-bench prefetch --file-dir /var/cache/ucmd --block-bytes 256KiB\n",
     PROGRAM_OPTIONS(prefetch_options), 0, 0, bench_prefetch},
    {"echo", "", "The baselines alone; needs no daemon",
     "Example:\n  ucm-bench echo --file-dir /var/cache/ucmd\n", PROGRAM_OPTIONS(echo_options), 0, 0,
     bench_echo},
    {"start", "", "Start to first answer, and what an idle daemon costs; needs no daemon",
     "Starts daemons of its own in a temporary folder. The baseline is the same program\n"
     "printing its version.\n\n"
     "Example:\n  ucm-bench start --arena 64GiB\n",
     PROGRAM_OPTIONS(start_options), 0, 0, bench_start},
    {"tier", "", "The NVMe tier against its disk: reads, writes, hits meanwhile; needs no daemon",
     "Starts the tier, and daemons of its own, on a folder of the disk. Reads and writes\n"
     "with checksums stand against fio on the same file at the same block size and depth,\n"
     "in short slices by turns; loads of blocks in DRAM while the disk is being written\n"
     "stand against the same loads while it is idle.\n\n"
     "Examples:\n"
     "  ucm-bench tier --dir /var/cache/ucmd\n"
     "  ucm-bench tier --only hits --json\n",
     PROGRAM_OPTIONS(tier_options), 0, 0, bench_tier},
    {"share", "", "The shared tier against its root: stores, loads, lookups, a server that hangs",
     "Starts daemons of its own. The measure is a plain libnfs client on the same server,\n"
     "or fio in the same folder. Lookups are measured through a link that takes 1 ms a\n"
     "round trip, hits in DRAM through one that carries nothing; both are made here.\n\n"
     "Examples:\n"
     "  ucm-bench share --root /mnt/kv\n"
     "  ucm-bench share --root 'nfs://server/kv?nfsport=2049&mountport=20048'\n",
     PROGRAM_OPTIONS(share_options), 0, 0, bench_share},
    {"copy", "", "Loads and dumps of a GPU, by strategy and chunk size, idle and beside a worker",
     "Starts a daemon for each strategy, in a temporary folder, and plays a worker whose\n"
     "GPU does nothing, multiplies matrices without pause, or runs a chain of short\n"
     "kernels. Baselines are one large DMA transfer, and the worker alone. Two GPUs are\n"
     "measured side by side where there are two. --json is what docs/plot_copy.py reads.\n"
     "The companion is libucmclient_cuda's; staged always has one.\n\n"
     "Examples:\n"
     "  ucm-bench copy --nvme-dir /var/cache/ucmd\n"
     "  ucm-bench copy --encoding fp8,q4,lossless\n"
     "  ucm-bench copy --json >copy.json && docs/plot_copy.py copy.json >docs/copy.svg\n",
     PROGRAM_OPTIONS(copy_options), 0, 0, bench_copy},
    {"step", "",
     "What a decoding engine's steps take while loads run, and what those get of the bus",
     "Starts a daemon for each strategy and share, in a temporary folder, and plays an engine "
     "that\n"
     "decodes: small copies of inputs, a CUDA graph of 289 kernels which read 14 GiB, and\n"
     "tokens copied back. Baselines are the same steps without loads, and one large DMA\n"
     "transfer after another, without a daemon.\n\n"
     "Examples:\n"
     "  ucm-bench step\n"
     "  ucm-bench step --strategies auto+ring --chunk 32KiB --json\n",
     PROGRAM_OPTIONS(step_options), 0, 0, bench_step},
    {"fair", "", "What each of several tenants gets while all of them load; needs root",
     "Starts a daemon of its own and is a user of its own for each tenant. Tenants have\n"
     "weights of 100 to 400, and requests of 16 MiB and of 1 MiB in turn. Then one floods\n"
     "and another one of the same weight sends a request now and then: how long does it\n"
     "wait, beside the same alone?\n\n"
     "Examples:\n"
     "  ucm-bench fair --device gpu --tenants 2,10,100\n"
     "  ucm-bench fair --tier nvme --dir /var/cache\n",
     PROGRAM_OPTIONS(fair_options), 0, 0, bench_fair},
    {"select", "", "Scoring a layer's blocks and choosing among them; needs no daemon",
     "Digests lie as in the daemon's arena, all layers of a block in one slot. Times are\n"
     "of one layer: queries to chosen blocks, a list for each KV head. The baseline reads\n"
     "as many bytes in one piece, by as many threads.\n\n"
     "Examples:\n"
     "  ucm-bench select\n"
     "  ucm-bench select --blocks 8192,65536 --methods mean --reduce softmax\n",
     PROGRAM_OPTIONS(select_options), 0, 0, bench_select},
    {"chain", "", "A chain opened, appended to and selected from; needs no daemon",
     "Starts a daemon of its own, stores blocks and their digests, and measures from\n"
     "chain.open to the first selection's answer, all in DRAM. A block takes 4 KiB of DRAM,\n"
     "its digests 4 KiB at least, and they must fit a quarter of the daemon's arena: 2^20\n"
     "blocks want 18 GiB.\n\n"
     "Examples:\n"
     "  ucm-bench chain\n"
     "  ucm-bench chain --blocks 65536 --layers 32\n",
     PROGRAM_OPTIONS(chain_options), 0, 0, bench_chain},
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
    .help = "Every figure that depends on the machine stands next to a baseline measured in the\n"
            "same run, in turn with it, and their ratio. Figures are medians over rounds.\n\n"
            "Exit codes:\n"
            "  0  measured\n"
            "  1  something failed\n"
            "  2  the command line is wrong\n"
            "  3  no daemon is there\n"
            "  4  a loaded block differed from what was stored\n",
};
