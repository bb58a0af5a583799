#include "daemon/encryption/secrets.h"
#include "daemon/shared/shared_internal.h"

#include <string.h>

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

int shared_file_fingerprint(struct shared *s, const uint8_t fingerprint[UCM_FINGERPRINT_BYTES],
                            bool encrypted, uint8_t out[UCM_FINGERPRINT_BYTES])
{
    const uint8_t *secret = NULL;
    int rc = 0;

    memcpy(out, fingerprint, UCM_FINGERPRINT_BYTES);
    if (!encrypted)
        return 0;
    if (s)
        rc = shared_secret(s, fingerprint, &secret);
    if (rc == 0)
        rc = block_file_encrypted_fingerprint(fingerprint, secret, out);
    if (rc < 0)
        memset(out, 0, UCM_FINGERPRINT_BYTES); /* a name that no file has */
    return rc;
}

const char *shared_secrets_problem(const struct shared *s)
{
    return s && s->secrets ? secrets_problem(s->secrets) : NULL;
}
