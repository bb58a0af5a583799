/* A root that is a Mooncake store: what every backend promises, through ucmd-backend-mooncake. The store is a real master with a process that lends
 * it memory where UCM_MOONCAKE_PYTHON names a Python that has Mooncake's client (one phase of `make check`); else the client is played over a folder. */
#include "tests/unit/share/share_contract.h"

#include "daemon/config/roots.h"

#include <curl/curl.h>
#include <signal.h>
#include <sys/wait.h>

#define PLAYED "tests/integration/mooncake_played/python"
#define SERVER "tests/integration/mooncake_server.py"

/* Started once, by the process that starts the tests, which are children of its. */
static struct {
    pid_t parent, pid;
    char folder[128], why[160];
    int port, in;
    char target[128], options[512];
} server;

static struct config_process process;
static char prefix[64];

/* ---- the server ---- */

static int wipe_cb(const char *path, const struct stat *st, int type, struct FTW *at)
{
    (void)st, (void)type, (void)at;
    return remove(path);
}

static void serve(int in, int out)
{
    const char *real = getenv("UCM_MOONCAKE_PYTHON");

    dup2(in, STDIN_FILENO);
    dup2(out, STDOUT_FILENO);
    execl(real ? real : PLAYED, real ? real : PLAYED, "-B", SERVER, server.folder, real, NULL);
    _exit(1);
}

static void __attribute__((constructor)) server_start(void)
{
    const char *folder = getenv("UCM_TEST_DISK"), *real = getenv("UCM_MOONCAKE_PYTHON");
    int in[2], out[2];
    char line[1024] = "";

    server.parent = getpid();
    if (real && access(real, X_OK) < 0) {
        snprintf(server.why, sizeof(server.why),
                 "no Mooncake client: `make setup` fetches it from PyPI");
        return;
    }
    snprintf(server.folder, sizeof(server.folder), "%s/ucm-mooncake-XXXXXX",
             folder ? folder : "/tmp");
    if (!mkdtemp(server.folder) || chmod(server.folder, 0777) < 0 || pipe2(in, O_CLOEXEC) < 0 ||
        pipe2(out, O_CLOEXEC) < 0) {
        snprintf(server.why, sizeof(server.why), "no folder for the store");
        return;
    }
    server.pid = fork();
    if (server.pid == 0)
        serve(in[0], out[1]);
    close(in[0]);
    close(out[1]);
    server.in = in[1];
    if (read(out[0], line, sizeof(line) - 1) <= 0 ||
        sscanf(line, "%d %127s %511s", &server.port, server.target, server.options) != 3)
        snprintf(server.why, sizeof(server.why), "the store does not start");
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

/* ---- its objects, seen by another client ---- */

struct bytes {
    uint8_t *data;
    uint64_t n, at;
};

static size_t take_cb(char *data, size_t size, size_t n, void *ctx)
{
    struct bytes *b = ctx;

    b->data = realloc(b->data, b->n + size * n + 1);
    memcpy(b->data + b->n, data, size * n);
    b->n += size * n;
    b->data[b->n] = '\0';
    return size * n;
}

static size_t give_cb(char *to, size_t size, size_t n, void *ctx)
{
    struct bytes *b = ctx;

    n = size * n < b->n - b->at ? size * n : (size_t)(b->n - b->at);
    memcpy(to, b->data + b->at, n);
    b->at += n;
    return n;
}

/* The status of a request for /PATH; what came is in *in. */
static long ask(const char *method, const char *path, struct bytes *out, struct bytes *in)
{
    CURL *e = curl_easy_init();
    char url[700];
    CURLcode rc;
    long status = 0;

    snprintf(url, sizeof(url), "http://127.0.0.1:%d/%s", server.port, path);
    curl_easy_setopt(e, CURLOPT_URL, url);
    curl_easy_setopt(e, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(e, CURLOPT_WRITEFUNCTION, take_cb);
    curl_easy_setopt(e, CURLOPT_WRITEDATA, in);
    curl_easy_setopt(e, CURLOPT_CUSTOMREQUEST, method);
    if (out) {
        curl_easy_setopt(e, CURLOPT_UPLOAD, 1L);
        curl_easy_setopt(e, CURLOPT_INFILESIZE_LARGE, (curl_off_t)out->n);
        curl_easy_setopt(e, CURLOPT_READFUNCTION, give_cb);
        curl_easy_setopt(e, CURLOPT_READDATA, out);
    }
    rc = curl_easy_perform(e);
    cr_assert_eq(rc, CURLE_OK, "%s %s: %s", method, url, curl_easy_strerror(rc));
    curl_easy_getinfo(e, CURLINFO_RESPONSE_CODE, &status);
    curl_easy_cleanup(e);
    return status;
}

static long ask_of(const char *method, const char *path, struct bytes *out, struct bytes *in)
{
    char key[600];

    snprintf(key, sizeof(key), "%s%s", prefix, path);
    return ask(method, key, out, in);
}

static uint8_t *remote_get(const char *path, uint64_t *bytes)
{
    struct bytes in = {calloc(1, 1), 0, 0};
    long status = ask_of("GET", path, NULL, &in);

    cr_assert(status == 200 || status == 404, "%s: %ld", path, status);
    *bytes = in.n;
    if (status == 200)
        return in.data;
    free(in.data);
    return NULL;
}

static void remote_put(const char *path, const void *data, uint64_t n)
{
    struct bytes out = {(uint8_t *)data, n, 0}, in = {calloc(1, 1), 0, 0};
    long status = ask_of("PUT", path, &out, &in);

    cr_assert_eq(status, 200, "%s: %ld", path, status);
    free(in.data);
}

static void remote_remove(const char *path)
{
    struct bytes in = {calloc(1, 1), 0, 0};

    cr_assert_eq(ask_of("DELETE", path, NULL, &in), 204, "%s", path);
    free(in.data);
}

static unsigned remote_count(void)
{
    struct bytes in = {calloc(1, 1), 0, 0};
    char path[100];
    unsigned n;

    snprintf(path, sizeof(path), "?count=%s", prefix);
    cr_assert_eq(ask("GET", path, NULL, &in), 200);
    n = (unsigned)atoi((char *)in.data);
    free(in.data);
    return n;
}

static const struct contract_remote remote = {.get = remote_get,
                                              .put = remote_put,
                                              .remove = remote_remove,
                                              .count = remote_count,
                                              .objects_only = true};

/* ---- a test ---- */

static void post(const char *what)
{
    struct bytes in = {calloc(1, 1), 0, 0};
    char path[100];

    snprintf(path, sizeof(path), "%s/%s", what, prefix);
    cr_assert_eq(ask("POST", path, NULL, &in), 204);
    free(in.data);
}

/* Of a real store, all tests' master: one test at a time. */
static void away(struct contract *c)
{
    (void)c;
    post("away");
}

static void back(struct contract *c)
{
    (void)c;
    post("back");
}

static void process_of(const char *ucmd)
{
    char *python = strstr(server.options, "python=") + strlen("python=");

    snprintf(process.command, sizeof(process.command), "%.*s/ucmd-backend-mooncake %s/%s?%s",
             (int)(strrchr(ucmd, '/') - ucmd), ucmd, server.target, prefix, server.options);
    process.buffer_bytes = 20u << 20;
    process.memory_bytes = CONFIG_MEMORY;
    process.patience_ms = CONTRACT_DEADLINE_MS; /* a busy machine starts processes slowly */
    process.network = true;
    snprintf(process.read, sizeof(process.read), "%s", python);
    *strrchr(process.read, '/') = '\0';
    if (getenv("UCM_MOONCAKE_PYTHON")) /* FOLDER/bin/python: all of the folder */
        *strrchr(process.read, '/') = '\0';
    else
        snprintf(process.folder, sizeof(process.folder), "%s", server.folder);
}

static void begin(struct contract *c)
{
    const char *ucmd = getenv("UCMD") ? getenv("UCMD") : "build/ucmd";
    char *real = realpath(ucmd, NULL);

    if (server.why[0])
        cr_skip("%s", server.why);
    cr_assert(real, "%s", ucmd);
    signal(SIGPIPE, SIG_IGN); /* as the daemon does */
    snprintf(c->launcher, sizeof(c->launcher), "%s", real);
    snprintf(prefix, sizeof(prefix), "kv-%d", (int)getpid());
    process_of(real);
    strcpy(c->target, CONFIG_PROCESS "store");
    c->process = &process;
    c->ops = &share_process;
    c->root_away = away;
    c->root_back = back;
    contract_remote = &remote;
    if (getenv("UCM_MOONCAKE_PYTHON"))
        post("back"); /* a test that failed may have left it stopped */
    free(real);
}

static void end(struct contract *c)
{
    (void)c;
}

SHARE_CONTRACT_OBJECTS(share_mooncake, begin, end)
