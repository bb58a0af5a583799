/* What a configuration opens in the sandbox of ucmd.service. */
#include "daemon/config/unit.h"

#include "tests/unit/config/config_rig.h"

TestSuite(config_unit, .init = setup, .fini = teardown, .timeout = 10);

static char text[4096];

static const char *unit(void)
{
    FILE *f = fmemopen(text, sizeof(text), "w");

    cr_assert_not_null(f);
    cr_assert_eq(config_unit_print(&c, f, &e), 0, "%s", e.text);
    cr_assert_eq(fclose(f), 0);
    return text;
}

static void check_has(const char *line)
{
    char whole[256];

    snprintf(whole, sizeof(whole), "\n%s\n", line);
    cr_assert_not_null(strstr(unit(), whole), "%s: missing in:\n%s", line, text);
}

static void check_has_not(const char *words)
{
    cr_assert_null(strstr(unit(), words), "%s: found in:\n%s", words, text);
}

Test(config_unit, the_defaults_open_nothing)
{
    cr_assert_str_eq(unit(), "[Service]\n");
    set("nvme.paths=/var/lib/ucmd/nvme0");
    set("arena.persist_dir=/dev/shm/ucmd");
    cr_assert_str_eq(unit(), "[Service]\n", "the unit has these already");
}

Test(config_unit, directories_are_writable_and_read_only_roots_are_not)
{
    set("nvme.paths=/mnt/nvme0,/mnt/nvme 1");
    set("shared.roots=/srv/kv capacity=1TiB,/srv/old ro");
    check_has("ReadWritePaths=\"-/mnt/nvme0\"");
    check_has("ReadWritePaths=\"-/mnt/nvme 1\"");
    check_has("ReadWritePaths=\"-/srv/kv\"");
    check_has_not("/srv/old");
    check_has_not("AF_INET");
}

Test(config_unit, nfs_opens_the_network)
{
    set("shared.roots=nfs://10.0.0.5/kv");
    check_has("RestrictAddressFamilies=AF_INET AF_INET6");
    check_has("PrivateNetwork=no");
    check_has("IPAddressAllow=any");
}

Test(config_unit, monitoring_opens_the_network_and_its_directory)
{
    set("metrics.listen=127.0.0.1:9471");
    set("metrics.socket=/srv/monitoring/ucmd.sock");
    check_has("IPAddressAllow=any");
    check_has("ReadWritePaths=\"-/srv/monitoring\"");
    set("socket_group=monitoring");
    check_has("SupplementaryGroups=\"monitoring\"");
    check_has("SystemCallFilter=@chown");
}

Test(config_unit, a_raw_disk_is_allowed_with_its_state)
{
    set("nvme.paths=/dev/nvme1n1");
    set("nvme.state=/srv/state");
    set("encryption.secrets=/srv/secrets");
    check_has("DeviceAllow=\"/dev/nvme1n1\" rw");
    check_has("ReadWritePaths=\"-/srv/state\"");
    check_has("ReadWritePaths=\"-/srv/secrets\"");
    check_has_not("-/dev/nvme1n1");
}

Test(config_unit, what_lies_below_a_private_directory_comes_into_the_sandbox)
{
    set("nvme.paths=/home/kv/nvme");
    set("shared.roots=/tmp/kv");
    check_has("ProtectHome=tmpfs");
    check_has("BindPaths=\"-/home/kv/nvme\"");
    check_has("PrivateTmp=no");
    check_has("ReadWritePaths=\"-/tmp/kv\"");
}

Test(config_unit, no_path_writes_a_setting_of_its_own)
{
    set("shared.roots=/srv/100%%\"k\\v");
    check_has("ReadWritePaths=\"-/srv/100%%\\\"k\\\\v\"");
}

Test(config_unit, roots_that_can_t_be_read_print_nothing)
{
    FILE *f = fmemopen(text, sizeof(text), "w");

    set("shared.roots=kv");
    cr_assert_eq(config_unit_print(&c, f, &e), -EINVAL);
    cr_assert_eq(ftell(f), 0);
    cr_assert_eq(fclose(f), 0);
}

Test(config_unit, the_hint_is_for_units_only)
{
    unsetenv("INVOCATION_ID");
    cr_assert_str_empty(config_unit_hint());
    setenv("INVOCATION_ID", "0123", 1);
    cr_assert_not_null(strstr(config_unit_hint(), "systemctl daemon-reload"));
}
