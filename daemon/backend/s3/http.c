/* One HTTP request: this file gives it to libcurl, and judges the result.
 *
 * libcurl 7.88 signs, with these rules to keep: parameters are sorted and encoded here, since it
 * signs them as they are; the payload's hash is always a header of ours; no header is without a
 * value (it signs "Expect:" though it does not send it); and no header's name begins with another's
 * and a dash (it would sort them wrong). */
#include "daemon/backend/s3/s3.h"

#include <errno.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define URL_BYTES 4096u
#define HEADER_BYTES 8300u /* a session's token */
#define COPY_BYTES                                                                                 \
    (128L << 10) /* at a time between libcurl and the span: more does not stay in the cache */
#define CONNECT_MS 5000u
#define STALLED_S 5L
#define AGENT "ucmd-backend-s3/" UCM_VERSION
#define FILES 200u /* of an answer */
#define NS 1000000000u

static const char temp_byte[1] = {'x'};

/* ---- listings ---- */

/* NULL: no memory. */
static struct wire_file *file_add(struct s3_job *j)
{
    if (j->n_files == j->cap_files) {
        uint32_t cap = j->cap_files ? 2 * j->cap_files : 64;
        struct wire_file *longer = realloc(j->files, cap * sizeof(*longer));

        if (!longer)
            return NULL;
        j->files = longer;
        j->cap_files = cap;
    }
    return &j->files[j->n_files++];
}

static void file_cb(void *ctx, const struct s3_listed *file)
{
    struct s3_job *j = ctx;
    size_t prefix = strlen(j->s3->target.prefix) + strlen(j->r->key);
    const char *name = file->key + prefix;
    struct wire_file *f;

    if (j->step != S3_LIST || strlen(file->key) <= prefix || strlen(name) > WIRE_KEY_BYTES ||
        strchr(name, '/'))
        return;
    f = file->whole ? file_add(j) : NULL;
    if (!f) {
        j->unread++;
        return;
    }
    strcpy(f->name, name);
    f->bytes = file->bytes;
    f->mtime_ns = file->mtime_ns;
}

static int page_send(struct s3_job *j)
{
    int rc = 0;

    for (uint32_t at = 0; rc == 0 && at < j->n_files; at += FILES)
        rc = ucm_backend_files(j->s3->backend, j->r, j->files + at,
                               j->n_files - at < FILES ? j->n_files - at : FILES);
    return rc;
}

/* ---- bytes ---- */

/* Decides, at the first of them, whose bytes an answer has. */
static void judge(struct s3_job *j)
{
    curl_off_t length = -1;
    long code = 0;

    j->judged = true;
    curl_easy_getinfo(j->easy, CURLINFO_RESPONSE_CODE, &code);
    curl_easy_getinfo(j->easy, CURLINFO_CONTENT_LENGTH_DOWNLOAD_T, &length);
    j->to_span = j->step == S3_GET && code == 200;
    j->wrong_bytes = j->to_span && length >= 0 && (uint64_t)length != j->r->bytes;
}

static size_t answer_cb(char *data, size_t size, size_t n, void *ctx)
{
    struct s3_job *j = ctx;

    n *= size;
    if (!j->judged)
        judge(j);
    if (!j->to_span) {
        if (!j->xml)
            j->xml = s3_xml_new(file_cb, j);
        if (!j->xml)
            return CURL_WRITEFUNC_ERROR;
        s3_xml_feed(j->xml, data, n);
        return n;
    }
    if (j->wrong_bytes || n > j->r->bytes - j->at) {
        j->wrong_bytes = true;
        return CURL_WRITEFUNC_ERROR;
    }
    memcpy((uint8_t *)j->r->data + j->at, data, n);
    j->at += n;
    return n;
}

static const void *upload_of(const struct s3_job *j, uint64_t *bytes)
{
    bool whole = j->step == S3_PUT || j->step == S3_PUT_NEW;

    *bytes = whole ? j->r->bytes : j->step == S3_PUT_TEMP ? sizeof(temp_byte) : 0;
    return whole ? j->r->data : temp_byte;
}

static size_t upload_cb(char *to, size_t size, size_t n, void *ctx)
{
    struct s3_job *j = ctx;
    uint64_t bytes;
    const uint8_t *data = upload_of(j, &bytes);

    n *= size;
    if (n > bytes - j->at)
        n = (size_t)(bytes - j->at);
    memcpy(to, data + j->at, n);
    j->at += n;
    return n;
}

/* A connection that was kept broke before the server had answered: from the start again. */
static int rewind_cb(void *ctx, curl_off_t at, int origin)
{
    struct s3_job *j = ctx;

    if (origin != SEEK_SET || at < 0)
        return CURL_SEEKFUNC_CANTSEEK;
    j->at = (uint64_t)at;
    return CURL_SEEKFUNC_OK;
}

/* ---- what it asks for ---- */

static const char *name_of(const struct s3_job *j)
{
    return j->step == S3_PUT_TEMP || j->step == S3_DELETE_TEMP ? j->r->temp : j->r->key;
}

static bool listing_url(const struct s3_job *j, char url[URL_BYTES])
{
    const struct s3_target *t = &j->s3->target;
    bool page = j->step == S3_LIST, fits = true;
    size_t n = strlen(t->base) - 1;

    /* Names in the order of the alphabet. */
    snprintf(url, URL_BYTES, "%.*s?", (int)n, t->base);
    if (strchr(t->base + 8, '/') == t->base + n) /* the bucket is the host's name */
        snprintf(url, URL_BYTES, "%s?", t->base);
    if (page && j->token[0]) {
        strcat(url, "continuation-token=");
        fits = s3_encode(url, URL_BYTES - 100, j->token, true);
        strcat(url, "&");
    }
    strcat(url, "encoding-type=url&list-type=2&max-keys=");
    strcat(url, page ? "1000&prefix=" : "1&prefix=");
    fits = fits && s3_encode(url, URL_BYTES, t->prefix, true);
    return fits && (!page || s3_encode(url, URL_BYTES, j->r->key, true));
}

static bool object_url(const struct s3_job *j, char url[URL_BYTES])
{
    const struct s3_target *t = &j->s3->target;

    snprintf(url, URL_BYTES, "%s", t->base);
    return s3_encode(url, URL_BYTES, t->prefix, false) &&
           s3_encode(url, URL_BYTES, name_of(j), false);
}

static bool header_add(struct s3_job *j, const char *name, const char *value)
{
    char line[HEADER_BYTES];
    struct curl_slist *longer;

    if (snprintf(line, sizeof(line), "%s: %s", name, value) >= (int)sizeof(line))
        return false;
    longer = curl_slist_append(j->headers, line);
    if (longer)
        j->headers = longer;
    return longer != NULL;
}

/* Headers of a payload that is sent. Without a signature of the payload its hash is not needed: the
 * daemon checks what it reads. */
static bool payload_header(struct s3_job *j)
{
    unsigned char hash[EVP_MAX_MD_SIZE];
    char text[2 * EVP_MAX_MD_SIZE + 1] = "UNSIGNED-PAYLOAD";
    unsigned n = 0;
    uint64_t bytes;
    const void *data = upload_of(j, &bytes);

    if (j->s3->target.payload_signed) {
        if (EVP_Digest(data, bytes, hash, &n, EVP_sha256(), NULL) != 1)
            return false;
        for (unsigned i = 0; i < n; i++)
            snprintf(text + 2 * i, 3, "%02x", hash[i]);
    }
    return header_add(j, "x-amz-content-sha256", text);
}

static bool headers_make(struct s3_job *j, const struct s3_key *key)
{
    char source[URL_BYTES];
    bool good = payload_header(j);

    if (key->token[0])
        good = good && header_add(j, "x-amz-security-token", key->token);
    if (j->step == S3_PUT || j->step == S3_PUT_NEW)
        good = good && header_add(j, "content-type", "application/octet-stream");
    if (j->step == S3_PUT_NEW)
        good = good && header_add(j, "if-none-match", "*");
    if (j->step == S3_COPY) {
        snprintf(source, sizeof(source), "/%s/", j->s3->target.bucket);
        good = good && s3_encode(source, sizeof(source), j->s3->target.prefix, false) &&
               s3_encode(source, sizeof(source), j->r->key, false) &&
               header_add(j, "x-amz-copy-source", source) &&
               header_add(j, "x-amz-metadata-directive", "REPLACE");
    }
    return good;
}

/* ---- libcurl ---- */

static void method_set(struct s3_job *j)
{
    uint64_t bytes;

    switch (j->step) {
    case S3_HEAD:
        curl_easy_setopt(j->easy, CURLOPT_NOBODY, 1L);
        break;
    case S3_DELETE:
    case S3_DELETE_TEMP:
        curl_easy_setopt(j->easy, CURLOPT_CUSTOMREQUEST, "DELETE");
        break;
    case S3_PUT_NEW:
    case S3_PUT:
    case S3_COPY:
    case S3_PUT_TEMP:
        (void)upload_of(j, &bytes);
        curl_easy_setopt(j->easy, CURLOPT_UPLOAD, 1L);
        curl_easy_setopt(j->easy, CURLOPT_INFILESIZE_LARGE, (curl_off_t)bytes);
        curl_easy_setopt(j->easy, CURLOPT_READFUNCTION, upload_cb);
        curl_easy_setopt(j->easy, CURLOPT_READDATA, j);
        curl_easy_setopt(j->easy, CURLOPT_SEEKFUNCTION, rewind_cb);
        curl_easy_setopt(j->easy, CURLOPT_SEEKDATA, j);
        break;
    default:
        break; /* GET */
    }
}

static void connection_set(struct s3_job *j)
{
    const struct s3_target *t = &j->s3->target;
    uint64_t now = clock_ms(), left = j->r->until_ms > now ? j->r->until_ms - now : 1;

    curl_easy_setopt(j->easy, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
    curl_easy_setopt(j->easy, CURLOPT_PROTOCOLS_STR,
                     strncmp(t->base, "https:", 6) == 0 ? "https" : "http");
    curl_easy_setopt(j->easy, CURLOPT_SSLVERSION, (long)CURL_SSLVERSION_TLSv1_2);
    if (t->ca[0]) {
        curl_easy_setopt(j->easy, CURLOPT_CAINFO, t->ca);
        curl_easy_setopt(j->easy, CURLOPT_CAPATH, NULL);
    }
    curl_easy_setopt(j->easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(j->easy, CURLOPT_TCP_KEEPALIVE, 1L);
    curl_easy_setopt(j->easy, CURLOPT_BUFFERSIZE, COPY_BYTES);
    curl_easy_setopt(j->easy, CURLOPT_UPLOAD_BUFFERSIZE, COPY_BYTES);
    curl_easy_setopt(j->easy, CURLOPT_TIMEOUT_MS, (long)left);
    curl_easy_setopt(j->easy, CURLOPT_CONNECTTIMEOUT_MS,
                     (long)(left < CONNECT_MS ? left : CONNECT_MS));
    curl_easy_setopt(j->easy, CURLOPT_LOW_SPEED_LIMIT, 1L);
    curl_easy_setopt(j->easy, CURLOPT_LOW_SPEED_TIME, STALLED_S);
}

static void signature_set(struct s3_job *j, const struct s3_key *key)
{
    char provider[96];

    snprintf(provider, sizeof(provider), "aws:amz:%s:s3", j->s3->target.region);
    curl_easy_setopt(j->easy, CURLOPT_AWS_SIGV4, provider);
    curl_easy_setopt(j->easy, CURLOPT_USERNAME, key->id);
    curl_easy_setopt(j->easy, CURLOPT_PASSWORD, key->secret);
    curl_easy_setopt(j->easy, CURLOPT_HTTPHEADER, j->headers);
}

int s3_http_begin(struct s3_job *j, const struct s3_key *key)
{
    bool lists = j->step == S3_LIST || j->step == S3_PROBE;
    char url[URL_BYTES];

    j->at = 0;
    j->n_files = 0;
    j->judged = j->to_span = j->wrong_bytes = j->code_known = false;
    j->error[0] = '\0';
    curl_easy_reset(j->easy);
    if (!headers_make(j, key) || !(lists ? listing_url(j, url) : object_url(j, url)))
        return -ENOMEM;
    curl_easy_setopt(j->easy, CURLOPT_URL, url);
    curl_easy_setopt(j->easy, CURLOPT_PATH_AS_IS, 1L);
    curl_easy_setopt(j->easy, CURLOPT_PRIVATE, j);
    curl_easy_setopt(j->easy, CURLOPT_ERRORBUFFER, j->error);
    curl_easy_setopt(j->easy, CURLOPT_USERAGENT, AGENT);
    curl_easy_setopt(j->easy, CURLOPT_FILETIME, 1L);
    curl_easy_setopt(j->easy, CURLOPT_WRITEFUNCTION, answer_cb);
    curl_easy_setopt(j->easy, CURLOPT_WRITEDATA, j);
    connection_set(j);
    method_set(j);
    signature_set(j, key);
    return curl_multi_add_handle(j->s3->multi, j->easy) == CURLM_OK ? 0 : -ENOMEM;
}

/* ---- what came of it ---- */

static void reason_set(struct s3_job *j, const char *what, const char *more)
{
    snprintf(j->reason, sizeof(j->reason), "%.66s%s%.50s", what, more[0] ? ": " : "", more);
}

/* No answer, or not all of it. */
static enum s3_outcome broken(struct s3_job *j, CURLcode result)
{
    reason_set(j, j->error[0] ? j->error : curl_easy_strerror(result), "");
    switch (result) {
    case CURLE_WRITE_ERROR:
        return j->wrong_bytes ? S3_WRONG_BYTES : S3_REFUSED;
    case CURLE_OPERATION_TIMEDOUT:
        return S3_SLOW;
    case CURLE_COULDNT_RESOLVE_HOST:
    case CURLE_COULDNT_CONNECT:
        return S3_AWAY;
    case CURLE_OUT_OF_MEMORY:
    case CURLE_PEER_FAILED_VERIFICATION:
    case CURLE_SSL_CACERT_BADFILE:
    case CURLE_SSL_CIPHER:
    case CURLE_URL_MALFORMAT:
    case CURLE_UNSUPPORTED_PROTOCOL:
        return S3_REFUSED;
    default:
        return S3_AGAIN;
    }
}

struct known {
    const char *code;
    enum s3_outcome outcome;
};

/* Codes that say more than the status next to them. */
static const struct known codes[] = {
    {"NoSuchKey", S3_MISSING},
    {"NoSuchBucket", S3_NO_BUCKET},
    {"SlowDown", S3_AGAIN},
    {"RequestTimeout", S3_AGAIN},
    {"InternalError", S3_AGAIN},
    {"ServiceUnavailable", S3_AGAIN},
    {"ConditionalRequestConflict", S3_AGAIN},
    {"OperationAborted", S3_AGAIN},
    {"PreconditionFailed", S3_EXISTS},
    {"QuotaExceeded", S3_FULL},
    {"EntityTooLarge", S3_FULL}, /* a quota's answer in Swift */
    {"XMinioStorageFull", S3_FULL},
    {"ExpiredToken", S3_DENIED},
    {"InvalidToken", S3_DENIED},
    {"TokenRefreshRequired", S3_DENIED},
    {"InvalidAccessKeyId", S3_DENIED},
    {"SignatureDoesNotMatch", S3_DENIED},
};

static enum s3_outcome status_outcome(const struct s3_job *j, long status)
{
    switch (status) {
    case 400: /* to a HEAD it comes without its code, which may be ExpiredToken */
        return j->step == S3_HEAD ? S3_DENIED : S3_REFUSED;
    case 401:
    case 403:
        return S3_DENIED;
    case 404:
        return S3_MISSING;
    case 412:
        return S3_EXISTS;
    case 413:
    case 507:
        return S3_FULL;
    case 408:
    case 409:
    case 429:
    case 500:
    case 502:
    case 503:
    case 504:
        return S3_AGAIN;
    case 501:
        return j->step == S3_PUT_NEW ? S3_UNSUPPORTED : S3_REFUSED;
    default:
        return S3_REFUSED;
    }
}

static void region_note(struct s3_job *j)
{
    struct curl_header *h;

    if (curl_easy_header(j->easy, "x-amz-bucket-region", 0, CURLH_HEADER, -1, &h) == CURLHE_OK &&
        strcmp(h->value, j->s3->target.region) != 0)
        snprintf(j->reason, sizeof(j->reason), "the bucket is in region %.40s: write region=%.40s",
                 h->value, h->value);
}

static enum s3_outcome refused(struct s3_job *j, long status)
{
    const char *code = j->xml ? s3_xml_code(j->xml) : "";
    char number[32];
    enum s3_outcome o = status_outcome(j, status);

    snprintf(number, sizeof(number), "the server answered %ld", status);
    reason_set(j, number, code);
    region_note(j);
    j->code_known = code[0] != '\0';
    for (size_t i = 0; i < sizeof(codes) / sizeof(codes[0]); i++)
        if (strcmp(code, codes[i].code) == 0)
            o = codes[i].outcome;
    return o;
}

/* An answer that says that it was done. */
static enum s3_outcome done(struct s3_job *j, long status)
{
    bool lists = j->step == S3_LIST || j->step == S3_PROBE;

    if (j->step == S3_COPY && j->xml && s3_xml_code(j->xml)[0])
        return refused(j, status); /* it has an error's text after a 200 */
    if (lists && (!j->xml || !s3_xml_is_listing(j->xml))) {
        reason_set(j, "what answered is no listing of S3: is the endpoint right?", "");
        return S3_REFUSED;
    }
    if (j->step == S3_LIST) {
        j->s3->gone |= page_send(j) == -EPIPE;
        snprintf(j->token, sizeof(j->token), "%s", s3_xml_next(j->xml));
    }
    if (j->step == S3_GET && j->at != j->r->bytes)
        return S3_WRONG_BYTES;
    return S3_DONE;
}

enum s3_outcome s3_http_end(struct s3_job *j, CURLcode result, uint64_t *wait_ms)
{
    curl_off_t wait_s = 0;
    enum s3_outcome o;
    long status = 0;

    (void)curl_multi_remove_handle(j->s3->multi, j->easy);
    curl_easy_getinfo(j->easy, CURLINFO_RESPONSE_CODE, &status);
    curl_easy_getinfo(j->easy, CURLINFO_RETRY_AFTER, &wait_s);
    *wait_ms = wait_s > 0 && wait_s < 86400 ? (uint64_t)wait_s * 1000 : 0;
    if (result != CURLE_OK)
        o = broken(j, result);
    else
        o = status >= 200 && status < 300 ? done(j, status) : refused(j, status);
    curl_slist_free_all(j->headers);
    j->headers = NULL;
    s3_xml_free(j->xml);
    j->xml = NULL;
    return o;
}

uint64_t s3_http_bytes(struct s3_job *j)
{
    curl_off_t length = -1;

    curl_easy_getinfo(j->easy, CURLINFO_CONTENT_LENGTH_DOWNLOAD_T, &length);
    return length > 0 ? (uint64_t)length : 0;
}

uint64_t s3_http_mtime_ns(struct s3_job *j)
{
    curl_off_t s = -1;

    curl_easy_getinfo(j->easy, CURLINFO_FILETIME_T, &s);
    return s > 0 ? (uint64_t)s * NS : 0;
}

uint64_t s3_http_now_ns(struct s3_job *j)
{
    struct curl_header *h;
    time_t s = -1;

    if (curl_easy_header(j->easy, "Date", 0, CURLH_HEADER, -1, &h) == CURLHE_OK)
        s = curl_getdate(h->value, NULL);
    return s > 0 ? (uint64_t)s * NS : 0;
}
