/* health.h - how a tallyd is, for probes and for Prometheus: HTTP/1.0 on a port of its own (tallyd --health).
 *
 * Served by a thread of its own from a copy of what the main thread tells it once a tick, so that whoever asks, however
 * often or slowly, holds no lock of the service's loop. */
#ifndef TLY_HEALTH_H
#define TLY_HEALTH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "membership/status.h"
#include "sum/service.h"

enum { TLY_HEALTH_REQUEST = 2048, TLY_HEALTH_ANSWER = 8192 }; /* bytes at most */

/* What the main thread tells. */
struct tly_health_news {
    bool serving;                              /* a job is running, and this is a service of it */
    bool coordinating;                         /* or its coordinator, which listens */
    char job[64];                              /* its name */
    uint32_t ranks, machines, services, epoch; /* of it */
    double share;                              /* of all sums that are this service's, 0 to 1 */
    /* Of its card, bit/s; 0: not known. */
    uint64_t current;                /* what it carries now: the plan's figure until it is seen */
    uint64_t planned;                /* what the split goes by */
    uint64_t declared, measured;     /* what was said of it, or found at the start: one of them */
    struct tly_slow slow;            /* who holds the job up */
    uint64_t changed;                /* when the split last changed, seconds since 1970; 0: not yet */
    uint64_t cpu_us;                 /* processor time of this process */
    uint64_t jobs;                   /* that have begun here, this one too */
    struct tly_service_facts facts;  /* of this job */
    struct tly_service_facts before; /* of the jobs before, their sums: counters never fall */
};

enum { TLY_HEALTH_ALIVE_S = 60 }; /* the main thread has told nothing for so long: it is not alive */

/* Make the answer to a request, head and body.  age_s: of the news.  Returns its length; 0: the request has not ended
 * yet.  A request that is no HTTP, or longer than TLY_HEALTH_REQUEST, is answered by an error.  No I/O. */
size_t tly_health_answer(const char *request, size_t len, const struct tly_health_news *news, double age_s,
                         char out[TLY_HEALTH_ANSWER]);

/* "[ADDRESS:]PORT", the address numeric (IPv6 in brackets), by default 127.0.0.1.  -EINVAL and tly_error(). */
int tly_health_parse(const char *where, struct sockaddr_storage *out);

struct tly_health;
/* Listen at `where` and start the thread.  -errno and tly_error(). */
int tly_health_start(const char *where, struct tly_health **out);
/* From the main thread. */
void tly_health_tell(struct tly_health *h, const struct tly_health_news *news);
/* NULL is accepted. */
void tly_health_stop(struct tly_health *h);

#endif
