/* Secrets in a directory: all users get the same one, and another one after a purge. And the
 * answers while the directory is unavailable. */
/* Sanitizers: thread */
#include "daemon/encryption/secrets.h"
#include "tests/runner/wipe.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static uv_loop_t loop;
static struct secrets *one, *two;
static char directory[] = "/tmp/secrets.XXXXXX";
static unsigned changes;
static int purged;
static const uint8_t space[UCM_FINGERPRINT_BYTES] = "a namespace",
                     other[UCM_FINGERPRINT_BYTES] = "b";

static void changed_cb(void *ctx)
{
    (void)ctx;
    changes++;
}

static void purged_cb(struct secrets_purge *p, int status)
{
    (void)p;
    purged = status;
}

static void setup(void)
{
    cr_assert_eq(uv_loop_init(&loop), 0);
    cr_assert_not_null(mkdtemp(directory));
    cr_assert_eq(secrets_open(&loop, directory, 60000, changed_cb, NULL, &one), 0);
    cr_assert_eq(secrets_open(&loop, directory, 60000, changed_cb, NULL, &two), 0);
    changes = 0;
    purged = 1;
}

static void teardown(void)
{
    secrets_close(one);
    secrets_close(two);
    uv_run(&loop, UV_RUN_DEFAULT);
    cr_expect_eq(uv_loop_close(&loop), 0);
    while (wipe(directory) != 0) /* a thread that was given up may still be writing there */
        ;
}

TestSuite(shared_secrets, .init = setup, .fini = teardown, .timeout = 60);

static int found(struct secrets *s, const uint8_t *fingerprint, uint8_t secret[SHARED_SECRET_BYTES])
{
    const uint8_t *at;
    int rc;

    while ((rc = secrets_find(s, fingerprint, &at)) == -EAGAIN) {
        cr_assert(uv_loop_alive(&loop), "nothing under way brings it");
        uv_run(&loop, UV_RUN_ONCE);
    }
    if (rc == 0)
        memcpy(secret, at, SHARED_SECRET_BYTES);
    return rc;
}

static const char *path_of_space(void)
{
    static char path[256];

    snprintf(path, sizeof(path), "%s/", directory);
    for (unsigned i = 0; i < sizeof(space); i++)
        snprintf(path + strlen(path), 3, "%02x", space[i]);
    return path;
}

Test(shared_secrets, all_who_ask_get_the_same_and_each_namespace_its_own)
{
    uint8_t a[SHARED_SECRET_BYTES], b[SHARED_SECRET_BYTES], c[SHARED_SECRET_BYTES];
    const uint8_t *at;

    cr_assert_eq(secrets_find(one, space, &at), -EAGAIN);
    cr_assert_eq(secrets_find(two, space, &at), -EAGAIN, "both make it at once");
    cr_assert_eq(found(one, space, a), 0);
    cr_assert_eq(found(two, space, b), 0);
    cr_assert_arr_eq(a, b, sizeof(a));
    cr_assert_eq(found(one, other, c), 0);
    cr_assert_arr_neq(a, c, sizeof(a));
    cr_assert_geq(changes, 3u);
}

Test(shared_secrets, a_purge_puts_another_one_in_its_place_and_overwrites_it)
{
    static struct secrets_purge p = {.done_cb = purged_cb}, q = {.done_cb = purged_cb};
    uint8_t before[SHARED_SECRET_BYTES], after[SHARED_SECRET_BYTES], bytes[64];
    char kept[256];
    const uint8_t *at;
    FILE *f;

    cr_assert_eq(found(one, space, before), 0);
    snprintf(kept, sizeof(kept), "%s/kept", directory);
    cr_assert_eq(link(path_of_space(), kept), 0);
    memcpy(p.fingerprint, space, sizeof(space));
    secrets_purge(one, &p);
    cr_assert_eq(secrets_find(one, space, &at), -EAGAIN, "nobody uses the one that goes");
    while (purged == 1)
        uv_run(&loop, UV_RUN_ONCE);
    cr_assert_eq(purged, 0);
    cr_assert_eq(found(one, space, after), 0);
    cr_assert_arr_neq(before, after, sizeof(before));
    f = fopen(kept, "rb");
    cr_assert_eq(fread(bytes, 1, sizeof(bytes), f), sizeof(bytes));
    fclose(f);
    cr_assert(bytes[0] == 0 && memcmp(bytes, bytes + 1, sizeof(bytes) - 1) == 0);
    cr_assert_eq(found(two, space, before), 0);
    cr_assert_arr_eq(before, after, sizeof(before));
    memcpy(q.fingerprint, other, sizeof(other));
    secrets_purge(one, &p);
    secrets_purge(one, &q);
    secrets_cancel(one, &p);
    purged = 1;
    while (purged == 1)
        uv_run(&loop, UV_RUN_ONCE);
    cr_assert_eq(purged, 0, "of a namespace that nobody had asked for");
    secrets_purge(one, &p); /* under way when it ends */
    secrets_purge(one, &q);
}

Test(shared_secrets, a_purge_that_is_cancelled_before_its_turn_leaves_a_secret)
{
    static struct secrets_purge p = {.done_cb = purged_cb}, q = {.done_cb = purged_cb};
    uint8_t before[SHARED_SECRET_BYTES], after[SHARED_SECRET_BYTES];

    cr_assert_eq(found(one, other, before), 0);
    memcpy(p.fingerprint, space, sizeof(space));
    memcpy(q.fingerprint, other, sizeof(other));
    secrets_purge(one, &p);
    secrets_purge(one, &q);
    secrets_cancel(one, &q);
    cr_assert_eq(found(one, other, after), 0);
    cr_expect_arr_eq(before, after, sizeof(before));
    cr_expect_eq(purged, 0);
}

Test(shared_secrets, what_is_no_secret_is_none)
{
    uint8_t secret[SHARED_SECRET_BYTES];
    FILE *f;

    f = fopen(path_of_space(), "wb");
    fputs("UCMSECR1 and something else", f);
    fclose(f);
    cr_assert_eq(found(one, space, secret), -ENOKEY);
    cr_assert_eq(found(one, other, secret), 0, "others are not concerned");
}

static void told(const char *of, const char *word)
{
    const char *problem;
    uv_async_t awake; /* the directory's timer alone keeps no loop alive */

    cr_assert_eq(uv_async_init(&loop, &awake, NULL), 0);
    while (!(problem = secrets_problem(one)) != !word || (word && !strstr(problem, word)))
        uv_run(&loop, UV_RUN_ONCE);
    uv_close((uv_handle_t *)&awake, NULL);
    uv_run(&loop, UV_RUN_NOWAIT);
    cr_expect(!word || strstr(problem, of), "%s", problem);
}

/* Without any call that asks for a secret. */
Test(shared_secrets, a_directory_that_can_not_be_used_is_told_of_until_it_can)
{
    char away[sizeof(directory) + 8];
    uint8_t secret[SHARED_SECRET_BYTES];

    cr_expect_eq(found(one, space, secret), 0);
    snprintf(away, sizeof(away), "%s.away", directory);
    cr_assert_eq(rename(directory, away), 0);
    cr_expect_eq(found(one, other, secret), -ENOKEY);
    cr_expect(strstr(secrets_problem(one), "No such file"), "%s", secrets_problem(one));
    secrets_close(one);
    cr_assert_eq(secrets_open(&loop, directory, 60000, changed_cb, NULL, &one), 0);
    told(directory, "No such file or directory; encrypted blocks are misses");
    cr_assert_eq(rename(away, directory), 0);
    cr_assert_eq(chmod(directory, 0777), 0);
    told(directory, "users other than its owner and group may write to it");
    cr_expect_eq(found(one, space, secret), 0, "which stops nobody");
    secrets_close(one);
    cr_assert_eq(secrets_open(&loop, directory, 60000, changed_cb, NULL, &one), 0);
    told(directory, "users other than its owner and group");
    cr_assert_eq(chmod(directory, 0700), 0);
    told(directory, NULL);
}
