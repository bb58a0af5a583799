/* How a namespace's blocks are encoded, which its identity says: docs/protocol.md, "Encoded
 * namespaces". Thread: any; neither changes. */
#ifndef UCMD_INDEX_NS_FORM_H
#define UCMD_INDEX_NS_FORM_H

#include "daemon/index/index.h"

/* How all of them are encoded; NULL: they are not. */
static inline const struct codec *ns_codec(const struct ns *ns)
{
    return ns->part_forms[0].codec;
}

/* The identity of an encoded namespace is a function of its base's and of the spec. *out points
 * into *m, and to what base's does. */
#define NS_ENCODED_SALT_BYTES (UCM_FINGERPRINT_BYTES + 8 + UCM_ENCODING_IDENTITY_BYTES)
struct ns_encoded_memory {
    char layout[UCM_MAX_NAME_BYTES + 1];
    uint8_t salt[NS_ENCODED_SALT_BYTES];
};
void ns_encoded_identity(const struct ns *base, const struct ucm_encoding_spec *spec,
                         struct ns_encoded_memory *m, struct ns_identity *out);
/* What it says. A client may have made it up: that it has this form proves nothing. */
struct ns_encoded {
    const char *encoding; /* name */
    uint32_t version;
    const uint8_t *base; /* fingerprint */
    uint64_t raw_layer_bytes;
};
/* False: it is none. */
bool ns_encoded(const struct ns_identity *identity, struct ns_encoded *out);

#endif
