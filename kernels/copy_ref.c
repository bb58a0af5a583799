#include "kernels/copy.h"

#include <string.h>

void ucm_copy_ref(const struct ucm_copy_plane *planes, uint32_t n_planes,
                  const struct ucm_copy_item *items, uint32_t n_items,
                  enum ucm_copy_direction direction)
{
    for (uint32_t i = 0; i < n_items; i++) {
        for (uint32_t p = 0; p < n_planes; p++) {
            const struct ucm_copy_plane *plane = &planes[p];
            void *slot = (void *)(uintptr_t)(items[i].slot + plane->slot_offset);
            void *fragment = (void *)(uintptr_t)(plane->base + items[i].block * plane->stride);

            if (direction == UCM_COPY_LOAD)
                memcpy(fragment, slot, plane->block_bytes);
            else
                memcpy(slot, fragment, plane->block_bytes);
        }
    }
}
