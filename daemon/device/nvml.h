/* What the driver's management library tells of one GPU; without it, nothing. Inside this room
 * only. One object belongs to one thread. */
#ifndef UCMD_DEVICE_NVML_H
#define UCMD_DEVICE_NVML_H

#include <stdint.h>

struct nvml_memory {
    unsigned long long total, free, used;
};

struct nvml {
    void *library, *device;
    int (*init)(void);
    int (*shutdown)(void);
    int (*by_uuid)(const char *uuid, void **device);
    int (*memory)(void *device, struct nvml_memory *out);
    int (*driver)(char *text, unsigned size);
};

/* Harmless when the library is not there: the others then tell nothing. Takes milliseconds. */
void nvml_open(struct nvml *n, const uint8_t uuid[16]);
void nvml_close(struct nvml *n);
uint64_t nvml_used_bytes(const struct nvml *n);        /* of all processes; 0: not known */
void nvml_driver(const struct nvml *n, char text[80]); /* its version, "" when not known */

#endif
