/* service.c - the rules of messages.
 *
 * A message is a broadcast between two ranks, and may be offered first.  By `probe` one rank learns which message waits for
 * it.  The round has that rank alone.  Its result is the number of the rank whose message has waited longest and has not been
 * asked for.  Until there is one, the round waits for the next offer.  One rank's messages are offered in order, so that
 * message is the next of that rank's. */
#include <stddef.h>
#include <string.h>

#include "base/list.h"
#include "ops/root.h"
#include "ops/rule.h"
#include "sum/internal.h"
#include "sum/members.h"
#include "sum/round.h"
#include "sum/session.h"
#include "sum/slot.h"
#include "tally/tally.h"

const struct tly_rule tly_rule_message = {
    .name = "message",
    .givers = TLY_ROOT_GIVES,
    .groups = TLY_PAIRS,
    .streams = true,
    .offers = true,
    .length = tly_root_length,
    .place = tly_root_place,
    .advance = tly_root_advance,
};

static const char *probe_check(const struct tly_frame *f, const struct tly_members *who)
{
    return f->dtype == TALLY_INT64 && f->length == sizeof(int64_t) ? NULL : "a list of another size";
}

/* The oldest message for the rank in the probe's name space. */
static const struct tly_round *probe_find(const struct tly_job *job, const struct tly_round *r)
{
    uint32_t to = r->head.rank;
    for (const struct tly_list *n = job->incomplete.next; n != &job->incomplete; n = n->next) {
        const struct tly_round *m = tly_list_entry(n, struct tly_round, node);
        if (m->rule->offers && m->head.part == 0 && m->head.count == r->head.count &&
            tly_pair_to(m->head.group) == to && m->slots[to].state == SLOT_ABSENT)
            return m;
    }
    return NULL;
}

static bool probe_may_start(struct tly_job *job, const struct tly_round *r)
{
    return probe_find(job, r) != NULL;
}

static void probe_advance(struct tly_job *job, struct tly_round *r, uint32_t from, uint32_t to)
{
    int64_t rank = tly_pair_from(probe_find(job, r)->head.group);
    memcpy(r->result, &rank, sizeof rank);
}

const struct tly_rule tly_rule_probe = {
    .name = "probe",
    .givers = TLY_NONE_GIVE,
    .groups = TLY_PAIRS,
    .check = probe_check,
    .length = tly_rule_part_length,
    .may_start = probe_may_start,
    .advance = probe_advance,
};
