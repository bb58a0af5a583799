/* Bytes of a peer, as the body of one frame. They are checked, opened and decoded by the table of
 * their method (a response: by every table of a result). A message that decodes must encode again,
 * and decode to the same. Traps on any break of these promises. */
#include "proto/proto.h"
#include "tests/fuzz/fuzz.h"

#include <string.h>

#define LIMIT (4u << 20)

/* Larger than any message's struct. */
struct any_value {
    uint64_t words[64];
};

/* Encodes the value, opens and decodes the frame, and encodes the result. Both frames must be the
 * same. */
static void check_round_trip(const struct proto_message *m, const struct any_value *value)
{
    struct ucm_error e = {0};
    struct proto_envelope env;
    struct any_value again;
    struct proto_buf first, second;
    bool answerable;

    proto_buf_init(&first, LIMIT);
    proto_buf_init(&second, LIMIT);
    must(proto_response(&first, 1, m, value, &e) == 0);
    must(proto_envelope_open(&env, first.p + PROTO_HEADER_BYTES, first.n - PROTO_HEADER_BYTES,
                             &answerable, &e) == 0);
    must(!answerable);
    must(proto_decode(m, &env, &again, &e) == 0);
    must(proto_response(&second, 1, m, &again, &e) == 0);
    must(first.n == second.n && memcmp(first.p, second.p, first.n) == 0);
    proto_envelope_close(&env);
    proto_buf_free(&first);
    proto_buf_free(&second);
}

static void check_decode(const struct proto_message *m, struct proto_envelope *env)
{
    struct ucm_error e = {0};
    struct any_value value;
    int rc = proto_decode(m, env, &value, &e);

    must(rc == 0 || (rc == -UCM_WIRE_INVALID && e.code == UCM_WIRE_INVALID && e.text[0]));
    if (rc == 0 && m != &proto_free_map)
        check_round_trip(m, &value);
}

static void check_body(struct proto_envelope *env)
{
    int method;

    if (env->type == PROTO_REQUEST) {
        method = proto_method_find(env->method);
        if (method >= 0)
            check_decode(proto_methods[method].params, env);
    } else if (env->type == PROTO_RESPONSE && env->error.code == 0) {
        for (int i = 0; i < UCM_METHOD_COUNT; i++)
            check_decode(proto_methods[i].result, env);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct ucm_error e = {0};
    struct proto_envelope env;
    bool answerable;
    uint32_t elements;
    int checked = proto_frame_check(data, n, &elements, &e);
    int rc = proto_envelope_open(&env, data, n, &answerable, &e);

    must(checked == 0 || (checked == -UCM_WIRE_INVALID && rc == checked));
    must(rc == 0 || (rc == -UCM_WIRE_INVALID && e.text[0]));
    must(rc != 0 || answerable == (env.type == PROTO_REQUEST));
    if (rc == 0) {
        check_body(&env);
        proto_envelope_close(&env);
    }
    return 0;
}
