/* trace: what chosen requests wait for, as one file that Perfetto and chrome://tracing open.
 *
 * In the file a request of the engine is a process, and each request to the daemon a row (a thread)
 * of it. Events of a row must lie inside each other or apart. So what overlaps, such as reads of one
 * block alongside copies of another, continues in a second row. */
#include "client/ctl/ctl.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <xxhash.h>

#define POLL_NS 100000000
#define LIMIT_MARGIN_MS 10000 /* the daemon ends a trace that nobody ends so long after its time */
#define ROWS 8                /* of one request to the daemon */
#define SPANS_MAX 64
#define KINDS_MAX 16

/* How long requests spent on one kind of span, together. */
struct kind {
    char name[32];
    uint64_t us, spans, longest_us;
};

struct trace_file {
    FILE *out;
    const char *path;
    bool first; /* no event is written yet */
    int failed; /* -ENOMEM */
    uint64_t requests, lost;
    struct kind kind[KINDS_MAX];
    size_t kinds;
    uint64_t slowest_us, slowest_span_us;
    char slowest[128], slowest_span[32];
    uint64_t *group; /* hashes of the requests of engines that were seen; 0: an empty place */
    size_t groups, groups_cap;
};

struct span {
    char name[32];
    uint64_t start, end, count;
    uint32_t row;
};

/* ---- events ---- */

/* Takes the event. */
static void event_write(struct trace_file *f, cJSON *event)
{
    char *text = event ? cJSON_PrintUnformatted(event) : NULL;

    cJSON_Delete(event);
    if (!text) {
        f->failed = -ENOMEM;
        return;
    }
    fprintf(f->out, "%s\n%s", f->first ? "" : ",", text);
    f->first = false;
    cJSON_free(text);
}

static cJSON *event_new(const char *phase, const char *name, uint64_t process, uint64_t row)
{
    cJSON *event = cJSON_CreateObject();

    cJSON_AddStringToObject(event, "ph", phase);
    cJSON_AddStringToObject(event, "name", name);
    ctl_json_u64(event, "pid", process);
    ctl_json_u64(event, "tid", row);
    return event;
}

static void name_write(struct trace_file *f, const char *what, uint64_t process, uint64_t row,
                       const char *name)
{
    cJSON *event = event_new("M", what, process, row);

    cJSON_AddStringToObject(cJSON_AddObjectToObject(event, "args"), "name", name);
    event_write(f, event);
}

/* Returns its args, which the caller fills before event_write. */
static cJSON *complete_new(const char *name, uint64_t process, uint64_t row, uint64_t start,
                           uint64_t us, cJSON **event)
{
    *event = event_new("X", name, process, row);
    ctl_json_u64(*event, "ts", start);
    ctl_json_u64(*event, "dur", us);
    return cJSON_AddObjectToObject(*event, "args");
}

/* ---- groups: requests of engines ---- */

static int groups_grow(struct trace_file *f)
{
    size_t cap = f->groups_cap ? 2 * f->groups_cap : 1024;
    uint64_t *group = calloc(cap, sizeof *group);

    if (!group)
        return -ENOMEM;
    for (size_t i = 0; i < f->groups_cap; i++)
        for (size_t at = f->group[i] % cap; f->group[i] != 0; at = (at + 1) % cap)
            if (group[at] == 0) {
                group[at] = f->group[i];
                break;
            }
    free(f->group);
    f->group = group;
    f->groups_cap = cap;
    return 0;
}

/* The number of the engine's request. The first time it gets a name. JSON's numbers are exact to
 * 2^53. */
static uint64_t group_of(struct trace_file *f, const char *name)
{
    uint64_t hash = (XXH3_64bits(name, strlen(name)) & ((UINT64_C(1) << 31) - 1)) | 1;
    size_t at;

    if (2 * f->groups >= f->groups_cap && groups_grow(f) != 0) {
        f->failed = -ENOMEM;
        return hash;
    }
    for (at = hash % f->groups_cap; f->group[at] != 0; at = (at + 1) % f->groups_cap)
        if (f->group[at] == hash)
            return hash;
    f->group[at] = hash;
    f->groups++;
    name_write(f, "process_name", hash, 0, name);
    return hash;
}

/* ---- records ---- */

static bool fit(const struct span *a, const struct span *b)
{
    return a->end <= b->start || b->end <= a->start || (a->start <= b->start && b->end <= a->end) ||
           (b->start <= a->start && a->end <= b->end);
}

/* Puts each span into the first row where it fits. Returns how many rows that takes. */
static uint32_t spans_lay(struct span *spans, uint32_t n)
{
    uint32_t rows = 1;

    for (uint32_t i = 0; i < n; i++) {
        uint32_t row = 0, k = 0;

        while (k < i && row < ROWS - 1) {
            if (spans[k].row != row || fit(&spans[k], &spans[i])) {
                k++;
            } else {
                row++;
                k = 0;
            }
        }
        spans[i].row = row;
        rows = row + 1 > rows ? row + 1 : rows;
    }
    return rows;
}

static uint32_t spans_read(const msgpack_object *record, struct span *spans)
{
    uint64_t end = answer_u64(record, "start_us") + answer_u64(record, "us");
    uint32_t n = answer_count(record, "spans");

    n = n < SPANS_MAX ? n : SPANS_MAX;
    for (uint32_t i = 0; i < n; i++) {
        const msgpack_object *o = answer_at(record, "spans", i);
        struct span *s = &spans[i];

        answer_text(o, "name", s->name, sizeof s->name);
        s->start = answer_u64(o, "start_us");
        s->end = s->start + answer_u64(o, "us");
        s->count = answer_u64(o, "count");
        s->end = s->end < end ? s->end : end; /* both are rounded */
        s->start = s->start < s->end ? s->start : s->end;
    }
    return n;
}

static void span_count(struct trace_file *f, const struct span *s)
{
    uint64_t us = s->end - s->start;
    size_t i = 0;

    while (i < f->kinds && strcmp(f->kind[i].name, s->name) != 0)
        i++;
    if (i == KINDS_MAX)
        return;
    if (i == f->kinds)
        memcpy(f->kind[f->kinds++].name, s->name, sizeof s->name);
    f->kind[i].us += us;
    f->kind[i].spans++;
    if (us > f->kind[i].longest_us)
        f->kind[i].longest_us = us;
}

static void record_count(struct trace_file *f, const char *name, const msgpack_object *record,
                         const struct span *spans, uint32_t n)
{
    uint64_t us = answer_u64(record, "us");
    const struct span *longest = NULL;

    f->requests++;
    for (uint32_t i = 0; i < n; i++) {
        span_count(f, &spans[i]);
        if (!longest || spans[i].end - spans[i].start > longest->end - longest->start)
            longest = &spans[i];
    }
    if (us < f->slowest_us || !longest)
        return;
    f->slowest_us = us;
    f->slowest_span_us = longest->end - longest->start;
    snprintf(f->slowest, sizeof f->slowest, "%s", name);
    memcpy(f->slowest_span, longest->name, sizeof f->slowest_span);
}

static void record_write(struct trace_file *f, const msgpack_object *record)
{
    static const char *const fields[] = {"ns",  "part", "n_keys", "ok", "bytes",
                                         "uid", "pid",  "code",   NULL};
    char method[32], request[72], tenant[260], group[400], name[128];
    uint64_t number = answer_u64(record, "number"), process, row = number * ROWS;
    struct span spans[SPANS_MAX];
    uint32_t n = spans_read(record, spans), rows = spans_lay(spans, n);
    cJSON *event, *args;

    answer_text(record, "method", method, sizeof method);
    answer_text(record, "request", request, sizeof request);
    answer_text(record, "tenant", tenant, sizeof tenant);
    if (request[0] != '\0')
        snprintf(group, sizeof group, "%s (%s)", request, tenant);
    else
        snprintf(group, sizeof group, "process %" PRIu64 " (%s)", answer_u64(record, "pid"),
                 tenant);
    process = group_of(f, group);
    for (uint32_t i = 0; i < rows; i++) {
        snprintf(name, sizeof name,
                 i == 0 ? "%s of part %" PRIu64 : "%s of part %" PRIu64 ", alongside", method,
                 answer_u64(record, "part"));
        name_write(f, "thread_name", process, row + i, name);
    }
    args = complete_new(method, process, row, answer_u64(record, "start_us"),
                        answer_u64(record, "us"), &event);
    ctl_json_counts(args, record, fields);
    if (request[0] != '\0')
        cJSON_AddStringToObject(args, "request", request);
    event_write(f, event);
    for (uint32_t i = 0; i < n; i++) {
        args = complete_new(spans[i].name, process, row + spans[i].row, spans[i].start,
                            spans[i].end - spans[i].start, &event);
        ctl_json_u64(args, "count", spans[i].count);
        event_write(f, event);
    }
    snprintf(name, sizeof name, "%s%s%s", method, request[0] != '\0' ? " of " : "", request);
    record_count(f, name, record, spans, n);
}

/* ---- the trace ---- */

static int params_read(const struct args *a, struct msg_trace *m)
{
    const char *request = args_text(a, "request"), *tenant = args_text(a, "tenant");
    size_t n;

    *m = (struct msg_trace){.op = UCM_TRACE_START,
                            .slower_us = args_number(a, "slower") * 1000,
                            .sample = args_number(a, "sample"),
                            .limit_ms = args_number(a, "seconds") + LIMIT_MARGIN_MS,
                            .bytes = args_number(a, "ring")};
    if (request) {
        n = strlen(request);
        if (n > UCM_MAX_REQUEST_BYTES) /* ids are cut to so many bytes */
            n = UCM_MAX_REQUEST_BYTES;
        m->request = (struct proto_str){request, (uint32_t)n};
    }
    if (tenant && strlen(tenant) > UCM_MAX_NAME_BYTES)
        return program_usage_error(a, "--tenant: a name has at most %d bytes", UCM_MAX_NAME_BYTES);
    if (tenant)
        m->tenant = (struct proto_str){tenant, (uint32_t)strlen(tenant)};
    return CTL_OK;
}

/* Reads records until the time is over and none is left. */
static int records_read(const struct args *a, struct trace_file *f)
{
    struct msg_trace read = {.op = UCM_TRACE_READ}, stop = {.op = UCM_TRACE_STOP};
    const struct timespec pause = {.tv_nsec = POLL_NS};
    uint64_t left_ms = args_number(a, "seconds");
    struct timespec now, end;
    bool ending = false, more = true;
    struct answer page;
    int rc = CTL_OK;

    clock_gettime(CLOCK_MONOTONIC, &end);
    end.tv_sec += (time_t)(left_ms / 1000);
    while (rc == CTL_OK && f->failed == 0 && (!ending || more)) {
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (!ending && (program_interrupted || now.tv_sec > end.tv_sec ||
                        (now.tv_sec == end.tv_sec &&
                         now.tv_nsec >= end.tv_nsec + (long)(left_ms % 1000) * 1000000)))
            ending = true;
        rc = ctl_call(a, UCM_METHOD_TRACE, ending ? &stop : &read, &page);
        if (rc != CTL_OK)
            break;
        for (uint32_t i = 0; i < answer_count(page.root, "records"); i++)
            record_write(f, answer_at(page.root, "records", i));
        more = answer_flag(page.root, "more");
        f->lost = answer_u64(page.root, "lost");
        answer_close(&page);
        if (!ending && !more)
            nanosleep(&pause, NULL);
    }
    return rc;
}

static int file_begin(struct trace_file *f)
{
    f->out = fopen(f->path, "we");
    if (!f->out)
        return program_fail(CTL_ERROR, "%s: %s", f->path, strerror(errno));
    f->first = true;
    fprintf(f->out, "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[");
    return CTL_OK;
}

static int file_end(struct trace_file *f, int rc)
{
    bool written;

    fprintf(f->out,
            "\n],\"otherData\":{\"program\":\"ucmctl " UCM_VERSION "\",\"requests\":%" PRIu64
            ",\"lost\":%" PRIu64 "}}\n",
            f->requests, f->lost);
    written = !ferror(f->out);
    written = fclose(f->out) == 0 && written;
    free(f->group);
    if (rc == CTL_OK && !written)
        return program_fail(CTL_ERROR, "%s: %s", f->path, strerror(errno));
    return rc == CTL_OK && f->failed ? program_fail(CTL_ERROR, "memory ran out") : rc;
}

static int report_json(const struct trace_file *f)
{
    cJSON *j = cJSON_CreateObject(), *spans;

    cJSON_AddStringToObject(j, "file", f->path);
    ctl_json_u64(j, "requests", f->requests);
    ctl_json_u64(j, "lost", f->lost);
    spans = cJSON_AddArrayToObject(j, "spans");
    for (size_t i = 0; i < f->kinds; i++) {
        cJSON *o = cJSON_CreateObject();

        cJSON_AddStringToObject(o, "name", f->kind[i].name);
        ctl_json_u64(o, "spans", f->kind[i].spans);
        ctl_json_u64(o, "us", f->kind[i].us);
        ctl_json_u64(o, "longest_us", f->kind[i].longest_us);
        cJSON_AddItemToArray(spans, o);
    }
    return ctl_print_json(j, false);
}

static int report(const struct trace_file *f)
{
    static const char *const titles[] = {"SPAN", ">SPANS", ">MS TOGETHER", ">MS LONGEST", NULL};
    struct table t;

    printf("%" PRIu64 " requests in %s", f->requests, f->path);
    if (f->lost > 0)
        printf(", %" PRIu64 " more were lost: choose fewer, or a larger --ring", f->lost);
    printf("\n");
    if (f->requests == 0)
        return CTL_OK;
    printf("slowest: %s, %.3f ms, of them %.3f ms %s\n\n", f->slowest, (double)f->slowest_us / 1000,
           (double)f->slowest_span_us / 1000, f->slowest_span);
    table_begin(&t, titles);
    for (size_t i = 0; i < f->kinds; i++) {
        table_cell(&t, "%s", f->kind[i].name);
        table_cell(&t, "%" PRIu64, f->kind[i].spans);
        table_cell(&t, "%.3f", (double)f->kind[i].us / 1000);
        table_cell(&t, "%.3f", (double)f->kind[i].longest_us / 1000);
    }
    return ctl_table_end(&t);
}

int cmd_trace(const struct args *a)
{
    struct trace_file f = {.path = args_text(a, "out")};
    struct sigaction action = {.sa_handler = program_interrupt};
    struct msg_trace start;
    struct answer answer;
    int rc;

    if (!f.path)
        return program_usage_error(a, "--out FILE says where to write the trace");
    rc = params_read(a, &start);
    if (rc == CTL_OK)
        rc = ctl_call(a, UCM_METHOD_TRACE, &start, &answer);
    if (rc != CTL_OK)
        return rc;
    answer_close(&answer);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    rc = file_begin(&f);
    if (rc != CTL_OK)
        return rc;
    rc = file_end(&f, records_read(a, &f));
    if (rc != CTL_OK)
        return rc;
    return args_given(a, "json") ? report_json(&f) : report(&f);
}
