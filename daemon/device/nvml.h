/* The driver's management library, which may be missing. Inside this room only. */
#ifndef UCMD_DEVICE_NVML_H
#define UCMD_DEVICE_NVML_H

#include <stdint.h>

struct nvml {
    uint64_t used_bytes; /* of one GPU's memory, by all processes; 0: not known */
    char driver[80];     /* its version, "" when not known */
};

/* Reads both. Takes milliseconds. Any thread. */
void nvml_read(struct nvml *out, const uint8_t uuid[16]);

#endif
