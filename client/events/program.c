#include "client/events/events.h"

#include "proto/build.h"

static const struct arg_option common_options[] = {
    {"socket", ARG_TEXT, "PATH", "the daemon's socket; $UCM_SOCKET, else /run/ucmd/ucmd.sock", NULL,
     0, 0},
};

static const struct arg_option publish_options[] = {
    {"endpoint", ARG_TEXT, "URI", "where subscribers connect to", "tcp://127.0.0.1:5557", 0, 0},
    {"replay", ARG_TEXT, "URI", "where they ask for what they missed; \"\": nowhere",
     "tcp://127.0.0.1:5558", 0, 0},
    {"topic", ARG_TEXT, "TOPICS",
     "under which; {model} is a namespace's model; several with commas between", "kv-events", 0, 0},
    {"tenant", ARG_TEXT, "NAME", "whose blocks, for operators; the own tenant's", NULL, 0, 0},
    {"namespace", ARG_TEXT, "DIGITS", "only of the namespace whose fingerprint begins so", NULL, 0,
     0},
    {"format", ARG_CHOICE, "map|array", "events as vLLM packs them now, or as older vLLM did",
     "map", 0, 0},
    {"hashes", ARG_CHOICE, "int|bytes",
     "as VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES has them, or whole keys", "int", 0, 0},
    {"media", ARG_TEXT, "NAMES", "what routers call the tiers",
     "dram=CPU,nvme=STORAGE,shared=STORAGE", 0, 0},
    {"rank", ARG_NUMBER, "N", "data_parallel_rank of batches", "0", 0, 65535},
    {"steps", ARG_NUMBER, "N", "batches that are kept for replay", "10000", 1, 1000000},
    {"memory", ARG_SIZE, "SIZE", "and their bytes", "256MiB", 1 << 20, UINT64_C(1) << 40},
};

static const struct program_command commands[] = {
    {"publish", "", "Tells routers where blocks lie, until it is stopped",
     "Publishes on ZeroMQ what ucmd tells of one tenant's blocks, in the format of vLLM's own "
     "events, so that\n"
     "routers which read those (llm-d, Dynamo) read these. It tells all blocks when it starts, "
     "when\n"
     "somebody subscribes, and after a gap. The daemon must have events.memory set.\n\n"
     "There is no password: who reaches the endpoint reads tokens of prompts.\n\n"
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
            "  1  the daemon refused, an endpoint can't be had, or memory ran out\n"
            "  2  the command line is wrong\n\n"
            "Examples:\n"
            "  ucmevents publish\n",
};
