/* Block keys: examples, and what fails. tests/integration/test_python.py compares them with Python's
 * hashlib and pickle. */
#include "client/include/ucmclient.h"

#include <criterion/criterion.h>
#include <dlfcn.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <string.h>

static const uint32_t tokens[16] = {70000};
static const char meta[] = "llama:8:torch.bfloat16:0";

static void expect_hex(const uint8_t *p, size_t n, const char *hex)
{
    char text[65];

    for (size_t i = 0; i < n; i++)
        sprintf(text + 2 * i, "%02x", p[i]);
    cr_expect_str_eq(text, hex);
}

/* The block's pickle spans several frames. */
Test(client_keys, md5_of_a_long_block)
{
    static uint32_t many[200000];
    uint8_t key[16];

    for (uint32_t i = 0; i < 200000; i++)
        many[i] = i * 2654435761u;
    cr_assert_eq(ucm_keys_md5(meta, NULL, many, 200000, 1, key), 0);
    expect_hex(key, 16, "d8bc0386360691f15322bcb44b4dbd2a");
}

/* The examples of docs/protocol.md, "Block keys". */
Test(client_keys, the_documents_examples)
{
    uint32_t first[32];
    uint8_t keys[64];

    for (uint32_t i = 0; i < 32; i++)
        first[i] = i + 1;
    cr_assert_eq(ucm_keys_sha256(NULL, first, 16, 2, keys), 0);
    expect_hex(keys, 32, "45b94141c1e32c4e2cde21638b6d04594dd396f5c663b1bb8d7b5384cef995f1");
    expect_hex(keys + 32, 32, "52d3f3df1932ed7d6a32b96883039fcd361f2702304b677dc1db7c025878f133");
    cr_assert_eq(ucm_keys_md5("demo:1:torch.bfloat16:0", NULL, first, 16, 2, keys), 0);
    expect_hex(keys, 16, "d9612e02b3bb842d3d99e101f7590a1d");
    expect_hex(keys + 16, 16, "611fa204a8b288ca4784543a7c03eaeb");
}

Test(client_keys, bad_arguments)
{
    uint8_t key[32];

    cr_expect_eq(ucm_keys_sha256(NULL, NULL, 1, 1, key), -UCM_EINVALID);
    cr_expect_eq(ucm_keys_sha256(NULL, tokens, 0, 1, key), -UCM_EINVALID);
    cr_expect_eq(ucm_keys_sha256(NULL, tokens, 1, 0, key), 0);
    cr_expect_eq(ucm_keys_md5(NULL, NULL, tokens, 1, 1, key), -UCM_EINVALID);
    cr_expect_eq(ucm_keys_md5(meta, NULL, tokens, (1u << 20) + 1, 1, key), -UCM_EINVALID);
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
    cr_expect_eq(ucm_keys_md5(meta, NULL, tokens, 16, 1, key), -UCM_EUNSUPPORTED);
    cr_expect_not_null(strstr(ucm_errmsg(), "MD5"));
    cr_expect_not_null(strstr(ucm_errmsg(), ERR_reason_error_string(ERR_PACK(
                                                ERR_LIB_EVP, 0, EVP_R_UNSUPPORTED_ALGORITHM))));
    cr_expect_eq(ucm_keys_sha256(NULL, tokens, 16, 1, key), -UCM_EUNSUPPORTED);
    update_fails = ERR_R_MALLOC_FAILURE;
    cr_expect_eq(ucm_keys_md5(meta, NULL, tokens, 16, 1, key), -UCM_ENOMEMORY);
    cr_expect_eq(ucm_keys_sha256(NULL, tokens, 16, 1, key), -UCM_ENOMEMORY);
    update_fails = 0;
    cr_expect_eq(ucm_keys_md5(meta, NULL, tokens, 16, 1, key), 0);
    cr_expect_eq(ERR_GET_REASON(ERR_peek_last_error()), EVP_R_BAD_DECRYPT, "the caller's error");
}
