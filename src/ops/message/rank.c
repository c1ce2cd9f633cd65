/* rank.c - messages and probes, at a rank.
 *
 * A message is a broadcast between two ranks.  A large one is only offered first (TLY_OFFER).  Once the receiver's requests are
 * there, the service asks for it as it asks for data that it had to drop (tly_memory_want_offers, AGAIN).  A probe is a round
 * of one rank.  It ends when a message is there that no rank has asked for (service.c). */
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/error.h"
#include "base/map.h"
#include "comm/comm.h"
#include "comm/epoch/epoch.h"
#include "comm/op/group.h"
#include "comm/op/handle.h"
#include "comm/op/op.h"
#include "comm/op/part.h"
#include "comm/path/parts.h"
#include "comm/submit.h"
#include "ops/call.h"
#include "wire/frame.h"

struct message {
    uint32_t from, to; /* ranks */
    uint8_t *copy;     /* owned: of what is sent, so that the sender need not wait */
    int64_t found;     /* a probe's answer: a rank */
};

static unsigned message_needs(const tally_comm *c, const struct tly_request *r)
{
    return r->from == (uint32_t)c->rank ? TLY_CALL_INPUT : TLY_CALL_OUTPUT;
}

static int message_furnish(tally_comm *c, struct tally_op *op, const struct tly_request *r)
{
    struct message *own = tly_op_own(op);
    own->from = r->from;
    own->to = r->to;
    if (!r->copy)
        return 0;
    own->copy = malloc(op->bytes + 1);
    if (!own->copy)
        return -ENOMEM;
    if (op->bytes)
        memcpy(own->copy, r->input, op->bytes);
    op->input = own->copy;
    op->alone = true;
    atomic_fetch_add_explicit(&c->copied, op->bytes, memory_order_relaxed);
    return 0;
}

static void message_release(struct tally_op *op)
{
    struct message *own = tly_op_own(op);
    if (own->copy)
        atomic_fetch_sub_explicit(&op->comm->copied, op->bytes, memory_order_relaxed);
    free(own->copy);
}

/* The n-th message from one rank to another with a tag; and the mailbox in which a probe looks.  names.lock held. */
static int message_name(struct tally_op *op, const struct tly_request *r, char *name, size_t len)
{
    struct tally_group *g = op->group;
    const uint32_t mailbox[] = {op->space, r->tag};
    const uint32_t box[] = {op->space, r->tag, op->kind, r->from, r->to};
    uint64_t key = XXH3_64bits_withSeed(box, sizeof box, 5);
    uintptr_t n = (uintptr_t)tly_map_get(&g->messages, key);
    op->mailbox = XXH3_64bits_withSeed(mailbox, sizeof mailbox, g->id) | 1;
    if (op->call == &tly_call_probe)
        snprintf(name, len, "probe no. %llu of rank %u, tag %u", (unsigned long long)n + 1, r->to, r->tag);
    else
        snprintf(name, len, "message no. %llu from rank %u to rank %u, tag %u", (unsigned long long)n + 1,
                 r->from, r->to, r->tag);
    return tly_map_put(&g->messages, key, (void *)(n + 1)) ? tly_fail(ENOMEM, "out of memory") : 0;
}

/* A message goes through the receiver's machine.  A large one is offered first, so that one that nobody receives yet
 * takes no memory there. */
static int message_cut(tally_comm *c, struct tally_op *op)
{
    struct message *own = tly_op_own(op);
    bool probe = op->call == &tly_call_probe, mine = !probe && own->from == (uint32_t)c->rank;
    uint64_t bytes = probe ? sizeof own->found : op->bytes;
    uint32_t n = bytes ? tly_parts_count(bytes, op->epoch->part_bytes) : 1;
    static const uint8_t nothing;
    op->parts = calloc(n, sizeof *op->parts);
    if (!op->parts)
        return tly_fail(ENOMEM, "out of memory");
    op->part_count = n;
    tly_progress_begin(&op->progress, n);
    for (uint32_t i = 0; i < n; i++) {
        uint64_t at = (uint64_t)i * op->epoch->part_bytes;
        uint32_t length = tly_parts_length(at, bytes, op->epoch->part_bytes);
        struct tly_part *p = &op->parts[i];
        *p = (struct tly_part){
            .op = op,
            .place = at,
            .index = i,
            .order = i,
            .number = i,
            .group = tly_pair(own->from, own->to),
            .length = length,
            .owner = tly_service_of(c, own->to),
            .dtype = probe ? TALLY_INT64 : op->dtype,
            .root = own->from};
        if (mine) {
            p->input = op->input ? op->input + at : &nothing;
            p->offer = bytes > TLY_KEPT_BYTES;
        } else {
            p->landing = probe ? (uint8_t *)&own->found : op->output + at;
            p->result_length = length;
        }
    }
    return 0;
}

/* The answer of a probe is a rank. */
static int probe_answered(tally_comm *c, struct tally_op *op)
{
    struct message *own = tly_op_own(op);
    for (int i = 0; i < op->group->size; i++)
        if (op->group->ranks[i] == (uint32_t)own->found)
            tly_handle_found(&op->handle, i);
    return 0;
}

/* Facts that a message and a probe share. */
#define MESSAGE \
    .own_bytes = sizeof(struct message), .needs = message_needs, .furnish = message_furnish, \
    .name = message_name, .release = message_release, .cut = message_cut, .message = true

const struct tly_call tly_call_message = {MESSAGE, .function = "message"};

const struct tly_call tly_call_probe = {MESSAGE, .finds = true, .answered = probe_answered,
                                        .function = "probe"};
