/* gpus.h - whether the GPUs of this machine's ranks sum in groups (gpus.c).  The thread that opens the communicator calls it. */
#ifndef TLY_COMM_GPUS_H
#define TLY_COMM_GPUS_H

#include "tally/tally.h"

/* Agree with all ranks on groups of TALLY_GPU_GROUP GPUs.  On a machine where they cannot, the host sums, and its first rank
 * says so.  Errors are those of tally_op_wait(). */
int tly_gpus_agree(tally_comm *c);

#endif
