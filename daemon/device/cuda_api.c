#include "daemon/device/cuda_api.h"

#include "daemon/device/cuda.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

struct cuda_api cuda;

/* dlsym and cuGetProcAddress give object pointers; POSIX lets them hold functions. */
static void pointer_set(void *function, void *address)
{
    memcpy(function, &address, sizeof(address));
}

static int load_function(PFN_cuGetProcAddress_v12000 get, const char *name, int version,
                         void *function, char why[200])
{
    CUdriverProcAddressQueryResult found;
    void *address = NULL;
    CUresult r = get(name, &address, version, CU_GET_PROC_ADDRESS_DEFAULT, &found);

    if (r != CUDA_SUCCESS || found != CU_GET_PROC_ADDRESS_SUCCESS || !address) {
        snprintf(why, 200, "libcuda.so.1 has no %s of version %d; a driver of CUDA 12 is needed",
                 name, version);
        return -ENOENT;
    }
    pointer_set(function, address);
    return 0;
}

int cuda_load(char why[200])
{
    PFN_cuGetProcAddress_v12000 get;
    struct cuda_api api;
    void *library, *address;
    char missing[200];

    if (cuda.cuInit)
        return 0;
    library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(why, 200, "the NVIDIA driver is not installed: %s", dlerror());
        return -ENOENT;
    }
    address = dlsym(library, "cuGetProcAddress_v2");
    if (!address) {
        snprintf(why, 200, "libcuda.so.1 is too old; a driver of CUDA 12 is needed");
        goto err_after_open;
    }
    pointer_set(&get, address);
#define X(name, version)                                                                           \
    if (load_function(get, #name, version, &api.name, why) < 0)                                    \
        goto err_after_open;
    CUDA_API(X)
#undef X
#define X(name, version)                                                                           \
    if (load_function(get, #name, version, &api.name, missing) < 0)                                \
        api.name = NULL;
    CUDA_API_OPTIONAL(X)
#undef X
    cuda = api; /* the library stays for good */
    return 0;

err_after_open:
    dlclose(library);
    return -ENOENT;
}

void cuda_error_text(CUresult r, char *text, size_t size)
{
    const char *name, *sentence;

    if (cuda.cuGetErrorName(r, &name) != CUDA_SUCCESS ||
        cuda.cuGetErrorString(r, &sentence) != CUDA_SUCCESS)
        snprintf(text, size, "CUDA error %d", (int)r);
    else
        snprintf(text, size, "%s (%s)", name, sentence);
}

static CUresult identify(int ordinal, struct cuda_gpu_id *id)
{
    CUdevice dev;
    CUuuid uuid;
    CUresult r = cuda.cuDeviceGet(&dev, ordinal);

    id->ordinal = ordinal;
    if (r == CUDA_SUCCESS)
        r = cuda.cuDeviceGetName(id->name, sizeof(id->name), dev);
    if (r == CUDA_SUCCESS)
        r = cuda.cuDeviceGetUuid(&uuid, dev);
    if (r == CUDA_SUCCESS)
        memcpy(id->uuid, uuid.bytes, UCM_UUID_BYTES);
    return r;
}

void cuda_enumerate(struct cuda_gpus *out)
{
    char text[160];
    int n = 0;
    CUresult r = cuda.cuInit(0);

    if (r == CUDA_SUCCESS)
        r = cuda.cuDeviceGetCount(&n);
    out->n = 0;
    out->why[0] = '\0';
    for (int i = 0; r == CUDA_SUCCESS && i < n && i < DEVICE_GPUS_MAX; i++) {
        r = identify(i, &out->gpu[out->n]);
        out->n += r == CUDA_SUCCESS;
    }
    if (r != CUDA_SUCCESS) {
        cuda_error_text(r, text, sizeof(text));
        snprintf(out->why, sizeof(out->why), "the NVIDIA driver says %s", text);
    } else if (n == 0) {
        snprintf(out->why, sizeof(out->why), "the NVIDIA driver shows no GPU");
    }
}

/* ---- libnvidia-ml, whose headers are not always there ---- */

struct nvml_memory {
    unsigned long long total, free, used;
};

struct nvml {
    int (*init)(void);
    int (*shutdown)(void);
    int (*by_uuid)(const char *uuid, void **device);
    int (*memory)(void *device, struct nvml_memory *out);
};

static uint64_t nvml_used(const struct nvml *nvml, const char *uuid)
{
    struct nvml_memory memory;
    uint64_t used = 0;
    void *device;

    if (nvml->init() != 0)
        return 0;
    if (nvml->by_uuid(uuid, &device) == 0 && nvml->memory(device, &memory) == 0)
        used = memory.used;
    nvml->shutdown();
    return used;
}

uint64_t cuda_used_bytes(const uint8_t u[16])
{
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    struct nvml nvml;
    uint64_t used = 0;
    char uuid[64];

    if (!library)
        return 0;
    pointer_set(&nvml.init, dlsym(library, "nvmlInit_v2"));
    pointer_set(&nvml.shutdown, dlsym(library, "nvmlShutdown"));
    pointer_set(&nvml.by_uuid, dlsym(library, "nvmlDeviceGetHandleByUUID"));
    pointer_set(&nvml.memory, dlsym(library, "nvmlDeviceGetMemoryInfo"));
    snprintf(uuid, sizeof(uuid),
             "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1],
             u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14],
             u[15]);
    if (nvml.init && nvml.shutdown && nvml.by_uuid && nvml.memory)
        used = nvml_used(&nvml, uuid);
    dlclose(library);
    return used;
}
