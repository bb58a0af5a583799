#include "tests/gpu/decode.h"

#include <stdatomic.h>
#include <string.h>

/* ---- steps that get everything ---- */

static void check_first(struct scene *t)
{
    struct ucm_cuda_decode_result r;

    scene_draw(t);
    r = scene_step(t);
    check(r.step == 1 && r.flags == 0 && r.unserved == 0, "%s: step %lu, flags %u", t->spec.name,
          (unsigned long)r.step, r.flags);
    check(r.missed == scene_chosen(t, LAYERS) && r.taken == r.missed, "%s: %lu missed, %u chosen",
          t->spec.name, (unsigned long)r.missed, scene_chosen(t, LAYERS));
    check(scene_resident(t, "the first step") == r.missed, "%s: resident", t->spec.name);
    scene_compare(t, "the first step");
}

/* The same input, wherever its blocks lie, and by launches or by a graph. */
static void check_bits(struct scene *t)
{
    struct output *a = fresh(sizeof(*a)), *b = fresh(sizeof(*b));
    uint64_t missed = scene_step(t).missed;

    scene_output(t, a);
    check(scene_replay(t).missed == missed, "%s: all of it is resident", t->spec.name);
    scene_output(t, b);
    check(memcmp(a, b, sizeof(*a)) == 0, "%s: a graph has other bits", t->spec.name);
    scene_forget(t);
    check(scene_replay(t).missed == missed + scene_chosen(t, LAYERS), "%s: nothing was resident",
          t->spec.name);
    scene_output(t, b);
    check(memcmp(a, b, sizeof(*a)) == 0, "%s: other entries, other bits", t->spec.name);
}

void test_decode_steps(const struct scene_spec *spec)
{
    struct scene t;

    scene_open(&t, spec);
    for (uint32_t c = 0; c < SEQUENCES; c++)
        check(ucm_cuda_decode_enter(t.decode, c, spec->entries / 4, gpu_stream) == 0, "%s",
              ucm_cuda_errmsg());
    check_first(&t);
    for (uint32_t i = 0; i < (few ? 2u : 30u); i++) {
        struct ucm_cuda_decode_result r;

        scene_draw(&t);
        r = i % 2 ? scene_replay(&t) : scene_step(&t);
        check(r.flags == 0 && r.step == i + 2, "%s: step %lu, flags %u", spec->name,
              (unsigned long)r.step, r.flags);
        scene_compare(&t, "a step");
        scene_resident(&t, "a step");
    }
    check_bits(&t);
    check(ucm_cuda_decode_leave(t.decode, 1, gpu_stream) == 0, "%s", ucm_cuda_errmsg());
    scene_resident(&t, "one has left");
    scene_close(&t);
}

/* ---- steps that don't ---- */

static void check_served(struct scene *t, const char *what)
{
    struct output *want = fresh(sizeof(*want)), *got = fresh(sizeof(*got));
    struct ucm_cuda_decode_result r;

    scene_places(t);
    check(scene_replay(t).flags == 0, "%s, %s: all are in the mapping", t->spec.name, what);
    scene_output(t, want);
    scene_forget(t);
    for (uint32_t i = 0; i < NUMBERS; i += 5)
        scene_no_place(t, i);
    atomic_store(scene_seq(t, 3), 3); /* its bytes are changing */
    atomic_store(scene_seq(t, 7), 4); /* and these did */
    r = scene_replay(t);
    check(r.flags == (UCM_CUDA_DECODE_UNSERVED | UCM_CUDA_DECODE_NO_ENTRY), "%s, %s: flags %u",
          t->spec.name, what, r.flags);
    scene_resident(t, "a step that was not served");
    check(scene_serve(t) == r.unserved, "%s, %s: %u keys", t->spec.name, what, r.unserved);
    r = scene_replay(t);
    check(r.flags == 0, "%s, %s: run again, flags %u", t->spec.name, what, r.flags);
    scene_output(t, got);
    check(memcmp(want, got, sizeof(*want)) == 0, "%s, %s: other bits", t->spec.name, what);
    scene_compare(t, what);
}

/* Of fewer entries than a step needs. */
static void check_full(const struct scene_spec *spec)
{
    struct scene_spec small = *spec;
    struct ucm_cuda_decode_result r;
    struct scene t;

    small.entries = 12;
    scene_open(&t, &small);
    scene_draw(&t);
    r = scene_replay(&t);
    check((r.flags & (UCM_CUDA_DECODE_UNSERVED | UCM_CUDA_DECODE_FULL)) ==
              (UCM_CUDA_DECODE_UNSERVED | UCM_CUDA_DECODE_FULL),
          "%s: full, flags %u", spec->name, r.flags);
    check(scene_resident(&t, "full") <= 12, "%s: full", spec->name);
    scene_close(&t);
}

/* Mistakes of the caller show. */
static void check_strays(struct scene *t)
{
    uint32_t at = t->input.layer[1].index[0];
    int32_t number = t->input.table[at], page = t->input.page_table[CHOSEN];
    struct ucm_cuda_decode_result r;

    t->input.table[at] = NUMBERS;
    gpu_put(t->gpu_input, &t->input, sizeof(t->input));
    r = scene_replay(t);
    check((r.flags & UCM_CUDA_DECODE_STRAY) != 0 && (r.flags & UCM_CUDA_DECODE_UNSERVED) != 0,
          "%s: a stray, flags %u", t->spec.name, r.flags);
    t->input.table[at] = number;
    t->input.page_table[CHOSEN] = -1;
    gpu_put(t->gpu_input, &t->input, sizeof(t->input));
    r = scene_replay(t);
    check(r.flags == UCM_CUDA_DECODE_NO_PAGE, "%s: no page, flags %u", t->spec.name, r.flags);
    t->input.page_table[CHOSEN] = page;
    gpu_put(t->gpu_input, &t->input, sizeof(t->input));
    check(scene_replay(t).flags == 0, "%s: neither", t->spec.name);
}

/* Steps that began and never ended leave nothing to the next one, nor to blocks that are put
 * between them. */
static void check_aborted(struct scene *t)
{
    const struct ucm_entries *s = &t->decode->entries;
    uint32_t words[6] = {0, 1, 2, 0, 1, 2}, n = 3, flags = UCM_ATTEND_NO_PAGE, placed = 0;
    CUdeviceptr keys = gpu_put(0, words, sizeof(words)), requests = keys + 3 * sizeof(*words);
    struct ucm_cuda_decode_put put = {.key = {0, 0, 5}, .from = t->blocks + 5 * t->block};

    for (uint32_t i = 0; i < 2; i++) {
        scene_forget(t);
        check(ucm_cuda_decode_begin(t->decode, gpu_stream) == 0, "%s", ucm_cuda_errmsg());
        must(decode_launch(t->decode, DECODE_WANT, 1, 32,
                           (void *[]){(void *)s, &keys, &requests, &n}, gpu_stream),
             "misses");
        gpu_put(t->decode->plan.attend.flags, &flags, sizeof(flags));
        if (i == 1) {
            check(ucm_cuda_decode_put(t->decode, &put, 1, &placed, gpu_stream) == 0, "%s",
                  ucm_cuda_errmsg());
            check(placed == 1, "%s: %u of 1 were put", t->spec.name, placed);
        }
        scene_places(t);
        flags = scene_replay(t).flags;
        check(flags == 0, "%s: after a step that never ended, flags %u", t->spec.name, flags);
        flags = UCM_ATTEND_NO_PAGE;
        scene_resident(t, "after a step that never ended");
        scene_compare(t, "after a step that never ended");
    }
}

/* A block with an infinity, where entries are encoded. */
static void check_stranger(struct scene *t)
{
    struct ucm_cuda_decode_put put = {.key = {0, 0, STRANGER},
                                      .from = t->blocks + STRANGER * t->block};
    uint32_t placed = 0, before = scene_resident(t, "before a stranger");

    check(ucm_cuda_decode_put(t->decode, &put, 1, &placed, gpu_stream) == 0 && placed == 1,
          "%s: a stranger", t->spec.name);
    check(scene_resident(t, "a stranger") == before + 1, "%s: a stranger", t->spec.name);
}

void test_decode_between(const struct scene_spec *spec)
{
    struct scene t;

    scene_open(&t, spec);
    do
        scene_draw(&t);
    while (t.input.layer[1].count[0] == 0);
    check_served(&t, "served");
    check_strays(&t);
    check_aborted(&t);
    check_stranger(&t);
    for (uint32_t i = 0; i < (few ? 0u : 5u); i++) {
        scene_draw(&t);
        check_served(&t, "served again");
    }
    scene_close(&t);
    check_full(spec);
}
