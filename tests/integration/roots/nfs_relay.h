/* A relay of TCP between a client of NFS and its server, in a thread: counts requests, cuts connections, damages,
 * changes and replaces replies. */
#ifndef UCMD_TESTS_NFS_RELAY_H
#define UCMD_TESTS_NFS_RELAY_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define NFS_RELAY_PORT 20500
#define NFS_RELAY_PAIRS 8

struct nfs_relay {
    atomic_uint requests; /* from client to server, since the beginning */
    atomic_uint cut;      /* connections to be cut before it goes on */
    /* One in so many bytes of replies is changed, lengths and numbers too; 0: none. */
    atomic_uint damage_every;
    /* One reply says this instead: the one after `say_after` others. For a client with one request
     * under way at a time. */
    atomic_uint say_status, say_after;
    /* In the same reply, 32 bits at this multiple of four become `word_is`; 0: none. */
    atomic_uint word_at, word_is;
    /* For nfs_relay_put; put_n is 0 when it was done. */
    pthread_mutex_t put_lock;
    const uint8_t *put;
    unsigned put_n;
    bool put_raw;
    atomic_bool stop;
    pthread_t thread;
    int listener, to_port;
    struct {
        int client, server;
        uint32_t mark_bytes, left; /* of a record from the client */
        uint8_t mark[4];
    } pairs[NFS_RELAY_PAIRS];
    unsigned n;
    uint64_t random;
};

void nfs_relay_open(struct nfs_relay *r, int to_port);
void nfs_relay_close(struct nfs_relay *r);
/* Replaces the reply after say_after others by a record with its number and these bytes, or with
 * raw by the bytes alone. The caller keeps the bytes until the relay is closed or has others. */
void nfs_relay_put(struct nfs_relay *r, const uint8_t *bytes, unsigned n, bool raw);

#endif
