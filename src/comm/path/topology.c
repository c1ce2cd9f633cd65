/* topology.c - topology.h: finds the machine (src/machine), picks the GPUs of its ranks, in the order of ranks, and plans for them
 * (src/inside).  `tally topo` says the same of a machine with a rank for each GPU. */
#include "comm/path/topology.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/comm.h"
#include "inside/inside.h"
#include "machine/machine.h"

enum { BYTES = 100 << 20 }; /* of gradients: the choice does not depend on it */

static bool topology_same_place(const char *a, const char *b)
{
    unsigned at[2][4];
    return sscanf(a, "%x:%x:%x.%x", &at[0][0], &at[0][1], &at[0][2], &at[0][3]) == 4 &&
           sscanf(b, "%x:%x:%x.%x", &at[1][0], &at[1][1], &at[1][2], &at[1][3]) == 4 &&
           memcmp(at[0], at[1], sizeof at[0]) == 0;
}

/* The GPUs of the machine's ranks, in their order.  False, with the reason. */
static bool topology_find_gpus(const tally_comm *c, const struct tly_machine *m, uint8_t gpu[], char *why,
                               size_t size)
{
    bool taken[TLY_MAX_GPUS] = {false};
    for (int i = 0; i < c->local_size; i++) {
        const char *address = tly_gpus_address(c->local, (uint32_t)i);
        int at = 0;
        while (at < m->gpus && !topology_same_place(m->gpu[at].address, address))
            at++;
        if (at == m->gpus || taken[at]) {
            snprintf(why, size, at < m->gpus ? "two ranks are on GPU %s" : "GPU %s is not to be seen",
                     address);
            return false;
        }
        taken[at] = true;
        gpu[i] = (uint8_t)at;
    }
    return true;
}

/* Bytes over the machine's cards each way for each byte of gradients; spare machines take half of it away at most. */
static double topology_traffic(const tally_comm *c)
{
    return c->machines == 1 ? 0 : c->services > c->machines ? 1 : 2.0 * (c->machines - 1) / c->machines;
}

static void topology_take(struct tly_gpus_choice *out, const struct tly_inside_groups *groups, int ranks)
{
    out->each = (uint32_t)groups->each;
    out->owners = (uint32_t)groups->owners;
    memcpy(out->owner, groups->owner, (size_t)(ranks / groups->each) * (size_t)groups->owners);
}

static void topology_plan(const tally_comm *c, struct tly_machine *m, struct tly_machine *ours,
                          struct tly_gpus_choice *out)
{
    const struct tly_inside_job job = {.bytes = BYTES, .traffic = topology_traffic(c)};
    uint8_t gpu[TLY_LOCAL_RANKS];
    struct tly_inside_groups groups;
    struct tly_inside *plan = calloc(1, sizeof *plan);
    if (!plan || tly_machine_load(c->params.topo, c->params.topo_links, m, out->why, sizeof out->why) != 0 ||
        !topology_find_gpus(c, m, gpu, out->why, sizeof out->why)) {
        free(plan);
        return;
    }
    tly_machine_pick(m, gpu, c->local_size, ours);
    if (tly_inside_plan(ours, &job, 0, plan) != 0)
        snprintf(out->why, sizeof out->why, "there is no plan for this machine");
    else if (tly_inside_groups(plan, ours->gpus, &groups, out->why, sizeof out->why))
        topology_take(out, &groups, c->local_size);
    tly_inside_finish(plan);
    free(plan);
}

void tly_topology_choose(tally_comm *c, struct tly_gpus_choice *out)
{
    struct tly_machine *m = calloc(2, sizeof *m);
    *out = (struct tly_gpus_choice){.each = 1, .why = "out of memory"};
    if (m)
        topology_plan(c, m, m + 1, out);
    free(m);
}
