/* test_sparse: summaries and selections on a GPU, compared bit for bit with the C of kernels/sparse. */
#ifndef UCM_TESTS_GPU_SPARSE_H
#define UCM_TESTS_GPU_SPARSE_H

#include "client/include/ucmclient_cuda_sparse.h"
#include "kernels/sparse/select.h"
#include "tests/gpu/compare.h"

#define TOKENS_REST (UCM_SPARSE_TOKENS + 1) /* in place of a method: tokens with rest */

/* Summaries of `method` over heads of d channels, with parameters that fit; 0: a shape that has none. */
bool summary_of(struct ucm_sparse_summary *out, uint32_t method, uint32_t dtype, uint32_t tokens,
                uint32_t kv_heads, uint32_t d, uint32_t rope_dim);
struct ucm_summary_plan *plan_of(const struct ucm_sparse_summary *summary);
const char *method_name(uint32_t method);

void test_summaries(void);
void test_selections(void);
void test_graphs(void);

#endif
