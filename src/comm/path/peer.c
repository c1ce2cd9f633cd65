/* peer.c - the connection to one summation service: admitted parts go out, results land in place. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/list.h"
#include "base/log.h"
#include "comm/comm.h"
#include "comm/epoch/epoch.h"
#include "comm/epoch/report.h"
#include "comm/epoch/traffic.h"
#include "comm/op/active.h"
#include "comm/op/joining.h"
#include "comm/op/op.h"
#include "comm/op/part.h"
#include "comm/op/tensor.h"
#include "comm/path/doubt.h"
#include "comm/path/keep.h"
#include "comm/path/moves.h"
#include "comm/path/peer.h"
#include "comm/path/queue.h"
#include "membership/member.h"
#include "membership/roster.h"
#include "sched/sched.h"
#include "trace/trace.h"
#include "transport/address.h"
#include "transport/outbox.h"
#include "transport/transport.h"
#include "wire/frame.h"
#include "wire/hello.h"
#include "wire/pack.h"

enum {
    EXPLAIN_MS = 1500,
    NEWS_PARTS = 4, /* received and not yet told to the service; it needs that for its memory alone */
    NEWS_MS = 20,
    NEWS_PUSH_MS = 50,           /* the same where a push will tell */
    TALLYD_SILENCE_S = 5,        /* without a sign of life, whatever the reason */
    TALLYD_UNANSWERED_MS = 1500, /* ... while operations wait, asked for one, and not for our own fault */
    REACH_S =
        4, /* for the first answer of a tallyd: two lost packets of the connection's beginning cost 3 s */
    RETRY_MS = 200,     /* to connect again */
    GIVEN_UP_MS = 2000, /* ... once it has been said that it cannot be reached */
    MOST_LOSSES = 8,    /* of one connection within FORGIVEN_S: more is no accident */
    FORGIVEN_S = 10,
    /* Bytes: some ten thousand sentences; less, by default, than another service accepts if they go there. */
    MOST_UNASKED = 8 << 20,
};

/* --- out ----------------------------------------------------------------------------------------- */

static void peer_send_mark(struct tly_part *p, struct tly_outgoing *out)
{
    struct tly_writer w = {0};
    tly_write_text(&w, p->op->reason);
    out->frame.flags = TLY_MARK | TLY_LAST | (p->op->mark ? 0 : TLY_QUIET);
    out->frame.payload = (uint32_t)w.len;
    out->payload = out->owned = w.data;
}

/* What has been received is told by the next push, if there will be one; at a step's end at once. */
static void peer_pace(struct tly_peer *peer, struct tly_link *link)
{
    tly_link_set_pace(link, NEWS_PARTS * peer->comm->epoch->part_bytes,
                      tly_sched_waits(&peer->queue) ? NEWS_PUSH_MS : NEWS_MS);
}

static bool peer_next(void *user, struct tly_link *link, struct tly_outgoing *out)
{
    struct tly_peer *peer = user;
    if (tly_outbox_next(&peer->outbox, out, NULL))
        return true;
    tly_queue_admit(peer->comm);
    struct tly_part *p = peer->first;
    if (!p) {
        peer_pace(peer, link);
        return false;
    }
    *out = (struct tly_outgoing){0};
    if (p->sent == p->start)
        tly_part_stamp(p, TLY_AT_FIRST);
    tly_peer_head(p, &out->frame);
    uint32_t done = p->length;
    if (p->mark) {
        peer_send_mark(p, out);
    } else if (!p->input || p->offer) {
        out->frame.flags = p->offer ? TLY_OFFER : TLY_REQUEST;
        tly_part_stamp(p, TLY_AT_SENT);
    } else {
        uint32_t left = p->length - p->sent;
        uint32_t n = left < TLY_MAX_FRAGMENT ? left : TLY_MAX_FRAGMENT;
        out->frame.offset = p->sent;
        out->frame.payload = n;
        out->frame.flags = (n == left ? TLY_LAST : 0) | (p->quiet ? TLY_QUIET : 0);
        if (p->start && p->sent == p->start)
            out->frame.flags |= TLY_RESUMED;
        out->payload = p->input + p->sent;
        out->token = p;
        out->stays = out->whole = true;
        p->frames++;
        done = p->sent + n;
    }
    if (tly_wait_is_patient(&p->op->wait))
        out->frame.flags |= TLY_PATIENT;
    p->sent = done;
    p->known = true;
    if (done == p->length) {
        peer->first = p->next;
        if (!peer->first)
            peer->last = NULL;
        tly_part_change(p, PART_SENT); /* a mark lands with the verdict that it brings */
    }
    return true;
}

static void peer_sent(void *user, struct tly_link *link, void *token)
{
    struct tly_part *p = token;
    if (--p->frames == 0 && p->state == PART_SENT)
        tly_part_stamp(p, TLY_AT_SENT);
}

/* --- in ------------------------------------------------------------------------------------------ */

static bool peer_awaits_result(const struct tly_part *p)
{
    switch (p->state) {
    case PART_QUEUED: /* again: what was had before may come meanwhile */
    case PART_ADMITTED:
    case PART_SENT:
    case PART_SAID:
        return p->known;
    default:
        return false;
    }
}

/* Then what has not landed yet is the input still, and must stay whole: it may have to be given again. */
static bool peer_lands_over_input(const struct tly_part *p)
{
    return p->input && p->landing < p->input + p->length && p->input < p->landing + p->result_length;
}

static int peer_header(void *user, struct tly_link *link, const struct tly_frame *f, struct tly_landing *land,
                       const char **why)
{
    struct tly_peer *peer = user;
    if (!tly_frame_goes(f->type, TLY_SERVICE_TO_RANK)) {
        *why = "a message that a rank does not take";
        return -EPROTO;
    }
    if (f->type == TLY_RESULT) {
        struct tly_part *p = tly_op_find_part(peer, f);
        if (!p || !peer_awaits_result(p))
            return 0; /* of something that has failed meanwhile, or that has landed before */
        if (p->op->call->apart && !tly_moves_is_told(p)) {
            *why = "values of a shared tensor without their state";
            return -EPROTO;
        }
        bool ends = f->offset + f->payload == f->length;
        if (f->length != p->result_length || f->offset != p->landed || ends != !!(f->flags & TLY_LAST)) {
            *why = "a result that does not fit its part";
            return -EPROTO;
        }
        if (f->offset == 0)
            tly_part_stamp(p, TLY_AT_RESULT_FIRST);
        if (f->payload)
            *land = (struct tly_landing){.to = p->landing + f->offset,
                                         .token = p,
                                         .in_blocks = peer_lands_over_input(p)};
        return 0;
    }
    land->control = true;
    return 0;
}

/* Four results are told, however long they are. */
static uint32_t peer_news(const struct tly_peer *peer, uint32_t length)
{
    uint32_t unit = peer->comm->epoch->part_bytes;
    return length < unit ? length : unit;
}

static void peer_count_received(struct tly_peer *peer, uint32_t bytes)
{
    struct tly_counts counts = {.received = ++peer->received};
    if (peer->link) /* what has come may just have failed the communicator */
        tly_link_set_counts(peer->link, &counts, bytes);
}

/* The ranks that only give keep their input until this root has the result, and their operations wait for that news. */
static bool peer_givers_wait(struct tly_peer *peer, const struct tly_part *p)
{
    return p && p->op->call->reduces && p->op->call->root && peer->mortal && !tly_sched_waits(&peer->queue);
}

/* An operation has all of its results, and waits only to hear that the other ranks have them, too.  No result will bring that
 * news, so the services are told what has come, and asked. */
static void peer_ask_stable(tally_comm *c)
{
    static const struct tly_frame question = {.type = TLY_COUNTS, .flags = TLY_REQUEST};
    for (int i = 0; i < c->services; i++) {
        struct tly_peer *peer = &c->peers[i];
        if (peer->mortal && peer->open && !tly_list_empty(&peer->kept))
            tly_peer_post(peer, &question, NULL, 0);
    }
}

static void peer_on_result(struct tly_peer *peer, const struct tly_frame *f, const void *data)
{
    struct tly_part *p = tly_op_find_part(peer, f);
    bool last = f->flags & TLY_LAST, urgent = peer_givers_wait(peer, p), ask = false;
    if (p && peer_awaits_result(p) && (data || f->payload == 0)) {
        p->landed += f->payload;
        if (last) {
            tly_part_stamp(p, TLY_AT_LANDED);
            p = tly_op_landed(peer->comm, p);
            bool all = p && tly_progress_missing(&p->op->progress) == 0;
            ask =
                all && p->op->bytes > peer->comm->params.retain_bytes && tly_progress_waits(&p->op->progress);
            if (p && peer->mortal)
                ask |= tly_keep_part(peer, p) && all && !p->quiet;
            else if (p)
                tly_op_settled(peer->comm, p);
        }
    } else if (last && !tly_doubt_confirmed(peer, f, true) && peer->mortal) {
        tly_keep_unasked(peer, f);
    }
    if (last)
        peer_count_received(peer, urgent ? UINT32_MAX : peer_news(peer, f->length));
    if (ask)
        peer_ask_stable(peer->comm);
}

static struct tally_op *peer_find_mark(tally_comm *c, const struct tly_frame *f)
{
    for (struct tally_op *op = tly_op_oldest(&c->active); op; op = tly_op_after(&c->active, op))
        if (op->mark && op->key == f->key && op->round == f->round)
            return op;
    return NULL;
}

/* The part that a verdict is about: home's is about part 0, and only shared tensors get one from another service. */
static const struct tly_part *peer_judged(const struct tally_op *op, const struct tly_frame *f)
{
    return &op->parts[op->call->kept && f->part < op->part_count ? f->part : 0];
}

static void peer_on_verdict(struct tly_peer *peer, const struct tly_frame *f, const void *data)
{
    struct tly_reader r = {data, f->payload, false};
    char sentence[TLY_SENTENCE];
    int err = (int)tly_read32(&r);
    tly_read_text(&r, sentence, sizeof sentence);
    struct tally_op *op = tly_op_find(peer->comm, f), *mark = op ? NULL : peer_find_mark(peer->comm, f);
    if (op && op->call->apart && !tly_op_find_part(peer, f))
        op = NULL; /* of a service that the part has left */
    bool kept = tly_doubt_confirmed(peer, f, true) || !peer->mortal;
    bool passed_on = mark || (op && !op->call->apart); /* nobody else waits for an operation of one rank */
    if (!kept && passed_on)
        tly_keep_verdict(peer, peer_judged(op ? op : mark, f), err, sentence);
    else if (!kept)
        tly_keep_unasked(peer, f);
    if (op || mark)
        tly_epoch_decided(peer->comm, op ? op : mark);
    if (op)
        tly_op_end(peer->comm, op, err > 0 ? err : EINVAL, sentence);
    else if (mark)
        tly_op_end(peer->comm, mark, 0, sentence); /* as it was meant */
    peer_count_received(peer, f->payload);
}

static void peer_tell_spec(struct tly_peer *peer, const struct tly_frame *f)
{
    char text[400] = "no such operation";
    struct tally_op *op = tly_op_find(peer->comm, f);
    if (op && op->mark)
        snprintf(text, sizeof text, "refuses: %s", op->reason);
    else if (op)
        tly_spec_text(op, text, sizeof text);
    struct tly_writer w = {0};
    tly_write_text(&w, text);
    struct tly_frame answer = *f;
    answer.flags = 0;
    tly_peer_post(peer, &answer, w.data, w.len);
    free(w.data);
}

/* Home says who is late. */
static void peer_on_late(struct tly_peer *peer, const struct tly_frame *f, const void *data)
{
    struct tly_reader r = {data, f->payload, false};
    struct tally_op *op = tly_op_find(peer->comm, f);
    double seconds = (double)tly_read64(&r) / TLY_SEC;
    if (!op)
        return;
    char ranks[TLY_LATE_TEXT];
    tly_read_text(&r, ranks, sizeof ranks);
    tly_op_set_late(op, ranks);
    char title[TLY_TITLE];
    if (f->flags & TLY_MARK)
        tly_warn("comm", "%s has waited %.0f s for rank %s", tly_op_title(op, title), seconds, ranks);
}

static void peer_on_report(struct tly_peer *peer, const struct tly_frame *f, const void *data)
{
    struct tly_reader r = {data, f->payload, false};
    tally_comm *c = peer->comm;
    for (size_t i = 0; i < sizeof peer->report / sizeof *peer->report; i++)
        peer->report[i] = tly_read64(&r);
    tly_report_came(&c->reports, &peer->reported);
}

static void peer_on_pace(struct tly_peer *peer, const struct tly_frame *f, const void *data)
{
    struct tly_reader r = {data, f->payload, false};
    uint64_t sending_us = tly_read64(&r);
    if (!r.failed)
        tly_traffic_answered(peer, sending_us);
}

/* Results that a service may have asked for are less than this. */
static uint64_t peer_largest_window(const struct tly_roster *r)
{
    uint64_t now = tly_roster_window((int)tly_roster_active(r), r->part_bytes, UINT64_MAX, 0);
    return now > r->window_bytes ? now : r->window_bytes;
}

static int peer_frame(void *user, struct tly_link *link, const struct tly_frame *f, void *data,
                      const char **why)
{
    struct tly_peer *peer = user;
    tally_comm *c = peer->comm;
    tly_queue_accepted(peer, tly_count_extend(peer->accepted, f->accepted));
    tly_sched_grant(&peer->queue, tly_count_extend(peer->queue.granted, f->granted));
    if (peer->mortal)
        tly_keep_stable(peer, tly_count_extend(peer->stable, f->stable));
    if (peer->unasked > MOST_UNASKED) {
        peer->dialling.losses = MOST_LOSSES; /* it would go on so */
        *why = "it keeps sending results that nobody has asked for";
        return -EPROTO;
    }
    bool asks = f->type == TLY_SPEC || f->type == TLY_AGAIN;
    if (peer->mortal && asks &&
        peer->outbox.bytes > TLY_MOST_LETTER_BYTES + peer_largest_window(&c->member.roster)) {
        *why = "it keeps asking and reads no answers";
        return -EPROTO;
    }
    struct tly_part *p;
    switch (f->type) {
    case TLY_RESULT:
        peer_on_result(peer, f, data);
        break;
    case TLY_VERDICT:
        peer_on_verdict(peer, f, data);
        break;
    case TLY_SPEC:
        peer_tell_spec(peer, f);
        break;
    case TLY_AGAIN:
        p = tly_op_find_part(peer, f);
        if (tly_frame_is_kept(f))
            tly_moves_final(peer, f);
        else if (f->flags & TLY_MARK)
            tly_doubt_final(peer, f);
        else if (p)
            tly_queue_again(c, p, f->offset);
        break;
    case TLY_HAVE:
        return tly_moves_told(peer, f, data, why);
    case TLY_DONE:
        tly_doubt_confirmed(peer, f, false);
        break;
    case TLY_PACE:
        peer_on_pace(peer, f, data);
        break;
    case TLY_STATUS:
        if (f->key)
            peer_on_late(peer, f, data);
        else
            peer_on_report(peer, f, data);
        break;
    default:
        break;
    }
    return 0;
}

/* --- life ---------------------------------------------------------------------------------------- */

static void peer_opened(void *user, struct tly_link *link)
{
    struct tly_peer *peer = user;
    tally_comm *c = peer->comm;
    double patience = c->params.dead_timeout;
    if (peer->mortal && patience > TALLYD_SILENCE_S)
        patience = TALLYD_SILENCE_S;
    peer->open = true;
    tly_sched_open(&peer->queue, c->member.roster.window_bytes);
    peer->accused = false;
    tly_link_set_silence(link, (int64_t)(patience * (double)TLY_SEC));
    bool again = peer->known;
    peer->known = true;
    if (again)
        tly_doubt_mended(peer);
    tly_rounds_tell(peer);
    if (again && tly_comm_leaves(c)) {
        struct tly_frame f = {.type = TLY_GOODBYE};
        tly_peer_post(peer, &f, NULL, 0);
    }
    tly_epoch_met(c);
}

/* The service cannot be reached.  Without a tallyd the job goes on.  Where a machine's service cannot be reached a rank
 * may have died: the coordinator knows better, and says the same to all. */
void tly_peer_give_up(struct tly_peer *peer, const char *why)
{
    tally_comm *c = peer->comm;
    char sentence[400], here[80] = "this machine";
    if (c->member.here.ss_family)
        tly_address_host(&c->member.here, here, sizeof here);
    const char *name = peer->mortal ? "it" : peer->name; /* the coordinator names a tallyd itself */
    if (peer->known)
        snprintf(sentence, sizeof sentence, "lost the connection to %s: %s", name, why);
    else
        snprintf(sentence, sizeof sentence, "cannot reach %s from %s: %s", name, here, why);
    peer->dialling.retry_at = c->loop.awake + GIVEN_UP_MS * TLY_MS;
    if (peer->accused || (peer->mortal && c->member.away)) /* nobody to tell: with the next attempt */
        return;
    peer->accused = true;
    if (peer->mortal) {
        tly_member_accuse(&c->member, peer->index, sentence);
        return;
    }
    tly_comm_doom(c, 0, EXPLAIN_MS * TLY_MS, sentence);
}

static int peer_dial(struct tly_peer *p);

static void peer_closed(void *user, struct tly_link *link, int err, const char *why)
{
    struct tly_peer *peer = user;
    tally_comm *c = peer->comm;
    bool was_open = peer->open;
    uint32_t worse = tly_link_skip(link, &c->member.roster.services[peer->index].at);
    int tries = (int)tly_link_tries(link);
    const char *medium = tly_link_medium(link);
    if (was_open)
        tly_doubt_begin(peer);
    tly_peer_drop(peer);
    if (tly_comm_leaves(c) || tly_comm_failed(c) || peer->gone)
        return;
    if (!was_open && worse) { /* there is another way */
        peer->dialling.skip = worse;
        if (peer_dial(peer) == 0)
            return;
    }
    if (was_open) {
        peer->dialling.lost_at = c->loop.awake;
        peer->dialling.losses++;
        if (worse && peer->dialling.losses >= tries) {
            peer->dialling.skip_ever = worse; /* what breaks here need not break there */
            tly_log(tries > 1 ? TALLY_LOG_WARNING : TALLY_LOG_DEBUG, "comm",
                    "no longer by %s to %s: %d connections have broken within %d s; the last: %s", medium,
                    peer->name, tries, FORGIVEN_S, why);
        }
    }
    int64_t patience = (int64_t)(c->params.dead_timeout * (double)TLY_SEC);
    if (peer->mortal && patience > TALLYD_SILENCE_S * TLY_SEC)
        patience = TALLYD_SILENCE_S * TLY_SEC;
    if (was_open && err != ETIMEDOUT && peer->dialling.losses <= MOST_LOSSES)
        peer->dialling.retry_at = c->loop.awake; /* both ends may live */
    else if (!was_open && peer->known && err != ECONNREFUSED &&
             c->loop.awake - peer->dialling.lost_at < patience)
        peer->dialling.retry_at = c->loop.awake + RETRY_MS * TLY_MS;
    else
        tly_peer_give_up(peer, why);
    if (peer->dialling.retry_at <= c->loop.awake && tly_peer_connect(peer) != 0)
        tly_peer_give_up(peer, tly_error());
}

static const struct tly_link_user calls = {
    .opened = peer_opened,
    .header = peer_header,
    .frame = peer_frame,
    .next = peer_next,
    .sent = peer_sent,
    .closed = peer_closed};

static int peer_dial(struct tly_peer *p)
{
    tally_comm *c = p->comm;
    const struct tly_roster_service *s = &c->member.roster.services[p->index];
    struct tly_link_config config = {
        .user_calls = &calls,
        .user = p,
        .identity = c->member.identity,
        .peer_name = p->name,
        .params = &c->params,
        .checksum = c->params.checksum,
        .skip = p->dialling.skip};
    config.identity.role = TLY_ROLE_RANK;
    int err = tly_link_dial(&c->loop, &s->at, &config, &p->link);
    return err ? tly_fail(-err, "%s", strerror(-err)) : 0; /* the caller names both ends */
}

void tly_peer_init(struct tly_peer *p, tally_comm *c, uint32_t index)
{
    p->comm = c;
    p->index = index;
    p->reported = true; /* nobody waits for that */
    tly_sched_add(&c->sched, &p->queue);
    tly_outbox_init(&p->outbox);
    tly_list_init(&p->kept);
    tly_list_init(&p->doubted);
    tly_list_init(&p->decided);
}

int tly_peer_connect(struct tly_peer *p)
{
    p->dialling.at = p->comm->loop.awake;
    const struct tly_roster *roster = &p->comm->member.roster;
    const struct tly_roster_service *s = &roster->services[p->index];
    p->incarnation = s->incarnation;
    p->mortal = s->role == TLY_ROLE_TALLYD;
    tly_service_name(roster, p->index, p->name, sizeof p->name);
    p->dialling.skip = p->dialling.skip_ever;
    return peer_dial(p);
}

void tly_peer_drop(struct tly_peer *p)
{
    tly_link_destroy(p->link);
    p->link = NULL;
    p->open = false;
    tly_glances_end(&p->glances);
    p->told = 0;
    tly_outbox_finish(&p->outbox, NULL, NULL);
    tly_report_came(&p->comm->reports, &p->reported); /* it will not answer */
}

/* Has anybody on another host been heard in the last `ns`?  Else we may be the ones that are cut off. */
static bool peer_hears_others(const struct tly_peer *silent, int64_t ns)
{
    const tally_comm *c = silent->comm;
    int64_t since = c->loop.awake - ns;
    for (int i = 0; i <= c->services; i++) {
        const struct tly_peer *p = i < c->services ? &c->peers[i] : NULL;
        const struct tly_link *link = p ? p->link : c->member.link;
        if (p == silent || !link || !tly_link_is_open(link) || tly_link_heard_at(link) < since)
            continue;
        if (tly_link_is_far(link))
            return true;
    }
    return false;
}

/* A tallyd that gives no sign of life while operations wait costs the whole job its time, and out it loses nothing: so it is
 * judged soon, but only by a loop that ran all that time, and only if the path is known to be well. */
static void peer_look_for_life(struct tly_peer *p)
{
    tally_comm *c = p->comm;
    bool reached;
    if (!p->open || !p->mortal)
        return;
    if (!tly_link_await(p->link, !tly_active_is_empty(&c->active)))
        return;
    int64_t quiet = tly_link_unanswered(p->link, &reached);
    if (quiet < TALLYD_UNANSWERED_MS * TLY_MS || !(reached || peer_hears_others(p, quiet)))
        return;
    char why[100];
    snprintf(why, sizeof why, "no sign of life for %.1f s", (double)quiet / TLY_SEC);
    peer_closed(p, p->link, ETIMEDOUT, why);
}

void tly_peer_tick(struct tly_peer *p)
{
    tally_comm *c = p->comm;
    peer_look_for_life(p);
    if (p->open && p->dialling.losses && c->loop.awake - p->dialling.lost_at > FORGIVEN_S * TLY_SEC)
        p->dialling.losses = 0;
    bool late = c->loop.awake - p->dialling.at >= REACH_S * TLY_SEC;
    if (p->mortal && p->link && !p->known && !p->accused && late) {
        char why[40];
        snprintf(why, sizeof why, "no answer within %d s", REACH_S);
        tly_peer_drop(p);
        tly_peer_give_up(p, why);
    }
    if (p->link || p->gone || !p->known || tly_comm_leaves(c) || c->loop.awake < p->dialling.retry_at)
        return;
    if (tly_peer_connect(p) != 0)
        tly_peer_give_up(p, tly_error());
}

void tly_peer_finish(struct tly_peer *p)
{
    tly_link_destroy(p->link);
    p->link = NULL;
    tly_sched_remove(&p->queue);
    p->first = p->last = NULL;
    tly_outbox_finish(&p->outbox, NULL, NULL);
}
