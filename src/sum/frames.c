/* frames.c - the frames that come over a session: which may come, what is wrong with them, and which file they concern.
 *
 * A header is judged before its payload is read: by session (a watcher, a rank of the job), by type, and a push by all
 * that it says of its part (frames_bad_push, and ops/rule.h for its size).  A frame that makes no sense ends the connection with a
 * sentence.  Nothing is remembered here. */
#include <errno.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/error.h"
#include "membership/measure.h"
#include "ops/rule.h"
#include "reduce/reduce.h"
#include "sum/internal.h"
#include "sum/job.h"
#include "sum/members.h"
#include "sum/regain.h"
#include "sum/round.h"
#include "sum/service.h"
#include "sum/session.h"
#include "sum/slot.h"
#include "sum/verdict.h"
#include "trace/trace.h"
#include "transport/outbox.h"
#include "transport/transport.h"

/* May ranks of this group do what the frame says? */
static bool frames_fits_group(const struct tly_rule *rule, const struct tly_frame *f,
                              const struct tly_members *who)
{
    bool pair = f->group & TLY_PAIR;
    if (!pair)
        return rule->groups != TLY_PAIRS;
    if (rule->groups == TLY_LISTS || f->root != tly_pair_from(f->group))
        return false;
    return rule->givers != TLY_NONE_GIVE || who->count == 1;
}

static const char *frames_bad_push(const struct tly_job *job, const struct tly_session *p,
                                   const struct tly_frame *f, const struct tly_members *who)
{
    const struct tly_rule *rule = tly_rule_of(f);
    size_t element = tly_reduce_element_size(f->dtype);
    bool request = f->flags & TLY_REQUEST, offer = f->flags & TLY_OFFER;
    if (f->rank != p->rank || !job->by_rank[p->rank])
        return "a push in another's name";
    if (!rule)
        return "unknown kind, type or size";
    if (!who || !frames_fits_group(rule, f, who))
        return "unknown group";
    if (rule->givers == TLY_ROOT_GIVES && !tly_members_have(who, f->root))
        return "no such root";
    bool judged = f->part == 0 || (f->type == TLY_HAVE && rule->keep); /* by home, or by any service */
    if (f->flags & TLY_MARK)
        return judged && f->offset == 0 && f->length == 0 ? NULL : "a malformed error mark";
    if (element == 0 || f->length % element || f->payload % element)
        return "unknown kind, type or size";
    if (f->length > job->part_most)
        return "a part larger than agreed";
    if (rule->carried && f->root && (f->root + 1 <= who->count || f->root + 1 > who->carried))
        return "a carried sum of too few or too many ranks";
    const char *why = rule->check ? rule->check(f, who) : NULL;
    if (why)
        return why;
    if (f->type == TLY_HAVE)
        return f->offset > f->length ? "more than there is of a part" : NULL;
    if (request == tly_rule_gives(rule, f, f->rank) || (offer && (request || !rule->offers)))
        return "a request out of place";
    if ((request || offer) && f->payload)
        return "a request with data";
    return NULL;
}

/* With equal hashes of their specs frames differ in these only by a bug or by ill will; sizes must never differ. */
static bool frames_same_shape(const struct tly_frame *a, const struct tly_frame *b)
{
    return a->kind == b->kind && a->dtype == b->dtype && a->op == b->op && a->length == b->length &&
           a->root == b->root;
}

/* May the rank begin this push now, as far as its window and its burden go? */
static const char *frames_bad_beginning(const struct tly_session *p, const struct tly_round *r,
                                        const struct tly_frame *f)
{
    const struct tly_job *job = p->job;
    if (p->pushed + tly_charge(f->length) > p->granted)
        return "a push past its window";
    if (job->burden[p->rank].owed > job->most_owed + 2 * job->window_rounds)
        return "it confirms none of the results that it gets";
    if (!r && tly_window_crowded(p))
        return "it has begun more operations than a rank may";
    return NULL;
}

/* Does the push fit into the round that is here? */
static const char *frames_bad_fit(const struct tly_session *p, const struct tly_round *r,
                                  const struct tly_frame *f)
{
    const struct tly_slot *slot = &r->slots[p->rank];
    bool mark = f->flags & TLY_MARK;
    if (f->spec == r->head.spec && !mark && !(r->head.flags & TLY_MARK) && !frames_same_shape(f, &r->head))
        return "two sizes of one tensor";
    if (mark && slot->state != SLOT_ABSENT && !(slot->state == SLOT_REFUSED && r->answers[p->rank].held))
        return "an error mark after a push";
    /* A fragment lands in a slot only where it continues that: nothing else keeps it within the slot's memory. */
    if (slot->state == SLOT_COMING && (slot->loan || slot->data) &&
        (f->offset != slot->filled || f->spec != slot->spec || f->length != r->head.length ||
         (slot->loan && slot->loan != tly_link_loan(p->link))))
        return "data that does not continue where the tensor's last data ended";
    return NULL;
}

static int frames_on_push(struct tly_session *p, const struct tly_frame *f, struct tly_landing *land,
                          const char **why)
{
    struct tly_job *job = p->job;
    const struct tly_members *who = tly_members_of(p, f->group);
    struct tly_round *r = tly_store_find(job, f);
    bool begins = f->offset == 0 || (f->flags & TLY_RESUMED);
    *why = frames_bad_push(job, p, f, who);
    if (!*why && begins)
        *why = frames_bad_beginning(p, r, f);
    if (*why)
        return -EPROTO;
    if (f->flags & TLY_RESUMED)
        tly_window_accept(p, f->offset, f->length); /* what is not sent counts as taken */
    if (!r && f->offset > 0) {                      /* the rest of something cancelled */
        if (begins)
            tly_window_pass(p, f->length);
        return 0;
    }
    if (!r)
        r = tly_round_open(job, f, who);
    *why = r ? frames_bad_fit(p, r, f) : "out of memory";
    if (*why)
        return r ? -EPROTO : -ENOMEM;
    if ((f->flags & TLY_MARK) && r->slots[p->rank].state == SLOT_REFUSED) {
        r->answers[p->rank].held = false; /* once more, after its connection was lost */
        r->slots[p->rank].session = p->id;
        tly_verdict_arrived(p, r);
    }
    tly_round_push(p, r, f, who, land);
    if (begins && r->rule->offers && f->part == 0)
        tly_progress_waiting(job);
    if (begins && r->said)
        tly_redo_look(job, r);
    return 0;
}

int tly_frames_header(void *user, struct tly_link *l, const struct tly_frame *f, struct tly_landing *land,
                      const char **why)
{
    struct tly_session *p = user;
    struct tly_job *job = p->job;
    bool alive = f->type == TLY_BEAT || f->type == TLY_COUNTS;
    bool asks = f->type == TLY_STATUS && (f->flags || f->payload); /* about a round */
    if (p->watcher && (asks || !tly_frame_goes(f->type, TLY_WATCHER_TO_SERVICE))) {
        *why = "a watcher may only ask for the status or measure";
        return -EPROTO;
    }
    if (tly_outbox_full(&p->outbox) && !alive) {
        *why = "it keeps asking and reads no answers";
        return -EPROTO;
    }
    if (p->watcher) {
        land->control = f->type != TLY_MEASURE; /* of that nobody wants more than how much it is */
        return 0;
    }
    if (!job->ranks && !alive) {
        *why = "a frame before the job has begun";
        return -EPROTO;
    }
    if (!alive && (p->rank >= job->ranks || job->by_rank[p->rank] != p)) {
        *why = "a frame from no rank of the job";
        return -EPROTO;
    }
    if (!tly_frame_goes(f->type, TLY_RANK_TO_SERVICE)) {
        *why = "a message that a service does not take";
        return -EPROTO;
    }
    if (f->type == TLY_PUSH) {
        int err = frames_on_push(p, f, land, why);
        if (err || !(f->flags & TLY_MARK))
            return err;
    } else if (f->type == TLY_HAVE && !tly_frame_is_kept(f)) {
        *why = frames_bad_push(job, p, f, tly_members_of(p, f->group));
        if (*why)
            return -EPROTO;
    }
    *land = (struct tly_landing){.control = true};
    return 0;
}

static char *frames_payload_text(const void *data, uint32_t len)
{
    struct tly_reader r = {data, len, false};
    char *text = malloc(TLY_SENTENCE);
    if (text)
        tly_read_text(&r, text, TLY_SENTENCE);
    return text;
}

static void frames_report(struct tly_session *p)
{
    struct tly_service_facts facts;
    struct tly_writer w = {0};
    struct tly_frame f = {.type = TLY_STATUS};
    tly_job_facts(p->job, &facts);
    tly_service_facts_write(&w, &facts);
    if (!w.failed)
        tly_session_post(p, &f, w.data, w.len, NULL);
    free(w.data);
}

/* For how long results for this rank were on their way: the rank's reports need it.  What has come it knows itself. */
static void frames_tell_load(struct tly_session *p)
{
    struct tly_link_load load = {0};
    struct tly_writer w = {0};
    struct tly_frame f = {.type = TLY_PACE};
    int err = tly_link_load(p->link, &load);
    tly_write64(&w, err ? UINT64_MAX : load.busy_us);
    if (!w.failed)
        tly_session_post(p, &f, w.data, w.len, NULL);
    free(w.data);
}

static uint64_t frames_arrived(const struct tly_session *p)
{
    struct tly_link_load load;
    return tly_link_load(p->link, &load) == 0 ? load.arrived : tly_link_bytes(p->link, false);
}

static void frames_tell_rate(struct tly_session *p)
{
    struct tly_measure m = {
        .step = TLY_MEASURE_COUNTED, .round = p->flow.round, .count = 1, .rate = {p->flow.rate}};
    struct tly_writer w = {0};
    struct tly_frame answer = {.type = TLY_MEASURE};
    tly_measure_write(&w, &m);
    if (!w.failed)
        tly_session_post(p, &answer, w.data, w.len, NULL);
    free(w.data);
}

/* More of a stream has come, by which network cards are measured. */
static void frames_gauge(struct tly_session *p, const struct tly_frame *f)
{
    struct tly_job *job = p->job;
    uint32_t streams = f->count <= TLY_MEASURE_MOST ? (uint32_t)f->count : TLY_MEASURE_MOST;
    enum tly_meter_due due =
        tly_meter_take(&job->meter, &p->flow, f->round, streams, frames_arrived(p), tly_now());
    for (struct tly_list *n = job->sessions.next; due && n != &job->sessions; n = n->next) {
        struct tly_session *x = tly_list_entry(n, struct tly_session, node);
        if (x->watcher && due == TLY_METER_BEGINS)
            tly_meter_begin(&x->flow, frames_arrived(x));
        else if (x->watcher)
            tly_meter_end(&job->meter, &x->flow, frames_arrived(x));
        if (x->watcher && tly_meter_tell(&job->meter, &x->flow))
            frames_tell_rate(x);
    }
    if (tly_meter_tell(&job->meter, &p->flow))
        frames_tell_rate(p);
}

/* A part is summed as far as it has come from all. */
void tly_frames_landed(void *user, struct tly_link *l, const struct tly_frame *f, uint32_t bytes)
{
    struct tly_session *p = user;
    if (f->type == TLY_MEASURE)
        frames_gauge(p, f);
    if (f->type != TLY_PUSH || (f->flags & TLY_MARK))
        return;
    uint32_t more = bytes - p->taken;
    p->taken = bytes;
    tly_window_accept(p, more, f->length);
    struct tly_round *r = tly_store_find(p->job, f);
    if (r)
        tly_progress_landed(p, r, f, more);
}

/* The rank cannot push, or takes back what it has pushed. */
static void frames_on_mark(struct tly_session *p, struct tly_round *r, const struct tly_frame *f,
                           const void *data)
{
    char *text = frames_payload_text(data, f->payload);
    const char *reason = text ? text : "out of memory";
    if (f->type == TLY_CANCEL)
        tly_verdict_cancelled(p, r, reason);
    else
        tly_verdict_refused(p, r, f->flags & TLY_QUIET, reason);
    free(text);
}

static void frames_on_pushed(struct tly_session *p, const struct tly_frame *f, const void *data)
{
    struct tly_job *job = p->job;
    struct tly_round *r = tly_store_find(job, f);
    uint32_t more = f->payload - p->taken, cost = more;
    if (f->flags & (TLY_REQUEST | TLY_MARK | TLY_OFFER))
        cost = TLY_LEAST_CHARGE; /* it brought no data through the rank's card */
    else if (f->flags & TLY_LAST)
        cost += tly_charge(f->length) - f->length;
    p->taken = 0;
    tly_window_accept(p, cost, f->length);
    if (!r)
        return;
    if (f->flags & TLY_MARK) {
        frames_on_mark(p, r, f, data);
        return;
    }
    tly_progress_landed(p, r, f, more);
    if (f->part == 0 && job->joined_count)
        tly_verdict_joined(job, r);
    /* A rank has left already: this round will not be complete. */
    if (f->part == 0 && job->left)
        for (uint32_t i = 0; i < job->ranks; i++)
            if (job->gone[i])
                tly_verdict_left(job, i);
}

int tly_frames_frame(void *user, struct tly_link *l, const struct tly_frame *f, void *data, const char **why)
{
    struct tly_session *p = user;
    struct tly_job *job = p->job;
    struct tly_round *r;
    if (p->watcher) {
        if (f->type == TLY_STATUS)
            frames_report(p);
        else if (f->type == TLY_MEASURE)
            frames_gauge(p, f);
        return 0;
    }
    tly_answers_received(p, tly_count_extend(p->received, f->received));
    tly_progress_copies(job);
    switch (f->type) {
    case TLY_PUSH:
        frames_on_pushed(p, f, data);
        break;
    case TLY_GROUP:
        return tly_members_learn(p, f, data, why);
    case TLY_JOINED:
        return tly_joining_learn(p, f, data, why);
    case TLY_HAVE:
        return tly_frame_is_kept(f) ? tly_regain_have(p, f, data, why) : tly_redo_have(p, f, data, why);
    case TLY_DONE:
        tly_redo_done(p, f);
        tly_regain_done(p, (uint32_t)f->count);
        break;
    case TLY_FINAL:
        if (tly_frame_is_kept(f))
            return tly_regain_final(p, f, data, why);
        tly_redo_final(p, f, data);
        break;
    case TLY_SPEC:
        r = tly_store_find(job, f);
        if (r) {
            char *text = frames_payload_text(data, f->payload);
            if (text)
                tly_verdict_text(p, r, text);
        }
        break;
    case TLY_CANCEL:
        r = tly_store_find(job, f);
        if (r && (f->flags & TLY_MARK))
            frames_on_mark(p, r, f, data);
        else if (r)
            tly_round_cancel(p, r);
        if (!(f->flags & TLY_MARK))
            tly_regain_cancelled(p, f);
        break;
    case TLY_STATUS:
        r = f->flags & TLY_REQUEST ? tly_store_find(job, f) : NULL;
        if (r)
            tly_verdict_late(job, r, p);
        else if (!(f->flags & TLY_REQUEST))
            frames_report(p);
        break;
    case TLY_COUNTS:
        if (f->flags & TLY_REQUEST)
            tly_answers_asked(p);
        break;
    case TLY_PACE:
        if (f->flags & TLY_REQUEST)
            frames_tell_load(p);
        break;
    case TLY_GOODBYE:
        p->left = true;
        tly_redo_left(job, p->rank);
        tly_regain_left(job, p->rank);
        break;
    default:
        break;
    }
    return 0;
}
