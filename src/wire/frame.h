/* frame.h - the one header that opens every message, and its limits.  No I/O.
 *
 * 128 bytes, little-endian, encoded byte by byte:
 *
 *        0        4        8       12       16
 *      0 | magic  |v  t fl | seq    | part   |      v version, t type, fl flags
 *     16 | place in tensor | length | offset |      the part's place and length; the fragment's offset in it
 *     32 | payload| round  |accepted|granted |      payload bytes that follow; cumulative counts, modulo 2^32
 *     48 |received| stable | check           |      SipHash-2-4 of the header, with 0 here, under the direction's key
 *     64 | key             | spec hash       |      from here on the context
 *     80 | element count   | epoch  |k d o - |      k kind, d dtype, o op
 *     96 | group  | rank   | root   |priority|      rank: who sends
 *    112 | prescale        | postscale       |
 *
 * A frame whose context is that of the frame before it, in its direction, has the flag SAME and leaves it out, as all
 * parts of a tensor do but for the first; the check is that of the whole header.
 * Where a push is the sum of a machine's ranks, root says how many ranks all pushes of the part are of, less one.
 * A message and a probe have the hash of their group and tag in the place of the element count.
 * seq, the counts and the check are filled in when the frame goes to the kernel.
 *
 * With TALLY_CHECKSUM=1 the XXH3 of a payload follows it, if it leaves the machine.  No byte of a fragment lands over its input
 * or counts before the fragment is verified (transport/link/).  An altered fragment closes the connection.
 *
 * Every header carries four counts, the low 32 bits of cumulative 64-bit counts:
 *   accepted  bytes of pushes that the service has taken off the connection; gives the rank's credit back
 *   granted   bytes that the rank may push in all; the window
 *   received  results that have landed whole on the rank, in the order in which they were sent
 *   stable    how many of those all ranks have
 * Without other frames they go alone (COUNTS).  An idle rank sends them after four parts or 20 ms, and one with more to push
 * after at most 50 ms.  A service sends them after 3/4 of the rank's credit or 20 ms.  With REQUEST a rank says that an operation
 * waits for no more than `stable`: the service sends that once it has reached the `received` of this frame. */
#ifndef TLY_FRAME_H
#define TLY_FRAME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    TLY_FRAME_BYTES = 128,
    TLY_FRAME_LEAST = 64, /* without a context */
    TLY_PROTOCOL_LOWEST = 1,
    TLY_PROTOCOL_HIGHEST = 1,
    TLY_MAX_FRAGMENT = 256 << 10, /* payload of one data frame */
    TLY_MAX_CONTROL = 1 << 20,    /* payload of any other frame */
    TLY_MAX_PART = 64 << 20,
    TLY_ALIGN = 64, /* parts and fragments begin at multiples of this in the tensor */
    TLY_FRAME_KEY_BYTES = 16,
    TLY_TRAILER_BYTES = 8, /* XXH3 of the payload, 64 bits, little-endian, seeded with the frame's seq */
    TLY_MAX_RANKS = 4096,
};

enum tly_frame_type {
    TLY_HELLO = 1, /* proof of the secret; payload struct of hello.h */
    TLY_ROSTER,    /* member -> coordinator: who I am; back: candidates for one machine; then: the proofs */
    TLY_INVITE, /* coordinator -> member: the epoch; connect to all its services; later: a service has come */
    TLY_PREPARE, /* change of epoch: begin no new rounds */
    TLY_BEGUN,   /* member -> coordinator: connected; rounds begun */
    TLY_COMMIT,  /* coordinator -> member: the epoch holds from here */
    TLY_COMPLAIN, /* rank -> coordinator: why the job cannot go on, or which service cannot be reached; MARK: why I leave */
    TLY_PUSH,    /* worker -> service: input, request or error mark */
    TLY_RESULT,  /* service -> worker */
    TLY_SPEC,    /* home -> worker: tell your spec; back: its text */
    TLY_VERDICT, /* home -> worker: this round fails with this sentence; key 0: the job does */
    TLY_CANCEL, /* worker -> service: forget my push of this part, and what a create that has failed has left of it; MARK: to
                 * home, fail the round with this reason */
    TLY_AGAIN, /* service -> worker: push this part again from an offset; MARK: send the result up to there (FINAL) */
    TLY_HAVE, /* worker -> service: so much of this part's result has landed; LAST: all, MARK: a verdict; of a kept part: which
               * version the worker holds; back: version and counts of the values that follow */
    TLY_DONE, /* worker -> service: that was all I have in doubt; back: this part is stable */
    TLY_FINAL,   /* worker -> service: the result as it has landed */
    TLY_COUNTS,  /* nothing but counts */
    TLY_BEAT,    /* nothing but a sign of life and counts */
    TLY_STATUS,  /* question about, or news of, a service or a round */
    TLY_GOODBYE, /* an orderly end; back: all have left, or, with a number, that rank has left */
    TLY_PACE, /* service -> worker, asked: for how long it had results on their way; rank -> coordinator: its traffic over
               * all connections, QUIET: it has none, and how many epochs it needs, MARK: its steps; back: who holds all
               * up, what cards carry, and what has changed the split last */
    TLY_GROUP,  /* worker -> service: the ranks that a group's number stands for, on this connection */
    TLY_RETURN, /* between the links' ends: what lies in your memory has been read */
    TLY_MEASURE, /* what network cards carry: coordinator <-> member, member <-> service (membership/measure.h) */
    TLY_JOINED, /* a rank takes part in nothing until all ranks have joined; coordinator -> member: all have */
    TLY_SETUP, /* between the links' ends, before the first frame of their users: how the medium goes on (medium.h); empty:
                * ready; MARK: this end cannot, and why */
    TLY_FRAME_TYPES
};

/* Ends the title of a spec in words (SPEC's payload): "all_reduce no. 16|float32 [3] sum". */
enum { TLY_TITLE_END = '|' };

enum tly_frame_flag {
    TLY_LAST = 1,    /* last fragment of its part */
    TLY_REQUEST = 2, /* asks for data and brings none */
    TLY_MARK = 4,    /* error mark: the payload is the reason; QUIET: of what its rank has cancelled */
    TLY_SUMMED = 16, /* the payload, if any, is followed by its checksum; set by the link */
    TLY_QUIET = 32,  /* the pusher wants no result: its answer is empty; of PACE: the rank has no traffic */
    TLY_OFFER = 64,  /* there is data, to be asked for when somebody wants it; brings none */
    TLY_SHOWN = 128, /* between ends on one machine: a reference follows, not the payload; set by the link */
    TLY_RESUMED = 256, /* after a connection has been mended; of a push: its first fragment, not its part's */
    TLY_PATIENT = 512, /* of a push: who sends it minds no wait for the others */
    TLY_SAME = 1024,   /* the context is that of the frame before; set and taken away by encode and decode */
};

/* A frame's group: 0 stands for all ranks in their order, other numbers for the list that its rank has sent, and
 * these for two ranks alone, of which the first gives and the second takes. */
#define TLY_PAIR 0x80000000u
static inline uint32_t tly_pair(uint32_t from, uint32_t to)
{
    return TLY_PAIR | from << 12 | to;
}
static inline uint32_t tly_pair_from(uint32_t pair)
{
    return pair >> 12 & (TLY_MAX_RANKS - 1);
}
static inline uint32_t tly_pair_to(uint32_t pair)
{
    return pair & (TLY_MAX_RANKS - 1);
}

enum { TLY_KINDS = 32 }; /* numbers of operations are below */
/* A kind of operation beyond those of tally.h: who has a message for me? */
enum { TLY_PROBE = 11 };
/* A handle's kind, of no frame: this rank waits until all have joined. */
enum { TLY_JOIN = 12 };
/* Of HAVE, AGAIN and FINAL: they are about a part of a shared tensor, and about no operation (wire/kept.h). */
enum { TLY_KEPT = 17 };

struct tly_frame {
    uint8_t type;
    uint16_t flags;
    uint32_t seq, epoch;
    uint64_t key, spec, count;
    uint8_t kind, dtype, op;
    uint32_t part;
    uint64_t place;
    uint32_t length, offset;
    uint32_t payload, round, group, rank, root;
    int32_t priority;
    double prescale, postscale;
    uint32_t accepted, granted, received, stable;
};

/* Is it about a part of a shared tensor that moves? */
static inline bool tly_frame_is_kept(const struct tly_frame *f)
{
    return f->kind == TLY_KEPT;
}

/* The context of the last frame of one direction of a connection. */
struct tly_context {
    uint8_t bytes[TLY_FRAME_BYTES - TLY_FRAME_LEAST];
};

/* At a connection's beginning: that of no frame. */
void tly_context_init(struct tly_context *c);

/* Returns how many bytes of `out` are to be sent.  `last` is kept up to date by encode and decode. */
uint32_t tly_frame_encode(const struct tly_frame *f, const uint8_t key[TLY_FRAME_KEY_BYTES],
                          struct tly_context *last, uint8_t out[TLY_FRAME_BYTES]);

/* Bytes of the header of which these are the first.  Not checked yet. */
uint32_t tly_frame_size(const uint8_t in[TLY_FRAME_LEAST]);

/* `in` has tly_frame_size() bytes.  0, or -EPROTO with *why (a static string) set: wrong magic, version, check or
 * sequence number, or a field out of its limits.  Nothing of the frame is believed before the check holds. */
int tly_frame_decode(const uint8_t *in, const uint8_t key[TLY_FRAME_KEY_BYTES], uint32_t seq,
                     struct tly_context *last, struct tly_frame *f, const char **why);

/* The table of types (types.c). */
bool tly_frame_is_type(int type);
/* From whom to whom a frame may go.  What a watcher is answered is not in the table: it asks and reads one answer. */
enum tly_frame_way {
    TLY_SERVICE_TO_RANK,
    TLY_RANK_TO_SERVICE,
    TLY_WATCHER_TO_SERVICE,
    TLY_RANK_TO_COORDINATOR,
    TLY_TALLYD_TO_COORDINATOR,
    TLY_WATCHER_TO_COORDINATOR,
    TLY_COORDINATOR_TO_MEMBER,
    TLY_FRAME_WAYS
};
bool tly_frame_goes(int type, enum tly_frame_way way);
uint32_t tly_frame_most(int type); /* bytes of the payload */

/* The least that a push costs its rank's window, for bookkeeping takes memory too. */
enum { TLY_LEAST_CHARGE = 256 };
static inline uint32_t tly_charge(uint32_t length)
{
    return length < TLY_LEAST_CHARGE ? TLY_LEAST_CHARGE : length;
}

/* A cumulative count from its last 32 bits: the nearest value to `before`. */
static inline uint64_t tly_count_extend(uint64_t before, uint32_t wire)
{
    return before + (uint64_t)(int64_t)(int32_t)(wire - (uint32_t)before);
}

#endif
