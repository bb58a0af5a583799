/* Steps in rounds. They attend a list's first blocks, and copy no others. Where the blocks lay
 * changes no bit. A step that was not served ends after as many runs as there are rounds. */
#include "tests/gpu/decode.h"

#include <string.h>

/* The rounds of a step, as its reports tell them. */
static void check_told(struct scene *t, const struct ucm_cuda_decode_result *r,
                       const struct output *out)
{
    uint32_t lists = SEQUENCES * t->spec.lists, rounds = 0;
    uint64_t attended = 0;
    float share = 1;

    for (uint32_t i = 0; i < LAYERS * lists; i++) {
        const struct ucm_cuda_decode_report *report = &out->report[i / lists][i % lists];
        uint32_t count = t->input.layer[i / lists].count[i % lists];

        check(report->blocks == count || (report->share >= t->spec.eps && report->blocks % 2 == 0),
              "%s: a list stopped at %u of %u blocks, %g", t->spec.name, report->blocks, count,
              (double)report->share);
        check((t->spec.eps < 1 && t->input.least[i % lists / t->spec.lists] <= CHOSEN) ||
                  report->blocks == count,
              "%s: %u of %u blocks", t->spec.name, report->blocks, count);
        check(report->blocks < CHOSEN || report->share == 1, "%s: all cover %g", t->spec.name,
              (double)report->share);
        attended += report->blocks;
        rounds = report->rounds > rounds ? report->rounds : rounds;
        share = report->share < share ? report->share : share;
    }
    check(r->attended == attended && r->rounds == rounds && r->share == share,
          "%s: told %lu blocks, %u rounds, %g, not %lu, %u, %g", t->spec.name,
          (unsigned long)r->attended, r->rounds, (double)r->share, (unsigned long)attended, rounds,
          (double)share);
}

static void check_step(struct scene *t, bool graph)
{
    struct output *out = fresh(sizeof(*out)), *again = fresh(sizeof(*again));
    struct ucm_cuda_decode_result r, before = {0};

    scene_forget(t);
    (void)ucm_cuda_decode_result(t->decode, &before);
    r = graph ? scene_replay(t) : scene_step(t);
    scene_output(t, out);
    check(r.flags == 0, "%s: flags %u", t->spec.name, r.flags);
    check(r.missed - before.missed == scene_chosen(t, LAYERS), "%s: %lu missed, %u attended",
          t->spec.name, (unsigned long)(r.missed - before.missed), scene_chosen(t, LAYERS));
    check(scene_resident(t, "rounds") == scene_chosen(t, LAYERS), "%s: resident", t->spec.name);
    scene_compare(t, "rounds");
    check_told(t, &r, out);
    r = graph ? scene_step(t) : scene_replay(t);
    scene_output(t, again);
    check(r.flags == 0 && memcmp(out, again, sizeof(*out)) == 0, "%s: resident, other bits",
          t->spec.name);
}

/* Each run gets a round further. */
static void check_unserved(struct scene *t)
{
    struct output *want = fresh(sizeof(*want)), *got = fresh(sizeof(*got));
    uint32_t runs = 0;

    check(scene_replay(t).flags == 0, "%s: flags", t->spec.name);
    scene_output(t, want);
    scene_forget(t);
    for (uint32_t i = 0; i < NUMBERS; i += 2)
        scene_no_place(t, i);
    for (; scene_replay(t).flags != 0 && runs <= LAYERS * ROUNDS; runs++)
        check(scene_serve(t) > 0, "%s: nothing was missed", t->spec.name);
    check(runs > 0 && runs <= LAYERS * ROUNDS, "%s: served %u times", t->spec.name, runs);
    scene_output(t, got);
    check(memcmp(want, got, sizeof(*want)) == 0, "%s: served, other bits", t->spec.name);
}

void test_decode_rounds(const struct scene_spec *spec)
{
    struct scene t;

    scene_open(&t, spec);
    for (uint32_t i = 0; i < (few ? 1u : 10u); i++) {
        scene_draw(&t);
        check_step(&t, i % 2);
        check_unserved(&t);
    }
    scene_close(&t);
}
