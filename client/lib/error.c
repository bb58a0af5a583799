#include "client/lib/internal.h"

#include <stdarg.h>
#include <stdio.h>

/* The daemon's codes: here and on the wire. */
#define CODES(C)                                                                                   \
    C(UCM_OK, UCM_WIRE_OK)                                                                         \
    C(UCM_EINVALID, UCM_WIRE_INVALID)                                                              \
    C(UCM_EUNSUPPORTED, UCM_WIRE_UNSUPPORTED)                                                      \
    C(UCM_EDENIED, UCM_WIRE_DENIED)                                                                \
    C(UCM_ENOTFOUND, UCM_WIRE_NOT_FOUND)                                                           \
    C(UCM_EBUSY, UCM_WIRE_BUSY)                                                                    \
    C(UCM_EDEADLINE, UCM_WIRE_DEADLINE)                                                            \
    C(UCM_ECANCELLED, UCM_WIRE_CANCELLED)                                                          \
    C(UCM_EDEVICE, UCM_WIRE_DEVICE)                                                                \
    C(UCM_EIO, UCM_WIRE_IO)                                                                        \
    C(UCM_ENOMEMORY, UCM_WIRE_NO_MEMORY)                                                           \
    C(UCM_ESHUTDOWN, UCM_WIRE_SHUTDOWN)                                                            \
    C(UCM_EINTERNAL, UCM_WIRE_INTERNAL)

#define SAME(a, b) _Static_assert((int)(a) == (int)(b), #a " must equal " #b)
#define SAME_CODE(a, b) SAME(a, b);
CODES(SAME_CODE)
SAME(UCM_FOUND_NOT, UCM_LOOKUP_MISS);
SAME(UCM_FOUND_DRAM, UCM_LOOKUP_DRAM);
SAME(UCM_FOUND_NVME, UCM_LOOKUP_NVME);
SAME(UCM_BLOCK_IS_OK, UCM_BLOCK_OK);
SAME(UCM_BLOCK_IS_MISS, UCM_BLOCK_MISS);
SAME(UCM_BLOCK_IS_FAILED, UCM_BLOCK_FAILED);
SAME(UCM_BLOCK_IS_NO_ROOM, UCM_BLOCK_NO_ROOM);
SAME(UCM_BLOCK_IS_EXISTS, UCM_BLOCK_EXISTS);
SAME(UCM_BLOCK_IS_IN_PROGRESS, UCM_BLOCK_IN_PROGRESS);
SAME(UCM_BLOCK_IS_CANCELLED, UCM_BLOCK_CANCELLED);
SAME(UCM_BLOCK_IS_DEVICE, UCM_BLOCK_DEVICE);
SAME(UCM_BLOCK_IS_NOT_DURABLE, UCM_BLOCK_NOT_DURABLE);
SAME(UCM_BLOCK_IS_UNFIT, UCM_BLOCK_UNFIT);
SAME(UCM_MEMORY_MEMFD, UCM_HANDLE_MEMFD);
SAME(UCM_MEMORY_CUDA_IPC, UCM_HANDLE_CUDA_IPC);
SAME(UCM_MEMORY_CUDA_FD, UCM_HANDLE_CUDA_FD);

static _Thread_local char last_message[640];

const char *ucm_strerror(int status)
{
    static const struct {
        int status;
        const char *name;
    } names[] = {
#define NAMED(code, wire) {code, #code},
        CODES(NAMED)
#undef NAMED
            {UCM_EDISCONNECTED, "UCM_EDISCONNECTED"},
        {UCM_ENODAEMON, "UCM_ENODAEMON"},
        {UCM_EPROTOCOL, "UCM_EPROTOCOL"},
        {UCM_ECONSUMED, "UCM_ECONSUMED"},
        {UCM_EPENDING, "UCM_EPENDING"},
    };

    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].status == status || -names[i].status == status)
            return names[i].name;
    return "UCM_EUNKNOWN";
}

const char *ucm_errmsg(void)
{
    return last_message;
}

const char *ucm_version(void)
{
    return UCM_VERSION;
}

int client_fail(int status, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(last_message, sizeof last_message, format, args);
    va_end(args);
    return -status;
}

int client_fail_as(int status, const char *text)
{
    snprintf(last_message, sizeof last_message, "%s", text);
    return status;
}

int client_fail_wire(int status, const struct ucm_error *e)
{
    return client_fail_as(status, e->text[0] ? e->text : ucm_error_sentence(e->code));
}
