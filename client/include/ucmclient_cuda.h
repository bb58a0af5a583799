/* libucmclient_cuda: lets a worker's own process move small fragments for ucmd, and lets its
 * streams wait for loads. Optional: everything works without it. The daemon uses it only where it
 * pays, which is for fragments below 512 KiB.
 *
 * The copy agent keeps a staging ring: entries of the worker's GPU memory, 64 MiB by default. The
 * daemon's copy engines move whole entries over the bus. In loads a kernel of the copy agent
 * scatters them to the worker's pages, on a high-priority stream of its own. In dumps one gathers
 * them, on a low-priority stream. So small fragments reach the bus's speed, and the worker's
 * kernels need not take turns with another process's.
 *
 * ucm_load and ucm_dump keep their promises. A load is done only when its bytes are visible to any
 * kernel launched afterwards. A dump reads only after its event. If the copy agent gets no
 * processor for 20 ms, the daemon copies without it. A copy agent whose daemon is gone moves
 * nothing. Its kernels run alongside the worker's. But while CUDA's lazy load of a kernel waits for
 * a running kernel, it blocks every launch in the process. So a worker with kernels that run for
 * seconds should set CUDA_MODULE_LOADING=EAGER.
 *
 * Threads: call every function from any thread, but none of a handle during or after its
 * ucm_cuda_close. The library runs two threads a handle. One launches kernels, and sleeps while
 * there is nothing to move. The other registers the ring again after a reconnect. The first
 * ucm_cuda_stream_wait that has to wait starts a third. The library uses the GPU's primary context,
 * which is the CUDA runtime's, and does not change the caller's current context. Fork: as
 * ucmclient.h says; close nothing in the child.
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
    uint64_t entry_bytes; /* 64 KiB to 64 MiB, a multiple of 4096; 0: 16 MiB */
    uint32_t entries;     /* 2 to 8; 0: 4. Take 8 of 8 MiB for `q4` alongside the worker's
                           * kernels */
};

/* The sentence of the calling thread's last failed call into this library; "" when no call failed.
 * Valid until the thread's next call. */
UCM_API const char *ucm_cuda_errmsg(void);

/* Creates the ring on the GPU with that UUID (16 bytes) and registers it; one a client and GPU.
 * options may be NULL. On success the caller owns *out and closes it before the client. */
UCM_API int ucm_cuda_open(struct ucm_client *client, const uint8_t *gpu,
                          const struct ucm_cuda_options *options, int timeout_ms,
                          struct ucm_cuda **out);
/* Lets every stream go on that still waits (ucm_cuda_stream_wait), waits for copies through the
 * ring, and frees it. Unregister its regions first. On an error the handle stays, because the
 * daemon may still use the ring: call again, or ucm_cuda_abandon, before ucm_close. If a stream
 * ever waited, this waits for all work of the context, however long that takes, as
 * cudaDeviceSynchronize does. NULL is fine. */
UCM_API int ucm_cuda_close(struct ucm_cuda *cuda, int timeout_ms);
/* Closes without asking the daemon, for when that does not answer. Regions need not be
 * unregistered. Waits for kernels under way. Call the client's ucm_close next: it ends the daemon's
 * copies (ucmclient.h says when), which may write to the regions' memory until then. NULL is fine.
 */
UCM_API void ucm_cuda_abandon(struct ucm_cuda *cuda);

/* ucm_region_register for a region on that GPU whose copies may go through the ring. addresses[i]:
 * where spec->memory[i] begins (its offset counted in) in this process. At most 256 a ring. */
UCM_API int ucm_cuda_region_register(struct ucm_cuda *cuda, struct ucm_namespace *ns,
                                     const struct ucm_region_spec *spec, const uint64_t *addresses,
                                     int timeout_ms, struct ucm_region **out);
/* ucm_region_unregister for a region of the call above; that function says when the memory may be
 * freed. After the daemon's answer it waits for a kernel of the region that still runs, as cudaFree
 * would.
 */
UCM_API int ucm_cuda_region_unregister(struct ucm_cuda *cuda, struct ucm_region *region,
                                       int timeout_ms);

/* ---- streams that wait for layers ---- */

/* Makes `stream` (a cudaStream_t or CUstream of the GPU's primary context) wait until the load's
 * first `layers` layers are in all blocks. It returns at once. ucm_task_wait_layers defines when
 * layers are there; UINT32_MAX: until the task is done. Kernels enqueued afterwards begin after
 * that; no thread of the caller waits. Layers that are there already cost the stream nothing. If
 * streams wait for several loads, each but the oldest may go on up to 1 ms late.
 *
 * The stream also goes on when the task fails or is cancelled, when the connection breaks, or
 * timeout_ms after this call (negative: 10 s). So trust what was computed after the wait only when
 * the task's result is good (ucm_task_check, ucm_task_wait) and ucm_cuda_stream_waits_end returned
 * 0.
 *
 * -UCM_EBUSY: 256 waits are pending, or were given up and not ended yet. -UCM_EINVALID: the stream
 * is of another context, or is being captured into a graph.
 *
 * CUDA does not know what the stream waits for. Note:
 * - While it waits, some calls block until the timeout at the longest. These are
 *   cudaDeviceSynchronize and what synchronizes by itself, such as cudaFree, and registering and
 *   unregistering regions here. Lazy loading of a kernel is another (set
 *   CUDA_MODULE_LOADING=EAGER), and a launch into a full queue, which holds some thousand launches.
 * - A wait on the legacy default stream blocks every stream that is not non-blocking.
 * - Streams beyond CUDA_DEVICE_MAX_CONNECTIONS share queues, so other streams may block, too.
 * - The copy agent's kernels must not block, as the load may need them. Their streams have the two
 *   highest priorities: give a stream that waits a lower one.
 * - If a launch into a full queue blocked the whole driver, a load through entries would fail after
 *   5 s and leave the ring unused. This was not tried.
 * - Don't close a handle whose streams waited while a graph is being captured. */
UCM_API int ucm_cuda_stream_wait(struct ucm_cuda *cuda, struct ucm_task *task, uint32_t layers,
                                 void *stream, int timeout_ms);
/* Call this for a task with such waits before ucm_task_free. Ends the waits that are left (their
 * streams go on), and returns when the library no longer uses the task. 0: every wait ended because
 * its layers were there, or because the task failed, which its result says. -UCM_EDEADLINE: a
 * stream went on early, by its timeout, this call or ucm_cuda_close. It may have read anything,
 * though the task's result is good. This is reported once: further calls for the task return 0. */
UCM_API int ucm_cuda_stream_waits_end(struct ucm_cuda *cuda, struct ucm_task *task);

#ifdef __cplusplus
}
#endif
#endif
