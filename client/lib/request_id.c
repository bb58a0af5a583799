/* The id belongs to the thread, so calls need no argument for it. It does not belong to the client,
 * because threads share clients. */
#include "client/lib/internal.h"

#include <string.h>

static _Thread_local char request_id[UCM_MAX_REQUEST_BYTES];
static _Thread_local uint32_t request_id_n;

struct proto_str client_request_id(void)
{
    return (struct proto_str){request_id, request_id_n};
}

int ucm_set_request_id(const char *id)
{
    uint32_t control;
    size_t n = id ? strnlen(id, UCM_MAX_REQUEST_BYTES + 1) : 0;

    request_id_n = 0;
    if (n > UCM_MAX_REQUEST_BYTES)
        for (n = UCM_MAX_REQUEST_BYTES; n > 0 && ((unsigned char)id[n] & 0xc0) == 0x80;)
            n--;
    if (proto_text_span(id, (uint32_t)n, &control) != n)
        return client_fail(UCM_EINVALID, "a request id is UTF-8 without control characters");
    if (n > 0)
        memcpy(request_id, id, n);
    request_id_n = (uint32_t)n;
    return 0;
}
