#include "daemon/device/nvml.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

struct memory {
    unsigned long long total, free, used;
};

static void symbol_get(void *library, const char *name, void *function)
{
    void *address = dlsym(library, name);

    memcpy(function, &address, sizeof(address));
}

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
    int (*memory)(void *, struct memory *), (*driver)(char *, unsigned);
    struct memory read;
    char text[64];

    *out = (struct nvml){0};
    if (!library)
        return;
    symbol_get(library, "nvmlInit_v2", &init);
    symbol_get(library, "nvmlShutdown", &shutdown);
    symbol_get(library, "nvmlDeviceGetHandleByUUID", &by_uuid);
    symbol_get(library, "nvmlDeviceGetMemoryInfo", &memory);
    symbol_get(library, "nvmlSystemGetDriverVersion", &driver);
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
