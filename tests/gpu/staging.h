/* The harness's rings, one a worker: made with its first region, when the tests want staged copies,
 * and closed with the device. */
#ifndef UCM_TESTS_GPU_STAGING_H
#define UCM_TESTS_GPU_STAGING_H

#include "tests/gpu/harness.h"

void rings_watch(struct test_worker *w);
void rings_close(struct test_device *t);
/* The worker's copy agent gets to know the region, whose memory begins at `offset` of its
 * allocation. */
void ring_region(struct test_device *t, struct device_region *r, uint64_t offset);

#endif
