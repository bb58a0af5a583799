#include "client/pages/pages.h"

#include "daemon/config/table.h"
#include "daemon/usage.h"

#include <assert.h>
#include <string.h>

#define KEYS_BYTES 4096

/* "socket=|arena.size=|...", so that --set completes the names of keys. */
static const char *keys(void)
{
    static char text[KEYS_BYTES];
    size_t at = 0;

    for (size_t i = 0; i < config_key_count; i++) {
        if (config_keys[i].internal)
            continue;
        at += (size_t)snprintf(text + at, sizeof(text) - at, "%s%s=", at > 0 ? "|" : "",
                               config_keys[i].name);
        assert(at < sizeof(text));
    }
    return text;
}

/* --help and --version are every program's own. */
const struct program *pages_daemon(void)
{
    static struct arg_option options[ARGS_MAX_OPTIONS];
    static struct program daemon;
    size_t n = 0;

    for (size_t i = 0; i < usage_option_count; i++) {
        const struct usage_option *from = &usage_options[i];

        if (strcmp(from->name, "help") == 0 || strcmp(from->name, "version") == 0)
            continue;
        assert(n < ARGS_MAX_OPTIONS);
        options[n++] = (struct arg_option){
            .name = from->name,
            .kind = from->value == NULL ? ARG_FLAG : ARG_TEXT,
            .value = from->value,
            .help = from->help,
        };
    }
    daemon = (struct program){.name = "ucmd",
                              .version = UCM_VERSION,
                              .summary = usage_summary,
                              .help = usage_help,
                              .options = options,
                              .n_options = n};
    return &daemon;
}

bool pages_config_keys(const struct program *p, const struct arg_option *o, const char **words)
{
    if (p != pages_daemon() || strcmp(o->name, "set") != 0)
        return false;
    *words = keys();
    return true;
}
