/* Environment variables as keys, and what config.get lists of keys. */
#include "daemon/config/table.h"
#include "tests/unit/config/config_rig.h"

TestSuite(config_environment, .init = setup, .fini = teardown);

static int environment(const char *a, const char *b)
{
    char *const variables[] = {(char *)"PATH=/bin", (char *)a, (char *)b, NULL};

    return config_environment(&c, variables, &e);
}

Test(config_environment, a_variable_goes_over_the_file_and_below_the_command_line)
{
    char *const sets[] = {(char *)"log.level=error"};
    char *const variables[] = {(char *)"UCMD_LOG_LEVEL=debug", (char *)"UCMD_ARENA_SIZE=2GiB",
                               (char *)"UCMD_NVME_PATHS=/a,/b", NULL};
    struct config_sources from = {
        .path = file, .environment = variables, .sets = sets, .n_sets = 1};

    cr_assert_eq(read_text("arena:\n  size: 1GiB\n  slab: 2MiB\n"), 0);
    cr_assert_eq(config_read_all(&c, &from, &e), 0, "%s", e.text);
    cr_assert_eq(c.arena_size, 2ull << 30);
    cr_assert_eq(c.arena_slab, 2ull << 20);
    cr_assert_eq(c.log_level, LOG_ERROR);
    cr_assert_eq(c.nvme_paths.n, 2);
    cr_assert_str_eq(c.nvme_paths.item[1], "/b");
}

Test(config_environment, a_wrong_value_names_the_variable)
{
    cr_assert_eq(environment("UCMD_ARENA_SIZE=4GB", NULL), -EINVAL);
    cr_assert_not_null(strstr(e.text, "UCMD_ARENA_SIZE: arena.size: \"4GB\""), "%s", e.text);
    cr_assert_eq(environment("UCMD_ARENA_SLAB=3MiB", NULL), 0);
    cr_assert_eq(config_check(&c, &e), -EINVAL);
    cr_assert_eq(strncmp(e.text, "UCMD_ARENA_SLAB: arena.slab is 3MiB", 35), 0, "%s", e.text);
}

Test(config_environment, an_unknown_one_is_refused_with_the_nearest)
{
    cr_assert_eq(environment("UCMD_ARENA_SISE=4GiB", NULL), -EINVAL);
    cr_assert_str_eq(e.text,
                     "UCMD_ARENA_SISE: there is no such key; did you mean UCMD_ARENA_SIZE?");
    cr_assert_eq(environment("UCMD_SOCKETMODE=0660", NULL), -EINVAL);
    cr_assert_not_null(strstr(e.text, "did you mean UCMD_SOCKET_MODE?"), "%s", e.text);
    cr_assert_eq(environment("UCMD_GARBAGE_ENTIRELY=1", NULL), -EINVAL);
    cr_assert_not_null(strstr(e.text, "'ucmd --check' lists all keys"), "%s", e.text);
    cr_assert_eq(environment("UCMD_arena_size=1GiB", NULL), -EINVAL);
    cr_assert_eq(environment("UCMD_"
                             "0123456789012345678901234567890123456789012345678901234567890=1",
                             NULL),
                 -EINVAL);
}

/* A pod alongside a service named ucmd gets these. */
Test(config_environment, what_is_not_the_daemon_s_is_left_alone)
{
    cr_assert_eq(environment("UCMD_SERVICE_HOST=10.0.0.1", "UCMD_PORT=tcp://10.0.0.1:9471"), 0);
    cr_assert_eq(environment("UCMD_PORT_9471_TCP_ADDR=10.0.0.1", "UCMDX=1"), 0);
    cr_assert_eq(
        environment("UCMD_METRICS_SERVICE_HOST=10.0.0.1", "UCMD_METRICS_SERVICE_PORT_HTTP=9471"), 0,
        "%s", e.text);
    cr_assert_eq(environment("UCMD_METRICS_PORT=tcp://10.0.0.1:9471",
                             "UCMD_METRICS_PORT_9471_TCP_ADDR=10.0.0.1"),
                 0, "%s", e.text);
    cr_assert_eq(environment("UCMD_METRICS_FOR_THE_NAMESPACE_OF_ALL_PREFILL_PODS_SERVICE_PORT=1",
                             "UCMD_METRICS_FOR_THE_NAMESPACE_OF_ALL_PREFILL_PODS_PORT_9471_TCP=x"),
                 0, "%s", e.text);
    cr_assert_eq(environment("UCMD_METRICS_PORT=9471", NULL), -EINVAL);
    cr_assert_eq(environment("UCMD=/usr/bin/ucmd", "UCM_SOCKET=/s"), 0);
}

Test(config_environment, every_key_has_a_variable_of_its_own)
{
    char a[CONFIG_VARIABLE_BYTES], b[CONFIG_VARIABLE_BYTES];

    for (size_t i = 0; i < config_key_count; i++)
        for (size_t j = 0; j < i; j++)
            cr_assert_str_neq(config_variable(config_keys[i].name, a),
                              config_variable(config_keys[j].name, b));
}

static struct config_entries entries;

static const struct config_entry *entry_of(const char *key)
{
    for (uint32_t i = 0; i < entries.n; i++)
        if (strcmp(entries.entry[i].key, key) == 0)
            return &entries.entry[i];
    cr_assert_fail("%s is not listed", key);
    return NULL;
}

Test(config_environment, entries_say_where_each_value_came_from)
{
    struct config next;
    char where[96];

    cr_assert_eq(read_text("log:\n  level: warn\n"), 0);
    cr_assert_eq(environment("UCMD_ARENA_SIZE=2GiB", NULL), 0);
    set("nvme.queue_depth=8");
    config_init(&next);
    cr_assert_eq(config_set(&next, "arena.size=3GiB", &e), 0);
    config_entries(&c, &next, &entries);
    snprintf(where, sizeof(where), "%s:2", file);
    cr_assert_str_eq(entry_of("log.level")->where, where);
    cr_assert_eq(entry_of("log.level")->from, CONFIG_FROM_FILE);
    cr_assert(entry_of("log.level")->changed && entry_of("log.level")->reloadable);
    cr_assert_str_eq(entry_of("arena.size")->where, "UCMD_ARENA_SIZE");
    cr_assert_str_eq(entry_of("arena.size")->next, "3GiB");
    cr_assert_str_eq(entry_of("arena.size")->initial, "4GiB");
    cr_assert_str_eq(entry_of("nvme.queue_depth")->where, "--set");
    cr_assert_eq(entry_of("nvme.size")->from, CONFIG_FROM_DEFAULT);
    cr_assert(!entry_of("nvme.size")->changed && !entry_of("nvme.size")->waits);
    for (uint32_t i = 0; i < entries.n; i++)
        cr_assert_str_neq(entries.entry[i].key, "request.handshake", "it is for tests only");
    config_free(&next);
}
