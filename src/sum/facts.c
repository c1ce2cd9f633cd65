/* facts.c - how a service stands, as it is told to those who ask (STATUS): from the job's counts to bytes.  facts_read.c reads
 * them. */
#include "base/list.h"
#include "base/thread.h"
#include "sum/internal.h"
#include "sum/job.h"
#include "sum/members.h"
#include "sum/round.h"
#include "sum/service.h"
#include "sum/session.h"
#include "sum/slot.h"
#include "sum/verdict.h"
#include "transport/transport.h"

void tly_facts_add_bytes(struct tly_service_facts *f, const struct tly_session *p)
{
    if (!p->link || p->watcher)
        return;
    f->bytes_received += tly_link_bytes(p->link, false);
    f->bytes_sent += tly_link_bytes(p->link, true);
}

void tly_job_facts(struct tly_job *job, struct tly_service_facts *out)
{
    *out = job->facts;
    out->rounds_open = job->store.count;
    out->bytes_in_use = job->quota.in_use;
    out->bytes_peak = job->quota.peak;
    out->memory_limit = job->house->budget.pool.limit;
    out->cpu_us = tly_thread_cpu_since(job->cpu_before) / 1000;
    for (const struct tly_list *n = job->sessions.next; n != &job->sessions; n = n->next)
        tly_facts_add_bytes(out, tly_list_entry(n, struct tly_session, node));
    out->waiting_ms = (uint64_t)(tly_verdict_waits(job, out->waits_for, sizeof out->waits_for) / TLY_MS);
}

/* The numbers first; a new one goes to their end. */
void tly_service_facts_write(struct tly_writer *w, const struct tly_service_facts *f)
{
    const uint64_t values[] = {f->bytes_summed, f->parts_summed, f->rounds_open,   f->bytes_in_use,
                               f->bytes_peak,   f->memory_limit, f->slots_dropped, f->bytes_received,
                               f->bytes_sent,   f->waiting_ms,   f->cpu_us};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        tly_write64(w, values[i]);
    tly_write_text(w, f->waits_for);
}
