/* raw.h - a service in a thread of this process, and ranks that are links of the test's own: they can say what no rank
 * would, or only would at a moment that cannot be had otherwise. */
#ifndef RAW_H
#define RAW_H

#include "base/loop.h"
#include "base/param.h"
#include "sum/service.h"
#include "tally/tally.h"
#include "transport/medium.h"
#include "transport/outbox.h"

/* Two of the ranks come by raw_begin(); the others where a test calls raw_enter(). */
enum { RAW_PART = 65536, RAW_WINDOW = 2 * RAW_PART, RAW_COME = 2, RAW_MOST_RANKS = 12, RAW_ASKED = 64 };

struct raw_rank {
    struct tly_link *link;
    struct tly_outbox outbox;
    uint32_t number; /* in its job */
    int err;         /* of closed */
    char why[200];
    int opened, closed;
    int answers, results, verdicts, specs; /* STATUS; of whole parts; ...; texts that were asked for */
    int verdict_err;                       /* of the last of them */
    int again, finals, done;               /* AGAIN, with MARK, DONE */
    uint32_t again_from;                   /* the last of them */
    uint64_t asked[RAW_ASKED];             /* keys of the first of them, in their order */
    int landed;                            /* bytes of results */
    uint64_t received, granted;
    bool confirms_nothing;
    _Alignas(float) uint8_t result[RAW_PART]; /* of the last part, which tests read as floats */
    struct tly_service_facts facts;           /* of the last STATUS */
};

extern struct raw {
    struct tly_loop loop;
    struct tly_params params;
    struct tly_service *service;
    struct tly_identity identity;
    const struct tly_medium *only[2];        /* raw_begin_over */
    const struct tly_medium *const *library; /* all media, while there is only that one */
    struct raw_rank rank[RAW_MOST_RANKS];
} raw;

/* A service of a job of so many ranks, each on a machine of its own; settings: of the service, ended by NULL. */
int raw_begin(uint32_t ranks, const char *const *settings);
/* The same with ranks on these machines, whose numbers ascend. */
int raw_begin_on(const uint32_t *machine, uint32_t ranks, const char *const *settings);
/* The same over this medium alone, with the service in raw.loop: the medium's ends may have to share a loop. */
int raw_begin_over(const struct tly_medium *medium, uint32_t ranks, const char *const *settings);
void raw_end(void);
/* (Again) a connection of this rank's. */
void raw_enter(int rank);
/* The same to another job's service: rank `number` of the job, over the network.  Does not wait. */
void raw_connect(int rank, const struct tly_identity *job, uint32_t number, const struct tly_endpoints *to);
/* End it as a broken network would, without a word. */
void raw_break(int rank);
/* A roster says that it has left the job. */
void raw_left(uint32_t rank);
/* f.rank is filled in, unless it is another. */
void raw_post(int rank, struct tly_frame f, const void *data, size_t len);
/* For tests that have services of their own: the loop and no service. */
void raw_begin_alone(const char *const *settings);
/* Turn the loop until *what >= value. */
void raw_until(const int *what, int value);
/* Until the service has read all that the rank has said. */
void raw_settle(int rank);
/* A whole push of so many bytes of float32, the sum of whose part all get. */
struct tly_frame raw_push(uint64_t key, uint32_t length);

#endif
