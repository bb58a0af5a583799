#include "daemon/shared/breaker.h"

void breaker_init(struct breaker *b, uint32_t limit, uint64_t seed)
{
    *b = (struct breaker){.limit = limit};
    backoff_init(&b->backoff, BREAKER_PAUSE_MS, BREAKER_PAUSE_MAX_MS, seed | 1);
}

bool breaker_good(struct breaker *b)
{
    bool was = breaker_closed(b);

    b->state = BREAKER_CLOSED;
    b->failures = 0;
    backoff_reset(&b->backoff);
    return !was;
}

bool breaker_trip(struct breaker *b, uint64_t now_ms)
{
    bool was = breaker_closed(b);

    if (b->state == BREAKER_OPEN)
        return false;
    b->state = BREAKER_OPEN;
    (void)backoff_fail(&b->backoff, now_ms);
    return was;
}

bool breaker_bad(struct breaker *b, uint64_t now_ms)
{
    if (breaker_closed(b) && ++b->failures < b->limit)
        return false;
    return breaker_trip(b, now_ms);
}

bool breaker_try(struct breaker *b, uint64_t now_ms)
{
    if (b->state != BREAKER_OPEN || !backoff_ready(&b->backoff, now_ms))
        return false;
    b->state = BREAKER_TRIAL;
    return true;
}

void breaker_again(struct breaker *b, uint64_t now_ms)
{
    if (b->state != BREAKER_TRIAL)
        return;
    b->state = BREAKER_OPEN;
    b->backoff.until = now_ms;
}
