/* What segment.c and segment_reclaim.c share. */
#ifndef UCMD_TIER_SEGMENT_INSIDE_H
#define UCMD_TIER_SEGMENT_INSIDE_H

#include "daemon/format/nvme_format.h"
#include "daemon/tier/segment.h"

static inline uint64_t segment_stride(const struct segment *s)
{
    return (uint64_t)s->stride_pages * NVME_PAGE;
}

/* Strides that may be open in the file at a time. */
uint32_t segment_open_max(const struct segment_file *f);
/* Puts it at the end of the list where it belongs, or takes it out. */
void segment_list(struct segment_table *t, struct segment *s);
/* The record was live. */
void segment_record_kill(struct segment_table *t, struct segment *s, uint32_t record);

#endif
