/* kept.h - what frames say of a part of a shared tensor that moves to another service (docs/why/shared.md).
 *
 * A version is the epoch in which the part came to its service, and how many additions that has applied since.  The service sends
 * a state before each copy of the values.  The rank keeps it with them, and gives both to the part's next owner.
 *
 *   HAVE, worker -> service     kind TLY_KEPT, epoch: in which the part came here.  Payload: nothing, if the rank holds no values;
 *                               a version; or, with MARK, the state of the values that follow as FINAL
 *   AGAIN, MARK                 kind TLY_KEPT: send the values that you hold
 *   FINAL                       kind TLY_KEPT: a fragment of them
 *   HAVE, service -> worker     an operation's kind and round: the state of the RESULT that follows
 *
 *   version   epoch 32, count 64
 *   state     version, joins 32; for each rank: round of its last operation 32, its clock 32 */
#ifndef TLY_WIRE_KEPT_H
#define TLY_WIRE_KEPT_H

#include <stdbool.h>
#include <stdint.h>

#include "wire/pack.h"

enum { TLY_VERSION_BYTES = 12, TLY_STATE_LEAST = 16, TLY_STATE_RANK = 8 };

struct tly_version {
    uint32_t epoch; /* 0: of no values */
    uint64_t count;
};

static inline uint32_t tly_state_bytes(uint32_t ranks)
{
    return TLY_STATE_LEAST + ranks * TLY_STATE_RANK;
}

static inline void tly_version_put(uint8_t *to, const struct tly_version *v)
{
    tly_put64(tly_put32(to, v->epoch), v->count);
}

static inline struct tly_version tly_version_get(const uint8_t *from)
{
    return (struct tly_version){tly_get32(from), tly_get64(from + 4)};
}

static inline bool tly_version_is_newer(const struct tly_version *a, const struct tly_version *b)
{
    return a->epoch != b->epoch ? a->epoch > b->epoch : a->count > b->count;
}

#endif
