/* Policies as text. policy_table.c names each key once; reading, writing and the messages of errors
 * follow the table. Numbers are read and written by hand, since the locale of an engine's process
 * may have a comma where C has a point. */
#include "client/lib/sparse/policy.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define NAME_MAX_BYTES 32
#define DECIMALS 1000000

/* ---- names ---- */

struct word {
    const char *p;
    size_t n;
};

static struct word word_of(const char *name)
{
    return (struct word){name, strlen(name)};
}

static bool word_is(struct word w, const char *name)
{
    return strlen(name) == w.n && memcmp(name, w.p, w.n) == 0;
}

/* Letters to change, add or leave out. */
static size_t distance(struct word w, const char *name)
{
    size_t row[NAME_MAX_BYTES + 1], n = strlen(name);

    if (w.n > NAME_MAX_BYTES || n > NAME_MAX_BYTES)
        return SIZE_MAX;
    for (size_t i = 0; i <= n; i++)
        row[i] = i;
    for (size_t j = 0; j < w.n; j++) {
        size_t corner = row[0];

        row[0] = j + 1;
        for (size_t i = 0; i < n; i++) {
            size_t best = corner + (w.p[j] != name[i]);

            corner = row[i + 1];
            best = best < corner + 1 ? best : corner + 1;
            row[i + 1] = best < row[i] + 1 ? best : row[i] + 1;
        }
    }
    return row[n];
}

/* Names, for a message: only the nearest if one is near, else all. */
struct names {
    char all[400];
    const char *near;
    size_t least;
};

static void names_add(struct names *out, struct word wrong, const char *name)
{
    size_t at = strlen(out->all), d = distance(wrong, name);

    snprintf(out->all + at, sizeof out->all - at, "%s%s", at > 0 ? ", " : "", name);
    if (out->near == NULL || d < out->least) {
        out->near = name;
        out->least = d;
    }
}

static int names_refuse(const struct names *names, const char *what, struct word wrong)
{
    int shown = wrong.n < NAME_MAX_BYTES ? (int)wrong.n : NAME_MAX_BYTES;

    if (names->least <= 1 + wrong.n / 3)
        return client_fail(UCM_EINVALID, "%s \"%.*s\" is not known; did you mean \"%s\"?", what,
                           shown, wrong.p, names->near);
    return client_fail(UCM_EINVALID, "%s \"%.*s\" is not known; there are %s", what, shown, wrong.p,
                       names->all);
}

static const struct policy_preset *find_preset(struct word name)
{
    for (uint32_t i = 0; i < policy_n_presets; i++)
        if (word_is(name, policy_presets[i].name))
            return &policy_presets[i];
    return NULL;
}

static int refuse_preset(struct word name)
{
    struct names names = {.near = NULL};

    for (uint32_t i = 0; i < policy_n_presets; i++)
        names_add(&names, name, policy_presets[i].name);
    return names_refuse(&names, "policy", name);
}

static const struct policy_key *find_key(struct word name)
{
    for (uint32_t i = 0; i < policy_n_keys; i++)
        if (word_is(name, policy_keys[i].name))
            return &policy_keys[i];
    return NULL;
}

static int refuse_key(struct word name)
{
    struct names names = {.near = NULL};

    for (uint32_t i = 0; i < policy_n_keys; i++)
        names_add(&names, name, policy_keys[i].name);
    return names_refuse(&names, "key", name);
}

/* ---- numbers ---- */

/* Digits, and with `point` up to 6 decimals. */
static bool read_number(struct word w, bool point, double *value, uint64_t *whole)
{
    uint64_t n = 0, scale = 0;

    if (w.n == 0)
        return false;
    for (size_t i = 0; i < w.n; i++) {
        if (point && w.p[i] == '.' && scale == 0 && w.n > 1) {
            scale = 1;
            continue;
        }
        if (w.p[i] < '0' || w.p[i] > '9' || scale == DECIMALS)
            return false;
        if (__builtin_mul_overflow(n, 10, &n) ||
            __builtin_add_overflow(n, (uint64_t)(w.p[i] - '0'), &n))
            return false;
        scale *= 10;
    }
    *value = (double)n / (double)(scale > 0 ? scale : 1);
    *whole = n;
    return true;
}

static int write_real(char *out, size_t room, double value)
{
    uint64_t n = (uint64_t)llround(value * DECIMALS);
    int length = snprintf(out, room, "%" PRIu64 ".%06" PRIu64, n / DECIMALS, n % DECIMALS);

    while (length > 0 && (size_t)length < room && out[length - 1] == '0')
        out[--length] = '\0';
    if (length > 0 && (size_t)length < room && out[length - 1] == '.')
        out[--length] = '\0';
    return length;
}

static int refuse_range(const struct policy_key *k, struct word value)
{
    int shown = value.n < 40 ? (int)value.n : 40;
    char least[32], most[32];

    if (k->type == POLICY_SEED)
        return client_fail(UCM_EINVALID, "%s is \"%.*s\"; a whole number below 2^64 is wanted",
                           k->name, shown, value.p);
    write_real(least, sizeof least, k->least);
    write_real(most, sizeof most, k->most);
    return client_fail(UCM_EINVALID, "%s is \"%.*s\"; a %s from %s to %s is wanted", k->name, shown,
                       value.p, k->type == POLICY_REAL ? "number such as 0.25" : "whole number",
                       least, most);
}

/* ---- values ---- */

static int set_name(const struct policy_key *k, struct word value, uint32_t *out)
{
    struct names names = {.near = NULL};
    char what[NAME_MAX_BYTES + 16];

    for (uint32_t i = 0; k->names[i] != NULL; i++) {
        if (k->names[i][0] == '\0')
            continue;
        if (word_is(value, k->names[i])) {
            *out = i;
            return 0;
        }
        names_add(&names, value, k->names[i]);
    }
    snprintf(what, sizeof what, "%s", k->name);
    return names_refuse(&names, what, value);
}

static int set_value(struct ucm_policy *p, const struct policy_key *k, struct word value)
{
    void *field = (char *)p + k->at;
    uint64_t whole;
    double number;

    if (k->type == POLICY_NAME)
        return set_name(k, value, field);
    if (!read_number(value, k->type == POLICY_REAL, &number, &whole) ||
        (k->type != POLICY_SEED && (number < k->least || number > k->most)))
        return refuse_range(k, value);
    if (k->type == POLICY_REAL)
        memcpy(field, &number, sizeof number);
    else if (k->type == POLICY_SEED)
        memcpy(field, &whole, sizeof whole);
    else
        *(uint32_t *)field = (uint32_t)whole;
    return 0;
}

static bool same_value(const struct policy_key *k, const struct ucm_policy *a,
                       const struct ucm_policy *b)
{
    size_t bytes = k->type == POLICY_SEED || k->type == POLICY_REAL ? 8 : 4;

    return memcmp((const char *)a + k->at, (const char *)b + k->at, bytes) == 0;
}

static int write_value(const struct policy_key *k, const struct ucm_policy *p, char *out,
                       size_t room)
{
    const void *field = (const char *)p + k->at;
    uint64_t seed;
    double real;

    switch (k->type) {
    case POLICY_NAME:
        return snprintf(out, room, "%s", k->names[*(const uint32_t *)field]);
    case POLICY_REAL:
        memcpy(&real, field, sizeof real);
        return write_real(out, room, real);
    case POLICY_SEED:
        memcpy(&seed, field, sizeof seed);
        return snprintf(out, room, "%" PRIu64, seed);
    default:
        return snprintf(out, room, "%" PRIu32, *(const uint32_t *)field);
    }
}

/* ---- what fits together ---- */

static bool has_effect(const struct ucm_policy *p, const struct policy_key *k)
{
    return (k->summaries == 0 || k->summaries >> p->summary & 1) &&
           (k->choices == 0 || k->choices >> p->choice & 1);
}

static int check_ranges(const struct ucm_policy *p)
{
    char text[64];

    for (uint32_t i = 0; i < policy_n_keys; i++) {
        const struct policy_key *k = &policy_keys[i];
        const void *field = (const char *)p + k->at;
        double value = 0;
        uint32_t count = 0;

        if (k->type == POLICY_SEED || !has_effect(p, k))
            continue;
        if (k->type == POLICY_REAL)
            memcpy(&value, field, sizeof value);
        else
            value = count = *(const uint32_t *)field;
        if (k->type == POLICY_NAME) {
            for (uint32_t j = 0; j <= count; j++)
                if (k->names[j] == NULL)
                    return client_fail(UCM_EINVALID, "%s %u is not known", k->name, count);
            continue;
        }
        if (!(value >= k->least && value <= k->most)) {
            snprintf(text, sizeof text, "%.6g", value);
            return refuse_range(k, word_of(text));
        }
    }
    return 0;
}

static bool estimates(const struct ucm_policy *p)
{
    return p->summary == UCM_SPARSE_STATS || (p->summary == UCM_SPARSE_TOKENS && p->rest > 0);
}

static int check_choice(const struct ucm_policy *p)
{
    if (p->choice == UCM_SPARSE_CHOICE_MASS &&
        (!estimates(p) || p->reduce == UCM_SPARSE_REDUCE_SOFTMAX))
        return client_fail(UCM_EINVALID, "choice mass wants scores that are logarithms of mass: "
                                         "reduce=max or mean, and summary=stats, or summary=tokens "
                                         "with rest=1");
    if (p->choice == UCM_SPARSE_CHOICE_ESTIMATED && !estimates(p))
        return client_fail(UCM_EINVALID, "choice estimated wants a summary that estimates mass: "
                                         "summary=stats, or summary=tokens with rest=1");
    if (p->choice == UCM_SPARSE_CHOICE_CERTIFIED && p->summary != UCM_SPARSE_BOX)
        return client_fail(UCM_EINVALID, "choice certified wants a summary that bounds scores: "
                                         "summary=box");
    if (p->goal > 0 && !estimates(p))
        return client_fail(UCM_EINVALID, "goal wants a summary that estimates mass: summary=stats, "
                                         "or summary=tokens with rest=1; goal=0 is a fixed top k");
    if (p->goal > 0 && p->choice != UCM_SPARSE_CHOICE_TOPK)
        return client_fail(UCM_EINVALID, "goal is of choice=topk; the others have eps");
    return 0;
}

int ucm_policy_check(const struct ucm_policy *p)
{
    int r;

    if (!p)
        return client_fail(UCM_EINVALID, "policy is NULL");
    if (p->summary < UCM_SPARSE_MEAN || p->summary > UCM_SPARSE_TOKENS)
        return client_fail(UCM_EINVALID, "summary %u is not known", p->summary);
    r = check_ranges(p);
    if (r)
        return r;
    if (p->summary == UCM_SPARSE_HASH && p->bits != 64 && p->bits != 128 && p->bits != 256)
        return client_fail(UCM_EINVALID, "bits is %u; 64, 128 and 256 are allowed", p->bits);
    if (p->summary == UCM_SPARSE_SUBMEAN && p->keep == 0)
        return client_fail(UCM_EINVALID, "keep is 0: no channel is left to compare");
    if (p->metric == UCM_SPARSE_L2 &&
        (p->summary == UCM_SPARSE_BOX || p->summary == UCM_SPARSE_HASH || estimates(p)))
        return client_fail(UCM_EINVALID, "metric l2 is of summaries mean, submean, and tokens with "
                                         "rest=0");
    if (p->metric == UCM_SPARSE_ROUNDED && !policy_rounds(p))
        return client_fail(UCM_EINVALID, "metric rounded is of summaries mean, submean and tokens");
    if (p->limit > 0 && p->limit < p->min_blocks)
        return client_fail(UCM_EINVALID, "limit is %u, less than min_blocks, which is %u", p->limit,
                           p->min_blocks);
    return check_choice(p);
}

/* Keys that were given and have no effect are mistakes. */
static int check_effect(const struct ucm_policy *p, const struct policy_key *k)
{
    const struct policy_key *key = find_key(word_of(k->summaries != 0 ? "summary" : "choice"));
    uint32_t with = k->summaries != 0 ? k->summaries : k->choices;
    uint32_t now = k->summaries != 0 ? p->summary : p->choice;
    char names[64] = "";

    if (has_effect(p, k))
        return 0;
    for (uint32_t i = 0; key->names[i] != NULL; i++)
        if (with >> i & 1)
            snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s",
                     names[0] != '\0' ? " or " : "", key->names[i]);
    return client_fail(UCM_EINVALID, "%s has no effect with %s=%s; it is of %s", k->name, key->name,
                       key->names[now], names);
}

/* ---- reading and writing ---- */

static struct word cut(const char **text, char until)
{
    size_t n = strcspn(*text, (char[]){until, '\0'});
    struct word w = {*text, n};

    *text += n;
    return w;
}

/* One pass over "key=value,...". The first sets `summary` only, since the others' defaults depend
 * on it. */
static int read_keys(struct ucm_policy *p, const char *text, bool summary)
{
    bool ratio = false, tokens = false;

    while (*text != '\0') {
        struct word pair = cut(&text, ','), name = {pair.p, 0}, value;
        const char *equals = memchr(pair.p, '=', pair.n);
        const struct policy_key *k;
        int r;

        if (*text == ',' && *++text == '\0')
            return client_fail(UCM_EINVALID, "the policy ends in a comma");
        if (equals == NULL)
            return client_fail(UCM_EINVALID, "\"%.*s\" is no key=value",
                               (int)(pair.n < 40 ? pair.n : 40), pair.p);
        name.n = (size_t)(equals - pair.p);
        value = (struct word){equals + 1, pair.n - name.n - 1};
        k = find_key(name);
        if (k == NULL)
            return refuse_key(name);
        if ((k->at == offsetof(struct ucm_policy, summary)) != summary)
            continue;
        r = set_value(p, k, value);
        if (r)
            return r;
        if (summary)
            policy_summary_defaults(p);
        if (k->at == offsetof(struct ucm_policy, sparse_ratio))
            ratio = true;
        if (k->at == offsetof(struct ucm_policy, topk_tokens))
            tokens = p->topk_tokens > 0;
    }
    if (ratio && tokens)
        return client_fail(UCM_EINVALID, "topk_tokens counts in place of sparse_ratio: give one");
    if (ratio)
        p->topk_tokens = 0; /* of the preset */
    return 0;
}

static int check_effects(const struct ucm_policy *p, const char *text)
{
    while (*text != '\0') {
        struct word pair = cut(&text, ',');
        int r;

        pair.n = (size_t)((const char *)memchr(pair.p, '=', pair.n) - pair.p);
        r = check_effect(p, find_key(pair));
        if (r)
            return r;
        text += *text == ',';
    }
    return 0;
}

/* Both passes. */
static int apply(struct ucm_policy *p, const char *keys)
{
    int r = read_keys(p, keys, true);

    return r ? r : read_keys(p, keys, false);
}

/* tests/unit/client/test_client_policy.c checks that the tables are right, so this refuses
 * nothing. */
static void preset_policy(const struct policy_preset *preset, struct ucm_policy *out)
{
    memset(out, 0, sizeof *out);
    for (uint32_t i = 0; i < policy_n_keys; i++)
        (void)set_value(out, &policy_keys[i], word_of(policy_keys[i].value));
    policy_summary_defaults(out);
    (void)apply(out, preset->keys);
    snprintf(out->preset, sizeof out->preset, "%s", preset->name);
}

int ucm_policy_parse(const char *text, struct ucm_policy *out)
{
    const struct policy_preset *preset;
    struct ucm_policy p;
    struct word name;
    int r;

    if (!text || !out)
        return client_fail(UCM_EINVALID, "text or out is NULL");
    name = cut(&text, ':');
    preset = find_preset(name);
    if (preset == NULL)
        return refuse_preset(name);
    preset_policy(preset, &p);
    text += *text == ':';
    r = apply(&p, text);
    if (r == 0)
        r = check_effects(&p, text);
    if (r == 0)
        r = ucm_policy_check(&p);
    if (r == 0)
        *out = p;
    return r;
}

/* Appends key=value. */
static void put(char *text, size_t room, size_t *at, const struct policy_key *k,
                const struct ucm_policy *p)
{
    char mark = memchr(text, ':', *at < room ? *at : room) != NULL ? ',' : ':';
    char value[NAME_MAX_BYTES];
    int n;

    write_value(k, p, value, sizeof value);
    n = snprintf(*at < room ? text + *at : NULL, *at < room ? room - *at : 0, "%c%s=%s", mark,
                 k->name, value);
    *at += (size_t)n;
}

int ucm_policy_text(const struct ucm_policy *policy, char *text, size_t room)
{
    const struct policy_preset *preset;
    struct ucm_policy base;
    size_t at;
    int r = ucm_policy_check(policy);

    if (r)
        return r;
    if (!text || memchr(policy->preset, '\0', sizeof policy->preset) == NULL)
        return client_fail(UCM_EINVALID, "text is NULL, or preset has no end");
    preset = find_preset(word_of(policy->preset));
    if (preset == NULL)
        return client_fail(UCM_EINVALID, "preset \"%s\" is not known", policy->preset);
    preset_policy(preset, &base);
    at = (size_t)snprintf(text, room, "%s", preset->name);
    if (policy->summary != base.summary) {
        base.summary = policy->summary;
        policy_summary_defaults(&base);
        put(text, room, &at, find_key(word_of("summary")), policy);
    }
    if (policy->sparse_ratio != base.sparse_ratio)
        base.topk_tokens = 0;
    for (uint32_t i = 0; i < policy_n_keys; i++)
        if (!same_value(&policy_keys[i], policy, &base) && has_effect(policy, &policy_keys[i]))
            put(text, room, &at, &policy_keys[i], policy);
    return at < room ? 0
                     : client_fail(UCM_EINVALID, "room is %zu bytes; %zu are needed", room, at + 1);
}
