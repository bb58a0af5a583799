/* A root that is a Mooncake store: what every backend promises, through ucmd-backend-mooncake. If
 * UCM_MOONCAKE_PYTHON names a Python that has Mooncake's client, the store is real (one phase of
 * `make check`). It then has a master, and a process that gives it memory. Otherwise the client is
 * played over a directory. */
#include "tests/integration/shared_store.h"

#define PLAYED "tests/integration/mooncake_played/python"

/* What the server says: the port of another client, the target's beginning and its options. */
static int port;
static char target[128], options[512];

static bool ready(void)
{
    const char *real = getenv("UCM_MOONCAKE_PYTHON");

    if (real && access(real, X_OK) < 0)
        snprintf(store.why, sizeof(store.why),
                 "no Mooncake client: `make setup` downloads it from PyPI");
    else if (chmod(store.directory, 0777) < 0)
        snprintf(store.why, sizeof(store.why), "no directory for the store");
    return !store.why[0];
}

static void serve(void)
{
    const char *real = getenv("UCM_MOONCAKE_PYTHON");

    execl(real ? real : PLAYED, real ? real : PLAYED, "-B", "tests/integration/mooncake_server.py",
          store.directory, real, NULL);
}

static void url(const char *path, char out[700])
{
    snprintf(out, 700, "http://127.0.0.1:%d/%s%s", port, store.part, path);
}

static const struct store_kind store_kind = {
    .name = "Mooncake", .backend = "mooncake", .ready = ready, .serve = serve, .url = url};

static unsigned count(void)
{
    struct store_bytes in;
    char all[128];
    unsigned n;

    snprintf(all, sizeof(all), "http://127.0.0.1:%d/?count=%s", port, store.part);
    cr_assert_eq(store_request("GET", all, NULL, &in), 200);
    n = (unsigned)atoi((char *)in.data);
    free(in.data);
    return n;
}

static const struct contract_remote remote = {.get = store_get,
                                              .put = store_put,
                                              .remove = store_remove,
                                              .count = count,
                                              .objects_only = true};

/* ---- a test ---- */

static void post(const char *what)
{
    struct store_bytes in;
    char all[128];

    snprintf(all, sizeof(all), "http://127.0.0.1:%d/%s/%s", port, what, store.part);
    cr_assert_eq(store_request("POST", all, NULL, &in), 204);
    free(in.data);
}

/* Stops a real store's master, which all tests share: one test at a time. */
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

static void begin(struct contract *c)
{
    char *at = store_begin(c, &remote), *python;
    struct config_process *p = &store.process;

    cr_assert_eq(sscanf(store.said, "%d %127s %511s", &port, target, options), 3);
    sprintf(at, "%s/%s?%s", target, store.part, options);
    p->memory_bytes = CONFIG_MEMORY;
    p->patience_ms = CONTRACT_DEADLINE_MS; /* a busy machine starts processes slowly */
    python = strstr(options, "python=") + strlen("python=");
    snprintf(p->read, sizeof(p->read), "%s", python);
    *strrchr(p->read, '/') = '\0';
    if (getenv("UCM_MOONCAKE_PYTHON")) /* DIRECTORY/bin/python: all of the directory */
        *strrchr(p->read, '/') = '\0';
    else
        snprintf(p->directory, sizeof(p->directory), "%s", store.directory);
    c->root_away = away;
    c->root_back = back;
    if (getenv("UCM_MOONCAKE_PYTHON"))
        post("back"); /* a test that failed may have left it stopped */
}

SHARED_CONTRACT_OBJECTS(shared_mooncake, begin, store_end)
