/* cards.c - what the schedule alone makes of the optimum: a model in which nothing takes time but network cards.
 *
 *   cards WORKERS CPU_MACHINES BYTES [PART [CREDIT]]       bytes; 0: Tally's own choice
 *
 * Each machine has a queue out and one in, at the switch, of 1 Gbit/s both; a part is one packet, with what headers and
 * acknowledgements take; ranks admit parts of one planned tensor by the library's own plan, order and credit; a service sums in
 * no time when all have come.  Prints the fraction of the optimum, and how long cards had nothing to send or get in the
 * first and the last 40 ms: there the schedule loses what it loses. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/heap.h"
#include "plan/plan.h"

enum {
    PACKET = 160, /* bytes of a card that a part takes beside its own, each way: header and acknowledgement */
    SERVICE_NS =
        30000, /* from the last push to the first result; and through memory to the service beside a rank */
    PACE_BYTES = 256 << 10, /* counts go alone after so much news */
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

struct part {
    int service, come;
    uint32_t bytes;
};

struct rank {
    uint32_t next;
    uint64_t in_flight, opened;
    uint64_t news[MOST]; /* accepted, and not told yet, of each service */
};

static struct card out[MOST], in[MOST];
static struct rank ranks[MOST];
static struct part *parts;
static struct tly_heap events;
static uint32_t count;
static uint64_t credit, sequence;
static int n, k;
static int64_t end; /* of the first run; in it 0 */

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
static int64_t take(struct card *c, int64_t now, uint32_t bytes)
{
    int64_t begin = now > c->free ? now : c->free, from = end - EDGE_NS > c->free ? end - EDGE_NS : c->free;
    c->idle_first += least(begin, EDGE_NS) - least(c->free, EDGE_NS);
    c->idle_last += end && begin > from ? begin - from : 0;
    return c->free = begin + (int64_t)((bytes + PACKET) / rate * 1e9);
}

static void transmit(int64_t now, int from, struct event e)
{
    if (from == e.machine) {
        e.kind = ARRIVES;
        at(now + SERVICE_NS, e);
    } else {
        e.kind = AT_SWITCH;
        at(take(&out[from], now, e.bytes), e);
    }
}

static void admit(int64_t now, int r)
{
    struct rank *rank = &ranks[r];
    for (; rank->next < count; rank->next++) {
        const struct part *p = &parts[rank->next];
        if (!rank->in_flight)
            rank->opened = credit / 4;
        else if (rank->in_flight + p->bytes > rank->opened)
            return;
        rank->in_flight += p->bytes;
        transmit(now, r,
                 (struct event){.rank = r, .machine = p->service, .part = rank->next, .bytes = p->bytes});
    }
}

static void tell(int64_t now, int r, int service)
{
    struct rank *rank = &ranks[r];
    uint64_t news = rank->news[service];
    if (!news)
        return;
    rank->news[service] = 0;
    rank->in_flight -= news;
    rank->opened = rank->opened + news < credit ? rank->opened + news : credit;
    admit(now, r);
}

static void pushed(int64_t now, const struct event *e)
{
    struct part *p = &parts[e->part];
    uint64_t *news = &ranks[e->rank].news[p->service];
    *news += p->bytes;
    if (p->service == e->rank || *news >= PACE_BYTES)
        at(now, (struct event){.kind = TOLD, .rank = e->rank, .machine = p->service});
    if (++p->come < n)
        return;
    p->come = 0;
    for (int i = 0; i < n; i++) {
        int r = (i + (int)e->part) % n;
        transmit(now + SERVICE_NS, p->service,
                 (struct event){.rank = r, .machine = r, .part = e->part, .bytes = p->bytes, .result = true});
    }
}

/* Returns when the last result has come. */
static int64_t run(void)
{
    int64_t now = 0;
    for (int i = 0; i < n + k; i++)
        out[i] = in[i] = (struct card){0};
    for (int r = 0; r < n; r++) {
        ranks[r] = (struct rank){0};
        at(r * 7919 % 200 * 1000, (struct event){.kind = BEGINS, .rank = r}); /* not all at once */
    }
    while (tly_heap_top(&events)) {
        now = (int64_t)(tly_heap_top(&events)->order.sequence >> 24);
        struct event *e = tly_heap_pop(&events);
        if (e->kind == BEGINS) {
            admit(now, e->rank);
        } else if (e->kind == TOLD) {
            tell(now, e->rank, e->machine);
        } else if (e->kind == AT_SWITCH) {
            e->kind = ARRIVES;
            at(take(&in[e->machine], now, e->bytes), *e);
        } else if (e->result) {
            tell(now, e->rank, parts[e->part].service);
        } else {
            pushed(now, e);
        }
        free(e);
    }
    return now;
}

static void cut_and_deal(uint64_t bytes, uint32_t most, uint64_t given)
{
    uint32_t weight[MOST], late[MOST];
    static struct tly_dealer d;
    struct tly_stretch s = {.bytes = bytes};
    int active = 0;
    tly_plan_weights(n, k, weight);
    for (int i = 0; i < n + k; i++)
        active += weight[i] > 0;
    credit = 2ull * (unsigned)active * tly_plan_largest_part(&s, most, active);
    tly_plan_late(n, n + k, weight, bytes, credit, late);
    tly_dealer_init(&d, n, n + k, late);
    credit = given ? given : credit;
    for (uint64_t done = 0; done < bytes; done += parts[count++].bytes) {
        uint32_t length = tly_plan_part(&s, done, most, active);
        parts = must(realloc(parts, (count + 1) * sizeof *parts));
        parts[count] = (struct part){.service = tly_dealer_next(&d, length), .bytes = length};
    }
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

int main(int argc, char **argv)
{
    uint64_t value[5] = {0};
    for (int i = 1; i < argc && i < 6; i++) {
        char *rest;
        value[i - 1] = strtoull(argv[i], &rest, 10);
        if (*rest || rest == argv[i])
            argc = 0;
    }
    uint64_t bytes = value[2] / 64 * 64, most = value[3] ? value[3] / 64 * 64 : tly_plan_part_bytes(1e9 / 8);
    if (argc < 4 || argc > 6 || value[0] < 2 || value[0] > MOST / 2 || value[1] > MOST / 2 || !bytes ||
        bytes > 1ull << 32 || most < 4096 || most > 64 << 20) {
        fprintf(
            stderr,
            "usage: cards WORKERS CPU_MACHINES BYTES [PART [CREDIT]]\n"
            "2 to 512 workers, up to 512 CPU machines, 64 bytes to 4 GB in parts of 4096 bytes to 64 MB\n");
        return 2;
    }
    n = (int)value[0];
    k = (int)value[1];
    cut_and_deal(bytes, (uint32_t)most, value[4]);
    end = run();
    run(); /* once more, to see what was idle before the end */
    double optimum = tly_plan_time(n, k, (double)bytes, rate);
    printf("%.4f of the optimum, %.1f ms; %u parts\n", optimum / ((double)end / 1e9), (double)end / 1e6,
           count);
    print_idle("workers", 0, n);
    print_idle("CPU machines", n, n + k);
    free(parts);
    tly_heap_finish(&events);
    return 0;
}
