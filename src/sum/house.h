/* house.h - a house for jobs: what the jobs of one process share.  A loop (in a thread of its own, the rank's or the
 * caller's), the listener, the memory of all slots, the crew.
 *
 * A connection says for which job it comes, and proves that job's secret.  If the house does not know the job, the
 * connection sees what it would see with a wrong secret. */
#ifndef TLY_HOUSE_H
#define TLY_HOUSE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

#include "base/loop.h"
#include "base/param.h"
#include "transport/endpoint.h"

struct tly_house;

/* Listen at `address` (port 0: any within TALLY_PORTS).  loop NULL: it gets a loop of its own, which runs from
 * tly_house_start() on.  Jobs created before that are there when the first peer is heard.  params: borrowed. */
int tly_house_create(struct tly_loop *loop, const struct tly_params *params,
                     const struct sockaddr_storage *address, struct tly_house **out);
int tly_house_start(struct tly_house *h);
/* Its own loop runs in the turns of this one from here on, without a thread.  Where its data is to lie on one of several NUMA
 * nodes it keeps its thread.  Negative: it has no thread any more.  In the thread that turns the host, without its lock. */
int tly_house_lodge(struct tly_house *h, struct tly_loop *host);
/* Does another thread than the caller's turn its loop? */
bool tly_house_is_turned(const struct tly_house *h);
/* Where it listens. */
void tly_house_endpoints(const struct tly_house *h, struct tly_endpoints *out);
/* Let nobody in any more, and send away those who have not proved a secret. */
void tly_house_shut(struct tly_house *h);
/* After all its jobs.  NULL is accepted. */
void tly_house_destroy(struct tly_house *h);

#endif
