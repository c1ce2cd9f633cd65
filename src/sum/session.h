/* session.h - a rank's connection: what it may push, and what it is sent.  Owner: the loop. */
#ifndef TLY_SUM_SESSION_H
#define TLY_SUM_SESSION_H

#include <stdbool.h>
#include <stdint.h>

#include "base/heap.h"
#include "base/list.h"
#include "base/map.h"
#include "membership/measure.h"
#include "transport/outbox.h"
#include "transport/transport.h"

struct tly_answer;
struct tly_round;
struct tly_slot;
struct tly_frame;
struct tly_house;
struct tly_job;

/* ms for which the news of accepted bytes waits for a result that tells it. */
enum { TLY_COUNTS_MS = 20 };

/* What the service keeps for a rank's sake.  It is bounded, because an admitted rank may mean ill, and it outlives the rank's
 * connections, because such a rank may connect again and again. */
struct tly_burden {
    uint32_t opened; /* rounds that it has opened and that not all ranks have pushed */
    uint32_t owed;   /* rounds whose answer it has not confirmed */
    uint32_t lists;  /* groups that it was the first to tell, */
    uint32_t named;  /* and the ranks in them */
};

/* What a rank said last about having joined (tally_join).  Outlives its connections. */
struct tly_joined {
    bool on;
    struct tly_map rounds; /* key of a tensor -> how often it had submitted that, as a pointer */
    bool coming;           /* that list is still coming, */
    uint32_t session;      /* over this session */
};

/* One rank's connection. */
struct tly_session {
    struct tly_list node; /* in house->lobby until the secret is proved, then in job->sessions */
    struct tly_house *house;
    struct tly_job *job; /* NULL: not said yet, or unknown here */
    struct tly_link *link;
    uint32_t rank;
    uint32_t id;                /* counts sessions, from 1 */
    uint32_t done_epoch;        /* its rank has said what it has in doubt since this epoch began */
    bool speaks;                /* it has named a part of a shared tensor since it last said DONE */
    uint64_t held;              /* bytes that its connection holds of the house's budget */
    bool proved;                /* its peer knows the job's secret */
    bool watcher;               /* not a rank: asks for the status, or measures before the job begins */
    struct tly_meter_flow flow; /* of a watcher that measures */
    bool left;                  /* has said goodbye */
    struct tly_map groups;      /* number -> struct tly_members, as its rank has told */
    uint32_t taken;             /* bytes of the fragment under way that are counted already */
    uint64_t pushed, accepted, granted, answered; /* charge bytes */
    uint32_t lacking;              /* its slots that are SLOT_ABSENT or SLOT_AGAIN: they wait for its push */
    struct tly_heap ready;         /* answers with bytes to send */
    struct tly_outbox outbox;      /* a letter's tag: the round whose verdict it is (a reference) */
    struct tly_round **deliveries; /* owned ring of rounds answered and not yet stable (references) */
    uint64_t delivered, received, stable; /* counts; the ring holds [stable, delivered) */
    uint64_t
        told; /* deliveries that the rank says it has; past `received` while the medium still reads them */
    uint64_t asked,
        asked_last; /* the rank waits to hear that so many deliveries are stable: its first question
                                   that is open, and its last */
    uint32_t ring_room;
};

/* session.c */
/* Send a control frame.  verdict: the round whose answer it is, or NULL. */
int tly_session_post(struct tly_session *p, const struct tly_frame *f, const void *data, size_t len,
                     struct tly_round *verdict);
/* Have the next header tell the counts.  bytes: how much of that is news to the rank. */
void tly_session_counts(struct tly_session *p, uint32_t bytes);

/* window.c */
/* Has the rank opened so many rounds to which others have not come that it may open no more? */
bool tly_window_crowded(const struct tly_session *p);
/* One rank more has pushed the round or spoken of it. */
void tly_window_arrived(struct tly_job *job, struct tly_round *r);
/* The round is nobody's burden any more. */
void tly_window_lift(struct tly_job *job, struct tly_round *r);
/* The round has an answer that this rank has not confirmed; it has. */
void tly_window_owe(struct tly_job *job, struct tly_round *r, uint32_t rank);
void tly_window_confirm(struct tly_job *job, struct tly_round *r, uint32_t rank);
/* Open the rank's window as far as it may be open. */
void tly_window_grant(struct tly_session *p);
/* The same for all ranks but this one (NULL: for all): they may have waited behind what only a new round can free. */
void tly_window_grant_others(struct tly_job *job, const struct tly_session *p);
/* A push of so many bytes begins and is not wanted: the window is as before. */
void tly_window_pass(struct tly_session *p, uint32_t length);
/* The slot's push needs no window any more. */
void tly_window_give_back(struct tly_job *job, uint32_t rank, struct tly_slot *slot);
/* `bytes` of a part of `length` have been taken off the connection. */
void tly_window_accept(struct tly_session *p, uint32_t bytes, uint32_t length);

/* answers.c */
/* Bytes of the result that this rank is sent. */
uint32_t tly_answers_length(const struct tly_round *r, uint32_t rank);
/* Queue the answers that have something to send. */
void tly_answers_queue(struct tly_job *job, struct tly_round *r);
/* The next fragment of the most urgent one. */
bool tly_answers_next(struct tly_session *p, struct tly_outgoing *out);
/* Room for one more delivery; false: out of memory. */
bool tly_answers_reserve(struct tly_session *p);
/* The round's answer, a result or a verdict, has gone out whole. */
void tly_answers_delivered(struct tly_session *p, struct tly_round *r);
/* The rank has the answer.  True: it was the last, and the round is no more. */
bool tly_answers_confirmed(struct tly_job *job, struct tly_round *r, uint32_t rank);
/* The rank says that it has so many of its answers.  One that the medium still reads is kept until tly_answers_sent(). */
void tly_answers_received(struct tly_session *p, uint64_t count);
/* An operation of the rank waits for nothing but the news that what the rank has is stable: tell that at once. */
void tly_answers_asked(struct tly_session *p);
/* The medium has completed a fragment of this answer.  The answer may be gone afterwards. */
void tly_answers_sent(struct tly_session *p, struct tly_answer *a);
/* Forget deliveries that have become stable. */
void tly_answers_settle(struct tly_job *job);

/* joining.c */
/* JOINED has come.  -EPROTO (*why), -ENOMEM. */
int tly_joining_learn(struct tly_session *p, const struct tly_frame *f, const void *data, const char **why);

/* frames.c */
/* The link's calls for a frame (transport/transport.h); user: a session. */
int tly_frames_header(void *user, struct tly_link *l, const struct tly_frame *f, struct tly_landing *land,
                      const char **why);
void tly_frames_landed(void *user, struct tly_link *l, const struct tly_frame *f, uint32_t bytes);
int tly_frames_frame(void *user, struct tly_link *l, const struct tly_frame *f, void *data, const char **why);

/* peers.c */
/* A connection came: make it a session in the house's lobby, which is config->user. */
int tly_peers_accept(struct tly_house *house, struct tly_link_config *config);
/* The job has begun, or a rank has come: it is one of the job's from now on. */
void tly_peers_admit(struct tly_session *p);
void tly_peers_destroy(struct tly_session *p);

#endif
