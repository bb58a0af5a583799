/* A load that re-rotates K: each run of keys has a table of angles, made when the request
 * arrives. */
#include "daemon/features.h"
#include "daemon/request/copies.h"

/* A run of keys, as the client names it. */
struct shift_run {
    uint32_t keys;
    struct ucm_rope_shift shift;
};

static uint32_t runs_of(struct proto_u32s shifts)
{
    return shifts.n / UCM_SHIFT_NUMBERS;
}

static struct shift_run run_at(struct proto_u32s shifts, uint32_t i)
{
    const uint32_t *p = shifts.p + (size_t)i * UCM_SHIFT_NUMBERS;

    return (struct shift_run){p[0], {p[1], p[2], p[3], p[4]}};
}

/* Tokens of a run are re-rotated by one table, so their frequencies must not have changed in
 * between. */
static bool frequencies_differ(const struct ucm_rope_spec *s, const struct ucm_rope_shift *t)
{
    uint64_t old = t->old_length > s->trained ? t->old_length : s->trained;
    uint64_t new = t->new_length > s->trained ? t->new_length : s->trained;

    return s->scaling == UCM_ROPE_DYNAMIC && old != new;
}

static int run_check(struct call *call, const struct ucm_rope_spec *spec,
                     const struct shift_run *run, uint32_t i, uint64_t tokens, uint64_t *end)
{
    struct ucm_rope_shift last = run->shift;
    char why[UCM_ROPE_WHY];

    if (run->keys == 0)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID, "shifts: run %u has no keys", i);
    if (run->shift.new_position < *end)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "shifts: run %u begins at position %llu, the one before ends at %llu; "
                             "runs come by their new positions and do not overlap",
                             i, (unsigned long long)run->shift.new_position,
                             (unsigned long long)*end);
    if (frequencies_differ(spec, &run->shift))
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "shifts: run %u goes from a length of %llu to %llu, past the trained "
                             "%u: dynamic scaling then gives each token an angle of its own, so "
                             "its K must be computed",
                             i, (unsigned long long)run->shift.old_length,
                             (unsigned long long)run->shift.new_length, spec->trained);
    last.old_position += run->keys * tokens - 1;
    last.new_position += run->keys * tokens - 1;
    if (ucm_rope_check_shift(&last, why) != 0)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID, "shifts: of run %u's last token %s", i,
                             why);
    *end = last.new_position + 1;
    return 0;
}

static int shifts_check(struct call *call, const struct registered *region,
                        struct proto_u32s shifts, uint32_t n_keys, size_t *memory)
{
    const struct device_rope *rope = region->region->rope;
    uint64_t keys = 0, end = 0;

    if (!rope)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "shifts: region %u was registered without rope, which says where K "
                             "lies and how it is rotated",
                             region->name);
    if (shifts.n % UCM_SHIFT_NUMBERS != 0)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "shifts: %u numbers are no whole number of runs of %d", shifts.n,
                             UCM_SHIFT_NUMBERS);
    for (uint32_t i = 0; i < runs_of(shifts); i++) {
        struct shift_run run = run_at(shifts, i);

        if (run_check(call, &rope->spec, &run, i, region->ns->identity.block_tokens, &end) != 0)
            return -call->error.code;
        keys += run.keys;
    }
    if (keys != n_keys)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "shifts: the runs have %llu keys, the load has %u",
                             (unsigned long long)keys, n_keys);
    *memory = n_keys * sizeof(struct ucm_rope_angle *) +
              (size_t)runs_of(shifts) * (rope->spec.rotary / 2) * sizeof(struct ucm_rope_angle);
    return 0;
}

static void shifts_init(struct copies *c, struct proto_u32s shifts, void *memory)
{
    const struct ucm_rope_spec *spec = &c->region->region->rope->spec;
    struct ucm_rope_angle *table;
    uint32_t key = 0;

    c->shifts = memory;
    table = (struct ucm_rope_angle *)(c->shifts + c->w.n_keys);
    for (uint32_t i = 0; i < runs_of(shifts); i++, table += spec->rotary / 2) {
        struct shift_run run = run_at(shifts, i);
        bool shifted = ucm_rope_table(spec, &run.shift, table);

        for (uint32_t end = key + run.keys; key < end; key++)
            c->shifts[key] = shifted ? table : NULL;
    }
}

static int blend_open(struct requests *rq)
{
    static const struct load_shifts shifts = {shifts_check, shifts_init};

    rq->shifts = &shifts;
    return 0;
}

const struct feature blend_feature = {.open_cb = blend_open};
