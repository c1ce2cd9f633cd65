/* internal.h - a house and its jobs.
 *
 * A rank and tallyd run a service: a house with one job (service.c).  A house owns what jobs share: loop, listener, pool and
 * crew.  Jobs share nothing but memory and threads.  Each reserves parts of the pool (job.c); a job that uses more than its
 * reservation gives the rest back when another job reserves it (tly_memory_yield).
 *
 * A job has sessions (connections of its ranks, session.h) and rounds (round.h).  A round is one part in
 * one round of a tensor; it has a slot and an answer for each rank.  All of it belongs to the loop: it is touched under the
 * loop's lock only.  The crew reads slots' data and writes the result of rounds with pieces_left > 0, which nobody else
 * touches meanwhile.  Each push comes in by frames.c and goes from there to the file that it concerns.
 *
 * A file may use the files above it in this list (test/checks/test_circles.py):
 *
 *   slot.c      the states of a slot
 *   session.c   what a rank is told
 *   members.c   who takes part in a round
 *   window.c    what a rank may push, and what is kept for its sake
 *   store.c     the rounds of a job
 *   memory.c    memory for slots and results; loans
 *   kept.c      what is kept of shared tensors between rounds
 *   joined.c    ranks that have joined, in rounds
 *   verdict.c   ranks that disagree, refuse, leave or are late
 *   answers.c   results on their way to the ranks
 *   round.c     arrivals and release
 *   progress.c  from all pushes to the result
 *   regain.c    parts of shared tensors that come from other services
 *   redo.c      what ranks say after a loss
 *   joining.c   the word of a rank that it has joined
 *   facts.c     how the service stands; facts_read.c: the same, for the command
 *   frames.c    the frames that come over a session
 *   peers.c     sessions from the handshake to the end
 *   house.c     what jobs share
 *   job.c       a job from the first connection to the end
 *   service.c   a house of one job, for a rank and tallyd
 *
 * crew.c, pool.c, quota.c and words.c use none of them. */
#ifndef TLY_SUM_INTERNAL_H
#define TLY_SUM_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/event.h"
#include "base/list.h"
#include "base/loop.h"
#include "base/map.h"
#include "membership/measure.h"
#include "sum/crew.h"
#include "sum/house.h"
#include "sum/job.h"
#include "sum/quota.h"
#include "sum/service.h"
#include "wire/frame.h"
#include "wire/hello.h"

struct tly_burden;
struct tly_joined;
struct tly_members;
struct tly_session;

/* What jobs share: see house.h. */
struct tly_house {
    struct tly_loop *loop, own_loop;
    bool own_thread;
    pthread_t thread;
    struct tly_hook hook;
    struct tly_listener *listener;
    struct tly_crew crew;
    int node; /* the NUMA node of the loop's thread and its data; -1: there is only one */
    struct tly_budget budget;
    struct tly_list jobs;  /* of struct tly_job; borrowed */
    struct tly_list lobby; /* of struct tly_session: connections that have not proved the secret */
    uint8_t decoy[TLY_FRAME_KEY_BYTES]; /* key of the incarnations of jobs that are not here */
    const struct tly_params *params;    /* borrowed */
};

/* One job's identity and state: see job.h. */
struct tly_job {
    struct tly_list node; /* in house->jobs */
    struct tly_house *house;
    struct tly_loop *loop; /* the house's */
    struct tly_hook hook;
    struct tly_identity identity;
    uint64_t incarnation;
    char name[200];          /* of its service, as ranks call it; once the job has begun */
    uint32_t fragment_bytes; /* less of a result is not sent */
    int64_t dead_ns, late_ns;
    struct tly_list sessions;

    uint64_t cpu_before;    /* ns that Tally's threads of this process had cost when the job was created */
    bool mortal;            /* may die alone: a tallyd's.  Then its ranks hear what is stable */
    bool redo_waits;        /* rounds wait for memory for their results */
    bool copies_wait;       /* answers of shared tensors wait for memory for their copies */
    bool restore_waits;     /* so do rounds whose results come from a rank (redo.c) */
    uint32_t sessions_seen; /* counts sessions of ranks */
    uint32_t ranks;         /* 0: no epoch yet */
    uint32_t left;          /* ranks that are gone */
    uint64_t part_bytes, part_most; /* unit of the newest epoch, longest part of any */
    bool window_fixed;              /* the user has set the window */
    uint64_t first_window;          /* charge bytes that a new connection may push */
    uint64_t sharing;               /* services that the job is split over */
    uint64_t window_bytes;          /* charge bytes that may be pushed and not answered now */
    atomic_ullong news;  /* part_bytes and services with a share << 32 of an epoch that has begun, from
                                       * another thread (release); taken by the loop (acquire); 0: none */
    uint32_t pace_bytes; /* counts go alone after so many bytes of news */
    struct tly_session **by_rank;    /* owned array, borrowed sessions */
    bool *gone;                      /* owned array: ranks that have said goodbye, connected or not */
    struct tly_burden *burden;       /* owned array, of each rank */
    struct tly_joined *joined;       /* owned array, of each rank */
    uint32_t joined_count;           /* entries of `joined` that are on */
    uint32_t joins;                  /* how often all ranks have joined */
    const uint8_t *zeros;            /* a part of zeros, mapped once a rank has joined; takes no memory */
    uint32_t *machine;               /* owned array: of each rank */
    uint32_t machines;               /* worker machines */
    int *machine_ranks;              /* owned array: ranks on each of them */
    bool teams;                      /* ranks of a machine may push together */
    uint32_t most_opened, most_owed; /* bounds of a burden; past most_owed the rank's window stays shut */
    uint32_t window_rounds;          /* least pushes that fill a window */
    uint32_t watchers;               /* sessions of watchers */
    struct tly_members *all;         /* borrowed from lists */
    struct tly_list lists;           /* of struct tly_members; owned */
    struct tly_map by_list;          /* hash of its ranks -> struct tly_members, borrowed */
    struct tly_map pairs;            /* number -> struct tly_members, borrowed */
    struct tly_meter meter;

    struct tly_map store;       /* rounds by id */
    struct tly_list incomplete; /* rounds by age */
    uint32_t mismatches;        /* rounds with mismatch_at */
    uint32_t dropped_slots;     /* slots that are SLOT_DROPPED */
    uint32_t waiting;           /* rounds with `waits` */
    uint32_t restored;          /* rounds with `restored` */
    uint64_t next_order, next_age;
    struct tly_map kept; /* id -> struct tly_kept; owned */
    uint64_t kept_bytes; /* memory reserved for them */
    uint32_t givers;     /* parts whose values a rank has been asked for */
    struct tly_quota quota;
    struct tly_service_facts facts;
    struct tly_event quiet; /* the last session has ended */

    const struct tly_params *params; /* borrowed */
    struct tly_trace *trace;         /* owned; NULL: no timeline is wanted */
};

/* service.c: a house of one job */
struct tly_service {
    struct tly_house *house; /* owned */
    struct tly_job *job;     /* owned */
};

/* facts.c */
/* Count what has gone over the session's connection. */
void tly_facts_add_bytes(struct tly_service_facts *facts, const struct tly_session *p);

#endif
