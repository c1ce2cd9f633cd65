/* groups_faults_test.c - what goes wrong in jobs whose GPUs sum in groups: at the start, midway and at the end. */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "test/device/application.h"
#include "test/device/cancels.h"
#include "test/device/fake_cuda.h"
#include "test/device/groups.h"
#include "test/service/job.h"

#include <cmocka.h>

/* --- the start -------------------------------------------------------------------------------------------- */

struct fault {
    const char *words[4]; /* of each rank */
    bool no_context;      /* of rank 1 */
    bool all;             /* the four ranks are one group */
};

/* Sums are right, in whatever way. */
static int sum_once(int rank, void *arg)
{
    const struct fault *f = arg;
    struct tensor x;
    struct gpu g;
    void *context;
    tally_op *op;
    open_gpu(&g, rank, f->words[rank]);
    if (f->no_context && rank == 1)
        CHECK(cuCtxPopCurrent_v2(&context) == 0);
    tally_comm *c = job_open();
    if (f->no_context && rank == 1)
        CHECK(cuCtxPushCurrent_v2(context) == 0);
    make(&x, 3 * SLOT + 16);
    for (int step = 0; step < 3; step++) {
        struct tally_options o = on_gpu(&g);
        memset(x.host, 1 + rank, x.bytes);
        upload(&g, &x);
        CHECK(tally_push_pull(c, "x", x.device, x.device, x.bytes, TALLY_UINT8, TALLY_SUM, &o, &op) == 0);
        job_expect(op, 0);
        CHECK(((uint8_t *)fake_cuda_data(x.device))[x.bytes - 1] == 10);
    }
    CHECK(tally_comm_close(c) == 0);
    unmake(&x);
    close_gpu(&g);
    return 0;
}

static void refused(const struct fault *f, const char *said)
{
    struct job j = {.ranks = 4,
                    .machine = together,
                    .main = sum_once,
                    .arg = (void *)(uintptr_t)f,
                    .settings = {f->all ? "TALLY_GPU_GROUP=4" : "TALLY_GPU_GROUP=2"}};
    job_start(&j);
    job_finish(&j);
    job_log_lacks(&j, 0, "GPUs in groups");
    job_log_holds(&j, 0, "the host sums: ");
    job_log_holds(&j, 0, said);
    job_clear(&j);
}

static void the_host_sums_where_gpus_cannot(void **state)
{
    static const char *const calls[] = {
        "cuMemAlloc:2",      "cuMemHostRegister:801",      "cuIpcGetMemHandle:801", "cuMemcpyAsync:1",
        "cuMemcpyAsync:1:2", "cuIpcOpenMemHandle:801",     "cuEventSynchronize:1",  "cuModuleLoadData:223",
        "cuLaunchKernel:1",  "cuMemHostGetDevicePointer:1"};
    const char *peers = pairs_of_gpus, *none = "gpus=4";
    refused(&(struct fault){.words = {none, none, none, none}}, "cuIpcOpenMemHandle failed: ");
    refused(&(struct fault){.words = {peers, peers, peers, peers}, .no_context = true},
            "rank 1: CUDA: cuCtxGetDevice failed: ");
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        for (int at = 0; at < 4; at += 3) {
            char words[128], call[64];
            struct fault f = {.words = {peers, peers, peers, peers}};
            snprintf(words, sizeof words, "%s fail=%s", peers, calls[i]);
            f.words[at] = words;
            snprintf(call, sizeof call, "rank %d: GPU %d: %.*s failed: ", at, at, (int)strcspn(calls[i], ":"),
                     calls[i]);
            refused(&f, call);
        }
}

/* A rank maps one or two of three buffers.  All give back what they have. */
static void mapping_is_refused_halfway(void **state)
{
    const char *peers = "gpus=4 peers=0:1 peers=0:2 peers=0:3 peers=1:2 peers=1:3 peers=2:3";
    for (int at = 2; at <= 3; at++)
        for (int rank = 0; rank < 4; rank += 2) {
            char words[128], call[64];
            struct fault f = {.words = {peers, peers, peers, peers}, .all = true};
            snprintf(words, sizeof words, "%s fail=cuIpcOpenMemHandle:801:%d", peers, at);
            snprintf(call, sizeof call, "rank %d: GPU %d: cuIpcOpenMemHandle failed: ", rank, rank);
            f.words[rank] = words;
            refused(&f, call);
        }
}

/* Machine 1 refuses, and machine 0 does not mind. */
static void one_machine_cannot(void **state)
{
    static const struct {
        const char *words, *said;
    } cases[] = {{"gpus=4", "cuIpcOpenMemHandle failed: "},
                 {"gpus=4 peers=2:3 fail=cuIpcGetMemHandle:801", "cuIpcGetMemHandle failed: "},
                 {"gpus=4 peers=2:3 fail=cuMemAlloc:2", "cuMemAlloc failed: "},
                 {"gpus=4 peers=2:3 fail=cuMemcpyAsync:1:2", "cuMemcpyAsync failed: "}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *peers = pairs_of_gpus;
        struct fault f = {.words = {peers, peers, peers, cases[i].words}};
        struct job j = {.ranks = 4,
                        .machine = two_by_two,
                        .main = sum_once,
                        .arg = &f,
                        .settings = {"TALLY_GPU_GROUP=2"}};
        job_start(&j);
        job_finish(&j);
        job_log_holds(&j, 0, "GPUs in groups");
        job_log_lacks(&j, 0, "the host sums: ");
        job_log_holds(&j, 2, "the host sums: rank 3: ");
        job_log_holds(&j, 2, cases[i].said);
        job_clear(&j);
    }
}

/* Ranks that are no multiple of a group, groups that are no node of the tree, and machines that are none. */
static void jobs_without_groups(void **state)
{
    static const int mingled[] = {0, 1, 0, 1}, apart[] = {0, 1, 2, 3};
    static const struct {
        const char *group;
        const int *machine;
    } cases[] = {{"TALLY_GPU_GROUP=8", together},
                 {"TALLY_GPU_GROUP=3", together},
                 {"TALLY_GPU_GROUP=4", two_by_two},
                 {"TALLY_GPU_GROUP=2", mingled},
                 {"TALLY_GPU_GROUP=2", apart}};
    const char *peers = pairs_of_gpus;
    struct fault f = {.words = {peers, peers, peers, peers}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct job j = {.ranks = 4,
                        .machine = cases[i].machine,
                        .main = sum_once,
                        .arg = &f,
                        .settings = {cases[i].group}};
        job_start(&j);
        job_finish(&j);
        job_log_holds(&j, 0, "GPUs do not sum in groups");
        job_log_lacks(&j, 0, "GPUs in groups");
        job_clear(&j);
    }
}

/* --- the topology ------------------------------------------------------------------------------------------ */

/* Where a rank's GPU is on the bus; NULL: the rank opens without a context.  Each rank sees its own GPU alone, as number 0. */
static int sum_on_hidden_gpus(int rank, void *arg)
{
    const char *const *address = arg;
    char words[512] = "gpus=4 peers=0:1 peers=0:2 peers=0:3 peers=1:2 peers=1:3 peers=2:3",
         own[2] = {'0' + rank};
    struct tensor x;
    struct gpu g;
    void *context;
    tally_op *op;
    for (int i = 0; i < 4; i++)
        if (address[i])
            snprintf(words + strlen(words), sizeof words - strlen(words), " pci=%d:%s", i, address[i]);
    setenv("CUDA_VISIBLE_DEVICES", own, 1);
    open_gpu(&g, 0, words);
    if (!address[rank])
        CHECK(cuCtxPopCurrent_v2(&context) == 0);
    tally_comm *c = job_open();
    if (!address[rank])
        CHECK(cuCtxPushCurrent_v2(context) == 0);
    struct tally_options o = on_gpu(&g);
    make(&x, 3 * SLOT);
    memset(x.host, 1 + rank, x.bytes);
    upload(&g, &x);
    CHECK(tally_push_pull(c, "x", x.device, x.device, x.bytes, TALLY_UINT8, TALLY_SUM, &o, &op) == 0);
    job_expect(op, 0);
    CHECK(((uint8_t *)fake_cuda_data(x.device))[x.bytes - 1] == 10);
    CHECK(tally_comm_close(c) == 0);
    unmake(&x);
    close_gpu(&g);
    return 0;
}

static void groups_are_those_of_the_topology(void **state)
{
    static const char pcie[] = "TALLY_TOPO=" TLY_TEST_MACHINES "/pcie.xml";
    static const struct {
        const char *address[4], *topo, *said;
    } cases[] = {
        {{"0000:03:00.0", "0000:04:00.0", "0000:05:00.0", "0000:06:00.0"}, pcie, "GPUs in groups of 4"},
        {{"0000:04:00.0", "0000:03:00.0", "0000:83:00.0", "0000:84:00.0"}, pcie, "GPUs in groups of 2"},
        {{"0000:03:00.0", "0000:83:00.0", "0000:04:00.0", "0000:84:00.0"},
         pcie,
         "GPUs one by one (groups are not of GPUs in a row, with as many in each)"},
        {{"0000:03:00.0", "0000:04:00.0", "0000:05:00.0", "0000:83:00.0"},
         pcie,
         "GPUs one by one (groups are not of GPUs in a row, with as many in each)"},
        {{"0000:03:00.0", "0000:04:00.0", "0000:03:00.0", "0000:04:00.0"},
         pcie,
         "GPUs one by one (two ranks are on GPU 0000:03:00.0)"},
        {{"0000:03:00.0", "0000:04:00.0", "0000:05:00.0", "0001:06:00.0"},
         pcie,
         "GPUs one by one (GPU 0001:06:00.0 is not to be seen)"},
        {{"0000:03:00.0", NULL, "0000:05:00.0", NULL},
         pcie,
         "GPUs one by one (rank 1 had no CUDA context when the job started)"},
        {{NULL, "0000:04:00.0", "0000:05:00.0", "0000:06:00.0"},
         pcie,
         "GPUs one by one (rank 0 had no CUDA context when the job started)"},
        {{"0000:03:00.0", "0000:04:00.0", "0000:05:00.0", "0000:06:00.0"},
         "TALLY_TOPO=/nothing.xml",
         "GPUs one by one (cannot open /nothing.xml: "}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct job j = {.ranks = 4,
                        .machine = together,
                        .main = sum_on_hidden_gpus,
                        .arg = (void *)(uintptr_t)cases[i].address,
                        .settings = {cases[i].topo}};
        job_start(&j);
        job_finish(&j);
        job_log_holds(&j, 0, cases[i].said);
        job_clear(&j);
    }
}

/* --- tensors elsewhere ------------------------------------------------------------------------------------- */

/* In some steps rank 2's tensor is on the host, or rank 1's. */
static int mix_places(int rank, void *arg)
{
    struct tensor x;
    struct gpu g;
    tally_op *op;
    open_gpu(&g, rank, pairs_of_gpus);
    tally_comm *c = job_open();
    make(&x, 3 * SLOT + 16);
    for (int step = 0; step < 9; step++) {
        struct tally_options o = on_gpu(&g);
        bool host = step % 3 && rank == step % 3;
        memset(x.host, 1 + rank, x.bytes);
        upload(&g, &x);
        CHECK(cuStreamSynchronize(g.stream) == 0);
        void *at = host ? x.host : x.device;
        CHECK(tally_push_pull(c, "x", at, at, x.bytes, TALLY_UINT8, TALLY_SUM, host ? NULL : &o, &op) == 0);
        job_expect(op, 0);
        const uint8_t *data = host ? x.host : fake_cuda_data(x.device);
        CHECK(data[0] == 10 && data[x.bytes - 1] == 10);
    }
    CHECK(tally_comm_close(c) == 0);
    unmake(&x);
    close_gpu(&g);
    return 0;
}

static void tensors_on_the_host_of_some_ranks(void **state)
{
    run_both(mix_places);
}

/* Tensors of PyTorch's expandable segments, whose memory cannot be exported. */
static int expand(int rank, void *arg)
{
    struct gpu g;
    tally_op *op;
    unsigned long long at;
    open_gpu(&g, rank, "gpus=4 peers=0:1 peers=2:3");
    tally_comm *c = job_open();
    struct tally_options o = on_gpu(&g);
    CHECK(fake_cuda_expand(&at, 4 * SLOT) == 0);
    uint8_t *x = (uint8_t *)(uintptr_t)at, *data = fake_cuda_data(x);
    memset(data, 1 + rank, 4 * SLOT);
    CHECK(tally_push_pull(c, "x", x, x, 4 * SLOT, TALLY_UINT8, TALLY_SUM, &o, &op) == 0);
    job_expect(op, 0);
    CHECK(data[0] == 10 && memcmp(data, data + 1, 4 * SLOT - 1) == 0);
    CHECK(tally_comm_close(c) == 0);
    CHECK(cuMemFree_v2(at) == 0 && cuMemFree_v2(at + 2 * SLOT) == 0);
    close_gpu(&g);
    return 0;
}

static void expandable_segments(void **state)
{
    run_both(expand);
}

/* Rank 3 means another shape, which ends the operation on all ranks, and nothing else. */
static int disagree(int rank, void *arg)
{
    struct tensor x;
    struct gpu g;
    tally_op *op;
    open_gpu(&g, rank, pairs_of_gpus);
    tally_comm *c = job_open();
    make(&x, 6 * SLOT);
    for (int step = 0; step < 12; step++) {
        struct tally_options o = on_gpu(&g);
        bool wrong = step % 3 == 1;
        CHECK(cuStreamSynchronize(g.stream) == 0); /* what has failed has not waited for it */
        memset(x.host, 1 + rank, x.bytes);
        upload(&g, &x);
        CHECK(tally_push_pull(c, wrong ? "wrong" : "right", x.device, x.device,
                              x.bytes - (wrong && rank == 3 ? SLOT : 0), TALLY_UINT8, TALLY_SUM, &o, &op) ==
              0);
        job_expect(op, wrong ? -EINVAL : 0);
        const uint8_t *data = fake_cuda_data(x.device);
        CHECK(wrong || (data[0] == 10 && memcmp(data, data + 1, x.bytes - 1) == 0));
    }
    CHECK(tally_comm_close(c) == 0);
    CHECK(cuStreamSynchronize(g.stream) == 0);
    unmake(&x);
    close_gpu(&g);
    return 0;
}

static void ranks_disagree(void **state)
{
    run_both(disagree);
}

/* A communicator follows another. */
static int cancel(int rank, void *arg)
{
    struct gpu g;
    struct tensor x[2];
    open_gpu(&g, rank, pairs_of_gpus);
    for (int t = 0; t < 2; t++)
        make(&x[t], 3 * SLOT);
    for (int turn = 0; turn < 2; turn++) {
        tally_comm *c = job_open();
        cancel_some(c, &g, x, 10);
        CHECK(tally_comm_close(c) == 0);
    }
    CHECK(cuStreamSynchronize(g.stream) == 0);
    for (int t = 0; t < 2; t++)
        unmake(&x[t]);
    close_gpu(&g);
    return 0;
}

static void operations_are_cancelled(void **state)
{
    run_both(cancel);
}

/* Rank 3 has no more data: the others go through the service, which takes zeros for it. */
static int join(int rank, void *arg)
{
    struct gpu g;
    struct tensor x;
    tally_op *op;
    open_gpu(&g, rank, pairs_of_gpus);
    tally_comm *c = job_open();
    make(&x, 2 * SLOT);
    for (int step = 0; step < 3 + (rank < 3); step++) {
        struct tally_options o = on_gpu(&g);
        memset(x.host, 1 + rank, x.bytes);
        upload(&g, &x);
        CHECK(tally_push_pull(c, "x", x.device, x.device, x.bytes, TALLY_UINT8, TALLY_SUM, &o, &op) == 0);
        job_expect(op, 0);
        CHECK(((uint8_t *)fake_cuda_data(x.device))[x.bytes - 1] == (step < 3 ? 10 : 6));
    }
    CHECK(tally_join(c, NULL, &op) == 0);
    job_expect(op, 0);
    CHECK(tally_comm_close(c) == 0);
    unmake(&x);
    close_gpu(&g);
    return 0;
}

static void a_rank_joins(void **state)
{
    run_both(join);
}

/* --- ranks that leave -------------------------------------------------------------------------------------- */

static void nap(int ms)
{
    struct timespec time = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L};
    nanosleep(&time, NULL);
}

struct release {
    int ms;
    void *stream;
};

static void *release(void *arg)
{
    const struct release *r = arg;
    nap(r->ms);
    fake_cuda_hold(r->stream, 0);
    return NULL;
}

/* Rank 1 ends "a" and closes.  Rank 0 copies its result later than that, and begins "b" in vain. */
static int close_early(int rank, void *arg)
{
    struct gpu g;
    struct tensor x[2];
    tally_op *op[2];
    pthread_t thread;
    open_gpu(&g, rank, "gpus=2 peers=0:1");
    tally_comm *c = job_open();
    for (int t = 0; t < 2; t++)
        make(&x[t], 8 * SLOT);
    struct tally_options o = on_gpu(&g);
    struct release when = {.ms = rank ? 600 : 3000, .stream = rank ? g.stream : NULL};
    memset(x[0].host, 1 + rank, x[0].bytes);
    if (rank)
        fake_cuda_hold(g.stream, 1);
    upload(&g, &x[0]);
    job_barrier(c);
    for (int t = 0; t < 2 - rank; t++)
        CHECK(tally_push_pull(c, t ? "b" : "a", x[t].device, x[t].device, x[t].bytes, TALLY_UINT8, TALLY_SUM,
                              &o, &op[t]) == 0);
    if (!rank) {
        nap(300); /* its input is in its buffer */
        fake_cuda_hold(NULL, 1);
    }
    CHECK(pthread_create(&thread, NULL, release, &when) == 0);
    CHECK(tally_op_wait(op[0], 20000) == 0);
    const uint8_t *data = fake_cuda_data(x[0].device);
    CHECK(data[0] == 3 && memcmp(data, data + 1, x[0].bytes - 1) == 0);
    tally_op_free(op[0]);
    if (!rank) {
        CHECK(tally_op_wait(op[1], 20000) == -ESHUTDOWN);
        CHECK_HOLDS(tally_error(), "rank 1 has left the job");
        tally_op_free(op[1]);
    }
    CHECK(tally_comm_close(c) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    for (int t = 0; t < 2; t++)
        unmake(&x[t]);
    close_gpu(&g);
    return 0;
}

static void a_rank_closes_early(void **state)
{
    struct job j = {.ranks = 2, .machine = together, .main = close_early, .settings = {"TALLY_GPU_GROUP=2"}};
    job_run(&j);
}

/* Rank 0 closes 3 s behind rank 1, and keeps nothing. */
static int close_late(int rank, void *arg)
{
    struct gpu g;
    open_gpu(&g, rank, "gpus=2 peers=0:1");
    for (int turn = 0; turn < 2; turn++) {
        tally_comm *c = job_open();
        job_barrier(c);
        if (!rank)
            nap(3000);
        CHECK(tally_comm_close(c) == 0);
    }
    if (!rank)
        close_gpu(&g);
    return 0;
}

static void a_rank_closes_late(void **state)
{
    struct job j = {.ranks = 2, .machine = together, .main = close_late, .settings = {"TALLY_GPU_GROUP=2"}};
    job_run(&j);
}

/* --- failures --------------------------------------------------------------------------------------------- */

/* Is shared memory of a job still mapped here?  The pool is, until its last block is free. */
static bool maps_shared_memory(void)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[512];
    bool any = false;
    CHECK(maps);
    while (!any && fgets(line, sizeof line, maps))
        any = strstr(line, "/memfd:tally");
    fclose(maps);
    return any;
}

/* Until it fails. */
static int sum_until_it_fails(int rank, void *arg)
{
    const char *fault = arg;
    char words[128];
    struct tensor x;
    struct gpu g;
    tally_comm *c;
    int err = 0;
    snprintf(words, sizeof words, "%s%s%s", pairs_of_gpus, rank == 1 ? " fail=" : "", rank == 1 ? fault : "");
    open_gpu(&g, rank, words);
    make(&x, 5 * SLOT);
    if (tally_comm_open(NULL, &c) != 0) {
        CHECK_HOLDS(tally_error(), "rank 1");
        return 0;
    }
    for (int step = 0; step < 200 && !err; step++) {
        struct tally_options o = on_gpu(&g);
        tally_op *op;
        err = tally_push_pull(c, "x", x.device, x.device, x.bytes / 4, TALLY_FLOAT32, TALLY_SUM, &o, &op);
        if (!err) {
            err = tally_op_wait(op, -1);
            tally_op_free(op);
        }
    }
    CHECK(err != 0);
    const char *who = strstr(tally_error(), "rank 1");
    if (rank == 1)
        CHECK_HOLDS(tally_error(), "GPU 1: ");
    else
        CHECK(who && !strstr(who + 1, "rank 1")); /* it is named once */
    tally_comm_close(c);
    if (rank != 1) /* its GPU works, so nothing in shared memory is left to it */
        CHECK(!maps_shared_memory());
    return 0;
}

static void a_rank_is_killed_at_each_step(void **state)
{
    static const char *const calls[] = {
        "cuMemAlloc:-9:2",         "cuIpcGetMemHandle:-9",    "cuIpcOpenMemHandle:-9",
        "cuMemcpyAsync:-9:4",      "cuMemcpyAsync:-9:9",      "cuMemcpyAsync:-9:17",
        "cuMemcpyAsync:-9:30",     "cuLaunchKernel:-9",       "cuLaunchKernel:-9:10",
        "cuEventSynchronize:-9:5", "cuEventSynchronize:-9:6", "cuEventSynchronize:-9:40"};
    for (size_t i = 0; i < 2 * sizeof calls / sizeof *calls; i++) {
        struct job j = {.ranks = 4,
                        .machine = i % 2 ? two_by_two : together,
                        .main = sum_until_it_fails,
                        .arg = (void *)(uintptr_t)calls[i / 2],
                        .settings = {"TALLY_GPU_GROUP=2"}};
        job_start(&j);
        for (int r = 0; r < 4; r++)
            if (job_wait_rank(&j, r) != (r == 1 ? 128 + SIGKILL : 0))
                fail_msg("%s: rank %d: %s", calls[i / 2], r, job_log(&j, r));
        job_clear(&j);
    }
}

static uint64_t moved_in_all(void)
{
    uint64_t all = 0;
    for (int from = 0; from < 3; from++)
        for (int to = 0; to < 3; to++)
            all += fake_cuda_moved(from, to);
    return all;
}

struct hang {
    bool unread; /* rank 1's GPU hangs before it has read the input, else before it copies results */
    atomic_int stage;
};

/* Rank 1's GPU hangs, and rank 0 ends the job.  What the GPU copies once rank 1 has closed is still there. */
static int hang(int rank, void *arg)
{
    struct hang *h = arg;
    struct gpu g;
    struct tensor x;
    tally_op *op;
    open_gpu(&g, rank, "gpus=2 peers=0:1 fail=copy-to-GPU:2:1000000"); /* none fails, but they are counted */
    tally_comm *c = job_open();
    make(&x, 2 * SLOT);
    memset(x.host, 1, x.bytes);
    upload(&g, &x);
    if (rank == 1 || h->unread)
        CHECK(cuStreamSynchronize(g.stream) == 0);
    else
        fake_cuda_hold(g.stream, 1);
    fake_cuda_hold(NULL, rank == 1 && h->unread);
    const int given = fake_cuda_calls();
    const uint64_t read = fake_cuda_moved(2, 2);
    struct tally_options o = on_gpu(&g);
    CHECK(tally_push_pull(c, "x", x.device, x.device, x.bytes, TALLY_UINT8, TALLY_SUM, &o, &op) == 0);
    if (rank == 0) {
        job_await(&h->stage, 1);
        fake_cuda_hold(g.stream, 0);
        job_await(&h->stage, 2);
        CHECK(tally_comm_abort(c, "enough") == 0);
        tally_comm_close(c);
        tally_op_free(op);
        return 0;
    }
    while (!h->unread && fake_cuda_moved(2, 2) < read + x.bytes)
        nap(1);
    fake_cuda_hold(NULL, 1);
    atomic_store(&h->stage, 1);
    while (fake_cuda_calls() < given + (h->unread ? 1 : 3))
        nap(1);
    atomic_store(&h->stage, 2);
    CHECK(tally_op_wait(op, -1) == -ECONNRESET);
    CHECK_HOLDS(tally_op_error(op), "rank 0 left: enough");
    tally_op_free(op);
    const uint64_t before = moved_in_all();
    tally_comm_close(c);
    fake_cuda_hold(NULL, 0);
    while (moved_in_all() == before)
        nap(1);
    atomic_store(&h->stage, 3);
    return 0;
}

static void a_gpu_hangs(void **state)
{
    struct hang *h = job_shared(sizeof *h);
    for (int unread = 0; unread < 2; unread++) {
        h->unread = unread;
        atomic_store(&h->stage, 0);
        struct job j = {
            .ranks = 2, .machine = together, .main = hang, .arg = h, .settings = {"TALLY_GPU_GROUP=2"}};
        job_start(&j);
        job_finish(&j);
        assert_int_equal(atomic_load(&h->stage), 3);
        job_log_holds(&j, 1,
                      unread ? "a GPU has not read an input for 3 s"
                             : "GPU 1: cuEventSynchronize has not returned for 3 s");
        job_clear(&j);
    }
}

/* Rank 1's GPU hangs while the job starts: as its buffer is written, as it reads the group's, or in a kernel. */
static int hang_at_the_start(int rank, void *arg)
{
    const int step = *(const int *)arg;
    struct gpu g;
    tally_comm *c;
    open_gpu(&g, rank, "gpus=2 peers=0:1");
    fake_cuda_hold(NULL, rank == 1 && step == 0);
    fake_cuda_read(rank == 1 && step == 1 ? 0 : -1);
    fake_cuda_hold_kernels(rank == 1 && step == 2);
    CHECK(tally_comm_open(NULL, &c) == -ENODEV);
    CHECK_HOLDS(tally_error(), "GPU 1: cuEventSynchronize has not returned for 3 s");
    const char *who = strstr(tally_error(), "rank 1");
    CHECK(rank == 1 || (who && !strstr(who + 1, "rank 1")));
    return 0;
}

static void a_gpu_hangs_at_the_start(void **state)
{
    for (int step = 0; step < 3; step++) {
        struct job j = {.ranks = 2,
                        .machine = together,
                        .main = hang_at_the_start,
                        .arg = &step,
                        .settings = {"TALLY_GPU_GROUP=2"}};
        job_run(&j);
    }
}

/* A failure of the GPU's ends the job, and names rank and call. */
static void the_driver_fails_midway(void **state)
{
    static const char *const calls[] = {"cuLaunchKernel:700:3", "cuMemcpyAsync:700:20",
                                        "cuEventSynchronize:719:20", "cuLaunchKernel:1:4",
                                        "cuEventRecord:2:30"};
    for (size_t i = 0; i < 2 * sizeof calls / sizeof *calls; i++) {
        struct job j = {.ranks = 4,
                        .machine = i % 2 ? two_by_two : together,
                        .main = sum_until_it_fails,
                        .arg = (void *)(uintptr_t)calls[i / 2],
                        .settings = {"TALLY_GPU_GROUP=2"}};
        job_run(&j);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_host_sums_where_gpus_cannot),
        cmocka_unit_test(mapping_is_refused_halfway),
        cmocka_unit_test(one_machine_cannot),
        cmocka_unit_test(jobs_without_groups),
        cmocka_unit_test(groups_are_those_of_the_topology),
        cmocka_unit_test(tensors_on_the_host_of_some_ranks),
        cmocka_unit_test(expandable_segments),
        cmocka_unit_test(ranks_disagree),
        cmocka_unit_test(operations_are_cancelled),
        cmocka_unit_test(a_rank_joins),
        cmocka_unit_test(a_rank_closes_early),
        cmocka_unit_test(a_rank_closes_late),
        cmocka_unit_test(a_rank_is_killed_at_each_step),
        cmocka_unit_test(the_driver_fails_midway),
        cmocka_unit_test(a_gpu_hangs),
        cmocka_unit_test(a_gpu_hangs_at_the_start),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
