/* kind.c - which kind each operation's parts are of.  To add a kind: its file in kinds/, and its line here. */
#include "sum/kind.h"

#include <errno.h>
#include <stddef.h>

#include "tally/tally.h"

static struct {
    const struct tly_kind *first, *others; /* of part 0; of all other parts */
} kinds[TLY_KINDS] = {
    [TALLY_PUSH_PULL] = {&tly_kind_all_reduce, &tly_kind_all_reduce},
    [TALLY_BROADCAST] = {&tly_kind_root, &tly_kind_root},
    [TALLY_ALLGATHER] = {&tly_kind_list, &tly_kind_piece},
    [TALLY_BARRIER] = {&tly_kind_barrier, &tly_kind_meet},
    [TALLY_REDUCE] = {&tly_kind_sum, &tly_kind_sum},
    [TALLY_REDUCE_SCATTER] = {&tly_kind_meet, &tly_kind_sum},
    [TALLY_ALLTOALL] = {&tly_kind_table, &tly_kind_root},
    [TALLY_GATHER] = {&tly_kind_table, &tly_kind_root},
    [TALLY_SCATTER] = {&tly_kind_table, &tly_kind_root},
    [TALLY_MESSAGE] = {&tly_kind_message, &tly_kind_message},
    [TLY_PROBE] = {&tly_kind_probe, &tly_kind_probe},
};

const struct tly_kind *tly_kind_of(const struct tly_frame *f)
{
    if (f->kind >= TLY_KINDS)
        return NULL;
    return f->part ? kinds[f->kind].others : kinds[f->kind].first;
}

int tly_kind_register(uint8_t number, const struct tly_kind *first, const struct tly_kind *others)
{
    if (!number || number >= TLY_KINDS || !first || !others)
        return -EINVAL;
    if (kinds[number].first)
        return -EEXIST;
    kinds[number].first = first;
    kinds[number].others = others;
    return 0;
}
