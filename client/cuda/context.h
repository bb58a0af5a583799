/* The worker's CUDA context, for the length of a call. Threads: any; enter and leave on one. */
#ifndef UCM_CUDA_CONTEXT_H
#define UCM_CUDA_CONTEXT_H

#include <cuda.h>

/* Makes the context current, whatever context the thread has. While any thread of the process
 * captures a graph, allocations and the like fail and spoil the capture unless their thread is in
 * relaxed mode: it is, until leave. Does not nest. On a CUDA error don't leave. */
CUresult ucm_context_enter(CUcontext context);
void ucm_context_leave(void);

#endif
