/* tcp.h - TCP sockets with the settings that measuring has shown to matter. */
#ifndef TLY_TCP_H
#define TLY_TCP_H

#include "transport/medium.h"

extern const struct tly_medium tly_tcp;

/* A socket that is connecting, non-blocking. */
int tly_tcp_connect(const struct sockaddr_storage *to, int *fd);
/* A socket that listens at c->address. */
int tly_tcp_bind(const struct tly_door_config *c, int *fd);
/* Where a socket listens.  On failure the socket is closed. */
int tly_tcp_where(int fd, struct sockaddr_storage *out);
/* A connection has come: tune the socket, and write the peer's name. */
void tly_tcp_accept(int fd, const struct sockaddr_storage *from, char name[80]);
/* Nothing overtakes what the kernel has, nor do counts: keep little there that is not yet on the wire. */
enum { TLY_TCP_UNSENT = 64 << 10 };
/* How much the kernel takes ahead of what it has sent: so much, or as much as its buffer holds. */
void tly_tcp_limit_unsent(int fd, bool limited);
/* -ENOTSUP: the kernel does not say. */
int tly_tcp_load(int fd, struct tly_link_load *out);

#endif
