/* topo.h - what this process may use of its machine, read with hwloc once.  Knows nothing of the rest. */
#ifndef TLY_TOPO_H
#define TLY_TOPO_H

/* Cores that this process may use: physical ones within its affinity, and no more than its cgroup's CPU quota
 * allows; at least 1. */
int tly_topo_cores(void);

/* Keep the calling thread, number `index` of `count`, on one NUMA node, the threads spread over the nodes
 * that the process may use.  Does nothing on a machine of one node, or where it may not. */
void tly_topo_spread(int index, int count);

#endif
