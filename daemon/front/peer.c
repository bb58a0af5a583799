#include "daemon/front/peer.h"

#include "daemon/base/log.h"
#include "daemon/base/text_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* Whether "uid:1000 gid:200" names the peer. */
static bool names_peer(const char *members, const struct ucred *cred)
{
    bool is_gid;
    uint32_t id;

    for (size_t n; *members; members += n + (members[n] == ' ')) {
        n = strcspn(members, " ");
        if (config_principal(members, n, &is_gid, &id) && id == (is_gid ? cred->gid : cred->uid))
            return true;
    }
    return false;
}

/* The length of the longest "cgroup:PATH" among the members that the peer's cgroup is, or lies in;
 * 0: none. */
static size_t names_cgroup(const char *members, const char *cgroup)
{
    size_t best = 0, bytes;

    for (size_t n; *members; members += n + (members[n] == ' ')) {
        const char *path;

        n = strcspn(members, " ");
        path = config_cgroup(members, n, &bytes);
        if (path && bytes > best && strncmp(path, cgroup, bytes) == 0 &&
            (cgroup[bytes] == '/' || cgroup[bytes] == '\0' || bytes == 1))
            best = bytes;
    }
    return best;
}

/* The rule of the peer's tenant, or NULL. */
static const char *rule_find(const struct config_list *tenants, const struct ucred *cred,
                             const char *cgroup)
{
    const char *by_cgroup = NULL, *by_id = NULL;
    size_t best = 0;

    for (size_t i = 0; i < tenants->n; i++) {
        const char *rule = tenants->item[i], *members = rule + strcspn(rule, " ");
        size_t bytes = names_cgroup(members, cgroup);

        if (bytes > best) {
            best = bytes;
            by_cgroup = rule;
        }
        if (!by_id && names_peer(members, cred))
            by_id = rule;
    }
    return by_cgroup ? by_cgroup : by_id;
}

static void tenant_find(const struct config *config, const struct ucred *cred, const char *cgroup,
                        struct peer *peer)
{
    const char *rule = rule_find(&config->tenants, cred, cgroup);
    size_t n = rule ? strcspn(rule, " ") : 0;

    if (n > 0 && n <= UCM_MAX_NAME_BYTES) {
        memcpy(peer->tenant, rule, n);
        peer->tenant[n] = '\0';
        return;
    }
    snprintf(peer->tenant, sizeof(peer->tenant), "uid:%u", (unsigned)cred->uid);
    if (cred->uid == 0 && peer->place == PLACE_CONTAINER)
        log_warn("front", "container-shares",
                 "pid=%d tenant=uid:0 cgroup=%.200s hint=\"all containers that run as root are one "
                 "tenant, unless tenants names their cgroups\"",
                 (int)cred->pid, cgroup);
}

bool peer_may_be_admin(const struct config *config, const struct ucred *cred)
{
    bool named = cred->uid == 0 || cred->uid == geteuid();

    for (size_t i = 0; i < config->admins.n; i++)
        named |= names_peer(config->admins.item[i], cred);
    return named;
}

static bool is_admin(const struct config *config, const struct ucred *cred, enum peer_place place)
{
    return peer_may_be_admin(config, cred) &&
           (place == PLACE_HERE || (place == PLACE_CONTAINER && config->container_admins));
}

static bool has_cgroups(const struct config_list *tenants)
{
    for (size_t i = 0; i < tenants->n; i++)
        if (strstr(tenants->item[i], " cgroup:"))
            return true;
    return false;
}

int peer_identify(int fd, const struct config *config, struct peer *peer, struct ucm_error *e)
{
    char cgroup[PLACE_CGROUP_BYTES];
    struct ucred cred;
    socklen_t len = sizeof(cred);

    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &len) != 0)
        return ucm_error_set(e, UCM_WIRE_DENIED, "the kernel does not say who you are: %s",
                             strerror(errno));
    *peer = (struct peer){.uid = cred.uid, .gid = cred.gid, .pid = cred.pid, .fd = fd};
    peer->place = place_read(fd, cred.pid, cgroup);
    if (cgroup[0] == '\0' && has_cgroups(&config->tenants))
        return ucm_error_set(
            e, UCM_WIRE_DENIED,
            "the daemon can't see the cgroup of process %d, and its `tenants` names cgroups; the "
            "process must live while it connects, and be in a PID namespace that the daemon sees",
            (int)cred.pid);
    peer->admin = is_admin(config, &cred, peer->place);
    tenant_find(config, &cred, cgroup, peer);
    return 0;
}

bool peer_is_own(const struct peer *peer, const struct config *config)
{
    struct ucred cred = {.pid = getpid(), .uid = geteuid(), .gid = getegid()};
    struct peer own = {.place = PLACE_HERE};
    char cgroup[PLACE_CGROUP_BYTES];

    place_own_cgroup(cgroup);
    tenant_find(config, &cred, cgroup, &own);
    return strcmp(own.tenant, peer->tenant) == 0;
}

bool peer_stopped(pid_t pid)
{
    char path[32], text[512], *end;

    snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    if (text_file_read(AT_FDCWD, path, 0, text, sizeof(text)) <= 0)
        return false;
    end = strrchr(text, ')'); /* the name before it may hold anything */
    return end && end[1] == ' ' && (end[2] == 'T' || end[2] == 't');
}
