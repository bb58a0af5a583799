/* Policies: their keys and presets as tables (policy_table.c), their text (policy.c), and what
 * follows from them (policy_apply.c). */
#ifndef UCM_CLIENT_POLICY_H
#define UCM_CLIENT_POLICY_H

#include "client/include/ucmclient_sparse.h"
#include "client/lib/sparse/internal.h"

enum policy_type {
    POLICY_COUNT, /* uint32_t */
    POLICY_SEED,  /* uint64_t */
    POLICY_REAL,  /* double with at most 6 decimals */
    POLICY_NAME,  /* uint32_t: its place in names */
};

/* A field of struct ucm_policy. */
struct policy_key {
    const char *name, *value; /* value: its default */
    const char *about;
    enum policy_type type;
    size_t at;
    double least, most;
    const char *const *names;    /* up to NULL; "" is no value */
    uint32_t summaries, choices; /* bit i: it has an effect with number i; 0: with all */
};

struct policy_preset {
    const char *name, *about;
    const char *keys; /* that differ from their defaults */
};

extern const struct policy_key policy_keys[];
extern const struct policy_preset policy_presets[];
extern const uint32_t policy_n_keys, policy_n_presets;

/* Whether the summary has metric rounded. */
bool policy_rounds(const struct ucm_policy *p);
/* Sets the summary's parameters to what is usual for its method. */
void policy_summary_defaults(struct ucm_policy *p);

#endif
