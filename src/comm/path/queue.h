/* queue.h - parts wait for their turn: priority, credit, windows (queue.c).  Owner: the loop. */
#ifndef TLY_COMM_QUEUE_H
#define TLY_COMM_QUEUE_H

#include <stdint.h>

#include "tally/tally.h"

struct tly_part;
struct tly_peer;
struct tally_op;

int tly_queue_part(tally_comm *c, struct tly_part *p);
void tly_queue_admit(tally_comm *c);
/* The part goes to another service, to which it came in epoch `came`: what the old one has of it is void. */
void tly_queue_move(tally_comm *c, struct tly_part *p, uint16_t to, uint32_t came);
/* The part waits no longer in any queue, if it did, and its link does not read its input any more. */
void tly_queue_remove(struct tly_part *p);
/* Take the parts of an operation that has failed out of all queues; tell services to forget them. */
void tly_queue_withdraw(tally_comm *c, struct tally_op *op);
/* This rank takes back what it has begun: its home says the reason to all, unless all have begun it. */
void tly_queue_cancel(tally_comm *c, struct tally_op *op);
/* The service wants the part from its byte `start` on. */
void tly_queue_again(tally_comm *c, struct tly_part *p, uint32_t start);
/* The connection is no more: nothing is in flight there. */
void tly_queue_lost(struct tly_peer *p);
void tly_queue_accepted(struct tly_peer *peer, uint64_t accepted);

#endif
