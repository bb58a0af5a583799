#include "daemon/backend/s3/target.h"

#include <ctype.h>
#include <curl/curl.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define REGION "us-east-1"

bool s3_encode(char *out, size_t cap, const char *text, bool query)
{
    size_t n = strlen(out);

    for (const unsigned char *c = (const unsigned char *)text; *c; c++) {
        bool plain = (isalnum(*c) && *c < 0x80) || strchr("-._~", *c) || (*c == '/' && !query);

        if (n + 4 > cap)
            return false;
        n += (size_t)snprintf(out + n, 4, plain ? "%c" : "%%%02X", *c);
    }
    return true;
}

static int refuse(char why[S3_WHY_BYTES], const char *what, const char *text)
{
    snprintf(why, S3_WHY_BYTES, "%s: \"%.80s\"", what, text);
    return -EINVAL;
}

/* ---- options ---- */

struct options {
    struct s3_target *t;
    char endpoint[S3_TEXT_BYTES];
    char style[8], touch[4], list[4], payload[12];
};

static bool is_one_of(const char *text, const char *one, const char *other)
{
    return !text[0] || strcmp(text, one) == 0 || strcmp(text, other) == 0;
}

static int option_take(struct options *o, const char *name, const char *value,
                       char why[S3_WHY_BYTES])
{
    const struct {
        const char *name;
        char *to;
        size_t cap;
    } known[] = {{"endpoint", o->endpoint, sizeof(o->endpoint)},
                 {"region", o->t->region, sizeof(o->t->region)},
                 {"style", o->style, sizeof(o->style)},
                 {"ca", o->t->ca, sizeof(o->t->ca)},
                 {"credentials", o->t->credentials, sizeof(o->t->credentials)},
                 {"profile", o->t->profile, sizeof(o->t->profile)},
                 {"command", o->t->command, sizeof(o->t->command)},
                 {"touch", o->touch, sizeof(o->touch)},
                 {"list", o->list, sizeof(o->list)},
                 {"payload", o->payload, sizeof(o->payload)}};

    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++) {
        if (strcmp(name, known[i].name) != 0)
            continue;
        if (known[i].to[0] || !value[0] || strlen(value) >= known[i].cap)
            return refuse(why, "an option is given once, with a value that is not too long", name);
        strcpy(known[i].to, value);
        return 0;
    }
    return refuse(why,
                  "an option is one of endpoint, region, style, ca, credentials, profile, command, "
                  "touch, list, payload",
                  name);
}

static int options_take(struct options *o, char *query, char why[S3_WHY_BYTES])
{
    int rc = 0;

    for (char *word; rc == 0 && (word = strsep(&query, "&")) != NULL;) {
        char *value = strchr(word, '='), *plain;

        if (!value)
            return refuse(why, "an option has a value after =", word);
        *value++ = '\0';
        plain = curl_easy_unescape(NULL, value, 0, NULL);
        rc = plain ? option_take(o, word, plain, why) : -ENOMEM;
        curl_free(plain);
    }
    return rc;
}

static int options_check(const struct options *o, char why[S3_WHY_BYTES])
{
    const struct s3_target *t = o->t;

    if (!is_one_of(o->style, "path", "virtual"))
        return refuse(why, "style is path or virtual", o->style);
    if (!is_one_of(o->touch, "yes", "no") || !is_one_of(o->list, "yes", "no"))
        return refuse(why, "touch and list are yes or no", o->touch);
    if (!is_one_of(o->payload, "signed", "unsigned"))
        return refuse(why, "payload is signed or unsigned", o->payload);
    if ((t->ca[0] && t->ca[0] != '/') || (t->credentials[0] && t->credentials[0] != '/') ||
        (t->command[0] && t->command[0] != '/'))
        return refuse(why, "ca, credentials and command are absolute paths", t->ca);
    if (strspn(t->region, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.") !=
        strlen(t->region))
        return refuse(why, "a region has letters, digits and dashes", t->region);
    return 0;
}

/* ---- the bucket's URL ---- */

/* "https://HOST[:PORT]" of an endpoint without a path. */
static int endpoint_read(const char *text, char **scheme, char **host, char **port,
                         char why[S3_WHY_BYTES])
{
    CURLU *u = curl_url();
    char *path = NULL;
    bool good = u && curl_url_set(u, CURLUPART_URL, text, 0) == CURLUE_OK &&
                curl_url_get(u, CURLUPART_SCHEME, scheme, 0) == CURLUE_OK &&
                curl_url_get(u, CURLUPART_HOST, host, 0) == CURLUE_OK &&
                curl_url_get(u, CURLUPART_PATH, &path, 0) == CURLUE_OK && strcmp(path, "/") == 0 &&
                (strcmp(*scheme, "https") == 0 || strcmp(*scheme, "http") == 0);

    if (good)
        (void)curl_url_get(u, CURLUPART_PORT, port, 0); /* there may be none */
    curl_free(path);
    curl_url_cleanup(u);
    return good ? 0 : refuse(why, "an endpoint is https://HOST[:PORT], or http://", text);
}

static int base_make(const struct options *o, char why[S3_WHY_BYTES])
{
    struct s3_target *t = o->t;
    bool own = o->endpoint[0] != '\0';
    bool virtual_host = o->style[0] ? o->style[0] == 'v' : !own;
    char *scheme = NULL, *host = NULL, *port = NULL, endpoint[S3_TEXT_BYTES];
    int n = 0, rc;

    snprintf(endpoint, sizeof(endpoint), "https://s3.%s.amazonaws.com", t->region);
    rc = endpoint_read(own ? o->endpoint : endpoint, &scheme, &host, &port, why);
    if (rc == 0)
        n = snprintf(t->base, sizeof(t->base), "%s://%s%s%s%s%s/%s%s", scheme,
                     virtual_host ? t->bucket : "", virtual_host ? "." : "", host, port ? ":" : "",
                     port ? port : "", virtual_host ? "" : t->bucket, virtual_host ? "" : "/");
    curl_free(scheme);
    curl_free(host);
    curl_free(port);
    if (n >= (int)sizeof(t->base))
        return refuse(why, "the endpoint is too long", o->endpoint);
    return rc;
}

/* ---- all of it ---- */

static bool bucket_take(struct s3_target *t, const char *host)
{
    size_t n = strlen(host);

    if (n < 3 || n >= sizeof(t->bucket) ||
        strspn(host, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_") != n)
        return false;
    strcpy(t->bucket, host);
    return true;
}

static bool prefix_take(struct s3_target *t, const char *path)
{
    size_t n;

    while (*path == '/')
        path++;
    n = strlen(path);
    while (n > 0 && path[n - 1] == '/')
        n--;
    if (n + 2 > sizeof(t->prefix) || strstr(path, "//") || strstr(path, "./"))
        return false;
    snprintf(t->prefix, sizeof(t->prefix), "%.*s%s", (int)n, path, n ? "/" : "");
    return true;
}

static int parts_take(CURLU *u, struct options *o, const char *text, char why[S3_WHY_BYTES])
{
    char *host = NULL, *path = NULL, *query = NULL;
    int rc = 0;

    if (curl_url_get(u, CURLUPART_HOST, &host, 0) != CURLUE_OK || !bucket_take(o->t, host))
        rc = refuse(why, "a bucket's name has 3 to 63 letters, digits, dots, dashes and _", text);
    else if (curl_url_get(u, CURLUPART_PATH, &path, CURLU_URLDECODE) != CURLUE_OK ||
             !prefix_take(o->t, path))
        rc =
            refuse(why, "a prefix has less than 500 bytes, and no empty part, . or .. in it", text);
    if (rc == 0 && curl_url_get(u, CURLUPART_QUERY, &query, 0) == CURLUE_OK)
        rc = options_take(o, query, why);
    curl_free(host);
    curl_free(path);
    curl_free(query);
    return rc;
}

int s3_target_parse(const char *text, struct s3_target *out, char why[S3_WHY_BYTES])
{
    struct options o = {.t = out};
    CURLU *u = curl_url();
    int rc;

    *out = (struct s3_target){.touch = true};
    if (!u)
        return -ENOMEM;
    rc = strncmp(text, "s3://", 5) == 0 &&
                 curl_url_set(u, CURLUPART_URL, text,
                              CURLU_NON_SUPPORT_SCHEME | CURLU_PATH_AS_IS) == CURLUE_OK
             ? parts_take(u, &o, text, why)
             : refuse(why, "a target is s3://BUCKET[/PREFIX][?OPTION=VALUE[&...]]", text);
    curl_url_cleanup(u);
    if (rc == 0)
        rc = options_check(&o, why);
    if (rc < 0)
        return rc;
    out->touch = strcmp(o.touch, "no") != 0;
    out->list = strcmp(o.list, "no") != 0;
    out->payload_signed = o.payload[0] == 's';
    out->file_named = out->credentials[0] != '\0';
    if (!out->file_named)
        strcpy(out->credentials, S3_CREDENTIALS);
    if (!out->region[0])
        strcpy(out->region, REGION);
    if (!out->profile[0])
        strcpy(out->profile, "default");
    return base_make(&o, why);
}
