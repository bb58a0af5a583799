/* The replay: what hosts hold, what the shared tier holds, and who finds what. */
#include "tests/bench/scale_fleet.h"

#include <stdlib.h>
#include <string.h>

#define LOW_PERCENT 90u /* collection brings the shared tier there */

static void *zeroed(size_t n, size_t size)
{
    void *p = calloc(n > 0 ? n : 1, size);

    if (p == NULL)
        abort();
    return p;
}

/* ---- what hosts have ---- */

static uint64_t key_of(const struct fleet *x, uint32_t host, uint64_t run)
{
    return host * x->n_runs + run;
}

static uint32_t *slot_of(struct fleet *x, uint64_t key)
{
    return &x->table[fleet_mix(key) & x->table_mask];
}

struct entry *fleet_find(struct fleet *x, uint32_t host, uint64_t run)
{
    uint64_t key = key_of(x, host, run);

    for (uint32_t i = *slot_of(x, key); i != 0; i = x->entries[i].chain)
        if (x->entries[i].key == key)
            return &x->entries[i];
    return NULL;
}

static void table_grow(struct fleet *x)
{
    uint64_t n = x->table_mask > 0 ? 2 * (x->table_mask + 1) : 1024;

    free(x->table);
    x->table = zeroed(n, sizeof(*x->table));
    x->table_mask = n - 1;
    for (uint32_t i = 1; i < x->n_entries; i++) {
        struct entry *e = &x->entries[i];
        uint32_t *slot = slot_of(x, e->key);

        if (e->n == 0 && !e->known)
            continue; /* unused */
        e->chain = *slot;
        *slot = i;
    }
}

static struct entry *entry_new(struct fleet *x, uint32_t host, uint64_t run)
{
    uint64_t key = key_of(x, host, run);
    uint32_t at = x->unused, *slot;

    if (at != 0) {
        x->unused = x->entries[at].behind;
    } else {
        if (x->n_entries >= x->cap_entries) {
            x->cap_entries = x->cap_entries > 0 ? x->cap_entries / 2 * 3 : 1024;
            x->entries = realloc(x->entries, x->cap_entries * sizeof(*x->entries));
            if (x->entries == NULL)
                abort();
        }
        at = x->n_entries++;
        x->entries[at] = (struct entry){0};
        if (x->n_entries > x->table_mask)
            table_grow(x);
    }
    slot = slot_of(x, key);
    x->entries[at] = (struct entry){.key = key, .chain = *slot};
    *slot = at;
    return &x->entries[at];
}

static void entry_free(struct fleet *x, struct entry *e)
{
    uint32_t at = (uint32_t)(e - x->entries), *i = slot_of(x, e->key);

    while (*i != at)
        i = &x->entries[*i].chain;
    *i = e->chain;
    *e = (struct entry){.behind = x->unused};
    x->unused = at;
}

static enum scale_list list_of(const struct entry *e)
{
    return e->d > 0 ? LIST_DRAM : e->n > 0 ? LIST_NVME : LIST_NOTED;
}

static void list_remove(struct fleet *x, struct host *h, struct entry *e)
{
    enum scale_list l = list_of(e);

    *(e->before ? &x->entries[e->before].behind : &h->first[l]) = e->behind;
    *(e->behind ? &x->entries[e->behind].before : &h->last[l]) = e->before;
}

static void list_put_first(struct fleet *x, struct host *h, struct entry *e)
{
    enum scale_list l = list_of(e);
    uint32_t at = (uint32_t)(e - x->entries);

    e->before = 0;
    e->behind = h->first[l];
    *(e->behind ? &x->entries[e->behind].before : &h->last[l]) = at;
    h->first[l] = at;
}

static uint16_t length_of(const struct fleet *x, uint64_t run)
{
    uint32_t common = x->t->n_common, own = x->t->n_runs - common;

    return x->length[run < common ? run : common + (run - common) % own];
}

static bool on_share(const struct fleet *x, uint64_t run)
{
    return x->stored[run] != 0;
}

/* A tier let go of a run's last block: the tier below has it now, or the host knows it no more. Off all lists. */
static void entry_falls(struct fleet *x, struct host *h, struct entry *e)
{
    if (e->n == 0 && !e->known) {
        entry_free(x, e);
        return;
    }
    if (e->n == 0)
        h->noted += length_of(x, e->key % x->n_runs);
    list_put_first(x, h, e);
}

/* Of the run that was not used for longest, its last blocks first. */
static void dram_evict(struct fleet *x, struct host *h)
{
    while (h->dram > x->f->dram && h->last[LIST_DRAM] != 0) {
        struct entry *e = &x->entries[h->last[LIST_DRAM]];
        uint64_t over = h->dram - x->f->dram;
        uint16_t d = over < e->d ? (uint16_t)(e->d - over) : 0;

        if (d == 0)
            list_remove(x, h, e);
        h->dram -= (uint64_t)(e->d - d);
        e->d = d & 0x7fff;
        if (x->f->nvme == 0) {
            h->held -= (uint64_t)(e->n - d);
            e->n = d;
        }
        if (d == 0)
            entry_falls(x, h, e);
    }
}

static void nvme_evict(struct fleet *x, struct host *h)
{
    while (x->f->nvme > 0 && h->held > x->f->nvme) {
        uint32_t at = h->last[LIST_NVME] != 0 ? h->last[LIST_NVME] : h->last[LIST_DRAM];
        struct entry *e = &x->entries[at];
        uint64_t over = h->held - x->f->nvme, most = (uint64_t)(e->n - e->d);
        uint16_t n = (uint16_t)(over < most ? over : most);

        if (n == 0)
            return; /* all of it is in DRAM */
        if (e->n == n)
            list_remove(x, h, e);
        e->n = (uint16_t)(e->n - n);
        h->held -= n;
        if (e->n == 0)
            entry_falls(x, h, e);
    }
}

static void noted_evict(struct fleet *x, struct host *h)
{
    while (h->noted > x->f->noted && h->last[LIST_NOTED] != 0) {
        struct entry *e = &x->entries[h->last[LIST_NOTED]];

        list_remove(x, h, e);
        h->noted -= length_of(x, e->key % x->n_runs);
        entry_free(x, e);
    }
}

/* Brings the request's runs into DRAM; its head becomes the one that was used last. */
static void path_touch(struct fleet *x, uint32_t host)
{
    struct host *h = &x->hosts[host];

    for (uint32_t i = x->path_n; i-- > 0;) {
        struct entry *e = fleet_find(x, host, x->path[i]);

        if (e == NULL) {
            e = entry_new(x, host, x->path[i]);
        } else {
            list_remove(x, h, e);
            if (e->n == 0)
                h->noted -= x->blocks[i];
        }
        h->dram += (uint64_t)(x->blocks[i] - e->d);
        h->held += (uint64_t)(x->blocks[i] - e->n);
        e->n = x->blocks[i];
        e->d = x->blocks[i] & 0x7fff;
        e->known = x->knows[i];
        list_put_first(x, h, e);
    }
    dram_evict(x, h);
    nvme_evict(x, h);
    noted_evict(x, h);
}

/* ---- the shared tier ---- */

static void op_count(struct fleet *x, enum scale_op op, uint64_t n)
{
    x->ops[op] += n;
}

static void second_ends(struct fleet *x)
{
    for (int op = 0; op < SCALE_OPS; op++) {
        x->out->ops[op] += x->ops[op];
        x->out->worst[op] = x->ops[op] > x->out->worst[op] ? x->ops[op] : x->out->worst[op];
        x->ops[op] = 0;
    }
    x->out->seconds++;
}

/* Others find it once it has settled. */
static bool settled(const struct fleet *x, uint64_t run)
{
    return on_share(x, run) && x->stored[run] <= x->now + 1 &&
           x->now + 1 - x->stored[run] >= (x->f->settle_ms * SCALE_STEPS + 999) / 1000;
}

static void run_write(struct fleet *x, uint32_t i)
{
    if (on_share(x, x->path[i])) {
        op_count(x, SCALE_AGAIN, x->blocks[i]);
    } else {
        op_count(x, SCALE_WRITE, x->blocks[i]);
        x->stored[x->path[i]] = x->now + 1;
        x->out->stored += x->blocks[i];
    }
    x->knows[i] = true;
}

/* The oldest go first, until the tier is at LOW_PERCENT. */
static void collect(struct fleet *x)
{
    uint64_t *of_step = zeroed(x->now + 2, sizeof(*of_step)),
             much = x->f->capacity / 100 * LOW_PERCENT, sum;
    uint32_t cut = 0;

    for (uint64_t r = 0; r < x->n_runs; r++)
        of_step[x->stored[r]] += x->stored[r] != 0 ? length_of(x, r) : 0;
    for (sum = x->out->stored; sum > much && cut <= x->now; cut++)
        sum -= of_step[cut + 1];
    for (uint64_t r = 0; r < x->n_runs; r++)
        if (x->stored[r] != 0 && x->stored[r] <= cut)
            x->stored[r] = 0;
    x->out->removed += x->out->stored - sum;
    x->out->stored = sum;
    free(of_step);
}

/* ---- a request ---- */

/* Where the search of the prefix is: `at` the first run that is not found whole, of which `have` blocks are. */
struct progress {
    uint32_t at, have;
};

/* What the host has, or knows to be on the shared tier, from the head on. */
static struct progress local_prefix(struct fleet *x, uint32_t host)
{
    struct progress p = {0, 0};

    for (; p.at < x->path_n; p.at++) {
        const struct entry *e = fleet_find(x, host, x->path[p.at]);
        uint32_t below;

        if (e == NULL)
            break;
        x->out->dram += e->d;
        x->out->nvme += (uint64_t)(e->n - e->d);
        below = (uint32_t)(x->blocks[p.at] - e->n);
        x->knows[p.at] = e->known;
        if (below > 0 && e->known && on_share(x, x->path[p.at])) {
            x->out->shared += below;
            op_count(x, SCALE_READ, below);
        } else if (below > 0) {
            x->out->lost += e->known;
            op_count(x, SCALE_READ, e->known);
            x->knows[p.at] = false;
            p.have = e->n;
            break;
        } else if (!e->known && x->f->admission == SCALE_REUSE &&
                   x->f->capacity != SCALE_NO_SHARE) {
            run_write(x, p.at);
        }
    }
    return p;
}

/* Asks the shared tier for what is missing. Returns how many blocks of the missing ones it found, one behind the other. */
static uint32_t shared_prefix(struct fleet *x, uint32_t host, struct progress from)
{
    uint32_t missing = 0, there = 0;
    bool whole = true;
    struct scale_probe p;

    for (uint32_t i = from.at; i < x->path_n; i++) {
        const struct entry *e = i == from.at ? NULL : fleet_find(x, host, x->path[i]);
        uint32_t n = x->blocks[i] - (i == from.at ? from.have : 0);

        if (e != NULL && (e->n == x->blocks[i] || e->known))
            continue; /* not asked for */
        whole = whole && settled(x, x->path[i]);
        missing += n;
        there += whole ? n : 0;
    }
    p = scale_probe(missing, there, x->f->waves, x->f->first_wave);
    x->out->lookups++;
    x->out->lookups_missed += there == 0;
    x->out->finds_missed += there == 0 ? p.finds : 0;
    x->out->rounds[p.rounds < SCALE_WAVES ? p.rounds : SCALE_WAVES - 1]++;
    x->out->late += there - p.found;
    op_count(x, SCALE_FIND, p.finds);
    return p.found;
}

/* Reads `found` blocks behind the prefix, and what the host has between them. Returns the runs that are whole then. */
static struct progress shared_read(struct fleet *x, uint32_t host, struct progress p,
                                   uint32_t found)
{
    for (; p.at < x->path_n; p.at++, p.have = 0) {
        const struct entry *e = fleet_find(x, host, x->path[p.at]);
        uint32_t n = x->blocks[p.at] - p.have;

        bool known = e != NULL && e->known && on_share(x, x->path[p.at]);

        if (p.have == 0 && e != NULL && (e->n == x->blocks[p.at] || known)) {
            x->out->dram += e->d;
            x->out->nvme += (uint64_t)(e->n - e->d);
            x->out->shared += n - e->n;
            op_count(x, SCALE_READ, n - e->n);
            x->knows[p.at] = known;
            continue;
        }
        if (found < n)
            break;
        found -= n;
        x->out->shared += n;
        op_count(x, SCALE_READ, n);
        x->knows[p.at] = true;
    }
    x->out->shared += found; /* a part of a run: lookups that ended early */
    op_count(x, SCALE_READ, found);
    p.have += found;
    return p;
}

/* The engine computes the rest, and the host stores what of it is not there. */
static void rest_store(struct fleet *x, uint32_t host, struct progress p)
{
    for (uint32_t i = p.at; i < x->path_n; i++) {
        const struct entry *e = fleet_find(x, host, x->path[i]);

        x->out->computed += (uint64_t)(x->blocks[i] - (i == p.at ? p.have : 0));
        x->knows[i] = e != NULL && e->known && on_share(x, x->path[i]);
        if (!x->knows[i] && x->f->capacity != SCALE_NO_SHARE &&
            (x->f->admission == SCALE_ALL || e != NULL))
            run_write(x, i);
    }
}

static void request_run(struct fleet *x, uint32_t copy, const struct scale_request *r)
{
    const struct scale_traffic *t = x->t;
    uint32_t n = 0, host;
    uint64_t blocks = 0;
    struct progress p;

    for (uint32_t k = r->run; k != SCALE_NONE; k = t->runs[k].parent)
        n++;
    x->path_n = n;
    for (uint32_t k = r->run; k != SCALE_NONE; k = t->runs[k].parent) {
        const struct scale_run *run = &t->runs[k];
        uint64_t own = t->n_runs - t->n_common;

        n--;
        x->path[n] = run->common ? run->number : t->n_common + copy * own + run->number;
        x->blocks[n] = run->blocks;
        x->head[n] = run->common && t->n_common < t->n_runs;
        x->knows[n] = false;
        blocks += run->blocks;
    }
    host = fleet_route(x, (uint64_t)copy << 32 | r->session, blocks);
    x->out->requests++;
    x->out->references += blocks;
    p = local_prefix(x, host);
    if (p.at < x->path_n && x->f->capacity != SCALE_NO_SHARE)
        p = shared_read(x, host, p, shared_prefix(x, host, p));
    rest_store(x, host, p);
    path_touch(x, host);
}

/* ---- all of it ---- */

static void fleet_init(struct fleet *x)
{
    const struct scale_traffic *t = x->t;
    uint32_t own = t->n_runs - t->n_common;

    x->n_runs = t->n_common + (uint64_t)own * x->f->copies;
    x->hosts = zeroed(x->f->hosts, sizeof(*x->hosts));
    x->stored = zeroed(x->n_runs, sizeof(*x->stored));
    x->holders = x->f->place == SCALE_PREFIX ? zeroed(x->n_runs, sizeof(*x->holders)) : NULL;
    x->length = zeroed(t->n_runs, sizeof(*x->length));
    x->path = zeroed(t->deepest, sizeof(*x->path));
    x->blocks = zeroed(t->deepest, sizeof(*x->blocks));
    x->head = zeroed(t->deepest, 1);
    x->knows = zeroed(t->deepest, 1);
    x->n_entries = 1;
    x->random = x->f->seed;
    for (uint32_t i = 0; i < t->n_runs; i++)
        x->length[t->runs[i].number + (t->runs[i].common ? 0 : t->n_common)] = t->runs[i].blocks;
    table_grow(x);
}

static void fleet_close(struct fleet *x)
{
    uint64_t most = 0;

    for (uint32_t i = 0; i < x->f->hosts; i++)
        most = x->hosts[i].requests > most ? x->hosts[i].requests : most;
    if (x->out->requests > 0)
        x->out->busiest = (double)most * x->f->hosts / (double)x->out->requests;
    free(x->hosts);
    free(x->entries);
    free(x->table);
    free(x->stored);
    free(x->holders);
    free(x->length);
    free(x->path);
    free(x->blocks);
    free(x->head);
    free(x->knows);
}

/* Each copy begins somewhere else in the trace, and goes round, so that bursts of one do not meet those of all others. */
static void step_run(struct fleet *x, const uint32_t *offset)
{
    const struct scale_traffic *t = x->t;

    for (uint32_t copy = 0; copy < x->f->copies; copy++) {
        uint32_t at = (x->now + offset[copy]) % t->n_steps;

        for (uint32_t i = t->first[at]; i < t->first[at + 1]; i++)
            request_run(x, copy, &t->requests[i]);
    }
}

void scale_replay(const struct scale_traffic *t, const struct scale_fleet *f,
                  struct scale_result *out)
{
    struct fleet x = {.t = t, .f = f, .out = out};
    uint32_t *offset = zeroed(f->copies, sizeof(*offset));

    *out = (struct scale_result){0};
    fleet_init(&x);
    for (uint32_t i = 1; i < f->copies; i++)
        offset[i] = (uint32_t)(fleet_random(&x) % t->n_steps);
    for (x.now = 0; x.now < t->n_steps; x.now++) {
        step_run(&x, offset);
        if ((x.now + 1) % SCALE_STEPS == 0)
            second_ends(&x);
        if (f->collect_s > 0 && (x.now + 1) % (f->collect_s * SCALE_STEPS) == 0 &&
            f->capacity > 0 && f->capacity != SCALE_NO_SHARE && out->stored > f->capacity)
            collect(&x);
    }
    free(offset);
    fleet_close(&x);
}
