#include "daemon/encryption/secrets.h"
#include "daemon/share/share_internal.h"

int share_secrets_open(struct share *s, void (*changed_cb)(void *ctx))
{
    const struct share_settings *set = &s->settings;

    if (!set->encryption || !set->secrets || set->secrets[0] == '\0')
        return 0;
    return secrets_open(set->loop, set->secrets, set->secrets_ms, changed_cb, s, &s->secrets);
}

void share_secrets_close(struct share *s)
{
    secrets_close(s->secrets);
}

int share_secret(struct share *s, const uint8_t fingerprint[UCM_FINGERPRINT_BYTES],
                 const uint8_t **secret)
{
    *secret = NULL;
    return s->secrets ? secrets_find(s->secrets, fingerprint, secret) : 0;
}

const char *share_secrets_problem(const struct share *s)
{
    return s && s->secrets ? secrets_problem(s->secrets) : NULL;
}
