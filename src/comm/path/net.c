/* net.c - the network as the last stage of every operation (stage.h): parts go to their services' queues. */
#include "comm/op/op.h"
#include "comm/op/part.h"
#include "comm/path/queue.h"
#include "comm/path/stage.h"

static int net_ready(tally_comm *c, struct tly_part *p)
{
    return tly_queue_part(c, p);
}

static void net_withdraw(tally_comm *c, struct tally_op *op, bool over)
{
    tly_queue_withdraw(c, op);
}

const struct tly_stage tly_stage_net = {
    .does = "is about to be queued", .ready = net_ready, .withdraw = net_withdraw};
