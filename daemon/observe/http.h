/* The listener of monitoring: the pages of pages.h over HTTP, on a Unix socket and an address of
 * TCP.
 *
 * One thread does all of it, by libmicrohttpd. It reads what the event loop published and never
 * waits for the event loop; the event loop never waits for it. A connection carries one request.
 *
 * If the publication is older than HTTP_FRESH_MS, a page asks the event loop for a new one. It is
 * answered when that comes, or after as long again from the old one: a stuck loop delays no answer
 * further.
 *
 * Bounds, so that clients of any kind cost nobody else anything:
 * - HTTP_CONNECTIONS on each socket. At the bound a new one takes the place of the oldest that has
 *   not sent its request, else of the oldest that is older than HTTP_BUSY_MS; else it waits in the
 *   backlog.
 * - Each ends after HTTP_LIFE_MS, whatever it does; its request's head has HTTP_HEAD_BYTES.
 * - No close() of a descriptor that a client sends waits in the thread; one that does keeps its
 *   connection's place.
 * - A text is rendered once for each publication, and shared by all that ask for it. */
#ifndef UCMD_OBSERVE_HTTP_H
#define UCMD_OBSERVE_HTTP_H

#include "daemon/base/listener.h"
#include "daemon/observe/published.h"

#define HTTP_LISTENERS 2
#define HTTP_CONNECTIONS 8
#define HTTP_LIFE_MS 5000
#define HTTP_BUSY_MS 1000
#define HTTP_HEAD_BYTES (8u << 10)
#define HTTP_FRESH_MS 100

struct http;

struct http_options {
    /* Up to HTTP_LISTENERS, which http_new takes over, also when it fails. */
    struct listener *listeners;
    size_t n_listeners;
    struct published *published; /* borrowed; the thread is its reader */
    /* Runs on the thread of http: have the event loop publish, then call http_published. */
    void (*ask_cb)(void *ctx);
    void *ctx;
};

/* Starts the thread. 0 or -errno. */
int http_new(const struct http_options *o, struct http **out);
/* Ends every connection, joins the thread, closes the listeners; NULL is allowed. */
void http_free(struct http *h);
/* The event loop has published what ask_cb asked for. One system call. */
void http_published(struct http *h);

#endif
