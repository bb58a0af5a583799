/* top.h: what happened between two results of stats. */
#include "client/ctl/top.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

/* What a daemon says, in as few fields as top reads. */
struct said {
    uint64_t uptime_ms, keys, hits, load_bytes;
    uint64_t slow; /* lookups of 8 ms; 92 lookups of 1 us besides */
    const char *instance;
};

static void text(msgpack_packer *pk, const char *s)
{
    msgpack_pack_str(pk, strlen(s));
    msgpack_pack_str_body(pk, s, strlen(s));
}

static void field(msgpack_packer *pk, const char *name, uint64_t v)
{
    text(pk, name);
    msgpack_pack_uint64(pk, v);
}

static void pack_buckets(msgpack_packer *pk, const struct said *said)
{
    text(pk, "buckets");
    msgpack_pack_array(pk, 4);
    msgpack_pack_uint64(pk, 1);
    msgpack_pack_uint64(pk, 92);
    msgpack_pack_uint64(pk, 8192);
    msgpack_pack_uint64(pk, said->slow);
}

static void pack_histogram(msgpack_packer *pk, const struct said *said)
{
    text(pk, "histograms");
    msgpack_pack_array(pk, 1);
    msgpack_pack_map(pk, 4);
    text(pk, "name");
    text(pk, "lookup");
    text(pk, "tier");
    text(pk, "");
    text(pk, "size");
    text(pk, "");
    pack_buckets(pk, said);
}

static void pack_stats(msgpack_packer *pk, const struct said *said)
{
    msgpack_pack_map(pk, 5);
    field(pk, "uptime_ms", said->uptime_ms);
    text(pk, "instance");
    text(pk, said->instance != NULL ? said->instance : "i");
    text(pk, "metrics");
    msgpack_pack_map(pk, 3);
    field(pk, "lookup_keys", said->keys);
    field(pk, "lookup_hits", said->hits);
    field(pk, "load_bytes", said->load_bytes);
    pack_histogram(pk, said);
    text(pk, "tenants");
    msgpack_pack_array(pk, 1);
    msgpack_pack_map(pk, 4);
    text(pk, "name");
    text(pk, "team-a");
    field(pk, "load_bytes", said->load_bytes);
    for (int i = 0; i < 2; i++) {
        text(pk, i == 0 ? "lookup_times" : "load_times");
        msgpack_pack_map(pk, 1);
        pack_buckets(pk, said);
    }
}

/* Namespaces 1 to 3, of which each has loaded half as much as the one before it. */
static void pack_namespaces(msgpack_packer *pk, const struct said *said)
{
    msgpack_pack_map(pk, 1);
    text(pk, "namespaces");
    msgpack_pack_array(pk, 3);
    for (uint64_t i = 1; i <= 3; i++) {
        msgpack_pack_map(pk, 4);
        field(pk, "ns", i);
        text(pk, "tenant");
        text(pk, "team-a");
        field(pk, "dram_bytes", 100 * i);
        field(pk, "load_bytes", said->load_bytes >> i);
    }
}

static void read_packed(struct top_sample *s, const struct said *said,
                        void (*pack)(msgpack_packer *pk, const struct said *said),
                        int (*read)(struct top_sample *s, const msgpack_object *o))
{
    msgpack_sbuffer buffer;
    msgpack_unpacked unpacked;
    msgpack_packer pk;
    size_t at = 0;

    msgpack_sbuffer_init(&buffer);
    msgpack_packer_init(&pk, &buffer, msgpack_sbuffer_write);
    pack(&pk, said);
    msgpack_unpacked_init(&unpacked);
    cr_assert_eq(msgpack_unpack_next(&unpacked, buffer.data, buffer.size, &at),
                 MSGPACK_UNPACK_SUCCESS);
    cr_assert_eq(read(s, &unpacked.data), 0);
    msgpack_unpacked_destroy(&unpacked);
    msgpack_sbuffer_destroy(&buffer);
}

static struct top_sample sample(const struct said *said)
{
    struct top_sample s = {.x = NULL};

    read_packed(&s, said, pack_stats, top_read_stats);
    read_packed(&s, said, pack_namespaces, top_read_namespaces);
    return s;
}

struct pair {
    struct top_sample from, to;
};

static struct pair pair(const struct said *from, const struct said *to)
{
    return (struct pair){sample(from), sample(to)};
}

static void pair_close(struct pair *p)
{
    top_close(&p->from);
    top_close(&p->to);
}

static char *printed(const struct top_frame *f)
{
    char *text = NULL;
    size_t n = 0;
    FILE *out = open_memstream(&text, &n);

    cr_assert_eq(top_print(f, out), 0);
    fclose(out);
    return text;
}

Test(top, rates_are_of_the_time_between)
{
    struct pair p =
        pair(&(struct said){.uptime_ms = 1000, .keys = 100, .hits = 100, .load_bytes = 1 << 20},
             &(struct said){.uptime_ms = 3000, .keys = 300, .hits = 150, .load_bytes = 5 << 20});
    struct top_rates r;
    struct top_frame f;

    cr_assert(top_frame(&p.from, &p.to, &f));
    cr_assert_float_eq(f.seconds, 2, 1e-9);
    cr_assert_float_eq(f.all.load, 2 << 20, 1e-3);
    cr_assert_float_eq(f.all.hits, 0.25, 1e-9);
    r = top_row_rates(&f, &p.to.tenants.row[0], &p.from.tenants.row[0]);
    cr_assert_float_eq(r.load, 2 << 20, 1e-3);
    cr_assert_float_eq(r.hits, TOP_UNKNOWN, 1e-9, "nothing was looked up");
    /* One that is new has done it all in this time. */
    r = top_row_rates(&f, &p.to.namespaces.row[0], NULL);
    cr_assert_float_eq(r.load, (5 << 20) / 2 / 2, 1e-3);
    pair_close(&p);
}

Test(top, times_are_of_what_was_counted_between)
{
    /* 92 fast ones before, and as many after: between lie the slow ones only. */
    struct pair p = pair(&(struct said){.uptime_ms = 1000, .slow = 5},
                         &(struct said){.uptime_ms = 2000, .slow = 15});
    struct top_frame f;

    cr_assert(top_frame(&p.from, &p.to, &f));
    cr_assert_eq(f.lookup.n, 10);
    cr_assert(f.lookup.p50_us > 4000 && f.lookup.p50_us <= 8192, "%f", f.lookup.p50_us);
    cr_assert_eq(f.load.n, 0);
    cr_assert_float_eq(f.load.p99_us, TOP_UNKNOWN, 1e-9);
    pair_close(&p);
}

Test(top, a_tenant_has_times_of_its_own)
{
    struct pair p = pair(&(struct said){.uptime_ms = 1000, .slow = 5},
                         &(struct said){.uptime_ms = 2000, .slow = 15});
    struct top_rates r;
    struct top_frame f;
    char *text;

    cr_assert(top_frame(&p.from, &p.to, &f));
    r = top_row_rates(&f, &p.to.tenants.row[0], &p.from.tenants.row[0]);
    cr_assert_eq(r.lookup.n, 10);
    cr_assert(r.lookup.p50_us > 4000 && r.lookup.p99_us <= 8192, "%f", r.lookup.p50_us);
    cr_assert_eq(r.load_times.n, 10);
    r = top_row_rates(&f, &p.to.tenants.row[0], NULL);
    cr_assert_eq(r.lookup.n, 92 + 15, "one that is new has done it all in this time");
    text = printed(&f);
    cr_assert_not_null(strstr(text, "LOOKUP P50"), "%s", text);
    free(text);
    pair_close(&p);
}

Test(top, the_busiest_is_first_and_idle_ones_by_what_they_hold)
{
    struct pair p = pair(&(struct said){.uptime_ms = 1000},
                         &(struct said){.uptime_ms = 2000, .load_bytes = 1 << 20});
    uint32_t order[3];
    struct top_frame f;

    cr_assert(top_frame(&p.from, &p.to, &f));
    top_order(&f, &p.from.namespaces, &p.to.namespaces, order);
    cr_assert(order[0] == 0 && order[1] == 1 && order[2] == 2);
    pair_close(&p);
    p = pair(&(struct said){.uptime_ms = 1000}, &(struct said){.uptime_ms = 2000});
    cr_assert(top_frame(&p.from, &p.to, &f));
    top_order(&f, &p.from.namespaces, &p.to.namespaces, order);
    cr_assert(order[0] == 2 && order[1] == 1 && order[2] == 0);
    pair_close(&p);
}

Test(top, a_restart_has_no_rates)
{
    struct pair p = pair(&(struct said){.uptime_ms = 1000, .instance = "a"},
                         &(struct said){.uptime_ms = 9000, .instance = "b"});
    struct top_frame f;

    cr_assert_not(top_frame(&p.from, &p.to, &f));
    cr_assert_not(top_frame(&p.to, &p.to, &f), "nor has no time");
    pair_close(&p);
}

Test(top, namespaces_are_bounded)
{
    const struct said said = {.uptime_ms = 1};
    struct top_sample s = sample(&said);

    while (!s.namespaces.more)
        read_packed(&s, &said, pack_namespaces, top_read_namespaces);
    cr_assert_eq(s.namespaces.n, TOP_MAX_NAMESPACES);
    top_close(&s);
}
