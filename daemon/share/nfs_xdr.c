#include "daemon/share/nfs_xdr.h"

#include <endian.h>
#include <stddef.h>
#include <string.h>

static const uint8_t *take(struct nfs_xdr *x, uint32_t n)
{
    const uint8_t *at = x->at;

    if (x->bad || (size_t)(x->end - at) < n) {
        x->bad = true;
        return NULL;
    }
    x->at += n;
    return at;
}

uint32_t nfs_xdr_u32(struct nfs_xdr *x)
{
    const uint8_t *at = take(x, 4);
    uint32_t value;

    if (!at)
        return 0;
    memcpy(&value, at, sizeof(value));
    return be32toh(value);
}

uint64_t nfs_xdr_u64(struct nfs_xdr *x)
{
    uint64_t high = nfs_xdr_u32(x);

    return high << 32 | nfs_xdr_u32(x);
}

bool nfs_xdr_bool(struct nfs_xdr *x)
{
    uint32_t value = nfs_xdr_u32(x);

    if (value > 1)
        x->bad = true;
    return value == 1;
}

void nfs_xdr_skip(struct nfs_xdr *x, uint32_t n)
{
    (void)take(x, n);
}

const uint8_t *nfs_xdr_bytes(struct nfs_xdr *x, uint32_t n)
{
    const uint8_t *at = take(x, n);

    nfs_xdr_skip(x, nfs_xdr_padding(n));
    return x->bad ? NULL : at;
}

const uint8_t *nfs_xdr_opaque(struct nfs_xdr *x, uint32_t max, uint32_t *n)
{
    uint32_t length = nfs_xdr_u32(x);
    const uint8_t *at;

    if (length > max)
        x->bad = true;
    at = nfs_xdr_bytes(x, length);
    *n = at ? length : 0;
    return at;
}

static uint8_t *give(struct nfs_xdr_out *o, uint32_t n)
{
    uint8_t *at = o->at;

    if (o->bad || (size_t)(o->end - at) < n) {
        o->bad = true;
        return NULL;
    }
    o->at += n;
    return at;
}

void nfs_xdr_put_u32(struct nfs_xdr_out *o, uint32_t value)
{
    uint8_t *at = give(o, 4);

    value = htobe32(value);
    if (at)
        memcpy(at, &value, sizeof(value));
}

void nfs_xdr_put_u64(struct nfs_xdr_out *o, uint64_t value)
{
    nfs_xdr_put_u32(o, (uint32_t)(value >> 32));
    nfs_xdr_put_u32(o, (uint32_t)value);
}

void nfs_xdr_put_bytes(struct nfs_xdr_out *o, const void *bytes, uint32_t n)
{
    uint8_t *at = give(o, n), *padding = give(o, nfs_xdr_padding(n));

    if (!padding)
        return;
    memcpy(at, bytes, n);
    memset(padding, 0, nfs_xdr_padding(n));
}

void nfs_xdr_put_opaque(struct nfs_xdr_out *o, const void *bytes, uint32_t n)
{
    nfs_xdr_put_u32(o, n);
    nfs_xdr_put_bytes(o, bytes, n);
}

void nfs_xdr_put_string(struct nfs_xdr_out *o, const char *text)
{
    nfs_xdr_put_opaque(o, text, (uint32_t)strlen(text));
}
