/* What targets of NFS mean, and the refusals of strings that are no targets. */
#include "daemon/backend/nfs/target.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>

Test(nfs_target, server_export_and_options)
{
    struct nfs_target t;
    const char *why = NULL;

    cr_assert_eq(nfs_target_parse("nfs://10.0.0.5/export/kv", &t, &why), 0);
    cr_assert_str_eq(t.server, "10.0.0.5");
    cr_assert_str_eq(t.export, "/export/kv");
    cr_assert_eq(t.port, 2049);
    cr_assert_eq(t.mount_port, 0);
    cr_assert_eq(t.uid, -1);
    cr_assert_eq(t.gid, -1);

    cr_assert_eq(
        nfs_target_parse("nfs://[fe80::1]:1234/e?version=3&mountport=77&uid=0&gid=5", &t, &why), 0);
    cr_assert_str_eq(t.server, "fe80::1");
    cr_assert_str_eq(t.export, "/e");
    cr_assert_eq(t.port, 1234);
    cr_assert_eq(t.mount_port, 77);
    cr_assert_eq(t.uid, 0);
    cr_assert_eq(t.gid, 5);
    cr_assert_null(why);
}

Test(nfs_target, what_is_wrong_is_said)
{
    static const struct {
        const char *text, *says;
    } cases[] = {{"/mnt/kv", "nfs://"},
                 {"nfs:///kv", "SERVER"},
                 {"nfs://server", "path"},
                 {"nfs://server/", "path"},
                 {"nfs://[::1/kv", "brackets"},
                 {"nfs://server:0/kv", "port"},
                 {"nfs://server:65536/kv", "port"},
                 {"nfs://server/kv?version=4", "version 3"},
                 {"nfs://server/kv?nfsport=x", "port"},
                 {"nfs://server/kv?uid=-1", "numbers"},
                 {"nfs://server/kv?uid=99999999999", "numbers"},
                 {"nfs://server/kv?readahead=1", "options are"},
                 {"nfs://server/kv?version", "NAME=VALUE"},
                 {"nfs://server/kv?uid=1&uid=1", "once"},
                 {"nfs://server/kv?nfsport=99999", "port"}};
    char text[NFS_EXPORT_CAP + 32] = "nfs://s/";

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct nfs_target t;
        const char *why = NULL;

        cr_assert_eq(nfs_target_parse(cases[i].text, &t, &why), -EINVAL, "%s", cases[i].text);
        cr_assert(strstr(why, cases[i].says), "%s: %s", cases[i].text, why);
    }
    memset(text + 8, 'x', NFS_EXPORT_CAP);
    cr_assert_eq(nfs_target_parse(text, &(struct nfs_target){0}, &(const char *){NULL}), -EINVAL);
}
