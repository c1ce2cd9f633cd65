/* cluster.h - for tests: a model of a cluster in which a replanner works.  It knows no time but samples.
 *
 * In each step what crosses a card takes as long as the plan's formula says of its true rate; the longest is the step.  A card
 * is backlogged for about the square root of the part of the step for which it is busy, as measured on the emulated cluster:
 * 0.4 where it is busy for 0.24, 0.58 and 0.75 for 0.45. */
#ifndef TLY_PLAN_CLUSTER_H
#define TLY_PLAN_CLUSTER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "plan/replan.h"

enum { CLUSTER_MOST = 24, CLUSTER_SHAPES = 6 };

/* Workers first, tallyds behind them; rates have any unit. */
struct cluster {
    int workers, count;
    double real[CLUSTER_MOST], sums[CLUSTER_MOST]; /* true rates; of sums 0: no limit */
    double noise;                                  /* of all cards' rates, drawn anew for each step, */
    uint32_t hold;                                 /* or for so many */
    double now[CLUSTER_MOST];                      /* true rates of this step */
    double bias[CLUSTER_MOST];                     /* what a gauge adds to the rate that it sees, always */
    double lie[CLUSTER_MOST];                      /* it claims this backlog; 0: the truth */
    double process[CLUSTER_MOST]; /* what its process manages of its card's rate; 0: all of it */
    double unseen[CLUSTER_MOST];  /* part of its backlog that does not show */
    struct tly_replan *r;
    struct tly_replan_service s[CLUSTER_MOST];
    uint32_t changes, steps;
    double seconds; /* of the last step */
    unsigned random;
};

/* Workers and tallyds of the clusters that tests try one by one. */
extern const int cluster_shapes[CLUSTER_SHAPES][2];
#define EACH_SHAPE(shape) for (size_t shape = 0; shape < CLUSTER_SHAPES; shape++)

/* Thousands of steps take a second for each machine of the shape: one of the large shapes runs with each part of the long
 * tests, and all with TEST_LONG=all. */
bool cluster_is_long(size_t shape);

/* All cards carry 100.  said: what the split goes by at first, or NULL: 100; most: what is declared, or 0. */
void cluster_start(struct cluster *c, int workers, int spare, const double *said, double most);
/* Four workers and some tallyds that are known, after which the first `slow` of the tallyds drop to `rate`. */
void cluster_start_slow(struct cluster *c, int spare, int slow, double rate);
void cluster_finish(struct cluster *c);
/* The split that the roster would have by what the replanner says. */
void cluster_split(struct cluster *c);
void cluster_step(struct cluster *c);
void cluster_run(struct cluster *c, int steps);
/* The weights of the split of now, and what a step takes by them and these true rates. */
void cluster_weights(const struct cluster *c, uint32_t *weight);
double cluster_took(const struct cluster *c, const double *real, const uint32_t *weight);
/* The shortest step that some split allows by the true rates. */
double cluster_best(const struct cluster *c);
/* The fraction of the optimum that the split of now reaches by the true rates; the same after some steps more. */
double cluster_fraction(const struct cluster *c);
double cluster_settled(struct cluster *c, int within);
/* The mean fraction of the optimum in some samples. */
double cluster_mean(struct cluster *c, int samples);
/* About a standard normal number. */
double cluster_normal(struct cluster *c);

#endif
