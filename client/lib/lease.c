#include "client/lib/internal.h"

#include <stdlib.h>
#include <string.h>

#define LEASES_MIN 64
#define LEASES_MAX 65536

int client_lease_prepare(struct ucm_client *c)
{
    uint32_t n = LEASES_MIN;

    if (c->leases)
        return 0;
    /* Twice what the daemon grants at a time, so half of the table is free or has run out. */
    while (n < LEASES_MAX && n / 2 < c->info.max_leases)
        n *= 2;
    c->leases = calloc(n, sizeof *c->leases);
    if (!c->leases)
        return client_fail(UCM_ENOMEMORY, "no memory for leases");
    c->n_leases = n;
    return 0;
}

uint32_t client_lease_add(struct ucm_client *c, uint32_t wire, uint32_t lease_ms)
{
    int64_t now = client_now_ns();
    struct client_lease *lease = NULL;
    uint32_t number = 0;

    for (uint32_t i = 0; i < c->n_leases; i++) {
        number = c->next_lease++;
        lease = &c->leases[number % c->n_leases];
        if (number != 0 && (lease->number == 0 || lease->ends_ns <= now))
            break;
    }
    if (number == 0)
        lease = &c->leases[number = c->next_lease++];
    *lease = (struct client_lease){number, wire, now + (int64_t)lease_ms * 1000000};
    return number;
}

uint32_t client_lease_find(struct ucm_client *c, uint32_t number)
{
    struct client_lease *lease;

    if (number == 0 || !c->leases)
        return 0;
    lease = &c->leases[number % c->n_leases];
    /* After a lease ran out the daemon may use its wire number for another one. */
    return lease->number == number && lease->ends_ns > client_now_ns() ? lease->wire : 0;
}

void client_lease_end(struct ucm_client *c, uint32_t number)
{
    if (client_lease_find(c, number) != 0)
        c->leases[number % c->n_leases].number = 0;
}

void client_lease_end_all(struct ucm_client *c)
{
    if (c->leases)
        memset(c->leases, 0, c->n_leases * sizeof *c->leases);
}
