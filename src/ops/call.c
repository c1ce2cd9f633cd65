/* call.c - which call has which number.  To add an operation: its room, and its lines here and in rule.c. */
#include "ops/call.h"

#include <errno.h>
#include <stddef.h>

#include "tally/tally.h"
#include "wire/frame.h"

static const struct tly_call *calls[TLY_KINDS] = {
    [TALLY_PUSH_PULL] = &tly_call_push_pull,
    [TALLY_BROADCAST] = &tly_call_broadcast,
    [TALLY_ALLGATHER] = &tly_call_allgather,
    [TALLY_BARRIER] = &tly_call_barrier,
    [TALLY_REDUCE] = &tly_call_reduce,
    [TALLY_REDUCE_SCATTER] = &tly_call_reduce_scatter,
    [TALLY_ALLTOALL] = &tly_call_alltoall,
    [TALLY_GATHER] = &tly_call_gather,
    [TALLY_SCATTER] = &tly_call_scatter,
    [TALLY_MESSAGE] = &tly_call_message,
    [TALLY_PUSH_PULLV] = &tly_call_push_pullv,
    [TLY_PROBE] = &tly_call_probe,
    [TLY_JOIN] = &tly_call_join,
    [TALLY_SHARED_CREATE] = &tly_call_shared_create,
    [TALLY_SHARED_ADD] = &tly_call_shared_add,
    [TALLY_SHARED_READ] = &tly_call_shared_read,
};

const struct tly_call *tly_call_of(unsigned kind)
{
    return kind < TLY_KINDS ? calls[kind] : NULL;
}

int tly_call_register(unsigned number, const struct tly_call *call)
{
    if (!number || number >= TLY_KINDS)
        return -EINVAL;
    if (calls[number])
        return -EEXIST;
    calls[number] = call;
    return 0;
}
