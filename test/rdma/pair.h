/* pair.h - a queue pair with all that it needs, and what tests do with two of them: over the fake card, or over a real one.
 *
 * Everything that is expected to succeed does, or the test fails. */
#ifndef TEST_RDMA_PAIR_H
#define TEST_RDMA_PAIR_H

#include <stdbool.h>

#include "transport/rdma/verbs.h"

enum { END_BYTES = 1 << 20, END_WR = 16, END_INLINE = 64 };

/* What the other end must know; it is sent as it is. */
struct end_address {
    uint32_t number, psn, key;
    uint64_t at;
    union tly_ibv_gid gid;
    uint16_t lid;
    int mtu;
};

struct end {
    struct tly_ibv_context *context;
    struct tly_ibv_pd *pd;
    struct tly_ibv_comp_channel *channel;
    struct tly_ibv_cq *cq;
    struct tly_ibv_qp *qp;
    struct tly_ibv_mr *mr; /* of `memory` */
    uint8_t *memory;       /* END_BYTES */
    struct end_address own;
    int gid_index;
    /* Set before end_connect() if others are wanted: */
    int cqe, timeout, retries, rnr_retries, rnr_timer;
};

/* Open a device for end 0 or 1: the first whose port is up, or the end's in TEST_RDMA_DEVICE ("DEVICE,DEVICE"). */
void end_open(struct end *e, int which);
/* INIT: receives can be posted. */
void end_init(struct end *e);
/* RTR and RTS. */
void end_connect(struct end *e, const struct end_address *to);
/* Two ends in this process. */
void ends_open(struct end e[2]);
void ends_close(struct end e[2]);
void end_destroy_qp(struct end *e);
void end_close(struct end *e);

struct tly_ibv_sge end_sge(const struct end *e, size_t at, uint32_t bytes);
/* Post a receive into memory from `at`. */
void end_receive(struct end *e, uint64_t id, size_t at, uint32_t bytes);
/* Post; returns what post_send does. */
int end_send(struct end *e, uint64_t id, size_t at, uint32_t bytes, unsigned flags);
/* Into the other end's memory. */
int end_write(struct end *e, uint64_t id, size_t at, uint32_t bytes, const struct end_address *to,
              size_t there, unsigned flags);
/* The next completion, which comes. */
struct tly_ibv_wc end_wait(struct end *e);
/* It has this status and id. */
void end_expect(struct end *e, uint64_t id, int status);
/* Is one there? */
bool end_poll(struct end *e, struct tly_ibv_wc *out);
/* The next async event, which comes; acknowledged. */
int end_event(struct end *e);
/* State by state, without the wait. */
int end_modify(struct end *e, int state);

#endif
