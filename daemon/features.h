/* The one list of the daemon's features, and of the methods of the wire. */
#ifndef UCMD_FEATURES_H
#define UCMD_FEATURES_H

#include "daemon/request/feature.h"

extern const struct feature *const daemon_features[FEATURES];
extern const method_fn daemon_methods[];

#endif
