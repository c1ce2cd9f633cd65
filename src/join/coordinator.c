/* coordinator.c - from members to an epoch, and the one who says that a rank is dead. */
#include "join/coordinator.h"

#include <errno.h>
#include <inttypes.h>
#include <sodium.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/event.h"
#include "base/log.h"
#include "base/map.h"
#include "base/thread.h"
#include "join/measure.h"
#include "join/status.h"
#include "plan/plan.h"
#include "topo/card.h"
#include "transport/outbox.h"
#include "transport/tcp/socket.h"

enum state {
    GATHERING = TLY_JOB_GATHERING,
    PROVING = TLY_JOB_PROVING,
    MEASURING = TLY_JOB_MEASURING,
    INVITING = TLY_JOB_INVITING,
    RUNNING = TLY_JOB_RUNNING,
    FAILED = TLY_JOB_FAILED,
    ENDED = TLY_JOB_ENDED
};

/* CONNECT_S: longer than members take to find out themselves what they cannot reach. */
enum {
    TALLYD_SILENCE_S = 5,
    MISSING_EVERY_S = 10,
    COMPLAINT_MS = 300,
    CONNECT_S = 30,
    MEET_S = 10,           /* all ranks a service that joins a running job */
    MEASURE_STEP_MS = 300, /* longer than a round takes; who has not answered by then is not waited for */
    MEASURE_MS = 2500,     /* and so much for all rounds: 40 to 110 ms each */
    LARGEST_WINDOW = 1 << 30,
    MOST_BEGUN = 1 << 18, /* rounds of one rank's in one change: far more than operations under way */
    MOST_WATCHERS = 64,   /* at a time */
    LEAVE_S = 5,          /* so long a coordinator apart waits for members that know that the job is over */
};

/* One connection.  Owner: the coordinator's loop. */
struct member {
    struct tly_list node;
    struct tly_coordinator *c;
    struct tly_link *link;
    struct tly_outbox outbox;
    struct tly_member_info info;
    bool known; /* waited for at the end: has shown the secret, or is about to; does not only watch */
    bool joined, proved, begun, left;
    uint64_t nonce_seen;
    uint32_t service;       /* a tallyd's place in the roster, or TLY_NO_SERVICE */
    bool waiting;           /* a tallyd that came while the job ran: not yet invited, */
    bool invited;           /* or not yet met by all ranks */
    uint32_t met, answered; /* a rank: the last INVITE, the last PREPARE that it has answered */
    uint32_t saying, said;  /* a rank: the PREPARE that it answers, and how many rounds it has named by now */
    uint32_t committed;     /* a rank that has resumed: its epoch then */
    bool watcher;
    int64_t
        accused_at; /* a tallyd that a rank cannot reach: when it said so, on the awake clock; 0: nobody has */
    uint32_t accuser;       /* that rank */
    uint32_t accuses;       /* a rank: how many services it cannot reach, in this epoch */
    bool told;              /* that the job is slower than predicted */
    uint32_t held, suspect; /* what it told */
    uint32_t card;          /* MEASURING: its card's place in the survey, */
    bool stands, awaited;   /* whether it streams for it, and is about to answer, */
    bool silent;            /* and has said nothing in this round */
};

/* All fields but the first three belong to the loop. */
struct tly_coordinator {
    pthread_t thread;
    bool started;
    struct tly_listener *listener;
    struct tly_loop loop;
    struct tly_hook hook;
    struct tly_identity identity;
    uint32_t servers;
    int64_t servers_ns, join_ns, dead_ns;
    uint64_t part_bytes, credit_bytes;
    uint32_t window_parts;
    enum tly_split split;
    bool teams; /* ranks of a machine may share memory */
    enum { MEASURE_NONE, MEASURE_UNKNOWN, MEASURE_ALL } measure;
    struct tly_survey *survey; /* owned: MEASURING */
    struct tly_measure step;   /* of it, the one under way */
    struct {
        char host_id[64];
        uint64_t bandwidth;
    } * found; /* owned: what came of it */
    uint32_t found_count;
    int64_t measuring_at, step_at; /* awake clock */
    struct tly_list members;
    enum state state;
    uint32_t size;            /* ranks; 0 until the first has joined */
    struct member **ranks;    /* owned array of size, of borrowed */
    struct tly_roster roster; /* from INVITING on */
    char (*host_id)[64];      /* owned: of each service of it */
    /* A change of epoch.  Invitations and preparations are numbered in one sequence, from the first epoch's 1. */
    uint32_t number;         /* the last one given */
    uint32_t invitation;     /* the one under way; 0: none */
    int64_t invited_at;      /* awake clock */
    bool wanted;             /* the roster has changed: a new epoch is due */
    uint32_t preparing;      /* the epoch for which ranks are asked what they have begun; 0: none */
    struct tly_begun *begun; /* owned: what they have said */
    size_t begun_count, begun_room;
    uint32_t watchers, known;
    bool standalone;
    bool resuming;             /* GATHERING: the members of a job that runs */
    uint32_t committed;        /* ... the newest epoch that one of them is in, */
    struct tly_roster settled; /* ... and its roster: others may be in the one before */
    int64_t resumed_at; /* awake clock; tallyd that do not come back soon are gone; 0: none is missed */
    struct tly_map begun_seen; /* hash of key and round -> anything */
    uint32_t ranks_here, tallyds_here;
    int64_t born, complete_at, proving_at, asked_missing; /* awake clock */
    char verdict[TLY_SENTENCE];                           /* FAILED: why */
    int verdict_err;
    int64_t over_at; /* awake clock: when all were told that the job has failed or ended; 0: not yet */
    char complaint[TLY_SENTENCE];
    int64_t complaint_due;  /* awake clock; 0: none */
    struct tly_event quiet; /* set when the last one that is known has gone */
};

/* --- sending ------------------------------------------------------------------------------------- */

static void post(struct member *m, int type, uint16_t flags, const void *data, size_t len)
{
    struct tly_frame f = {.type = (uint8_t)type, .flags = flags};
    if (m->link) /* out of memory: the connection ends, which the member notices */
        tly_outbox_post(&m->outbox, &f, data, len, NULL);
}

static bool next(void *user, struct tly_link *link, struct tly_outgoing *out)
{
    struct member *m = user;
    return tly_outbox_next(&m->outbox, out, NULL);
}

static void post_verdict(struct member *m, int err, const char *sentence)
{
    struct tly_writer w = {0};
    tly_write32(&w, (uint32_t)err);
    tly_write_text(&w, sentence);
    if (!w.failed)
        post(m, TLY_VERDICT, 0, w.data, w.len);
    free(w.data);
}

static void post_all(struct tly_coordinator *c, int type, const void *data, size_t len)
{
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        struct member *m = tly_list_entry(n, struct member, node);
        if (m->joined)
            post(m, type, 0, data, len);
    }
}

static void fail_job(struct tly_coordinator *c, int err, const char *format, ...)
{
    va_list args;
    if (c->state == FAILED || c->state == ENDED)
        return;
    va_start(args, format);
    vsnprintf(c->verdict, sizeof c->verdict, format, args);
    va_end(args);
    c->state = FAILED;
    c->over_at = c->loop.awake;
    c->verdict_err = err;
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next)
        post_verdict(tly_list_entry(n, struct member, node), err, c->verdict);
}

/* --- gathering ----------------------------------------------------------------------------------- */

static void member_name(const struct member *m, char *out, size_t len)
{
    if (m->info.role == TLY_ROLE_TALLYD)
        snprintf(out, len, "tallyd on %s (%s port %u)", m->info.host, m->info.address, m->info.port);
    else
        snprintf(out, len, m->info.host[0] ? "rank %u on %s" : "rank %u", m->info.rank, m->info.host);
}

/* Not there, and has not left. */
static bool is_missing(const struct tly_coordinator *c, uint32_t rank)
{
    return !c->ranks[rank] && !(rank < c->roster.rank_count && c->roster.ranks[rank].left);
}

static bool all_here(const struct tly_coordinator *c)
{
    uint32_t i = 0;
    while (i < c->size && !is_missing(c, i))
        i++;
    return c->size && i == c->size;
}

/* "2, 3, 7-9" of the ranks that are missing. */
static void missing_text(const struct tly_coordinator *c, char *out, size_t len)
{
    size_t at = 0;
    out[0] = '\0';
    for (uint32_t i = 0; i < c->size && at + 32 < len; i++) {
        if (!is_missing(c, i))
            continue;
        uint32_t end = i;
        while (end + 1 < c->size && is_missing(c, end + 1))
            end++;
        at += (size_t)snprintf(out + at, len - at, end > i + 1 ? "%s%u-%u" : "%s%u", at ? ", " : "", i, end);
        if (end == i + 1)
            end = i;
        i = end;
    }
}

static void ask_for_proofs(struct tly_coordinator *c)
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
            post(c->ranks[i], TLY_ROSTER, TLY_REQUEST, w.data, w.len);
        free(w.data);
    }
}

/* What a rank may have at a service unanswered.  Unless told, so much that the ranks' credit binds first: a part
 * that is passed over because its service's window is shut leaves the order common to all ranks. */
static uint64_t window(const struct tly_coordinator *c, const struct tly_roster *r)
{
    uint64_t bytes = r->part_bytes * c->window_parts;
    if (!bytes)
        bytes = 2 * (c->credit_bytes ? c->credit_bytes : 2ull * tly_roster_active(r) * r->part_bytes);
    if (bytes < r->part_bytes)
        bytes = r->part_bytes;
    return bytes < LARGEST_WINDOW ? bytes : LARGEST_WINDOW;
}

/* The address at which the members of other machines reach this one: that by which the first of them has come.
 * False if there are none. */
static bool find_face(const struct tly_coordinator *c, char *out, size_t len)
{
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        const struct member *m = tly_list_entry(n, struct member, node);
        struct sockaddr_storage from, here;
        if (!m->joined)
            continue;
        tly_link_address(m->link, true, &from);
        if (tly_place_is_own(&from))
            continue;
        tly_link_address(m->link, false, &here);
        tly_address_host(&here, out, len);
        return true;
    }
    return false;
}

/* Members that share this machine may listen at all of its addresses: name the one that the others use.  -EINVAL: it
 * is where others cannot reach it. */
static int place_service(const struct tly_coordinator *c, struct tly_roster *r, uint32_t index)
{
    char face[64], name[300];
    struct sockaddr_storage a;
    struct tly_roster_service *s = &r->services[index];
    bool apart = find_face(c, face, sizeof face);
    if (tly_address_parse(s->address, 0, &a) != 0)
        return 0;
    if (tly_address_is_any(&a)) {
        snprintf(s->address, sizeof s->address, "%s", apart ? face : "127.0.0.1");
        if (!s->bandwidth && tly_address_parse(s->address, 0, &a) == 0)
            s->bandwidth = tly_card_rate(&a); /* it did not know at which card */
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

static int place_services(struct tly_coordinator *c, struct tly_roster *r)
{
    for (uint32_t i = 0; i < r->service_count; i++)
        if (place_service(c, r, i) != 0) {
            fail_job(c, EINVAL, "%s", tly_error());
            return -EINVAL;
        }
    return 0;
}

static void add_service(struct tly_coordinator *c, struct tly_roster *r, uint32_t index,
                        const struct tly_member_info *m)
{
    struct tly_roster_service *s = &r->services[index];
    memcpy(c->host_id[index], m->host_id, sizeof c->host_id[index]);
    *s = (struct tly_roster_service){
        .role = m->role,
        .rank = m->role == TLY_ROLE_RANK ? m->rank : 0,
        .port = m->port,
        .incarnation = m->incarnation,
        .bandwidth = m->bandwidth,
        .sum_rate = m->sum_rate,
        .memory = m->memory,
        .card = index};
    memcpy(s->address, m->address, sizeof s->address);
    memcpy(s->host, m->host, sizeof s->host);
}

/* Services on hosts of one id are behind one card: containers, or a tallyd beside a rank.  If all are, no card
 * matters (false), and each counts as a machine of its own.  Only who has a share counts. */
static bool find_cards(const struct tly_coordinator *c, struct tly_roster *r)
{
    bool one = true;
    for (uint32_t i = 0; i < r->service_count; i++) {
        uint32_t first = 0;
        while (r->services[first].state != TLY_SERVICE_ACTIVE ||
               strcmp(c->host_id[first], c->host_id[i]) != 0) {
            if (first == i)
                break;
            first++;
        }
        r->services[i].card = first;
        one &= first == 0 || r->services[i].state != TLY_SERVICE_ACTIVE;
    }
    for (uint32_t i = 0; one && i < r->service_count; i++)
        r->services[i].card = i;
    return !one;
}

/* *cards (may be NULL): as find_cards(). */
static int make_roster(struct tly_coordinator *c, struct tly_roster *r, bool *cards)
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
            add_service(c, r, r->ranks[i].machine, m);
        } else if (m->bandwidth && (!s->bandwidth || m->bandwidth < s->bandwidth)) {
            s->bandwidth = m->bandwidth; /* the lowest that a rank of the machine has said */
        }
    }
    r->service_count = r->machine_count;
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        struct member *m = tly_list_entry(n, struct member, node);
        if (!m->joined || m->info.role != TLY_ROLE_TALLYD)
            continue;
        m->service = r->service_count++;
        add_service(c, r, m->service, &m->info);
    }
    if (r->service_count > TLY_MAX_MACHINES) {
        err = -E2BIG;
        goto out;
    }
    r->teams = c->teams && tly_roster_suits_teams(r);
    bool apart = find_cards(c, r);
    if (cards)
        *cards = apart;
out:
    free(same);
    if (err)
        tly_roster_finish(r);
    return err;
}

static void invite(struct tly_coordinator *c)
{
    struct tly_roster *r = &c->roster;
    struct tly_writer w = {0};
    c->state = INVITING;
    int err = make_roster(c, r, NULL);
    if (!err && place_services(c, r) != 0) {
        tly_roster_finish(r);
        return; /* the job has failed */
    }
    if (!err && !r->part_bytes)
        r->part_bytes = tly_plan_part_bytes(tly_roster_slowest(r));
    if (!err)
        err = tly_roster_split(r, c->split);
    switch (err) {
    case 0:
        r->window_bytes = window(c, r);
        tly_roster_write(&w, r);
        if (w.failed || w.len > TLY_MAX_CONTROL)
            fail_job(c, ENOMEM, "the coordinator is out of memory");
        else
            post_all(c, TLY_INVITE, w.data, w.len);
        break;
    case -E2BIG:
        fail_job(c, E2BIG, "more services than the %d that Tally handles", TLY_MAX_MACHINES);
        break;
    case -ENOENT:
        fail_job(c, EINVAL,
                 "TALLY_SPLIT=server leaves the sums to tallyd, and there is none: start tallyd and set "
                 "TALLY_SERVERS, or let the ranks' machines sum (TALLY_SPLIT=optimal)");
        break;
    default:
        fail_job(c, ENOMEM, "the coordinator is out of memory");
        break;
    }
    if (err)
        tly_roster_finish(r); /* nobody may see one without weights */
    free(w.data);
}

/* --- measuring --------------------------------------------------------------------------------------- */

static void advance(struct tly_coordinator *c);

static void post_measure(struct member *m, const struct tly_measure *x)
{
    struct tly_writer w = {0};
    tly_measure_write(&w, x);
    if (!w.failed)
        post(m, TLY_MEASURE, 0, w.data, w.len);
    m->awaited = !w.failed;
    free(w.data);
}

static bool is_awaited(const struct tly_coordinator *c)
{
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next)
        if (tly_list_entry(n, struct member, node)->awaited)
            return true;
    return false;
}

/* Within one machine, also if it plays several, no card matters; where all ranks share one, nothing crosses any. */
static bool crosses_cards(const struct tly_roster *r)
{
    struct sockaddr_storage a;
    for (uint32_t i = 0; i < r->service_count; i++)
        if (tly_address_parse(r->services[i].address, 0, &a) != 0 || tly_address_is_loopback(&a))
            return false;
    return r->machine_count > 1;
}

/* Are there cards to be measured?  The roster that tells is made anew afterwards, with what was found. */
static void survey(struct tly_coordinator *c)
{
    struct tly_roster r;
    bool apart;
    if (c->measure == MEASURE_NONE || make_roster(c, &r, &apart) != 0) {
        invite(c);
        return;
    }
    bool all = c->measure == MEASURE_ALL;
    if (place_services(c, &r) == 0) {
        bool matter = all || (apart && crosses_cards(&r));
        if (!matter || tly_survey_create(&r, all, &c->survey) != 0)
            c->survey = NULL;
        for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
            struct member *m = tly_list_entry(n, struct member, node);
            if (!m->joined || !c->survey)
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
        tly_list_entry(n, struct member, node)->service = TLY_NO_SERVICE;
    tly_roster_finish(&r);
}

/* To a list, unless there is no room for the whole of it. */
static void append(char *text, size_t len, const char *format, ...)
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
static void take_results(struct tly_coordinator *c)
{
    char found[TLY_SENTENCE - 64] = "", unknown[TLY_SENTENCE - 256] = "";
    tly_survey_end(c->survey);
    c->found = calloc(c->size + c->tallyds_here, sizeof *c->found); /* without memory it is not known later */
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        struct member *m = tly_list_entry(n, struct member, node);
        uint64_t rate = 0;
        if (!m->joined || !tly_survey_result(c->survey, m->card, &rate))
            continue;
        m->info.bandwidth = rate;
        if (m->stands && rate && c->found) {
            memcpy(c->found[c->found_count].host_id, m->info.host_id, sizeof m->info.host_id);
            c->found[c->found_count++].bandwidth = rate;
        }
        if (m->stands && rate)
            append(found, sizeof found, "%s%s %.3g Gbit/s", *found ? ", " : "", m->info.host,
                   (double)rate * 1e-9);
        else if (m->stands)
            append(unknown, sizeof unknown, "%s%s", *unknown ? ", " : "", m->info.host);
    }
    if (*found)
        tly_info("join", "network cards were measured: %s", found);
    if (*unknown)
        tly_warn("join",
                 "how fast the network card is on %s is not known and could not be measured: taken to be as "
                 "slow as the slowest that is known; TALLY_BANDWIDTH there would say it",
                 unknown);
}

/* The next step of a round, or the next round, or the end.  Who has not answered by now is not waited for. */
static void go_on_measuring(struct tly_coordinator *c)
{
    bool go = c->step.step == TLY_MEASURE_MEET, late = c->loop.awake - c->measuring_at >= MEASURE_MS * TLY_MS;
    c->step = (struct tly_measure){.step = go ? TLY_MEASURE_GO : TLY_MEASURE_MEET, .round = c->step.round};
    c->step_at = c->loop.awake;
    for (struct tly_list *n = c->members.next; n != &c->members && !go; n = n->next) {
        struct member *m = tly_list_entry(n, struct member, node);
        if (m->awaited && m->silent)
            tly_survey_drop(c->survey, m->card); /* the others would only wait for it again */
        m->awaited = m->silent = false;
    }
    if (!go)
        c->step.round = c->survey && !late ? tly_survey_next(c->survey) : 0;
    for (struct tly_list *n = c->members.next; n != &c->members && c->step.round; n = n->next) {
        struct member *m = tly_list_entry(n, struct member, node);
        struct tly_measure meet;
        if (!m->joined || !m->stands || !tly_survey_meet(c->survey, m->card, &meet))
            continue;
        m->silent |= !go;
        post_measure(m, go ? &c->step : &meet);
    }
    if (c->step.round)
        return;
    if (c->survey)
        take_results(c);
    tly_survey_destroy(c->survey);
    c->survey = NULL;
    invite(c);
}

static void on_measured(struct member *m, const struct tly_measure *x)
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
    advance(c);
}

/* --- changes of epoch ---------------------------------------------------------------------------- *
 *
 * A tallyd that has come is invited: all ranks connect to it.  When they have, or one is gone or leaves, PREPARE asks
 * all ranks to begin no new rounds and to say which they have begun; when all have, COMMIT gives them the new roster and
 * all that anybody has begun: such a round stays in its epoch.  Whatever changes meanwhile begins a new PREPARE. */

static bool present(const struct member *m)
{
    return m->joined && !m->left && m->info.role == TLY_ROLE_RANK;
}

/* To whom: */
enum whom {
    RANKS,  /* that have not left */
    ALL,    /* these, and the tallyd that serve */
    BEHIND, /* ranks that have not heard of the epoch in which others are */
};

static bool is_behind(const struct member *m)
{
    return present(m) && m->committed < m->c->committed;
}

static void post_roster(struct tly_coordinator *c, int type, uint16_t flags, struct tly_writer *w,
                        enum whom whom)
{
    if (w->failed || w->len > TLY_MAX_CONTROL) {
        fail_job(c, ENOMEM, "the coordinator is out of memory");
        return;
    }
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        struct member *m = tly_list_entry(n, struct member, node);
        if (whom == BEHIND ? is_behind(m)
                           : present(m) || (whom == ALL && m->joined && m->service != TLY_NO_SERVICE))
            post(m, type, flags, w->data, w->len);
    }
}

static bool all_answered(const struct tly_coordinator *c, uint32_t number)
{
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        const struct member *m = tly_list_entry(n, struct member, node);
        if (present(m) && m->answered != number && m->met != number)
            return false;
    }
    return true;
}

/* The lowest place that nobody has; -E2BIG, -ENOMEM. */
static int find_place(struct tly_coordinator *c, uint32_t *place)
{
    struct tly_roster *r = &c->roster;
    uint32_t i = r->machine_count;
    while (i < r->service_count && r->services[i].state != TLY_SERVICE_GONE)
        i++;
    if (i == TLY_MAX_MACHINES)
        return -E2BIG;
    if (i == r->service_count) {
        void *services = realloc(r->services, (i + 1) * sizeof *r->services);
        if (services)
            r->services = services;
        void *ids = realloc(c->host_id, (i + 1) * sizeof *c->host_id);
        if (ids)
            c->host_id = ids;
        if (!services || !ids)
            return -ENOMEM;
        r->service_count++;
    }
    *place = i;
    return 0;
}

/* What was measured of a host's card; 0: nothing.  A tallyd that comes while the job runs is not measured, but it may have
 * been here before. */
static uint64_t measured_of(const struct tly_coordinator *c, const char *host_id)
{
    for (uint32_t i = 0; i < c->found_count; i++)
        if (strcmp(c->found[i].host_id, host_id) == 0)
            return c->found[i].bandwidth;
    return 0;
}

/* Those who came since the last time. */
static void invite_more(struct tly_coordinator *c)
{
    bool any = false;
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        struct member *m = tly_list_entry(n, struct member, node);
        if (!m->waiting)
            continue;
        m->waiting = false;
        uint32_t at;
        if (!m->info.bandwidth)
            m->info.bandwidth = measured_of(c, m->info.host_id);
        int err = find_place(c, &at);
        if (!err) {
            add_service(c, &c->roster, at, &m->info);
            err = place_service(c, &c->roster, at);
            c->roster.services[at].state = err ? TLY_SERVICE_GONE : TLY_SERVICE_IDLE;
        }
        if (err) {
            post_verdict(m, -err, err == -EINVAL ? tly_error() : "there is no room for more services");
            continue;
        }
        m->service = at;
        m->invited = any = true;
    }
    if (!any)
        return;
    c->invitation = c->roster.epoch = ++c->number;
    c->invited_at = c->loop.awake;
    struct tly_writer w = {0};
    tly_roster_write(&w, &c->roster);
    post_roster(c, TLY_INVITE, 0, &w, RANKS);
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        struct member *m = tly_list_entry(n, struct member, node);
        if (m->invited && !w.failed)
            post(m, TLY_INVITE, 0, w.data, w.len);
    }
    free(w.data);
}

static void prepare(struct tly_coordinator *c)
{
    struct tly_writer w = {0};
    c->wanted = false;
    c->preparing = c->roster.epoch = ++c->number;
    c->begun_count = 0;
    tly_map_finish(&c->begun_seen);
    c->begun_seen = (struct tly_map){0};
    tly_roster_write(&w, &c->roster);
    post_roster(c, TLY_PREPARE, 0, &w, RANKS);
    free(w.data);
}

/* All that anybody has begun, then the roster. */
static void post_commit(struct tly_coordinator *c, const struct tly_roster *roster, enum whom whom)
{
    size_t at = 0;
    do {
        struct tly_writer w = {0};
        size_t n = c->begun_count - at < TLY_BEGUN_ROUNDS ? c->begun_count - at : TLY_BEGUN_ROUNDS;
        tly_write32(&w, (uint32_t)n);
        for (size_t end = at + n; at < end; at++) {
            tly_write64(&w, c->begun[at].key);
            tly_write32(&w, c->begun[at].round);
            tly_write32(&w, c->begun[at].epoch);
        }
        bool last = at == c->begun_count;
        if (last)
            tly_roster_write(&w, roster);
        post_roster(c, TLY_COMMIT, last ? TLY_LAST : 0, &w, last || whom == BEHIND ? whom : RANKS);
        free(w.data);
    } while (at < c->begun_count);
}

static bool any_behind(const struct tly_coordinator *c)
{
    for (uint32_t i = 0; i < c->size; i++)
        if (c->ranks[i] && is_behind(c->ranks[i]))
            return true;
    return false;
}

/* The last coordinator died between its COMMITs, and this one has heard from all what they have begun: those who did not
 * get theirs get it now.  What nobody who is behind has begun in the epochs before began in the new one.  Then the change
 * that was under way begins anew, for they go on in between. */
static void catch_up(struct tly_coordinator *c)
{
    size_t count = 0;
    for (size_t i = 0; i < c->begun_count; i++)
        if (c->begun[i].epoch < c->committed)
            c->begun[count++] = c->begun[i];
    c->begun_count = count;
    post_commit(c, &c->settled, BEHIND);
    for (uint32_t i = 0; i < c->size; i++)
        if (c->ranks[i])
            c->ranks[i]->committed = c->committed;
    prepare(c);
}

static void commit(struct tly_coordinator *c)
{
    find_cards(c, &c->roster);
    int err = tly_roster_split(&c->roster, c->split);
    if (err) {
        fail_job(c, -err,
                 err == -ENOENT ? "TALLY_SPLIT=server leaves the sums to tallyd, and the last one is gone"
                                : "the coordinator is out of memory");
        return;
    }
    c->roster.epoch = c->preparing;
    c->preparing = 0;
    post_commit(c, &c->roster, ALL);
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next)
        tly_list_entry(n, struct member, node)->accuses = 0;
}

/* A rank's answer to INVITE or PREPARE. */
static int on_begun(struct member *m, bool last, struct tly_reader *r, const char **why)
{
    struct tly_coordinator *c = m->c;
    uint32_t number = tly_read32(r), count = tly_read32(r);
    m->said = m->saying == number ? m->said : 0;
    m->saying = number;
    if (count > MOST_BEGUN - m->said) {
        *why = "more rounds begun than a rank may have";
        return -EPROTO;
    }
    m->said += count;
    for (uint32_t i = 0; i < count && number == c->preparing && !r->failed; i++) {
        struct tly_begun b = {.key = tly_read64(r)};
        b.round = tly_read32(r);
        b.epoch = tly_read32(r);
        uint64_t id = (b.key ^ b.round) * 0x9e3779b97f4a7c15ull;
        if (r->failed || tly_map_get(&c->begun_seen, id))
            continue; /* two rounds of one hash: such a hash is that of one in 10^9 jobs */
        if (c->begun_count == c->begun_room) {
            size_t room = c->begun_room ? 2 * c->begun_room : 64;
            void *more = realloc(c->begun, room * sizeof *c->begun);
            if (more) {
                c->begun = more;
                c->begun_room = room;
            }
        }
        if (c->begun_count == c->begun_room || tly_map_put(&c->begun_seen, id, c) != 0) {
            fail_job(c, ENOMEM, "the coordinator is out of memory");
            return 0;
        }
        c->begun[c->begun_count++] = b;
    }
    if (last && number == c->preparing)
        m->answered = number;
    else if (last && number == c->invitation)
        m->met = number; /* others answer what holds no more */
    return 0;
}

/* All ranks have met those who were invited. */
static void welcome(struct tly_coordinator *c)
{
    bool any = false;
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        struct member *m = tly_list_entry(n, struct member, node);
        if (!m->invited)
            continue;
        m->invited = false;
        any = true;
        c->roster.services[m->service].state = TLY_SERVICE_ACTIVE;
        tly_info("join", "tallyd on %s (%s port %u) joins", m->info.host, m->info.address, m->info.port);
    }
    c->invitation = 0;
    c->wanted |= any;
}

static bool guests_ready(const struct tly_coordinator *c)
{
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        const struct member *m = tly_list_entry(n, struct member, node);
        if (m->invited && !m->begun)
            return false;
    }
    return true;
}

/* Whatever is due next. */
static void change(struct tly_coordinator *c)
{
    if (c->invitation && guests_ready(c) && all_answered(c, c->invitation))
        welcome(c);
    if (c->wanted)
        prepare(c);
    if (c->preparing && all_answered(c, c->preparing) && any_behind(c))
        catch_up(c);
    else if (c->preparing && all_answered(c, c->preparing))
        commit(c);
    if (c->state == RUNNING && !c->preparing && !c->invitation)
        invite_more(c);
}

static void strike_out(struct tly_coordinator *c, uint32_t service, bool left, const char *why)
{
    char name[200];
    tly_service_name(&c->roster, service, name, sizeof name);
    if (left)
        tly_info("join", "%s has left", name);
    else
        tly_warn("join", "%s is out: %s; the job goes on without it", name, why);
    c->roster.services[service].state = TLY_SERVICE_GONE;
    c->wanted = true;
}

/* A tallyd is out: the job goes on without it. */
static void evict(struct member *m, const char *why)
{
    if (m->service == TLY_NO_SERVICE || m->c->roster.services[m->service].state == TLY_SERVICE_GONE)
        return;
    strike_out(m->c, m->service, m->left, why);
    m->service = TLY_NO_SERVICE;
    m->invited = false;
}

static void advance(struct tly_coordinator *c)
{
    bool all_ranks = c->state == GATHERING && all_here(c);
    if (all_ranks && c->resuming) {
        c->state = RUNNING;
        c->wanted = true; /* whatever was under way begins anew */
        c->resumed_at = c->loop.awake;
        tly_info("join", "all %u ranks of the running job are here", c->size);
    }
    if (all_ranks && !c->resuming) {
        if (!c->complete_at)
            c->complete_at = c->loop.awake;
        if (c->tallyds_here >= c->servers)
            ask_for_proofs(c);
    }
    if (c->state == PROVING) {
        bool proved = c->size > 0;
        for (uint32_t i = 0; i < c->size; i++)
            proved &= c->ranks[i]->proved;
        if (proved)
            survey(c);
    }
    while (c->state == MEASURING && !is_awaited(c))
        go_on_measuring(c);
    if (c->state == INVITING) {
        bool begun = true;
        for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
            struct member *m = tly_list_entry(n, struct member, node);
            begun &= !m->joined || m->begun;
        }
        if (begun) {
            c->state = RUNNING;
            post_all(c, TLY_COMMIT, NULL, 0);
        }
    }
    if (c->state == RUNNING)
        change(c);
    if (c->state == RUNNING) {
        bool left = true;
        for (uint32_t i = 0; i < c->size; i++)
            left &= !c->ranks[i] || c->ranks[i]->left;
        if (left) {
            c->state = ENDED;
            c->over_at = c->loop.awake;
            post_all(c, TLY_GOODBYE, NULL, 0);
        }
    }
}

/* Does the newcomer fit those who are here?  If not, the start fails for all and each learns why. */
static bool fits(struct tly_coordinator *c, const struct member *m)
{
    const struct tly_member_info *me = &m->info;
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        const struct member *o = tly_list_entry(n, struct member, node);
        const struct tly_member_info *other = &o->info;
        if (!o->joined || o == m || other->role != TLY_ROLE_RANK || me->role != TLY_ROLE_RANK)
            continue;
        if (other->size != me->size) {
            fail_job(c, EPROTO, "rank %u on %s was started for %u ranks, rank %u on %s for %u", other->rank,
                     other->host, other->size, me->rank, me->host, me->size);
            return false;
        }
        if (other->rank == me->rank) {
            fail_job(c, EEXIST, "rank %u has come twice: process %u on %s and process %u on %s", me->rank,
                     other->pid, other->host, me->pid, me->host);
            return false;
        }
        if (other->restart && me->restart && other->restart != me->restart) {
            fail_job(c, EPROTO,
                     "rank %u on %s belongs to restart %u of the job, rank %u on %s to restart %u "
                     "(TORCHELASTIC_RESTART_COUNT)",
                     other->rank, other->host, other->restart - 1, me->rank, me->host, me->restart - 1);
            return false;
        }
        if (other->digest != me->digest) {
            fail_job(c, EPROTO, "the settings of rank %u on %s (%s) differ from those of rank %u on %s (%s)",
                     me->rank, me->host, me->settings, other->rank, other->host, other->settings);
            return false;
        }
    }
    return true;
}

static void on_member_info(struct member *m)
{
    struct tly_coordinator *c = m->c;
    char name[200];
    member_name(m, name, sizeof name);
    tly_link_rename(m->link, name);
    if (c->state == FAILED) {
        struct sockaddr_storage from;
        tly_link_address(m->link, true, &from);
        bool ours = m->info.rank == 0 && m->info.pid == (uint32_t)getpid() && tly_place_is_own(&from);
        if (ours) /* others have failed before this very process has joined its own coordinator */
            post_verdict(m, c->verdict_err, c->verdict);
        else
            post_verdict(m, EAGAIN, "the job's last start has not ended yet"); /* it comes again */
        return;
    }
    if ((c->state == RUNNING || c->resuming) && m->info.role == TLY_ROLE_TALLYD) {
        m->joined = m->waiting = true;
        c->tallyds_here++;
        tly_link_set_silence(m->link, TALLYD_SILENCE_S * TLY_SEC);
        advance(c);
        return;
    }
    if (c->state != GATHERING || c->resuming) {
        if (m->info.role == TLY_ROLE_TALLYD)
            post_verdict(m, EAGAIN, "the job is about to start, or to end");
        else if (m->info.rank < c->size && (!c->ranks[m->info.rank] || c->ranks[m->info.rank]->left))
            post_verdict(m, EAGAIN, "the job's last start has not ended yet"); /* it comes again */
        else
            post_verdict(m, EEXIST,
                         "the job is running already: give this one another TALLY_PORT, or end that one");
        return;
    }
    if (!fits(c, m))
        return;
    if (m->info.role == TLY_ROLE_TALLYD) {
        c->tallyds_here++;
        tly_link_set_silence(m->link, TALLYD_SILENCE_S * TLY_SEC);
    } else {
        if (!c->size) {
            c->ranks = calloc(m->info.size, sizeof *c->ranks);
            if (!c->ranks) {
                fail_job(c, ENOMEM, "the coordinator is out of memory");
                return;
            }
            c->size = m->info.size;
        }
        c->ranks[m->info.rank] = m;
        c->ranks_here++;
    }
    m->joined = true;
    advance(c);
}

/* --- who asks ------------------------------------------------------------------------------------ */

static uint32_t stand(const struct member *m)
{
    return m->left     ? TLY_STAND_LEFT
           : m->begun  ? TLY_STAND_CONNECTED
           : m->proved ? TLY_STAND_PROVED
                       : TLY_STAND_JOINED;
}

static void answer(struct member *watcher)
{
    const struct tly_coordinator *c = watcher->c;
    struct tly_status s = {.state = c->state,
                           .size = c->size,
                           .servers = c->servers,
                           .age_ms = (uint64_t)((c->loop.awake - c->born) / TLY_MS),
                           .has_roster = c->roster.rank_count > 0,
                           .roster = c->roster};
    struct tly_writer w = {0};
    s.members = calloc(c->ranks_here + c->tallyds_here + 1, sizeof *s.members);
    if (!s.members)
        return; /* who asks gets no answer in time */
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        const struct member *m = tly_list_entry(n, struct member, node);
        const struct tly_member_info *info = &m->info;
        if (!m->joined)
            continue;
        struct tly_status_member *out = &s.members[s.member_count++];
        *out = (struct tly_status_member){.role = info->role,
                                          .rank = info->role == TLY_ROLE_RANK ? info->rank : TLY_NO_RANK,
                                          .pid = info->pid,
                                          .port = info->port,
                                          .stand = stand(m)};
        memcpy(out->address, info->address, sizeof out->address);
        memcpy(out->host, info->host, sizeof out->host);
    }
    tly_status_write(&w, &s);
    if (!w.failed && w.len <= TLY_MAX_CONTROL)
        post(watcher, TLY_STATUS, 0, w.data, w.len);
    free(w.data);
    free(s.members); /* the roster is the coordinator's */
}

/* --- who holds the job up -------------------------------------------------------------------------- */

/* All ranks say that it goes slower than predicted.  If one alone has its credit out, the others wait for what it
 * sends: its machine.  Else the service that most of them point at. */
static void judge(struct tly_coordinator *c)
{
    double *held = calloc(c->size, sizeof *held);
    uint32_t machine = TLY_NO_SERVICE;
    for (uint32_t i = 0; held && i < c->size; i++) {
        if (!c->ranks[i] || !c->ranks[i]->told)
            goto out; /* not all yet */
        held[i] = c->ranks[i]->held;
    }
    if (!held)
        return;
    int one = tly_plan_standout((int)c->size, held);
    if (one >= 0)
        machine = c->roster.ranks[one].machine;
    for (uint32_t i = 0; i < c->size && one < 0; i++) {
        uint32_t votes = 0;
        for (uint32_t j = 0; j < c->size; j++)
            votes += c->ranks[j]->suspect == c->ranks[i]->suspect;
        if (2 * votes > c->size) {
            machine = c->ranks[i]->suspect;
            break;
        }
    }
    struct tly_writer w = {0};
    tly_write32(&w, machine);
    if (!w.failed && machine != TLY_NO_SERVICE)
        post_all(c, TLY_PACE, w.data, w.len);
    free(w.data);
out:
    free(held);
}

/* --- frames -------------------------------------------------------------------------------------- */

static int header(void *user, struct tly_link *l, const struct tly_frame *f, struct tly_landing *land,
                  const char **why)
{
    const struct member *m = user;
    uint8_t role = tly_link_peer(l)->role;
    bool alive = f->type == TLY_BEAT || f->type == TLY_COUNTS;
    bool of_ranks = f->type == TLY_COMPLAIN || f->type == TLY_PACE;
    if ((!alive && (role == TLY_ROLE_WATCHER) != (f->type == TLY_STATUS)) ||
        (of_ranks && role != TLY_ROLE_RANK)) {
        *why = "a frame out of its sender's role";
        return -EPROTO;
    }
    if (tly_outbox_full(&m->outbox) && !alive) {
        *why = "much is asked and no answer is read";
        return -EPROTO;
    }
    switch (f->type) {
    case TLY_STATUS:
    case TLY_ROSTER:
    case TLY_BEGUN:
    case TLY_COMPLAIN:
    case TLY_PACE:
    case TLY_MEASURE:
    case TLY_GOODBYE:
    case TLY_BEAT:
    case TLY_COUNTS:
        break;
    default:
        *why = "no frame for a coordinator";
        return -EPROTO;
    }
    land->control = true;
    return 0;
}

static struct member *find_tallyd(const struct tly_coordinator *c, uint64_t incarnation)
{
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        struct member *m = tly_list_entry(n, struct member, node);
        if (m->service != TLY_NO_SERVICE && m->info.incarnation == incarnation)
            return m;
    }
    return NULL;
}

/* Its place in the roster if it serves; else the count of services. */
static uint32_t find_serving(const struct tly_coordinator *c, uint64_t incarnation)
{
    uint32_t at = 0;
    while (at < c->roster.service_count && (c->roster.services[at].incarnation != incarnation ||
                                            c->roster.services[at].state != TLY_SERVICE_ACTIVE))
        at++;
    return at;
}

/* A member of a job that goes on without a coordinator has come. */
static void take_back(struct member *m)
{
    struct tly_coordinator *c = m->c;
    bool is_rank = m->info.role == TLY_ROLE_RANK;
    uint32_t at = find_serving(c, m->info.incarnation);
    bool known = at < c->roster.service_count;
    if (known)
        memcpy(c->host_id[at], m->info.host_id, sizeof c->host_id[at]);
    if (!is_rank)
        m->service = known ? at : TLY_NO_SERVICE;
    if (!is_rank && !known)
        post_verdict(m, EAGAIN, "the job goes on without this tallyd");
    m->joined = is_rank || known;
}

/* Nobody so far was in so new an epoch: what its member knows is what the coordinator knows. */
static int take_newest(struct tly_coordinator *c, struct tly_roster *roster, uint32_t committed)
{
    struct tly_writer w = {0};
    struct tly_roster settled = {0};
    uint32_t number =
        roster->epoch + 1000; /* those that were given and nobody remembers must not come again */
    /* It may have been invited to meet a guest since.  Who left the split may be gone by now. */
    roster->epoch = committed;
    for (uint32_t i = roster->machine_count; i < roster->service_count; i++)
        if (roster->services[i].state == TLY_SERVICE_IDLE)
            roster->services[i].state = TLY_SERVICE_GONE;
    for (uint32_t i = 0; i < c->roster.rank_count; i++)
        roster->ranks[i].left |= c->roster.ranks[i].left; /* who has said so to us */
    void *ids = calloc(roster->service_count, sizeof *c->host_id);
    tly_roster_write(&w, roster);
    struct tly_reader r = {w.data, w.len, false};
    int err = !ids || w.failed ? -ENOMEM : tly_roster_read(&r, &settled);
    free(w.data);
    if (err) {
        free(ids);
        return err;
    }
    free(c->host_id);
    tly_roster_finish(&c->settled);
    tly_roster_finish(&c->roster);
    c->host_id = ids;
    c->settled = settled;
    c->roster = *roster;
    *roster = (struct tly_roster){0};
    c->committed = committed;
    c->number = number > c->number ? number : c->number;
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        struct member *m = tly_list_entry(n, struct member, node);
        if (!m->joined || m->waiting)
            continue;
        take_back(m);
        c->tallyds_here -= !m->joined;
    }
    return 0;
}

/* The first member of a job that runs, and whose coordinator has died. */
static int adopt(struct tly_coordinator *c, struct tly_roster *roster, uint64_t incarnation,
                 uint32_t committed)
{
    uint32_t size = roster->rank_count;
    c->ranks = calloc(size, sizeof *c->ranks);
    int err = c->ranks ? take_newest(c, roster, committed) : -ENOMEM;
    if (err)
        return err;
    c->size = size;
    c->identity.incarnation = incarnation;
    c->resuming = true;
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        struct member *m = tly_list_entry(n, struct member, node);
        m->waiting = m->joined && m->info.role == TLY_ROLE_TALLYD;
    }
    return 0;
}

/* A member of a job that runs.  What changes were under way is forgotten: a tallyd that had been invited comes again. */
static int on_resumed(struct member *m, struct tly_reader *r, const char **why)
{
    struct tly_coordinator *c = m->c;
    struct tly_roster roster;
    uint64_t incarnation = tly_read64(r);
    uint32_t committed = tly_read32(r);
    bool is_rank = m->info.role == TLY_ROLE_RANK;
    char name[200];
    if (tly_roster_read(r, &roster) != 0) {
        *why = "a roster that cannot be read";
        return -EPROTO;
    }
    uint32_t size = roster.rank_count;
    member_name(m, name, sizeof name);
    tly_link_rename(m->link, name);
    bool first = c->state == GATHERING && !c->resuming && !c->size;
    int err = first ? adopt(c, &roster, incarnation, committed) : 0;
    bool fits_here = (c->resuming || c->state == RUNNING) && c->identity.incarnation == incarnation &&
                     size == c->size && !(is_rank && (m->info.rank >= c->size || c->ranks[m->info.rank]));
    if (!err && !first && fits_here && c->state == GATHERING && committed > c->committed)
        err = take_newest(c, &roster, committed);
    for (uint32_t i = 0; !err && fits_here && i < roster.rank_count; i++)
        c->roster.ranks[i].left |= roster.ranks[i].left;
    if (err) {
        fail_job(c, ENOMEM, "the coordinator is out of memory");
    } else if (!fits_here) {
        post_verdict(m, ESTALE, "there is another start of the job by now");
    } else {
        take_back(m);
        m->committed = committed;
        if (is_rank) {
            c->ranks[m->info.rank] = m;
            c->ranks_here++;
        } else if (m->joined) {
            c->tallyds_here++;
            tly_link_set_silence(m->link, TALLYD_SILENCE_S * TLY_SEC);
        }
        m->begun = m->proved = true;
        advance(c);
    }
    tly_roster_finish(&roster);
    return 0;
}

/* Services of a job that was taken over, which have not come back. */
static void miss_services(struct tly_coordinator *c)
{
    if (!c->resumed_at || c->state != RUNNING || c->loop.awake - c->resumed_at < TALLYD_SILENCE_S * TLY_SEC)
        return;
    c->resumed_at = 0;
    for (uint32_t i = c->roster.machine_count; i < c->roster.service_count; i++)
        if (c->roster.services[i].state == TLY_SERVICE_ACTIVE &&
            !find_tallyd(c, c->roster.services[i].incarnation))
            strike_out(c, i, false, "it has not come back to the coordinator");
    advance(c);
}

static bool is_embedded(const struct tly_coordinator *c, uint64_t incarnation)
{
    for (uint32_t i = 0; i < c->roster.machine_count; i++)
        if (c->roster.services[i].incarnation == incarnation)
            return true;
    return false;
}

/* Another coordinator may have to know it, and would hear it from the others. */
static void note_left(struct tly_coordinator *c, uint32_t rank)
{
    struct tly_writer w = {0};
    c->roster.ranks[rank].left = 1;
    tly_write32(&w, rank);
    if (c->roster.standalone && !w.failed)
        post_all(c, TLY_GOODBYE, w.data, w.len);
    free(w.data);
}

static int frame(void *user, struct tly_link *l, const struct tly_frame *f, void *data, const char **why)
{
    struct member *m = user;
    struct tly_coordinator *c = m->c;
    struct tly_reader r = {data, f->payload, false};
    switch (f->type) {
    case TLY_ROSTER:
        if (f->flags & TLY_REQUEST) {
            m->nonce_seen = tly_read64(&r);
            m->proved = true;
            advance(c);
        } else {
            if (m->joined || tly_member_read(&r, &m->info) != 0 || m->info.role != tly_link_peer(l)->role) {
                *why = "a member that cannot be read";
                return -EPROTO;
            }
            if (f->flags & TLY_RESUMED)
                return on_resumed(m, &r, why);
            on_member_info(m);
        }
        break;
    case TLY_BEGUN:
        m->begun = true;
        if (f->payload && present(m) && on_begun(m, f->flags & TLY_LAST, &r, why) != 0)
            return -EPROTO;
        advance(c);
        break;
    case TLY_COMPLAIN: {
        char sentence[TLY_SENTENCE - 200], name[200];
        uint32_t err = tly_read32(&r);
        tly_read_text(&r, sentence, sizeof sentence);
        uint64_t service = tly_read64(&r);
        if ((!m->joined && c->state != GATHERING) || r.failed)
            break;
        struct member *accused = find_tallyd(c, service);
        if (!err && service && !accused && c->state <= RUNNING && !is_embedded(c, service))
            break; /* it is out already */
        if (!err && accused && m->joined) {
            m->accuses++;
            if (!accused->accused_at) {
                accused->accused_at = c->loop.awake;
                accused->accuser = m->info.rank;
            }
            break;
        }
        if (!m->joined) /* it has failed before it could say more of itself */
            m->info = (struct tly_member_info){.role = TLY_ROLE_RANK, .rank = tly_link_peer(l)->rank};
        member_name(m, name, sizeof name);
        if (err) {
            fail_job(c, err < 4096 ? (int)err : EPROTO, "%s: %s", name, sentence);
        } else if (!c->complaint_due) {
            /* Who cannot be reached may just have died: its own connection will tell, and names it better. */
            c->complaint_due = c->loop.awake + COMPLAINT_MS * TLY_MS;
            snprintf(c->complaint, sizeof c->complaint, "%s: %s", name, sentence);
        }
        break;
    }
    case TLY_PACE:
        if (m->joined && c->state == RUNNING && !m->told) {
            m->told = true;
            m->held = tly_read32(&r);
            m->suspect = tly_read32(&r);
            judge(c);
        }
        break;
    case TLY_MEASURE: {
        struct tly_measure x;
        if (tly_measure_read(&r, &x) != 0) {
            *why = "a measurement that cannot be read";
            return -EPROTO;
        }
        on_measured(m, &x);
        break;
    }
    case TLY_GOODBYE:
        m->left = true;
        if (m->joined && m->info.role == TLY_ROLE_RANK && m->info.rank < c->roster.rank_count)
            note_left(c, m->info.rank);
        if (m->service != TLY_NO_SERVICE && c->roster.services[m->service].state == TLY_SERVICE_ACTIVE) {
            c->roster.services[m->service].state = TLY_SERVICE_IDLE; /* it stays for what it has begun */
            c->wanted = true;
        }
        advance(c);
        break;
    case TLY_STATUS:
        if (c->state == FAILED)
            post_verdict(m, c->verdict_err, c->verdict);
        else
            answer(m);
        break;
    default:
        break;
    }
    return 0;
}

static void set_known(struct member *m, bool known)
{
    m->c->known += (uint32_t)known - m->known;
    m->known = known;
    if (!m->c->known)
        tly_event_set(&m->c->quiet);
}

static void drop(struct member *m)
{
    struct tly_coordinator *c = m->c;
    tly_list_remove(&m->node);
    c->watchers -= m->watcher;
    set_known(m, false);
    tly_link_destroy(m->link);
    tly_outbox_finish(&m->outbox, NULL, NULL);
    free(m);
}

static void closed(void *user, struct tly_link *l, int err, const char *why)
{
    struct member *m = user;
    struct tly_coordinator *c = m->c;
    char name[200];
    member_name(m, name, sizeof name);
    if (err == EACCES)
        tly_warn("join", "%s was not let in: %s", tly_link_name(l), why);
    /* A goodbye counts once the job runs; before that it leaves a hole in the roster like any other end. */
    bool lost = m->joined && (!m->left || (c->state < RUNNING && !c->resuming));
    bool is_rank = m->info.role == TLY_ROLE_RANK;
    if (m->joined && is_rank) {
        c->ranks[m->info.rank] = NULL;
        c->ranks_here--;
    }
    if (m->joined && !is_rank)
        c->tallyds_here--;
    if (m->joined && !is_rank && c->state <= RUNNING) {
        char text[100];
        snprintf(text, sizeof text, "silent for %d s (stopped, or cut off)", TALLYD_SILENCE_S);
        evict(m, err == ETIMEDOUT ? text : why);
        lost = false; /* nothing is lost with it; before the start it is simply not there */
    }
    drop(m);
    if (lost && c->state != ENDED) {
        if (err == ETIMEDOUT)
            fail_job(c, ETIMEDOUT, "%s has been silent for %.0f s: taken for dead (%s)", name,
                     is_rank ? (double)c->dead_ns / TLY_SEC : TALLYD_SILENCE_S,
                     is_rank ? "TALLY_DEAD_TIMEOUT" : "stopped, or cut off");
        else
            fail_job(c, ECONNRESET, "%s has died: %s", name, why);
    }
    advance(c);
}

static void opened(void *user, struct tly_link *l)
{
    struct member *m = user;
    m->watcher = tly_link_peer(l)->role == TLY_ROLE_WATCHER;
    m->c->watchers += m->watcher;
    set_known(m, !m->watcher);
    if (m->c->watchers > MOST_WATCHERS)
        drop(m); /* who asks asks again */
}

static const struct tly_link_user calls = {
    .opened = opened, .header = header, .frame = frame, .next = next, .closed = closed};

static int accepting(void *user, struct tly_link_config *config);

/* The link is created after accepting() has returned: it is known from its first callback on. */
static void remember(void *user, struct tly_link *l)
{
    struct member *m = user;
    m->link = l;
}

static int accepting(void *user, struct tly_link_config *config)
{
    struct tly_coordinator *c = user;
    /* Who comes now comes again later, to the next coordinator: it must not lose this one in the midst of its joining.
     * Inside a rank a failed one still has to tell that very rank why (on_member_info). */
    if (c->state == ENDED || (c->state == FAILED && c->standalone))
        return -ESHUTDOWN;
    struct member *m = calloc(1, sizeof *m);
    if (!m)
        return -ENOMEM;
    m->c = c;
    m->service = TLY_NO_SERVICE;
    tly_outbox_init(&m->outbox);
    tly_list_append(&c->members, &m->node);
    set_known(m, !c->standalone); /* one that ends with its rank would be looked for in vain */
    config->user_calls = &calls;
    config->user = m;
    config->identity = c->identity;
    config->silence_ns = c->dead_ns;
    config->created = remember;
    return 0;
}

/* --- time ---------------------------------------------------------------------------------------- */

/* The first member that has not done what the start waits for. */
static const char *unready(const struct tly_coordinator *c, char *out, size_t len)
{
    snprintf(out, len, "a member");
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        const struct member *m = tly_list_entry(n, struct member, node);
        bool ready = c->state == PROVING ? m->proved || m->info.role != TLY_ROLE_RANK : m->begun;
        if (m->joined && !ready) {
            member_name(m, out, len);
            break;
        }
    }
    return out;
}

/* A rank's word suffices, for nothing is lost; but who cannot reach most services is cut off itself.  The moment is for
 * those whose own connections end just now. */
static void judge_accused(struct tly_coordinator *c)
{
    uint32_t alive = 0;
    char text[100];
    for (uint32_t i = 0; i < c->roster.service_count; i++)
        alive += c->roster.services[i].state != TLY_SERVICE_GONE;
    for (struct tly_list *n = c->members.next, *next; n != &c->members; n = next) {
        struct member *m = tly_list_entry(n, struct member, node);
        next = n->next;
        bool late = m->invited && c->invitation && c->loop.awake - c->invited_at >= MEET_S * TLY_SEC;
        if (!late && (!m->accused_at || c->loop.awake - m->accused_at < COMPLAINT_MS * TLY_MS))
            continue;
        const struct member *accuser = c->ranks[m->accuser];
        if (!late && accuser && alive > 2 && 2 * accuser->accuses > alive) {
            member_name(accuser, text, sizeof text);
            fail_job(c, ECONNRESET, "%s is cut off: it cannot reach %u of %u services", text,
                     accuser->accuses, alive);
            return;
        }
        if (late)
            snprintf(text, sizeof text, "not all ranks have reached it within %d s", MEET_S);
        else
            snprintf(text, sizeof text, "rank %u cannot reach it", m->accuser);
        evict(m, text);
        post_verdict(m, EAGAIN, "it is out of the job: not all ranks can reach it");
        m->accused_at = 0;
        advance(c);
    }
}

static void tick(struct tly_hook *h)
{
    struct tly_coordinator *c = tly_list_entry(h, struct tly_coordinator, hook);
    int64_t now = c->loop.awake;
    char missing[512], name[200];
    if (c->complaint_due && now >= c->complaint_due)
        fail_job(c, ECONNRESET, "%s", c->complaint);
    judge_accused(c);
    miss_services(c);
    if (c->state == MEASURING && now - c->step_at >= MEASURE_STEP_MS * TLY_MS) {
        go_on_measuring(c);
        advance(c);
    }
    if (c->resuming && c->state == GATHERING && now - c->born >= c->dead_ns) {
        missing_text(c, missing, sizeof missing);
        fail_job(c, ETIMEDOUT,
                 "rank %s has not come back to the coordinator within %.0f s (TALLY_DEAD_TIMEOUT)", missing,
                 (double)c->dead_ns / TLY_SEC);
    }
    bool tell = now - c->asked_missing >= MISSING_EVERY_S * TLY_SEC;
    if (c->state == GATHERING && c->complete_at) {
        if (now - c->complete_at >= c->servers_ns) {
            tly_warn("join",
                     "only %u of %u tallyd are there after %.0f s (TALLY_SERVERS_TIMEOUT): starting without "
                     "the rest",
                     c->tallyds_here, c->servers, (double)c->servers_ns / TLY_SEC);
            ask_for_proofs(c);
        } else if (tell) {
            c->asked_missing = now;
            tly_warn("join", "all ranks are there; waiting for tallyd: %u of %u have come (TALLY_SERVERS)",
                     c->tallyds_here, c->servers);
        }
    }
    if (c->state == GATHERING && !c->complete_at && c->size && !c->resuming) {
        missing_text(c, missing, sizeof missing);
        if (now - c->born >= c->join_ns) {
            fail_job(c, ETIMEDOUT, "rank %s did not join within %.0f s (TALLY_JOIN_TIMEOUT)", missing,
                     (double)c->join_ns / TLY_SEC);
        } else if (tell) {
            c->asked_missing = now;
            tly_warn("join", "waiting for rank %s", missing);
        }
    }
    /* Not from the beginning: the last rank may have come just in time, and tallyd been waited for after that. */
    if ((c->state == PROVING || c->state == INVITING) && now - c->proving_at >= CONNECT_S * TLY_SEC)
        fail_job(c, ETIMEDOUT, "%s has not connected to all services within %d s",
                 unready(c, name, sizeof name), CONNECT_S);
}

static void *serve(void *arg)
{
    struct tly_coordinator *c = arg;
    tly_loop_run(&c->loop);
    return NULL;
}

int tly_coordinator_create(const struct tly_place *place, const struct tly_params *params,
                           const struct sockaddr_storage *address, bool standalone,
                           struct tly_coordinator **out)
{
    struct tly_coordinator *c = calloc(1, sizeof *c);
    if (!c)
        return tly_fail(ENOMEM, "out of memory");
    tly_list_init(&c->members);
    int err = tly_loop_init(&c->loop);
    if (err) {
        free(c);
        return err;
    }
    c->identity.role = TLY_ROLE_COORDINATOR;
    c->identity.rank = standalone ? TLY_NO_RANK : 0; /* in whose process it is */
    memcpy(c->identity.secret, place->secret, sizeof place->secret);
    memcpy(c->identity.job, place->job, sizeof place->job);
    do
        randombytes_buf(&c->identity.incarnation, sizeof c->identity.incarnation);
    while (!c->identity.incarnation);
    c->standalone = standalone;
    c->servers = (uint32_t)params->servers;
    c->servers_ns = (int64_t)(params->servers_timeout * (double)TLY_SEC);
    c->join_ns = (int64_t)(params->join_timeout * (double)TLY_SEC);
    c->dead_ns = (int64_t)(params->dead_timeout * (double)TLY_SEC);
    c->part_bytes = params->part_bytes;
    c->window_parts = (uint32_t)params->window_parts;
    c->credit_bytes = params->credit_bytes;
    c->split = strcmp(params->split, "server") == 0 ? TLY_SPLIT_SERVER
               : strcmp(params->split, "all-reduce") == 0
                   ? TLY_SPLIT_ALL_REDUCE
                   : TLY_SPLIT_OPTIMAL;
    c->teams = strcmp(params->local, "on") == 0;
    c->measure = strcmp(params->measure, "off") == 0   ? MEASURE_NONE
                 : strcmp(params->measure, "all") == 0 ? MEASURE_ALL
                                                       : MEASURE_UNKNOWN;
    c->hook.tick = tick;
    c->born = c->asked_missing = c->loop.awake;
    tly_loop_hook(&c->loop, &c->hook);
    struct tly_listener_config listen = {.address = *address, .accepting = accepting, .user = c};
    err = tly_tcp_listen(&c->loop, &listen, &c->listener);
    if (!err)
        err = tly_thread_start(&c->thread, "tally-coord", serve, c);
    if (err) {
        tly_coordinator_destroy(c, 0);
        return err;
    }
    c->started = true;
    *out = c;
    return 0;
}

bool tly_coordinator_is_over(struct tly_coordinator *c)
{
    tly_loop_lock(&c->loop);
    bool over = c->over_at && (!c->known || c->loop.awake - c->over_at >= LEAVE_S * TLY_SEC);
    tly_loop_unlock(&c->loop);
    return over;
}

uint16_t tly_coordinator_port(const struct tly_coordinator *c)
{
    return tly_listener_port(c->listener);
}

void tly_coordinator_destroy(struct tly_coordinator *c, int64_t deadline)
{
    if (!c)
        return;
    if (c->started) {
        tly_loop_lock(&c->loop);
        bool quiet = !c->known;
        if (!quiet)
            c->quiet = (struct tly_event){0};
        tly_loop_unlock(&c->loop);
        if (!quiet)
            tly_event_wait(&c->quiet, deadline);
    }
    if (c->started) {
        tly_loop_stop(&c->loop);
        pthread_join(c->thread, NULL);
    }
    while (!tly_list_empty(&c->members))
        drop(tly_list_entry(c->members.next, struct member, node));
    tly_listener_destroy(c->listener);
    tly_loop_finish(&c->loop);
    tly_survey_destroy(c->survey);
    free(c->found);
    tly_roster_finish(&c->roster);
    tly_roster_finish(&c->settled);
    tly_map_finish(&c->begun_seen);
    free(c->begun);
    free(c->host_id);
    free(c->ranks);
    free(c);
}
