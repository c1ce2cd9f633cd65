/* null.c - a test medium that moves no payload but those of control frames, and counts what it would have moved: what is
 * left is what links cost. */
#include "test/media/pair.h"
#include "test/media/testing.h"

static const struct tly_pair_conduct how = {.moved = 1024};
static const char *const names[] = {"null", NULL};

static int listen_at(const struct tly_door_config *c, struct tly_door **out)
{
    return tly_pair_listen(&tly_null, c, out);
}

static int dial(const struct tly_dial *d, struct tly_channel **out)
{
    return tly_pair_dial(&tly_null, &how, d, out);
}

const struct tly_medium tly_null = {
    .scheme = "null",
    .names = names,
    .in_order = true,
    .inside = true,
    .listen = listen_at,
    .shut = tly_pair_shut,
    .dial = dial,
    .start = tly_pair_start,
    .send = tly_pair_send,
    .close = tly_pair_close,
    .destroy = tly_pair_destroy,
    .detach = tly_pair_detach,
};
