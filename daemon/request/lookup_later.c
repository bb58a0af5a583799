/* Lookups that don't wait for the shared tier: what a session has asked it, for clients that come
 * back. */
#include "daemon/request/view.h"

#include <stdlib.h>
#include <xxhash.h>

/* Entries per session; a new one replaces the oldest that was answered. */
#define LATERS_MAX 64u
/* How long the shared tier's answer waits for its client, whatever the caches below keep of it.
 * Once the client has had it, it holds for shared.negative. After that the shared tier is asked
 * once more. */
#define KEPT_MS 1000u

struct later {
    struct list link;
    uint64_t hash;         /* of the keys: a collision costs a hit, nothing else */
    struct view_look look; /* none under way: the shared tier has answered, at answered_ms */
    uint64_t answered_ms;
    bool told; /* that it has answered */
};

static void later_free(struct session *s, struct later *l)
{
    if (l->look.k)
        view_look_cancel(&l->look);
    list_remove(&l->link);
    s->n_laters--;
    free(l);
}

void lookups_later_end(struct session *s)
{
    while (!list_empty(&s->laters))
        later_free(s, LIST_ENTRY(s->laters.next, struct later, link));
}

static void done_cb(struct view_look *look, const uint8_t *keys)
{
    (void)keys;
    LIST_ENTRY(look, struct later, look)->answered_ms = uv_now(look->s->rq->modules.loop);
}

static bool later_holds(const struct session *s, const struct later *l)
{
    uint64_t age_ms = uv_now(s->rq->modules.loop) - l->answered_ms;

    return l->look.k || (!l->told && age_ms < KEPT_MS) ||
           age_ms < s->rq->modules.config->shared_negative_ms;
}

/* NULL: it has not been asked, or too long ago. */
static struct later *later_find(struct session *s, const struct later *like)
{
    for (struct list *node = s->laters.next; node != &s->laters; node = node->next) {
        struct later *l = LIST_ENTRY(node, struct later, link);

        if (l->look.view.ns[0] != like->look.view.ns[0] || l->hash != like->hash ||
            l->look.keys_bytes != like->look.keys_bytes || l->look.per_key != like->look.per_key)
            continue;
        if (later_holds(s, l))
            return l;
        later_free(s, l);
        return NULL;
    }
    return NULL;
}

static bool room_make(struct session *s)
{
    struct list *node = s->laters.next, *next;

    for (; s->n_laters >= LATERS_MAX && node != &s->laters; node = next) {
        struct later *l = LIST_ENTRY(node, struct later, link);

        next = node->next;
        if (!l->look.k)
            later_free(s, l);
    }
    return s->n_laters < LATERS_MAX;
}

bool lookup_later(struct session *s, const struct view *v, const struct msg_lookup *m,
                  uint32_t hits)
{
    struct later like = {.hash = XXH3_64bits(m->keys.p, m->keys.n),
                         .look = {.s = s,
                                  .view = *v,
                                  .per_key = m->per_key,
                                  .keys_bytes = m->keys.n,
                                  .until_ms = shared_query_until_later(s->rq, m->wait_ms),
                                  .done_cb = done_cb}};
    struct later *l = later_find(s, &like);

    if (l) {
        l->told = !l->look.k;
        return l->look.k != NULL;
    }
    if (!room_make(s) || !view_look_begin(&like.look, m->keys, hits))
        return false;
    l = malloc(sizeof(*l));
    if (!l) {
        view_look_cancel(&like.look);
        return false;
    }
    *l = like;
    list_push_back(&s->laters, &l->link);
    s->n_laters++;
    l->look.k->ctx = &l->look;
    return true;
}
