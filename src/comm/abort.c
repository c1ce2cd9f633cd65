/* abort.c - tally_comm_abort(): a rank leaves because of an error of its own, and the others hear why.
 *
 * The reason goes to the coordinator, which ends the job with it on all ranks: the operations under way may need this
 * rank, in whatever way they travel.  Then the communicator fails here, too.  In the process of the coordinator it waits for
 * that: the caller may end the process, and the coordinator tells the other ranks first.  Any thread. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/loop.h"
#include "base/text.h"
#include "comm/comm.h"
#include "membership/member.h"
#include "tally/tally.h"

enum {
    MOST_REASON = 400, /* bytes: a line, not a traceback */
    TELL_MS = 1000,    /* for the coordinator of this process to tell the other ranks */
};

/* One line: white space becomes spaces, other control characters '?', and it ends with a whole character. */
static void abort_clean(const char *reason, char out[MOST_REASON])
{
    size_t n = 0;
    for (const char *p = reason; *p && n < MOST_REASON - 1; p++)
        out[n++] = strchr("\t\n\v\f\r", *p) ? ' ' : *p;
    if (reason[n]) { /* cut off: not within a character of UTF-8 */
        while (n > 0 && ((unsigned char)out[n - 1] & 0xc0) == 0x80)
            n--;
        if (n > 0 && ((unsigned char)out[n - 1] & 0xc0) == 0xc0)
            n--;
    }
    while (n > 0 && out[n - 1] == ' ')
        n--;
    out[n] = '\0';
    tly_text_clean(out);
}

int tally_comm_abort(tally_comm *c, const char *reason)
{
    int err = tly_comm_check(c);
    if (err)
        return err;
    if (!reason || !*reason)
        return tly_fail(EINVAL, "tally_comm_abort: a reason is needed");
    if (!c->params.abort)
        return 0;
    char text[MOST_REASON], sentence[MOST_REASON + 64];
    abort_clean(reason, text);
    snprintf(sentence, sizeof sentence, "rank %d left: %s", c->rank, text);
    tly_loop_lock(&c->loop);
    bool first = !tly_comm_failed(c);
    if (first)
        tly_member_abort(&c->member, text);
    tly_loop_unlock(&c->loop);
    if (first && c->coordinator)
        tly_comm_wait_left(c, tly_now() + TELL_MS * TLY_MS);
    tly_loop_lock(&c->loop);
    tly_comm_fail(c, ECONNRESET, sentence);
    tly_loop_unlock(&c->loop);
    tly_loop_wake(&c->loop);
    return 0;
}
