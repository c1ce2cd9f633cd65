/* topo.c - `tally topo`: this machine, or one from a file, and how its GPUs would sum. */
#include "cli/topo.h"

#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/param.h"
#include "cli/cli.h"
#include "plan/plan.h"

const char tly_cli_topo_usage[] =
    "usage: tally topo [--xml FILE] [--links FILE] [--svg FILE] [--json] [-n N] [-k K] [-M SIZE]\n"
    "                  [--flow SIZE[,STEPS[,US]]]\n"
    "\n"
    "Draws this machine, or one from a file: NUMA nodes, PCIe switches, GPUs, NVLinks and network\n"
    "cards.  Predicts how its GPUs best sum their gradients and hand them to the network, what\n"
    "crosses each link, which link is the bottleneck, and which facts are guessed.  This is a\n"
    "forecast, which jobs carry out where GPUs copy to each other directly.\n"
    "\n"
    "  -x, --xml FILE      a machine as hwloc's XML (`lstopo FILE.xml` writes it); - is standard input\n"
    "  -l, --links FILE    facts that XML lacks: NVLinks, rates of cards, slices (see tally(1))\n"
    "  -s, --svg FILE      draw into this file as well\n"
    "  -n, --workers N     worker machines of the job (8)\n"
    "  -k, --servers K     CPU machines that run tallyd (0)\n"
    "  -M, --bytes SIZE    gradients, in bytes or with K, M, G, T, powers of 1024 (100M)\n"
    "      --flow SIZE     move the bytes in virtual time, with direct copies alone, in pieces of SIZE;\n"
    "                      STEPS of a kind are under way on a GPU (2), each begins after US\n"
    "                      microseconds (0)\n"
    "      --json          print JSON\n";

int tly_cli_machine(const char *command, const char *xml, const char *links, struct tly_machine *m)
{
    char why[640] = "";
    return tly_machine_load(xml, links, m, why, sizeof why) == 0 ? 0 : tly_cli_fail(command, "%s", why);
}

int tly_cli_no_plan(const char *command, const char *xml, int err)
{
    const char *file = xml ? xml : "this machine";
    if (err == -E2BIG)
        return tly_cli_fail(command, "%s: its PCIe switches are more than 8 deep; Tally plans for 8 at most",
                            file);
    if (err == -EINVAL)
        return tly_cli_fail(command, "%s contradicts itself: no plan; lstopo writes a new file", file);
    return tly_cli_fail(command, "%s: no plan: %s", file, strerror(-err));
}

/* --- JSON --------------------------------------------------------------------------------------------------- */

static const char *const sources[] = {"unknown", "guessed", "found", "given"};
static const char *const types[TLY_LINK_KINDS] = {
    "gpu_up", "gpu_down", "switch_up", "switch_down", "card_up",     "card_down",   "net_out",
    "net_in", "between",  "memory",    "nvlink",      "nvswitch_to", "nvswitch_of",
};
static const char *const bases[TLY_GROUP_BASES] = {"nvlink", "switch", "top_switch", "single", "all"};
static const char *const shares[TLY_SHARE_KINDS] = {"equal", "near", "far", "balanced"};
static const char *const verbs[] = {"copy", "add", "exchange"};
static const char *const places[] = {"gpu", "slot", "node"};
static const char *const reasons[] = {"no_groups", "no_gain", "memory_unknown", "memory_bound", "used"};

static void topo_put_text(const char *name, const char *text, const char *end)
{
    printf("\"%s\": ", name);
    tly_json_text(stdout, text);
    fputs(end, stdout);
}

static void topo_put_rate(const char *name, struct tly_rate r, const char *end)
{
    printf("\"%s\": {", name);
    tly_cli_json_number("bits_per_s", r.bytes > 0 ? r.bytes * 8 : NAN, ", ");
    printf("\"source\": \"%s\"}%s", sources[r.source], end);
}

static void topo_put_devices(const struct tly_machine *m)
{
    printf("  \"switches\": [");
    for (int i = 0; i < m->switches; i++) {
        printf("%s\n    {\"parent\": %d, \"node\": %d, \"cut_gpu\": %s, ", i ? "," : "", m->sw[i].parent,
               m->sw[i].node, m->sw[i].gpu ? "true" : "false");
        topo_put_text("address", m->sw[i].address, ", ");
        topo_put_rate("up", m->sw[i].up, "}");
    }
    printf("],\n  \"gpus\": [");
    for (int i = 0; i < m->gpus; i++) {
        const struct tly_gpu *g = &m->gpu[i];
        printf("%s\n    {\"parent\": %d, \"node\": %d, \"slice\": %d, \"memory_bytes\": %llu, ", i ? "," : "",
               g->parent, g->node, g->slice, (unsigned long long)g->memory);
        topo_put_text("address", g->address, ", ");
        topo_put_text("name", g->name, ", ");
        topo_put_rate("pcie", g->link, ", ");
        topo_put_rate("nvswitch", g->nvswitch, "}");
    }
    printf("],\n  \"cards\": [");
    for (int i = 0; i < m->cards; i++) {
        const struct tly_card *c = &m->card[i];
        printf("%s\n    {\"parent\": %d, \"node\": %d, \"ports\": %d, \"used\": %s, ", i ? "," : "",
               c->parent, c->node, c->ports, c->idle ? "false" : "true");
        topo_put_text("address", c->address, ", ");
        topo_put_text("name", c->name, ", ");
        topo_put_text("rdma", c->rdma, ", ");
        topo_put_rate("pcie", c->link, ", ");
        topo_put_rate("network", c->rate, "}");
    }
    printf("],\n");
}

static void topo_put_machine(const struct tly_machine *m)
{
    printf("  \"nodes\": [");
    for (int i = 0; i < m->nodes; i++) {
        printf("%s\n    {\"number\": %d, \"cores\": %d, \"memory_bytes\": %llu, ", i ? "," : "",
               m->node[i].number, m->node[i].cores, (unsigned long long)m->node[i].memory);
        topo_put_rate("bandwidth", m->node[i].bandwidth, "}");
    }
    printf("],\n");
    topo_put_devices(m);
    printf("  \"nvlinks\": [");
    bool first = true;
    for (int a = 0; a < m->gpus; a++)
        for (int b = a + 1; b < m->gpus; b++)
            if (m->nvlink[a][b] > 0) {
                printf("%s\n    {\"gpus\": [%d, %d], \"bits_per_s\": %.12g, \"source\": \"%s\"}",
                       first ? "" : ",", a, b, m->nvlink[a][b] * 8, sources[m->nvlink_source]);
                first = false;
            }
    printf("],\n  ");
    topo_put_rate("between_nodes", m->socket, ",\n  ");
    topo_put_rate("across", m->across, ",\n");
}

static void topo_put_links(const struct tly_cli_topo *t, const struct tly_inside *p)
{
    bool first = true;
    printf("  \"links\": [");
    for (int i = 0; i < p->links; i++) {
        const struct tly_inside_link *l = &p->link[i];
        char name[TLY_CLI_WORDS];
        if (l->bytes <= 0)
            continue;
        printf("%s\n    {\"link\": %d, \"kind\": \"%s\", \"of\": %d, \"to\": %d, ", first ? "" : ",", i,
               types[l->type], l->a, l->b);
        topo_put_text("name", tly_cli_link_text(&t->m, l, name), ", ");
        tly_cli_json_number("bytes", l->bytes, ", ");
        tly_cli_json_number("time_s", l->rate.bytes > 0 ? l->seconds : NAN, "}");
        first = false;
    }
    printf("],\n  \"steps\": [");
    for (int i = 0; i < p->steps; i++) {
        const struct tly_inside_step *s = &p->step[i];
        printf("%s\n    {\"stage\": %d, \"do\": \"%s\", \"from\": [\"%s\", %d], \"to\": [\"%s\", %d], "
               "\"begin\": %llu, "
               "\"end\": %llu, \"bytes\": %.12g, \"links\": [",
               i ? "," : "", s->phase, verbs[s->verb], places[s->from_at], s->from,
               s->verb == TLY_DO_EXCHANGE ? "card" : places[s->to_at], s->to, (unsigned long long)s->begin,
               (unsigned long long)s->end, s->bytes);
        for (int j = 0; j < s->links; j++)
            printf("%s%d", j ? ", " : "", s->link[j]);
        printf("]}");
    }
    printf("]");
}

/* How this plan's GPUs sum, and what each of its links carries. */
static void topo_put_way(const struct tly_cli_topo *t, const struct tly_inside *p)
{
    char text[TLY_CLI_WORDS];
    printf("  \"groups\": \"%s\",\n  \"shares\": \"%s\",\n  ", bases[p->way.base], shares[p->way.shares]);
    topo_put_text("strategy", tly_cli_way_text(&t->m, &p->way, text), ",\n");
    printf("  \"group_of_gpu\": [");
    for (int g = 0; g < t->m.gpus; g++)
        printf("%s%d", g ? ", " : "", p->way.group[g]);
    printf("],\n  \"share_of_gpu\": [");
    for (int g = 0; g < t->m.gpus; g++)
        printf("%s%.9g", g ? ", " : "", p->way.share[g]);
    printf("],\n  ");
    tly_cli_json_number("time_s", p->seconds, ",\n");
    printf("  \"bottleneck\": %d,\n", p->bottleneck);
    topo_put_links(t, p);
}

static void topo_put_strategy(const struct tly_cli_topo *t)
{
    const struct tly_inside *p = &t->plan;
    printf("  \"bytes\": %llu,\n  \"workers\": %d,\n  \"servers\": %d,\n  ", (unsigned long long)p->job.bytes,
           t->workers, t->servers);
    tly_cli_json_number("traffic", p->job.traffic, ",\n");
    printf("  \"s_n\": %d,\n  \"s_g\": %d,\n  \"l\": %d,\n  \"rule\": %d,\n  \"by_rule\": %s,\n",
           p->with_card, p->without_card, p->each, p->rule, p->by_rule ? "true" : "false");
    topo_put_way(t, p);
    printf(",\n  \"copied\": {");
    tly_cli_json_number("used", p->way.copied, ", ");
    tly_cli_json_number("best", p->best_copied, ", ");
    printf("\"why\": \"%s\"},\n  \"options\": [", reasons[p->why_copied]);
    for (int i = 0; i < p->options; i++)
        printf("%s\n    {\"groups\": \"%s\", \"shares\": \"%s\", \"time_s\": %.12g}", i ? "," : "",
               bases[p->option[i].base], shares[p->option[i].shares],
               p->option[i].seconds * (double)p->job.bytes);
    printf("],\n  \"better\": [");
    for (int i = 0; i < t->betters; i++) {
        printf("%s\n    {\"move\": \"%s\", \"which\": %d, \"to_switch\": %d, \"to_node\": %d, ", i ? "," : "",
               t->better[i].card ? "card" : "gpu", t->better[i].which, t->better[i].to, t->better[i].node);
        tly_cli_json_number("time_s", t->better[i].seconds, "}");
    }
    printf("],\n");
}

static void topo_put_flow(const struct tly_cli_topo *t)
{
    if (!t->flow_job.piece)
        return;
    printf(",\n  \"flow\": {\"piece\": %llu, \"steps\": %d, \"pieces\": %llu, ",
           (unsigned long long)t->flow_job.piece, t->flow_job.most, (unsigned long long)t->flow.pieces);
    tly_cli_json_number("delay_s", t->flow_job.delay, ", ");
    tly_cli_json_number("time_s", t->flow.seconds, "}");
}

/* What jobs carry out of it. */
static void topo_put_groups(const struct tly_cli_topo *t)
{
    struct tly_inside_groups groups;
    char why[160];
    bool any = tly_inside_groups(&t->direct, t->m.gpus, &groups, why, sizeof why);
    printf(",\n  \"in_jobs\": {\"group\": %d, \"owners\": [", any ? groups.each : 1);
    for (int i = 0; any && i < t->m.gpus / groups.each * groups.owners; i++)
        printf("%s%d", i ? ", " : "", groups.owner[i]);
    printf("], ");
    topo_put_text("why", any ? "" : why, "}");
}

static void topo_put_json(const struct tly_cli_topo *t)
{
    printf("{\n");
    topo_put_machine(&t->m);
    topo_put_strategy(t);
    printf("  \"direct\": {\n");
    topo_put_way(t, &t->direct);
    topo_put_groups(t);
    topo_put_flow(t);
    printf("},\n  \"notes\": [");
    for (int i = 0; i < t->m.notes; i++) {
        fputs(i ? ",\n    " : "\n    ", stdout);
        tly_json_text(stdout, t->m.note[i]);
    }
    printf("]\n}\n");
}

/* --- the command -------------------------------------------------------------------------------------------- */

static int topo_draw(const char *path, const struct tly_cli_topo *t)
{
    FILE *f = fopen(path, "we");
    if (!f)
        return tly_cli_fail("topo", "cannot write %s: %s", path, strerror(errno));
    bool failed = tly_cli_topo_draw(f, t) != 0 || ferror(f);
    if (fclose(f) != 0 || failed)
        return tly_cli_fail("topo", "cannot write %s: %s", path, strerror(errno));
    return 0;
}

static int topo_decide(struct tly_cli_topo *t, const char *xml, uint64_t bytes)
{
    char why[256] = "";
    struct tly_inside_job job = {.bytes = bytes, .traffic = tly_plan_time(t->workers, t->servers, 1, 1)};
    int err = tly_inside_plan(&t->m, &job, TLY_MAY_ALL, &t->plan);
    if (!err)
        err = tly_inside_plan(&t->m, &job, 0, &t->direct);
    if (err)
        return tly_cli_no_plan("topo", xml, err);
    if (tly_inside_check(&t->m, &t->plan, why, sizeof why) != 0 ||
        tly_inside_check(&t->m, &t->direct, why, sizeof why) != 0)
        return tly_cli_fail("topo", "this plan would be wrong, which is a mistake in Tally: %s", why);
    if (t->flow_job.piece)
        err = tly_inside_flow(&t->m, &t->direct, &t->flow_job, &t->flow);
    if (err)
        return tly_cli_fail("topo",
                            err == -E2BIG ? "--flow: there are more than a million pieces; make them larger"
                                          : "--flow: %s",
                            strerror(-err));
    t->betters = tly_inside_better(&t->m, &t->plan.job, t->plan.seconds, t->better);
    if (t->betters < 0)
        return tly_cli_fail("topo", "%s", strerror(-t->betters));
    return 0;
}

enum { OPERATION = 8 << 20 }; /* bytes, as Python cuts tensors of GPUs (device.py) */

/* SIZE[,STEPS[,US]] */
static bool topo_read_flow(const char *text, struct tly_flow_job *job)
{
    char size[32];
    size_t n = strcspn(text, ",");
    double us = 0;
    int steps = 2, end = 0;
    snprintf(size, sizeof size, "%.*s", (int)n, text);
    double bytes = tly_cli_size(size);
    if (text[n] && sscanf(text + n, ",%d%n,%lf%n", &steps, &end, &us, &end) < 1)
        return false;
    *job = (struct tly_flow_job){
        .piece = (uint64_t)bytes, .operation = OPERATION, .delay = 1e-6 * us, .most = steps};
    return n < sizeof size && !text[n + (size_t)end] && bytes >= 1 && bytes <= (double)(1ULL << 40) &&
           steps >= 1 && steps <= TLY_FLOW_MOST && us >= 0 && us <= 1e6;
}

int tly_cli_topo(int argc, char **argv)
{
    static const struct option options[] = {
        {"xml", required_argument, NULL, 'x'},     {"links", required_argument, NULL, 'l'},
        {"svg", required_argument, NULL, 's'},     {"workers", required_argument, NULL, 'n'},
        {"servers", required_argument, NULL, 'k'}, {"bytes", required_argument, NULL, 'M'},
        {"flow", required_argument, NULL, 'f'},    {"json", no_argument, NULL, 'j'},
        {"help", no_argument, NULL, 'h'},          {0}};
    static struct tly_cli_topo t;
    t.workers = 8;
    const char *xml = NULL, *links = NULL, *svg = NULL;
    double bytes = 100 << 20;
    bool json = false;
    for (int c; (c = getopt_long(argc, argv, "+x:l:s:n:k:M:h", options, NULL)) != -1;)
        switch (c) {
        case 'x':
            xml = optarg;
            break;
        case 'l':
            links = optarg;
            break;
        case 's':
            svg = optarg;
            break;
        case 'n':
            if ((t.workers = (int)tly_cli_number(optarg, 1, TLY_MAX_SERVICES)) < 0)
                return tly_cli_misuse("topo", "-n %s: the number of worker machines is 1 to %d", optarg,
                                      TLY_MAX_SERVICES);
            break;
        case 'k':
            if ((t.servers = (int)tly_cli_number(optarg, 0, TLY_MAX_SERVICES)) < 0)
                return tly_cli_misuse("topo", "-k %s: the number of CPU machines is 0 to %d", optarg,
                                      TLY_MAX_SERVICES);
            break;
        case 'M':
            bytes = tly_cli_size(optarg);
            if (bytes < 1 || bytes > (double)(1ULL << 40))
                return tly_cli_misuse("topo", "-M %s is no size up to 1T, such as 100M", optarg);
            break;
        case 'f':
            if (!topo_read_flow(optarg, &t.flow_job))
                return tly_cli_misuse(
                    "topo",
                    "--flow %s: give SIZE[,STEPS[,US]], such as 256K,4,5: 1 to %d steps, up to "
                    "a million microseconds",
                    optarg, TLY_FLOW_MOST);
            break;
        case 'j':
            json = true;
            break;
        case 'h':
            fputs(tly_cli_topo_usage, stdout);
            return 0;
        default:
            return CLI_USAGE;
        }
    if (optind < argc)
        return tly_cli_misuse("topo", "unexpected argument %s", argv[optind]);
    if (xml && links && strcmp(xml, "-") == 0 && strcmp(links, "-") == 0)
        return tly_cli_misuse("topo", "only one of --xml and --links can be standard input");
    int status = tly_cli_machine("topo", xml, links, &t.m);
    if (!status)
        status = topo_decide(&t, xml, (uint64_t)bytes);
    if (!status && svg)
        status = topo_draw(svg, &t);
    if (!status && json)
        topo_put_json(&t);
    else if (!status)
        tly_cli_topo_print(&t);
    tly_inside_finish(&t.plan);
    tly_inside_finish(&t.direct);
    return status;
}
