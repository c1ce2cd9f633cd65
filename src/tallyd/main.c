/* main.c - tallyd: a summation service on a spare CPU machine.  Joins a job, serves it to its end, waits for
 * the next.  One thread: the loop holds both the coordinator's connection and the service.  Another,
 * with --health, answers probes. */
#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/loop.h"
#include "base/text.h"
#include "base/thread.h"
#include "membership/coordinator.h"
#include "membership/member.h"
#include "sum/service.h"
#include "tallyd/health.h"
#include "transport/address.h"

enum { DRAIN_S = 20 };

static volatile sig_atomic_t asked_to_stop; /* how often */

static void tallyd_on_signal(int signal)
{
    asked_to_stop++;
}

static bool tallyd_cancelled(void *user)
{
    return asked_to_stop;
}

static void tallyd_usage(FILE *out)
{
    fprintf(
        out,
        "usage: tallyd --coord HOST[:PORT] [--coordinator] [--once] [--memory SIZE] [--job NAME]\n"
        "              [--health [ADDRESS:]PORT]\n\n"
        "Sums gradients for a Tally job on a machine with spare network and CPU.\n\n"
        "  --coord HOST[:PORT]  the job's coordinator (rank 0's host; TALLY_COORD)\n"
        "  --coordinator        do not sum; run the job's coordinator at that address, instead of rank 0\n"
        "  --once               exit when the job ends (default: wait for the next one)\n"
        "  --memory SIZE        most memory to take, such as 8G (default: half of what is allowed)\n"
        "  --job NAME           serve this job only (TALLY_JOB; default: any)\n"
        "  --health [ADDRESS:]PORT  answer /live, /ready and /metrics there over HTTP (127.0.0.1)\n"
        "  --help, --version\n\n"
        "The job secret is read from TALLY_SECRET_FILE, TALLY_SECRET or ~/.config/tally/secret.\n"
        "`tally params` lists all settings.\n");
}

/* Tells once a tick how it stands.  Owner: the main thread. */
static struct pulse {
    struct tly_hook hook;
    struct tly_health *health; /* owned; NULL: nobody wants to know */
    struct tly_health_news news;
    struct tly_member *member;   /* of this job; borrowed */
    struct tly_service *service; /* borrowed; NULL: not yet */
} pulse;

/* Take this service's entries from the current roster. */
static void tallyd_tell_share(struct tly_health_news *n, const struct tly_roster *r,
                              const struct tly_currents *now, uint64_t incarnation)
{
    double total = 0;
    n->share = 0;
    n->planned = n->current = n->declared = n->measured = 0;
    for (uint32_t i = 0; i < r->service_count; i++)
        total += r->services[i].weight;
    for (uint32_t i = 0; i < r->service_count; i++) {
        const struct tly_roster_service *s = &r->services[i];
        if (s->incarnation != incarnation || s->state == TLY_SERVICE_GONE)
            continue;
        n->share = total > 0 ? s->weight / total : 0;
        n->planned = s->bandwidth;
        n->current = tly_current(now, r, i);
        *(s->measured ? &n->measured : &n->declared) = s->said;
    }
}

static void tallyd_tell(struct tly_hook *h)
{
    const struct tly_roster *r = &pulse.member->roster;
    struct tly_health_news *n = &pulse.news;
    bool serving = pulse.service && pulse.member->state == TLY_MEMBER_RUNNING;
    n->jobs += serving && !n->serving;
    n->serving = serving;
    n->cpu_us = tly_thread_cpu() / 1000;
    snprintf(n->job, sizeof n->job, "%s", pulse.member->identity.job);
    n->ranks = r->rank_count;
    n->machines = r->machine_count;
    n->services = r->service_count;
    n->epoch = r->epoch;
    n->slow = pulse.member->slow;
    n->changed = pulse.member->change.at;
    if (pulse.service) {
        tly_service_facts(pulse.service, &n->facts);
        tallyd_tell_share(n, r, &pulse.member->current, tly_service_incarnation(pulse.service));
    }
    tly_health_tell(pulse.health, n);
}

static void tallyd_begin_pulse(struct tly_loop *loop, struct tly_member *m)
{
    if (!pulse.health)
        return;
    pulse.member = m;
    pulse.service = NULL;
    pulse.hook = (struct tly_hook){.tick = tallyd_tell};
    tly_loop_hook(loop, &pulse.hook);
}

/* Called before the service and the member go.  Their counters are added to the totals of earlier jobs. */
static void tallyd_end_pulse(struct tly_loop *loop)
{
    struct tly_health_news *n = &pulse.news;
    if (!pulse.health)
        return;
    tallyd_tell(&pulse.hook);
    n->before.bytes_summed += n->facts.bytes_summed;
    n->before.parts_summed += n->facts.parts_summed;
    n->before.slots_dropped += n->facts.slots_dropped;
    n->before.bytes_received += n->facts.bytes_received;
    n->before.bytes_sent += n->facts.bytes_sent;
    tly_loop_unhook(loop, &pulse.hook);
    *n = (struct tly_health_news){.jobs = n->jobs, .before = n->before, .cpu_us = n->cpu_us};
    tly_health_tell(pulse.health, n);
}

/* Out of the split at once; the rounds that have begun here are still summed.  A second signal ends it. */
static void tallyd_drain(struct tly_loop *loop, struct tly_member *m, struct tly_service *service)
{
    int signals = asked_to_stop;
    int64_t deadline = tly_now() + DRAIN_S * TLY_SEC;
    uint32_t before = m->roster.epoch;
    tly_loop_lock(loop);
    tly_member_goodbye(m);
    tly_loop_unlock(loop);
    tly_info("tallyd", "leaving job '%s'", m->identity.job);
    for (;;) {
        struct tly_service_facts facts;
        tly_service_facts(service, &facts);
        bool out = m->roster.epoch != before; /* no round begins here any more */
        if ((out && facts.rounds_open == 0) || m->left || m->state != TLY_MEMBER_RUNNING ||
            tly_now() > deadline || asked_to_stop > signals)
            break;
        tly_loop_turn(loop, 20);
    }
}

/* This tallyd was in the job and no longer is.  One that stood still, or was cut off, has missed the reason, so its sentence
 * begins with that.  EAGAIN: the coordinator has said that the job goes on without it. */
static int tallyd_explain_end(const struct tly_loop *loop, const struct tly_member *m)
{
    double paused = (double)tly_loop_pause(loop) / TLY_SEC, unheard = (double)m->unheard / TLY_SEC;
    const char *what = m->error == EAGAIN ? "is out" : "is out, or the job has ended meanwhile";
    char sentence[TLY_SENTENCE];
    snprintf(sentence, sizeof sentence, "%.700s", m->sentence);
    bool out = m->error == EAGAIN || m->error == ECONNRESET || m->error == ETIMEDOUT || m->error == EPIPE;
    if (out && paused > 0)
        return tly_fail(
            m->error, "stopped for %.1f s (SIGSTOP, swapped out, or no processor) and %s: joining again (%s)",
            paused, what, sentence);
    if (out && unheard > 0)
        return tly_fail(
            m->error, "cut off from the coordinator for %.1f s (a link was down?) and %s: joining again (%s)",
            unheard, what, sentence);
    return tly_fail(m->error, "%s", sentence);
}

static void tallyd_changed(void *service, const struct tly_roster *roster)
{
    tly_service_change(service, roster);
}

static int tallyd_serve(struct tly_loop *loop, struct tly_member *m, struct tly_service **service,
                        bool *served)
{
    struct sockaddr_storage at;
    struct tly_endpoints endpoints;
    int err = tly_member_service_address(m, &at);
    if (!err)
        err = tly_service_create(loop, m->params, &m->identity, &at, service);
    if (err)
        return err;
    pulse.service = *service;
    m->changed = tallyd_changed;
    m->user = *service;
    tly_service_endpoints(*service, &endpoints);
    err = tly_member_announce(m, &endpoints, tly_service_incarnation(*service), tly_service_memory(*service));
    if (!err)
        err = tly_service_begin(*service, &m->roster);
    if (!err)
        err = tly_member_begin(m);
    if (err)
        return err;
    *served = true;
    tly_info("tallyd", "serving job '%s': %u ranks on %u machines, %u tallyd", m->identity.job,
             m->roster.rank_count, m->roster.machine_count,
             m->roster.service_count - m->roster.machine_count);
    while (!asked_to_stop && !m->left && m->state == TLY_MEMBER_RUNNING)
        tly_loop_turn(loop, -1);
    if (asked_to_stop && m->state == TLY_MEMBER_RUNNING && !m->left)
        tallyd_drain(loop, m, *service);
    if (m->state == TLY_MEMBER_OVER)
        return tallyd_explain_end(loop, m);
    return asked_to_stop ? tly_fail(EINTR, "stopped by a signal") : 0;
}

/* One job from joining to its end.  patience_s: for its coordinator to answer; negative: for ever.  *served: it was in the job. */
static int tallyd_job(const struct tly_place *place, const struct tly_params *params, double patience_s,
                      bool *served)
{
    struct tly_loop loop;
    struct tly_member member;
    struct tly_service *service = NULL;
    int err = tly_loop_init(&loop);
    if (err)
        return err;
    tly_member_init(&member, &loop, place, params, false);
    member.cancelled = tallyd_cancelled;
    tallyd_begin_pulse(&loop, &member);
    err = tly_member_find(&member, patience_s);
    if (!err)
        err = tly_member_connect(&member, patience_s);
    if (!err)
        err = tallyd_serve(&loop, &member, &service, served);
    if (!err) {
        struct tly_service_facts facts;
        tly_service_facts(service, &facts);
        char summed[TLY_BYTES_TEXT], peak[TLY_BYTES_TEXT];
        tly_info(
            "tallyd",
            "job '%s' has ended: %s summed in %llu parts, at most %s of memory, %.1f s of processor time",
            member.identity.job, tly_bytes_text(facts.bytes_summed, summed),
            (unsigned long long)facts.parts_summed, tly_bytes_text(facts.bytes_peak, peak),
            (double)facts.cpu_us / 1e6);
    }
    char sentence[TLY_SENTENCE];
    snprintf(sentence, sizeof sentence, "%s", tly_error());
    tly_loop_lock(&loop);
    tallyd_end_pulse(&loop);
    tly_loop_unlock(&loop);
    tly_service_destroy(service, 0);
    tly_loop_lock(&loop);
    tly_member_finish(&member);
    tly_loop_unlock(&loop);
    tly_loop_finish(&loop);
    return err ? tly_fail(-err, "%s", sentence) : 0;
}

/* What came as text is not needed any more; of the environment it would show to whoever may read that of our user's
 * processes. */
static void tallyd_forget_secret(struct tly_params *params)
{
    char *text[] = {getenv("TALLY_SECRET"), params->secret};
    for (int i = 0; i < 2; i++)
        if (text[i])
            sodium_memzero(text[i], strlen(text[i]));
}

static void tallyd_pause_ms(int ms)
{
    struct timespec pause = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * TLY_MS};
    nanosleep(&pause, NULL);
}

/* A moment of a coordinator's main thread.  c: NULL while it does not listen. */
static void tallyd_stand_by(const struct tly_place *place, struct tly_coordinator *c, int ms)
{
    if (pulse.health) {
        struct tly_health_news *n = &pulse.news;
        struct tly_coordinator_facts f = {0};
        if (c)
            tly_coordinator_facts(c, &f);
        *n = (struct tly_health_news){.coordinating = c,
                                      .ranks = f.ranks,
                                      .machines = f.machines,
                                      .services = f.services,
                                      .epoch = f.epoch,
                                      .changed = f.changed,
                                      .slow = f.slow};
        snprintf(n->job, sizeof n->job, "%s", place->job);
        tly_health_tell(pulse.health, n);
    }
    tallyd_pause_ms(ms);
}

/* Where to listen: as rank 0 would (src/comm/comm.c, comm_coordinate). */
static int tallyd_find_own_address(const struct tly_place *place, struct sockaddr_storage *out)
{
    struct tly_addresses to;
    int err;
    while ((err = tly_place_resolve(place, &to)) == -EAGAIN && !asked_to_stop)
        tallyd_stand_by(place, NULL, 500);
    if (err)
        return err;
    if (!tly_place_take_own(place, &to, out))
        return tly_fail(EADDRNOTAVAIL, "%s (%s) is no address of this machine", place->coord_host,
                        place->coord_from);
    return 0;
}

/* A coordinator apart from rank 0, for job after job.  If it ends the job that runs goes on, and another may take over. */
static int tallyd_coordinate(struct tly_place *place, const struct tly_params *params, bool once)
{
    struct sockaddr_storage at;
    char text[80];
    if (!place->job[0])
        snprintf(place->job, sizeof place->job, "default");
    int err = tallyd_find_own_address(place, &at);
    if (err)
        return err;
    tly_address_text(&at, text, sizeof text);
    do {
        struct tly_coordinator *c;
        err = tly_coordinator_create(place, params, &at, -1, true, &c);
        for (int i = 0; err == -EADDRINUSE && i < 50 && !asked_to_stop; i++) {
            tallyd_stand_by(place, NULL, 100); /* the one before may be about to end */
            err = tly_coordinator_create(place, params, &at, -1, true, &c);
        }
        if (err)
            return err;
        tly_info("tallyd", "coordinating job '%s' at %s", place->job, text);
        while (!asked_to_stop && !tly_coordinator_is_over(c))
            tallyd_stand_by(place, c, 50);
        tly_coordinator_destroy(c, 0);
    } while (!asked_to_stop && !once);
    return 0;
}

static const struct option options[] = {
    {"coordinator", no_argument, NULL, 'C'},
    {"coord", required_argument, NULL, 'c'},
    {"once", no_argument, NULL, 'o'},
    {"memory", required_argument, NULL, 'm'},
    {"job", required_argument, NULL, 'j'},
    {"health", required_argument, NULL, 'H'},
    {"help", no_argument, NULL, 'h'},
    {"version", no_argument, NULL, 'v'},
    {0}};

/* What the command line says. */
struct tallyd_command {
    char text[3][512];
    const char *settings[4]; /* into text; NULL at the end */
    const char *health;
    bool once, coordinator;
};

/* An exit status, or -1: go on. */
static int tallyd_parse(int argc, char **argv, struct tallyd_command *c)
{
    int count = 0, o;
    while ((o = getopt_long(argc, argv, "hv", options, NULL)) != -1) {
        const char *name =
            o == 'c'   ? "TALLY_COORD"
            : o == 'm' ? "TALLY_MEMORY"
            : o == 'j' ? "TALLY_JOB"
                       : NULL;
        if (name && count < 3) {
            snprintf(c->text[count], sizeof c->text[count], "%s=%s", name, optarg);
            c->settings[count] = c->text[count];
            count++;
        } else if (o == 'H') {
            c->health = optarg;
        } else if (o == 'C') {
            c->coordinator = true;
        } else if (o == 'o') {
            c->once = true;
        } else if (o == 'v') {
            printf("tallyd %s\n", TALLY_VERSION);
            return 0;
        } else {
            tallyd_usage(o == 'h' ? stdout : stderr);
            return o == 'h' ? 0 : 2;
        }
    }
    if (optind == argc)
        return -1;
    fprintf(stderr, "tallyd: unexpected argument '%s'\n", argv[optind]);
    tallyd_usage(stderr);
    return 2;
}

/* Job after job, until it is asked to stop, or with `once` until one has ended.  The last one's error.
 *
 * With `once` a tallyd that was put out of its job comes again while there is a coordinator.  When none answers for as long as
 * a silent rank may live, the job has ended without it. */
static int tallyd_serve_jobs(struct tly_place *place, struct tly_params *params, bool once)
{
    int err;
    unsigned late = 0;
    bool was_in = false;
    char told[TLY_SENTENCE] = "";
    do {
        bool served = false;
        err = tallyd_job(place, params, once && was_in ? params->dead_timeout : -1, &served);
        if (once && (err == -ESHUTDOWN || (was_in && !served && err == -ETIMEDOUT))) {
            tly_info("tallyd", "the job has ended without this tallyd (%s)", tly_error());
            return 0;
        }
        was_in |= served;
        bool turned_away = err == -EAGAIN || err == -ESTALE; /* another job's turn */
        bool news = err && !asked_to_stop && strcmp(told, tly_error()) != 0;
        if (news && (!turned_away || late++ == 0))
            tly_warn("tallyd", "%s", tly_error());
        snprintf(told, sizeof told, "%s", err ? tly_error() : ""); /* what goes on is said once */
        if (!turned_away)
            late = 0;
        if (err == -EACCES || err == -EPROTO || err == -EINVAL)
            break; /* trying again would not help */
        if (err && !asked_to_stop && (!once || turned_away)) {
            struct timespec pause = {.tv_nsec = 500 * TLY_MS};
            nanosleep(&pause, NULL);
        }
    } while (!asked_to_stop && (!once || err == -EAGAIN || err == -ESTALE));
    return asked_to_stop ? 0 : err;
}

int main(int argc, char **argv)
{
    struct tallyd_command c = {0};
    struct tly_params params;
    struct tly_place place;
    char why[TLY_SENTENCE];
    int status = tallyd_parse(argc, argv, &c);
    if (status >= 0)
        return status;
    if (sodium_init() < 0 || tly_params_load(&params, c.settings, why, sizeof why) != 0) {
        fprintf(stderr, "tallyd: %s\n", why);
        return 2;
    }
    if (tly_log_set_level(params.log) != 0 || tly_place_find(&place, &params, false) != 0) {
        fprintf(stderr, "tallyd: %s\n", tly_error());
        return 2;
    }
    tallyd_forget_secret(&params);
    tly_thread_count_me();
    if (c.health && tly_health_start(c.health, &pulse.health) != 0) {
        fprintf(stderr, "tallyd: --health: %s\n", tly_error());
        return 2;
    }
    struct sigaction act = {.sa_handler = tallyd_on_signal};
    sigaction(SIGTERM, &act, NULL);
    sigaction(SIGINT, &act, NULL);
    signal(SIGPIPE, SIG_IGN);
    int err = c.coordinator ? tallyd_coordinate(&place, &params, c.once)
                            : tallyd_serve_jobs(&place, &params, c.once);
    if (err && c.coordinator)
        fprintf(stderr, "tallyd: %s\n", tly_error());
    tly_health_stop(pulse.health);
    tly_params_finish(&params);
    return err ? 1 : 0;
}
