/* A root that is a bucket: what every backend promises, through ucmd-backend-s3 and OpenStack Swift's S3 API. */
/* Sanitizers: address */
#include "tests/integration/shared_store.h"

#include <sys/xattr.h>

#define PYTHON "/usr/bin/python3"
#define KEY "test:tester"
#define SECRET "testing"

static bool ready(void)
{
#ifdef __SANITIZE_THREAD__
    snprintf(store.why, sizeof(store.why), "nothing here has threads");
#endif
    if (!store.why[0] && setxattr(store.directory, "user.swift", "x", 1, 0) < 0)
        snprintf(store.why, sizeof(store.why),
                 "Swift needs extended attributes, which %.80s has not", store.directory);
    return !store.why[0];
}

static void serve(void)
{
    execl(PYTHON, PYTHON, "-B", "tests/integration/swift_server.py", store.directory, NULL);
}

static void url(const char *path, char out[700])
{
    snprintf(out, 700, "http://127.0.0.1:%d/%s%s", atoi(store.said), store.part, path);
}

static struct curl_slist *authorize(CURL *easy)
{
    struct curl_slist *headers = curl_slist_append(NULL, "x-amz-content-sha256: UNSIGNED-PAYLOAD");

    curl_easy_setopt(easy, CURLOPT_AWS_SIGV4, "aws:amz:us-east-1:s3");
    curl_easy_setopt(easy, CURLOPT_USERNAME, KEY);
    curl_easy_setopt(easy, CURLOPT_PASSWORD, SECRET);
    curl_easy_setopt(easy, CURLOPT_HTTPHEADER, headers);
    return headers;
}

static const struct store_kind store_kind = {.name = "Swift (python3-swift)",
                                             .backend = "s3",
                                             .ready = ready,
                                             .serve = serve,
                                             .url = url,
                                             .authorize = authorize};

static unsigned count(void)
{
    struct store_bytes in;
    unsigned n = 0;

    cr_assert_eq(store_ask("GET", "?list-type=2", NULL, &in), 200);
    for (const char *at = (char *)in.data; (at = strstr(at, "<Key>")) != NULL; at++)
        n++;
    free(in.data);
    return n;
}

static const struct contract_remote remote = {.get = store_get,
                                              .put = store_put,
                                              .remove = store_remove,
                                              .count = count,
                                              .removes_blind = true};

/* ---- a test ---- */

static void away_path(char path[256])
{
    snprintf(path, 256, "%s/away-%s", store.directory, store.part);
}

static void away(struct contract *c)
{
    char path[256];

    (void)c;
    away_path(path);
    contract_remote = NULL;
    contract_put(path, "", 0);
    contract_remote = &remote;
}

static void back(struct contract *c)
{
    char path[256];

    (void)c;
    away_path(path);
    cr_assert_eq(unlink(path), 0);
}

static void credentials_lay(const char *path)
{
    FILE *f = fopen(path, "w");

    cr_assert(f, "%s", path);
    fprintf(f, "[default]\naws_access_key_id = %s\naws_secret_access_key = %s\n", KEY, SECRET);
    cr_assert_eq(fclose(f), 0);
}

static void begin(struct contract *c)
{
    char *target = store_begin(c, &remote), credentials[160];

    snprintf(credentials, sizeof(credentials), "%s/credentials-%d", store.directory, (int)getpid());
    credentials_lay(credentials);
    sprintf(target, "s3://%s?endpoint=http://127.0.0.1:%d&credentials=%s", store.part,
            atoi(store.said), credentials);
    snprintf(store.process.read, sizeof(store.process.read), "%s", credentials);
    c->root_away = away;
    c->root_back = back;
    store_put("", "", 0);
}

SHARED_CONTRACT_STORE(shared_s3, begin, store_end)
