/* The configuration from variables, which go over the file: for containers without one. */
#include "daemon/config/table.h"

#include <ctype.h>
#include <string.h>

#define PREFIX "UCMD_"

static const struct config_key *key_of(const char *variable)
{
    char name[CONFIG_VARIABLE_BYTES];

    for (size_t i = 0; i < config_key_count; i++)
        if (strcmp(config_variable(config_keys[i].name, name), variable) == 0)
            return &config_keys[i];
    return NULL;
}

/* "9471_TCP", "9471_TCP_ADDR" */
static bool is_port_of_service(const char *text)
{
    size_t digits = strspn(text, "0123456789");

    return digits > 0 &&
           (strncmp(text + digits, "_TCP", 4) == 0 || strncmp(text + digits, "_UDP", 4) == 0 ||
            strncmp(text + digits, "_SCTP", 5) == 0);
}

/* Kubernetes sets some for every service of a pod's namespace, one named ucmd or ucmd-metrics too:
 * what it names UCMD_METRICS_SERVICE_HOST, UCMD_METRICS_PORT and so on is nobody's mistake.
 * UCMD_KILL_AT is the tests' own. */
static bool is_others(const char *variable, const char *value)
{
    static const char service[] = "_SERVICE_", port[] = "_PORT";
    const char *at = strstr(variable, service);

    if (at && (strcmp(at, "_SERVICE_HOST") == 0 || strncmp(at, "_SERVICE_PORT", 13) == 0))
        return true;
    for (at = strstr(variable, port); at; at = strstr(at + 1, port)) {
        const char *rest = at + strlen(port);

        if ((*rest == '\0' && strstr(value, "://")) ||
            (*rest == '_' && is_port_of_service(rest + 1)))
            return true;
    }
    return strcmp(variable, PREFIX "KILL_AT") == 0;
}

/* "UCMD_ARENA_SISE" as "arena.sise" if there is such a section. */
static void key_guess(const char *variable, char name[CONFIG_VARIABLE_BYTES])
{
    size_t n = 0;

    for (const char *p = variable + strlen(PREFIX); *p; p++)
        name[n++] = (char)tolower((unsigned char)*p);
    name[n] = '\0';
    for (size_t i = 1; i < config_section_count; i++) {
        size_t length = strlen(config_sections[i].name);

        if (strncmp(name, config_sections[i].name, length) == 0 && name[length] == '_') {
            name[length] = '.';
            return;
        }
    }
}

static int refuse_unknown(const char *variable, struct config_error *e)
{
    char name[CONFIG_VARIABLE_BYTES], near_name[CONFIG_VARIABLE_BYTES];
    const char *near;

    key_guess(variable, name);
    near = config_key_nearest(name);
    if (near && config_key_find(near))
        return config_refuse(e, "%s: there is no such key; did you mean %s?", variable,
                             config_variable(near, near_name));
    return config_refuse(e, "%s: there is no such key; 'ucmd --check' lists all keys", variable);
}

static int variable_set(struct config *c, const char *assignment, struct config_error *e)
{
    const char *equals = strchr(assignment, '=');
    char variable[4 * CONFIG_VARIABLE_BYTES];
    const struct config_key *k;
    size_t n = equals ? (size_t)(equals - assignment) : 0;
    int rc;

    if (n <= strlen(PREFIX) || memcmp(assignment, PREFIX, strlen(PREFIX)) != 0)
        return 0;
    *e = (struct config_error){.line = CONFIG_LINE_ENV};
    if (n >= sizeof(variable))
        return config_refuse(e, "%.60s...: there is no such key", assignment);
    memcpy(variable, assignment, n);
    variable[n] = '\0';
    k = key_of(variable);
    if (!k && is_others(variable, equals + 1))
        return 0;
    if (n >= CONFIG_VARIABLE_BYTES)
        return config_refuse(e, "%.60s...: there is no such key", assignment);
    if (!k)
        return refuse_unknown(variable, e);
    e->key = k->name;
    rc = config_value_set(c, k, equals + 1, e);
    if (rc == 0)
        c->origin.line[config_key_index(k)] = CONFIG_LINE_ENV;
    return rc;
}

int config_environment(struct config *c, char *const *environment, struct config_error *e)
{
    int rc = 0;

    for (; rc == 0 && *environment; environment++)
        rc = variable_set(c, *environment, e);
    return rc;
}
