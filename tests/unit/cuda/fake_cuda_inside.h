/* What the fake driver's two files share. */
#ifndef UCM_TESTS_FAKE_CUDA_INSIDE_H
#define UCM_TESTS_FAKE_CUDA_INSIDE_H

#include <cuda.h>

#include <stdint.h>

#define FAKE_HANDLE_MEMORY 0x6d656d6fu
#define FAKE_HANDLE_EVENT 0x65766e74u

unsigned fake_cuda_objects(void); /* streams and events that are there */
CUresult fake_cuda_daemon_query(CUevent e);
CUresult fake_cuda_daemon_launch(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                 unsigned by, unsigned bz, unsigned shared, CUstream s,
                                 void **arguments, void **extra);
CUfunction fake_cuda_coder(const char *name); /* a kernel of kernels/encoding */
CUresult fake_cuda_daemon_record(CUevent e, CUstream s);
void fake_cuda_handle_fill(uint8_t handle[64], uint32_t kind, void *what);
/* NULL: it is none of that kind. */
void *fake_cuda_handle_of(const void *handle, uint32_t kind);

#endif
