/* rank.c - messages and probes, at a rank. */
#include <errno.h>
#include <stdlib.h>

#include "base/error.h"
#include "comm/comm.h"
#include "comm/epoch.h"
#include "comm/group.h"
#include "comm/op.h"
#include "comm/part.h"
#include "comm/parts.h"
#include "ops/call.h"
#include "wire/frame.h"

/* A message goes through the receiver's machine.  A large one is offered first, so that one that nobody receives yet
 * takes no memory there. */
static int message_cut(tally_comm *c, struct tally_op *op)
{
    bool probe = op->call == &tly_call_probe, mine = !probe && op->message.from == (uint32_t)c->rank;
    uint64_t bytes = probe ? sizeof op->message.found : op->bytes;
    uint32_t n = bytes ? tly_parts_count(bytes, op->epoch->part_bytes) : 1;
    static const uint8_t nothing;
    op->parts = calloc(n, sizeof *op->parts);
    if (!op->parts)
        return tly_fail(ENOMEM, "out of memory");
    op->part_count = op->parts_left = n;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t at = (uint64_t)i * op->epoch->part_bytes;
        uint32_t length = tly_parts_length(at, bytes, op->epoch->part_bytes);
        struct part *p = &op->parts[i];
        *p = (struct part){.op = op,
                           .place = at,
                           .index = i,
                           .order = i,
                           .number = i,
                           .group = tly_pair(op->message.from, op->message.to),
                           .length = length,
                           .owner = tly_service_of(c, op->message.to),
                           .dtype = probe ? TALLY_INT64 : op->dtype,
                           .root = op->message.from};
        if (mine) {
            p->input = op->input ? op->input + at : &nothing;
            p->offer = bytes > TLY_KEPT_BYTES;
        } else {
            p->landing = probe ? (uint8_t *)&op->message.found : op->output + at;
            p->result_length = length;
        }
    }
    return 0;
}

/* The answer of a probe is a rank. */
static int probe_answered(tally_comm *c, struct tally_op *op)
{
    for (int i = 0; i < op->group->size; i++)
        if (op->group->ranks[i] == (uint32_t)op->message.found)
            op->source = i;
    return 0;
}

const struct tly_call tly_call_message = {.cut = message_cut, .function = "message", .message = true};

const struct tly_call tly_call_probe = {
    .cut = message_cut, .answered = probe_answered, .function = "probe", .message = true};
