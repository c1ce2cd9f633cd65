/* service.c - the rule of part 0 of an all-to-all, gather or scatter: it compares what all ranks bring.  That is how many
 * elements each gives to each rank of the group, and how many it expects of each.  If one gives what another does not expect,
 * all get a verdict; else all get an empty result.  The pieces follow `root` (broadcast). */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "ops/rule.h"
#include "sum/internal.h"
#include "sum/members.h"
#include "sum/round.h"
#include "sum/session.h"
#include "sum/slot.h"
#include "sum/verdict.h"
#include "tally/tally.h"

static const char *table_check(const struct tly_frame *f, const struct tly_members *who)
{
    bool fits = f->dtype == TALLY_INT64 && f->length == 2 * (uint64_t)who->count * sizeof(int64_t);
    return fits ? NULL : "a list of another size";
}

static uint32_t table_length(const struct tly_frame *f, const struct tly_members *who, uint32_t rank)
{
    return 0;
}

/* The n-th number of a rank's table. */
static uint64_t table_number(const struct tly_round *r, uint32_t rank, size_t n)
{
    uint64_t value;
    memcpy(&value, r->slots[rank].data + n * sizeof value, sizeof value);
    return value;
}

/* A rank's table: elements for each rank of the group, then elements from each. */
static void table_tell(struct tly_job *job, struct tly_round *r)
{
    char sentence[TLY_SENTENCE];
    uint32_t n = r->who->count;
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = 0; j < n; j++) {
            uint32_t from = r->who->rank[i], to = r->who->rank[j];
            uint64_t given = table_number(r, from, j), taken = table_number(r, to, (size_t)n + i);
            if (given == taken)
                continue;
            snprintf(sentence, sizeof sentence,
                     "the ranks disagree: rank %u gives rank %u %llu elements, and %llu are expected", from,
                     to, (unsigned long long)given, (unsigned long long)taken);
            tly_verdict_decide(job, r, EINVAL, sentence);
            return;
        }
}

const struct tly_rule tly_rule_table = {
    .name = "table", .check = table_check, .length = table_length, .tell = table_tell};
