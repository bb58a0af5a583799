#include "daemon/base/nfs_target.h"

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

/* The text up to '&' or the end is NAME=VALUE. `seen`: a bit for each option that came before. */
static const char *option_set(struct nfs_target *t, const char *at, size_t n, unsigned *seen)
{
    static const char *const names[] = {"version", "nfsport", "mountport", "uid", "gid"};
    const char *equals = memchr(at, '=', n);
    struct span name = {at, equals ? (size_t)(equals - at) : 0}, value;
    unsigned i = 0;

    if (!equals)
        return "an option is NAME=VALUE";
    value = (struct span){equals + 1, n - name.n - 1};
    while (i < sizeof(names) / sizeof(names[0]) && !span_is(name, names[i]))
        i++;
    if (*seen >> i & 1)
        return "each option may be given once";
    *seen |= 1u << i;
    switch (i) {
    case 0:
        return span_is(value, "3") ? NULL : "only version 3 of NFS is supported; write version=3";
    case 1:
        return option_port(value, &t->port);
    case 2:
        return option_port(value, &t->mount_port);
    case 3:
        return option_id(value, &t->uid);
    case 4:
        return option_id(value, &t->gid);
    default:
        return "options are version, nfsport, mountport, uid and gid";
    }
}

static const char *options_set(struct nfs_target *t, const char *at)
{
    const char *why = NULL;
    unsigned seen = 0;

    while (*at && !why) {
        size_t n = strcspn(at, "&");

        why = option_set(t, at, n, &seen);
        at += n;
        at += *at == '&';
    }
    return why;
}

/* "[2001:db8::1]" or a name without a colon, then an optional ":port". Moves *at to the path. */
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
        return "the address lacks its closing bracket; brackets enclose IPv6 addresses";
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
        return "write the path of the export behind the server, e.g. nfs://server/export/kv";
    memcpy(t->export, at, n);
    at += n;
    return options_set(t, *at ? at + 1 : at);
}

int nfs_target_parse(const char *text, struct nfs_target *out, const char **why)
{
    struct nfs_target t = {.port = NFS_PORT, .uid = -1, .gid = -1};

    if (strncmp(text, SCHEME, strlen(SCHEME)) != 0)
        *why = "an NFS target begins with nfs://";
    else
        *why = target_set(&t, text + strlen(SCHEME));
    if (*why)
        return -EINVAL;
    *out = t;
    return 0;
}
