/* in.c - frames in: a header is checked and its user says where the payload belongs; when that is in place, the user is told.
 *
 * Three detours on the way of a payload:
 *   control    no place of the user's: a buffer of the link's own, for one frame
 *   beside     what lies at its place is still needed, and it comes with a checksum, or in no order: it lands in a buffer
 *              of one fragment, and moves when it is whole
 *   shown      it is not sent: a reference comes, and header() is asked when that has come.  The payload is copied from
 *              the peer's memory, or its user reads it there (a loan) */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/fail.h"
#include "base/log.h"
#include "transport/link/link.h"
#include "transport/loan.h"

/* The frame, or what has come of it, ends the connection. */
static void link_in_refuse(struct tly_link *l, int err, const char *why)
{
    if (l->state == TLY_LINK_CLOSED)
        return;
    if (err == -ECONNRESET) {
        tly_link_end(l, ECONNRESET, why ? why : "connection ended");
        return;
    }
    if (!l->strangers) /* else it is counted */
        tly_warn("transport", "closing the connection to %s: %s", l->name, why ? why : strerror(-err));
    tly_link_end(l, EPROTO, why ? why : strerror(-err));
}

/* A buffer of the link's own. */
static int link_in_land_in_control(struct tly_link *l, const char **why)
{
    l->land.to = l->control = malloc(l->frame.payload);
    if (l->control)
        return 0;
    *why = "out of memory";
    return -ENOMEM;
}

static int link_in_land_beside(struct tly_link *l, const char **why)
{
    if (!l->beside)
        l->beside = malloc(TLY_MAX_FRAGMENT);
    if (!l->beside) {
        *why = "out of memory";
        return -ENOMEM;
    }
    l->moves_to = l->in.to;
    l->in.to = l->beside;
    l->in.in_blocks = false; /* it moves whole */
    l->in.users = false;
    return 0;
}

/* Where the frame's payload belongs, says the user, or the handshake. */
static int link_in_find_place(struct tly_link *l, const char **why)
{
    int err = 0;
    if (l->state == TLY_LINK_SHAKING) {
        if (l->frame.type != TLY_HELLO || l->frame.payload != TLY_HELLO_BYTES) {
            *why = "no handshake";
            return -EPROTO;
        }
        l->land.control = true;
    } else if (l->state == TLY_LINK_SETTING_UP) {
        if (l->frame.type != TLY_SETUP || l->frame.payload > TLY_SETUP_BYTES) {
            *why = "a frame before the medium is set up";
            return -EPROTO;
        }
        l->land.control = true;
    } else if (l->frame.type == TLY_HELLO || l->frame.type == TLY_SETUP) {
        *why = "a second handshake";
        return -EPROTO;
    } else {
        err = l->calls->header(l->user, l, &l->frame, &l->land, why);
    }
    if (err || l->state == TLY_LINK_CLOSED)
        return err;
    if (l->land.control && l->frame.payload)
        err = link_in_land_in_control(l, why);
    l->in.to = l->land.to;
    l->in.in_blocks = l->land.in_blocks;
    l->in.users = l->in.to && !l->land.control;
    if (!err && l->in.to && l->in.in_blocks && (l->in.trailer || !tly_link_via(l)->in_order))
        err = link_in_land_beside(l, why);
    return err;
}

/* A reference, or news that a loan has come back: header() is not asked yet. */
static int link_in_begin_shown(struct tly_link *l, const char **why)
{
    bool returns = l->frame.type == TLY_RETURN;
    if (!tly_link_via(l)->lending || l->state != TLY_LINK_OPEN || l->in.trailer ||
        returns == (l->frame.payload > 0)) {
        *why = "a reference to memory out of place";
        return -EPROTO;
    }
    l->in.to = l->reference;
    l->in.follows = returns ? 0 : TLY_REFERENCE_BYTES;
    return 0;
}

static int link_in_begin(struct tly_link *l, const uint8_t *header, const char **why)
{
    static const uint8_t zero[TLY_FRAME_KEY_BYTES];
    bool open = l->state == TLY_LINK_OPEN, keyed = open || l->state == TLY_LINK_SETTING_UP;
    int err = tly_frame_decode(header, keyed ? l->hello.receive_key : zero, l->receive_seq, &l->received,
                               &l->frame, why);
    if (err)
        return err;
    l->receive_seq++;
    l->land = (struct tly_landing){0};
    l->moves_to = NULL;
    l->in = (struct tly_arrival){.follows = l->frame.payload};
    if ((l->frame.flags & TLY_SUMMED) && open) {
        l->checksum = true;
        l->in.trailer = l->frame.payload ? TLY_TRAILER_BYTES : 0;
        l->frame.flags &= (uint16_t)~TLY_SUMMED; /* none of the user's business */
    }
    bool shown = l->frame.flags & TLY_SHOWN || l->frame.type == TLY_RETURN;
    err = shown ? link_in_begin_shown(l, why) : link_in_find_place(l, why);
    if (err)
        return err;
    l->in.coming = true;
    if (!shown)
        tly_fail_at(l->hello.me.role, "begins", l->frame.type);
    return 0;
}

struct tly_arrival *tly_link_begin(struct tly_link *l, const uint8_t *header)
{
    const char *why = NULL;
    int err = link_in_begin(l, header, &why);
    if (err)
        link_in_refuse(l, err, why);
    return l->state == TLY_LINK_CLOSED ? NULL : &l->in;
}

void tly_link_progress(struct tly_link *l)
{
    if (l->calls->landed && l->state == TLY_LINK_OPEN && !l->in.trailer && !(l->frame.flags & TLY_SHOWN))
        l->calls->landed(l->user, l, &l->frame, l->in.landed);
}

/* -EPROTO: it is not what was sent.  Then what lies beside moves to its place. */
static int link_in_verify(struct tly_link *l, const uint8_t *trailer, const char **why)
{
    uint8_t sum[TLY_TRAILER_BYTES];
    if (!l->in.to)
        return 0; /* nobody wants it, so nobody is misled */
    if (l->in.trailer) {
        tly_link_checksum(sum, l->in.to, l->frame.payload, l->frame.seq);
        if (memcmp(sum, trailer, sizeof sum) != 0) {
            *why = "a payload was altered on its way";
            return -EPROTO;
        }
    }
    if (l->moves_to) {
        memcpy(l->moves_to, l->in.to, l->frame.payload);
        l->in.to = l->moves_to;
    }
    return 0;
}

/* A payload that lies in memory of the peer's: it is copied to where it belongs, or its user reads it there. */
static int link_in_take_shown(struct tly_link *l, const char **why)
{
    const struct tly_lending *lending = tly_link_via(l)->lending;
    struct tly_loan *loan;
    uint32_t at;
    int err = lending->resolve(l->channel, l->reference, &l->frame, &loan, &at, why);
    if (err)
        return err;
    l->frame.flags &= (uint16_t)~TLY_SHOWN;
    l->land = (struct tly_landing){0};
    l->loan = tly_loan_is_whole(loan) ? loan : NULL;
    err = l->calls->header(l->user, l, &l->frame, &l->land, why);
    l->loan = NULL;
    if (!err && l->state != TLY_LINK_CLOSED) {
        if (l->land.control)
            err = link_in_land_in_control(l, why);
        bool wanted = l->land.to || l->land.lent;
        const uint8_t *data = wanted && !err ? tly_loan_hold(loan) : NULL;
        if (data && l->land.to)
            memcpy(l->land.to, data + at, l->frame.payload);
        else if (data)
            l->land.to = (void *)(data + at);
        if (data)
            tly_loan_drop(loan);
        else if (wanted && !err)
            err = -ECONNRESET;
        if (!err)
            err = l->calls->frame(l->user, l, &l->frame, l->land.to, why);
    }
    lending->done(l->channel, loan, &l->frame);
    return err;
}

static int link_in_complete(struct tly_link *l, const char **why)
{
    int err = 0;
    if (l->state == TLY_LINK_SHAKING)
        tly_link_on_hello(l);
    else if (l->state == TLY_LINK_SETTING_UP)
        err = tly_link_on_setup(l, why);
    else if (l->frame.type == TLY_RETURN)
        tly_link_via(l)->lending->returned(l->channel, l->frame.key);
    else if (l->frame.flags & TLY_SHOWN)
        err = link_in_take_shown(l, why);
    else
        err = l->calls->frame(l->user, l, &l->frame, l->in.to, why);
    bool asked = l->frame.type == TLY_BEAT && (l->frame.flags & TLY_REQUEST);
    if (asked && !err && l->state == TLY_LINK_OPEN && !l->destroyed && !tly_link_waiting(l))
        tly_link_say(l, TLY_BEAT, 0); /* else what waits to be sent is a sign of life as well */
    return err;
}

void tly_link_arrived(struct tly_link *l, const uint8_t *trailer)
{
    const char *why = NULL;
    int err = link_in_verify(l, trailer, &why);
    if (!err) {
        l->in.coming = false;
        tly_fail_at(l->hello.me.role, "gets", l->frame.type);
        err = link_in_complete(l, &why);
        tly_fail_at(l->hello.me.role, "has done", l->frame.type);
        free(l->control);
        l->control = NULL;
    }
    if (err)
        link_in_refuse(l, err, why);
}
