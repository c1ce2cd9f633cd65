/* start.c - from members to the first epoch: who shares a machine, where each service is reached, how fast the cards
 * are, and the roster that says so. */
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "membership/internal.h"
#include "membership/start.h"
#include "plan/cut.h"
#include "plan/plan.h"
#include "topo/card.h"
#include "transport/address.h"

enum {
    MEASURE_MS = 4000, /* all rounds: 40 to 130 ms each, on slow networks more */
    LARGEST_WINDOW = 1 << 30,
};

void tly_start_prove(struct tly_coordinator *c)
{
    c->state = PROVING;
    c->proving_at = c->loop.awake;
    for (uint32_t i = 0; i < c->size; i++) {
        const struct tly_member_info *me = &c->ranks[i]->info;
        const char *door = "";
        for (uint32_t j = 0; j < i && !*door; j++) {
            const struct tly_member_info *other = &c->ranks[j]->info;
            if (strcmp(me->host_id, other->host_id) == 0 && me->netns == other->netns)
                door = other->door;
        }
        struct tly_writer w = {0};
        tly_write_text(&w, door);
        if (!w.failed)
            tly_coordinator_post(c->ranks[i], TLY_ROSTER, TLY_REQUEST, w.data, w.len);
        free(w.data);
    }
}

/* What a rank may have at a service unanswered.  Unless told, so much that the ranks' credit binds first: a part
 * that is passed over because its service's window is shut leaves the order common to all ranks.  All that may share in
 * the first roster have memory for that. */
static uint64_t start_window(const struct tly_coordinator *c, const struct tly_roster *r)
{
    int active = (int)tly_roster_active(r);
    uint64_t bytes = UINT64_MAX;
    for (uint32_t i = 0; i < r->service_count; i++) {
        if (!tly_roster_shares(r, i))
            continue;
        uint64_t memory = r->services[i].memory ? r->services[i].memory : UINT64_MAX,
                 suits = tly_roster_window(active, r->part_bytes, memory, r->rank_count);
        bytes = suits < bytes ? suits : bytes;
    }
    /* By a window for less than the usual credit services know that they must tell sooner (job_set_sizes in src/sum/job.c). */
    bool little =
        c->credit_bytes && c->credit_bytes < tly_plan_sum_credit(active, false, r->part_bytes, r->part_bytes);
    if (c->window_parts)
        bytes = r->part_bytes * c->window_parts;
    else if (little || bytes < 2 * c->credit_bytes)
        bytes = 2 * c->credit_bytes;
    if (bytes < r->part_most)
        bytes = r->part_most;
    return bytes < LARGEST_WINDOW ? bytes : LARGEST_WINDOW;
}

/* The address at which the members of other machines reach this one: that by which the first of them has come.
 * False if there are none. */
static bool start_find_face(const struct tly_coordinator *c, struct sockaddr_storage *out)
{
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        const struct tly_coordinator_member *m = tly_list_entry(n, struct tly_coordinator_member, node);
        struct sockaddr_storage from;
        if (!m->entered)
            continue;
        tly_link_address(m->link, true, &from);
        if (tly_place_is_own(&from))
            continue;
        tly_link_address(m->link, false, out);
        return true;
    }
    return false;
}

/* Members that share this machine may listen at all of its addresses: name the one that the others use.  -EINVAL: it
 * is where others cannot reach it. */
int tly_start_place(const struct tly_coordinator *c, struct tly_roster *r, uint32_t index)
{
    char name[300];
    struct sockaddr_storage a, face;
    struct tly_roster_service *s = &r->services[index];
    bool apart = start_find_face(c, &face);
    if (!tly_endpoints_address(&s->at, &a))
        return 0;
    if (tly_address_is_any(&a)) {
        if (!apart)
            tly_address_parse("127.0.0.1", 0, &face);
        tly_endpoints_place(&s->at, &face);
        if (!s->bandwidth)
            s->bandwidth = s->said = tly_card_rate(&face); /* it did not know at which card */
    } else if (apart && tly_address_is_loopback(&a)) {
        tly_service_name(r, index, name, sizeof name);
        return tly_fail(
            EINVAL,
            "%s cannot be reached from other machines: name the coordinator to it as they do, not as "
            "localhost (TALLY_COORD, MASTER_ADDR)",
            name);
    }
    return 0;
}

static int start_place_services(struct tly_coordinator *c, struct tly_roster *r)
{
    for (uint32_t i = 0; i < r->service_count; i++)
        if (tly_start_place(c, r, i) != 0) {
            tly_coordinator_fail(c, EINVAL, "%s", tly_error());
            return -EINVAL;
        }
    return 0;
}

/* The service that this member has said it runs, behind a card of its own. */
static struct tly_roster_service start_service_of(const struct tly_member_info *m, uint32_t index)
{
    struct tly_roster_service s = {
        .role = m->role,
        .rank = m->role == TLY_ROLE_RANK ? m->rank : 0,
        .at = m->at,
        .incarnation = m->incarnation,
        .bandwidth = m->bandwidth,
        .said = m->bandwidth,
        .sum_rate = m->sum_rate,
        .memory = m->memory,
        .card = index};
    memcpy(s.host, m->host, sizeof s.host);
    return s;
}

void tly_start_add(struct tly_coordinator *c, struct tly_roster *r, uint32_t index,
                   const struct tly_member_info *m)
{
    memcpy(c->host_id[index], m->host_id, sizeof c->host_id[index]);
    r->services[index] = start_service_of(m, index);
}

void tly_start_warn_memory(const struct tly_roster *r, uint32_t index)
{
    char name[200], has[TLY_BYTES_TEXT], least[TLY_BYTES_TEXT];
    if (!tly_roster_lacks_memory(r, index))
        return;
    tly_service_name(r, index, name, sizeof name);
    tly_warn(
        "join",
        "%s gets no share: it has %s of memory, and parts of %u ranks and a result take %s: give it more "
        "(tallyd --memory, TALLY_MEMORY)",
        name, tly_bytes_text(r->services[index].memory, has), r->rank_count,
        tly_bytes_text(tly_roster_least_memory(r), least));
}

/* Services on hosts of one id are behind one card: containers, or a tallyd beside a rank.  If all are, no card
 * matters (false), and each counts as a machine of its own.  Only who has a share counts.  Until those who come back to
 * another coordinator have said where they are, the roster tells whether all were on one host. */
bool tly_start_find_cards(const struct tly_coordinator *c, struct tly_roster *r)
{
    bool one = true, shared = false;
    for (uint32_t i = 0; i < r->service_count; i++)
        shared |= r->services[i].card != i;
    for (uint32_t i = 0; i < r->service_count; i++) {
        uint32_t first = 0;
        while (r->services[first].state != TLY_SERVICE_ACTIVE ||
               strcmp(c->host_id[first], c->host_id[i]) != 0) {
            if (first == i)
                break;
            first++;
        }
        r->services[i].card = first;
        bool away = c->host_id[i][0] == TLY_HOST_AWAY;
        one &= first == 0 || r->services[i].state != TLY_SERVICE_ACTIVE || (away && !shared);
    }
    for (uint32_t i = 0; one && i < r->service_count; i++)
        r->services[i].card = i;
    return !one;
}

/* *cards (may be NULL): as tly_start_find_cards(). */
static int start_make_roster(struct tly_coordinator *c, struct tly_roster *r, bool *cards)
{
    uint32_t *same = calloc(c->size, sizeof *same);
    c->number = 1;
    free(c->host_id);
    c->host_id = calloc(c->size + c->tallyds_here, sizeof *c->host_id);
    *r = (struct tly_roster){.epoch = c->number, .part_bytes = c->part_bytes, .standalone = c->standalone};
    r->ranks = calloc(c->size, sizeof *r->ranks);
    r->services = calloc(c->size + c->tallyds_here, sizeof *r->services);
    int err = same && c->host_id && r->ranks && r->services ? 0 : -ENOMEM;
    if (err)
        goto out;
    for (uint32_t i = 0; i < c->size; i++) {
        same[i] = i;
        for (uint32_t j = 0; j < i && same[i] == i; j++)
            if (c->ranks[i]->nonce_seen && c->ranks[i]->nonce_seen == c->ranks[j]->info.nonce)
                same[i] = j;
    }
    tly_roster_group(r, c->size, same);
    for (uint32_t i = 0; i < c->size; i++) {
        const struct tly_member_info *m = &c->ranks[i]->info;
        struct tly_roster_service *s = &r->services[r->ranks[i].machine];
        if (r->ranks[i].local_rank == 0) {
            tly_start_add(c, r, r->ranks[i].machine, m);
            s->measured = c->ranks[i]->measured;
            s->tried = c->ranks[i]->once;
        } else if (m->bandwidth && (!s->bandwidth || m->bandwidth < s->bandwidth)) {
            s->bandwidth = s->said = m->bandwidth; /* the lowest that a rank of the machine has said */
            s->measured = c->ranks[i]->measured;
            s->tried = c->ranks[i]->once;
        }
    }
    r->service_count = r->machine_count;
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        struct tly_coordinator_member *m = tly_list_entry(n, struct tly_coordinator_member, node);
        if (!m->entered || m->info.role != TLY_ROLE_TALLYD)
            continue;
        m->service = r->service_count++;
        tly_start_add(c, r, m->service, &m->info);
        r->services[m->service].measured = m->measured;
        r->services[m->service].tried = m->once;
    }
    if (r->service_count > TLY_MAX_MACHINES) {
        err = -E2BIG;
        goto out;
    }
    r->teams = c->teams && tly_roster_suits_teams(r);
    bool apart = tly_start_find_cards(c, r);
    if (cards)
        *cards = apart;
out:
    free(same);
    if (err)
        tly_roster_finish(r);
    return err;
}

/* The least memory of a service that may have a share: of one that has room for parts of `part_most`. */
static uint64_t start_least_memory(const struct tly_roster *r)
{
    uint64_t least = UINT64_MAX;
    for (uint32_t i = 0; i < r->service_count; i++) {
        uint64_t memory = r->services[i].memory;
        if (memory && memory < least && !tly_roster_lacks_memory(r, i))
            least = memory;
    }
    return least;
}

/* Between which sizes parts may be in any epoch: what memory and checks must reckon with. */
static void start_set_part_bounds(const struct tly_coordinator *c, struct tly_roster *r)
{
    double fastest = 0;
    bool known = true;
    for (uint32_t i = 0; i < r->service_count; i++) {
        fastest = fmax(fastest, (double)r->services[i].bandwidth / 8);
        known &= r->services[i].bandwidth > 0;
    }
    r->part_least = c->part_bytes ? c->part_bytes : tly_plan_part_bytes(1);
    uint32_t unit = tly_plan_part_bytes(known ? fastest : 0);
    r->window_fixed = c->window_parts || c->credit_bytes; /* for parts of a unit */
    r->part_most = c->part_bytes ? c->part_bytes : unit;
    if (!c->part_bytes && !r->window_fixed)
        r->part_most = tly_plan_part_most(unit, start_least_memory(r), r->rank_count);
    r->part_bytes = c->part_bytes ? c->part_bytes : tly_plan_part_bytes(tly_roster_usual(r));
}

bool tly_start_fit_parts(const struct tly_coordinator *c, struct tly_roster *r)
{
    if (c->part_bytes)
        return false;
    uint64_t suits = tly_plan_part_bytes(tly_roster_usual(r));
    suits = suits < r->part_least ? r->part_least : suits > r->part_most ? r->part_most : suits;
    bool near = 4 * suits > 3 * r->part_bytes && 3 * suits < 4 * r->part_bytes;
    if (!near)
        r->part_bytes = suits;
    return !near;
}

static void start_invite(struct tly_coordinator *c)
{
    struct tly_roster *r = &c->roster;
    struct tly_writer w = {0};
    c->state = INVITING;
    c->inviting_at = c->loop.awake;
    int err = start_make_roster(c, r, NULL);
    if (!err && start_place_services(c, r) != 0) {
        tly_roster_finish(r);
        return; /* the job has failed */
    }
    if (!err) {
        start_set_part_bounds(c, r);
        for (uint32_t i = 0; i < r->service_count; i++)
            tly_start_warn_memory(r, i);
        err = tly_roster_split(r, c->split);
    }
    if (!err && tly_start_fit_parts(c, r))
        err = tly_roster_split(r, c->split); /* memory lasts for another rate, then */
    switch (err) {
    case 0:
        r->window_bytes = start_window(c, r);
        tly_roster_write(&w, r);
        if (w.failed || w.len > TLY_MAX_CONTROL)
            tly_coordinator_fail(c, ENOMEM, TLY_COORDINATOR_NO_MEMORY);
        else
            tly_coordinator_post_all(c, TLY_INVITE, w.data, w.len);
        break;
    case -E2BIG:
        tly_coordinator_fail(c, E2BIG, "more services than the %d that Tally handles", TLY_MAX_MACHINES);
        break;
    case -ENOENT:
        tly_coordinator_fail(c, EINVAL,
                             "TALLY_SPLIT=server leaves the sums to tallyd, and there is none with memory "
                             "for them: start tallyd and set TALLY_SERVERS, or let the ranks' machines "
                             "sum (TALLY_SPLIT=optimal)");
        break;
    default:
        tly_coordinator_fail(c, ENOMEM, TLY_COORDINATOR_NO_MEMORY);
        break;
    }
    if (err)
        tly_roster_finish(r); /* nobody may see one without weights */
    free(w.data);
}

/* --- measuring --------------------------------------------------------------------------------------- */

static void start_post_measure(struct tly_coordinator_member *m, const struct tly_measure *x)
{
    struct tly_writer w = {0};
    tly_measure_write(&w, x);
    if (!w.failed)
        tly_coordinator_post(m, TLY_MEASURE, 0, w.data, w.len);
    m->awaited = !w.failed;
    free(w.data);
}

bool tly_start_awaits(const struct tly_coordinator *c)
{
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next)
        if (tly_list_entry(n, struct tly_coordinator_member, node)->awaited)
            return true;
    return false;
}

/* Within one machine, also if it plays several, no card matters; where all ranks share one, nothing crosses any. */
bool tly_start_crosses_cards(const struct tly_roster *r)
{
    struct sockaddr_storage a;
    for (uint32_t i = 0; i < r->service_count; i++) {
        const struct tly_roster_service *s = &r->services[i];
        if (s->state != TLY_SERVICE_GONE &&
            (!tly_endpoints_address(&s->at, &a) || tly_address_is_loopback(&a)))
            return false;
    }
    return r->machine_count > 1;
}

/* Tallyd that listen where others cannot reach them: the job starts without those. */
static void start_drop_unplaced(struct tly_coordinator *c)
{
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        struct tly_coordinator_member *m = tly_list_entry(n, struct tly_coordinator_member, node);
        if (!m->entered || m->info.role != TLY_ROLE_TALLYD)
            continue;
        struct tly_roster_service s = start_service_of(&m->info, 0);
        struct tly_roster one = {.service_count = 1, .services = &s};
        if (tly_start_place(c, &one, 0) == 0)
            continue;
        tly_warn("join", "%s; the job goes on without it", tly_error());
        tly_coordinator_post_verdict(m, EINVAL, tly_error());
        m->entered = false;
        c->tallyds_here--;
    }
}

struct tly_found_host *tly_start_found(struct tly_coordinator *c, const char *host_id, bool make)
{
    for (uint32_t i = 0; i < c->found_count; i++)
        if (strcmp(c->found[i].host_id, host_id) == 0)
            return &c->found[i];
    if (!make || c->found_count >= TLY_MAX_MACHINES)
        return NULL;
    struct tly_found_host *more = realloc(c->found, (c->found_count + 1) * sizeof *more);
    if (!more)
        return NULL;
    c->found = more;
    struct tly_found_host *f = &more[c->found_count++];
    *f = (struct tly_found_host){0};
    snprintf(f->host_id, sizeof f->host_id, "%s", host_id);
    return f;
}

/* The card's rate was measured.  keep: a tallyd that comes to that host later begins with it. */
static void start_take(struct tly_coordinator *c, struct tly_coordinator_member *m, uint64_t rate, bool once,
                       bool keep)
{
    struct tly_found_host *f = keep ? tly_start_found(c, m->info.host_id, true) : NULL;
    m->info.bandwidth = rate;
    m->measured = true;
    m->once = once;
    if (f) {
        f->bandwidth = rate;
        f->once = once;
    }
}

/* "HOST=RATE,...", rates in bit/s, k, M or G; with a "?" behind it measured once.  0: it is not among them. */
static uint64_t start_given_rate(const char *given, const char *host, bool *once)
{
    size_t length = strlen(host);
    double rate = 0;
    for (const char *at = given; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        if (strncmp(at, host, length) != 0 || at[length] != '=')
            continue;
        const char *text = at + length + 1;
        if (!tly_digits(&text, true, &rate))
            return 0;
        *once = text[strcspn(text, ",?")] == '?';
        double unit = *text == 'k' ? 1e3 : *text == 'M' ? 1e6 : *text == 'G' ? 1e9 : 1;
        return rate * unit < (double)TLY_MAX_RATE ? (uint64_t)(rate * unit) : 0;
    }
    return 0;
}

/* What a test has measured instead of us. */
static void start_take_given(struct tly_coordinator *c)
{
    for (struct tly_list *n = c->members.next; n != &c->members && c->given; n = n->next) {
        struct tly_coordinator_member *m = tly_list_entry(n, struct tly_coordinator_member, node);
        bool once = false;
        uint64_t rate = start_given_rate(c->given, m->info.host, &once);
        if (m->entered && rate)
            start_take(c, m, rate, once, true);
    }
}

/* Are there cards to be measured?  The roster that tells is made anew afterwards, with what was found. */
void tly_start_survey(struct tly_coordinator *c)
{
    struct tly_roster r;
    bool apart;
    start_drop_unplaced(c);
    start_take_given(c);
    if (c->measure == MEASURE_NONE || start_make_roster(c, &r, &apart) != 0) {
        start_invite(c);
        return;
    }
    bool all = c->measure == MEASURE_ALL;
    if (start_place_services(c, &r) == 0) {
        bool matter = all || (apart && tly_start_crosses_cards(&r));
        if (!matter || tly_survey_create(&r, all, &c->survey) != 0)
            c->survey = NULL;
        for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
            struct tly_coordinator_member *m = tly_list_entry(n, struct tly_coordinator_member, node);
            if (!m->entered || !c->survey)
                continue;
            bool rank = m->info.role == TLY_ROLE_RANK;
            uint32_t service = rank ? r.ranks[m->info.rank].machine : m->service;
            m->card = tly_survey_card(c->survey, service);
            m->stands =
                tly_survey_stands(c->survey, service) && (!rank || r.ranks[m->info.rank].local_rank == 0);
        }
        c->state = MEASURING;
        c->measuring_at = c->loop.awake;
        c->step = (struct tly_measure){.step = TLY_MEASURE_GO};
    }
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next)
        tly_list_entry(n, struct tly_coordinator_member, node)->service = TLY_NO_SERVICE;
    tly_roster_finish(&r);
}

/* To a list, unless there is no room for the whole of it. */
static void start_append(char *text, size_t len, const char *format, ...)
{
    size_t at = strlen(text);
    va_list args;
    va_start(args, format);
    int n = vsnprintf(text + at, len - at, format, args);
    va_end(args);
    if (n < 0 || (size_t)n >= len - at)
        text[at] = '\0';
}

/* What was found counts as if the members had said it. */
static void start_take_results(struct tly_coordinator *c)
{
    char found[TLY_SENTENCE - 64] = "", unknown[TLY_SENTENCE - 256] = "";
    tly_survey_end(c->survey);
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        struct tly_coordinator_member *m = tly_list_entry(n, struct tly_coordinator_member, node);
        uint64_t rate = 0;
        bool once;
        if (!m->entered || !tly_survey_result(c->survey, m->card, &rate, &once))
            continue;
        if (rate) /* else what was said of it counts */
            start_take(c, m, rate, once, m->stands);
        if (m->stands && rate)
            start_append(found, sizeof found, "%s%s %.3g Gbit/s%s", *found ? ", " : "", m->info.host,
                         (double)rate * 1e-9, once ? " (once)" : "");
        else if (m->stands && !m->info.bandwidth)
            start_append(unknown, sizeof unknown, "%s%s", *unknown ? ", " : "", m->info.host);
    }
    if (*found)
        tly_info("join", "network cards were measured: %s", found);
    if (*unknown)
        tly_warn("join",
                 "the rate of the network card on %s is not known and could not be measured: taken to be as "
                 "slow as the slowest that is known; set TALLY_BANDWIDTH there",
                 unknown);
}

/* The next step of a round, or the next round, or the end.  A member that has not answered by now is not waited for. */
void tly_start_go_on_measuring(struct tly_coordinator *c)
{
    bool go = c->step.step == TLY_MEASURE_MEET, late = c->loop.awake - c->measuring_at >= MEASURE_MS * TLY_MS;
    c->step = (struct tly_measure){.step = go ? TLY_MEASURE_GO : TLY_MEASURE_MEET, .round = c->step.round};
    c->step_at = c->loop.awake;
    for (struct tly_list *n = c->members.next; n != &c->members && !go; n = n->next) {
        struct tly_coordinator_member *m = tly_list_entry(n, struct tly_coordinator_member, node);
        if (m->awaited && m->silent)
            tly_survey_drop(c->survey, m->card); /* the others would only wait for it again */
        m->awaited = m->silent = false;
    }
    if (!go)
        c->step.round = c->survey && !late ? tly_survey_next(c->survey) : 0;
    for (struct tly_list *n = c->members.next; n != &c->members && c->step.round; n = n->next) {
        struct tly_coordinator_member *m = tly_list_entry(n, struct tly_coordinator_member, node);
        struct tly_measure meet;
        if (!m->entered || !m->stands || !tly_survey_meet(c->survey, m->card, &meet))
            continue;
        m->silent |= !go;
        start_post_measure(m, go ? &c->step : &meet);
    }
    if (c->step.round)
        return;
    if (c->survey)
        start_take_results(c);
    tly_survey_destroy(c->survey);
    c->survey = NULL;
    start_invite(c);
}

void tly_start_measured(struct tly_coordinator_member *m, const struct tly_measure *x)
{
    struct tly_coordinator *c = m->c;
    bool go = c->step.step == TLY_MEASURE_GO;
    if (c->state != MEASURING || !m->awaited || x->round != c->step.round ||
        x->step != (go ? TLY_MEASURE_COUNTED : TLY_MEASURE_MET))
        return;
    m->awaited = m->silent = false;
    double sent = 0;
    for (uint32_t i = 0; i < x->count; i++)
        sent += (double)x->rate[i];
    if (go)
        tly_log(TALLY_LOG_DEBUG, "join", "measuring, round %u: %s sends %.3g Gbit/s to %u others", x->round,
                m->info.host, sent * 1e-9, x->count);
    if (go)
        tly_survey_counted(c->survey, m->card, x);
}
