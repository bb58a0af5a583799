#include "daemon/config/roots.h"

#include "daemon/backend/nfs/target.h"
#include "daemon/config/unit.h"
#include "proto/units.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define NFS "nfs://"
#define S3 "s3://"
#define S3_READ "/etc/ucmd/s3" /* its key */
#define MOONCAKE "mooncake://"
#define ROOTS "shared.roots"
#define CAPACITY "capacity="
#define BUFFER "buffer="
#define MEMORY "memory="
#define DIRECTORY "write="
#define READ "read="

static bool is_nfs(const char *text)
{
    return strncmp(text, NFS, strlen(NFS)) == 0;
}

static bool is_s3(const char *text)
{
    return strncmp(text, S3, strlen(S3)) == 0;
}

static bool is_mooncake(const char *text)
{
    return strncmp(text, MOONCAKE, strlen(MOONCAKE)) == 0;
}

static bool is_process(const char *text)
{
    return strncmp(text, CONFIG_PROCESS, strlen(CONFIG_PROCESS)) == 0;
}

static int process_name_check(const char *text, struct config_error *e)
{
    const char *name = text + strlen(CONFIG_PROCESS);
    size_t n = strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_");

    if (n == 0 || n > 63 || name[n] != '\0')
        return config_refuse(e,
                             ROOTS ": \"%.80s\": after " CONFIG_PROCESS
                                   " stands a name of 1 to 63 letters, digits, dots, dashes and _",
                             text);
    return 0;
}

static int target_take(const char *text, struct config_root *out, struct config_error *e)
{
    struct nfs_target nfs;
    const char *wrong = NULL;
    size_t n = strlen(text);

    *out = (struct config_root){.capacity_bytes = 0};
    if (n >= sizeof(out->target))
        return config_refuse(e, ROOTS ": a target is longer than %zu bytes",
                             sizeof(out->target) - 1);
    memcpy(out->target, text, n + 1);
    while (text[0] == '/' && n > 1 && text[n - 1] == '/')
        out->target[--n] = '\0';
    if (text[0] == '/')
        return 0;
    if (is_process(text))
        return process_name_check(text, e);
    if (is_s3(text))
        return text[strlen(S3)] && !strchr("/?", text[strlen(S3)])
                   ? 0
                   : config_refuse(e, ROOTS ": \"%.80s\": write s3://BUCKET[/PREFIX][?OPTIONS]",
                                   text);
    if (is_mooncake(text))
        return text[strlen(MOONCAKE)] && strchr(text + strlen(MOONCAKE), ':')
                   ? 0
                   : config_refuse(
                         e, ROOTS ": \"%.80s\": write mooncake://MASTER:PORT[/PREFIX][?OPTIONS]",
                         text);
    if (!is_nfs(text))
        return config_refuse(
            e,
            ROOTS
            ": \"%.80s\" is neither an absolute path nor nfs://SERVER/EXPORT nor s3://BUCKET nor "
            "mooncake://MASTER:PORT nor " CONFIG_PROCESS "NAME; write one of them",
            text);
    if (nfs_target_parse(text, &nfs, &wrong) < 0)
        return config_refuse(e, ROOTS ": \"%.80s\": %s", text, wrong);
    return 0;
}

/* Where ucmd's own backends lie: next to it, or where `make install` puts them. */
static void backend_path(const char *name, char *path, size_t n)
{
    char directory[PATH_MAX];
    ssize_t length = readlink("/proc/self/exe", directory, sizeof(directory) - 1);
    char *slash;

    directory[length > 0 ? length : 0] = '\0';
    slash = strrchr(directory, '/');
    if (slash)
        *slash = '\0';
    snprintf(path, n, "%s/ucmd-backend-%s", directory, name);
    if (access(path, X_OK) == 0)
        return;
    slash = strrchr(directory, '/');
    if (slash)
        *slash = '\0';
    snprintf(path, n, "%s/libexec/ucmd/ucmd-backend-%s", directory, name);
}

/* One of ucmd's own. */
static int own_process(const struct config *c, struct config_root *r, const char *name,
                       const char *words, struct config_error *e)
{
    struct config_process *p = &r->process;
    uint64_t part = (c->arena_slab + 4096 + 4095) & ~(uint64_t)4095;
    char path[PATH_MAX + 64];
    int n;

    backend_path(name, path, sizeof(path));
    n = snprintf(p->command, sizeof(p->command), "%s %s%s", path, r->target, words);
    if (n >= (int)sizeof(p->command))
        return config_refuse(e, ROOTS ": %.80s is too long with %.80s before it", r->target, path);
    if (p->buffer_bytes == 0)
        p->buffer_bytes = part > CONFIG_BUFFER ? part : CONFIG_BUFFER;
    p->buffer_bytes = (p->buffer_bytes + 4095) & ~(uint64_t)4095;
    if (p->memory_bytes == 0)
        p->memory_bytes = CONFIG_MEMORY;
    return 0;
}

/* The process has a user of its own, but the server is to take it for the daemon. */
static int nfs_process(const struct config *c, struct config_root *r, struct config_error *e)
{
    char words[32];

    snprintf(words, sizeof(words), " %u %u", (unsigned)geteuid(), (unsigned)getegid());
    r->process.network = true;
    return own_process(c, r, "nfs", words, e);
}

static int s3_process(const struct config *c, struct config_root *r, struct config_error *e)
{
    if (!r->process.read[0])
        strcpy(r->process.read, S3_READ);
    r->process.network = true;
    return own_process(c, r, "s3", "", e);
}

static int mooncake_process(const struct config *c, struct config_root *r, struct config_error *e)
{
    r->process.network = true;
    return own_process(c, r, "mooncake", "", e);
}

/* What it reads it may write to, too: a root that is "ro" gets no writes from the daemon. */
static int directory_process(const struct config *c, struct config_root *r, struct config_error *e)
{
    uint64_t parts = c->shared_threads * (c->arena_slab + 8192); /* one for each thread */
    char words[16];

    /* The health check finds one that no other has. */
    snprintf(words, sizeof(words), " %u", (unsigned)c->shared_threads + 1);
    strcpy(r->process.directory, r->target);
    if (parts < CONFIG_BUFFER)
        r->process.buffer_bytes = parts;
    return own_process(c, r, "directory", words, e);
}

/* "NAME=SIZE"; which may be there once. */
static int size_take(const char *word, uint64_t *to, const struct config_root *out,
                     struct config_error *e)
{
    char why[UNITS_WHY_BYTES];
    const char *size = strchr(word, '=');
    int name = (int)(size - word);

    if (*to != 0)
        return config_refuse(e, ROOTS ": %.*s is given twice after %.80s; leave one out", name + 1,
                             word, out->target);
    if (units_parse_size(size + 1, to, why) < 0)
        return config_refuse(e, ROOTS ": %s", why);
    return *to > 0 ? 0 : config_refuse(e, ROOTS ": %.*s=0; leave it out", name, word);
}

static bool word_is(const char *word, const char *name)
{
    return strncmp(word, name, strlen(name)) == 0 && word[strlen(name)] != '\0';
}

static int path_take(const char *word, char to[CONFIG_ITEM_BYTES], struct config_root *out,
                     struct config_error *e)
{
    const char *path = strchr(word, '=') + 1;

    if (path[0] != '/' || to[0])
        return config_refuse(e,
                             ROOTS ": %.80s after %.80s: it is given once, with an absolute path",
                             word, out->target);
    snprintf(to, CONFIG_ITEM_BYTES, "%s", path);
    return 0;
}

/* False: it is none of a process. */
static bool process_word_take(const char *word, struct config_root *out, int *rc,
                              struct config_error *e)
{
    *rc = 0;
    if (word_is(word, BUFFER))
        *rc = size_take(word, &out->process.buffer_bytes, out, e);
    else if (word_is(word, MEMORY))
        *rc = size_take(word, &out->process.memory_bytes, out, e);
    else if (word_is(word, DIRECTORY))
        *rc = path_take(word, out->process.directory, out, e);
    else if (word_is(word, READ))
        *rc = path_take(word, out->process.read, out, e);
    else if (strcmp(word, "network") == 0)
        out->process.network = true;
    else
        return false;
    return true;
}

static int word_take(const char *word, struct config_root *out, struct config_error *e)
{
    bool process = is_process(out->target) || is_s3(out->target) || is_mooncake(out->target);
    int rc;

    if (word_is(word, CAPACITY))
        return size_take(word, &out->capacity_bytes, out, e);
    if (process && process_word_take(word, out, &rc, e))
        return rc;
    if (strcmp(word, "ro") != 0)
        return config_refuse(e,
                             ROOTS ": \"%.40s\" after %.80s is neither capacity=SIZE nor ro%s; "
                                   "write one of them, or leave it out",
                             word, out->target,
                             process ? " nor buffer=SIZE, memory=SIZE, network, read=PATH or "
                                       "write=DIRECTORY; a command stands after --"
                                     : "");
    if (out->read_only)
        return config_refuse(e, ROOTS ": ro is given twice after %.80s; leave one out",
                             out->target);
    out->read_only = true;
    return 0;
}

/* What stands after "--". */
static int command_take(const char *rest, struct config_root *out, struct config_error *e)
{
    while (rest && *rest == ' ')
        rest++;
    if (!rest || *rest != '/')
        return config_refuse(e,
                             ROOTS
                             ": %.80s: after its options stand -- and a command that begins with "
                             "an absolute path",
                             out->target);
    snprintf(out->process.command, sizeof(out->process.command), "%s", rest);
    if (out->process.buffer_bytes == 0)
        out->process.buffer_bytes = CONFIG_BUFFER;
    if (out->process.memory_bytes == 0)
        out->process.memory_bytes = CONFIG_MEMORY;
    out->process.buffer_bytes = (out->process.buffer_bytes + 4095) & ~(uint64_t)4095;
    return 0;
}

/* "TARGET [capacity=SIZE] [ro]", and of a process "[buffer=SIZE] -- COMMAND" */
static int root_parse(const char *item, struct config_root *out, struct config_error *e)
{
    char copy[CONFIG_ITEM_BYTES], *rest = copy;
    const char *word;
    int rc;

    snprintf(copy, sizeof(copy), "%s", item);
    rc = target_take(strsep(&rest, " "), out, e);
    while (rc == 0 && (word = strsep(&rest, " ")) &&
           !(is_process(out->target) && strcmp(word, "--") == 0))
        if (*word)
            rc = word_take(word, out, e);
    if (rc < 0 || !is_process(out->target))
        return rc;
    return command_take(rest, out, e);
}

/* A part is as large as a slab at most; its header and the encryption's lie in front of it. */
static int buffer_check(const struct config *c, const struct config_root *r, struct config_error *e)
{
    if (r->process.buffer_bytes >= c->arena_slab + 4096)
        return 0;
    return config_refuse(e,
                         ROOTS ": %.80s: the buffer must be 4096 bytes larger than arena.slab, so "
                               "that it holds any part; write %s%llu",
                         r->target, BUFFER, (unsigned long long)c->arena_slab + 4096);
}

static int process_make(const struct config *c, struct config_root *r, struct config_error *e)
{
    int rc = is_nfs(r->target)        ? nfs_process(c, r, e)
             : is_s3(r->target)       ? s3_process(c, r, e)
             : is_mooncake(r->target) ? mooncake_process(c, r, e)
             : r->target[0] == '/'    ? directory_process(c, r, e)
                                      : 0;

    return rc < 0 ? rc : buffer_check(c, r, e);
}

int config_roots(const struct config *c, struct config_root out[UCM_MAX_ROOTS], uint32_t *n,
                 struct config_error *e)
{
    int rc = 0;

    *n = 0;
    config_locate(c, e, ROOTS);
    for (size_t i = 0; rc == 0 && i < c->shared_roots.n; i++)
        rc = root_parse(c->shared_roots.item[i], &out[(*n)++], e);
    for (uint32_t i = 0; rc == 0 && i < *n; i++)
        rc = process_make(c, &out[i], e);
    for (uint32_t i = 1; rc == 0 && i < *n; i++)
        for (uint32_t j = 0; j < i; j++)
            if (strcmp(out[i].target, out[j].target) == 0)
                return config_refuse(e, ROOTS ": %.160s is there twice; name each root once",
                                     out[i].target);
    return rc;
}

/* ---- what lies at a directory's path ---- */

#define LOOK_S 2 /* of each directory; a mount that hangs does not answer at all */

struct look {
    char path[CONFIG_ITEM_BYTES];
    bool write;
    int status;
};

static void *look_main(void *arg)
{
    struct look *l = arg;
    struct stat st;

    if (stat(l->path, &st) < 0)
        l->status = -errno;
    else if (!S_ISDIR(st.st_mode))
        l->status = -ENOTDIR;
    else if (faccessat(AT_FDCWD, l->path, l->write ? W_OK | X_OK : R_OK | X_OK, AT_EACCESS) < 0)
        l->status = -errno;
    return NULL;
}

int config_root_look(const char *directory, bool write)
{
    struct look *l = calloc(1, sizeof(*l));
    struct timespec until;
    pthread_t thread;
    int status;

    if (!l)
        return -ENOMEM;
    snprintf(l->path, sizeof(l->path), "%s", directory);
    l->write = write;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += LOOK_S;
    if (pthread_create(&thread, NULL, look_main, l) != 0) {
        free(l);
        return -ENOMEM;
    }
    if (pthread_timedjoin_np(thread, NULL, &until) != 0) {
        pthread_detach(thread);
        return -ETIMEDOUT; /* the thread may still write to *l, which is therefore not freed */
    }
    status = l->status;
    free(l);
    return status;
}

/* May this process speak IPv4 or IPv6 at all? */
static int network_look(void)
{
    static const int families[] = {AF_INET, AF_INET6};
    int status = 0;

    for (size_t i = 0; i < sizeof(families) / sizeof(families[0]); i++) {
        int fd = socket(families[i], SOCK_STREAM | SOCK_CLOEXEC, 0);

        if (fd >= 0) {
            close(fd);
            return 0;
        }
        status = -errno;
    }
    return status;
}

/* Its file is there and may be executed, and it may use the network that it needs. */
static int process_look(const struct config_root *r, char file[CONFIG_COMMAND_BYTES])
{
    snprintf(file, CONFIG_COMMAND_BYTES, "%.*s", (int)strcspn(r->process.command, " "),
             r->process.command);
    if (faccessat(AT_FDCWD, file, X_OK, AT_EACCESS) < 0)
        return -errno;
    file[0] = '\0';
    return r->process.network ? network_look() : 0;
}

static const char *status_text(int status)
{
    return status == -EAFNOSUPPORT ? "this process may not use the network" : strerror(-status);
}

/* A directory that is missing may be a mount that comes later: it must not stop a start for ever. A
 * file in its place is a mistake that no mount mends. */
int config_check_roots(const struct config *c, void (*warn_cb)(const char *text),
                       struct config_error *e)
{
    struct config_root roots[UCM_MAX_ROOTS];
    uint32_t n;

    if (config_roots(c, roots, &n, e) < 0)
        return -EINVAL;
    for (uint32_t i = 0; i < n; i++) {
        const struct config_root *r = &roots[i];
        char file[CONFIG_COMMAND_BYTES] = ""; /* what is wrong, if not the target itself */
        int status = r->target[0] == '/' ? config_root_look(r->target, !r->read_only) : 0;
        bool there = status == -EROFS || ((status == -EACCES || status == -EPERM) && !r->read_only);

        if (status == 0)
            status = process_look(r, file);

        if (status == -ENOTDIR)
            return config_refuse(e,
                                 ROOTS
                                 ": %.120s is not a directory; name the directory of a file system "
                                 "that hosts share",
                                 r->target);
        if (status == 0)
            continue;
        if (there)
            (void)config_refuse(e,
                                ROOTS ": %.120s: uid %u can't write there: %s; write \"ro\" after "
                                      "it if that is meant%s",
                                r->target, (unsigned)geteuid(), strerror(-status),
                                config_unit_hint());
        else
            (void)config_refuse(e,
                                ROOTS
                                ": %.120s: %.160s%s%s; ucmd starts without this root and uses it "
                                "as soon as it is there%s",
                                r->target, file, file[0] ? ": " : "", status_text(status),
                                status == -EAFNOSUPPORT ? config_unit_hint() : "");
        warn_cb(e->text);
    }
    return 0;
}
