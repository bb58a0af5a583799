/* A network that can be made slow or dead: takes TCP connections on a loopback port of its own and
 * carries their bytes to and from a server, each a given time later, or not at all. For hosts whose
 * kernel has no netem, and without root.
 * Threads: one of its own; the functions are one caller's. */
#ifndef UCM_BENCH_LINK_H
#define UCM_BENCH_LINK_H

#include <stdbool.h>
#include <stdint.h>

struct bench_link;

/* host: a numeric address or a name. 0 or -errno; nothing is sent to the server yet. */
int link_open(const char *host, unsigned port, struct bench_link **out);
void link_close(struct bench_link *l); /* with all its connections; NULL-safe */
unsigned link_port(const struct bench_link *l);
/* For bytes that arrive from now on, each way. */
void link_delay(struct bench_link *l, uint64_t ns);
/* Nothing is carried, and nothing lost, until it ends. */
void link_hang(struct bench_link *l, bool hang);

#endif
