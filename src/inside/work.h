/* work.h - shared by inside.c (chooses a way), steps.c (writes it down) and graph.c (links and paths). */
#ifndef TLY_INSIDE_WORK_H
#define TLY_INSIDE_WORK_H

#include "inside/inside.h"

struct tly_inside_path {
    int count;
    bool across;
    uint16_t link[TLY_INSIDE_PATH];
};

/* One machine and job at work; on the heap. */
struct tly_inside_work {
    const struct tly_machine *m;
    struct tly_inside *out; /* its links, and its steps if `keep` */
    struct tly_inside_job job;
    unsigned may; /* what ways may use */
    bool keep;
    int err;
    int switch_at, card_at, between_at, memory_at, nvswitch_at; /* the first link of each kind */
    uint16_t nvlink[TLY_MAX_GPUS][TLY_MAX_GPUS];                /* from, to */
    /* The range that is written down, and by which way. */
    const struct tly_inside_way *way;
    uint64_t begin, end;
    uint64_t low[TLY_MAX_GPUS], high[TLY_MAX_GPUS];           /* what a GPU owns */
    uint64_t out_low[TLY_MAX_CARDS], out_high[TLY_MAX_CARDS]; /* what goes over a card */
};

/* Sound enough to work on?  As tly_inside_plan(). */
int tly_inside_sound(const struct tly_machine *m);

/* Makes the table of links in out.  -ENOMEM. */
int tly_inside_links(struct tly_inside_work *w);

/* The topmost switch above a place; -1: none. */
int tly_inside_top(const struct tly_machine *m, int parent);

/* Paths are appended to p. */
void tly_inside_up_gpu(const struct tly_inside_work *w, int gpu, struct tly_inside_path *p);
void tly_inside_down_gpu(const struct tly_inside_work *w, int gpu, struct tly_inside_path *p);
void tly_inside_out_card(const struct tly_inside_work *w, int card, struct tly_inside_path *p); /* and back */
void tly_inside_memory(const struct tly_inside_work *w, int node, struct tly_inside_path *p);
void tly_inside_between(const struct tly_inside_work *w, int from, int to, struct tly_inside_path *p);

/* From GPU to GPU: over NVLink where `nvlink`, and false if there is none; else over PCIe. */
bool tly_inside_gpu_to_gpu(const struct tly_inside_work *w, int from, int to, bool nvlink,
                           struct tly_inside_path *p);

/* Can they reach each other over NVLink, directly or by NVSwitch? */
bool tly_inside_nvlinked(const struct tly_machine *m, int a, int b);

/* Shares within each group by weight; equal where all of a group weigh nothing. */
void tly_inside_weigh(const struct tly_machine *m, struct tly_inside_way *way, const double *weight);

/* Writes down `way` for the bytes from begin to end of M: adds to the links' loads and, if w->keep, to the steps. */
void tly_inside_write(struct tly_inside_work *w, const struct tly_inside_way *way, uint64_t begin,
                      uint64_t end);

/* Seconds for a byte of M by this way; the loads of the links are those of 1 TB. */
double tly_inside_seconds(struct tly_inside_work *w, const struct tly_inside_way *way);

/* Begins work; out is set up and w->out.  NULL with an error. */
struct tly_inside_work *tly_inside_begin(const struct tly_machine *m, const struct tly_inside_job *job,
                                         unsigned may, struct tly_inside *out, int *err);

/* Fills in what the paper asks of a machine. */
void tly_inside_look(const struct tly_machine *m, struct tly_inside *out);

/* The steps themselves of out->way, with their real number of bytes. */
int tly_inside_write_steps(struct tly_inside_work *w);

/* Fills in out->way and what led to it. */
int tly_inside_choose(struct tly_inside_work *w);

#endif
