/* The router: which host gets the next request. */
#include "tests/bench/scale_fleet.h"

#include <math.h>
#include <stddef.h>

#define HALF_LIFE 100.0 /* of a load, in steps: 10 s */

static double faded(double load, uint32_t steps)
{
    return steps == 0 ? load : load * exp2(-(double)steps / HALF_LIFE);
}

static double load_of(struct fleet *x, uint32_t host)
{
    struct host *h = &x->hosts[host];

    h->load = faded(h->load, x->now - h->load_step);
    h->load_step = x->now;
    return h->load;
}

static uint32_t lighter_of_two(struct fleet *x)
{
    uint32_t a = (uint32_t)(fleet_random(x) % x->f->hosts),
             b = (uint32_t)(fleet_random(x) % x->f->hosts);

    return load_of(x, a) <= load_of(x, b) ? a : b;
}

/* Who has the longest part of the prompt, by what the router was told `stale_ms` ago; SCALE_NONE: nobody. That a run was
 * evicted it knows at once. Of a head that all share it does not ask who has it: sooner or later that is everybody. */
static uint32_t holder_of(struct fleet *x)
{
    uint32_t late = (x->f->stale_ms * SCALE_STEPS + 999) / 1000;
    uint32_t known = x->now + 1 > late ? x->now + 1 - late : 0; /* what was noted until then */

    for (uint32_t i = x->path_n; i-- > 0;) {
        const struct holder *k = &x->holders[x->path[i]];
        uint32_t host = k->since <= known ? k->host : k->since_before <= known ? k->before : 0;
        const struct entry *e;

        if (x->head[i])
            break;
        if (host == 0)
            continue;
        e = fleet_find(x, host - 1, x->path[i]);
        if (e != NULL && e->n > 0)
            return host - 1;
    }
    return SCALE_NONE;
}

static void holders_note(struct fleet *x, uint32_t host)
{
    for (uint32_t i = 0; i < x->path_n; i++) {
        struct holder *k = &x->holders[x->path[i]];

        if (k->host == host + 1)
            continue;
        *k = (struct holder){(uint16_t)(host + 1), k->host, x->now + 1, k->since};
    }
}

static uint32_t by_prefix(struct fleet *x)
{
    uint32_t host = holder_of(x);

    x->load = faded(x->load, x->now - x->load_step);
    x->load_step = x->now;
    if (host == SCALE_NONE ||
        (x->f->slack > 0 && load_of(x, host) > x->f->slack * x->load / x->f->hosts))
        host = lighter_of_two(x);
    holders_note(x, host);
    return host;
}

uint32_t fleet_route(struct fleet *x, uint64_t session, uint64_t references)
{
    uint32_t host;

    if (x->f->place == SCALE_ROUND_ROBIN)
        host = x->next_host++ % x->f->hosts;
    else if (x->f->place == SCALE_SESSION)
        host = (uint32_t)(fleet_mix(session) % x->f->hosts);
    else
        host = by_prefix(x);
    (void)load_of(x, host);
    x->hosts[host].load += (double)references;
    x->load += (double)references;
    x->hosts[host].requests++;
    return host;
}
