#include "client/cuda/context.h"

#include "client/cuda/error.h"

#include <string.h>

CUresult ucm_device_find(const uint8_t uuid[UCM_UUID_BYTES], CUdevice *out)
{
    int n = 0;
    CUresult r = cuInit(0);

    if (r == CUDA_SUCCESS)
        r = cuDeviceGetCount(&n);
    for (int i = 0; r == CUDA_SUCCESS && i < n; i++) {
        CUuuid found;

        r = cuDeviceGet(out, i);
        if (r == CUDA_SUCCESS)
            r = cuDeviceGetUuid(&found, *out);
        if (r == CUDA_SUCCESS && memcmp(found.bytes, uuid, UCM_UUID_BYTES) == 0)
            return r;
    }
    return r == CUDA_SUCCESS ? CUDA_ERROR_NO_DEVICE : r;
}

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

int cuda_enter(CUcontext context)
{
    CUresult r = ucm_context_enter(context);

    return r == CUDA_SUCCESS ? 0 : cuda_fail_driver(r, "the GPU's context can't be entered");
}

int cuda_leave(CUresult r, const char *what)
{
    ucm_context_leave();
    return r == CUDA_SUCCESS ? 0 : cuda_fail_driver(r, what);
}

CUresult ucm_upload(const void *from, size_t bytes, CUstream stream, CUdeviceptr *out)
{
    CUresult r = cuMemAlloc(out, bytes);

    if (r == CUDA_SUCCESS)
        r = cuMemcpyHtoDAsync(*out, from, bytes, stream);
    return r == CUDA_SUCCESS ? cuStreamSynchronize(stream) : r;
}
