/* fake_verbs.h - what tests ask of the fake libibverbs (fake_verbs/fake.h), beside its own functions. */
#ifndef FAKE_VERBS_H
#define FAKE_VERBS_H

#include <stdint.h>

/* The counters.  The file of FAKE_VERBS=count=FILE holds a uint64_t of each, summed over all processes. */
enum fake_verbs_count {
    FAKE_SEND_POSTS, /* calls of post_send, and their work requests */
    FAKE_SENDS,
    FAKE_RECV_POSTS, /* calls of post_recv, and their work requests */
    FAKE_RECVS,
    FAKE_COMPLETIONS, /* that poll_cq has returned */
    FAKE_ERRORS,      /* of these, with a status that is none of success */
    FAKE_POLLS,       /* calls of poll_cq */
    FAKE_WAKES,       /* events of completion channels */
    FAKE_BYTES,       /* that the card has moved for work requests of this process */
    FAKE_RNRS,        /* messages of this process for which the peer had no receive */
    FAKE_REGISTERED,  /* bytes that are registered, in whole pages */
    FAKE_REGISTRATIONS,
    FAKE_COUNTS
};

/* Of this process alone. */
uint64_t fake_verbs_count(enum fake_verbs_count which);
/* How many devices, PDs, MRs, channels, CQs and QPs this process has not given back. */
int fake_verbs_left(void);
/* Take the words of FAKE_VERBS instead of those of the environment, for all that is open, too. */
void fake_verbs_set(const char *words);
/* The devices that this process has open vanish, as if pulled out; or their ports lose and regain the link. */
void fake_verbs_vanish(void);
void fake_verbs_link(int up);

#endif
