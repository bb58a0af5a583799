/* The one list of the daemon's features, and of the methods of the wire. */
#ifndef UCMD_FEATURES_H
#define UCMD_FEATURES_H

#include "daemon/request/feature.h"

/* Shared mappings end before the sequences that they name. */
enum feature_id {
    FEATURE_RETRIEVAL,
    FEATURE_MAPPINGS,
    FEATURE_LOOKUP_TABLES,
    FEATURE_EVENTS,
    FEATURE_TRACE,
    FEATURE_ENCODING,
    FEATURE_BLEND,
    FEATURE_BLOCK_POOL,
    FEATURE_ADMIN, /* closes first: no other close_cb calls audit_blocks or requests_observe */
};
_Static_assert(FEATURE_ADMIN + 1 == FEATURES, "each feature has a number");

extern const struct feature retrieval_feature, mappings_feature, lookup_tables_feature,
    events_feature, trace_feature, encoding_feature, blend_feature, block_pool_feature,
    admin_feature;

extern const struct feature *const daemon_features[FEATURES];
extern const method_fn daemon_methods[];

#endif
