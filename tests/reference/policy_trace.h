/* The trace that the studies replay: requests, each a chain of numbered blocks. Part of one program
 * each: plain state. A line has "hash_ids": the numbers of a request's blocks, head first. A trace of
 * `ucm-bench record` begins with "ucm_trace" and also has lines without; they are skipped. */
#ifndef UCM_TESTS_POLICY_TRACE_H
#define UCM_TESTS_POLICY_TRACE_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct request {
    uint32_t *id;
    uint32_t n;
    double when; /* seconds since the start */
};

static struct request *requests;
static uint32_t n_requests, n_ids, cap_requests;
static uint64_t n_references;

static void *zeroed(size_t n, size_t size)
{
    void *p = calloc(n ? n : 1, size);

    if (!p)
        abort();
    return p;
}

static void request_add(const uint32_t *id, uint32_t n)
{
    struct request r = {.n = n};

    r.id = zeroed(n, sizeof(*r.id));
    memcpy(r.id, id, n * sizeof(*r.id));
    n_references += n;
    if (n_requests == cap_requests) {
        cap_requests = cap_requests ? cap_requests * 2 : 1024;
        requests = realloc(requests, cap_requests * sizeof(*requests));
        if (!requests)
            abort();
    }
    requests[n_requests++] = r;
}

static void request_parse(const cJSON *ids, const cJSON *timestamp)
{
    uint32_t n = (uint32_t)cJSON_GetArraySize(ids), i = 0, *id = zeroed(n, sizeof(*id));
    const cJSON *number;

    cJSON_ArrayForEach(number, ids) {
        id[i] = (uint32_t)number->valuedouble;
        n_ids = id[i] >= n_ids ? id[i] + 1 : n_ids;
        i++;
    }
    request_add(id, n);
    requests[n_requests - 1].when = cJSON_IsNumber(timestamp) ? timestamp->valuedouble / 1000 : 0;
    free(id);
}

static int trace_read(const char *path)
{
    FILE *f = fopen(path, "r");
    char *line = NULL;
    bool recorded = false;
    size_t cap = 0;
    int rc = 0;

    if (!f) {
        perror(path);
        return -1;
    }
    while (rc == 0 && getline(&line, &cap, f) > 0) {
        cJSON *o = cJSON_Parse(line);
        const cJSON *ids = cJSON_GetObjectItem(o, "hash_ids");
        const cJSON *version = cJSON_GetObjectItem(o, "ucm_trace");

        if (cJSON_IsNumber(version))
            recorded = version->valueint == 1;
        if (cJSON_IsArray(ids))
            request_parse(ids, cJSON_GetObjectItem(o, "timestamp"));
        else if (!recorded || !cJSON_IsObject(o))
            rc = -1;
        cJSON_Delete(o);
    }
    free(line);
    fclose(f);
    if (rc != 0)
        fprintf(stderr, "%s: request %u has no hash_ids\n", path, n_requests + 1);
    return rc;
}

/* A cache of that many percent of the blocks must hold each request; the simulations rely on it. */
static inline bool trace_fits(double percent)
{
    uint32_t longest = 0;

    for (uint32_t i = 0; i < n_requests; i++)
        longest = requests[i].n > longest ? requests[i].n : longest;
    if (n_ids * percent / 100 >= longest + 1.0)
        return true;
    fprintf(stderr, "%g %% of %u blocks do not hold the longest request, %u\n", percent, n_ids,
            longest);
    return false;
}

static void trace_free(void)
{
    for (uint32_t i = 0; i < n_requests; i++)
        free(requests[i].id);
    free(requests);
    requests = NULL;
    n_requests = n_ids = cap_requests = 0;
    n_references = 0;
}

#endif
