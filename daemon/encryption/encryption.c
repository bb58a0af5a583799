#include "daemon/encryption/encryption.h"

#include "daemon/base/kill_point.h"
#include "daemon/base/log.h"
#include "daemon/config/config.h"
#include "daemon/encryption/source.h"
#include "daemon/format/bytes.h"
#include "proto/metrics/metrics.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <openssl/crypto.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MODULE "encryption"
#define LOCKED_BYTES (1u << 20) /* for keys, 32 bytes each; and two texts' room for each source */
#define BUCKETS 1024u
#define DERIVED_MAX 8192u /* beyond it, those that nobody uses are derived again */
#define FILES_MS 2000u    /* that the start waits for all files together */
#define MISSING_MS 10000u /* between two lines about one tenant's missing key */

struct key {
    uint8_t id[ENCRYPTION_ID_BYTES];
    uint8_t *secret;
};

/* A tenant's source and what it brought. */
struct encryption_origin {
    struct encryption *encryption;
    char name[UCM_MAX_NAME_BYTES + 1];
    struct source source;
    struct key key[ENCRYPTION_KEYS_MAX];
    unsigned n;
    char error[200];  /* of the last attempt; "": none */
    uint64_t tell_ms; /* when the log may say so again */
};

struct encryption {
    uv_loop_t *loop;
    struct metrics *metrics;
    struct encryption_origin *origin, *others; /* by name; others: of "*", or NULL */
    unsigned n;
    bool plaintext, closing;
    struct encryption_key *derived[BUCKETS];
    unsigned derived_n;
    unsigned busy; /* sources being read */
};

static void encryption_free(struct encryption *s);

/* ---- locked memory ---- */

static void *locked_new(size_t bytes)
{
    return CRYPTO_secure_zalloc(bytes, __FILE__, __LINE__);
}

static void locked_free(void *p, size_t bytes)
{
    CRYPTO_secure_clear_free(p, bytes, __FILE__, __LINE__);
}

/* OpenSSL's: between guard pages, locked, left out of core dumps. One for the process, and it
 * stays. */
static int locked_open(size_t sources)
{
    size_t bytes = LOCKED_BYTES; /* OpenSSL wants a power of two */
    int rc;

    while (bytes < LOCKED_BYTES + sources * 2 * SOURCE_BYTES)
        bytes *= 2;
    rc = CRYPTO_secure_malloc_initialized() ? 1 : CRYPTO_secure_malloc_init(bytes, 32);

    if (rc == 2)
        log_warn(MODULE, "keys-not-locked", "reason=\"%s\"",
                 "mlock is refused: keys may reach the swap; raise LimitMEMLOCK");
    return rc == 0 ? -ENOMEM : 0;
}

/* ---- derived keys ---- */

static unsigned bucket_of(const uint8_t *fingerprint, const uint8_t *id)
{
    return (unsigned)((get64(fingerprint) ^ get64(id)) % BUCKETS);
}

static void derived_free(struct encryption *s, struct encryption_key *k)
{
    locked_free((void *)k->secret, ENCRYPTION_KEY_BYTES);
    free(k);
    s->derived_n--;
}

/* Takes those that nobody uses, of this origin and with this id, or all, out of the table and frees
 * them; what is in use goes with its last user. */
static void derived_drop(struct encryption *s, const struct encryption_origin *o, const uint8_t *id)
{
    for (unsigned i = 0; i < BUCKETS; i++) {
        struct encryption_key **at = &s->derived[i], *k;

        while ((k = *at) != NULL) {
            if ((o && k->origin != o) || (id && memcmp(k->id, id, ENCRYPTION_ID_BYTES) != 0) ||
                (!o && k->users > 0)) {
                at = &k->next;
                continue;
            }
            *at = k->next;
            k->origin = NULL;
            if (k->users == 0)
                derived_free(s, k);
        }
    }
}

static bool is_of(const struct encryption_key *k, const struct encryption_origin *o,
                  const struct encryption_space *space, const uint8_t *id)
{
    return k->origin == o && memcmp(k->id, id, ENCRYPTION_ID_BYTES) == 0 &&
           memcmp(k->fingerprint, space->fingerprint, UCM_FINGERPRINT_BYTES) == 0 &&
           k->salt_bytes == space->salt_bytes &&
           (k->salt_bytes == 0 || memcmp(k->salt, space->salt, k->salt_bytes) == 0);
}

static struct encryption_key *derived_find(const struct encryption *s,
                                           const struct encryption_origin *o,
                                           const struct encryption_space *space, const uint8_t *id)
{
    struct encryption_key *k = s->derived[bucket_of(space->fingerprint, id)];

    while (k && !is_of(k, o, space, id))
        k = k->next;
    return k;
}

static int derived_new(struct encryption *s, struct encryption_origin *o, const struct key *from,
                       const struct encryption_space *space, struct encryption_key **out)
{
    struct encryption_key *k, **bucket = &s->derived[bucket_of(space->fingerprint, from->id)];
    uint8_t *secret;

    assert(space->salt_bytes <= sizeof(k->salt));
    if (s->derived_n >= DERIVED_MAX)
        derived_drop(s, NULL, NULL);
    secret = s->derived_n < 2 * DERIVED_MAX ? locked_new(ENCRYPTION_KEY_BYTES) : NULL;
    k = secret ? calloc(1, sizeof(*k)) : NULL;
    if (!k || encryption_derive(from->secret, space->salt, space->salt_bytes, "ucmd namespace 1",
                                space->fingerprint, UCM_FINGERPRINT_BYTES, secret,
                                ENCRYPTION_KEY_BYTES) < 0) {
        locked_free(secret, ENCRYPTION_KEY_BYTES);
        free(k);
        return -ENOMEM;
    }
    k->secret = secret;
    k->origin = o;
    memcpy(k->id, from->id, ENCRYPTION_ID_BYTES);
    memcpy(k->fingerprint, space->fingerprint, UCM_FINGERPRINT_BYTES);
    k->salt_bytes = space->salt_bytes;
    if (space->salt_bytes > 0)
        memcpy(k->salt, space->salt, space->salt_bytes);
    k->next = *bucket;
    *bucket = k;
    s->derived_n++;
    *out = k;
    return 0;
}

/* ---- tenants ---- */

static int name_compare(const void *left, const void *right)
{
    return strcmp(((const struct encryption_origin *)left)->name,
                  ((const struct encryption_origin *)right)->name);
}

static struct encryption_origin *origin_of(const struct encryption *s, const char *tenant, size_t n)
{
    unsigned low = 0, high = s ? s->n : 0;

    while (low < high) {
        unsigned mid = low + (high - low) / 2;
        struct encryption_origin *o = &s->origin[mid];
        int order = strncmp(o->name, tenant, n);

        if (order == 0 && o->name[n] == '\0')
            return o;
        if (order < 0)
            low = mid + 1;
        else
            high = mid;
    }
    return s ? s->others : NULL;
}

/* The tenant stands first in an identity: 16 bytes that say what this is, the name's length, the
 * name. */
static struct encryption_origin *origin_by(const struct encryption *s, const uint8_t *identity,
                                           uint32_t bytes)
{
    uint32_t n = bytes >= 20 ? get32(identity + 16) : UINT32_MAX;

    return n <= UCM_MAX_NAME_BYTES && n <= bytes - 20 ? origin_of(s, (const char *)identity + 20, n)
                                                      : NULL;
}

bool encryption_wanted(const struct encryption *s, const char *tenant)
{
    return origin_of(s, tenant, strlen(tenant)) != NULL;
}

bool encryption_wanted_by(const struct encryption *s, const uint8_t *identity,
                          uint32_t identity_bytes)
{
    return origin_by(s, identity, identity_bytes) != NULL;
}

bool encryption_awaited_by(const struct encryption *s, const uint8_t *identity,
                           uint32_t identity_bytes)
{
    const struct encryption_origin *o = origin_by(s, identity, identity_bytes);

    return o && o->n == 0 && o->source.busy;
}

bool encryption_plaintext_allowed(const struct encryption *s)
{
    return !s || s->plaintext;
}

static int missing(struct encryption_origin *o, const uint8_t *id)
{
    uint64_t now_ms = uv_now(o->encryption->loop);
    char text[2 * ENCRYPTION_ID_BYTES + 1] = "the current one";

    o->encryption->metrics->encryption_key_missing++;
    if (now_ms < o->tell_ms)
        return -ENOKEY;
    o->tell_ms = now_ms + MISSING_MS;
    if (id)
        snprintf(text, sizeof(text), "%016" PRIx64, __builtin_bswap64(get64(id)));
    log_warn(MODULE, "key-missing",
             "tenant=%s key=%s: what it has encrypted is a miss, and stays where it is", o->name,
             text);
    return -ENOKEY;
}

int encryption_key_take(struct encryption *s, const struct encryption_space *space,
                        const uint8_t *id, struct encryption_key **out)
{
    struct encryption_origin *o = origin_by(s, space->identity, space->identity_bytes);
    const struct key *from = NULL;
    struct encryption_key *k;
    int rc = 0;

    if (!o)
        return -ENOKEY;
    for (unsigned i = o->n; i > 0 && !from; i--)
        if (!id || memcmp(o->key[i - 1].id, id, ENCRYPTION_ID_BYTES) == 0)
            from = &o->key[i - 1];
    if (!from)
        return missing(o, id);
    k = derived_find(s, o, space, from->id);
    if (!k)
        rc = derived_new(s, o, from, space, &k);
    if (rc < 0)
        return rc;
    k->users++;
    *out = k;
    return 0;
}

void encryption_key_drop(struct encryption *s, struct encryption_key *k)
{
    if (--k->users > 0)
        return;
    if (!k->origin)
        derived_free(s, k);
    if (s->closing)
        encryption_free(s);
}

/* ---- sources ---- */

static void keys_free(struct key *key, unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        locked_free(key[i].secret, ENCRYPTION_KEY_BYTES);
}

static int keys_make(uint8_t secrets[ENCRYPTION_KEYS_MAX][ENCRYPTION_KEY_BYTES], unsigned n,
                     struct key *out)
{
    for (unsigned i = 0; i < n; i++) {
        out[i].secret = locked_new(ENCRYPTION_KEY_BYTES);
        if (!out[i].secret || encryption_derive(secrets[i], NULL, 0, "ucmd key id 1", NULL, 0,
                                                out[i].id, ENCRYPTION_ID_BYTES) < 0) {
            keys_free(out, i + 1);
            return -ENOMEM;
        }
        memcpy(out[i].secret, secrets[i], ENCRYPTION_KEY_BYTES);
    }
    return 0;
}

static bool has(const struct key *key, unsigned n, const uint8_t *id)
{
    while (n > 0 && memcmp(key[n - 1].id, id, ENCRYPTION_ID_BYTES) != 0)
        n--;
    return n > 0;
}

static void keys_take_over(struct encryption_origin *o, const struct key *fresh, unsigned n)
{
    struct key old[ENCRYPTION_KEYS_MAX];
    unsigned old_n = o->n, added = 0, gone = 0;

    KILL_POINT("keys-read");
    memcpy(old, o->key, sizeof(old));
    memcpy(o->key, fresh, n * sizeof(*fresh));
    o->n = n;
    for (unsigned i = 0; i < n; i++)
        added += !has(old, old_n, fresh[i].id);
    for (unsigned i = 0; i < old_n; i++) {
        if (has(fresh, n, old[i].id))
            continue;
        derived_drop(o->encryption, o, old[i].id);
        gone++;
    }
    keys_free(old, old_n);
    KILL_POINT("keys-taken");
    log_info(MODULE, "keys-read", "tenant=%s keys=%u added=%u forgotten=%u current=%016" PRIx64,
             o->name, n, added, gone, __builtin_bswap64(get64(o->key[n - 1].id)));
}

static void source_done_cb(struct source *source, int status, const char *why)
{
    struct encryption_origin *o =
        (struct encryption_origin *)((char *)source - offsetof(struct encryption_origin, source));
    uint8_t(*secrets)[ENCRYPTION_KEY_BYTES] =
        locked_new(ENCRYPTION_KEYS_MAX * ENCRYPTION_KEY_BYTES);
    struct encryption *s = o->encryption;
    struct key fresh[ENCRYPTION_KEYS_MAX];
    char text[160] = "";
    unsigned n = 0;

    if (status == 0)
        status = secrets ? source_parse(source->text, source->n, secrets, &n, text) : -ENOMEM;
    else
        snprintf(text, sizeof(text), "%s", why);
    if (status == 0)
        status = keys_make(secrets, n, fresh);
    OPENSSL_cleanse(source->text, SOURCE_BYTES);
    locked_free(secrets, ENCRYPTION_KEYS_MAX * ENCRYPTION_KEY_BYTES);
    s->busy--;
    if (s->closing) {
        keys_free(fresh, status == 0 ? n : 0);
        encryption_free(s);
        return;
    }
    o->error[0] = '\0';
    if (status == 0)
        keys_take_over(o, fresh, n);
    else
        snprintf(o->error, sizeof(o->error), "%s",
                 status == -ENOMEM ? "no locked memory for them" : text);
    if (status < 0)
        log_error(MODULE, "keys-not-read", "tenant=%s source=\"%s\" reason=\"%s\" keys=%u", o->name,
                  source->from, o->error, o->n);
}

static void origin_read(struct encryption_origin *o)
{
    if (o->n == 0 && !o->error[0])
        snprintf(o->error, sizeof(o->error), "they are being read");
    o->encryption->busy++;
    source_read(&o->source);
}

int encryption_reload(struct encryption *s, const char *tenant)
{
    unsigned n = 0;

    for (unsigned i = 0; s && i < s->n; i++) {
        struct encryption_origin *o = &s->origin[i];

        if (tenant && strcmp(o->name, tenant) != 0)
            continue;
        n++;
        if (!o->source.busy)
            origin_read(o);
    }
    return n > 0 || !tenant ? (int)n : -ENOENT;
}

bool encryption_view(const struct encryption *s, unsigned i, struct encryption_tenant_view *out)
{
    const struct encryption_origin *o = s && i < s->n ? &s->origin[i] : NULL;

    if (!o)
        return false;
    *out = (struct encryption_tenant_view){.tenant = o->name,
                                           .source = o->source.from,
                                           .error = o->error,
                                           .keys = o->n,
                                           .reading = o->source.busy};
    for (unsigned k = 0; k < o->n; k++)
        memcpy(out->id[k], o->key[k].id, ENCRYPTION_ID_BYTES);
    return true;
}

bool encryption_problem(const struct encryption *s, const char *tenant,
                        char text[ENCRYPTION_PROBLEM_BYTES])
{
    const struct encryption_origin *o = NULL,
                                   *own = tenant ? origin_of(s, tenant, strlen(tenant)) : NULL;

    for (unsigned i = 0; s && i < s->n && !o; i++)
        o = s->origin[i].error[0] ? &s->origin[i] : NULL;
    if (!o)
        return false;
    if (own && own->error[0])
        o = own;
    if (tenant && o != own)
        snprintf(text, ENCRYPTION_PROBLEM_BYTES, "keys of another tenant can't be read");
    else
        snprintf(text, ENCRYPTION_PROBLEM_BYTES, "keys of tenant %s: %s%s", o->name, o->error,
                 o->n > 0 ? "; the keys read before are used"
                          : "; nothing of it is stored or read below DRAM");
    return true;
}

/* ---- opening and closing ---- */

static int origin_init(struct encryption *s, struct encryption_origin *o, const char *item,
                       uint64_t timeout_ms)
{
    size_t n = source_name_bytes(item);

    o->encryption = s;
    memcpy(o->name, item, n);
    o->source.loop = s->loop;
    o->source.from = item + n + 1;
    o->source.timeout_ms = timeout_ms;
    o->source.done_cb = source_done_cb;
    o->source.text = locked_new(SOURCE_BYTES);
    return o->source.text ? 0 : -ENOMEM;
}

/* Nobody is served yet, and the keys are there, as a rule, before the first request. */
static void files_await(struct encryption *s)
{
    uint64_t until_ms = uv_hrtime() / 1000000 + FILES_MS;

    for (unsigned i = 0; i < s->n; i++) {
        uint64_t now_ms = uv_hrtime() / 1000000;

        source_wait(&s->origin[i].source, now_ms < until_ms ? until_ms - now_ms : 0);
    }
}

int encryption_open(uv_loop_t *loop, const struct config *config, struct metrics *metrics,
                    struct encryption **out)
{
    const struct config_list *list = &config->encryption_tenants;
    struct encryption *s;
    int rc;

    *out = NULL;
    if (list->n == 0)
        return 0;
    rc = locked_open(list->n);
    s = rc == 0 ? calloc(1, sizeof(*s)) : NULL;
    if (!s)
        return -ENOMEM;
    s->loop = loop;
    s->metrics = metrics;
    s->plaintext = config->encryption_read_plaintext;
    s->origin = calloc(list->n, sizeof(*s->origin));
    for (size_t i = 0; s->origin && i < list->n && rc == 0; i++, s->n++)
        rc = origin_init(s, &s->origin[i], list->item[i], config->encryption_timeout_ms);
    if (!s->origin || rc < 0) {
        encryption_free(s);
        return -ENOMEM;
    }
    qsort(s->origin, s->n, sizeof(*s->origin), name_compare);
    for (unsigned i = 0; i < s->n; i++) {
        s->others = strcmp(s->origin[i].name, "*") == 0 ? &s->origin[i] : s->others;
        origin_read(&s->origin[i]);
    }
    files_await(s);
    *out = s;
    return 0;
}

/* Once no source is being read and no key is in use. */
static void encryption_free(struct encryption *s)
{
    derived_drop(s, NULL, NULL);
    if (s->busy > 0 || s->derived_n > 0)
        return;
    for (unsigned i = 0; i < s->n; i++) {
        keys_free(s->origin[i].key, s->origin[i].n);
        locked_free(s->origin[i].source.text, SOURCE_BYTES);
    }
    free(s->origin);
    free(s);
    encryption_memory_drop();
}

void encryption_close(struct encryption *s)
{
    if (!s)
        return;
    s->closing = true;
    s->busy++; /* a source that ends now must not free it */
    for (unsigned i = 0; i < s->n; i++)
        source_stop(&s->origin[i].source);
    s->busy--;
    encryption_free(s);
}
