#include "daemon/shared/process/process.h"

#include "daemon/base/memfd.h"
#include "daemon/shared/process/sandbox.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define WORDS_MAX 64u

static int fail(struct process_run *run, const char *what, int err)
{
    snprintf(run->why, sizeof(run->why), "%s: %s", what, strerror(err));
    return -err;
}

/* Its space is taken at once: a page that is missing later ends the daemon. */
static int buffer_make(struct process_run *run)
{
    void *p;
    int rc = memfd_new("ucmd-backend", run->buffer_bytes, &run->buffer_fd);

    if (rc < 0)
        return fail(run, "no memory for the buffer", -rc);
    if (fcntl(run->buffer_fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
        return fail(run, "the buffer can't be sealed", errno);
    p = mmap(NULL, run->buffer_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, run->buffer_fd, 0);
    if (p == MAP_FAILED)
        return fail(run, "no memory for the buffer", errno);
    run->buffer = p;
    (void)madvise(p, run->buffer_bytes, MADV_DONTDUMP);
    rc = memfd_populate(run->buffer_fd, 0, p, run->buffer_bytes);
    return rc < 0 ? fail(run, "no memory for the buffer", -rc) : 0;
}

struct words {
    char *argv[WORDS_MAX + 16];
    unsigned n;
    char texts[4 * CONFIG_ITEM_BYTES + CONFIG_COMMAND_BYTES];
    size_t at;
};

static int word_add(struct words *w, const char *format, ...) __attribute__((format(printf, 2, 3)));
static int word_add(struct words *w, const char *format, ...)
{
    size_t room = sizeof(w->texts) - w->at;
    va_list args;
    int n;

    va_start(args, format);
    n = vsnprintf(w->texts + w->at, room, format, args);
    va_end(args);
    if (n < 0 || (size_t)n >= room || w->n + 1 >= sizeof(w->argv) / sizeof(w->argv[0]))
        return -E2BIG;
    w->argv[w->n++] = w->texts + w->at;
    w->argv[w->n] = NULL;
    w->at += (size_t)n + 1;
    return 0;
}

/* The launcher's arguments about the sandbox. */
static int sandbox_words(struct words *w, const struct shared_backend *b)
{
    const struct config_process *c = &b->config;
    int rc = word_add(w, "%s", b->launcher);

    if (rc == 0)
        rc = word_add(w, PROCESS_SANDBOX);
    if (rc == 0 && c->network)
        rc = word_add(w, "network");
    if (rc == 0 && c->memory_bytes > 0)
        rc = word_add(w, "memory=%llu", (unsigned long long)c->memory_bytes);
    if (rc == 0 && c->read[0])
        rc = word_add(w, "read=%s", c->read);
    if (rc == 0 && c->directory[0])
        rc = word_add(w, "%s=%s", b->read_only ? "read" : "write", c->directory);
    return rc == 0 ? word_add(w, "--") : rc;
}

static int command_words(struct words *w, const char *command)
{
    int rc = 0;

    while (rc == 0 && *command) {
        size_t n = strcspn(command, " ");

        if (n > 0)
            rc = w->n < WORDS_MAX ? word_add(w, "%.*s", (int)n, command) : -E2BIG;
        command += n + (command[n] == ' ');
    }
    return rc;
}

/* What the process has: its socket as WIRE_FD, `said` as standard output and error, and no other
 * descriptor. */
static int actions_init(posix_spawn_file_actions_t *actions, int socket, int said)
{
    int err = posix_spawn_file_actions_init(actions);

    if (err != 0)
        return err;
    err = posix_spawn_file_actions_adddup2(actions, said, 1);
    if (err == 0)
        err = posix_spawn_file_actions_adddup2(actions, said, 2);
    if (err == 0)
        err = posix_spawn_file_actions_adddup2(actions, socket, WIRE_FD);
    if (err == 0)
        err = posix_spawn_file_actions_addopen(actions, 0, "/dev/null", O_RDONLY, 0);
    if (err == 0)
        err = posix_spawn_file_actions_addclosefrom_np(actions, WIRE_FD + 1);
    if (err == 0)
        err = posix_spawn_file_actions_addchdir_np(actions, "/");
    if (err != 0)
        posix_spawn_file_actions_destroy(actions);
    return err;
}

static int attributes_init(posix_spawnattr_t *attributes)
{
    sigset_t all, none;
    int err = posix_spawnattr_init(attributes);

    if (err != 0)
        return err;
    sigfillset(&all);
    sigemptyset(&none);
    err = posix_spawnattr_setflags(attributes, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGDEF |
                                                   POSIX_SPAWN_SETSIGMASK);
    if (err == 0)
        err = posix_spawnattr_setsigdefault(attributes, &all);
    if (err == 0)
        err = posix_spawnattr_setsigmask(attributes, &none);
    if (err != 0)
        posix_spawnattr_destroy(attributes);
    return err;
}

static int spawn(pid_t *pid, char *const *argv, int socket, int said)
{
    static char path[] = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                lang[] = "LANG=C.UTF-8", fd[] = "UCM_BACKEND_FD=3";
    char *const environment[] = {path, lang, fd, NULL};
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    int err = actions_init(&actions, socket, said);

    if (err != 0)
        return err;
    err = attributes_init(&attributes);
    if (err == 0) {
        /* Without a copy of the daemon's page tables: fork would hold up a large daemon. */
        err = posix_spawn(pid, argv[0], &actions, &attributes, argv, environment);
        posix_spawnattr_destroy(&attributes);
    }
    posix_spawn_file_actions_destroy(&actions);
    return err;
}

int process_make(struct process_run *run)
{
    struct words words = {.n = 0};
    char what[128];
    int sockets[2], said, err, rc = buffer_make(run);

    if (rc < 0)
        return rc;
    rc = run->b->launcher ? sandbox_words(&words, run->b) : 0;
    if (rc == 0)
        rc = command_words(&words, run->b->config.command);
    if (rc < 0)
        return fail(run, "its command", -rc);
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) < 0)
        return fail(run, "no socket", errno);
    run->socket = sockets[0];
    err = fcntl(run->socket, F_SETFL, O_NONBLOCK) < 0 ? errno : 0;
    if (err == 0)
        err = -process_said_begin(run->b, &said);
    if (err == 0) {
        err = spawn(&run->pid, words.argv, sockets[1], said);
        close(said);
    }
    close(sockets[1]);
    if (err != 0) {
        run->pid = 0;
        snprintf(what, sizeof(what), "%.100s can't be started", words.argv[0]);
        return fail(run, what, err);
    }
    run->pid_fd = (int)syscall(SYS_pidfd_open, run->pid, 0);
    return run->pid_fd < 0 ? fail(run, "the process can't be watched", errno) : 0;
}
