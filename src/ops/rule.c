/* rule.c - the rules of each operation's parts.  To add an operation: its room, and its line here. */
#include "ops/rule.h"

#include <errno.h>
#include <stddef.h>

#include "tally/tally.h"

static struct {
    const struct tly_rule *first, *others; /* of part 0; of all other parts */
} rules[TLY_KINDS] = {
    [TALLY_PUSH_PULL] = {&tly_rule_all_reduce, &tly_rule_all_reduce},
    [TALLY_BROADCAST] = {&tly_rule_root, &tly_rule_root},
    [TALLY_ALLGATHER] = {&tly_rule_list, &tly_rule_piece},
    [TALLY_BARRIER] = {&tly_rule_barrier, &tly_rule_meet},
    [TALLY_REDUCE] = {&tly_rule_sum, &tly_rule_sum},
    [TALLY_REDUCE_SCATTER] = {&tly_rule_meet, &tly_rule_sum},
    [TALLY_ALLTOALL] = {&tly_rule_table, &tly_rule_root},
    [TALLY_GATHER] = {&tly_rule_table, &tly_rule_root},
    [TALLY_SCATTER] = {&tly_rule_table, &tly_rule_root},
    [TALLY_MESSAGE] = {&tly_rule_message, &tly_rule_message},
    [TALLY_PUSH_PULLV] = {&tly_rule_all_reduce, &tly_rule_all_reduce},
    [TLY_PROBE] = {&tly_rule_probe, &tly_rule_probe},
    [TALLY_SHARED_CREATE] = {&tly_rule_shared_create, &tly_rule_shared_create},
    [TALLY_SHARED_ADD] = {&tly_rule_shared_add, &tly_rule_shared_add},
    [TALLY_SHARED_READ] = {&tly_rule_shared_read, &tly_rule_shared_read},
};

const struct tly_rule *tly_rule_of(const struct tly_frame *f)
{
    if (f->kind >= TLY_KINDS)
        return NULL;
    return f->part ? rules[f->kind].others : rules[f->kind].first;
}

int tly_rule_register(uint8_t number, const struct tly_rule *first, const struct tly_rule *others)
{
    if (!number || number >= TLY_KINDS || !first || !others)
        return -EINVAL;
    if (rules[number].first)
        return -EEXIST;
    rules[number].first = first;
    rules[number].others = others;
    return 0;
}
