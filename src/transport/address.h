/* address.h - IP addresses and ports of hosts, and what of a host answers. */
#ifndef TLY_ADDRESS_H
#define TLY_ADDRESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

/* A machine's answer to a connection attempt; for sentences about an attempt that has failed. */
enum tly_reach {
    TLY_REACH_NOTHING,     /* neither this port nor another one */
    TLY_REACH_OTHER_PORT,  /* another port, but not this one: a firewall is between */
    TLY_REACH_NO_LISTENER, /* it refuses: nothing listens at the port */
    TLY_REACH_PORT,
};
enum tly_reach tly_address_reach(const struct sockaddr_storage *to, int timeout_ms);

/* ", held by process 12 of alice, job night: python train.py" of the process that listens at an address of this network
 * namespace, as far as the system tells; "" if it tells nothing, or for port 0.  False if that process
 * is no coordinator for us: it runs nothing of Tally, or is this one.  It may still forward connections to one, as ssh -L and
 * container runtimes do. */
enum { TLY_HOLDER = 256 };
bool tly_address_holder(const struct sockaddr_storage *at, char out[TLY_HOLDER]);

/* HOST and port as "HOST:PORT", with IPv6 in brackets. */
void tly_address_compose(const char *host, uint16_t port, char *out, size_t len);
/* The opposite: HOST, HOST:PORT, [V6], [V6]:PORT or a bare V6.  Without a port *port stays as it is.  -EINVAL: none of
 * these, or a host with colons that is no IPv6 address. */
int tly_address_split(const char *text, char *host, size_t len, uint16_t *port);
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
/* What tly_address_text() writes: "10.0.0.1:4711", "[::1]:4711"; -EINVAL. */
int tly_address_read(const char *text, struct sockaddr_storage *out);
socklen_t tly_address_len(const struct sockaddr_storage *a);

#endif
