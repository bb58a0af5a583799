#include "daemon/front/peer.h"

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

static void tenant_find(const struct config *config, const struct ucred *cred, struct peer *peer)
{
    for (size_t i = 0; i < config->tenants.n; i++) {
        const char *rule = config->tenants.item[i];
        size_t name = strcspn(rule, " ");

        if (name <= UCM_MAX_NAME_BYTES && names_peer(rule + name, cred)) {
            memcpy(peer->tenant, rule, name);
            peer->tenant[name] = '\0';
            return;
        }
    }
    snprintf(peer->tenant, sizeof(peer->tenant), "uid:%u", (unsigned)cred->uid);
}

int peer_identify(int fd, const struct config *config, struct peer *peer)
{
    struct ucred cred;
    socklen_t len = sizeof(cred);

    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &len) != 0)
        return -errno;
    *peer = (struct peer){.uid = cred.uid, .gid = cred.gid, .pid = cred.pid, .fd = fd};
    peer->admin = cred.uid == 0 || cred.uid == geteuid();
    for (size_t i = 0; i < config->admins.n; i++)
        peer->admin |= names_peer(config->admins.item[i], &cred);
    tenant_find(config, &cred, peer);
    return 0;
}

bool peer_stopped(pid_t pid)
{
    char path[32], text[512], *end;
    ssize_t n;
    int fd;

    snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    n = read(fd, text, sizeof(text) - 1);
    close(fd);
    if (n <= 0)
        return false;
    text[n] = '\0';
    end = strrchr(text, ')'); /* the name before it may hold anything */
    return end && end[1] == ' ' && (end[2] == 'T' || end[2] == 't');
}
