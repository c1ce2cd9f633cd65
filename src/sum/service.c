/* service.c - a service as a rank and tallyd run it: a house (house.c) of one job (job.c). */
#include "sum/service.h"

#include <errno.h>
#include <stdlib.h>

#include "base/error.h"
#include "sum/house.h"
#include "sum/internal.h"
#include "sum/job.h"
#include "sum/session.h"
#include "trace/trace.h"

int tly_service_create(struct tly_loop *loop, const struct tly_params *params,
                       const struct tly_identity *identity, const struct sockaddr_storage *address,
                       struct tly_service **out)
{
    struct tly_service *s = calloc(1, sizeof *s);
    int err = s ? tly_house_create(loop, params, address, &s->house) : tly_fail(ENOMEM, "out of memory");
    if (!err)
        err = tly_job_create(s->house, params, identity, &s->job);
    if (!err)
        err = tly_house_start(s->house);
    if (err) {
        tly_service_destroy(s, 0);
        return err;
    }
    *out = s;
    return 0;
}

void tly_service_endpoints(const struct tly_service *s, struct tly_endpoints *out)
{
    tly_house_endpoints(s->house, out);
}

uint64_t tly_service_memory(const struct tly_service *s)
{
    return s->house->budget.pool.limit;
}

uint64_t tly_service_incarnation(const struct tly_service *s)
{
    return tly_job_incarnation(s->job);
}

int tly_service_lodge(struct tly_service *s, struct tly_loop *host)
{
    return tly_house_lodge(s->house, host);
}

int tly_service_begin(struct tly_service *s, const struct tly_roster *roster)
{
    return tly_job_begin(s->job, roster);
}

void tly_service_change(struct tly_service *s, const struct tly_roster *roster)
{
    tly_job_change(s->job, roster);
}

void tly_service_resize(struct tly_service *s, const struct tly_roster *roster)
{
    if (s)
        tly_job_resize(s->job, roster);
}

void tly_service_write_trace(struct tly_service *s)
{
    if (s)
        tly_trace_write(s->job->trace, NULL, NULL);
}

void tly_service_facts(struct tly_service *s, struct tly_service_facts *out)
{
    tly_job_facts(s->job, out);
}

void tly_service_destroy(struct tly_service *s, int64_t deadline)
{
    if (!s)
        return;
    if (s->job && tly_house_is_turned(s->house))
        tly_job_wait(s->job, deadline);
    if (s->house)
        tly_house_shut(s->house);
    tly_job_destroy(s->job);
    tly_house_destroy(s->house);
    free(s);
}
