#include "client/events/events.h"

#include "proto/build.h"

static const struct arg_option common_options[] = {
    {"socket", ARG_TEXT, "PATH", "the daemon's socket; $UCM_SOCKET, else /run/ucmd/ucmd.sock", NULL,
     0, 0},
};

static const struct arg_option publish_options[] = {
    {"endpoint", ARG_TEXT, "URI", "where subscribers connect to", "tcp://127.0.0.1:5557", 0, 0},
    {"replay", ARG_TEXT, "URI", "where subscribers ask for missed batches; \"\": nowhere",
     "tcp://127.0.0.1:5558", 0, 0},
    {"topic", ARG_TEXT, "TOPICS", "topics with commas between; {model} is a namespace's model",
     "kv-events", 0, 0},
    {"tenant", ARG_TEXT, "NAME", "whose blocks, for operators; otherwise the caller's own tenant's",
     NULL, 0, 0},
    {"namespace", ARG_TEXT, "DIGITS", "only the namespace whose fingerprint begins with DIGITS",
     NULL, 0, 0},
    {"format", ARG_CHOICE, "map|array", "events as vLLM packs them now, or as older vLLM did",
     "map", 0, 0},
    {"hashes", ARG_CHOICE, "int|bytes",
     "as VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES has them, or whole keys", "int", 0, 0},
    {"media", ARG_TEXT, "NAMES", "what routers call the tiers",
     "dram=CPU,nvme=STORAGE,shared=STORAGE", 0, 0},
    {"rank", ARG_NUMBER, "N", "data_parallel_rank of batches", "0", 0, 65535},
    {"steps", ARG_NUMBER, "N", "batches that are kept for replay", "10000", 1, 1000000},
    {"memory", ARG_SIZE, "SIZE", "memory for these batches", "256MiB", 1 << 20, UINT64_C(1) << 40},
};

static const struct program_command commands[] = {
    {"publish", "", "Tells routers where blocks lie, until it is stopped",
     "Publishes the cache events of one tenant on ZeroMQ, in the format of vLLM's own events.\n"
     "Routers that read those, such as llm-d and Dynamo, can read these. It publishes all blocks\n"
     "when it starts, when somebody subscribes, and after a gap. The daemon must have\n"
     "events.memory set.\n\n"
     "There is no password: every client that reaches the endpoint can read tokens of prompts.\n\n"
     "Examples:\n"
     "  ucmevents publish --endpoint tcp://10.0.0.5:5557 --topic 'kv@10.0.0.5@{model}'\n"
     "  ucmevents publish --tenant team-a --format array\n",
     PROGRAM_OPTIONS(publish_options), 0, 0, cmd_publish},
};

static const struct program_group group = {
    .title = "Commands", .commands = commands, .n_commands = PROGRAM_COUNT(commands)};
static const struct program_group *const groups[] = {&group};

const struct program events_program = {
    .name = "ucmevents",
    .version = UCM_VERSION,
    .commit = ucm_build_commit,
    .built_with = ucm_build_options,
    .summary = "Publishes events of ucmd, the KV cache daemon of this host, for routers",
    PROGRAM_OPTIONS(common_options),
    .groups = groups,
    .n_groups = PROGRAM_COUNT(groups),
    .help = "Exit status:\n"
            "  0  stopped as asked\n"
            "  1  the daemon refused, an endpoint can't be bound, or memory ran out\n"
            "  2  the command line is wrong\n\n"
            "Examples:\n"
            "  ucmevents publish\n",
};
