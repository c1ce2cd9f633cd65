/* run.h - the job that `tally run` starts, and what the files of the command offer each other.  run.c draws the processes.
 *
 * The guard owns the job: only its one thread touches it after the fork. */
#ifndef TLY_CLI_RUN_H
#define TLY_CLI_RUN_H

#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/types.h>

#include "base/param.h"

struct signalfd_siginfo;

struct tly_run_options {
    int ranks, servers, machines, port;
    bool prefix;
    char *tallyd;
    char **command;
};

/* A traceback that has been passed on lately. */
struct tly_run_seen {
    uint64_t hash; /* of its lines */
    int64_t at;
    const struct tly_run_child *child; /* which had it; NULL: none */
};

/* Output on its way to our own stdout or stderr.  While it is stuck there, nothing more is read from the children that
 * write to it, and signals are still heard. */
struct tly_run_sink {
    int fd;
    char *data; /* owned */
    size_t at, len, room;
    struct tly_run_seen seen[16]; /* the oldest is overwritten */
    unsigned seen_count;
};

/* One of a child's two outputs. */
struct tly_run_stream {
    int fd; /* our end of the pipe; -1 once it has ended */
    struct tly_run_sink *sink;
    char *line; /* owned; what has come of the current line */
    size_t len, room;
    char *held; /* owned; the lines of a traceback that may go on */
    size_t held_len, held_room;
    int64_t held_since, held_last; /* when its first and its last line came */
};

struct tly_run_child {
    pid_t pid; /* 0 once it is reaped */
    bool server;
    int index, status;
    struct tly_run_stream out, err;
};

enum tly_run_phase {
    RUNNING,
    ENDING,  /* SIGTERM was sent, GRACE_SECONDS until SIGKILL */
    KILLING, /* SIGKILL is sent to all there is and all that turns up */
};

struct tly_run_job {
    const struct tly_run_options *options;
    struct tly_run_child *children; /* ranks, then servers */
    int count, ranks_left, left;
    enum tly_run_phase phase;
    int64_t deadline;  /* of the phase; 0 none */
    int64_t signalled; /* when a signal to end came last; 0 never */
    int status;        /* what to exit with */
    bool failed;       /* status is final */
    bool flush;        /* whether what is left of the output is still worth waiting for */
    int signal_fd;
    pid_t front;
    sigset_t old_mask;
    struct rlimit old_files;
    struct tly_run_sink out, err;
};

/* --- run_output.c ------------------------------------------------------------------------------------------ */

bool tly_run_sink_busy(const struct tly_run_sink *s);
/* Write once; after POLLOUT a pipe takes a chunk without blocking.  -EPIPE: nobody reads any more. */
int tly_run_sink_write(struct tly_run_sink *s);

/* Take in one piece and pass whole lines on.  False: nothing is there now. */
bool tly_run_stream_read(const struct tly_run_child *c, struct tly_run_stream *s);
/* Pass the rest of the line on and close the stream. */
void tly_run_stream_end(const struct tly_run_child *c, struct tly_run_stream *s);

/* Pass on what the stream has held long enough.  When it will have, or INT64_MAX. */
int64_t tly_run_stream_due(const struct tly_run_child *c, struct tly_run_stream *s, int64_t now);

/* Add "tally run: " and the message to our standard error. */
__attribute__((format(printf, 2, 3))) void tly_run_say(struct tly_run_job *job, const char *format, ...);
/* "rank 3" or "tallyd 0", in `buf`. */
const char *tly_run_title(const struct tly_run_child *c, char buf[32]);

/* --- run_end.c --------------------------------------------------------------------------------------------- */

/* Send the signal to every child of this process that is not one of the job's (`job` NULL: to every child): the
 * orphans that descendants have left behind.  It reads /proc, because there is no other list of one's children. */
void tly_run_signal_adopted(const struct tly_run_job *job, int sig);
/* Begin the phase KILLING. */
void tly_run_kill_all(struct tly_run_job *job);
/* Something has failed: the first status is the job's, and the phase ENDING begins. */
void tly_run_fail(struct tly_run_job *job, int status);
/* Reap all that has ended.  False: no child is left, adopted ones included. */
bool tly_run_reap(struct tly_run_job *job);
void tly_run_handle_signal(struct tly_run_job *job, const struct signalfd_siginfo *info);

/* --- run_start.c ------------------------------------------------------------------------------------------- */

/* A port that is free now, other than `other`, and outside the range from which the kernel takes ports for outgoing
 * connections.  A port of that range could be taken before the coordinator listens, if only by a tallyd that tries to
 * reach it.  -EADDRINUSE: none. */
int tly_run_free_port(int other);
/* Set the variables that all processes of the job share, in our environment. */
void tly_run_set_common(const struct tly_run_options *o, const struct tly_params *p, int port,
                        int store_port);
/* Start a child.  -errno. */
int tly_run_start(struct tly_run_job *job, struct tly_run_child *c);

/* --- run_guard.c ------------------------------------------------------------------------------------------- */

/* Start the job's processes and stay until all have ended.  The exit status. */
int tly_run_guard(struct tly_run_job *job);

#endif
