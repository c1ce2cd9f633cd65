/* machine.c - a machine's description made whole: slices, guesses, and what is said about them. */
#include "machine/machine.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What is assumed where nothing is known: PCIe 3.0 x16, and what BytePS says of the way between its processors. */
#define PCIE_GUESS (15.75e9 * TLY_PCIE_SHARE)
#define SOCKET_GUESS (300e9 / 8)

/* Cards slower than half of the fastest are for managing the machine, not for gradients. */
#define IDLE_BELOW 0.5

/* A link of 16 lanes at PCIe 1's speed. */
#define SLOWED_DOWN (4.01e9 * TLY_PCIE_SHARE)

void tly_machine_note(struct tly_machine *m, const char *format, ...)
{
    va_list args;
    if (m->notes == TLY_MAX_NOTES)
        return;
    va_start(args, format);
    vsnprintf(m->note[m->notes++], TLY_NOTE_BYTES, format, args);
    va_end(args);
}

int tly_machine_gpu(const struct tly_machine *m, const char *name)
{
    char *end;
    if (strncmp(name, "gpu", 3) == 0 && name[3] >= '0' && name[3] <= '9') {
        long n = strtol(name + 3, &end, 10);
        return !*end && n < m->gpus ? (int)n : -1;
    }
    for (int i = 0; i < m->gpus; i++)
        if (strcmp(m->gpu[i].address, name) == 0)
            return i;
    return -1;
}

int tly_machine_card(const struct tly_machine *m, const char *name)
{
    for (int i = 0; *name && i < m->cards; i++)
        if (strcmp(m->card[i].address, name) == 0 || strcmp(m->card[i].name, name) == 0 ||
            strcmp(m->card[i].rdma, name) == 0)
            return i;
    return -1;
}

/* --- slices ------------------------------------------------------------------------------------------------- */

/* NVLinks of GPU g go, as slices have none, and those behind it are by `more` further on. */
static void machine_move_links(struct tly_machine *m, int g, int more)
{
    double old[TLY_MAX_GPUS][TLY_MAX_GPUS];
    memcpy(old, m->nvlink, sizeof old);
    memset(m->nvlink, 0, sizeof m->nvlink);
    for (int i = 0; i < m->gpus; i++)
        for (int j = 0; j < m->gpus; j++)
            if (i != g && j != g)
                m->nvlink[i + (i > g) * more][j + (j > g) * more] = old[i][j];
}

/* The slices of one GPU take its place; further GPUs move up, with what is known of them. */
static int machine_cut_gpu(struct tly_machine *m, int g, char *why, size_t size)
{
    struct tly_gpu whole = m->gpu[g];
    int more = whole.slices - 1;
    if (m->gpus + more > TLY_MAX_GPUS || m->switches == TLY_MAX_SWITCHES) {
        snprintf(why, size, "with all slices the machine has more than 64 GPUs, or 128 switches");
        return -E2BIG;
    }
    struct tly_switch *s = &m->sw[m->switches];
    *s = (struct tly_switch){.parent = whole.parent, .node = whole.node, .gpu = true, .up = whole.link};
    memcpy(s->address, whole.address, sizeof s->address);
    machine_move_links(m, g, more);
    memmove(&m->gpu[g + 1 + more], &m->gpu[g + 1], (size_t)(m->gpus - g - 1) * sizeof *m->gpu);
    m->gpus += more;
    for (int i = g; i <= g + more; i++) {
        m->gpu[i] = whole;
        m->gpu[i].slices = 0;
        m->gpu[i].slice = i - g;
        m->gpu[i].parent = m->switches;
        m->gpu[i].link = m->gpu[i].nvswitch = (struct tly_rate){0};
        m->gpu[i].memory = whole.memory / (uint64_t)whole.slices;
    }
    m->switches++;
    return 0;
}

static void machine_set_peers(struct tly_machine *m)
{
    for (int i = 0; i < m->gpus; i++) {
        m->gpu[i].peers = 0;
        for (int j = 0; j < m->gpus && !m->peers_off && m->gpu[i].slice < 0; j++)
            if (j != i && m->gpu[j].slice < 0)
                m->gpu[i].peers |= 1ULL << j;
    }
}

/* --- guesses ------------------------------------------------------------------------------------------------ */

static void machine_guess_nodes(struct tly_machine *m)
{
    int lost = 0;
    if (!m->nodes)
        m->node[m->nodes++] = (struct tly_node){0};
    for (int i = 0; i < m->switches; i++)
        lost += m->sw[i].node < 0;
    for (int i = 0; i < m->gpus; i++)
        lost += m->gpu[i].node < 0;
    for (int i = 0; i < m->cards; i++)
        lost += m->card[i].node < 0;
    for (int i = 0; i < m->switches; i++)
        if (m->sw[i].node < 0)
            m->sw[i].node = 0;
    for (int i = 0; i < m->gpus; i++)
        if (m->gpu[i].node < 0)
            m->gpu[i].node = 0;
    for (int i = 0; i < m->cards; i++)
        if (m->card[i].node < 0)
            m->card[i].node = 0;
    if (lost && m->nodes > 1)
        tly_machine_note(m, "%d devices do not say on which NUMA node they are: node %d is guessed", lost,
                         m->node[0].number);
}

/* The fastest of those that are known, or what is usual. */
static double machine_usual(const struct tly_machine *m)
{
    double best = 0;
    for (int i = 0; i < m->gpus; i++)
        if (m->gpu[i].link.bytes > best)
            best = m->gpu[i].link.bytes;
    return best > 0 ? best : PCIE_GUESS;
}

static int machine_guess_rate(struct tly_rate *r, double rate)
{
    if (r->bytes > 0)
        return 0;
    *r = (struct tly_rate){rate, TLY_GUESSED};
    return 1;
}

static void machine_guess_links(struct tly_machine *m)
{
    double rate = machine_usual(m);
    int guessed = 0, slow = 0;
    bool found = false;
    for (int i = 0; i < m->gpus; i++) {
        if (m->gpu[i].slice < 0)
            guessed += machine_guess_rate(&m->gpu[i].link, rate);
        found |= m->gpu[i].link.source == TLY_FOUND;
        slow += m->gpu[i].link.source == TLY_FOUND && m->gpu[i].link.bytes < SLOWED_DOWN;
    }
    for (int i = 0; i < m->switches && m->gpus; i++) {
        found |= m->sw[i].up.source == TLY_FOUND;
        guessed += machine_guess_rate(&m->sw[i].up, rate);
    }
    for (int i = 0; i < m->cards && m->gpus; i++)
        guessed += machine_guess_rate(&m->card[i].link, rate);
    if (guessed)
        tly_machine_note(m, "%d PCIe links do not say their speed: %.0f Gbit/s is guessed", guessed,
                         rate * 8e-9);
    if (slow)
        tly_machine_note(m,
                         "the PCIe links of %d GPUs are as slow as an idle GPU's, which slows them to save "
                         "power: the machine may be faster than predicted here",
                         slow);
    if (found)
        tly_machine_note(m, "PCIe links are taken to carry %.0f%% of their nominal rate, as BytePS measured",
                         100 * TLY_PCIE_SHARE);
}

static void machine_guess_cards(struct tly_machine *m)
{
    double fastest = 0;
    for (int i = 0; i < m->cards; i++)
        if (m->card[i].rate.bytes > fastest)
            fastest = m->card[i].rate.bytes;
    for (int i = 0; i < m->cards; i++) {
        struct tly_card *c = &m->card[i];
        const char *name = c->name[0] ? c->name : c->rdma[0] ? c->rdma : c->address;
        c->idle = fastest > 0 && c->rate.bytes < IDLE_BELOW * fastest;
        if (c->idle)
            tly_machine_note(m, "card %s is left out: %s", name,
                             c->rate.bytes > 0 ? "another one is more than twice as fast"
                                               : "it does not say its rate, and another one does");
        else if (c->rate.bytes <= 0)
            tly_machine_note(m, "card %s does not say its rate: its network is not in the predicted times",
                             name);
    }
}

static void machine_guess_between(struct tly_machine *m)
{
    double least = 0;
    for (int i = 0; i < m->gpus; i++)
        if (m->gpu[i].slice < 0 && (least <= 0 || m->gpu[i].link.bytes < least))
            least = m->gpu[i].link.bytes;
    if (machine_guess_rate(&m->socket, SOCKET_GUESS) && m->nodes > 1 && m->gpus)
        tly_machine_note(m, "what the way between NUMA nodes carries is not known: %.0f Gbit/s is guessed",
                         m->socket.bytes * 8e-9);
    if (least > 0 && machine_guess_rate(&m->across, least * TLY_ACROSS_SHARE) && m->gpus > 1)
        tly_machine_note(m,
                         "copies from GPU to GPU that leave their PCIe switch are taken to be as much slower "
                         "as BytePS measured: %.0f Gbit/s",
                         m->across.bytes * 8e-9);
}

int tly_machine_finish(struct tly_machine *m, char *why, size_t size)
{
    for (int i = 0; i < m->gpus; i++)
        if (m->gpu[i].slices > 0) {
            int slices = m->gpu[i].slices, err = machine_cut_gpu(m, i, why, size);
            if (err)
                return err;
            i += slices - 1;
        }
    machine_set_peers(m);
    machine_guess_nodes(m);
    machine_guess_links(m);
    machine_guess_cards(m);
    machine_guess_between(m);
    bool linked = false, flat = m->gpus > 1 && m->switches == 0;
    for (int i = 0; i < m->gpus; i++) {
        linked |= m->gpu[i].nvswitch.bytes > 0;
        for (int j = 0; j < m->gpus; j++)
            linked |= m->nvlink[i][j] > 0;
    }
    if (m->nvswitches && !linked)
        tly_machine_note(
            m, "there are %d NVSwitches, but nothing says what the NVLinks carry: they are left out",
            m->nvswitches);
    if (flat)
        tly_machine_note(m, "no GPUs share a PCIe switch, or the machine hides it, as virtual ones do");
    return 0;
}
