/* fake.h - a libibverbs.so.1 without a card: what its library and its card share.
 *
 *   words.c    FAKE_VERBS, faults, counters
 *   call.c     requests to the card, and its start
 *   devices.c  devices, GIDs, contexts, async events
 *   objects.c  PDs, MRs, channels, CQs, QPs
 *   posts.c    work requests and completions
 *   ../fake_card/   the card, a program that the first process starts and that ends after the last
 *
 * The card is a process of its own, as a card is a machine of its own: it goes on while a process is stopped.  A request
 * (to create, modify, register, destroy) is a packet over a Unix socket and is answered.  Work requests and completions are in
 * rings in shared memory.  The card reads and writes registered memory by process_vm_readv and process_vm_writev.  It has
 * one thread, so once a request to destroy is answered nothing of that queue pair is under way.  All processes of a network
 * name space meet at one card, by an abstract socket; those of several by fabric=PATH.
 *
 * It is as strict as a card may be: a queue's slots are free once a completion has been polled; a transition wants all of
 * its attributes; both ends must agree on GID, PSN and number; completions of a QP that was destroyed stay in the CQ; what is
 * received too soon waits for its sender's patience.  It lacks: READ, atomics, SRQ, UD, memory windows.
 *
 * FAKE_VERBS is a list of words:
 *   devices=N              the most devices, one an interface that has an address; 0: none
 *   infiniband             their ports are InfiniBand's: one GID, and a LID
 *   down                   their ports have no link at first
 *   inline=N wr=N cqe=N    limits of the devices
 *   memlock=BYTES          as ulimit -l: what can be registered, in whole pages
 *   dontfork               forked children lack the pages that are registered, as with kernels before 5.12
 *   fail=CALL:ERRNO[:N[:M]]  M calls of this name (1), such as ibv_reg_mr or post_send, fail from the N-th on (1)
 *   seed=N                 what is random begins here
 *   random=N               one call in N that creates, registers, modifies or posts fails with ENOMEM, and one work request in
 *                          100 N is never answered
 *   delay=US               a work request begins up to so late, and its completion comes up to so late, at random
 *   pieces=BYTES           a WRITE lands in pieces of this size, with other work between them
 *   lost=N                 the N-th work request is never answered
 *   vanish=N               at the N-th work request the device vanishes: DEVICE_FATAL, and all that is posted is flushed
 *   silent                 it is not flushed
 *   purge                  destroying a QP removes its completions
 *   fabric=PATH            a Unix socket at which processes of several network name spaces meet
 *   count=FILE             counters of all processes (fake_verbs.h)
 *   log=FILE               what the card has to say
 *
 * What verbs leave undefined ends the process with a sentence. */
#ifndef FAKE_H
#define FAKE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "test/rdma/fake_verbs.h"
#include "transport/rdma/ibv.h"

enum { FAKE_GIDS = 32, FAKE_SGES = 16, FAKE_INLINE = 256, FAKE_MOST_WR = 16384, FAKE_MOST_CQE = 65536 };
enum { FAKE_MOST_MESSAGE = 8 << 20 };

/* --- rings: shared memory ------------------------------------------------------------------------------------- */

struct fake_slot {
    uint64_t wr_id, remote_addr;
    uint32_t opcode, flags, imm, rkey, sges, inline_bytes;
    union {
        struct tly_ibv_sge sge[FAKE_SGES];
        uint8_t bytes[FAKE_INLINE];
    };
};

/* Send slots, and behind them receive slots.  The library moves the heads; where the card is nobody else needs to know. */
struct fake_qp_ring {
    _Atomic uint32_t sq_head, rq_head;
    uint32_t sq_size, rq_size;
    struct fake_slot slot[];
};

struct fake_cqe {
    struct tly_ibv_wc wc;
    uint32_t slot; /* up to here, and with it, the slots of its queue are free */
    uint32_t receive;
};

/* The card moves head, the library tail. */
struct fake_cq_ring {
    _Atomic uint32_t head, tail;
    _Atomic uint32_t armed; /* 1: any completion wakes; 2: a solicited one, or an error */
    uint32_t size;
    struct fake_cqe entry[];
};

/* The page that a context shares with the card. */
struct fake_page {
    _Atomic uint32_t asleep; /* the card waits for the bell */
    _Atomic uint32_t vanished, down;
    _Atomic uint64_t bytes, rnrs;
};

/* --- requests --------------------------------------------------------------------------------------------------- */

enum fake_request_type {
    FAKE_HELLO = 1, /* fds: page, bell, async events */
    FAKE_FAULTS,
    FAKE_VANISH,
    FAKE_LINK,
    FAKE_ALLOC_PD,
    FAKE_DEALLOC_PD,
    FAKE_REG_MR,
    FAKE_DEREG_MR,
    FAKE_CREATE_CHANNEL, /* fd: events */
    FAKE_DESTROY_CHANNEL,
    FAKE_CREATE_CQ, /* fd: ring */
    FAKE_DESTROY_CQ,
    FAKE_CREATE_QP, /* fd: ring */
    FAKE_MODIFY_QP,
    FAKE_DESTROY_QP,
};

struct fake_faults {
    uint64_t seed, random, delay_us, pieces, lost, vanish;
    bool silent, purge, down;
};

struct fake_request {
    uint32_t type;
    uint32_t handle; /* of the object */
    uint32_t pd, channel, send_cq, recv_cq, number;
    int mask, access, sig_all;
    uint64_t at, bytes;
    struct tly_ibv_qp_attr attr;
    struct fake_faults faults;
    bool infiniband;
    uint16_t lid;
    uint32_t gids;
    struct tly_ibv_gid_entry gid[FAKE_GIDS];
};

struct fake_reply {
    int err; /* errno or 0 */
    uint32_t handle, key;
};

/* In a channel's pipe, and in the one for async events. */
struct fake_event {
    uint32_t type, handle;
};

/* The next of a sequence that a seed begins. */
static inline uint64_t fake_random(uint64_t *state)
{
    uint64_t x = *state += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}

/* Where the card listens: a path, or behind "@" an abstract name. */
static inline socklen_t fake_address(const char *where, struct sockaddr_un *out)
{
    size_t n = strnlen(where, sizeof out->sun_path - 1);
    *out = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(out->sun_path, where, n);
    if (*where == '@')
        out->sun_path[0] = '\0';
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n);
}

#endif
