#include "client/lib/internal.h"

#define LONGEST_NS 1000000 /* longer waits sleep all the time */
#define BEFORE_NS 100000   /* the spin begins this long before the expected end ... */
#define AFTER_NS 60000     /* ... and ends this long after it */
/* Before the spin a wait sleeps in naps. A processor that idles longer sleeps deeper, or a
 * hypervisor gives it away. Waking it then takes up to 0.15 ms. */
#define NAP_NS 100000

void client_spin_learn(struct client_spin *s, uint32_t n_keys, int64_t took_ns)
{
    int64_t key_ns = took_ns / n_keys;

    s->key_ns = s->key_ns == 0 ? key_ns : s->key_ns + (key_ns - s->key_ns) / 4;
}

int64_t client_spin_expect(const struct client_spin *s, uint32_t n_keys)
{
    int64_t ns = s->key_ns > LONGEST_NS ? 0 : s->key_ns * n_keys;

    return ns == 0 || ns > LONGEST_NS ? 0 : client_now_ns() + ns;
}

int client_spin_poll(struct pollfd *p, int64_t expected_ns, int64_t deadline_ns)
{
    int64_t from_ns = expected_ns - BEFORE_NS, until_ns = expected_ns + AFTER_NS;
    int64_t now_ns = client_now_ns();
    int n = 0;

    if (until_ns > deadline_ns)
        until_ns = deadline_ns;
    while (n == 0 && now_ns < from_ns && now_ns < until_ns) {
        int64_t left_ns = from_ns - now_ns;
        struct timespec nap = {.tv_nsec = left_ns < NAP_NS ? left_ns : NAP_NS};

        n = ppoll(p, 1, &nap, NULL);
        now_ns = client_now_ns();
    }
    while (n == 0 && now_ns < until_ns) {
        n = poll(p, 1, 0);
        now_ns = client_now_ns();
    }
    return n;
}
