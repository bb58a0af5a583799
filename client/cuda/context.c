#include "client/cuda/context.h"

/* The mode to return to, of a thread between enter and leave. */
static _Thread_local CUstreamCaptureMode capture_mode;

CUresult ucm_context_enter(CUcontext context)
{
    CUresult r = cuCtxPushCurrent(context);

    if (r != CUDA_SUCCESS)
        return r;
    capture_mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    (void)cuThreadExchangeStreamCaptureMode(&capture_mode);
    return r;
}

void ucm_context_leave(void)
{
    CUcontext old;

    (void)cuThreadExchangeStreamCaptureMode(&capture_mode);
    (void)cuCtxPopCurrent(&old);
}
