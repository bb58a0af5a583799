/* config_check: mistakes that only the whole configuration shows. */
#include "tests/unit/config/config_rig.h"

TestSuite(config_check, .init = setup, .fini = teardown);

/* A configuration that config_check has nothing against. */
static void set_sound(void)
{
    set("socket=%s/ucmd.sock", directory);
    set("nvme.paths=%s", directory);
    set("nvme.size=4MiB");
    set("nvme.segment=1MiB");
    set("events.memory=1000KiB");
    check_refused("--set: events.memory is too small", "write 1MiB or more");
    set("events.memory=1MiB");
    cr_assert_eq(config_check(&c, &e), 0, "%s", e.text);
    set("events.memory=0");
    cr_assert_eq(config_check(&c, &e), 0, "%s", e.text);
}

Test(config_check, sizes_against_each_other)
{
    set_sound();
    set("arena.slab=3MiB");
    check_refused("--set: arena.slab is 3MiB", "write 2MiB or 4MiB");
    set("arena.slab=64MiB");
    set("arena.size=32MiB");
    check_refused("--set: arena.size (32MiB) is smaller than arena.slab (64MiB)", "raise it");
    set("arena.size=64MiB");
    set("nvme.segment=2MiB");
    check_refused("--set: nvme.size (4MiB) is smaller than 4 times nvme.segment (2MiB)",
                  "raise it");
    set("nvme.segment=1049000");
    check_refused("--set: nvme.segment", "power of two");
    set("nvme.segment=1MiB");
}

Test(config_check, a_check_names_the_line_of_the_file)
{
    char begin[96];

    cr_assert_eq(read_text("arena:\n\n  size: 1MiB\n"), 0);
    snprintf(begin, sizeof(begin), "%s:3: arena.size", file);
    check_refused(begin, "smaller than arena.slab");
}

Test(config_check, the_sockets_directory)
{
    set_sound();
    set("socket=/nowhere/at/all/ucmd.sock");
    check_refused("--set: socket: directory /nowhere/at/all does not exist", "make it");
    setenv("LISTEN_FDS", "1", 1);
    cr_assert_eq(config_check(&c, &e), 0, "systemd made the socket: %s", e.text);
    unsetenv("LISTEN_FDS");
    write_bytes("", 0);
    set("socket=%s", file);
    check_refused("--set: socket: ", "is no socket");
    set("socket=%s/ucmd.sock", file);
    check_refused("--set: socket: ", "is not a directory");
}

Test(config_check, the_sockets_group)
{
    set_sound();
    set("socket_group=nosuchgroup");
    check_refused("--set: socket_group: there is no group \"nosuchgroup\"", "name one");
    set("socket_group=");
    cr_assert_eq(read_text("log:\n  level: info\nsocket_group: nosuchgroup\n"), 0);
    memset(&e, 0, sizeof(e));
    cr_assert_eq(config_check(&c, &e), -EINVAL);
    cr_assert_not_null(strstr(e.text, "ucmd.yaml:3: socket_group: "), "%s", e.text);
    set("socket_group=daemon");
    cr_assert_eq(geteuid() == 0 ? 0 : config_check(&c, &e), geteuid() == 0 ? 0 : -EINVAL);
    if (geteuid() != 0)
        cr_skip_test("needs root for the rest");
    cr_assert_eq(config_check(&c, &e), 0, "%s", e.text);
    cr_assert_eq(chmod(directory, 0777), 0);
    cr_assert_eq(seteuid(65534), 0);
    check_refused("--set: socket_group: uid 65534 is not in the group \"daemon\"", "add");
    cr_assert_eq(seteuid(0), 0);
}

Test(config_check, more_memory_than_the_host_has)
{
    set_sound();
    set("arena.size=15TiB");
    check_refused("--set: arena.size is 15TiB, with the index and requests ", "MiB fit");
}

Test(config_check, nvme_directories)
{
    char link[96];

    set_sound();
    set("nvme.paths=/nowhere");
    check_refused("--set: nvme.paths: directory /nowhere does not exist", "make it");
    write_bytes("", 0);
    set("nvme.paths=%s", file);
    check_refused("--set: nvme.paths: ", "is not a directory; set nvme.state");
    snprintf(link, sizeof(link), "%s/link", directory);
    cr_assert_eq(symlink(directory, link), 0);
    set("nvme.paths=%s,%s", directory, link);
    check_refused("--set: nvme.paths: ", "are one; name each once");
}

Test(config_check, nvme_directory_of_somebody_else)
{
    if (geteuid() != 0)
        cr_skip_test("needs root");
    set_sound();
    cr_assert_eq(chmod(directory, 0755), 0);
    set("socket=/tmp/ucmd.sock");
    cr_assert_eq(seteuid(65534), 0);
    check_refused("--set: nvme.paths: directory ", "give it to the daemon's user");
    cr_assert_eq(seteuid(0), 0);
}

Test(config_check, room_for_the_nvme_files)
{
    char sub[96];

    set_sound();
    set("nvme.size=16TiB");
    set("nvme.segment=1GiB");
    check_refused("--set: nvme.size: the file system of ", "lower nvme.size");
    /* Two directories on one file system share its space. */
    snprintf(sub, sizeof(sub), "%s/sub", directory);
    cr_assert_eq(mkdir(sub, 0700), 0);
    set("nvme.paths=%s,%s", directory, sub);
    set("nvme.size=4MiB");
    set("nvme.segment=1MiB");
    cr_assert_eq(config_check(&c, &e), 0, "%s", e.text);
}

Test(config_check, tenants_against_each_other)
{
    set_sound();
    set("tenants=a uid:1 gid:7,b uid:2 gid:1");
    cr_assert_eq(config_check(&c, &e), 0, "%s", e.text);
    set("tenants=a uid:1,b uid:2 uid:1");
    check_refused("--set: tenants: uid:1 is in \"a\" and in \"b\"", "leave it in one");
    set("tenants=a gid:1,a-b gid:3,a uid:2");
    check_refused("--set: tenants: \"a\" is there twice", "after one name");
    set("tenants=a uid:5 uid:5");
    check_refused("--set: tenants: uid:5 is in \"a\" and in \"a\"", "leave it in one");
}

Test(config_check, a_cgroup_is_in_one_tenant)
{
    set_sound();
    set("tenants=a cgroup:/x uid:1,b cgroup:/x/y cgroup:/xy,c cgroup:/");
    cr_assert_eq(config_check(&c, &e), 0, "%s", e.text);
    set("tenants=a cgroup:/xy cgroup:/x,b uid:1,c cgroup:/x");
    check_refused("--set: tenants: cgroup:/x is in \"a\" and in \"c\"", "leave it in one");
}
