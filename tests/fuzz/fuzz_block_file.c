/* Any bytes as a block file's header and as a name in its directory. Bytes that decode are those
 * that encoding would have made. A name that passes is that of a part, or of a temporary file in
 * the same directory. Traps on any break of these promises. */
#include "daemon/format/bytes.h"
#include "daemon/format/checksum.h"
#include "daemon/shared/block_file.h"
#include "tests/fuzz/fuzz.h"

#include <stdio.h>
#include <string.h>

/* Checks the header against the part that it names, with its checksum as it is and corrected. */
static void check_header(const uint8_t bytes[BLOCK_FILE_HEADER_BYTES])
{
    struct block_file_header wanted = {.payload_bytes = get64(bytes + 8),
                                       .part = get32(bytes + 24),
                                       .encrypted = block_file_is_encrypted(bytes)};
    uint8_t again[BLOCK_FILE_HEADER_BYTES];

    memcpy(wanted.identity, bytes + 32, sizeof(wanted.identity));
    if (block_file_decode(bytes, &wanted, &wanted.checksum) < 0) {
        must(wanted.checksum == 0);
        return;
    }
    must(wanted.checksum == get64(bytes + 16));
    block_file_encode(&wanted, again);
    must(memcmp(again, bytes, 28) == 0 && memcmp(again + 32, bytes + 32, 16) == 0);
    wanted.payload_bytes++;
    must(block_file_decode(bytes, &wanted, &wanted.checksum) < 0);
}

static void hex_get(const char *hex, uint8_t *out, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        unsigned byte;

        must(sscanf(hex + 2 * i, "%2x", &byte) == 1);
        out[i] = (uint8_t)byte;
    }
}

/* The part that has this name. */
static void check_name(const char *name)
{
    struct block_file_id id = {.key_bytes = (uint32_t)strcspn(name, "-") / 2};
    uint8_t identity[BLOCK_FILE_IDENTITY_BYTES], part;
    char again[BLOCK_FILE_NAME_CAP];
    const char *at = name;

    must(id.key_bytes <= UCM_MAX_KEY_BYTES);
    hex_get(at, id.key, id.key_bytes);
    at += 2 * (size_t)id.key_bytes + 1;
    hex_get(at, id.fingerprint, 16);
    at += 33;
    hex_get(at, &part, 1);
    id.part = part;
    must(block_file_locate(&id, identity, again) == 0);
    must(strcmp(again, name) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    uint8_t header[BLOCK_FILE_HEADER_BYTES];
    char name[256] = {0};

    if (n < sizeof(header))
        return 0;
    memcpy(header, data, sizeof(header));
    check_header(header);
    put64(header + sizeof(header) - 8, checksum_of(header, sizeof(header) - 8));
    check_header(header);

    n -= sizeof(header);
    memcpy(name, data + sizeof(header), n < sizeof(name) ? n : sizeof(name) - 1);
    if (block_file_temp_valid(name))
        must(strlen(name) < BLOCK_FILE_TEMP_CAP && !strchr(name, '/') &&
             !block_file_name_valid(name));
    if (block_file_name_valid(name))
        check_name(name);
    return 0;
}
