/* topo_text.c - `tally topo` for people: the machine as a tree, the strategy, and what each link carries. */
#include <langinfo.h>
#include <locale.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "cli/topo.h"

/* --- words -------------------------------------------------------------------------------------------------- */

static const char *topo_text_gbits(struct tly_rate r, char text[32])
{
    if (r.bytes <= 0)
        return "rate not known";
    snprintf(text, 32, "%.4g Gbit/s%s", r.bytes * 8e-9, r.source == TLY_GUESSED ? " (guessed)" : "");
    return text;
}

static void topo_text_append(char *text, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void topo_text_append(char *text, const char *format, ...)
{
    size_t n = strlen(text);
    va_list args;
    va_start(args, format);
    vsnprintf(text + n, TLY_CLI_WORDS - n, format, args);
    va_end(args);
}

const char *tly_cli_list_text(uint64_t set, char text[TLY_CLI_WORDS])
{
    text[0] = '\0';
    for (int i = 0; i < 64; i++) {
        int last = i;
        if (!(set >> i & 1))
            continue;
        while (last < 63 && (set >> (last + 1) & 1))
            last++;
        topo_text_append(text,
                         last > i + 1 ? "%s%d to %d"
                         : last > i   ? "%s%d, %d"
                                      : "%s%d",
                         text[0] ? ", " : "", i, last);
        i = last;
    }
    return text;
}

const char *tly_cli_card_text(const struct tly_card *c, char text[TLY_CLI_WORDS])
{
    snprintf(text, TLY_CLI_WORDS, "%s", c->name[0] ? c->name : c->rdma[0] ? c->rdma : c->address);
    return text;
}

const char *tly_cli_option_text(enum tly_inside_base base, enum tly_inside_shares shares,
                                char text[TLY_CLI_WORDS])
{
    static const char *const groups[TLY_GROUP_BASES] = {
        "over NVLink",
        "CPU-assisted, grouped by PCIe switch",
        "CPU-assisted, grouped by topmost PCIe switch",
        "every GPU copies its gradients to host memory",
        "one ring over all GPUs by PCIe, as a plain all-reduce",
    };
    static const char *const owners[TLY_SHARE_KINDS] = {
        "",
        ", roots near a card that share no switch with it",
        ", roots that share no switch with a card",
        ", GPUs that share a switch with a card own less",
    };
    snprintf(text, TLY_CLI_WORDS, "%s%s", groups[base], owners[shares]);
    return text;
}

const char *tly_cli_way_text(const struct tly_machine *m, const struct tly_inside_way *way,
                             char text[TLY_CLI_WORDS])
{
    char list[TLY_CLI_WORDS];
    uint64_t owners = 0;
    bool alike = true;
    for (int g = 0; g < m->gpus; g++) {
        owners |= way->share[g] > 0 ? 1ULL << g : 0;
        alike &= way->share[g] > 0;
    }
    tly_cli_list_text(owners, list);
    if (m->gpus == 0)
        snprintf(text, TLY_CLI_WORDS,
                 "there is no GPU: ranks sum in memory, as tally-run(1) and tallyd(8) do");
    else if (m->gpus == 1)
        snprintf(text, TLY_CLI_WORDS, "the GPU copies its gradients to host memory and back");
    else if (way->base == TLY_GROUP_SINGLE)
        snprintf(text, TLY_CLI_WORDS, "every GPU copies its gradients to host memory; the CPU sums");
    else if (way->base == TLY_GROUP_NVLINK && alike)
        snprintf(text, TLY_CLI_WORDS, "reduce-scatter and all-gather over NVLink%s",
                 way->groups > 1 ? " within each group; the CPU sums across groups" : "");
    else if (way->base == TLY_GROUP_NVLINK)
        snprintf(text, TLY_CLI_WORDS, "reduce over NVLink to GPU %.150s, and broadcast from there%s", list,
                 way->groups > 1 ? "; the CPU sums across groups" : "");
    else
        snprintf(text, TLY_CLI_WORDS,
                 "CPU-assisted aggregation: reduce-scatter and all-gather below each %sPCIe switch, the CPU "
                 "sums across switches",
                 way->base == TLY_GROUP_TOP ? "topmost " : "");
    return text;
}

const char *tly_cli_rule_text(const struct tly_inside *plan, char text[TLY_CLI_WORDS])
{
    const char *nvlink = plan->nvlinked ? "NVLinks join all GPUs" : "NVLinks do not join all GPUs";
    if (plan->rule == 0)
        snprintf(
            text, TLY_CLI_WORDS,
            "neither rule of BytePS fits (S_n = %d, S_g = %d, %s): the fastest of %d strategies compared",
            plan->with_card, plan->without_card, nvlink, plan->options);
    else if (plan->by_rule)
        snprintf(text, TLY_CLI_WORDS, "rule %d of BytePS: S_n = %d, S_g = %d, %s", plan->rule,
                 plan->with_card, plan->without_card, nvlink);
    else
        snprintf(text, TLY_CLI_WORDS,
                 "rule %d of BytePS (S_n = %d, S_g = %d) is predicted to be slower than this, the fastest of "
                 "%d strategies",
                 plan->rule, plan->with_card, plan->without_card, plan->options);
    return text;
}

const char *tly_cli_copied_text(const struct tly_inside *plan, char text[TLY_CLI_WORDS])
{
    static const char *const why[] = {
        "", "not used: another link is the bottleneck",
        "not used: the memory bandwidth is not known (a memory line in the links file gives it)",
        "not used: host memory would become the bottleneck", "used"};
    text[0] = '\0';
    if (plan->why_copied != TLY_COPIED_NO_GROUPS)
        snprintf(text, TLY_CLI_WORDS,
                 "brute-force copies of %.1f%% of the bytes would balance the PCIe links (%.1f%% less time "
                 "on them); %s",
                 100 * plan->best_copied,
                 100 * (1 - plan->best_copied_seconds / plan->without_copied_seconds), why[plan->why_copied]);
    return text;
}

static const char *topo_text_switch_text(const struct tly_machine *m, int s, char text[TLY_CLI_WORDS])
{
    snprintf(text, TLY_CLI_WORDS, "%s %s", m->sw[s].gpu ? "GPU" : "switch", m->sw[s].address);
    return text;
}

const char *tly_cli_link_text(const struct tly_machine *m, const struct tly_inside_link *l,
                              char text[TLY_CLI_WORDS])
{
    char name[TLY_CLI_WORDS] = "";
    if (l->type >= TLY_LINK_CARD_UP && l->type <= TLY_LINK_NET_IN)
        tly_cli_card_text(&m->card[l->a], name);
    if (l->type == TLY_LINK_SWITCH_UP || l->type == TLY_LINK_SWITCH_DOWN)
        topo_text_switch_text(m, l->a, name);
    switch (l->type) {
    case TLY_LINK_GPU_UP:
    case TLY_LINK_GPU_DOWN:
        snprintf(text, TLY_CLI_WORDS, "PCIe %s GPU %d", l->type == TLY_LINK_GPU_UP ? "from" : "to", l->a);
        break;
    case TLY_LINK_SWITCH_UP:
    case TLY_LINK_SWITCH_DOWN:
        snprintf(text, TLY_CLI_WORDS, "%.200s %s the CPU", name,
                 l->type == TLY_LINK_SWITCH_UP ? "to" : "from");
        break;
    case TLY_LINK_CARD_UP:
    case TLY_LINK_CARD_DOWN:
        snprintf(text, TLY_CLI_WORDS, "PCIe %s card %.200s", l->type == TLY_LINK_CARD_UP ? "from" : "to",
                 name);
        break;
    case TLY_LINK_NET_OUT:
    case TLY_LINK_NET_IN:
        snprintf(text, TLY_CLI_WORDS, "network %s card %.200s",
                 l->type == TLY_LINK_NET_OUT ? "out of" : "into", name);
        break;
    case TLY_LINK_BETWEEN:
        snprintf(text, TLY_CLI_WORDS, "node %d to node %d", m->node[l->a].number, m->node[l->b].number);
        break;
    case TLY_LINK_MEMORY:
        snprintf(text, TLY_CLI_WORDS, "memory of node %d", m->node[l->a].number);
        break;
    case TLY_LINK_NVLINK:
        snprintf(text, TLY_CLI_WORDS, "NVLink from GPU %d to %d", l->a, l->b);
        break;
    default:
        snprintf(text, TLY_CLI_WORDS, "NVSwitch %s GPU %d", l->type == TLY_LINK_NVSWITCH_TO ? "from" : "to",
                 l->a);
        break;
    }
    return text;
}

const char *tly_cli_move_text(const struct tly_machine *m, const struct tly_inside_move *move,
                              char text[TLY_CLI_WORDS])
{
    char what[TLY_CLI_WORDS], to[TLY_CLI_WORDS];
    if (move->card)
        tly_cli_card_text(&m->card[move->which], what);
    else
        snprintf(what, sizeof what, "%d", move->which);
    if (move->to >= 0)
        topo_text_switch_text(m, move->to, to);
    else
        snprintf(to, sizeof to, "a port of its own at node %d", m->node[move->node].number);
    snprintf(text, TLY_CLI_WORDS, "%s %.90s at %.120s", move->card ? "card" : "GPU", what, to);
    return text;
}

/* --- the tree ----------------------------------------------------------------------------------------------- */

/* How branches are drawn: to one more, to the last, past it, nothing. */
static const char *const lines[2][4] = {{"|- ", "`- ", "|  ", "   "}, {"├─ ", "└─ ", "│  ", "   "}};

struct topo_text_tree {
    const struct tly_machine *m;
    bool wide; /* the terminal has the characters for it */
};

static int topo_text_children(const struct tly_machine *m, int parent, int node)
{
    int n = 0;
    for (int i = 0; i < m->switches; i++)
        n += m->sw[i].parent == parent && m->sw[i].node == node;
    for (int i = 0; i < m->gpus; i++)
        n += m->gpu[i].parent == parent && m->gpu[i].node == node;
    for (int i = 0; i < m->cards; i++)
        n += m->card[i].parent == parent && m->card[i].node == node;
    return n;
}

static void topo_text_print_gpu(const struct tly_gpu *g, int i)
{
    char rate[32];
    if (g->slice >= 0)
        printf("GPU %d  slice %d\n", i, g->slice);
    else
        printf("GPU %-2d %s  %s%s%s\n", i, g->address, topo_text_gbits(g->link, rate), g->name[0] ? "  " : "",
               g->name);
}

static void topo_text_print_card(const struct tly_card *c)
{
    char rate[32], link[32], name[TLY_CLI_WORDS];
    printf("card %s  %s  network %s, PCIe %s%s%s%s", tly_cli_card_text(c, name), c->address,
           topo_text_gbits(c->rate, rate), topo_text_gbits(c->link, link),
           c->name[0] && c->rdma[0] ? ", RDMA " : "", c->name[0] && c->rdma[0] ? c->rdma : "",
           c->idle ? ", not used" : "");
    printf(c->ports > 1 ? ", %d ports\n" : "\n", c->ports);
}

static void topo_text_print_below(const struct topo_text_tree *t, int parent, int node, const char *before)
{
    const struct tly_machine *m = t->m;
    int left = topo_text_children(m, parent, node);
    char name[TLY_CLI_WORDS], rate[32], inner[TLY_CLI_WORDS];
    for (int i = 0; i < m->switches; i++)
        if (m->sw[i].parent == parent && m->sw[i].node == node) {
            left--;
            printf("%s%s%s, %s to the CPU\n", before, lines[t->wide][left == 0],
                   topo_text_switch_text(m, i, name), topo_text_gbits(m->sw[i].up, rate));
            snprintf(inner, sizeof inner, "%.200s%s", before, lines[t->wide][2 + (left == 0)]);
            topo_text_print_below(t, i, node, inner);
        }
    for (int i = 0; i < m->gpus; i++)
        if (m->gpu[i].parent == parent && m->gpu[i].node == node) {
            printf("%s%s", before, lines[t->wide][--left == 0]);
            topo_text_print_gpu(&m->gpu[i], i);
        }
    for (int i = 0; i < m->cards; i++)
        if (m->card[i].parent == parent && m->card[i].node == node) {
            printf("%s%s", before, lines[t->wide][--left == 0]);
            topo_text_print_card(&m->card[i]);
        }
}

static void topo_text_print_nvlinks(const struct tly_machine *m)
{
    bool any = false, through = false;
    for (int a = 0; a < m->gpus; a++) {
        through |= m->gpu[a].nvswitch.bytes > 0;
        for (int b = 0; b < m->gpus; b++)
            any |= m->nvlink[a][b] > 0;
    }
    if (any) {
        printf("\nNVLinks, Gbit/s each way\n      ");
        for (int b = 0; b < m->gpus; b++)
            printf(" %5d", b);
        for (int a = 0; a < m->gpus; a++) {
            printf("\nGPU %-2d", a);
            for (int b = 0; b < m->gpus; b++)
                if (m->nvlink[a][b] > 0)
                    printf(" %5.0f", m->nvlink[a][b] * 8e-9);
                else
                    printf(" %5s", "-");
        }
        putchar('\n');
    }
    for (int a = 0; a < m->gpus && through; a++) {
        uint64_t same = 0;
        char list[TLY_CLI_WORDS];
        bool first = m->gpu[a].nvswitch.bytes > 0;
        for (int b = 0; b < m->gpus; b++)
            if (m->gpu[b].nvswitch.bytes == m->gpu[a].nvswitch.bytes) {
                same |= 1ULL << b;
                first &= b >= a;
            }
        if (first)
            printf("\nNVSwitch: GPU %s, %.4g Gbit/s each way\n", tly_cli_list_text(same, list),
                   m->gpu[a].nvswitch.bytes * 8e-9);
    }
}

/* --- links -------------------------------------------------------------------------------------------------- */

static bool topo_text_alike(const struct tly_inside_link *a, const struct tly_inside_link *b)
{
    return a->type == b->type && fabs(a->bytes - b->bytes) <= 1e-6 * a->bytes &&
           fabs(a->seconds - b->seconds) <= 1e-6 * a->seconds;
}

/* Links of one kind that carry the same are one line: "PCIe from GPU 0 to 7". */
static void topo_text_name_alike(const struct tly_cli_topo *t, int from, char text[TLY_CLI_WORDS])
{
    const struct tly_inside_link *l = &t->plan.link[from];
    char list[TLY_CLI_WORDS];
    uint64_t same = 0;
    int n = 0;
    for (int i = from; i < t->plan.links; i++)
        if (topo_text_alike(l, &t->plan.link[i])) {
            same |= 1ULL << (t->plan.link[i].a & 63);
            n++;
        }
    tly_cli_list_text(same, list);
    if (n > 1 && l->type <= TLY_LINK_GPU_DOWN)
        snprintf(text, TLY_CLI_WORDS, "PCIe %s GPU %.200s", l->type == TLY_LINK_GPU_UP ? "from" : "to", list);
    else if (n > 1 && l->type >= TLY_LINK_NVSWITCH_TO)
        snprintf(text, TLY_CLI_WORDS, "NVSwitch %s GPU %.200s",
                 l->type == TLY_LINK_NVSWITCH_TO ? "from" : "to", list);
    else if (n > 1 && l->type == TLY_LINK_NVLINK)
        snprintf(text, TLY_CLI_WORDS, "NVLinks, %d of them", n);
    else if (n > 1 && (l->type == TLY_LINK_NET_IN || l->type == TLY_LINK_NET_OUT))
        snprintf(text, TLY_CLI_WORDS, "network %s %d cards", l->type == TLY_LINK_NET_OUT ? "out of" : "into",
                 n);
    else if (n > 1 && l->type <= TLY_LINK_CARD_DOWN)
        snprintf(text, TLY_CLI_WORDS, "PCIe %s %d %s", l->type & 1 ? "to" : "from", n,
                 l->type <= TLY_LINK_SWITCH_DOWN ? "switches" : "cards");
    else
        tly_cli_link_text(&t->m, l, text);
}

static bool topo_text_printed_before(const struct tly_cli_topo *t, int link)
{
    enum tly_inside_link_type type = t->plan.link[link].type;
    bool one_line = type != TLY_LINK_BETWEEN && type != TLY_LINK_MEMORY;
    for (int i = 0; i < link && one_line; i++)
        if (topo_text_alike(&t->plan.link[link], &t->plan.link[i]))
            return true;
    return false;
}

static void topo_text_print_links(const struct tly_cli_topo *t, bool wide)
{
    const struct tly_inside *p = &t->plan;
    char name[TLY_CLI_WORDS], bytes[32], busy[32];
    printf("\n%-44s %10s %11s\n", "what crosses each link", "bytes", "busy");
    for (int i = 0; i < p->links; i++) {
        const struct tly_inside_link *l = &p->link[i];
        if (l->bytes <= 0 || topo_text_printed_before(t, i))
            continue;
        topo_text_name_alike(t, i, name);
        printf("%-44s %10s", name, tly_cli_bytes_text(l->bytes, bytes));
        if (l->rate.bytes <= 0) {
            printf(l->type <= TLY_LINK_GPU_DOWN ? "\n" : "   rate not known\n");
            continue;
        }
        printf(" %11s  ", tly_cli_time_text(l->seconds, busy));
        for (int bar = (int)(20 * l->seconds / p->seconds + 0.5); bar > 0; bar--)
            fputs(wide ? "█" : "#", stdout);
        printf("%s\n", l->seconds >= p->seconds * (1 - 1e-9) ? "  <- bottleneck" : "");
    }
}

static void topo_text_print_options(const struct tly_cli_topo *t)
{
    const struct tly_inside *p = &t->plan;
    char time[32], text[TLY_CLI_WORDS];
    if (p->options < 2)
        return;
    printf("\nstrategies compared\n");
    for (int i = 0; i < p->options; i++) {
        double seconds = p->option[i].seconds * (double)p->job.bytes;
        bool chosen = p->option[i].base == p->way.base && p->option[i].shares == p->way.shares;
        printf("%s %11s  %s\n", chosen ? "*" : " ", tly_cli_time_text(seconds, time),
               tly_cli_option_text(p->option[i].base, p->option[i].shares, text));
    }
}

static void topo_text_print_strategy(const struct tly_cli_topo *t, bool wide)
{
    const struct tly_inside *p = &t->plan;
    char text[TLY_CLI_WORDS], bytes[32], time[32];
    printf("\n%s\n", tly_cli_way_text(&t->m, &p->way, text));
    if (!t->m.gpus)
        return;
    if (t->m.gpus > 1)
        printf("%s\n", tly_cli_rule_text(p, text));
    if (tly_cli_copied_text(p, text)[0])
        printf("%s\n", text);
    printf("%s of gradients on each GPU, %d worker and %d CPU machine%s: %.3g of them each way over the "
           "network\n",
           tly_cli_bytes_text((double)p->job.bytes, bytes), t->workers, t->servers,
           t->servers == 1 ? "" : "s", p->job.traffic);
    topo_text_print_links(t, wide);
    if (p->bottleneck >= 0)
        printf("\npredicted: %s; bottleneck: %s\n", tly_cli_time_text(p->seconds, time),
               tly_cli_link_text(&t->m, &p->link[p->bottleneck], text));
    if (p->seconds < t->direct.seconds * (1 - 1e-3))
        printf("with direct copies alone: %s; %s\n", tly_cli_way_text(&t->m, &t->direct.way, text),
               tly_cli_time_text(t->direct.seconds, time));
    if (t->flow.seconds > 0)
        printf("direct copies in virtual time, in pieces of %s: %s, %.1f%% of the forecast's speed\n",
               tly_cli_bytes_text((double)t->flow_job.piece, bytes), tly_cli_time_text(t->flow.seconds, time),
               100 * t->direct.seconds / t->flow.seconds);
    topo_text_print_options(t);
    for (int i = 0; i < t->betters; i++)
        printf("%sbetter placement: %s takes %s, %.0f%% less\n", i ? "" : "\n",
               tly_cli_move_text(&t->m, &t->better[i], text), tly_cli_time_text(t->better[i].seconds, time),
               100 * (1 - t->better[i].seconds / p->seconds));
}

void tly_cli_topo_print(const struct tly_cli_topo *t)
{
    const struct tly_machine *m = &t->m;
    char memory[32], rate[32];
    setlocale(LC_CTYPE, "");
    struct topo_text_tree tree = {m, strcmp(nl_langinfo(CODESET), "UTF-8") == 0};
    printf("%d GPU%s, %d NUMA node%s, %d network card%s\n", m->gpus, m->gpus == 1 ? "" : "s", m->nodes,
           m->nodes == 1 ? "" : "s", m->cards, m->cards == 1 ? "" : "s");
    for (int i = 0; i < m->nodes; i++) {
        printf("\nnode %d: %d cores, %s", m->node[i].number, m->node[i].cores,
               tly_cli_bytes_text((double)m->node[i].memory, memory));
        if (m->node[i].bandwidth.bytes > 0)
            printf(" at %s", topo_text_gbits(m->node[i].bandwidth, rate));
        putchar('\n');
        topo_text_print_below(&tree, -1, i, "");
    }
    topo_text_print_nvlinks(m);
    topo_text_print_strategy(t, tree.wide);
    for (int i = 0; i < m->notes; i++)
        printf("%snote: %s\n", i ? "" : "\n", m->note[i]);
    if (!m->gpus)
        return;
    struct tly_inside_groups groups;
    char why[160];
    if (tly_inside_groups(&t->direct, m->gpus, &groups, why, sizeof why))
        printf("\nThis is a forecast. Jobs of %d machine%s with a rank for each GPU, in their order: GPUs in "
               "groups of %d\n",
               t->workers, t->workers == 1 ? "" : "s", groups.each);
    else
        printf("\nThis is a forecast. Jobs of %d machine%s: GPUs one by one (%s)\n", t->workers,
               t->workers == 1 ? "" : "s", why);
}
