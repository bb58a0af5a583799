/* Plain libcurl at an S3 server, for what looks at a bucket from outside: signed requests that upload from memory. */
#ifndef UCMD_TESTS_S3_PLAIN_H
#define UCMD_TESTS_S3_PLAIN_H

#include <curl/curl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define S3_PLAIN_PAYLOAD "x-amz-content-sha256: UNSIGNED-PAYLOAD" /* a header of each request */

struct s3_bytes {
    uint8_t *data;
    uint64_t n, at;
};

/* What a request sends comes from a struct s3_bytes. */
static inline size_t s3_give_cb(char *to, size_t size, size_t n, void *ctx)
{
    struct s3_bytes *b = ctx;

    n = size * n < b->n - b->at ? size * n : (size_t)(b->n - b->at);
    memcpy(to, b->data + b->at, n);
    b->at += n;
    return n;
}

/* A GET; url is copied, headers (with S3_PLAIN_PAYLOAD) are borrowed until it is done. */
static inline void s3_plain_begin(CURL *easy, const char *url, const char *key, const char *secret,
                                  struct curl_slist *headers)
{
    curl_easy_setopt(easy, CURLOPT_URL, url);
    curl_easy_setopt(easy, CURLOPT_AWS_SIGV4, "aws:amz:us-east-1:s3");
    curl_easy_setopt(easy, CURLOPT_USERNAME, key);
    curl_easy_setopt(easy, CURLOPT_PASSWORD, secret);
    curl_easy_setopt(easy, CURLOPT_HTTPHEADER, headers);
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
}

/* A PUT of these bytes, from the first one on. */
static inline void s3_plain_upload(CURL *easy, struct s3_bytes *from)
{
    from->at = 0;
    curl_easy_setopt(easy, CURLOPT_UPLOAD, 1L);
    curl_easy_setopt(easy, CURLOPT_INFILESIZE_LARGE, (curl_off_t)from->n);
    curl_easy_setopt(easy, CURLOPT_READFUNCTION, s3_give_cb);
    curl_easy_setopt(easy, CURLOPT_READDATA, from);
}

/* The credentials file of ucmd-backend-s3. */
static inline bool s3_credentials_lay(const char *path, const char *key, const char *secret)
{
    FILE *f = fopen(path, "w");

    if (!f)
        return false;
    fprintf(f, "[default]\naws_access_key_id = %s\naws_secret_access_key = %s\n", key, secret);
    return fclose(f) == 0;
}

#endif
