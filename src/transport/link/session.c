/* session.c - a link over its channel: what the channel and the loop call. */
#include <errno.h>

#include "transport/link/link.h"

static void link_on_enter(void *user)
{
    tly_link_enter(user);
}

static void link_on_leave(void *user)
{
    tly_link_leave(user);
}

static void link_on_connected(void *user)
{
    struct tly_link *l = user;
    tly_link_become(l, TLY_LINK_SHAKING);
    tly_link_shake(l);
}

static void link_on_ended(void *user, int err, const char *why)
{
    struct tly_link *l = user;
    if (!why)
        why = l->state == TLY_LINK_OPEN         ? "connection ended"
              : l->state == TLY_LINK_SETTING_UP ? "connection ended while its medium was set up"
                                                : "connection ended in the handshake";
    tly_link_end(l, err, why);
}

static void link_on_room(void *user)
{
    struct tly_link *l = user;
    l->wants_room = false;
    tly_link_push(l);
}

static void link_on_handed(void *user, uint32_t packets, size_t bytes)
{
    tly_link_on_handed(user, packets, bytes);
}

static void link_on_completed(void *user, uint32_t packets)
{
    tly_link_on_completed(user, packets);
}

static void link_on_heard(void *user, size_t bytes)
{
    struct tly_link *l = user;
    l->bytes_received += bytes;
    tly_link_note_heard(l);
}

static struct tly_arrival *link_on_begin(void *user, const uint8_t *header)
{
    return tly_link_begin(user, header);
}

static void link_on_progress(void *user)
{
    tly_link_progress(user);
}

static void link_on_arrived(void *user, const uint8_t *trailer)
{
    tly_link_arrived(user, trailer);
}

static const struct tly_channel_user up = {
    .enter = link_on_enter,
    .leave = link_on_leave,
    .connected = link_on_connected,
    .ended = link_on_ended,
    .room = link_on_room,
    .handed = link_on_handed,
    .completed = link_on_completed,
    .heard = link_on_heard,
    .begin = link_on_begin,
    .progress = link_on_progress,
    .arrived = link_on_arrived,
};

/* Before the loop sleeps: frames first, then counts that went with none of them. */
static int64_t link_prepare(struct tly_hook *h)
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

static void link_tick(struct tly_hook *h)
{
    struct tly_link *l = tly_list_entry(h, struct tly_link, hook);
    tly_link_enter(l);
    tly_link_look_alive(l);
    tly_link_leave(l);
}

int tly_link_start(struct tly_link *l, struct tly_channel *c, struct tly_strangers *strangers)
{
    l->channel = c;
    l->hook.prepare = link_prepare;
    l->hook.tick = link_tick;
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
