/* Any bytes as a configuration file: refused with a sentence, or read, printed and read back equal.
 */
#include "daemon/config/table.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int read_bytes(struct config *c, const void *data, size_t size, struct config_error *e)
{
    char path[64];
    int fd = memfd_create("fuzz", MFD_CLOEXEC), rc;

    if (fd < 0 || write(fd, data, size) != (ssize_t)size)
        abort();
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    rc = config_read(c, path, e);
    close(fd);
    return rc;
}

/* Catches what config_print writes, in place of standard output. */
static char *print(const struct config *c, size_t *n)
{
    FILE *saved = stdout;
    char *text = NULL;

    stdout = open_memstream(&text, n);
    if (!stdout)
        abort();
    config_print(c);
    fclose(stdout);
    stdout = saved;
    return text;
}

static void read_back(const struct config *c)
{
    struct config_error e;
    struct config back;
    size_t n;
    char *text = print(c, &n);

    config_init(&back);
    if (read_bytes(&back, text, n, &e) < 0)
        abort();
    for (size_t i = 0; i < config_key_count; i++)
        if (!config_value_equal(c, &back, &config_keys[i]))
            abort();
    config_free(&back);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct config_error e = {.text = ""};
    struct config c;

    config_init(&c);
    if (read_bytes(&c, data, size, &e) == 0)
        read_back(&c);
    else if (e.text[0] == '\0')
        abort();
    config_free(&c);
    return 0;
}
