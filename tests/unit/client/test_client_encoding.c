/* The client library's encoded namespaces, against a daemon of the test's own. */
#include "tests/unit/client/client_rig.h"

static struct msg_encoding_open asked;
static unsigned raw_dumps;

static bool hook(struct fake *f, int conn, int method, struct proto_envelope *env)
{
    static const uint8_t fingerprint[UCM_FINGERPRINT_BYTES] = {7};
    union proto_any m;
    struct ucm_error e;

    if (method != UCM_METHOD_ENCODING_OPEN && method != UCM_METHOD_DUMP)
        return false;
    cr_assert_eq(proto_decode(proto_methods[method].params, env, &m, &e), 0, "%s", e.text);
    if (method == UCM_METHOD_DUMP) {
        raw_dumps += m.dump.raw;
        fake_reply_blocks(f, conn, env->msgid, m.dump.keys.n / 16, UCM_BLOCK_UNFIT);
    } else {
        asked = m.encoding_open;
        cr_expect_eq(m.encoding_open.encoding.n, 3);
        cr_expect_eq(m.encoding_open.k.n, 3);
        cr_expect_eq(m.encoding_open.v.n, 0);
        fake_reply(f, conn, env->msgid, &proto_encoding_open_r,
                   &(struct msg_encoding_open_r){.ns = 9,
                                                 .fingerprint = {fingerprint, sizeof fingerprint},
                                                 .version = 1,
                                                 .encoded_bytes = 60,
                                                 .raw_bytes = 100});
    }
    return true;
}

static struct ucm_encoded_form form(void)
{
    return (struct ucm_encoded_form){
        .encoding = "fp8", .dtype = "bf16", .k = {16, 1, 64}, .axis = 1, .run = 8};
}

static void setup(void)
{
    rig_setup();
    rig.fake.hook = hook;
}

TestSuite(client_encoding, .init = setup, .fini = rig_teardown, .timeout = 120);

Test(client_encoding, says_what_was_opened)
{
    struct ucm_encoded_form f = form();
    struct ucm_encoding_info info;
    struct ucm_namespace *ns, *summaries;
    uint8_t fingerprint[32];

    cr_assert_eq(ucm_encoding_open(rig.ns, &f, -1, &ns), 0, "%s", ucm_errmsg());
    cr_expect_eq(asked.version, 1, "the library's");
    cr_expect_eq(asked.axis, 1);
    cr_expect_eq(asked.run, 8);
    cr_expect_eq(ucm_encoding_describe(ns, &info), 0);
    cr_expect_str_eq(info.form.encoding, "fp8");
    cr_expect_neq(info.form.encoding, f.encoding, "a copy");
    cr_expect_eq(info.form.version, 1);
    cr_expect_eq(info.raw_bytes, 100);
    cr_expect_eq(info.encoded_bytes, 60);
    ucm_namespace_fingerprint(ns, fingerprint);
    cr_expect_eq(fingerprint[0], 7);
    cr_expect_eq(ucm_encoding_describe(rig.ns, &info), -UCM_ENOTFOUND);
    cr_expect_eq(ucm_encoding_open(ns, &f, -1, &summaries), -UCM_EINVALID, "encoded already");
    ucm_namespace_close(ns);
}

Test(client_encoding, refuses_what_the_library_does_not_know)
{
    struct ucm_encoded_form f = form();
    struct ucm_namespace *ns;

#define REFUSED(change, status)                                                                    \
    do {                                                                                           \
        f = form();                                                                                \
        f.change;                                                                                  \
        cr_expect_eq(ucm_encoding_open(rig.ns, &f, -1, &ns), -(status), #change);                  \
    } while (0)
    REFUSED(encoding = NULL, UCM_EINVALID);
    REFUSED(dtype = NULL, UCM_EINVALID);
    REFUSED(encoding = "fp9", UCM_EUNSUPPORTED);
    REFUSED(version = 2, UCM_EUNSUPPORTED);
    REFUSED(dtype = "bf17", UCM_EINVALID);
    REFUSED(k.tokens = 0, UCM_EINVALID);
    REFUSED(k.dim = 1u << 30, UCM_EINVALID);
    REFUSED(order = 2, UCM_EINVALID);
    f = form();
    cr_expect_eq(ucm_encoding_open(NULL, &f, -1, &ns), -UCM_EINVALID);
    cr_expect_eq(ucm_encoding_open(rig.ns, NULL, -1, &ns), -UCM_EINVALID);
    cr_expect_eq(ucm_encoding_open(rig.ns, &f, -1, NULL), -UCM_EINVALID);
    cr_expect_eq(ucm_encoding_describe(NULL, NULL), -UCM_EINVALID);
    cr_expect_eq(fake_count(&rig.fake, UCM_METHOD_ENCODING_OPEN), 0);
}

Test(client_encoding, is_opened_again_after_a_reconnect)
{
    struct ucm_lookup l = {.keys = rig.keys, .n_keys = 1};
    struct ucm_encoded_form f = form();
    struct ucm_namespace *ns;
    uint32_t hits;

    cr_assert_eq(ucm_encoding_open(rig.ns, &f, -1, &ns), 0, "%s", ucm_errmsg());
    rig_reconnect();
    cr_expect_eq(ucm_lookup_prefix(ns, &l, -1, &hits, NULL, NULL), 0, "%s", ucm_errmsg());
    cr_expect_eq(fake_count(&rig.fake, UCM_METHOD_ENCODING_OPEN), 2);
}

/* A daemon that knows no encodings would refuse the field. */
Test(client_encoding, raw_is_said_of_encoded_regions_only)
{
    uint32_t block = 0;
    struct ucm_transfer t = {.keys = rig.keys, .blocks = &block, .n_keys = 1};
    struct ucm_result result;
    struct ucm_task *task;

    cr_assert_eq(ucm_dump_raw(rig.region, &t, -1, &task), 0, "%s", ucm_errmsg());
    cr_expect_eq(ucm_task_wait(task, -1, &result), 0);
    cr_expect_eq(result.result[0], UCM_BLOCK_IS_UNFIT);
    cr_expect_eq(result.n_ok, 0);
    ucm_task_free(task);
    cr_expect_eq(raw_dumps, 0);
}
