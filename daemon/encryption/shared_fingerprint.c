#include "daemon/shared/shared.h"

#include <string.h>

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
