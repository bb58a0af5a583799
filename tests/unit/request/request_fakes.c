#include "tests/unit/request/request_fakes.h"

#include "daemon/front/front.h"
#include "daemon/retrieval/pool.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

void conn_send(struct conn *c, struct proto_buf *b)
{
    struct answer *a = &c->answer[c->n++];

    cr_assert_lt(c->n, ANSWERS_MAX);
    *a = (struct answer){.frame = malloc(b->n), .bytes = b->n};
    cr_assert(a->frame);
    memcpy(a->frame, b->p, b->n);
    a->msgid = a->frame[PROTO_HEADER_BYTES + 2]; /* small numbers only */
    b->n = 0;
}

void conn_welcome(struct conn *c)
{
    (void)c;
}

/* No request of these tests sends descriptors. */
uint32_t conn_fds_room(struct conn *c)
{
    (void)c;
    return 0;
}

void conn_send_fds(struct conn *c, struct proto_buf *b, const int *fds, uint32_t n)
{
    (void)fds;
    cr_assert_eq(n, 0);
    conn_send(c, b);
}

bool conn_backed_up(const struct conn *c)
{
    (void)c;
    return false;
}

void conn_offend(struct conn *c, const struct ucm_error *e)
{
    (void)c;
    cr_assert_fail("%s", e->text);
}

void conn_drop(struct conn *c, const char *reason)
{
    (void)c;
    cr_assert_fail("%s", reason);
}

void conn_free(struct conn *c)
{
    c->freed = true;
}

struct summary_pool pool;

int summary_pool_new(struct uv_loop_s *loop, unsigned threads, struct summary_pool **out)
{
    (void)loop;
    (void)threads;
    list_init(&pool.jobs);
    *out = &pool;
    return 0;
}

void summary_pool_free(struct summary_pool *p)
{
    (void)p;
}

unsigned summary_pool_threads(const struct summary_pool *p)
{
    (void)p;
    return 1;
}

void summary_turns_init(struct summary_turns *turns)
{
    list_init(&turns->queues);
}

void summary_queue_init(struct summary_queue *queue, struct summary_turns *turns)
{
    queue->turns = turns;
    list_init(&queue->link);
    list_init(&queue->jobs);
}

void summary_pool_submit(struct summary_pool *p, struct summary_job *job, uint32_t pieces)
{
    cr_assert_gt(pieces, 0u);
    job->pieces = pieces;
    atomic_store(&job->stop, false);
    list_push_back(&p->jobs, &job->link);
}

void summary_job_stop(struct summary_job *job)
{
    atomic_store(&job->stop, true);
}

bool summary_job_stopped(const struct summary_job *job)
{
    return atomic_load(&job->stop);
}
