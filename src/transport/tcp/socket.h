/* socket.h - TCP sockets as Tally wants them, and addresses. */
#ifndef TLY_SOCKET_H
#define TLY_SOCKET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#include "transport/transport.h"

/* A socket that is connecting, non-blocking. */
int tly_socket_connect(const struct sockaddr_storage *to, int *fd);
/* Take over an accepted socket's settings. */
void tly_socket_tune(int fd);
int tly_tcp_accept(struct tly_loop *loop, int fd, const struct tly_link_config *c);

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
