/* In place of the other cuda files, in a build that found no CUDA headers. */
#include "daemon/cuda/cuda.h"

#include <errno.h>
#include <stdio.h>

int cuda_load(char why[200])
{
    snprintf(why, 200, "ucmd was built without CUDA");
    return -ENOENT;
}

void cuda_enumerate(struct cuda_gpus *out)
{
    out->n = 0;
}

int cuda_new(struct uv_loop_s *loop, const struct cuda_gpu_id *id,
             const struct device_config *config, struct device **out)
{
    (void)loop;
    (void)id;
    (void)config;
    (void)out;
    return -ENOENT;
}
