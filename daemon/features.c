#include "daemon/features.h"

#include "daemon/request/internal.h"

const struct feature *const daemon_features[FEATURES] = {
    [FEATURE_RETRIEVAL] = &retrieval_feature,
    [FEATURE_MAPPINGS] = &mappings_feature,
    [FEATURE_LOOKUP_TABLES] = &lookup_tables_feature,
    [FEATURE_EVENTS] = &events_feature,
    [FEATURE_TRACE] = &trace_feature,
    [FEATURE_ENCODING] = &encoding_feature,
    [FEATURE_BLEND] = &blend_feature,
    [FEATURE_BLOCK_POOL] = &block_pool_feature,
    [FEATURE_ADMIN] = &admin_feature,
};

const method_fn daemon_methods[] = {
#define M(NAME, name, text, params, result) [UCM_METHOD_##NAME] = method_##name,
    UCM_METHODS(M)
#undef M
};
