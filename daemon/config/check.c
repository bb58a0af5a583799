/* What no key of a configuration shows alone; see config_check. */
#include "daemon/config/memory.h"
#include "daemon/config/roots.h"
#include "daemon/config/table.h"
#include "daemon/config/tenants.h"
#include "daemon/format/nvme_format.h"
#include "daemon/format/take.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <libgen.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#define MIB (1ull << 20)

/* The value of a key as it would be written. */
#define SHOWN(c, key) config_value_text(c, config_key_find(key), (char[CONFIG_TEXT_BYTES]){""})

/* ---- sizes ---- */

static int check_power_of_two(const struct config *c, struct config_error *e, const char *key)
{
    uint64_t value = config_number(c, config_key_find(key)), below = MIB;

    if ((value & (value - 1)) == 0)
        return 0;
    while (below * 2 < value)
        below *= 2;
    return config_fail(c, e, key, "%s is %s, not a power of two; write %lluMiB or %lluMiB", key,
                       SHOWN(c, key), (unsigned long long)(below / MIB),
                       (unsigned long long)(below * 2 / MIB));
}

/* Is the value of `key` at least `times` the value of `than`? */
static int check_at_least(const struct config *c, struct config_error *e, const char *key,
                          unsigned times, const char *than)
{
    char factor[24] = "";

    if (config_number(c, config_key_find(key)) >= times * config_number(c, config_key_find(than)))
        return 0;
    if (times > 1)
        snprintf(factor, sizeof(factor), "%u times ", times);
    return config_fail(c, e, key, "%s (%s) is smaller than %s%s (%s); raise it, or lower %s", key,
                       SHOWN(c, key), factor, than, SHOWN(c, than), than);
}

static int check_sizes(const struct config *c, struct config_error *e)
{
    int rc = check_power_of_two(c, e, "arena.slab");

    if (rc == 0)
        rc = check_at_least(c, e, "arena.size", 1, "arena.slab");
    if (rc == 0 && c->nvme_paths.n > 0)
        rc = check_power_of_two(c, e, "nvme.segment");
    if (rc == 0 && c->nvme_paths.n > 0)
        rc = check_at_least(c, e, "nvme.size", 4, "nvme.segment");
    if (rc == 0 && c->events_memory > 0 && c->events_memory < CONFIG_EVENTS_MIN)
        rc = config_fail(c, e, "events.memory",
                         "events.memory is too small; write 1MiB or more, or 0 for no events");
    return rc;
}

/* ---- tenants ---- */

struct member {
    uint64_t who;  /* the id, above it whether it is a gid */
    size_t tenant; /* its index in the list */
};

static int member_compare(const void *a, const void *b)
{
    const struct member *m = a, *o = b;

    if (m->who != o->who)
        return m->who < o->who ? -1 : 1;
    return m->tenant < o->tenant ? -1 : m->tenant > o->tenant;
}

static int name_length(const char *tenant)
{
    return (int)strcspn(tenant, " ");
}

/* Puts the members of one tenant, which item_tenant has checked, at `out`; returns their number. */
static size_t members_of(const struct config *c, size_t tenant, struct member *out)
{
    size_t n = 0;

    for (const char *p = strchr(c->tenants.item[tenant], ' '); p; p = strchr(p + 1, ' ')) {
        bool is_gid = false;
        uint32_t id = 0;

        if (!config_principal(p + 1, strcspn(p + 1, " "), &is_gid, &id))
            continue; /* a cgroup */
        out[n++] = (struct member){(uint64_t)is_gid << 32 | id, tenant};
    }
    return n;
}

/* With a uid or gid in two tenants the order of the list would decide. */
static int check_members(const struct config *c, struct config_error *e, struct member *all)
{
    char *const *name = c->tenants.item;
    size_t n = 0;

    for (size_t i = 0; i < c->tenants.n; i++)
        n += members_of(c, i, all + n);
    qsort(all, n, sizeof(*all), member_compare);
    for (size_t i = 1; i < n; i++)
        if (all[i].who == all[i - 1].who)
            return config_fail(
                c, e, "tenants",
                "tenants: %s:%u is in \"%.*s\" and in \"%.*s\"; leave it in one of them",
                all[i].who >> 32 ? "gid" : "uid", (unsigned)all[i].who,
                name_length(name[all[i - 1].tenant]), name[all[i - 1].tenant],
                name_length(name[all[i].tenant]), name[all[i].tenant]);
    return 0;
}

struct cgroup {
    const char *path;
    size_t bytes, tenant;
};

static int cgroup_compare(const void *a, const void *b)
{
    const struct cgroup *m = a, *o = b;
    int order = strncmp(m->path, o->path, m->bytes < o->bytes ? m->bytes : o->bytes);

    if (order == 0 && m->bytes != o->bytes)
        order = m->bytes < o->bytes ? -1 : 1;
    return order != 0 ? order : m->tenant < o->tenant ? -1 : m->tenant > o->tenant;
}

/* One cgroup may lie in another, then the longer path decides, but not be the same. */
static int check_cgroups(const struct config *c, struct config_error *e, struct cgroup *all)
{
    char *const *name = c->tenants.item;
    size_t n = 0;

    for (size_t i = 0; i < c->tenants.n; i++)
        for (const char *p = strchr(name[i], ' '); p; p = strchr(p + 1, ' ')) {
            all[n].path = config_cgroup(p + 1, strcspn(p + 1, " "), &all[n].bytes);
            all[n].tenant = i;
            n += all[n].path != NULL;
        }
    qsort(all, n, sizeof(*all), cgroup_compare);
    for (size_t i = 1; i < n; i++)
        if (all[i].bytes == all[i - 1].bytes && all[i].tenant != all[i - 1].tenant &&
            memcmp(all[i].path, all[i - 1].path, all[i].bytes) == 0)
            return config_fail(
                c, e, "tenants",
                "tenants: cgroup:%.*s is in \"%.*s\" and in \"%.*s\"; leave it in one of them",
                (int)all[i].bytes, all[i].path, name_length(name[all[i - 1].tenant]),
                name[all[i - 1].tenant], name_length(name[all[i].tenant]), name[all[i].tenant]);
    return 0;
}

/* With a tenant in it twice the order of the list would decide. */
static int check_encryption(const struct config *c, struct config_error *e)
{
    const struct config_list *t = &c->encryption_tenants;

    if (t->n > 0 && c->arena_persist_dir[0] != '\0' && !c->encryption_allow_persistent_arena)
        return config_fail(
            c, e, "arena.persist_dir",
            "arena.persist_dir would keep blocks of the tenants of encryption.tenants in the "
            "clear, in memory that outlives the daemon; leave it empty, or write "
            "encryption.allow_persistent_arena: true");
    if (c->encryption_secrets[0] != '\0' && c->encryption_secrets[0] != '/')
        return config_fail(c, e, "encryption.secrets",
                           "encryption.secrets: \"%.160s\" is wrong; write the absolute path of a "
                           "directory that all hosts of the shared roots have in common",
                           c->encryption_secrets);

    for (size_t i = 0; i < t->n; i++)
        for (size_t j = 0; j < i; j++)
            if (name_length(t->item[i]) == name_length(t->item[j]) &&
                strncmp(t->item[i], t->item[j], (size_t)name_length(t->item[i])) == 0)
                return config_fail(c, e, "encryption.tenants",
                                   "encryption.tenants: \"%.*s\" is there twice; leave one",
                                   name_length(t->item[i]), t->item[i]);
    return 0;
}

static int check_tenants(const struct config *c, struct config_error *e)
{
    const struct config_list *t = &c->tenants;
    size_t bytes = 1, most;
    struct member *all;
    struct cgroup *cgroups;
    int rc;

    for (size_t i = 0; i < t->n; i++) {
        int n = name_length(t->item[i]);

        bytes += strlen(t->item[i]);
        for (size_t j = 0; j < i; j++)
            if (name_length(t->item[j]) == n && memcmp(t->item[i], t->item[j], (size_t)n) == 0)
                return config_fail(c, e, "tenants",
                                   "tenants: \"%.*s\" is there twice; write all its members "
                                   "after one name",
                                   n, t->item[i]);
    }
    most = bytes / 6 + 1; /* " uid:N" is the shortest */
    all = malloc(most * sizeof(*all));
    cgroups = malloc(most * sizeof(*cgroups));
    if (all && cgroups) {
        rc = check_members(c, e, all);
        rc = rc == 0 ? check_cgroups(c, e, cgroups) : rc;
    } else {
        rc = config_fail(c, e, "tenants", "tenants: memory ran out");
    }
    free(all);
    free(cgroups);
    return rc;
}

/* ---- paths ---- */

/* A directory that this process may make files in. */
static int check_directory(const struct config *c, struct config_error *e, const char *key,
                           const char *path, struct stat *st)
{
    int err = stat(path, st) < 0 ? errno : 0;

    if (err == ENOENT)
        return config_fail(c, e, key,
                           "%s: directory %.160s does not exist; make it, or name one that does",
                           key, path);
    if (err != 0)
        return config_fail(c, e, key, "%s: %.160s: %s; name a directory that the daemon may use",
                           key, path, strerror(err));
    if (!S_ISDIR(st->st_mode))
        return config_fail(c, e, key, "%s: %.160s is not a directory; name one", key, path);
    if (faccessat(AT_FDCWD, path, W_OK | X_OK, AT_EACCESS) < 0)
        return config_fail(c, e, key,
                           "%s: directory %.160s: %s for uid %u; give it to the daemon's user", key,
                           path, strerror(errno), (unsigned)geteuid());
    return 0;
}

static int check_socket(const struct config *c, struct config_error *e)
{
    char copy[CONFIG_ITEM_BYTES];
    struct stat st;

    if (getenv("LISTEN_FDS")) /* systemd made the socket */
        return 0;
    if (stat(c->socket, &st) == 0 && !S_ISSOCK(st.st_mode))
        return config_fail(c, e, "socket", "socket: %s exists and is no socket; name another path",
                           c->socket);
    snprintf(copy, sizeof(copy), "%s", c->socket);
    return check_directory(c, e, "socket", dirname(copy), &st);
}

/* Unless systemd makes the socket, the daemon gives it to this group. */
static int check_group(const struct config *c, struct config_error *e)
{
    const struct group *group;

    if (c->socket_group[0] == '\0' || getenv("LISTEN_FDS"))
        return 0;
    group = getgrnam(c->socket_group);
    if (!group)
        return config_fail(c, e, "socket_group",
                           "socket_group: there is no group \"%s\"; name one that there is",
                           c->socket_group);
    if (geteuid() == 0 || group->gr_gid == getegid() || group_member(group->gr_gid))
        return 0;
    return config_fail(c, e, "socket_group",
                       "socket_group: uid %u is not in the group \"%s\", so it can't give the "
                       "socket to it; add the daemon's user to the group",
                       (unsigned)geteuid(), c->socket_group);
}

/* What the file that an earlier run left in the directory takes already. */
static uint64_t bytes_there(const char *directory, const char *name)
{
    char path[CONFIG_ITEM_BYTES + 32];
    struct stat st;

    snprintf(path, sizeof(path), "%s/%s", directory, name);
    return stat(path, &st) == 0 && S_ISREG(st.st_mode) ? (uint64_t)st.st_blocks * 512 : 0;
}

/* What a block of an ordinary model holds, for how many the index will know; and bytes a block. */
#define BLOCK_BYTES (512u << 10)
#define INDEX_BYTES 128u

/* Memory besides the arena: the index of what DRAM and NVMe can hold, frames and unread answers,
 * requests with what they keep, checksums of layers, events. */
static uint64_t beside_arena(const struct config *c)
{
    uint64_t blocks = (c->arena_size + c->nvme_paths.n * c->nvme_size) / BLOCK_BYTES;

    blocks = blocks < c->index_max_blocks ? blocks : c->index_max_blocks;
    return blocks * INDEX_BYTES + 2 * c->max_frame_memory + c->events_memory +
           (c->nvme_paths.n > 0 ? CONFIG_NVME_SUMS_BYTES : 0);
}

/* Bytes of the arena that need no new memory: those of an earlier run's file, or all of them if it
 * uses huge pages that were set aside at boot; check_keep checks these. */
static uint64_t arena_there(const struct config *c)
{
    uint64_t there;
    struct statfs fs;

    if (c->arena_persist_dir[0] == '\0')
        return 0;
    if (statfs(c->arena_persist_dir, &fs) == 0 && fs.f_type == HUGETLBFS_MAGIC)
        return c->arena_size;
    there = bytes_there(c->arena_persist_dir, CONFIG_KEEP_ARENA);
    return there < c->arena_size ? there : c->arena_size;
}

/* The kernel grants more than there is, and when it is touched ends the daemon, or an engine. A
 * twentieth stays free. */
static int check_memory(const struct config *c, struct config_error *e)
{
    uint64_t there = arena_there(c), beside = beside_arena(c) + c->mapping_size;
    uint64_t wanted = c->arena_size - there + beside, room, usable, fits;
    char mappings[64] = "";
    struct memory_room r;
    bool cgroup;

    if (memory_room("", wanted + wanted / 16, &r) < 0)
        return 0;
    cgroup = r.cgroup_bytes < r.host_bytes;
    room = cgroup ? r.cgroup_bytes : r.host_bytes;
    usable = room - room / 20;
    if (wanted <= usable)
        return 0;
    if (c->mapping_size > 0)
        snprintf(mappings, sizeof(mappings), " with mapping.size, %s,", SHOWN(c, "mapping.size"));
    fits = usable + there > beside ? (usable + there - beside) / MIB : 0;
    return config_fail(
        c, e, "arena.size",
        "arena.size is %s,%s with the index and requests %llu MiB, and %s %llu MiB of "
        "memory available, of which a twentieth stays free; at most %lluMiB fit",
        SHOWN(c, "arena.size"), mappings, (unsigned long long)(wanted / MIB),
        cgroup ? "this cgroup's limit leaves" : "this host has", (unsigned long long)(room / MIB),
        (unsigned long long)fits);
}

/* Has the file system of `path` space for `wanted` bytes, of which it holds `there` already? */
static int check_space(const struct config *c, struct config_error *e, const char *key,
                       const char *path, uint64_t wanted, uint64_t there)
{
    struct statfs fs;
    uint64_t space;

    if (statfs(path, &fs) < 0)
        return config_fail(c, e, key, "%s: %.160s: %s", key, path, strerror(errno));
    space = (uint64_t)fs.f_bavail * (uint64_t)fs.f_bsize + there;
    if (fs.f_blocks == 0 || space >= wanted) /* no blocks: a tmpfs without a limit */
        return 0;
    return config_fail(c, e, key,
                       "%s: the file system of %.160s has space for %llu MiB and %llu MiB are "
                       "wanted; lower %s, or free some space",
                       key, path, (unsigned long long)(space / MIB),
                       (unsigned long long)(wanted / MIB), key);
}

/* A hugetlbfs takes pages that were set aside; without them the first touch ends the process. */
static int check_huge_pages(const struct config *c, struct config_error *e, uint64_t page,
                            uint64_t there)
{
    uint64_t wanted = c->arena_size > there ? c->arena_size - there : 0;
    uint64_t room = memory_huge_room("", page);

    if (wanted <= room)
        return 0;
    return config_fail(
        c, e, "arena.persist_dir",
        "arena.persist_dir: %.160s wants %llu huge pages of %llu KiB and %llu are free; set "
        "more aside (vm.nr_hugepages), or lower arena.size",
        c->arena_persist_dir, (unsigned long long)((wanted + page - 1) / page),
        (unsigned long long)(page >> 10), (unsigned long long)(room / page));
}

/* Checks that the file system is in memory, that slabs are whole numbers of its pages, and that it
 * is large enough. */
static int check_keep(const struct config *c, struct config_error *e)
{
    const char *path = c->arena_persist_dir;
    struct statfs fs;
    struct stat st;
    int rc;

    if (path[0] == '\0')
        return 0;
    rc = check_directory(c, e, "arena.persist_dir", path, &st);
    if (rc < 0)
        return rc;
    if (statfs(path, &fs) < 0 || (fs.f_type != TMPFS_MAGIC && fs.f_type != HUGETLBFS_MAGIC))
        return config_fail(
            c, e, "arena.persist_dir",
            "arena.persist_dir: %.160s is not on a tmpfs or hugetlbfs; name a directory that is, "
            "e.g. /dev/shm/ucmd",
            path);
    if (c->arena_slab % (uint64_t)fs.f_bsize != 0)
        return config_fail(c, e, "arena.slab",
                           "arena.slab is smaller than a page of %.160s; write at least %lluMiB",
                           path, (unsigned long long)((uint64_t)fs.f_bsize / MIB));
    if (fs.f_type == HUGETLBFS_MAGIC) {
        rc = check_huge_pages(c, e, (uint64_t)fs.f_bsize, bytes_there(path, CONFIG_KEEP_ARENA));
        if (rc < 0)
            return rc;
    }
    return check_space(c, e, "arena.size", path, c->arena_size,
                       bytes_there(path, CONFIG_KEEP_ARENA));
}

/* A device or file; the NVMe tier's check looks into it. */
static int check_as_it_is(const struct config *c, struct config_error *e, const char *path)
{
    struct stat st;

    if (c->nvme_state[0] == '\0')
        return config_fail(
            c, e, "nvme.paths",
            "nvme.paths: %.160s is not a directory; set nvme.state to a directory for what belongs "
            "to it",
            path);
    return check_directory(c, e, "nvme.state", c->nvme_state, &st);
}

static bool is_as_it_is(const char *path, struct stat *st)
{
    return stat(path, st) == 0 && (S_ISREG(st->st_mode) || S_ISBLK(st->st_mode));
}

bool config_nvme_there(const struct config *c)
{
    struct stat st;

    for (size_t i = 0; i < c->nvme_paths.n; i++)
        if (stat(c->nvme_paths.item[i], &st) == 0)
            return true;
    return false;
}

/* The daemon starts without a disk that has failed. */
static bool is_left_out(const struct config *c, const char *path)
{
    struct stat st;
    int rc = stat(path, &st) < 0 ? -errno : 0;

    if (rc == 0 && S_ISDIR(st.st_mode))
        rc = faccessat(AT_FDCWD, path, W_OK | X_OK, AT_EACCESS) < 0 ? -errno : 0;
    return take_failed(rc) || (rc == -ENOENT && config_nvme_there(c));
}

struct directory {
    dev_t device;
    ino_t inode;
    uint64_t there;
};

/* Directories on one file system have its space in common. */
static int check_directories_space(const struct config *c, struct config_error *e,
                                   const struct directory *directories, size_t i)
{
    uint64_t file = nvme_file_bytes(c->nvme_size, c->nvme_segment);
    uint64_t wanted = 0, there = 0;

    for (size_t j = 0; j <= i; j++) {
        if (directories[j].device != directories[i].device)
            continue;
        wanted += file;
        there += directories[j].there < file ? directories[j].there : file;
    }
    return check_space(c, e, "nvme.size", c->nvme_paths.item[i], wanted, there);
}

static int check_nvme(const struct config *c, struct config_error *e)
{
    struct directory directories[CONFIG_MAX_PATHS];
    struct stat st;

    for (size_t i = 0; i < c->nvme_paths.n && i < CONFIG_MAX_PATHS; i++) {
        const char *path = c->nvme_paths.item[i];
        bool as_it_is = is_as_it_is(path, &st);
        int rc;

        directories[i] = (struct directory){0};
        if (is_left_out(c, path))
            continue;
        rc = as_it_is ? check_as_it_is(c, e, path) : check_directory(c, e, "nvme.paths", path, &st);
        if (rc < 0)
            return rc;
        for (size_t j = 0; j < i; j++)
            if (directories[j].device == st.st_dev && directories[j].inode == st.st_ino)
                return config_fail(c, e, "nvme.paths",
                                   "nvme.paths: %.100s and %.100s are one; name each once",
                                   c->nvme_paths.item[j], path);
        directories[i] =
            (struct directory){st.st_dev, st.st_ino, bytes_there(path, NVME_CACHE_FILE)};
        if (!as_it_is)
            rc = check_directories_space(c, e, directories, i);
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int check_shared(const struct config *c, struct config_error *e)
{
    struct config_root roots[UCM_MAX_ROOTS];
    uint32_t n;
    int rc = config_roots(c, roots, &n, e);

    if (rc < 0 || n == 0)
        return rc;
    return check_at_least(c, e, "shared.timeout", 1, "shared.lookup_timeout");
}

typedef int (*check_fn)(const struct config *c, struct config_error *e);

static int check_all(const struct config *c, struct config_error *e, const check_fn *checks,
                     size_t n)
{
    int rc = 0;

    for (size_t i = 0; rc == 0 && i < n; i++)
        rc = checks[i](c, e);
    return rc;
}

int config_check_values(const struct config *c, struct config_error *e)
{
    static const check_fn checks[] = {check_sizes, check_tenants, config_tenants_check,
                                      check_encryption, check_shared};

    return check_all(c, e, checks, sizeof(checks) / sizeof(checks[0]));
}

int config_check(const struct config *c, struct config_error *e)
{
    static const check_fn checks[] = {check_memory, check_socket, check_group, check_keep,
                                      check_nvme};
    int rc = config_check_values(c, e);

    return rc == 0 ? check_all(c, e, checks, sizeof(checks) / sizeof(checks[0])) : rc;
}
