#include "daemon/backend/nfs/target.h"

#include "proto/units.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define SCHEME "nfs://"
#define PORT_WRONG "a port is a number from 1 to 65535"
#define ID_WRONG "uid and gid are numbers"

enum { VERSION, PORT, MOUNT_PORT, UID, GID, OPTIONS };

static const struct {
    const char *name;
    uint64_t min, max;
    const char *wrong;
} options[OPTIONS] = {
    [VERSION] = {"version", 3, 3, "only version 3 of NFS is supported; write version=3"},
    [PORT] = {"nfsport", 1, UINT16_MAX, PORT_WRONG},
    [MOUNT_PORT] = {"mountport", 1, UINT16_MAX, PORT_WRONG},
    [UID] = {"uid", 0, INT32_MAX, ID_WRONG},
    [GID] = {"gid", 0, INT32_MAX, ID_WRONG},
};

/* The functions below return NULL, or what is wrong. They cut the text into strings. */

static const char *value_set(int64_t value[OPTIONS], unsigned i, const char *text)
{
    char why[UNITS_WHY_BYTES];
    uint64_t n;

    if (units_parse_count(text, &n, why) < 0 || n < options[i].min || n > options[i].max)
        return options[i].wrong;
    value[i] = (int64_t)n;
    return NULL;
}

/* "NAME=VALUE&NAME=VALUE" or "" */
static const char *options_set(int64_t value[OPTIONS], char *text)
{
    const char *why = NULL, *name;
    unsigned seen = 0, i;

    while (!why && text && *text) {
        char *rest = strsep(&text, "&");

        name = strsep(&rest, "=");
        for (i = 0; i < OPTIONS && strcmp(options[i].name, name) != 0; i++)
            ;
        if (!rest)
            why = "an option is NAME=VALUE";
        else if (i == OPTIONS)
            why = "options are version, nfsport, mountport, uid and gid";
        else if (seen >> i & 1)
            why = "each option may be given once";
        else
            why = value_set(value, i, rest);
        seen |= 1u << i;
    }
    return why;
}

/* "[2001:db8::1]" or a name without a colon, then an optional ":port" */
static const char *server_set(struct nfs_target *t, int64_t value[OPTIONS], char *text)
{
    char *end = text + strcspn(text, ":");

    if (*text == '[') {
        end = strchr(++text, ']');
        if (!end)
            return "the address lacks its closing bracket; brackets enclose IPv6 addresses";
        *end++ = '\0';
    }
    if (*end != '\0' && *end != ':')
        return "write a slash, or a colon and the port, after the address";
    if (*end == ':') {
        *end++ = '\0';
        if (value_set(value, PORT, end) != NULL)
            return PORT_WRONG;
    }
    if (*text == '\0' || strlen(text) >= sizeof(t->server))
        return "a target is nfs://SERVER/EXPORT";
    memcpy(t->server, text, strlen(text) + 1);
    return NULL;
}

static const char *target_set(struct nfs_target *t, char *text)
{
    int64_t value[OPTIONS] = {[PORT] = 2049, [UID] = -1, [GID] = -1};
    char *query = text, *server = strsep(&query, "?"), *export = strchr(server, '/');
    const char *why;

    if (!export || export[1] == '\0' || strlen(export) >= sizeof(t->export))
        return "write the path of the export after the server, e.g. nfs://server/export/kv";
    memcpy(t->export, export, strlen(export) + 1);
    *export = '\0';
    why = server_set(t, value, server);
    if (!why)
        why = options_set(value, query);
    t->port = (uint16_t)value[PORT];
    t->mount_port = (uint16_t)value[MOUNT_PORT];
    t->uid = value[UID];
    t->gid = value[GID];
    return why;
}

int nfs_target_parse(const char *text, struct nfs_target *out, const char **why)
{
    struct nfs_target t;
    char copy[NFS_SERVER_CAP + NFS_EXPORT_CAP + 256];

    if (strncmp(text, SCHEME, strlen(SCHEME)) != 0)
        *why = "an NFS target begins with nfs://";
    else if (snprintf(copy, sizeof(copy), "%s", text + strlen(SCHEME)) >= (int)sizeof(copy))
        *why = "the target is too long";
    else
        *why = target_set(&t, copy);
    if (*why)
        return -EINVAL;
    *out = t;
    return 0;
}
