/* setback.c - tallyd that some rank cannot reach: how long they wait before they are invited again.
 *
 * A tallyd that a rank cannot reach is put out of the job and comes again at once, as another member with another port.
 * Each invitation makes every rank connect, and a silent firewall costs seconds each time.  So the coordinator keeps the
 * machines of such tallyd in a table: the n-th setback in a row holds the next invitation back for 2^n seconds, at most
 * LONGEST_S, less a random quarter.  The tallyd stays connected to the coordinator meanwhile.  Owner: the coordinator's
 * loop. */
#include <sodium.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "membership/change.h"
#include "membership/internal.h"

enum {
    LONGEST_S = 64,
    MOST_SETBACKS = 1024, /* machines */
};

struct setback {
    char host_id[64], address[TLY_HOST_TEXT]; /* the machine */
    char why[300];                            /* the last reason */
    uint32_t count;                           /* in a row */
    int64_t until;                            /* awake clock */
};

static struct setback *setback_find(const struct tly_coordinator *c, const struct tly_coordinator_member *m)
{
    char address[TLY_HOST_TEXT];
    tly_endpoints_host(&m->info.at, address);
    for (uint32_t i = 0; i < c->setback_count; i++)
        if (strcmp(c->setbacks[i].host_id, m->info.host_id) == 0 &&
            strcmp(c->setbacks[i].address, address) == 0)
            return &c->setbacks[i];
    return NULL;
}

bool tly_setback_note(struct tly_coordinator *c, const struct tly_coordinator_member *m, const char *why)
{
    struct setback *s = setback_find(c, m);
    if (!s && c->setback_count < MOST_SETBACKS) {
        struct setback *more = realloc(c->setbacks, (c->setback_count + 1) * sizeof *more);
        if (more) {
            c->setbacks = more;
            s = &more[c->setback_count++];
            *s = (struct setback){0};
            memcpy(s->host_id, m->info.host_id, sizeof s->host_id);
            tly_endpoints_host(&m->info.at, s->address);
        }
    }
    if (!s) /* no room: it comes again at once */
        return true;
    bool news = strncmp(s->why, why, sizeof s->why - 1) != 0;
    strncpy(s->why, why, sizeof s->why - 1);
    s->count++;
    int64_t wait = (s->count < 6 ? 1 << s->count : LONGEST_S) * TLY_SEC;
    s->until = c->loop.awake + wait - (int64_t)randombytes_uniform((uint32_t)(wait / 4 / TLY_MS)) * TLY_MS;
    return news;
}

bool tly_setback_is_over(const struct tly_coordinator *c, const struct tly_coordinator_member *m)
{
    const struct setback *s = setback_find(c, m);
    return !s || c->loop.awake >= s->until;
}

void tly_setback_forget(struct tly_coordinator *c, const struct tly_coordinator_member *m)
{
    struct setback *s = setback_find(c, m);
    if (s)
        *s = c->setbacks[--c->setback_count];
}
