/* door.h - a listening socket as a door, for media whose channels come over one. */
#ifndef TLY_DOOR_H
#define TLY_DOOR_H

#include "transport/medium.h"

/* Owner: the loop. */
struct tly_socket_door {
    struct tly_door base;
    struct tly_loop *loop;
    struct tly_watch watch; /* of the socket, owned */
    struct tly_hook hook;
    struct tly_door_config config;
    bool resting, told; /* out of descriptors or memory, or too many strangers; and that has been said */
    /* A channel over an accepted socket, which it owns on success, and what to call its peer.  NULL: out of memory. */
    struct tly_channel *(*adopt)(struct tly_socket_door *d, int fd, const struct sockaddr_storage *from,
                                 char name[80]);
};

/* Over a socket that listens; it belongs to the door, also on failure.  where: as struct tly_door has it. */
int tly_socket_door_open(const struct tly_medium *medium, int fd, const char *where, uint16_t port,
                         const struct tly_door_config *c,
                         struct tly_channel *(*adopt)(struct tly_socket_door *d, int fd,
                                                      const struct sockaddr_storage *from, char name[80]),
                         struct tly_door **out);
void tly_socket_door_shut(struct tly_door *d);

#endif
