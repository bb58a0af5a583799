/* Secrets of namespaces in a directory that hosts have in common: one file of 64 bytes each, whose
 * name is the fingerprint in hexadecimal. Its content is magic "UCMSECR1", fingerprint (32 bytes),
 * secret (16), and the XXH3-64 of these (8). `.tmp-<16 digits>` is one that is being written. While
 * a file has other content, the namespace can't be used on the shared tier, until a purge replaces
 * the secret.
 *
 * Any thread; all of it blocks for as long as the directory's file system does. */
#ifndef UCMD_ENCRYPTION_SECRETS_FILE_H
#define UCMD_ENCRYPTION_SECRETS_FILE_H

#include "daemon/shared/shared.h"

#include <stdint.h>

/* The namespace's secret; of several hosts that make it at once all get the same. 0; -EBADMSG: what
 * lies there is no secret; -errno. */
int secrets_file_get(const char *directory, const uint8_t fingerprint[UCM_FINGERPRINT_BYTES],
                     uint8_t secret[SHARED_SECRET_BYTES]);
/* Puts a new secret in the place of the one that is there, and overwrites that. 0 and the new one,
 * or another host's that came between; -errno: the former one may still be there. */
int secrets_file_replace(const char *directory, const uint8_t fingerprint[UCM_FINGERPRINT_BYTES],
                         uint8_t secret[SHARED_SECRET_BYTES]);
/* Whether secrets can be made there. 0: they can; 1: they can, but users other than the directory's
 * owner and group may write to it, too; -errno. */
int secrets_file_check(const char *directory);

#endif
