#include "daemon/base/log.h"

#include "daemon/base/detached.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>
#include <uv.h>

#define LINE_BYTES 1024
#define WINDOW_MS 10000
#define RING_BYTES ((size_t)1 << 20)
#define FLUSH_MS 1000
#define STACK_BYTES (256u << 10)

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

/* The variable alone is not enough: a child inherits it even if its standard error goes
 * elsewhere. */
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

/* A text after "key=", in quotes if a parser needs them. */
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

static void line_begin(struct line *l, enum log_level level, const char *module, const char *event)
{
    pthread_once(&journal_once, journal_detect);
    if (to_journal) {
        line_add(l, "<%d>%s %s", journal_priorities[level], module, event);
    } else {
        line_add_time(l);
        line_add(l, "%s %s %s", level_names[level], module, event);
    }
}

/* ---- writing: at once, or from log_start on by a thread: no caller waits for the reader ---- */

static struct {
    pthread_mutex_t lock;
    pthread_cond_t filled;
    bool threaded;
    size_t first;       /* where the oldest line begins */
    atomic_size_t used; /* by whole lines; the one that is being written is among them */
    uint64_t lost; /* since then no line enters, so that the count stands where they were lost */
    char bytes[RING_BYTES];
} ring = {.lock = PTHREAD_MUTEX_INITIALIZER, .filled = PTHREAD_COND_INITIALIZER};

/* A failure is not reported: there is no other place to write to. */
static void bytes_write(const struct iovec *bytes, int n)
{
    while (writev(STDERR_FILENO, bytes, n) < 0 && errno == EINTR)
        continue;
}

/* The ring's n bytes from `at` on, in one or two pieces; returns how many. */
static int ring_pieces(size_t at, size_t n, struct iovec out[2])
{
    size_t to_end = RING_BYTES - at;

    out[0] = (struct iovec){ring.bytes + at, n < to_end ? n : to_end};
    out[1] = (struct iovec){ring.bytes, n - out[0].iov_len};
    return out[1].iov_len > 0 ? 2 : 1;
}

/* Under the lock, as all below. There is room. */
static void ring_put(const struct line *l)
{
    struct iovec to[2];

    ring_pieces((ring.first + ring.used) % RING_BYTES, l->n, to);
    memcpy(to[0].iov_base, l->text, to[0].iov_len);
    memcpy(to[1].iov_base, l->text + to[0].iov_len, to[1].iov_len);
    ring.used += l->n;
    pthread_cond_signal(&ring.filled);
}

static size_t ring_first_line(void)
{
    const char *at = ring.bytes + ring.first;
    size_t to_end = RING_BYTES - ring.first;
    const char *end = memchr(at, '\n', ring.used < to_end ? ring.used : to_end);

    if (end)
        return (size_t)(end - at) + 1;
    end = memchr(ring.bytes, '\n', ring.used - to_end);
    return to_end + (size_t)(end - ring.bytes) + 1;
}

static void lost_tell(void)
{
    struct line l = {.n = 0};

    line_begin(&l, LOG_WARN, "log", "lost");
    line_add(&l, " lines=%llu", (unsigned long long)ring.lost);
    line_end(&l);
    ring.lost = 0;
    ring_put(&l);
}

static void *writer_main(void *unused)
{
    pthread_setname_np(pthread_self(), "log");
    pthread_mutex_lock(&ring.lock);
    for (;;) {
        struct iovec bytes[2];
        size_t n;
        int pieces;

        while (ring.used == 0)
            pthread_cond_wait(&ring.filled, &ring.lock);
        n = ring_first_line();
        pieces = ring_pieces(ring.first, n, bytes);
        pthread_mutex_unlock(&ring.lock);
        bytes_write(bytes, pieces);
        pthread_mutex_lock(&ring.lock);
        ring.first = (ring.first + n) % RING_BYTES;
        ring.used -= n;
        if (ring.lost > 0 && ring.used <= RING_BYTES / 2)
            lost_tell();
    }
    return unused;
}

static void line_write(struct line *l)
{
    bool threaded;

    pthread_mutex_lock(&ring.lock);
    threaded = ring.threaded;
    if (threaded && ring.lost == 0 && ring.used + l->n <= RING_BYTES)
        ring_put(l);
    else if (threaded)
        ring.lost++;
    pthread_mutex_unlock(&ring.lock);
    if (!threaded)
        bytes_write(&(struct iovec){l->text, l->n}, 1);
}

void log_flush(void)
{
    for (int ms = 0; ms < FLUSH_MS && atomic_load(&ring.used) > 0; ms++)
        (void)nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

/* What led there is to be read. Then the process ends as it would without this, also where the
 * signal is systemd's, whose watchdog had no answer: the handler is gone, and the signal comes when
 * it returns. */
static void abort_cb(int number)
{
    log_flush();
    (void)raise(number); /* a valid signal */
}

void log_start(void)
{
    struct sigaction action = {.sa_handler = abort_cb, .sa_flags = (int)SA_RESETHAND};
    sigset_t all, before;
    int rc;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the event loop's */
    rc = detached_start(STACK_BYTES, writer_main, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc != 0) {
        log_warn("log", "no-thread", "error=%s: each line waits for its reader", strerror(-rc));
        return;
    }
    (void)sigaction(SIGABRT, &action, NULL); /* a valid signal */
    pthread_mutex_lock(&ring.lock);
    ring.threaded = true;
    pthread_mutex_unlock(&ring.lock);
}

static void line_log(enum log_level level, const char *module, const char *event, uint32_t held,
                     const char *format, struct arguments *args)
{
    int saved_errno = errno;
    struct line l = {.n = 0};

    line_begin(&l, level, module, event);
    if (held > 0)
        line_add(&l, " held=%u", held);
    if (format[0] != '\0') {
        line_add(&l, " ");
        line_add_format(&l, format, args);
    }
    line_end(&l);
    line_write(&l);
    errno = saved_errno;
}

void log_line(struct log_site *site, enum log_level level, const char *module, const char *event,
              const char *format, ...)
{
    struct arguments args;
    uint32_t held;

    if ((int)level > __atomic_load_n(&present_level, __ATOMIC_RELAXED) || !site_pass(site, &held))
        return;
    va_start(args.list, format);
    line_log(level, module, event, held, format, &args);
    va_end(args.list);
}

void log_audit(const char *event, const char *format, ...)
{
    struct arguments args;

    va_start(args.list, format);
    line_log(LOG_INFO, "audit", event, 0, format, &args);
    va_end(args.list);
}
