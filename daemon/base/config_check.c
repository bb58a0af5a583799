/* What only the whole configuration tells; see config_check. */
#include "daemon/base/config_roots.h"
#include "daemon/base/config_table.h"
#include "daemon/base/take.h"
#include "daemon/format/nvme_format.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <libgen.h>
#include <linux/magic.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/sysinfo.h>
#include <sys/vfs.h>
#include <unistd.h>

#define MIB (1ull << 20)

/* The value of a key as it would be written. */
struct shown {
    char text[CONFIG_TEXT_BYTES];
};

static struct shown show(const struct config *c, const char *key)
{
    struct shown s = {.text = ""};
    const char *text = config_value_text(c, config_key_find(key), s.text);

    if (text != s.text)
        snprintf(s.text, sizeof(s.text), "%s", text);
    return s;
}

/* ---- sizes ---- */

static int check_power_of_two(const struct config *c, struct config_error *e, const char *key,
                              uint64_t value)
{
    uint64_t below = MIB;

    if ((value & (value - 1)) == 0)
        return 0;
    while (below * 2 < value)
        below *= 2;
    return config_fail(c, e, key, "%s is %s, not a power of two; write %lluMiB or %lluMiB", key,
                       show(c, key).text, (unsigned long long)(below / MIB),
                       (unsigned long long)(below * 2 / MIB));
}

/* Is the value of `key` at least `times` the value of `than`? */
static int check_at_least(const struct config *c, struct config_error *e, const char *key,
                          uint64_t value, unsigned times, const char *than, uint64_t than_value)
{
    char factor[24] = "";

    if (value >= times * than_value)
        return 0;
    if (times > 1)
        snprintf(factor, sizeof(factor), "%u times ", times);
    return config_fail(c, e, key, "%s (%s) is smaller than %s%s (%s); raise it, or lower %s", key,
                       show(c, key).text, factor, than, show(c, than).text, than);
}

static int check_sizes(const struct config *c, struct config_error *e)
{
    int rc = check_power_of_two(c, e, "arena.extent", c->arena_extent);

    if (rc == 0)
        rc = check_at_least(c, e, "arena.size", c->arena_size, 1, "arena.extent", c->arena_extent);
    if (rc < 0 || c->nvme_paths.n == 0)
        return rc;
    rc = check_power_of_two(c, e, "nvme.segment", c->nvme_segment);
    if (rc == 0)
        rc = check_at_least(c, e, "nvme.size", c->nvme_size, 4, "nvme.segment", c->nvme_segment);
    return rc;
}

/* ---- tenants ---- */

struct principal {
    uint32_t id;
    bool is_gid;
    size_t tenant; /* its place in the list */
};

static int principal_compare(const void *a, const void *b)
{
    const struct principal *p = a, *q = b;

    if (p->is_gid != q->is_gid)
        return p->is_gid ? 1 : -1;
    if (p->id != q->id)
        return p->id < q->id ? -1 : 1;
    return p->tenant < q->tenant ? -1 : p->tenant > q->tenant;
}

static int name_length(const char *item)
{
    return (int)strcspn(item, " ");
}

/* Appends the members of one tenant to all; *n counts them. */
static int principals_of(const char *item, size_t tenant, struct principal **all, size_t *n)
{
    for (const char *p = strchr(item, ' '); p; p = strchr(p + 1, ' ')) {
        struct principal one = {.tenant = tenant};
        struct principal *grown = *all;

        if ((*n & (*n - 1)) == 0) {
            grown = realloc(*all, (*n > 0 ? *n * 2 : 1) * sizeof(*grown));
            if (!grown)
                return -ENOMEM;
            *all = grown;
        }
        if (!config_principal(p + 1, strcspn(p + 1, " "), &one.is_gid, &one.id))
            return -EINVAL; /* the table's check let nothing else in */
        grown[(*n)++] = one;
    }
    return 0;
}

/* A uid or gid in two tenants would make a peer's tenant a matter of order. */
static int check_principals(const struct config *c, struct config_error *e, struct principal *all,
                            size_t n)
{
    const struct config_list *t = &c->tenants;

    if (n > 0)
        qsort(all, n, sizeof(*all), principal_compare);
    for (size_t i = 1; i < n; i++) {
        const struct principal *a = &all[i - 1], *b = &all[i];

        if (a->id == b->id && a->is_gid == b->is_gid)
            return config_fail(
                c, e, "tenants",
                "tenants: %s:%u is in \"%.*s\" and in \"%.*s\"; leave it in one of them",
                a->is_gid ? "gid" : "uid", a->id, name_length(t->item[a->tenant]),
                t->item[a->tenant], name_length(t->item[b->tenant]), t->item[b->tenant]);
    }
    return 0;
}

static int string_compare(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Two items of one name: sorted by text they are neighbours, as a space sorts before what names
 * are made of. */
static int check_names(const struct config *c, struct config_error *e)
{
    size_t n = c->tenants.n;
    char **sorted = n > 0 ? malloc(n * sizeof(*sorted)) : NULL;
    int rc = 0;

    if (n == 0)
        return 0;
    if (!sorted)
        return -ENOMEM;
    memcpy(sorted, c->tenants.item, n * sizeof(*sorted));
    qsort(sorted, n, sizeof(*sorted), string_compare);
    for (size_t i = 1; i < n && rc == 0; i++) {
        int length = name_length(sorted[i]);

        if (length == name_length(sorted[i - 1]) &&
            memcmp(sorted[i], sorted[i - 1], (size_t)length) == 0)
            rc = config_fail(c, e, "tenants",
                             "tenants: \"%.*s\" is there twice; write all its members behind "
                             "one name",
                             length, sorted[i]);
    }
    free(sorted);
    return rc;
}

static int check_tenants(const struct config *c, struct config_error *e)
{
    struct principal *all = NULL;
    size_t n = 0;
    int rc = check_names(c, e);

    for (size_t i = 0; i < c->tenants.n && rc == 0; i++)
        rc = principals_of(c->tenants.item[i], i, &all, &n);
    if (rc == 0)
        rc = check_principals(c, e, all, n);
    if (rc == -ENOMEM)
        config_fail(c, e, "tenants", "tenants: memory ran out");
    free(all);
    return rc;
}

/* ---- paths ---- */

/* A folder that this process may make files in. */
static int check_folder(const struct config *c, struct config_error *e, const char *key,
                        const char *path, struct stat *st)
{
    if (stat(path, st) < 0 && errno == ENOENT)
        return config_fail(c, e, key,
                           "%s: folder %.160s does not exist; make it, or name one that does", key,
                           path);
    if (stat(path, st) < 0)
        return config_fail(c, e, key, "%s: %.160s: %s; name a folder that the daemon may use", key,
                           path, strerror(errno));
    if (!S_ISDIR(st->st_mode))
        return config_fail(c, e, key, "%s: %.160s is not a folder; name one", key, path);
    if (faccessat(AT_FDCWD, path, W_OK | X_OK, AT_EACCESS) < 0)
        return config_fail(c, e, key,
                           "%s: folder %.160s: %s for uid %u; give it to the daemon's user", key,
                           path, strerror(errno), (unsigned)geteuid());
    return 0;
}

static int check_socket(const struct config *c, struct config_error *e)
{
    char *copy;
    struct stat st;
    int rc;

    if (getenv("LISTEN_FDS")) /* systemd made the socket */
        return 0;
    if (stat(c->socket, &st) == 0 && !S_ISSOCK(st.st_mode))
        return config_fail(c, e, "socket", "socket: %s exists and is no socket; name another path",
                           c->socket);
    copy = strdup(c->socket);
    if (!copy) {
        config_fail(c, e, "socket", "socket: memory ran out");
        return -ENOMEM;
    }
    rc = check_folder(c, e, "socket", dirname(copy), &st);
    free(copy);
    return rc;
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

/* The kernel grants more than there is, and ends the daemon when it touches it. */
static int check_memory(const struct config *c, struct config_error *e)
{
    struct sysinfo host;
    uint64_t bytes;

    if (sysinfo(&host) < 0)
        return 0;
    bytes = (uint64_t)host.totalram * host.mem_unit;
    if (c->arena_size <= bytes)
        return 0;
    return config_fail(c, e, "arena.size",
                       "arena.size is %s, and this host has %llu MiB of memory; lower it",
                       show(c, "arena.size").text, (unsigned long long)(bytes / MIB));
}

/* What the file that an earlier run left in the folder takes already. */
static uint64_t bytes_there(const char *folder)
{
    char path[CONFIG_ITEM_BYTES + 32];
    struct stat st;

    snprintf(path, sizeof(path), "%s/%s", folder, NVME_CACHE_FILE);
    return stat(path, &st) == 0 && S_ISREG(st.st_mode) ? (uint64_t)st.st_blocks * 512 : 0;
}

/* Of memory, with pages that extents are whole numbers of, and large enough. */
static int check_keep(const struct config *c, struct config_error *e)
{
    const char *path = c->arena_keep;
    uint64_t room, there;
    char file[CONFIG_ITEM_BYTES + 32];
    struct statfs fs;
    struct stat st;
    int rc;

    if (path[0] == '\0')
        return 0;
    rc = check_folder(c, e, "arena.keep", path, &st);
    if (rc < 0)
        return rc;
    if (statfs(path, &fs) < 0 || (fs.f_type != TMPFS_MAGIC && fs.f_type != HUGETLBFS_MAGIC))
        return config_fail(
            c, e, "arena.keep",
            "arena.keep: %.160s is not on a tmpfs or hugetlbfs; name a folder that is, "
            "e.g. /dev/shm/ucmd",
            path);
    if (c->arena_extent % (uint64_t)fs.f_bsize != 0)
        return config_fail(c, e, "arena.extent",
                           "arena.extent is smaller than a page of %.160s; write at least %lluMiB",
                           path, (unsigned long long)((uint64_t)fs.f_bsize / MIB));
    snprintf(file, sizeof(file), "%s/%s", path, CONFIG_KEEP_ARENA);
    there = stat(file, &st) == 0 && S_ISREG(st.st_mode) ? (uint64_t)st.st_blocks * 512 : 0;
    room = (uint64_t)fs.f_bavail * (uint64_t)fs.f_bsize + there;
    /* a tmpfs without a limit says that it has no blocks */
    if (fs.f_blocks == 0 || room >= c->arena_size)
        return 0;
    return config_fail(
        c, e, "arena.size",
        "arena.size: the file system of %.160s has room for %llu MiB and %llu MiB are "
        "wanted; make it larger, or lower arena.size",
        path, (unsigned long long)(room / MIB), (unsigned long long)(c->arena_size / MIB));
}

/* An entry that is used as it is. Whether it may be is found out when it is opened. */
static int check_as_it_is(const struct config *c, struct config_error *e, const char *path)
{
    struct stat st;

    if (c->nvme_state[0] == '\0')
        return config_fail(
            c, e, "nvme.paths",
            "nvme.paths: %.160s is no folder; set nvme.state to a folder for what belongs "
            "to it",
            path);
    return check_folder(c, e, "nvme.state", c->nvme_state, &st);
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

/* The daemon starts without a disk that has failed, and is told so when it opens it. */
static bool is_left_out(const struct config *c, const char *path)
{
    struct stat st;
    int rc = stat(path, &st) < 0 ? -errno : 0;

    if (rc == 0 && S_ISDIR(st.st_mode))
        rc = faccessat(AT_FDCWD, path, W_OK | X_OK, AT_EACCESS) < 0 ? -errno : 0;
    return take_failed(rc) || (rc == -ENOENT && config_nvme_there(c));
}

struct folder {
    dev_t device;
    ino_t inode;
    uint64_t there;
};

/* Folders on one file system share its room. */
static int check_room(const struct config *c, struct config_error *e, const struct folder *folders,
                      size_t i)
{
    const char *path = c->nvme_paths.item[i];
    uint64_t file = nvme_file_bytes(c->nvme_size, c->nvme_segment);
    uint64_t wanted = 0, there = 0, room;
    struct statvfs fs;

    for (size_t j = 0; j <= i; j++) {
        if (folders[j].device != folders[i].device)
            continue;
        wanted += file;
        there += folders[j].there < file ? folders[j].there : file;
    }
    if (statvfs(path, &fs) < 0)
        return config_fail(c, e, "nvme.paths",
                           "nvme.paths: %.160s: %s; name a folder on a local disk", path,
                           strerror(errno));
    room = (uint64_t)fs.f_bavail * fs.f_frsize + there;
    if (room >= wanted)
        return 0;
    return config_fail(
        c, e, "nvme.size",
        "nvme.size: the file system of %.160s has room for %llu MiB and %llu MiB are wanted; "
        "lower nvme.size, or free some",
        path, (unsigned long long)(room / MIB), (unsigned long long)(wanted / MIB));
}

static int check_nvme(const struct config *c, struct config_error *e)
{
    struct folder folders[CONFIG_MAX_PATHS];
    struct stat st;

    for (size_t i = 0; i < c->nvme_paths.n && i < CONFIG_MAX_PATHS; i++) {
        const char *path = c->nvme_paths.item[i];
        bool as_it_is = is_as_it_is(path, &st);
        int rc;

        folders[i] = (struct folder){0};
        if (is_left_out(c, path))
            continue;
        rc = as_it_is ? check_as_it_is(c, e, path) : check_folder(c, e, "nvme.paths", path, &st);
        if (rc < 0)
            return rc;
        for (size_t j = 0; j < i; j++)
            if (folders[j].device == st.st_dev && folders[j].inode == st.st_ino)
                return config_fail(c, e, "nvme.paths",
                                   "nvme.paths: %.100s and %.100s are one; name each once",
                                   c->nvme_paths.item[j], path);
        folders[i] = (struct folder){st.st_dev, st.st_ino, bytes_there(path)};
        if (!as_it_is)
            rc = check_room(c, e, folders, i);
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int check_share(const struct config *c, struct config_error *e)
{
    struct config_root roots[CONFIG_MAX_ROOTS];
    char why[CONFIG_WHY_BYTES];
    const char *key;
    uint32_t n;
    int rc = config_roots(c, roots, &n, &key, why);

    if (rc < 0)
        return config_fail(c, e, key, "%s", why);
    if (n == 0)
        return 0;
    return check_at_least(c, e, "share.deadline", c->share_deadline_ms, 1, "share.lookup_deadline",
                          c->share_lookup_ms);
}

/* A folder that is missing may be a mount that comes later: it must not stop a start for ever. A
 * file in its place is a mistake that no mount mends. */
int config_check_roots(const struct config *c, void (*warn_cb)(const char *text),
                       struct config_error *e)
{
    struct config_root roots[CONFIG_MAX_ROOTS];
    char why[CONFIG_WHY_BYTES];
    const char *key;
    uint32_t n;

    if (config_roots(c, roots, &n, &key, why) < 0)
        return config_fail(c, e, key, "%s", why);
    for (uint32_t i = 0; i < n; i++) {
        int status = roots[i].target[0] == '/' ? config_root_look(roots[i].target) : 0;

        if (status == -ENOTDIR)
            return config_fail(c, e, key,
                               "%s: %.120s is not a folder; name the folder of a file system "
                               "that hosts share",
                               key, roots[i].target);
        if (status == 0)
            continue;
        (void)config_fail(c, e, key,
                          "%s: %.120s: %s; ucmd starts without this root and uses it as soon as "
                          "it is there",
                          key, roots[i].target, strerror(-status));
        warn_cb(e->text);
    }
    return 0;
}

int config_check(const struct config *c, struct config_error *e)
{
    int rc = check_sizes(c, e);

    if (rc == 0)
        rc = check_tenants(c, e);
    if (rc == 0)
        rc = check_memory(c, e);
    if (rc == 0)
        rc = check_socket(c, e);
    if (rc == 0)
        rc = check_group(c, e);
    if (rc == 0)
        rc = check_keep(c, e);
    if (rc == 0)
        rc = check_nvme(c, e);
    if (rc == 0)
        rc = check_share(c, e);
    return rc;
}
