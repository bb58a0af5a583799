/* For worker.c: its operations work on places. Functions that return int return 0, or -1 after a
 * sentence on standard error. */
#ifndef UCM_TESTS_GATE_PLACE_H
#define UCM_TESTS_GATE_PLACE_H

#include "client/bench/daemon.h"
#include "client/bench/rig.h"

#define GATE_TIMEOUT_MS 30000

/* -1 */
int gate_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Keys that no call has drawn before. */
void gate_keys(uint8_t *keys, uint32_t n);

/* A namespace with its region and stored keys. */
struct place {
    struct rig rig;
    uint8_t *keys, *fresh;
    uint32_t n;
};
int place_open(struct place *p, const struct daemon *d, const char *model, uint32_t n,
               uint32_t block, uint32_t fragment);
void place_close(struct place *p);
/* Stores its blocks, and waits until they are on NVMe where there is one. */
int place_store(struct place *p, bool nvme);
/* Loads, dumps or prefetches n blocks. */
int place_move(struct place *p, enum rig_op op, const uint8_t *keys, uint32_t n);

#endif
