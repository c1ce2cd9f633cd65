/* slow.c - the one judgement of who holds the job up, and by what.
 *
 * It looks, in this order, for a network card or a service's sums that are busy all the time and slower than was said
 * (adapt.c, by the ranks' reports of their traffic), for a rank that takes longer than the others by itself
 * (src/plan/late.c, by their reports of their steps), and for cards that all carry half.  All members are told (PACE) when the
 * judgement changes; the log, `tally status`, /metrics and the job's last line have it from there.  A new epoch begins with no
 * judgement, and whoever still holds the job up is named again.  Ranks leave one after the other at a job's end: the rank that
 * takes longer stays named until the others have shown something else.
 *
 * Where processors or networks are shared with others, the judgement moves from one holder to another within seconds.  After
 * three such turns in a minute it is that nobody alone holds the job up, until there has been no turn for a minute.  Turns
 * outlive epochs, for the split changes meanwhile.
 *
 * All of it belongs to the coordinator's loop. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/log.h"
#include "membership/adapt.h"
#include "membership/internal.h"

enum {
    REPEAT_S = 60, /* until the same is said again; twice as long each time */
    MOST_REPEAT_S = 1 << 20,
    TURNS_S = 60,  /* in which there are TLY_SLOW_TURNS turns, or none any more */
    SETTLED_S = 10 /* another holder than the one in the log has been named, before it is there, too */
};

/* Does a rank hold the job up, by itself? */
static bool slow_is_rank(enum tly_why why)
{
    return why == TLY_WHY_COMPUTES || why == TLY_WHY_WAITS || why == TLY_WHY_PAGES;
}

void tly_slow_heard(struct tly_coordinator_member *m, struct tly_reader *r)
{
    struct tly_steps steps;
    if (tly_steps_read(r, &steps) != 0)
        return; /* one sample less */
    tly_own_see(&m->own, &steps);
    m->c->slow.fresh = true;
}

void tly_slow_left(struct tly_coordinator *c)
{
    for (uint32_t i = 0; i < c->size; i++)
        if (c->ranks[i])
            c->ranks[i]->own.count = 0;
}

bool tly_slow_is_past(const struct tly_coordinator *c)
{
    return slow_is_rank(c->slow.told.why) && c->roster.ranks[c->slow.who].left;
}

/* --- who it is -------------------------------------------------------------------------------------- */

static int slow_by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* What the card of a service carries, as the plan knows by now; bit/s, 0: not known. */
static double slow_carries(const struct tly_coordinator *c, uint32_t service)
{
    return 8 * tly_replan_bandwidth(c->adapt.replan, (int)c->roster.services[service].card);
}

/* What its card carries over what was said; where nothing was, over the others' median. */
static double slow_card_ratio(const struct tly_coordinator *c, uint32_t service)
{
    uint32_t card = c->roster.services[service].card;
    double other[TLY_MAX_SERVICES], is = slow_carries(c, service);
    double due = (double)c->roster.services[card].said;
    int n = 0;
    for (uint32_t i = 0; !(due > 0) && i < c->roster.service_count && n < TLY_MAX_SERVICES; i++)
        if (i != card && c->roster.services[i].card == i &&
            c->roster.services[i].state == TLY_SERVICE_ACTIVE && slow_carries(c, i) > 0)
            other[n++] = slow_carries(c, i);
    if (n) {
        qsort(other, (size_t)n, sizeof *other, slow_by_value);
        due = other[n / 2];
    }
    return is > 0 && due > 0 ? is / due : 1;
}

static bool slow_all_carry_half(const struct tly_coordinator *c)
{
    bool any = false;
    for (uint32_t i = 0; i < c->roster.service_count; i++) {
        const struct tly_roster_service *s = &c->roster.services[i];
        if (s->state != TLY_SERVICE_ACTIVE || s->card != i)
            continue;
        double ratio = s->said ? slow_card_ratio(c, i) : 1;
        if (ratio < .4 || ratio > .7)
            return false;
        any = true;
    }
    return any;
}

static bool has_slow_card(const struct tly_coordinator *c, uint32_t service)
{
    return service < c->roster.service_count && slow_card_ratio(c, service) < 1 - TLY_ADAPT_NEWS;
}

/* As tly_late_find(). */
static int slow_find_late(const struct tly_coordinator *c, struct tly_lateness *late)
{
    const struct tly_own **of = calloc(c->size, sizeof *of);
    const struct tly_lateness *named = slow_is_rank(c->slow.told.why) ? &c->slow.late : NULL;
    for (uint32_t i = 0; of && i < c->size; i++)
        of[i] = c->ranks[i] && !c->ranks[i]->left && !c->roster.ranks[i].joined ? &c->ranks[i]->own : NULL;
    int found = of ? tly_late_find((int)c->size, of, named, late) : -1;
    free(of);
    return found;
}

static enum tly_why slow_why_late(const struct tly_lateness *late)
{
    return late->why == TLY_LATE_WAITS   ? TLY_WHY_WAITS
           : late->why == TLY_LATE_PAGES ? TLY_WHY_PAGES
                                         : TLY_WHY_COMPUTES;
}

static enum tly_why slow_judge(const struct tly_coordinator *c, uint32_t *who, struct tly_lateness *late)
{
    bool cards = c->adapt.replan;
    int busy = cards ? c->adapt.standout : -1;
    bool half = cards && slow_all_carry_half(c);
    *who = busy >= 0 ? (uint32_t)busy : 0;
    if (busy >= 0 && (tly_replan_sums_limit(c->adapt.replan, busy) ||
                      tly_replan_eases(c->adapt.replan, (int)c->roster.services[busy].card)))
        return TLY_WHY_SUMS;
    if (busy >= 0 && !half && has_slow_card(c, *who))
        return TLY_WHY_CARD;
    int found = busy >= 0 && half ? 0 : slow_find_late(c, late);
    if (found > 0) {
        *who = (uint32_t)late->rank;
        return slow_why_late(late);
    }
    if (half)
        return TLY_WHY_ALL_CARDS;
    *who = c->slow.who;
    if (found < 0 && slow_is_rank(c->slow.told.why))
        return c->slow.told.why; /* until the ranks that have not left show something else */
    /* A slow card that nobody waits for now. */
    return cards && c->slow.told.why == TLY_WHY_CARD && has_slow_card(c, *who)
               ? TLY_WHY_CARD
               : TLY_WHY_NOBODY;
}

/* --- turns ------------------------------------------------------------------------------------------ */

static void slow_name_holder(const struct tly_coordinator *c, enum tly_why why, uint32_t who, char *out,
                             size_t len)
{
    if (slow_is_rank(why))
        snprintf(out, len, "rank %u (%s)", who, c->roster.services[c->roster.ranks[who].machine].host);
    else if (why == TLY_WHY_ALL_CARDS)
        snprintf(out, len, "all network cards");
    else if (why == TLY_WHY_TURNS)
        snprintf(out, len, "nobody alone");
    else
        tly_adapt_name(&c->roster, who, out, len);
}

/* This one is judged to hold the job up. */
static void slow_note_turn(struct tly_coordinator *c, enum tly_why why, uint32_t who)
{
    struct tly_slow_turns *t = &c->slow.turns;
    int role = slow_is_rank(why) ? 1 : why == TLY_WHY_ALL_CARDS ? 2 : 3;
    /* Another tallyd may have got the index of one that is gone. */
    uint64_t holder = role == 3 ? c->roster.services[who].incarnation : who;
    if (why == TLY_WHY_NOBODY || (role == t->role && holder == t->last))
        return;
    uint32_t at = t->count++ % TLY_SLOW_TURNS;
    t->role = role;
    t->last = holder;
    t->at[at] = c->loop.awake;
    slow_name_holder(c, why, who, t->who[at], sizeof t->who[at]);
}

/* For how long the newest holder has been named. */
static int64_t slow_since_turn(const struct tly_coordinator *c)
{
    const struct tly_slow_turns *t = &c->slow.turns;
    return t->count ? c->loop.awake - t->at[(t->count - 1) % TLY_SLOW_TURNS] : INT64_MAX;
}

static bool slow_goes_by_turns(const struct tly_coordinator *c)
{
    const struct tly_slow_turns *t = &c->slow.turns;
    if (c->slow.told.why == TLY_WHY_TURNS)
        return slow_since_turn(c) < TURNS_S * TLY_SEC;
    return t->count >= TLY_SLOW_TURNS && c->loop.awake - t->at[t->count % TLY_SLOW_TURNS] < TURNS_S * TLY_SEC;
}

/* "rank 5 (w5), tallyd 1 (c1) and rank 2 (w2)": each once. */
static void slow_list_turns(const struct tly_slow_turns *t, char *out, size_t len)
{
    const char *who[TLY_SLOW_TURNS];
    int n = 0;
    size_t at = 0;
    for (int i = 0; i < TLY_SLOW_TURNS; i++) {
        bool is_new = true;
        for (int j = 0; j < n; j++)
            is_new &= strcmp(who[j], t->who[i]) != 0;
        if (is_new)
            who[n++] = t->who[i];
    }
    for (int i = 0; i < n && at < len; i++)
        at += (size_t)snprintf(out + at, len - at, "%s%s", i == 0 ? "" : i < n - 1 ? ", " : " and ", who[i]);
}

/* --- words ------------------------------------------------------------------------------------------ */

static void slow_describe(const struct tly_coordinator *c, uint32_t who, const struct tly_lateness *late,
                          struct tly_slow *s)
{
    char at[16], turns[TLY_SLOW_TURNS * (sizeof c->slow.turns.who[0] + 5)];
    struct tly_roster_service seen;
    tly_adapt_time(time(NULL), at);
    s->who[0] = '\0';
    if (s->why != TLY_WHY_NOBODY) /* else `who` is the last holder's number, of whatever kind that was */
        slow_name_holder(c, s->why, who, s->who, sizeof s->who);
    switch (s->why) {
    case TLY_WHY_CARD:
    case TLY_WHY_SUMS:
        tly_adapt_see(c, who, &seen);
        if (s->why == TLY_WHY_CARD)
            seen.sum_found = 0; /* found before, and no limit now */
        tly_adapt_speed(c, who, &seen, false, s->what, sizeof s->what);
        break;
    case TLY_WHY_COMPUTES:
    case TLY_WHY_WAITS:
    case TLY_WHY_PAGES:
        snprintf(s->what, sizeof s->what, "%s since %s: they wait for it for %.0f%% of a step of %.3g s%s",
                 s->why == TLY_WHY_COMPUTES ? "computes longer than the others"
                 : s->why == TLY_WHY_WAITS  ? "waits for a processor longer than the others"
                                            : "waits longer than the others for memory from a disk",
                 at, 100 * late->share, late->step_s,
                 s->why == TLY_WHY_COMPUTES ? ""
                 : s->why == TLY_WHY_WAITS  ? " (what else runs there, and may it use enough cores?)"
                                            : " (is its memory short?)");
        break;
    case TLY_WHY_ALL_CARDS:
        snprintf(s->what, sizeof s->what,
                 "carry about half of what was said or measured since %s (%.3g of %.3g Gbit/s)", at,
                 1e-9 * slow_carries(c, 0),
                 1e-9 * (double)c->roster.services[c->roster.services[0].card].said);
        break;
    case TLY_WHY_TURNS:
        slow_list_turns(&c->slow.turns, turns, sizeof turns);
        snprintf(s->what, sizeof s->what, "by turns %s since %s", turns, at);
        break;
    default:
        break;
    }
}

/* --- telling ---------------------------------------------------------------------------------------- */

/* The same is said again only after a pause; ranks that take longer by turns are one matter.  Soon after a line, another
 * holder must last. */
static void slow_write_log(struct tly_coordinator *c)
{
    struct tly_slow_found *s = &c->slow;
    char text[TLY_SENTENCE];
    int64_t since = s->logged == TLY_WHY_NOBODY ? INT64_MAX : c->loop.awake - s->logged_at;
    bool again = (slow_is_rank(s->logged) && slow_is_rank(s->told.why)) ||
                 (s->logged == s->told.why && s->logged_who == s->who);
    bool lasts = s->told.why == TLY_WHY_TURNS || slow_since_turn(c) >= SETTLED_S * TLY_SEC;
    if (s->told.why == TLY_WHY_NOBODY || s->is_logged ||
        (again ? since < s->pause_s * TLY_SEC : since < REPEAT_S * TLY_SEC && !lasts))
        return;
    s->pause_s = !again ? REPEAT_S : s->pause_s < MOST_REPEAT_S ? 2 * s->pause_s : s->pause_s;
    s->logged = s->told.why;
    s->logged_who = s->who;
    s->logged_at = c->loop.awake;
    s->is_logged = true;
    tly_slow_text(&s->told, text, sizeof text);
    bool stays = c->fixed && (s->logged == TLY_WHY_CARD || s->logged == TLY_WHY_SUMS);
    tly_warn("join", "the job is held up by %s%s", text,
             stays && c->split != TLY_SPLIT_OPTIMAL ? "; the split stays as it is (TALLY_SPLIT)"
             : stays                                ? "; the split stays as it is (TALLY_REPLAN=0)"
             : s->logged == TLY_WHY_ALL_CARDS
                 ? "; is TALLY_BANDWIDTH right, and does anything else use the network?"
             : s->logged == TLY_WHY_TURNS ? "; does anything else use their processors or their network?"
                                          : "");
}

static void slow_tell(struct tly_coordinator *c)
{
    struct tly_writer w = {0};
    struct tly_currents current;
    tly_slow_write(&w, &c->slow.told);
    tly_adapt_currents(c, &current);
    tly_currents_write(&w, &current);
    tly_currents_finish(&current);
    tly_change_write(&w, &c->changed.last);
    c->changed.fresh = w.failed; /* then the next tick tells it */
    if (!w.failed)
        tly_coordinator_post_all(c, TLY_PACE, w.data, w.len);
    free(w.data);
}

/* What it carries or adds, in bit/s; 0: it is not about that. */
static double slow_figure(const struct tly_coordinator *c, enum tly_why why, uint32_t who)
{
    return why == TLY_WHY_CARD   ? slow_carries(c, who)
           : why == TLY_WHY_SUMS ? 8 * tly_replan_sum_rate(c->adapt.replan, (int)who)
                                 : 0;
}

void tly_slow_tick(struct tly_coordinator *c)
{
    struct tly_slow_found *s = &c->slow;
    struct tly_lateness late = s->late;
    uint32_t who;
    bool news = c->changed.fresh;
    if (c->state != RUNNING || c->wanted || c->preparing)
        return;
    if (s->fresh) {
        s->fresh = false;
        news |= tly_adapt_moved(c);
        enum tly_why why = slow_judge(c, &who, &late);
        slow_note_turn(c, why, who);
        if (slow_goes_by_turns(c)) {
            why = TLY_WHY_TURNS;
            who = 0;
        }
        double is = slow_figure(c, why, who);
        bool moved = s->figure > 0 && is > 0 && fabs(log(is / s->figure)) > TLY_ADAPT_NEWS;
        if (why != s->told.why || (why != TLY_WHY_NOBODY && who != s->who) || moved) {
            s->told = (struct tly_slow){.why = why};
            s->who = who;
            s->late = late;
            s->figure = is;
            s->is_logged = false;
            slow_describe(c, who, &late, &s->told);
            news = true;
        }
    }
    if (news)
        slow_tell(c);
    slow_write_log(c);
}

void tly_slow_forget(struct tly_coordinator *c)
{
    struct tly_slow_found was = c->slow;
    bool told = was.told.why != TLY_WHY_NOBODY;
    c->slow = (struct tly_slow_found){.turns = was.turns};
    if (was.logged == TLY_WHY_TURNS) {
        c->slow.logged = was.logged;
        c->slow.logged_at = was.logged_at;
        c->slow.pause_s = was.pause_s;
    }
    c->adapt.standout = -1;
    if (told)
        slow_tell(c);
}
