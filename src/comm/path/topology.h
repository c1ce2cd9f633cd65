/* topology.h - which of a machine's GPUs are to sum in groups (topology.c).  The thread that opens the communicator calls it. */
#ifndef TLY_COMM_TOPOLOGY_H
#define TLY_COMM_TOPOLOGY_H

#include "local/gpus.h"
#include "tally/tally.h"

/* On the machine's first rank, all of whose ranks have GPUs: as TALLY_GPU_GROUP or the machine's topology says.  It may take a second. */
void tly_topology_choose(tally_comm *c, struct tly_gpus_choice *out);

#endif
