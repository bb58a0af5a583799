#include "daemon/front/peer.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* One word of a rule: "uid:1000" or "gid:200"; config_check has seen its syntax. */
static bool word_matches(const char *word, const struct ucred *cred)
{
    unsigned long id;

    if (strncmp(word, "uid:", 4) != 0 && strncmp(word, "gid:", 4) != 0)
        return false;
    id = strtoul(word + 4, NULL, 10);
    return word[0] == 'u' ? id == cred->uid : id == cred->gid;
}

/* Whether any word of the rule, from the second on when skip_name is set, names the peer. */
static bool rule_matches(const char *rule, bool skip_name, const struct ucred *cred)
{
    char copy[1024], *save = NULL, *word;

    if (snprintf(copy, sizeof(copy), "%s", rule) >= (int)sizeof(copy))
        return false;
    word = strtok_r(copy, " \t", &save);
    if (skip_name && word)
        word = strtok_r(NULL, " \t", &save);
    for (; word; word = strtok_r(NULL, " \t", &save))
        if (word_matches(word, cred))
            return true;
    return false;
}

static void tenant_find(const struct config *config, const struct ucred *cred, struct peer *peer)
{
    for (size_t i = 0; i < config->tenants.n; i++) {
        const char *rule = config->tenants.item[i];
        size_t name = strcspn(rule, " \t");

        if (name <= UCM_MAX_NAME_BYTES && rule_matches(rule, true, cred)) {
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
        peer->admin |= rule_matches(config->admins.item[i], false, &cred);
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
