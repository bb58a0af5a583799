/* A CUDA driver of two GPUs whose memory is the host's. It has only what the device module and the
 * copy agent need. The two link into one program, each in the role of its process.
 *
 * Promises: each stream runs its work in order, on a thread of its own, after the delay of
 * fake_cuda_delay. Kernels read their items and planes only then, so a descriptor that is
 * overwritten too early shows. Only the copy kernel and those of kernels/encoding and kernels/rope
 * do anything. fake_cuda_launched tells that the others were launched. Freed memory that is open
 * stays until it is closed. Threads: any; install and fake_cuda_delay come first. */
#ifndef UCM_TESTS_FAKE_CUDA_H
#define UCM_TESTS_FAKE_CUDA_H

#include <cuda.h>

#include <stdbool.h>
#include <stdint.h>

#define FAKE_GPUS 2
/* PCI address of the first; the others are on the next buses. */
#define FAKE_DOMAIN 0x10000
#define FAKE_BUS 0x3b

/* Makes it the driver of daemon/cuda/api.h. */
void fake_cuda_install(void);
/* Everything on a stream takes a random time up to this. */
void fake_cuda_delay(unsigned max_us);
/* Every query of an event by the daemon returns this error from now on. */
void fake_cuda_lose(CUresult r);
/* The copy agent's kernels take so long. */
void fake_cuda_slow(unsigned us);
/* The copy agent's kernels don't begin before this is called with false. */
void fake_cuda_hold(bool hold);
bool fake_cuda_holds(void); /* at least one of them waits for that */
/* The clock by which the daemon's device module counts its timeouts (job_clock_ms). It stands still
 * from the first call on and moves by fake_clock_pass only, so that no timeout depends on how busy
 * the host is. */
void fake_clock_stop(void);
void fake_clock_pass(unsigned ms);
uint64_t fake_clock_ms(void);
/* The copy agent's next n events can't be recorded. */
void fake_cuda_fail_records(unsigned n);
/* The most events that waited at once on one of the daemon's streams since the last call. */
unsigned fake_cuda_most_events(void);
/* No stream can wait for a word; every stream is being captured. */
void fake_cuda_refuse_waits(bool refuse);
void fake_cuda_capture(bool begin);
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
unsigned fake_cuda_registered(void); /* ranges of host memory */
void fake_cuda_refuse_registrations(bool refuse);
/* Each registration waits up to 0.2 s for another one. The second function says whether two threads
 * were in one at once. */
void fake_cuda_register_together(void);
bool fake_cuda_registered_together(void);
/* A registration does not end before this is called with false. The second function says how many
 * have begun. */
void fake_cuda_hold_registrations(bool hold);
unsigned fake_cuda_registrations(void);
/* Where the memory of a handle begins; NULL: it is none, or is freed. */
uint8_t *fake_cuda_memory_of(const uint8_t handle[64]);
/* Handles don't say how large their memory is, like those of an unknown driver. */
void fake_cuda_handles_unlike(bool unlike);
/* GPUs then have compute capability 9.0 and so many clusters at once; 0, at first: none. */
void fake_cuda_clusters(int at_once);

#endif
