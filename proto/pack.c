#include "proto/tables.h"

#include <string.h>

void proto_pack_raw(msgpack_packer *pk, const void *packed, size_t n)
{
    pk->callback(pk->data, packed, n);
}

void proto_pack_strn(msgpack_packer *pk, const char *s, size_t n)
{
    msgpack_pack_str(pk, n);
    proto_pack_raw(pk, s, n);
}

void proto_pack_str(msgpack_packer *pk, const char *s)
{
    proto_pack_strn(pk, s, strlen(s));
}

void proto_pack_u64(msgpack_packer *pk, const char *key, uint64_t v)
{
    proto_pack_str(pk, key);
    msgpack_pack_uint64(pk, v);
}

void proto_pack_text(msgpack_packer *pk, const char *key, const char *text)
{
    proto_pack_str(pk, key);
    proto_pack_str(pk, text);
}

void proto_pack_bin(msgpack_packer *pk, const char *key, const uint8_t *p, size_t n)
{
    proto_pack_str(pk, key);
    msgpack_pack_bin(pk, n);
    proto_pack_raw(pk, p, n);
}

void proto_pack_flag(msgpack_packer *pk, const char *key, bool on)
{
    proto_pack_str(pk, key);
    if (on)
        msgpack_pack_true(pk);
    else
        msgpack_pack_false(pk);
}
