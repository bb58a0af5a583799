/* What the fake driver's files share. */
#ifndef UCM_TESTS_FAKE_CUDA_INSIDE_H
#define UCM_TESTS_FAKE_CUDA_INSIDE_H

#include "kernels/encoding/encoding.h"
#include "kernels/rope/rope.h"

#include <cuda.h>

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FAKE_HANDLE_MEMORY 0x6d656d6fu
#define FAKE_HANDLE_EVENT 0x65766e74u

struct rows {
    uint64_t to, from, to_pitch, from_pitch, width, height;
};

struct op {
    struct op *next;
    CUevent event; /* done is set to `value`, and nothing else */
    bool waits;    /* or is waited for until it is */
    uint64_t value;
    const _Atomic uint32_t *word; /* or is waited for until it reaches `value` */
    uint64_t planes, items;       /* a kernel, when n_items is not 0 */
    uint32_t n_planes, n_items, direction, slow_us;
    bool copy_agent; /* a kernel of the copy agent's */
    bool encoded;    /* it encodes or decodes */
    struct ucm_encoding_spec spec;
    bool shifted, in_place; /* it re-rotates K */
    struct ucm_rope_spec rope;
    uint64_t at, tables; /* of uint32_t, of struct ucm_rope_angle */
    size_t n;            /* or copies */
    struct rows rows[];
};

/* With room for so many copies. */
struct op *fake_op_new(size_t n);
/* After what the stream has to do; it then owns it. */
CUresult fake_op_send(CUstream s, struct op *o);
/* Does what a kernel or copies do. */
void fake_op_run(const struct op *o);

extern atomic_uint fake_cuda_objects; /* streams and events that are there */
CUresult fake_cuda_daemon_query(CUevent e);
CUresult fake_cuda_daemon_launch(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                 unsigned by, unsigned bz, unsigned shared, CUstream s,
                                 void **arguments, void **extra);
CUfunction fake_cuda_coder(const char *name); /* a kernel of kernels/encoding */
CUfunction fake_cuda_rerotator(void);         /* of kernels/rope */
CUfunction fake_cuda_idle(const char *name);  /* a kernel that does nothing */
CUresult fake_cuda_daemon_record(CUevent e, CUstream s);
void fake_cuda_handle_fill(uint8_t handle[64], uint32_t kind, void *what);
/* NULL: it is none of that kind. */
void *fake_cuda_handle_of(const void *handle, uint32_t kind);

#endif
