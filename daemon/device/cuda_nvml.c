#include "daemon/device/nvml.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static void symbol_get(struct nvml *n, const char *name, void *function)
{
    void *address = dlsym(n->library, name);

    memcpy(function, &address, sizeof(address));
}

void nvml_open(struct nvml *n, const uint8_t u[16])
{
    char uuid[64];

    *n = (struct nvml){.library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL)};
    if (!n->library)
        return;
    symbol_get(n, "nvmlInit_v2", &n->init);
    symbol_get(n, "nvmlShutdown", &n->shutdown);
    symbol_get(n, "nvmlDeviceGetHandleByUUID", &n->by_uuid);
    symbol_get(n, "nvmlDeviceGetMemoryInfo", &n->memory);
    symbol_get(n, "nvmlSystemGetDriverVersion", &n->driver);
    snprintf(uuid, sizeof(uuid),
             "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1],
             u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14],
             u[15]);
    if (n->init && n->shutdown && n->by_uuid && n->init() == 0) {
        if (n->by_uuid(uuid, &n->device) == 0)
            return;
        n->shutdown();
    }
    n->device = NULL;
    dlclose(n->library);
    n->library = NULL;
}

void nvml_close(struct nvml *n)
{
    if (!n->library)
        return;
    n->shutdown();
    dlclose(n->library);
    *n = (struct nvml){0};
}

uint64_t nvml_used_bytes(const struct nvml *n)
{
    struct nvml_memory memory;

    return n->library && n->memory && n->memory(n->device, &memory) == 0 ? memory.used : 0;
}

void nvml_driver(const struct nvml *n, char text[80])
{
    if (!n->library || !n->driver || n->driver(text, 80) != 0)
        text[0] = '\0';
}
