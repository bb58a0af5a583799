/* What tenants are given, as people write it: "KEY=VALUE KEY=VALUE", in the configuration
 * (`tenant_settings`), in `ucmctl tenant set`, and in the file that keeps what that has set. Pure
 * functions, any thread. */
#ifndef UCMD_CONFIG_TENANTS_H
#define UCMD_CONFIG_TENANTS_H

#include "daemon/config/config.h"

/* A name: its settings are those of each tenant whose own say nothing. */
#define TENANT_ALL "*"

#define TENANT_SIZE_MAX (UINT64_C(1) << 50)

/* X(field, name, kind, min, max, initial): SIZE in bytes, or COUNT. Others can't evict what is
 * guaranteed of a tier; the tenant gets at most `most`. Connections, requests, memory and leased
 * bound what base/limit.h counts. 0 is no bound. */
#define TENANT_SETTINGS(X)                                                                         \
    X(weight, "weight", COUNT, 1, 10000, 100)                                                      \
    X(dram_min, "dram.min", SIZE, 0, TENANT_SIZE_MAX, 0)                                           \
    X(dram_max, "dram.max", SIZE, 0, TENANT_SIZE_MAX, 0)                                           \
    X(nvme_min, "nvme.min", SIZE, 0, TENANT_SIZE_MAX, 0)                                           \
    X(nvme_max, "nvme.max", SIZE, 0, TENANT_SIZE_MAX, 0)                                           \
    X(shared_min, "shared.min", SIZE, 0, TENANT_SIZE_MAX, 0)                                       \
    X(shared_max, "shared.max", SIZE, 0, TENANT_SIZE_MAX, 0)                                       \
    X(namespaces, "namespaces", COUNT, 1, 32768, 32768)                                            \
    X(connections, "connections", COUNT, 0, 65536, 0)                                              \
    X(requests, "requests", COUNT, 0, 65536, 0)                                                    \
    X(memory, "memory", SIZE, 0, TENANT_SIZE_MAX, 0)                                               \
    X(leased, "leased", SIZE, 0, TENANT_SIZE_MAX, 0)

enum tenant_key {
#define X(field, name, kind, min, max, initial) TENANT_KEY_##field,
    TENANT_SETTINGS(X)
#undef X
        TENANT_KEYS
};

struct tenant_settings {
    uint64_t given; /* bit by enum tenant_key: these were written */
#define X(field, name, kind, min, max, initial) uint64_t field;
    TENANT_SETTINGS(X)
#undef X
};

#define TENANT_WHY_BYTES 320
#define TENANT_TEXT_BYTES 704

/* What holds when nothing is written: by the table, and by the keys of `limits` (NULL: by the table
 * alone). None is `given`. */
struct tenant_settings tenant_settings_initial(const struct config *c);
/* Takes over "KEY=VALUE ..." what is in it. 0, or -EINVAL with a sentence; *s is untouched then. */
int tenant_settings_parse(const char *text, struct tenant_settings *s, char why[TENANT_WHY_BYTES]);
/* What is given, as tenant_settings_parse takes it. Returns text. */
char *tenant_settings_text(const struct tenant_settings *s, char text[TENANT_TEXT_BYTES]);
/* What `over` gives goes over what *s has. */
void tenant_settings_over(struct tenant_settings *s, const struct tenant_settings *over);

/* Whether a tenant may have this name: as `tenants` of the configuration takes it, or uid:N. */
bool tenant_name_possible(const char *name);
/* Splits an entry of `tenant_settings` into a name and what it is given. The same results as
 * above. */
int config_tenant(const char *item, char name[UCM_MAX_NAME_BYTES + 1], struct tenant_settings *s,
                  char why[TENANT_WHY_BYTES]);
/* Checks the values together: -EINVAL if a tenant is guaranteed more than its maximum. */
int tenant_settings_check(const struct tenant_settings *s, char why[TENANT_WHY_BYTES]);
/* Whether it gives a guarantee of any tier. */
bool tenant_gives_guarantee(const struct tenant_settings *s);
/* Adds what one tenant is guaranteed to *sum, whose fields were 0 before the first one. */
void tenant_guarantees_add(struct tenant_settings *sum, const struct tenant_settings *s);
/* -EINVAL when the sum is more than a tier of this configuration has. */
int tenant_guarantees_check(const struct config *c, const struct tenant_settings *sum,
                            char why[TENANT_WHY_BYTES]);
/* The whole list. 0, or -EINVAL with *e. */
int config_tenants_check(const struct config *c, struct config_error *e);

#endif
