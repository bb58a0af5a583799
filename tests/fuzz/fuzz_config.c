/* Any bytes as a configuration file: refused with a sentence, or read, printed and read back equal.
 */
#include "daemon/config/table.h"
#include "tests/fuzz/fuzz.h"

#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

static int read_bytes(struct config *c, const void *data, size_t size, struct config_error *e)
{
    char path[64];
    int fd = memfd_create("fuzz", MFD_CLOEXEC), rc;

    must(fd >= 0 && write(fd, data, size) == (ssize_t)size);
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
    must(stdout != NULL);
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
    must(read_bytes(&back, text, n, &e) == 0);
    for (size_t i = 0; i < config_key_count; i++)
        must(config_value_equal(c, &back, &config_keys[i]));
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
    else
        must(e.text[0] != '\0');
    config_free(&c);
    return 0;
}
