/* endpoint.h - where a process can be dialled: "SCHEME:WHERE", one for each medium that it listens on.
 *
 * WHERE is HOST:PORT, numeric ("10.0.0.1:4711", "[fd77::3]:4711"), for a medium that crosses a network, and any other text
 * for one that does not.  Only the medium with that scheme reads more out of it. */
#ifndef TLY_ENDPOINT_H
#define TLY_ENDPOINT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#include "wire/pack.h"

enum { TLY_ENDPOINT = 80, TLY_MOST_ENDPOINTS = 4 };

struct tly_endpoint {
    char text[TLY_ENDPOINT];
};

struct tly_endpoints {
    uint32_t count;
    struct tly_endpoint at[TLY_MOST_ENDPOINTS];
};

void tly_endpoints_write(struct tly_writer *w, const struct tly_endpoints *e);
int tly_endpoints_read(struct tly_reader *r, struct tly_endpoints *e); /* -EPROTO; *e untouched then */

/* -ENOSPC: there are too many, or the text is too long. */
int tly_endpoints_add(struct tly_endpoints *e, const char *scheme, const char *where);
/* What is behind "SCHEME:" in one of them; NULL: none has that scheme. */
const char *tly_endpoints_where(const struct tly_endpoints *e, const char *scheme);

/* The address of the host, and its port, by which others name it; false: it has none. */
bool tly_endpoints_address(const struct tly_endpoints *e, struct sockaddr_storage *out);
/* Have all of them be at the host of this address; their ports stay. */
void tly_endpoints_place(struct tly_endpoints *e, const struct sockaddr_storage *host);
/* The numeric host and the port, for messages; "" and 0 if there is none. */
enum { TLY_HOST_TEXT = 64 };
uint32_t tly_endpoints_host(const struct tly_endpoints *e, char out[TLY_HOST_TEXT]);

#endif
