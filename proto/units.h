/* Sizes and durations as people write them, in the configuration and on command lines: whole
 * numbers with a unit. What may mean two things ("4GB", "5m") is refused with a sentence that says
 * how to write either. Pure functions, any thread. */
#ifndef UCM_PROTO_UNITS_H
#define UCM_PROTO_UNITS_H

#include <stdint.h>

#define UNITS_TEXT_BYTES 32
#define UNITS_WHY_BYTES 160

/* "4096", "64KiB", "4GiB": bytes. 0; or -EINVAL with a sentence in why. */
int units_parse_size(const char *text, uint64_t *bytes, char why[UNITS_WHY_BYTES]);
/* "500ms", "10s", "5min", "1h", "0": milliseconds. The same. */
int units_parse_duration(const char *text, uint64_t *ms, char why[UNITS_WHY_BYTES]);
/* A whole number, nothing else. The same. */
int units_parse_count(const char *text, uint64_t *value, char why[UNITS_WHY_BYTES]);

/* With the largest unit that keeps the number whole. Each returns buf. */
char *units_size_text(char buf[UNITS_TEXT_BYTES], uint64_t bytes);
char *units_duration_text(char buf[UNITS_TEXT_BYTES], uint64_t ms);

#endif
