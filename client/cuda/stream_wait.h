/* Streams that wait for a load's layers. A stream waits for a word in pinned memory, which the GPU
 * polls by itself; a thread waits for the tasks with the client library and writes the words.
 *
 * Promises:
 * - Every wait ends at its deadline at the latest, and its stream goes on.
 * - The thread makes no CUDA call, so nothing that blocks the driver delays a wait's end.
 * - A word only grows, so a stream that reaches a wait late does not stop, even if the wait's entry
 *   has another wait by then.
 * Threads: any, but one for init and close. */
#ifndef UCM_CUDA_STREAM_WAIT_H
#define UCM_CUDA_STREAM_WAIT_H

#include <cuda.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/queue.h>

#define STREAM_WAITS 256

enum stream_wait_state {
    STREAM_WAIT_FREE,
    STREAM_WAIT_PENDING,
    STREAM_WAIT_GIVEN_UP, /* its stream went on without the layers; kept until stream_waits_end */
};

struct stream_wait {
    TAILQ_ENTRY(stream_wait) node; /* while it is pending */
    enum stream_wait_state state;
    struct ucm_task *task; /* NULL: free */
    uint32_t layers;
    uint32_t value; /* at which its word lets the stream go on; when free, of the last wait */
    uint32_t round; /* in which its task was polled last */
    int64_t deadline_ns;
};

TAILQ_HEAD(stream_wait_queue, stream_wait);

struct stream_waits {
    CUcontext context;
    _Atomic uint32_t *words; /* one an entry */
    CUdeviceptr words_gpu;
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    /* Under the mutex. */
    bool runs, quit;
    bool used;               /* a stream may poll a word */
    struct ucm_task *polled; /* by the thread now, without the mutex */
    uint32_t round;
    struct stream_wait_queue pending; /* oldest first */
    struct stream_wait entries[STREAM_WAITS];
};

/* On a CUDA error nothing is left. */
CUresult stream_waits_init(struct stream_waits *w, CUcontext context);
/* Gives up every wait and ends the thread; the next wait starts another. */
void stream_waits_stop(struct stream_waits *w);
/* After stop. Waits for all work of the context if a stream ever waited. */
void stream_waits_close(struct stream_waits *w);

/* ucm_cuda_stream_wait on a checked stream, with the context current. 0, -UCM_EBUSY,
 * -UCM_ENOMEMORY, or -UCM_EDEVICE with *error. */
int stream_waits_add(struct stream_waits *w, struct ucm_task *task, uint32_t layers,
                     CUstream stream, int timeout_ms, CUresult *error);
/* ucm_cuda_stream_waits_end. 0 or -UCM_EDEADLINE. */
int stream_waits_end(struct stream_waits *w, struct ucm_task *task);

#endif
