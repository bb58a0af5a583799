/* A worker in brief: it looks for the blocks of a prompt, loads them when all are cached, and
 * otherwise stores ("dumps") them for the next time. Run it twice: the second run loads.
 *
 * Build it against an installed library:
 *     cc load_or_dump.c $(pkg-config --cflags --libs libucmclient) -o load_or_dump */
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <ucmclient.h>
#include <unistd.h>

enum {
    BLOCKS = 64, /* of paged KV memory */
    LAYERS = 2,
    FRAGMENT = 4096, /* bytes of one block in one layer */
    TOKENS = 16,     /* of a block */
    PROMPT = 4,      /* blocks of the prompt */
    KV_BYTES = BLOCKS * LAYERS * FRAGMENT,
};

static int failed(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, ucm_errmsg());
    return -1;
}

/* Workers that agree on every field share their blocks. */
static int open_namespace(struct ucm_client *client, struct ucm_namespace **ns)
{
    uint32_t layers = LAYERS;
    struct ucm_identity identity = {
        .model = "meta-llama/Llama-3.1-8B",
        .dtype = "bf16",
        .layout = "example/1",
        .block_tokens = TOKENS,
        .key_bytes = 32,
        .parts = 1, /* ranks that each hold a slice of a block */
        .layers = &layers,
        .n_layers = 1,
        .layer_bytes = FRAGMENT,
    };

    return ucm_namespace_open(client, &identity, -1, ns) < 0 ? failed("namespace") : 0;
}

/* Hands the daemon the paged KV memory, one plane a layer. For a GPU's memory: device "cuda", and
 * memory of the kind UCM_MEMORY_CUDA_IPC. */
static int register_region(struct ucm_namespace *ns, int fd, struct ucm_region **region)
{
    struct ucm_memory memory = {.kind = UCM_MEMORY_MEMFD, .bytes = KV_BYTES, .fd = fd};
    struct ucm_plane planes[LAYERS];
    struct ucm_region_spec spec = {
        .blocks = BLOCKS,
        .device = "cpu",
        .memory = &memory,
        .n_memory = 1,
        .planes = planes,
        .n_planes = LAYERS,
    };

    for (uint32_t i = 0; i < LAYERS; i++)
        planes[i] = (struct ucm_plane){
            .offset = (uint64_t)i * BLOCKS * FRAGMENT,
            .stride = FRAGMENT,
            .block_bytes = FRAGMENT,
            .layer = i,
        };
    return ucm_region_register(ns, &spec, -1, region) < 0 ? failed("region") : 0;
}

static int load_or_dump(struct ucm_namespace *ns, struct ucm_region *region, void *kv)
{
    uint32_t blocks[PROMPT] = {7, 3, 5, 1}; /* which blocks of the KV memory are the prompt's */
    uint32_t tokens[PROMPT * TOKENS] = {0}, hits, lease;
    uint8_t keys[PROMPT][32];
    struct ucm_lookup lookup = {.keys = keys, .n_keys = PROMPT, .lease_ms = 5000};
    struct ucm_transfer transfer = {.keys = keys, .blocks = blocks, .n_keys = PROMPT};
    struct ucm_result result;
    struct ucm_task *task;
    int r;

    ucm_keys_sha256(NULL, tokens, TOKENS, PROMPT, keys[0]);
    if (ucm_lookup_prefix(ns, &lookup, -1, &hits, NULL, &lease) < 0)
        return failed("lookup");
    if (hits == PROMPT) {
        transfer.lease = lease; /* keeps the blocks cached until they are loaded */
        r = ucm_load(region, &transfer, -1, &task);
    } else {
        memset(kv, 42, KV_BYTES); /* in place of computing them */
        r = ucm_dump(region, &transfer, -1, &task);
    }
    if (r < 0 || ucm_task_wait(task, -1, &result) < 0)
        return failed("transfer");
    printf("%u of %d blocks were cached; %s %llu bytes\n", hits, PROMPT,
           hits == PROMPT ? "loaded" : "dumped", (unsigned long long)result.bytes);
    ucm_task_free(task);
    return 0;
}

int main(void)
{
    struct ucm_client *client;
    struct ucm_namespace *ns;
    struct ucm_region *region;
    void *kv;
    int fd, r;

    if (ucm_connect(NULL, -1, &client) < 0) { /* $UCM_SOCKET, or /run/ucmd/ucmd.sock */
        failed("connect");
        return 1;
    }
    if (ucm_shared_memory(KV_BYTES, &fd, &kv) < 0) {
        failed("memory");
        ucm_close(client);
        return 1;
    }
    r = open_namespace(client, &ns);
    if (r == 0)
        r = register_region(ns, fd, &region);
    if (r == 0) {
        r = load_or_dump(ns, region, kv);
        ucm_region_unregister(region, -1); /* only then may the memory go */
    }
    ucm_close(client);
    munmap(kv, KV_BYTES);
    close(fd);
    return r < 0;
}
