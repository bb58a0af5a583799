/* GPUs of the CUDA driver, as daemon/device sees them. It uses no CUDA type, so that device.c
 * builds without CUDA's headers; none.c takes the place of the driver there. */
#ifndef UCMD_CUDA_CUDA_H
#define UCMD_CUDA_CUDA_H

#include "daemon/device/device.h"

struct cuda_gpu_id {
    char name[64];
    uint8_t uuid[UCM_UUID_BYTES];
    int ordinal;
    char pci[24]; /* address, "0000:3b:00.0"; "": not known */
};

struct cuda_gpus {
    struct cuda_gpu_id gpu[DEVICE_GPUS_MAX];
    uint32_t n;
    char why[200]; /* there are none, or not all */
};

/* Loads the driver's library, which takes milliseconds. 0, or -ENOENT and why not. Loop only. */
int cuda_load(char why[200]);
/* Starts the driver and lists its GPUs; may take long. After cuda_load; any thread, one at a time.
 */
void cuda_enumerate(struct cuda_gpus *out);
/* Makes the device of one GPU; its thread does not touch the GPU before the first OPEN. */
int cuda_new(struct uv_loop_s *loop, const struct cuda_gpu_id *id,
             const struct device_config *config, struct device **out);

#endif
