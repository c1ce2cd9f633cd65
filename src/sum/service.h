/* service.h - the summation service: takes pushes from all ranks, sums each part along the tree when all have
 * come, answers each rank once.  It keeps nothing about a tensor between rounds.
 *
 * Runs in a loop of its own (in the first local rank of a machine), in its own thread or the rank's, or in the caller's loop
 * (tallyd). */
#ifndef TLY_SERVICE_H
#define TLY_SERVICE_H

#include <stdint.h>
#include <sys/socket.h>

#include "base/loop.h"
#include "base/param.h"
#include "membership/roster.h"
#include "wire/hello.h"
#include "wire/pack.h"

struct tly_service;

struct tly_service_facts {
    uint64_t bytes_summed; /* of results */
    uint64_t parts_summed, rounds_open, bytes_in_use, bytes_peak, memory_limit, slots_dropped;
    uint64_t bytes_received, bytes_sent; /* over the connections to ranks, headers too */
    uint64_t cpu_us;     /* processor time of Tally's threads in its process since the job began there */
    uint64_t waiting_ms; /* of the round that has waited longest; 0: none waits */
    char waits_for[200]; /* what it waits for, in words; empty: nothing */
};

/* Listen at `address` (port 0: any within TALLY_PORTS) for members of the job that `identity` names.  `loop`
 * NULL: a thread is started. */
int tly_service_create(struct tly_loop *loop, const struct tly_params *params,
                       const struct tly_identity *identity, const struct sockaddr_storage *address,
                       struct tly_service **out);
/* Where it listens. */
void tly_service_endpoints(const struct tly_service *s, struct tly_endpoints *out);
uint64_t tly_service_incarnation(const struct tly_service *s);
uint64_t tly_service_memory(const struct tly_service *s); /* bytes that it may take */

/* With a loop of its own: see tly_house_lodge() in sum/house.h. */
int tly_service_lodge(struct tly_service *s, struct tly_loop *host);

/* The epoch: who pushes.  Copies what it needs. */
int tly_service_begin(struct tly_service *s, const struct tly_roster *roster);
/* In the loop.  A later epoch: of its roster it matters here which ranks have left, and how long parts are. */
void tly_service_change(struct tly_service *s, const struct tly_roster *roster);

/* From any thread: the same, of how long parts are alone, for a service whose ranks tell it who leaves.  NULL is accepted. */
void tly_service_resize(struct tly_service *s, const struct tly_roster *roster);

/* Write the timeline of this service (TALLY_TRACE) now; its destruction writes it otherwise.  Needs no lock.  NULL is
 * accepted. */
void tly_service_write_trace(struct tly_service *s);

void tly_service_facts(struct tly_service *s, struct tly_service_facts *out);
/* What a service answers to STATUS: as bytes, and back.  -EPROTO. */
void tly_service_facts_write(struct tly_writer *w, const struct tly_service_facts *facts);
int tly_service_facts_read(struct tly_reader *r, struct tly_service_facts *out);

/* Wait (until the monotonic deadline) for what is being sent, then close all and free.  NULL is accepted. */
void tly_service_destroy(struct tly_service *s, int64_t deadline);

#endif
