/* control.h - what lies at the head of each rank's segment: the ring of posts, the work entries, and words that wake.
 *
 * A rank writes its posts into its own ring and all others read them, each at its own pace: one message to all.
 * Small data travel in the post itself; a larger tensor's post says where it lies. */
#ifndef TLY_LOCAL_CONTROL_H
#define TLY_LOCAL_CONTROL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "device/device.h"
#include "local/local.h"

enum {
    TLY_RING = 256 << 10,  /* bytes, a power of two */
    TLY_EAGER = 4096,      /* most bytes in a post */
    TLY_TINY = 16,         /* most bytes in its first 64 */
    TLY_AHEAD = 256,       /* bytes of a payload that are asked for before they are read, or written */
    TLY_PROCESSORS = 1024, /* whose numbers are looked at */
    TLY_WORKS = 1 << 15, /* large operations in flight; more take the other way.  A team's wait: so many that
                              ranks which submit in opposite orders do not come to wait for each other */
    TLY_BLOCK = 128 << 10, /* bytes of private memory that are moved at once */
    TLY_ZEROS = 16 << 10,  /* bytes of what stands for a rank that has joined */
    TLY_LOOKS = 8,         /* between looks at the clock where a submission lingers */
};

enum { TLY_POST_EAGER = 1, TLY_POST_POOL_IN = 2, TLY_POST_POOL_OUT = 4, TLY_POST_SERVICE = 8 };
/* Not a call: the rank has thought of taking back the one that it has posted under this name, and does so if this has
 * TLY_POST_SERVICE. */
enum { TLY_POST_BACK = 16 };
/* Not a call, either: the rank has joined, and does not post of what it has not by now. */
enum { TLY_POST_JOINED = 64 };
/* Posted by a rank behind its TLY_POST_JOINED, but of the time before. */
enum { TLY_POST_LATE = 128 };
enum { TLY_POST_PATIENT = 32 }; /* who has posted it minds no wait for the others */

/* `there` of a post: all ranks of the machine take part, or a group's: then a line follows that has a bit for each rank. */
enum { TLY_POST_ALL = 1, TLY_POST_GROUP, TLY_POST_LINE = 64 };

/* One rank's call.  In the ring; its payload follows, and the next post begins at a multiple of 64.  Readers look at
 * `there` of the next one: what is tiny crosses from core to core as one line of the cache. */
struct tly_post {
    uint64_t key, spec;
    union {
        struct {
            uint64_t input, output; /* place in the segment, or address in the process */
        };
        uint8_t tiny[TLY_TINY]; /* or all of the payload */
    };
    uint64_t bytes;    /* of the input */
    int64_t first_dim; /* of a team: how many parts there are; of another reduction: the priority */
    uint32_t round, gen;
    uint16_t work; /* the entry, and its generation */
    uint8_t call;  /* its number; 0: there is no post */
    uint8_t flags;
    bool gpu; /* the tensor is on a GPU that sums in a group */
    _Atomic uint16_t
        there; /* 0: none yet.  Last, release; pairs with acquire in the readers.  Cleared before the one before */
};
_Static_assert(sizeof(struct tly_post) == 64, "posts begin at multiples of 64");

/* Who does which chunk of a large operation.  Generation in the upper half, a number below.  In a team each rank has one
 * for each of its operations: `next` is not 0 once its buffers are not lent any more, `done` counts results in them.  What
 * goes through windows: window.h. */
struct tly_work {
    _Alignas(64) _Atomic uint64_t
        next;              /* the next chunk to be taken; UINT32_MAX: its rank has given the round up */
    _Atomic uint64_t done; /* chunks that are done; release, pairs with acquire in readers */
    _Atomic uint64_t
        window; /* its place in the segment; of a group's sum in the pool: generation, chunks that are there */
    /* Of a team: what its rank's post does not say, for one that stands in.  The post publishes it. */
    struct {
        double prescale, postscale;
        uint64_t count;
        int32_t priority;
        uint8_t dtype, reduction;
    } what;
};

/* A rank asks the owner of this segment to copy a block between the owner's private memory and that rank's slot (ferry.c). */
struct tly_ask {
    _Alignas(64) uint64_t at; /* where the block begins in the tensor */
    uint32_t length, gen;
    uint16_t work; /* the owner's entry for the operation, and its generation */
    bool writes;   /* into the output; else out of the input */
    bool done;     /* the answer: it has been copied; written by the owner */
};

enum { TLY_ABLE = 1, TLY_DIRECT = 2, TLY_UNABLE = 4 }; /* control.state */
enum { TLY_WAKE_THREAD = 1, TLY_WAKE_WAITERS = 2 };    /* control.wanted, as a futex's bits */

/* Of GPUs that sum in groups (gpus.h).  Other ranks read it after its owner has closed. */
enum { TLY_GPUS_LISTED = 64 };
enum { TLY_GPUS_STOPPED = 1, TLY_GPUS_LEFT = 2 };
enum { TLY_GPUS_OWNER = 255 }; /* carries: the owner in the first group */

/* Bytes of a tensor that all ranks of the machine are to post as pieces. */
struct tly_gpus_entry {
    uint64_t round; /* its name */
    uint64_t at, bytes;
    uint32_t chunk; /* most bytes of a piece; owners have pieces in turn */
    uint8_t carrier, steps;
};

/* The machine's groups: the first rank's word. */
struct tly_gpus_choice {
    uint32_t each,
        owners; /* ranks of a group, 1: none sum on GPUs; places of owners, which own pieces in turn */
    uint8_t owner[TLY_LOCAL_RANKS]; /* ranks at these places of each group, one group behind the other */
    char why[160];                  /* if none do */
};

/* What a rank shows the others. */
struct tly_gpus_offer {
    uint64_t place; /* of its struct tly_gpus_shared, in its segment; 0: it has no GPU, or no memory */
    uint64_t nonce; /* at the beginning of its buffer */
    struct tly_device_ticket ticket;
};

/* What a rank tells the others at the start.  `step` counts the words that are there (release). */
enum { TLY_GPUS_CHOSEN = 1, TLY_GPUS_OFFERED, TLY_GPUS_ANSWERED };
struct tly_gpus_start {
    _Atomic uint32_t step;
    struct tly_gpus_choice choice;
    struct tly_gpus_offer offer;
    bool can;               /* it reaches its group */
    char why[TLY_SENTENCE]; /* why not; "": because another rank cannot */
};

struct tly_gpus_control {
    char address[TLY_DEVICE_ADDRESS]; /* of its GPU on the PCI bus, "": none; written before control.state */
    struct tly_gpus_start start;
    _Alignas(64) _Atomic uint32_t end; /* STOPPED: reads no result any more; LEFT: maps no buffer any more */
    _Atomic uint64_t taken;            /* entries of rank 0's list of which this rank has posted all pieces */
    uint32_t posted;                   /* pieces of the next entry */
    _Atomic uint64_t landed;           /* results that this rank, as their carrier, has reported; release */
    struct tly_gpus_entry landing[TLY_GPUS_LISTED];
    /* rank 0's */
    _Atomic uint64_t listed; /* how many entries there are in the list, ever; release */
    struct tly_gpus_entry list[TLY_GPUS_LISTED];
    _Atomic uint64_t heard[TLY_LOCAL_RANKS]; /* of each rank's results, those that are in the list */
};

/* Written by its owner, but for the bell, the work entries, the doubts and what others ask. */
struct tly_control {
    _Alignas(64) _Atomic uint32_t wanted; /* whom to wake when something has changed; 0: somebody looks */
    _Atomic uint32_t left;    /* 1: submits nothing more; 2: and has given up what had not ended; release */
    _Atomic uint32_t stuck;   /* its ring is full: tell it when you have read */
    _Atomic uint32_t failed;  /* its private memory must not be touched any more */
    _Atomic uint32_t writing; /* 1 + the rank into whose private memory it is just writing */
    _Atomic uint32_t working; /* name of the round of which it does a chunk now (tly_work_name); 0: none */
    _Alignas(64) _Atomic uint32_t bell;       /* futex; anybody adds */
    _Atomic uint32_t state;                   /* of the start */
    uint64_t probe, probe_at;                 /* a number in private memory, for the others to try */
    uint64_t processors[TLY_PROCESSORS / 64]; /* that it may use, as bits; written before `state` */
    int32_t node; /* NUMA node on which it was opened, -1: the machine has one; written before `state` */
    _Alignas(64) _Atomic uint32_t
        doubts; /* the lowest rank's is used: how often a rank was about to take back a post */
    _Alignas(64) _Atomic uint64_t elected; /* the lowest rank's is used: the round for which each rank keeps a
                                              window, 0: none.  (window.h) */
    _Alignas(
        64) _Atomic uint64_t asks; /* a bit for each rank that asks: that rank sets it, the owner clears it */
    uint64_t slots; /* in a team: place of the window with a slot for each rank; written before `state` */
    struct tly_ask ask[TLY_LOCAL_RANKS];
    _Alignas(64) struct {
        _Alignas(
            64) _Atomic uint64_t at; /* what has been read of that rank's ring, or a little less; release */
    } read[TLY_LOCAL_RANKS];
    struct tly_gpus_control gpus;
    /* In the pool a round uses the entry of its first place for its chunks, and each rank's for `window` and the mark that the
     * rank has given up.  Else each rank uses its own. */
    struct tly_work work[TLY_WORKS];
    _Alignas(64) uint8_t ring[TLY_RING];
};

/* The post at this place of a ring. */
static inline struct tly_post *tly_post_at(struct tly_control *c, uint64_t at)
{
    return (struct tly_post *)(c->ring + (at & (TLY_RING - 1)));
}

#endif
