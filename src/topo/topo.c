/* topo.c - hwloc's view of the machine, cut down to what is asked. */
#include "topo/topo.h"

#include <hwloc.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>

/* Loaded once, never changed: read by any thread. */
static hwloc_topology_t topology;
static hwloc_bitmap_t allowed;
static bool loaded;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void load(void)
{
    if (hwloc_topology_init(&topology) != 0)
        return;
    allowed = hwloc_bitmap_alloc();
    loaded = allowed && hwloc_topology_load(topology) == 0 &&
             hwloc_get_cpubind(topology, allowed, HWLOC_CPUBIND_PROCESS) == 0;
}

/* cgroup v2's cpu.max, "QUOTA PERIOD" or "max PERIOD", in cores rounded up; 0: no limit. */
static int quota(void)
{
    long long us, period;
    int cores = 0;
    FILE *f = fopen("/sys/fs/cgroup/cpu.max", "re");
    if (!f)
        return 0;
    if (fscanf(f, "%lld %lld", &us, &period) == 2 && period > 0)
        cores = (int)((us + period - 1) / period);
    fclose(f);
    return cores;
}

int tly_topo_cores(void)
{
    pthread_once(&once, load);
    int cores = loaded ? hwloc_get_nbobjs_inside_cpuset_by_type(topology, allowed, HWLOC_OBJ_CORE) : 1;
    int limit = quota();
    if (limit && limit < cores)
        cores = limit;
    return cores > 1 ? cores : 1;
}

void tly_topo_spread(int index, int count)
{
    pthread_once(&once, load);
    int nodes = loaded ? hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_NUMANODE) : 0;
    if (nodes < 2 || count < 1)
        return;
    hwloc_obj_t node = hwloc_get_obj_by_type(topology, HWLOC_OBJ_NUMANODE, (unsigned)(index * nodes / count));
    hwloc_bitmap_t set = hwloc_bitmap_alloc();
    if (node && set) {
        hwloc_bitmap_and(set, node->cpuset, allowed);
        if (!hwloc_bitmap_iszero(set))
            hwloc_set_cpubind(topology, set, HWLOC_CPUBIND_THREAD); /* a wish: EPERM is no error */
    }
    hwloc_bitmap_free(set);
}
