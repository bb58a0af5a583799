#include "daemon/index/internal.h"

#include <stdlib.h>

/* ---- one allocation a namespace: itself, its table, the numbers, the salt and the strings ---- */

struct ns_memory {
    struct ns ns;
    struct ns_table table;
    uint32_t shards[];
};

static const char *copy_text(uint8_t **at, const char *text)
{
    size_t n = strlen(text) + 1;
    char *copy = memcpy(*at, text, n);

    *at += n;
    return copy;
}

struct ns *ns_new(const struct ns_identity *from, uint32_t id, const uint8_t *fingerprint,
                  uint64_t *size_bytes)
{
    size_t text = strlen(from->tenant) + strlen(from->model) + strlen(from->revision) +
                  strlen(from->dtype) + strlen(from->layout) + 5;
    size_t n = sizeof(struct ns_memory) + from->parts * sizeof(uint32_t) + from->salt_bytes + text;
    struct ns_memory *m = calloc(1, n);
    struct ns_identity *to;
    uint8_t *at;

    if (!m)
        return NULL;
    m->table.key_bytes = from->key_bytes;
    m->ns.id = id;
    m->ns.table = &m->table;
    memcpy(m->ns.fingerprint, fingerprint, sizeof(m->ns.fingerprint));
    to = &m->ns.identity;
    *to = *from;
    memcpy(m->shards, from->shards, from->parts * sizeof(uint32_t));
    to->shards = m->shards;
    at = (uint8_t *)(m->shards + from->parts);
    to->salt = at;
    if (from->salt_bytes > 0)
        memcpy(at, from->salt, from->salt_bytes);
    at += from->salt_bytes;
    to->tenant = copy_text(&at, from->tenant);
    to->model = copy_text(&at, from->model);
    to->revision = copy_text(&at, from->revision);
    to->dtype = copy_text(&at, from->dtype);
    to->layout = copy_text(&at, from->layout);
    *size_bytes = n;
    return &m->ns;
}

void ns_free(struct ns *ns)
{
    ns_table_close(ns->table);
    free(ns); /* the first member of its struct ns_memory */
}
