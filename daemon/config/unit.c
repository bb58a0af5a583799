#include "daemon/config/unit.h"

#include "daemon/config/roots.h"

#include <libgen.h>
#include <string.h>

static bool is_below(const char *path, const char *directory)
{
    size_t n = strlen(directory);

    return strncmp(path, directory, n) == 0 && (path[n] == '/' || path[n] == '\0');
}

static bool is_below_any(const char *path, const char *const *directories)
{
    for (; *directories; directories++)
        if (is_below(path, *directories))
            return true;
    return false;
}

/* A path as a word of a unit file; "%" begins a specifier there. */
static void print_word(FILE *out, const char *text)
{
    fputc('"', out);
    for (; *text; text++) {
        if (*text == '"' || *text == '\\')
            fputc('\\', out);
        if (*text == '%')
            fputc('%', out);
        fputc(*text, out);
    }
    fputc('"', out);
}

static void print_path(FILE *out, const char *setting, const char *path)
{
    char word[CONFIG_ITEM_BYTES + 2];

    snprintf(word, sizeof(word), "-%s", path);
    fprintf(out, "%s=", setting);
    print_word(out, word);
    fputc('\n', out);
}

/* What a directory needs that the daemon writes to. "-": one that is missing stops no start; what
 * is mounted later comes into the sandbox with the rights of its mount. */
static void print_directory(FILE *out, const char *path)
{
    static const char *const homes[] = {"/home", "/root", "/run/user", NULL};
    static const char *const temporary[] = {"/tmp", "/var/tmp", NULL};
    static const char *const writable[] = {"/var/lib/ucmd", "/run/ucmd", "/dev", NULL};

    if (path[0] != '/' || is_below_any(path, writable))
        return;
    if (is_below_any(path, homes)) {
        fputs("ProtectHome=tmpfs\n", out);
        print_path(out, "BindPaths", path);
        return;
    }
    if (is_below_any(path, temporary))
        fputs("PrivateTmp=no\n", out);
    print_path(out, "ReadWritePaths", path);
}

static void print_nvme(const struct config *c, FILE *out)
{
    for (size_t i = 0; i < c->nvme_paths.n; i++) {
        const char *path = c->nvme_paths.item[i];

        print_directory(out, path);
        if (is_below(path, "/dev") && !is_below(path, "/dev/shm")) {
            fputs("DeviceAllow=", out);
            print_word(out, path);
            fputs(" rw\n", out);
        }
    }
    print_directory(out, c->nvme_state);
}

int config_unit_print(const struct config *c, FILE *out, struct config_error *e)
{
    struct config_root roots[UCM_MAX_ROOTS];
    bool network = false;
    char socket[CONFIG_ITEM_BYTES];
    uint32_t n;
    int rc = config_roots(c, roots, &n, e);

    if (rc < 0)
        return rc;
    fputs("[Service]\n", out);
    print_nvme(c, out);
    print_directory(out, c->arena_persist_dir);
    print_directory(out, c->state);
    print_directory(out, c->encryption_secrets);
    print_directory(out, c->copy_calibration);
    snprintf(socket, sizeof(socket), "%s", c->metrics_socket);
    print_directory(out, dirname(socket));
    for (uint32_t i = 0; i < n; i++) {
        const struct config_process *process = &roots[i].process;

        network = network || process->network;
        if (process->directory[0] && !(roots[i].target[0] == '/' && roots[i].read_only))
            print_directory(out, process->directory);
    }
    if (c->socket_group[0]) {
        fputs("# For the socket that is given to socket_group\nSupplementaryGroups=", out);
        print_word(out, c->socket_group);
        fputs("\nSystemCallFilter=@chown\n", out);
    }
    if (network || c->metrics_listen[0])
        fputs("# For nfs://, s3:// and mooncake:// roots, backends with `network` and "
              "metrics.listen\n"
              "PrivateNetwork=no\n"
              "RestrictAddressFamilies=AF_INET AF_INET6\n"
              "IPAddressAllow=any\n",
              out);
    return 0;
}
