#include "client/ctl/answer.h"
#include "proto/exposition.h"

#include <string.h>

static void fields_read(const msgpack_object *map, const struct metric_list *list, void *values)
{
    for (size_t i = 0; i < list->n_metrics; i++) {
        const struct metric_info *m = &list->metric[i];
        uint64_t v =
            strcmp(m->kind, "flag") == 0 ? answer_flag(map, m->name) : answer_u64(map, m->name);

        memcpy((char *)values + m->offset, &v, sizeof v);
    }
}

/* Elements beyond `max` are left out. */
static void list_read(const msgpack_object *stats, unsigned which, uint32_t max,
                      struct exposition *x)
{
    const struct metric_list *list = &metric_lists[which];
    const char *label = which == METRIC_LIST_NODES ? "node" : "name";
    uint32_t n = answer_count(stats, list->wire);

    n = n < max ? n : max;
    memcpy((char *)x + list->offset_n, &n, sizeof n);
    for (uint32_t i = 0; i < n; i++) {
        const msgpack_object *o = answer_at(stats, list->wire, i);
        char *to = (char *)x + list->offset + i * list->size;

        answer_text(o, label, to, list->label_bytes); /* each struct begins with it */
        fields_read(o, list, to);
    }
}

static unsigned find(const char *text, const char *const *names, unsigned n)
{
    unsigned i = 0;

    while (i < n && strcmp(names[i], text) != 0)
        i++;
    return i;
}

void answer_exposition(const msgpack_object *stats, struct exposition *x)
{
    char text[32];

    memset(x, 0, sizeof *x);
    answer_text(stats, "version", x->version, sizeof x->version);
    answer_text(stats, "policy", x->policy, sizeof x->policy);
    x->uptime_ms = answer_u64(stats, "uptime_ms");
    x->health = find(answer_text(stats, "health", text, sizeof text), health_names, HEALTH_STATES);
    fields_read(answer_get(stats, "metrics"), &metric_lists[METRIC_LIST_PLAIN], &x->metrics);
    list_read(stats, METRIC_LIST_TIERS, EXPOSITION_TIERS, x);
    list_read(stats, METRIC_LIST_ROOTS, UCM_MAX_ROOTS, x);
    list_read(stats, METRIC_LIST_DEVICES, EXPOSITION_DEVICES, x);
    list_read(stats, METRIC_LIST_NODES, EXPOSITION_NODES, x);
    list_read(stats, METRIC_LIST_TENANTS, EXPOSITION_TENANTS, x);
    for (uint32_t i = 0; i < x->n_roots; i++)
        x->root[i].state =
            find(answer_text(answer_at(stats, "shares", i), "health", text, sizeof text),
                 root_state_names, ROOT_STATES);
}
