#include "tests/unit/share_fake.h"

int share_submit(struct share *s, struct share_io *io)
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

int share_secret(struct share *s, const uint8_t fingerprint[UCM_FINGERPRINT_BYTES],
                 const uint8_t **secret)
{
    *secret = NULL;
    return fake_without_secret(s, fingerprint) ? -EAGAIN : 0;
}

void share_on_ready(struct share *s, void (*ready_cb)(void *ctx), void (*secrets_cb)(void *ctx),
                    void *ctx)
{
    s->ready_cb = ready_cb;
    s->secrets_cb = secrets_cb;
    s->ctx = ctx;
}

int share_lookup(struct share *s, struct share_lookup *p)
{
    if (s->lookup_error)
        return s->lookup_error;
    s->lookups++;
    cr_assert_null(s->lookup);
    s->lookup = p;
    return 0;
}

void share_lookup_cancel(struct share *s, struct share_lookup *p)
{
    cr_assert_eq(s->lookup, p);
    s->lookup = NULL;
}

void share_remove(struct share *s, const struct block_file_id *id, const struct fair_who *who)
{
    cr_assert_gt(who->tenant, 0u);
    s->removes++;
    fake_file_erase(s, id);
}

void share_removal_begin(struct share *s, struct share_removal *r)
{
    cr_assert_null(s->removal);
    s->removal = r;
}

void share_removal_cancel(struct share *s, struct share_removal *r)
{
    cr_assert_eq(s->removal, r);
    s->removal = NULL;
}

int share_purge(struct share *s, struct share_purge *p)
{
    cr_assert_null(s->purge);
    s->purge = p;
    return 0;
}

void share_purge_cancel(struct share *s, struct share_purge *p)
{
    cr_assert_eq(s->purge, p);
    s->purge = NULL;
}

const char *share_secrets_problem(const struct share *s)
{
    (void)s;
    return NULL;
}

uint32_t share_roots(const struct share *s)
{
    return s ? 2 : 0;
}

void share_stats(const struct share *s, uint32_t root, struct share_root_stats *out)
{
    (void)s, (void)root;
    *out = (struct share_root_stats){.target = "/fake", .backend = "fake"};
}

int share_collect(struct share *s, uint32_t root)
{
    (void)s, (void)root;
    return -EINVAL;
}
