/* Shared lookups: which of these keys exist, in few round trips.
 *
 * The search for the end of a chain narrows an interval: the first `lo` keys exist, key `hi` does
 * not, as far as is known. A wave asks for up to LOOKUP_WAVE keys between them, evenly spaced; the
 * first wave also asks for the first few, because most chains that do not exist at all end there.
 * The next wave begins as soon as the first missing key of the wave is known. Answers that come
 * later, also those after the deadline, go to the answer cache.
 *
 * With `per_key` every key is asked for, LOOKUP_WAVE at a time.
 *
 * A key's block may lack parts: a root lost a file, or a store evicts objects one by one. If every
 * key is asked for, and in the wave that asks for the rest of a chain, a root with the highest part
 * is asked for the others, too. A block that is not there costs one question all the same. */
#include "daemon/shared/shared_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define LOOKUP_WAVE 64u /* keys under way of one lookup */
#define LOOKUP_HEAD 4u  /* the first few */
#define ALL_KEYS LOOKUP_WAVE

struct key_state {
    uint32_t number; /* which key of the request */
    /* Finds that have not ended: of the highest part by root, then of the others by part */
    uint16_t pending;
    uint8_t found; /* a shared_root_id: where the highest part is; 0: none so far */
    bool failed;   /* a root that could have the part gave no answer */
    bool lacks;    /* another part is on no root */
    bool answered;
};

struct lookup {
    struct list link;
    struct shared *shared;
    struct shared_lookup *request;
    struct deadline deadline;
    struct list finds;                        /* under way, of find.link */
    shared_roots_mask asked, begun, answered; /* roots: usable, asked, answered */
    uint32_t lo, hi, next;
    bool chain, over;
    bool whole; /* the wave asks for all keys that are left, and for all their parts */
    struct key_state keys[LOOKUP_WAVE];
    uint32_t n_keys;           /* of a wave */
    uint8_t idle[LOOKUP_WAVE]; /* which of `keys` have had an answer; not by waves */
    uint32_t n_idle;
};

/* One part of a key on one root. Outlives the lookup when the root is late. */
struct find {
    struct shared_task task;
    struct shared *shared;
    struct lookup *lookup; /* NULL: the lookup has ended */
    struct list link;
    uint64_t hash_seed,
        removed;        /* as in struct shared when it began: purges and removals change them */
    uint32_t root, key; /* key: of lookup.keys */
    shared_roots_mask others; /* roots to ask next, if this one does not have the part */
};

static bool lookup_step(struct lookup *p);
static void lookup_end(struct lookup *p, bool late);

/* ---- one key ---- */

static bool asks_all_parts(const struct lookup *p)
{
    return p->request->part > 0 && (!p->chain || p->whole);
}

static void key_id(const struct shared_lookup *request, uint32_t number, uint32_t part,
                   struct block_file_id *id)
{
    memset(id, 0, sizeof(*id));
    memcpy(id->fingerprint, request->fingerprint, sizeof(id->fingerprint));
    memcpy(id->key, request->keys + (size_t)number * request->key_bytes, request->key_bytes);
    id->key_bytes = request->key_bytes;
    id->part = part;
}

static void find_detach(struct find *f)
{
    list_remove(&f->link);
    f->lookup = NULL;
}

/* Detaches the finds that have not ended, of one key or of ALL_KEYS. One that the backend has goes
 * on, for the answer cache; one that waits is cancelled. */
static void finds_leave(struct lookup *p, uint32_t key)
{
    struct list *next;

    for (struct list *node = p->finds.next; node != &p->finds; node = next) {
        struct find *f = LIST_ENTRY(node, struct find, link);

        next = node->next;
        if (key != ALL_KEYS && f->key != key)
            continue;
        p->keys[f->key].pending--;
        find_detach(f);
        if (f->task.state == SHARED_TASK_QUEUED &&
            shared_root_cancel(f->shared->roots[f->root], &f->task))
            free(f);
    }
}

/* As far as is known: parts of which no root has said anything are unverified. */
static bool key_there(const struct key_state *s)
{
    return s->found && !s->lacks;
}

/* Records a key's answer; without waves another key takes its turn. */
static void key_answered(struct lookup *p, uint32_t key)
{
    struct key_state *s = &p->keys[key];

    s->answered = true;
    if (key_there(s))
        p->request->answers[s->number] = s->found;
    else if (s->lacks || !s->failed)
        p->request->answers[s->number] = SHARED_MISSING;
    if (p->chain)
        return;
    if (s->pending > 0)
        finds_leave(p, key);
    p->idle[p->n_idle++] = (uint8_t)key;
}

static bool find_begin(struct lookup *p, uint32_t key, uint32_t root, shared_roots_mask others,
                       const struct block_file_id *id);

/* Asks for a part other than the highest: one root after the other, first the one that has that. */
static void part_ask(struct lookup *p, uint32_t key, uint32_t part, shared_roots_mask roots)
{
    struct key_state *k = &p->keys[key];
    bool failed = false;
    struct block_file_id id;

    key_id(p->request, k->number, part, &id);
    for (uint32_t i = 0; i < p->shared->n; i++) {
        uint32_t root = (k->found - 1 + i) % p->shared->n;
        enum shared_known known;

        if (!(roots >> root & 1))
            continue;
        roots &= ~(1u << root);
        known = shared_recall(p->shared, &id, root);
        if (known == SHARED_KNOWN_FOUND ||
            (known == SHARED_KNOWN_NOT && find_begin(p, key, root, roots, &id)))
            return;
        failed |= known == SHARED_KNOWN_NOT;
    }
    k->failed |= failed;
    k->lacks |= !failed;
}

/* The highest part is there. */
static void key_found(struct lookup *p, uint32_t key)
{
    struct key_state *k = &p->keys[key];
    struct block_file_id id;

    k->failed = false;
    if (asks_all_parts(p)) {
        if (k->pending > 0)
            finds_leave(p, key);
        key_id(p->request, k->number, p->request->part, &id);
        for (uint32_t part = 0; part < p->request->part && !k->lacks && !k->failed; part++)
            part_ask(p, key, part, shared_roots_that_may_have(p->shared, &id, p->asked));
    }
    if (k->pending == 0 || k->lacks || !asks_all_parts(p))
        key_answered(p, key);
}

/* A find of a key that has no answer yet has ended. others: roots that are to be asked for the part
 * next. */
static void key_heard(struct lookup *p, uint32_t key, uint32_t part, shared_roots_mask others,
                      int status)
{
    struct key_state *k = &p->keys[key];
    bool highest = part == p->request->part;

    if (highest && status == 0) {
        key_found(p, key);
        return;
    }
    if (!highest && status == -ENOENT)
        part_ask(p, key, part, others);
    if (k->pending == 0 || k->lacks)
        key_answered(p, key);
}

static void find_answer(struct find *f, int status)
{
    struct lookup *p = f->lookup;
    struct key_state *k = &p->keys[f->key];
    uint32_t part = f->task.op.id.part;

    find_detach(f);
    k->pending--;
    if (status == 0 || status == -ENOENT)
        p->answered |= 1u << f->root;
    else
        k->failed = true;
    /* If several roots have the key, the first decides. */
    if (!k->answered) {
        if (part == p->request->part && status == 0)
            k->found = (uint8_t)(f->root + 1);
        key_heard(p, f->key, part, f->others, status);
    }
    if (lookup_step(p))
        lookup_end(p, false);
}

/* "It exists" is not remembered when a purge began or ended meanwhile. */
static void find_remember(const struct find *f, int status)
{
    struct shared *s = f->shared;
    const struct block_file_id *id = &f->task.op.id;

    if (status == 0 && f->hash_seed == s->hash_seed)
        shared_remember_found(s, id, f->root, f->removed);
    else if (status == -ENOENT && shared_recall(s, id, f->root) != SHARED_KNOWN_MISSING)
        shared_remember(s, id, f->root, false, s->settings.negative_ms);
}

static void find_released_cb(struct shared_task *t)
{
    struct find *f = LIST_ENTRY(t, struct find, task);
    int status = shared_status_missing(t->status) ? -ENOENT : t->status;

    /* A later removal or miss overrides this answer. */
    if (status == 0 && shared_recall(f->shared, &t->op.id, f->root) == SHARED_KNOWN_MISSING)
        status = -ENOENT;
    find_remember(f, status);
    if (f->lookup)
        find_answer(f, status);
    free(f);
}

static bool find_begin(struct lookup *p, uint32_t key, uint32_t root, shared_roots_mask others,
                       const struct block_file_id *id)
{
    struct shared *s = p->shared;
    struct find *f = calloc(1, sizeof(*f));

    if (!f)
        return false;
    f->shared = s;
    f->lookup = p;
    f->hash_seed = s->hash_seed;
    f->removed = s->removed;
    f->root = root;
    f->key = key;
    f->others = others;

    f->task.class = SHARED_LOOKUP;
    f->task.who = p->request->who;
    f->task.op.verb = SHARED_FIND;
    f->task.op.id = *id;
    f->task.op.bytes = p->request->bytes_of(p->request, id->part);
    f->task.deadline_ms = shared_now(s) + s->settings.timeout_ms;
    f->task.released_cb = find_released_cb;
    if (shared_root_submit(s->roots[root], &f->task) < 0) {
        free(f);
        return false;
    }
    p->begun |= 1u << root;
    p->keys[key].pending++;
    list_push_back(&p->finds, &f->link);
    return true;
}

/* Asks those roots of which the answer cache knows nothing. */
static void key_ask(struct lookup *p, uint32_t key, uint32_t number)
{
    struct shared *s = p->shared;
    struct key_state *k = &p->keys[key];
    shared_roots_mask holders, unknown = 0;
    struct block_file_id id;

    *k = (struct key_state){.number = number};
    key_id(p->request, number, p->request->part, &id);
    holders = shared_roots_that_may_have(s, &id, p->asked);
    k->failed = holders == 0;
    for (uint32_t i = 0; i < s->n && !k->found; i++) {
        enum shared_known known;

        if (!(holders >> i & 1))
            continue;
        known = shared_recall(s, &id, i);
        if (known == SHARED_KNOWN_FOUND)
            k->found = (uint8_t)(i + 1);
        else if (known == SHARED_KNOWN_NOT)
            unknown |= 1u << i;
    }
    for (uint32_t i = 0; i < s->n && !k->found; i++)
        if (unknown >> i & 1)
            k->failed |= !find_begin(p, key, i, 0, &id);
    if (k->found)
        key_found(p, key);
    else if (k->pending == 0)
        key_answered(p, key);
}

/* ---- a chain, by waves ---- */

static bool wave_settled(const struct lookup *p)
{
    for (uint32_t i = 0; i < p->n_keys; i++) {
        const struct key_state *s = &p->keys[i];

        if (!s->answered)
            return false;
        if (!key_there(s))
            return true;
    }
    return true;
}

/* Narrows the interval by the answers, in the keys' order. */
static void wave_close(struct lookup *p)
{
    for (uint32_t i = 0; i < p->n_keys; i++) {
        const struct key_state *s = &p->keys[i];

        if (!key_there(s)) {
            p->hi = s->number;
            break;
        }
        p->request->answers[s->number] = s->found;
        p->lo = s->number + 1;
    }
    p->n_keys = 0;
    finds_leave(p, ALL_KEYS);
}

/* The i-th of `n` keys of a wave. */
static uint32_t wave_key(const struct lookup *p, uint32_t i, uint32_t n)
{
    uint32_t wide = p->hi - p->lo, head = p->lo == 0 ? LOOKUP_HEAD : 0;

    if (wide <= LOOKUP_WAVE)
        return p->lo + i;
    if (i < head)
        return i;
    /* While no key is known to be missing, the last key is asked for, too. */
    if (p->hi == p->request->n)
        return p->lo + head - 1 + (uint32_t)((uint64_t)(i - head + 1) * (wide - head) / (n - head));
    return p->lo + (uint32_t)((uint64_t)(i + 1) * wide / (n + 1));
}

static void wave_begin(struct lookup *p)
{
    uint32_t wide = p->hi - p->lo, n = wide < LOOKUP_WAVE ? wide : LOOKUP_WAVE;
    uint32_t keys[LOOKUP_WAVE];

    for (uint32_t i = 0; i < n; i++)
        keys[i] = wave_key(p, i, n);
    p->n_keys = n;
    p->whole = wide <= LOOKUP_WAVE;
    for (uint32_t i = 0; i < n; i++)
        key_ask(p, i, keys[i]);
}

static bool chain_step(struct lookup *p)
{
    for (;;) {
        if (p->n_keys > 0) {
            if (!wave_settled(p))
                return false;
            wave_close(p);
        }
        if (p->lo == p->hi)
            return true;
        wave_begin(p);
    }
}

/* ---- keys one by one ---- */

static bool key_exists(const struct shared_lookup *request, uint32_t number)
{
    return request->answers[number] != SHARED_UNKNOWN && request->answers[number] != SHARED_MISSING;
}

static bool each_step(struct lookup *p)
{
    while (p->n_idle > 0 && p->next < p->hi)
        key_ask(p, p->idle[--p->n_idle], p->next++);
    while (p->lo < p->hi && key_exists(p->request, p->lo))
        p->lo++;
    return p->chain ? p->lo == p->hi : p->next == p->hi && p->n_idle == LOOKUP_WAVE;
}

/* After the deadline: those whose highest part is there. */
static void each_close(struct lookup *p)
{
    for (uint32_t i = 0; i < LOOKUP_WAVE; i++)
        if (!p->keys[i].answered && key_there(&p->keys[i]))
            p->request->answers[p->keys[i].number] = p->keys[i].found;
    while (p->lo < p->hi && key_exists(p->request, p->lo))
        p->lo++;
}

static bool lookup_step(struct lookup *p)
{
    if (p->over)
        return false; /* its end is scheduled */
    return p->chain ? chain_step(p) : each_step(p);
}

/* ---- begin and end ---- */

static void roots_report(const struct lookup *p, bool late)
{
    for (uint32_t i = 0; i < p->shared->n; i++) {
        bool answered = p->answered >> i & 1, begun = p->begun >> i & 1;

        if (p->asked >> i & 1)
            shared_root_lookup_ended(p->shared->roots[i], answered        ? SHARED_LOOKUP_ANSWERED
                                                          : late && begun ? SHARED_LOOKUP_LATE
                                                                          : SHARED_LOOKUP_LEFT);
    }
}

static void lookup_free(struct lookup *p, bool late)
{
    deadline_disarm(p->shared->settings.deadlines, &p->deadline);
    finds_leave(p, ALL_KEYS);
    roots_report(p, late);
    list_remove(&p->link);
    p->shared->n_lookups--;
    free(p);
}

/* Keys before one that exists are taken to exist, unverified, on the same root. */
static void presume(struct shared_lookup *request)
{
    uint8_t root = SHARED_UNKNOWN;

    for (uint32_t i = request->prefix; i-- > 0;) {
        if (key_exists(request, i))
            root = request->answers[i];
        else if (request->answers[i] == SHARED_UNKNOWN)
            request->answers[i] = root;
    }
}

static void lookup_end(struct lookup *p, bool late)
{
    struct shared_lookup *request = p->request;

    if (p->n_keys > 0)
        wave_close(p);
    else if (!p->chain)
        each_close(p);
    request->prefix = p->lo;
    if (p->chain)
        presume(request);
    request->op = NULL;
    lookup_free(p, late);
    request->done_cb(request);
}

static void deadline_cb(struct deadline *d)
{
    struct lookup *p = LIST_ENTRY(d, struct lookup, deadline);

    lookup_end(p, !p->over);
}

static shared_roots_mask roots_for_lookups(struct shared *s)
{
    shared_roots_mask asked = 0;

    for (uint32_t i = 0; i < s->n; i++)
        if (shared_root_takes_lookups(s->roots[i]))
            asked |= 1u << i;
    return asked;
}

static struct lookup *lookup_new(struct shared *s, struct shared_lookup *request)
{
    struct lookup *p = calloc(1, sizeof(*p));

    if (!p)
        return NULL;
    p->shared = s;
    p->request = request;
    p->asked = roots_for_lookups(s);
    p->hi = request->n;
    p->chain = !request->per_key;
    list_init(&p->finds);
    for (uint32_t i = 0; i < LOOKUP_WAVE; i++)
        p->idle[p->n_idle++] = (uint8_t)(LOOKUP_WAVE - 1 - i);
    return p;
}

/* No root was asked, and no key exists. */
static bool nothing_found(const struct lookup *p)
{
    for (uint32_t i = 0; p->over && i < p->request->n; i++)
        if (key_exists(p->request, i))
            return false;
    return p->over;
}

int shared_lookup(struct shared *s, struct shared_lookup *request)
{
    struct lookup *p;

    if (s->n_lookups >= SHARED_LOOKUPS_MAX)
        return -EAGAIN;
    p = lookup_new(s, request);
    if (!p)
        return -ENOMEM;
    memset(request->answers, SHARED_UNKNOWN, request->n);
    request->prefix = 0;
    s->settings.metrics->shared_probes++;
    s->n_lookups++;
    list_push_back(&s->lookups, &p->link);
    p->over = lookup_step(p);
    if (nothing_found(p)) {
        lookup_free(p, false);
        return -ENOENT;
    }
    deadline_arm(s->settings.deadlines, &p->deadline,
                 p->over ? shared_now(s) : request->deadline_ms, deadline_cb);
    request->op = p;
    return 0;
}

void shared_lookup_cancel(struct shared *s, struct shared_lookup *request)
{
    struct lookup *p = request->op;

    (void)s;
    if (!p)
        return;
    request->op = NULL;
    lookup_free(p, false);
}
