#include "tests/unit/shared_fake.h"

int shared_submit(struct shared *s, struct shared_io *io)
{
    s->submits++;
    if (io->encrypted && fake_without_secret(s, io->space.fingerprint))
        return io->write ? -EAGAIN : -ENOENT;
    if (s->refuse_n > 0) {
        s->refuse_n--;
        s->refused = s->refused || s->refuse == -EAGAIN;
        return s->refuse;
    }
    list_push_back(&s->pending, &io->link);
    s->n_pending++;
    return 0;
}

int shared_secret(struct shared *s, const uint8_t fingerprint[UCM_FINGERPRINT_BYTES],
                  const uint8_t **secret)
{
    *secret = NULL;
    return fake_without_secret(s, fingerprint) ? -EAGAIN : 0;
}

int shared_file_fingerprint(struct shared *s, const uint8_t fingerprint[UCM_FINGERPRINT_BYTES],
                            bool encrypted, uint8_t out[UCM_FINGERPRINT_BYTES])
{
    if (encrypted && s && fake_without_secret(s, fingerprint)) {
        memset(out, 0, UCM_FINGERPRINT_BYTES);
        return -EAGAIN;
    }
    memcpy(out, fingerprint, UCM_FINGERPRINT_BYTES);
    return encrypted ? block_file_encrypted_fingerprint(fingerprint, NULL, out) : 0;
}

void shared_on_ready(struct shared *s, void (*ready_cb)(void *ctx), void (*secrets_cb)(void *ctx),
                     void *ctx)
{
    s->ready_cb = ready_cb;
    s->secrets_cb = secrets_cb;
    s->ctx = ctx;
}

int shared_lookup(struct shared *s, struct shared_lookup *p)
{
    if (s->lookup_error)
        return s->lookup_error;
    s->lookups++;
    cr_assert_null(s->lookup);
    s->lookup = p;
    return 0;
}

void shared_lookup_cancel(struct shared *s, struct shared_lookup *p)
{
    cr_assert_eq(s->lookup, p);
    s->lookup = NULL;
}

void shared_remove(struct shared *s, const struct block_file_id *id, const struct fair_who *who)
{
    cr_assert_gt(who->tenant, 0u);
    s->removes++;
    fake_file_erase(s, id);
}

void shared_removal_begin(struct shared *s, struct shared_removal *r)
{
    cr_assert_null(s->removal);
    s->removal = r;
}

void shared_removal_cancel(struct shared *s, struct shared_removal *r)
{
    cr_assert_eq(s->removal, r);
    s->removal = NULL;
}

int shared_purge(struct shared *s, struct shared_purge *p)
{
    cr_assert_null(s->purge);
    s->purge = p;
    return 0;
}

void shared_purge_cancel(struct shared *s, struct shared_purge *p)
{
    cr_assert_eq(s->purge, p);
    s->purge = NULL;
}

const char *shared_secrets_problem(const struct shared *s)
{
    (void)s;
    return NULL;
}

uint32_t shared_roots(const struct shared *s)
{
    return s ? 2 : 0;
}

void shared_stats(const struct shared *s, uint32_t root, struct shared_root_stats *out)
{
    (void)s, (void)root;
    *out = (struct shared_root_stats){.target = "/fake", .backend = "fake"};
}

int shared_collect(struct shared *s, uint32_t root)
{
    (void)s, (void)root;
    return -EINVAL;
}
