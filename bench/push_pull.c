/* push_pull.c - push_pull of one tensor beside what the same connections carry, in the style of nccl-tests.
 *
 *   tally run --no-prefix -n 2 -k 2 -- push_pull [--quick] [--json FILE] ...      (bench/push_pull.py does it)
 *
 * Two ways move the same bytes, in turn, block after block, so that a disturbance meets both alike:
 *   tally  push_pull, out of place, float32, sum
 *   limit  the bytes alone.  Each worker sends its share to each service and receives as many, over sockets with
 *          the settings of src/transport/tcp/socket.c.  No header, no key, no sum, no waiting for other workers.
 *          There are as many processes as in the Tally job: the workers are the ranks themselves, what tallyd is
 *          there is a child process here, and a worker machine's own service is one more duty of its first rank.
 *          Two kinds are measured, and the faster one is the limit:
 *            echo    the service sends back what it has received, 128 KB at a time out of one buffer, and a worker
 *                    keeps 512 KB under way on a connection, which fit into caches
 *            stream  both directions flow independently, once the first byte of an iteration has come
 *
 * A block's first iteration is not counted; the others last from the moment that the last rank has ended the first to
 * the moment that the last rank has ended the last.  That, by their number, is the block's time; `time` and `limit`
 * are medians over blocks.  (Single iterations of the limit say little: its workers do not wait for each other.)
 * p99 is over single iterations, each from the last rank's end of the one before to the last rank's end. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <math.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#include <tally/tally.h>

#include "plan/plan.h"

enum {
    MOST_RANKS = 64,
    MOST_SERVICES = 64,
    MOST_ITERATIONS = 512, /* of a block */
    MOST_SAMPLES = 20000,
    MOST_ROUNDS = 1000,
    MOST_PROCESSES = 256,
    CHUNK = 128 << 10,  /* of the limit: this much at a time ... */
    WINDOW = 512 << 10, /* ... and for echo no more than this under way on a connection, or caches run over */
    RECEIVE_BUFFER = 4 << 20,
    NOT_SENT_LOW_WATER = 256 << 10,
};

enum way { TALLY, ECHO, STREAM, WAYS };

/* In memory that all ranks and the limit's services share. */
struct shared {
    atomic_uint arrived, turn; /* of the barrier; turn is its futex */
    int host[MOST_SERVICES];   /* rank in whose process, or by whose child, the limit's service runs */
    atomic_int port[MOST_SERVICES];
    atomic_ulong wrong;
    int iterations; /* of the block that comes; set by rank 0 */
    bool go_on;
    double ended[MOST_RANKS][MOST_ITERATIONS];
};

struct options {
    uint64_t from, to, factor;
    double seconds; /* for a size, about */
    int rounds;
    const char *json;
};

/* Seconds of an iteration. */
struct samples {
    double *single; /* owned */
    int count;
    double time[MOST_ROUNDS]; /* of each block, and CPU time over all processes */
    double cpu[MOST_ROUNDS];
    int blocks;
};

static struct shared *shared;
static tally_comm *comm;
static int rank, size, services, machines;
static uint32_t weight[MOST_SERVICES];
static char *settings; /* owned; rank 0: JSON object, but for its closing brace */
static const uint64_t page = 4096;

_Noreturn static void fail(const char *what, const char *why)
{
    fprintf(stderr, "push_pull: rank %d: %s: %s\n", rank, what, why);
    exit(1);
}

static void check(int err, const char *what)
{
    if (err < 0)
        fail(what, tally_error());
}

static void check_os(int64_t result, const char *what)
{
    if (result < 0)
        fail(what, strerror(errno));
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* --- shared memory and barrier ------------------------------------------------------------------------- */

static void wait_for(tally_op *op)
{
    int err = tally_op_wait(op, -1);
    if (err < 0)
        fail("push_pull", tally_op_error(op));
    tally_op_free(op);
}

/* Rank 0 makes it without a name, so that nothing is left behind; the others find it through rank 0. */
static void share_memory(void)
{
    int64_t place[2] = {getpid(), -1};
    if (rank == 0) {
        place[1] = memfd_create("push_pull", MFD_CLOEXEC);
        check_os(place[1], "memfd_create");
        check_os(ftruncate((int)place[1], sizeof *shared), "ftruncate");
    }
    tally_op *op;
    check(tally_broadcast(comm, "bench.shared", place, 2, TALLY_INT64, 0, NULL, &op), "broadcast");
    wait_for(op);
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)place[0], (int)place[1]);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    check_os(fd, path);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (shared == MAP_FAILED)
        fail("mmap", strerror(errno));
    close(fd);
    check(tally_barrier(comm, "bench.mapped", NULL, &op), "barrier");
    wait_for(op);
}

/* Who waits sleeps: spinning would disturb those who still work. */
static void barrier(void)
{
    unsigned turn = atomic_load(&shared->turn);
    if (atomic_fetch_add(&shared->arrived, 1) + 1 == (unsigned)size) {
        atomic_store(&shared->arrived, 0);
        atomic_fetch_add(&shared->turn, 1);
        syscall(SYS_futex, &shared->turn, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
        return;
    }
    while (atomic_load(&shared->turn) == turn)
        syscall(SYS_futex, &shared->turn, FUTEX_WAIT, turn, NULL, NULL, 0);
}

/* --- the limit: sockets and shares --------------------------------------------------------------------- */

/* What a worker tells a service before the bytes of a block. */
struct order {
    uint64_t way, share, iterations;
};

/* One end of a connection. */
struct end {
    int fd;
    bool serves, readable, writable, hung_up;
    uint64_t sent, received; /* of the block */
    uint64_t share;          /* bytes of one iteration */
    uint64_t offset;         /* worker: of the share in the tensor */
    struct order order;
    size_t order_filled; /* service: bytes of the order that have come */
    uint64_t blocks;     /* service: done */
    uint8_t *buffer;     /* service: owned; of the echo */
    size_t from, to;     /* what the buffer holds */
};

/* One process's part of the limit. */
struct raw {
    int epoll;
    int count, ours; /* ends; the first `ours` are of the worker's side */
    uint64_t blocks; /* begun */
    struct end ends[MOST_RANKS + MOST_SERVICES];
};

static uint8_t constant[CHUNK], sink[CHUNK]; /* stream: what services send, and where they receive */

static void set(int fd, int level, int name, int value)
{
    check_os(setsockopt(fd, level, name, &value, sizeof value), "setsockopt");
}

static int make_socket(void)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    check_os(fd, "socket");
    set(fd, SOL_SOCKET, SO_RCVBUF, RECEIVE_BUFFER);
    return fd;
}

static void tune(int fd)
{
    set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    set(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, NOT_SENT_LOW_WATER);
    check_os(setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "cubic", 5), "cubic");
    check_os(fcntl(fd, F_SETFL, O_NONBLOCK), "fcntl");
}

static void add_end(struct raw *w, int fd, bool serves)
{
    tune(fd);
    struct end *e = &w->ends[w->count++];
    *e = (struct end){.fd = fd, .serves = serves, .writable = true, .buffer = serves ? malloc(CHUNK) : NULL};
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLET, .data.ptr = e};
    check_os(epoll_ctl(w->epoll, EPOLL_CTL_ADD, fd, &event), "epoll_ctl");
}

static int listen_on_loopback(int *port)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof a;
    int fd = make_socket();
    check_os(bind(fd, (struct sockaddr *)&a, sizeof a), "bind");
    check_os(listen(fd, MOST_RANKS), "listen");
    check_os(getsockname(fd, (struct sockaddr *)&a, &len), "getsockname");
    *port = ntohs(a.sin_port);
    return fd;
}

static void accept_workers(struct raw *w, int listener)
{
    for (int i = 0; i < size; i++) {
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        check_os(fd, "accept");
        add_end(w, fd, true);
    }
    close(listener);
}

static void connect_to(struct raw *w, int service)
{
    struct sockaddr_in a = {.sin_family = AF_INET,
                            .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                            .sin_port = htons((uint16_t)shared->port[service])};
    int fd = make_socket();
    check_os(connect(fd, (struct sockaddr *)&a, sizeof a), "connect");
    add_end(w, fd, false);
}

/* --- the limit: moving bytes --------------------------------------------------------------------------- */

/* Bytes moved, 0 if the kernel has no room or nothing more. */
static size_t put(struct end *e, const void *from, size_t n)
{
    ssize_t r = send(e->fd, from, n, MSG_NOSIGNAL);
    if (r < 0 && errno != EAGAIN)
        fail("send", strerror(errno));
    if (r < (ssize_t)n)
        e->writable = false;
    return r < 0 ? 0 : (size_t)r;
}

static size_t get(struct end *e, void *to, size_t n)
{
    ssize_t r = recv(e->fd, to, n, 0);
    if (r < 0 && errno != EAGAIN)
        fail("recv", strerror(errno));
    if (r == 0)
        e->hung_up = true;
    if (r < (ssize_t)n) /* all there was: more makes a new edge */
        e->readable = false;
    return r < 0 ? 0 : (size_t)r;
}

static size_t at_most(uint64_t n)
{
    return n < CHUNK ? (size_t)n : CHUNK;
}

static bool serve(struct end *e)
{
    size_t n = 0;
    if (e->order_filled < sizeof e->order) {
        if (e->readable)
            e->order_filled += n =
                get(e, (uint8_t *)&e->order + e->order_filled, sizeof e->order - e->order_filled);
        if (e->order_filled < sizeof e->order)
            return n > 0;
        e->sent = e->received = 0;
    }
    const uint64_t all = e->order.share * e->order.iterations;
    bool echo = e->order.way == ECHO;
    if (e->readable && e->received < all && (!echo || e->from == e->to)) {
        size_t more = get(e, echo ? e->buffer : sink, at_most(all - e->received));
        if (echo) {
            e->from = 0;
            e->to = more;
        }
        e->received += more;
        n += more;
    }
    if (e->writable && echo && e->from < e->to) {
        size_t more = put(e, e->buffer + e->from, e->to - e->from);
        e->from += more;
        e->sent += more;
        n += more;
    } else if (e->writable && !echo && e->order.share) {
        uint64_t begun = (e->received + e->order.share - 1) / e->order.share * e->order.share;
        if (e->sent < begun) {
            size_t more = put(e, constant, at_most(begun - e->sent));
            e->sent += more;
            n += more;
        }
    }
    if (e->received == all && e->sent == all) {
        e->blocks++;
        e->order_filled = 0;
        return true;
    }
    return n > 0;
}

static bool work(struct end *e, enum way way, const uint8_t *input, uint8_t *output, uint64_t iteration)
{
    size_t n = 0;
    uint64_t begun = e->share * (iteration + 1), before = e->share * iteration;
    if (e->readable && e->received < begun) {
        size_t more = get(e, output + e->offset + (e->received - before), at_most(begun - e->received));
        if (e->hung_up)
            fail("limit", "a service has hung up");
        e->received += more;
        n += more;
    }
    uint64_t until = way == ECHO && begun > e->received + WINDOW ? e->received + WINDOW : begun;
    if (e->writable && e->sent < until) {
        size_t more = put(e, input + e->offset + (e->sent - before), at_most(until - e->sent));
        e->sent += more;
        n += more;
    }
    return n > 0;
}

static void wait_for_edges(struct raw *w)
{
    struct epoll_event events[MOST_RANKS + MOST_SERVICES];
    int n = epoll_wait(w->epoll, events, sizeof events / sizeof *events, -1);
    if (n < 0 && errno != EINTR)
        fail("epoll_wait", strerror(errno));
    for (int i = 0; i < n; i++) {
        struct end *e = events[i].data.ptr;
        e->readable |= (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0;
        e->writable |= (events[i].events & EPOLLOUT) != 0;
    }
}

/* What tallyd is in the job: until the workers hang up. */
_Noreturn static void be_service(struct raw *w)
{
    for (;;) {
        bool moved = false;
        int left = 0;
        for (int i = 0; i < w->count; i++) {
            moved |= serve(&w->ends[i]);
            left += !w->ends[i].hung_up;
        }
        if (!left)
            _exit(0);
        if (!moved)
            wait_for_edges(w);
    }
}

/* This service's part of the tensor: whole pages, as the plan splits them. */
static void split(uint64_t bytes, uint64_t share[])
{
    uint64_t pages[MOST_SERVICES];
    tly_plan_shares(services, weight, bytes / page, pages);
    int last = 0;
    for (int i = 0; i < services; i++) {
        share[i] = pages[i] * page;
        last = weight[i] ? i : last;
    }
    share[last] += bytes % page;
}

static void run_limit(struct raw *w, enum way way, const uint8_t *input, uint8_t *output, uint64_t bytes,
                      int iterations)
{
    uint64_t share[MOST_SERVICES], offset = 0, iteration = 0;
    split(bytes, share);
    w->blocks++;
    for (int i = 0, s = 0; i < w->ours; i++, s++) {
        struct end *e = &w->ends[i];
        while (!weight[s])
            s++;
        e->share = share[s];
        e->offset = offset;
        e->sent = e->received = 0;
        offset += share[s];
        struct order o = {way, e->share, (uint64_t)iterations};
        if (put(e, &o, sizeof o) != sizeof o)
            fail("limit", "the connection is full before it is used");
    }
    for (;;) {
        bool moved = false, whole = true, served = true;
        for (int i = 0; i < w->count; i++) {
            struct end *e = &w->ends[i];
            if (e->serves) {
                moved |= serve(e);
                served &= e->blocks == w->blocks;
            } else if (iteration < (uint64_t)iterations) {
                moved |= work(e, way, input, output, iteration);
                whole &= e->received == e->share * (iteration + 1) && e->sent == e->received;
            }
        }
        if (iteration < (uint64_t)iterations && whole) {
            shared->ended[rank][iteration++] = now();
            continue;
        }
        if (iteration == (uint64_t)iterations && served)
            return;
        if (!moved)
            wait_for_edges(w);
    }
}

static void set_up_limit(struct raw *w)
{
    int listener[MOST_SERVICES], port;
    w->epoll = epoll_create1(EPOLL_CLOEXEC);
    check_os(w->epoll, "epoll_create1");
    for (int s = 0; s < services; s++) {
        listener[s] = -1;
        if (!weight[s] || shared->host[s] != rank)
            continue;
        listener[s] = listen_on_loopback(&port);
        shared->port[s] = port;
        if (s < machines)
            continue;
        pid_t parent = getpid(), child = fork();
        check_os(child, "fork");
        if (child == 0) {
            static struct raw own;
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (getppid() != parent)
                _exit(1);
            own.epoll = epoll_create1(EPOLL_CLOEXEC);
            accept_workers(&own, listener[s]);
            be_service(&own);
        }
        close(listener[s]);
        listener[s] = -1;
    }
    barrier();
    for (int s = 0; s < services; s++)
        if (weight[s])
            connect_to(w, s);
    w->ours = w->count;
    for (int s = 0; s < services; s++)
        if (listener[s] >= 0)
            accept_workers(w, listener[s]);
    barrier();
}

/* --- Tally --------------------------------------------------------------------------------------------- */

/* Whole numbers, so that their sum is exact. */
static float value_of(int r, uint64_t i)
{
    return (float)(i % 97) + (float)(r + 1);
}

static float sum_at(uint64_t i)
{
    return (float)size * (float)(i % 97) + (float)(size * (size + 1)) / 2;
}

static void run_tally(const char *name, const float *input, float *output, uint64_t count, int iterations)
{
    for (int i = 0; i < iterations; i++) {
        tally_op *op;
        check(tally_push_pull(comm, name, input, output, count, TALLY_FLOAT32, TALLY_SUM, NULL, &op),
              "push_pull");
        wait_for(op);
        shared->ended[rank][i] = now();
    }
}

/* --- CPU time ------------------------------------------------------------------------------------------ */

static pid_t processes[MOST_PROCESSES]; /* of the job: ranks, tallyd and the limit's services; rank 0 */
static int process_count;

static pid_t parent_of(pid_t pid)
{
    char path[64], text[256], *end;
    int parent = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *f = fopen(path, "re");
    /* The name, in parentheses, may hold anything. */
    if (f && fgets(text, sizeof text, f) && (end = strrchr(text, ')')))
        sscanf(end, ") %*c %d", &parent);
    if (f)
        fclose(f);
    return parent;
}

/* All that were started by who started this one, and their children. */
static void find_processes(void)
{
    DIR *d = opendir("/proc");
    pid_t launcher = getppid(), pid;
    for (struct dirent *e; d && (e = readdir(d));) {
        if ((pid = atoi(e->d_name)) <= 1)
            continue;
        pid_t parent = parent_of(pid);
        if (process_count < MOST_PROCESSES && parent > 1 &&
            (parent == launcher || parent_of(parent) == launcher))
            processes[process_count++] = pid;
    }
    if (d)
        closedir(d);
}

/* Seconds on a CPU so far, over all threads of the job. */
static double cpu_time(void)
{
    double sum = 0;
    for (int i = 0; i < process_count; i++) {
        char path[320];
        snprintf(path, sizeof path, "/proc/%d/task", processes[i]);
        DIR *d = opendir(path);
        for (struct dirent *e; d && (e = readdir(d));) {
            double ns;
            snprintf(path, sizeof path, "/proc/%d/task/%s/schedstat", processes[i], e->d_name);
            FILE *f = e->d_name[0] == '.' ? NULL : fopen(path, "re");
            if (!f)
                continue;
            if (fscanf(f, "%lf", &ns) == 1)
                sum += ns * 1e-9;
            fclose(f);
        }
        if (d)
            closedir(d);
    }
    return sum;
}

/* --- measuring ----------------------------------------------------------------------------------------- */

static double last_end(int i)
{
    double last = 0;
    for (int r = 0; r < size; r++)
        last = fmax(last, shared->ended[r][i]);
    return last;
}

static void run_block(enum way way, struct raw *w, const char *name, const float *input, float *output,
                      uint64_t bytes, int iterations, struct samples *s)
{
    double cpu = s ? cpu_time() : 0;
    barrier();
    if (way == TALLY)
        run_tally(name, input, output, bytes / sizeof *output, iterations);
    else
        run_limit(w, way, (const uint8_t *)input, (uint8_t *)output, bytes, iterations);
    barrier();
    if (!s)
        return;
    s->cpu[s->blocks] = (cpu_time() - cpu) / iterations;
    s->time[s->blocks++] = (last_end(iterations - 1) - last_end(0)) / (iterations - 1);
    for (int i = 1; i < iterations && s->count < MOST_SAMPLES; i++)
        s->single[s->count++] = last_end(i) - last_end(i - 1);
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts; p from 0 to 1. */
static double quantile(double *x, int count, double p)
{
    qsort(x, (size_t)count, sizeof *x, by_size);
    return x[(int)(p * (count - 1) + 0.5)];
}

static void count_wrong(const float *output, uint64_t count)
{
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < count; i++)
        wrong += output[i] != sum_at(i);
    atomic_fetch_add(&shared->wrong, wrong);
}

static void print_row(FILE *json, uint64_t bytes, struct samples s[WAYS])
{
    double middle[WAYS], least[WAYS], cpu[WAYS];
    for (int w = 0; w < WAYS; w++) {
        middle[w] = quantile(s[w].time, s[w].blocks, 0.5);
        least[w] = s[w].time[0];
        cpu[w] = quantile(s[w].cpu, s[w].blocks, 0.5);
    }
    enum way best = middle[ECHO] < middle[STREAM] ? ECHO : STREAM;
    double fraction = middle[best] / middle[TALLY], p99 = quantile(s[TALLY].single, s[TALLY].count, 0.99);
    unsigned long wrong = atomic_load(&shared->wrong);
    static const char *const names[] = {"tally", "echo", "stream"};
    printf("%12llu %11llu %8s %11.1f %11.1f %9.3f %11.1f %7s %9.3f %10.1f %10.1f %6lu\n",
           (unsigned long long)bytes, (unsigned long long)bytes / 4, "float32", middle[TALLY] * 1e6,
           p99 * 1e6, (double)bytes / middle[TALLY] / 1e9, middle[best] * 1e6, names[best], fraction,
           cpu[TALLY] * 1e6, cpu[best] * 1e6, wrong);
    fflush(stdout);
    if (!json)
        return;
    fprintf(json,
            "{\"bench\": \"push_pull\", \"ranks\": %d, \"machines\": %d, \"tallyd\": %d, \"bytes\": %llu, "
            "\"count\": %llu, "
            "\"dtype\": \"float32\", \"time_us\": %.2f, \"p99_us\": %.2f, \"least_us\": %.2f, "
            "\"iterations\": %d, \"blocks\": %d, "
            "\"algbw_gb_s\": %.4f, \"limit_us\": %.2f, \"limit_least_us\": %.2f, \"limit_kind\": \"%s\", "
            "\"fraction\": %.4f, \"cpu_us\": %.2f, \"limit_cpu_us\": %.2f, \"wrong\": %lu, \"tally\": "
            "\"%s\", \"settings\": %s}}\n",
            size, machines, services - machines, (unsigned long long)bytes, (unsigned long long)bytes / 4,
            middle[TALLY] * 1e6, p99 * 1e6, least[TALLY] * 1e6, s[TALLY].count, s[TALLY].blocks,
            (double)bytes / middle[TALLY] / 1e9, middle[best] * 1e6, least[best] * 1e6, names[best], fraction,
            cpu[TALLY] * 1e6, cpu[best] * 1e6, wrong, tally_version(), settings);
    fflush(json);
}

static float *take(uint64_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        fail("mmap", strerror(errno));
    return p;
}

static void measure(const struct options *o, struct raw *w, FILE *json, uint64_t bytes, float *input,
                    float *output)
{
    uint64_t count = bytes / sizeof *input;
    char name[64];
    static struct samples s[WAYS];
    memset(s, 0, sizeof s);
    for (int i = 0; i < WAYS && rank == 0; i++)
        if (!(s[i].single = malloc(MOST_SAMPLES * sizeof *s[i].single)))
            fail("malloc", strerror(errno));
    snprintf(name, sizeof name, "bench.%llu", (unsigned long long)bytes);
    const char *const names[] = {name};
    check(tally_plan(comm, 0, 1, names, &bytes), "plan");
    if (rank == 0)
        atomic_store(&shared->wrong, 0);

    /* The first block warms up, and says how many iterations the time allows. */
    run_block(TALLY, w, name, input, output, bytes, 3, NULL);
    if (rank == 0) {
        double fits = o->seconds / (o->rounds * WAYS) / fmax(1e-6, last_end(2) - last_end(1));
        shared->iterations = fits < 2 ? 3 : fits > MOST_ITERATIONS - 1 ? MOST_ITERATIONS : 1 + (int)fits;
    }
    barrier();
    const int iterations = shared->iterations;
    for (int way = 0; way < WAYS; way++)
        run_block(way, w, name, input, output, bytes, 2, NULL);
    for (int round = 0; round < o->rounds; round++)
        for (int i = 0; i < WAYS; i++) {
            enum way way = (enum way)((i + round) % WAYS);
            run_block(way, w, name, input, output, bytes, iterations, rank == 0 ? &s[way] : NULL);
            /* What the limit has left there is wrong for Tally: a result that does not come is seen. */
            if (way == TALLY && (round < 2 || round == o->rounds - 1))
                count_wrong(output, count);
        }
    barrier();
    if (rank == 0)
        print_row(json, bytes, s);
    for (int i = 0; i < WAYS; i++)
        free(s[i].single);
}

/* --- main ---------------------------------------------------------------------------------------------- */

static void print_head(const struct options *o)
{
    struct utsname u;
    char *report = NULL;
    uname(&u);
    check(tally_comm_report(comm, 10000, &report), "report");
    printf("# push_pull of one tensor: %d ranks on %d machines, %d tallyd, all on this one; Tally %s\n", size,
           machines, services - machines, tally_version());
    printf("# limit: the same bytes over TCP alone, Linux %s %s, cubic, TCP_NODELAY, SO_RCVBUF %d MB, "
           "TCP_NOTSENT_LOWAT %d KB; the faster of echo (%d KB under way) and stream, %d KB at a time\n",
           u.release, u.machine, RECEIVE_BUFFER >> 20, NOT_SENT_LOW_WATER >> 10, WINDOW >> 10, CHUNK >> 10);
    char *rest = strstr(report, ", \"operations\"");
    if (rest)
        *rest = 0;
    settings = report;
    printf("# settings: %s}\n", settings);
    printf("# %d rounds of blocks in turn, about %.3g s a size; times are medians; cpu is that of all "
           "processes\n",
           o->rounds, o->seconds);
    printf("%12s %11s %8s %11s %11s %9s %11s %7s %9s %10s %10s %6s\n", "bytes", "count", "dtype", "time us",
           "p99 us", "algbw GB/s", "limit us", "limit", "fraction", "cpu us", "limit cpu", "wrong");
    fflush(stdout);
}

static uint64_t parse_bytes(const char *text)
{
    char *rest;
    uint64_t n = strtoull(text, &rest, 10);
    for (const char *unit = "KMG", *u = unit; *u; u++)
        if (*rest == *u) {
            n <<= 10 * (u - unit + 1);
            rest++;
        }
    if (*rest || n < 4) {
        fprintf(stderr, "push_pull: '%s' is no number of bytes from 4\n", text);
        exit(2);
    }
    return n & ~3ull;
}

static struct options parse(int argc, char **argv)
{
    struct options o = {.from = 4, .to = 256 << 20, .factor = 4, .seconds = 3, .rounds = 10};
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "--quick") == 0) {
            o.to = 16 << 20;
            o.seconds = 0.4;
            o.rounds = 4;
        }
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (strcmp(argv[i], "--quick") == 0)
            continue;
        else if (strcmp(argv[i], "--json") == 0 && value)
            o.json = argv[++i];
        else if (strcmp(argv[i], "--from") == 0 && value)
            o.from = parse_bytes(argv[++i]);
        else if (strcmp(argv[i], "--to") == 0 && value)
            o.to = parse_bytes(argv[++i]);
        else if (strcmp(argv[i], "--factor") == 0 && value && atoi(value) > 1)
            o.factor = (uint64_t)atoi(argv[++i]);
        else if (strcmp(argv[i], "--seconds") == 0 && value && atof(value) > 0)
            o.seconds = atof(argv[++i]);
        else if (strcmp(argv[i], "--rounds") == 0 && value && atoi(value) > 0 && atoi(value) <= MOST_ROUNDS)
            o.rounds = atoi(argv[++i]);
        else {
            fprintf(
                stderr,
                "usage: tally run -n N -k K -- push_pull [--quick] [--from BYTES] [--to BYTES] [--factor F] "
                "[--seconds PER_SIZE] [--rounds N] [--json FILE]\n");
            exit(2);
        }
    }
    return o;
}

int main(int argc, char **argv)
{
    static struct raw raw;
    struct options o = parse(argc, argv);
    check(tally_comm_open(NULL, &comm), "open");
    rank = tally_comm_rank(comm);
    size = tally_comm_size(comm);
    services = tally_comm_service_count(comm);
    machines = tally_comm_machine_count(comm);
    if (size > MOST_RANKS || services > MOST_SERVICES)
        fail("start", "too many ranks or services for this program");
    check_os(tly_plan_weights(machines, services - machines, weight), "plan");
    share_memory();
    if (tally_comm_local_rank(comm) == 0)
        shared->host[tally_comm_machine(comm)] = rank;
    for (int s = machines; s < services; s++)
        if ((s - machines) % size == rank)
            shared->host[s] = rank;
    barrier();
    set_up_limit(&raw);

    float *input = take(o.to), *output = take(o.to);
    for (uint64_t i = 0; i < o.to / sizeof *input; i++)
        input[i] = value_of(rank, i);
    memset(output, 0, o.to);
    FILE *json = NULL;
    if (rank == 0) {
        find_processes();
        if (o.json && !(json = fopen(o.json, "a")))
            fail(o.json, strerror(errno));
        print_head(&o);
    }
    unsigned long wrong = 0;
    for (uint64_t bytes = o.from; bytes <= o.to; bytes = bytes * o.factor & ~3ull) {
        measure(&o, &raw, json, bytes, input, output);
        wrong += atomic_load(&shared->wrong);
        barrier();
    }
    if (json)
        fclose(json);
    free(settings);
    barrier();
    check(tally_comm_close(comm), "close");
    return wrong != 0;
}
