/* job.h - one job of a house: who its ranks are, what they push, what they are answered.
 *
 * Any thread may call these, but for those that say otherwise: they take the loop's lock, or need none. */
#ifndef TLY_SUM_JOB_H
#define TLY_SUM_JOB_H

#include <stdint.h>

#include "base/param.h"
#include "membership/roster.h"
#include "sum/house.h"
#include "wire/hello.h"

struct tly_job;
struct tly_service_facts;

/* Let members of the job that `identity` names come in.  params: borrowed. */
int tly_job_create(struct tly_house *h, const struct tly_params *params, const struct tly_identity *identity,
                   struct tly_job **out);
uint64_t tly_job_incarnation(const struct tly_job *job);

/* The first epoch: who pushes.  Copies what it needs. */
int tly_job_begin(struct tly_job *job, const struct tly_roster *roster);
/* In the loop.  A later epoch: which ranks have left, and how long parts are. */
void tly_job_change(struct tly_job *job, const struct tly_roster *roster);
/* A later epoch, of which only the length of parts matters. */
void tly_job_resize(struct tly_job *job, const struct tly_roster *roster);

/* In the loop. */
void tly_job_facts(struct tly_job *job, struct tly_service_facts *out);

/* Wait until all connections of the job have ended, or the monotonic deadline.  Not in the loop's thread. */
void tly_job_wait(struct tly_job *job, int64_t deadline);
/* Close its connections and free all; other jobs of the house go on.  NULL is accepted. */
void tly_job_destroy(struct tly_job *job);

#endif
