/* A load whose K turns: each run of keys has a table of angles, made when the request arrives. */
#include "daemon/features.h"
#include "daemon/request/copies.h"

#include <string.h>

/* A run of keys, as the client names it. */
struct turn_run {
    uint32_t keys;
    struct ucm_rope_turn turn;
};

static uint32_t runs_of(struct proto_u32s turns)
{
    return turns.n / UCM_TURN_NUMBERS;
}

static struct turn_run run_at(struct proto_u32s turns, uint32_t i)
{
    const uint32_t *p = turns.p + (size_t)i * UCM_TURN_NUMBERS;

    return (struct turn_run){p[0], {p[1], p[2], p[3], p[4]}};
}

/* Tokens of a run turn by one table, so their frequencies must not have changed in between. */
static bool frequencies_differ(const struct ucm_rope_spec *s, const struct ucm_rope_turn *t)
{
    uint64_t old = t->old_length > s->trained ? t->old_length : s->trained;
    uint64_t new = t->new_length > s->trained ? t->new_length : s->trained;

    return s->scaling == UCM_ROPE_DYNAMIC && old != new;
}

static int run_check(struct call *call, const struct ucm_rope_spec *spec,
                     const struct turn_run *run, uint32_t i, uint64_t tokens, uint64_t *end)
{
    struct ucm_rope_turn last = run->turn;
    char why[UCM_ROPE_WHY];

    if (run->keys == 0)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID, "turns: run %u has no keys", i);
    if (run->turn.new_position < *end)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "turns: run %u begins at position %llu, the one before ends at %llu; "
                             "runs come by their new positions and do not overlap",
                             i, (unsigned long long)run->turn.new_position,
                             (unsigned long long)*end);
    if (frequencies_differ(spec, &run->turn))
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "turns: run %u goes from a length of %llu to %llu, past the trained "
                             "%u: dynamic scaling then gives each token an angle of its own, so "
                             "its K must be computed",
                             i, (unsigned long long)run->turn.old_length,
                             (unsigned long long)run->turn.new_length, spec->trained);
    last.old_position += run->keys * tokens - 1;
    last.new_position += run->keys * tokens - 1;
    if (ucm_rope_check_turn(&last, why) != 0)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID, "turns: of run %u's last token %s", i,
                             why);
    *end = last.new_position + 1;
    return 0;
}

static int turns_check(struct call *call, const struct registered *region, struct proto_u32s turns,
                       uint32_t n_keys, size_t *memory)
{
    const struct device_rope *rope = region->region->rope;
    uint64_t keys = 0, end = 0;

    if (!rope)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "turns: region %u was registered without rope, which says where K "
                             "lies and how it turns",
                             region->name);
    if (turns.n % UCM_TURN_NUMBERS != 0)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "turns: %u numbers are no whole number of runs of %d", turns.n,
                             UCM_TURN_NUMBERS);
    for (uint32_t i = 0; i < runs_of(turns); i++) {
        struct turn_run run = run_at(turns, i);

        if (run_check(call, &rope->spec, &run, i, region->ns->identity.block_tokens, &end) != 0)
            return -call->error.code;
        keys += run.keys;
    }
    if (keys != n_keys)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "turns: the runs have %llu keys, the load has %u",
                             (unsigned long long)keys, n_keys);
    *memory = n_keys * sizeof(struct ucm_rope_angle *) +
              (size_t)runs_of(turns) * (rope->spec.rotary / 2) * sizeof(struct ucm_rope_angle);
    return 0;
}

static void turns_init(struct copies *c, struct proto_u32s turns, void *memory)
{
    const struct ucm_rope_spec *spec = &c->region->region->rope->spec;
    struct ucm_rope_angle *table;
    uint32_t key = 0;

    c->turns = memory;
    table = (struct ucm_rope_angle *)(c->turns + c->w.n_keys);
    for (uint32_t i = 0; i < runs_of(turns); i++, table += spec->rotary / 2) {
        struct turn_run run = run_at(turns, i);
        bool turned = ucm_rope_table(spec, &run.turn, table);

        for (uint32_t end = key + run.keys; key < end; key++)
            c->turns[key] = turned ? table : NULL;
    }
}

static int blend_open(struct requests *rq)
{
    static const struct load_turns turns = {turns_check, turns_init};

    rq->turns = &turns;
    return 0;
}

const struct feature blend_feature = {.open_cb = blend_open};
