/* XDR (RFC 4506): numbers in network order, bytes padded to four. Both cursors are bounded: reading
 * or writing beyond the end sets `bad`; from then on calls do nothing and return zeroes, so a decoder
 * checks `bad` once, at its end. Pure functions, any thread. */
#ifndef UCMD_SHARE_NFS_XDR_H
#define UCMD_SHARE_NFS_XDR_H

#include <stdbool.h>
#include <stdint.h>

struct nfs_xdr {
    const uint8_t *at, *end;
    bool bad;
};

uint32_t nfs_xdr_u32(struct nfs_xdr *x);
uint64_t nfs_xdr_u64(struct nfs_xdr *x);
bool nfs_xdr_bool(struct nfs_xdr *x); /* bad unless it is 0 or 1 */
void nfs_xdr_skip(struct nfs_xdr *x, uint32_t n);
/* Skips n bytes and their padding; returns where they are, NULL when bad. */
const uint8_t *nfs_xdr_bytes(struct nfs_xdr *x, uint32_t n);
/* The same for bytes with their length before them; bad above max. */
const uint8_t *nfs_xdr_opaque(struct nfs_xdr *x, uint32_t max, uint32_t *n);

struct nfs_xdr_out {
    uint8_t *at, *end;
    bool bad;
};

void nfs_xdr_put_u32(struct nfs_xdr_out *o, uint32_t value);
void nfs_xdr_put_u64(struct nfs_xdr_out *o, uint64_t value);
void nfs_xdr_put_bytes(struct nfs_xdr_out *o, const void *bytes, uint32_t n);
void nfs_xdr_put_opaque(struct nfs_xdr_out *o, const void *bytes, uint32_t n);
void nfs_xdr_put_string(struct nfs_xdr_out *o, const char *text);

static inline uint32_t nfs_xdr_padding(uint32_t n)
{
    return (4 - n % 4) % 4;
}

#endif
