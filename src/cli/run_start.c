/* run_start.c - starts the ranks and services of `tally run`: ports, environment, pipes, fork and exec.
 *
 * tly_run_set_common() sets the variables that all processes share, once, in our own environment.  Each child adds its
 * own variables between fork and exec.  With prefixes a child has a process group and two pipes of its own.
 *
 * The front chooses the ports and sets the environment; the guard starts the children. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/run.h"
#include "topo/topo.h"

/* --- ports and environment ---------------------------------------------------------------------- */

int tly_run_free_port(int other)
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

static void run_set_number(const char *name, int value)
{
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, 1);
}

static int run_core_count(void)
{
    cpu_set_t set;
    int cores = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1, quota = tly_topo_quota("");
    return quota && quota < cores ? quota : cores;
}

void tly_run_set_common(const struct tly_run_options *o, const struct tly_params *p, int port, int store_port)
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
    run_set_number("TALLY_SERVERS", o->servers);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    run_set_number("MASTER_PORT", store_port);
    run_set_number("WORLD_SIZE", o->ranks);
    if (!p->secret && !p->secret_file) {
        unsigned char secret[32];
        randombytes_buf(secret, sizeof secret);
        setenv("TALLY_SECRET", sodium_bin2hex(text, sizeof text, secret, sizeof secret), 1);
    }
    int threads = run_core_count() / o->ranks;
    if (!getenv("OMP_NUM_THREADS"))
        run_set_number("OMP_NUM_THREADS", threads > 1 ? threads : 1);
}

/* What one of them has for itself.  Ranks are spread over machines in blocks, the larger ones first. */
static void run_set_own(const struct tly_run_options *o, const struct tly_run_child *c)
{
    char text[32];
    int machine = c->index;
    if (!c->server) {
        int least = o->ranks / o->machines, larger = o->ranks % o->machines, local = c->index, size = 0;
        for (machine = 0; local >= (size = least + (machine < larger)); machine++)
            local -= size;
        run_set_number("RANK", c->index);
        run_set_number("LOCAL_RANK", local);
        run_set_number("LOCAL_WORLD_SIZE", size);
    }
    if (o->servers || o->machines > 1) {
        snprintf(text, sizeof text, "%s-%d", c->server ? "tallyd" : "machine", machine);
        setenv("TALLY_HOST_ID", text, 1);
    }
}

/* --- processes ---------------------------------------------------------------------------------- */

static int run_open_pipe(struct tly_run_stream *s, struct tly_run_sink *sink, int *child_end)
{
    int fd[2];
    if (pipe2(fd, O_CLOEXEC) < 0)
        return -errno;
    fcntl(fd[0], F_SETFL, O_NONBLOCK);
    *s = (struct tly_run_stream){.fd = fd[0], .sink = sink};
    *child_end = fd[1];
    return 0;
}

static _Noreturn void run_become(const struct tly_run_job *job, const struct tly_run_child *c, pid_t guard,
                                 int out, int err)
{
    const struct tly_run_options *o = job->options;
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
    run_set_own(o, c);
    setrlimit(RLIMIT_NOFILE, &job->old_files);
    signal(SIGPIPE, SIG_DFL);
    sigprocmask(SIG_SETMASK, &job->old_mask, NULL);
    execvp(argv[0], argv);
    int why = errno;
    dprintf(STDERR_FILENO, "cannot run %s: %s\n", argv[0], strerror(why));
    _exit(why == ENOENT ? 127 : 126);
}

int tly_run_start(struct tly_run_job *job, struct tly_run_child *c)
{
    int out = -1, err = -1, rc = 0;
    if (job->options->prefix) {
        if ((rc = run_open_pipe(&c->out, &job->out, &out)) < 0 ||
            (rc = run_open_pipe(&c->err, &job->err, &err)) < 0)
            goto done;
    }
    pid_t guard = getpid(), pid = fork();
    if (pid == 0)
        run_become(job, c, guard, out, err);
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
