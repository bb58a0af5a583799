#include "daemon/config/memory.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The number after `name` in a file of lines "name 123" or "name: 123 kB"; the whole file's first
 * number for "". UINT64_MAX: there is none, as in "max". */
static uint64_t number_read(const char *path, const char *name)
{
    uint64_t v = UINT64_MAX;
    size_t n = strlen(name);
    char line[256];
    FILE *f = fopen(path, "re");

    if (!f)
        return v;
    while (v == UINT64_MAX && fgets(line, sizeof(line), f)) {
        const char *p = line + n;

        if (strncmp(line, name, n) != 0 || (n > 0 && *p != ' ' && *p != ':'))
            continue;
        p += strspn(p, ": \t");
        if (isdigit((unsigned char)*p)) {
            v = strtoull(p, NULL, 10);
            v = strstr(p, "kB") ? v << 10 : v;
        } else if (n == 0) {
            break;
        }
    }
    fclose(f);
    return v;
}

static uint64_t number_or_0(const char *path, const char *name)
{
    uint64_t v = number_read(path, name);

    return v == UINT64_MAX ? 0 : v;
}

/* Memory of its own that a process holds. */
static uint64_t anonymous_bytes(const char *root, const char *pid)
{
    char path[PATH_MAX];

    snprintf(path, sizeof(path), "%s/proc/%s/status", root, pid);
    return number_or_0(path, "RssAnon");
}

/* What tells daemons of one host apart: two can't have the same file, or the same socket. */
struct identity {
    char config[1024], socket[128]; /* as their command lines name them; "": they don't */
};

/* The value of a word "NAME=VALUE", or of "NAME" the next word; NULL: it is another word. */
static const char *word_value(const char *word, const char *next, const char *name)
{
    size_t n = strlen(name);

    if (strncmp(word, name, n) != 0)
        return NULL;
    return word[n] == '=' ? word + n + 1 : word[n] == '\0' ? next : NULL;
}

static void identity_read(const char *root, const char *pid, struct identity *out)
{
    static const char set[] = "socket=";
    char path[PATH_MAX], words[8192];
    size_t n = 0;
    FILE *f;

    *out = (struct identity){.config = ""};
    snprintf(path, sizeof(path), "%s/proc/%s/cmdline", root, pid);
    f = fopen(path, "re");
    if (f) {
        n = fread(words, 1, sizeof(words) - 1, f);
        fclose(f);
    }
    words[n] = '\0';
    for (size_t i = 0; i < n; i += strlen(words + i) + 1) {
        size_t after = i + strlen(words + i) + 1;
        const char *next = after < n ? words + after : "", *value;

        value = word_value(words + i, next, "--config");
        if (value)
            snprintf(out->config, sizeof(out->config), "%s", value);
        value = word_value(words + i, next, "--set");
        if (value && strncmp(value, set, sizeof(set) - 1) == 0)
            snprintf(out->socket, sizeof(out->socket), "%s", value + sizeof(set) - 1);
    }
}

static int is_daemon(const char *root, const char *pid)
{
    char path[PATH_MAX], name[32] = "";
    FILE *f;

    snprintf(path, sizeof(path), "%s/proc/%s/comm", root, pid);
    f = fopen(path, "re");
    if (!f)
        return 0;
    if (!fgets(name, sizeof(name), f))
        name[0] = '\0';
    fclose(f);
    return strcmp(name, "ucmd\n") == 0;
}

/* A check alongside the running daemon, a reload, and a start while the kernel still frees what the
 * last daemon had: its memory is this one's. A second daemon's, of another file or socket, is
 * not. */
static uint64_t daemons_bytes(const char *root)
{
    struct identity own, other;
    char path[PATH_MAX];
    uint64_t bytes = 0;
    struct dirent *entry;
    DIR *dir;

    identity_read(root, "self", &own);

    snprintf(path, sizeof(path), "%s/proc", root);
    dir = opendir(path);
    while (dir && (entry = readdir(dir))) {
        if (!isdigit((unsigned char)entry->d_name[0]) || !is_daemon(root, entry->d_name))
            continue;
        identity_read(root, entry->d_name, &other);
        if (strcmp(other.config, own.config) == 0 && strcmp(other.socket, own.socket) == 0)
            bytes += anonymous_bytes(root, entry->d_name);
    }
    if (dir)
        closedir(dir);
    return bytes;
}

/* ---- cgroups ---- */

struct cgroup_files {
    const char *mount, *limit, *used, *cache[2];
};

static const struct cgroup_files version2 = {
    "/sys/fs/cgroup", "memory.max", "memory.current", {"inactive_file", "active_file"}};
static const struct cgroup_files version1 = {"/sys/fs/cgroup/memory",
                                             "memory.limit_in_bytes",
                                             "memory.usage_in_bytes",
                                             {"total_inactive_file", "total_active_file"}};

/* What one cgroup leaves; its page cache gives way. */
static uint64_t cgroup_room(const char *directory, const struct cgroup_files *files, uint64_t own)
{
    char path[PATH_MAX];
    uint64_t limit, used, cache;

    snprintf(path, sizeof(path), "%s/%s", directory, files->limit);
    limit = number_read(path, "");
    if (limit == UINT64_MAX || limit >= INT64_MAX / 2)
        return UINT64_MAX;
    snprintf(path, sizeof(path), "%s/%s", directory, files->used);
    used = number_or_0(path, "");
    snprintf(path, sizeof(path), "%s/memory.stat", directory);
    cache = number_or_0(path, files->cache[0]) + number_or_0(path, files->cache[1]);
    used = used > cache + own ? used - cache - own : 0;
    return limit > used ? limit - used : 0;
}

/* A cgroup and all above it; in a container the path may be one that only the host sees, and what
 * is mounted is the container's own. */
static uint64_t cgroups_room(const char *root, const struct cgroup_files *files, char *group,
                             uint64_t own)
{
    uint64_t least = UINT64_MAX;
    char directory[2048];

    for (;;) {
        char *slash = strrchr(group, '/');
        uint64_t room;

        snprintf(directory, sizeof(directory), "%s%s%s", root, files->mount, group);
        room = cgroup_room(directory, files, own);
        least = room < least ? room : least;
        if (!slash)
            return least;
        *slash = '\0';
    }
}

static uint64_t all_cgroups_room(const char *root, uint64_t own)
{
    uint64_t least = UINT64_MAX;
    char path[PATH_MAX], line[1024];
    FILE *f;

    snprintf(path, sizeof(path), "%s/proc/self/cgroup", root);
    f = fopen(path, "re");
    while (f && fgets(line, sizeof(line), f)) {
        const struct cgroup_files *files = strncmp(line, "0::/", 4) == 0 ? &version2 : &version1;
        char *group = strchr(line, '/');
        uint64_t room;

        if (!group || (files == &version1 && !strstr(line, ":memory:")))
            continue;
        line[strcspn(line, "\n")] = '\0';
        room = cgroups_room(root, files, group, own);
        least = room < least ? room : least;
    }
    if (f)
        fclose(f);
    return least;
}

int memory_room(const char *root, uint64_t enough, struct memory_room *out)
{
    char path[PATH_MAX];
    uint64_t available;

    snprintf(path, sizeof(path), "%s/proc/meminfo", root);
    available = number_read(path, "MemAvailable");
    if (available == UINT64_MAX)
        return -ENODATA;
    out->host_bytes = available < enough ? available + daemons_bytes(root) : available;
    out->cgroup_bytes = all_cgroups_room(root, anonymous_bytes(root, "self"));
    return 0;
}

uint64_t memory_huge_room(const char *root, uint64_t page_bytes)
{
    static const char *const names[] = {"free_hugepages", "resv_hugepages"};
    uint64_t pages[2];

    for (int i = 0; i < 2; i++) {
        char path[PATH_MAX];

        snprintf(path, sizeof(path), "%s/sys/kernel/mm/hugepages/hugepages-%llukB/%s", root,
                 (unsigned long long)(page_bytes >> 10), names[i]);
        pages[i] = number_or_0(path, "");
    }
    return pages[0] > pages[1] ? (pages[0] - pages[1]) * page_bytes : 0;
}

uint64_t memory_total(void)
{
    long pages = sysconf(_SC_PHYS_PAGES), bytes = sysconf(_SC_PAGESIZE);

    return pages > 0 && bytes > 0 ? (uint64_t)pages * (uint64_t)bytes : 0;
}
