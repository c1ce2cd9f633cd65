/* post.c - control frames to a service, and the header that all frames about a part have in common. */
#include <errno.h>

#include "comm/comm.h"
#include "comm/epoch/epoch.h"
#include "comm/op/op.h"
#include "comm/op/part.h"
#include "comm/op/spec.h"
#include "comm/path/peer.h"
#include "transport/outbox.h"
#include "wire/frame.h"

void tly_peer_post(struct tly_peer *p, const struct tly_frame *f, const void *data, size_t len)
{
    if (tly_outbox_post(&p->outbox, f, data, len, NULL) != 0)
        tly_comm_fail(p->comm, ENOMEM, "out of memory");
}

void tly_peer_head(const struct tly_part *p, struct tly_frame *f)
{
    const struct tally_op *op = p->op;
    *f = (struct tly_frame){
        .type = TLY_PUSH,
        .epoch = p->came ? p->came : op->epoch->number,
        .key = op->key,
        .spec = tly_spec_hash(&op->spec) + p->piece * 0x9e3779b97f4a7c15ull,
        .count = op->mailbox ? op->mailbox : op->count,
        .kind = op->kind,
        .dtype = p->dtype,
        .op = op->reduction,
        .part = p->number,
        .place = p->place,
        .length = p->length,
        .round = op->round,
        .group = p->group,
        .rank = (uint32_t)op->comm->rank,
        .root = p->root,
        .priority = op->priority,
        .prescale = p->scaled ? 1 : tly_spec_prescale(&op->spec),
        .postscale = tly_spec_postscale(&op->spec)};
}

void tly_peer_ask_late(struct tly_peer *p, const struct tally_op *op)
{
    struct tly_frame f;
    tly_peer_head(&op->parts[0], &f);
    f.type = TLY_STATUS;
    f.flags = TLY_REQUEST;
    f.length = 0;
    tly_peer_post(p, &f, NULL, 0);
}
