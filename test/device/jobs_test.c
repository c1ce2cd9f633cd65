/* jobs_test.c - jobs whose tensors are in the memory of GPUs that are not there (fake_cuda/): the bits of tensors in the host's
 * memory, whatever the order of copies and operations.  What fails fails on all ranks, except that a result may be missing on one
 * rank's GPU alone. */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "test/device/application.h"
#include "test/device/cancels.h"
#include "test/device/fake_cuda.h"
#include "test/device/gpu.h"
#include "test/service/job.h"

#include <cmocka.h>

enum { MOST = UNDER_SANITIZER ? 150000 : 300000, TENSORS = 6, STEPS = 3 };

static const int pairs[] = {0, 0, 1, 1}, together[] = {0, 0, 0, 0};

/* --- sums ------------------------------------------------------------------------------------------------- */

struct plan {
    bool orders; /* ranks begin operations in different orders */
    bool shared; /* what is staged lies where the machine's other ranks read it */
    bool hidden; /* each rank sees a GPU of its own alone */
    const char *driver;
};

/* Tensors on the GPU and the same ones on the host: equal bits.  All are in flight at once. */
static void take_step(tally_comm *c, const struct gpu *g, const struct plan *plan, int step, struct tensor *x)
{
    static const int dtypes[TENSORS] = {TALLY_FLOAT32, TALLY_FLOAT64,  TALLY_FLOAT16,
                                        TALLY_INT32,   TALLY_BFLOAT16, TALLY_FLOAT32};
    static const size_t counts[TENSORS] = {MOST, 70000, 1, 0, 30001, 17};
    static uint8_t host[TENSORS][MOST * 4];
    tally_op *op[TENSORS], *same;
    int rank = tally_comm_rank(c);
    for (int i = 0; i < TENSORS; i++) {
        int t = (i + (plan->orders ? rank : 0)) % TENSORS;
        struct tally_options o = on_gpu(g);
        char name[16];
        snprintf(name, sizeof name, "t%d", t);
        o.postscale = step == 1 ? 0.7 : 0;
        for (size_t at = 0; at < x[t].bytes; at++)
            x[t].host[at] =
                (uint8_t)(job_hash(&(uint64_t[]){at / 4 + 1000003u * (unsigned)(step + 7 * rank + t)}, 8) >>
                          13);
        memcpy(host[t], x[t].host, x[t].bytes);
        upload(g, &x[t]);
        CHECK(tally_push_pull(c, name, x[t].device, x[t].device, counts[t], (enum tally_dtype)dtypes[t],
                              step == 2 ? TALLY_MAX : TALLY_SUM, &o, &op[t]) == 0);
    }
    for (int t = 0; t < TENSORS; t++) {
        if (tally_op_wait(op[t], -1) != 0)
            fprintf(stderr, "%s\n", tally_op_error(op[t]));
        job_expect(op[t], 0);
        char name[16];
        struct tally_options o = {.size = sizeof o, .postscale = step == 1 ? 0.7 : 0};
        snprintf(name, sizeof name, "host %d", t);
        CHECK(tally_push_pull(c, name, host[t], host[t], counts[t], (enum tally_dtype)dtypes[t],
                              step == 2 ? TALLY_MAX : TALLY_SUM, &o, &same) == 0);
        job_expect(same, 0);
        CHECK(memcmp(fake_cuda_data(x[t].device), host[t], x[t].bytes) == 0);
    }
}

static int sums(int rank, void *arg)
{
    static const size_t bytes[TENSORS] = {MOST * 4, 70000 * 8, 2, 0, 30001 * 2, 17 * 4};
    struct tensor x[TENSORS];
    struct gpu g;
    const struct plan *plan = arg;
    if (plan->hidden)
        setenv("CUDA_VISIBLE_DEVICES", (const char[]){(char)('3' - rank), 0}, 1);
    open_gpu(&g, 0, plan->driver ? plan->driver : "gpus=1");
    tally_comm *c = job_open();
    for (int t = 0; t < TENSORS; t++)
        make(&x[t], bytes[t]);
    for (int step = 0; step < STEPS; step++)
        take_step(c, &g, plan, step, x);
    CHECK(fake_cuda_is_shared(fake_cuda_staged()) == plan->shared);
    CHECK(!plan->hidden || fake_cuda_moved(0, 1 + 3 - rank) > 0);
    job_barrier(c);
    CHECK(tally_comm_close(c) == 0);
    for (int t = 0; t < TENSORS; t++)
        unmake(&x[t]);
    close_gpu(&g);
    return 0;
}

static void run_sums(int ranks, int tallyds, const int *machine, const char *memory, struct plan plan)
{
    struct job j = {.ranks = ranks,
                    .tallyds = tallyds,
                    .machine = machine,
                    .main = sums,
                    .arg = &plan,
                    .settings = {"TALLY_PART_BYTES=64K", memory}};
    job_run(&j);
}

static void machines_of_one_rank(void **state)
{
    run_sums(1, 0, NULL, NULL, (struct plan){.shared = true});
    run_sums(2, 0, NULL, NULL, (struct plan){0});
    run_sums(3, 1, NULL, NULL, (struct plan){.orders = true});
}

static void machines_of_several_ranks(void **state)
{
    run_sums(4, 0, pairs, NULL, (struct plan){.orders = true, .shared = true});
}

static void one_machine(void **state)
{
    run_sums(4, 0, together, NULL, (struct plan){.orders = true, .shared = true});
}

/* Each rank would fill its memory with another tensor first. */
static void little_memory_and_other_orders(void **state)
{
    run_sums(3, 0, NULL, "TALLY_DEVICE_MEMORY=64K", (struct plan){.orders = true});
}

static void gpus_are_hidden(void **state)
{
    run_sums(4, 0, pairs, NULL, (struct plan){.driver = "gpus=4", .shared = true, .hidden = true});
}

/* So ranks stage an operation after the other. */
static void little_memory_can_be_pinned(void **state)
{
    run_sums(2, 0, NULL, NULL, (struct plan){.driver = "gpus=1 pinned=4500000"});
}

static void shared_memory_is_not_pinned(void **state)
{
    run_sums(4, 0, pairs, NULL, (struct plan){.driver = "gpus=1 unshared"});
    /* nor for these reasons; the tensors' own memory is pinned before */
    run_sums(4, 0, pairs, NULL, (struct plan){.driver = "gpus=1 fail=cuMemHostRegister:800:7"});
    run_sums(4, 0, pairs, NULL, (struct plan){.driver = "gpus=1 fail=cuMemHostRegister:712:7"});
}

/* Tensors for which a power of two is beyond the limit: a piece of 6 MB, one of 8 MB that exceeds it, and the first again. */
static int pin_large_tensors(int rank, void *arg)
{
    enum { MB = 1 << 20 };
    static const size_t bytes[] = {9 * MB / 2, 5 * MB, 15 * MB / 2, 5 * MB};
    struct gpu g;
    struct tensor x;
    tally_op *op;
    open_gpu(&g, 0, "gpus=1 fail=cuMemHostRegister:2:1000000"); /* none fails, but they are counted */
    tally_comm *c = job_open();
    make(&x, 8 * MB);
    memset(x.host, 1, x.bytes);
    upload(&g, &x);
    for (int i = 0; i < 4; i++) {
        struct tally_options o = on_gpu(&g);
        char name[8];
        snprintf(name, sizeof name, "%zu", bytes[i]);
        const int before = fake_cuda_calls();
        fake_cuda_pinned();
        CHECK(tally_push_pull(c, name, x.device, x.device, bytes[i], TALLY_UINT8, TALLY_MAX, &o, &op) == 0);
        job_expect(op, 0);
        CHECK(fake_cuda_calls() - before == (i != 1));
        CHECK(fake_cuda_pinned() <= x.room + (i == 2 ? 8 : 6) * MB);
    }
    CHECK(tally_comm_close(c) == 0);
    unmake(&x);
    close_gpu(&g);
    return 0;
}

static void large_tensors_are_pinned_tightly(void **state)
{
    struct job j = {.ranks = 2, .main = pin_large_tensors, .settings = {"TALLY_DEVICE_MEMORY=7M"}};
    job_run(&j);
}

/* --- failures --------------------------------------------------------------------------------------------- */

struct fault {
    const char *call;
    int at, code;      /* the application makes the first calls */
    int times;         /* of a wait */
    atomic_int failed; /* operations, of all ranks */
    atomic_int open;   /* ranks */
};

/* No rank's GPU is lost, and no rank killed, while another one still opens its communicator. */
static tally_comm *open_with(struct fault *f, int ranks)
{
    tally_comm *c = job_open();
    atomic_fetch_add(&f->open, 1);
    job_await(&f->open, ranks);
    return c;
}

/* Does an error name the call, and on the other rank rank 1? */
static bool names(int rank, const char *call, const char *error)
{
    return strstr(error, "GPU 0") && strstr(error, call) && (rank == 1 || strstr(error, "rank 1"));
}

/* A call of rank 1's driver fails, once or for good.  For good: the job fails, and all ranks hear whose call it was. */
static int fail_in_driver(int rank, void *arg)
{
    struct fault *f = arg;
    struct gpu g;
    struct tensor x;
    char words[80] = "gpus=1";
    bool said = false;
    if (rank == 1)
        snprintf(words, sizeof words, "gpus=1 fail=%s:%d:%d", f->call, f->code, f->at);
    open_gpu(&g, 0, words);
    tally_comm *c = open_with(f, 2);
    make(&x, 100000);
    for (int step = 0; step < 4; step++) {
        struct tally_options o = on_gpu(&g);
        tally_op *op;
        memset(x.host, step, x.bytes);
        if (cuMemcpyAsync((uintptr_t)x.device, (uintptr_t)x.host, x.bytes, g.stream) != 0 ||
            cuStreamSynchronize(g.stream) != 0)
            memset(x.host, 0, x.bytes); /* the GPU is lost */
        int err = tally_push_pull(c, "x", x.device, x.device, 25000, TALLY_FLOAT32, TALLY_SUM, &o, &op);
        if (err) {
            said |= names(rank, f->call, tally_error());
            tally_refuse(c, "x", TALLY_PUSH_PULL, NULL, tally_error());
        } else if ((err = tally_op_wait(op, -1)) != 0) {
            said |= names(rank, f->call, tally_op_error(op));
            tally_op_free(op);
        } else {
            tally_op_free(op);
        }
        atomic_fetch_add(&f->failed, err != 0);
    }
    if (f->code == 700)
        CHECK(said);
    tally_comm_close(c);
    return 0;
}

static void failures_of_the_driver(void **state)
{
    static const struct {
        const char *name;
        int at;
    } calls[] = {{"cuMemHostRegister", 2},  {"cuMemcpyAsync", 2},      {"cuEventCreate", 1},
                 {"cuEventRecord", 1},      {"cuEventSynchronize", 1}, {"cuStreamWaitEvent", 1},
                 {"cuStreamIsCapturing", 1}};
    struct fault *f = job_shared(sizeof *f);
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        for (int code = 2; code <= 700; code += 698) {
            *f = (struct fault){.call = calls[i].name, .at = calls[i].at, .code = code};
            struct job j = {
                .ranks = 2, .main = fail_in_driver, .arg = f, .settings = {"TALLY_PART_BYTES=16K"}};
            job_run(&j);
            int failed = atomic_load(&f->failed);
            assert_true(code == 700 ? failed >= 2 : failed == 2);
        }
}

struct loss {
    bool aborted;     /* rank 0 has ended the job before */
    atomic_int stage; /* 1: rank 1's GPU has the copy; 2: rank 0 has the result */
};

/* Rank 1's GPU is lost while it copies a result. */
static int lose(int rank, void *arg)
{
    struct loss *loss = arg;
    struct gpu g;
    struct tensor x;
    tally_op *op;
    open_gpu(&g, 0, "gpus=1 fail=copy-to-GPU:2:1000000"); /* none fails, but they are counted */
    tally_comm *c = job_open();
    make(&x, 100000);
    memset(x.host, 0, x.bytes);
    upload(&g, &x);
    CHECK(cuStreamSynchronize(g.stream) == 0);
    fake_cuda_hold(NULL, rank == 1);
    struct tally_options o = on_gpu(&g);
    CHECK(tally_push_pull(c, "x", x.device, x.device, 25000, TALLY_FLOAT32, TALLY_SUM, &o, &op) == 0);
    if (rank == 0) {
        job_expect(op, 0);
        job_await(&loss->stage, 1);
        if (loss->aborted)
            CHECK(tally_comm_abort(c, "enough") == 0);
        atomic_store(&loss->stage, 2);
    } else {
        while (fake_cuda_calls() < 2)
            usleep(1000);
        atomic_store(&loss->stage, 1);
        job_await(&loss->stage, 2);
        CHECK(tally_op_wait(op, 300) == -ETIMEDOUT);
        fake_cuda_lose(719);
        int err = tally_op_wait(op, -1);
        CHECK(loss->aborted ? err == -ECONNRESET : err == -ENODEV);
        CHECK_HOLDS(tally_op_error(op),
                    loss->aborted ? "rank 0 left: enough" : "GPU 0: cuEventSynchronize failed");
        tally_op_free(op);
    }
    while (tally_barrier(c, NULL, NULL, &op) == 0 && tally_op_wait(op, -1) == 0)
        tally_op_free(op);
    if (!loss->aborted) {
        const char *who = strstr(tally_error(), "rank 1");
        CHECK_HOLDS(tally_error(), "GPU 0: cuEventSynchronize failed");
        CHECK(rank == 1 || (who && !strstr(who + 1, "rank 1")));
    }
    tally_comm_close(c);
    return 0;
}

static void a_gpu_is_lost(void **state)
{
    struct loss *loss = job_shared(sizeof *loss);
    for (int aborted = 0; aborted < 2; aborted++) {
        *loss = (struct loss){.aborted = aborted};
        struct job j = {.ranks = 2, .main = lose, .arg = loss};
        job_run(&j);
    }
}

/* Rank 1's GPU copies no result until the rank has closed, and rank 0 ends the job meanwhile.  What it copies then is still there. */
static int hang(int rank, void *arg)
{
    enum { COPIES = 4 }; /* of results, which the GPU is given at a time */
    atomic_int *stage = arg;
    struct gpu g;
    struct tensor x;
    tally_op *op;
    open_gpu(&g, 0, "gpus=1 fail=copy-to-GPU:2:1000000"); /* none fails, but they are counted */
    tally_comm *c = job_open();
    make(&x, 100000);
    memset(x.host, 0, x.bytes);
    upload(&g, &x);
    CHECK(cuStreamSynchronize(g.stream) == 0);
    uint64_t before = fake_cuda_moved(0, 1);
    fake_cuda_hold(NULL, rank == 1);
    struct tally_options o = on_gpu(&g);
    CHECK(tally_push_pull(c, "x", x.device, x.device, 25000, TALLY_FLOAT32, TALLY_SUM, &o, &op) == 0);
    if (rank == 0) {
        job_expect(op, 0);
        job_await(stage, 1);
        CHECK(tally_comm_abort(c, "enough") == 0);
        tally_comm_close(c);
        return 0;
    }
    while (fake_cuda_calls() < 1 + COPIES)
        usleep(1000);
    atomic_store(stage, 1);
    CHECK(tally_op_wait(op, -1) == -ECONNRESET);
    CHECK_HOLDS(tally_op_error(op), "rank 0 left: enough");
    tally_op_free(op);
    CHECK(tally_push_pull(c, "y", x.device, x.device, 25000, TALLY_FLOAT32, TALLY_SUM, &o, &op) < 0);
    tally_comm_close(c);
    fake_cuda_hold(NULL, 0);
    while (fake_cuda_moved(0, 1) == before) /* the first: a lost GPU is not waited for again */
        usleep(1000);
    atomic_store(stage, 2);
    return 0;
}

static void a_gpu_hangs(void **state)
{
    atomic_int *stage = job_shared(sizeof *stage);
    struct job j = {.ranks = 2, .main = hang, .arg = stage, .settings = {"TALLY_PART_BYTES=16K"}};
    job_start(&j);
    job_finish(&j);
    assert_int_equal(atomic_load(stage), 2);
    job_log_holds(&j, 1, "GPU 0: cuEventSynchronize has not returned for 3 s");
    job_clear(&j);
}

/* Rank 1's GPU does not read the input until the rank has closed, and rank 0 ends the job meanwhile.  What it writes then is still
 * there. */
static int hang_unread(int rank, void *arg)
{
    atomic_int *stage = arg;
    struct gpu g;
    struct tensor x;
    tally_op *op;
    open_gpu(&g, 0, "gpus=1 fail=cuMemcpyAsync:2:1000000"); /* none fails, but they are counted */
    tally_comm *c = job_open();
    make(&x, 100000);
    memset(x.host, 0, x.bytes);
    upload(&g, &x);
    fake_cuda_hold(g.stream, rank == 1);
    const int given = fake_cuda_calls();
    struct tally_options o = on_gpu(&g);
    CHECK(tally_push_pull(c, "x", x.device, x.device, 25000, TALLY_FLOAT32, TALLY_SUM, &o, &op) == 0);
    if (rank == 0) {
        job_await(stage, 1);
        CHECK(tally_comm_abort(c, "enough") == 0);
        tally_comm_close(c);
        tally_op_free(op);
        return 0;
    }
    while (fake_cuda_calls() == given)
        usleep(1000);
    atomic_store(stage, 1);
    CHECK(tally_op_wait(op, -1) == -ECONNRESET);
    tally_op_free(op);
    tally_comm_close(c);
    fake_cuda_hold(g.stream, 0);
    while (fake_cuda_moved(1, 0) < x.bytes)
        usleep(1000);
    atomic_store(stage, 2);
    return 0;
}

static void an_input_is_never_read(void **state)
{
    atomic_int *stage = job_shared(sizeof *stage);
    for (int shared = 0; shared < 2; shared++) {
        atomic_store(stage, 0);
        struct job j = {.ranks = 2,
                        .main = hang_unread,
                        .arg = stage,
                        .machine = shared ? together : NULL,
                        .settings = {"TALLY_GPU_GROUP=1"}};
        job_start(&j);
        job_finish(&j);
        assert_int_equal(atomic_load(stage), 2);
        job_log_holds(&j, 1, "a GPU has not read an input for 3 s");
        job_clear(&j);
    }
}

/* Rank 1's driver fails to wait for a copy, once or twice. */
static int fail_to_wait(int rank, void *arg)
{
    struct fault *f = arg;
    struct gpu g;
    tally_op *op;
    unsigned long long x;
    char words[80] = "gpus=1";
    if (rank == 1)
        snprintf(words, sizeof words, "gpus=1 fail=cuEventSynchronize:999:%d:%d", f->at, f->times);
    open_gpu(&g, 0, words);
    tally_comm *c = open_with(f, 2);
    struct tally_options o = on_gpu(&g);
    CHECK(cuMemAlloc_v2(&x, PAGE) == 0);
    const bool lost = f->times == 2;
    int err = tally_push_pull(c, "x", (void *)(uintptr_t)x, (void *)(uintptr_t)x, 1000, TALLY_FLOAT32,
                              TALLY_SUM, &o, &op);
    CHECK(!err || (lost && rank == 0)); /* rank 1's GPU may be lost already */
    if (!err) {
        err = tally_op_wait(op, -1);
        tally_op_free(op);
    }
    if (rank == 1)
        CHECK(err == (lost ? -ENODEV : f->at == 1 ? -ECANCELED : -EIO));
    if (err)
        CHECK(names(rank, "cuEventSynchronize", tally_error()));
    if (rank == 0) /* its GPU may not have read the input yet */
        CHECK(cuStreamSynchronize(g.stream) == 0);
    if (rank == 0 || !lost) /* its stream waits for a copy that goes on */
        CHECK(cuStreamSynchronize(g.stream) == 0 && cuMemFree_v2(x) == 0);
    tally_comm_close(c);
    if (rank == 0 || !lost)
        close_gpu(&g);
    return 0;
}

static void waits_for_copies_fail(void **state)
{
    struct fault *f = job_shared(sizeof *f);
    for (int twice = 0; twice < 2; twice++)
        for (int result = 0; result < 2; result++) {
            *f = (struct fault){.at = 1 + result, .times = 1 + twice};
            struct job j = {.ranks = 2, .main = fail_to_wait, .arg = f};
            job_run(&j);
        }
}

/* Rank 1 cannot copy a part of the second result to its GPU.  The others have it, and all have the next ones. */
static int fail_to_copy_back(int rank, void *arg)
{
    struct gpu g;
    struct tensor x;
    tally_op *op;
    open_gpu(&g, 0, "gpus=1");
    tally_comm *c = job_open();
    make(&x, 100000);
    for (int step = 0; step < 4; step++) {
        struct tally_options o = on_gpu(&g);
        CHECK(cuStreamSynchronize(g.stream) == 0);
        for (int i = 0; i < 25000; i++)
            ((float *)x.host)[i] = (float)(rank + step);
        upload(&g, &x);
        if (step == 1 && rank == 1)
            fake_cuda_fail("copy-to-GPU:999");
        CHECK(tally_push_pull(c, "x", x.device, x.device, 25000, TALLY_FLOAT32, TALLY_SUM, &o, &op) == 0);
        int err = tally_op_wait(op, -1), size = tally_comm_size(c);
        CHECK(err == (step == 1 && rank == 1 ? -EIO : 0));
        for (int i = 0; i < 25000 && !err; i++)
            CHECK(((float *)fake_cuda_data(x.device))[i] == (float)(size * (size - 1) / 2 + size * step));
        tally_op_free(op);
    }
    CHECK(tally_comm_close(c) == 0);
    unmake(&x);
    close_gpu(&g);
    return 0;
}

static void a_copy_back_fails_on_its_rank_alone(void **state)
{
    static const int *const machines[] = {NULL, pairs, together};
    for (int i = 0; i < 3; i++) {
        struct job j = {.ranks = 4,
                        .main = fail_to_copy_back,
                        .machine = machines[i],
                        .settings = {"TALLY_PART_BYTES=16K"}};
        job_run(&j);
    }
}

static int die(int rank, void *arg)
{
    atomic_int *stage = arg;
    struct gpu g;
    struct tensor x;
    tally_op *op;
    open_gpu(&g, 0, "gpus=1");
    tally_comm *c = job_open();
    make(&x, MOST * 4);
    for (int step = 0;; step++) {
        struct tally_options o = on_gpu(&g);
        memset(x.host, step, x.bytes);
        upload(&g, &x);
        int err = tally_push_pull(c, "x", x.device, x.device, MOST, TALLY_FLOAT32, TALLY_SUM, &o, &op);
        if (step == 3)
            atomic_fetch_add(stage, 1);
        if (!err) {
            err = tally_op_wait(op, -1);
            tally_op_free(op);
        }
        if (err)
            break;
    }
    CHECK_HOLDS(tally_error(), "rank 1");
    tally_comm_close(c);
    CHECK(cuStreamSynchronize(g.stream) == 0);
    unmake(&x);
    close_gpu(&g);
    return 0;
}

/* Rank 1 is killed in a call of its driver. */
static int die_in_driver(int rank, void *arg)
{
    struct fault *f = arg;
    struct gpu g;
    struct tensor x;
    tally_op *op;
    char words[80] = "gpus=1";
    if (rank == 1)
        snprintf(words, sizeof words, "gpus=1 fail=%s:-9:%d", f->call, f->at);
    open_gpu(&g, 0, words);
    tally_comm *c = open_with(f, 3);
    make(&x, 100000);
    for (int err = 0; !err;) {
        struct tally_options o = on_gpu(&g);
        memset(x.host, 0, x.bytes);
        upload(&g, &x);
        err = tally_push_pull(c, "x", x.device, x.device, 25000, TALLY_FLOAT32, TALLY_SUM, &o, &op);
        if (!err) {
            err = tally_op_wait(op, -1);
            tally_op_free(op);
        }
    }
    CHECK_HOLDS(tally_error(), "rank 1");
    tally_comm_close(c);
    CHECK(cuStreamSynchronize(g.stream) == 0);
    unmake(&x);
    close_gpu(&g);
    return 0;
}

static void a_rank_is_killed_at_each_step(void **state)
{
    static const struct fault steps[] = {
        {"cuStreamIsCapturing", 2}, {"cuMemHostRegister", 2}, {"cuStreamWaitEvent", 2},  {"cuMemcpyAsync", 2},
        {"cuEventSynchronize", 1},  {"copy-to-GPU", 2},       {"cuEventSynchronize", 3}, {"copy-to-GPU", 9}};
    static const int two_and_one[] = {0, 0, 1};
    struct fault *f = job_shared(sizeof *f);
    for (size_t i = 0; i < 3 * sizeof steps / sizeof *steps; i++) {
        const int *machines[] = {NULL, two_and_one, together};
        f->call = steps[i / 3].call;
        f->at = steps[i / 3].at;
        atomic_store(&f->open, 0);
        struct job j = {.ranks = 3,
                        .main = die_in_driver,
                        .arg = f,
                        .machine = machines[i % 3],
                        .settings = {"TALLY_PART_BYTES=16K"}};
        job_start(&j);
        for (int rank = 0; rank < 3; rank++)
            if (job_wait_rank(&j, rank) != (rank == 1 ? 128 + SIGKILL : 0))
                fail_msg("%s:%d, case %d, rank %d: %s", f->call, f->at, (int)(i % 3), rank,
                         job_log(&j, rank));
        job_clear(&j);
    }
}

static void a_rank_is_killed(void **state)
{
    atomic_int *stage = job_shared(sizeof *stage);
    struct job j = {.ranks = 3, .main = die, .arg = stage, .settings = {"TALLY_PART_BYTES=16K"}};
    job_kill_rank(&j, 1, stage, 2);
}

/* Rank 1 ends the job while rank 0's GPU has yet to read two inputs: b's stream is held, and a's copy comes behind b's.  What a's
 * stream is given then comes after its copy. */
static int fail_unread(int rank, void *arg)
{
    enum { NOT_READY = 600 };
    atomic_int *stage = arg;
    struct gpu g;
    struct tensor x[2]; /* b, a */
    tally_op *op[2];
    void *late, *behind;
    open_gpu(&g, rank,
             "gpus=2 peers=0:1 fail=cuMemcpyAsync:2:1000000"); /* none fails, but they are counted */
    tally_comm *c = job_open();
    struct tally_options o = on_gpu(&g);
    CHECK(cuStreamCreate(&late, 1) == 0 && cuEventCreate(&behind, 2) == 0);
    for (int t = 0; t < 2; t++) {
        make(&x[t], 100000);
        memset(x[t].host, 0, x[t].bytes);
        upload(&g, &x[t]);
    }
    CHECK(cuStreamSynchronize(g.stream) == 0);
    if (rank == 0) {
        CHECK(cuMemcpyAsync((uintptr_t)x[0].device, (uintptr_t)x[0].host, x[0].bytes, late) == 0);
        fake_cuda_hold(late, 1);
    }
    int before = fake_cuda_calls();
    for (int t = 0; t < 2; t++) {
        o.stream = rank == 0 && t == 0 ? late : g.stream;
        CHECK(tally_push_pull(c, t ? "a" : "b", x[t].device, x[t].device, 25000, TALLY_FLOAT32, TALLY_SUM, &o,
                              &op[t]) == 0);
        while (rank == 0 && fake_cuda_calls() < before + 1 + t) /* the GPU has been given the copy */
            usleep(1000);
    }
    if (rank == 0)
        atomic_store(stage, 1);
    job_await(stage, 1);
    if (rank == 1)
        CHECK(tally_comm_abort(c, "enough") == 0);
    for (int t = 0; t < 2; t++)
        CHECK(job_ends(op[t]) != 0 ||
              rank == 1); /* which may still get a's sum once rank 0 has let b's stream go */
    CHECK(cuEventRecord(behind, g.stream) == 0);
    if (rank == 0)
        CHECK(cuEventQuery(behind) == NOT_READY);
    fake_cuda_hold(late, 0);
    CHECK(cuEventSynchronize(behind) == 0 && cuStreamSynchronize(late) == 0);
    for (int t = 0; t < 2; t++)
        unmake(&x[t]); /* the driver ends the process if a copy still reads it */
    tally_comm_close(c);
    CHECK(cuStreamDestroy_v2(late) == 0 && cuEventDestroy_v2(behind) == 0);
    close_gpu(&g);
    return 0;
}

static void streams_wait_until_failed_inputs_are_read(void **state)
{
    static const char *const groups[] = {"TALLY_GPU_GROUP=1", "TALLY_GPU_GROUP=2"};
    atomic_int *stage = job_shared(sizeof *stage);
    for (int i = 0; i < 2; i++) {
        atomic_store(stage, 0);
        struct job j = {
            .ranks = 2, .main = fail_unread, .arg = stage, .machine = together, .settings = {groups[i]}};
        job_run(&j);
    }
}

/* --- cancellation ----------------------------------------------------------------------------------------- */

static int cancel(int rank, void *arg)
{
    struct gpu g;
    struct tensor x[2];
    open_gpu(&g, 0, "gpus=1");
    tally_comm *c = job_open();
    for (int t = 0; t < 2; t++)
        make(&x[t], 200000);
    cancel_some(c, &g, x, 20);
    CHECK(tally_comm_close(c) == 0);
    CHECK(cuStreamSynchronize(g.stream) == 0);
    for (int t = 0; t < 2; t++)
        unmake(&x[t]);
    close_gpu(&g);
    return 0;
}

static void operations_are_cancelled(void **state)
{
    struct job j = {.ranks = 2,
                    .main = cancel,
                    .settings = {"TALLY_PART_BYTES=16K", "TALLY_DEVICE_MEMORY=256K"}};
    job_run(&j);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(machines_of_one_rank),
        cmocka_unit_test(machines_of_several_ranks),
        cmocka_unit_test(one_machine),
        cmocka_unit_test(little_memory_and_other_orders),
        cmocka_unit_test(gpus_are_hidden),
        cmocka_unit_test(little_memory_can_be_pinned),
        cmocka_unit_test(large_tensors_are_pinned_tightly),
        cmocka_unit_test(shared_memory_is_not_pinned),
        cmocka_unit_test(failures_of_the_driver),
        cmocka_unit_test(waits_for_copies_fail),
        cmocka_unit_test(a_copy_back_fails_on_its_rank_alone),
        cmocka_unit_test(a_gpu_is_lost),
        cmocka_unit_test(a_gpu_hangs),
        cmocka_unit_test(an_input_is_never_read),
        cmocka_unit_test(streams_wait_until_failed_inputs_are_read),
        cmocka_unit_test(a_rank_is_killed),
        cmocka_unit_test(a_rank_is_killed_at_each_step),
        cmocka_unit_test(operations_are_cancelled),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
