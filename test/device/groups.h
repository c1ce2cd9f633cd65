/* groups.h - in tests of GPUs that sum in groups: where ranks sit, and jobs on one machine and on two. */
#ifndef GROUPS_H
#define GROUPS_H

#include <stdio.h>
#include <string.h>

#include "test/device/gpu.h"
#include "test/service/job.h"

enum { MOST_RANKS = 16, SLOT = 256 << 10 };

__attribute__((unused)) static const int together[MOST_RANKS] = {0}, two_by_two[MOST_RANKS] = {0, 0, 1, 1};

/* The driver's words: four GPUs, of which 0 and 1, and 2 and 3, copy to each other. */
__attribute__((unused)) static const char pairs_of_gpus[] = "gpus=4 peers=0:1 peers=2:3";

/* On one machine, and on two. */
static inline void run_both(int (*main)(int rank, void *arg))
{
    const int *const machines[] = {together, two_by_two};
    for (int i = 0; i < 2; i++) {
        struct job j = {.ranks = 4, .machine = machines[i], .main = main, .settings = {"TALLY_GPU_GROUP=2"}};
        job_run(&j);
    }
}

#endif
