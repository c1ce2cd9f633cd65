/* session.c - a link over its channel: what the channel and the loop call. */
#include <errno.h>

#include "transport/link/link.h"

static void on_enter(void *user)
{
    tly_link_enter(user);
}

static void on_leave(void *user)
{
    tly_link_leave(user);
}

static void on_connected(void *user)
{
    struct tly_link *l = user;
    tly_link_become(l, TLY_LINK_SHAKING);
    tly_link_shake(l);
}

static void on_ended(void *user, int err, const char *why)
{
    struct tly_link *l = user;
    if (!why)
        why = l->state == TLY_LINK_OPEN ? "connection ended" : "connection ended in the handshake";
    tly_link_end(l, err, why);
}

static void on_room(void *user)
{
    struct tly_link *l = user;
    l->wants_room = false;
    tly_link_push(l);
}

static void on_handed(void *user, uint32_t packets, size_t bytes)
{
    tly_link_on_handed(user, packets, bytes);
}

static void on_completed(void *user, uint32_t packets)
{
    tly_link_on_completed(user, packets);
}

static void on_heard(void *user, size_t bytes)
{
    struct tly_link *l = user;
    l->bytes_received += bytes;
    tly_link_note_heard(l);
}

static struct tly_arrival *on_begin(void *user, const uint8_t *header)
{
    return tly_link_begin(user, header);
}

static void on_progress(void *user)
{
    tly_link_progress(user);
}

static void on_arrived(void *user, const uint8_t *trailer)
{
    tly_link_arrived(user, trailer);
}

static const struct tly_channel_user up = {
    .enter = on_enter,
    .leave = on_leave,
    .connected = on_connected,
    .ended = on_ended,
    .room = on_room,
    .handed = on_handed,
    .completed = on_completed,
    .heard = on_heard,
    .begin = on_begin,
    .progress = on_progress,
    .arrived = on_arrived,
};

/* Before the loop sleeps: frames first, then counts that went with none of them. */
static int64_t prepare(struct tly_hook *h)
{
    struct tly_link *l = tly_list_entry(h, struct tly_link, hook);
    if (l->state != TLY_LINK_OPEN)
        return INT64_MAX;
    tly_link_enter(l);
    if (!l->wants_room)
        tly_link_push(l);
    int64_t due = tly_link_send_counts(l);
    tly_link_leave(l);
    return due;
}

static void tick(struct tly_hook *h)
{
    struct tly_link *l = tly_list_entry(h, struct tly_link, hook);
    tly_link_enter(l);
    tly_link_look_alive(l);
    tly_link_leave(l);
}

int tly_link_start(struct tly_link *l, struct tly_channel *c, struct tly_strangers *strangers)
{
    l->channel = c;
    l->hook.prepare = prepare;
    l->hook.tick = tick;
    c->up = &up;
    c->user = l;
    if (!l->hello.connector)
        tly_link_become(l, TLY_LINK_SHAKING);
    int err = c->medium->start(c);
    if (err) {
        c->medium->close(c);
        return err;
    }
    tly_loop_hook(l->loop, &l->hook);
    l->strangers = strangers;
    if (strangers)
        strangers->shaking++;
    return 0;
}
