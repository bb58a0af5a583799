/* What a reload changes, and what it leaves for the next start. */
#include "daemon/config/table.h"

#include <string.h>

/* Both own what their fields point to, so the fields themselves change places. */
static void exchange(struct config *a, struct config *b, const struct config_key *k)
{
    static const size_t bytes[] = {
        [CONFIG_SIZE] = sizeof(uint64_t), [CONFIG_DURATION] = sizeof(uint64_t),
        [CONFIG_INT] = sizeof(unsigned),  [CONFIG_OCTAL] = sizeof(unsigned),
        [CONFIG_BOOL] = sizeof(bool),     [CONFIG_ENUM] = sizeof(unsigned),
        [CONFIG_STRING] = sizeof(char *), [CONFIG_LIST] = sizeof(struct config_list),
    };
    unsigned char field[sizeof(struct config_list)];
    size_t n = bytes[k->kind];

    memcpy(field, config_field(a, k), n);
    memcpy(config_field(a, k), config_field(b, k), n);
    memcpy(config_field(b, k), field, n);
}

void config_reload(struct config *c, struct config *fresh, struct config_changes *changes)
{
    changes->n = 0;
    for (size_t i = 0; i < config_key_count; i++) {
        const struct config_key *k = &config_keys[i];
        uint32_t *line = &c->origin.line[i];
        struct config_change *change = &changes->change[changes->n];

        if (*line == CONFIG_LINE_SET || *line == CONFIG_LINE_ENV)
            continue;
        if (config_value_equal(c, fresh, k)) {
            *line = fresh->origin.line[i];
            continue;
        }
        *change = (struct config_change){.key = k->name, .restart = !k->reloadable};
        config_shown(c, k, change->from);
        config_shown(fresh, k, change->to);
        changes->n++;
        if (k->reloadable) {
            exchange(c, fresh, k);
            *line = fresh->origin.line[i];
        } else if (*line != 0) {
            *line = CONFIG_LINE_EARLIER;
        }
    }
}
