/* Spans name bytes in slots. One that leaves the part, the slot or the caller's blocks is refused.
 */
#include "tests/unit/cache/cache_rig.h"

TestSuite(cache_span, .init = rig_open, .fini = rig_close);

static struct span span;

static void refused(int rc)
{
    static uint64_t refusals;

    cr_expect_eq(rc, -EINVAL);
    cr_expect_eq(rig.metrics.span_refused, ++refusals);
}

Test(cache_span, of_a_part_needs_a_use)
{
    block_ref ref = store(rig.one, 1);

    refused(span_part(rig.cache, ref, 0, &span));
    use(ref, 0);
    cr_assert_eq(span_part(rig.cache, ref, 0, &span), 0);
    cr_expect_eq(span.form, ns_form(rig.one, 0));
    cr_expect_eq(span.n, LAYERS);
    cr_expect_eq(span.len, ns_part_bytes(rig.one, 0));
    cr_expect_not(span.pending);
    cache_put(rig.cache, ref, 0);
    refused(span_part(rig.cache, ref, 0, &span));
    drop(ref);
}

Test(cache_span, of_a_fill_needs_the_claim)
{
    block_ref ref = open_block(rig.one, 1);
    struct pending_write *f;

    cr_assert_eq(claim(ref, 0, 1, 1, &f), 0);
    refused(span_pending_write(rig.cache, f, 0, 1, &span));
    refused(span_pending_write(rig.cache, f, 0, LAYERS, &span));
    refused(span_pending_write(rig.cache, f, 1, LAYERS, &span));
    refused(span_pending_write(rig.cache, f, 1, UINT32_MAX, &span));
    refused(span_pending_write(rig.cache, f, 1, 0, &span));
    cr_assert_eq(span_pending_write(rig.cache, f, 1, 1, &span), 0);
    cr_expect_eq(span.origin, memory_to_fill(f) + rig.one->identity.layer_bytes);
    cr_expect(span.pending);
    pending_write_done(rig.cache, f, 1, false);
    drop(ref);
}

Test(cache_span, is_cut_within_itself)
{
    block_ref ref = store(rig.one, 1);
    struct span all, one, out;

    use(ref, 0);
    cr_assert_eq(span_part(rig.cache, ref, 0, &all), 0);
    cr_assert_eq(span_cut(rig.cache, &all, 1, 1, &one), 0);
    cr_expect_eq(one.origin, all.origin + all.form->layer_bytes);
    cr_expect_eq(one.len, all.form->layer_bytes);
    refused(span_cut(rig.cache, &all, LAYERS, 1, &out));
    refused(span_cut(rig.cache, &all, 1, LAYERS, &out));
    refused(span_cut(rig.cache, &all, 0, 0, &out));
    refused(span_cut(rig.cache, &all, UINT32_MAX, 2, &out));
    refused(span_cut(rig.cache, &one, 0, 1, &out)); /* the layer before it */
    refused(span_cut(rig.cache, &one, 1, 2, &out));
    cr_assert_eq(span_cut(rig.cache, &one, 1, 1, &out), 0);
    cr_expect_eq(out.origin, one.origin);
    put_and_drop(ref, 0);
}

/* Bytes past the slot are out of reach, even for a caller that mistakes the part's form. */
Test(cache_span, ends_with_the_slot)
{
    const struct form *form = ns_form(rig.one, 0);
    struct form longer = *form, more = *form;
    slot_ref slot = arena_alloc(rig.arena, ns_part_bytes(rig.one, 0), 1, NUMA_NONE);
    uint64_t room = tier_layers_room(form->layer_bytes, 0, 1);

    cr_assert_neq(slot, 0u);
    cr_assert_eq(span_slot(rig.cache, slot, form, &span), 0);
    longer.layer_bytes += 2048;
    more.layers++;
    refused(span_slot(rig.cache, slot, &longer, &span));
    refused(span_kept(rig.cache, slot, &more, &span));
    longer.layer_bytes = UINT64_MAX;
    refused(span_slot(rig.cache, slot, &longer, &span));
    refused(span_slot(rig.cache, 0, form, &span));
    refused(span_stage(rig.cache, slot, arena_slot_bytes(rig.arena, slot) - room + 1, form, 0, 1,
                       &span));
    refused(span_stage(rig.cache, slot, UINT64_MAX, form, 0, 1, &span));
    refused(span_stage(rig.cache, slot, 0, form, LAYERS, 1, &span));
    cr_assert_eq(
        span_stage(rig.cache, slot, arena_slot_bytes(rig.arena, slot) - room, form, 0, 1, &span),
        0);
    arena_slot_free(rig.arena, slot);
}

/* A sequence may have blocks of two namespaces. Uses count in the namespace of each block. */
Test(cache_span, a_touch_counts_in_the_blocks_own_namespace)
{
    block_ref refs[3] = {store(rig.one, 1), 0, store(rig.two, 1)};
    struct admission one = rig.one->admission, two = rig.two->admission;

    for (int i = 0; i < 3; i++)
        cache_touch_own(rig.cache, rig.one, refs + 1, 2);
    cr_expect_eq(memcmp(&rig.one->admission, &one, sizeof(one)), 0);
    cr_expect_eq(memcmp(&rig.two->admission, &two, sizeof(two)), 0);
    for (int i = 0; i < 3; i++)
        cache_touch_own(rig.cache, rig.two, refs, 3);
    cr_expect_eq(memcmp(&rig.one->admission, &one, sizeof(one)), 0);
    cr_expect_gt(rig.two->admission.hits, two.hits);
    drop(refs[0]);
    drop(refs[2]);
}
