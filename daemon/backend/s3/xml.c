#include "daemon/backend/s3/xml.h"

#include <curl/curl.h>
#include <expat.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define PAGE_BYTES (8u << 20)

struct s3_xml {
    XML_Parser parser;
    void (*file_cb)(void *ctx, const struct s3_listed *file);
    void *ctx;
    size_t bytes; /* so far */
    bool broken, ended;
    unsigned depth;
    char root[32], within[32]; /* names of the elements at depth 1 and 2 */
    char text[S3_XML_TEXT_BYTES];
    size_t n_text; /* sizeof(text): it is longer */
    bool truncated;
    char code[64], next[S3_XML_TEXT_BYTES];
    struct s3_listed file;
    unsigned parts; /* of `file`: a bit for each */
};

uint64_t s3_time_parse(const char *text)
{
    struct tm tm = {.tm_sec = 0};
    const char *rest = strptime(text, "%Y-%m-%dT%H:%M:%S", &tm);
    uint64_t ns = 0, unit = 100000000;
    time_t s;

    if (!rest)
        return 0;
    if (*rest == '.')
        for (rest++; *rest >= '0' && *rest <= '9'; rest++, unit /= 10)
            ns += (uint64_t)(*rest - '0') * unit;
    s = timegm(&tm);
    if (s <= 0 || (uint64_t)s >= UINT64_MAX / 1000000000u ||
        (strcmp(rest, "Z") != 0 && strcmp(rest, "+00:00") != 0))
        return 0;
    return (uint64_t)s * 1000000000u + ns;
}

static void begin_cb(void *ctx, const XML_Char *name, const XML_Char **attributes)
{
    struct s3_xml *x = ctx;

    (void)attributes;
    x->depth++;
    x->n_text = 0;
    if (x->depth == 1)
        snprintf(x->root, sizeof(x->root), "%s", name);
    if (x->depth != 2)
        return;
    snprintf(x->within, sizeof(x->within), "%s", name);
    x->parts = 0;
}

static void text_cb(void *ctx, const XML_Char *text, int n)
{
    struct s3_xml *x = ctx;

    if ((size_t)n >= sizeof(x->text) - x->n_text) {
        x->n_text = sizeof(x->text);
        return;
    }
    memcpy(x->text + x->n_text, text, (size_t)n);
    x->n_text += (size_t)n;
}

static void listed_part(struct s3_xml *x, const char *name)
{
    if (strcmp(name, "Key") == 0) {
        char *plain = curl_easy_unescape(NULL, x->text, 0, NULL);

        if (plain)
            snprintf(x->file.key, sizeof(x->file.key), "%s", plain);
        x->parts |= plain ? 1u : 0u;
        curl_free(plain);
    } else if (strcmp(name, "Size") == 0) {
        size_t digits = strspn(x->text, "0123456789");

        /* 18 digits are an exabyte, and no overflow. */
        if (digits > 0 && digits <= 18 && x->text[digits] == '\0') {
            x->file.bytes = strtoull(x->text, NULL, 10);
            x->parts |= 2u;
        }
    } else if (strcmp(name, "LastModified") == 0) {
        x->file.mtime_ns = s3_time_parse(x->text);
        x->parts = (x->parts & ~4u) | (x->file.mtime_ns > 0 ? 4u : 0u); /* it may be there twice */
    }
}

static void top_part(struct s3_xml *x, const char *name)
{
    bool listing = strcmp(x->root, "ListBucketResult") == 0;

    if (strcmp(x->root, "Error") == 0 && strcmp(name, "Code") == 0)
        snprintf(x->code, sizeof(x->code), "%.63s", x->text);
    else if (listing && strcmp(name, "IsTruncated") == 0)
        x->truncated = strcmp(x->text, "true") == 0;
    else if (listing && strcmp(name, "NextContinuationToken") == 0)
        snprintf(x->next, sizeof(x->next), "%s", x->text);
    else if (listing && strcmp(name, "Contents") == 0 && (x->parts & 1)) {
        x->file.whole = x->parts == 7;
        x->file_cb(x->ctx, &x->file);
    }
}

static void end_cb(void *ctx, const XML_Char *name)
{
    struct s3_xml *x = ctx;

    if (x->n_text < sizeof(x->text)) {
        x->text[x->n_text] = '\0';
        if (x->depth == 3 && strcmp(x->within, "Contents") == 0)
            listed_part(x, name);
        else if (x->depth == 2)
            top_part(x, name);
    } else if (x->depth == 2) {
        x->broken = true; /* a token that is too long */
    }
    x->n_text = 0;
    x->depth--;
}

struct s3_xml *s3_xml_new(void (*file_cb)(void *ctx, const struct s3_listed *file), void *ctx)
{
    struct s3_xml *x = calloc(1, sizeof(*x));

    if (!x)
        return NULL;
    x->file_cb = file_cb;
    x->ctx = ctx;
    x->parser = XML_ParserCreate(NULL);
    if (!x->parser) {
        free(x);
        return NULL;
    }
    XML_SetUserData(x->parser, x);
    XML_SetElementHandler(x->parser, begin_cb, end_cb);
    XML_SetCharacterDataHandler(x->parser, text_cb);
    return x;
}

void s3_xml_free(struct s3_xml *x)
{
    if (!x)
        return;
    XML_ParserFree(x->parser);
    free(x);
}

void s3_xml_feed(struct s3_xml *x, const char *data, size_t n)
{
    x->bytes += n;
    if (x->bytes > PAGE_BYTES)
        x->broken = true;
    if (!x->broken && XML_Parse(x->parser, data, (int)n, 0) != XML_STATUS_OK)
        x->broken = true;
}

static bool whole(struct s3_xml *x)
{
    if (!x->broken && !x->ended && XML_Parse(x->parser, "", 0, 1) != XML_STATUS_OK)
        x->broken = true;
    x->ended = true;
    return !x->broken;
}

bool s3_xml_is_listing(struct s3_xml *x)
{
    return whole(x) && strcmp(x->root, "ListBucketResult") == 0 && (!x->truncated || x->next[0]);
}

const char *s3_xml_code(struct s3_xml *x)
{
    return whole(x) ? x->code : "";
}

const char *s3_xml_next(struct s3_xml *x)
{
    return x->truncated ? x->next : "";
}
