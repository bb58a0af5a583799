/* How many namespaces there may be, in total and for a tenant, and which one gives way. */
#include "tests/integration/harness.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static struct host host;

static void open_host(const char *const *sets, bool nvme)
{
    host = (struct host){.nvme = nvme, .sets = {"nvme.segment=1MiB"}};
    for (unsigned i = 0; sets[i]; i++)
        host.sets[1 + i] = sets[i];
    host_start(&host);
}

static void close_host(void)
{
    host_remove(&host);
}

TestSuite(namespaces, .fini = close_host, .timeout = 60);

static struct ucm_client *connect_host(void)
{
    struct ucm_options options = {.socket = host.socket};
    struct ucm_client *c;

    cr_assert_eq(ucm_connect(&options, 5000, &c), 0, "%s", ucm_errmsg());
    return c;
}

static int open_ns(struct ucm_client *c, unsigned number, struct ucm_namespace **ns)
{
    char model[32];
    uint32_t layers;
    struct ucm_identity id = worker_identity(&(struct worker_options){.model = model}, &layers);

    snprintf(model, sizeof(model), "m%u", number);
    return ucm_namespace_open(c, &id, 5000, ns);
}

/* Blocks under model "m<number>" by a worker that is gone afterwards. */
static void store(unsigned number)
{
    char model[32];
    struct worker w;

    snprintf(model, sizeof(model), "m%u", number);
    worker_open(&w, &host, &(struct worker_options){.model = model});
    worker_store(&w, 0, 4);
    worker_close(&w);
}

static uint32_t hits(unsigned number)
{
    char model[32];
    struct worker w;
    uint32_t n;

    snprintf(model, sizeof(model), "m%u", number);
    worker_open(&w, &host, &(struct worker_options){.model = model});
    n = worker_hits(&w, 0, 4);
    worker_close(&w);
    return n;
}

Test(namespaces, a_tenant_is_told_when_it_has_enough)
{
    static const char *const sets[] = {"limits.namespaces_per_tenant=3", NULL};
    struct ucm_namespace *ns[4];
    struct ucm_client *c;

    open_host(sets, false);
    c = connect_host();
    for (unsigned i = 0; i < 3; i++)
        cr_assert_eq(open_ns(c, i, &ns[i]), 0, "%s", ucm_errmsg());
    cr_expect_eq(open_ns(c, 3, &ns[3]), -UCM_EBUSY);
    cr_expect_not_null(strstr(ucm_errmsg(), "limits.namespaces_per_tenant"), "%s", ucm_errmsg());
    cr_expect_eq(open_ns(c, 0, &ns[3]), 0, "one that is open already is no new one");
    ucm_namespace_close(ns[3]);
    for (unsigned i = 0; i < 3; i++)
        ucm_namespace_close(ns[i]);
    ucm_close(c);
    /* nobody has them open any more */
    c = connect_host();
    cr_expect_eq(open_ns(c, 3, &ns[3]), 0, "%s", ucm_errmsg());
    ucm_namespace_close(ns[3]);
    ucm_close(c);
}

/* A job may use a new salt each time, for ever. Namespaces that hold blocks stay. */
Test(namespaces, the_unused_give_way)
{
    static const char *const sets[] = {"limits.namespaces=8", NULL};

    open_host(sets, false);
    store(1000);
    for (unsigned i = 0; i < 40; i++) {
        struct ucm_client *c = connect_host();
        struct ucm_namespace *ns;

        cr_assert_eq(open_ns(c, i, &ns), 0, "namespace %u: %s", i, ucm_errmsg());
        ucm_namespace_close(ns);
        ucm_close(c);
    }
    cr_expect_eq(hits(1000), 4u);
    for (unsigned i = 2000; i < 2007; i++)
        store(i);
    {
        struct ucm_client *c = connect_host();
        struct ucm_namespace *ns;

        cr_expect_eq(open_ns(c, 1, &ns), -UCM_EBUSY);
        cr_expect_not_null(strstr(ucm_errmsg(), "limits.namespaces"), "%s", ucm_errmsg());
        ucm_close(c);
    }
    for (unsigned i = 2000; i < 2007; i++)
        cr_expect_eq(hits(i), 4u);
}

/* Needs root to become another user. */
Test(namespaces, a_tenant_does_not_lock_others_out)
{
    static const char *const sets[] = {"limits.namespaces=8", "limits.namespaces_per_tenant=4",
                                       NULL};
    struct ucm_namespace *ns;
    struct ucm_client *c;
    unsigned n = 0;
    int status;
    pid_t pid;

    open_host(sets, false);
    if (geteuid() != 0)
        cr_skip_test("needs root to act as another user");
    cr_assert_eq(chmod(host.dir, 0755), 0);
    cr_assert_eq(chmod(host.socket, 0666), 0);
    c = connect_host();
    while (open_ns(c, n, &ns) == 0) {
        ucm_namespace_close(ns);
        n++;
    }
    cr_expect_eq(n, 4u);
    pid = fork();
    if (pid == 0) {
        struct ucm_client *mine;

        if (setgid(65534) != 0 || setuid(65534) != 0)
            _exit(3);
        mine = connect_host();
        for (unsigned i = 0; i < 2; i++)
            if (open_ns(mine, i, &ns) != 0)
                _exit(4);
        _exit(0);
    }
    cr_assert_eq(waitpid(pid, &status, 0), pid);
    cr_expect_eq(WIFEXITED(status) ? WEXITSTATUS(status) : -1, 0);
    ucm_close(c);
}

/* A start loads all namespaces on storage, however many. An evicted one left nothing there, and its
 * name can be used again. */
Test(namespaces, over_a_restart)
{
    static const char *const sets[] = {"limits.namespaces_per_tenant=4", NULL};
    struct ucm_namespace *ns;
    struct ucm_client *c;

    open_host(sets, true);
    for (unsigned i = 0; i < 4; i++)
        store(i);
    c = connect_host();
    cr_expect_eq(open_ns(c, 10, &ns), -UCM_EBUSY);
    ucm_close(c);
    cr_assert_eq(host_stop(&host), 0);
    host.sets[1] = "limits.namespaces_per_tenant=2";
    host_restart(&host);
    c = connect_host();
    cr_assert(metric_reaches(c, "nvme_recovered_parts", 16, 20000));
    for (unsigned i = 0; i < 4; i++)
        cr_expect_eq(hits(i), 4u, "namespace %u", i);
    cr_expect_eq(open_ns(c, 10, &ns), -UCM_EBUSY);
    ucm_close(c);
}
