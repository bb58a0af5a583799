/* ucmctl verify --offline --salvage on damaged files. The files that it mends are sound for the
 * next daemon. It leaves alone what it must not touch. */
/* Sanitizers: address */
#include "tests/fault/damage.h"
#include "tests/inject/inject.h"
#include "tests/runner/environment.h"

#include <errno.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

TestSuite(salvage, .fini = close_host, .timeout = 120);

/* The exit status of ucmctl verify --offline; its output in `out`. */
static int verify_offline(const char *more, char *out, size_t cap)
{
    return ucmctl(out, cap, "verify --json --offline %s %s 2>&1", host.dir, more);
}

static void salvaged(const struct harm *h, bool clean)
{
    static char out[8192];
    unsigned missing;
    bool victim;

    open_host(false);
    store(0);
    store(1000);
    stop(clean);
    cr_expect_eq(verify_offline("", out, sizeof(out)), 0, "before: %s", out);
    harm_do(&host, h);
    cr_expect_eq(verify_offline("", out, sizeof(out)), 5, "%s: not found: %s", h->name, out);
    cr_expect_eq(verify_offline("--salvage", out, sizeof(out)), 5, "%s: %s", h->name, out);
    cr_expect_not_null(strstr(out, "\"salvaged\""), "%s", out);
    cr_expect_eq(verify_offline("", out, sizeof(out)), 0, "%s: not repaired: %s", h->name, out);
    start_again();
    cr_expect_eq(damage_seen(), 0u, "%s: the start finds damage", h->name);
    missing = load_all(0, &victim) + load_all(1000, &(bool){false});
    if (h->harmless || h->rebuilt)
        cr_expect_eq(missing, 0u, "%s: %u missing", h->name, missing);
    else
        cr_expect(victim, "%s", h->name);
    cr_expect_eq(damage_seen(), 0u, "%s: a read finds damage", h->name);
    store_again();
    cr_expect_eq(load_all(0, &victim), 0u, "%s", h->name);
}

Test(salvage, makes_the_next_start_clean)
{
    for (size_t i = 0; i < HARMS; i++) {
        if (left_out(i))
            continue;
        if (i > 0)
            close_host();
        salvaged(&harms[i], !harms[i].scan_only);
    }
}

Test(salvage, refuses_what_it_must_not_touch)
{
    static char out[8192];
    int fd;

    open_host(false);
    store(0);
    cr_expect_eq(verify_offline("--salvage", out, sizeof(out)), 1, "%s", out);
    cr_expect_not_null(strstr(out, "in use"), "%s", out);
    stop(true);
    fd = harm_file(&host, "ucmd.cache");
    harm_put(fd, "\x02", 1, 8);
    cr_expect_eq(verify_offline("--salvage", out, sizeof(out)), 1, "%s", out);
    cr_expect_not_null(strstr(out, "version 2"), "%s", out);
    harm_put(fd, "\x01", 1, 8);
    close(fd);
    cr_expect_eq(verify_offline("--salvage", out, sizeof(out)), 0, "%s", out);
    cr_expect_not_null(strstr(out, "\"slots\":\t64"), "%s", out);
    cr_expect_not_null(strstr(out, "test"), "%s", out);
    start_again();
    cr_expect_eq(load_all(0, &(bool){false}), 0u);
}

/* verify_offline with reads that fail as `fault` says. */
static int verify_under(const struct inject *fault, const char *more, char *out, size_t cap)
{
    char path[128];
    FILE *f;
    int rc;

    snprintf(path, sizeof(path), "%s.inject", host.dir);
    f = fopen(path, "w");
    cr_assert_not_null(f);
    cr_assert_eq(fwrite(fault, sizeof(*fault), 1, f), 1u);
    cr_assert_eq(fclose(f), 0);
    setenv("UCM_INJECT", path, 1);
    preload("ucmd-inject.so");
    rc = verify_offline(more, out, cap);
    unsetenv("LD_PRELOAD");
    unsetenv("UCM_INJECT");
    unlink(path);
    return rc;
}

/* The last record of ucmd.namespaces can't be read. It lies at an offset past the cache file's end,
 * so that the fault spares the cache file. Blank pages before it are damage for salvage to mend. */
Test(salvage, keeps_namespaces_that_it_cannot_read)
{
    static char out[8192];
    struct inject fault = {.read_error = EIO, .reads = -1};
    uint8_t record[HARM_PAGE], after[HARM_PAGE];
    struct stat st;
    int fd;

    open_host(false);
    store(0);
    stop(true);
    fd = harm_file(&host, "ucmd.cache");
    cr_assert_eq(fstat(fd, &st), 0);
    close(fd);
    fault.read_from = st.st_size + (1 << 20);
    fd = harm_file(&host, "ucmd.namespaces");
    harm_get(fd, record, sizeof(record), 0);
    harm_put(fd, record, sizeof(record), fault.read_from);
    close(fd);
    cr_expect_eq(verify_offline("", out, sizeof(out)), 5, "%s", out);
    cr_expect_eq(verify_under(&fault, "", out, sizeof(out)), 1, "%s", out);
    cr_expect_not_null(strstr(out, "ucmd.namespaces"), "%s", out);
    cr_expect_eq(verify_under(&fault, "--salvage", out, sizeof(out)), 1, "%s", out);
    cr_expect_not_null(strstr(out, "\"names_rewritten\":\tfalse"), "%s", out);
    fd = harm_file(&host, "ucmd.namespaces");
    harm_get(fd, after, sizeof(after), fault.read_from);
    close(fd);
    cr_expect_eq(memcmp(record, after, sizeof(record)), 0);
    cr_expect_eq(verify_offline("--salvage", out, sizeof(out)), 5, "%s", out);
    cr_expect_eq(verify_offline("", out, sizeof(out)), 0, "%s", out);
    start_again();
    cr_expect_eq(load_all(0, &(bool){false}), 0u);
}

#define SOUND 12u

/* Its bytes are right, but a start without a checkpoint would not find them. */
static void no_promise_for_what_is_not_mended(uint64_t number)
{
    int fd = harm_file(&host, "ucmd.cache");

    harm_flip(fd, harm_slot(fd, number) + 104);
    close(fd);
    cr_expect_eq(worker_dump_one(&w, number), UCM_BLOCK_IS_NOT_DURABLE);
    cr_expect_eq(metric(w.client, "nvme_bad_headers"), 1u);
    cr_expect_eq(load_all(0, &(bool){false}), 1u, "it is served on");
}

/* Damages one of the next parts, in another segment than `last`. Parts are not written in order. */
static off_t harm_apart(int fd, uint64_t number, off_t last)
{
    off_t at;

    do
        at = harm_slot(fd, number++);
    while (at >> 20 == last >> 20);
    harm_flip(fd, at + HARM_PAGE);
    return at;
}

/* Past nvme.quarantine the file is read-only. An operator may say that the disk is well. */
Test(salvage, too_many_bad_segments_stop_the_writes)
{
    static char out[8192];
    bool victim;
    off_t at = 0;
    int fd;

    open_host(false);
    for (unsigned i = 0; i < 4; i++)
        store(i * 1000);
    stop(true);
    start_again();
    fd = harm_file(&host, "ucmd.cache");
    for (unsigned i = 0; i < 4; i++)
        at = harm_apart(fd, i * 1000 + HARM_VICTIM, at);
    close(fd);
    for (unsigned i = 0; i < 4; i++)
        cr_expect_eq(load_all(i * 1000, &victim), 1u);
    cr_expect(health_is(w.client, "degraded"));
    stop(true);
    start_again();
    cr_expect(health_is(w.client, "degraded"));
    for (unsigned i = 0; i < 4; i++)
        cr_expect_eq(load_all(i * 1000, &victim), 1u);
    no_promise_for_what_is_not_mended(SOUND);
    stop(true);
    cr_expect_eq(verify_offline("--salvage --lift-quarantine", out, sizeof(out)), 5, "%s", out);
    cr_expect_eq(verify_offline("", out, sizeof(out)), 0, "%s", out);
    start_again();
    cr_expect(health_is(w.client, "ok"));
    cr_expect_eq(metric(w.client, "nvme_quarantined_bytes"), 0u);
    store(9000);
}
