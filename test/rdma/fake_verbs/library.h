/* library.h - what the files of the fake library share. */
#ifndef FAKE_LIBRARY_H
#define FAKE_LIBRARY_H

#include "test/rdma/fake_verbs/fake.h"

#define EXPORT __attribute__((visibility("default")))

/* --- words.c --- */

struct fake_settings {
    int devices, inline_bytes, wr, cqe;
    bool infiniband, dontfork;
    uint64_t memlock;
    char fabric[100], log[200];
    struct fake_faults faults;
};

/* Those of FAKE_VERBS, read at the first call. */
const struct fake_settings *fake_settings(void);
/* The errno with which a call of this name fails now, or 0. */
int fake_fails(const char *call);
void fake_take_words(const char *words);
uint64_t fake_own_count(enum fake_verbs_count which);
void fake_add(enum fake_verbs_count which, int64_t n);
void fake_die(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

/* --- devices.c --- */

struct fake_device {
    struct tly_ibv_device base; /* first */
    int references;             /* of lists and contexts */
    int mtu;
    uint64_t guid;
    uint16_t lid;
    uint32_t gids;
    struct tly_ibv_gid_entry gid[FAKE_GIDS];
};

struct fake_context {
    struct tly_ibv_context base; /* first */
    struct fake_device *device;
    struct fake_page *page;
    int bell;                       /* eventfd: there is work for the card */
    uint64_t seen_bytes, seen_rnrs; /* of the page's */
    pthread_mutex_t call_lock;      /* a request and its reply */
    pthread_mutex_t lock;           /* guards the rest; taken behind a CQ's */
    int pds, mrs, channels;
    struct fake_cq *cqs;
    struct fake_qp *qps;
    struct fake_context *next; /* of those that are open */
};

static inline struct fake_context *fake_context_of(struct tly_ibv_context *c)
{
    return (struct fake_context *)c;
}

/* Add what the card has counted. */
void fake_collect(struct fake_context *c);

/* --- call.c --- */

/* Returns the reply's errno.  `fds` are lent. */
int fake_call(struct fake_context *c, struct fake_request *q, const int *fds, int count,
              struct fake_reply *out);
/* A socket to the card, which is started if there is none. */
int fake_connect(void);
/* Tell the card of work, if it sleeps. */
void fake_ring(struct fake_context *c);

/* --- objects.c --- */

struct fake_channel {
    struct tly_ibv_comp_channel base; /* first */
    uint32_t handle;
};

struct fake_cq {
    struct tly_ibv_cq base; /* first */
    struct fake_cq_ring *ring;
    size_t mapped;
    pthread_mutex_t lock; /* of those that poll */
    uint32_t got_events;  /* by get_cq_event */
    int users;            /* QPs */
    struct fake_cq *next;
};

struct fake_qp {
    struct tly_ibv_qp base; /* first */
    struct fake_qp_ring *ring;
    size_t mapped;
    struct tly_ibv_qp_cap cap;
    pthread_mutex_t send_lock, recv_lock;
    _Atomic uint32_t sq_tail, rq_tail; /* slots before these are free */
    uint32_t got_events;
    struct fake_qp *next;
};

/* --- posts.c --- */

/* A queue pair's completions that have not been polled are polled no more. */
void fake_purge(struct tly_ibv_cq *cq, uint32_t number);
/* It is RESET, and what was posted is gone. */
void fake_reset_qp(struct fake_qp *qp);
void fake_fill_ops(struct tly_ibv_context *c);

#endif
