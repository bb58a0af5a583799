/* Bytes in one slot of the arena: some layers of one part. Only daemon/cache/ref.c makes spans,
 * and checks each; callers that copy, read, write or build get one, and may read its fields and
 * copy it whole.
 *
 * A span proves form and bounds. That the slot stays is proved by its maker's reference to the
 * part, or claim. */
#ifndef UCMD_BASE_SPAN_H
#define UCMD_BASE_SPAN_H

#include "daemon/base/form.h"

struct span {
    const struct form *form; /* of the part; lives with the namespace that holds it */
    uint32_t slot;
    uint32_t first, n; /* layers */
    uint8_t *origin;   /* where layer `first` begins */
    uint64_t len;      /* n * form->layer_bytes */
    bool pending;      /* its bytes are still to be written; else nobody writes them */
};

#endif
