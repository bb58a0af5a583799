/* Doctor, plan, verify, format: disks and the host itself. */
#include "client/ctl/ctl.h"

static const struct arg_option verify_options[] = {
    {"page", ARG_NUMBER, "N", "check N blocks in one call", "64", 1, 4096},
    {"offline", ARG_TEXT, "PATH", "check this entry of nvme.paths, without a daemon", NULL, 0, 0},
    {"state", ARG_TEXT, "DIR", "nvme.state, if PATH is a device or a file", NULL, 0, 0},
    {"salvage", ARG_FLAG, NULL, "drop or repair what is damaged (with --offline)", NULL, 0, 0},
    {"lift-quarantine", ARG_FLAG, NULL, "allow writes to bad segments again (with --offline)", NULL,
     0, 0},
};

static const struct arg_option format_options[] = {
    {"force", ARG_FLAG, NULL, "also if it holds something; destroys that", NULL, 0, 0},
    {"yes", ARG_FLAG, NULL, "do not ask", NULL, 0, 0},
};

static const struct arg_option doctor_options[] = {
    {"dir", ARG_TEXT, "DIR", "measure here, not next to the daemon's cache", NULL, 0, 0},
    {"quick", ARG_FLAG, NULL, "measure nothing; takes one second, not several", NULL, 0, 0},
};

static const struct arg_option plan_options[] = {
    {"tp", ARG_NUMBER, "N", "ranks that share a layer's heads (tensor parallelism)", "1", 1, 1024},
    {"pp", ARG_NUMBER, "N", "ranks that share the layers (pipeline parallelism)", "1", 1, 1024},
    {"block-tokens", ARG_NUMBER, "N", "tokens in a block of the engine", "16", 1, 65536},
    {"kv-dtype", ARG_CHOICE, "auto|fp32|bf16|fp16|fp8|int8|int4",
     "of the KV; auto: as the config says", "auto", 0, 0},
    {"dram", ARG_SIZE, "SIZE", "arena.size", NULL, 1u << 20, UINT64_C(1) << 60},
    {"nvme", ARG_SIZE, "SIZE", "nvme.size, in sum over the paths", NULL, 1u << 20,
     UINT64_C(1) << 60},
    {"length", ARG_NUMBER, "TOKENS", "of a request, its context included", NULL, 1, 1u << 30},
    {"requests", ARG_NUMBER, "N", "requests at once (with --length)", "1", 1, 1u << 24},
    {"history", ARG_NUMBER, "N", "earlier conversations to keep (with --length)", "0", 0, 1u << 28},
    {"trace", ARG_TEXT, "FILE", "of ucm-bench record: what it would hit, by size", NULL, 0, 0},
};

static const struct program_command commands[] = {
    {"doctor", "", "What slows the cache on this host, and whether it really works",
     "Looks at limits, io_uring, NUMA, memory, huge pages, disks and GPUs. Measures each\n"
     "tier for a second. Sends 16 MiB through the daemon and back, as a worker would, in\n"
     "host memory and on each GPU. Leaves nothing but counts in lookup_keys, dump_blocks and\n"
     "load_blocks_dram. As root it sees most. Works without a daemon, too.\n\n"
     "The exit status is 0 when all is well, 4 when something is slow or missing, and 1\n"
     "when something fails. What can't be tried here is no fault.\n\n"
     "Examples:\n"
     "  ucmctl doctor\n"
     "  ucmctl doctor --dir /var/lib/ucmd\n"
     "  ucmctl doctor --quick --json | jq -r .verdict\n",
     PROGRAM_OPTIONS(doctor_options), 0, 0, cmd_doctor},
    {"plan", "MODEL-CONFIG.json", "What a model's KV takes, what a host holds, what to buy",
     "Reads a config.json as Hugging Face's model repositories have it, or its directory:\n"
     "full attention, grouped heads, sliding windows, MLA. No daemon is needed. Without\n"
     "--dram, --nvme and --length it takes the sizes of the daemon that runs here.\n\n"
     "--length asks the other way round: what to buy for so many requests and so long a\n"
     "history. It assumes that all ranks are on this host, and that prompts share nothing;\n"
     "prompts that share a beginning need less. --trace reads what 'ucm-bench record' wrote\n"
     "at a site, and says what part of its lookups' blocks such sizes would hit under LRU.\n\n"
     "Examples:\n"
     "  ucmctl plan config.json --tp 4 --kv-dtype fp8\n"
     "  ucmctl plan config.json --dram 512GiB --nvme 15TiB\n"
     "  ucmctl plan config.json --length 32768 --requests 64 --history 5000\n"
     "  ucmctl plan config.json --dram 512GiB --trace site.jsonl\n",
     PROGRAM_OPTIONS(plan_options), 1, 1, cmd_plan},
    {"verify", "[NS]", "Read what is on NVMe and check it",
     "Without a namespace: all of them. The daemon drops corrupt parts and never serves\n"
     "them. The exit status is 5 if any was corrupt or unreadable.\n\n"
     "--offline checks the files of a daemon that does not run. PATH is an entry of\n"
     "nvme.paths: a directory, or a device or file; for these --state names the directory with\n"
     "the namespaces. It counts live records, corrupt headers and corrupt payloads. After\n"
     "a kill, records that were being written may be corrupt; none of these had been\n"
     "acknowledged as durable.\n\n"
     "Only --salvage writes. It drops what is corrupt, and restores damaged segment headers\n"
     "from the records after them. It writes the list of namespaces again without damaged\n"
     "entries, and removes a checkpoint that names anything damaged. The exit status is for\n"
     "what it found; run it again to see that the damage is gone.\n\n"
     "Examples:\n"
     "  ucmctl verify && echo sound\n"
     "  ucmctl verify --offline /var/lib/ucmd/nvme0\n"
     "  ucmctl verify --offline /var/lib/ucmd/nvme0 --salvage\n"
     "  ucmctl verify --offline /dev/nvme1n1 --state /var/lib/ucmd/state\n",
     PROGRAM_OPTIONS(verify_options), 0, 1, cmd_verify},
    {"format", "PATH", "Prepare a block device, or a file, for ucmd",
     "PATH is an entry of nvme.paths that is not a directory, and no daemon may use it. A device\n"
     "that holds something is refused; --force destroys the contents, after asking.\n\n"
     "Example:\n"
     "  ucmctl format /dev/nvme1n1\n",
     PROGRAM_OPTIONS(format_options), 1, 1, cmd_format},
};

const struct program_group commands_host = {.title = "Commands for disks and hosts",
                                            .commands = commands,
                                            .n_commands = PROGRAM_COUNT(commands)};
