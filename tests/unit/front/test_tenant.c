#include "daemon/tenant/tenant.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

static struct tenant_set set;
static struct config config;

static void setup(void)
{
    cr_assert_eq(tenant_set_init(&set), 0);
    config_init(&config);
}

static void teardown(void)
{
    tenant_set_close(&set);
    config_free(&config);
}

TestSuite(tenant, .init = setup, .fini = teardown);

static void configure(const char *assignment)
{
    struct config_error e = {.text = ""};

    cr_assert_eq(config_set(&config, assignment, &e), 0, "%s", e.text);
    cr_assert_eq(config_check_values(&config, &e), 0, "%s", e.text);
    cr_assert_eq(tenant_set_configure(&set, &config), 0);
}

static void refused(const char *assignment, const char *says)
{
    struct config_error e = {.text = ""};

    cr_assert_eq(config_set(&config, assignment, &e), 0, "%s", e.text);
    cr_assert_neq(config_check_values(&config, &e), 0);
    cr_assert_not_null(strstr(e.text, says), "%s", e.text);
    cr_assert_not_null(strstr(e.text, "tenant_settings: "), "%s", e.text);
}

Test(tenant, it_lives_while_something_refers_to_it)
{
    struct tenant *a = tenant_ref(&set, "a"), *b = tenant_ref(&set, "uid:7");

    cr_assert_eq(tenant_ref(&set, "a"), a);
    cr_assert_eq(tenant_find(&set, "uid:7"), b);
    tenant_unref(&set, a);
    cr_assert_eq(tenant_find(&set, "a"), a);
    tenant_unref(&set, a);
    cr_assert_null(tenant_find(&set, "a"));
    cr_assert_eq(tenant_next(&set, NULL), b);
    cr_assert_null(tenant_next(&set, b));
    tenant_unref(&set, b);
}

Test(tenant, thousands_are_found)
{
    struct tenant *t[10000];
    char name[32];

    for (unsigned i = 0; i < 10000; i++) {
        snprintf(name, sizeof(name), "uid:%u", i);
        t[i] = tenant_ref(&set, name);
        cr_assert_not_null(t[i]);
    }
    for (unsigned i = 0; i < 10000; i++) {
        snprintf(name, sizeof(name), "uid:%u", i);
        cr_assert_eq(tenant_find(&set, name), t[i]);
        tenant_unref(&set, t[i]);
    }
    cr_assert_null(tenant_next(&set, NULL));
}

Test(tenant, settings_come_from_the_table_then_from_all_then_from_its_own)
{
    struct tenant *a = tenant_ref(&set, "team-a"), *b = tenant_ref(&set, "team-b");

    cr_assert_eq(a->settings.weight, 100u);
    configure("limits.namespaces_per_tenant=7");
    cr_assert_eq(a->settings.namespaces, 7u);
    configure("tenant_settings=team-a weight=300,* weight=50 namespaces=5,uid:9 namespaces=3");
    cr_assert_eq(a->settings.weight, 300u);
    cr_assert_eq(a->settings.namespaces, 5u);
    cr_assert_eq(b->settings.weight, 50u);
    cr_assert_eq(tenant_find(&set, "uid:9")->settings.namespaces, 3u);
    cr_assert_eq(tenant_find(&set, "uid:9")->settings.weight, 50u);
    /* and go with the configuration */
    configure("tenant_settings=");
    cr_assert_eq(a->settings.weight, 100u);
    cr_assert_null(tenant_find(&set, "uid:9"));
    tenant_unref(&set, a);
    tenant_unref(&set, b);
}

Test(tenant, what_is_wrong_is_said)
{
    refused("tenant_settings=team-a", "no setting is named");
    refused("tenant_settings=team-a wieght=3",
            "no setting \"wieght\"; there are weight, dram.min, ");
    refused("tenant_settings=team-a weight", "write KEY=VALUE");
    refused("tenant_settings=team-a weight=0", "from 1 to 10000");
    refused("tenant_settings=team-a weight=3 weight=4", "given twice");
    refused("tenant_settings=gid:3 weight=3", "does not begin with a tenant's name");
    refused("tenant_settings=uid:007 weight=3", "does not begin with a tenant's name");
    refused("tenant_settings=other weight=3", "does not begin with a tenant's name");
    refused("tenant_settings=weight=3", "does not begin with a tenant's name");
    refused("tenant_settings=a weight=3,b weight=3,a namespaces=3", "\"a\" is there twice");
}

Test(tenant, guarantees_fit_together)
{
    configure("arena.size=1GiB");
    configure("nvme.rewrite=0");
    refused("tenant_settings=a nvme.min=1MiB", "and nvme.rewrite is 0; raise it");
    configure("tenant_settings=a dram.min=512MiB dram.max=512MiB,b dram.min=512MiB");
    refused("tenant_settings=a dram.min=512MiB,b dram.min=513MiB",
            "all tenants' dram.min are 1025MiB in sum, and arena.size is 1GiB");
    refused("tenant_settings=a dram.min=2MiB dram.max=1MiB",
            "a: dram.min (2MiB) is more than dram.max (1MiB)");
    refused("tenant_settings=a nvme.min=2MiB nvme.max=1MiB",
            "a: nvme.min (2MiB) is more than nvme.max (1MiB)");
    refused("tenant_settings=a dram.min=2MiB,* dram.max=1MiB", "is more than dram.max");
    refused("tenant_settings=* dram.min=2MiB", "give it by name");
}

Test(tenant, settings_are_written_as_they_are_read)
{
    struct tenant_settings s = {.given = 0}, again = {.given = 0};
    char text[TENANT_TEXT_BYTES], why[TENANT_WHY_BYTES];

    cr_assert_eq(tenant_settings_parse("  namespaces=12  weight=7", &s, why), 0);
    cr_assert_str_eq(tenant_settings_text(&s, text), "weight=7 namespaces=12");
    cr_assert_eq(tenant_settings_parse(text, &again, why), 0);
    cr_assert_eq(memcmp(&s, &again, sizeof(s)), 0);
}
