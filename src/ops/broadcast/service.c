/* service.c - the rule of a broadcast: one rank, the root, gives its data to the others, which push requests.
 *
 * The pieces of an all-to-all, gather or scatter follow it, too.  Those of an all-gather and messages differ in facts alone.
 *
 * The root's slot is the result, and goes out as it comes.  Nothing is read in the root's memory: the others may need it
 * when the root's operation has ended long ago. */
#include <stddef.h>
#include <string.h>

#include "ops/root.h"
#include "ops/rule.h"
#include "sum/internal.h"
#include "sum/members.h"
#include "sum/round.h"
#include "sum/session.h"
#include "sum/slot.h"

uint32_t tly_root_length(const struct tly_frame *f, const struct tly_members *who, uint32_t rank)
{
    return rank == f->root ? 0 : f->length;
}

uint8_t *tly_root_place(const struct tly_round *r)
{
    return r->slots[r->head.root].data;
}

/* After a loss the result has memory of its own, which holds its beginning already. */
void tly_root_advance(struct tly_job *job, struct tly_round *r, uint32_t from, uint32_t to)
{
    const uint8_t *data = r->slots[r->head.root].data;
    if (r->result != data)
        memcpy(r->result + from, data + from, to - from);
}

const struct tly_rule tly_rule_root = {
    .name = "root",
    .givers = TLY_ROOT_GIVES,
    .groups = TLY_LISTS_AND_PAIRS,
    .streams = true,
    .length = tly_root_length,
    .place = tly_root_place,
    .advance = tly_root_advance,
};
