#include "daemon/base/log.h"

#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <uv.h>

#define LINE_BYTES 1024
#define WINDOW_MS 10000

static const char *const level_names[] = {"error", "warn", "info", "debug"};
static const int journal_priorities[] = {3, 4, 6, 7};

static int present_level = LOG_INFO;
static pthread_mutex_t site_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t journal_once = PTHREAD_ONCE_INIT;
static bool to_journal;

void log_set_level(enum log_level level)
{
    __atomic_store_n(&present_level, (int)level, __ATOMIC_RELAXED);
}

/* The variable alone is not enough: a child inherits it even if its standard error goes elsewhere. */
static void journal_detect(void)
{
    const char *stream = getenv("JOURNAL_STREAM");
    unsigned long long device, inode;
    struct stat st;

    if (stream && sscanf(stream, "%llu:%llu", &device, &inode) == 2 &&
        fstat(STDERR_FILENO, &st) == 0)
        to_journal = device == st.st_dev && inode == st.st_ino;
}

/* May this line pass? *held: how many lines were held back since the last one that passed. */
static bool site_pass(struct log_site *site, uint32_t *held)
{
    uint64_t now_ms = uv_hrtime() / 1000000;
    bool pass;

    pthread_mutex_lock(&site_lock);
    if (site->lines == 0 || now_ms - site->window_ms >= WINDOW_MS) {
        site->window_ms = now_ms;
        site->lines = 0;
    }
    pass = site->lines < LOG_BURST;
    *held = site->held;
    if (pass) {
        site->lines++;
        site->held = 0;
    } else if (site->held < UINT32_MAX) {
        site->held++;
    }
    pthread_mutex_unlock(&site_lock);
    return pass;
}

/* A line in the making; text past the end is cut, never written. */
struct line {
    char text[LINE_BYTES];
    size_t n;
};

static void line_vadd(struct line *l, const char *format, va_list args)
    __attribute__((format(printf, 2, 0)));
static void line_add(struct line *l, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void line_vadd(struct line *l, const char *format, va_list args)
{
    size_t left = sizeof(l->text) - l->n;
    int n = vsnprintf(l->text + l->n, left, format, args);

    if (n < 0)
        return;
    l->n += (size_t)n < left ? (size_t)n : left - 1;
}

static void line_add(struct line *l, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    line_vadd(l, format, args);
    va_end(args);
}

static void line_add_time(struct line *l)
{
    struct timespec now;
    struct tm utc;

    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    l->n += strftime(l->text + l->n, sizeof(l->text) - l->n, "%Y-%m-%dT%H:%M:%S", &utc);
    line_add(l, ".%03ldZ ", now.tv_nsec / 1000000);
}

/* Values may come from peers: nothing in them may start a line of its own or drive a terminal. */
static void line_end(struct line *l)
{
    if (l->n == sizeof(l->text) - 1)
        memcpy(l->text + l->n - 3, "...", 3);
    for (size_t i = 0; i < l->n; i++)
        if ((unsigned char)l->text[i] < ' ' || l->text[i] == 0x7f)
            l->text[i] = '?';
    l->text[l->n++] = '\n';
}

/* A failure is not reported: there is no other place to write to. */
static void line_write(const struct line *l)
{
    ssize_t n;

    do
        n = write(STDERR_FILENO, l->text, l->n);
    while (n < 0 && errno == EINTR);
}

static void line_begin(struct line *l, enum log_level level, const char *room, const char *event)
{
    pthread_once(&journal_once, journal_detect);
    if (to_journal) {
        line_add(l, "<%d>%s %s", journal_priorities[level], room, event);
    } else {
        line_add_time(l);
        line_add(l, "%s %s %s", level_names[level], room, event);
    }
}

void log_line(struct log_site *site, enum log_level level, const char *room, const char *event,
              const char *format, ...)
{
    int saved_errno = errno;
    struct line l = {.n = 0};
    uint32_t held;
    va_list args;

    if ((int)level > __atomic_load_n(&present_level, __ATOMIC_RELAXED) || !site_pass(site, &held))
        return;
    line_begin(&l, level, room, event);
    if (held > 0)
        line_add(&l, " held=%u", held);
    if (format[0] != '\0') {
        line_add(&l, " ");
        va_start(args, format);
        line_vadd(&l, format, args);
        va_end(args);
    }
    line_end(&l);
    line_write(&l);
    errno = saved_errno;
}

void log_audit(const char *event, const char *format, ...)
{
    int saved_errno = errno;
    struct line l = {.n = 0};
    va_list args;

    line_begin(&l, LOG_INFO, "audit", event);
    line_add(&l, " ");
    va_start(args, format);
    line_vadd(&l, format, args);
    va_end(args);
    line_end(&l);
    line_write(&l);
    errno = saved_errno;
}

const char *log_escape(const char *text, char *out, size_t size)
{
    size_t n = 0;

    for (; *text && n + 2 < size; text++) {
        if (*text == '"' || *text == '\\')
            out[n++] = '\\';
        out[n++] = *text;
    }
    out[n] = '\0';
    return out;
}
