/* late.c - a test medium that does all that a network card may: its ends have words before the first frame, payloads are read late, land in pieces in any order, and are
 * completed some time after they have arrived. */
#include "test/media/pair.h"
#include "test/media/testing.h"

static const struct tly_pair_conduct how = {.wait = 3, .piece = 1000, .linger = 5, .moved = UINT32_MAX};
static const char *const names[] = {"late", NULL};

static int listen_at(const struct tly_door_config *c, struct tly_door **out)
{
    return tly_pair_listen(&tly_late, c, out);
}

static int dial(const struct tly_dial *d, struct tly_channel **out)
{
    return tly_pair_dial(&tly_late, &how, d, out);
}

const struct tly_medium tly_late = {
    .scheme = "late",
    .names = names,
    .listen = listen_at,
    .shut = tly_pair_shut,
    .dial = dial,
    .start = tly_pair_start,
    .send = tly_pair_send,
    .close = tly_pair_close,
    .destroy = tly_pair_destroy,
    .detach = tly_pair_detach,
    .setup = &tly_pair_setup,
    .announce = tly_pair_announce,
    .withdraw = tly_pair_withdraw,
};
