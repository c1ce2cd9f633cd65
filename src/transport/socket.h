/* socket.h - sockets of any family. */
#ifndef TLY_SOCKET_H
#define TLY_SOCKET_H

#include <stdbool.h>

/* Non-blocking; with as many descriptors as the hard limit gives.  Negative: errno. */
int tly_socket_open(int family);
/* After this errno there is more room for descriptors now: try again. */
bool tly_socket_raise_limit(int err);

#endif
