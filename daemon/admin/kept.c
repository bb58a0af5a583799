/* Settings that operators give while the daemon runs, and the file that keeps them: a line for each
 * tenant, as `tenant_settings` has it. */
#include "daemon/admin/kept.h"

#include "daemon/base/log.h"
#include "daemon/base/text_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FILE_NAME "tenants"
#define NEW_NAME "tenants.new"
#define HEAD "# What 'ucmctl tenant set' has set. The daemon writes this file.\n"
#define LINE_BYTES (UCM_MAX_NAME_BYTES + TENANT_TEXT_BYTES + 2)
#define TEXT_BYTES (sizeof(HEAD) + TENANTS_KEPT_MAX * LINE_BYTES)

/* ---- what may be given ---- */

/* What the tenant would have if `s` came on top of what was given to `name`; NULL: in place of
 * it. */
static struct tenant_settings settings_with(const struct tenant_set *set, const struct tenant *t,
                                            const char *name, const struct tenant_settings *s)
{
    static const struct tenant_settings none = {.given = 0};
    bool all = strcmp(name, TENANT_ALL) == 0, own = t && strcmp(t->name, name) == 0;
    struct tenant_settings is = set->initial;

    tenant_settings_over(&is, &set->configured);
    tenant_settings_over(&is, all && !s ? &none : &set->kept);
    tenant_settings_over(&is, all && s ? s : &none);
    tenant_settings_over(&is, t ? &t->configured : &none);
    tenant_settings_over(&is, t && !(own && !s) ? &t->kept : &none);
    tenant_settings_over(&is, own && s ? s : &none);
    return is;
}

int tenant_give_check(struct tenant_set *set, const struct config *c, const char *name,
                      const struct tenant_settings *s, char why[TENANT_WHY_BYTES])
{
    bool all = strcmp(name, TENANT_ALL) == 0;
    const struct tenant *named = tenant_find(set, name);
    struct tenant_settings sum = {.given = 0}, is;

    if (s && all && tenant_gives_guarantee(s)) {
        snprintf(why, TENANT_WHY_BYTES,
                 "a guarantee is one tenant's; give it by name, not to " TENANT_ALL);
        return -EINVAL;
    }
    if (s && set->n_kept >= TENANTS_KEPT_MAX &&
        !(all ? set->kept.given : named && named->kept.given)) {
        snprintf(why, TENANT_WHY_BYTES,
                 "%u tenants have settings that were set so, as many as there may be; reset some",
                 TENANTS_KEPT_MAX);
        return -EINVAL;
    }
    for (const struct tenant *t = tenant_next(set, NULL); t; t = tenant_next(set, t)) {
        is = settings_with(set, t, name, s);
        if ((all || t == named) && tenant_settings_check(&is, why) != 0)
            return -EINVAL;
        tenant_guarantees_add(&sum, &is);
    }
    if (!named && !all) {
        is = settings_with(set, NULL, name, NULL);
        if (s)
            tenant_settings_over(&is, s);
        if (tenant_settings_check(&is, why) != 0)
            return -EINVAL;
        tenant_guarantees_add(&sum, &is);
    }
    return tenant_guarantees_check(c, &sum, why);
}

/* What the tenants of `set` would have under another configuration. 0 or -ENOMEM. */
static int trial_make(struct tenant_set *trial, const struct tenant_set *set,
                      const struct config *fresh)
{
    int rc = tenant_set_configure(trial, fresh);

    if (rc == 0 && set->kept.given)
        rc = tenant_give(trial, TENANT_ALL, &set->kept);
    for (struct tenant *t = tenant_next(set, NULL); rc == 0 && t; t = tenant_next(set, t))
        if (t->kept.given)
            rc = tenant_give(trial, t->name, &t->kept);
    return rc;
}

int tenant_configure_check(const struct tenant_set *set, const struct config *running,
                           const struct config *fresh, char why[TENANT_WHY_BYTES])
{
    struct tenant_settings sum = {.given = 0};
    struct tenant_set trial;
    int rc = tenant_set_init(&trial);

    if (rc == 0) {
        rc = trial_make(&trial, set, fresh);
        for (struct tenant *t = tenant_next(&trial, NULL); rc == 0 && t;
             t = tenant_next(&trial, t)) {
            rc = tenant_settings_check(&t->settings, why);
            tenant_guarantees_add(&sum, &t->settings);
        }
        tenant_set_close(&trial);
    }
    if (rc == -ENOMEM)
        snprintf(why, TENANT_WHY_BYTES, "memory ran out");
    return rc == 0 ? tenant_guarantees_check(running, &sum, why) : -EINVAL;
}

/* ---- the file ---- */

char *tenants_kept_text(const struct tenant_set *set)
{
    char *text = malloc(sizeof(HEAD) + (set->n_kept + 1) * LINE_BYTES), line[TENANT_TEXT_BYTES];
    size_t n = sizeof(HEAD) - 1;

    if (!text)
        return NULL;
    memcpy(text, HEAD, sizeof(HEAD));
    if (set->kept.given)
        n += (size_t)sprintf(text + n, TENANT_ALL " %s\n", tenant_settings_text(&set->kept, line));
    for (const struct tenant *t = tenant_next(set, NULL); t; t = tenant_next(set, t))
        if (t->kept.given)
            n +=
                (size_t)sprintf(text + n, "%s %s\n", t->name, tenant_settings_text(&t->kept, line));
    return text;
}

static int text_write(int directory, const char *text)
{
    size_t n = strlen(text);
    int fd =
        openat(directory, NEW_NAME, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644);
    ssize_t written;
    int rc = 0;

    if (fd < 0)
        return -errno;
    written = write(fd, text, n);
    if (written < 0)
        rc = -errno;
    else if ((size_t)written != n)
        rc = -ENOSPC;
    if (rc == 0 && fsync(fd) < 0)
        rc = -errno;
    if (close(fd) < 0 && rc == 0)
        rc = -errno;
    if (rc == 0 && renameat(directory, NEW_NAME, directory, FILE_NAME) < 0)
        rc = -errno;
    if (rc != 0)
        (void)unlinkat(directory, NEW_NAME, 0);
    return rc;
}

int tenants_kept_write(const char *directory, const char *text)
{
    int fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC), rc;

    if (fd < 0)
        return -errno;
    rc = text_write(fd, text);
    if (rc == 0 && fsync(fd) < 0)
        rc = -errno;
    (void)close(fd);
    return rc;
}

static void line_take(struct tenant_set *set, const struct config *c, const char *line)
{
    char name[UCM_MAX_NAME_BYTES + 1], why[TENANT_WHY_BYTES];
    struct tenant_settings s = {.given = 0};
    int rc = config_tenant(line, name, &s, why);

    if (rc == 0)
        rc = tenant_give_check(set, c, name, &s, why);
    if (rc == 0 && tenant_give(set, name, &s) == 0)
        return;
    log_error("tenant", "kept-settings-refused", "tenant=\"%.64s\" reason=\"%s\"", line,
              rc == 0 ? "memory ran out" : why);
}

void tenants_kept_read(struct tenant_set *set, const struct config *c)
{
    char path[CONFIG_SHOWN_BYTES], *text, *rest, *line;
    ssize_t n;

    if (c->state[0] == '\0')
        return;
    snprintf(path, sizeof(path), "%s/" FILE_NAME, c->state);
    if (faccessat(AT_FDCWD, path, F_OK, AT_SYMLINK_NOFOLLOW) < 0 && errno == ENOENT)
        return;
    text = malloc(TEXT_BYTES + 1);
    if (!text) {
        log_error("tenant", "kept-settings-refused", "reason=\"%s\"", "memory ran out");
        return;
    }
    n = text_file_read(AT_FDCWD, path, O_NOFOLLOW | O_NONBLOCK, text, TEXT_BYTES + 1);
    if (n < 0 && n != -ENOENT)
        log_error("tenant", "kept-settings-refused", "file=\"%s\" reason=\"%s\"", path,
                  strerror((int)-n));
    for (ssize_t i = 0; i < n; i++) /* damage is refused, and does not hide what follows */
        text[i] = text[i] == '\0' ? '?' : text[i];
    rest = n > 0 ? text : NULL;
    while ((line = strsep(&rest, "\n")))
        if (line[0] != '\0' && line[0] != '#')
            line_take(set, c, line);
    free(text);
}
