/* judge.c - judges which tallyd the job goes on without, and what ends it.
 *
 * Two kinds of evidence come in.  Ranks complain (COMPLAIN): of a tallyd that they cannot reach, which is put out after a
 * moment, or of something that ends the job.  Members fall silent.  Only tly_judge_tick() puts somebody out: what a rank saw
 * first may be the death of a process whose own connection ends a moment later, and that names the cause better.  Who holds
 * the job up is found in slow.c.
 *
 * Everything here runs in the coordinator's loop. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "membership/change.h"
#include "membership/internal.h"

enum {
    COMPLAINT_MS = 300,
    MEET_S = 10, /* for all ranks to meet a service that joins a running job */
};

/* --- complaints ---------------------------------------------------------------------------------- */

static bool judge_is_embedded(const struct tly_coordinator *c, uint64_t incarnation)
{
    for (uint32_t i = 0; i < c->roster.machine_count; i++)
        if (c->roster.services[i].incarnation == incarnation)
            return true;
    return false;
}

/* A rank cannot reach a tallyd.  That it has reached before says that the rank may be cut off; a newcomer says nothing. */
static void judge_accuse(struct tly_coordinator_member *m, struct tly_coordinator_member *accused,
                         const char *sentence)
{
    struct tly_coordinator *c = m->c;
    char name[200];
    m->accuses += c->state == RUNNING && !accused->invited;
    if (accused->accused_at)
        return;
    tly_coordinator_name(m, name, sizeof name);
    accused->accused_at = c->loop.awake;
    accused->accuser = m->info.rank;
    snprintf(accused->accusation, sizeof accused->accusation, "%.100s %.190s", name, sentence);
}

void tly_judge_complaint(struct tly_coordinator_member *m, const struct tly_frame *f, struct tly_reader *r)
{
    struct tly_coordinator *c = m->c;
    char sentence[TLY_SENTENCE - 200], name[200];
    uint32_t err = tly_read32(r);
    tly_read_text(r, sentence, sizeof sentence);
    uint64_t service = tly_read64(r);
    if ((!m->entered && c->state != GATHERING) || r->failed)
        return;
    struct tly_coordinator_member *accused = tly_change_find_tallyd(c, service);
    if (!err && service && !accused && c->state <= RUNNING && !judge_is_embedded(c, service))
        return; /* it is out already */
    if (!err && accused && m->entered) {
        judge_accuse(m, accused, sentence);
        return;
    }
    if (!m->entered) /* it has failed before it could say more of itself */
        m->info = (struct tly_member_info){.role = TLY_ROLE_RANK, .rank = tly_link_peer(m->link)->rank};
    tly_coordinator_name(m, name, sizeof name);
    if (f->flags & TLY_MARK) {
        tly_coordinator_fail(c, ECONNRESET, "rank %u left: %s", m->info.rank, sentence);
    } else if (err) {
        tly_coordinator_fail(c, err < 4096 ? (int)err : EPROTO, "%s: %s", name, sentence);
    } else if (!c->complaint_due) {
        /* The machine that cannot be reached may just have died: its own connection will tell, and names it better. */
        c->complaint_due = c->loop.awake + COMPLAINT_MS * TLY_MS;
        snprintf(c->complaint, sizeof c->complaint, "%s: %s", name, sentence);
    }
}

/* --- putting out --------------------------------------------------------------------------------- */

/* The job goes on without a tallyd, and the tallyd is told so: if it only stood still it comes again. */
static void judge_put_out(struct tly_coordinator_member *m, const char *why)
{
    char text[TLY_SENTENCE];
    snprintf(text, sizeof text, "the job goes on without this tallyd: %s", why);
    tly_change_evict(m, why);
    tly_coordinator_post_verdict(m, EAGAIN, text);
    m->accused_at = 0;
}

bool tly_judge_is_silent(const struct tly_coordinator_member *m, char *why, size_t len)
{
    if (!m->entered || m->info.role == TLY_ROLE_RANK ||
        m->c->loop.awake - tly_link_heard_at(m->link) <= TALLYD_SILENCE_S * TLY_SEC)
        return false;
    snprintf(why, len, "silent for %d s (stopped, or cut off)", TALLYD_SILENCE_S);
    return true;
}

static void judge_silent(struct tly_coordinator *c)
{
    char why[100];
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        struct tly_coordinator_member *m = tly_list_entry(n, struct tly_coordinator_member, node);
        /* One that has been put out has been told, and has yet to read that. */
        if (c->state == RUNNING && m->service != TLY_NO_SERVICE && tly_judge_is_silent(m, why, sizeof why))
            judge_put_out(m, why);
    }
}

/* It has not answered since a rank accused it. */
static bool judge_is_silent(const struct tly_coordinator_member *m)
{
    return m->accused_at && tly_link_heard_at(m->link) < m->accused_at;
}

/* Why this tallyd is due to be put out; NULL: it is not. */
static const char *judge_charge(const struct tly_coordinator *c, const struct tly_coordinator_member *m,
                                char *text, size_t len)
{
    bool starts = c->state == INVITING && m->entered && m->service != TLY_NO_SERVICE && !m->begun;
    if ((m->invited && c->invitation && c->loop.awake - c->invited_at >= MEET_S * TLY_SEC) ||
        (starts && c->loop.awake - c->inviting_at >= MEET_S * TLY_SEC)) {
        snprintf(text, len,
                 starts ? "it has not begun within %d s" : "not all ranks have reached it within %d s",
                 MEET_S);
        return text;
    }
    if (!m->accused_at || c->loop.awake - m->accused_at < COMPLAINT_MS * TLY_MS)
        return NULL;
    if (!judge_is_silent(m))
        return m->accusation;
    snprintf(text, len, "silent while rank %u waited for it (stopped, or cut off)", m->accuser);
    return text;
}

/* A rank's word suffices, for nothing is lost.  But a rank that has lost most services, though they answer us, is cut off
 * itself.  The moment is for those whose own connections end just now. */
static void judge_accused(struct tly_coordinator *c)
{
    uint32_t alive = 0;
    char text[TLY_SENTENCE - 200], late[100];
    for (uint32_t i = 0; i < c->roster.service_count; i++)
        alive += c->roster.services[i].state != TLY_SERVICE_GONE;
    /* A job that has failed does not go on without anybody. */
    for (struct tly_list *n = c->members.next, *next; n != &c->members && c->state <= RUNNING; n = next) {
        struct tly_coordinator_member *m = tly_list_entry(n, struct tly_coordinator_member, node);
        next = n->next;
        if (m->accused_at && !tly_link_await(m->link, true))
            continue;
        const char *why = judge_charge(c, m, late, sizeof late);
        if (!why)
            continue;
        const struct tly_coordinator_member *accuser = m->accused_at ? c->ranks[m->accuser] : NULL;
        if (!judge_is_silent(m) && accuser && alive > 2 && 2 * accuser->accuses > alive) {
            tly_coordinator_name(accuser, text, sizeof text);
            tly_coordinator_fail(c, ECONNRESET, "%s is cut off: it cannot reach %u of %u services", text,
                                 accuser->accuses, alive);
            return;
        }
        if (!judge_is_silent(m)) /* a tallyd that stood still may come again at once */
            m->said_before = !tly_setback_note(c, m, why);
        judge_put_out(m, why);
    }
}

void tly_judge_tick(struct tly_coordinator *c)
{
    if (c->complaint_due && c->loop.awake >= c->complaint_due)
        tly_coordinator_fail(c, ECONNRESET, "%s", c->complaint);
    judge_accused(c);
    judge_silent(c);
}
