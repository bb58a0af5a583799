/* doctor: tenants' keys for encryption at rest, as the daemon has them. */
#include "client/ctl/doctor.h"

#include <inttypes.h>
#include <string.h>

static void source_check(struct doctor *d, const msgpack_object *o)
{
    char tenant[257], error[256];
    uint32_t keys = answer_count(o, "ids");

    answer_text(o, "tenant", tenant, sizeof tenant);
    answer_text(o, "error", error, sizeof error);
    if (keys > 0 && error[0] == '\0')
        doctor_add(d, DOCTOR_OK, "keys", NULL, "tenant %s: %" PRIu32 ", the last is current",
                   tenant, keys);
    else if (keys > 0)
        doctor_add(d, DOCTOR_WARN, "keys", "mend its source, then 'ucmctl encryption-key reload'",
                   "tenant %s: its source can't be read, the keys of before are used: %s", tenant,
                   error);
    else
        doctor_add(d, answer_flag(o, "reading") ? DOCTOR_WARN : DOCTOR_FAIL, "keys",
                   "mend its source in encryption.tenants, then 'ucmctl encryption-key reload'",
                   "tenant %s has none, so nothing of it is stored or read below DRAM: %s", tenant,
                   error);
}

void doctor_keys(struct doctor *d)
{
    const msgpack_object *metrics = d->client ? answer_get(d->stats, "metrics") : NULL;
    uint64_t unknown = metrics ? answer_u64(metrics, "encryption_bytes_unknown") : 0;
    struct answer list;
    char bytes[HUMAN_BYTES];

    if (d->client == NULL)
        return;
    if (answer_call(d->client, UCM_METHOD_ENCRYPTION_KEY_LIST, NULL,
                    (int)args_number(d->a, "timeout"), &list) != 0) {
        doctor_add(d, DOCTOR_SKIP, "keys", "run it as an operator", "%s", ucm_errmsg());
        return;
    }
    for (uint32_t i = 0; i < answer_count(list.root, "keys"); i++)
        source_check(d, answer_at(list.root, "keys", i));
    if (unknown > 0)
        doctor_add(d, DOCTOR_WARN, "keys",
                   "put the line of that key back into its source, or wait until its blocks age",
                   "%s on NVMe are encrypted with keys that no source has: they are misses",
                   human_bytes(bytes, unknown));
    answer_close(&list);
}
