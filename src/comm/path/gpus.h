/* gpus.h - whether the GPUs of this machine's ranks sum in groups (gpus.c).  The thread that opens the communicator calls it. */
#ifndef TLY_COMM_GPUS_H
#define TLY_COMM_GPUS_H

#include "tally/tally.h"

/* Agree with the machine's ranks on groups of GPUs, those of TALLY_GPU_GROUP or of the machine's topology.  Where they cannot, the
 * host sums, and the machine's first rank says so.  Errors are those of tally_op_wait(). */
int tly_gpus_agree(tally_comm *c);
/* Say how this machine's GPUs sum, for the line with which a job begins; "": there are none. */
void tly_gpus_text(const tally_comm *c, char *out, size_t size);

#endif
