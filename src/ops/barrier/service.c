/* service.c - the rules of a barrier: no rank brings data, and the answer is empty.  Part 0 of a reduce-scatter follows
 * `meet`. */
#include <stddef.h>

#include "ops/rule.h"
#include "sum/members.h"

static const char *meet_check(const struct tly_frame *f, const struct tly_members *who)
{
    return f->length ? "data where ranks only meet" : NULL;
}

/* A barrier goes on without ranks that have joined, unless its root says that it cannot. */
static bool meet_spares(const struct tly_frame *f)
{
    return !f->root;
}

const struct tly_rule tly_rule_barrier = {
    .name = "barrier", .check = meet_check, .length = tly_rule_part_length, .spares = meet_spares};

const struct tly_rule tly_rule_meet = {.name = "meet", .check = meet_check, .length = tly_rule_part_length};
