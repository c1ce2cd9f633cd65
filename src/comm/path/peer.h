/* peer.h - connections to services: one for each place in the roster.
 *
 * Owner: the loop. */
#ifndef TLY_COMM_PEER_H
#define TLY_COMM_PEER_H

#include <stdbool.h>
#include <stdint.h>

#include "base/list.h"
#include "comm/epoch/traffic.h"
#include "sched/sched.h"
#include "tally/tally.h"
#include "transport/outbox.h"
#include "transport/transport.h"

struct tly_part;
struct tally_op;

/* How it is reached.  Owner: peer.c. */
struct tly_dialling {
    uint32_t skip;                 /* media that are not tried now: they have not connected, */
    uint32_t skip_ever;            /* or an open connection by one was lost (tly_link_skip) */
    int losses;                    /* of the connection, lately */
    int64_t at, lost_at, retry_at; /* awake clock */
};

/* The connection to one summation service.  Owner: the loop. */
struct tly_peer {
    tally_comm *comm;
    uint32_t index;
    struct tly_link *link;
    char name[200];
    struct tly_sched_queue queue;  /* of parts; its window, in charge bytes */
    struct tly_part *first, *last; /* admitted */
    struct tly_outbox outbox;
    uint64_t accepted;       /* of what was handed over */
    uint64_t received;       /* results landed */
    uint32_t told;           /* groups' lists that it knows */
    uint64_t stable;         /* of those, all ranks have */
    struct tly_list kept;    /* of keeps: results [stable, received) */
    struct tly_list doubted; /* of keeps: to be said, or said, to a service that may know of them */
    struct tly_list
        decided; /* of keeps: verdicts, for a rank that comes for one after this service has died */
    uint32_t decided_count;
    bool open;
    bool mortal;      /* may die alone: a tallyd */
    uint64_t unasked; /* bytes of keeps from it for which nothing here has waited */
    bool known;       /* has been open before */
    bool gone;        /* out of the job */
    bool accused;     /* the coordinator has been told that it cannot be reached */
    struct tly_dialling dialling;
    uint64_t incarnation;
    bool reported; /* answer to tally_comm_report */
    uint64_t report[7];
    struct tly_glances glances;
};

/* post.c */
/* Send a control frame to the service; out of memory: the communicator fails. */
void tly_peer_post(struct tly_peer *p, const struct tly_frame *f, const void *data, size_t len);
/* The header of a push of this part, from which those of all other frames about it are made. */
void tly_peer_head(const struct tly_part *p, struct tly_frame *f);
/* Ask an operation's home for whom it waits (tly_op_set_late). */
void tly_peer_ask_late(struct tly_peer *p, const struct tally_op *op);

/* peer.c */
void tly_peer_init(struct tly_peer *p, tally_comm *c, uint32_t index);
/* To the service of this place in the newest roster. */
int tly_peer_connect(struct tly_peer *p);
/* The service cannot be reached: tell the coordinator, which decides for all.  why: a sentence's end. */
void tly_peer_give_up(struct tly_peer *p, const char *why);
/* Forget the connection; nothing follows. */
void tly_peer_drop(struct tly_peer *p);
/* Try again, or give up, where the connection is lost. */
void tly_peer_tick(struct tly_peer *p);
void tly_peer_finish(struct tly_peer *p);

#endif
