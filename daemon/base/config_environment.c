/* The configuration from variables, which go over the file: for containers without one. */
#include "daemon/base/config_table.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

#define PREFIX "UCMD_"

const char *config_variable(const char *key, char buf[CONFIG_VARIABLE_BYTES])
{
    size_t n = (size_t)snprintf(buf, CONFIG_VARIABLE_BYTES, PREFIX "%s", key);

    for (size_t i = 0; i < n && i < CONFIG_VARIABLE_BYTES; i++)
        buf[i] = buf[i] == '.' ? '_' : (char)toupper((unsigned char)buf[i]);
    return buf;
}

static const struct config_key *key_of(const char *variable)
{
    char name[CONFIG_VARIABLE_BYTES];

    for (size_t i = 0; i < config_key_count; i++)
        if (strcmp(config_variable(config_keys[i].name, name), variable) == 0)
            return &config_keys[i];
    return NULL;
}

/* Kubernetes sets some for every service of a pod's namespace, one named ucmd too. UCMD_KILL_AT is the
 * tests' own. */
static bool is_others(const char *variable)
{
    static const char *const begins[] = {PREFIX "SERVICE_", PREFIX "PORT_"};

    for (size_t i = 0; i < sizeof(begins) / sizeof(begins[0]); i++)
        if (strncmp(variable, begins[i], strlen(begins[i])) == 0)
            return true;
    return strcmp(variable, PREFIX "PORT") == 0 || strcmp(variable, PREFIX "KILL_AT") == 0;
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
    char variable[CONFIG_VARIABLE_BYTES];
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
    if (is_others(variable))
        return 0;
    k = key_of(variable);
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
