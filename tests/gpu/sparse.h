/* test_sparse: digests and selections on a GPU, compared bit for bit with the C of kernels/sparse. */
#ifndef UCM_TESTS_GPU_SPARSE_H
#define UCM_TESTS_GPU_SPARSE_H

#include "client/include/ucmclient_cuda_sparse.h"
#include "kernels/sparse/select.h"

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

extern uint8_t gpu_uuid[16];
extern CUstream gpu_stream;
extern bool few; /* some cases of each kind only, for slow checkers */

/* Prints a line when it fails, and counts. Returns condition. */
bool check(bool condition, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Ends the program if a call of the driver failed. */
void must(CUresult r, const char *what);

/* Memory of the GPU. put copies n bytes to at, or if that is 0 to new memory, which it returns. */
CUdeviceptr gpu_new(size_t n);
CUdeviceptr gpu_put(CUdeviceptr at, const void *from, size_t n);
void gpu_get(void *to, CUdeviceptr at, size_t n);
void gpu_free(CUdeviceptr at);
void gpu_sync(void);

uint32_t rnd(void);
uint32_t rnd_below(uint32_t n);
float rnd_normal(void);
void *fresh(size_t n); /* zeroed; ends the program if there is none */

#define TOKENS_REST (UCM_SPARSE_TOKENS + 1) /* in place of a method: tokens with rest */

/* Digests of `method` over heads of d channels, with parameters that fit; 0: a shape that has none. */
bool digest_of(struct ucm_sparse_digest *out, uint32_t method, uint32_t dtype, uint32_t tokens,
               uint32_t kv_heads, uint32_t d, uint32_t rope_dim);
struct ucm_digest_plan *plan_of(const struct ucm_sparse_digest *digest);
const char *method_name(uint32_t method);

void test_digests(void);
void test_selections(void);
void test_graphs(void);
void measure(void);

#endif
