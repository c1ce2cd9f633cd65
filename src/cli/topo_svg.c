/* topo_svg.c - `tally topo --svg`: nodes at the top, switches and devices below, and on each link what crosses it.
 *
 * A link's width is its rate, its colour its busy time as a share of the bottleneck's.  Devices have a column each;
 * whatever is above them stands over the middle of theirs. */
#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "cli/topo.h"

enum {
    COLUMN = 104, /* of a device */
    DEVICE = 88,  /* wide, */
    DEVICE_HIGH = 46,
    GAP = 36, /* between nodes */
    MARGIN = 32,
    NODE_Y = 100,
    NODE_HIGH = 52,
    LEVEL = 104, /* from one level of switches to the next */
    SWITCH_HIGH = 28,
    LINE = 19, /* of text */
    LEAST_WIDE = 860,
};

struct drawing {
    FILE *out;
    const struct tly_cli_topo *t;
    int column;                                             /* the next one that is free */
    double node_x[TLY_MAX_NODES], node_wide[TLY_MAX_NODES]; /* left edge */
    double switch_x[TLY_MAX_SWITCHES], gpu_x[TLY_MAX_GPUS], card_x[TLY_MAX_CARDS]; /* middles */
    int depth[TLY_MAX_SWITCHES];
    double wide, devices_y;
};

/* --- text --------------------------------------------------------------------------------------------------- */

static void svg_put_escaped(FILE *out, const char *text)
{
    for (; *text; text++) {
        const char *special = *text == '<' ? "&lt;" : *text == '>' ? "&gt;" : *text == '&' ? "&amp;" : NULL;
        if (special)
            fputs(special, out);
        else
            fputc(*text, out);
    }
}

static void svg_put_text(const struct drawing *d, double x, double y, const char *class, const char *text)
{
    fprintf(d->out, "<text x=\"%.1f\" y=\"%.1f\" class=\"%s\">", x, y, class);
    svg_put_escaped(d->out, text);
    fputs("</text>\n", d->out);
}

/* A text cut so that it fits a width, of letters so wide. */
static void svg_put_short(const struct drawing *d, double x, double y, const char *class, const char *text,
                          double wide, double letter)
{
    char copy[TLY_CLI_WORDS];
    size_t most = (size_t)(wide / letter);
    snprintf(copy, sizeof copy, "%s", text);
    if (strlen(copy) > most && most > 2)
        snprintf(copy + most - 2, 3, "..");
    svg_put_text(d, x, y, class, copy);
}

static const char *svg_bytes_text(double bytes, char text[32])
{
    static const char *const units[] = {"B", "KB", "MB", "GB", "TB"};
    int u = 0;
    for (; bytes >= 1024 && u < 4; u++)
        bytes /= 1024;
    snprintf(text, 32, "%.3g %s", bytes, units[u]);
    return text;
}

static const char *svg_rate_text(struct tly_rate r, char text[32])
{
    snprintf(text, 32, r.bytes > 0 ? "%.4g Gbit/s%s" : "rate unknown", r.bytes * 8e-9,
             r.source == TLY_GUESSED ? "?" : "");
    return text;
}

/* --- places ------------------------------------------------------------------------------------------------- */

static void svg_place_below(struct drawing *d, int parent, int node);

static void svg_place_switch(struct drawing *d, int s)
{
    double from = d->column;
    d->depth[s] = d->t->m.sw[s].parent >= 0 ? d->depth[d->t->m.sw[s].parent] + 1 : 0;
    svg_place_below(d, s, d->t->m.sw[s].node);
    if (d->column == from)
        d->column++;
    d->switch_x[s] = (from + d->column) / 2;
}

static void svg_place_below(struct drawing *d, int parent, int node)
{
    const struct tly_machine *m = &d->t->m;
    for (int i = 0; i < m->switches; i++)
        if (m->sw[i].parent == parent && m->sw[i].node == node)
            svg_place_switch(d, i);
    for (int i = 0; i < m->gpus; i++)
        if (m->gpu[i].parent == parent && m->gpu[i].node == node)
            d->gpu_x[i] = d->column++ + 0.5;
    for (int i = 0; i < m->cards; i++)
        if (m->card[i].parent == parent && m->card[i].node == node)
            d->card_x[i] = d->column++ + 0.5;
}

/* Columns become places on the page. */
static void svg_place_all(struct drawing *d)
{
    const struct tly_machine *m = &d->t->m;
    double left = MARGIN;
    int deepest = -1;
    for (int n = 0; n < m->nodes; n++) {
        d->column = 0;
        svg_place_below(d, -1, n);
        if (d->column < 2)
            d->column = 2;
        d->node_x[n] = left;
        d->node_wide[n] = d->column * COLUMN;
        for (int i = 0; i < m->switches; i++)
            if (m->sw[i].node == n)
                d->switch_x[i] = left + d->switch_x[i] * COLUMN;
        for (int i = 0; i < m->gpus; i++)
            if (m->gpu[i].node == n)
                d->gpu_x[i] = left + d->gpu_x[i] * COLUMN;
        for (int i = 0; i < m->cards; i++)
            if (m->card[i].node == n)
                d->card_x[i] = left + d->card_x[i] * COLUMN;
        left += d->node_wide[n] + GAP;
    }
    for (int i = 0; i < m->switches; i++)
        if (d->depth[i] > deepest)
            deepest = d->depth[i];
    d->wide = fmax(left - GAP + MARGIN, LEAST_WIDE);
    d->devices_y = NODE_Y + NODE_HIGH + LEVEL * (deepest + 2) - SWITCH_HIGH;
    for (int i = 0; i < m->switches; i++) /* its own level in y, from here on */
        d->depth[i] = NODE_Y + NODE_HIGH + LEVEL * (d->depth[i] + 1) - SWITCH_HIGH;
}

/* --- links -------------------------------------------------------------------------------------------------- */

static const struct tly_inside_link nothing;

static const struct tly_inside_link *svg_find(const struct drawing *d, enum tly_inside_link_type type, int a,
                                              int b)
{
    for (int i = 0; i < d->t->plan.links; i++) {
        const struct tly_inside_link *l = &d->t->plan.link[i];
        if (l->type == type && l->a == a && l->b == b)
            return l;
    }
    return &nothing;
}

/* From pale blue, nearly idle, to red, the bottleneck. */
static const char *svg_colour(double share, char text[16])
{
    static const int stops[4][3] = {{148, 178, 214}, {66, 133, 196}, {230, 145, 56}, {200, 40, 40}};
    double at = share >= 1 ? 3 : share * 3;
    int from = at >= 3 ? 2 : (int)at, c[3];
    for (int i = 0; i < 3; i++)
        c[i] = (int)(stops[from][i] + (stops[from + 1][i] - stops[from][i]) * (at - from));
    snprintf(text, 16, "#%02x%02x%02x", c[0], c[1], c[2]);
    return text;
}

struct load {
    double bytes, share; /* the busier direction's, share of the time that all takes */
    double width;
};

static struct load svg_load_of(const struct drawing *d, const struct tly_inside_link *a,
                               const struct tly_inside_link *b)
{
    const struct tly_inside_link *l = b->seconds > a->seconds ? b : a;
    double all = d->t->plan.seconds,
           width = l->rate.bytes > 0 ? 1.5 + 1.1 * log2(1 + l->rate.bytes / 3e9) : 1.5;
    return (struct load){l->bytes, all > 0 ? l->seconds / all : 0, fmin(width, 9)};
}

static const char *svg_stroke(const struct load *l, char text[16])
{
    return l->bytes > 0 ? svg_colour(l->share, text) : "#c9ced6";
}

/* From a place above to one below, with what crosses it, both ways or the same each way. */
static void svg_draw_link(const struct drawing *d, double x1, double y1, double x2, double y2,
                          const struct tly_inside_link *a, const struct tly_inside_link *b)
{
    char c[16], text[TLY_CLI_WORDS], bytes[32];
    struct load l = svg_load_of(d, a, b);
    double bend = (y1 + y2) / 2;
    fprintf(d->out,
            "<path d=\"M%.1f %.1f C%.1f %.1f %.1f %.1f %.1f %.1f\" fill=\"none\" stroke=\"%s\" "
            "stroke-width=\"%.1f\"/>\n",
            x1, y1, x1, bend, x2, bend, x2, y2, svg_stroke(&l, c), l.width);
    if (l.bytes <= 0)
        return;
    svg_bytes_text(l.bytes, bytes);
    if (l.share > 0)
        snprintf(text, sizeof text, "%s, %.0f%%", bytes, 100 * l.share);
    else
        snprintf(text, sizeof text, "%s", bytes);
    svg_put_text(d, x2, y2 - 12, "load halo", text); /* white around the letters, above the line */
    svg_put_text(d, x2, y2 - 12, "load", text);
}

static double svg_top_x(const struct drawing *d, int parent, int node, double x)
{
    if (parent >= 0)
        return d->switch_x[parent];
    return fmin(fmax(x, d->node_x[node] + 20), d->node_x[node] + d->node_wide[node] - 20);
}

static double svg_top_y(const struct drawing *d, int parent)
{
    return parent >= 0 ? d->depth[parent] + SWITCH_HIGH : NODE_Y + NODE_HIGH;
}

static void svg_draw_links(const struct drawing *d)
{
    const struct tly_machine *m = &d->t->m;
    for (int i = 0; i < m->switches; i++) {
        const struct tly_switch *s = &m->sw[i];
        svg_draw_link(d, svg_top_x(d, s->parent, s->node, d->switch_x[i]), svg_top_y(d, s->parent),
                      d->switch_x[i], d->depth[i], svg_find(d, TLY_LINK_SWITCH_UP, i, 0),
                      svg_find(d, TLY_LINK_SWITCH_DOWN, i, 0));
    }
    for (int i = 0; i < m->gpus; i++) {
        const struct tly_gpu *g = &m->gpu[i];
        svg_draw_link(d, svg_top_x(d, g->parent, g->node, d->gpu_x[i]), svg_top_y(d, g->parent), d->gpu_x[i],
                      d->devices_y, svg_find(d, TLY_LINK_GPU_UP, i, 0), svg_find(d, TLY_LINK_GPU_DOWN, i, 0));
    }
    for (int i = 0; i < m->cards; i++) {
        const struct tly_card *c = &m->card[i];
        svg_draw_link(d, svg_top_x(d, c->parent, c->node, d->card_x[i]), svg_top_y(d, c->parent),
                      d->card_x[i], d->devices_y, svg_find(d, TLY_LINK_CARD_UP, i, 0),
                      svg_find(d, TLY_LINK_CARD_DOWN, i, 0));
    }
    for (int i = 0; i + 1 < m->nodes; i++) {
        char c[16];
        struct load l =
            svg_load_of(d, svg_find(d, TLY_LINK_BETWEEN, i, i + 1), svg_find(d, TLY_LINK_BETWEEN, i + 1, i));
        double x = d->node_x[i] + d->node_wide[i];
        fprintf(d->out,
                "<line x1=\"%.1f\" y1=\"%d\" x2=\"%.1f\" y2=\"%d\" stroke=\"%s\" stroke-width=\"%.1f\"/>\n",
                x, NODE_Y + NODE_HIGH / 2, d->node_x[i + 1], NODE_Y + NODE_HIGH / 2, svg_stroke(&l, c),
                l.width);
    }
}

/* --- NVLinks and the network, below the devices --------------------------------------------------------------- */

static double svg_draw_nvlinks(const struct drawing *d)
{
    const struct tly_machine *m = &d->t->m;
    double y = d->devices_y + DEVICE_HIGH, lowest = 0;
    for (int a = 0; a < m->gpus; a++)
        for (int b = a + 1; b < m->gpus; b++) {
            char c[16];
            if (m->nvlink[a][b] <= 0)
                continue;
            struct load l =
                svg_load_of(d, svg_find(d, TLY_LINK_NVLINK, a, b), svg_find(d, TLY_LINK_NVLINK, b, a));
            double x1 = d->gpu_x[a], x2 = d->gpu_x[b], deep = fmin(24 + fabs(x2 - x1) * 0.22, 150);
            fprintf(d->out,
                    "<path d=\"M%.1f %.1f C%.1f %.1f %.1f %.1f %.1f %.1f\" fill=\"none\" stroke=\"%s\" "
                    "stroke-width=\"%.1f\"%s><title>NVLink %d - %d</title></path>\n",
                    x1, y, x1, y + deep, x2, y + deep, x2, y, svg_stroke(&l, c),
                    fmin(1 + m->nvlink[a][b] / 25e9, 12), l.bytes > 0 ? "" : " stroke-dasharray=\"3 4\"", a,
                    b);
            lowest = fmax(lowest, deep * 0.75);
        }
    return lowest;
}

static double svg_draw_nvswitch(const struct drawing *d, double y)
{
    const struct tly_machine *m = &d->t->m;
    double left = 1e9, right = 0;
    char c[16];
    for (int a = 0; a < m->gpus; a++)
        if (m->gpu[a].nvswitch.bytes > 0) {
            struct load l = svg_load_of(d, svg_find(d, TLY_LINK_NVSWITCH_TO, a, 0),
                                        svg_find(d, TLY_LINK_NVSWITCH_OF, a, 0));
            fprintf(d->out,
                    "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"%s\" "
                    "stroke-width=\"%.1f\"/>\n",
                    d->gpu_x[a], d->devices_y + DEVICE_HIGH, d->gpu_x[a], y + 30, svg_stroke(&l, c), l.width);
            left = fmin(left, d->gpu_x[a]);
            right = fmax(right, d->gpu_x[a]);
        }
    if (right <= 0)
        return 0;
    fprintf(d->out,
            "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"26\" rx=\"5\" fill=\"#e3f0df\" "
            "stroke=\"#6a9a5b\"/>\n",
            left - DEVICE / 2.0, y + 30, right - left + DEVICE);
    svg_put_text(d, (left + right) / 2, y + 48, "name", "NVSwitch");
    return 62;
}

static double svg_draw_network(const struct drawing *d, double y)
{
    const struct tly_machine *m = &d->t->m;
    double left = 1e9, right = 0;
    for (int i = 0; i < m->cards; i++) {
        const struct tly_inside_link *out = svg_find(d, TLY_LINK_NET_OUT, i, 0),
                                     *in = svg_find(d, TLY_LINK_NET_IN, i, 0);
        if (m->card[i].idle)
            continue;
        svg_draw_link(d, d->card_x[i], d->devices_y + DEVICE_HIGH, d->card_x[i], y + 44, out, in);
        left = fmin(left, d->card_x[i]);
        right = fmax(right, d->card_x[i]);
    }
    if (right <= 0)
        return 0;
    fprintf(d->out,
            "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"26\" rx=\"13\" fill=\"#f4ead6\" "
            "stroke=\"#b08d4a\"/>\n",
            left - DEVICE / 2.0, y + 44, right - left + DEVICE);
    svg_put_text(d, (left + right) / 2, y + 62, "name", "network");
    return 76;
}

/* --- boxes -------------------------------------------------------------------------------------------------- */

static void svg_box(const struct drawing *d, double x, double y, double wide, double high, const char *fill,
                    const char *line)
{
    fprintf(
        d->out,
        "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" rx=\"5\" fill=\"%s\" stroke=\"%s\"/>\n",
        x, y, wide, high, fill, line);
}

static void svg_draw_device(const struct drawing *d, double x, const char *name, const char *more,
                            const char *last, const char *fill, const char *line)
{
    svg_box(d, x - DEVICE / 2.0, d->devices_y, DEVICE, DEVICE_HIGH, fill, line);
    svg_put_short(d, x, d->devices_y + 15, "name", name, DEVICE, 7);
    svg_put_short(d, x, d->devices_y + 28, "small", more, DEVICE, 5.2);
    svg_put_short(d, x, d->devices_y + 40, "small", last, DEVICE, 5.2);
}

static void svg_draw_boxes(const struct drawing *d)
{
    const struct tly_machine *m = &d->t->m;
    char name[TLY_CLI_WORDS], more[TLY_CLI_WORDS], rate[32], bytes[32];
    for (int i = 0; i < m->nodes; i++) {
        double x = d->node_x[i] + d->node_wide[i] / 2;
        svg_box(d, d->node_x[i], NODE_Y, d->node_wide[i], NODE_HIGH, "#e8ecf4", "#6b7a99");
        snprintf(name, sizeof name, "node %d", m->node[i].number);
        snprintf(more, sizeof more, "%d cores, %s", m->node[i].cores,
                 svg_bytes_text((double)m->node[i].memory, bytes));
        svg_put_text(d, x, NODE_Y + 22, "name", name);
        svg_put_text(d, x, NODE_Y + 39, "small", more);
    }
    for (int i = 0; i < m->switches; i++) {
        snprintf(name, sizeof name, "%s %s, %s", m->sw[i].gpu ? "GPU" : "switch", m->sw[i].address,
                 svg_rate_text(m->sw[i].up, rate));
        svg_box(d, d->switch_x[i] - 100, d->depth[i], 200, SWITCH_HIGH, m->sw[i].gpu ? "#e3f0df" : "#efe8f4",
                "#85739c");
        svg_put_short(d, d->switch_x[i], d->depth[i] + 18, "small", name, 196, 5.2);
    }
    for (int i = 0; i < m->gpus; i++) {
        const struct tly_gpu *g = &m->gpu[i];
        bool owns = d->t->plan.way.share[i] > 0 && m->gpus > 1;
        if (g->slice >= 0)
            snprintf(name, sizeof name, "slice %d", g->slice);
        else
            snprintf(name, sizeof name, "GPU %d", i);
        snprintf(more, sizeof more, "owns %.3g%%", 100 * d->t->plan.way.share[i]);
        svg_draw_device(d, d->gpu_x[i], name, g->slice >= 0 ? "of a GPU" : svg_rate_text(g->link, rate),
                        owns ? more : "", owns ? "#cfe8c6" : "#eef6eb", "#6a9a5b");
    }
    for (int i = 0; i < m->cards; i++) {
        const struct tly_card *c = &m->card[i];
        snprintf(more, sizeof more, "%s%s", svg_rate_text(c->rate, rate), c->idle ? ", not used" : "");
        svg_draw_device(d, d->card_x[i], tly_cli_card_text(c, name), more, c->address,
                        c->idle ? "#f5f5f5" : "#f9dfb8", "#b08d4a");
    }
}

/* --- the page ------------------------------------------------------------------------------------------------ */

static void svg_draw_legend(const struct drawing *d)
{
    char c[16];
    double x = d->wide - MARGIN - 250;
    for (int i = 0; i < 20; i++)
        fprintf(d->out, "<rect x=\"%.1f\" y=\"40\" width=\"9\" height=\"9\" fill=\"%s\"/>\n", x + 9 * i + 34,
                svg_colour(i / 19.0, c));
    svg_put_text(d, x + 28, 49, "end", "idle");
    svg_put_text(d, x + 218, 49, "left", "busy");
    svg_put_text(d, x + 124, 66, "small", "% of the predicted time; bytes each way");
}

static double svg_draw_words(const struct drawing *d, double y)
{
    const struct tly_cli_topo *t = d->t;
    char text[TLY_CLI_WORDS], line[2 * TLY_CLI_WORDS], time[32];
    if (t->m.gpus > 1)
        svg_put_text(d, MARGIN, y += LINE, "left", tly_cli_rule_text(&t->plan, text));
    if (t->plan.bottleneck >= 0) {
        snprintf(line, sizeof line, "Predicted: %s. Bottleneck: %s.",
                 tly_cli_time_text(t->plan.seconds, time),
                 tly_cli_link_text(&t->m, &t->plan.link[t->plan.bottleneck], text));
        svg_put_text(d, MARGIN, y += LINE, "left", line);
    }
    for (int i = 0; i < t->betters; i++) {
        snprintf(line, sizeof line, "Better placement: %s, %s.",
                 tly_cli_move_text(&t->m, &t->better[i], text),
                 tly_cli_time_text(t->better[i].seconds, time));
        svg_put_text(d, MARGIN, y += LINE, "left", line);
    }
    for (int i = 0; i < t->m.notes; i++)
        svg_put_short(d, MARGIN, y += LINE, "note", t->m.note[i], d->wide - 2 * MARGIN, 5.6);
    return y + LINE;
}

/* All but the page itself; returns how high it is. */
static double svg_draw_body(struct drawing *d)
{
    const struct tly_cli_topo *t = d->t;
    char text[TLY_CLI_WORDS], line[2 * TLY_CLI_WORDS], bytes[32];
    svg_put_text(d, MARGIN, 36, "title",
                 t->m.gpus ? "How the GPUs of this machine would sum" : "This machine");
    snprintf(line, sizeof line, "%s%s%s", tly_cli_way_text(&t->m, &t->plan.way, text),
             t->m.gpus ? ". Gradients: " : "",
             t->m.gpus ? svg_bytes_text((double)t->plan.job.bytes, bytes) : "");
    svg_put_short(d, MARGIN, 82, "left", line, d->wide - 2 * MARGIN, 5.8);
    if (t->m.gpus)
        svg_draw_legend(d);
    svg_draw_links(d);
    double y = d->devices_y + DEVICE_HIGH, below = svg_draw_nvlinks(d), bar = svg_draw_nvswitch(d, y);
    below = fmax(below, bar + svg_draw_network(d, y + bar));
    svg_draw_boxes(d);
    return svg_draw_words(d, y + below + 12);
}

int tly_cli_topo_draw(FILE *out, const struct tly_cli_topo *t)
{
    struct drawing d = {.t = t};
    char *body = NULL;
    size_t size = 0;
    d.out = open_memstream(&body, &size);
    if (!d.out)
        return -ENOMEM;
    svg_place_all(&d);
    double high = svg_draw_body(&d);
    if (fclose(d.out) != 0) {
        free(body);
        return -ENOMEM;
    }
    fprintf(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" height=\"%.0f\" "
        "font-family=\"DejaVu Sans, Helvetica, Arial, sans-serif\">\n"
        "<style>text{fill:#23272f;font-size:11px}.title{font-size:16px;font-weight:bold}"
        ".name{font-size:12px;font-weight:bold;text-anchor:middle}.small{font-size:9.5px;text-anchor:middle}"
        ".load{font-size:9.5px;text-anchor:middle}.halo{stroke:#fff;stroke-width:4px;stroke-linejoin:round}"
        ".end{text-anchor:end}.note{fill:#6b6f76;font-size:10.5px}</style>\n"
        "<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n",
        d.wide, high, d.wide, high);
    fwrite(body, 1, size, out);
    fputs("</svg>\n", out);
    free(body);
    return 0;
}
