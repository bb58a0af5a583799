#include "client/cuda/error.h"

#include "client/include/ucmclient_cuda.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>

static _Thread_local char message[256];
static _Thread_local bool ours; /* false: the last message is the client library's */

const char *ucm_cuda_errmsg(void)
{
    return ours ? message : ucm_errmsg();
}

int cuda_fail(int status, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    ours = true;
    return -status;
}

int cuda_fail_driver(CUresult r, const char *what)
{
    const char *name = "?", *sentence = "?";

    (void)cuGetErrorName(r, &name);
    (void)cuGetErrorString(r, &sentence);
    return cuda_fail(r == CUDA_ERROR_OUT_OF_MEMORY ? UCM_ENOMEMORY : UCM_EDEVICE, "%s: %s (%s)",
                     what, name, sentence);
}

int cuda_pass(int r)
{
    ours = false;
    return r;
}
