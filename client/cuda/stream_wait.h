/* Streams that wait for a load's layers: words in pinned memory, which the GPU looks at by itself,
 * and a thread that waits for the tasks by the client library and writes the words.
 *
 * Promises: every wait ends, at its deadline at the latest, and a stream that waits then goes on;
 * later only when the connection breaks and the client library has a companion's kernel to wait
 * for. The thread makes no CUDA call, so that nothing that holds up the driver holds up a wait's
 * end. A word only grows: whoever comes late to a wait that has ended does not stop there, though
 * its slot may be another's by then. Threads: any, but init and close. */
#ifndef UCM_CUDA_STREAM_WAIT_H
#define UCM_CUDA_STREAM_WAIT_H

#include "client/include/ucmclient.h"

#include <cuda.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/queue.h>

#define STREAM_WAITS 256

enum stream_wait_state {
    STREAM_WAIT_FREE,
    STREAM_WAIT_PENDING,
    STREAM_WAIT_GIVEN_UP, /* its stream went on without the layers: kept until somebody asks */
};

struct stream_wait {
    TAILQ_ENTRY(stream_wait) node; /* while it is pending */
    enum stream_wait_state state;
    struct ucm_task *task; /* NULL: free */
    uint32_t layers;
    uint32_t value; /* of the word when the stream may go on; the slot's last wait's, when free */
    uint32_t round; /* in which it was asked for last */
    int64_t deadline_ns;
};

TAILQ_HEAD(stream_wait_queue, stream_wait);

struct stream_waits {
    CUcontext context;
    _Atomic uint32_t *words; /* one a slot */
    CUdeviceptr words_gpu;
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    /* Under the mutex. */
    bool runs, quit;
    bool used;              /* a stream may look at a word */
    struct ucm_task *asked; /* the thread is in a call for it, without the mutex */
    uint32_t round;
    struct stream_wait_queue pending; /* oldest first */
    struct stream_wait slots[STREAM_WAITS];
};

/* A CUDA error; then nothing is left. */
CUresult stream_waits_init(struct stream_waits *w, CUcontext context);
/* Gives up every wait and ends the thread; the next wait begins another. */
void stream_waits_stop(struct stream_waits *w);
/* Behind stop. Waits for all that was enqueued in the context. */
void stream_waits_close(struct stream_waits *w);

/* ucm_cuda_stream_wait on a stream that was looked at, with the context current. 0, -UCM_EBUSY,
 * -UCM_ENOMEMORY, or -UCM_EDEVICE with *error. */
int stream_waits_add(struct stream_waits *w, struct ucm_task *task, uint32_t layers,
                     CUstream stream, int timeout_ms, CUresult *error);
/* ucm_cuda_stream_waits_end. 0 or -UCM_EDEADLINE. */
int stream_waits_end(struct stream_waits *w, struct ucm_task *task);

#endif
