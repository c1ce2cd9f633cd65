/* gpus.h - whether the GPUs of this machine's ranks sum in groups (gpus.c).  The thread that opens the communicator calls it. */
#ifndef TLY_COMM_GPUS_H
#define TLY_COMM_GPUS_H

#include "tally/tally.h"

/* Agree with all ranks on groups of TALLY_GPU_GROUP GPUs, if the job has one machine.  Where they cannot, the host sums, and rank
 * 0 says so.  Errors are those of tally_op_wait(). */
int tly_gpus_agree(tally_comm *c);

#endif
