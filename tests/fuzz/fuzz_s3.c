/* Any bytes as XML of an S3 server, as a file of credentials, and as the output of a command for
 * credentials. The first byte says which of these, and where the XML is cut in two. Traps on a text
 * without an end, and on a key that lacks a half. */
#include "daemon/backend/s3/credentials_parse.h"
#include "daemon/backend/s3/xml.h"
#include "tests/fuzz/fuzz.h"

#include <string.h>

static bool ends(const char *text, size_t cap)
{
    return memchr(text, '\0', cap) != NULL;
}

static void file_cb(void *ctx, const struct s3_listed *file)
{
    (void)ctx;
    must(ends(file->key, sizeof(file->key)));
    must(!file->whole || file->mtime_ns > 0);
}

static void check_xml(const char *text, size_t n, size_t cut)
{
    struct s3_xml *x = s3_xml_new(file_cb, NULL);

    must(x != NULL);
    cut = n > 0 ? cut % n : 0;
    s3_xml_feed(x, text, cut);
    s3_xml_feed(x, text + cut, n - cut);
    must(!s3_xml_is_listing(x) || !*s3_xml_code(x));
    must(strlen(s3_xml_code(x)) < 64 && strlen(s3_xml_next(x)) < S3_XML_TEXT_BYTES);
    s3_xml_free(x);
}

static void check_key(const struct s3_key *key)
{
    must(ends(key->id, sizeof(key->id)) && ends(key->secret, sizeof(key->secret)) &&
         ends(key->token, sizeof(key->token)));
}

static void check_profile(const char *text, size_t n)
{
    char *copy = malloc(n + 1), process[64];
    struct s3_key key = {.id = ""};

    must(copy != NULL);
    memcpy(copy, text, n);
    copy[n] = '\0';
    (void)s3_profile_parse(copy, "default", &key, process, sizeof(process));
    must(ends(process, sizeof(process)));
    check_key(&key);
    free(copy);
}

static void check_command(const char *text, size_t n)
{
    struct s3_key key = {.id = ""};
    int64_t expires_s = -1;
    const char *wrong = s3_command_parse(text, n, 1000000000, &key, &expires_s);

    check_key(&key);
    must(wrong || expires_s == 0 || expires_s > 1000000000);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    const char *text = (const char *)data + 1;

    if (n == 0)
        return 0;
    if (data[0] % 3 == 0)
        check_xml(text, n - 1, data[0]);
    else if (data[0] % 3 == 1)
        check_profile(text, n - 1);
    else
        check_command(text, n - 1);
    return 0;
}
