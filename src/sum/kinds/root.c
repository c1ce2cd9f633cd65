/* root.c - the kinds in which one rank, the root, gives its data to the others, which push requests.
 *
 * The root's slot is the result, and goes out as it comes.  Nothing is read in the root's memory, for the others may
 * need it when the root's operation has ended long ago. */
#include <stddef.h>
#include <string.h>

#include "sum/internal.h"
#include "sum/kind.h"
#include "sum/members.h"
#include "sum/round.h"
#include "sum/session.h"
#include "sum/slot.h"

static uint32_t length(const struct tly_frame *f, const struct members *who, uint32_t rank)
{
    return rank == f->root ? 0 : f->length;
}

static bool spares(const struct tly_frame *f)
{
    return true;
}

static uint8_t *place(const struct round *r)
{
    return r->slots[r->head.root].data;
}

/* After a loss the result has memory of its own, which holds its beginning already. */
static void advance(struct tly_job *job, struct round *r, uint32_t from, uint32_t to)
{
    const uint8_t *data = r->slots[r->head.root].data;
    if (r->result != data)
        memcpy(r->result + from, data + from, to - from);
}

/* A broadcast, and a piece of an alltoall, gather or scatter. */
const struct tly_kind tly_kind_root = {
    .name = "root",
    .givers = TLY_ROOT_GIVES,
    .groups = TLY_LISTS_AND_PAIRS,
    .streams = true,
    .length = length,
    .place = place,
    .advance = advance,
};

/* A piece of an allgather: the ranks that have joined give none and want none. */
const struct tly_kind tly_kind_piece = {
    .name = "piece",
    .givers = TLY_ROOT_GIVES,
    .groups = TLY_LISTS_AND_PAIRS,
    .streams = true,
    .length = length,
    .spares = spares,
    .place = place,
    .advance = advance,
};

const struct tly_kind tly_kind_message = {
    .name = "message",
    .givers = TLY_ROOT_GIVES,
    .groups = TLY_PAIRS,
    .streams = true,
    .offers = true,
    .length = length,
    .place = place,
    .advance = advance,
};
