/* connect.c - finding the coordinator, and the first connection to it.
 *
 * The coordinator's name is looked up until it has addresses (tly_member_find).  All addresses are tried in their order, again
 * and again with growing pauses, until one answers, one refuses for good, or time is up (tly_member_connect).  Meanwhile the
 * log says what may be wrong.  The caller's thread turns the loop; no other thread runs it yet. */
#include <errno.h>
#include <sodium.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "membership/member.h"
#include "transport/address.h"

enum { TELL_S = 10, REACH_MS = 1000, ADVICE = TLY_HOLDER + 160 };

static void connect_pause_for(struct tly_member *m, int ms)
{
    int64_t until = tly_now() + ms * TLY_MS;
    while (tly_now() < until && !(m->cancelled && m->cancelled(m->user)))
        tly_loop_turn(m->loop, (int)((until - tly_now()) / TLY_MS) + 1);
}

static bool connect_worth_trying_again(int err)
{
    switch (err) {
    case EACCES:
    case EPROTO:
    case ESTALE:
    case ENOMEM:
        return false;
    default:
        return true;
    }
}

/* What may be wrong where no coordinator answers at m->at, and what to do; asks that machine. */
static const char *connect_advice(const struct tly_member *m, char room[ADVICE])
{
    char holder[TLY_HOLDER] = "";
    bool may = !tly_place_is_own(&m->at) || tly_address_holder(&m->at, holder);
    if (holder[0]) {
        snprintf(room, ADVICE, "the port is%s%s", holder + 1,
                 may ? ", which has not answered as rank 0's coordinator"
                     : ", which is no coordinator of Tally and leads to none now: end it, or set TALLY_PORT "
                       "for all ranks");
        return room;
    }
    switch (tly_address_reach(&m->at, REACH_MS)) {
    case TLY_REACH_NO_LISTENER:
        snprintf(room, ADVICE,
                 "that machine answers, but nothing listens at the port: is rank 0 started, and there? The "
                 "address is from %s",
                 m->place->coord_from);
        return room;
    case TLY_REACH_OTHER_PORT:
        return "that machine answers, but not at this port: a firewall keeps it shut; open it, or "
               "set another TALLY_PORT";
    case TLY_REACH_NOTHING:
        snprintf(room, ADVICE,
                 "nothing at that address answers: is it rank 0's, and is a firewall between? The address is "
                 "from %s",
                 m->place->coord_from);
        return room;
    default:
        return "something listens there, but does not answer as Tally's coordinator: is it another program? "
               "See rank 0's output; TALLY_PORT";
    }
}

/* The pauses between attempts, and what is said of them meanwhile. */
struct patience {
    int64_t deadline, told; /* monotonic; deadline negative: none */
    int64_t delay_ms;
};

static struct patience connect_patience_of(double timeout_s)
{
    int64_t now = tly_now();
    return (struct patience){timeout_s < 0 ? -1 : now + (int64_t)(timeout_s * (double)TLY_SEC), now, 10};
}

/* An attempt (to connect, or to look the address up) has failed: wait for the next.  False when time is up.  refused: its
 * machine answers, so rank 0 is likely to start only, as a program that imports much does, or to come behind a tallyd. */
static bool connect_wait_to_retry(struct tly_member *m, struct patience *p, const char *why, bool connects,
                                  bool refused)
{
    int64_t now = tly_now();
    double tell_s = refused && m->params->late_warning > TELL_S ? m->params->late_warning : TELL_S;
    char room[ADVICE];
    if (p->deadline >= 0 && now > p->deadline)
        return false;
    if (now - p->told > (int64_t)(tell_s * (double)TLY_SEC)) {
        p->told = now;
        if (connects)
            tly_warn("join", "still trying: %s (%s)", why, connect_advice(m, room));
        else
            tly_warn("join", "still trying: %s", why);
    }
    connect_pause_for(m, (int)(p->delay_ms / 2 + randombytes_uniform((uint32_t)p->delay_ms)));
    p->delay_ms = p->delay_ms * 3 / 2 < 1000 ? p->delay_ms * 3 / 2 + 1 : 1000;
    return true;
}

int tly_member_find(struct tly_member *m, double timeout_s)
{
    struct patience p = connect_patience_of(timeout_s);
    char why[TLY_SENTENCE - 64];
    for (;;) {
        int err = tly_place_resolve(m->place, &m->to);
        if (err != -EAGAIN)
            return err;
        snprintf(why, sizeof why, "%s", tly_error());
        if (!connect_wait_to_retry(m, &p, why, false, false))
            return tly_fail(ETIMEDOUT, "%s; tried for %.0f s", why, timeout_s);
        if (m->cancelled && m->cancelled(m->user))
            return tly_fail(EINTR, "interrupted while joining");
    }
}

static void connect_leave(struct tly_member *m)
{
    tly_loop_lock(m->loop);
    tly_link_destroy(m->link);
    m->link = NULL;
    tly_loop_unlock(m->loop);
    m->identity.incarnation = 0; /* the next one may be another's */
    memcpy(m->identity.job, m->place->job, sizeof m->identity.job);
}

/* One attempt, at m->at; it has until `deadline`. */
static int try_to_connect(struct tly_member *m, int64_t deadline)
{
    m->state = TLY_MEMBER_CONNECTING;
    snprintf(m->sentence, sizeof m->sentence, "no answer");
    tly_loop_lock(m->loop);
    int err = tly_member_dial(m, &m->identity);
    tly_loop_unlock(m->loop);
    if (err) {
        m->error = -err;
        snprintf(m->sentence, sizeof m->sentence, "%s", tly_error());
        return err;
    }
    err = tly_member_wait(m, TLY_MEMBER_KNOWN, deadline);
    if (err)
        connect_leave(m);
    return err;
}

/* Try the addresses in their order.  *refused: one before that which answered did not, though its host did. */
static int connect_try_all(struct tly_member *m, int64_t deadline, unsigned sweep, bool *refused)
{
    int err = -ETIMEDOUT;
    *refused = false;
    for (int i = 0; i < m->to.count && (i == 0 || deadline < 0 || tly_now() < deadline); i++) {
        char text[80];
        m->at = m->to.at[i];
        tly_address_text(&m->at, text, sizeof text);
        snprintf(m->coordinator, sizeof m->coordinator, m->to.named ? "%s (%s)" : "%s", text,
                 m->place->coord_host);
        int64_t until = deadline;
        if (m->to.count > 1) { /* one that swallows packets must not hold up the others */
            until = tly_now() + (sweep < 8 ? 2 + sweep : 10) * TLY_SEC;
            until = deadline < 0 || until < deadline ? until : deadline;
        }
        err = try_to_connect(m, until);
        if (!err || err == -EINTR || (err != -ETIMEDOUT && !connect_worth_trying_again(-err)))
            break;
        *refused |= err == -ECONNREFUSED;
    }
    return err;
}

int tly_member_connect(struct tly_member *m, double timeout_s)
{
    struct patience p = connect_patience_of(timeout_s);
    char why[TLY_SENTENCE], room[ADVICE];
    bool refused, sure = false;
    for (unsigned sweep = 0;; sweep++) {
        if (sweep && m->to.named && !m->to.settled)
            tly_place_resolve(m->place,
                              &m->to); /* the host may have come back elsewhere; else what we know stays */
        int err = connect_try_all(m, p.deadline, sweep, &refused);
        if (!err && refused && !sure) {
            /* The coordinator may have come up between the two attempts: all should reach it in the same way. */
            sure = true;
            connect_leave(m);
            continue;
        }
        if (!err)
            return 0;
        if (err == -EINTR)
            return tly_fail(EINTR, "interrupted while joining");
        if (err != -ETIMEDOUT && !connect_worth_trying_again(-err))
            return tly_fail(-err, "the coordinator at %s refuses: %s", m->coordinator, m->sentence);
        snprintf(why, sizeof why, "no coordinator at %s: %.500s", m->coordinator, m->sentence);
        if (!connect_wait_to_retry(m, &p, why, true, refused))
            return tly_fail(ETIMEDOUT, "no coordinator at %s within %.0f s: %.400s (%s)", m->coordinator,
                            timeout_s, m->sentence, connect_advice(m, room));
    }
}

int tly_member_service_address(const struct tly_member *m, struct sockaddr_storage *at)
{
    int err = 0;
    if (m->params->iface)
        err = tly_place_iface(m->params->iface, &m->here, at);
    else if (m->to.named && m->place->has_secret && tly_place_is_own(&m->at))
        tly_address_any(at);
    else
        *at = m->here;
    if (!err && !m->place->has_secret && !tly_address_is_loopback(at))
        err = tly_fail(EACCES, "TALLY_IFACE=%s leads to other machines: that needs a secret (`tally secret`)",
                       m->params->iface);
    tly_address_set_port(at, 0);
    return err;
}
