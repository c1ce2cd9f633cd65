/* job.h - jobs for tests: ranks forked from the test program, tallyd beside them, all on this machine.  What each
 * process says on standard error goes to a file, which a failing test shows. */
#ifndef JOB_H
#define JOB_H

#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/types.h>
#include <unistd.h>

#include "tally/tally.h"

enum { JOB_MOST_RANKS = 72, JOB_MOST_TALLYDS = 8 };

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { UNDER_SANITIZER = 1 };
#else
enum { UNDER_SANITIZER = 0 };
#endif

/* In a rank: end the process if `cond` does not hold. */
#define CHECK(cond) \
    do { \
        if (!(cond)) \
            rank_fails(__FILE__, __LINE__, #cond); \
    } while (0)
void rank_fails(const char *file, int line, const char *what) __attribute__((noreturn));
/* In a rank: `text` must hold `part`. */
#define CHECK_HOLDS(text, part) rank_must_hold(__FILE__, __LINE__, text, part)
void rank_must_hold(const char *file, int line, const char *text, const char *part);

struct job {
    /* filled in by the test */
    int ranks, tallyds;
    const int *machine;       /* of each rank; NULL: each rank is a machine of its own */
    const char *settings[12]; /* "NAME=value" for ranks and tallyd */
    const char *tallyd_options[4];
    bool tallyd_stays;                /* without --once: it ends when job_clear() kills it */
    int (*main)(int rank, void *arg); /* in the rank's process; its result is the exit status */
    void *arg;
    int start_first; /* ranks that job_start() starts; 0: all */
    int port;        /* of the coordinator; 0: a free one */

    /* filled in by job_start() */
    char folder[64];
    pid_t rank_pid[JOB_MOST_RANKS], tallyd_pid[JOB_MOST_TALLYDS];
    int rank_status[JOB_MOST_RANKS], tallyd_status[JOB_MOST_TALLYDS]; /* of waitpid; -1: still running */
};

int job_free_port(void);
void job_start(struct job *j);
void job_start_rank(struct job *j, int rank);
void job_start_tallyd(struct job *j, int index);
/* A coordinator in a process of its own, which ends with the test program.  It listens once this returns. */
pid_t job_start_coordinator(int port);

/* Wait for all ranks and tallyd that still run; all of them must have ended well. */
void job_finish(struct job *j);
/* Wait for one rank; returns its exit status, or 128 + the signal that ended it. */
int job_wait_rank(struct job *j, int rank);
int job_wait_tallyd(struct job *j, int index);
/* Kill what is left of it and remove its files. */
void job_clear(struct job *j);
/* What rank `index` (tallyd: JOB_MOST_RANKS + index) has said so far; freed with the job. */
const char *job_log(const struct job *j, int index);
/* Fail the test unless that holds `part`. */
void job_log_holds(const struct job *j, int index, const char *part);
void job_log_lacks(const struct job *j, int index, const char *part);

/* Memory that the test and all its ranks share, zeroed. */
void *job_shared(size_t bytes);
/* Wait until *value >= target; patience runs out as everywhere. */
void job_await(atomic_int *value, int target);
void job_sleep_ms(int ms);
/* In a rank, before job_open(): its shared memory is small.  Then job_fill_pool() leaves none of it. */
void job_limit_pool(void);
void job_fill_pool(tally_comm *c);
/* In a rank: process_vm_readv() and process_vm_writev() fail, as in many containers. */
void job_forbid_reaching(void);
/* In a rank, before job_open(): ranks next to each other run on sockets of their own, as far as they can know.  False: this
 * process may use one processor only. */
bool job_move_apart(int rank);
/* Bytes of memory that this process has. */
size_t job_resident(void);
/* Of `len` bytes; never 0. */
uint64_t job_hash(const void *data, size_t len);

/* The part of the long tests that runs, by TEST_LONG: I of I/N, 0 for none, JOB_ALL for all of them. */
enum { JOB_ALL = -1 };
int job_long(void);

/* A job from its start to its end. */
void job_run(struct job *j);
/* Start it, and once *stage is `at` kill that rank, or tallyd 0.  All other ranks must end well. */
void job_kill_rank(struct job *j, int rank, atomic_int *stage, int at);
/* In a rank, with what an operation then returned, 0 if the kill came too late: the error names the rank that was killed.  Close; no
 * rank writes to the result any more. */
void job_close_after_kill(tally_comm *c, int err, int killed, void *result, size_t bytes);
void job_kill_tallyd(struct job *j, atomic_int *stage, int at);
/* Fill in the machines of ranks, of which each letter names one.  Returns how many ranks there are. */
int job_layout(const char *layout, int machine[JOB_MOST_RANKS]);
/* This reduction, or another if the type does not have it. */
int job_reduction(int dtype, int reduction);

/* In a rank. */
tally_comm *job_open(void);
struct tally_options job_in(tally_group *g);
/* Wait for the operation and free it: how it has ended; or it must have ended so. */
int job_ends(tally_op *op);
void job_expect(tally_op *op, int err);
void job_barrier(tally_comm *c);
/* Memory of a tensor, from the pool or of this process alone; it may be empty. */
void *job_memory(tally_comm *c, size_t bytes, bool pooled);
void job_give_back(void *memory, bool pooled);
/* What all services have of it. */
unsigned long long job_bytes_in_use(tally_comm *c);
/* Close it; the services must have given all memory back. */
void job_leave(tally_comm *c);

/* random numbers */
uint64_t job_random(uint64_t *state);

#endif
