/* Between the structs of ucmclient_sparse.h and those of kernels/sparse. */
#ifndef UCM_CLIENT_SPARSE_LOCAL_H
#define UCM_CLIENT_SPARSE_LOCAL_H

#include "client/include/ucmclient_sparse.h"
#include "kernels/sparse/select.h"

/* 0, or -UCM_EINVALID with the sentence; then *out is checked. */
int client_summary_spec(const struct ucm_sparse_summary *summary, struct ucm_summary_spec *out);
int client_choose_spec(const struct ucm_sparse_choose *choose,
                       const struct ucm_summary_spec *summary, struct ucm_choose_spec *out);
uint32_t client_score_lists(const struct ucm_sparse_summary *summary,
                            const struct ucm_sparse_score *score);
/* Bytes of an element of q; 0: q_dtype is none of F32, F16 and BF16. */
uint32_t client_q_element(uint32_t q_dtype);

#endif
