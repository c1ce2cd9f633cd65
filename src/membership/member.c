/* member.c - a rank or a tallyd in its job: its connection to the coordinator, what it hears there and what it says.
 *
 * The states go in one direction (member.h).  connect.c makes the first connection; a coordinator in a process of its own may
 * go and come back, and is then dialled once a tick.  Callbacks run in the loop; other calls take its lock or need it, as
 * member.h says. */
#include "membership/member.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "topo/card.h"
#include "transport/address.h"

enum { RETRY_MS = 500 };

static void member_post(struct tly_member *m, int type, uint16_t flags, const struct tly_writer *w)
{
    struct tly_frame f = {.type = (uint8_t)type, .flags = flags};
    if (w && w->failed)
        tly_outbox_lose(&m->outbox);
    else
        tly_outbox_post(&m->outbox, &f, w ? w->data : NULL, w ? w->len : 0, NULL);
}

static bool member_next(void *user, struct tly_link *link, struct tly_outgoing *out)
{
    struct tly_member *m = user;
    return tly_outbox_next(&m->outbox, out, NULL);
}

static void member_end(struct tly_member *m, int err, const char *sentence)
{
    if (m->state == TLY_MEMBER_OVER)
        return;
    m->state = TLY_MEMBER_OVER;
    m->error = err;
    snprintf(m->sentence, sizeof m->sentence, "%s", sentence);
    if (m->over)
        m->over(m->user, err, m->sentence);
}

static void member_say_measured(void *user, const struct tly_measure *x)
{
    struct tly_member *m = user;
    struct tly_writer w = {0};
    tly_measure_write(&w, x);
    member_post(m, TLY_MEASURE, 0, &w);
    free(w.data);
}

static int member_measure(struct tly_member *m, struct tly_reader *r, const char **why)
{
    struct tly_measure x;
    if (tly_measure_read(r, &x) != 0) {
        *why = "a measurement that cannot be read";
        return -EPROTO;
    }
    if (m->state != TLY_MEMBER_KNOWN)
        return 0;
    if (x.step == TLY_MEASURE_MEET)
        tly_streams_meet(&m->streams, &m->identity, &x);
    else if (x.step == TLY_MEASURE_GO)
        tly_streams_go(&m->streams, &x);
    return 0;
}

static void member_say_joined(struct tly_member *m)
{
    struct tly_writer w = {0};
    tly_write32(&w, m->roster.joins);
    tly_write32(&w, m->drained);
    member_post(m, TLY_JOINED, 0, &w);
    free(w.data);
}

void tly_member_join(struct tly_member *m, bool drained)
{
    m->joining = true;
    m->drained = drained;
    if (m->link && !m->away) /* else member_resume() says it */
        member_say_joined(m);
}

/* A coordinator is there again: it knows nothing but what the members tell it. */
static void member_resume(struct tly_member *m)
{
    struct tly_writer w = {0};
    m->away = false;
    m->resumed = true;
    m->slow = (struct tly_slow){0};
    tly_member_write(&w, &m->info);
    tly_write64(&w, m->identity.incarnation);
    tly_write32(&w, m->committed);
    tly_roster_write(&w, &m->roster);
    member_post(m, TLY_ROSTER, TLY_RESUMED, &w);
    free(w.data);
    if (m->joining)
        member_say_joined(m);
    if (m->leaving)
        member_post(m, TLY_GOODBYE, 0, NULL);
    tly_log(m->identity.role == TLY_ROLE_RANK && m->identity.rank ? TALLY_LOG_DEBUG : TALLY_LOG_WARNING,
            "join", "the coordinator at %s is back: services come and go again", m->coordinator);
}

static void member_opened(void *user, struct tly_link *l)
{
    struct tly_member *m = user;
    const struct tly_identity *peer = tly_link_peer(l);
    if (m->away) {
        member_resume(m);
        return;
    }
    m->identity.incarnation = peer->incarnation;
    m->holder = peer->rank;
    if (!m->identity.job[0])
        memcpy(m->identity.job, peer->job, sizeof peer->job);
    m->state = TLY_MEMBER_KNOWN;
    tly_link_address(l, false, &m->here);
}

static int member_header(void *user, struct tly_link *l, const struct tly_frame *f, struct tly_landing *land,
                         const char **why)
{
    if (!tly_frame_goes(f->type, TLY_COORDINATOR_TO_MEMBER)) {
        *why = "a message that a member does not take";
        return -EPROTO;
    }
    land->control = true;
    return 0;
}

static int member_take_roster(struct tly_member *m, struct tly_reader *r, const char **why)
{
    struct tly_roster roster;
    if (tly_roster_read(r, &roster) != 0) {
        *why = "a roster that cannot be read";
        return -EPROTO;
    }
    tly_roster_finish(&m->roster);
    m->roster = roster;
    return 0;
}

/* The news: who holds the job up, what cards carry, and the last change of the split.  Only messages and gauges use them, so
 * the job goes on if they cannot be read. */
static void member_take_news(struct tly_member *m, struct tly_reader *r)
{
    struct tly_currents current;
    struct tly_change change;
    if (tly_slow_read(r, &m->slow) != 0 || tly_currents_read(r, &current) != 0)
        return;
    tly_currents_finish(&m->current);
    m->current = current;
    if (tly_change_read(r, &change) != 0 || !change.at ||
        (change.at == m->change.at && strcmp(change.what, m->change.what) == 0))
        return; /* a coordinator that has taken the job over knows of no change yet */
    m->change = change;
    if (m->holder == TLY_NO_RANK && m->identity.rank == 0) /* else it is in this log already */
        tly_info("join", "%s", change.what);
}

/* The first one says "go"; a later one has the rounds begun in older epochs, then (LAST) the new roster. */
static int member_commit(struct tly_member *m, const struct tly_frame *f, struct tly_reader *r,
                         const char **why)
{
    if (m->state == TLY_MEMBER_INVITED) {
        m->state = TLY_MEMBER_RUNNING;
        m->committed = m->roster.epoch;
    }
    if (!f->payload)
        return 0;
    uint32_t count = tly_read32(r);
    for (uint32_t i = 0; i < count && !r->failed; i++) {
        struct tly_begun b = {.key = tly_read64(r)};
        b.round = tly_read32(r);
        b.epoch = tly_read32(r);
        if (!r->failed && m->promised)
            m->promised(m->user, &b);
    }
    if (!(f->flags & TLY_LAST))
        return 0;
    int err = member_take_roster(m, r, why);
    if (err)
        return err;
    m->committed = m->roster.epoch;
    if (m->changed)
        m->changed(m->user, &m->roster);
    m->resumed = false;
    return 0;
}

/* MARK: joins will never be complete; LAST: one is; else: a rank has joined, and others have not. */
static void member_on_joined(struct tly_member *m, const struct tly_frame *f, struct tly_reader *r)
{
    uint32_t joins = tly_read32(r), rank = tly_read32(r);
    char sentence[TLY_SENTENCE] = "";
    if (f->flags & TLY_MARK)
        tly_read_text(r, sentence, sizeof sentence);
    if (r->failed || rank >= m->roster.rank_count)
        return;
    if (f->flags & TLY_MARK) {
        if (m->joining && m->joined)
            m->joined(m->user, joins, rank, ESHUTDOWN, sentence);
    } else if (!(f->flags & TLY_LAST)) {
        if (joins != m->roster.joins)
            return;
        tly_roster_join(&m->roster, rank);
        if (rank == m->identity.rank && m->joining && m->placed)
            m->placed(m->user);
    } else if (joins > m->roster.joins) {
        tly_roster_joined_all(&m->roster, joins, rank);
        m->joining = m->drained = false;
        if (m->joined)
            m->joined(m->user, joins, rank, 0, NULL);
    }
}

/* Does the process behind this door share the machine with us?  name "": there is no door to knock at. */
static void member_prove(struct tly_member *m, struct tly_reader *r)
{
    char name[64];
    struct tly_writer w = {0};
    uint64_t nonce = 0;
    tly_read_text(r, name, sizeof name);
    if (name[0] && tly_proof_knock(name, &nonce) != 0)
        tly_warn("join", "a rank with the same TALLY_HOST_ID or boot id cannot be reached inside this "
                         "machine: it counts as another machine's");
    tly_write64(&w, nonce);
    member_post(m, TLY_ROSTER, TLY_REQUEST, &w);
    free(w.data);
}

/* With a number: that rank has left, and others have not.  Without: all have. */
static void member_on_goodbye(struct tly_member *m, const struct tly_frame *f, struct tly_reader *r)
{
    if (f->payload) {
        uint32_t rank = tly_read32(r);
        if (!r->failed && rank < m->roster.rank_count)
            m->roster.ranks[rank].left = 1;
        return;
    }
    m->left = true;
    if (m->state < TLY_MEMBER_RUNNING) /* it waited to be invited */
        member_end(m, ESHUTDOWN, "the job has ended without this tallyd");
    if (m->goodbye)
        m->goodbye(m->user);
}

static int member_frame(void *user, struct tly_link *l, const struct tly_frame *f, void *data,
                        const char **why)
{
    struct tly_member *m = user;
    struct tly_reader r = {data, f->payload, false};
    switch (f->type) {
    case TLY_ROSTER:
        member_prove(m, &r);
        return 0;
    case TLY_MEASURE:
        return member_measure(m, &r, why);
    case TLY_INVITE:
        tly_streams_close(&m->streams);
        if (member_take_roster(m, &r, why) != 0)
            return -EPROTO;
        if (m->state == TLY_MEMBER_RUNNING && m->invited)
            m->invited(m->user);
        else if (m->state < TLY_MEMBER_INVITED)
            m->state = TLY_MEMBER_INVITED;
        return 0;
    case TLY_PREPARE: {
        struct tly_roster next;
        if (tly_roster_read(&r, &next) != 0) {
            *why = "a roster that cannot be read";
            return -EPROTO;
        }
        if (m->prepare)
            m->prepare(m->user, &next);
        tly_roster_finish(&next);
        return 0;
    }
    case TLY_COMMIT:
        return member_commit(m, f, &r, why);
    case TLY_VERDICT: {
        char sentence[TLY_SENTENCE];
        int err = (int)tly_read32(&r);
        tly_read_text(&r, sentence, sizeof sentence);
        m->unheard = tly_link_gap(l);
        member_end(m, err > 0 ? err : ECONNRESET, sentence);
        return 0;
    }
    case TLY_GOODBYE:
        member_on_goodbye(m, f, &r);
        return 0;
    case TLY_JOINED:
        member_on_joined(m, f, &r);
        return 0;
    case TLY_PACE:
        member_take_news(m, &r);
        return 0;
    default:
        return 0;
    }
}

/* "the coordinator at 10.0.0.1:29777"; inside a rank its death is that rank's. */
static void member_name_coordinator(const struct tly_member *m, char *out, size_t len)
{
    const struct tly_roster *r = &m->roster;
    const char *host = m->holder < r->rank_count ? r->services[r->ranks[m->holder].machine].host : "";
    if (m->holder == TLY_NO_RANK)
        snprintf(out, len, "the coordinator at %s", m->coordinator);
    else
        snprintf(out, len, "rank %u%s%s, which holds the coordinator at %s,", m->holder,
                 host[0] ? " on " : "", host, m->coordinator);
}

static void member_closed(void *user, struct tly_link *l, int err, const char *why)
{
    struct tly_member *m = user;
    int64_t unheard = tly_link_gap(m->link);
    tly_link_destroy(m->link);
    m->link = NULL;
    if (m->left || m->state == TLY_MEMBER_OVER)
        return;
    m->unheard = unheard;
    char sentence[TLY_SENTENCE], name[512];
    /* What it decided holds; without it services neither come nor go, and nobody is declared dead. */
    if (m->state == TLY_MEMBER_RUNNING && m->roster.standalone && err != EACCES) {
        if (!m->away && !m->identity.rank)
            tly_warn("join", "the coordinator at %s is gone (%s): the job goes on, and looks for it",
                     m->coordinator, why);
        m->away = true;
        m->retry_at = m->loop->awake + RETRY_MS * TLY_MS;
        tly_outbox_finish(&m->outbox, NULL, NULL);
        return;
    }
    m->lost = err == ECONNRESET;
    member_name_coordinator(m, name, sizeof name);
    if (m->state == TLY_MEMBER_CONNECTING)
        snprintf(sentence, sizeof sentence, "%s", why);
    else
        snprintf(sentence, sizeof sentence, "%s has died: %s", name, why);
    member_end(m, err, sentence);
}

static const struct tly_link_user calls = {.opened = member_opened,
                                           .header = member_header,
                                           .frame = member_frame,
                                           .next = member_next,
                                           .closed = member_closed};

int tly_member_dial(struct tly_member *m, const struct tly_identity *as)
{
    struct tly_link_config c = {.user_calls = &calls,
                                .user = m,
                                .identity = *as,
                                .peer_name = "coordinator",
                                .silence_ns = (int64_t)(m->params->dead_timeout * (double)TLY_SEC),
                                .checksum = m->params->checksum};
    struct tly_endpoints to;
    tly_media_at(&m->at, &to);
    return tly_link_dial(m->loop, &to, &c, &m->link);
}

static void member_tick(struct tly_hook *h)
{
    struct tly_member *m = tly_list_entry(h, struct tly_member, hook);
    if (!m->away || m->link || m->loop->awake < m->retry_at)
        return;
    struct tly_identity as = m->identity;
    as.incarnation = 0; /* it does not know the job's yet */
    m->retry_at = m->loop->awake + RETRY_MS * TLY_MS;
    tly_member_dial(m, &as);
}

void tly_member_init(struct tly_member *m, struct tly_loop *loop, const struct tly_place *place,
                     const struct tly_params *params, bool is_rank)
{
    memset(m, 0, sizeof *m);
    m->loop = loop;
    m->place = place;
    m->params = params;
    m->identity.role = is_rank ? TLY_ROLE_RANK : TLY_ROLE_TALLYD;
    m->identity.rank = place->rank;
    memcpy(m->identity.secret, place->secret, sizeof place->secret);
    memcpy(m->identity.job, place->job, sizeof place->job);
    tly_outbox_init(&m->outbox);
    tly_list_init(&m->hook.node);
    m->hook.tick = member_tick;
    m->streams = (struct tly_streams){.loop = loop, .say = member_say_measured, .user = m};
}

void tly_member_finish(struct tly_member *m)
{
    if (!m || !m->loop)
        return;
    m->over = NULL;
    tly_loop_unhook(m->loop, &m->hook);
    if (m->link)
        tly_link_flush(m->link); /* a complaint that waits is the others' best explanation */
    tly_link_destroy(m->link);
    tly_streams_close(&m->streams);
    tly_proof_close(&m->door);
    tly_currents_finish(&m->current);
    tly_roster_finish(&m->roster);
    tly_outbox_finish(&m->outbox, NULL, NULL);
    m->loop = NULL;
}

int tly_member_wait(struct tly_member *m, enum tly_member_state state, int64_t deadline)
{
    while (m->state < state) {
        if (m->cancelled && m->cancelled(m->user))
            return -EINTR;
        if (deadline >= 0 && tly_now() > deadline)
            return -ETIMEDOUT;
        tly_loop_turn(m->loop, 100);
    }
    return m->state == TLY_MEMBER_OVER ? -m->error : 0;
}

static int64_t member_entry_deadline(const struct tly_member *m)
{
    /* The coordinator ends the wait and says who is missing; this is only in case it does not. */
    return m->identity.role == TLY_ROLE_TALLYD
               ? -1
               : tly_now() +
                     (int64_t)((m->params->join_timeout + m->params->servers_timeout + 60) * (double)TLY_SEC);
}

static int member_entered(struct tly_member *m, int err, const char *what)
{
    if (err == -EINTR)
        return tly_fail(EINTR, "interrupted while joining");
    if (err == -ETIMEDOUT && m->state != TLY_MEMBER_OVER)
        return tly_fail(ETIMEDOUT, "%s: no word from the coordinator at %s", what, m->coordinator);
    return err ? tly_fail(-err, "%s", m->sentence) : 0;
}

int tly_member_announce(struct tly_member *m, const struct tly_endpoints *service, uint64_t incarnation,
                        uint64_t memory)
{
    struct sockaddr_storage a;
    uint64_t card = tly_endpoints_address(service, &a) ? tly_card_rate(&a) : 0;
    struct tly_member_info info = {
        .role = m->identity.role,
        .rank = m->place->rank,
        .size = m->place->size,
        .restart = (uint32_t)(m->place->restart + 1),
        .pid = (uint32_t)getpid(),
        .at = *service,
        .netns = m->place->netns,
        .digest = tly_params_digest(m->params),
        .incarnation = incarnation,
        .bandwidth = m->params->bandwidth ? m->params->bandwidth : card,
        .sum_rate = m->params->sum_rate,
        .memory = memory};
    snprintf(info.host, sizeof info.host, "%s", m->place->host);
    snprintf(info.host_id, sizeof info.host_id, "%s", m->place->host_id);
    tly_params_agreed_text(m->params, info.settings, sizeof info.settings);
    tly_loop_lock(m->loop);
    int err = m->identity.role == TLY_ROLE_RANK ? tly_proof_open(&m->door, m->loop) : 0;
    if (!err) {
        struct tly_writer w = {0};
        snprintf(info.door, sizeof info.door, "%s", m->door.name);
        info.nonce = m->door.nonce;
        m->info = info;
        tly_member_write(&w, &info);
        member_post(m, TLY_ROSTER, 0, &w);
        free(w.data);
    }
    tly_loop_unlock(m->loop);
    if (err)
        return err;
    return member_entered(m, tly_member_wait(m, TLY_MEMBER_INVITED, member_entry_deadline(m)),
                          "waiting for the other ranks");
}

int tly_member_begin(struct tly_member *m)
{
    tly_loop_lock(m->loop);
    member_post(m, TLY_BEGUN, 0, NULL);
    tly_loop_unlock(m->loop);
    int err = member_entered(m, tly_member_wait(m, TLY_MEMBER_RUNNING, member_entry_deadline(m)),
                             "waiting for all connections");
    tly_loop_lock(m->loop);
    tly_proof_close(&m->door);
    if (!err && m->roster.standalone)
        tly_loop_hook(m->loop, &m->hook);
    tly_loop_unlock(m->loop);
    return err;
}

void tly_member_begun(struct tly_member *m, uint32_t epoch, const struct tly_begun *rounds, size_t count,
                      size_t ended)
{
    do {
        struct tly_writer w = {0};
        uint32_t n = count < TLY_BEGUN_ROUNDS ? (uint32_t)count : TLY_BEGUN_ROUNDS;
        size_t under_way = count - ended;
        tly_write32(&w, epoch);
        tly_write32(&w, n);
        tly_write32(&w, n > under_way ? n - (uint32_t)under_way : 0);
        for (uint32_t i = 0; i < n; i++) {
            tly_write64(&w, rounds[i].key);
            tly_write32(&w, rounds[i].round);
            tly_write32(&w, rounds[i].epoch);
        }
        rounds += n;
        count -= n;
        ended = ended < count ? ended : count;
        if (m->link)
            member_post(m, TLY_BEGUN, count ? 0 : TLY_LAST, &w);
        free(w.data);
    } while (count);
}

void tly_member_goodbye(struct tly_member *m)
{
    m->leaving = true;
    if (m->link && !m->away) /* else member_resume() says it */
        member_post(m, TLY_GOODBYE, 0, NULL);
}

void tly_member_tell_traffic(struct tly_member *m, const struct tly_traffic *t)
{
    struct tly_writer w = {0};
    tly_traffic_write(&w, t);
    if (m->link && !m->away && w.len <= TLY_MAX_CONTROL)
        member_post(m, TLY_PACE, 0, &w);
    free(w.data);
}

void tly_member_tell_quiet(struct tly_member *m, uint32_t epochs)
{
    struct tly_writer w = {0};
    tly_write32(&w, epochs);
    if (m->link && !m->away && !w.failed)
        member_post(m, TLY_PACE, TLY_QUIET, &w);
    free(w.data);
}

void tly_member_tell_steps(struct tly_member *m, const struct tly_steps *t)
{
    struct tly_writer w = {0};
    tly_steps_write(&w, t);
    if (m->link && !m->away)
        member_post(m, TLY_PACE, TLY_MARK, &w);
    free(w.data);
}

static void member_complain(struct tly_member *m, uint16_t flags, int err, const char *sentence,
                            uint32_t service)
{
    struct tly_writer w = {0};
    char text[TLY_SENTENCE - 256];
    snprintf(text, sizeof text, "%s", sentence);
    tly_write32(&w, (uint32_t)err);
    tly_write_text(&w, text);
    tly_write64(&w, service == TLY_NO_SERVICE ? 0 : m->roster.services[service].incarnation);
    if (m->link)
        member_post(m, TLY_COMPLAIN, flags, &w);
    free(w.data);
}

void tly_member_complain(struct tly_member *m, int err, const char *sentence)
{
    member_complain(m, 0, err, sentence, TLY_NO_SERVICE);
}

void tly_member_accuse(struct tly_member *m, uint32_t index, const char *sentence)
{
    member_complain(m, 0, 0, sentence, index);
}

void tly_member_abort(struct tly_member *m, const char *reason)
{
    member_complain(m, TLY_MARK, ECONNRESET, reason, TLY_NO_SERVICE);
    if (m->link)
        tly_link_flush(m->link);
}
