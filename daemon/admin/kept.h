/* Settings that operators give tenants, and that are kept over a restart. Thread: the event loop,
 * where nothing else is said. */
#ifndef UCMD_ADMIN_KEPT_H
#define UCMD_ADMIN_KEPT_H

#include "daemon/tenant/tenant.h"

#define TENANTS_KEPT_MAX 1024u /* tenants that have settings of this kind */

/* Whether the tenant may be given this on top of what it has (NULL: instead of what was given so):
 * by name, or TENANT_ALL. 0, or -EINVAL with a sentence. */
int tenant_give_check(struct tenant_set *set, const struct config *c, const char *name,
                      const struct tenant_settings *s, char why[TENANT_WHY_BYTES]);
/* Whether a reload may give what `fresh` says, besides what operators have given: guarantees in sum
 * against the sizes of the running configuration. 0, or -EINVAL with a sentence. */
int tenant_configure_check(const struct tenant_set *set, const struct config *running,
                           const struct config *fresh, char why[TENANT_WHY_BYTES]);
/* What was given to all tenants, as a text from malloc; NULL: no memory. */
char *tenants_kept_text(const struct tenant_set *set);
/* Writes such a text into the directory: whole, or not at all. 0 or -errno. Waits for the disk; any
 * thread. */
int tenants_kept_write(const char *directory, const char *text);
/* Loads what an earlier run wrote there. It skips and logs what is unreadable, or no longer fits
 * the configuration. */
void tenants_kept_read(struct tenant_set *set, const struct config *c);

#endif
