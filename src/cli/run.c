/* run.c - `tally run`: ranks and summation services on this machine.
 *
 *   tally run (front) ── guard ──┬── rank 0 … rank N-1 ── whatever they start
 *                                └── tallyd 0 … tallyd K-1
 *
 * The guard does the work in one poll loop (run_guard.c).  It starts the processes (run_start.c), puts a prefix before
 * their lines (run_output.c), and ends all of them when the first fails, when a signal comes, or when the ranks are done
 * (run_end.c).  It is a subreaper, so what ranks have started and left behind becomes its child and is ended too.
 *
 * Front and guard watch each other, because no process survives its own kill -9 to clean up.  The guard gets a signal
 * when the front dies.  The front is a subreaper too.  When the guard dies, ranks and services die with it
 * (PR_SET_PDEATHSIG), the rest becomes the front's, and the front kills it.
 *
 * Here are the command line and the front. */
#include <errno.h>
#include <getopt.h>
#include <limits.h>
#include <signal.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/param.h"
#include "cli/cli.h"
#include "cli/run.h"

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

enum { MOST_CHILDREN = 1000 };

/* Wait for the guard, hand it what signals reach this process alone, and clean up after it. */
static int run_front(pid_t guard_pid, const sigset_t *set)
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
            tly_run_signal_adopted(NULL, SIGKILL);
        int sig = sigwaitinfo(set, NULL);
        if (sig > 0 && sig != SIGCHLD && guarded)
            kill(guard_pid, sig);
    }
}

/* The program beside this one, as installed and as built, or the one on the PATH. */
static char *run_find_tallyd(void)
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

static int run_parse(int argc, char **argv, struct tly_run_options *o)
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

/* Settings of other jobs that this one does not take. */
static void run_say_overridden(const struct tly_run_options *o, const struct tly_params *p)
{
    if (p->coord)
        tly_cli_say("run", "TALLY_COORD=%s does not count: rank 0 of this job listens at 127.0.0.1",
                    p->coord);
    if (getenv("TALLY_PORT") && p->port != o->port)
        tly_cli_say("run", "TALLY_PORT=%d does not count: --port says where rank 0 of this job listens",
                    (int)p->port);
    if (p->servers && p->servers != o->servers)
        tly_cli_say("run", "TALLY_SERVERS=%d does not count: -k says how many tallyd this job has, %d",
                    (int)p->servers, o->servers);
    if (p->host_id && (o->servers || o->machines > 1))
        tly_cli_say("run", "TALLY_HOST_ID=%s does not count: the ranks appear as %d machines", p->host_id,
                    o->machines);
}

/* A module of the user's that Python finds in the script's folder, or in this one, before the package. */
static void run_say_shadow(const struct tly_run_options *o)
{
    static const char *const modules[] = {"tally.py", "tally/__init__.py"};
    char path[PATH_MAX + 32], *script = NULL, *folder;
    for (char **word = o->command; word && *word && !script; word++) {
        size_t len = strlen(*word);
        if (len > 3 && strcmp(*word + len - 3, ".py") == 0)
            script = realpath(*word, NULL);
    }
    folder = script ? script : realpath(".", NULL);
    if (!folder)
        return;
    if (script)
        *strrchr(script, '/') = '\0';
    snprintf(path, sizeof path, "%s/tally/_lib.py", folder);
    bool ours = access(path, F_OK) == 0;
    for (int i = 0; i < 2 && !ours; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, modules[i]);
        if (access(path, F_OK) == 0)
            tly_cli_say("run", "%s hides the Python package tally from scripts in its folder: rename it",
                        path);
    }
    free(folder);
}

static int run_launch(const struct tly_run_options *o)
{
    struct tly_params p;
    char why[1024];
    if (tly_params_load(&p, NULL, why, sizeof why) < 0) /* once here rather than once in every process */
        return tly_cli_fail("run", "%s", why);
    int port = o->port ? o->port : tly_run_free_port(0),
        store_port = port < 0 ? port : tly_run_free_port(port);
    if (store_port < 0) {
        tly_params_finish(&p);
        return tly_cli_fail("run", "no port is free");
    }
    run_say_overridden(o, &p);
    run_say_shadow(o);
    tly_run_set_common(o, &p, port, store_port);
    tly_params_finish(&p);

    struct tly_run_job job = {.options = o, .count = o->ranks + o->servers, .flush = true, .front = getpid()};
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
        return run_front(pid, &set);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    job.signal_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (prctl(PR_SET_CHILD_SUBREAPER, 1) < 0 || job.signal_fd < 0)
        _exit(tly_cli_fail("run", "cannot watch over processes: %s", strerror(errno)));
    _exit(tly_run_guard(&job));
}

int tly_cli_run(int argc, char **argv)
{
    struct tly_run_options o = {.prefix = true};
    if (sodium_init() < 0)
        return tly_cli_fail("run", "no source of random numbers");
    int status = run_parse(argc, argv, &o);
    if (status == 0) {
        if (!o.tallyd)
            o.tallyd = run_find_tallyd();
        status = run_launch(&o);
    }
    free(o.tallyd);
    return status < 0 ? 0 : status;
}
