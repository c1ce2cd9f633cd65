/* streams.c - a member streams to services, so that they can count what its card and theirs carry (measure.h). */
#include <errno.h>
#include <string.h>

#include "base/clock.h"
#include "membership/measure.h"

/* MOST_MS: who has not counted by then will not.  CHUNK_BYTES: of one frame; news of how much has come is finer. */
enum { MOST_MS = 150, CHUNK_BYTES = 32 << 10 };

static const uint8_t nothing[CHUNK_BYTES];

/* All have met, or all that have met have counted, but for those that have ended. */
static void streams_check(struct tly_streams *s)
{
    struct tly_measure m = {.step = s->going ? TLY_MEASURE_COUNTED : TLY_MEASURE_MET,
                            .round = s->round,
                            .count = s->count};
    for (uint32_t i = 0; i < s->count; i++) {
        const struct tly_measure_stream *x = &s->stream[i];
        if (x->link && (s->going ? x->met && !x->counted : !x->met))
            return;
        m.rate[i] = x->rate;
    }
    if (!s->going)
        m.count = 0;
    s->until = 0;
    s->say(s->user, &m);
}

static void streams_opened(void *user, struct tly_link *l)
{
    struct tly_measure_stream *x = user;
    if (x->all->going)
        return; /* too late for this round */
    x->met = true;
    streams_check(x->all);
}

static int streams_header(void *user, struct tly_link *l, const struct tly_frame *f, struct tly_landing *land,
                          const char **why)
{
    land->control = true;
    return 0;
}

static int streams_frame(void *user, struct tly_link *l, const struct tly_frame *f, void *data,
                         const char **why)
{
    struct tly_measure_stream *x = user;
    struct tly_reader r = {data, f->payload, false};
    struct tly_measure m;
    if (f->type != TLY_MEASURE)
        return 0;
    if (tly_measure_read(&r, &m) != 0 || m.step != TLY_MEASURE_COUNTED || m.count != 1) {
        *why = "a measurement that cannot be read";
        return -EPROTO;
    }
    if (m.round == x->all->round && x->all->going && !x->counted) {
        x->counted = true;
        x->rate = m.rate[0];
        streams_check(x->all);
    }
    return 0;
}

static bool streams_next(void *user, struct tly_link *l, struct tly_outgoing *out)
{
    const struct tly_measure_stream *x = user;
    if (!x->all->going || !x->met || tly_now() >= x->all->until)
        return false;
    out->frame = (struct tly_frame){
        .type = TLY_MEASURE, .round = x->all->round, .count = x->all->count, .payload = CHUNK_BYTES};
    out->payload = nothing;
    return true;
}

static void streams_closed(void *user, struct tly_link *l, int err, const char *why)
{
    struct tly_measure_stream *x = user;
    bool awaited = x->all->going ? x->met && !x->counted : !x->met;
    tly_link_destroy(x->link);
    x->link = NULL;
    if (awaited)
        streams_check(x->all);
}

static const struct tly_link_user calls = {.opened = streams_opened,
                                           .header = streams_header,
                                           .frame = streams_frame,
                                           .next = streams_next,
                                           .closed = streams_closed};

void tly_streams_meet(struct tly_streams *s, const struct tly_identity *me, const struct tly_measure *m)
{
    tly_streams_close(s);
    s->round = m->round;
    for (uint32_t i = 0; i < m->count; i++) {
        struct tly_link_config c = {.user_calls = &calls,
                                    .user = &s->stream[i],
                                    .identity = *me,
                                    .peer_name = "a service",
                                    .by_address = true};
        c.identity.role = TLY_ROLE_WATCHER;
        s->stream[i] = (struct tly_measure_stream){.all = s};
        tly_link_dial(s->loop, &m->to[i], &c,
                      &s->stream[i].link); /* one that cannot be reached shows nothing */
    }
    s->count = m->count;
    streams_check(s);
}

void tly_streams_go(struct tly_streams *s, const struct tly_measure *m)
{
    if (m->round != s->round || s->going)
        return;
    s->going = true;
    s->until = tly_now() + MOST_MS * TLY_MS;
    streams_check(s);
    for (uint32_t i = 0; i < s->count; i++)
        if (s->stream[i].link)
            tly_link_flush(s->stream[i].link);
}

void tly_streams_close(struct tly_streams *s)
{
    for (uint32_t i = 0; i < s->count; i++) {
        tly_link_destroy(s->stream[i].link);
        s->stream[i].link = NULL;
    }
    s->count = 0;
    s->going = false;
}
