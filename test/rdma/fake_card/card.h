/* card.h - what the files of the fake card share.  It has one thread; everything is its own.
 *
 *   card.c    the loop, and clients
 *   calls.c   their requests
 *   queues.c  QPs and CQs
 *   move.c    registered memory
 *   work.c    work requests
 *
 * A client is a context that a process has open, known by its socket.  If the process dies while a forked child holds the
 * socket, the client stays, as with a card: the kernel ends a context with the last descriptor. */
#ifndef FAKE_CARD_H
#define FAKE_CARD_H

#include <sys/types.h>

#include "test/rdma/fake_verbs/fake.h"

struct card_pd {
    uint32_t handle;
    struct card_pd *next;
};

struct card_mr {
    uint32_t handle, key, pd;
    int access;
    uint64_t at, bytes;
    struct card_mr *next;
};

struct card_channel {
    uint32_t handle;
    int fd;
    struct card_channel *next;
};

struct card_cq {
    uint32_t handle;
    struct fake_cq_ring *ring;
    size_t mapped;
    struct card_channel *channel; /* NULL: none */
    struct card_client *client;
    bool overrun; /* nothing comes into it any more */
    struct card_cq *next;
};

struct card_qp {
    struct card_client *client;
    uint32_t number, pd;
    int state, sig_all;
    struct tly_ibv_qp_attr attr;
    struct card_cq *send_cq, *recv_cq;
    struct fake_qp_ring *ring;
    size_t mapped;
    uint32_t sq_at, rq_at; /* the first that is not done */
    /* State of the work request at sq_at: */
    bool begun, done, lost;
    int status;
    uint32_t offset;   /* bytes of a WRITE that have landed */
    uint64_t ready_at; /* nothing before */
    uint64_t patience; /* when its retries are used up; 0: it has had an answer */
    int rnr_retries;   /* left */
    bool heard;        /* a message has come */
    struct card_qp *next;
};

struct card_client {
    int sock, bell, events;
    pid_t pid;
    struct fake_page *page;
    struct fake_faults faults;
    uint64_t works, random;
    bool infiniband, vanished;
    uint16_t lid;
    uint32_t gids;
    struct tly_ibv_gid_entry gid[FAKE_GIDS];
    struct card_pd *pds;
    struct card_mr *mrs;
    struct card_channel *channels;
    struct card_cq *cqs;
    struct card_qp *qps;
    struct card_client *next;
};

extern struct card_client *card_clients;

/* --- card.c --- */

uint64_t card_now(void); /* ns */
uint32_t card_handle(void);
/* Take one off a list that its field `next` makes. */
#define CARD_UNLINK(list, one) \
    do { \
        __typeof__(one) *at = &(list); \
        while (*at != (one)) \
            at = &(*at)->next; \
        *at = (one)->next; \
    } while (0)

/* --- calls.c --- */

/* Answer a request, whose descriptors are taken over.  Returns errno. */
int card_answer(struct card_client *c, const struct fake_request *q, int fds[3], struct fake_reply *out);
void card_finish(struct card_client *c);
void card_event(struct card_client *c, int type, uint32_t handle);
void card_vanish(struct card_client *c);

/* --- queues.c --- */

void card_complete(struct card_cq *cq, const struct fake_cqe *e, bool solicited);
int card_modify(struct card_qp *q, const struct tly_ibv_qp_attr *a, int mask);
/* From now on what is posted is flushed. */
void card_fail_qp(struct card_qp *q);
/* The other end, if it answers. */
struct card_qp *card_peer(const struct card_qp *q);

/* --- move.c --- */

/* Registered memory in pieces, in order. */
struct card_extent {
    struct card_client *client; /* NULL: `bytes` */
    const uint8_t *bytes;
    struct tly_ibv_sge sge[FAKE_SGES];
    uint32_t count, length;
};

/* The memory of a slot; false: it may not be read (access 0) or written so. */
bool card_find(const struct card_qp *q, const struct fake_slot *s, int access, struct card_extent *out);
/* The memory that a WRITE names, at this end. */
bool card_find_remote(const struct card_qp *q, uint64_t at, uint64_t bytes, uint32_t key,
                      struct card_extent *out);
/* Move bytes from an offset in each.  Returns a status: LOC_PROT_ERR or REM_OP_ERR if memory is not there. */
int card_move(const struct card_extent *from, uint32_t skip_from, const struct card_extent *to,
              uint32_t skip_to, uint32_t bytes);

/* --- work.c --- */

/* Go on with a queue pair.  False: it has nothing to do before *wake, which only becomes earlier. */
bool card_work(struct card_qp *q, uint64_t *wake);

#endif
