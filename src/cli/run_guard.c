/* run_guard.c - the guard of `tally run`: one poll loop that starts the children and lives until the last is gone.
 *
 * Each turn of the loop reaps what has ended, then polls for signals, for sinks that can be written and for streams that
 * can be read.  When no child is left, orphans included, it passes on what is still in the pipes.
 *
 * The guard is a process of its own with one thread.  It alone touches the job (struct tly_run_job). */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "base/clock.h"
#include "cli/cli.h"
#include "cli/run.h"

static void guard_watch(struct pollfd *fds, struct tly_run_child **who, int *n, struct tly_run_child *c,
                        struct tly_run_stream *s)
{
    if (s->fd < 0 || tly_run_sink_busy(s->sink))
        return;
    fds[*n] = (struct pollfd){.fd = s->fd, .events = POLLIN};
    who[(*n)++] = c;
}

static void guard_take_signals(struct tly_run_job *job)
{
    struct signalfd_siginfo info;
    while (read(job->signal_fd, &info, sizeof info) == sizeof info)
        tly_run_handle_signal(job, &info);
}

/* Returns when something has happened or the phase's time is over. */
static void guard_wait_and_handle(struct tly_run_job *job, struct pollfd *fds, struct tly_run_child **who)
{
    struct tly_run_sink *sinks[] = {&job->out, &job->err};
    int n = 0, timeout_ms = -1;
    int64_t now = tly_now(), next = job->deadline ? job->deadline : INT64_MAX;
    for (int i = 0; i < job->count; i++) {
        int64_t out = tly_run_stream_due(&job->children[i], &job->children[i].out, now),
                err = tly_run_stream_due(&job->children[i], &job->children[i].err, now);
        next = out < next ? out : next;
        next = err < next ? err : next;
    }
    if (next != INT64_MAX)
        timeout_ms = next > now ? (int)((next - now + TLY_MS - 1) / TLY_MS) : 0;
    fds[n++] = (struct pollfd){.fd = job->signal_fd, .events = POLLIN};
    for (int i = 0; i < 2; i++)
        fds[n++] = (struct pollfd){.fd = tly_run_sink_busy(sinks[i]) ? sinks[i]->fd : -1, .events = POLLOUT};
    for (int i = 0; i < job->count; i++) {
        guard_watch(fds, who, &n, &job->children[i], &job->children[i].out);
        guard_watch(fds, who, &n, &job->children[i], &job->children[i].err);
    }
    if (poll(fds, (nfds_t)n, timeout_ms) < 0)
        return;
    for (int i = 0; i < 2; i++) {
        int rc = fds[1 + i].revents ? tly_run_sink_write(sinks[i]) : 0;
        if (rc < 0 && rc != -EPIPE)
            tly_run_say(job, "cannot write to standard %s: %s", i ? "error" : "output", strerror(-rc));
        if (rc < 0)
            tly_run_fail(job, rc == -EPIPE ? 128 + SIGPIPE : CLI_FAILED);
    }
    for (int i = 3; i < n; i++)
        if (fds[i].revents)
            tly_run_stream_read(who[i], who[i]->out.fd == fds[i].fd ? &who[i]->out : &who[i]->err);
    if (fds[0].revents)
        guard_take_signals(job);
    if (job->deadline && tly_now() >= job->deadline) {
        tly_run_kill_all(job);
    }
}

/* All processes have ended: pass on what they have said. */
static void guard_drain(struct tly_run_job *job, struct pollfd *fds, struct tly_run_child **who)
{
    for (int i = 0; i < job->count; i++) {
        struct tly_run_child *c = &job->children[i];
        struct tly_run_stream *streams[] = {&c->out, &c->err};
        for (int j = 0; j < 2; j++) {
            while (streams[j]->fd >= 0 && tly_run_stream_read(c, streams[j]))
                ;
            tly_run_stream_end(c, streams[j]);
        }
    }
    job->deadline = 0;
    while (job->flush && (tly_run_sink_busy(&job->out) || tly_run_sink_busy(&job->err)))
        guard_wait_and_handle(job, fds, who);
}

int tly_run_guard(struct tly_run_job *job)
{
    const struct tly_run_options *o = job->options;
    char name[32];
    int rc = 0;
    size_t most = 3 + 2 * (size_t)job->count;
    job->children = calloc((size_t)job->count, sizeof job->children[0]);
    struct pollfd *fds = calloc(most, sizeof fds[0]);
    struct tly_run_child **who = calloc(most, sizeof who[0]);
    if (!job->children || !fds || !who) {
        free(fds);
        free(who);
        return tly_cli_fail("run", "out of memory");
    }
    for (int i = 0; i < job->count; i++) {
        struct tly_run_child *c = &job->children[i];
        c->server = i >= o->ranks;
        c->index = c->server ? i - o->ranks : i;
        c->out.fd = c->err.fd = -1;
    }
    for (int i = 0; i < job->count && rc == 0; i++)
        if ((rc = tly_run_start(job, &job->children[i])) < 0) {
            tly_run_say(job, "cannot start %s: %s", tly_run_title(&job->children[i], name), strerror(-rc));
            tly_run_fail(job, CLI_FAILED);
        }
    if (getppid() != job->front) { /* the signal for that may have come before we had asked for it */
        job->flush = false;
        tly_run_kill_all(job);
    }
    while (tly_run_reap(job))
        guard_wait_and_handle(job, fds, who);
    guard_drain(job, fds, who);
    free(job->out.data);
    free(job->err.data);
    free(job->children);
    free(fds);
    free(who);
    return job->status;
}
