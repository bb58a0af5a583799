/* The device of workers whose KV lies in shared memory. Inside this room only. */
#ifndef UCMD_DEVICE_CPU_H
#define UCMD_DEVICE_CPU_H

#include "daemon/device/device.h"

/* 0 or -errno. */
int cpu_new(struct uv_loop_s *loop, unsigned threads, struct device **out);

#endif
