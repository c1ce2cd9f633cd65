/* session.c - what a rank is told over its session: control frames, and the counts that ride in every header. */
#include "sum/session.h"
#include "sum/round.h"
#include "transport/outbox.h"
#include "transport/transport.h"

int tly_session_post(struct tly_session *p, const struct tly_frame *f, const void *data, size_t len,
                     struct tly_round *verdict)
{
    int err = tly_outbox_post(&p->outbox, f, data, len, verdict);
    if (!err && verdict)
        verdict->references++;
    return err;
}

void tly_session_counts(struct tly_session *p, uint32_t bytes)
{
    struct tly_counts c = {.accepted = p->accepted, .granted = p->granted, .stable = p->stable};
    tly_link_set_counts(p->link, &c, bytes);
}
