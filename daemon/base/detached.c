#include "daemon/base/detached.h"

#include <pthread.h>

int detached_start(size_t stack_bytes, void *(*run_cb)(void *arg), void *arg)
{
    pthread_attr_t attr;
    pthread_t thread;
    int rc = pthread_attr_init(&attr);

    if (rc != 0)
        return -rc;
    rc = pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    if (rc == 0 && stack_bytes > 0)
        rc = pthread_attr_setstacksize(&attr, stack_bytes);
    if (rc == 0)
        rc = pthread_create(&thread, &attr, run_cb, arg);
    pthread_attr_destroy(&attr);
    return -rc;
}
