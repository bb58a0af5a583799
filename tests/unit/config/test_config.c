/* Keys, values, files, and what a reload takes. */
#include "daemon/config/table.h"
#include "tests/unit/config/config_rig.h"

static struct config fresh; /* another one, with the defaults until a test changes it */

static void begin(void)
{
    setup();
    config_init(&fresh);
}

static void end(void)
{
    config_free(&fresh);
    teardown();
}

TestSuite(config, .init = begin, .fini = end);

/* The text is refused in this line, with a message that contains `says`. */
static void refused(const char *text, unsigned line, const char *says)
{
    char begin[80];

    memset(&e, 0, sizeof(e));
    cr_assert_eq(read_text(text), -EINVAL, "taken: %s", text);
    snprintf(begin, sizeof(begin), "%s:%u: ", file, line);
    expect_error(begin, says);
}

static void set_refused(const char *assignment, const char *says)
{
    memset(&e, 0, sizeof(e));
    cr_assert_eq(config_set(&c, assignment, &e), -EINVAL, "taken: %s", assignment);
    expect_error("--set: ", says);
}

static void set_fresh(const char *assignment)
{
    cr_assert_eq(config_set(&fresh, assignment, &e), 0, "%s", e.text);
}

static void all_equal(const struct config *a, const struct config *b)
{
    for (size_t i = 0; i < config_key_count; i++)
        cr_assert(config_value_equal(a, b, &config_keys[i]), "%s differs", config_keys[i].name);
}

/* ---- the table and the file that ships ---- */

Test(config, the_table_is_sound)
{
    for (size_t i = 0; i < config_key_count; i++) {
        const struct config_key *k = &config_keys[i];

        cr_assert_eq(config_key_find(k->name), k, "%s is there twice", k->name);
        cr_assert_leq(strspn(k->name, "abcdefghijklmnopqrstuvwxyz_."), strlen(k->name));
        cr_assert_gt(strlen(k->help), 0);
        cr_assert(k->kind != CONFIG_ENUM || k->names);
    }
}

Test(config, the_file_that_ships_holds_the_defaults_and_every_key)
{
    cr_assert_eq(config_read(&c, "config/ucmd.yaml", &e), 0, "%s", e.text);
    all_equal(&c, &fresh);
    for (size_t i = 0; i < config_key_count; i++)
        cr_assert_eq(c.origin.line[i] == 0, config_keys[i].internal, "%s", config_keys[i].name);
}

/* Standard output of config_print; the caller frees it. */
static char *printed(const struct config *which)
{
    int saved = dup(STDOUT_FILENO);
    FILE *f = tmpfile();
    char *text;
    long n;

    cr_assert_not_null(f);
    fflush(stdout);
    dup2(fileno(f), STDOUT_FILENO);
    config_print(which);
    dup2(saved, STDOUT_FILENO);
    close(saved);
    n = lseek(fileno(f), 0, SEEK_END);
    text = calloc(1, (size_t)n + 1);
    cr_assert_eq(pread(fileno(f), text, (size_t)n, 0), n);
    fclose(f);
    return text;
}

Test(config, the_file_that_ships_is_what_print_prints)
{
    char *text = printed(&c), *shipped = calloc(1, 65536);
    FILE *f = fopen("config/ucmd.yaml", getenv("UCMD_UPDATE") ? "w+" : "r");

    cr_assert_not_null(f);
    if (getenv("UCMD_UPDATE"))
        fputs(text, f);
    rewind(f);
    cr_assert_gt(fread(shipped, 1, 65535, f), 0);
    fclose(f);
    cr_assert_str_eq(text, shipped, "not so; UCMD_UPDATE=1 build/check/config mends it");
    free(text);
    free(shipped);
}

Test(config, what_is_printed_reads_back_the_same)
{
    char *text;

    set("socket=/tmp/with \"quotes\" and \\ and #/a: b.sock");
    set("socket_mode=0600");
    set("socket_group=null");
    set("tenants=a uid:1 gid:2,b uid:3");
    set("admins=uid:0,gid:5");
    set("log.level=debug");
    set("arena.size=1048577");
    set("nvme.paths=/a,/b c,/d'e");
    set("nvme.io=threads");
    set("lease.max=90s");
    set("request.timeout=1001ms");
    set("shutdown.drain=0");
    set("arena.prefault=false");
    text = printed(&c);
    write_bytes(text, strlen(text));
    free(text);
    cr_assert_eq(config_read(&fresh, file, &e), 0, "%s", e.text);
    all_equal(&fresh, &c);
    cr_assert_eq(fresh.arena_size, 1048577);
    cr_assert_str_eq(fresh.socket_group, "null");
}

/* ---- values ---- */

/* tests/unit/proto/test_units.c has the ways to write a size, and those to write a duration. */
Test(config, sizes)
{
    set("arena.size=4096KiB");
    cr_assert_eq(c.arena_size, 4096u * 1024);
    set_refused("arena.size=4G", "write 4GiB");
    set_refused("arena.size=4 GiB", "whole number");
    set_refused("arena.size=65TiB", "from 1MiB to 15TiB");
    set_refused("arena.slab=2GiB", "from 1MiB to 1GiB");
    cr_assert_eq(c.arena_size, 4096u * 1024);
}

Test(config, durations)
{
    set("request.timeout=1h");
    cr_assert_eq(c.request_timeout_ms, 3600000);
    set_refused("request.timeout=30", "no unit");
    set_refused("request.timeout=2h", "from 1ms to 1h");
    set_refused("request.timeout=0ms", "from 1ms");
    cr_assert_eq(c.request_timeout_ms, 3600000);
}

Test(config, other_kinds)
{
    set("nvme.queue_depth=4096");
    cr_assert_eq(c.nvme_queue_depth, 4096);
    set_refused("nvme.queue_depth=4097", "from 1 to 4096");
    set_refused("nvme.queue_depth=0x10", "whole number");
    set("socket_mode=0600");
    cr_assert_eq(c.socket_mode, 0600);
    set_refused("socket_mode=660", "leading 0");
    set_refused("socket_mode=0888", "octal");
    set_refused("socket_mode=07777", "from 00 to 0777");
    set("arena.numa=off");
    cr_assert_eq(c.arena_numa, CONFIG_NUMA_OFF);
    set_refused("arena.numa=on", "auto");
    set("shared.sync=true");
    cr_assert(c.shared_sync);
    set_refused("shared.sync=yes", "write one of false, true");
    set("nvme.io=uring");
    cr_assert_eq(c.nvme_io, CONFIG_IO_URING);
    set_refused("nvme.io=io_uring", "auto, uring, threads");
    set("log.level=warn");
    cr_assert_eq(c.log_level, LOG_WARN);
    set_refused("socket=ucmd.sock", "absolute");
    set_refused(
        "socket=/a-path-of-more-than-one-hundred-and-seven-bytes/which-is-what-the-kernel-takes-"
        "for-the-name-of-a-unix-socket",
        "from 1 to 107");
}

Test(config, lists_by_set_replace)
{
    set("nvme.paths=/a,/b");
    cr_assert_eq(c.nvme_paths.n, 2);
    set("nvme.paths=/c");
    cr_assert_eq(c.nvme_paths.n, 1);
    cr_assert_str_eq(c.nvme_paths.item[0], "/c");
    set_refused("nvme.paths=/c,d", "absolute");
    set_refused("nvme.paths=/1,/2,/3,/4,/5,/6,/7,/8,/9,/10,/11,/12,/13,/14,/15,/16,/17",
                "at most 16");
    cr_assert_eq(c.nvme_paths.n, 1);
    set("nvme.paths=");
    cr_assert_eq(c.nvme_paths.n, 0);
}

Test(config, tenants_and_admins_syntax)
{
    set("tenants=team-a uid:1000 gid:200,b uid:4294967294");
    set("admins=uid:0,gid:27");
    set_refused("admins=root", "uid:NUMBER");
    set_refused("admins=uid:", "uid:NUMBER");
    set_refused("admins=uid:-1", "uid:NUMBER");
    set_refused("admins=uid:4294967295", "uid:NUMBER");
    set_refused("tenants=a", "say who");
    set_refused("tenants=uid:1000", "begin with a name");
    set_refused("tenants=a  uid:1", "one space");
    set_refused("tenants=a uid:1 ", "one space");
    set_refused("tenants=a alice", "uid:NUMBER");
    set("tenants=a uid:1 cgroup:/a.slice/b,all cgroup:/");
    set_refused("tenants=a cgroup:", "cgroup:/PATH");
    set_refused("tenants=a cgroup:a.slice", "cgroup:/PATH");
    set_refused("tenants=a cgroup:/a.slice/", "cgroup:/PATH");
    set_refused("admins=cgroup:/a", "uid:NUMBER");
    set_refused("tenants=a/b uid:1", "begin with a name");
    set("tenants=others uid:1,other-team uid:2");
    set_refused("tenants=a uid:1,other uid:2", "another name than \"other\"");
}

Test(config, set_wants_a_known_key_and_a_value)
{
    set_refused("arena.size", "write key=value");
    set_refused("=4", "write key=value");
    set_refused("arena.sise=4GiB", "did you mean \"arena.size\"?");
    set_refused("cuda=off", "did you mean \"device.cuda\"?");
    set_refused("completely.different=1", "lists all keys");
    set_refused("log=1", "\"log\" is a section; set one of its keys");
    set_refused(
        "a-name-that-is-longer-than-any-key-could-ever-be-and-still-goes-on-and-on-and-on=1",
        "unknown key");
}

/* ---- files ---- */

Test(config, a_file_changes_what_it_names_and_nothing_else)
{
    cr_assert_eq(read_text("# a comment\n"
                           "arena:\n"
                           "  size: 8GiB\n"
                           "nvme:\n"
                           "  paths:\n"
                           "    - /a\n"
                           "    - \"/b c\"\n"
                           "socket_mode: 0600\n"
                           "log:\n"
                           "  # level: debug\n"),
                 0, "%s", e.text);
    cr_assert_eq(c.arena_size, 8ull << 30);
    cr_assert_eq(c.socket_mode, 0600);
    cr_assert_eq(c.nvme_paths.n, 2);
    cr_assert_str_eq(c.nvme_paths.item[1], "/b c");
    set("arena.size=4GiB");
    set("socket_mode=0660");
    set("nvme.paths=");
    all_equal(&c, &fresh);
}

Test(config, empty_files_mean_the_defaults)
{
    cr_assert_eq(read_text(""), 0);
    cr_assert_eq(read_text("# nothing\n"), 0);
    cr_assert_eq(read_text("---\n"), 0);
    cr_assert_eq(read_text("{}\n"), 0);
}

Test(config, unknown_keys)
{
    refused("log:\n  level: info\narena:\n  # c\n  sise: 4GiB\n", 5,
            "unknown key \"arena.sise\"; did you mean \"arena.size\"?");
    refused("arean:\n  size: 4GiB\n", 1, "did you mean \"arena\"?");
    refused("size: 4GiB\n", 1, "did you mean \"arena.size\"?");
    refused("arena.size: 4GiB\n", 1, "write \"arena:\", and below it, indented, \"size:\"");
    refused("arena:\n  zzzzzzzz: 1\n", 2, "lists all keys");
    refused("arena:\n  ? [a, b]\n  : 1\n", 2, "plain word");
}

Test(config, bad_values_name_their_line)
{
    refused("arena:\n  size: 4GB\n", 2, "write 4GiB");
    refused("arena:\n  size:\n    - 4GiB\n", 3, "arena.size takes one value");
    refused("arena:\n  size: {a: b}\n", 2, "arena.size takes one value");
    refused("arena:\n  size:\n", 2, "arena.size has no value");
    refused("arena:\n  size: ~\n", 2, "arena.size has no value");
    refused("arena: 4GiB\n", 1, "arena is a section");
    refused("arena: [4GiB]\n", 1, "arena is a section");
    refused("socket:\n  path: /a\n", 2, "socket takes one value");
    refused("nvme:\n  paths: /a\n", 2, "[/a]");
    refused("nvme:\n  paths: {a: b}\n", 2, "takes a list");
    refused("nvme:\n  paths: [[/a]]\n", 2, "one value an item");
    refused("nvme:\n  paths: [/a, relative]\n", 2, "absolute path");
    refused("nvme:\n  paths:\n    -\n", 3, "one value an item");
}

Test(config, keys_and_sections_set_twice)
{
    refused("arena:\n  size: 4GiB\n  size: 5GiB\n", 3, "arena.size is set twice, in line 2 too");
    refused("arena:\n  size: 4GiB\nlog:\n  level: info\narena:\n  slab: 1MiB\n", 5,
            "section arena is there twice, in line 1 too");
}

/* The message names the line of the mistake, not the one at which the parser gave up. */
Test(config, the_line_of_an_open_quote_or_bracket_and_after_a_byte_order_mark)
{
    refused("\xef\xbb\xbfsocket: /a\narena:\n  sise: 4GiB\n", 3, "did you mean");
    refused("\xef\xbb\xbf# c\n\narena:\n  sise: 4GiB\n", 4, "did you mean");
    refused("log:\n  level: info\nsocket: \"/a\narena:\n  size: 4GiB\n", 3, "close");
    refused("socket: '/a\n\n\n", 1, "close");
    refused("log:\n  level: info\nsocket: \"/a\narena:\n  keep: \"/b\"\n", 3,
            "a quote that is not");
    refused("nvme:\n  paths: [/a, \"/b]\n  size: 1GiB\n", 2, "close");
    refused("nvme:\n  paths: [/a, /b\n  size: 1GiB\n", 2, "close what begins here");
    cr_assert_eq(read_text("\xef\xbb\xbfsocket: /a\n"), 0, "%s", e.text);
}

Test(config, a_key_of_earlier_versions_is_unknown)
{
    refused("shared:\n  low: 80\n", 2, "unknown key");
    refused("shared:\n  placement: round-robin\n", 2, "write one of tiered, hashed");
}

Test(config, what_is_not_yaml_or_too_much_of_it)
{
    refused("arena:\n\tsize: 4GiB\n", 2, "a tab; indent with spaces");
    refused("arena:\n  size: 4GiB\n slab: 1MiB\n", 3, "indented");
    refused("arena: {size: 4GiB\n", 1, "close what begins here");
    refused("- a\n", 1, "key: value");
    refused("just text\n", 1, "key: value");
    refused("arena: &x\n  size: 4GiB\n", 1, "anchors");
    refused("arena:\n  size: &x 4GiB\n", 2, "anchors");
    refused("arena:\n  size: *x\n", 2, "anchors");
    refused("arena:\n  size: !!int 4\n", 2, "tags");
    refused("arena:\n  size: 4GiB\n---\nlog:\n  level: info\n", 3, "a second document");
    refused("socket: \"/a\\0b\"\n", 1, "control character");
    refused("socket: \"/a\\nb\"\n", 1, "control character");
    refused("log:\n  level: \xff\xfe\n", 2, "UTF-8");
    refused("log:\n  level: \x01\n", 2, "UTF-8");
}

Test(config, a_huge_file_is_not_read)
{
    size_t n = (1u << 20) + 1;
    char *text = malloc(n);

    cr_assert_not_null(text);
    memset(text, '#', n);
    write_bytes(text, n);
    cr_assert_eq(config_read(&c, file, &e), -EINVAL);
    cr_assert_not_null(strstr(e.text, "larger than 1 MiB"));
    memset(text, '\n', n - 1);
    write_bytes(text, n - 1);
    cr_assert_eq(config_read(&c, file, &e), 0, "%s", e.text);
    memset(text, '[', n - 1); /* nor does nesting cost anything */
    write_bytes(text, n - 1);
    cr_assert_eq(config_read(&c, file, &e), -EINVAL);
    for (size_t i = 0; i < n - 1; i++)
        text[i] = "- "[i % 2];
    write_bytes(text, n - 1);
    cr_assert_eq(config_read(&c, file, &e), -EINVAL);
    free(text);
}

Test(config, files_that_can_not_be_read)
{
    cr_assert_eq(config_read(&c, "/nowhere/ucmd.yaml", &e), -ENOENT);
    cr_assert_str_eq(e.text, "/nowhere/ucmd.yaml: can't be opened: No such file or directory");
    cr_assert_eq(config_read(&c, directory, &e), -EISDIR);
    cr_assert_not_null(strstr(e.text, "Is a directory"));
}

Test(config, a_refused_file_leaves_sound_strings)
{
    refused("socket: /a.sock\nnvme:\n  paths: [/a, /b]\n  size: x\n", 4, "nvme.size");
    cr_assert_str_eq(c.socket, "/a.sock");
    cr_assert_eq(c.nvme_paths.n, 2);
}

/* ---- reload ---- */

static struct config_changes changes;

static void assert_change(const char *key, bool restart, const char *from, const char *to)
{
    const struct config_change *change = changes.change;

    while (change < changes.change + changes.n && strcmp(change->key, key) != 0)
        change++;
    cr_assert(change < changes.change + changes.n, "%s is not among the changes", key);
    cr_assert_eq(change->restart, restart, "%s", key);
    cr_assert_str_eq(change->from, from);
    cr_assert_str_eq(change->to, to);
}

Test(config, reload_takes_what_is_reloadable_and_names_the_rest)
{
    set_fresh("log.level=debug");
    set_fresh("request.timeout=5s");
    config_reload(&c, &fresh, &changes);
    cr_assert_eq(changes.n, 2);
    assert_change("log.level", false, "info", "debug");
    cr_assert_eq(c.log_level, LOG_DEBUG);
    cr_assert_eq(c.request_timeout_ms, 5000);
}

Test(config, reload_names_every_key_that_needs_a_restart)
{
    set_fresh("arena.size=8GiB");
    set_fresh("nvme.paths=/a");
    set_fresh("arena.persist_dir=/dev/shm/ucmd");
    set_fresh("log.level=error");
    config_reload(&c, &fresh, &changes);
    cr_assert_eq(changes.n, 4);
    assert_change("arena.size", true, "4GiB", "8GiB");
    assert_change("nvme.paths", true, "[]", "[/a]");
    assert_change("arena.persist_dir", true, "", "/dev/shm/ucmd");
    assert_change("log.level", false, "info", "error");
    cr_assert_eq(c.log_level, LOG_ERROR);
    cr_assert_eq(c.arena_size, 4ull << 30);
    cr_assert_eq(c.nvme_paths.n, 0);
    cr_assert_eq(fresh.arena_size, 8ull << 30, "what the next start will find");
}

Test(config, reload_takes_over_tenants_and_admins)
{
    write_bytes("tenants: [a uid:1, b uid:2 gid:3]\nadmins: [\"uid:7\"]\n", 51);
    cr_assert_eq(config_read(&fresh, file, &e), 0, "%s", e.text);
    config_reload(&c, &fresh, &changes);
    cr_assert_eq(changes.n, 2);
    assert_change("tenants", false, "[]", "[a uid:1, b uid:2 gid:3]");
    cr_assert_eq(c.tenants.n, 2);
    cr_assert_str_eq(c.tenants.item[1], "b uid:2 gid:3");
    cr_assert_str_eq(c.admins.item[0], "uid:7");
    config_free(&fresh);
    config_init(&fresh);
    config_reload(&c, &fresh, &changes);
    assert_change("tenants", false, "[a uid:1, b uid:2 gid:3]", "[]");
    cr_assert_eq(c.tenants.n, 0);
}

Test(config, reload_shows_a_long_list_in_part)
{
    char text[40];

    for (unsigned i = 0; i < 1000; i++) {
        snprintf(text, sizeof(text), "tenant-%u uid:%u", i, i);
        cr_assert_eq(config_list_add(&fresh.tenants, text), 0);
    }
    config_reload(&c, &fresh, &changes);
    cr_assert_eq(changes.n, 1);
    cr_assert_not_null(strstr(changes.change[0].to, "tenant-0 uid:0, tenant-1 uid:1, "));
    cr_assert_not_null(strstr(changes.change[0].to, " more]"));
    cr_assert_eq(c.tenants.n, 1000);
}

Test(config, reload_keeps_where_each_key_was_set)
{
    cr_assert_eq(read_text("log:\n  level: warn\narena:\n  size: 2GiB\n"), 0);
    write_bytes("\n\nlog:\n  level: warn\narena:\n  size: 1GiB\n", 41);
    cr_assert_eq(config_read(&fresh, file, &e), 0, "%s", e.text);
    config_reload(&c, &fresh, &changes);
    cr_assert_eq(changes.n, 1);
    cr_assert_eq(c.origin.line[config_key_index(config_key_find("log.level"))], 4);
    cr_assert_eq(c.origin.line[config_key_index(config_key_find("arena.size"))],
                 CONFIG_LINE_EARLIER);
}

Test(config, reload_leaves_what_the_command_line_set)
{
    set("log.level=debug");
    set("arena.size=8GiB");
    config_reload(&c, &fresh, &changes);
    cr_assert_eq(changes.n, 0);
    cr_assert_eq(c.log_level, LOG_DEBUG);
    cr_assert_eq(c.arena_size, 8ull << 30);
}
