/* plan.c - `tally plan`: the split, the traffic and the times that src/plan predicts, for people and programs. */
#include "cli/cli.h"

#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/param.h"
#include "base/text.h"
#include "cli/topo.h"
#include "plan/plan.h"

const char tly_cli_plan_usage[] =
    "usage: tally plan -n N [-k K] [-B RATE] [-M SIZE] [--gpus N] [--topo FILE] [--links FILE] [--json]\n"
    "       tally plan --machines FILE [-M SIZE] [--gpus N] [--topo FILE] [--links FILE] [--json]\n"
    "\n"
    "Predicts how many bytes each summation service sums, what its machine sends and receives, and\n"
    "how long one exchange of all gradients takes at best.  Compares that with all-reduce and a\n"
    "parameter server.  Below stand the other collectives of as many bytes, with one rank a machine.\n"
    "\n"
    "  -n, --workers N       worker machines\n"
    "  -k, --servers K       CPU machines that run tallyd (0)\n"
    "  -B, --bandwidth RATE  bandwidth of a machine's network card each way, in bit/s or with k, M,\n"
    "                        G, T, powers of 1000 (10G)\n"
    "  -M, --bytes SIZE      gradients, in bytes or with K, M, G, T, powers of 1024 (100M)\n"
    "  -f, --machines FILE   machines that differ (- is standard input); a line is\n"
    "                          worker|cpu RATE [sum=RATE] [card=NAME] [xCOUNT]\n"
    "                        sum: what its service can add, in bit/s of its inputs; card: machines\n"
    "                        with the same name share a network card; # starts a comment\n"
    "  -g, --gpus N          GPUs of each worker machine that the job uses; without --topo, assume\n"
    "                        four on a PCIe 3.0 switch and a card on a port of its own\n"
    "  -t, --topo FILE       a worker machine as hwloc's XML: times include its inside, and the\n"
    "                        default of -B is what its network cards carry\n"
    "  -l, --links FILE      facts that XML lacks, as for `tally topo`\n"
    "      --json            print JSON\n";

/* No more than this is a gain; shares that are rounded move times by less. */
#define GAIN 1e-4

/* Machines alike: a line of the file. */
struct plan_row {
    bool worker;
    int count, first;      /* machines first to first + count - 1 */
    double rate, sum_rate; /* bit/s */
    char card[32];
};

struct plan {
    int n, k, rows;
    bool inside, assumed; /* there is a machine with GPUs; of which only their number is known */
    uint64_t bytes;
    struct plan_row row[TLY_MAX_SERVICES];
    struct tly_plan_machine machine[TLY_MAX_SERVICES]; /* rates in bytes/s */
    uint32_t weight[TLY_MAX_SERVICES];
    uint64_t share[TLY_MAX_SERVICES];
};

/* --- machines -------------------------------------------------------------------------------------- */

/* One word of a line.  NULL, or what is wrong with it. */
static const char *plan_take_word(struct plan_row *r, int number, const char *word)
{
    if (number == 0) {
        r->worker = strcmp(word, "worker") == 0;
        return r->worker || strcmp(word, "cpu") == 0 ? NULL : "is neither worker nor cpu";
    }
    if (number == 1)
        return (r->rate = tly_cli_rate(word)) < 0 ? "is no rate in bit/s from 1k on, such as 25G" : NULL;
    bool sum = strncmp(word, "sum=", 4) == 0, card = strncmp(word, "card=", 5) == 0;
    if ((sum && r->sum_rate > 0) || (card && r->card[0]) || (*word == 'x' && r->count))
        return "says again what this line has said";
    if (sum)
        return (r->sum_rate = tly_cli_rate(word + 4)) < 0
                   ? "has no rate in bit/s from 1k on, such as 25G"
                   : NULL;
    if (card) {
        if (!word[5] || strlen(word + 5) >= sizeof r->card)
            return "has no name of 1 to 31 letters";
        memcpy(r->card, word + 5, strlen(word + 5) + 1);
        return NULL;
    }
    if (*word == 'x')
        return (r->count = (int)tly_cli_number(word + 1, 1, TLY_MAX_SERVICES)) < 0
                   ? "is no number of machines such as x4"
                   : NULL;
    return "is none of sum=RATE, card=NAME, xCOUNT";
}

static int plan_read_line(struct plan *p, char *line, const char *path, int number)
{
    struct plan_row r = {0};
    int words = 0;
    line[strcspn(line, "#\r\n")] = '\0';
    char *save = NULL;
    for (char *w = strtok_r(line, " \t", &save); w; w = strtok_r(NULL, " \t", &save)) {
        const char *wrong = tly_text_clean(w) ? "holds control characters" : plan_take_word(&r, words++, w);
        if (wrong)
            return tly_cli_misuse("plan", "%s, line %d: \"%s\" %s", path, number, w, wrong);
    }
    if (!words)
        return 0;
    if (words == 1)
        return tly_cli_misuse("plan", "%s, line %d: a rate in bit/s is missing", path, number);
    r.count += !r.count;
    *(r.worker ? &p->n : &p->k) += r.count;
    if (p->n + p->k > TLY_MAX_SERVICES)
        return tly_cli_misuse("plan", "%s, line %d: at most %d machines in all", path, number,
                              TLY_MAX_SERVICES);
    p->row[p->rows++] = r;
    return 0;
}

static int plan_read_machines(struct plan *p, const char *path)
{
    bool standard = strcmp(path, "-") == 0;
    FILE *f = standard ? stdin : fopen(path, "re");
    char *line = NULL;
    size_t room = 0;
    int status = 0;
    if (!f)
        return tly_cli_fail("plan", "cannot open %s: %s", path, strerror(errno));
    for (int number = 1; !status && getline(&line, &room, f) >= 0; number++)
        status = plan_read_line(p, line, path, number);
    if (!status && ferror(f))
        status = tly_cli_fail("plan", "cannot read %s", path);
    free(line);
    if (!standard)
        fclose(f);
    if (!status && p->n == 0)
        status = tly_cli_misuse("plan", "%s names no worker machine", path);
    return status;
}

/* The machines of all rows, those with workers first. */
static void plan_place_machines(struct plan *p)
{
    int at = 0;
    for (int worker = 1; worker >= 0; worker--)
        for (int i = 0; i < p->rows; i++) {
            struct plan_row *r = &p->row[i];
            if (r->worker != worker)
                continue;
            r->first = at;
            for (int j = 0; j < r->count; j++, at++)
                p->machine[at] = (struct tly_plan_machine){.ranks = r->worker,
                                                           .card = (uint32_t)at,
                                                           .bandwidth = r->rate / 8,
                                                           .sum_rate = r->sum_rate / 8};
        }
    for (int i = 0; i < p->rows; i++) {
        uint32_t card = (uint32_t)p->row[i].first;
        if (!p->row[i].card[0])
            continue;
        for (int j = 0; j < p->rows; j++)
            if (strcmp(p->row[j].card, p->row[i].card) == 0 && (uint32_t)p->row[j].first < card)
                card = (uint32_t)p->row[j].first;
        for (int j = 0; j < p->row[i].count; j++)
            p->machine[p->row[i].first + j].card = card;
    }
}

/* --- what comes out -------------------------------------------------------------------------------- */

/* Seconds with so many CPU machines more, each as fast as the fastest that is there. */
static double plan_seconds(struct plan *p, int more)
{
    static struct tly_plan_machine m[TLY_MAX_SERVICES];
    static uint32_t weight[TLY_MAX_SERVICES];
    int count = p->n + p->k;
    double fastest = 0;
    memcpy(m, p->machine, (size_t)count * sizeof *m);
    for (int i = 0; i < count; i++)
        fastest = fmax(fastest, m[i].bandwidth);
    for (int i = count; i < count + more; i++)
        m[i] = (struct tly_plan_machine){.card = (uint32_t)i, .bandwidth = fastest};
    tly_plan_split(TLY_SPLIT_OPTIMAL, count + more, m, weight);
    return tly_plan_cost(count + more, m, weight, NULL) * (double)p->bytes;
}

/* All that is said besides the machines. */
struct times {
    double here, reduce, server, one_more;
    int useful, busiest; /* more CPU machines that bring something; the machine that takes longest */
};

static void plan_foresee(struct plan *p, struct times *t)
{
    uint32_t weight[TLY_MAX_SERVICES];
    int count = p->n + p->k, low = 0, high = TLY_MAX_SERVICES - count;
    double m = (double)p->bytes;
    t->here = tly_plan_cost(count, p->machine, p->weight, &t->busiest) * m;
    t->reduce = tly_plan_cost_all_reduce(count, p->machine) * m;
    t->server = INFINITY;
    if (p->k > 0 && tly_plan_split(TLY_SPLIT_SERVER, count, p->machine, weight) == 0)
        t->server = tly_plan_cost(count, p->machine, weight, NULL) * m;
    t->one_more = plan_seconds(p, high > 0);
    double least = plan_seconds(p, high);
    while (low < high) { /* as few as come to the same as all that there could be */
        int middle = (low + high) / 2;
        if (plan_seconds(p, middle) <= least * (1 + GAIN))
            high = middle;
        else
            low = middle + 1;
    }
    t->useful = low;
}

/* The least seconds that cards need for collectives of so many bytes, in pieces alike: a tensor, or an all-gather's result, or
 * what each machine gives in an all-to-all.  NAN where machines share a card: what they send each other does not cross it. */
struct collectives {
    double gather, sum, broadcast, reduce, exchange;
};

static struct collectives plan_foresee_collectives(const struct plan *p)
{
    static uint64_t pieces[TLY_MAX_SERVICES], whole[TLY_MAX_SERVICES];
    static struct tly_plan_load load[TLY_MAX_SERVICES];
    int count = p->n + p->k, root = -1;
    for (int i = 0; i < count; i++) {
        if (p->machine[i].card != (uint32_t)i)
            return (struct collectives){NAN, NAN, NAN, NAN, NAN};
        root = root < 0 && p->machine[i].ranks ? i : root;
        pieces[i] = p->machine[i].ranks ? p->bytes / (unsigned)p->n : 0;
        whole[i] = i == root ? p->bytes : 0;
    }
    pieces[root] += p->bytes % (unsigned)p->n;
    return (struct collectives){
        .gather = tly_plan_least_gather(count, p->machine, pieces, load),
        .sum = tly_plan_sum_where_wanted(count, p->machine, pieces, load),
        .broadcast = tly_plan_least_gather(count, p->machine, whole, load),
        .reduce = tly_plan_least_sum(count, p->machine, whole, load),
        .exchange = tly_plan_least_exchange(count, p->machine, (double)p->bytes / p->n, load)};
}

/* --- inside machines ---------------------------------------------------------------------------------------- */

static struct tly_machine gpus; /* a worker machine's inside */

/* What its cards carry together, bytes/s; 0: not known. */
static double plan_cards_rate(void)
{
    double sum = 0;
    for (int i = 0; i < gpus.cards; i++)
        sum += gpus.card[i].idle ? 0 : gpus.card[i].rate.bytes;
    return sum;
}

/* The first machine of BytePS: four GPUs to a switch, the switches in turn on two processors, the card on one of them. */
static void plan_assume_machine(int count)
{
    struct tly_rate bus = {105e9 / 8, TLY_GUESSED};
    gpus = (struct tly_machine){.nodes = count > 4 ? 2 : 1, .gpus = count, .cards = 1};
    for (int g = 0; g < count; g++)
        gpus.gpu[g] = (struct tly_gpu){
            .parent = g / 4, .node = g / 4 % 2, .slice = -1, .link = bus, .peers = UINT64_MAX};
    for (int s = 0; s < (count + 3) / 4; s++, gpus.switches++)
        gpus.sw[s] = (struct tly_switch){.parent = -1, .node = s % 2, .up = bus};
    gpus.card[0] = (struct tly_card){.name = "1", .parent = -1};
    gpus.across = (struct tly_rate){80e9 / 8, TLY_GUESSED};
    gpus.socket = (struct tly_rate){300e9 / 8, TLY_GUESSED};
}

/* Has its cards carry so much together. */
static void plan_set_cards(struct tly_machine *m, double rate)
{
    double sum = plan_cards_rate();
    int used = 0;
    for (int i = 0; i < m->cards; i++)
        used += !m->card[i].idle;
    if (!used) {
        m->cards = 1;
        m->card[0] = (struct tly_card){.name = "1", .parent = -1};
        used = 1;
    }
    for (int i = 0; i < m->cards; i++)
        if (!m->card[i].idle)
            m->card[i].rate.bytes = sum > 0 ? m->card[i].rate.bytes * rate / sum : rate / used;
}

/* One exchange, with the inside of the machines of a row. */
struct inside {
    double seconds, reduce; /* Tally's, and an all-reduce's that looks at no topology */
    char way[TLY_CLI_WORDS], waits[TLY_CLI_WORDS];
    bool network; /* the bottleneck is the network, not a link inside */
};

static int plan_look_inside(const struct plan *p, const struct plan_row *r, struct inside *in)
{
    static struct tly_machine m;
    struct tly_inside plan;
    struct tly_inside_way way;
    double ring = 2.0 * (p->n - 1) / p->n;
    struct tly_inside_job job = {p->bytes, tly_plan_traffic(p->n + p->k, p->machine, p->weight, r->first)};
    m = gpus;
    plan_set_cards(&m, r->rate / 8);
    int err = tly_inside_plan(&m, &job, TLY_MAY_ALL, &plan);
    if (err)
        return err;
    in->seconds = plan.seconds;
    in->network = plan.bottleneck < 0 || plan.link[plan.bottleneck].type == TLY_LINK_NET_OUT ||
                  plan.link[plan.bottleneck].type == TLY_LINK_NET_IN;
    tly_cli_way_text(&m, &plan.way, in->way);
    if (plan.bottleneck >= 0)
        tly_cli_link_text(&m, &plan.link[plan.bottleneck], in->waits);
    else
        snprintf(in->waits, sizeof in->waits, "nothing");
    tly_inside_finish(&plan);
    job.traffic = ring;
    tly_inside_plain(&m, &way);
    err = tly_inside_try(&m, &job, &way, &plan);
    in->reduce = plan.seconds;
    tly_inside_finish(&plan);
    return err;
}

/* The slowest of all worker machines. */
static int plan_look_inside_all(const struct plan *p, struct inside *slowest)
{
    *slowest = (struct inside){.seconds = -1};
    double reduce = 0;
    for (int i = 0; i < p->rows; i++) {
        struct inside in = {0};
        int err = p->row[i].worker ? plan_look_inside(p, &p->row[i], &in) : 0;
        if (err)
            return err;
        reduce = fmax(reduce, in.reduce);
        if (p->row[i].worker && in.seconds > slowest->seconds)
            *slowest = in;
    }
    slowest->reduce = reduce;
    return 0;
}

static double plan_each_way(const struct plan *p, int i)
{
    return (double)p->bytes * tly_plan_traffic(p->n + p->k, p->machine, p->weight, i);
}

static void plan_print_row(const struct plan *p, const struct plan_row *r)
{
    char what[96], rate[32], sums[32], moves[32];
    int i = r->first;
    snprintf(what, sizeof what, "%d %s%s, %s%s%s", r->count, r->worker ? "worker machine" : "CPU machine",
             r->count == 1 ? "" : "s", tly_cli_rate_text(r->rate, rate), r->card[0] ? ", card " : "",
             r->card);
    printf("%-36s %12s %8.2f%% %16s\n", what, tly_cli_bytes_text((double)p->share[i], sums),
           100.0 * (double)p->share[i] / (double)p->bytes, tly_cli_bytes_text(plan_each_way(p, i), moves));
}

static void plan_print_inside(const struct plan *p, const struct times *t, const struct inside *in)
{
    double all = fmax(t->here, in->seconds), reduce = fmax(t->reduce, in->reduce);
    char time[32];
    printf("\nwith the inside of worker machines, %d GPU%s each: %s\n", gpus.gpus, gpus.gpus == 1 ? "" : "s",
           in->way);
    printf("%-22s %14s  bottleneck: %s\n", "Tally", tly_cli_time_text(all, time),
           in->seconds >= t->here * (1 - GAIN) ? in->waits : "the network of other machines");
    printf("%-22s %14s  %.3f times as long\n", "all-reduce", tly_cli_time_text(reduce, time),
           all > 0 ? reduce / all : 1);
    if (p->assumed)
        printf("assumed: four GPUs to a PCIe 3.0 switch, the card on a port of its own; --topo FILE "
               "describes yours\n");
    if (!in->network && in->seconds > t->here * (1 + GAIN))
        printf("the bottleneck is inside the machines: more CPU machines bring nothing\n");
}

static void plan_print_text(const struct plan *p, const struct times *t)
{
    char rate[32], bytes[32], time[32];
    printf("gradients: %s\n\n", tly_cli_bytes_text((double)p->bytes, bytes));
    printf("%-36s %12s %9s %16s\n", "machines, rate each way", "each sums", "share", "moves each way");
    for (int worker = 1; worker >= 0; worker--)
        for (int i = 0; i < p->rows; i++)
            if (p->row[i].worker == worker)
                plan_print_row(p, &p->row[i]);
    if (t->here == 0) {
        printf(p->n == 1 ? "\none worker machine: nothing crosses the network\n"
                         : "\nall worker machines behind one card: nothing crosses it\n");
        return;
    }
    printf("\n%-22s %14s", "Tally", tly_cli_time_text(t->here, time));
    for (int i = 0; i < p->rows && p->rows > 2; i++) {
        const struct plan_row *r = &p->row[i];
        if (t->busiest >= r->first && t->busiest < r->first + r->count)
            printf("  busiest: %s, %s", r->worker ? "worker machine" : "CPU machine",
                   tly_cli_rate_text(r->rate, rate));
    }
    putchar('\n');
    printf("%-22s %14s  %.3f times as long\n", "all-reduce", tly_cli_time_text(t->reduce, time),
           t->reduce / t->here);
    if (p->k > 0)
        printf("%-22s %14s  %.3f times as long\n", "parameter server", tly_cli_time_text(t->server, time),
               t->server / t->here);
    else
        printf("%-22s %14s    has no machines\n", "parameter server", "-");
    struct collectives c = plan_foresee_collectives(p);
    const char *names[] = {"all-gather", "reduce-scatter", "broadcast", "reduce", "all-to-all"};
    double seconds[] = {c.gather, c.sum, c.broadcast, c.reduce, c.exchange};
    for (int i = 0; i < 5 && !isnan(c.gather); i++)
        printf("%s%-22s %14s\n", i ? "" : "\n", names[i], tly_cli_time_text(seconds[i], time));
    if (t->useful)
        printf("\none more CPU machine: %s, %.1f%% less; up to %d more bring something\n",
               tly_cli_time_text(t->one_more, time), 100 * (1 - t->one_more / t->here), t->useful);
    else if (p->n == 2)
        printf("\nbetween two worker machines no CPU machine brings anything\n");
    else if (p->n + p->k == TLY_MAX_SERVICES)
        printf("\nTally handles no more than these %d machines\n", TLY_MAX_SERVICES);
    else
        printf("\none more CPU machine brings nothing\n");
}

static void plan_print_service(const struct plan *p, int i)
{
    const struct tly_plan_machine *m = &p->machine[i];
    printf("    {\"kind\": \"%s\", ", m->ranks ? "worker" : "cpu");
    tly_cli_json_number("bandwidth_bits_per_s", m->bandwidth * 8, ", ");
    tly_cli_json_number("sum_rate_bits_per_s", m->sum_rate > 0 ? m->sum_rate * 8 : NAN, ", ");
    printf("\"card\": %u, \"weight\": %u, \"bytes\": %llu, \"each_way_bytes\": %.0f}%s\n", m->card,
           p->weight[i], (unsigned long long)p->share[i], plan_each_way(p, i),
           i + 1 < p->n + p->k ? "," : "");
}

static void plan_print_json(const struct plan *p, const struct times *t, const struct inside *in)
{
    bool alike = true;
    for (int i = 1; i < p->n + p->k; i++)
        alike &= p->machine[i].bandwidth == p->machine[0].bandwidth;
    printf("{\n  \"n\": %d,\n  \"k\": %d,\n  \"bytes\": %llu,\n  ", p->n, p->k, (unsigned long long)p->bytes);
    tly_cli_json_number("bandwidth_bits_per_s", alike ? p->machine[0].bandwidth * 8 : NAN, ",\n");
    printf("  \"services\": [\n");
    for (int i = 0; i < p->n + p->k; i++)
        plan_print_service(p, i);
    printf("  ],\n  ");
    tly_cli_json_number("time_s", t->here, ",\n  ");
    tly_cli_json_number("all_reduce_time_s", t->reduce, ",\n  ");
    tly_cli_json_number("server_time_s", p->n == 1 ? NAN : t->server, ",\n  ");
    tly_cli_json_number("gamma_a", t->here > 0 ? t->reduce / t->here : NAN, ",\n  ");
    tly_cli_json_number("gamma_p", t->here > 0 ? t->server / t->here : NAN, ",\n  ");
    struct collectives c = plan_foresee_collectives(p);
    tly_cli_json_number("all_gather_time_s", c.gather, ",\n  ");
    tly_cli_json_number("reduce_scatter_time_s", c.sum, ",\n  ");
    tly_cli_json_number("broadcast_time_s", c.broadcast, ",\n  ");
    tly_cli_json_number("reduce_time_s", c.reduce, ",\n  ");
    tly_cli_json_number("all_to_all_time_s", c.exchange, ",\n  ");
    if (p->inside) {
        printf("\"inside\": {\"gpus\": %d, ", gpus.gpus);
        tly_cli_json_number("time_s", in->seconds, ", ");
        tly_cli_json_number("all_reduce_time_s", in->reduce, ", \"strategy\": ");
        tly_json_text(stdout, in->way);
        printf(", \"bottleneck\": ");
        tly_json_text(stdout, in->waits);
        printf("},\n  ");
        tly_cli_json_number("end_to_end_time_s", fmax(t->here, in->seconds), ",\n  ");
        tly_cli_json_number("end_to_end_all_reduce_time_s", fmax(t->reduce, in->reduce), ",\n  ");
    }
    tly_cli_json_number("one_more_time_s", t->one_more, ",\n  ");
    bool room = p->n + p->k < TLY_MAX_SERVICES;
    printf("\"one_more_helps\": %s,\n  \"more_that_help\": %d,\n  \"busiest\": %d\n}\n",
           !room       ? "null"
           : t->useful ? "true"
                       : "false",
           t->useful, t->busiest);
}

/* --- the command -------------------------------------------------------------------------------------------- */

struct arguments {
    const char *file, *alike, *topo, *links;
    double rate; /* 0: not given */
    int gpus;    /* the same */
    bool json, help;
};

static int plan_take_option(struct plan *p, struct arguments *a, int c)
{
    double x;
    switch (c) {
    case 'n':
        if ((p->n = (int)tly_cli_number(optarg, 1, TLY_MAX_SERVICES)) < 0)
            return tly_cli_misuse("plan", "-n %s: the number of worker machines is 1 to %d", optarg,
                                  TLY_MAX_SERVICES);
        break;
    case 'k':
        if ((p->k = (int)tly_cli_number(optarg, 0, TLY_MAX_SERVICES)) < 0)
            return tly_cli_misuse("plan", "-k %s: the number of CPU machines is 0 to %d", optarg,
                                  TLY_MAX_SERVICES);
        break;
    case 'M':
        if ((x = tly_cli_size(optarg)) < 1)
            return tly_cli_misuse("plan", "-M %s is no size, such as 100M", optarg);
        p->bytes = (uint64_t)x;
        break;
    case 'B':
        if ((a->rate = tly_cli_rate(optarg)) < 0)
            return tly_cli_misuse("plan", "-B %s is no rate in bit/s from 1k on, such as 25G", optarg);
        break;
    case 'g':
        if ((a->gpus = (int)tly_cli_number(optarg, 1, TLY_MAX_GPUS)) < 0)
            return tly_cli_misuse("plan", "--gpus %s: the number of GPUs of a machine is 1 to %d", optarg,
                                  TLY_MAX_GPUS);
        break;
    case 'f':
        a->file = optarg;
        break;
    case 't':
        a->topo = optarg;
        break;
    case 'l':
        a->links = optarg;
        break;
    case 'j':
        a->json = true;
        break;
    case 'h':
        a->help = true;
        break;
    default:
        return CLI_USAGE;
    }
    if (c == 'n' || c == 'k' || c == 'B')
        a->alike = c == 'n' ? "-n" : c == 'k' ? "-k" : "-B";
    return 0;
}

/* A worker machine's GPUs, and what its cards carry, if nothing else says. */
static int plan_take_inside(struct plan *p, struct arguments *a)
{
    char why[256];
    const char *files[] = {a->file, a->topo, a->links};
    int standard = 0;
    for (int i = 0; i < 3; i++)
        standard += files[i] && strcmp(files[i], "-") == 0;
    if (standard > 1)
        return tly_cli_misuse("plan", "only one of --machines, --topo and --links can be standard input");
    if (a->links && !a->topo)
        return tly_cli_misuse("plan", "--links goes with --topo");
    p->inside = a->topo || a->gpus;
    if (p->inside && p->bytes > 1ULL << 40)
        return tly_cli_misuse("plan", "-M: at most 1T with --gpus or --topo");
    if (!p->inside)
        return 0;
    if (!a->topo) {
        p->assumed = true;
        plan_assume_machine(a->gpus);
        return tly_machine_finish(&gpus, why, sizeof why) ? tly_cli_fail("plan", "%s", why) : 0;
    }
    int status = tly_cli_machine("plan", a->topo, a->links, &gpus);
    if (status)
        return status;
    if (!gpus.gpus)
        return tly_cli_fail("plan", "%s has no GPU", a->topo);
    if (a->gpus > gpus.gpus)
        return tly_cli_fail("plan", "--gpus %d: %s has %d", a->gpus, a->topo, gpus.gpus);
    if (a->gpus)
        gpus.gpus = a->gpus;
    if (!a->rate)
        a->rate = plan_cards_rate() * 8;
    return 0;
}

static int plan_take_machines(struct plan *p, const struct arguments *a)
{
    double rate = a->rate > 0 ? a->rate : 10e9;
    if (a->file && a->alike)
        return tly_cli_misuse("plan", "%s and --machines exclude each other", a->alike);
    if (a->file)
        return plan_read_machines(p, a->file);
    if (!p->n)
        return tly_cli_misuse("plan", "-n, the number of worker machines, is needed");
    if (p->n + p->k > TLY_MAX_SERVICES)
        return tly_cli_misuse("plan", "-n %d -k %d: at most %d machines in all", p->n, p->k,
                              TLY_MAX_SERVICES);
    p->row[p->rows++] = (struct plan_row){.worker = true, .count = p->n, .rate = rate};
    if (p->k)
        p->row[p->rows++] = (struct plan_row){.count = p->k, .rate = rate};
    return 0;
}

int tly_cli_plan(int argc, char **argv)
{
    static const struct option options[] = {
        {"workers", required_argument, NULL, 'n'},
        {"servers", required_argument, NULL, 'k'},
        {"bytes", required_argument, NULL, 'M'},
        {"bandwidth", required_argument, NULL, 'B'},
        {"machines", required_argument, NULL, 'f'},
        {"gpus", required_argument, NULL, 'g'},
        {"topo", required_argument, NULL, 't'},
        {"links", required_argument, NULL, 'l'},
        {"json", no_argument, NULL, 'j'},
        {"help", no_argument, NULL, 'h'},
        {0}};
    static struct plan p;
    struct arguments a = {0};
    struct inside in = {0};
    struct times t;
    int status = 0, err;
    p = (struct plan){.bytes = 100 << 20};
    for (int c;
         !status && !a.help && (c = getopt_long(argc, argv, "+n:k:M:B:f:g:t:l:h", options, NULL)) != -1;)
        status = plan_take_option(&p, &a, c);
    if (status)
        return status;
    if (a.help) {
        fputs(tly_cli_plan_usage, stdout);
        return 0;
    }
    if (optind < argc)
        return tly_cli_misuse("plan", "unexpected argument %s", argv[optind]);
    if ((status = plan_take_inside(&p, &a)) != 0 || (status = plan_take_machines(&p, &a)) != 0)
        return status;
    plan_place_machines(&p);
    if ((err = tly_plan_split(TLY_SPLIT_OPTIMAL, p.n + p.k, p.machine, p.weight)) != 0)
        return tly_cli_fail("plan", "no plan: %s", strerror(-err));
    tly_plan_shares(p.n + p.k, p.weight, p.bytes, p.share);
    plan_foresee(&p, &t);
    if (p.inside && (err = plan_look_inside_all(&p, &in)) != 0)
        return tly_cli_no_plan("plan", a.topo, err);
    if (a.json)
        plan_print_json(&p, &t, &in);
    else
        plan_print_text(&p, &t);
    if (p.inside && !a.json)
        plan_print_inside(&p, &t, &in);
    return 0;
}
