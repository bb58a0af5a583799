/* Keys and boxes of daemon/encryption: what opens, what does not, and which sources are refused. */
#include "daemon/encryption/box.h"
#include "daemon/encryption/source.h"
#include "daemon/format/nvme_format.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

static const uint8_t key[ENCRYPTION_KEY_BYTES] = "a key of 32 bytes, for tests";
static const uint8_t context[40] = "salt and names";

Test(encryption, each_input_makes_another_key)
{
    static const uint8_t second[ENCRYPTION_KEY_BYTES] = "another";
    static const struct {
        const uint8_t *key;
        const char *salt, *label, *info;
    } inputs[] = {{key, "salt", "label", "info"},    {key, "salt", "label", "info"},
                  {second, "salt", "label", "info"}, {key, "salu", "label", "info"},
                  {key, "salt", "labem", "info"},    {key, "salt", "label", "inf"}};
    uint8_t base[32], other[32], long_one[64];

    for (unsigned i = 0; i < 6; i++) {
        cr_assert_eq(encryption_derive(inputs[i].key, inputs[i].salt, 4, inputs[i].label,
                                       inputs[i].info, strlen(inputs[i].info), other, 32),
                     0);
        if (i == 0)
            memcpy(base, other, sizeof(base));
        cr_assert_eq(memcmp(base, other, 32) == 0, i < 2, "input %u", i);
    }
    cr_assert_eq(encryption_derive(key, "salt", 4, "label", "info", 4, long_one, 64), 0);
    cr_assert_arr_eq(base, long_one, 32);
}

/* The value was computed with Python's hmac module, by RFC 5869. */
Test(encryption, is_hkdf_sha256)
{
    static const uint8_t want[8] = {0xb6, 0x74, 0x2a, 0xd8, 0x3a, 0xbd, 0x38, 0xb0};
    uint8_t ones[ENCRYPTION_KEY_BYTES], out[8];

    memset(ones, 1, sizeof(ones));
    cr_assert_eq(encryption_derive(ones, NULL, 0, "ucmd key id 1", NULL, 0, out, sizeof(out)), 0);
    cr_assert_arr_eq(out, want, sizeof(want));
}

static int open_with(const uint8_t *with, const void *names, uint32_t number, const char *aad,
                     const uint8_t *encrypted, const uint8_t *tag, uint8_t *out)
{
    struct encryption_box b;
    struct encryption_aad a = {aad, strlen(aad)};
    int rc;

    cr_assert_eq(encryption_box_begin(&b, with, names, sizeof(context), false), 0);
    rc = encryption_box_decrypt(&b, number, &a, 1, encrypted, out, 100, tag);
    encryption_box_close(&b);
    return rc;
}

Test(encryption, opens_only_what_was_encrypted)
{
    uint8_t plain[100], encrypted[100], out[100], tag[ENCRYPTION_TAG_BYTES],
        tag2[ENCRYPTION_TAG_BYTES], bad[100], second[32] = "b", names[40] = "x";
    struct encryption_aad a = {"names", 5};
    struct encryption_box b;

    memset(plain, 'p', sizeof(plain));
    cr_assert_eq(encryption_box_begin(&b, key, context, sizeof(context), true), 0);
    cr_assert_eq(encryption_box_encrypt(&b, 7, &a, 1, plain, encrypted, 100, tag), 0);
    cr_assert_eq(encryption_box_encrypt(&b, 8, &a, 1, plain, out, 100, tag2), 0);
    encryption_box_close(&b);
    cr_assert_arr_neq(encrypted, plain, 100);
    cr_assert_arr_neq(encrypted, out, 100, "another nonce, other bytes");
    cr_assert_eq(open_with(key, context, 7, "names", encrypted, tag, out), 0);
    cr_assert_arr_eq(out, plain, 100);
    cr_assert_eq(open_with(key, context, 8, "names", encrypted, tag, out), -EBADMSG);
    cr_assert_eq(open_with(key, context, 7, "namez", encrypted, tag, out), -EBADMSG);
    cr_assert_eq(open_with(key, context, 7, "names", encrypted, tag2, out), -EBADMSG);
    cr_assert_eq(open_with(second, context, 7, "names", encrypted, tag, out), -EBADMSG);
    cr_assert_eq(open_with(key, names, 7, "names", encrypted, tag, out), -EBADMSG);
    for (unsigned bit = 0; bit < 800; bit += 7) {
        memcpy(bad, encrypted, 100);
        bad[bit / 8] ^= (uint8_t)(1u << bit % 8);
        cr_assert_eq(open_with(key, context, 7, "names", bad, tag, out), -EBADMSG, "bit %u", bit);
    }
    memcpy(out, encrypted, 100); /* where it lies */
    cr_assert_eq(open_with(key, context, 7, "names", out, tag, out), 0);
    cr_assert_arr_eq(out, plain, 100);
}

Test(encryption, memory_is_used_again)
{
    void *first = encryption_memory_take(8192), *second;

    encryption_memory_give(first, 8192);
    second = encryption_memory_take(8192);
    cr_assert_eq(first, second);
    cr_assert_eq((uintptr_t)second % 4096, 0u);
    encryption_memory_give(second, 8192);
    for (unsigned i = 0; i < 100; i++)
        encryption_memory_give(encryption_memory_take(4096 * (1 + i)), 4096 * (1 + i));
    encryption_memory_drop();
}

#define HEX16 "0123456789abcdef"
#define KEY1 HEX16 HEX16 HEX16 HEX16
#define KEY2 HEX16 HEX16 HEX16 "0123456789ABCDEE"

static int parse(const char *text, unsigned *n, char why[160],
                 uint8_t keys[ENCRYPTION_KEYS_MAX][ENCRYPTION_KEY_BYTES])
{
    return source_parse(text, strlen(text), keys, n, why);
}

Test(encryption, sources)
{
    uint8_t keys[ENCRYPTION_KEYS_MAX][ENCRYPTION_KEY_BYTES];
    char why[160], many[2000] = "";
    unsigned n;

    cr_assert_eq(parse(KEY1, &n, why, keys), 0);
    cr_assert_eq(n, 1u);
    cr_assert_eq(parse("# of team-a\n\n" KEY1 "\r\n" KEY2 "\n" KEY1 "\n", &n, why, keys), 0);
    cr_assert_eq(n, 2u, "the same key counts once, at its last place");
    cr_assert_eq(keys[0][31], 0xeeu);
    cr_assert_eq(keys[1][31], 0xefu);
    cr_assert_eq(parse("", &n, why, keys), -EINVAL);
    cr_assert_not_null(strstr(why, "no key"));
    cr_assert_eq(parse(KEY1 "\n" KEY1 "0\n", &n, why, keys), -EINVAL);
    cr_assert_not_null(strstr(why, "line 2 has 65 bytes"), "%s", why);
    cr_assert_eq(parse("g" KEY1, &n, why, keys), -EINVAL);
    cr_assert_eq(parse(HEX16, &n, why, keys), -EINVAL);
    for (unsigned i = 0; i < 17; i++)
        snprintf(many + strlen(many), sizeof(many) - strlen(many),
                 "%02x" HEX16 HEX16 HEX16 "23456789abcdef\n", i);
    cr_assert_eq(parse(many, &n, why, keys), -EINVAL);
    cr_assert_not_null(strstr(why, "more than 16"));
}

Test(encryption, the_header_of_a_encrypted_record)
{
    struct nvme_record_header in = {.key_bytes = 16,
                                    .part = 3,
                                    .payload_bytes = 81000,
                                    .segment = 5,
                                    .record = 2,
                                    .generation = 77,
                                    .sequence = 99,
                                    .layer_bytes = 9000,
                                    .encrypted = true,
                                    .key_id = {1, 2},
                                    .salt = {3, 4}};
    uint8_t page[NVME_PAGE], bad[NVME_PAGE];
    struct nvme_record_header out;
    uint64_t sum;

    memset(in.fingerprint, 9, sizeof(in.fingerprint));
    memset(in.key, 8, 16);
    nvme_encrypted_encode(&in, page);
    memset(nvme_encrypted_page_tag(page), 6, NVME_TAG_BYTES);
    memset(nvme_encrypted_tag(page, 8), 7, NVME_TAG_BYTES);
    sum = nvme_encrypted_finish(page);
    cr_assert_eq(sum, 0x0606060606060606u);
    cr_assert_eq(nvme_record_header_decode(page, &out), 0);
    cr_assert(out.encrypted && out.checksum == sum && out.layer_bytes == 9000 &&
              out.generation == 77 && out.sequence == 99);
    cr_assert_arr_eq(out.salt, in.salt, sizeof(in.salt));
    cr_assert_eq(nvme_encrypted_fragments(&out), 9u);
    for (unsigned bit = 0; bit < NVME_PAGE * 8; bit += 13) {
        memcpy(bad, page, NVME_PAGE);
        bad[bit / 8] ^= (uint8_t)(1u << bit % 8);
        cr_assert_neq(nvme_record_header_decode(bad, &out), 0, "bit %u", bit);
    }
    in.payload_bytes = 9000 * (NVME_FRAGMENTS_MAX + 1);
    nvme_encrypted_encode(&in, page);
    nvme_encrypted_finish(page);
    cr_assert_eq(nvme_record_header_decode(page, &out), -EBADMSG, "more pieces than tags");
}
