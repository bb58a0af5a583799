/* The worker's CUDA context, for the length of a call. Threads: any; enter and leave on one. */
#ifndef UCM_CUDA_CONTEXT_H
#define UCM_CUDA_CONTEXT_H

#include <cuda.h>

/* The caller's thread may have another context, or none. And while any thread of the process
 * captures a graph, allocations and the like fail and spoil it, unless their thread is relaxed
 * about it: it is, until leave. Not to be entered twice. A CUDA error: nothing is to be left. */
CUresult ucm_context_enter(CUcontext context);
void ucm_context_leave(void);

#endif
