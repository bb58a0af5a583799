#include "daemon/backend/s3/credentials.h"

#include "daemon/backend/s3/credentials_parse.h"
#include "proto/clock.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define OUTPUT_BYTES 65536u /* of the command, and of the file */
#define WORDS 32            /* of the command */
#define COMMAND_MS 30000u
#define REAP_MS 10u    /* from one look whether it has ended to the next */
#define LOOK_MS 5000u  /* from one look at the file to the next */
#define EARLY_S 300    /* before its end a key is renewed; a quarter of its life, if that is less */
#define AGAIN_MS 1000u /* after a failure, doubled up to */
#define AGAIN_MAX_MS 60000u

extern char **environ;

struct s3_credentials {
    const struct s3_target *t;
    struct s3_key key;
    bool has_key;
    uint64_t version;
    int64_t expires_s; /* since 1970; 0: never */
    uint64_t due_ms;   /* it is to be fetched */
    uint64_t looked_ms, doubted_ms;
    unsigned failures;
    char reason[S3_WHY_BYTES];
    /* The file as it was read last. */
    struct timespec file_mtime;
    ino_t file_inode;
    char process[S3_TEXT_BYTES]; /* its credential_process; "": none */
    /* The command. */
    pid_t pid;    /* 0: it does not run */
    pid_t killed; /* that has not ended yet; 0: none. No other runs alongside it */
    int fd;       /* -1: it has closed its output, or does not run */
    uint64_t until_ms;
    char *output;
    size_t n_output;
};

static uint64_t pause_ms(struct s3_credentials *c)
{
    uint64_t ms = (uint64_t)AGAIN_MS << (c->failures < 6 ? c->failures : 6);

    c->failures++;
    return ms < AGAIN_MAX_MS ? ms : AGAIN_MAX_MS;
}

static void failed(struct s3_credentials *c, const char *what, const char *why)
{
    snprintf(c->reason, sizeof(c->reason), "%.100s: %.90s", what, why);
    c->due_ms = clock_ms() + pause_ms(c);
}

/* Until `life_s` from now; 0: for ever. */
static void key_take(struct s3_credentials *c, const struct s3_key *key, int64_t expires_s)
{
    int64_t life_s = expires_s - (int64_t)time(NULL);
    int64_t early_s = life_s / 4 < EARLY_S ? life_s / 4 : EARLY_S;

    if (!c->has_key || memcmp(&c->key, key, sizeof(*key)) != 0)
        c->version++;
    c->key = *key;
    c->has_key = true;
    c->expires_s = expires_s;
    c->failures = 0;
    c->reason[0] = '\0';
    c->due_ms = expires_s == 0 ? UINT64_MAX : clock_ms() + (uint64_t)(life_s - early_s) * 1000;
}

/* ---- the environment ---- */

static bool environment_take(struct s3_credentials *c)
{
    const char *id = getenv("AWS_ACCESS_KEY_ID"), *secret = getenv("AWS_SECRET_ACCESS_KEY");
    const char *token = getenv("AWS_SESSION_TOKEN");
    struct s3_key key = {.id = ""};

    if (!id || !secret)
        return false;
    if (s3_text_take(key.id, sizeof(key.id), id) &&
        s3_text_take(key.secret, sizeof(key.secret), secret) &&
        s3_text_take(key.token, sizeof(key.token), token ? token : ""))
        key_take(c, &key, 0);
    else
        failed(c, "the environment", "AWS_ACCESS_KEY_ID and what belongs to it is too long");
    return true;
}

/* ---- the file ---- */

static int file_read(struct s3_credentials *c, char *text, struct stat *st)
{
    int fd = open(c->t->credentials, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    ssize_t n = fd < 0 || fstat(fd, st) < 0 ? -1 : read(fd, text, OUTPUT_BYTES);
    int err = n < 0 ? -errno : n == OUTPUT_BYTES ? -EFBIG : 0;

    if (fd >= 0)
        close(fd);
    if (err == 0)
        text[n] = '\0';
    return err;
}

static void file_take(struct s3_credentials *c)
{
    char *text = malloc(OUTPUT_BYTES + 1);
    struct s3_key key = {.id = ""};
    struct stat st;
    int err = text ? file_read(c, text, &st) : -ENOMEM;

    if (err < 0) {
        failed(c, c->t->credentials, strerror(-err));
    } else if (!s3_profile_parse(text, c->t->profile, &key, c->process, sizeof(c->process))) {
        failed(c, c->t->credentials, "a value in it is too long");
    } else if (c->process[0] == '/') {
        c->due_ms = 0;
    } else if (!key.id[0] || !key.secret[0]) {
        failed(c, c->t->credentials,
               "its profile has no aws_access_key_id and aws_secret_access_key");
    } else {
        key_take(c, &key, 0);
        c->file_mtime = st.st_mtim;
        c->file_inode = st.st_ino;
    }
    if (text)
        explicit_bzero(text, OUTPUT_BYTES);
    explicit_bzero(&key, sizeof(key));
    free(text);
}

/* An operator who replaces the file wants its new keys used. */
static bool file_changed(const struct s3_credentials *c)
{
    struct stat st;

    return stat(c->t->credentials, &st) == 0 &&
           (st.st_ino != c->file_inode || st.st_mtim.tv_sec != c->file_mtime.tv_sec ||
            st.st_mtim.tv_nsec != c->file_mtime.tv_nsec);
}

/* ---- the command ---- */

static const char *command_of(const struct s3_credentials *c)
{
    return c->t->command[0] ? c->t->command : c->process;
}

static int command_spawn(struct s3_credentials *c, int out)
{
    char text[S3_TEXT_BYTES], *words[WORDS + 1], *rest = text;
    posix_spawn_file_actions_t fa;
    size_t n = 0;
    int err;

    snprintf(text, sizeof(text), "%s", command_of(c));
    for (char *word; n < WORDS && (word = strsep(&rest, " ")) != NULL;)
        if (*word)
            words[n++] = word;
    words[n] = NULL;
    if (posix_spawn_file_actions_init(&fa) != 0)
        return -ENOMEM;
    err = posix_spawn_file_actions_adddup2(&fa, out, STDOUT_FILENO);
    if (err == 0)
        err = posix_spawn_file_actions_addclosefrom_np(&fa, STDERR_FILENO + 1);
    if (err == 0)
        err = posix_spawn(&c->pid, words[0], &fa, NULL, words, environ);
    posix_spawn_file_actions_destroy(&fa);
    return -err;
}

static void command_start(struct s3_credentials *c)
{
    int ends[2], err;

    if (c->killed) {
        failed(c, command_of(c), "the one before was killed, and has not ended yet");
        return;
    }
    c->output = malloc(OUTPUT_BYTES + 1);
    c->n_output = 0;
    if (!c->output || pipe2(ends, O_CLOEXEC) < 0) {
        free(c->output);
        c->output = NULL;
        failed(c, command_of(c), strerror(errno));
        return;
    }
    err = command_spawn(c, ends[1]);
    close(ends[1]);
    if (err < 0) {
        close(ends[0]);
        free(c->output);
        c->output = NULL;
        c->pid = 0;
        failed(c, command_of(c), strerror(-err));
        return;
    }
    c->fd = ends[0];
    (void)fcntl(c->fd, F_SETFL, O_NONBLOCK);
    c->until_ms = clock_ms() + COMMAND_MS;
}

static void command_free(struct s3_credentials *c)
{
    if (c->fd >= 0)
        close(c->fd);
    c->fd = -1;
    c->pid = 0;
    explicit_bzero(c->output, OUTPUT_BYTES);
    free(c->output);
    c->output = NULL;
}

/* Nobody waits for it: a call of the kernel's may hold even what was killed. */
static void killed_reap(struct s3_credentials *c)
{
    if (c->killed && waitpid(c->killed, NULL, WNOHANG) != 0)
        c->killed = 0;
}

static void command_kill(struct s3_credentials *c)
{
    (void)kill(c->pid, SIGKILL);
    c->killed = c->pid;
    command_free(c);
    killed_reap(c);
}

/* NULL: the key was taken; else what is wrong. */
static const char *output_take(struct s3_credentials *c)
{
    struct s3_key key = {.id = ""};
    int64_t expires_s = 0;
    const char *wrong =
        s3_command_parse(c->output, c->n_output, (int64_t)time(NULL), &key, &expires_s);

    if (!wrong)
        key_take(c, &key, expires_s);
    explicit_bzero(&key, sizeof(key));
    return wrong;
}

/* What it printed so far. NULL, or why it is to be killed. */
static const char *command_read(struct s3_credentials *c)
{
    ssize_t n = read(c->fd, c->output + c->n_output, OUTPUT_BYTES - c->n_output);

    if (n > 0) {
        c->n_output += (size_t)n;
        return c->n_output == OUTPUT_BYTES ? "it printed too much" : NULL;
    }
    if (n < 0)
        return errno == EAGAIN || errno == EINTR ? NULL : strerror(errno);
    close(c->fd);
    c->fd = -1;
    return NULL;
}

static void command_turn(struct s3_credentials *c)
{
    const char *wrong = c->fd >= 0 ? command_read(c) : NULL;
    int status;

    if (!wrong && clock_ms() >= c->until_ms)
        wrong = "it took too long";
    if (wrong) {
        command_kill(c);
    } else if (c->fd < 0 && waitpid(c->pid, &status, WNOHANG) == c->pid) {
        wrong = WIFEXITED(status) && WEXITSTATUS(status) == 0 ? output_take(c) : "it failed";
        command_free(c);
    }
    if (wrong)
        failed(c, command_of(c), wrong);
}

/* ---- all of them ---- */

int s3_credentials_open(const struct s3_target *t, struct s3_credentials **out)
{
    struct s3_credentials *c = calloc(1, sizeof(*c));

    if (!c)
        return -ENOMEM;
    c->t = t;
    c->fd = -1;
    *out = c;
    return 0;
}

void s3_credentials_close(struct s3_credentials *c)
{
    if (!c)
        return;
    if (c->pid)
        command_kill(c);
    explicit_bzero(c, sizeof(*c));
    free(c);
}

static void fetch(struct s3_credentials *c)
{
    if (c->t->command[0] || c->process[0] == '/')
        command_start(c);
    else if (c->t->file_named || !environment_take(c))
        file_take(c);
}

uint64_t s3_credentials_iteration(struct s3_credentials *c)
{
    uint64_t now = clock_ms();
    bool of_file = c->has_key && c->file_inode != 0;

    killed_reap(c);
    if (c->pid)
        command_turn(c);
    if (of_file && now >= c->looked_ms + LOOK_MS) {
        c->looked_ms = now;
        if (file_changed(c))
            c->due_ms = 0;
    }
    for (unsigned i = 0; i < 2 && !c->pid && now >= c->due_ms; i++)
        fetch(c); /* twice: the file may name a command */
    if (c->pid)
        return c->fd < 0 ? now + REAP_MS : c->until_ms;
    return of_file && c->due_ms > c->looked_ms + LOOK_MS ? c->looked_ms + LOOK_MS : c->due_ms;
}

int s3_credentials_fd(const struct s3_credentials *c)
{
    return c->fd;
}

bool s3_credentials_awaited(const struct s3_credentials *c)
{
    return c->pid != 0;
}

const struct s3_key *s3_credentials_get(struct s3_credentials *c)
{
    if (c->has_key && c->expires_s != 0 && (int64_t)time(NULL) >= c->expires_s) {
        explicit_bzero(&c->key, sizeof(c->key));
        c->has_key = false;
        if (!c->reason[0])
            snprintf(c->reason, sizeof(c->reason), "the credentials have expired");
    }
    return c->has_key ? &c->key : NULL;
}

uint64_t s3_credentials_version(const struct s3_credentials *c)
{
    return c->version;
}

bool s3_credentials_doubt(struct s3_credentials *c, uint64_t version)
{
    uint64_t now = clock_ms();

    if (c->version != version || c->pid || c->due_ms == 0)
        return true;
    if (now < c->doubted_ms + AGAIN_MS)
        return false;
    c->doubted_ms = now;
    c->due_ms = 0;
    return true;
}

const char *s3_credentials_reason(const struct s3_credentials *c)
{
    return c->reason;
}
