/* run.c - `tally run`: ranks and summation services on this machine.
 *
 *   tally run (front) ── guard ──┬── rank 0 … rank N-1 ── whatever they start
 *                                └── tallyd 0 … tallyd K-1
 *
 * The guard does the work in one poll loop: it starts the processes, puts a prefix before their lines, and ends
 * all of them when the first fails, when a signal comes, or when the ranks are done.  It is a subreaper, so
 * what ranks have started and left behind becomes its child and is ended too.
 *
 * Front and guard watch each other, because no process survives its own kill -9 to clean up: the guard gets a
 * signal when the front dies; the front is a subreaper too, so that when the guard dies (and with it, by
 * PR_SET_PDEATHSIG, ranks and services) the rest becomes the front's and is killed there. */
#include "cli/cli.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <limits.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sodium.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/param.h"
#include "topo/topo.h"

const char tly_cli_run_usage[] =
    "usage: tally run -n N [OPTION...] -- COMMAND [ARGUMENT...]\n"
    "\n"
    "Starts N ranks of COMMAND and K summation services (tallyd) on this machine, with the variables\n"
    "that torchrun sets and those that Tally needs.  When a process fails, it ends all others and\n"
    "returns the exit status of the first that failed.\n"
    "\n"
    "  -n, --ranks N        ranks to start\n"
    "  -k, --servers K      tallyd to start (0)\n"
    "      --machines M     let the ranks appear as M machines (with -k, one for each; else one for all)\n"
    "      --no-prefix      print output unchanged, without [rank 3] before each line\n"
    "      --port P         the coordinator's port (a free one)\n"
    "      --tallyd PROGRAM the tallyd to start (the one beside this program)\n";

enum { MOST_CHILDREN = 1000, LONGEST_LINE = 1 << 20, CHUNK = 4096 };
enum { GRACE_SECONDS = 5 };

struct options {
    int ranks, servers, machines, port;
    bool prefix;
    char *tallyd;
    char **command;
};

/* Output on its way to our own stdout or stderr.  While it is stuck there, nothing more is read from those
 * who write to it, and signals are still heard. */
struct sink {
    int fd;
    char *data; /* owned */
    size_t at, len, room;
};

/* One of a child's two outputs. */
struct stream {
    int fd; /* our end of the pipe; -1 once it has ended */
    struct sink *sink;
    char *line; /* owned; what has come of the current line */
    size_t len, room;
};

struct child {
    pid_t pid; /* 0 once it is reaped */
    bool server;
    int index, status;
    struct stream out, err;
};

enum phase {
    RUNNING,
    ENDING,  /* SIGTERM was sent, GRACE_SECONDS until SIGKILL */
    KILLING, /* SIGKILL is sent to all there is and all that turns up */
};

struct job {
    const struct options *options;
    struct child *children; /* ranks, then servers */
    int count, ranks_left, left;
    enum phase phase;
    int64_t deadline;  /* of the phase; 0 none */
    int64_t signalled; /* when a signal to end came last; 0 never */
    int status;        /* what to exit with */
    bool failed;       /* status is final */
    bool flush;        /* whether what is left of the output is still worth waiting for */
    int signal_fd;
    pid_t front;
    sigset_t old_mask;
    struct rlimit old_files;
    struct sink out, err;
};

/* --- output ---------------------------------------------------------------------------------- */

static void *grown(void *data, size_t *room, size_t need)
{
    if (need <= *room)
        return data;
    size_t more = *room ? *room : 512;
    while (more < need)
        more *= 2;
    void *p = realloc(data, more);
    if (!p) {
        fprintf(stderr, "tally run: out of memory\n");
        _exit(CLI_FAILED); /* the front ends the children */
    }
    *room = more;
    return p;
}

static void sink_add(struct sink *s, const char *data, size_t len)
{
    if (s->fd < 0)
        return;
    if (s->at == s->len)
        s->at = s->len = 0;
    s->data = grown(s->data, &s->room, s->len + len);
    memcpy(s->data + s->len, data, len);
    s->len += len;
}

static bool sink_busy(const struct sink *s)
{
    return s->fd >= 0 && s->at < s->len;
}

/* Write once; after POLLOUT a pipe takes CHUNK bytes without blocking.  -EPIPE: nobody reads any more. */
static int sink_write(struct sink *s)
{
    size_t len = s->len - s->at;
    ssize_t n = write(s->fd, s->data + s->at, len < CHUNK ? len : CHUNK);
    if (n < 0) {
        if (errno == EINTR || errno == EAGAIN)
            return 0;
        s->fd = -1;
        return -errno;
    }
    s->at += (size_t)n;
    return 0;
}

__attribute__((format(printf, 2, 3))) static void say(struct job *job, const char *format, ...)
{
    char text[1024] = "tally run: ";
    va_list args;
    va_start(args, format);
    int len = 11 + vsnprintf(text + 11, sizeof text - 12, format, args);
    va_end(args);
    if (len > (int)sizeof text - 2)
        len = sizeof text - 2;
    text[len++] = '\n';
    sink_add(&job->err, text, (size_t)len);
}

static const char *title(const struct child *c, char buf[32])
{
    snprintf(buf, 32, "%s %d", c->server ? "tallyd" : "rank", c->index);
    return buf;
}

static void emit_line(const struct child *c, struct stream *s)
{
    char name[32], prefix[40];
    int len = snprintf(prefix, sizeof prefix, "[%s] ", title(c, name));
    sink_add(s->sink, prefix, (size_t)len);
    sink_add(s->sink, s->line, s->len);
    if (s->line[s->len - 1] != '\n')
        sink_add(s->sink, "\n", 1);
    s->len = 0;
}

static void stream_end(const struct child *c, struct stream *s)
{
    if (s->fd < 0)
        return;
    if (s->len)
        emit_line(c, s);
    close(s->fd);
    s->fd = -1;
    free(s->line);
    s->line = NULL;
    s->room = 0;
}

/* Take in one piece and pass whole lines on.  False: nothing there now. */
static bool stream_read(const struct child *c, struct stream *s)
{
    char piece[16384];
    ssize_t n = read(s->fd, piece, sizeof piece);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return false;
    if (n <= 0) {
        stream_end(c, s);
        return false;
    }
    for (char *at = piece, *end = piece + n; at < end;) {
        char *newline = memchr(at, '\n', (size_t)(end - at));
        size_t len = (size_t)((newline ? newline + 1 : end) - at);
        s->line = grown(s->line, &s->room, s->len + len);
        memcpy(s->line + s->len, at, len);
        s->len += len;
        if (newline || s->len >= LONGEST_LINE)
            emit_line(c, s);
        at += len;
    }
    return true;
}

/* --- ending ---------------------------------------------------------------------------------- */

/* Send to every child of this process that is none of the job's (NULL: none is): what descendants have left
 * behind.  /proc is read, for there is no other list of one's children. */
static void signal_adopted(const struct job *job, int sig)
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
static void signal_child(const struct job *job, const struct child *c, int sig)
{
    if (c->pid > 0)
        kill(job->options->prefix ? -c->pid : c->pid, sig);
}

static void signal_all(const struct job *job, int sig)
{
    for (int i = 0; i < job->count; i++)
        signal_child(job, &job->children[i], sig);
    signal_adopted(job, sig);
}

static void kill_all(struct job *job)
{
    job->phase = KILLING;
    job->deadline = 0;
    signal_all(job, SIGKILL);
}

static void end_all(struct job *job)
{
    if (job->phase >= ENDING)
        return;
    job->phase = ENDING;
    job->deadline = tly_now() + GRACE_SECONDS * TLY_SEC;
    signal_all(job, SIGTERM);
    signal_all(job, SIGCONT); /* a stopped process would not hear it */
}

static void fail(struct job *job, int status)
{
    if (!job->failed)
        job->status = status;
    job->failed = true;
    end_all(job);
}

static void child_ended(struct job *job, struct child *c, int wait_status)
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
            say(job, "%s was ended by signal %d (%s)%s", title(c, name), WTERMSIG(wait_status),
                strsignal(WTERMSIG(wait_status)), job->left ? "; ending the others" : "");
        else
            say(job, "%s ended with status %d%s", title(c, name), status,
                job->left ? "; ending the others" : "");
        fail(job, status);
    } else if (!job->ranks_left && job->phase == RUNNING) {
        end_all(job); /* the services wait for the next job, and whatever the ranks have left behind */
    }
}

/* Reap all that has ended.  False: no child is left, adopted ones included. */
static bool reap(struct job *job)
{
    int wait_status;
    pid_t pid;
    bool any = false;
    while ((pid = waitpid(-1, &wait_status, WNOHANG)) > 0) {
        any = true;
        for (int i = 0; i < job->count; i++)
            if (job->children[i].pid == pid)
                child_ended(job, &job->children[i], wait_status);
    }
    if (job->phase >= ENDING && any) /* its children are ours now */
        signal_adopted(job, job->phase == KILLING ? SIGKILL : SIGTERM);
    return pid == 0;
}

static void handle_signal(struct job *job, const struct signalfd_siginfo *info)
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
        kill_all(job);
        return;
    }
    say(job, "%s; ending the job", strsignal(sig));
    fail(job, 128 + sig);
}

/* --- starting -------------------------------------------------------------------------------- */

/* A port that is free now and not of the range from which the kernel takes ports for outgoing connections:
 * from there it could be taken before the coordinator listens, if only by a tallyd that tries to reach it. */
static int free_port(int other)
{
    unsigned low = 32768;
    FILE *f = fopen("/proc/sys/net/ipv4/ip_local_port_range", "re");
    if (f && fscanf(f, "%u", &low) != 1)
        low = 32768;
    if (f)
        fclose(f);
    unsigned first = 10000, count = low > first + 100 ? low - first : 0;
    for (int attempt = 0; attempt < 1000; attempt++) {
        bool any = !count || attempt >= 500;
        int port = any ? 0 : (int)(first + randombytes_uniform(count));
        struct sockaddr_in6 a = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port)};
        struct sockaddr_in b = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
        socklen_t len = sizeof a;
        int fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0); /* stands for IPv4 as well */
        if (fd < 0 || bind(fd, (struct sockaddr *)&a, sizeof a) < 0) {
            bool no_ipv6 = fd < 0 || errno == EADDRNOTAVAIL;
            if (fd >= 0)
                close(fd);
            if (!no_ipv6)
                continue;
            fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
            if (fd < 0 || bind(fd, (struct sockaddr *)&b, sizeof b) < 0) {
                if (fd >= 0)
                    close(fd);
                continue;
            }
        }
        if (any && getsockname(fd, (struct sockaddr *)&a, &len) == 0)
            port = ntohs(a.sin6_port); /* at the same place in both kinds of address */
        close(fd);
        if (port && port != other)
            return port;
    }
    return -EADDRINUSE;
}

static void set_number(const char *name, int value)
{
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, 1);
}

static int core_count(void)
{
    cpu_set_t set;
    int cores = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1, quota = tly_topo_quota("");
    return quota && quota < cores ? quota : cores;
}

/* What all processes of the job share. */
static void set_common(const struct options *o, const struct tly_params *p, int port, int store_port)
{
    static const char *const foreign[] = {
        /* of a launcher that we ourselves run under */
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_NAME",
        "ROLE_WORLD_SIZE",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_USE_AGENT_STORE"};
    char text[80];
    for (size_t i = 0; i < sizeof foreign / sizeof foreign[0]; i++)
        unsetenv(foreign[i]);
    snprintf(text, sizeof text, "127.0.0.1:%d", port);
    setenv("TALLY_COORD", text, 1);
    set_number("TALLY_SERVERS", o->servers);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    set_number("MASTER_PORT", store_port);
    set_number("WORLD_SIZE", o->ranks);
    if (!p->secret && !p->secret_file) {
        unsigned char secret[32];
        randombytes_buf(secret, sizeof secret);
        setenv("TALLY_SECRET", sodium_bin2hex(text, sizeof text, secret, sizeof secret), 1);
    }
    int threads = core_count() / o->ranks;
    if (!getenv("OMP_NUM_THREADS"))
        set_number("OMP_NUM_THREADS", threads > 1 ? threads : 1);
}

/* What one of them has for itself.  Ranks are spread over machines in blocks, the larger ones first. */
static void set_own(const struct options *o, const struct child *c)
{
    char text[32];
    int machine = c->index;
    if (!c->server) {
        int least = o->ranks / o->machines, larger = o->ranks % o->machines, local = c->index, size = 0;
        for (machine = 0; local >= (size = least + (machine < larger)); machine++)
            local -= size;
        set_number("RANK", c->index);
        set_number("LOCAL_RANK", local);
        set_number("LOCAL_WORLD_SIZE", size);
    }
    if (o->servers || o->machines > 1) {
        snprintf(text, sizeof text, "%s-%d", c->server ? "tallyd" : "machine", machine);
        setenv("TALLY_HOST_ID", text, 1);
    }
}

static int open_pipe(struct stream *s, struct sink *sink, int *child_end)
{
    int fd[2];
    if (pipe2(fd, O_CLOEXEC) < 0)
        return -errno;
    fcntl(fd[0], F_SETFL, O_NONBLOCK);
    *s = (struct stream){.fd = fd[0], .sink = sink};
    *child_end = fd[1];
    return 0;
}

static _Noreturn void become(const struct job *job, const struct child *c, pid_t guard, int out, int err)
{
    const struct options *o = job->options;
    char port[32], *server[] = {o->tallyd, "--coord", port, NULL};
    char **argv = c->server ? server : o->command;
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0 || getppid() != guard)
        _exit(CLI_FAILED);
    if (o->prefix) {
        setpgid(0, 0);
        dup2(out, STDOUT_FILENO);
        dup2(err, STDERR_FILENO);
    }
    /* One process may have the terminal's input, and only in a group that may read it. */
    if (o->prefix || c->server || c->index > 0) {
        int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
        if (null >= 0)
            dup2(null, STDIN_FILENO);
    }
    snprintf(port, sizeof port, "%s", getenv("TALLY_COORD"));
    set_own(o, c);
    setrlimit(RLIMIT_NOFILE, &job->old_files);
    signal(SIGPIPE, SIG_DFL);
    sigprocmask(SIG_SETMASK, &job->old_mask, NULL);
    execvp(argv[0], argv);
    int why = errno;
    dprintf(STDERR_FILENO, "cannot run %s: %s\n", argv[0], strerror(why));
    _exit(why == ENOENT ? 127 : 126);
}

static int start(struct job *job, struct child *c)
{
    int out = -1, err = -1, rc = 0;
    if (job->options->prefix) {
        if ((rc = open_pipe(&c->out, &job->out, &out)) < 0 || (rc = open_pipe(&c->err, &job->err, &err)) < 0)
            goto done;
    }
    pid_t guard = getpid(), pid = fork();
    if (pid == 0)
        become(job, c, guard, out, err);
    if (pid < 0) {
        rc = -errno;
        goto done;
    }
    if (job->options->prefix)
        setpgid(pid, pid); /* here as well, so that it holds before the first kill, whoever runs first */
    c->pid = pid;
    job->left++;
    if (!c->server)
        job->ranks_left++;
done:
    if (out >= 0)
        close(out);
    if (err >= 0)
        close(err);
    return rc;
}

/* --- the guard's loop ------------------------------------------------------------------------ */

static void watch(struct pollfd *fds, struct child **who, int *n, struct child *c, struct stream *s)
{
    if (s->fd < 0 || sink_busy(s->sink))
        return;
    fds[*n] = (struct pollfd){.fd = s->fd, .events = POLLIN};
    who[(*n)++] = c;
}

static void take_signals(struct job *job)
{
    struct signalfd_siginfo info;
    while (read(job->signal_fd, &info, sizeof info) == sizeof info)
        handle_signal(job, &info);
}

/* Returns when something has happened or the phase's time is over. */
static void wait_and_handle(struct job *job, struct pollfd *fds, struct child **who)
{
    struct sink *sinks[] = {&job->out, &job->err};
    int n = 0, timeout_ms = -1;
    fds[n++] = (struct pollfd){.fd = job->signal_fd, .events = POLLIN};
    for (int i = 0; i < 2; i++)
        fds[n++] = (struct pollfd){.fd = sink_busy(sinks[i]) ? sinks[i]->fd : -1, .events = POLLOUT};
    for (int i = 0; i < job->count; i++) {
        watch(fds, who, &n, &job->children[i], &job->children[i].out);
        watch(fds, who, &n, &job->children[i], &job->children[i].err);
    }
    if (job->deadline) {
        int64_t left = job->deadline - tly_now();
        timeout_ms = left > 0 ? (int)((left + TLY_MS - 1) / TLY_MS) : 0;
    }
    if (poll(fds, (nfds_t)n, timeout_ms) < 0)
        return;
    for (int i = 0; i < 2; i++) {
        int rc = fds[1 + i].revents ? sink_write(sinks[i]) : 0;
        if (rc < 0 && rc != -EPIPE)
            say(job, "cannot write to standard %s: %s", i ? "error" : "output", strerror(-rc));
        if (rc < 0)
            fail(job, rc == -EPIPE ? 128 + SIGPIPE : CLI_FAILED);
    }
    for (int i = 3; i < n; i++)
        if (fds[i].revents)
            stream_read(who[i], who[i]->out.fd == fds[i].fd ? &who[i]->out : &who[i]->err);
    if (fds[0].revents)
        take_signals(job);
    if (job->deadline && tly_now() >= job->deadline) {
        kill_all(job);
    }
}

/* All processes have ended: pass on what they have said. */
static void drain(struct job *job, struct pollfd *fds, struct child **who)
{
    for (int i = 0; i < job->count; i++) {
        struct child *c = &job->children[i];
        struct stream *streams[] = {&c->out, &c->err};
        for (int j = 0; j < 2; j++) {
            while (streams[j]->fd >= 0 && stream_read(c, streams[j]))
                ;
            stream_end(c, streams[j]);
        }
    }
    job->deadline = 0;
    while (job->flush && (sink_busy(&job->out) || sink_busy(&job->err)))
        wait_and_handle(job, fds, who);
}

static int guard(struct job *job)
{
    const struct options *o = job->options;
    char name[32];
    int rc = 0;
    size_t most = 3 + 2 * (size_t)job->count;
    job->children = calloc((size_t)job->count, sizeof job->children[0]);
    struct pollfd *fds = calloc(most, sizeof fds[0]);
    struct child **who = calloc(most, sizeof who[0]);
    if (!job->children || !fds || !who)
        return tly_cli_fail("run", "out of memory");
    for (int i = 0; i < job->count; i++) {
        struct child *c = &job->children[i];
        c->server = i >= o->ranks;
        c->index = c->server ? i - o->ranks : i;
        c->out.fd = c->err.fd = -1;
    }
    for (int i = 0; i < job->count && rc == 0; i++)
        if ((rc = start(job, &job->children[i])) < 0) {
            say(job, "cannot start %s: %s", title(&job->children[i], name), strerror(-rc));
            fail(job, CLI_FAILED);
        }
    if (getppid() != job->front) { /* the signal for that may have come before we had asked for it */
        job->flush = false;
        kill_all(job);
    }
    while (reap(job))
        wait_and_handle(job, fds, who);
    drain(job, fds, who);
    free(job->out.data);
    free(job->err.data);
    free(job->children);
    free(fds);
    free(who);
    return job->status;
}

/* --- the front ------------------------------------------------------------------------------- */

/* Wait for the guard, hand it what signals reach this process alone, and clean up after it. */
static int front(pid_t guard_pid, const sigset_t *set)
{
    int status = CLI_FAILED, wait_status;
    bool guarded = true;
    for (;;) {
        pid_t pid;
        while ((pid = waitpid(-1, &wait_status, WNOHANG)) > 0) {
            if (pid != guard_pid)
                continue;
            guarded = false;
            status = WIFSIGNALED(wait_status) ? 128 + WTERMSIG(wait_status) : WEXITSTATUS(wait_status);
        }
        if (pid < 0)
            return status;
        if (!guarded)
            signal_adopted(NULL, SIGKILL);
        int sig = sigwaitinfo(set, NULL);
        if (sig > 0 && sig != SIGCHLD && guarded)
            kill(guard_pid, sig);
    }
}

/* The program beside this one, as installed and as built, or the one on the PATH. */
static char *find_tallyd(void)
{
    static const char *const places[] = {"tallyd", "../tallyd/tallyd"};
    char self[PATH_MAX], path[PATH_MAX + 32];
    ssize_t len = readlink("/proc/self/exe", self, sizeof self - 1);
    if (len > 0) {
        self[len] = 0;
        *strrchr(self, '/') = 0;
        for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
            snprintf(path, sizeof path, "%s/%s", self, places[i]);
            if (access(path, X_OK) == 0)
                return strdup(path);
        }
    }
    return strdup("tallyd");
}

static int parse(int argc, char **argv, struct options *o)
{
    enum { MACHINES = 256, NO_PREFIX, PORT, TALLYD };
    static const struct option options[] = {
        {"ranks", required_argument, NULL, 'n'},
        {"servers", required_argument, NULL, 'k'},
        {"port", required_argument, NULL, PORT},
        {"machines", required_argument, NULL, MACHINES},
        {"help", no_argument, NULL, 'h'},
        {"no-prefix", no_argument, NULL, NO_PREFIX},
        {"tallyd", required_argument, NULL, TALLYD},
        {0}};
    for (int c; (c = getopt_long(argc, argv, "+n:k:h", options, NULL)) != -1;) {
        switch (c) {
        case 'n':
            if ((o->ranks = (int)tly_cli_number(optarg, 1, MOST_CHILDREN)) < 0)
                return tly_cli_misuse("run", "-n %s: the number of ranks is 1 to %d", optarg, MOST_CHILDREN);
            break;
        case 'k':
            if ((o->servers = (int)tly_cli_number(optarg, 0, MOST_CHILDREN)) < 0)
                return tly_cli_misuse("run", "-k %s: the number of tallyd is 0 to %d", optarg, MOST_CHILDREN);
            break;
        case MACHINES:
            if ((o->machines = (int)tly_cli_number(optarg, 1, MOST_CHILDREN)) < 0)
                return tly_cli_misuse("run", "--machines %s is no number of machines", optarg);
            break;
        case PORT:
            if ((o->port = (int)tly_cli_number(optarg, 1, 65535)) < 0)
                return tly_cli_misuse("run", "--port %s: a port is 1 to 65535", optarg);
            break;
        case NO_PREFIX:
            o->prefix = false;
            break;
        case TALLYD:
            free(o->tallyd);
            o->tallyd = strdup(optarg);
            break;
        case 'h':
            fputs(tly_cli_run_usage, stdout);
            return -1;
        default:
            return CLI_USAGE;
        }
    }
    if (!o->ranks)
        return tly_cli_misuse("run", "-n, the number of ranks, is needed");
    if (optind == argc)
        return tly_cli_misuse("run", "a command is needed");
    if (!o->machines)
        o->machines = o->servers ? o->ranks : 1;
    if (o->machines > o->ranks)
        return tly_cli_misuse("run", "--machines %d: there are only %d ranks", o->machines, o->ranks);
    o->command = argv + optind;
    return 0;
}

static int launch(const struct options *o)
{
    struct tly_params p;
    char why[1024];
    if (tly_params_load(&p, NULL, why, sizeof why) < 0) /* once here rather than once in every process */
        return tly_cli_fail("run", "%s", why);
    int port = o->port ? o->port : free_port(0), store_port = port < 0 ? port : free_port(port);
    if (store_port < 0) {
        tly_params_finish(&p);
        return tly_cli_fail("run", "no port is free");
    }
    set_common(o, &p, port, store_port);
    tly_params_finish(&p);

    struct job job = {.options = o, .count = o->ranks + o->servers, .flush = true, .front = getpid()};
    job.out.fd = STDOUT_FILENO;
    job.err.fd = STDERR_FILENO;
    sigset_t set;
    struct sigaction hangup;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGQUIT);
    sigaddset(&set, SIGCHLD);
    if (sigaction(SIGHUP, NULL, &hangup) == 0 && hangup.sa_handler != SIG_IGN) /* nohup's wish */
        sigaddset(&set, SIGHUP);
    signal(SIGCHLD, SIG_DFL);
    signal(SIGPIPE, SIG_IGN);
    sigprocmask(SIG_BLOCK, &set, &job.old_mask);
    getrlimit(RLIMIT_NOFILE, &job.old_files);
    struct rlimit files = {job.old_files.rlim_max, job.old_files.rlim_max};
    setrlimit(RLIMIT_NOFILE, &files);
    fflush(NULL);
    if (prctl(PR_SET_CHILD_SUBREAPER, 1) < 0)
        return tly_cli_fail("run", "cannot become a subreaper: %s", strerror(errno));

    pid_t pid = fork();
    if (pid < 0)
        return tly_cli_fail("run", "cannot fork: %s", strerror(errno));
    if (pid > 0)
        return front(pid, &set);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    job.signal_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (prctl(PR_SET_CHILD_SUBREAPER, 1) < 0 || job.signal_fd < 0)
        _exit(tly_cli_fail("run", "cannot watch over processes: %s", strerror(errno)));
    _exit(guard(&job));
}

int tly_cli_run(int argc, char **argv)
{
    struct options o = {.prefix = true};
    if (sodium_init() < 0)
        return tly_cli_fail("run", "no source of random numbers");
    int status = parse(argc, argv, &o);
    if (status == 0) {
        if (!o.tallyd)
            o.tallyd = find_tallyd();
        status = launch(&o);
    }
    free(o.tallyd);
    return status < 0 ? 0 : status;
}
