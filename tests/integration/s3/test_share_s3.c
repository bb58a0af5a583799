/* A root that is a bucket: what every backend promises, through ucmd-backend-s3 and OpenStack Swift's S3 API. */
/* Sanitizers: address */
#include "tests/integration/s3/s3_plain.h"
#include "tests/unit/share/share_contract.h"

#include "daemon/config/roots.h"

#include <signal.h>
#include <sys/wait.h>
#include <sys/xattr.h>

#define PYTHON "/usr/bin/python3"
#define KEY "test:tester"
#define SECRET "testing"
#define SERVER "tests/integration/swift_server.py"

/* Started once, by the process that starts the tests, which are children of its. */
static struct {
    pid_t parent, pid;
    char folder[128], why[160];
    int port, in;
} server;

static struct config_process process;
static char bucket[64];

/* ---- the server ---- */

static int wipe_cb(const char *path, const struct stat *st, int type, struct FTW *at)
{
    (void)st, (void)type, (void)at;
    return remove(path);
}

static bool folder_make(void)
{
    const char *disk = getenv("UCM_TEST_DISK");

    snprintf(server.folder, sizeof(server.folder), "%s/ucm-swift-XXXXXX", disk ? disk : "/tmp");
    if (!mkdtemp(server.folder)) {
        server.folder[0] = '\0';
        snprintf(server.why, sizeof(server.why), "no folder for Swift");
    } else if (setxattr(server.folder, "user.swift", "x", 1, 0) < 0) {
        snprintf(server.why, sizeof(server.why),
                 "Swift needs extended attributes, which %.80s has not", disk ? disk : "/tmp");
    }
    return server.why[0] == '\0';
}

static void serve(int in, int out)
{
    dup2(in, STDIN_FILENO);
    dup2(out, STDOUT_FILENO);
    execl(PYTHON, PYTHON, "-B", SERVER, server.folder, NULL);
    _exit(1);
}

static void __attribute__((constructor)) server_start(void)
{
    int in[2], out[2];
    char line[16] = "";

    server.parent = getpid();
#ifdef __SANITIZE_THREAD__
    snprintf(server.why, sizeof(server.why), "nothing here has threads");
    return;
#endif
    if (!folder_make() || pipe2(in, O_CLOEXEC) < 0 || pipe2(out, O_CLOEXEC) < 0)
        return;
    server.pid = fork();
    if (server.pid == 0)
        serve(in[0], out[1]);
    close(in[0]);
    close(out[1]);
    server.in = in[1];
    if (read(out[0], line, sizeof(line) - 1) > 0)
        server.port = atoi(line);
    else
        snprintf(server.why, sizeof(server.why),
                 "Swift does not start: is python3-swift installed?");
    close(out[0]);
}

static void __attribute__((destructor)) server_stop(void)
{
    if (getpid() != server.parent)
        return;
    if (server.pid > 0) {
        close(server.in); /* its end */
        (void)waitpid(server.pid, NULL, 0);
    }
    if (server.folder[0])
        (void)nftw(server.folder, wipe_cb, 16, FTW_DEPTH | FTW_PHYS);
}

/* ---- its files, seen by another client ---- */

static size_t take_cb(char *data, size_t size, size_t n, void *ctx)
{
    struct s3_bytes *b = ctx;

    b->data = realloc(b->data, b->n + size * n + 1);
    memcpy(b->data + b->n, data, size * n);
    b->n += size * n;
    b->data[b->n] = '\0';
    return size * n;
}

/* The status; what came is in *in. */
static long ask(const char *method, const char *path, struct s3_bytes *out, struct s3_bytes *in)
{
    struct curl_slist *h = curl_slist_append(NULL, S3_PLAIN_PAYLOAD);
    CURL *e = curl_easy_init();
    char url[700];
    long status = 0;

    snprintf(url, sizeof(url), "http://127.0.0.1:%d/%s%s", server.port, bucket, path);
    s3_plain_begin(e, url, KEY, SECRET, h);
    curl_easy_setopt(e, CURLOPT_WRITEFUNCTION, take_cb);
    curl_easy_setopt(e, CURLOPT_WRITEDATA, in);
    curl_easy_setopt(e, CURLOPT_CUSTOMREQUEST, method);
    if (out)
        s3_plain_upload(e, out);
    cr_assert_eq(curl_easy_perform(e), CURLE_OK, "%s %s", method, path);
    curl_easy_getinfo(e, CURLINFO_RESPONSE_CODE, &status);
    curl_easy_cleanup(e);
    curl_slist_free_all(h);
    return status;
}

static uint8_t *remote_get(const char *path, uint64_t *bytes)
{
    struct s3_bytes in = {calloc(1, 1), 0, 0};
    long status = ask("GET", path, NULL, &in);

    cr_assert(status == 200 || status == 404, "%s: %ld", path, status);
    *bytes = in.n;
    if (status == 200)
        return in.data;
    free(in.data);
    return NULL;
}

static void remote_put(const char *path, const void *data, uint64_t n)
{
    struct s3_bytes out = {(uint8_t *)data, n, 0}, in = {calloc(1, 1), 0, 0};
    long status = ask("PUT", path, &out, &in);

    cr_assert_eq(status, 200, "%s: %ld %s", path, status, in.data);
    free(in.data);
}

static void remote_remove(const char *path)
{
    struct s3_bytes in = {calloc(1, 1), 0, 0};

    cr_assert_eq(ask("DELETE", path, NULL, &in), 204, "%s: %s", path, in.data);
    free(in.data);
}

static unsigned remote_count(void)
{
    struct s3_bytes in = {calloc(1, 1), 0, 0};
    unsigned n = 0;

    cr_assert_eq(ask("GET", "?list-type=2", NULL, &in), 200);
    for (const char *at = (char *)in.data; (at = strstr(at, "<Key>")) != NULL; at++)
        n++;
    free(in.data);
    return n;
}

static const struct contract_remote remote = {.get = remote_get,
                                              .put = remote_put,
                                              .remove = remote_remove,
                                              .count = remote_count,
                                              .removes_blind = true};

/* ---- a test ---- */

static void away(struct contract *c)
{
    char path[256];

    (void)c;
    snprintf(path, sizeof(path), "%s/away-%s", server.folder, bucket);
    contract_remote = NULL;
    contract_put(path, "", 0);
    contract_remote = &remote;
}

static void back(struct contract *c)
{
    char path[256];

    (void)c;
    snprintf(path, sizeof(path), "%s/away-%s", server.folder, bucket);
    cr_assert_eq(unlink(path), 0);
}

static void begin(struct contract *c)
{
    const char *ucmd = getenv("UCMD") ? getenv("UCMD") : "build/ucmd";
    char *real = realpath(ucmd, NULL), credentials[160];

    if (server.why[0])
        cr_skip("%s", server.why);
    cr_assert(real, "%s", ucmd);
    signal(SIGPIPE, SIG_IGN); /* as the daemon does */
    snprintf(c->launcher, sizeof(c->launcher), "%s", real);
    snprintf(credentials, sizeof(credentials), "%s/credentials-%d", server.folder, (int)getpid());
    cr_assert(s3_credentials_lay(credentials, KEY, SECRET), "%s", credentials);
    snprintf(bucket, sizeof(bucket), "kv-%d", (int)getpid());
    snprintf(process.command, sizeof(process.command),
             "%.*s/ucmd-backend-s3 s3://%s?endpoint=http://127.0.0.1:%d&credentials=%s",
             (int)(strrchr(real, '/') - real), real, bucket, server.port, credentials);
    process.buffer_bytes = 20u << 20;
    process.network = true;
    snprintf(process.read, sizeof(process.read), "%s", credentials);
    strcpy(c->target, CONFIG_PROCESS "bucket");
    c->process = &process;
    c->ops = &share_process;
    c->root_away = away;
    c->root_back = back;
    contract_remote = &remote;
    remote_put("", "", 0);
    free(real);
}

static void end(struct contract *c)
{
    (void)c;
}

SHARE_CONTRACT_STORE(share_s3, begin, end)
