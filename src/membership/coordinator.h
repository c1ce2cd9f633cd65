/* coordinator.h - gathers the members of a job, makes them an epoch, and watches that they live.  Runs in a
 * thread of its own, inside rank 0 unless TALLY_COORD names another process.
 *
 * member                       coordinator
 *   ROSTER (who I am)      ->              all there?
 *                          <-  ROSTER      prove that you share a machine with the one behind this door
 *   ROSTER (nonce)         ->
 *                         <->  MEASURE     where cards do not say their speed: measure.h
 *                          <-  INVITE      the epoch: connect to its services
 *   BEGUN                  ->
 *                          <-  COMMIT      all are connected: go
 *   COMPLAIN (sentence)    ->
 *                          <-  VERDICT     the job has failed: sentence
 *   GOODBYE                ->
 *                          <-  GOODBYE     all ranks have said it
 */
#ifndef TLY_COORDINATOR_H
#define TLY_COORDINATOR_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

#include "base/param.h"
#include "membership/place.h"
#include "membership/status.h"

struct tly_coordinator;

/* Listen at `address` and start.  standalone: in a process of its own.  If that dies the job goes on, and its members tell
 * the next one there what they know.  listening: a socket that listens there already, owned from now on, or -1.
 * -EADDRINUSE: somebody listens there. */
int tly_coordinator_create(const struct tly_place *place, const struct tly_params *params,
                           const struct sockaddr_storage *address, int listening, bool standalone,
                           struct tly_coordinator **out);
/* The job has come to its end, and all members have gone or had the time to.  Strangers and who only watches do not
 * count, and nobody else is let in any more. */
bool tly_coordinator_is_over(struct tly_coordinator *c);
/* Facts of the job that runs, for metrics.  All are 0 before its first epoch, after its end, and while a coordinator that took
 * over waits for its members. */
struct tly_coordinator_facts {
    uint32_t ranks, machines, services, epoch;
    uint64_t changed;     /* when the split last changed, seconds since 1970; 0: not yet */
    struct tly_slow slow; /* who holds the job up */
};
void tly_coordinator_facts(struct tly_coordinator *c, struct tly_coordinator_facts *out);
uint16_t tly_coordinator_port(const struct tly_coordinator *c);

/* Wait until the members have gone (monotonic deadline), then stop and free.  NULL is accepted. */
void tly_coordinator_destroy(struct tly_coordinator *c, int64_t deadline);

#endif
