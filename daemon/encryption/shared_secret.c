#include "daemon/encryption/secrets.h"
#include "daemon/shared/shared_internal.h"

int shared_secrets_open(struct shared *s, void (*changed_cb)(void *ctx))
{
    const struct shared_settings *set = &s->settings;

    if (!set->encryption || !set->secrets || set->secrets[0] == '\0')
        return 0;
    return secrets_open(set->loop, set->secrets, set->secrets_ms, changed_cb, s, &s->secrets);
}

void shared_secrets_close(struct shared *s)
{
    secrets_close(s->secrets);
}

int shared_secret(struct shared *s, const uint8_t fingerprint[UCM_FINGERPRINT_BYTES],
                  const uint8_t **secret)
{
    *secret = NULL;
    return s->secrets ? secrets_find(s->secrets, fingerprint, secret) : 0;
}

const char *shared_secrets_problem(const struct shared *s)
{
    return s && s->secrets ? secrets_problem(s->secrets) : NULL;
}
