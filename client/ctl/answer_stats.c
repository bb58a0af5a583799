#include "client/ctl/answer.h"
#include "proto/metrics/exposition.h"

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

/* The daemon sends bounds, and counts of what is not empty. */
static void buckets_read(const msgpack_object *o, struct histogram *h)
{
    const msgpack_object *buckets = answer_get(o, "buckets");
    uint64_t sum_ns = h->sum_ns + answer_u64(o, "sum_ns");

    for (uint32_t i = 0; i + 1 < answer_count(o, "buckets"); i += 2) {
        const msgpack_object *p = &buckets->via.array.ptr[i];
        uint64_t bound_us = p[0].type == MSGPACK_OBJECT_POSITIVE_INTEGER ? p[0].via.u64 : 0;
        uint64_t ns = bound_us < UINT64_MAX / 1000 ? bound_us * 1000 : UINT64_MAX;

        if (p[1].type == MSGPACK_OBJECT_POSITIVE_INTEGER)
            histogram_add(h, ns, p[1].via.u64);
    }
    h->sum_ns = sum_ns; /* of the durations themselves, not of their bounds */
}

static void histograms_read(const msgpack_object *stats, struct histograms *all)
{
    char name[32], tier[16], size[16];

    for (uint32_t k = 0; k < answer_count(stats, "histograms"); k++) {
        const msgpack_object *o = answer_at(stats, "histograms", k);
        unsigned t =
            find(answer_text(o, "tier", tier, sizeof tier), metric_tier_names, METRIC_TIERS);
        unsigned s =
            find(answer_text(o, "size", size, sizeof size), metric_size_names, METRIC_SIZES);

        answer_text(o, "name", name, sizeof name);
        t = tier[0] == '\0' ? 0 : t;
        s = size[0] == '\0' ? 0 : s;
        for (size_t i = 0; i < histogram_infos_n; i++) {
            const struct histogram_info *info = &histogram_infos[i];

            if (strcmp(info->name, name) == 0 && t < info->tiers && s < info->sizes)
                buckets_read(o, (struct histogram *)((char *)all + info->offset) + t * info->sizes +
                                    s);
        }
    }
}

static void reuse_read(const msgpack_object *o, struct metrics_reuse *r)
{
    char name[32];

    r->references = answer_u64(o, "references");
    r->sampled = answer_u64(o, "sampled");
    for (uint32_t i = 0; i < answer_count(o, "curves"); i++) {
        const msgpack_object *curve = answer_at(o, "curves", i);
        unsigned t =
            find(answer_text(curve, "tiers", name, sizeof name), reuse_tiers_names, REUSE_TIERS);

        if (t == REUSE_TIERS)
            continue;
        r->bytes[t] = answer_u64(curve, "bytes");
        for (uint32_t k = 0; k < REUSE_POINTS; k++) {
            const msgpack_object *hit = answer_at(curve, "hit_permille", k);

            if (hit != NULL && hit->type == MSGPACK_OBJECT_POSITIVE_INTEGER)
                r->hit_permille[t][k] = (uint32_t)hit->via.u64;
        }
    }
}

void answer_exposition(const msgpack_object *stats, struct exposition *x)
{
    char text[32];

    memset(x, 0, sizeof *x);
    answer_text(stats, "version", x->version, sizeof x->version);
    answer_text(stats, "commit", x->commit, sizeof x->commit);
    answer_text(stats, "options", x->options, sizeof x->options);
    answer_text(stats, "policy", x->policy, sizeof x->policy);
    x->uptime_ms = answer_u64(stats, "uptime_ms");
    x->health = find(answer_text(stats, "health", text, sizeof text), health_names, HEALTH_STATES);
    fields_read(answer_get(stats, "metrics"), &metric_lists[METRIC_LIST_PLAIN], &x->metrics);
    histograms_read(stats, &x->metrics.histograms);
    reuse_read(answer_get(stats, "reuse"), &x->reuse);
    list_read(stats, METRIC_LIST_TIERS, EXPOSITION_TIERS, x);
    list_read(stats, METRIC_LIST_ROOTS, UCM_MAX_ROOTS, x);
    list_read(stats, METRIC_LIST_DEVICES, EXPOSITION_DEVICES, x);
    list_read(stats, METRIC_LIST_NODES, EXPOSITION_NODES, x);
    list_read(stats, METRIC_LIST_TENANTS, EXPOSITION_TENANTS, x);
    for (uint32_t i = 0; i < x->n_roots; i++)
        x->root[i].state =
            find(answer_text(answer_at(stats, "shared_roots", i), "health", text, sizeof text),
                 root_state_names, ROOT_STATES);
}
