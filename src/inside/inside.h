/* inside.h - how a machine's GPUs sum what they have and hand it to the network: BytePS §4.2 for any machine.
 *
 * Given a machine (machine/machine.h) and a job, tly_inside_plan() chooses a way, writes down every copy of it with the links
 * that it crosses, and says how long each link is busy.  All copies overlap, because gradients go in many small parts; so
 * the link that is busy longest says how long it takes.  Pure functions, no I/O, no global state.
 *
 * `tally topo` and `tally plan --topo` show this forecast.  Jobs carry it out where they can (tly_inside_groups).
 *
 *   inside.c  chooses a way: BytePS's rules, or the fastest of the ways in ways.c
 *   steps.c   writes down each copy of it, with its links (graph.c)
 *   check.c   replays the steps, and shares no code with the files that make them
 *   groups.c  what jobs carry out of a plan
 *   flow.c    a plan's copies in virtual time, in the order of device/order.h
 *   plain.c   a plan by a given way, and the plain one to compare with
 *   better.c  other places for a card or a GPU
 *
 * Every way has the same six phases, of which some may be empty:
 *   1  the GPUs of a group reduce: each byte to the one of them that owns it
 *   2  owners copy what they own to the memory of their processor
 *   3  processors add what the groups sent, and bring it together at the node of the network card
 *   4  it goes over the network and comes back as the sum over all machines
 *   5  owners copy it back
 *   6  they pass it on within their group
 * Ways differ in who is in a group, by what it is linked, and how much each of it owns.  BytePS's two rules are two ways. */
#ifndef TLY_INSIDE_H
#define TLY_INSIDE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "machine/machine.h"

enum { TLY_INSIDE_PATH = 24, TLY_INSIDE_DEEPEST = 8 };

struct tly_inside_job {
    uint64_t bytes; /* gradients of each GPU, M */
    double
        traffic; /* over the machine's cards each way, for each byte of M (tly_plan_traffic()); 0: one machine alone */
};

/* --- links and steps ---------------------------------------------------------------------------------------- */

enum tly_inside_link_type {
    TLY_LINK_GPU_UP, /* a's PCIe link, away from it */
    TLY_LINK_GPU_DOWN,
    TLY_LINK_SWITCH_UP, /* of switch a, towards the processor */
    TLY_LINK_SWITCH_DOWN,
    TLY_LINK_CARD_UP,
    TLY_LINK_CARD_DOWN,
    TLY_LINK_NET_OUT,     /* of card a */
    TLY_LINK_NET_IN,      /* of card a */
    TLY_LINK_BETWEEN,     /* from NUMA node a to b */
    TLY_LINK_MEMORY,      /* of NUMA node a, reads and writes */
    TLY_LINK_NVLINK,      /* from GPU a to b */
    TLY_LINK_NVSWITCH_TO, /* from GPU a */
    TLY_LINK_NVSWITCH_OF, /* to GPU a */
    TLY_LINK_KINDS,
};

struct tly_inside_link {
    enum tly_inside_link_type type;
    int a, b;
    struct tly_rate rate;
    double bytes;   /* that cross it */
    double seconds; /* that it is busy; 0 where its rate is not known */
};

/* Where bytes lie: in a GPU; in the place that its processor keeps for it; in the sum of a NUMA node. */
enum tly_inside_at { TLY_AT_GPU, TLY_AT_SLOT, TLY_AT_NODE };

enum tly_inside_verb {
    TLY_DO_COPY,     /* over what lies there */
    TLY_DO_ADD,      /* to it */
    TLY_DO_EXCHANGE, /* with the network, by card `to`; `from` is a node */
};

struct tly_inside_step {
    uint8_t phase, verb, from_at, to_at, from, to;
    bool across;         /* a copy between GPUs that leaves their PCIe switch, and is slow */
    uint64_t begin, end; /* of M */
    double bytes;        /* that cross each of its links */
    int links;
    uint16_t link[TLY_INSIDE_PATH]; /* in the order in which bytes cross them; one twice counts twice */
};

/* --- ways --------------------------------------------------------------------------------------------------- */

/* Who is in a group. */
enum tly_inside_base {
    TLY_GROUP_NVLINK, /* all that NVLinks connect */
    TLY_GROUP_SWITCH, /* below one PCIe switch */
    TLY_GROUP_TOP,    /* below one switch, and those below that */
    TLY_GROUP_SINGLE, /* one GPU: each copies all it has, "brute force" */
    TLY_GROUP_ALL,    /* all, over whatever lies between: what Tally never does, to compare with */
    TLY_GROUP_BASES,
};

/* How much each of a group owns. */
enum tly_inside_shares {
    TLY_SHARE_EQUAL, /* all, equally: reduce-scatter and all-gather */
    TLY_SHARE_NEAR, /* those that share no switch with a card, near one if any are; equally.  The paper's roots */
    TLY_SHARE_FAR,      /* those that share no switch with a card, equally */
    TLY_SHARE_BALANCED, /* those that share one with a card as much less as takes least time */
    TLY_SHARE_KINDS,
};

struct tly_inside_way {
    enum tly_inside_base base;
    enum tly_inside_shares shares;
    int groups;
    bool direct;                 /* a group's GPUs all reach each other, and owners copy from each of them */
    uint8_t group[TLY_MAX_GPUS]; /* of each GPU */
    uint8_t order[TLY_MAX_GPUS]; /* GPUs, group after group, as bytes go around in it */
    bool ring
        [TLY_MAX_GPUS]; /* of each group that is not direct: a ring in this order; else bytes go along trees */
    double share[TLY_MAX_GPUS]; /* that a GPU owns of its group's bytes */
    double copied;              /* x: share of all bytes that every GPU copies to the processor as it is */
};

/* Why x is or is not what Eq. 8 and 9 would have. */
enum tly_inside_why_copied {
    TLY_COPIED_NO_GROUPS,      /* nothing to save: no group that PCIe connects */
    TLY_COPIED_NO_GAIN,        /* another link is what everything waits for */
    TLY_COPIED_MEMORY_UNKNOWN, /* whether the memory bears it */
    TLY_COPIED_MEMORY_BOUND,   /* it does not */
    TLY_COPIED_USED,
};

struct tly_inside_option {
    enum tly_inside_base base;
    enum tly_inside_shares shares;
    double seconds;
};

struct tly_inside {
    struct tly_inside_job job;
    /* What the paper asks of a machine. */
    int with_card, without_card; /* S_n, S_g: switches (or ports) with GPUs and a card, and with GPUs alone */
    int each;                    /* l: GPUs in each group of those below one switch; 0: not the same in all */
    int rule;                    /* of the paper that applies: 1, 2; 0: neither */
    bool nvlinked;               /* NVLinks connect all GPUs */
    /* What was chosen. */
    struct tly_inside_way way;
    bool by_rule; /* as the rule says; else what takes least time of the options */
    double seconds;
    int bottleneck;                                                  /* a link; -1: none */
    double best_copied, best_copied_seconds, without_copied_seconds; /* x*, J(x*), J(0) by PCIe links alone */
    enum tly_inside_why_copied why_copied;
    int options;
    struct tly_inside_option option[TLY_GROUP_BASES * TLY_SHARE_KINDS];
    int links, steps, room;
    struct tly_inside_link *link;
    struct tly_inside_step *step;
};

/* What a way may use: a mask. */
enum {
    TLY_MAY_RELAY = 1, /* GPUs pass on what others sent them; else groups are direct */
    TLY_MAY_WEIGH = 2, /* balanced shares; else the owners have equal parts */
    TLY_MAY_COPY = 4,  /* x > 0 */
    TLY_MAY_ALL = 7,
};

/* Chooses among the ways that `may` allows: that of the paper's rule where one applies, unless another is predicted to take 1%
 * less; else the fastest of all bases and shares.  -EINVAL: the machine contradicts itself (a switch above itself, indices,
 * rates that are negative or not finite).  -E2BIG: switches are more than 8 deep.  -ENOMEM. */
int tly_inside_plan(const struct tly_machine *m, const struct tly_inside_job *job, unsigned may,
                    struct tly_inside *out);

/* The groups and shares of a way; false if the machine has no such groups.  direct: GPUs join groups in their order, each the
 * first group of which it reaches every GPU. */
bool tly_inside_way(const struct tly_machine *m, enum tly_inside_base base, enum tly_inside_shares shares,
                    bool direct, struct tly_inside_way *way);

/* What BytePS compares with, an all-reduce that looks at no topology: over NVLinks where they join all GPUs, in and out of
 * the machine by the GPU beside the card ("root = 0"); else a ring over PCIe, or single copies where it cannot be. */
bool tly_inside_plain(const struct tly_machine *m, struct tly_inside_way *way);

/* As tly_inside_plan(), by this way and no other. */
int tly_inside_try(const struct tly_machine *m, const struct tly_inside_job *job,
                   const struct tly_inside_way *way, struct tly_inside *out);

void tly_inside_finish(struct tly_inside *out);

/* Groups of GPUs in a row, which jobs carry out (local/gpus.h). */
enum { TLY_INSIDE_GROUP = 8 }; /* most GPUs of a group */
struct tly_inside_groups {
    int each, owners;            /* GPUs of a group; equal parts that a group's sum has */
    uint8_t owner[TLY_MAX_GPUS]; /* of each group's parts, one group behind the other: a GPU that owns it */
};

/* The groups of a direct plan for so many GPUs, if there is one for each rank of the machine, in their order.  False: each GPU copies
 * all it has to the host, with the reason in `why`. */
bool tly_inside_groups(const struct tly_inside *plan, int gpus, struct tly_inside_groups *out, char *why,
                       size_t size);

/* Does a GPU, with the place of its topmost switch, share that with a card in use? */
bool tly_inside_shares_card(const struct tly_machine *m, int gpu);

/* Replays the steps: follows each over its links from where it begins to where it ends, keeps account of whose bytes lie
 * where, adds up what crosses each link, and asks in the end that every GPU has every GPU's bytes once and has had them
 * exchanged, that links carry what the plan says, and that none is busy for longer than the plan takes.  Shares no code
 * with what makes the steps.  0, or -EINVAL with a sentence. */
int tly_inside_check(const struct tly_machine *m, const struct tly_inside *plan, char *why, size_t size);

/* --- what a better place would bring (better.c) -------------------------------------------------------------- */

struct tly_inside_move {
    bool card;     /* a card, else a GPU */
    int which, to; /* `to`: a switch; -1: a port of its own, at `node` */
    int node;
    double seconds; /* then */
};

/* The best move of one card, and of one GPU, to another switch or to a port of its own; those that save at least 1%, the
 * better first.  Returns how many, 0 to 2; -ENOMEM. */
int tly_inside_better(const struct tly_machine *m, const struct tly_inside_job *job, double seconds,
                      struct tly_inside_move move[2]);

#endif
