/* cards.c - what the schedule alone makes of the optimum: a model in which nothing takes time but network cards.
 *
 *   cards [OPERATION] WORKERS CPU_MACHINES BYTES [PART [CREDIT]]       bytes; 0: Tally's own choice
 *
 * OPERATION is all-reduce if not given; `cards help` lists the others.  BYTES are those of the tensor, of an all-gather's whole
 * result, and of what one rank of an all-to-all gives; a root is rank 0.
 *
 * Each machine has a queue out and one in, at the switch, of 1 Gbit/s both; a part is one packet, with what headers and
 * acknowledgements take; ranks admit parts of one planned tensor by the library's own plan and scheduling core; a service sums in
 * no time when all have come.  Prints the fraction of the optimum, how much each card carried of what it can in that time, and
 * how long cards had nothing to send or get in the first and the last 40 ms: there the schedule loses what it loses. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/heap.h"
#include "base/list.h"
#include "plan/cut.h"
#include "plan/plan.h"
#include "sched/sched.h"

enum {
    PACKET = 160, /* bytes of a card that a part takes beside its own, each way: header and acknowledgement */
    SERVICE_NS =
        30000, /* from the last push to the first result; and through memory to the service beside a rank */
    REQUEST = 256,           /* bytes of a rank's credit */
    ROWS_AHEAD = 6,          /* parts of each piece: src/ops/all_gather/rank.c */
    UNASKED_BYTES = 1 << 20, /* a piece: there, too */
    EDGE_NS = 40000000,
    MOST = 1024,
};

static const double rate = 1e9 / 8 * 1448 / 1514; /* of payload */

enum kind { BEGINS, AT_SWITCH, ARRIVES, TOLD };

struct event {
    enum kind kind;
    int rank, machine; /* who pushes or is answered; where it goes */
    uint32_t part, bytes;
    bool result;
};

struct card {
    int64_t free; /* from then on */
    int64_t idle_first, idle_last;
};

enum { ALL = -1 };

/* `from`: whose data it is, ALL: every rank's, which are summed.  `to`: who gets the result, ALL: every rank but `from`.  Of
 * one rank's for one rank (`pair`) the others know nothing; else those that have no data send a request, and those that get no
 * result an empty one. */
struct part {
    int service, come, from, to;
    bool pair;
    uint32_t bytes;
};

struct rank {
    uint32_t next, landed;
    uint32_t *parts, count; /* owned: in the order in which it sends them */
    struct tly_sched sched;
    struct tly_sched_queue queue; /* of all services: none has a window here */
    struct tly_task task;         /* the next part */
    uint64_t news[MOST];          /* bytes that each service has accepted and not told yet */
    /* The same with each part counted as a whole one, but for small ones: tly_window_accept() in src/sum/window.c. */
    uint64_t parts_of_news[MOST];
};

static struct card out[MOST], in[MOST];
static uint64_t sent[MOST], got[MOST];
static struct rank ranks[MOST];
static struct part *parts;
static struct tly_heap events;
static uint32_t count;
static uint64_t credit, sequence;
static uint32_t ahead;             /* parts that a rank may have admitted and that have not landed; 0: any */
static struct tly_cutting cutting; /* by unit and memory; the rest is the operation's */
static int n, k;
static int64_t end; /* of the first run; in it 0 */
static int64_t now;

static void *must(void *p)
{
    if (!p) {
        fprintf(stderr, "cards: out of memory\n");
        exit(1);
    }
    return p;
}

static void at(int64_t when, struct event e)
{
    struct event *own = must(malloc(sizeof *own));
    *own = e;
    /* Of two at one time the first one first. */
    struct tly_rank_order order = {0, (uint64_t)when << 24 | (sequence++ & 0xffffff)};
    if (tly_heap_push(&events, order, own) != 0)
        must(NULL);
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* A packet of a card that is there now has gone at the time returned. */
static int64_t take(struct card *c, int64_t when, uint32_t bytes)
{
    int64_t begin = when > c->free ? when : c->free, from = end - EDGE_NS > c->free ? end - EDGE_NS : c->free;
    c->idle_first += least(begin, EDGE_NS) - least(c->free, EDGE_NS);
    c->idle_last += end && begin > from ? begin - from : 0;
    return c->free = begin + (int64_t)((bytes + PACKET) / rate * 1e9);
}

static void transmit(int64_t when, int from, struct event e)
{
    if (from == e.machine) {
        e.kind = ARRIVES;
        at(when + SERVICE_NS, e);
    } else {
        e.kind = AT_SWITCH;
        sent[from] += e.bytes;
        got[e.machine] += e.bytes;
        at(take(&out[from], when, e.bytes), e);
    }
}

/* Does rank r have data for it? */
static bool gives(const struct part *p, int r)
{
    return p->from == ALL || p->from == r;
}

static void line_up(struct rank *rank);

static void start(struct tly_task *task)
{
    struct rank *rank = tly_list_entry(task, struct rank, task);
    uint32_t number = rank->parts[rank->next++];
    int r = (int)(rank - ranks);
    uint32_t bytes = gives(&parts[number], r) ? parts[number].bytes : 0;
    transmit(now, r,
             (struct event){.rank = r, .machine = parts[number].service, .part = number, .bytes = bytes});
    line_up(rank);
}

/* The next part waits for its turn, if it may. */
static void line_up(struct rank *rank)
{
    if (rank->next == rank->count || (ahead && rank->next >= rank->landed + ahead))
        return;
    const struct part *p = &parts[rank->parts[rank->next]];
    bool brings = gives(p, (int)(rank - ranks));
    uint64_t charge = brings ? p->bytes : REQUEST;
    rank->task = (struct tly_task){
        .order = {0, rank->next}, .bytes = charge, .charge = charge, .eager = !brings, .start = start};
    if (tly_sched_ready(&rank->queue, &rank->task) != 0)
        must(NULL);
}

static void admit(int r)
{
    struct rank *rank = &ranks[r];
    if (!tly_sched_waits(&rank->queue))
        line_up(rank);
    tly_sched_run(&rank->sched);
}

static void tell(int r, int service)
{
    struct rank *rank = &ranks[r];
    uint64_t news = rank->news[service];
    if (!news)
        return;
    rank->news[service] = rank->parts_of_news[service] = 0;
    tly_sched_finish(&rank->queue, news);
    admit(r);
}

static void pushed(const struct event *e)
{
    struct part *p = &parts[e->part];
    uint64_t *news = &ranks[e->rank].news[p->service];
    uint64_t *counts = &ranks[e->rank].parts_of_news[p->service];
    uint32_t weight = e->bytes ? e->bytes : REQUEST;
    *news += weight;
    const uint64_t unit = cutting.unit;
    *counts += p->bytes < unit / 4 ? 4 * weight : weight * unit / p->bytes;
    if (p->service == e->rank || *counts >= unit + unit / 2) /* so much goes alone */
        at(now, (struct event){.kind = TOLD, .rank = e->rank, .machine = p->service});
    if (++p->come < (p->pair ? 2 : n))
        return;
    p->come = 0;
    for (int i = 0; i < n; i++) {
        int r = (i + (int)e->part) % n;
        bool gets = p->to == ALL ? r != p->from : r == p->to;
        if (gets || !p->pair || r == p->from)
            transmit(
                now + SERVICE_NS, p->service,
                (struct event){
                    .rank = r, .machine = r, .part = e->part, .bytes = gets ? p->bytes : 0, .result = true});
    }
}

/* Returns when the last result has come. */
static int64_t run(void)
{
    now = 0;
    for (int i = 0; i < n + k; i++)
        out[i] = in[i] = (struct card){0};
    memset(sent, 0, sizeof sent);
    memset(got, 0, sizeof got);
    for (int r = 0; r < n; r++) {
        struct rank *rank = &ranks[r];
        tly_sched_remove(&rank->queue);
        *rank = (struct rank){.parts = rank->parts, .count = rank->count};
        tly_sched_init(&rank->sched, credit);
        tly_sched_add(&rank->sched, &rank->queue);
        tly_sched_open(&rank->queue, UINT64_MAX);
        at(r * 7919 % 200 * 1000, (struct event){.kind = BEGINS, .rank = r}); /* not all at once */
    }
    while (tly_heap_top(&events)) {
        now = (int64_t)(tly_heap_top(&events)->order.sequence >> 24);
        struct event *e = tly_heap_pop(&events);
        if (e->kind == BEGINS) {
            admit(e->rank);
        } else if (e->kind == TOLD) {
            tell(e->rank, e->machine);
        } else if (e->kind == AT_SWITCH) {
            e->kind = ARRIVES;
            at(take(&in[e->machine], now, e->bytes), *e);
        } else if (e->result) {
            ranks[e->rank].landed++;
            tell(e->rank, parts[e->part].service);
            admit(e->rank);
        } else {
            pushed(e);
        }
        free(e);
    }
    return now;
}

static void add(struct part p)
{
    parts = must(realloc(parts, (count + 1) * sizeof *parts));
    parts[count++] = p;
}

static struct tly_cutting cut_for(int active, uint32_t fewest)
{
    struct tly_cutting c = cutting;
    c.active = active;
    c.far = k >= n;
    c.fewest = fewest;
    return c;
}

static uint32_t longest_of(uint64_t bytes, int active, uint32_t fewest)
{
    struct tly_cutting c = cut_for(active, fewest);
    return tly_plan_largest_part(&(struct tly_stretch){.bytes = bytes}, &c);
}

static void add_all(uint64_t bytes, int active, uint32_t fewest, struct tly_dealer *d, int from, int to)
{
    struct tly_stretch s = {.bytes = bytes};
    struct tly_cutting c = cut_for(active, fewest);
    uint32_t part = tly_plan_largest_part(&s, &c);
    credit = from == ALL && to == ALL ? tly_plan_sum_credit(active, k >= n, part, c.unit)
                                      : tly_plan_credit(active, part);
    for (uint64_t done = 0; done < bytes; done += parts[count - 1].bytes) {
        uint32_t length = tly_plan_part(&s, done, &c);
        add((struct part){.service = tly_dealer_next(d, length), .bytes = length, .from = from, .to = to});
    }
}

static int count_active(const uint32_t *weight)
{
    int active = 0;
    for (int i = 0; i < n + k; i++)
        active += weight[i] > 0;
    return active;
}

static void all_reduce(uint64_t bytes)
{
    uint32_t weight[MOST], late[MOST];
    static struct tly_dealer d;
    tly_plan_weights(n, k, weight);
    int active = count_active(weight);
    uint32_t fewest = k ? TLY_SPARES : TLY_FEW, part = longest_of(bytes, active, fewest);
    tly_plan_late(n, n + k, weight, bytes, tly_plan_credit(active, part < cutting.unit ? part : cutting.unit),
                  late);
    tly_dealer_init(&d, n, n + k, late);
    add_all(bytes, active, fewest, &d, ALL, ALL);
}

/* Machines alike, with a rank each and without. */
static const struct tly_plan_machine *machines(void)
{
    static struct tly_plan_machine m[MOST];
    for (int i = 0; i < n + k; i++)
        m[i] = (struct tly_plan_machine){.ranks = i < n, .card = (uint32_t)i, .bandwidth = rate};
    return m;
}

/* Those with a root, rank 0. */
static void broadcast(uint64_t bytes)
{
    uint32_t weight[MOST];
    static struct tly_dealer d;
    if (tly_plan_broadcast(n + k, machines(), 0, weight) != 0)
        must(NULL);
    tly_dealer_init_at(&d, n + k, weight, 1);
    int active = count_active(weight);
    add_all(bytes, active, tly_plan_broadcast_fewest(bytes, active), &d, 0, ALL);
}

static void reduce(uint64_t bytes)
{
    uint32_t weight[MOST], spare[MOST];
    static struct tly_dealer d;
    tly_plan_weights(n, k, spare);
    if (tly_plan_reduce(n + k, machines(), 0, spare, weight) != 0)
        must(NULL);
    tly_dealer_init_at(&d, n + k, weight, 1);
    add_all(bytes, count_active(weight), TLY_MANY, &d, ALL, 0);
}

/* Those that are cut into pieces: the i-th part of each piece before any piece's next. */
static void pieces(uint64_t bytes, bool gathers)
{
    static struct tly_relay relay;
    uint64_t piece = bytes / (unsigned)n / 64 * 64, each[MOST] = {0};
    uint32_t weight[MOST];
    for (int i = 0; i < n; i++)
        each[i] = piece;
    if (tly_relay_init(&relay, n + k, machines(), each) != 0)
        must(NULL);
    tly_plan_weights(n, k, weight);
    uint32_t most = longest_of(bytes, n, TLY_MANY);
    credit = tly_plan_credit(count_active(weight), cutting.unit);
    if (credit < tly_plan_credit(n, most))
        credit = tly_plan_credit(n, most);
    ahead = gathers ? ROWS_AHEAD * (uint32_t)n : 0;
    for (uint64_t at = 0; at < piece; at += most)
        for (int i = 0; i < n; i++) {
            uint32_t length = piece - at < most ? (uint32_t)(piece - at) : most;
            add((struct part){.service = gathers ? tly_relay_next(&relay, i, length) : i,
                              .bytes = length,
                              .from = gathers ? i : ALL,
                              .to = gathers ? ALL : i});
        }
}

static void reduce_scatter(uint64_t bytes)
{
    pieces(bytes, false);
}

/* Parts that one rank gives another, in the turns of pair_parts() in src/comm/path/parts.c. */
static void pairs(uint64_t piece, bool (*has)(int from, int to))
{
    uint32_t weight[MOST];
    tly_plan_weights(n, k, weight);
    uint32_t most = longest_of(piece * (unsigned)n, 1, TLY_MANY * (uint32_t)n);
    credit = tly_plan_credit(count_active(weight), cutting.unit);
    if (credit < tly_plan_credit(n, most))
        credit = tly_plan_credit(n, most);
    for (uint64_t at = 0; at < piece; at += most)
        for (int turn = 1; turn < n; turn++)
            for (int from = 0; from < n; from++) {
                int to = (from + turn) % n;
                uint32_t length = piece - at < most ? (uint32_t)(piece - at) : most;
                if (has(from, to))
                    add((struct part){.service = to, .bytes = length, .from = from, .to = to, .pair = true});
            }
}

static bool any_pair(int from, int to)
{
    return from != to;
}

static void all_gather(uint64_t bytes)
{
    uint64_t piece = bytes / (unsigned)n / 64 * 64;
    if (piece <= UNASKED_BYTES)
        pairs(piece, any_pair);
    else
        pieces(bytes, true);
}

static bool to_root(int from, int to)
{
    return to == 0 && from != 0;
}

static bool from_root(int from, int to)
{
    return from == 0 && to != 0;
}

static bool first_two(int from, int to)
{
    return from == 0 && to == 1;
}

static void all_to_all(uint64_t bytes)
{
    pairs(bytes / (unsigned)n / 64 * 64, any_pair);
}

static void gather(uint64_t bytes)
{
    pairs(bytes / (unsigned)n / 64 * 64, to_root);
}

static void scatter(uint64_t bytes)
{
    pairs(bytes / (unsigned)n / 64 * 64, from_root);
}

static void message(uint64_t bytes)
{
    pairs(bytes, first_two);
}

/* `through`: the fraction of `bytes` that one card must carry one way, whatever is done; 0: by tly_plan_time(). */
static const struct operation {
    const char *name;
    void (*cut)(uint64_t bytes);
    enum { WHOLE, OTHERS, SPLIT } through;
} operations[] = {{"all-reduce", all_reduce, SPLIT},  {"reduce-scatter", reduce_scatter, OTHERS},
                  {"all-gather", all_gather, OTHERS}, {"broadcast", broadcast, WHOLE},
                  {"reduce", reduce, WHOLE},          {"all-to-all", all_to_all, OTHERS},
                  {"gather", gather, OTHERS},         {"scatter", scatter, OTHERS},
                  {"message", message, WHOLE}};

enum { OPERATIONS = sizeof operations / sizeof *operations };

static void list_parts(void)
{
    for (int r = 0; r < n; r++) {
        ranks[r].parts = must(malloc(count * sizeof *ranks[r].parts + 1));
        for (uint32_t i = 0; i < count; i++)
            if (!parts[i].pair || parts[i].from == r || parts[i].to == r)
                ranks[r].parts[ranks[r].count++] = i;
    }
}

static double optimum_of(const struct operation *o, double bytes)
{
    if (o->through == SPLIT)
        return tly_plan_time(n, k, bytes, rate);
    return bytes / rate * (o->through == WHOLE ? 1 : (n - 1.0) / n);
}

static void print_idle(const char *who, int from, int to)
{
    double sum[4] = {0};
    for (int i = from; i < to; i++) {
        take(&out[i], end, 0);
        take(&in[i], end, 0);
        sum[0] += (double)out[i].idle_first;
        sum[1] += (double)out[i].idle_last;
        sum[2] += (double)in[i].idle_first;
        sum[3] += (double)in[i].idle_last;
    }
    if (to > from)
        printf("%s: idle ms in the first and the last %d: out %.1f %.1f, in %.1f %.1f\n", who,
               EDGE_NS / 1000000, sum[0] / (to - from) / 1e6, sum[1] / (to - from) / 1e6,
               sum[2] / (to - from) / 1e6, sum[3] / (to - from) / 1e6);
}

/* Least and most over machines of what their cards carried, of what they can. */
static void print_loads(const char *who, int from, int to)
{
    double least[2] = {1e9, 1e9}, most[2] = {0}, can = rate * (double)end / 1e9;
    for (int i = from; i < to; i++) {
        double load[2] = {(double)sent[i] / can, (double)got[i] / can};
        for (int way = 0; way < 2; way++) {
            least[way] = load[way] < least[way] ? load[way] : least[way];
            most[way] = load[way] > most[way] ? load[way] : most[way];
        }
    }
    if (to > from)
        printf("%s: cards carried of what they can: out %.3f to %.3f, in %.3f to %.3f\n", who, least[0],
               most[0], least[1], most[1]);
}

static int usage(void)
{
    fprintf(stderr,
            "usage: cards [OPERATION] WORKERS CPU_MACHINES BYTES [PART [CREDIT]]\n"
            "2 to 512 workers, up to 512 CPU machines, 64 bytes to 4 GB in parts of 4096 bytes to 64 MB\n"
            "operations:");
    for (int i = 0; i < OPERATIONS; i++)
        fprintf(stderr, " %s", operations[i].name);
    fprintf(stderr, "\n");
    return 2;
}

int main(int argc, char **argv)
{
    uint64_t value[5] = {0};
    const struct operation *o = &operations[0];
    for (int i = 0; i < OPERATIONS && argc > 1; i++)
        if (strcmp(argv[1], operations[i].name) == 0) {
            o = &operations[i];
            argv++;
            argc--;
            break;
        }
    for (int i = 1; i < argc && i < 6; i++) {
        char *rest;
        value[i - 1] = strtoull(argv[i], &rest, 10);
        if (*rest || rest == argv[i])
            argc = 0;
    }
    uint64_t bytes = value[2] / 64 * 64, unit = value[3] ? value[3] / 64 * 64 : tly_plan_part_bytes(1e9 / 8);
    if (argc < 4 || argc > 6 || value[0] < 2 || value[0] > MOST / 2 || value[1] > MOST / 2 || !bytes ||
        bytes > 1ull << 32 || unit < 4096 || unit > 64 << 20)
        return usage();
    n = (int)value[0];
    k = (int)value[1];
    cutting.unit = (uint32_t)unit;
    cutting.most = value[3] ? cutting.unit : tly_plan_part_most(cutting.unit, UINT64_MAX, (uint32_t)n);
    o->cut(bytes);
    if (!count)
        return usage();
    credit = value[4] ? value[4] : credit;
    list_parts();
    end = run();
    run(); /* once more, to see what was idle before the end */
    printf("%.4f of the optimum, %.1f ms; %u parts\n", optimum_of(o, (double)bytes) / ((double)end / 1e9),
           (double)end / 1e6, count);
    print_loads("workers", 0, n);
    print_loads("CPU machines", n, n + k);
    print_idle("workers", 0, n);
    print_idle("CPU machines", n, n + k);
    for (int r = 0; r < n; r++) {
        tly_sched_remove(&ranks[r].queue);
        free(ranks[r].parts);
    }
    free(parts);
    tly_heap_finish(&events);
    return 0;
}
