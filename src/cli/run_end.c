/* run_end.c - how a job of `tally run` ends: the first failure, a signal, or the end of the ranks.
 *
 * A job goes through three phases.  RUNNING: nothing has failed.  ENDING: all processes have got SIGTERM and have
 * GRACE_SECONDS.  KILLING: all processes get SIGKILL, and so does each one that turns up.  The first failure fixes the
 * exit status.
 *
 * "All processes" are the children and the orphans: processes that a descendant has started and left behind.  The guard
 * is a subreaper, so orphans become its children, and /proc lists them.
 *
 * The guard calls all of this; the front calls tly_run_signal_adopted() alone. */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "cli/cli.h"
#include "cli/run.h"

enum { GRACE_SECONDS = 5 };

void tly_run_signal_adopted(const struct tly_run_job *job, int sig)
{
    DIR *proc = opendir("/proc");
    pid_t self = getpid();
    for (struct dirent *e; proc && (e = readdir(proc));) {
        char path[300], stat[512];
        pid_t pid = (pid_t)atoi(e->d_name), parent = 0;
        if (pid <= 0)
            continue;
        snprintf(path, sizeof path, "/proc/%d/stat", pid);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        ssize_t n = fd < 0 ? -1 : read(fd, stat, sizeof stat - 1);
        if (fd >= 0)
            close(fd);
        if (n <= 0)
            continue;
        stat[n] = 0;
        char *after_name = strrchr(stat, ')');
        if (!after_name || sscanf(after_name, ") %*c %d", &parent) != 1 || parent != self)
            continue;
        bool known = false;
        for (int i = 0; job && i < job->count; i++)
            known |= job->children[i].pid == pid;
        if (!known)
            kill(pid, sig);
    }
    if (proc)
        closedir(proc);
}

/* A rank and what it has started, as far as that stayed in its process group. */
static void run_signal_child(const struct tly_run_job *job, const struct tly_run_child *c, int sig)
{
    if (c->pid > 0)
        kill(job->options->prefix ? -c->pid : c->pid, sig);
}

static void run_signal_all(const struct tly_run_job *job, int sig)
{
    for (int i = 0; i < job->count; i++)
        run_signal_child(job, &job->children[i], sig);
    tly_run_signal_adopted(job, sig);
}

void tly_run_kill_all(struct tly_run_job *job)
{
    job->phase = KILLING;
    job->deadline = 0;
    run_signal_all(job, SIGKILL);
}

static void run_end_all(struct tly_run_job *job)
{
    if (job->phase >= ENDING)
        return;
    job->phase = ENDING;
    job->deadline = tly_now() + GRACE_SECONDS * TLY_SEC;
    run_signal_all(job, SIGTERM);
    run_signal_all(job, SIGCONT); /* a stopped process would not hear it */
}

void tly_run_fail(struct tly_run_job *job, int status)
{
    if (!job->failed)
        job->status = status;
    job->failed = true;
    run_end_all(job);
}

static void run_child_ended(struct tly_run_job *job, struct tly_run_child *c, int wait_status)
{
    char name[32];
    bool killed = WIFSIGNALED(wait_status);
    int status = killed ? 128 + WTERMSIG(wait_status) : WEXITSTATUS(wait_status);
    c->pid = 0;
    c->status = status;
    job->left--;
    if (!c->server)
        job->ranks_left--;
    /* A service that we ended ourselves must end well too, unless the signal found it without a handler. */
    bool badly = c->server && !killed && !job->failed;
    if (status && (job->phase < ENDING || badly)) {
        if (killed)
            tly_run_say(job, "%s was ended by signal %d (%s)%s", tly_run_title(c, name),
                        WTERMSIG(wait_status), strsignal(WTERMSIG(wait_status)),
                        job->left ? "; ending the others" : "");
        else
            tly_run_say(job, "%s ended with status %d%s", tly_run_title(c, name), status,
                        job->left ? "; ending the others" : "");
        tly_run_fail(job, status);
    } else if (!job->ranks_left && job->phase == RUNNING) {
        run_end_all(job); /* the services wait for the next job, and whatever the ranks have left behind */
    }
}

bool tly_run_reap(struct tly_run_job *job)
{
    int wait_status;
    pid_t pid;
    bool any = false;
    while ((pid = waitpid(-1, &wait_status, WNOHANG)) > 0) {
        any = true;
        for (int i = 0; i < job->count; i++)
            if (job->children[i].pid == pid)
                run_child_ended(job, &job->children[i], wait_status);
    }
    if (job->phase >= ENDING && any) /* its children are ours now */
        tly_run_signal_adopted(job, job->phase == KILLING ? SIGKILL : SIGTERM);
    return pid == 0;
}

void tly_run_handle_signal(struct tly_run_job *job, const struct signalfd_siginfo *info)
{
    int sig = (int)info->ssi_signo;
    int64_t now = tly_now(), before = job->signalled;
    if (sig == SIGCHLD)
        return; /* the loop reaps in any case */
    job->signalled = now;
    bool orphaned = getppid() != job->front;
    /* One wish may come twice, to the process group and through the front. */
    if (!orphaned && before && now - before < TLY_SEC)
        return;
    if (job->phase >= ENDING || orphaned) { /* no more patience */
        job->flush = false;
        if (!job->failed)
            job->status = 128 + sig;
        job->failed = true;
        tly_run_kill_all(job);
        return;
    }
    tly_run_say(job, "%s; ending the job", strsignal(sig));
    tly_run_fail(job, 128 + sig);
}
