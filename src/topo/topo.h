/* topo.h - what this process may use of its machine, read with hwloc once.  Knows nothing of the rest. */
#ifndef TLY_TOPO_H
#define TLY_TOPO_H

#include <stdint.h>
#include <sys/socket.h>

/* Cores that this process may use: physical ones with a hardware thread within its affinity, and no more than
 * its cgroups' CPU quotas allow; at least 1. */
int tly_topo_cores(void);

/* The quotas alone, the least of this process's cgroup and those above it (version 2 and 1), in cores rounded
 * up; 0: none.  `root` is put before the paths that are read: "", or a folder in tests. */
int tly_topo_quota(const char *root);

/* What the memory limits of this process's cgroup and of those above it leave, the least of each, in bytes; UINT64_MAX:
 * no limit.  `root` as above. */
struct tly_topo_memory {
    uint64_t limit; /* of all that is in the group */
    uint64_t room;  /* that may still be taken before the limit is met, and somebody in the group is killed */
};
struct tly_topo_memory tly_topo_memory(const char *root);

/* The NUMA node that the network card with this address is on, or -1: not known, or the card is no hardware. */
int tly_topo_card(const struct sockaddr *address);

/* The NUMA node for thread number `index` of those that work on the same memory: the cores that this process may
 * use are handed out from node `home` on (-1: from where the calling thread runs), the nearest first, over and
 * over.  -1 on a machine of one node. */
int tly_topo_node(int home, int index);

/* Keep the calling thread, and so the memory that it is the first to touch, on tly_topo_node(home, index).  Does
 * nothing on a machine of one node, or where it may not. */
void tly_topo_place(int home, int index);

#endif
