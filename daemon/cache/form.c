/* Blocks in two forms: plain in one namespace, coded in another that is derived from it (ns.base), under the
 * same key. A dump may ask for one form in DRAM and the other one below, on NVMe and the shared tier:
 *
 *   the plain block is filled -> complete -> its coded form is built (coding.c) -> paired
 *
 * Both blocks of a pair are complete. The cache writes one of them below, and holds the other one back in DRAM.
 * The one that goes below leaves DRAM as soon as it is there. The cache ends a pair when it loses a part of
 * either block, and then writes the one that it held back. So one of the two is below or on its way there at
 * any moment. There is one exception: if the tier or the index gave the place of a coded block to newer ones,
 * the plain one stays in DRAM and is not written.
 *
 * A block that is not encoded yet names its form: the place of a struct ns_coded_form in its namespace. When the
 * coded form can't be had, the name is taken off, and the block is written as it is. After a restart there
 * are no names and no pairs; blocks are where they are. */
#include "daemon/cache/cache.h"
#include "daemon/cache/internal.h"

#include <assert.h>
#include <stdlib.h>

/* ---- forms ---- */

static_assert(NS_CODED_FORMS << BLOCK_FORM_SHIFT == BLOCK_FORM, "each has a number from 1");

static unsigned form_number(const struct block *b)
{
    return (b->flags & BLOCK_FORM) >> BLOCK_FORM_SHIFT;
}

struct ns_coded_form *cache_form_of(const struct ns *ns, const struct block *b)
{
    unsigned n = form_number(b);

    return n ? &ns->coded_forms[n - 1] : NULL;
}

/* The number of that form, with one more user; 0: there is no place, or no memory. */
static unsigned form_take(struct cache *c, struct ns *ns, struct ns *coded, bool below)
{
    struct ns_coded_form *empty = NULL;

    if (!ns->coded_forms)
        ns->coded_forms = calloc(NS_CODED_FORMS, sizeof(*ns->coded_forms));
    for (struct ns_coded_form *f = ns->coded_forms; f && f < ns->coded_forms + NS_CODED_FORMS;
         f++) {
        if (f->coded == coded && f->below == below && !f->ended) {
            f->users++;
            return (unsigned)(f - ns->coded_forms) + 1;
        }
        if (!f->coded && !empty)
            empty = f;
    }
    if (!empty)
        return 0;
    *empty = (struct ns_coded_form){.coded = coded, .below = below, .users = 1};
    index_ns_use(c->config.index, coded);
    return (unsigned)(empty - ns->coded_forms) + 1;
}

void cache_form_release(struct cache *c, struct ns *ns, unsigned number)
{
    struct ns_coded_form *f = number ? &ns->coded_forms[number - 1] : NULL;

    if (!f || --f->users > 0)
        return;
    index_ns_unuse(c->config.index, f->coded);
    f->coded = NULL;
}

void cache_form_forget(struct cache *c, block_ref ref)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);
    unsigned number = form_number(b);

    b->flags &= (uint16_t)~BLOCK_FORM;
    cache_form_release(c, ns, number);
}

unsigned cache_form_take(struct cache *c, struct ns *ns, struct ns *coded, bool below)
{
    unsigned number = c->coder.build ? form_take(c, ns, coded, below) : 0;

    c->config.metrics->transcode_no_room += number == 0;
    return number;
}

/* Parts whose dumps disagree are stored as they are. */
void cache_form_publish(struct cache *c, block_ref ref, unsigned number)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);

    if (b->whole_parts == 1 && form_number(b) == 0) {
        b->flags |= (uint16_t)(number << BLOCK_FORM_SHIFT); /* and has the fill's use of it */
        return;
    }
    if (form_number(b) != number)
        cache_form_forget(c, ref);
    cache_form_release(c, ns, number);
}

void cache_forms_end(const struct ns *coded)
{
    struct ns *base = coded->base;

    for (unsigned i = 0; base && base->coded_forms && i < NS_CODED_FORMS; i++)
        if (base->coded_forms[i].coded == coded)
            base->coded_forms[i].ended = true;
}

/* ---- pairs ---- */

/* The block of the same key in the other form; 0: there is none. */
static block_ref other_of(struct cache *c, block_ref ref)
{
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);
    const struct ns_coded_form *form = cache_form_of(ns, b);
    const struct ns *other = ns->base ? ns->base : form ? form->coded : NULL;

    return other ? index_find(c->config.index, other, b->key) : 0;
}

block_ref cache_pair_of(struct cache *c, block_ref ref)
{
    const struct block *b = index_block(c->config.index, ref);

    return b->flags & BLOCK_PAIRED ? other_of(c, ref) : 0;
}

void cache_pair(struct cache *c, block_ref base, block_ref coded, bool below)
{
    struct block *b = index_block(c->config.index, base);
    struct block *k = index_block(c->config.index, coded);

    b->flags |= BLOCK_PAIRED;
    k->flags |= BLOCK_PAIRED;
    if (below) {
        b->flags |= BLOCK_HELD_BACK;
        k->flags &= (uint16_t)~BLOCK_HELD_BACK;
    } else {
        k->flags |= BLOCK_HELD_BACK;
    }
}

void cache_unpair(struct cache *c, block_ref ref)
{
    struct block *b = index_block(c->config.index, ref), *other;
    block_ref other_ref = cache_pair_of(c, ref);
    bool held_back;

    b->flags &= (uint16_t) ~(BLOCK_PAIRED | BLOCK_HELD_BACK);
    cache_form_forget(c, ref);
    if (other_ref == 0)
        return;
    other = index_block(c->config.index, other_ref);
    held_back = other->flags & BLOCK_HELD_BACK;
    other->flags &= (uint16_t) ~(BLOCK_PAIRED | BLOCK_HELD_BACK);
    if (!held_back) {
        cache_form_forget(c, other_ref);
        return;
    }
    /* Written again below, its coded form would take the place of another one, whose plain block would be
     * next, without end. So it is as any block in DRAM whose copy was reclaimed. */
    if (c->reclaims && cache_form_of(cache_ns(c, other_ref), other))
        return;
    /* A plain one that names its form is encoded again, but not if somebody has just evicted that form. */
    if (c->named == ref)
        cache_form_forget(c, other_ref);
    cache_write_stored(c, other_ref, WRITE_NVME);
    cache_write_stored(c, other_ref, WRITE_SHARE);
}

static bool block_backed(const struct block *b, const struct ns *ns)
{
    for (uint32_t i = 0; i < ns->identity.parts; i++)
        if (!part_backed(&b->part[i]))
            return false;
    return true;
}

bool cache_pair_backed(struct cache *c, block_ref ref)
{
    block_ref other = cache_pair_of(c, ref);
    struct ns *ns;
    const struct block *b = other ? cache_block(c, other, &ns) : NULL;

    return b && block_backed(b, ns);
}

/* It is below, nobody uses it here or has read it back, and DRAM has the other form. */
static bool may_leave(struct cache *c, block_ref ref)
{
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);
    block_ref other;

    if (b->flags & (BLOCK_HELD_BACK | BLOCK_READ_BACK | BLOCK_QUEUED | BLOCK_SHARE_QUEUED |
                    BLOCK_PINNED) ||
        b->dram_parts == 0 || b->leases > 0 || !block_idle(b, ns) || !block_backed(b, ns))
        return false;
    other = other_of(c, ref);
    return other != 0 && cache_in_dram(c, other);
}

void cache_pair_settle(struct cache *c, block_ref ref)
{
    if (!may_leave(c, ref))
        return;
    block_drop_dram(c, ref, false);
    cache_released(c);
}

void cache_form_read(struct cache *c, block_ref ref)
{
    struct block *b = index_block(c->config.index, ref);

    if (b->flags & BLOCK_PAIRED)
        b->flags |= BLOCK_READ_BACK;
}

unsigned cache_pair_heat(struct cache *c, block_ref ref)
{
    block_ref other = cache_pair_of(c, ref);
    unsigned heat = policy_heat(c->config.policy, ref);
    unsigned others = other ? policy_heat(c->config.policy, other) : 0;

    return heat > others ? heat : others;
}
