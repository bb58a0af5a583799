#include "proto/tables.h"

#include <assert.h>
#include <string.h>

#define NEED_REQ true
#define NEED_OPT false
#define FIELD(kind, name, need, min, max)                                                          \
    {#name, min, max, offsetof(self, name), sizeof(#name) - 1, PROTO_KIND_##kind, NEED_##need},
#define COUNT(kind, name, need, min, max) +1

/* Each table is kept by a function: in a block scope FIELD can call any message's struct self. */
#define MESSAGE(suffix, list)                                                                      \
    static_assert((0 list(COUNT)) <= PROTO_MAX_FIELDS, #suffix " has too many fields");            \
    static const struct proto_field *fields_##suffix(void)                                         \
    {                                                                                              \
        typedef struct msg_##suffix self;                                                          \
        static const struct proto_field fields[] = {list(FIELD)};                                  \
        return fields;                                                                             \
    }                                                                                              \
    const struct proto_message proto_##suffix = {                                                  \
        .name = #suffix,                                                                           \
        .fields = fields_##suffix,                                                                 \
        .n_fields = 0 list(COUNT),                                                                 \
        .bytes = sizeof(struct msg_##suffix),                                                      \
    };

MESSAGE(handle, UCM_MSG_HANDLE)
MESSAGE(plane, UCM_MSG_PLANE)
UCM_MESSAGES(MESSAGE)

static const struct proto_field *fields_none(void)
{
    return NULL;
}

const struct proto_message proto_none = {.name = "none", .fields = fields_none};
const struct proto_message proto_free_map = {
    .name = "free_map", .fields = fields_none, .free = true};

struct method_entry {
    const char *name;
    uint32_t name_bytes;
    const struct proto_message *params, *result;
};

static const struct method_entry methods[] = {
#define M(NAME, name, text, params, result)                                                        \
    [UCM_METHOD_##NAME] = {text, sizeof(text) - 1, &proto_##params, &proto_##result},
    UCM_METHODS(M)
#undef M
};

int proto_method_find(struct proto_str method)
{
    for (int i = 0; i < UCM_METHOD_COUNT; i++)
        if (method.n == methods[i].name_bytes && memcmp(method.p, methods[i].name, method.n) == 0)
            return i;
    return -1;
}

const char *proto_method_name(enum ucm_method method)
{
    assert((unsigned)method < UCM_METHOD_COUNT);
    return methods[method].name;
}

const struct proto_message *proto_method_params(enum ucm_method method)
{
    assert((unsigned)method < UCM_METHOD_COUNT);
    return methods[method].params;
}

const struct proto_message *proto_method_result(enum ucm_method method)
{
    assert((unsigned)method < UCM_METHOD_COUNT);
    return methods[method].result;
}

const struct proto_message *proto_entry_message(enum proto_kind kind)
{
    assert(kind == PROTO_KIND_handles || kind == PROTO_KIND_planes);
    return kind == PROTO_KIND_handles ? &proto_handle : &proto_plane;
}
