/* What the daemon says that namespaces and tenants hold, and what was written for that. It is the
 * same before a restart and after it. */
#include "tests/integration/harness.h"

#include <criterion/criterion.h>
#include <inttypes.h>
#include <msgpack.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define BLOCKS 48u
#define SPACES_MAX 8
#define PAGE 4096u

static struct host host;
static struct worker one, two;
static char tenant[64];

static void open_workers(void)
{
    worker_open(&one, &host, &(struct worker_options){0});
    worker_open(&two, &host, &(struct worker_options){.model = "other", .layers = 3});
}

/* As a tenant of this name. */
static void open_host(const char *name)
{
    snprintf(tenant, sizeof(tenant), "tenants=%s uid:%u", name, (unsigned)getuid());
    host = (struct host){.nvme = true, .sets = {tenant}};
    host_start(&host);
    open_workers();
}

static void close_host(void)
{
    worker_close(&one);
    worker_close(&two);
    host_remove(&host);
}

TestSuite(accounting, .fini = close_host, .timeout = 90);

static void restart(bool kill)
{
    worker_close(&one);
    worker_close(&two);
    if (kill)
        host_kill(&host);
    else
        cr_assert_eq(host_stop(&host), 0);
    host_restart(&host);
    open_workers();
    wait_ok(one.client);
}

/* ---- what the daemon says ---- */

struct space {
    uint8_t fingerprint[32];
    uint64_t blocks, dram_bytes, nvme_bytes;
};

static const msgpack_object *field(const msgpack_object *map, const char *name)
{
    for (uint32_t i = 0; i < map->via.map.size; i++) {
        const msgpack_object *k = &map->via.map.ptr[i].key;

        if (k->via.str.size == strlen(name) && memcmp(k->via.str.ptr, name, k->via.str.size) == 0)
            return &map->via.map.ptr[i].val;
    }
    cr_assert_fail("no field %s", name);
    return NULL;
}

static uint32_t spaces_read(struct space out[SPACES_MAX])
{
    static const uint8_t no_params[] = {0x80};
    msgpack_unpacked unpacked;
    const msgpack_object *list;
    size_t n, off = 0;
    uint32_t count;
    uint8_t *p;

    cr_assert_eq(ucm_call(one.client, "namespace.list", no_params, 1, -1, &p, &n), 0, "%s",
                 ucm_errmsg());
    msgpack_unpacked_init(&unpacked);
    cr_assert_eq(msgpack_unpack_next(&unpacked, (char *)p, n, &off), MSGPACK_UNPACK_SUCCESS);
    list = field(&unpacked.data, "namespaces");
    count = list->via.array.size;
    cr_assert_leq(count, SPACES_MAX);
    for (uint32_t i = 0; i < count; i++) {
        const msgpack_object *o = &list->via.array.ptr[i];

        memcpy(out[i].fingerprint, field(o, "fingerprint")->via.bin.ptr, 32);
        out[i].blocks = field(o, "blocks")->via.u64;
        out[i].dram_bytes = field(o, "dram_bytes")->via.u64;
        out[i].nvme_bytes = field(o, "nvme_bytes")->via.u64;
    }
    msgpack_unpacked_destroy(&unpacked);
    free(p);
    return count;
}

static void ctl(const char *command, char *out, size_t cap)
{
    cr_assert_eq(ucmctl(out, cap, "--socket %s %s", host.socket, command), 0, "%s: %s", command,
                 out);
}

/* Blocks in DRAM do not outlive the daemon, so they are counted apart. */
static void leave_dram(void)
{
    cr_assert_eq(evict_dram(one.client, 1, -1), 0, "%s", ucm_errmsg());
    cr_assert_eq(evict_dram(one.client, 2, -1), 0, "%s", ucm_errmsg());
}

static uint64_t stride(const struct worker *w)
{
    return PAGE + (w->layers * w->layer_bytes + PAGE - 1) / PAGE * PAGE;
}

static void expect_same(const struct space *was, uint32_t n)
{
    struct space is[SPACES_MAX];
    uint32_t found = 0;

    cr_assert_eq(spaces_read(is), n);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t k = 0; k < n; k++) {
            if (memcmp(is[i].fingerprint, was[k].fingerprint, 32) != 0)
                continue;
            cr_expect_eq(is[i].blocks, was[k].blocks);
            cr_expect_eq(is[i].dram_bytes, was[k].dram_bytes);
            cr_expect_eq(is[i].nvme_bytes, was[k].nvme_bytes, "%" PRIu64 ", was %" PRIu64,
                         is[i].nvme_bytes, was[k].nvme_bytes);
            found++;
        }
    cr_expect_eq(found, n);
}

/* ---- tests ---- */

static void count_over_restart(bool kill)
{
    struct space was[SPACES_MAX];
    char before[2048], after[2048];

    open_host("alpha");
    worker_store(&one, 0, BLOCKS);
    worker_store(&two, 0, BLOCKS / 2);
    cr_assert(metric_reaches(one.client, "nvme_writes", BLOCKS + BLOCKS / 2, 20000));
    leave_dram();
    cr_assert_eq(spaces_read(was), 2u);
    cr_expect_eq(was[0].nvme_bytes, BLOCKS * one.layers * one.layer_bytes);
    cr_expect_eq(was[1].nvme_bytes, BLOCKS / 2 * two.layers * two.layer_bytes);
    cr_expect_eq(metric(one.client, "nvme_bytes_used"),
                 BLOCKS * stride(&one) + BLOCKS / 2 * stride(&two));
    ctl("tenant list --json", before, sizeof(before));
    cr_expect_not_null(strstr(before, "alpha"), "%s", before);
    restart(kill);
    expect_same(was, 2);
    cr_expect_eq(metric(one.client, "nvme_bytes_used"),
                 BLOCKS * stride(&one) + BLOCKS / 2 * stride(&two));
    ctl("tenant list --json", after, sizeof(after));
    cr_expect_str_eq(after, before);
}

Test(accounting, a_clean_restart_changes_no_count)
{
    count_over_restart(false);
}

Test(accounting, a_kill_changes_no_count)
{
    count_over_restart(true);
}

Test(accounting, tenants_of_earlier_runs_are_counted_as_theirs)
{
    struct space was[SPACES_MAX];
    char out[2048];

    open_host("alpha");
    worker_store(&one, 0, BLOCKS);
    worker_store(&two, 0, 8);
    cr_assert(metric_reaches(one.client, "nvme_writes", BLOCKS + 8, 20000));
    snprintf(tenant, sizeof(tenant), "tenants=beta uid:%u", (unsigned)getuid());
    restart(false);
    worker_store(&one, 0, 8);
    cr_assert(metric_reaches(one.client, "nvme_writes", 8, 20000));
    cr_assert_eq(spaces_read(was), 4u);
    ctl("tenant list", out, sizeof(out));
    cr_expect_not_null(strstr(out, "alpha"), "%s", out);
    cr_expect_not_null(strstr(out, "beta"), "%s", out);
}

/* Every byte that the cache wrote is in the figures of what the disk took. */
Test(accounting, wear_adds_up)
{
    uint64_t stored, written, segments;

    open_host("alpha");
    worker_store(&one, 0, BLOCKS);
    cr_assert(metric_reaches(one.client, "nvme_writes", BLOCKS, 20000));
    stored = metric(one.client, "nvme_stored_bytes");
    written = metric(one.client, "nvme_written_bytes");
    cr_expect_eq(stored, BLOCKS * one.layers * one.layer_bytes);
    cr_assert_geq(written, BLOCKS * stride(&one) + PAGE);
    segments = (written - BLOCKS * stride(&one)) / PAGE;
    cr_expect_eq(written, BLOCKS * stride(&one) + segments * PAGE);
    cr_expect_leq(segments, 4u);
    cr_expect_eq(metric(one.client, "nvme_write_amplification"),
                 (1000 * (written + metric(one.client, "nvme_checkpoint_bytes"))) / stored);
}
