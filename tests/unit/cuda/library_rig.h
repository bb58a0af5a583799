/* libucmclient_cuda over the fake driver, which runs none of its kernels: a GPU, a stream, and refusals with their sentence. */
#ifndef UCM_TESTS_UNIT_CUDA_LIBRARY_RIG_H
#define UCM_TESTS_UNIT_CUDA_LIBRARY_RIG_H

#include "client/include/ucmclient_cuda.h"
#include "tests/unit/cuda/fake_cuda.h"

#include <criterion/criterion.h>
#include <string.h>

static uint8_t uuid[16]; /* of the GPU */
static CUstream stream;

static inline void rig_open(void)
{
    fake_cuda_uuid(0, uuid);
    cr_assert_eq(cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0), CUDA_SUCCESS);
}

static inline void rig_close(void)
{
    (void)cuStreamDestroy(stream);
    cr_expect_eq(fake_cuda_left(), 0, "all is freed");
    cr_expect_eq(fake_cuda.registered, 0);
}

static inline void refused(int r, const char *part)
{
    cr_expect_eq(r, -UCM_EINVALID, "%d", r);
    cr_expect_not_null(strstr(ucm_cuda_errmsg(), part), "'%s' has no '%s'", ucm_cuda_errmsg(),
                       part);
}

/* The call is refused while one field of its argument has another value. */
#define REFUSED_WITH(good, field, value, call, part)                                               \
    do {                                                                                           \
        __typeof__(good) was = good;                                                               \
                                                                                                   \
        good.field = value;                                                                        \
        refused(call, part);                                                                       \
        good = was;                                                                                \
    } while (0)

#endif
