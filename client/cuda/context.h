/* The GPU and its context, for every file that works with them. Threads: any. */
#ifndef UCM_CUDA_CONTEXT_H
#define UCM_CUDA_CONTEXT_H

#include "proto/limits.h"

#include <cuda.h>
#include <stddef.h>
#include <stdint.h>

/* The GPU with that UUID; initialises CUDA. NO_DEVICE if there is none. */
CUresult ucm_device_find(const uint8_t uuid[UCM_UUID_BYTES], CUdevice *out);

/* Makes the worker's context current for the length of a call, whatever context the thread has. While
 * any thread of the process captures a graph, allocations and the like fail and spoil the capture
 * unless their thread is in relaxed mode: it is, until leave. Does not nest. On a CUDA error don't
 * leave. */
CUresult ucm_context_enter(CUcontext context);
void ucm_context_leave(void);
/* The same, with the sentence of an error: 0, or as cuda_fail_driver. `r` is what was done in between. */
int cuda_enter(CUcontext context);
int cuda_leave(CUresult r, const char *what);

/* Copies to new memory of the GPU; it is there on return, for kernels of all streams. After an error *out may be
 * memory, too. */
CUresult ucm_upload(const void *from, size_t bytes, CUstream stream, CUdeviceptr *out);

#endif
