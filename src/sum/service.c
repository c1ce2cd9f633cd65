/* service.c - the summation service: its thread, its sessions and the frames that come over them.  What a push
 * does is in round.c; what becomes of ranks that disagree, in verdict.c. */
#include "sum/service.h"

#include <errno.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysinfo.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/thread.h"
#include "join/place.h"
#include "sum/internal.h"
#include "topo/topo.h"

enum {
    FRAGMENT = 128 << 10,
    SEGMENT = 64 << 10, /* what the kernel sends and receives as one */
    HELD_UP_S = 120,    /* so long it is told that a rank held the others up */
    COUNTS_MS = 20,     /* for so long what was accepted waits for a result that tells it */
    /* Of one rank: bytes of rounds that it may have kept beyond those that its window allows, and the least number. */
    MOST_ROUND_BYTES = 128 << 20,
    LEAST_ROUNDS = 1024,
    MOST_WATCHERS = 64, /* at a time */
    LARGEST_WINDOW = 1 << 30,
};

/* --- sessions ------------------------------------------------------------------------------------ */

static void drop_letter(void *service, void *verdict)
{
    tly_round_unref(service, verdict);
}

/* verdict: the round whose answer this is, or NULL. */
int tly_session_post(struct session *p, const struct tly_frame *f, const void *data, size_t len,
                     struct round *verdict)
{
    int err = tly_outbox_post(&p->outbox, f, data, len, verdict);
    if (!err && verdict)
        verdict->references++;
    return err;
}

/* `bytes`: how much of news for the peer this is. */
void tly_session_counts(struct session *p, uint32_t bytes)
{
    struct tly_counts c = {.accepted = p->accepted, .granted = p->granted, .stable = p->stable};
    tly_link_set_counts(p->link, &c, bytes);
}

static bool next(void *user, struct tly_link *link, struct tly_outgoing *out)
{
    struct session *p = user;
    void *verdict;
    if (!tly_round_reserve(p))
        tly_outbox_lose(&p->outbox);
    if (!tly_outbox_next(&p->outbox, out, &verdict))
        return tly_round_answer(p, out);
    if (verdict) {
        tly_round_delivered(p, verdict);
        tly_round_unref(p->service, verdict);
    }
    return true;
}

static void add_bytes(struct tly_service_facts *f, const struct session *p)
{
    if (!p->link || p->watcher)
        return;
    f->bytes_received += tly_link_bytes(p->link, false);
    f->bytes_sent += tly_link_bytes(p->link, true);
}

static void destroy_session(struct session *p)
{
    struct tly_service *s = p->service;
    add_bytes(&s->facts, p);
    tly_link_destroy(p->link);
    tly_list_remove(&p->node);
    s->watchers -= p->watcher;
    if (p->rank < s->ranks && s->by_rank[p->rank] == p) {
        s->by_rank[p->rank] = NULL;
        tly_redo_detach(p);
    }
    tly_outbox_finish(&p->outbox, drop_letter, s);
    for (; p->stable < p->delivered; p->stable++)
        tly_round_unref(s, p->deliveries[p->stable % p->ring_room]);
    free(p->deliveries);
    tly_heap_finish(&p->ready);
    tly_map_finish(&p->groups);
    free(p);
    if (tly_list_empty(&s->sessions))
        tly_event_set(&s->quiet);
}

static void admit(struct session *p)
{
    struct tly_service *s = p->service;
    if (p->rank >= s->ranks) {
        tly_warn("sum", "rank %u does not belong to the job: turned away", p->rank);
        destroy_session(p);
        return;
    }
    if (s->by_rank[p->rank])
        destroy_session(s->by_rank[p->rank]); /* it has noticed before us that the connection is no more */
    p->id = ++s->sessions_seen;
    s->by_rank[p->rank] = p;
    p->granted = s->first_window; /* both ends know it from the roster */
    tly_link_set_pace(p->link, s->pace_bytes, COUNTS_MS);
    /* Its end was open a message earlier than ours: the others may have pushed already. */
    struct round *r;
    tly_map_each(&s->store, r) p->lacking +=
        r->slots[p->rank].state == SLOT_ABSENT && tly_members_have(r->who, p->rank);
}

/* The job has not begun: of each rank the newest connection will be its own. */
static void drop_earlier(struct tly_service *s, uint32_t rank)
{
    for (struct tly_list *n = s->sessions.next; n != &s->sessions && rank != TLY_NO_RANK; n = n->next) {
        struct session *p = tly_list_entry(n, struct session, node);
        if (p->rank == rank) {
            destroy_session(p);
            return;
        }
    }
}

static void opened(void *user, struct tly_link *l)
{
    struct session *p = user;
    const struct tly_identity *peer = tly_link_peer(l);
    char name[64];
    tly_link_set_silence(l, p->service->dead_ns);
    p->watcher = peer->role == TLY_ROLE_WATCHER;
    if (p->watcher) {
        if (++p->service->watchers > MOST_WATCHERS)
            destroy_session(p); /* who asks asks again */
        return;
    }
    if (peer->rank >= TLY_MAX_RANKS) {
        destroy_session(p);
        return;
    }
    if (!p->service->ranks)
        drop_earlier(p->service, peer->rank);
    p->rank = peer->rank;
    snprintf(name, sizeof name, "rank %u", p->rank);
    tly_link_rename(l, name);
    if (p->service->ranks)
        admit(p);
}

static void closed(void *user, struct tly_link *l, int err, const char *why)
{
    struct session *p = user;
    if (p->left)
        tly_round_received(p, p->delivered);
    /* A rank that goes without a word is the coordinator's to judge. */
    destroy_session(p);
}

/* --- frames -------------------------------------------------------------------------------------- */

/* May ranks of this group do what the frame says? */
static bool fits_group(const struct tly_kind *k, const struct tly_frame *f, const struct members *who)
{
    bool pair = f->group & TLY_PAIR;
    if (!pair)
        return k->groups != TLY_PAIRS;
    if (k->groups == TLY_LISTS || f->root != tly_pair_from(f->group))
        return false;
    return k->givers != TLY_NONE_GIVE || who->count == 1;
}

static const char *bad_push(const struct tly_service *s, const struct session *p, const struct tly_frame *f,
                            const struct members *who)
{
    const struct tly_kind *k = tly_kind_of(f);
    size_t element = tly_reduce_element_size(f->dtype);
    bool request = f->flags & TLY_REQUEST, offer = f->flags & TLY_OFFER;
    if (f->rank != p->rank || !s->by_rank[p->rank])
        return "a push in another's name";
    if (!k)
        return "unknown kind, type or size";
    if (!who || !fits_group(k, f, who))
        return "unknown group";
    if (k->givers == TLY_ROOT_GIVES && !tly_members_have(who, f->root))
        return "no such root";
    if (f->flags & TLY_MARK)
        return f->part == 0 && f->offset == 0 && f->length == 0
                   ? NULL
                   : "an error mark off its home, or with a size";
    if (element == 0 || f->length % element || f->payload % element)
        return "unknown kind, type or size";
    if (f->length > s->part_most)
        return "a part larger than agreed";
    const char *why = k->check ? k->check(f, who) : NULL;
    if (why)
        return why;
    if (f->type == TLY_HAVE)
        return f->offset > f->length ? "more than there is of a part" : NULL;
    if (request == tly_kind_gives(k, f, f->rank) || (offer && (request || !k->offers)))
        return "a request out of place";
    if ((request || offer) && f->payload)
        return "a request with data";
    return NULL;
}

/* With the same hash of the spec these can only differ by a bug or ill will; sizes must not. */
static bool same_shape(const struct tly_frame *a, const struct tly_frame *b)
{
    return a->kind == b->kind && a->dtype == b->dtype && a->op == b->op && a->length == b->length &&
           a->root == b->root;
}

/* `bytes` of a part of `length`.  Ranks have the less credit the shorter the parts are: it is news in parts. */
static void take(struct session *p, uint32_t bytes, uint32_t length)
{
    uint64_t most = p->service->part_bytes, news = length < most / 4 ? 4ull * bytes : bytes * most / length;
    p->accepted += bytes;
    tly_session_counts(p, (uint32_t)news);
}

static int on_push(struct session *p, const struct tly_frame *f, struct tly_landing *land, const char **why)
{
    struct tly_service *s = p->service;
    const struct members *who = tly_members_of(p, f->group);
    const char *bad = bad_push(s, p, f, who);
    if (bad) {
        *why = bad;
        return -EPROTO;
    }
    struct round *r = tly_round_find(s, f);
    bool begins = f->offset == 0 || (f->flags & TLY_RESUMED);
    if (begins && p->pushed + tly_charge(f->length) > p->granted) {
        *why = "a push past its window";
        return -EPROTO;
    }
    if (begins && s->burden[p->rank].owed > s->most_owed + 2 * s->window_rounds) {
        *why = "much is answered and nothing confirmed";
        return -EPROTO;
    }
    if (!r && begins && tly_round_crowded(p)) {
        *why = "more rounds opened than a rank may";
        return -EPROTO;
    }
    if (f->flags & TLY_RESUMED)
        take(p, f->offset, f->length); /* what is not sent is taken */
    if (!r && f->offset > 0) {         /* the rest of something cancelled */
        if (begins) {
            p->pushed += tly_charge(f->length);
            p->answered += tly_charge(f->length);
            tly_round_grant(p);
        }
        return 0;
    }
    if (!r)
        r = tly_round_open(s, f, who);
    if (!r) {
        *why = "out of memory";
        return -ENOMEM;
    }
    if (f->spec == r->head.spec && !(f->flags & TLY_MARK) && !(r->head.flags & TLY_MARK) &&
        !same_shape(f, &r->head)) {
        *why = "equal specs, unequal sizes";
        return -EPROTO;
    }
    const struct slot *slot = &r->slots[p->rank];
    if ((f->flags & TLY_MARK) && slot->state == SLOT_REFUSED && r->answers[p->rank].held) {
        r->answers[p->rank].held = false; /* once more, after its connection was lost */
        r->slots[p->rank].session = p->id;
        tly_verdict_arrived(p, r);
    } else if ((f->flags & TLY_MARK) && slot->state != SLOT_ABSENT) {
        *why = "an error mark after a push";
        return -EPROTO;
    }
    /* What lands in a slot continues it: nothing else keeps it within the slot's memory. */
    if (slot->state == SLOT_COMING && (slot->data || slot->loan) &&
        (f->offset != slot->filled || f->spec != slot->spec || f->length != r->head.length ||
         (slot->loan && slot->loan != tly_link_loan(p->link)))) {
        *why = "a fragment that does not continue its part";
        return -EPROTO;
    }
    tly_round_push(p, r, f, who, land);
    return 0;
}

static int header(void *user, struct tly_link *l, const struct tly_frame *f, struct tly_landing *land,
                  const char **why)
{
    struct session *p = user;
    struct tly_service *s = p->service;
    bool alive = f->type == TLY_BEAT || f->type == TLY_COUNTS;
    bool measures = p->watcher && f->type == TLY_MEASURE;
    if (p->watcher && !alive && !measures && (f->type != TLY_STATUS || f->flags || f->payload)) {
        *why = "a watcher may only ask for the status, or measure";
        return -EPROTO;
    }
    if (tly_outbox_full(&p->outbox) && !alive) {
        *why = "much is asked and no answer is read";
        return -EPROTO;
    }
    if (p->watcher) {
        land->control = !measures; /* of what is measured nobody wants more than how much it is */
        return 0;
    }
    if (!s->ranks && !alive) {
        *why = "a frame before the job has begun";
        return -EPROTO;
    }
    if (!alive && (p->rank >= s->ranks || s->by_rank[p->rank] != p)) {
        *why = "a frame from no rank of the job";
        return -EPROTO;
    }
    if (!tly_frame_goes_to(f->type, TLY_TO_SERVICE) || f->type == TLY_MEASURE) { /* that is for watchers */
        *why = "no frame for a service";
        return -EPROTO;
    }
    if (f->type == TLY_PUSH) {
        int err = on_push(p, f, land, why);
        if (err || !(f->flags & TLY_MARK))
            return err;
    } else if (f->type == TLY_HAVE) {
        *why = bad_push(s, p, f, tly_members_of(p, f->group));
        if (*why)
            return -EPROTO;
    }
    *land = (struct tly_landing){.control = true};
    return 0;
}

static char *payload_text(const void *data, uint32_t len)
{
    struct tly_reader r = {data, len, false};
    char *text = malloc(TLY_SENTENCE);
    if (text)
        tly_read_text(&r, text, TLY_SENTENCE);
    return text;
}

static void report(struct session *p)
{
    struct tly_service_facts facts;
    struct tly_writer w = {0};
    struct tly_frame f = {.type = TLY_STATUS};
    tly_service_facts(p->service, &facts);
    tly_service_facts_write(&w, &facts);
    if (!w.failed)
        tly_session_post(p, &f, w.data, w.len, NULL);
    free(w.data);
}

/* What the network has taken of the results for this rank, which makes an estimate of the cards of it. */
static void tell_load(struct session *p)
{
    struct tly_link_load load = {0};
    struct tly_writer w = {0};
    struct tly_frame f = {.type = TLY_PACE};
    if (tly_link_load(p->link, &load) != 0)
        load = (struct tly_link_load){0};
    tly_write64(&w, load.bytes);
    tly_write64(&w, load.busy_us);
    if (!w.failed)
        tly_session_post(p, &f, w.data, w.len, NULL);
    free(w.data);
}

/* More of a stream has come, by which network cards are measured. */
static void gauge(struct session *p, const struct tly_frame *f)
{
    struct tly_measure m = {.step = TLY_MEASURE_COUNTED, .round = f->round, .count = 1};
    struct tly_writer w = {0};
    struct tly_frame answer = {.type = TLY_MEASURE};
    uint32_t streams = f->count <= TLY_MEASURE_MOST ? (uint32_t)f->count : TLY_MEASURE_MOST;
    uint64_t bytes = tly_link_bytes(p->link, false);
    if (!tly_meter_take(&p->service->meter, &p->flow, f->round, streams, bytes, tly_now(), &m.rate[0]))
        return;
    tly_measure_write(&w, &m);
    if (!w.failed)
        tly_session_post(p, &answer, w.data, w.len, NULL);
    free(w.data);
}

/* A part is summed as far as it has come from all. */
static void landed(void *user, struct tly_link *l, const struct tly_frame *f, uint32_t bytes)
{
    struct session *p = user;
    if (f->type == TLY_MEASURE)
        gauge(p, f);
    if (f->type != TLY_PUSH || (f->flags & TLY_MARK))
        return;
    uint32_t more = bytes - p->taken;
    p->taken = bytes;
    take(p, more, f->length);
    struct round *r = tly_round_find(p->service, f);
    if (r)
        tly_round_landed(p, r, f, more);
}

/* The rank cannot push, or takes back what it has pushed. */
static void on_mark(struct session *p, struct round *r, const struct tly_frame *f, const void *data)
{
    char *text = payload_text(data, f->payload);
    const char *reason = text ? text : "out of memory";
    if (f->type == TLY_CANCEL)
        tly_verdict_cancelled(p, r, reason);
    else
        tly_verdict_refused(p, r, f->flags & TLY_QUIET, reason);
    free(text);
}

static void on_pushed(struct session *p, const struct tly_frame *f, const void *data)
{
    struct tly_service *s = p->service;
    struct round *r = tly_round_find(s, f);
    uint32_t more = f->payload - p->taken, cost = more;
    if (f->flags & (TLY_REQUEST | TLY_MARK | TLY_OFFER))
        cost = TLY_LEAST_CHARGE; /* of what it asks for nothing was handed to the card */
    else if (f->flags & TLY_LAST)
        cost += tly_charge(f->length) - f->length;
    p->taken = 0;
    take(p, cost, f->length);
    if (!r)
        return;
    if (f->flags & TLY_MARK) {
        on_mark(p, r, f, data);
        return;
    }
    tly_round_landed(p, r, f, more);
    if (f->part == 0 && s->joined_count)
        tly_verdict_joined(s, r);
    /* Somebody has left already: this round will not be complete. */
    if (f->part == 0 && s->left)
        for (uint32_t i = 0; i < s->ranks; i++)
            if (s->gone[i])
                tly_verdict_left(s, i);
}

static void leave(struct tly_service *s, uint32_t rank)
{
    s->left += !s->gone[rank];
    s->gone[rank] = true;
    tly_verdict_left(s, rank);
    tly_redo_look_at_all(s);
}

static int frame(void *user, struct tly_link *l, const struct tly_frame *f, void *data, const char **why)
{
    struct session *p = user;
    struct tly_service *s = p->service;
    struct round *r;
    if (p->watcher) {
        if (f->type == TLY_STATUS)
            report(p);
        else if (f->type == TLY_MEASURE)
            gauge(p, f);
        return 0;
    }
    tly_round_received(p, tly_count_extend(p->received, f->received));
    switch (f->type) {
    case TLY_PUSH:
        on_pushed(p, f, data);
        break;
    case TLY_GROUP:
        return tly_members_learn(p, f, data, why);
    case TLY_JOINED:
        return tly_joined_learn(p, f, data, why);
    case TLY_HAVE:
        return tly_redo_have(p, f, data, why);
    case TLY_DONE:
        tly_redo_done(p, f);
        break;
    case TLY_FINAL:
        tly_redo_final(p, f, data);
        break;
    case TLY_SPEC:
        r = tly_round_find(s, f);
        if (r) {
            char *text = payload_text(data, f->payload);
            if (text)
                tly_verdict_text(p, r, text);
        }
        break;
    case TLY_CANCEL:
        r = tly_round_find(s, f);
        if (r && (f->flags & TLY_MARK))
            on_mark(p, r, f, data);
        else if (r)
            tly_round_cancel(p, r);
        break;
    case TLY_STATUS:
        r = f->flags & TLY_REQUEST ? tly_round_find(s, f) : NULL;
        if (r)
            tly_verdict_late(s, r, p);
        else if (!(f->flags & TLY_REQUEST))
            report(p);
        break;
    case TLY_PACE:
        if (f->flags & TLY_REQUEST)
            tell_load(p);
        break;
    case TLY_GOODBYE:
        p->left = true;
        leave(s, p->rank);
        break;
    default:
        break;
    }
    return 0;
}

static void sent(void *user, struct tly_link *l, void *token)
{
    struct session *p = user;
    struct answer *a = token;
    if (--a->on_way == 0 && a->done)
        tly_round_stamp(p->service, a->round, TLY_AT_ANSWERED, p->rank);
}

static const struct tly_link_user calls = {
    .opened = opened,
    .header = header,
    .landed = landed,
    .frame = frame,
    .next = next,
    .sent = sent,
    .closed = closed};

static void remember(void *user, struct tly_link *l)
{
    struct session *p = user;
    p->link = l;
}

static int accepting(void *user, struct tly_link_config *config)
{
    struct tly_service *s = user;
    struct session *p = calloc(1, sizeof *p);
    if (!p)
        return -ENOMEM;
    p->service = s;
    p->rank = TLY_NO_RANK;
    tly_outbox_init(&p->outbox);
    tly_list_append(&s->sessions, &p->node);
    config->user_calls = &calls;
    config->user = p;
    config->identity = s->identity;
    config->created = remember;
    return 0;
}

/* --- life ---------------------------------------------------------------------------------------- */

static void tick(struct tly_hook *h)
{
    struct tly_service *s = tly_list_entry(h, struct tly_service, hook);
    if (!s->ranks)
        return;
    tly_verdict_tick(s);
    tly_round_settle(s);
    if (s->redo_waits) {
        s->redo_waits = false;
        tly_redo_look_at_all(s);
        for (struct tly_list *n = s->incomplete.next, *next; n != &s->incomplete; n = next) {
            next = n->next;
            tly_round_progress(s, tly_list_entry(n, struct round, node));
        }
    }
    if (s->restore_waits)
        tly_redo_restore(s);
    if (s->dropped_slots)
        tly_round_ask_again(s); /* memory that was short may be there again, without any news */
    tly_pool_look(&s->pool, s->loop->awake);
}

/* Half of what the machine or this process's cgroup allows. */
static uint64_t default_memory(void)
{
    struct sysinfo info;
    uint64_t all = tly_topo_memory("").limit;
    if (sysinfo(&info) == 0 && (uint64_t)info.totalram * info.mem_unit < all)
        all = (uint64_t)info.totalram * info.mem_unit;
    return all / 2;
}

/* How many threads sum.  A tallyd has its machine to itself; inside a rank most cores are the training's. */
static int crew_size(const struct tly_params *params, bool alone)
{
    if (params->sum_threads >= 0)
        return (int)params->sum_threads;
    int cores = tly_topo_cores();
    if (alone)
        return cores >= 4 ? cores - 1 : 0;
    return cores / 8;
}

/* --- timeline ------------------------------------------------------------------------------------ */

/* Which of the roster's services this is; their count: none. */
static uint32_t find_own(const struct tly_service *s, const struct tly_roster *roster)
{
    uint32_t i = 0;
    while (i < roster->service_count && roster->services[i].incarnation != s->incarnation)
        i++;
    return i;
}

static void start_trace(struct tly_service *s, const struct tly_roster *roster)
{
    struct tly_process who = {.service = true,
                              .index = find_own(s, roster),
                              .rank = TLY_NO_PEER,
                              .start = s->identity.incarnation,
                              .incarnation = s->incarnation};
    if (!s->params->trace || who.index == roster->service_count)
        return;
    const struct tly_roster_service *me = &roster->services[who.index];
    if (me->role == TLY_ROLE_RANK)
        who.rank = me->rank;
    struct tly_place here = {0};
    tly_place_machine(&here, s->params);
    snprintf(who.machine, sizeof who.machine, "%s", here.host_id);
    snprintf(who.job, sizeof who.job, "%s", s->identity.job);
    snprintf(who.host, sizeof who.host, "%s", me->host);
    s->trace = tly_trace_create(s->params->trace, s->params->trace_bytes, &who);
}

/* A window for twice the credit that ranks have for such parts, if memory lasts for that; it is this service's own
 * business, and each connection hears of it by its counts.  Smaller ones come to be as answers open them no further. */
static void set_sizes(struct tly_service *s, uint64_t part_bytes, uint64_t sharing)
{
    uint64_t suits = 4 * sharing * part_bytes, room = s->pool.limit / (s->ranks + 1ull);
    s->part_bytes = part_bytes;
    if (!s->window_fixed) {
        suits = suits < room ? suits : room;
        suits = suits < LARGEST_WINDOW ? suits : LARGEST_WINDOW;
        s->window_bytes = suits > s->part_most ? suits : s->part_most;
    }
    uint64_t half = part_bytes / 2 < FRAGMENT ? part_bytes / 2 : FRAGMENT;
    uint64_t fragment = s->params->fragment_bytes ? s->params->fragment_bytes
                        : half < SEGMENT          ? SEGMENT
                                                  : half;
    s->fragment_bytes = (uint32_t)(fragment < part_bytes ? fragment : part_bytes);
    /* Results tell what was accepted.  Where they keep a rank waiting, it hears so when three quarters of its credit
     * for this service are back; the credit is half a window, two parts for each service, unless told. */
    uint64_t news = 3 * s->window_bytes / (8 * sharing), most = 3 * part_bytes / 2;
    s->pace_bytes = (uint32_t)(news < most ? news : most);
    tly_straggler_begin_anew(&s->straggler);
    for (uint32_t i = 0; i < s->ranks; i++) {
        struct session *p = s->by_rank[i];
        if (!p)
            continue;
        tly_link_set_pace(p->link, s->pace_bytes, COUNTS_MS);
        tly_round_grant(p);
    }
}

static int64_t prepare(struct tly_hook *h)
{
    struct tly_service *s = tly_list_entry(h, struct tly_service, hook);
    /* Pairs with the release in tly_service_write_trace(). */
    if (atomic_load_explicit(&s->write_trace, memory_order_acquire))
        tly_trace_write(s->trace, NULL, NULL);
    uint64_t news = atomic_exchange_explicit(&s->news, 0, memory_order_acquire);
    if (news && s->ranks)
        set_sizes(s, news & UINT32_MAX, news >> 32);
    return INT64_MAX;
}

void tly_service_write_trace(struct tly_service *s)
{
    if (!s)
        return;
    atomic_store_explicit(&s->write_trace, true, memory_order_release);
    tly_loop_wake(s->loop);
}

static void *serve(void *arg)
{
    struct tly_service *s = arg;
    tly_topo_place(s->home, 0);
    tly_loop_run(s->loop);
    return NULL;
}

int tly_service_create(struct tly_loop *loop, const struct tly_params *params,
                       const struct tly_identity *identity, const struct sockaddr_storage *address,
                       struct tly_service **out)
{
    struct tly_service *s = calloc(1, sizeof *s);
    if (!s)
        return tly_fail(ENOMEM, "out of memory");
    s->own_loop.epoll_fd = -1;
    s->loop = loop ? loop : &s->own_loop;
    s->mortal = loop != NULL;
    tly_list_init(&s->sessions);
    tly_list_init(&s->incomplete);
    tly_list_init(&s->lists);
    tly_list_init(&s->hook.node);
    s->hook.tick = tick;
    s->hook.prepare = prepare;
    s->params = params;
    s->identity = *identity;
    s->identity.role = TLY_ROLE_SERVICE;
    s->identity.rank = TLY_NO_RANK;
    randombytes_buf(&s->incarnation, sizeof s->incarnation);
    s->fragment_bytes = (uint32_t)params->fragment_bytes;
    s->dead_ns = (int64_t)(params->dead_timeout * (double)TLY_SEC);
    s->late_ns = (int64_t)(params->late_warning * (double)TLY_SEC);
    s->pool.limit = params->memory ? params->memory : default_memory();
    int err = loop ? 0 : tly_loop_init(&s->own_loop);
    struct tly_listener_config listen = {
        .address = *address, .params = params, .accepting = accepting, .user = s};
    if (!err)
        err = tly_place_ports(params->ports, &listen.first_port, &listen.last_port);
    if (!err) {
        tly_loop_lock(s->loop);
        tly_loop_hook(s->loop, &s->hook);
        /* Arriving data is written by the loop's thread first, and so lies on its node: the network card's. */
        s->home = tly_topo_node(tly_topo_card((const struct sockaddr *)address), 0);
        if (loop)
            tly_topo_place(s->home, 0);
        err = tly_crew_start(&s->crew, s->loop, crew_size(params, loop != NULL), s->home);
        if (!err)
            err = tly_listen(s->loop, &listen, &s->listener);
        tly_loop_unlock(s->loop);
    }
    if (!err && !loop) {
        err = tly_thread_start(&s->thread, "tally-sum", serve, s);
        s->own_thread = !err;
    }
    if (err) {
        tly_service_destroy(s, 0);
        return err;
    }
    *out = s;
    return 0;
}

uint16_t tly_service_port(const struct tly_service *s)
{
    return tly_listener_port(s->listener);
}

void tly_service_endpoints(const struct tly_service *s, struct tly_endpoints *out)
{
    tly_listener_endpoints(s->listener, out);
}

uint64_t tly_service_memory(const struct tly_service *s)
{
    return s->pool.limit;
}

uint64_t tly_service_incarnation(const struct tly_service *s)
{
    return s->incarnation;
}

void tly_service_resize(struct tly_service *s, const struct tly_roster *roster)
{
    if (!s)
        return;
    /* Pairs with the acquire in prepare(). */
    atomic_store_explicit(&s->news, roster->part_bytes | (uint64_t)tly_roster_active(roster) << 32,
                          memory_order_release);
    tly_loop_wake(s->loop);
}

void tly_service_change(struct tly_service *s, const struct tly_roster *roster)
{
    set_sizes(s, roster->part_bytes, tly_roster_active(roster));
    for (uint32_t i = 0; i < roster->rank_count && i < s->ranks; i++)
        if (roster->ranks[i].left && !s->gone[i])
            leave(s, i);
}

int tly_service_begin(struct tly_service *s, const struct tly_roster *roster)
{
    tly_loop_lock(s->loop);
    s->part_most = roster->part_most;
    s->first_window = s->window_bytes = roster->window_bytes;
    s->window_fixed = roster->window_fixed;
    s->by_rank = calloc(roster->rank_count, sizeof *s->by_rank);
    s->gone = calloc(roster->rank_count, sizeof *s->gone);
    s->burden = calloc(roster->rank_count, sizeof *s->burden);
    s->joined = calloc(roster->rank_count, sizeof *s->joined);
    s->machine = calloc(roster->rank_count, sizeof *s->machine);
    s->teams = roster->teams;
    bool room = s->by_rank && s->gone && s->burden && s->joined && s->machine;
    int err = room ? 0 : -ENOMEM;
    for (uint32_t i = 0; i < roster->rank_count && room; i++)
        s->machine[i] = roster->ranks[i].machine;
    size_t round = sizeof(struct round) + roster->rank_count * (sizeof(struct slot) + sizeof(struct answer));
    s->most_owed =
        MOST_ROUND_BYTES / round > LEAST_ROUNDS ? (uint32_t)(MOST_ROUND_BYTES / round) : LEAST_ROUNDS;
    s->window_rounds = (uint32_t)(s->window_bytes / TLY_LEAST_CHARGE);
    s->most_opened = s->most_owed + s->window_rounds;
    if (!err)
        err = tly_members_begin(s, roster);
    if (!err)
        err = tly_straggler_init(&s->straggler, roster->rank_count);
    /* The first services are the machines' own, in their order. */
    for (uint32_t i = 0; i < roster->rank_count && !err; i++)
        s->straggler.pace[i].here = roster->ranks[i].machine == find_own(s, roster);
    /* The oldest round must always find room: one part from each rank, and a result. */
    uint64_t least = (roster->rank_count + 1) * tly_pool_size((uint32_t)roster->part_most);
    if (!err && s->pool.limit < least) {
        tly_warn("sum", "%llu bytes of memory (TALLY_MEMORY) are too few for %u ranks: using %llu",
                 (unsigned long long)s->pool.limit, roster->rank_count, (unsigned long long)least);
        s->pool.limit = least;
    }
    if (!err) {
        start_trace(s, roster);
        s->ranks = roster->rank_count;
        set_sizes(s, roster->part_bytes, tly_roster_active(roster));
        for (struct tly_list *n = s->sessions.next, *next_node; n != &s->sessions; n = next_node) {
            next_node = n->next;
            struct session *p = tly_list_entry(n, struct session, node);
            if (p->rank != TLY_NO_RANK)
                admit(p);
        }
        tly_service_change(s, roster);
    }
    tly_loop_unlock(s->loop);
    return err ? tly_fail(ENOMEM, "out of memory") : 0;
}

void tly_service_facts(struct tly_service *s, struct tly_service_facts *out)
{
    *out = s->facts;
    out->rounds_open = s->store.count;
    out->bytes_in_use = s->pool.in_use;
    out->bytes_peak = s->pool.peak;
    out->memory_limit = s->pool.limit;
    for (const struct tly_list *n = s->sessions.next; n != &s->sessions; n = n->next)
        add_bytes(out, tly_list_entry(n, struct session, node));
    out->waiting_ms = (uint64_t)(tly_verdict_waits(s, out->waits_for, sizeof out->waits_for) / TLY_MS);
    bool fresh = s->held_up_at && s->loop->awake - s->held_up_at < HELD_UP_S * TLY_SEC;
    snprintf(out->held_up, sizeof out->held_up, "%s", fresh ? s->held_up : "");
}

/* The numbers first, in the order in which they have come to be. */
void tly_service_facts_write(struct tly_writer *w, const struct tly_service_facts *f)
{
    const uint64_t values[] = {f->bytes_summed, f->parts_summed, f->rounds_open,   f->bytes_in_use,
                               f->bytes_peak,   f->memory_limit, f->slots_dropped, f->bytes_received,
                               f->bytes_sent,   f->waiting_ms};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        tly_write64(w, values[i]);
    tly_write_text(w, f->waits_for);
    tly_write_text(w, f->held_up);
}

int tly_service_facts_read(struct tly_reader *r, struct tly_service_facts *out)
{
    struct tly_service_facts f;
    f.bytes_summed = tly_read64(r);
    f.parts_summed = tly_read64(r);
    f.rounds_open = tly_read64(r);
    f.bytes_in_use = tly_read64(r);
    f.bytes_peak = tly_read64(r);
    f.memory_limit = tly_read64(r);
    f.slots_dropped = tly_read64(r);
    f.bytes_received = tly_read64(r);
    f.bytes_sent = tly_read64(r);
    f.waiting_ms = tly_read64(r);
    tly_read_text(r, f.waits_for, sizeof f.waits_for);
    tly_read_text(r, f.held_up, sizeof f.held_up);
    if (r->failed)
        return -EPROTO;
    *out = f;
    return 0;
}

void tly_service_destroy(struct tly_service *s, int64_t deadline)
{
    if (!s)
        return;
    if (s->own_thread) {
        tly_loop_lock(s->loop);
        bool wait = !tly_list_empty(&s->sessions);
        if (wait)
            s->quiet = (struct tly_event){0};
        tly_loop_unlock(s->loop);
        if (wait && deadline > tly_now())
            tly_event_wait(&s->quiet, deadline);
        tly_loop_stop(s->loop);
        pthread_join(s->thread, NULL);
    }
    tly_crew_stop(&s->crew);
    bool inside = s->loop->epoll_fd >= 0;
    if (inside)
        tly_loop_lock(s->loop);
    while (!tly_list_empty(&s->sessions))
        destroy_session(tly_list_entry(s->sessions.next, struct session, node));
    tly_round_close_store(s);
    tly_listener_destroy(s->listener);
    tly_loop_unhook(s->loop, &s->hook);
    if (inside)
        tly_loop_unlock(s->loop);
    tly_loop_finish(&s->own_loop);
    tly_trace_write(s->trace, NULL, NULL);
    tly_trace_destroy(s->trace);
    tly_pool_trim(&s->pool);
    tly_members_finish(s);
    tly_straggler_finish(&s->straggler);
    tly_joined_finish(s);
    free(s->by_rank);
    free(s->gone);
    free(s->burden);
    free(s);
}
