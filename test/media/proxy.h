/* proxy.h - stands between the two ends of a link over a socket: it cuts the stream into small pieces, flips a bit, hangs up or
 * falls silent at a given byte.  For tests. */
#ifndef TLY_PROXY_H
#define TLY_PROXY_H

#include <pthread.h>
#include <stdint.h>

#include "transport/endpoint.h"

struct proxy {
    pthread_t thread;
    int listener;
    char where[TLY_ENDPOINT], target[TLY_ENDPOINT]; /* of endpoints: the proxy's, and that behind it */
    bool local;                                     /* endpoints within the machine */
    uint32_t largest;                               /* piece */
    int64_t flip_at, cut_at, stall_at;              /* bytes from the connector; -1: never */
};

extern const struct proxy proxy_whole, proxy_pieces, proxy_bytes;

/* A socket that listens; where: at which endpoint, like: one of the same kind and machine. */
int proxy_listen(bool local, const char *like, char where[TLY_ENDPOINT]);
void *proxy_serve(void *proxy);

#endif
