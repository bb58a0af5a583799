/* Block keys against vectors made with Python's hashlib and pickle. */
#include "client/include/ucmclient.h"

#include <criterion/criterion.h>
#include <dlfcn.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Every length that a token takes in a pickle, and both ends of each. */
static const uint32_t ladder[16] = {0,          1,          255,        256,    65535, 65536,
                                    2147483647, 2147483648, 4294967295, 128000, 7,     300,
                                    70000,      5,          6,          8};
static const char meta[] = "llama:8:torch.bfloat16:0";

static void expect_hex(const uint8_t *p, size_t n, const char *hex)
{
    char text[65];

    for (size_t i = 0; i < n; i++)
        sprintf(text + 2 * i, "%02x", p[i]);
    cr_expect_str_eq(text, hex);
}

static void expect_md5(const uint8_t *parent, const uint32_t *tokens, uint32_t block_tokens,
                       uint32_t n_blocks, const char *first, const char *last)
{
    uint8_t *keys = malloc(16 * (size_t)n_blocks);

    cr_assert_not_null(keys);
    cr_assert_eq(ucm_keys_md5(meta, parent, tokens, block_tokens, n_blocks, keys), 0);
    expect_hex(keys, 16, first);
    expect_hex(keys + 16 * ((size_t)n_blocks - 1), 16, last);
    free(keys);
}

Test(client_keys, md5_is_the_original_chain)
{
    expect_md5(NULL, ladder, 1, 16, "19482576b2e1a9b26a4a0f80d73bd9e0",
               "441ecf6d48afc61833151d73a1a97eec");
    expect_md5(NULL, ladder, 2, 8, "90fd1fbaf3962c882f227688bb1a2388",
               "9c530758f44739ed3f39abb5bca2ef0a");
    expect_md5(NULL, ladder, 3, 5, "803f109c6c4f87c98f2b184982818438",
               "f92d264cae55cb7fd45062d44f3b91d2");
    expect_md5(NULL, ladder, 4, 4, "3e6728ddb59034be3bf0e17cb8548629",
               "aeb588a50d2e9ebd9036c5909bd70514");
    expect_md5(NULL, ladder, 8, 2, "f204c16624e52a7821851abc01269402",
               "81a1ab5aaba1eafb2a4351fd7c3763c9");
    expect_md5(NULL, ladder, 16, 1, "8d67518b2a2d2b37732453dcad23a75c",
               "8d67518b2a2d2b37732453dcad23a75c");
}

Test(client_keys, md5_takes_a_parent)
{
    uint8_t parent[16], first[32], second[16];

    for (uint8_t i = 0; i < 16; i++)
        parent[i] = i;
    expect_md5(parent, ladder, 16, 1, "47e5b494331113092f7ec2304276c433",
               "47e5b494331113092f7ec2304276c433");
    /* A hash chain may be continued. */
    cr_assert_eq(ucm_keys_md5(meta, NULL, ladder, 8, 2, first), 0);
    cr_assert_eq(ucm_keys_md5(meta, first, ladder + 8, 8, 1, second), 0);
    cr_expect_arr_eq(first + 16, second, 16);
}

/* Blocks whose pickle spans several frames. */
Test(client_keys, md5_splits_frames_as_python_does)
{
    static const struct {
        uint32_t n;
        const char *key;
    } cases[] = {{13000, "a63d1b095a5dd177feecd41534378d1d"},
                 {16384, "bf892765eebd78b66cbe2a44c7330564"},
                 {65536, "a568e5c904192c7091e09610b9874477"},
                 {200000, "d8bc0386360691f15322bcb44b4dbd2a"}};
    static uint32_t tokens[200000];

    for (uint32_t i = 0; i < 200000; i++)
        tokens[i] = i * 2654435761u;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        expect_md5(NULL, tokens, cases[i].n, 1, cases[i].key, cases[i].key);
}

Test(client_keys, sha256)
{
    static const struct {
        uint32_t block_tokens, n_blocks;
        const char *first, *last;
    } cases[] = {
        {1, 16, "e61a626d1981ca6eadae1dadd34a970d7477afbe143bb4d8bd2a98e90845ed6f",
         "a50f33cecda7fb249158113949b8a08813a2623a1179f1e5172aa02537a47be9"},
        {4, 4, "f2d452f85565cfca7e16c9b40d01399ad3701cd2605d1f8abc56f1119c6ffce2",
         "44c744084056e3d6165c69d87a315cb176889ed53bac8d84a0811b3dc2cf6f70"},
        {16, 1, "e4cedbe4467a7c93b4f25aeb85130684361bc2a0cb5e7ef75a00613d857fbb98",
         "e4cedbe4467a7c93b4f25aeb85130684361bc2a0cb5e7ef75a00613d857fbb98"},
    };
    uint8_t keys[16 * 32], parent[32];

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cr_assert_eq(ucm_keys_sha256(NULL, ladder, cases[i].block_tokens, cases[i].n_blocks, keys),
                     0);
        expect_hex(keys, 32, cases[i].first);
        expect_hex(keys + 32 * (cases[i].n_blocks - 1), 32, cases[i].last);
    }
    for (uint8_t i = 0; i < 32; i++)
        parent[i] = i;
    cr_assert_eq(ucm_keys_sha256(parent, ladder, 16, 1, keys), 0);
    expect_hex(keys, 32, "a821f59fab9223cb0394d7a8926c2d719fba60e035f563170cb633be64fdf355");
}

/* The examples of docs/protocol.md, "Block keys". */
Test(client_keys, the_documents_examples)
{
    uint32_t tokens[32];
    uint8_t keys[64];

    for (uint32_t i = 0; i < 32; i++)
        tokens[i] = i + 1;
    cr_assert_eq(ucm_keys_sha256(NULL, tokens, 16, 2, keys), 0);
    expect_hex(keys, 32, "45b94141c1e32c4e2cde21638b6d04594dd396f5c663b1bb8d7b5384cef995f1");
    expect_hex(keys + 32, 32, "52d3f3df1932ed7d6a32b96883039fcd361f2702304b677dc1db7c025878f133");
    cr_assert_eq(ucm_keys_md5("demo:1:torch.bfloat16:0", NULL, tokens, 16, 2, keys), 0);
    expect_hex(keys, 16, "d9612e02b3bb842d3d99e101f7590a1d");
    expect_hex(keys + 16, 16, "611fa204a8b288ca4784543a7c03eaeb");
}

Test(client_keys, bad_arguments)
{
    uint8_t key[32];

    cr_expect_eq(ucm_keys_sha256(NULL, NULL, 1, 1, key), -UCM_EINVALID);
    cr_expect_eq(ucm_keys_sha256(NULL, ladder, 0, 1, key), -UCM_EINVALID);
    cr_expect_eq(ucm_keys_sha256(NULL, ladder, 1, 0, key), 0);
    cr_expect_eq(ucm_keys_md5(NULL, NULL, ladder, 1, 1, key), -UCM_EINVALID);
    cr_expect_eq(ucm_keys_md5(meta, NULL, ladder, (1u << 20) + 1, 1, key), -UCM_EINVALID);
    cr_expect(ucm_errmsg()[0] != '\0');
}

/* In place of libcrypto's: fails for this reason. */
static int update_fails;

int EVP_DigestUpdate(EVP_MD_CTX *ctx, const void *bytes, size_t n)
{
    int (*real)(EVP_MD_CTX *, const void *, size_t);

    if (update_fails) {
        ERR_raise(ERR_LIB_EVP, update_fails);
        return 0;
    }
    *(void **)&real = dlsym(RTLD_NEXT, "EVP_DigestUpdate");
    return real(ctx, bytes, n);
}

Test(client_keys, a_failure_has_its_true_reason)
{
    uint8_t key[32];

    ERR_clear_error();
    ERR_raise(ERR_LIB_EVP, EVP_R_BAD_DECRYPT);
    update_fails = EVP_R_UNSUPPORTED_ALGORITHM;
    cr_expect_eq(ucm_keys_md5(meta, NULL, ladder, 16, 1, key), -UCM_EUNSUPPORTED);
    cr_expect_not_null(strstr(ucm_errmsg(), "MD5"));
    cr_expect_not_null(strstr(ucm_errmsg(), ERR_reason_error_string(ERR_PACK(
                                                ERR_LIB_EVP, 0, EVP_R_UNSUPPORTED_ALGORITHM))));
    cr_expect_eq(ucm_keys_sha256(NULL, ladder, 16, 1, key), -UCM_EUNSUPPORTED);
    update_fails = ERR_R_MALLOC_FAILURE;
    cr_expect_eq(ucm_keys_md5(meta, NULL, ladder, 16, 1, key), -UCM_ENOMEMORY);
    cr_expect_eq(ucm_keys_sha256(NULL, ladder, 16, 1, key), -UCM_ENOMEMORY);
    update_fails = 0;
    cr_expect_eq(ucm_keys_md5(meta, NULL, ladder, 16, 1, key), 0);
    cr_expect_eq(ERR_GET_REASON(ERR_peek_last_error()), EVP_R_BAD_DECRYPT, "the caller's error");
}
