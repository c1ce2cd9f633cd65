/* links.c - the list of what hwloc's XML cannot say: NVLinks, rates of cards, slices.  docs/gpu.md has its grammar.
 *
 * A line is a word, names and a rate.  A rate is in bit/s each way, or with k, M, G, T. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/param.h"
#include "machine/machine.h"

enum { MAX_WORDS = 4, LINE_BYTES = 256 };

struct links_line {
    struct tly_machine *m;
    int words;
    char *word[MAX_WORDS];
    char *why;
    size_t size;
};

static int links_refuse(struct links_line *l, const char *word, const char *what)
{
    snprintf(l->why, l->size, "\"%s\" %s", word, what);
    return -EINVAL;
}

/* Bytes/s. */
static int links_read_rate(struct links_line *l, const char *text, struct tly_rate *rate)
{
    static const char letters[] = "kmgt";
    const char *end = text;
    double x;
    bool good = tly_digits(&end, true, &x);
    const char *at = good && *end ? strchr(letters, *end | 32) : NULL;
    for (int i = 0; at && i <= (int)(at - letters); i++)
        x *= 1000;
    if (!good || end[at != NULL] || !(x >= 1e3 && x <= 1e15))
        return links_refuse(l, text, "is no rate in bit/s from 1k on, such as 25G");
    *rate = (struct tly_rate){x / 8, TLY_GIVEN};
    return 0;
}

static int links_find_gpu(struct links_line *l, const char *name, int *gpu)
{
    *gpu = tly_machine_gpu(l->m, name);
    return *gpu < 0 ? links_refuse(l, name, "is no GPU of this machine") : 0;
}

static int links_nvlink(struct links_line *l)
{
    struct tly_rate rate;
    int a, b, err = links_find_gpu(l, l->word[1], &a);
    if (!err)
        err = links_find_gpu(l, l->word[2], &b);
    if (!err)
        err = links_read_rate(l, l->word[3], &rate);
    if (!err && a == b)
        err = links_refuse(l, l->word[2], "is linked to itself");
    if (!err && l->m->nvlink[a][b] > 0 && l->m->nvlink_source == TLY_GIVEN)
        err = links_refuse(l, l->word[2], "is linked to it already");
    if (err)
        return err;
    if (l->m->nvlink_source != TLY_GIVEN) /* the list takes the place of what was found */
        memset(l->m->nvlink, 0, sizeof l->m->nvlink);
    l->m->nvlink_source = TLY_GIVEN;
    l->m->nvlink[a][b] = l->m->nvlink[b][a] = rate.bytes;
    return 0;
}

static int links_nvswitch(struct links_line *l)
{
    struct tly_rate rate;
    int g = 0, err = links_read_rate(l, l->word[2], &rate);
    bool all = strcmp(l->word[1], "all") == 0;
    if (!err && !all)
        err = links_find_gpu(l, l->word[1], &g);
    for (int i = 0; i < l->m->gpus && !err; i++)
        if (all || i == g)
            l->m->gpu[i].nvswitch = rate;
    return err;
}

static int links_pcie(struct links_line *l)
{
    struct tly_machine *m = l->m;
    struct tly_rate rate;
    const char *name = l->word[1];
    int err = links_read_rate(l, l->word[2], &rate), hits = 0;
    bool all = strcmp(name, "all") == 0;
    bool gpus = all || strcmp(name, "gpus") == 0, switches = all || strcmp(name, "switches") == 0,
         cards = all || strcmp(name, "cards") == 0;
    if (err)
        return err;
    int gpu = tly_machine_gpu(m, name), card = tly_machine_card(m, name);
    for (int i = 0; i < m->gpus; i++)
        if (gpus || i == gpu)
            m->gpu[i].link = rate, hits++;
    for (int i = 0; i < m->switches; i++)
        if (switches || strcmp(m->sw[i].address, name) == 0)
            m->sw[i].up = rate, hits++;
    for (int i = 0; i < m->cards; i++)
        if (cards || i == card)
            m->card[i].link = rate, hits++;
    return hits || gpus || switches || cards
               ? 0
               : links_refuse(l, name, "is no GPU, switch or card of this machine");
}

static int links_card(struct links_line *l)
{
    struct tly_rate rate;
    int i = tly_machine_card(l->m, l->word[1]);
    bool all = strcmp(l->word[1], "all") == 0;
    if (i < 0 && !all)
        return links_refuse(l, l->word[1], "is no network card of this machine");
    int err = links_read_rate(l, l->word[2], &rate);
    for (int j = 0; j < l->m->cards && !err; j++)
        if (all || j == i)
            l->m->card[j].rate = rate;
    return err;
}

static int links_memory(struct links_line *l)
{
    struct tly_rate rate;
    double number = -1;
    const char *end = l->word[1];
    bool all = strcmp(end, "all") == 0, hit = all;
    int err = links_read_rate(l, l->word[2], &rate);
    if (!err && !all && (!tly_digits(&end, false, &number) || *end))
        err = links_refuse(l, l->word[1], "is no number of a NUMA node");
    for (int i = 0; i < l->m->nodes && !err; i++)
        if (all || l->m->node[i].number == number) {
            l->m->node[i].bandwidth = rate;
            hit = true;
        }
    return err || hit ? err : links_refuse(l, l->word[1], "is no NUMA node of this machine");
}

static int links_slices(struct links_line *l)
{
    double n = 0;
    const char *end = l->word[2];
    int g, err = links_find_gpu(l, l->word[1], &g);
    if (!err && (!tly_digits(&end, false, &n) || *end || n < 1 || n > 8))
        err = links_refuse(l, l->word[2], "is no number of slices from 1 to 8");
    if (!err)
        l->m->gpu[g].slices = (int)n;
    return err;
}

static int links_between_nodes(struct links_line *l)
{
    return links_read_rate(l, l->word[1], &l->m->socket);
}

static int links_across(struct links_line *l)
{
    return links_read_rate(l, l->word[1], &l->m->across);
}

static int links_peers(struct links_line *l)
{
    bool off = strcmp(l->word[1], "off") == 0;
    if (!off && strcmp(l->word[1], "on") != 0)
        return links_refuse(l, l->word[1], "is neither on nor off");
    l->m->peers_off = off;
    return 0;
}

static const struct {
    const char *name, *form;
    int words;
    int (*take)(struct links_line *);
} types[] = {
    {"nvlink", "nvlink GPU GPU RATE", 4, links_nvlink},
    {"nvswitch", "nvswitch GPU|all RATE", 3, links_nvswitch},
    {"pcie", "pcie NAME|gpus|switches|cards|all RATE", 3, links_pcie},
    {"card", "card NAME|all RATE", 3, links_card},
    {"memory", "memory NODE|all RATE", 3, links_memory},
    {"slices", "slices GPU COUNT", 3, links_slices},
    {"socket", "socket RATE", 2, links_between_nodes},
    {"across", "across RATE", 2, links_across},
    {"peers", "peers on|off", 2, links_peers},
};

static int links_take_line(struct links_line *l, char *text)
{
    char *save = NULL;
    text[strcspn(text, "#")] = '\0';
    for (char *w = strtok_r(text, " \t\r", &save); w; w = strtok_r(NULL, " \t\r", &save)) {
        if (l->words == MAX_WORDS)
            return links_refuse(l, w, "is a word too many");
        l->word[l->words++] = w;
    }
    if (!l->words)
        return 0;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (strcmp(types[i].name, l->word[0]) == 0) {
            if (types[i].words == l->words)
                return types[i].take(l);
            snprintf(l->why, l->size, "this line should be \"%s\"", types[i].form);
            return -EINVAL;
        }
    return links_refuse(l, l->word[0],
                        "is none of nvlink, nvswitch, pcie, card, memory, slices, socket, across, peers");
}

int tly_machine_links(const char *text, size_t length, struct tly_machine *m, char *why, size_t size)
{
    const char *end = text + length;
    int err = 0;
    for (int number = 1; text < end && !err; number++) {
        char copy[LINE_BYTES], sentence[LINE_BYTES + 128] = "";
        struct links_line l = {.m = m, .why = sentence, .size = sizeof sentence};
        const char *stop = memchr(text, '\n', (size_t)(end - text));
        size_t n = (size_t)((stop ? stop : end) - text);
        if (n >= sizeof copy || memchr(text, '\0', n)) {
            err = -EINVAL;
            snprintf(sentence, sizeof sentence, "the line is longer than 255 letters, or not text");
        } else {
            memcpy(copy, text, n);
            copy[n] = '\0';
            for (char *c = copy; *c; c++)
                *c = *c == '\t' || *c == '\r' || (*c >= ' ' && *c <= '~') ? *c : '?';
            err = links_take_line(&l, copy);
        }
        if (err)
            snprintf(why, size, "line %d: %s", number, sentence);
        text = stop ? stop + 1 : end;
    }
    return err;
}
