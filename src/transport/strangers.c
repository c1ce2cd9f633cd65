/* strangers.c - counts the connections at a listener that end before they have proved the secret.
 *
 * A port scan, a health check or another job's ranks can knock many times a second for days: they cost one line a minute.
 * It is a warning if some had another secret or spoke another protocol; a connection that only comes and goes is none. */
#include "transport/strangers.h"

#include <errno.h>
#include <stdio.h>

#include "base/clock.h"
#include "base/log.h"

enum { TELL_EVERY_S = 60 };

void tly_strangers_note(struct tly_strangers *s, const char *name, int err, const char *why, int64_t now)
{
    if (!s->failed++)
        s->since = now;
    s->odd += err == EACCES || err == EPROTO;
    snprintf(s->last, sizeof s->last, "%s: %s", name, why);
    tly_debug("transport", "not past the handshake: %s", s->last);
    if (err == EACCES && !s->told) {
        s->told = true;
        tly_warn("transport", "%s was not let in: %s", name, why);
    }
}

void tly_strangers_tell(struct tly_strangers *s, uint16_t port, int64_t now, bool at_once)
{
    if (!s->failed || (!at_once && now - s->since < TELL_EVERY_S * TLY_SEC))
        return;
    char place[32] = "a local socket";
    if (port)
        snprintf(place, sizeof place, "port %u", port);
    if (s->failed > 1 || !s->told)
        tly_log(s->odd ? TALLY_LOG_WARNING : TALLY_LOG_INFO, "transport",
                "%s: %u connection%s in %d s did not get past the handshake, %u with another secret or "
                "protocol; the last was %s",
                place, s->failed, s->failed == 1 ? "" : "s", (int)((now - s->since) / TLY_SEC) + 1, s->odd,
                s->last);
    *s = (struct tly_strangers){.shaking = s->shaking};
}
