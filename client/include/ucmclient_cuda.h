/* libucmclient_cuda: lets a worker's own process move small chunks for ucmd, and its streams wait
 * for what is loaded. Optional: everything works without it, and the daemon uses it only where it
 * pays, which is for chunks below 512 KiB.
 *
 * The companion keeps a ring of slices in the worker's GPU memory (64 MiB unless asked otherwise).
 * The daemon's copy engines move whole slices over the bus, and a kernel of the companion, on a
 * stream of high priority of its own, scatters them to the worker's pages or gathers them. So small
 * chunks reach the bus's speed, and the worker's kernels don't have to take turns with another
 * process's.
 *
 * What ucm_load and ucm_dump promise stays: a load is done only when its bytes are visible to any
 * kernel launched after; a dump reads only after its event. A companion that gets no processor for
 * 20 ms is passed by; one whose daemon is gone moves nothing any more. Its kernels run beside the
 * worker's, but CUDA holds up every launch in a process while it loads another kernel lazily behind
 * one that runs: a worker with kernels that run for seconds sets CUDA_MODULE_LOADING=EAGER.
 *
 * Threads: every function may be called from any thread, but none of a handle during or after its
 * ucm_cuda_close. The library has two threads of its own a handle: one launches kernels (it sleeps
 * while there is nothing to move), one sees to it that a new connection gets a new ring. The first
 * ucm_cuda_stream_wait that has to wait begins a third. It uses the GPU's primary context, which is
 * the CUDA runtime's, and leaves each caller's current one alone. Fork: as ucmclient.h says; close
 * nothing in the child.
 *
 * Errors: 0 or a negative enum ucm_status; ucm_cuda_errmsg has the sentence. Outputs are untouched
 * on failure. Timeouts as in ucmclient.h. */
#ifndef UCMCLIENT_CUDA_H
#define UCMCLIENT_CUDA_H

#include <ucmclient.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ucm_cuda;

struct ucm_cuda_options {
    uint64_t slice_bytes; /* 64 KiB to 64 MiB, a multiple of 4096; 0: 16 MiB */
    uint32_t slices;      /* 2 to 8; 0: 4 */
};

/* The sentence of the calling thread's last failed call into this library, "" when there was none.
 * Valid until the thread's next call into it. */
UCM_API const char *ucm_cuda_errmsg(void);

/* Makes the ring on the GPU with that UUID (16 bytes) and registers it; one a client and GPU.
 * options may be NULL. On success *out is the caller's, to close before the client. */
UCM_API int ucm_cuda_open(struct ucm_client *client, const uint8_t *gpu,
                          const struct ucm_cuda_options *options, int timeout_ms,
                          struct ucm_cuda **out);
/* Lets every stream go on that still waits by ucm_cuda_stream_wait, waits for what moves through
 * the ring, and frees it; its regions must have been unregistered. On an error the handle stays, as
 * the daemon may still use the ring: call again, or ucm_cuda_abandon, before ucm_close. Where a
 * stream ever waited, it waits for all work of the context, as cudaDeviceSynchronize would, however
 * long that takes. NULL is fine.
 */
UCM_API int ucm_cuda_close(struct ucm_cuda *cuda, int timeout_ms);
/* Closes without asking the daemon, for one that does not answer; regions need not be unregistered.
 * Waits for kernels under way. The client's ucm_close must come next, with which the daemon's
 * copies end (ucmclient.h says when); until then they may write to the regions' memory. NULL is
 * fine. */
UCM_API void ucm_cuda_abandon(struct ucm_cuda *cuda);

/* ucm_region_register for a region on that GPU whose copies may go through the ring. addresses[i]:
 * where spec->memory[i] begins (its offset counted in) in this process. At most 256 a ring. */
UCM_API int ucm_cuda_region_register(struct ucm_cuda *cuda, struct ucm_namespace *ns,
                                     const struct ucm_region_spec *spec, const uint64_t *addresses,
                                     int timeout_ms, struct ucm_region **out);
/* ucm_region_unregister, which says when the memory may be freed, for a region of the call above.
 * Behind the daemon's answer it waits for a kernel of the region's that still runs, as cudaFree
 * would. */
UCM_API int ucm_cuda_region_unregister(struct ucm_cuda *cuda, struct ucm_region *region,
                                       int timeout_ms);

/* ---- streams that wait for layers ---- */

/* Makes `stream` (a cudaStream_t or CUstream of the GPU's primary context) wait until the first
 * `layers` layers of the load lie in all blocks, as ucm_task_wait_layers says (UINT32_MAX: until
 * the task is done), and returns: kernels that are enqueued behind it begin after that, and no
 * thread of the caller's waits. Layers that lie there already cost the stream nothing. While
 * several loads are waited for, all but the oldest wait's may be told of a millisecond late.
 *
 * Nothing stays parked: the stream goes on, too, when the task failed or was cancelled, when the
 * connection broke, or timeout_ms after this call (negative: 10 s). So what was computed behind it
 * may be believed only when the task's result is good (ucm_task_check, ucm_task_wait) and
 * ucm_cuda_stream_waits_end returned 0.
 *
 * -UCM_EBUSY: 256 waits are pending, or were given up and not ended yet. -UCM_EINVALID: the stream
 * is of another context, or is being captured into a graph.
 *
 * What the caller must know: CUDA does not see what the stream waits for. While it waits, so does
 * whoever calls cudaDeviceSynchronize or what synchronizes by itself (cudaFree, registering and
 * unregistering of regions here), loads a kernel lazily (CUDA_MODULE_LOADING=EAGER), or launches
 * into a full queue, some thousand launches behind; at the longest until the timeout. A wait on the
 * legacy default stream holds up every stream that is not non-blocking. Streams beyond
 * CUDA_DEVICE_MAX_CONNECTIONS share queues, so that others of the caller's may stand behind the
 * wait. The companion's kernels must not, as the load may need them: their streams have the two
 * highest priorities, which a stream that waits should not have. Where a launch into a full queue
 * holds up the whole driver, a load through slices would fail after 5 s and leave the ring unused:
 * not tried. Don't close a handle whose streams waited while a graph is captured. */
UCM_API int ucm_cuda_stream_wait(struct ucm_cuda *cuda, struct ucm_task *task, uint32_t layers,
                                 void *stream, int timeout_ms);
/* Of a task with such waits, before ucm_task_free: ends those that are left (their streams go on),
 * and returns when the library does not look at the task any more. 0: every wait ended because its
 * layers lay there, or the task had failed, which its result tells. -UCM_EDEADLINE: a stream went
 * on before, by its timeout, this call or ucm_cuda_close; what it then read may be anything, though
 * the task's result is good. It says so once: further calls for the task return 0. */
UCM_API int ucm_cuda_stream_waits_end(struct ucm_cuda *cuda, struct ucm_task *task);

#ifdef __cplusplus
}
#endif
#endif
