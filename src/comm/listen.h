/* listen.h - the coordinator's socket before the communicator is opened (listen.c).  Any thread. */
#ifndef TLY_COMM_LISTEN_H
#define TLY_COMM_LISTEN_H

#include <stdint.h>

/* The socket of tally_comm_listen(), if it is at this port and this process's; the caller's from here on.  Else -1. */
int tly_listen_take(uint16_t port);

#endif
