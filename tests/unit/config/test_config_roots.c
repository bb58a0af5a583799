/* The shared tier's roots as a configuration names them, and what is refused. */
#include "daemon/config/roots.h"

#include "tests/unit/config/config_rig.h"

static void begin(void)
{
    setup();
    set("socket=/tmp/ucmd.sock");
}

TestSuite(config_roots, .init = begin, .fini = teardown, .timeout = 10);

static void set_refused(const char *text, const char *begin, const char *right)
{
    set("%s", text);
    check_refused(begin, right);
}

static struct config_root roots[UCM_MAX_ROOTS];

static uint32_t roots_read(void)
{
    uint32_t n;

    cr_assert_eq(config_roots(&c, roots, &n, &e), 0, "%s", e.text);
    return n;
}

Test(config_roots, a_directory_is_a_process)
{
    set("shared.threads=5");
    set("shared.roots=/mnt/kv capacity=1TiB,/b");
    cr_assert_eq(roots_read(), 2);
    cr_assert_str_eq(roots[0].target, "/mnt/kv");
    cr_assert_eq(roots[0].capacity_bytes, 1ull << 40);
    cr_assert_str_eq(roots[0].process.directory, "/mnt/kv");
    cr_assert_not(roots[0].process.network);
    cr_assert_not_null(strstr(roots[0].process.command, "/ucmd-backend-directory /mnt/kv 6"));
    cr_assert_not_null(strstr(roots[1].process.command, "/ucmd-backend-directory /b 6"));
    cr_assert_eq(roots[0].process.buffer_bytes, CONFIG_BUFFER);
    set("arena.slab=1MiB");
    cr_assert_eq(roots_read(), 2);
    cr_assert_eq(roots[0].process.buffer_bytes, 5 * ((1u << 20) + 8192));
    set_refused("shared.roots=/a/with space", "--set: shared.roots: \"space\" after /a/with",
                "capacity=SIZE nor ro");
}

Test(config_roots, roots)
{
    cr_assert_eq(roots_read(), 0);
    set("shared.roots=/mnt/kv/ capacity=10TiB,nfs://10.0.0.5/export/kv?version=3 ro,/b ro "
        "capacity=1GiB");
    cr_assert_eq(roots_read(), 3);
    cr_assert_str_eq(roots[0].target, "/mnt/kv");
    cr_assert_eq(roots[0].capacity_bytes, 10ull << 40);
    cr_assert_not(roots[0].read_only);
    cr_assert_str_eq(roots[1].target, "nfs://10.0.0.5/export/kv?version=3");
    cr_assert_eq(roots[1].capacity_bytes, 0);
    cr_assert(roots[1].read_only && roots[2].read_only);
}

Test(config_roots, processes)
{
    set("shared.roots=process:cold capacity=1TiB network write=/mnt/kv read=/etc/x memory=3GiB "
        "buffer=1GiB -- /usr/x -- y,"
        "process:b ro -- /usr/z");
    cr_assert_eq(roots_read(), 2);
    cr_assert_str_eq(roots[0].target, "process:cold");
    cr_assert_str_eq(roots[0].process.command, "/usr/x -- y");
    cr_assert_str_eq(roots[0].process.directory, "/mnt/kv");
    cr_assert(roots[0].process.network && !roots[1].process.network);
    cr_assert_eq(roots[0].capacity_bytes, 1ull << 40);
    cr_assert_eq(roots[0].process.buffer_bytes, 1ull << 30);
    cr_assert_str_eq(roots[0].process.read, "/etc/x");
    cr_assert_eq(roots[0].process.memory_bytes, 3ull << 30);
    cr_assert_eq(roots[1].process.buffer_bytes, CONFIG_BUFFER);
    cr_assert_eq(roots[1].process.memory_bytes, CONFIG_MEMORY);
    cr_assert(roots[1].read_only);
}

Test(config_roots, processes_that_are_refused)
{
    set_refused("shared.roots=process: -- /x", "", "a name of 1 to 63");
    set_refused("shared.roots=process:a/b -- /x", "", "a name of 1 to 63");
    set_refused("shared.roots=process:a", "", "after its options stand --");
    set_refused("shared.roots=process:a --", "", "after its options stand --");
    set_refused("shared.roots=process:a -- x", "", "an absolute path");
    set_refused("shared.roots=process:a fast -- /x", "", "read=PATH or write=DIRECTORY");
    set_refused("shared.roots=process:a buffer=1MiB -- /x", "", "write buffer=67112960");
    set_refused("shared.roots=process:a write=b -- /x", "", "an absolute path");
    set_refused("shared.roots=/a network", "", "neither capacity=SIZE nor ro;");
    set_refused("shared.roots=process:a -- /x,process:a -- /y", "", "there twice");
}

Test(config_roots, roots_that_make_no_sense)
{
    set_refused("shared.roots=/a capacity=10GB", "--set: shared.roots: \"10GB\"", "write 10GiB");
    set_refused("shared.roots=/a rw", "--set: shared.roots: \"rw\" after /a",
                "capacity=SIZE nor ro");
    set_refused("shared.roots=/a,/a/", "--set: shared.roots: /a is there twice", "once");
    set_refused("shared.roots=nfs://server",
                "--set: shared.roots: \"nfs://server\": write the path", "nfs://server/export");
    set_refused("shared.roots=b", "--set: shared.roots: \"b\" is neither", "absolute path");
    set("shared.roots=/b");
    set_refused("shared.timeout=20ms",
                "--set: shared.timeout (20ms) is smaller than shared.lookup_timeout", "raise it");
}

/* The check refuses what the start would refuse, and says where it was set. */
Test(config_roots, targets_and_words_that_no_start_takes)
{
    set_refused("shared.roots=nfs://h/x?version=4", "--set: shared.roots: ", "version=3");
    set_refused("shared.roots=nfs://h/x?bogus=1", "--set: shared.roots: ", "options are");
    set_refused("shared.roots=nfs://h/x?nfsport=99999", "--set: shared.roots: ", "1 to 65535");
    set_refused("shared.roots=nfs://h:0/x", "--set: shared.roots: ", "1 to 65535");
    set_refused("shared.roots=nfs://h/x?uid=-1", "--set: shared.roots: ", "numbers");
    set_refused("shared.roots=nfs://h/x?uid=1&uid=2", "--set: shared.roots: ", "once");
    set_refused("shared.roots=/a capacity=1GiB capacity=2GiB",
                "--set: shared.roots: ", "capacity= is given twice");
    set_refused("shared.roots=/a ro ro", "--set: shared.roots: ", "ro is given twice");
}

static unsigned warnings, programs;

static void warn_cb(const char *text)
{
    cr_assert_eq(strncmp(text, "--set: shared.roots: /", 21), 0, "%s", text);
    cr_assert_not_null(strstr(text, "No such file"), "%s", text);
    programs += strstr(text, "ucmd-backend-directory") != NULL;
    warnings++;
}

Test(config_roots, a_file_is_refused_and_what_is_missing_is_warned_of)
{
    cr_assert_eq(config_root_look("/tmp", true), 0);
    cr_assert_eq(config_root_look("/proc/version", true), -ENOTDIR);
    cr_assert_eq(config_root_look("/nonexistent/kv", true), -ENOENT);
    set("shared.roots=/nonexistent/kv,/tmp");
    cr_assert_eq(config_check_roots(&c, warn_cb, &e), 0, "%s", e.text);
    cr_assert_eq(warnings, 2);
    cr_assert_eq(programs, 1, "it does not lie next to this one");
    set("shared.roots=/proc/version");
    cr_assert_eq(config_check_roots(&c, warn_cb, &e), -EINVAL);
    cr_assert_not_null(strstr(e.text, "/proc/version is not a directory"), "%s", e.text);
}

static char last[512];

static void keep_cb(const char *text)
{
    snprintf(last, sizeof(last), "%s", text);
}

Test(config_roots, a_directory_that_takes_no_writes_is_warned_of)
{
    set("shared.roots=/proc/self");
    cr_assert_eq(config_check_roots(&c, keep_cb, &e), 0, "%s", e.text);
    cr_assert_not_null(strstr(last, "can't write there"), "%s", last);
    set("shared.roots=/proc/self ro");
    cr_assert_eq(config_check_roots(&c, keep_cb, &e), 0, "%s", e.text);
    cr_assert_null(strstr(last, "can't write there"), "%s", last);
}

Test(config_roots, a_bucket_is_a_process)
{
    set("shared.roots=s3://kv/a?region=eu-1&endpoint=https://h:9 capacity=1GiB memory=1GiB,s3://b "
        "read=/srv/key buffer=1GiB");
    cr_assert_eq(roots_read(), 2);
    cr_assert_str_eq(strstr(roots[0].process.command, "/ucmd-backend-s3"),
                     "/ucmd-backend-s3 s3://kv/a?region=eu-1&endpoint=https://h:9");
    cr_assert(roots[0].process.network && roots[1].process.network);
    cr_assert_str_eq(roots[0].process.read, "/etc/ucmd/s3");
    cr_assert_str_eq(roots[1].process.read, "/srv/key");
    cr_assert_eq(roots[0].process.memory_bytes, 1u << 30);
    cr_assert_eq(roots[0].process.buffer_bytes, CONFIG_BUFFER);
    cr_assert_eq(roots[1].process.buffer_bytes, 1u << 30);
    set_refused("shared.roots=s3:///prefix", "", "s3://BUCKET");
    set_refused("shared.roots=s3://b buffer=1MiB", "", "larger than arena.slab");
}

Test(config_roots, a_mooncake_store_is_a_process)
{
    set("shared.roots=mooncake://10.0.0.6:50051/kv?protocol=rdma&python=/srv/m/bin/python "
        "read=/srv/m "
        "ro");
    cr_assert_eq(roots_read(), 1);
    cr_assert_str_eq(strstr(roots[0].process.command, "/ucmd-backend-mooncake"),
                     "/ucmd-backend-mooncake "
                     "mooncake://10.0.0.6:50051/kv?protocol=rdma&python=/srv/m/bin/python");
    cr_assert(roots[0].process.network);
    cr_assert(roots[0].read_only);
    cr_assert_str_eq(roots[0].process.read, "/srv/m");
    cr_assert_eq(roots[0].process.buffer_bytes, CONFIG_BUFFER);
    set_refused("shared.roots=mooncake://10.0.0.6", "", "mooncake://MASTER:PORT");
}

/* The backend is a program of ucmd's, next to the daemon or where it is installed. Here there is
 * none. */
Test(config_roots, an_nfs_server_is_a_process)
{
    char words[300];
    const char *path;

    set("shared.roots=nfs://192.0.2.1/kv?version=3 capacity=1GiB ro");
    cr_assert_eq(roots_read(), 1);
    snprintf(words, sizeof(words), "/ucmd-backend-nfs nfs://192.0.2.1/kv?version=3 %u %u",
             (unsigned)geteuid(), (unsigned)getegid());
    path = strstr(roots[0].process.command, "/libexec/ucmd/ucmd-backend-nfs");
    cr_assert(path && roots[0].process.command[0] == '/', "%s", roots[0].process.command);
    cr_assert_str_eq(strstr(path, "/ucmd-backend-nfs"), words);
    cr_assert(roots[0].process.network);
    cr_assert(roots[0].read_only);
    cr_assert_eq(roots[0].process.buffer_bytes, CONFIG_BUFFER);
    set("arena.size=1GiB");
    set("arena.slab=256MiB");
    roots_read();
    cr_assert_eq(roots[0].process.buffer_bytes, (256u << 20) + 4096, "it holds any part");
    cr_assert_eq(config_check_roots(&c, keep_cb, &e), 0, "%s", e.text);
    cr_assert_not_null(strstr(last, "/libexec/ucmd/ucmd-backend-nfs: No such file"), "%s", last);
}
