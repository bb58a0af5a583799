/* One line an event on standard error: "time level module event key=value ...", or without time and
 * with the journal's "<N>" prefix when $JOURNAL_STREAM says that it goes to the journal. After
 * "key=" a text is put into double quotes where it needs them; in quotes, of the format too, \" and
 * \\ stand for " and \. So a line splits at the spaces outside of quotes.
 * Any thread; a line is one write(2), of a thread from log_start on: then no caller waits for the
 * reader of standard error. Lines that do not fit its ring of 1 MiB are lost, and "warn log lost
 * lines=N" says how many. Each call site passes at most LOG_BURST lines in 10 s, then counts; the
 * next one that passes says how many were held back. */
#ifndef UCMD_BASE_LOG_H
#define UCMD_BASE_LOG_H

#include <stddef.h>
#include <stdint.h>

enum log_level { LOG_ERROR, LOG_WARN, LOG_INFO, LOG_DEBUG };

#define LOG_BURST 20

struct log_site {
    uint64_t window_ms; /* when the present window began */
    uint32_t lines, held;
};

void log_set_level(enum log_level level);
/* Starts the thread that writes the lines, once in a process; until then, and if it can't start,
 * callers write them. */
void log_start(void);
/* Waits until all lines are written, for 1 s at most: before the process ends. abort() does so by
 * itself. May be called in a signal's handler. */
void log_flush(void);

/* event: a few words with dashes, e.g. "read-failed"; format: "key=%s key=%d"; may be "". */
void log_line(struct log_site *site, enum log_level level, const char *module, const char *event,
              const char *format, ...) __attribute__((format(printf, 5, 6)));

/* "info audit EVENT key=value ...": what somebody changed, whatever the level is; never held back
 * here. */
void log_audit(const char *event, const char *format, ...) __attribute__((format(printf, 2, 3)));

#define LOG_AT(level, module, event, ...)                                                          \
    do {                                                                                           \
        static struct log_site site_;                                                              \
        log_line(&site_, level, module, event, __VA_ARGS__);                                       \
    } while (0)
#define log_error(module, event, ...) LOG_AT(LOG_ERROR, module, event, __VA_ARGS__)
#define log_warn(module, event, ...) LOG_AT(LOG_WARN, module, event, __VA_ARGS__)
#define log_info(module, event, ...) LOG_AT(LOG_INFO, module, event, __VA_ARGS__)
#define log_debug(module, event, ...) LOG_AT(LOG_DEBUG, module, event, __VA_ARGS__)

#endif
