/* adapt.c - the plan follows the network.
 *
 * Ranks report their traffic (traffic.c).  The coordinator makes a sample of their reports, and the replanner
 * (src/plan/replan.c) makes estimates of the samples.  When another split pays, a change begins as if a service had come or
 * gone.  One line says what has changed, and what that does.
 *
 *   a rank           comm/epoch/traffic.c: what the kernel has sent over each connection, and for how long it had something to send;
 *                    it asks each service the same (PACE, sum/frames.c) and tells the coordinator (PACE, traffic.c here)
 *   the coordinator  tly_adapt_heard, tly_adapt_tick: a sample once all ranks with traffic have reported
 *                    traffic.c: rate and backlog of each card and each service
 *                    plan/estimate.c, candidates.c, replan.c: what a card carries, and whether another split pays
 *   the change       change.c; tly_adapt_apply puts what is known into the roster, tly_start_fit_parts the size of parts
 *
 * With TALLY_REPLAN=0, and where no traffic crosses cards, the split stays.  The job is still told who holds it up (slow.c).
 *
 * A card's rate is the sum of what all its connections carry, so a sample needs the reports of all ranks with traffic.  One
 * that has none says so while the sample waits for it.  Reports of another epoch are dropped, and so are those of a sample that
 * is not complete after WAIT_MS.  A round stays in its epoch, so a step that is under way when the split changes goes on by
 * the old one: samples of such traffic are dropped, too.
 *
 * All of it belongs to the coordinator's loop. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "membership/adapt.h"
#include "membership/internal.h"
#include "membership/start.h"

enum {
    WAIT_MS = 5000,    /* for the other ranks' reports, or their word that there is nothing to report */
    MOST_EPOCHS = 4,   /* the newest and three older ones: with more alive at some rank nothing changes */
    LONG_CROWDED = 25, /* samples, 10 s of traffic */
};

/* --- samples ---------------------------------------------------------------------------------------- */

static void adapt_drop_reports(struct tly_coordinator *c)
{
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        struct tly_coordinator_member *m = tly_list_entry(n, struct tly_coordinator_member, node);
        tly_traffic_finish(&m->traffic);
        m->epochs = 0;
    }
    c->adapt.since = 0;
}

static void adapt_doubt(struct tly_coordinator_member *m)
{
    char who[200];
    if (m->doubted)
        return;
    tly_coordinator_name(m, who, sizeof who);
    tly_warn("join", "%s reports impossible traffic: its reports do not count, and the split stays", who);
    m->doubted = true;
}

void tly_adapt_heard_quiet(struct tly_coordinator_member *m, struct tly_reader *r)
{
    uint32_t epochs = tly_read32(r);
    if (r->failed || r->len || !epochs) {
        adapt_doubt(m);
        return;
    }
    m->epochs = epochs;
    m->quiet_at = m->c->loop.awake;
}

void tly_adapt_heard(struct tly_coordinator_member *m, struct tly_reader *r)
{
    struct tly_coordinator *c = m->c;
    struct tly_traffic t;
    int err = tly_traffic_read(r, &t);
    if (err == -EPROTO)
        adapt_doubt(m);
    if (err)
        return; /* without memory there is one sample less */
    bool fits = c->state == RUNNING && c->adapt.replan && !c->wanted && !c->preparing &&
                t.epoch == c->roster.epoch && t.count == c->roster.service_count;
    if (!fits) {
        tly_traffic_finish(&t);
        return;
    }
    tly_traffic_finish(&m->traffic);
    m->traffic = t;
    m->epochs = t.epochs;
    if (!c->adapt.since)
        c->adapt.since = c->loop.awake;
}

/* Has each rank reported, or said since the first report that it has nothing to report? */
static bool adapt_is_complete(const struct tly_coordinator *c)
{
    if (!c->adapt.since || c->wanted || c->preparing || c->invitation)
        return false;
    bool all = true;
    for (uint32_t i = 0; i < c->size; i++)
        all &= !c->ranks[i] || c->ranks[i]->left || c->roster.ranks[i].joined ||
               c->ranks[i]->quiet_at > c->adapt.since || c->ranks[i]->traffic.count;
    return all;
}

/* The services as the replanner is to see them, without the sample.  It adds by itself what it has found of their sums and
 * which of them rest, so both are left out here.  -ENOMEM. */
static int adapt_describe(const struct tly_coordinator *c, struct tly_replan_service *s)
{
    struct tly_roster r = c->roster;
    struct tly_plan_machine *machine = calloc(r.service_count, sizeof *machine);
    r.services = malloc(r.service_count * sizeof *r.services);
    int err = machine && r.services ? 0 : -ENOMEM;
    if (!err)
        memcpy(r.services, c->roster.services, r.service_count * sizeof *r.services);
    for (uint32_t i = 0; !err && i < r.service_count; i++) {
        r.services[i].sum_found = 0;
        r.services[i].rests = 0;
    }
    if (!err)
        tly_roster_machines(&r, machine);
    for (uint32_t i = 0; !err && i < r.service_count; i++)
        s[i] = (struct tly_replan_service){.machine = machine[i],
                                           .active = tly_roster_shares(&r, i),
                                           .spare = i >= r.machine_count,
                                           .weight = r.services[i].weight};
    free(r.services);
    free(machine);
    return err;
}

static uint64_t adapt_bits(double bytes)
{
    double x = 8 * bytes;
    return x <= 0 ? 0 : x < 1e3 ? 1000 : x < (double)TLY_MAX_RATE ? (uint64_t)x : TLY_MAX_RATE;
}

/* --- words ------------------------------------------------------------------------------------------ */

void tly_adapt_name(const struct tly_roster *r, uint32_t i, char *out, size_t len)
{
    const struct tly_roster_service *s = &r->services[i];
    if (s->role == TLY_ROLE_RANK)
        snprintf(out, len, "the machine of rank %u (%s)", s->rank, s->host);
    else
        snprintf(out, len, "tallyd %u (%s)", i - r->machine_count, s->host);
}

static double adapt_share(const struct tly_roster *r, uint32_t i)
{
    double total = 0;
    for (uint32_t j = 0; j < r->service_count; j++)
        total += r->services[j].weight;
    return total > 0 ? 100 * r->services[i].weight / total : 0;
}

/* Seconds for a byte by this split; NAN: not known.  *busiest (may be NULL): the service whose card or sums take so long. */
static double adapt_cost(const struct tly_roster *r, uint32_t *busiest)
{
    struct tly_plan_machine *machine = calloc(r->service_count, sizeof *machine);
    uint32_t *weight = calloc(r->service_count, sizeof *weight);
    double takes = NAN;
    int who = 0;
    for (uint32_t i = 0; machine && weight && i < r->service_count; i++)
        weight[i] = r->services[i].weight;
    if (machine && weight && tly_roster_active(r)) {
        tly_roster_machines(r, machine);
        takes = tly_plan_cost((int)r->service_count, machine, weight, &who);
    }
    if (busiest && takes > 0)
        *busiest = (uint32_t)who;
    free(machine);
    free(weight);
    return takes;
}

void tly_adapt_time(time_t when, char out[16])
{
    struct tm local;
    out[0] = '\0';
    if (localtime_r(&when, &local))
        strftime(out, 16, "%H:%M:%S", &local);
}

/* While it stays about the same, it has been so since then; 0: no limit (sums), or not known. */
static void adapt_note(struct tly_adapt_since *s, uint64_t rate)
{
    bool same =
        s->rate && rate ? fabs(log((double)rate / (double)s->rate)) <= TLY_ADAPT_NEWS : s->rate == rate;
    if (s->at && same)
        return;
    *s = (struct tly_adapt_since){rate, time(NULL)};
}

/* Since when each card carries and each service adds what they do; what is only tried or assumed counts for nothing. */
static void adapt_note_all(struct tly_coordinator *c)
{
    for (uint32_t i = 0; i < c->roster.service_count && i < c->adapt.places; i++) {
        if (tly_replan_tries(c->adapt.replan, (int)i) || tly_replan_assumes(c->adapt.replan, (int)i))
            continue;
        adapt_note(&c->adapt.place[i].carries, adapt_bits(tly_replan_bandwidth(c->adapt.replan, (int)i)));
        adapt_note(&c->adapt.place[i].adds, adapt_bits(tly_replan_sum_rate(c->adapt.replan, (int)i)));
    }
}

void tly_adapt_speed(const struct tly_coordinator *c, uint32_t i, const struct tly_roster_service *s,
                     bool tried, char *out, size_t len)
{
    const struct tly_adapt *a = &c->adapt;
    bool assumed = tly_replan_assumes(a->replan, (int)s->card);
    bool known = i < a->places && s->card < a->places && !tried && !assumed;
    time_t since = !known ? 0 : s->sum_found ? a->place[i].adds.at : a->place[s->card].carries.at;
    char at[16];
    tly_adapt_time(since ? since : time(NULL), at);
    double is = (double)s->bandwidth * 1e-9, said = (double)c->roster.services[s->card].said * 1e-9;
    if (s->sum_found)
        snprintf(out, len, "adds %.3g Gbit/s of inputs since %s", (double)s->sum_found * 1e-9, at);
    else if (tly_replan_eases(a->replan, (int)s->card))
        snprintf(out, len, "reads its inputs late since %s (is its processor short?)", at);
    else if (assumed)
        snprintf(out, len, "has rested and is tried with %.3g Gbit/s since %s", is, at);
    else if (tried)
        snprintf(out, len, "seems to carry %.3g Gbit/s since %s", is, at);
    else if (said > 0 && is < said * (1 - TLY_ADAPT_NEWS))
        snprintf(out, len, "carries %.3g of %.3g Gbit/s since %s", is, said, at);
    else
        snprintf(out, len, "carries %.3g Gbit/s since %s", is, at);
}

/* How much a service's card has changed since a line had it: the logarithm of the ratio; 0: nothing is known. */
static double adapt_news(const struct tly_coordinator *c, uint32_t i)
{
    double was = i < c->adapt.places ? (double)c->adapt.place[i].bandwidth : 0;
    double is = (double)c->roster.services[i].bandwidth;
    return was > 0 && is > 0 ? fabs(log(is / was)) : 0;
}

/* The service whose card has changed most since that was last told; TLY_NO_SERVICE: none has by TLY_ADAPT_NEWS. */
static uint32_t adapt_find_news(const struct tly_coordinator *c)
{
    uint32_t found = TLY_NO_SERVICE;
    double most = TLY_ADAPT_NEWS;
    for (uint32_t i = 0; i < c->roster.service_count && i < c->adapt.places; i++) {
        const struct tly_roster_service *s = &c->roster.services[i];
        if (s->state == TLY_SERVICE_ACTIVE && s->card == i && adapt_news(c, i) > most) {
            most = adapt_news(c, i);
            found = i;
        }
    }
    return found;
}

/* Changes of one epoch, or that were not told yet, are one. */
static void adapt_note_change(struct tly_coordinator *c, const char *text)
{
    struct tly_change *last = &c->changed.last;
    time_t now = time(NULL);
    size_t at = c->changed.fresh || c->changed.epoch == c->roster.epoch ? strlen(last->what) : 0;
    snprintf(last->what + at, sizeof last->what - at, "%s%s", at ? "; " : "", text);
    last->at = (uint64_t)now;
    tly_adapt_time(now, last->when);
    c->changed.epoch = c->roster.epoch;
    c->changed.fresh = true;
}

static void adapt_note_service(struct tly_coordinator *c, uint32_t i, const char *what)
{
    char who[200], text[300];
    tly_adapt_name(&c->roster, i, who, sizeof who);
    snprintf(text, sizeof text, "%s %s %.0f%%", who, what, adapt_share(&c->roster, i));
    adapt_note_change(c, text);
}

void tly_adapt_tell_gone(struct tly_coordinator *c)
{
    for (uint32_t i = c->roster.machine_count; i < c->roster.service_count; i++) {
        const struct tly_roster_service *s = &c->roster.services[i];
        if (s->weight && s->state != TLY_SERVICE_ACTIVE)
            adapt_note_service(c, i, s->left ? "has left: its share was" : "is out: its share was");
    }
}

void tly_adapt_tell_come(struct tly_coordinator *c)
{
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        struct tly_coordinator_member *m = tly_list_entry(n, struct tly_coordinator_member, node);
        if (m->welcome && m->service != TLY_NO_SERVICE && c->roster.services[m->service].weight)
            adapt_note_service(c, m->service, "has joined: its share is");
        m->welcome = false;
    }
}

static void adapt_say(struct tly_coordinator *c, uint32_t i, const char *what)
{
    struct tly_roster_service told = c->roster.services[i], *s = &told;
    if (adapt_news(c, s->card) > TLY_ADAPT_NEWS)
        s->sum_found = 0; /* found before: the card is the news */
    char who[200], speed[160], text[400];
    tly_adapt_name(&c->roster, i, who, sizeof who);
    bool more = i < c->adapt.places && s->bandwidth > c->adapt.place[i].bandwidth;
    bool tried = more && tly_replan_tries(c->adapt.replan, (int)s->card);
    bool seen = !tried && !tly_replan_assumes(c->adapt.replan, (int)s->card);
    tly_adapt_speed(c, i, s, tried, speed, sizeof speed);
    const struct tly_roster_service *card = &c->roster.services[s->card];
    bool declared = seen && !card->measured && card->said &&
                    (double)s->bandwidth < (double)card->said * (1 - TLY_ADAPT_NEWS);
    snprintf(text, sizeof text, "%s %s: %s", who, speed, what);
    tly_log(declared ? TALLY_LOG_WARNING : TALLY_LOG_INFO, "join", "%s", text);
    adapt_note_change(c, text);
}

/* A change of our making holds: say what it was for, and what comes of it. */
static void adapt_tell_change(struct tly_coordinator *c, double took)
{
    const struct tly_roster *r = &c->roster;
    uint32_t i = adapt_find_news(c), first = 0, busiest = 0;
    double takes = adapt_cost(r, &busiest), total = 0, most = -1;
    char what[200] = "";
    bool known = false;
    for (uint32_t j = 0; j < r->service_count && j < c->adapt.places; j++) {
        total += c->adapt.place[j].weight;
        known |= c->adapt.place[j].bandwidth > 0;
    }
    for (uint32_t j = 0; j < r->service_count && j < c->adapt.places && total > 0; j++) {
        double moved = fabs(adapt_share(r, j) - 100 * c->adapt.place[j].weight / total);
        if (moved > most && r->services[j].state == TLY_SERVICE_ACTIVE && c->adapt.place[j].active) {
            most = moved;
            first = j;
        }
    }
    if (i == TLY_NO_SERVICE &&
        !known) /* all cards are news: the one that the job waits for by the new split */
        i = busiest;
    else if (i ==
             TLY_NO_SERVICE) /* each card has changed a little: the service whose share has changed most */
        i = first;
    double was = i < c->adapt.places && total > 0 ? 100 * c->adapt.place[i].weight / total : 0;
    if (r->services[i].rests)
        snprintf(what, sizeof what, "it sums nothing for now (was %.0f%%)", was);
    else
        snprintf(what, sizeof what, "its share is now %.0f%% (was %.0f%%)", adapt_share(r, i), was);
    size_t at = strlen(what);
    char now[TLY_NUMBER_TEXT], before[TLY_NUMBER_TEXT];
    bool eased = tly_replan_eases(c->adapt.replan, (int)r->services[i].card);
    if (takes > 0 && took > 0 && eased) /* no rate of its card says what its share cost before */
        snprintf(what + at, sizeof what - at, ", 1 GB takes %s s", tly_number_text(takes * 1e9, now));
    else if (takes > 0 && took > 0)
        snprintf(what + at, sizeof what - at, ", 1 GB takes %s s (was %s)", tly_number_text(takes * 1e9, now),
                 tly_number_text(took * 1e9, before));
    adapt_say(c, i, what);
}

static void adapt_remember(struct tly_coordinator *c)
{
    for (uint32_t i = 0; i < c->roster.service_count && i < c->adapt.places; i++) {
        c->adapt.place[i].bandwidth = c->adapt.place[i].told = c->roster.services[i].bandwidth;
        c->adapt.place[i].weight = c->roster.services[i].weight;
        c->adapt.place[i].card = c->roster.services[i].card;
        c->adapt.place[i].active = c->roster.services[i].state == TLY_SERVICE_ACTIVE;
    }
}

/* --- changes ---------------------------------------------------------------------------------------- */

/* Has no service come or gone since the last epoch? */
static bool adapt_are_same(const struct tly_coordinator *c)
{
    bool same = c->roster.service_count == c->adapt.places;
    for (uint32_t i = 0; same && i < c->adapt.places; i++) {
        const struct tly_roster_service *s = &c->roster.services[i];
        same = c->adapt.place[i].incarnation == s->incarnation &&
               c->adapt.place[i].active == (s->state == TLY_SERVICE_ACTIVE);
    }
    return same;
}

/* Give the replanner a place for each service of the roster.  Without memory the split stays as it is. */
static void adapt_make_places(struct tly_coordinator *c)
{
    struct tly_adapt *a = &c->adapt;
    struct tly_roster *r = &c->roster;
    if (!a->replan && tly_replan_create(c->fixed, &a->replan) != 0)
        return;
    if (r->service_count > a->places) {
        struct tly_adapt_place *more = realloc(a->place, r->service_count * sizeof *more);
        if (!more)
            return;
        memset(more + a->places, 0, (r->service_count - a->places) * sizeof *more);
        a->place = more;
        a->places = r->service_count;
    }
    for (uint32_t i = 0; i < r->service_count; i++) {
        const struct tly_roster_service *s = &r->services[i];
        if (a->place[i].incarnation == s->incarnation)
            continue;
        double most = s->measured ? 0 : (double)s->said / 8;
        if (tly_replan_place(a->replan, (int)i, (double)s->bandwidth / 8, most, (double)s->sum_found / 8,
                             s->rests) != 0)
            continue;
        a->place[i] = (struct tly_adapt_place){.incarnation = s->incarnation};
        if (s->tried)
            tly_replan_doubt(a->replan, (int)i);
    }
}

void tly_adapt_begin(struct tly_coordinator *c)
{
    struct tly_adapt *a = &c->adapt;
    adapt_drop_reports(c);
    if (!tly_start_find_cards(c, &c->roster) || !tly_start_crosses_cards(&c->roster)) {
        tly_adapt_finish(c);
        return;
    }
    if (a->pending)
        adapt_tell_change(c, a->takes);
    a->pending = false;
    bool alone = adapt_are_same(c);
    adapt_make_places(c);
    if (a->replan) {
        tly_replan_begin(a->replan, alone);
        adapt_note_all(c);
    }
    adapt_remember(c);
}

static bool adapt_is_seen(const struct tly_coordinator *c, uint32_t i)
{
    uint32_t card = c->roster.services[i].card;
    return c->adapt.replan && i < c->adapt.places &&
           c->adapt.place[card].incarnation == c->roster.services[card].incarnation;
}

static uint64_t adapt_seen(const struct tly_coordinator *c, uint32_t i)
{
    return adapt_bits(tly_replan_bandwidth(c->adapt.replan, (int)c->roster.services[i].card));
}

uint64_t tly_adapt_sure(const struct tly_coordinator *c, uint32_t i)
{
    bool sure = adapt_is_seen(c, i) && tly_replan_is_sure(c->adapt.replan, (int)c->roster.services[i].card);
    return sure ? adapt_seen(c, i) : 0;
}

void tly_adapt_see(const struct tly_coordinator *c, uint32_t i, struct tly_roster_service *out)
{
    *out = c->roster.services[i];
    if (!adapt_is_seen(c, i))
        return;
    out->bandwidth = adapt_seen(c, i);
    out->sum_found = adapt_bits(tly_replan_sum_rate(c->adapt.replan, (int)i));
}

void tly_adapt_currents(const struct tly_coordinator *c, struct tly_currents *out)
{
    uint32_t count = c->roster.service_count;
    *out = (struct tly_currents){.epoch = c->roster.epoch};
    if (c->adapt.replan && count)
        out->bandwidth = calloc(count, sizeof *out->bandwidth);
    out->count = out->bandwidth ? count : 0;
    for (uint32_t i = 0; i < out->count; i++) {
        struct tly_roster_service now;
        tly_adapt_see(c, i, &now);
        out->bandwidth[i] = now.bandwidth;
    }
}

bool tly_adapt_moved(struct tly_coordinator *c)
{
    bool moved = false;
    for (uint32_t i = 0; c->adapt.replan && i < c->roster.service_count && i < c->adapt.places; i++) {
        struct tly_roster_service now;
        uint64_t *told = &c->adapt.place[i].told;
        tly_adapt_see(c, i, &now);
        double is = (double)now.bandwidth, was = (double)*told;
        if (now.card != i || fabs(is - was) <= TLY_ADAPT_MOVED * was)
            continue;
        *told = now.bandwidth;
        moved = true;
    }
    return moved;
}

/* What the replanner knows, into the roster.  A service that has just come has the values that it said. */
static void adapt_apply(struct tly_coordinator *c)
{
    const struct tly_adapt *a = &c->adapt;
    struct tly_roster *r = &c->roster;
    for (uint32_t i = 0; a->replan && i < r->service_count && i < a->places; i++) {
        struct tly_roster_service *s = &r->services[i];
        if (s->state != TLY_SERVICE_ACTIVE || a->place[i].incarnation != s->incarnation || s->card != i)
            continue;
        double value = tly_replan_bandwidth(a->replan, (int)i);
        for (uint32_t j = i; value > 0 && j < r->service_count; j++) {
            if (r->services[j].card != i)
                continue;
            r->services[j].bandwidth = adapt_bits(value);
            r->services[j].tried = !tly_replan_is_sure(a->replan, (int)i);
        }
    }
    for (uint32_t i = 0; a->replan && i < r->service_count && i < a->places; i++) {
        struct tly_roster_service *s = &r->services[i];
        if (s->state != TLY_SERVICE_ACTIVE || a->place[i].incarnation != s->incarnation)
            continue;
        s->sum_found = adapt_bits(tly_replan_sum_rate(a->replan, (int)i));
        s->rests = tly_replan_rests(a->replan, (int)i);
    }
}

/* What a coordinator before this one has found, whose split was not to stay. */
static void adapt_forget(struct tly_roster *r)
{
    for (uint32_t i = 0; i < r->service_count; i++) {
        struct tly_roster_service *s = &r->services[i];
        s->bandwidth = s->said;
        s->sum_found = 0;
        s->tried = s->rests = 0;
    }
}

/* The first service behind a card keeps the card's figures.  When another becomes first, they move to it. */
static void adapt_move_cards(struct tly_coordinator *c)
{
    const struct tly_adapt *a = &c->adapt;
    for (uint32_t i = 0; i < c->roster.service_count && i < a->places; i++) {
        const struct tly_roster_service *s = &c->roster.services[i];
        bool stays =
            s->state == TLY_SERVICE_ACTIVE && a->place[i].active && a->place[i].incarnation == s->incarnation;
        if (!stays || s->card == a->place[i].card)
            continue;
        tly_replan_move(a->replan, (int)a->place[i].card, (int)s->card);
        a->place[s->card].carries = a->place[a->place[i].card].carries;
    }
}

void tly_adapt_apply(struct tly_coordinator *c)
{
    if (c->adapt.replan) {
        adapt_make_places(c);
        adapt_move_cards(c);
    }
    if (c->fixed) {
        adapt_forget(&c->roster);
        return;
    }
    adapt_apply(c);
    c->adapt.takes = adapt_cost(&c->roster, NULL); /* by the split that was, and what is known now */
}

/* Does some rank still need four older epochs?  Then nothing changes; if that lasts it is said once. */
static bool adapt_is_crowded(struct tly_coordinator *c)
{
    uint32_t most = 0;
    for (uint32_t i = 1; i < c->size; i++)
        if (c->ranks[i] && (!c->ranks[most] || c->ranks[i]->epochs > c->ranks[most]->epochs))
            most = i;
    if (!c->ranks[most] || c->ranks[most]->epochs <= MOST_EPOCHS) {
        c->adapt.crowded = 0;
        return false;
    }
    if (++c->adapt.crowded == LONG_CROWDED)
        tly_warn("join",
                 "rank %u has operations under way that began before the last %u changes of the split: the "
                 "split stays until they end (a receive that nobody answers, or a rank that never submits)",
                 most, c->ranks[most]->epochs - 1);
    return true;
}

void tly_adapt_tick(struct tly_coordinator *c)
{
    struct tly_adapt *a = &c->adapt;
    struct tly_roster *r = &c->roster;
    if (a->since && c->loop.awake - a->since >= WAIT_MS * TLY_MS && !adapt_is_complete(c))
        adapt_drop_reports(c);
    if (c->state != RUNNING || !a->replan || !adapt_is_complete(c))
        return;
    const struct tly_traffic **of = calloc(c->size, sizeof *of);
    struct tly_replan_service *s = calloc(r->service_count, sizeof *s);
    double goodput;
    bool change = false;
    for (uint32_t i = 0; of && s && i < c->size; i++)
        of[i] = c->ranks[i] ? &c->ranks[i]->traffic : NULL;
    if (of && s && !adapt_is_crowded(c) && adapt_describe(c, s) == 0 && tly_traffic_sum(r, of, s, &goodput)) {
        change = tly_replan_step(a->replan, (int)r->service_count, s, goodput);
        a->standout = tly_replan_standout(a->replan, (int)r->service_count, s, a->standout);
        adapt_note_all(c);
        c->slow.fresh = true;
        for (uint32_t i = 0; i < r->service_count; i++)
            tly_log(TALLY_LOG_DEBUG, "join",
                    "service %u: %.3g Gbit/s, busy %.2f (%.2f), sums %.2f; taken for %.3g Gbit/s", i,
                    s[i].card.rate * 8e-9, s[i].card.busy, s[i].card.both, s[i].sums.busy,
                    tly_replan_bandwidth(a->replan, (int)i) * 8e-9);
    }
    free(of);
    free(s);
    adapt_drop_reports(c);
    if (change)
        a->pending = c->wanted = true;
}

void tly_adapt_finish(struct tly_coordinator *c)
{
    tly_replan_destroy(c->adapt.replan);
    free(c->adapt.place);
    c->adapt = (struct tly_adapt){.standout = -1};
}
