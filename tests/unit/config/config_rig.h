/* A configuration in a directory of its own, for tests of configurations. */
#ifndef TESTS_UNIT_CONFIG_RIG_H
#define TESTS_UNIT_CONFIG_RIG_H

#include "daemon/config/table.h"
#include "tests/runner/wipe.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static struct config c;
static struct config_error e;
static char directory[] = "/tmp/ucmd-test-config-XXXXXX";
static char file[64];

static inline void setup(void)
{
    cr_assert_not_null(mkdtemp(directory));
    snprintf(file, sizeof(file), "%s/ucmd.yaml", directory);
    config_init(&c);
    unsetenv("LISTEN_FDS");
}

static inline void teardown(void)
{
    config_free(&c);
    wipe(directory);
}

static inline void write_bytes(const char *text, size_t n)
{
    FILE *f = fopen(file, "w");

    cr_assert_not_null(f);
    cr_assert_eq(fwrite(text, 1, n, f), n);
    cr_assert_eq(fclose(f), 0);
}

static inline int read_text(const char *text)
{
    write_bytes(text, strlen(text));
    return config_read(&c, file, &e);
}

static inline __attribute__((format(printf, 1, 2))) void set(const char *format, ...)
{
    char assignment[512];
    va_list values;

    va_start(values, format);
    vsnprintf(assignment, sizeof(assignment), format, values);
    va_end(values);
    cr_assert_eq(config_set(&c, assignment, &e), 0, "%s", e.text);
}

/* The last error begins and goes on with these words. */
static inline void expect_error(const char *begins, const char *says)
{
    cr_assert_eq(strncmp(e.text, begins, strlen(begins)), 0, "\"%s\" does not begin with \"%s\"",
                 e.text, begins);
    cr_assert_not_null(strstr(e.text, says), "\"%s\" does not say \"%s\"", e.text, says);
}

static inline void check_refused(const char *begins, const char *says)
{
    memset(&e, 0, sizeof(e));
    cr_assert_eq(config_check(&c, &e), -EINVAL);
    expect_error(begins, says);
}

#endif
