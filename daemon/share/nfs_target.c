#include "daemon/share/nfs_target.h"

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define SCHEME "nfs://"
#define NFS_PORT 2049

struct span {
    const char *at;
    size_t n;
};

static bool span_is(struct span s, const char *word)
{
    return s.n == strlen(word) && memcmp(s.at, word, s.n) == 0;
}

static bool span_number(struct span s, uint64_t max, uint64_t *out)
{
    uint64_t value = 0;

    if (s.n == 0 || s.n > 10)
        return false;
    for (size_t i = 0; i < s.n; i++) {
        if (s.at[i] < '0' || s.at[i] > '9')
            return false;
        value = 10 * value + (uint64_t)(s.at[i] - '0');
    }
    if (value > max)
        return false;
    *out = value;
    return true;
}

static const char *option_port(struct span value, uint16_t *out)
{
    uint64_t n;

    if (!span_number(value, UINT16_MAX, &n) || n == 0)
        return "a port is a number from 1 to 65535";
    *out = (uint16_t)n;
    return NULL;
}

static const char *option_id(struct span value, int64_t *out)
{
    uint64_t n;

    if (!span_number(value, INT32_MAX, &n))
        return "uid and gid are numbers";
    *out = (int64_t)n;
    return NULL;
}

static const char *option_set(struct nfs_target *t, struct span name, struct span value)
{
    if (span_is(name, "version"))
        return span_is(value, "3") ? NULL : "version 3 of NFS is spoken, no other";
    if (span_is(name, "nfsport"))
        return option_port(value, &t->port);
    if (span_is(name, "mountport"))
        return option_port(value, &t->mount_port);
    if (span_is(name, "uid"))
        return option_id(value, &t->uid);
    if (span_is(name, "gid"))
        return option_id(value, &t->gid);
    return "options are version, nfsport, mountport, uid and gid";
}

static const char *options_set(struct nfs_target *t, const char *at)
{
    while (*at) {
        size_t n = strcspn(at, "&");
        const char *equals = memchr(at, '=', n), *why;

        if (!equals)
            return "an option is NAME=VALUE";
        why = option_set(t, (struct span){at, (size_t)(equals - at)},
                         (struct span){equals + 1, n - (size_t)(equals - at) - 1});
        if (why)
            return why;
        at += n;
        at += *at == '&';
    }
    return NULL;
}

/* "[2001:db8::1]" or what has no colon, then perhaps ":port". *at is then at the path. */
static const char *server_set(struct nfs_target *t, const char **at)
{
    bool bracket = **at == '[';
    struct span name = {*at + bracket, 0};
    const char *end;

    name.n = strcspn(name.at, bracket ? "]" : ":/?");
    if (name.n == 0 || name.n >= sizeof(t->server))
        return "a target is nfs://SERVER/EXPORT";
    end = name.at + name.n;
    if (bracket && *end++ != ']')
        return "an address in brackets ends with one";
    memcpy(t->server, name.at, name.n);
    if (*end == ':') {
        struct span port = {end + 1, strcspn(end + 1, "/?")};
        const char *why = option_port(port, &t->port);

        if (why)
            return why;
        end = port.at + port.n;
    }
    *at = end;
    return NULL;
}

static const char *target_set(struct nfs_target *t, const char *at)
{
    const char *why = server_set(t, &at);
    size_t n = strcspn(at, "?");

    if (why)
        return why;
    if (n < 2 || *at != '/' || n >= sizeof(t->export))
        return "behind the server stands the export's path, e.g. nfs://server/export/kv";
    memcpy(t->export, at, n);
    at += n;
    return options_set(t, *at ? at + 1 : at);
}

int nfs_target_parse(const char *text, struct nfs_target *out, const char **why)
{
    struct nfs_target t = {.port = NFS_PORT, .uid = -1, .gid = -1};

    if (strncmp(text, SCHEME, strlen(SCHEME)) != 0)
        *why = "a target of NFS begins with nfs://";
    else
        *why = target_set(&t, text + strlen(SCHEME));
    if (*why)
        return -EINVAL;
    *out = t;
    return 0;
}
