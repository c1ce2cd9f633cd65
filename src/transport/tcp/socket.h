/* socket.h - TCP sockets as Tally wants them, and addresses. */
#ifndef TLY_SOCKET_H
#define TLY_SOCKET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#include "transport/transport.h"

/* Non-blocking; with as many descriptors as the hard limit gives.  Negative: errno. */
int tly_socket_open(int family);
/* A socket that is connecting, non-blocking. */
int tly_socket_connect(const struct sockaddr_storage *to, int *fd);
/* Take over an accepted socket's settings. */
void tly_socket_tune(int fd);
/* -ENOTSUP: the kernel does not say. */
int tly_socket_load(int fd, struct tly_link_load *out);
/* A link over a connected, or connecting, socket, in whose hands it is on success; connecting, also on failure.
 * local: a Unix socket. */
int tly_link_connect(struct tly_loop *loop, int fd, bool local, const struct tly_link_config *c,
                     struct tly_link **out);
int tly_link_accept(struct tly_loop *loop, int fd, bool local, const struct tly_link_config *c);
/* A socket that listens at c->address; its descriptor is the caller's. */
int tly_tcp_bind(const struct tly_listener_config *c, int *fd);
/* ", held by process 12 of alice, job night: python train.py" of the process that listens at a port of this network
 * namespace, as far as the system tells; "" if it tells nothing, or for port 0. */
enum { TLY_HOLDER = 256 };
void tly_tcp_holder(uint16_t port, char out[TLY_HOLDER]);
/* A socket that listens; owned by the listener from here on, also on failure. */
int tly_listener_start(struct tly_loop *loop, int fd, const struct tly_listener_config *c,
                       struct tly_listener **out);

/* What of a machine answers a connection attempt: for sentences about one that has failed. */
enum tly_reach {
    TLY_REACH_NOTHING,     /* neither this port nor another one */
    TLY_REACH_OTHER_PORT,  /* another port, but not this one: a firewall is between */
    TLY_REACH_NO_LISTENER, /* it refuses: nothing listens at the port */
    TLY_REACH_PORT,
};
enum tly_reach tly_tcp_reach(const struct sockaddr_storage *to, int timeout_ms);

/* The host part, numeric. */
void tly_address_host(const struct sockaddr_storage *a, char *out, size_t len);
/* "host:port", numeric; IPv6 in brackets. */
void tly_address_text(const struct sockaddr_storage *a, char *out, size_t len);
uint16_t tly_address_port(const struct sockaddr_storage *a);
void tly_address_set_port(struct sockaddr_storage *a, uint16_t port);
bool tly_address_is_loopback(const struct sockaddr_storage *a);
/* Same host part. */
bool tly_address_same_host(const struct sockaddr_storage *a, const struct sockaddr_storage *b);
/* An IPv4 address in IPv6's clothes, as a listener for both sees it, becomes a plain one. */
void tly_address_unmap(struct sockaddr_storage *a);
/* "::", or "0.0.0.0" where there is no IPv6: all of a machine's addresses, of both families. */
void tly_address_any(struct sockaddr_storage *out);
bool tly_address_is_any(const struct sockaddr_storage *a);
/* An IPv6 address that means something else on every link. */
bool tly_address_is_link_local(const struct sockaddr_storage *a);
/* Numeric address without look-up ("10.0.0.1", "::1"); -EINVAL. */
int tly_address_parse(const char *host, uint16_t port, struct sockaddr_storage *out);
socklen_t tly_address_len(const struct sockaddr_storage *a);

#endif
