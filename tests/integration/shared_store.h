/* The tests of a backend's promises for a store with a server of its own. The process that starts
 * the tests starts the server once. Another client (libcurl) sees the store's files. A test program
 * says how its server is started and asked. */
#ifndef UCMD_TESTS_SHARED_STORE_H
#define UCMD_TESTS_SHARED_STORE_H

#include "daemon/config/roots.h"
#include "tests/unit/shared/shared_contract.h"

#include <curl/curl.h>
#include <signal.h>
#include <sys/wait.h>

#define STORE_BUFFER_BYTES (8u << 20)

struct store_bytes {
    uint8_t *data;
    uint64_t n, at;
};

/* The test program's own. */
struct store_kind {
    const char *name, *backend; /* ucmd-backend-NAME */
    /* Sets the server up in store.directory and becomes it. The server prints one line, store.said,
     * and ends with its standard input. */
    bool (*ready)(void); /* false: not here, for store.why */
    void (*serve)(void);
    /* The URL of a request for `path` in the test's part of the store. */
    void (*url)(const char *path, char out[700]);
    /* NULL, or adds what authorizes it; the list is freed after the request. */
    struct curl_slist *(*authorize)(CURL *easy);
};
static const struct store_kind store_kind;

static struct {
    pid_t parent, pid;
    char directory[128], why[160], said[1024];
    int in;
    char part[64];                 /* of this test: a bucket, or a prefix */
    struct config_process process; /* its backend */
} store;

static inline void store_fork(void)
{
    int in[2], out[2];

    if (pipe2(in, O_CLOEXEC) < 0 || pipe2(out, O_CLOEXEC) < 0)
        return;
    store.pid = fork();
    if (store.pid == 0) {
        dup2(in[0], STDIN_FILENO);
        dup2(out[1], STDOUT_FILENO);
        store_kind.serve();
        _exit(1);
    }
    close(in[0]);
    close(out[1]);
    store.in = in[1];
    if (read(out[0], store.said, sizeof(store.said) - 1) <= 0)
        snprintf(store.why, sizeof(store.why), "%s does not start", store_kind.name);
    close(out[0]);
}

static void __attribute__((constructor)) store_start(void)
{
    const char *disk = getenv("UCM_TEST_DISK");

    store.parent = getpid();
    snprintf(store.directory, sizeof(store.directory), "%s/ucm-store-XXXXXX", disk ? disk : "/tmp");
    if (!mkdtemp(store.directory)) {
        store.directory[0] = '\0';
        snprintf(store.why, sizeof(store.why), "no directory for %s", store_kind.name);
    } else if (store_kind.ready()) {
        store_fork();
    }
}

static void __attribute__((destructor)) store_stop(void)
{
    if (getpid() != store.parent)
        return;
    if (store.pid > 0) {
        close(store.in); /* its end */
        (void)waitpid(store.pid, NULL, 0);
    }
    if (store.directory[0])
        (void)wipe(store.directory);
}

/* ---- its files, seen by another client ---- */

static inline size_t store_take_cb(char *data, size_t size, size_t n, void *ctx)
{
    struct store_bytes *b = ctx;

    b->data = realloc(b->data, b->n + size * n + 1);
    memcpy(b->data + b->n, data, size * n);
    b->n += size * n;
    b->data[b->n] = '\0';
    return size * n;
}

static inline size_t store_give_cb(char *to, size_t size, size_t n, void *ctx)
{
    struct store_bytes *b = ctx;

    n = size * n < b->n - b->at ? size * n : (size_t)(b->n - b->at);
    memcpy(to, b->data + b->at, n);
    b->at += n;
    return n;
}

/* Returns the status. *in: what came, which the caller frees. out: what is sent, or NULL. */
static inline long store_request(const char *method, const char *url, struct store_bytes *out,
                                 struct store_bytes *in)
{
    CURL *e = curl_easy_init();
    struct curl_slist *headers = store_kind.authorize ? store_kind.authorize(e) : NULL;
    long status = 0;
    CURLcode rc;

    *in = (struct store_bytes){calloc(1, 1), 0, 0};
    curl_easy_setopt(e, CURLOPT_URL, url);
    curl_easy_setopt(e, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(e, CURLOPT_WRITEFUNCTION, store_take_cb);
    curl_easy_setopt(e, CURLOPT_WRITEDATA, in);
    curl_easy_setopt(e, CURLOPT_CUSTOMREQUEST, method);
    if (out) {
        curl_easy_setopt(e, CURLOPT_UPLOAD, 1L);
        curl_easy_setopt(e, CURLOPT_INFILESIZE_LARGE, (curl_off_t)out->n);
        curl_easy_setopt(e, CURLOPT_READFUNCTION, store_give_cb);
        curl_easy_setopt(e, CURLOPT_READDATA, out);
    }
    rc = curl_easy_perform(e);
    cr_assert_eq(rc, CURLE_OK, "%s %s: %s", method, url, curl_easy_strerror(rc));
    curl_easy_getinfo(e, CURLINFO_RESPONSE_CODE, &status);
    curl_easy_cleanup(e);
    curl_slist_free_all(headers);
    return status;
}

static inline long store_ask(const char *method, const char *path, struct store_bytes *out,
                             struct store_bytes *in)
{
    char url[700];

    store_kind.url(path, url);
    return store_request(method, url, out, in);
}

/* Makes a request whose answer's bytes are not needed. */
static inline void store_expect(const char *method, const char *path, struct store_bytes *out,
                                long status)
{
    struct store_bytes in;
    long got = store_ask(method, path, out, &in);

    cr_assert_eq(got, status, "%s %s: %ld %s", method, path, got, in.data);
    free(in.data);
}

static uint8_t *store_get(const char *path, uint64_t *bytes)
{
    struct store_bytes in;
    long status = store_ask("GET", path, NULL, &in);

    cr_assert(status == 200 || status == 404, "%s: %ld", path, status);
    *bytes = in.n;
    if (status == 200)
        return in.data;
    free(in.data);
    return NULL;
}

static void store_put(const char *path, const void *data, uint64_t n)
{
    store_expect("PUT", path, &(struct store_bytes){(uint8_t *)data, n, 0}, 200);
}

static void store_remove(const char *path)
{
    store_expect("DELETE", path, NULL, 204);
}

/* ---- a test ---- */

/* The backend's command, up to its target. Returns where that goes. */
static inline char *store_begin(struct contract *c, const struct contract_remote *remote)
{
    struct config_process *p = &store.process;
    char name[64], program[256];
    int n;

    if (store.why[0])
        cr_skip("%s", store.why);
    signal(SIGPIPE, SIG_IGN); /* as the daemon does */
    built("ucmd", c->launcher);
    snprintf(name, sizeof(name), "ucmd-backend-%s", store_kind.backend);
    built(name, program);
    snprintf(store.part, sizeof(store.part), "kv-%d", (int)getpid());
    n = snprintf(p->command, sizeof(p->command), "%s ", program);
    p->buffer_bytes = STORE_BUFFER_BYTES;
    p->network = true;
    strcpy(c->target, CONFIG_PROCESS "store");
    c->process = p;
    c->ops = &shared_process;
    contract_remote = remote;
    return p->command + n;
}

static inline void store_end(struct contract *c)
{
    (void)c;
}

#endif
