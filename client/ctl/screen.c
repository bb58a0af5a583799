#include "client/ctl/screen.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#define ENTER "\033[?1049h\033[?25l"
#define LEAVE "\033[?25h\033[?1049l"
#define HOME "\033[H"
#define CLEAR_LINE "\033[K"
#define CLEAR_BELOW "\033[J"

static struct termios before;
static volatile sig_atomic_t opened, resized, suspended;

/* Safe in a handler. */
static void put(const char *text, size_t n)
{
    while (n > 0) {
        ssize_t wrote = write(STDOUT_FILENO, text, n);

        if (wrote < 0 && errno != EINTR)
            return;
        text += wrote > 0 ? wrote : 0;
        n -= wrote > 0 ? (size_t)wrote : 0;
    }
}

static void enter(void)
{
    struct termios raw = before;

    raw.c_lflag &= ~(tcflag_t)(ICANON | ECHO);
    raw.c_cc[VMIN] = 1;
    raw.c_cc[VTIME] = 0;
    tcsetattr(STDIN_FILENO, TCSANOW, &raw);
    put(ENTER, sizeof ENTER - 1);
    opened = 1;
}

void screen_close(void)
{
    int saved = errno;

    if (opened) {
        opened = 0;
        put(LEAVE, sizeof LEAVE - 1);
        tcsetattr(STDIN_FILENO, TCSANOW, &before);
    }
    errno = saved;
}

/* Restores, and then ends as the signal does by itself: SA_RESETHAND has made it the default again. */
static void on_end(int number)
{
    screen_close();
    raise(number);
}

static void on_size(int number)
{
    (void)number;
    resized = 1;
}

static void on_stop(int number)
{
    (void)number;
    suspended = 1;
}

static void handle(int number, void (*handler)(int), int flags)
{
    struct sigaction action = {.sa_handler = handler, .sa_flags = flags};

    sigemptyset(&action.sa_mask);
    sigaction(number, &action, NULL);
}

int screen_open(void)
{
    static const int ends[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT};

    if (!isatty(STDOUT_FILENO) || tcgetattr(STDIN_FILENO, &before) != 0)
        return -ENOTTY;
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++)
        handle(ends[i], on_end, SA_RESETHAND);
    handle(SIGWINCH, on_size, 0);
    handle(SIGTSTP, on_stop, 0);
    atexit(screen_close);
    enter();
    return 0;
}

/* Ctrl-Z: gives the terminal back, and stops until SIGCONT. */
static void stop_here(void)
{
    suspended = 0;
    screen_close();
    handle(SIGTSTP, SIG_DFL, 0);
    raise(SIGTSTP);
    handle(SIGTSTP, on_stop, 0);
    enter();
}

/* Bytes of a line that fit into so many columns: continuation bytes of UTF-8 take none. */
static size_t clip(const char *line, size_t n, size_t columns)
{
    size_t at = 0, used = 0;

    for (; at < n; at++) {
        used += ((unsigned char)line[at] & 0xc0) != 0x80;
        if (used > columns)
            break;
    }
    return at;
}

void screen_show(const char *text)
{
    struct winsize size = {.ws_row = 24, .ws_col = 80};
    size_t rows = 0, n = 0;
    char *out = NULL;
    FILE *f;

    ioctl(STDOUT_FILENO, TIOCGWINSZ, &size);
    if (size.ws_row == 0 || size.ws_col == 0)
        size = (struct winsize){.ws_row = 24, .ws_col = 80};
    f = open_memstream(&out, &n);
    if (f == NULL)
        return;
    fputs(HOME, f);
    while (*text != '\0' && rows < size.ws_row) {
        size_t line = strcspn(text, "\n");

        if (rows++ > 0)
            fputs("\r\n", f);
        fwrite(text, 1, clip(text, line, size.ws_col), f);
        fputs(CLEAR_LINE, f);
        text += line + (text[line] == '\n');
    }
    if (rows < size.ws_row)
        fputs("\r\n" CLEAR_BELOW, f);
    if (fclose(f) == 0)
        put(out, n);
    free(out);
}

static int left_ms(const struct timespec *from, int timeout_ms)
{
    struct timespec now;
    int64_t passed;

    clock_gettime(CLOCK_MONOTONIC, &now);
    passed = (now.tv_sec - from->tv_sec) * 1000 + (now.tv_nsec - from->tv_nsec) / 1000000;
    return passed < timeout_ms ? (int)(timeout_ms - passed) : 0;
}

int screen_wait(int timeout_ms)
{
    struct pollfd keys = {.fd = STDIN_FILENO, .events = POLLIN};
    struct timespec from;
    unsigned char key;

    clock_gettime(CLOCK_MONOTONIC, &from);
    for (;;) {
        int n = poll(&keys, 1, left_ms(&from, timeout_ms));

        if (suspended) {
            stop_here();
            return 0;
        }
        if (resized) {
            resized = 0;
            return 0;
        }
        if (n == 0 || (n < 0 && errno != EINTR))
            return 0;
        if (n > 0)
            return read(STDIN_FILENO, &key, 1) == 1 ? key : 'q'; /* the terminal is gone */
    }
}
