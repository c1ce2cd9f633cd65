/* service.c - the rules of an all-gather.
 *
 * Part 0 follows `list`, which puts what all ranks bring one behind the other, in the group's order: the first dimensions of
 * their pieces, one number from each rank.  Where all pieces are equal the part is empty, and the ranks only meet.  The pieces
 * follow `piece`: each is a broadcast from its rank. */
#include <stddef.h>
#include <string.h>

#include "ops/root.h"
#include "ops/rule.h"
#include "sum/internal.h"
#include "sum/members.h"
#include "sum/round.h"
#include "sum/session.h"
#include "sum/slot.h"
#include "tally/tally.h"

static const char *list_check(const struct tly_frame *f, const struct tly_members *who)
{
    bool fits = f->length == 0 || (f->dtype == TALLY_INT64 && f->length == sizeof(int64_t));
    return fits ? NULL : "a list of another size";
}

static uint32_t list_length(const struct tly_frame *f, const struct tly_members *who, uint32_t rank)
{
    return f->length * who->count;
}

/* The ranks say with the root that they can do with zeros for a rank that has joined. */
static bool list_spares(const struct tly_frame *f)
{
    return f->root;
}

static void list_advance(struct tly_job *job, struct tly_round *r, uint32_t from, uint32_t to)
{
    for (uint32_t i = 0; i < r->who->count; i++) {
        const struct tly_slot *slot = &r->slots[r->who->rank[i]];
        uint8_t *at = r->result + (size_t)i * r->head.length;
        if (slot->state == SLOT_JOINED)
            memset(at, 0, r->head.length);
        else
            memcpy(at, slot->data, r->head.length);
    }
}

const struct tly_rule tly_rule_list = {
    .name = "list",
    .check = list_check,
    .length = list_length,
    .spares = list_spares,
    .advance = list_advance,
};

/* Ranks that have joined give no piece and want none. */
static bool piece_spares(const struct tly_frame *f)
{
    return true;
}

const struct tly_rule tly_rule_piece = {
    .name = "piece",
    .givers = TLY_ROOT_GIVES,
    .groups = TLY_LISTS_AND_PAIRS,
    .streams = true,
    .length = tly_root_length,
    .spares = piece_spares,
    .place = tly_root_place,
    .advance = tly_root_advance,
};
