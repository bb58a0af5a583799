#include "daemon/config/table.h"

#include "daemon/base/listener.h"
#include "proto/limits.h"
#include "proto/messages.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>
#include <sys/param.h>

#define MIB (1ull << 20)
#define GIB (1ull << 30)
#define TIB (1ull << 40)
#define SECOND 1000ull
#define HOUR (3600 * SECOND)

/* sun_path holds 108 bytes, its NUL included. */
#define SOCKET_BYTES 107

static const char *const bool_names[] = {"false", "true", NULL};
static const char *const level_names[] = {"error", "warn", "info", "debug", NULL};
static const char *const io_names[] = {"auto", "uring", "threads", NULL};
static const char *const write_stall_names[] = {"drop", "slow", NULL};
static const char *const admission_names[] = {"all", "reuse", NULL};
static const char *const nvme_admission_names[] = {"all", "reuse", "learned", NULL};
static const char *const placement_names[] = {"tiered", "hashed", NULL};
static const char *const copy_names[] = {"auto", "dma", "sm", "staged", NULL};
static const char *const numa_names[] = {"auto", "off", NULL};
static const char *const cuda_names[] = {"auto", "off", "required", NULL};

/* ---- what a text or a list's item must be: NULL, or what would be right ---- */

bool config_principal(const char *text, size_t n, bool *is_gid, uint32_t *id)
{
    uint64_t v = 0;

    if (n < 5 || n > 14 || (text[0] != 'u' && text[0] != 'g') || memcmp(text + 1, "id:", 3) != 0)
        return false;
    for (size_t i = 4; i < n; i++) {
        if (!isdigit((unsigned char)text[i]))
            return false;
        v = v * 10 + (uint64_t)(text[i] - '0');
    }
    if (v >= UINT32_MAX)
        return false;
    *is_gid = text[0] == 'g';
    *id = (uint32_t)v;
    return true;
}

/* "/" is every cgroup; others have no '/' at their end, as the kernel's have none. */
const char *config_cgroup(const char *text, size_t n, size_t *bytes)
{
    const size_t skip = strlen("cgroup:");

    if (n <= skip || memcmp(text, "cgroup:", skip) != 0 || text[skip] != '/' ||
        (n > skip + 1 && text[n - 1] == '/'))
        return NULL;
    *bytes = n - skip;
    return text + skip;
}

static const char *item_path(const char *text)
{
    return text[0] == '/' ? NULL : "write an absolute path";
}

static const char *item_socket(const char *text)
{
    return text[0] == '/' || !strchr(text, '/')
               ? NULL
               : "write an absolute path, or a name without a slash for one next to `socket`";
}

static const char *item_address(const char *text)
{
    union listener_address a;

    return text[0] == '\0' || listener_address_parse(text, &a) == 0
               ? NULL
               : "write an address and a port in numbers, e.g. 127.0.0.1:9471 or [::1]:9471, or a "
                 "port of 127.0.0.1";
}

static const char *item_directory(const char *text)
{
    return text[0] == '/' ? NULL
                          : "write the absolute path of a directory, e.g. /var/lib/ucmd/nvme0";
}

static const char *item_admin(const char *text)
{
    bool is_gid;
    uint32_t id;

    return config_principal(text, strlen(text), &is_gid, &id)
               ? NULL
               : "write uid:NUMBER or gid:NUMBER, e.g. uid:1000";
}

#define TENANT_CHARACTERS "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-"

static bool is_other(const char *text, size_t n)
{
    return n == strlen(UCM_TENANTS_OTHER) && memcmp(text, UCM_TENANTS_OTHER, n) == 0;
}

bool config_tenant_named(const char *text, size_t n)
{
    return n > 0 && n <= UCM_MAX_NAME_BYTES && strspn(text, TENANT_CHARACTERS) >= n &&
           !is_other(text, n);
}

static const char *item_tenant(const char *text)
{
    size_t n = strspn(text, TENANT_CHARACTERS);
    unsigned members = 0;
    size_t bytes;
    bool is_gid;
    uint32_t id;

    if (n == 0 || n > UCM_MAX_NAME_BYTES || (text[n] != ' ' && text[n] != '\0'))
        return "begin with a name of letters, digits, '.', '_' and '-', e.g. \"team-a uid:1000 "
               "gid:200\"";
    if (is_other(text, n))
        return "another name than \"" UCM_TENANTS_OTHER
               "\", which metrics give to all tenants beyond "
               "those that have a label of their own";
    for (text += n; *text == ' '; text += n, members++) {
        text++;
        n = strcspn(text, " ");
        if (!config_principal(text, n, &is_gid, &id) && !config_cgroup(text, n, &bytes))
            return "after the name write uid:NUMBER, gid:NUMBER or cgroup:/PATH, one space before "
                   "each, e.g. \"team-a uid:1000 gid:200\"";
    }
    return members > 0 ? NULL : "after the name say who it is, e.g. \"team-a uid:1000 gid:200\"";
}

static const char *item_encryption(const char *text)
{
    size_t n = strspn(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-:");
    const char *from = text + strcspn(text, " ");

    if (text[0] == '*' && text[1] == ' ')
        n = 1;
    if (n == 0 || n > UCM_MAX_NAME_BYTES || text[n] != ' ')
        return "begin with a tenant's name, or * for all others, and one space, e.g. \"team-a "
               "file:/etc/ucmd/team-a.keys\"";
    if (strncmp(from, " file:/", 7) == 0 || strncmp(from, " command:/", 10) == 0 ||
        (strncmp(from, " credential:", 12) == 0 && from[12] && !strchr(from, '/')))
        return NULL;
    return "after the name write file:/PATH, credential:NAME or command:/PATH, e.g. \"team-a "
           "file:/etc/ucmd/team-a.keys\"";
}

/* ---- the table ---- */

#define KEY(name_, kind_, field_, initial_)                                                        \
    .name = name_, .kind = CONFIG_##kind_, .offset = offsetof(struct config, field_),              \
    .initial = initial_
#define RANGE(min_, max_) .min = min_, .max = max_

const struct config_section config_sections[] = {
    {"", "Configuration of ucmd. Each key's comment ends with its default. Sizes are whole numbers "
         "with B, KiB, MiB, GiB or TiB (none: bytes). Durations are whole numbers with ms, s, min "
         "or h. 'ucmd --check --config FILE' checks a changed file. 'ucmctl config reload' and "
         "SIGHUP reload keys that are marked (reloadable); others take effect at the next start."},
    {"encryption", "Encryption of blocks on NVMe and on the shared tier (docs/security.md)."},
    {"log", "The log, on standard error: one line for each event."},
    {"metrics", "HTTP for monitoring: /metrics for Prometheus, /live and /ready for probes "
                "(docs/monitoring.md)."},
    {"arena", "DRAM: the staging buffers of all transfers, and the first tier of the cache."},
    {"mapping", "DRAM that workers map and read without a copy."},
    {"index", "The index of all cached blocks."},
    {"nvme", "The tier on local disks. Without paths there is none."},
    {"shared",
     "The tier that several hosts share (docs/shared-tier.md). Without roots there is none."},
    {"device", "GPUs."},
    {"copy", "Copies into and out of GPUs."},
    {"events", "Cache events, which tell routers where each block lies (docs/events.md)."},
    {"limits", "Hard limits. A client that reaches one gets BUSY, or its connection is refused."},
    {"lease", "Leases, which protect what a lookup found."},
    {"request", "Timeouts of requests."},
    {"shutdown", "The end of the daemon on SIGTERM."},
};
const size_t config_section_count = sizeof(config_sections) / sizeof(config_sections[0]);

const struct config_key config_keys[] = {
    {KEY("socket", STRING, socket, "/run/ucmd/ucmd.sock"), RANGE(1, SOCKET_BYTES),
     .item_cb = item_path,
     .help = "Unix socket that workers connect to. Its directory must exist. Not used when systemd "
             "passes the socket (ucmd.socket)."},
    {KEY("socket_mode", OCTAL, socket_mode, "0660"), RANGE(0, 0777),
     .help = "Permissions of the socket."},
    {KEY("socket_group", STRING, socket_group, ""), RANGE(0, 64),
     .help = "Group that owns the socket. \"\" is the daemon's own."},
    {KEY("tenants", LIST, tenants, ""), RANGE(0, 4096), .item_cb = item_tenant, .reloadable = true,
     .help = "Tenants, whose members share a cache: a list of \"NAME uid:N gid:N cgroup:/PATH\", "
             "with any number of members. A client belongs to the tenant with the longest PATH "
             "that contains its cgroup, otherwise to the first that lists its uid or primary gid. "
             "Any other client is a tenant by itself, named uid:N."},
    {KEY("tenant_settings", LIST, tenant_settings, ""), RANGE(0, 4096), .reloadable = true,
     .help = "What tenants are given: a list of \"NAME KEY=VALUE KEY=VALUE\". NAME is one of "
             "tenants, uid:N, or * for every tenant whose own entry does not set the key. weight "
             "is its part of a busy device, against the weights of others. namespaces replaces "
             "limits.namespaces_per_tenant. connections, requests, memory and leased bound what "
             "clients take. Others cannot evict what a tenant has below dram.min, nvme.min and "
             "shared.min. A tenant gets at most dram.max, nvme.max and shared.max; 0 is no bound. "
             "The nvme.min of all tenants together are at most half of NVMe. Garbage collection "
             "keeps shared.min and shared.max on each root. docs/configuration.md lists all "
             "settings."},
    {KEY("admins", LIST, admins, ""), RANGE(0, 1024), .item_cb = item_admin, .reloadable = true,
     .help =
         "Operators, besides root and the daemon's own user: a list of uid:N and gid:N, where gid "
         "is a client's primary group. A client in another user namespace is never an operator."},
    {KEY("container_admins", BOOL, container_admins, "false"), .names = bool_names,
     .reloadable = true,
     .help = "Whether a client in a container (another PID namespace than the daemon's) may be an "
             "operator. With true, every container that runs as the host's root is one."},

    {KEY("state", STRING, state, "/var/lib/ucmd"), RANGE(0, 160),
     .help = "Directory that keeps over restarts what 'ucmctl tenant set' has set. If it does not "
             "exist, or is \"\", such settings end with the daemon."},

    {KEY("encryption.tenants", LIST, encryption_tenants, ""), RANGE(0, 4096),
     .item_cb = item_encryption,
     .help = "Tenants whose blocks are encrypted, and the sources of their keys: a list of \"NAME "
             "file:/PATH\", \"NAME credential:NAME\" (of systemd) and \"NAME command:/PATH "
             "WORDS\". The name * is every tenant not in the list. A key is a line of 64 "
             "hexadecimal digits; the last line is the current key."},
    {KEY("encryption.read_plaintext", BOOL, encryption_read_plaintext, "false"),
     .names = bool_names,
     .help = "Whether the daemon reads an encrypted tenant's parts that NVMe holds unencrypted, "
             "from before. With true the cache is not cold when encryption begins, but whoever "
             "can write to the disk can plant blocks. With false the daemon ignores these parts."},
    {KEY("encryption.allow_persistent_arena", BOOL, encryption_allow_persistent_arena, "false"),
     .names = bool_names,
     .help = "Whether arena.persist_dir may keep blocks of encrypted tenants, unencrypted, in "
             "memory that outlives the daemon. With false the daemon refuses to start."},
    {KEY("encryption.secrets", STRING, encryption_secrets, ""), RANGE(0, 1024),
     .help = "Directory for the secrets of namespaces on shared roots. A purge replaces the "
             "secret, so that what a server keeps of the files can never be decrypted. Give all "
             "hosts the same directory, on storage that keeps no snapshots. \"\": no secrets, and "
             "a purge there only removes files."},
    {KEY("encryption.timeout", DURATION, encryption_timeout_ms, "10s"), RANGE(10, 60 * SECOND),
     .internal = true,
     .help = "How long a source of keys may take. Then a command is killed, and a file or "
             "credential, whose mount may hang, counts as not read."},

    {KEY("log.level", ENUM, log_level, "info"), .names = level_names, .reloadable = true,
     .help = "Events of this level, and of those before it in the list, are logged."},

    {KEY("metrics.socket", STRING, metrics_socket, "metrics.sock"), RANGE(0, SOCKET_BYTES),
     .item_cb = item_socket,
     .help = "Unix socket for HTTP: a path, or a name in the directory of `socket`; \"\": none. "
             "It belongs to socket_group."},
    {KEY("metrics.socket_mode", OCTAL, metrics_socket_mode, "0660"), RANGE(0, 0777),
     .help = "Permissions of metrics.socket."},
    {KEY("metrics.listen", STRING, metrics_listen, ""), RANGE(0, 64), .item_cb = item_address,
     .help = "Address for HTTP, such as 127.0.0.1:9471 or [::1]:9471; \"\": none. A port alone "
             "means that port of 127.0.0.1. With port 0 the kernel chooses and the log says "
             "which. There is no password: any address but loopback draws a warning."},

    {KEY("arena.size", SIZE, arena_size, "4GiB"), RANGE(MIB, 15 * TIB),
     .help = "DRAM that the daemon takes, rounded down to whole slabs."},
    {KEY("arena.slab", SIZE, arena_slab, "64MiB"), RANGE(MIB, GIB),
     .help = "Size of a slab, the unit in which DRAM moves between slot sizes; a power of two. No "
             "part of a block may be larger."},
    {KEY("arena.prefault", BOOL, arena_prefault, "true"), .names = bool_names, .internal = true,
     .help = "Touch all DRAM at start, after the socket is open; false touches a page at its first "
             "use, and places nothing on NUMA nodes."},
    {KEY("arena.persist_dir", STRING, arena_persist_dir, ""), RANGE(0, 160),
     .help = "Directory on a tmpfs or hugetlbfs, best one of its own, that keeps DRAM over an "
             "orderly stop and start (docs/operations.md). \"\": DRAM ends with the daemon."},
    {KEY("arena.numa", ENUM, arena_numa, "auto"), .names = numa_names,
     .help = "For hosts with several NUMA nodes. auto spreads DRAM over them, and puts a block on "
             "the node of the GPU that asks for it, if there is space. off leaves placement to the "
             "kernel, as auto does under a memory policy (numactl, NUMAPolicy=)."},

    {KEY("mapping.size", SIZE, mapping_size, "0"), RANGE(0, 15 * TIB), .reloadable = true,
     .help = "DRAM for shared mappings, in addition to arena.size and in whole slabs; at most the "
             "host's memory. 0: the daemon grants no shared mappings."},

    {KEY("index.max_blocks", INT, index_max_blocks, "16777216"), RANGE(1024, 1ull << 31),
     .help =
         "Most blocks that the index holds, over all tiers, at 128 bytes each. Each part after "
         "a block's first costs 24 bytes more, so fewer such blocks fit. Without nvme.paths and "
         "shared.roots the limit is at most one block for each 4 KiB of arena.size, plus "
         "65536. A full index drops the least recently used blocks, from NVMe too "
         "(index_evicted)."},

    {KEY("nvme.paths", LIST, nvme_paths, ""), RANGE(0, CONFIG_MAX_PATHS), .item_cb = item_directory,
     .help = "Directories, best one a disk: [/var/lib/ucmd/nvme0, ...]; or block devices and "
             "files that 'ucmctl format' prepared."},
    {KEY("nvme.state", STRING, nvme_state, ""), RANGE(0, 1024),
     .help = "Directory for the small files that devices and files of nvme.paths need."},
    {KEY("nvme.size", SIZE, nvme_size, "64GiB"), RANGE(4 * MIB, 16 * TIB),
     .help =
         "Size of the file in each directory, or the most that is used of each device or file."},
    {KEY("nvme.segment", SIZE, nvme_segment, "64MiB"), RANGE(MIB, GIB),
     .help = "Unit in which the files are written and reclaimed; a power of two. A file keeps the "
             "size that it was made with."},
    {KEY("nvme.queue_depth", INT, nvme_queue_depth, "128"), RANGE(1, 4096),
     .help = "Requests in flight for each path."},
    {KEY("nvme.io", ENUM, nvme_io, "auto"), .names = io_names, .internal = true,
     .help = "How the files are read and written: auto takes io_uring where the kernel allows it, "
             "otherwise threads."},
    {KEY("nvme.threads", INT, nvme_threads, "4"), RANGE(1, 256),
     .help = "Threads for checksums, and for reads and writes without io_uring."},
    {KEY("nvme.write_queue_size", SIZE, nvme_write_queue_size, "1GiB"), RANGE(MIB, 64 * TIB),
     .help = "Bytes in DRAM that may wait to be written, at most half of arena.size. Beyond that, "
             "DRAM may evict blocks that wait."},
    {KEY("nvme.scrub", SIZE, nvme_scrub, "32MiB"), RANGE(0, TIB),
     .help = "Bytes a second that the scrub reads and verifies in the background, after all other "
             "work; 0: none."},
    {KEY("nvme.scrub_interval", DURATION, nvme_scrub_interval_ms, "24h"),
     RANGE(10, 365 * 24 * HOUR), .internal = true,
     .help = "From the beginning of one scrub to the beginning of the next."},
    {KEY("nvme.quarantine", INT, nvme_quarantine, "5"), RANGE(0, 100), .internal = true,
     .help = "Percent of a file's segments that may be in quarantine for bad blocks. Beyond that "
             "(and beyond one segment) the daemon stops writing to the file."},
    {KEY("nvme.on_write_stall", ENUM, nvme_on_write_stall, "drop"), .names = write_stall_names,
     .help = "What happens beyond nvme.write_queue_size. drop answers dumps at once, and blocks "
             "that DRAM evicts first are not written. slow delays the answer of each dump by at "
             "most 200 ms, so that engines dump no faster than the disks write."},
    {KEY("nvme.write_stall_max", DURATION, nvme_write_stall_max_ms, "200ms"), RANGE(1, 60 * SECOND),
     .internal = true, .help = "How long slow delays one answer at most."},
    {KEY("nvme.admission", ENUM, nvme_admission, "learned"), .names = nvme_admission_names,
     .help = "Which blocks are written. all: every dumped block. reuse: a block when it is first "
             "used, or dumped a second time, mostly a tenth to half of all; blocks evicted from "
             "DRAM before that are lost. learned: all, but reuse for a namespace whose blocks "
             "are hardly ever read back from NVMe. Durable dumps are always written."},
    {KEY("nvme.rewrite", INT, nvme_rewrite, "50"), RANGE(0, 75), .internal = true,
     .help = "Percent of a segment that may be written again before the segment is reused: parts "
             "that were read since they were written."},

    {KEY("shared.roots", LIST, shared_roots, ""), RANGE(0, UCM_MAX_ROOTS),
     .help = "A list of mounted directories, NFS servers (without a mount), S3 "
             "buckets and Mooncake stores: [/mnt/kv, \"nfs://10.0.0.5/export/kv?version=3 "
             "capacity=10TiB\", \"s3://bucket?region=eu-central-1\", "
             "\"mooncake://10.0.0.6:50051\"]. Words may follow: capacity=SIZE (daemons remove "
             "the oldest files beyond it; none: no bound) and ro (this host only reads). A "
             "backend of your own is \"process:NAME capacity=10TiB -- /usr/libexec/ucmd/NAME "
             "WORD\" (docs/backends.md)."},
    {KEY("shared.placement", ENUM, shared_placement, "tiered"), .names = placement_names,
     .help = "How blocks are spread over several roots. tiered: to the first root that takes "
             "writes; garbage collection copies what it removes there to the next root. hashed: "
             "each block has one root, by its key; for servers that are alike."},
    {KEY("shared.lookup_timeout", DURATION, shared_lookup_ms, "50ms"), RANGE(1, 10 * SECOND),
     .help = "How long a lookup waits for the roots. Blocks not found by then count as missing."},
    {KEY("shared.negative", DURATION, shared_negative_ms, "2s"), RANGE(0, HOUR), .internal = true,
     .help = "How long the daemon remembers that a block is not there."},
    {KEY("shared.timeout", DURATION, shared_timeout_ms, "5s"), RANGE(10, 600 * SECOND),
     .help = "How long one read or write may take. If several roots may have a block, one that "
             "does not answer leaves half of this time to the others."},
    {KEY("shared.queue_depth", INT, shared_queue_depth, "64"), RANGE(1, 1024),
     .help = "Requests in flight for each root that is not a directory."},
    {KEY("shared.threads", INT, shared_threads, "16"), RANGE(2, 256),
     .help = "Threads of each directory's process; each has one request in flight."},
    {KEY("shared.admission", ENUM, shared_admission, "all"), .names = admission_names,
     .help = "Which blocks are written: all or reuse, which mean what they do for "
             "nvme.admission."},
    {KEY("shared.sync", BOOL, shared_sync, "false"), .names = bool_names,
     .help = "Whether the server makes each file durable before it gets its name. With false, a "
             "crash of the server may leave truncated files, which are misses."},
    {KEY("shared.gc_interval", DURATION, shared_gc_interval_ms, "10min"), RANGE(SECOND, 24 * HOUR),
     .help = "Time from one garbage collection of a root to the next. 'ucmctl shared gc' "
             "begins one at once."},
    {KEY("shared.touch", DURATION, shared_touch_ms, "1h"), RANGE(0, 365 * 24 * HOUR),
     .internal = true,
     .help =
         "A file that is read gets a new modification time when the old one is older than this."},

    {KEY("device.cuda", ENUM, cuda, "auto"), .names = cuda_names,
     .help = "NVIDIA GPUs: auto uses them where there are any; required refuses to start without "
             "one. --check looks for the driver only."},
    {KEY("device.cpu_threads", INT, cpu_threads, "2"), RANGE(1, 64), .internal = true,
     .help = "Threads that copy for workers whose KV memory is host memory; as many again build "
             "block summaries and select."},

    {KEY("copy.strategy", ENUM, copy_strategy, "auto"), .names = copy_names, .internal = true,
     .help =
         "dma: the GPU's copy engines, which leave its processors to the engine; sm: a kernel, "
         "which is faster for small scattered fragments; staged: through the staging ring in the "
         "worker's memory, where the worker has a copy agent. auto takes for each copy what "
         "costs least."},
    {KEY("copy.busy_max_percent", INT, copy_busy_max_percent, "85"), RANGE(5, 100),
     .help = "Percent of the bus that loads take at most while their worker's engine computes "
             "(the vLLM connector says when). Copies then leave gaps for the engine's own small "
             "copies. 100: loads go first, without gaps, which makes the engine's steps a quarter "
             "longer."},
    {KEY("copy.calibration", STRING, copy_calibration, "/var/lib/ucmd"), RANGE(0, 160),
     .internal = true,
     .help = "Directory that keeps what auto measured at a GPU's first use; \"\" measures at every "
             "start, as does a directory that can't be written to."},

    {KEY("events.memory", SIZE, events_memory, "0"), RANGE(0, TIB),
     .help = "Memory for events and for the tokens of blocks: about 200 bytes a block, all tenants "
             "together. 0: none are kept."},

    {KEY("limits.connections", INT, max_connections, "1024"), RANGE(1, 65536),
     .help = "Clients connected at once."},
    {KEY("limits.requests_per_connection", INT, max_requests_conn, "256"),
     RANGE(1, CONFIG_MAX_REQUESTS), .internal = true, .help = "Requests of one client at once."},
    {KEY("limits.namespaces", INT, max_namespaces, "4096"), RANGE(1, 32768),
     .help = "Namespaces known at once, over all tenants."},
    {KEY("limits.namespaces_per_tenant", INT, max_namespaces_tenant, "1024"), RANGE(1, 32768),
     .reloadable = true,
     .help = "Namespaces that one tenant may have. At either limit the daemon drops the least "
             "recently used namespace that is not open and holds no blocks."},
    {KEY("limits.frame_memory", SIZE, max_frame_memory, "256MiB"),
     RANGE(2 * UCM_MAX_FRAME_BYTES, TIB), .internal = true,
     .help = "Memory of the frames of all requests in progress."},

    {KEY("lease.max", DURATION, lease_max_ms, "10min"), RANGE(SECOND, UCM_TIMEOUT_MS),
     .help = "Longest lease that a lookup may take."},

    {KEY("request.timeout", DURATION, request_timeout_ms, "30s"), RANGE(1, UCM_TIMEOUT_MS),
     .reloadable = true, .help = "Timeout of a request that names none."},
    {KEY("request.handshake", DURATION, handshake_ms, "10s"), RANGE(10, HOUR), .internal = true,
     .help = "Time until a client must have said hello, and for a frame that has begun to arrive "
             "whole."},
    {KEY("request.unread", DURATION, unread_ms, "10min"), RANGE(10, HOUR), .internal = true,
     .help = "Time until a client for which 1 MiB of answers waits must have read some."},

    {KEY("shutdown.drain", DURATION, drain_ms, "10s"), RANGE(0, HOUR),
     .help = "Time for requests in progress to end. Each later phase of a stop takes at most "
             "about as long."},
};
const size_t config_key_count = sizeof(config_keys) / sizeof(config_keys[0]);

_Static_assert(sizeof(config_keys) / sizeof(config_keys[0]) <= CONFIG_MAX_KEYS,
               "struct config_origin has a line for every key");

size_t config_section_length(const char *name)
{
    const char *dot = strchr(name, '.');

    return dot ? (size_t)(dot - name) : 0;
}

const struct config_key *config_key_find(const char *name)
{
    for (size_t i = 0; i < config_key_count; i++)
        if (strcmp(config_keys[i].name, name) == 0)
            return &config_keys[i];
    return NULL;
}

/* ---- the nearest name ---- */

#define NEAR_BYTES 64

/* Levenshtein's distance, over one row. Both at most NEAR_BYTES long. */
static unsigned distance(const char *a, const char *b)
{
    unsigned row[NEAR_BYTES + 1];
    size_t n = strlen(b);

    for (unsigned j = 0; j <= n; j++)
        row[j] = j;
    for (unsigned i = 1; *a; a++, i++) {
        unsigned diagonal = row[0];

        row[0] = i;
        for (size_t j = 1; j <= n; j++) {
            unsigned above = row[j];

            row[j] = MIN(MIN(above, row[j - 1]) + 1, diagonal + (*a != b[j - 1]));
            diagonal = above;
        }
    }
    return row[n];
}

/* The right word without its section, or under another one. */
static const char *nearest_elsewhere(const char *name)
{
    size_t skip = config_section_length(name);

    for (size_t i = 0; i < config_key_count; i++) {
        const char *known = config_keys[i].name;
        size_t known_skip = config_section_length(known);

        if (strcmp(known + (known_skip > 0 ? known_skip + 1 : 0),
                   name + (skip > 0 ? skip + 1 : 0)) == 0)
            return known;
    }
    return NULL;
}

const char *config_key_nearest(const char *name)
{
    size_t n = strlen(name);
    unsigned best =
        n < 9 ? 1 + (unsigned)(n + 1) / 3 : 4; /* farther is a guess, not a slip of the pen */
    const char *found = NULL;

    if (n > NEAR_BYTES)
        return NULL;
    for (size_t i = 0; i < config_key_count + config_section_count - 1; i++) {
        const char *known = i < config_key_count ? config_keys[i].name
                                                 : config_sections[i - config_key_count + 1].name;
        unsigned d = distance(name, known);

        if (d < best) {
            best = d;
            found = known;
        }
    }
    return found ? found : nearest_elsewhere(name);
}

const char *config_variable(const char *key, char buf[CONFIG_VARIABLE_BYTES])
{
    size_t n = (size_t)snprintf(buf, CONFIG_VARIABLE_BYTES, "UCMD_%s", key);

    for (size_t i = 0; i < n && i < CONFIG_VARIABLE_BYTES; i++)
        buf[i] = buf[i] == '.' ? '_' : (char)toupper((unsigned char)buf[i]);
    return buf;
}
