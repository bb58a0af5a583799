#include "client/ctl/doctor.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

void doctor_add(struct doctor *d, enum verdict verdict, const char *check, const char *remedy,
                const char *format, ...)
{
    struct finding *f = &d->finding[d->n];
    va_list ap;

    if (d->n == DOCTOR_FINDINGS)
        return;
    d->n++;
    f->verdict = verdict;
    f->check = check;
    f->remedy = remedy;
    va_start(ap, format);
    vsnprintf(f->text, sizeof f->text, format, ap);
    va_end(ap);
}

bool doctor_line(const char *path, char *buf, size_t n)
{
    FILE *f = fopen(path, "r");
    bool got = f != NULL && fgets(buf, (int)n, f) != NULL;

    if (f != NULL)
        fclose(f);
    if (got)
        buf[strcspn(buf, "\n")] = '\0';
    return got;
}

double doctor_now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}
