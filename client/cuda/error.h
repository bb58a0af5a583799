/* What the calling thread's last failed call was about: ucm_cuda_errmsg. */
#ifndef UCM_CUDA_ERROR_H
#define UCM_CUDA_ERROR_H

#include <cuda.h>

/* Sets the sentence; returns -status, of enum ucm_status. */
int cuda_fail(int status, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The same for what the driver returned for `what`. */
int cuda_fail_driver(CUresult r, const char *what);
/* The sentence is the client library's; returns r. */
int cuda_pass(int r);

#endif
