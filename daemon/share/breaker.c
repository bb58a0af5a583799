#include "daemon/share/breaker.h"

void breaker_init(struct breaker *b, uint32_t limit, uint64_t seed)
{
    *b = (struct breaker){.limit = limit, .chance = seed | 1};
}

static uint64_t chance_next(struct breaker *b)
{
    b->chance ^= b->chance << 13;
    b->chance ^= b->chance >> 7;
    b->chance ^= b->chance << 17;
    return b->chance >> 11;
}

static void pause_begin(struct breaker *b, uint64_t now_ms)
{
    b->state = BREAKER_OPEN;
    b->until_ms = now_ms + b->pause_ms + chance_next(b) % (b->pause_ms / 4 + 1);
}

bool breaker_good(struct breaker *b)
{
    bool was = breaker_closed(b);

    b->state = BREAKER_CLOSED;
    b->failures = 0;
    return !was;
}

bool breaker_bad(struct breaker *b, uint64_t now_ms)
{
    switch (b->state) {
    case BREAKER_CLOSED:
        if (++b->failures < b->limit)
            return false;
        b->pause_ms = BREAKER_PAUSE_MS;
        pause_begin(b, now_ms);
        return true;
    case BREAKER_TRIAL:
        b->pause_ms =
            b->pause_ms * 2 < BREAKER_PAUSE_MAX_MS ? b->pause_ms * 2 : BREAKER_PAUSE_MAX_MS;
        pause_begin(b, now_ms);
        return false;
    default:
        return false;
    }
}

bool breaker_try(struct breaker *b, uint64_t now_ms)
{
    if (b->state != BREAKER_OPEN || now_ms < b->until_ms)
        return false;
    b->state = BREAKER_TRIAL;
    return true;
}

void breaker_again(struct breaker *b, uint64_t now_ms)
{
    if (b->state != BREAKER_TRIAL)
        return;
    b->state = BREAKER_OPEN;
    b->until_ms = now_ms;
}
