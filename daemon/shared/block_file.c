#include "daemon/shared/block_file.h"

#include "daemon/format/bytes.h"

#include <errno.h>
#include <inttypes.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <string.h>

static char *hex_put(char *at, const uint8_t *bytes, size_t n)
{
    static const char digits[] = "0123456789abcdef";

    for (size_t i = 0; i < n; i++) {
        *at++ = digits[bytes[i] >> 4];
        *at++ = digits[bytes[i] & 15];
    }
    return at;
}

static int identity_of(const struct block_file_id *id, uint8_t out[BLOCK_FILE_IDENTITY_BYTES])
{
    uint8_t bytes[UCM_FINGERPRINT_BYTES + 8 + UCM_MAX_KEY_BYTES];
    uint8_t digest[EVP_MAX_MD_SIZE];

    memcpy(bytes, id->fingerprint, UCM_FINGERPRINT_BYTES);
    put32(bytes + UCM_FINGERPRINT_BYTES, id->part);
    put32(bytes + UCM_FINGERPRINT_BYTES + 4, id->key_bytes);
    memcpy(bytes + UCM_FINGERPRINT_BYTES + 8, id->key, id->key_bytes);
    if (EVP_Digest(bytes, UCM_FINGERPRINT_BYTES + 8 + id->key_bytes, digest, NULL, EVP_sha256(),
                   NULL) != 1)
        return -ENOMEM;
    memcpy(out, digest, BLOCK_FILE_IDENTITY_BYTES);
    return 0;
}

int block_file_locate(const struct block_file_id *id, uint8_t identity[BLOCK_FILE_IDENTITY_BYTES],
                      char name[BLOCK_FILE_NAME_CAP])
{
    uint8_t part = (uint8_t)id->part;
    char *at;
    int err;

    if (id->key_bytes < UCM_MIN_KEY_BYTES || id->key_bytes > UCM_MAX_KEY_BYTES ||
        id->part >= UCM_MAX_PARTS)
        return -EINVAL;
    err = identity_of(id, identity);
    if (err < 0)
        return err;
    at = hex_put(name, id->key, id->key_bytes);
    *at++ = '-';
    at = hex_put(at, id->fingerprint, BLOCK_FILE_NAMESPACE_BYTES);
    *at++ = '-';
    at = hex_put(at, &part, 1);
    *at = '\0';
    return 0;
}

static size_t hex_span(const char *s)
{
    return strspn(s, "0123456789abcdef");
}

static uint8_t byte_of(const char *hex)
{
    uint8_t byte = 0;

    for (unsigned i = 0; i < 2; i++)
        byte = (uint8_t)(byte << 4 | (hex[i] <= '9' ? hex[i] - '0' : hex[i] - 'a' + 10));
    return byte;
}

int block_file_name_parse(const char *name, struct block_file_name *out)
{
    size_t n = hex_span(name);

    if (n % 2 != 0 || n < 2 * UCM_MIN_KEY_BYTES || n > 2 * UCM_MAX_KEY_BYTES || name[n] != '-')
        return -EINVAL;
    out->key_chars = n;
    name += n + 1;
    n = 2 * BLOCK_FILE_NAMESPACE_BYTES;
    if (hex_span(name) != n || name[n] != '-' || hex_span(name + n + 1) != 2 || name[n + 3] != '\0')
        return -EINVAL;
    for (unsigned i = 0; i < BLOCK_FILE_NAMESPACE_BYTES; i++)
        out->namespace[i] = byte_of(name + 2 * (size_t)i);
    out->part = byte_of(name + n + 1);
    return 0;
}

bool block_file_name_valid(const char *name)
{
    struct block_file_name parsed;

    return block_file_name_parse(name, &parsed) == 0;
}

/* Allowed in a temporary file's name; isalnum would depend on the locale. */
static bool host_byte(char c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '.' ||
           c == '_';
}

bool block_file_temp_valid(const char *name)
{
    size_t n = strlen(BLOCK_FILE_TEMP_PREFIX);

    if (strncmp(name, BLOCK_FILE_TEMP_PREFIX, n) != 0)
        return false;
    for (; name[n]; n++)
        if (!host_byte(name[n]) && name[n] != '-')
            return false;
    return n < BLOCK_FILE_TEMP_CAP;
}

#define TENANT_PREFIX ".tenant-"

void block_file_tenant_name(const uint8_t namespace[BLOCK_FILE_NAMESPACE_BYTES],
                            char out[BLOCK_FILE_NAME_CAP])
{
    strcpy(out, TENANT_PREFIX);
    *hex_put(out + sizeof(TENANT_PREFIX) - 1, namespace, BLOCK_FILE_NAMESPACE_BYTES) = '\0';
}

bool block_file_tenant_parse(const char *name, uint8_t namespace[BLOCK_FILE_NAMESPACE_BYTES])
{
    const char *hex = name + sizeof(TENANT_PREFIX) - 1;

    if (strncmp(name, TENANT_PREFIX, sizeof(TENANT_PREFIX) - 1) != 0 ||
        hex_span(hex) != 2 * BLOCK_FILE_NAMESPACE_BYTES ||
        hex[2 * BLOCK_FILE_NAMESPACE_BYTES] != '\0')
        return false;
    for (unsigned i = 0; i < BLOCK_FILE_NAMESPACE_BYTES; i++)
    namespace[i] = byte_of(hex + 2 * (size_t)i);
    return true;
}

void block_file_temp_prefix(const char *host, uint32_t pid, uint64_t started,
                            char out[BLOCK_FILE_TEMP_CAP])
{
    char name[33];

    snprintf(name, sizeof(name), "%s", host);
    for (char *c = name; *c; c++)
        *c = host_byte(*c) ? *c : '_';
    snprintf(out, BLOCK_FILE_TEMP_CAP, BLOCK_FILE_TEMP_PREFIX "%s-%08" PRIx32 "-%016" PRIx64 "-",
             name, pid, started);
}

int block_file_encrypted_fingerprint(const uint8_t fingerprint[UCM_FINGERPRINT_BYTES],
                                     const uint8_t *secret, uint8_t out[UCM_FINGERPRINT_BYTES])
{
    uint8_t bytes[16 + UCM_FINGERPRINT_BYTES + BLOCK_FILE_SECRET_BYTES] = {0},
                                               digest[EVP_MAX_MD_SIZE];
    size_t n = 16 + UCM_FINGERPRINT_BYTES;

    memcpy(bytes, secret ? "ucmd sealed 2" : "ucmd sealed 1", 13);
    memcpy(bytes + 16, fingerprint, UCM_FINGERPRINT_BYTES);
    if (secret) {
        memcpy(bytes + n, secret, BLOCK_FILE_SECRET_BYTES);
        n += BLOCK_FILE_SECRET_BYTES;
    }
    if (EVP_Digest(bytes, n, digest, NULL, EVP_sha256(), NULL) != 1)
        return -ENOMEM;
    memcpy(out, digest, UCM_FINGERPRINT_BYTES);
    return 0;
}
