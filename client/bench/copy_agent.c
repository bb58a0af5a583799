#include "client/bench/copy_agent.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define CLIENT_SO "libucmclient.so." UCM_SO_VERSION
#define COPY_AGENT_SO "libucmclient_cuda.so." UCM_SO_VERSION

/* A build directory is in nobody's library path: the library is opened there by its path, and
 * before it the one that it names. */
static void *open_beside(void)
{
    char path[4096];
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 64);
    char *name;

    if (n <= 0)
        return NULL;
    path[n] = '\0';
    name = strrchr(path, '/') + 1;
    snprintf(name, 64, "%s", CLIENT_SO);
    if (!dlopen(path, RTLD_NOW | RTLD_LOCAL))
        return NULL;
    snprintf(name, 64, "%s", COPY_AGENT_SO);
    return dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

static bool find(void *library, struct bench_copy_agent *out)
{
    const struct {
        const char *name;
        void *to;
    } symbols[] = {
        {"ucm_cuda_open", &out->open},
        {"ucm_cuda_close", &out->close},
        {"ucm_cuda_region_register", &out->region_register},
        {"ucm_cuda_region_unregister", &out->region_unregister},
        {"ucm_cuda_errmsg", &out->errmsg},
    };

    for (size_t i = 0; i < sizeof symbols / sizeof symbols[0]; i++) {
        void *found = dlsym(library, symbols[i].name);

        if (!found)
            return false;
        memcpy(symbols[i].to, &found, sizeof found);
    }
    return true;
}

static void *library_open(void)
{
    void *library = dlopen(COPY_AGENT_SO, RTLD_NOW | RTLD_LOCAL);

    return library ? library : open_beside();
}

const struct bench_copy_agent *bench_copy_agent(char *why, size_t why_bytes)
{
    static struct bench_copy_agent copy_agent;
    void *library;

    if (copy_agent.open)
        return &copy_agent;
    library = library_open();
    if (library && find(library, &copy_agent))
        return &copy_agent;
    snprintf(why, why_bytes, "no copy agent: %s", dlerror());
    return NULL;
}
