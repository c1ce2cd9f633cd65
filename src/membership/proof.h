/* proof.h - proof that two processes share a machine: a memfd with a nonce, passed over an abstract Unix
 * socket.  Host ids are only a guess (cloned machines share boot ids). */
#ifndef TLY_PROOF_H
#define TLY_PROOF_H

#include <stddef.h>
#include <stdint.h>

#include "base/loop.h"

/* Hands the nonce to whoever of the same user knocks.  Owner: the loop. */
struct tly_proof_door {
    struct tly_loop *loop;
    struct tly_watch watch;
    int memfd;
    uint64_t nonce;
    char name[64];
};

/* Open a door with a random name and nonce. */
int tly_proof_open(struct tly_proof_door *d, struct tly_loop *loop);
void tly_proof_close(struct tly_proof_door *d);

/* The nonce behind the door of that name; -errno if there is none here.  Blocks for at most 2 s. */
int tly_proof_knock(const char *name, uint64_t *nonce);

#endif
