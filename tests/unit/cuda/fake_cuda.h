/* A CUDA driver of two GPUs whose memory is the host's. It has only what the device module and the
 * copy agent need. The two link into one program, each in the role of its process.
 *
 * Promises: each stream runs its work in order, on a thread of its own, after the delay of
 * fake_cuda.delay_us. Kernels read their items and planes only then, so a descriptor that is
 * overwritten too early shows. Only the copy kernel and those of kernels/encoding and kernels/rope
 * do anything. fake_cuda_launched tells that the others were launched. Freed memory that is open
 * stays until it is closed. Threads: any; install comes first. */
#ifndef UCM_TESTS_FAKE_CUDA_H
#define UCM_TESTS_FAKE_CUDA_H

#include <cuda.h>

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define FAKE_GPUS 2
/* PCI address of the first; the others are on the next buses. */
#define FAKE_DOMAIN 0x10000
#define FAKE_BUS 0x3b

/* What a test sets and reads. */
struct fake_cuda {
    atomic_uint delay_us; /* everything on a stream takes a random time up to this */
    atomic_uint slow_us;  /* the copy agent's kernels take so long */
    atomic_bool hold;     /* the copy agent's kernels don't begin while this is set */
    atomic_bool holds;    /* at least one of them waits for that */
    atomic_uint lost;     /* not 0: every query of an event by the daemon returns this CUresult */
    atomic_uint bad_records;  /* so many of the copy agent's next events can't be recorded */
    atomic_bool refuse_waits; /* no stream can wait for a word */
    atomic_bool capturing;    /* every stream is being captured */
    atomic_uint registered;   /* ranges of host memory */
    atomic_bool refuse_registrations;
    atomic_bool hold_registrations;  /* a registration does not end while this is set */
    atomic_uint registrations;       /* how many have begun */
    atomic_bool register_together;   /* each one waits up to 0.2 s for another one, */
    atomic_bool registered_together; /* and two threads were in one at once */
    atomic_bool handles_unlike; /* handles don't tell their memory's size: an unknown driver's */
    atomic_int clusters;        /* GPUs have compute capability 9.0 and so many at once; 0: none */
};
extern struct fake_cuda fake_cuda;

/* Makes it the driver of daemon/cuda/api.h. */
void fake_cuda_install(void);
/* The clock by which the daemon's device module counts its timeouts (job_clock_ms). It stands still
 * from the first call on and moves by fake_clock_pass only, so that no timeout depends on how busy
 * the host is. */
void fake_clock_stop(void);
void fake_clock_pass(unsigned ms);
uint64_t fake_clock_ms(void);
/* The most events that waited at once on one of the daemon's streams since the last call. */
unsigned fake_cuda_most_events(void);
/* The handle of an event; the daemon may open it. */
void fake_cuda_event_handle(CUevent event, uint8_t handle[64]);
void fake_cuda_event_signal(CUevent event, bool signalled);
/* cuMemAlloc on that GPU. */
CUdeviceptr fake_cuda_alloc(int ordinal, size_t bytes);
void fake_cuda_uuid(int ordinal, uint8_t uuid[16]);
/* Orders all earlier work on streams before this call, and all later work after it. Daemon and copy
 * agent order themselves by shared words. Each maps them for itself, so ThreadSanitizer takes them
 * for different words. */
void fake_cuda_fence(void);
/* Whether a kernel of the copy agent's with that name was launched since the last call. */
bool fake_cuda_launched(const char *name);
/* Counts memory, streams and events that exist: 0 at the end of a test. */
unsigned fake_cuda_left(void);
/* Where the memory of a handle begins; NULL: it is none, or is freed. */
uint8_t *fake_cuda_memory_of(const uint8_t handle[64]);

#endif
