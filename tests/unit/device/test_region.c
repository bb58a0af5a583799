#include "daemon/device/device.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* A valid registration: cpu, one handle of 1 MiB, 16 blocks, 2 layers of 2 planes of 1 KiB in split
 * K/V. Each test spoils one field. */
#define BLOCKS 16u
#define FRAGMENT 1024u

static struct msg_handle handles[UCM_MAX_HANDLES + 1];
static struct msg_plane planes[UCM_MAX_PLANES + 1];
static struct msg_region_register m;
static uint8_t ipc[2][64];
static int fds[2];
static uint32_t n_fds;
static struct ucm_error e;

static void setup(void)
{
    memset(handles, 0, sizeof(handles));
    memset(planes, 0, sizeof(planes));
    m = (struct msg_region_register){.ns = 1,
                                     .part = 3,
                                     .blocks = BLOCKS,
                                     .device = {"cpu", 3},
                                     .handles = {handles, 1},
                                     .planes = {planes, 4}};
    handles[0] = (struct msg_handle){.kind = UCM_HANDLE_MEMFD, .bytes = 1 << 20, .fd = 1};
    for (uint32_t i = 0; i < 4; i++)
        planes[i] = (struct msg_plane){.offset = i * BLOCKS * FRAGMENT,
                                       .stride = FRAGMENT,
                                       .block_bytes = FRAGMENT,
                                       .layer = i / 2};
    memset(ipc[0], 1, 64);
    memset(ipc[1], 2, 64);
    fds[0] = open("/dev/null", O_RDONLY);
    fds[1] = open("/dev/null", O_RDONLY);
    n_fds = 2;
    e.code = 0;
}

static void teardown(void)
{
    for (int i = 0; i < 2; i++)
        if (fds[i] >= 0)
            close(fds[i]);
}

static int ask(uint32_t layers, uint64_t layer_bytes, struct device_region **r)
{
    struct form pages = {.layer_bytes = layer_bytes, .layers = layers};

    return region_check(&m, &pages, NULL, fds, n_fds, r, &e);
}

/* The registration is refused, with a sentence that contains `word`, and no descriptor is taken. */
static void refused_as(uint32_t layers, uint64_t layer_bytes, const char *word)
{
    struct device_region *r = (void *)&e;
    int before = fds[1];

    cr_assert_eq(ask(layers, layer_bytes, &r), -UCM_WIRE_INVALID, "expected a refusal about: %s",
                 word);
    cr_assert_eq(e.code, UCM_WIRE_INVALID);
    cr_assert(strstr(e.text, word), "\"%s\" does not say \"%s\"", e.text, word);
    cr_assert_eq(r, (void *)&e);
    cr_assert_eq(fds[1], before);
}

static void refused(const char *word)
{
    refused_as(2, 2 * FRAGMENT, word);
}

static void accepted_as(uint32_t layers, uint64_t layer_bytes)
{
    struct device_region *r = NULL;

    cr_assert_eq(ask(layers, layer_bytes, &r), 0, "%s", e.text);
    region_free(r);
    fds[1] = open("/dev/null", O_RDONLY);
}

static void accepted(void)
{
    accepted_as(2, 2 * FRAGMENT);
}

static void use_cuda(uint32_t n)
{
    m.device = (struct proto_str){"cuda", 4};
    m.handles.n = n;
    for (uint32_t i = 0; i < n; i++)
        handles[i] = (struct msg_handle){
            .kind = UCM_HANDLE_CUDA_IPC, .bytes = 1 << 20, .ipc = {ipc[i % 2], 64}};
}

TestSuite(region, .init = setup, .fini = teardown);

Test(region, takes_over_what_was_said)
{
    struct device_region *r;
    int fd = fds[1];

    cr_assert_eq(ask(2, 2 * FRAGMENT, &r), 0);
    cr_assert_eq(r->part, 3);
    cr_assert_eq(r->blocks, BLOCKS);
    cr_assert_eq(r->pages.layers, 2);
    cr_assert_eq(r->n_handles, 1);
    cr_assert_eq(r->n_planes, 4);
    cr_assert_eq(r->handles[0].fd, fd);
    cr_assert_eq(fds[1], -1, "the descriptor was taken");
    cr_assert_neq(fds[0], -1, "the other was not");
    cr_assert_eq(r->layer_first[0], 0);
    cr_assert_eq(r->layer_first[1], 2);
    cr_assert_eq(r->layer_first[2], 4);
    for (uint32_t i = 0; i < 4; i++) {
        cr_assert_eq(r->planes[i].slot_offset, i * FRAGMENT);
        cr_assert_eq(r->planes[i].block_bytes, FRAGMENT);
        cr_assert_eq(r->planes[i].stride, FRAGMENT);
        cr_assert_eq(r->planes[i].base, i * BLOCKS * FRAGMENT);
    }
    region_free(r);
    cr_assert_eq(fcntl(fd, F_GETFD), -1, "region_free closes what it took");
    region_free(NULL);
}

Test(region, keeps_its_own_copy_of_ipc_handles)
{
    struct device_region *r;

    use_cuda(1);
    cr_assert_eq(ask(2, 2 * FRAGMENT, &r), 0, "%s", e.text);
    memset(ipc[0], 9, 64);
    cr_assert_eq(r->handles[0].ipc[5], 1);
    cr_assert_eq(r->handles[0].ipc[63], 1);
    cr_assert_eq(r->handles[0].fd, -1);
    region_free(r);
}

/* One number is wrong at a time. */
Test(region, each_number_has_its_bounds)
{
    static const struct {
        uint64_t *at, value;
        const char *word;
    } wrong[] = {
        {&m.blocks, 0, "blocks is 0"},
        {&m.blocks, 1ull << 32, "blocks"},
        {&handles[0].kind, UCM_HANDLE_CUDA_IPC, "device cpu takes memfds"},
        {&handles[0].kind, UCM_HANDLE_CUDA_FD, "device cpu takes memfds"},
        {&handles[0].kind, 3, "kind 3"},
        {&handles[0].fd, 2, "descriptor 2"},
        {&handles[0].fd, UINT64_MAX, "2 came with"},
        {&handles[0].bytes, 0, "handle 0 has no bytes"},
        {&handles[0].bytes, 4 * BLOCKS * FRAGMENT - 1, "plane 3: block 15"}, /* one too few */
        {&planes[2].handle, 1, "plane 2 names handle 1"},
        {&planes[2].handle, UINT64_MAX, "plane 2"},
        {&planes[1].offset, UINT64_MAX, "plane 1: block 15"},
        {&planes[1].offset, UINT64_MAX - 15 * FRAGMENT, "plane 1: block 15"},
        {&planes[1].offset, (uint64_t)0 - 16 * FRAGMENT, "plane 1: block 15"}, /* 0 in 64 bits */
        {&planes[1].stride, UINT64_MAX, "plane 1: block 15"},
        {&planes[1].stride, UINT64_MAX / 15, "plane 1: block 15"},
        {&planes[1].stride, UINT64_MAX / 15 + 1, "plane 1: block 15"},
        {&planes[3].stride, FRAGMENT - 1, "plane 3: stride 1023"},
        {&planes[3].stride, 0, "plane 3: stride 0"},
        {&planes[3].block_bytes, 0, "plane 3: block_bytes is 0"},
        {&planes[3].block_bytes, 1ull << 32, "plane 3: block_bytes"},
        {&planes[3].layer, 2, "plane 3 is of layer 2; the namespace has 2"},
        {&planes[3].layer, UINT64_MAX, "plane 3"},
        {&planes[3].layer, 0, "plane 3 is of layer 0"},
        {&planes[0].layer, 1, "plane 1 is of layer 0 where layer 1 has 1024 of its 2048"},
        {&planes[1].layer, 1, "plane 1 is of layer 1 where layer 0 has 1024"},
    };

    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        uint64_t was = *wrong[i].at;

        *wrong[i].at = wrong[i].value;
        refused(wrong[i].word);
        *wrong[i].at = was;
    }
    handles[0].bytes = 4 * BLOCKS * FRAGMENT;
    accepted();
}

Test(region, device_kinds_and_counts)
{
    m.device = (struct proto_str){"xpu", 3};
    refused("\"cpu\" and \"cuda\"");
    m.device = (struct proto_str){"cuda", 4};
    refused("handle 0 is of kind 0");
    m.handles.n = 0;
    refused("0 handles");
    m.handles.n = UCM_MAX_HANDLES + 1;
    refused("257 handles");
    m.handles.n = 1;
    m.planes.n = 0;
    refused("0 planes");
    m.planes.n = UCM_MAX_PLANES + 1;
    refused("2049 planes");
}

Test(region, descriptors_must_be_there_and_have_one_handle_each)
{
    m.handles.n = 2;
    handles[1] = handles[0];
    refused("handles 0 and 1 name one descriptor");
    handles[1].fd = 0;
    accepted();
    close(fds[1]);
    fds[1] = -1;
    refused("descriptor 1");
    n_fds = 0;
    refused("0 came with");
}

/* It came by two descriptors. Without a look at the file that both refer to, two fragments would
 * share bytes. */
Test(region, one_memfd_that_came_twice_is_one_memory)
{
    m.handles.n = 2;
    handles[1] = handles[0];
    handles[1].fd = 0;
    planes[2].handle = planes[3].handle = 1;
    planes[2].offset = 0;
    close(fds[0]);
    close(fds[1]);
    fds[0] = memfd_create("kv", MFD_CLOEXEC);
    fds[1] = dup(fds[0]);
    refused("planes 0 and 2 overlap");
    close(fds[0]);
    fds[0] = memfd_create("other", MFD_CLOEXEC);
    accepted();
}

Test(region, handle_sizes_do_not_overflow)
{
    handles[0].bytes = UINT64_MAX;
    handles[0].offset = 2;
    refused("past any memory");
    handles[0].bytes = INT64_MAX;
    handles[0].offset = INT64_MAX;
    refused("past any memory");
    handles[0].bytes = (uint64_t)INT64_MAX;
    handles[0].offset = 0;
    accepted();
}

Test(region, ipc_handle_has_64_bytes_and_room_for_a_nonce)
{
    use_cuda(1);
    handles[0].bytes = 15;
    refused("handle 0 has 15 bytes; a CUDA IPC handle has at least 16");
    handles[0].bytes = 1 << 20;
    handles[0].ipc.n = 63;
    refused("63 bytes");
    handles[0].ipc.n = 0;
    refused("0 bytes");
}

Test(region, layers_are_filled_in_order)
{
    refused_as(2, 2 * FRAGMENT - 1, "plane 1: the fragments of layer 0 add up");
    refused_as(2, 2 * FRAGMENT + 1, "layer 0 has 2048 of its 2049");
    refused_as(2, 3 * FRAGMENT, "plane 2 is of layer 1 where layer 0 has 2048 of its 3072");
    refused_as(1, 2 * FRAGMENT, "plane 2 is of layer 1; the namespace has 1");
    m.planes.n = 3;
    refused("plane 2 is the last and layer 1 has 1024");
}

Test(region, layers_may_be_left_out)
{
    struct device_region *r;

    planes[0].layer = planes[1].layer = 1;
    planes[2].layer = planes[3].layer = 4;
    cr_assert_eq(ask(6, 2 * FRAGMENT, &r), 0, "%s", e.text);
    cr_assert_eq(r->pages.layers, 6);
    for (uint32_t layer = 0; layer <= 6; layer++)
        cr_assert_eq(r->layer_first[layer], layer <= 1 ? 0 : layer <= 4 ? 2 : 4, "layer %u", layer);
    for (uint32_t i = 0; i < 4; i++)
        cr_assert_eq(r->planes[i].slot_offset, (i < 2 ? 2 + i : 6 + i) * FRAGMENT, "plane %u", i);
    region_free(r);
}

Test(region, same_bytes_in_two_planes_are_refused)
{
    planes[3].offset = planes[2].offset;
    refused("planes 2 and 3 overlap");
    planes[3].offset = planes[2].offset + FRAGMENT - 1;
    refused("planes 2 and 3 overlap");
    planes[3].offset = planes[0].offset + 15 * FRAGMENT + 1;
    refused("overlap");
    planes[3].offset = planes[2].offset + 16 * FRAGMENT;
    accepted();
}

Test(region, interleaved_planes_share_no_byte)
{
    for (uint32_t i = 0; i < 4; i++) {
        planes[i].offset = (3 - i) * FRAGMENT; /* any order within the stride */
        planes[i].stride = 4 * FRAGMENT;
    }
    accepted();
    planes[1].offset++;
    refused("planes 0 and 1 overlap");
    planes[1].offset--;
    /* Wraps into the next block's first fragment. */
    planes[0].offset++;
    refused("planes 0 and 3 overlap");
    planes[0].offset--;
    planes[2].stride = 5 * FRAGMENT;
    refused("overlap");
}

Test(region, one_block_has_no_stride_to_speak_of)
{
    m.blocks = 1;
    for (uint32_t i = 0; i < 4; i++) {
        planes[i].offset = i * FRAGMENT;
        planes[i].stride = (i + 1) * (1ull << 40);
    }
    accepted();
}

Test(region, overlap_is_seen_through_handles_of_one_allocation)
{
    use_cuda(3); /* 0 and 2 are the same bytes */
    planes[3].handle = 2;
    planes[3].offset = 0;
    refused("planes 0 and 3 overlap");
    handles[2].offset = BLOCKS * FRAGMENT - 1;
    refused("overlap");
    handles[2].offset = 1 << 20;
    accepted();
    planes[3].handle = 1; /* another allocation */
    accepted();
}

Test(region, many_interleaved_planes)
{
    m.planes.n = UCM_MAX_PLANES;
    handles[0].bytes = 1ull << 30;
    for (uint32_t i = 0; i < UCM_MAX_PLANES; i++)
        planes[i] = (struct msg_plane){.offset = i * FRAGMENT,
                                       .stride = (uint64_t)UCM_MAX_PLANES * FRAGMENT,
                                       .block_bytes = FRAGMENT,
                                       .layer = i / 2};
    accepted_as(UCM_MAX_PLANES / 2, 2 * FRAGMENT);
    planes[2047].offset--;
    refused_as(UCM_MAX_PLANES / 2, 2 * FRAGMENT, "planes 2046 and 2047 overlap");
}

/* Layouts at random, small enough to try every byte. One is accepted exactly when no byte has two
 * owners. The exception is interleaved planes of different strides, which are always refused. */
Test(region, agrees_with_counting_bytes)
{
    uint8_t owner[256];
    unsigned accepted_n = 0, wrong = 0;

    srand(1);
    m.blocks = 3;
    m.planes.n = 3;
    handles[0].bytes = sizeof(owner);
    for (unsigned round = 0; round < 20000; round++) {
        struct device_region *r;
        bool overlap = false;
        int rc;

        memset(owner, 0, sizeof(owner));
        for (uint32_t p = 0; p < 3; p++) {
            planes[p] = (struct msg_plane){.offset = (uint64_t)(rand() % 60),
                                           .stride = 12,
                                           .block_bytes = (uint64_t)(1 + rand() % 4),
                                           .layer = 0};
            for (uint32_t b = 0; b < 3; b++)
                for (uint32_t i = 0; i < planes[p].block_bytes; i++)
                    overlap |= owner[planes[p].offset + b * 12 + i]++ > 0;
        }
        rc = ask(1, planes[0].block_bytes + planes[1].block_bytes + planes[2].block_bytes, &r);
        if (rc == 0) {
            accepted_n++;
            wrong += overlap;
            region_free(r);
            fds[1] = open("/dev/null", O_RDONLY);
        }
    }
    cr_assert_eq(wrong, 0, "%u layouts with a byte of two planes were accepted", wrong);
    cr_assert_gt(accepted_n, 1000);
}

/* ---- staging rings ---- */

Test(region, a_staging_ring_takes_its_descriptor)
{
    struct msg_ring_register ring = {
        .ipc = {ipc[0], 64}, .offset = 512, .entry_bytes = 65536, .entries = 4, .fd = 1};
    struct device_staging *s = NULL;
    int fd = fds[1];

    cr_assert_eq(staging_check(&ring, fds, n_fds, &s, &e), 0, "%s", e.text);
    cr_assert(fds[1] == -1 && s->fd == fd && fds[0] != -1);
    cr_assert(s->offset == 512 && s->entry_bytes == 65536 && s->entries == 4);
    memset(ipc[0], 9, 64);
    cr_assert_eq(s->ipc[63], 1, "its own copy");
    staging_free(s);
    cr_assert_eq(fcntl(fd, F_GETFD), -1);
    staging_free(NULL);
}

Test(region, a_staging_ring_is_of_whole_pages_and_comes_with_memory)
{
    struct msg_ring_register ring = {
        .ipc = {ipc[0], 64}, .entry_bytes = 65536 + 512, .entries = 4, .fd = 1};
    struct device_staging *s = NULL;

    cr_assert_eq(staging_check(&ring, fds, n_fds, &s, &e), -UCM_WIRE_INVALID);
    cr_assert(strstr(e.text, "multiple of 4096"), "%s", e.text);
    ring.entry_bytes = 65536;
    ring.fd = 2;
    cr_assert_eq(staging_check(&ring, fds, n_fds, &s, &e), -UCM_WIRE_INVALID);
    cr_assert(strstr(e.text, "2 descriptors"), "%s", e.text);
    cr_assert(s == NULL && fds[0] != -1 && fds[1] != -1);
}
