/* What programs share that compare kernels on a GPU with C: one GPU, one stream, counted checks and
 * memory. Random numbers are the same in each run. */
#ifndef UCM_TESTS_GPU_COMPARE_H
#define UCM_TESTS_GPU_COMPARE_H

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Opens the first GPU; ends the program if there is none. An argument --few sets `few`. end prints
 * the counts and returns main's status. */
void gpu_begin(int argc, char **argv);
int gpu_end(void);

extern uint8_t gpu_uuid[16];
extern CUstream gpu_stream;
extern bool few; /* some cases of each kind only, for slow checkers */

/* Prints a line when it fails, and counts. Returns condition. */
bool check(bool condition, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Ends the program if a call of the driver failed. */
void must(CUresult r, const char *what);

/* Memory of the GPU. put copies n bytes to at, or if that is 0 to new memory, which it returns. A
 * case ends with memory_end, which frees all of it, and that of fresh. */
void memory_end(void);
CUdeviceptr gpu_new(size_t n);
CUdeviceptr gpu_put(CUdeviceptr at, const void *from, size_t n);
void gpu_get(void *to, CUdeviceptr at, size_t n);
void gpu_sync(void);

/* Kernels of the module that was loaded last. `shared`: bytes of dynamic shared memory. */
void gpu_load(const void *image);
CUfunction gpu_kernel(const char *name);
void gpu_launch(const char *kernel, uint32_t blocks, uint32_t threads, uint32_t shared,
                void **arguments);

uint32_t rnd(void);
uint32_t rnd_below(uint32_t n);
float rnd_normal(void);
/* A random element of bf16 or float16, and what it is. */
float rnd_element(bool bf16, float size, uint16_t *bits);
/* Zeroed, at a multiple of 64; ends the program if there is none. */
void *fresh(size_t n);

#endif
