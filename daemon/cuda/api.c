#include "daemon/cuda/api.h"

#include "daemon/cuda/cuda.h"

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

/* Nothing depends on it but where slots lie. */
static void pci_address(CUdevice dev, char out[24])
{
    int domain, bus, slot;

    out[0] = '\0';
    if (cuda.cuDeviceGetAttribute(&domain, CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, dev) ==
            CUDA_SUCCESS &&
        cuda.cuDeviceGetAttribute(&bus, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, dev) == CUDA_SUCCESS &&
        cuda.cuDeviceGetAttribute(&slot, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID, dev) == CUDA_SUCCESS)
        snprintf(out, 24, "%04x:%02x:%02x.0", (unsigned)domain, (unsigned)bus, (unsigned)slot);
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
    if (r == CUDA_SUCCESS)
        pci_address(dev, id->pci);
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

/* ---- the management library ---- */

struct nvml_memory {
    unsigned long long total, free, used;
};

static void uuid_print(const uint8_t uuid[16], char text[64])
{
    int n = snprintf(text, 64, "GPU-");

    for (unsigned i = 0; i < 16; i++)
        n += snprintf(text + n, 64 - (size_t)n,
                      i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", uuid[i]);
}

void nvml_read(struct nvml *out, const uint8_t uuid[16])
{
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL), *device;
    int (*init)(void), (*shutdown)(void), (*by_uuid)(const char *, void **);
    int (*memory)(void *, struct nvml_memory *), (*driver)(char *, unsigned);
    struct nvml_memory read;
    char text[64];

    *out = (struct nvml){0};
    if (!library)
        return;
    pointer_set(&init, dlsym(library, "nvmlInit_v2"));
    pointer_set(&shutdown, dlsym(library, "nvmlShutdown"));
    pointer_set(&by_uuid, dlsym(library, "nvmlDeviceGetHandleByUUID"));
    pointer_set(&memory, dlsym(library, "nvmlDeviceGetMemoryInfo"));
    pointer_set(&driver, dlsym(library, "nvmlSystemGetDriverVersion"));
    uuid_print(uuid, text);
    if (init && shutdown && init() == 0) {
        if (by_uuid && memory && by_uuid(text, &device) == 0 && memory(device, &read) == 0)
            out->used_bytes = read.used;
        if (driver && driver(out->driver, sizeof(out->driver)) != 0)
            out->driver[0] = '\0';
        shutdown();
    }
    dlclose(library);
}
