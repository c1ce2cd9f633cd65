/* trace.h - stamps of what a process does with each part, in a ring; at the end it becomes a file
 * (TALLY_TRACE).
 *
 * With TALLY_TRACE a communicator and a service have a ring each.  tly_part_stamp() and tly_round_stamp() put stamps into it.
 * tly_trace_write() makes slices of the stamps (trace.c) and a file of the slices (timeline.c), when the communicator fails or
 * at the end.  `tally trace` reads the files back (read.c) and puts them on one clock (merge.c).  docs/trace.md describes the
 * rows.
 *
 * Stamps may come from any thread: nearly all are of the loop of the communicator or of the service, but operations
 * are submitted, and end in shared memory, in the application's threads. Without TALLY_TRACE there is no ring, and a
 * stamp costs a branch; with it a look at the clock, a lock that is rarely taken, and 32 bytes. */
#ifndef TLY_TRACE_H
#define TLY_TRACE_H

#include <pthread.h>

#include "base/clock.h"
#include "trace/timeline.h"

/* In the order in which a part meets them.  timeline.h's rows lie between them. */
enum tly_moment {
    /* rank; peer: the service */
    TLY_AT_SUBMITTED, /* the operation: part TLY_NO_PART */
    TLY_AT_DONE,
    TLY_AT_QUEUED,
    TLY_AT_ADMITTED,
    TLY_AT_FIRST, /* its first byte goes into what the kernel is handed next */
    TLY_AT_SENT,  /* the kernel has its last byte */
    TLY_AT_RESULT_FIRST,
    TLY_AT_LANDED,
    /* service; peer: the rank, or TLY_NO_PEER */
    TLY_AT_OPENED,   /* the first rank's first byte */
    TLY_AT_GATHERED, /* the last rank's last byte */
    TLY_AT_SUMMED,
    TLY_AT_ARRIVING,
    TLY_AT_ARRIVED,
    TLY_AT_ANSWERING,
    TLY_AT_ANSWERED,
    /* rank; key 0, round: the epoch that is prepared first, bytes: its unit of parts */
    TLY_AT_PREPARED,
    TLY_AT_COMMITTED,
    TLY_MOMENTS,
    TLY_IN_FLIGHT = TLY_MOMENTS, /* key: bytes handed over and not yet accepted */
};

/* One stamp. */
struct tly_stamp {
    int64_t at; /* monotonic, ns */
    uint64_t key;
    uint32_t round, part, bytes;
    uint16_t peer; /* 0xffff: none */
    uint8_t moment;
};

struct tly_trace {
    pthread_mutex_t lock;   /* guards ring and count */
    struct tly_stamp *ring; /* owned; a power of two of them */
    uint64_t mask, count;   /* count: all stamps ever, the last mask + 1 are there */
    struct tly_process who;
    bool written;
    char path[1024];
};

/* A ring of at most `bytes` for the process `who` (its name, job, machine and start), whose file's name will be
 * PREFIX.START.rank-INDEX.json or PREFIX.START.service-INDEX-LIFE.json: START, the first half of the job's start,
 * keeps runs apart, and LIFE, that of the incarnation, services that have one place one after the other. A `.json` at
 * the prefix's end is cut off. NULL, and a warning that says why, if there can be no ring or no such file: the job
 * goes on without. */
struct tly_trace *tly_trace_create(const char *prefix, uint64_t bytes, const struct tly_process *who);

/* Write the file, once; stamps that come later are not kept. name() puts the name of a tensor into out, or
 * "". A failure is a warning. */
void tly_trace_write(struct tly_trace *t, void (*name)(void *user, uint64_t key, char *out, size_t len),
                     void *user);

/* NULL is accepted.  Writes nothing. */
void tly_trace_destroy(struct tly_trace *t);

/* The file's content: what becomes of stamps, for tests.  `end`: when what is still open ends.  Of how many stamps it is,
 * or -ENOMEM: more may come meanwhile. */
int64_t tly_trace_slices(struct tly_trace *t, int64_t end, struct tly_process *out);

void tly_trace_put(struct tly_trace *t, const struct tly_stamp *s);

static inline void tly_stamp_at(struct tly_trace *t, int64_t at, enum tly_moment moment, uint32_t peer,
                                uint64_t key, uint32_t round, uint32_t part, uint32_t bytes)
{
    if (__builtin_expect(t != NULL, 0))
        tly_trace_put(t, &(struct tly_stamp){at, key, round, part, bytes, (uint16_t)peer, (uint8_t)moment});
}

static inline void tly_stamp(struct tly_trace *t, enum tly_moment moment, uint32_t peer, uint64_t key,
                             uint32_t round, uint32_t part, uint32_t bytes)
{
    if (__builtin_expect(t != NULL, 0))
        tly_stamp_at(t, tly_now(), moment, peer, key, round, part, bytes);
}

#endif
