#include "daemon/reload.h"

#include "daemon/admin/kept.h"
#include "daemon/base/log.h"
#include "daemon/cache/cache.h"
#include "daemon/index/index.h"
#include "daemon/notify.h"
#include "daemon/request/request.h"

#include <stdio.h>
#include <stdlib.h>

/* "a,b": the keys that a reload changed, or those that need a restart. */
static const char *keys_text(const struct config_changes *changes, bool restart, char *out,
                             size_t size)
{
    size_t n = 0;

    out[0] = '\0';
    for (uint32_t i = 0; i < changes->n && n < size; i++)
        if (changes->change[i].restart == restart)
            n += (size_t)snprintf(out + n, size - n, "%s%s", n > 0 ? "," : "",
                                  changes->change[i].key);
    return out;
}

static void changes_log(const struct config_changes *changes)
{
    char changed[400], restart[400];

    log_info("server", "reloaded", "changed=%s need_restart=%s",
             keys_text(changes, false, changed, sizeof(changed)),
             keys_text(changes, true, restart, sizeof(restart)));
}

static int tenants_check(const struct reload *r, const struct config *fresh, struct config_error *e)
{
    char why[TENANT_WHY_BYTES];

    if (tenant_configure_check(index_tenants(r->index), r->config, fresh, why) == 0)
        return 0;
    return config_fail(fresh, e, "tenant_settings", "with what 'ucmctl tenant set' has set: %s",
                       why);
}

int reload_cb(void *ctx, struct config_changes *changes, struct config_error *e)
{
    struct reload *r = ctx;
    struct config fresh;
    int rc;

    notify_reloading();
    config_init(&fresh);
    rc = config_read_all(&fresh, r->sources, e);
    if (rc == 0)
        rc = config_check_values(&fresh, e);
    if (rc == 0)
        rc = tenants_check(r, &fresh, e);
    if (rc == 0) {
        config_reload(r->config, &fresh, changes);
        log_set_level(r->config->log_level);
        if (tenant_set_configure(index_tenants(r->index), r->config) != 0)
            log_error("server", "tenant-settings", "reason=\"%s\"", "memory ran out");
        cache_tenants_changed(r->cache);
        requests_reloaded(r->requests);
        changes_log(changes);
        config_free(&r->next);
        r->next = fresh;
    } else {
        log_error("server", "reload-refused", "reason=\"%s\"", e->text);
        e->file = e->file ? r->sources->path : NULL; /* fresh owns what it points to */
        config_free(&fresh);
    }
    notify_ready("Serving");
    return rc;
}

void reload_by_signal(struct reload *r)
{
    struct config_changes *changes;
    struct config_error e;

    if (!r->sources->path) {
        log_warn("server", "reload-skipped", "reason=\"%s\"", "started without --config");
        return;
    }
    changes = malloc(sizeof(*changes));
    if (changes)
        reload_cb(r, changes, &e);
    else
        log_error("server", "reload-refused", "reason=\"%s\"", "memory ran out");
    free(changes);
}
