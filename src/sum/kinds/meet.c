/* meet.c - the kind in which the ranks only meet: nobody brings data, and the answer is empty.  A barrier, and part 0 of a
 * reduce-scatter. */
#include <stddef.h>

#include "sum/kind.h"
#include "sum/members.h"

static const char *check(const struct tly_frame *f, const struct members *who)
{
    return f->length ? "data where ranks only meet" : NULL;
}

/* A barrier goes on without ranks that have joined, unless its root says that it cannot. */
static bool spares(const struct tly_frame *f)
{
    return !f->root;
}

const struct tly_kind tly_kind_barrier = {
    .name = "barrier", .check = check, .length = tly_kind_part_length, .spares = spares};

const struct tly_kind tly_kind_meet = {.name = "meet", .check = check, .length = tly_kind_part_length};
