#include "daemon/encryption/source.h"

#include "daemon/format/io.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/crypto.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define WORDS_MAX 32u
#define FILE_PREFIX "file:"
#define CREDENTIAL_PREFIX "credential:"
#define COMMAND_PREFIX "command:"

static bool starts(const char *text, const char *with)
{
    return strncmp(text, with, strlen(with)) == 0;
}

size_t source_name_bytes(const char *item)
{
    return strcspn(item, " ");
}

/* ---- the text ---- */

static int digit_of(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

static bool key_parse(const char *line, size_t n, uint8_t key[ENCRYPTION_KEY_BYTES])
{
    if (n != 2 * ENCRYPTION_KEY_BYTES)
        return false;
    for (size_t i = 0; i < ENCRYPTION_KEY_BYTES; i++) {
        int high = digit_of(line[2 * i]), low = digit_of(line[2 * i + 1]);

        if (high < 0 || low < 0)
            return false;
        key[i] = (uint8_t)(high << 4 | low);
    }
    return true;
}

/* At the end, and not where it was before. */
static int key_add(uint8_t keys[ENCRYPTION_KEYS_MAX][ENCRYPTION_KEY_BYTES], unsigned *n,
                   const uint8_t key[ENCRYPTION_KEY_BYTES])
{
    for (unsigned i = 0; i < *n; i++) {
        if (CRYPTO_memcmp(keys[i], key, ENCRYPTION_KEY_BYTES) != 0)
            continue;
        memmove(keys[i], keys[i + 1], (size_t)(--*n - i) * ENCRYPTION_KEY_BYTES);
        break;
    }
    if (*n == ENCRYPTION_KEYS_MAX)
        return -ENOSPC;
    memcpy(keys[(*n)++], key, ENCRYPTION_KEY_BYTES);
    return 0;
}

int source_parse(const char *text, size_t n,
                 uint8_t keys[ENCRYPTION_KEYS_MAX][ENCRYPTION_KEY_BYTES], unsigned *count,
                 char why[160])
{
    uint8_t key[ENCRYPTION_KEY_BYTES];
    unsigned line = 0;
    int rc = 0;

    *count = 0;
    for (const char *at = text, *end = text + n; at < end && rc == 0;) {
        const char *stop = memchr(at, '\n', (size_t)(end - at));
        size_t bytes = (size_t)((stop ? stop : end) - at);

        line++;
        while (bytes > 0 && (at[bytes - 1] == '\r' || at[bytes - 1] == ' '))
            bytes--;
        if (bytes > 0 && *at != '#') {
            rc = key_parse(at, bytes, key) ? key_add(keys, count, key) : -EINVAL;
            if (rc == -ENOSPC)
                snprintf(why, 160, "more than %u keys", ENCRYPTION_KEYS_MAX);
            else if (rc < 0)
                snprintf(why, 160,
                         "line %u has %zu bytes and should be a key, 64 hexadecimal digits: "
                         "openssl rand -hex 32",
                         line, bytes);
        }
        at = stop ? stop + 1 : end;
    }
    OPENSSL_cleanse(key, sizeof(key));
    if (rc == 0 && *count == 0) {
        snprintf(why, 160, "no key; one is a line of 64 hexadecimal digits: openssl rand -hex 32");
        rc = -EINVAL;
    }
    return rc < 0 ? -EINVAL : 0;
}

/* ---- files ---- */

/* What the thread that reads it has; the event loop's again once it has ended. */
struct file_job {
    char *path, *text; /* text: SOURCE_BYTES of locked memory */
    size_t n;
    int status;
};

/* Up to the end of the file, and one byte more, which is too many. */
static int text_read(struct file_job *j, int fd)
{
    char more;
    ssize_t n = io_read_some(fd, j->text, SOURCE_BYTES, 0);

    if (n < 0)
        return (int)n;
    j->n = (size_t)n;
    n = io_read_some(fd, &more, 1, j->n);
    OPENSSL_cleanse(&more, 1);
    return n < 0 ? (int)n : n > 0 ? -EFBIG : 0;
}

static int file_status(const struct stat *st)
{
    return !S_ISREG(st->st_mode)                        ? -EINVAL
           : st->st_uid != 0 && st->st_uid != geteuid() ? -EXDEV
           : st->st_mode & (S_IWGRP | S_IWOTH)          ? -EPERM
           : st->st_mode & S_IROTH                      ? -EROFS
                                                        : 0;
}

static void file_run_cb(void *job)
{
    struct file_job *j = job;
    struct stat st;
    int fd;

    /* First by its name: to open a FIFO waits for its other end. */
    j->status = stat(j->path, &st) < 0 ? -errno : file_status(&st);
    if (j->status < 0)
        return;
    fd = open(j->path, O_RDONLY | O_CLOEXEC);
    j->status = fd < 0 || fstat(fd, &st) < 0 ? -errno : file_status(&st);
    if (j->status == 0)
        j->status = text_read(j, fd);
    if (fd >= 0)
        close(fd);
}

static void file_free_cb(void *job)
{
    struct file_job *j = job;

    CRYPTO_secure_clear_free(j->text, SOURCE_BYTES, __FILE__, __LINE__);
    free(j->path);
    free(j);
}

static const char *status_text(int status)
{
    return status == -EINVAL  ? "it should be a regular file"
           : status == -EXDEV ? "it should belong to root or the daemon's user"
           : status == -EPERM ? "its group or others may write it: chmod go-w"
           : status == -EROFS ? "others may read it: chmod o-r"
           : status == -EFBIG ? "it is longer than 4 KiB"
                              : strerror(-status);
}

static void file_ended_cb(void *ctx, void *job, int status)
{
    struct file_job *j = job;
    struct source *s = ctx;
    char why[160] = "";

    if (j)
        status = j->status;
    if (status == 0) {
        memcpy(s->text, j->text, j->n);
        s->n = j->n;
    } else if (!j) {
        snprintf(why, sizeof(why), "%.100s did not answer within %llu ms", s->path,
                 (unsigned long long)s->timeout_ms);
    } else {
        snprintf(why, sizeof(why), "%.100s: %s", s->path, status_text(status));
    }
    s->busy = false;
    s->done_cb(s, status, why);
}

static void file_read(struct source *s)
{
    static const struct aside_call call = {file_run_cb, file_ended_cb, file_free_cb};
    struct file_job *j = calloc(1, sizeof(*j));
    char why[160];
    int rc = -ENOMEM;

    if (j) {
        j->path = strdup(s->path);
        j->text = CRYPTO_secure_zalloc(SOURCE_BYTES, __FILE__, __LINE__);
        if (j->path && j->text)
            rc = aside_start(&s->aside, s->loop, &call, s, j, s->timeout_ms);
        if (rc == 0)
            return;
        file_free_cb(j);
    }
    snprintf(why, sizeof(why), "%.100s%s", s->path,
             rc == -EBUSY    ? ": the read before this one has not been answered yet"
             : rc == -EAGAIN ? ": no thread to read it"
                             : ": no memory to read it");
    s->busy = false;
    s->done_cb(s, rc, why);
}

static void credential_read(struct source *s, const char *name)
{
    const char *directory = getenv("CREDENTIALS_DIRECTORY");

    if (directory &&
        snprintf(s->path, sizeof(s->path), "%s/%s", directory, name) < (int)sizeof(s->path)) {
        file_read(s);
        return;
    }
    s->busy = false;
    s->done_cb(s, -ENOENT, "$CREDENTIALS_DIRECTORY is not set: LoadCredential= of systemd does so");
}

/* ---- commands ---- */

static void command_ended(struct source *s)
{
    char why[160] = "";
    int rc = s->status;

    if (rc == 0 && (s->exit_status != 0 || s->signal != 0))
        rc = -EIO;
    if (rc == -ETIMEDOUT)
        snprintf(why, sizeof(why), "the command did not end within %llu ms",
                 (unsigned long long)s->timeout_ms);
    else if (rc == -EFBIG)
        snprintf(why, sizeof(why), "the command wrote more than 4 KiB");
    else if (rc == -EIO && s->signal != 0)
        snprintf(why, sizeof(why), "the command ended by signal %d", s->signal);
    else if (rc == -EIO)
        snprintf(why, sizeof(why), "the command ended with status %lld", (long long)s->exit_status);
    else if (rc < 0)
        snprintf(why, sizeof(why), "the command: %s", strerror(-rc));
    s->busy = false;
    s->done_cb(s, rc, why);
}

static void handle_closed_cb(uv_handle_t *h)
{
    struct source *s = h->data;

    if (--s->handles == 0)
        command_ended(s);
}

static void close_once(uv_handle_t *h)
{
    if (!uv_is_closing(h))
        uv_close(h, handle_closed_cb);
}

/* The process has ended and the pipe is at its end: nothing is left to wait for. */
static void timer_close_last(struct source *s)
{
    if (uv_is_closing((uv_handle_t *)&s->process) && uv_is_closing((uv_handle_t *)&s->out))
        close_once((uv_handle_t *)&s->timer);
}

static void command_stop(struct source *s, int status)
{
    if (s->status == 0)
        s->status = status;
    close_once((uv_handle_t *)&s->out);
    if (!uv_is_closing((uv_handle_t *)&s->process))
        (void)uv_process_kill(&s->process, SIGKILL); /* exit_cb follows */
    timer_close_last(s);
}

static void timer_cb(uv_timer_t *timer)
{
    command_stop(timer->data, -ETIMEDOUT);
}

static void exit_cb(uv_process_t *process, int64_t exit_status, int signal)
{
    struct source *s = process->data;

    s->exit_status = exit_status;
    s->signal = signal;
    close_once((uv_handle_t *)process);
    /* What it wrote may still be in the pipe, which a child of it may keep open until the
     * deadline. */
    timer_close_last(s);
}

static void alloc_cb(uv_handle_t *h, size_t hint, uv_buf_t *out)
{
    struct source *s = h->data;

    (void)hint;
    /* After a full text one byte more is too many. */
    *out = s->n < SOURCE_BYTES ? uv_buf_init(s->text + s->n, (unsigned)(SOURCE_BYTES - s->n))
                               : uv_buf_init(&s->more, 1);
}

static void read_cb(uv_stream_t *stream, ssize_t n, const uv_buf_t *buf)
{
    struct source *s = stream->data;

    (void)buf;
    if (n > 0 && s->n == SOURCE_BYTES) {
        OPENSSL_cleanse(&s->more, 1);
        command_stop(s, -EFBIG);
    } else if (n > 0) {
        s->n += (size_t)n;
    }
    if (n >= 0)
        return;
    close_once((uv_handle_t *)stream);
    timer_close_last(s);
}

/* False: there are more than WORDS_MAX. */
static bool words_split(char *words, char *argv[WORDS_MAX + 1])
{
    unsigned n = 0;
    char *save, *word = strtok_r(words, " ", &save);

    for (; word && n < WORDS_MAX; word = strtok_r(NULL, " ", &save))
        argv[n++] = word;
    argv[n] = NULL;
    return !word;
}

static void command_start(struct source *s, char **argv)
{
    uv_stdio_container_t io[3] = {{.flags = UV_IGNORE},
                                  {.flags = UV_CREATE_PIPE | UV_WRITABLE_PIPE},
                                  {.flags = UV_INHERIT_FD, .data.fd = 2}};
    uv_process_options_t options = {
        .exit_cb = exit_cb, .file = argv[0], .args = argv, .stdio = io, .stdio_count = 3};
    int rc;

    s->status = s->signal = 0;
    s->exit_status = 0;
    s->handles = 3;
    (void)uv_pipe_init(s->loop, &s->out, 0); /* neither can fail */
    (void)uv_timer_init(s->loop, &s->timer);
    s->process.data = s->out.data = s->timer.data = s;
    io[1].data.stream = (uv_stream_t *)&s->out;
    rc = uv_spawn(s->loop, &s->process, &options); /* initialises the handle also when it fails */
    if (rc < 0) {
        close_once((uv_handle_t *)&s->process);
        command_stop(s, rc);
        return;
    }
    (void)uv_timer_start(&s->timer, timer_cb, s->timeout_ms, 0);
    rc = uv_read_start((uv_stream_t *)&s->out, alloc_cb, read_cb);
    if (rc < 0)
        command_stop(s, rc);
}

void source_read(struct source *s)
{
    s->n = 0;
    s->busy = true;
    if (starts(s->from, FILE_PREFIX)) {
        snprintf(s->path, sizeof(s->path), "%s", s->from + strlen(FILE_PREFIX));
        file_read(s);
    } else if (starts(s->from, CREDENTIAL_PREFIX)) {
        credential_read(s, s->from + strlen(CREDENTIAL_PREFIX));
    } else {
        char *words = strdup(s->from + strlen(COMMAND_PREFIX)), *argv[WORDS_MAX + 1];

        if (words && words_split(words, argv)) {
            command_start(s, argv);
        } else {
            s->busy = false;
            s->done_cb(s, words ? -E2BIG : -ENOMEM,
                       words ? "the command has more than 32 words: put them into a script"
                             : "no memory");
        }
        free(words);
    }
}

void source_wait(struct source *s, uint64_t ms)
{
    aside_wait(&s->aside, ms);
}

void source_stop(struct source *s)
{
    aside_stop(&s->aside);
    if (s->busy && s->handles > 0)
        command_stop(s, -ECANCELED);
}
