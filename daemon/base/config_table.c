#include "daemon/base/config_table.h"

#include "proto/limits.h"
#include "proto/messages.h"

#include <ctype.h>
#include <string.h>

#define KIB (1ull << 10)
#define MIB (1ull << 20)
#define GIB (1ull << 30)
#define TIB (1ull << 40)
#define SECOND 1000ull
#define HOUR (3600 * SECOND)

/* sun_path holds 108 bytes, its NUL included. */
#define SOCKET_BYTES 107

static const char *const level_names[] = {"error", "warn", "info", "debug", NULL};
static const char *const io_names[] = {"auto", "uring", "threads", NULL};
static const char *const pressure_names[] = {"drop", "slow", NULL};
static const char *const admission_names[] = {"all", "reuse", NULL};
static const char *const spread_names[] = {"tiered", "hashed", NULL};
static const char *const probe_names[] = {"prefix", "exact", NULL};
static const char *const copy_names[] = {"auto", "dma", "sm", "staged", NULL};
static const char *const numa_names[] = {"auto", "off", NULL};
static const char *const cuda_names[] = {"auto", "off", "required", NULL};

/* ---- what a list's item must be: NULL, or what would be right ---- */

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

static const char *item_folder(const char *text)
{
    return text[0] == '/' ? NULL : "write the absolute path of a folder, e.g. /var/lib/ucmd/nvme0";
}

static const char *item_root(const char *text)
{
    return text[0] == '/' || strncmp(text, "nfs://", 6) == 0
               ? NULL
               : "write the absolute path of a folder or nfs://SERVER/EXPORT, e.g. /mnt/kv "
                 "capacity=1TiB";
}

static const char *item_admin(const char *text)
{
    bool is_gid;
    uint32_t id;

    return config_principal(text, strlen(text), &is_gid, &id)
               ? NULL
               : "write uid:NUMBER or gid:NUMBER, e.g. uid:1000";
}

static const char *item_tenant(const char *text)
{
    size_t n = strspn(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-");
    unsigned members = 0;
    bool is_gid;
    uint32_t id;

    if (n == 0 || n > UCM_MAX_NAME_BYTES || (text[n] != ' ' && text[n] != '\0'))
        return "begin with a name of letters, digits, '.', '_' and '-', e.g. \"team-a uid:1000 "
               "gid:200\"";
    for (text += n; *text == ' '; text += n, members++) {
        text++;
        n = strcspn(text, " ");
        if (!config_principal(text, n, &is_gid, &id))
            return "after the name write uid:NUMBER or gid:NUMBER, one space before each, "
                   "e.g. \"team-a uid:1000 gid:200\"";
    }
    return members > 0 ? NULL : "after the name say who it is, e.g. \"team-a uid:1000 gid:200\"";
}

/* ---- the table ---- */

#define AT(field) offsetof(struct config, field)

const struct config_section config_sections[] = {
    {"", "Configuration of ucmd. Each key's comment ends with its default. Sizes are whole numbers "
         "with\n"
         "B, KiB, MiB, GiB or TiB (none: bytes), durations with ms, s, min or h. To check a "
         "changed file:\n"
         "ucmd --check --config FILE. SIGHUP reloads the keys marked (reloadable)."},
    {"log", "One line an event on standard error."},
    {"arena", "DRAM: staging buffers and the DRAM tier in one."},
    {"index", "What is cached where."},
    {"nvme", "The tier on local disks. Without paths the cache is DRAM only."},
    {"share", "The tier that several hosts have in common. Without roots there is none."},
    {"device", "Where workers keep their KV memory."},
    {"copy", "How bytes get into and out of GPUs."},
    {"limits", "Hard bounds; past one of them a peer is answered BUSY or turned away."},
    {"lease", "What a lookup may hold on to."},
    {"request", "How long things may take."},
    {"shutdown", "What happens on SIGTERM."},
};
const size_t config_section_count = sizeof(config_sections) / sizeof(config_sections[0]);

const struct config_key config_keys[] = {
    {"socket", CONFIG_PATH, false, AT(socket), "/run/ucmd/ucmd.sock", 1, SOCKET_BYTES, NULL, NULL,
     "Path of the Unix socket that workers connect to. Its folder must exist. Not used when "
     "systemd\n"
     "passes the socket (ucmd.socket)."},
    {"socket_mode", CONFIG_OCTAL, false, AT(socket_mode), "0660", 0, 0777, NULL, NULL,
     "Permissions of the socket."},
    {"socket_group", CONFIG_STRING, false, AT(socket_group), "", 0, 64, NULL, NULL,
     "Group that owns the socket; \"\" keeps the daemon's."},
    {"tenants", CONFIG_LIST, false, AT(tenants), "", 0, 4096, NULL, item_tenant,
     "Who shares cache with whom: a list of \"name uid:N uid:N gid:N\". The first that names a "
     "peer's\n"
     "uid or primary gid is its tenant; who is in none is a tenant by itself, named uid:N."},
    {"admins", CONFIG_LIST, false, AT(admins), "", 0, 1024, NULL, item_admin,
     "Who may use operators' calls besides root and the daemon's own user: a list of uid:N and "
     "gid:N,\n"
     "gid being a peer's primary group."},

    {"log.level", CONFIG_ENUM, true, AT(log_level), "info", 0, 0, level_names, NULL,
     "Least level that is logged."},

    {"arena.size", CONFIG_SIZE, false, AT(arena_size), "4GiB", MIB, 15 * TIB, NULL, NULL,
     "DRAM that the daemon takes, rounded down to whole extents."},
    {"arena.extent", CONFIG_SIZE, false, AT(arena_extent), "64MiB", MIB, GIB, NULL, NULL,
     "Unit in which DRAM moves between slot sizes; a power of two, and no part of a block may be\n"
     "larger."},
    {"arena.hugepages", CONFIG_BOOL, false, AT(arena_hugepages), "true", 0, 1, NULL, NULL,
     "Ask the kernel for transparent huge pages."},
    {"arena.prefault", CONFIG_BOOL, false, AT(arena_prefault), "true", 0, 1, NULL, NULL,
     "Touch all DRAM at start, behind the open socket; false touches a page at its first use."},
    {"arena.keep", CONFIG_STRING, false, AT(arena_keep), "", 0, 160, NULL, NULL,
     "Folder on a tmpfs or hugetlbfs, best one of its own: DRAM lies in a file there and is found "
     "again\n"
     "after an orderly stop and start (docs/operations.md). All of it is taken at start, whatever\n"
     "arena.prefault says. \"\" keeps nothing."},
    {"arena.numa", CONFIG_ENUM, false, AT(arena_numa), "auto", 0, 0, numa_names, NULL,
     "On a host of several NUMA nodes: auto spreads DRAM over them, and blocks lie on the node of "
     "the\n"
     "GPU that asked where that can be had; off leaves that to the kernel. So does auto where the\n"
     "daemon was given a memory policy (numactl, NUMAPolicy=), or with arena.prefault false and "
     "no\n"
     "arena.keep."},

    {"index.max_blocks", CONFIG_COUNT, false, AT(index_max_blocks), "16777216", 1024, 1ull << 31,
     NULL, NULL,
     "Blocks that the index holds at most, over all tiers; about 128 bytes each. When it is full, "
     "those\n"
     "make way that were not used for longest, also on NVMe (index_evicted in the stats)."},

    {"nvme.paths", CONFIG_LIST, false, AT(nvme_paths), "", 0, CONFIG_MAX_PATHS, NULL, item_folder,
     "Folders, best one a disk, in each of which one file is made: [/var/lib/ucmd/nvme0, ...]; or\n"
     "block devices, and files, that are used as they are once 'ucmctl format' was run on them."},
    {"nvme.state", CONFIG_STRING, false, AT(nvme_state), "", 0, 1024, NULL, NULL,
     "Folder for the little that belongs to devices and files of nvme.paths and can't lie beside\n"
     "them. Without it their blocks are lost."},
    {"nvme.size", CONFIG_SIZE, false, AT(nvme_size), "64GiB", 4 * MIB, 16 * TIB, NULL, NULL,
     "Size of each of these files; of a device at most so much is used."},
    {"nvme.segment", CONFIG_SIZE, false, AT(nvme_segment), "64MiB", MIB, GIB, NULL, NULL,
     "Unit in which the files are written and reclaimed; a power of two."},
    {"nvme.depth", CONFIG_INT, false, AT(nvme_depth), "128", 1, 4096, NULL, NULL,
     "Requests in flight for each path."},
    {"nvme.io", CONFIG_ENUM, false, AT(nvme_io), "auto", 0, 0, io_names, NULL,
     "How the files are read and written; auto takes io_uring where the kernel allows it, else\n"
     "threads."},
    {"nvme.threads", CONFIG_INT, false, AT(nvme_threads), "4", 1, 256, NULL, NULL,
     "Threads for checksums and blocking I/O."},
    {"nvme.backlog", CONFIG_SIZE, false, AT(nvme_backlog), "1GiB", MIB, 64 * TIB, NULL, NULL,
     "Bytes that may wait in DRAM to be written; past it DRAM is no longer kept for what waits."},
    {"nvme.scrub", CONFIG_SIZE, false, AT(nvme_scrub), "32MiB", 0, TIB, NULL, NULL,
     "Bytes a second that are read and verified in the background, behind all other work; 0: "
     "none."},
    {"nvme.scrub_interval", CONFIG_DURATION, false, AT(nvme_scrub_interval_ms), "24h", 10,
     365 * 24 * HOUR, NULL, NULL,
     "From the beginning of one such pass over all that lies there to the beginning of the next."},
    {"nvme.quarantine", CONFIG_INT, false, AT(nvme_quarantine), "5", 0, 100, NULL, NULL,
     "Percent of a file's segments that may be in quarantine for bad blocks; past it (and past "
     "one)\n"
     "the file takes no more writes."},
    {"nvme.pressure", CONFIG_ENUM, false, AT(nvme_pressure), "drop", 0, 0, pressure_names, NULL,
     "Past nvme.backlog, drop answers dumps at once, and what DRAM has no room for is not "
     "written;\n"
     "slow holds the answers of dumps back, so that engines dump no faster than the disks write."},
    {"nvme.pressure_wait", CONFIG_DURATION, false, AT(nvme_pressure_ms), "200ms", 1, 60 * SECOND,
     NULL, NULL, "How long slow holds one answer back at most."},
    {"nvme.admission", CONFIG_ENUM, false, AT(nvme_admission), "all", 0, 0, admission_names, NULL,
     "Which blocks are written: all that are dumped, or only those that were used or dumped again\n"
     "(reuse): a third to a quarter of the writes, but what DRAM could not keep until its second "
     "use is\n"
     "lost. Dumps that ask for durability are always written."},
    {"nvme.rewrite", CONFIG_INT, false, AT(nvme_rewrite), "50", 0, 75, NULL, NULL,
     "How much of a segment, in percent, may be written again before it is reused: parts that were "
     "read\n"
     "since they were written; 0 drops them with the rest."},

    {"share.roots", CONFIG_LIST, false, AT(share_roots), "", 0, CONFIG_MAX_ROOTS, NULL, item_root,
     "What hosts share: folders of mounted file systems and NFS servers that the daemon speaks to\n"
     "itself, e.g. [/mnt/kv, \"nfs://10.0.0.5/export/kv?version=3 capacity=10TiB\"]. Behind a "
     "target may "
     "stand\n"
     "capacity=SIZE (files go beyond it; none: no bound) and ro (nothing is written there)."},
    {"share.storage_backends", CONFIG_STRING, false, AT(share_backends), "", 0, 4096, NULL, NULL,
     "The same as UCM writes it: targets with colons between them."},
    {"share.spread", CONFIG_ENUM, false, AT(share_spread), "tiered", 0, 0, spread_names, NULL,
     "How blocks are spread over several roots. tiered: to the first root that takes writes; what\n"
     "garbage collection would remove from it is copied to the next one. hashed: each block has "
     "one\n"
     "root, by its key; for servers that are alike."},
    {"share.lookup", CONFIG_ENUM, false, AT(share_lookup), "prefix", 0, 0, probe_names, NULL,
     "How the end of a prefix is found. prefix: in a few round trips, taking for granted that what "
     "lies\n"
     "before a block that is there is there as well; exact asks for every block."},
    {"share.lookup_deadline", CONFIG_DURATION, false, AT(share_lookup_ms), "50ms", 1, 10 * SECOND,
     NULL, NULL,
     "How long a lookup waits for the roots at most; what is not known by then is a miss."},
    {"share.negative", CONFIG_DURATION, false, AT(share_negative_ms), "2s", 0, HOUR, NULL, NULL,
     "How long it is remembered that a block is not there."},
    {"share.deadline", CONFIG_DURATION, false, AT(share_deadline_ms), "5s", 10, 600 * SECOND, NULL,
     NULL,
     "How long one read or write may take; later it is given up. Where several roots may have a "
     "block,\n"
     "one that does not answer leaves half of the time to the others."},
    {"share.depth", CONFIG_INT, false, AT(share_depth), "64", 1, 1024, NULL, NULL,
     "Requests under way for each NFS server."},
    {"share.threads", CONFIG_INT, false, AT(share_threads), "16", 2, 256, NULL, NULL,
     "Threads for each folder, each of which has one request under way."},
    {"share.admission", CONFIG_ENUM, false, AT(share_admission), "all", 0, 0, admission_names, NULL,
     "Which blocks are written: all, or only those that are used or stored again, as "
     "nvme.admission says it."},
    {"share.sync", CONFIG_BOOL, false, AT(share_sync), "false", 0, 1, NULL, NULL,
     "Have each file on the server's stable storage before it gets its name. Without, a crash of "
     "the server\n"
     "may leave files that are cut short: they are found out, as misses."},
    {"share.low", CONFIG_INT, false, AT(share_low), "90", 1, 100, NULL, NULL,
     "Percent of its capacity that garbage collection brings a root back to."},
    {"share.collect", CONFIG_DURATION, false, AT(share_collect_ms), "10min", SECOND, 24 * HOUR,
     NULL, NULL,
     "From one garbage collection of a root to the next; ucmctl share collect begins one at once."},
    {"share.touch", CONFIG_DURATION, false, AT(share_touch_ms), "1h", 0, 365 * 24 * HOUR, NULL,
     NULL, "A file that is read gets a new modification time when the old one is older than this."},

    {"device.cuda", CONFIG_ENUM, false, AT(cuda), "auto", 0, 0, cuda_names, NULL,
     "NVIDIA GPUs: auto uses them where a driver is, required refuses to start without one."},
    {"device.cpu_threads", CONFIG_INT, false, AT(cpu_threads), "2", 1, 256, NULL, NULL,
     "Threads that copy for regions in host memory."},

    {"copy.strategy", CONFIG_ENUM, false, AT(copy_strategy), "auto", 0, 0, copy_names, NULL,
     "dma: by the copy engines, which take nothing from the engine's kernels; sm: by a kernel, "
     "which is\n"
     "faster for small scattered chunks; staged: through slices of the worker's memory, where it "
     "has "
     "a\n"
     "companion; auto takes for each copy what costs least."},
    {"copy.calibration", CONFIG_STRING, false, AT(copy_calibration), "/var/lib/ucmd", 0, 160, NULL,
     NULL,
     "Folder that keeps what auto measured at a GPU's first use (a fraction of a second); \"\" "
     "measures\n"
     "at every start, as does a folder that can't be written."},

    {"limits.connections", CONFIG_INT, false, AT(max_connections), "1024", 1, 65536, NULL, NULL,
     "Clients connected at once."},
    {"limits.requests", CONFIG_INT, false, AT(max_requests), "4096", 1, 1048576, NULL, NULL,
     "Requests under way in all."},
    {"limits.requests_per_connection", CONFIG_INT, false, AT(max_requests_conn), "256", 1, 65536,
     NULL, NULL, "Requests under way for one client."},
    {"limits.regions_per_connection", CONFIG_INT, false, AT(max_regions_conn), "64", 1, 4096, NULL,
     NULL, "Regions that one client may register."},
    {"limits.leases_per_connection", CONFIG_INT, false, AT(max_leases_conn), "4096", 1, 1048576,
     NULL, NULL, "Leases that one client may hold."},
    {"limits.namespaces", CONFIG_INT, false, AT(max_namespaces), "4096", 1, 32768, NULL, NULL,
     "Namespaces known at once, over all tenants."},
    {"limits.namespaces_per_tenant", CONFIG_INT, false, AT(max_namespaces_tenant), "1024", 1, 32768,
     NULL, NULL,
     "Of these, how many one tenant may have. At either bound the one that was used least recently "
     "gives way, if it is not open and holds no blocks."},
    {"limits.frame_memory", CONFIG_SIZE, false, AT(max_frame_memory), "256MiB",
     2 * UCM_MAX_FRAME_BYTES, TIB, NULL, NULL, "Memory of the frames of all requests under way."},

    {"lease.max", CONFIG_DURATION, false, AT(lease_max_ms), "10min", SECOND, UCM_DEADLINE_MS, NULL,
     NULL, "Longest lease that a lookup may take."},

    {"request.deadline", CONFIG_DURATION, true, AT(deadline_ms), "30s", 1, UCM_DEADLINE_MS, NULL,
     NULL, "Deadline of a request that names none."},
    {"request.handshake", CONFIG_DURATION, false, AT(handshake_ms), "10s", 10, HOUR, NULL, NULL,
     "Time until a client must have said hello, and for a frame that has begun to arrive whole."},

    {"shutdown.drain", CONFIG_DURATION, false, AT(drain_ms), "10s", 0, HOUR, NULL, NULL,
     "Time that requests under way get to finish before the daemon ends."},
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

static unsigned min3(unsigned a, unsigned b, unsigned c)
{
    unsigned m = a < b ? a : b;

    return m < c ? m : c;
}

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

            row[j] = min3(above + 1, row[j - 1] + 1, diagonal + (*a != b[j - 1]));
            diagonal = above;
        }
    }
    return row[n];
}

static void nearest_offer(const char *name, const char *known, unsigned *best, const char **found)
{
    unsigned d = distance(name, known);

    if (d < *best) {
        *best = d;
        *found = known;
    }
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
    for (size_t i = 0; i < config_key_count; i++)
        nearest_offer(name, config_keys[i].name, &best, &found);
    for (size_t i = 1; i < config_section_count; i++)
        nearest_offer(name, config_sections[i].name, &best, &found);
    return found ? found : nearest_elsewhere(name);
}
