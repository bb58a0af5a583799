#include "daemon/base/log.h"

#include <errno.h>
#include <limits.h>
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

static void line_add(struct line *l, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void line_add(struct line *l, const char *format, ...)
{
    size_t left = sizeof(l->text) - l->n;
    va_list args;
    int n;

    va_start(args, format);
    n = vsnprintf(l->text + l->n, left, format, args);
    va_end(args);
    if (n > 0)
        l->n += (size_t)n < left ? (size_t)n : left - 1;
}

static void line_add_bytes(struct line *l, const char *text, size_t n)
{
    size_t left = sizeof(l->text) - 1 - l->n;

    n = n < left ? n : left;
    memcpy(l->text + l->n, text, n);
    l->n += n;
}

/* ---- values: a parser splits a line at spaces outside of quotes ---- */

/* Within quotes. */
static void line_add_escaped(struct line *l, const char *text, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (text[i] == '"' || text[i] == '\\')
            line_add_bytes(l, "\\", 1);
        line_add_bytes(l, text + i, 1);
    }
}

/* A text behind "key=", in quotes if a parser needs them. */
static void line_add_value(struct line *l, const char *text, size_t n)
{
    bool plain = n > 0;

    for (size_t i = 0; i < n && plain; i++)
        plain = text[i] != ' ' && text[i] != '"' && text[i] != '\\';
    if (plain) {
        line_add_bytes(l, text, n);
        return;
    }
    line_add_bytes(l, "\"", 1);
    line_add_escaped(l, text, n);
    line_add_bytes(l, "\"", 1);
}

/* One conversion of a format, up to its letter, as printf has it. */
struct conversion {
    char spec[16];
    size_t n;
    bool precision; /* taken from the arguments: "%.*s" */
    enum { SIZE_INT, SIZE_LONG, SIZE_LONG_LONG, SIZE_SIZE } size;
};

static void conversion_read(const char *format, struct conversion *c)
{
    static const char letters[] = "diouxXcspfge";

    *c = (struct conversion){.size = SIZE_INT};
    do {
        if (c->n == sizeof(c->spec) - 1)
            abort(); /* no format here is like that */
        c->spec[c->n] = format[c->n];
        c->precision |= format[c->n] == '*';
        if (format[c->n] == 'l')
            c->size = c->size == SIZE_LONG ? SIZE_LONG_LONG : SIZE_LONG;
        if (format[c->n] == 'z' || format[c->n] == 'j')
            c->size = SIZE_SIZE;
    } while (!strchr(letters, format[c->n++]));
}

/* In a struct, so that a function can take one of them. */
struct arguments {
    va_list list;
};

static void line_add_number(struct line *l, const struct conversion *c, struct arguments *a)
{
    char letter = c->spec[c->n - 1];

    if (letter == 'f' || letter == 'g' || letter == 'e')
        line_add(l, c->spec, va_arg(a->list, double));
    else if (letter == 'p')
        line_add(l, c->spec, va_arg(a->list, void *));
    else if (c->size == SIZE_INT)
        line_add(l, c->spec, va_arg(a->list, int));
    else if (c->size == SIZE_LONG)
        line_add(l, c->spec, va_arg(a->list, long));
    else if (c->size == SIZE_SIZE)
        line_add(l, c->spec, va_arg(a->list, size_t));
    else
        line_add(l, c->spec, va_arg(a->list, long long));
}

static void line_add_format(struct line *l, const char *format, struct arguments *a)
{
    bool quoted = false;
    char before = ' ';

    while (*format) {
        struct conversion c;

        if (format[0] != '%' || format[1] == '%') {
            before = *format;
            quoted ^= before == '"';
            line_add_bytes(l, format, 1);
            format += format[0] == '%' ? 2 : 1;
            continue;
        }
        conversion_read(format, &c);
        format += c.n;
        if (c.spec[c.n - 1] == 's') {
            int most = c.precision ? va_arg(a->list, int) : INT_MAX;
            const char *text = va_arg(a->list, const char *);
            size_t n = strnlen(text, (size_t)most);

            if (quoted)
                line_add_escaped(l, text, n);
            else if (before == '=')
                line_add_value(l, text, n);
            else
                line_add_bytes(l, text, n);
        } else {
            line_add_number(l, &c, a);
        }
        before = ' ';
    }
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

/* A line that did not fit ends in "...", and its last quotes are closed. */
static void line_cut(struct line *l)
{
    static const char ends[] = "...\"";
    bool quoted = false;

    l->n -= sizeof(ends) - 1;
    if (l->text[l->n - 1] == '\\')
        l->text[l->n - 1] = '.';
    for (size_t i = 0; i < l->n; i++)
        quoted ^= l->text[i] == '"' && l->text[i - 1] != '\\';
    if (!quoted)
        l->text[l->n++] = '.';
    line_add_bytes(l, ends, quoted ? 4 : 3);
}

/* Values may come from peers: nothing in them may start a line of its own or drive a terminal. */
static void line_end(struct line *l)
{
    if (l->n == sizeof(l->text) - 1)
        line_cut(l);
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
    struct arguments args;
    uint32_t held;

    if ((int)level > __atomic_load_n(&present_level, __ATOMIC_RELAXED) || !site_pass(site, &held))
        return;
    line_begin(&l, level, room, event);
    if (held > 0)
        line_add(&l, " held=%u", held);
    if (format[0] != '\0') {
        line_add(&l, " ");
        va_start(args.list, format);
        line_add_format(&l, format, &args);
        va_end(args.list);
    }
    line_end(&l);
    line_write(&l);
    errno = saved_errno;
}

void log_audit(const char *event, const char *format, ...)
{
    int saved_errno = errno;
    struct line l = {.n = 0};
    struct arguments args;

    line_begin(&l, LOG_INFO, "audit", event);
    line_add(&l, " ");
    va_start(args.list, format);
    line_add_format(&l, format, &args);
    va_end(args.list);
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
