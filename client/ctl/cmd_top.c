/* top: what happens now, by tenant and namespace. */
#include "client/ctl/ctl.h"
#include "client/ctl/screen.h"
#include "client/ctl/top.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* A screen that nobody moves is no screen: its calls wait no longer. */
#define LIVE_TIMEOUT_MS 5000

struct top {
    const struct args *a;
    bool live, json;
    int timeout_ms, every_ms;
    uint64_t frames, wanted;     /* shown; 0: no end */
    struct top_sample sample[2]; /* in turn */
    int last;
};

static int now_read(struct top *t)
{
    const struct ctl *c = t->a->ctx;

    top_close(&t->sample[!t->last]);
    return top_read(c->client, t->timeout_ms, &t->sample[!t->last]);
}

static void pause_ms(int ms)
{
    struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L};

    nanosleep(&t, NULL);
}

/* A frame, as one that has no terminal gets it. */
static int print_frame(struct top *t, const struct top_frame *f)
{
    if (t->json)
        return ctl_print_json(top_json(f), true);
    if (t->frames > 0)
        putchar('\n');
    if (top_print(f, stdout) != 0)
        return program_fail(CTL_ERROR, "memory ran out");
    fflush(stdout);
    return CTL_OK;
}

static int show_frame(struct top *t, const struct top_frame *f)
{
    char *text = NULL;
    size_t n = 0;
    FILE *out;
    int rc;

    if (!t->live)
        return print_frame(t, f);
    out = open_memstream(&text, &n);
    if (out == NULL)
        return program_fail(CTL_ERROR, "memory ran out");
    rc = top_print(f, out);
    if (fclose(out) == 0 && rc == 0)
        screen_show(text);
    free(text);
    return rc == 0 ? CTL_OK : program_fail(CTL_ERROR, "memory ran out");
}

/* A daemon that went away may come back: the screen says so and goes on. */
static void show_trouble(const struct top *t, int status)
{
    const char *why = ucm_errmsg();
    char text[512];

    snprintf(text, sizeof text, "The daemon at %s does not answer: %s\nTrying again. q ends.\n",
             program_socket(t->a), why[0] != '\0' ? why : ucm_strerror(status));
    screen_show(text);
}

/* One step: reads, and shows what happened since the sample before. */
static int step(struct top *t)
{
    struct top_frame f;
    int rc = now_read(t);

    if (rc != 0) {
        if (!t->live)
            return ctl_status(t->a, rc);
        show_trouble(t, rc);
        return CTL_OK;
    }
    if (t->sample[t->last].x != NULL && top_frame(&t->sample[t->last], &t->sample[!t->last], &f)) {
        rc = show_frame(t, &f);
        t->frames++;
    }
    t->last = !t->last;
    return rc;
}

static int run(struct top *t)
{
    int rc = step(t); /* the first sample, of which nothing is shown */

    if (rc == CTL_OK && t->live)
        screen_show("ucmd: reading for the first interval. q ends.\n");
    while (rc == CTL_OK && (t->wanted == 0 || t->frames < t->wanted)) {
        if (t->live) {
            int key = screen_wait(t->every_ms);

            if (key == 'q' || key == 'Q' || key == 4 /* Ctrl-D */)
                break;
        } else {
            pause_ms(t->every_ms);
        }
        rc = step(t);
    }
    return rc;
}

int cmd_top(const struct args *a)
{
    struct top t = {.a = a,
                    .json = args_given(a, "json"),
                    .timeout_ms = (int)args_number(a, "timeout"),
                    .every_ms = (int)args_number(a, "interval"),
                    .wanted = args_number(a, "count")};
    int rc = ctl_connect(a);

    if (rc != CTL_OK)
        return rc;
    if (!t.json && isatty(STDIN_FILENO) && isatty(STDOUT_FILENO) && screen_open() == 0) {
        t.live = true;
        t.timeout_ms = t.timeout_ms < LIVE_TIMEOUT_MS ? t.timeout_ms : LIVE_TIMEOUT_MS;
    } else if (!args_given(a, "count")) {
        t.wanted = 1;
    }
    rc = run(&t);
    screen_close();
    top_close(&t.sample[0]);
    top_close(&t.sample[1]);
    return rc;
}
