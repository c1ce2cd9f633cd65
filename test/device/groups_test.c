/* groups_test.c - jobs whose GPUs sum in groups, on a driver that is not there (fake_cuda/): bits, bytes on each link, and what
 * goes wrong at the start, midway and at the end. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "inside/inside.h"
#include "test/device/application.h"
#include "test/device/fake_cuda.h"
#include "test/device/gpu.h"
#include "test/service/job.h"
#include "test/topo/machine_files.h"

#include <cmocka.h>

enum { MOST_RANKS = 8, SLOT = 256 << 10 };

static const int together[MOST_RANKS] = {0};

/* All GPUs of a machine of so many reach each other. */
static void all_peers(char *words, size_t size, int gpus)
{
    snprintf(words, size, "gpus=%d ", gpus);
    for (int a = 0; a < gpus; a++)
        for (int b = 0; b < a; b++)
            snprintf(words + strlen(words), size - strlen(words), "peers=%d:%d ", a, b);
}

/* --- bits ------------------------------------------------------------------------------------------------- */

enum { TENSORS = 14 };
static const struct {
    enum tally_dtype dtype;
    size_t count, size;
    enum tally_reduction op;
    double prescale, postscale;
} kinds[TENSORS] = {
    {TALLY_FLOAT32, 300000, 4, TALLY_SUM, 1, 1},     {TALLY_FLOAT64, 70001, 8, TALLY_AVERAGE, 1, 1},
    {TALLY_INT32, 17, 4, TALLY_SUM, 1, 1},           {TALLY_FLOAT32, 1, 4, TALLY_AVERAGE, 0.3, 0.7},
    {TALLY_INT64, 200000, 8, TALLY_SUM, 1, 1},       {TALLY_FLOAT32, 4000, 4, TALLY_MAX, 1, 1},
    {TALLY_COMPLEX64, 40000, 8, TALLY_SUM, 1, 0.5},  {TALLY_FLOAT16, 200001, 2, TALLY_AVERAGE, 1, 1},
    {TALLY_BFLOAT16, 150000, 2, TALLY_SUM, 1, 1},    {TALLY_FLOAT16, 4001, 2, TALLY_SUM, 0.3, 3},
    {TALLY_UINT64, 1000, 8, TALLY_AVERAGE, 1, 1},    {TALLY_UINT8, 1001, 1, TALLY_AVERAGE, -1.5, 0.3},
    {TALLY_INT64, 1001, 8, TALLY_AVERAGE, 1e300, 1}, {TALLY_INT16, 300003, 2, TALLY_AVERAGE, 1, 1},
};

struct plan {
    int ranks, steps;
    bool orders; /* ranks begin operations in different orders */
    atomic_int said;
};

static void fill(struct tensor *t, int rank, int step, int which)
{
    for (size_t at = 0; at < t->bytes; at++)
        t->host[at] =
            (uint8_t)(job_hash(&(uint64_t[]){at / 4 + 1000003u * (unsigned)(step + 7 * rank + which)}, 8) >>
                      13);
}

static int sums(int rank, void *arg)
{
    const struct plan *plan = arg;
    struct tensor x[TENSORS];
    struct gpu g;
    char words[2048];
    all_peers(words, sizeof words, plan->ranks);
    open_gpu(&g, rank, words);
    tally_comm *c = job_open();
    for (int t = 0; t < TENSORS; t++)
        make(&x[t], kinds[t].count * kinds[t].size);
    for (int step = 0; step < plan->steps; step++) {
        tally_op *op[TENSORS], *same;
        uint8_t *host[TENSORS];
        for (int i = 0; i < TENSORS; i++) {
            int t = (i + (plan->orders ? rank : 0)) % TENSORS;
            struct tally_options o = on_gpu(&g);
            char name[16];
            snprintf(name, sizeof name, "t%d", t);
            o.prescale = kinds[t].prescale;
            o.postscale = kinds[t].postscale;
            fill(&x[t], rank, step, t);
            host[t] = memcpy(malloc(x[t].bytes), x[t].host, x[t].bytes);
            upload(&g, &x[t]);
            CHECK(tally_push_pull(c, name, x[t].device, x[t].device, kinds[t].count, kinds[t].dtype,
                                  kinds[t].op, &o, &op[t]) == 0);
        }
        for (int t = 0; t < TENSORS; t++) {
            struct tally_options o = {.size = sizeof o,
                                      .prescale = kinds[t].prescale,
                                      .postscale = kinds[t].postscale};
            char name[16];
            job_expect(op[t], 0);
            snprintf(name, sizeof name, "host %d", t);
            CHECK(tally_push_pull(c, name, host[t], host[t], kinds[t].count, kinds[t].dtype, kinds[t].op, &o,
                                  &same) == 0);
            job_expect(same, 0);
            CHECK(memcmp(fake_cuda_data(x[t].device), host[t], x[t].bytes) == 0);
            free(host[t]);
        }
    }
    CHECK(tally_comm_close(c) == 0);
    for (int t = 0; t < TENSORS; t++)
        unmake(&x[t]);
    close_gpu(&g);
    return 0;
}

static void run(int ranks, const char *group, bool orders)
{
    struct plan plan = {.ranks = ranks, .steps = 2, .orders = orders};
    struct job j = {.ranks = ranks, .machine = together, .main = sums, .arg = &plan, .settings = {group}};
    job_start(&j);
    job_finish(&j);
    job_log_holds(&j, 0, "GPUs in groups");
    job_clear(&j);
}

static void one_group(void **state)
{
    run(2, "TALLY_GPU_GROUP=2", false);
    run(4, "TALLY_GPU_GROUP=4", true);
}

static void several_groups(void **state)
{
    run(4, "TALLY_GPU_GROUP=2", true);
    run(6, "TALLY_GPU_GROUP=2", true);
}

/* The sum of all is more than float16 holds, and the average is not. */
static int average_large(int rank, void *arg)
{
    struct gpu g;
    struct tensor x;
    tally_op *op;
    open_gpu(&g, rank, "gpus=4 peers=0:1 peers=2:3");
    tally_comm *c = job_open();
    struct tally_options o = on_gpu(&g);
    make(&x, 64);
    for (int i = 0; i < 32; i++)
        memcpy(x.host + 2 * i, &(uint16_t){0x78e2}, 2); /* 40000 */
    upload(&g, &x);
    CHECK(tally_push_pull(c, "x", x.device, x.device, 32, TALLY_FLOAT16, TALLY_AVERAGE, &o, &op) == 0);
    job_expect(op, 0);
    CHECK(memcmp(fake_cuda_data(x.device), x.host, x.bytes) == 0);
    CHECK(tally_comm_close(c) == 0);
    unmake(&x);
    close_gpu(&g);
    return 0;
}

static void averages_do_not_overflow(void **state)
{
    struct job j = {
        .ranks = 4, .machine = together, .main = average_large, .settings = {"TALLY_GPU_GROUP=2"}};
    job_run(&j);
}

/* A long tensor amid many short ones, each rank in an order of its own. */
static int sum_many(int rank, void *arg)
{
    enum { MANY = 150 };
    struct gpu g;
    struct tensor x, y[MANY];
    tally_op *op[MANY + 1];
    open_gpu(&g, rank, "gpus=4 peers=0:1 peers=2:3");
    tally_comm *c = job_open();
    struct tally_options o = on_gpu(&g);
    make(&x, 20000003);
    for (int i = 0; i < MANY; i++)
        make(&y[i], 4096u * (unsigned)(1 + i % 90) - 4u * (unsigned)(i % 3));
    memset(x.host, 1 + rank, x.bytes);
    upload(&g, &x);
    for (int k = 0; k < MANY; k++) {
        int i = (k * 7 + rank * 31) % MANY;
        char name[16];
        snprintf(name, sizeof name, "y%d", i);
        memset(y[i].host, 1 + rank + i % 10, y[i].bytes);
        upload(&g, &y[i]);
        CHECK(tally_push_pull(c, name, y[i].device, y[i].device, y[i].bytes, TALLY_UINT8, TALLY_SUM, &o,
                              &op[i]) == 0);
        if (k == MANY / 2)
            CHECK(tally_push_pull(c, "x", x.device, x.device, x.bytes, TALLY_UINT8, TALLY_SUM, &o,
                                  &op[MANY]) == 0);
    }
    for (int i = 0; i <= MANY; i++) {
        const struct tensor *t = i < MANY ? &y[i] : &x;
        const uint8_t sum = (uint8_t)(i < MANY ? 10 + 4 * (i % 10) : 10);
        job_expect(op[i], 0);
        const uint8_t *data = fake_cuda_data(t->device);
        CHECK(data[0] == sum && memcmp(data, data + 1, t->bytes - 1) == 0);
    }
    CHECK(tally_comm_close(c) == 0);
    unmake(&x);
    for (int i = 0; i < MANY; i++)
        unmake(&y[i]);
    close_gpu(&g);
    return 0;
}

static void many_in_other_orders(void **state)
{
    struct job j = {.ranks = 4, .machine = together, .main = sum_many, .settings = {"TALLY_GPU_GROUP=2"}};
    job_run(&j);
}

/* --- bytes ------------------------------------------------------------------------------------------------ */

struct links {
    struct tly_machine m;
    int file;
    uint64_t (*moved)[FAKE_PLACES]; /* of all ranks */
};

static struct tly_inside plan;

static bool reach(const struct tly_machine *m, int a, int b)
{
    return m->nvlink[a][b] > 0 || (m->gpu[a].nvswitch.bytes > 0 && m->gpu[b].nvswitch.bytes > 0) ||
           ((m->gpu[a].peers >> b & 1) && m->gpu[a].parent >= 0);
}

static int move_bytes(int rank, void *arg)
{
    struct links *l = arg;
    struct tensor x;
    struct gpu g;
    tally_op *op;
    char words[2048];
    snprintf(words, sizeof words, "gpus=%d count=/proc/self/fd/%d ", l->m.gpus, l->file);
    for (int a = 0; a < l->m.gpus; a++)
        for (int b = 0; b < a; b++)
            if (reach(&l->m, a, b))
                snprintf(words + strlen(words), sizeof words - strlen(words), "peers=%d:%d ", a, b);
    open_gpu(&g, rank, words);
    tally_comm *c = job_open();
    struct tally_options o = on_gpu(&g);
    make(&x, plan.job.bytes);
    memset(x.host, 1, x.bytes);
    upload(&g, &x);
    CHECK(cuStreamSynchronize(g.stream) == 0);
    job_barrier(c);
    if (rank == 0)
        memset(l->moved, 0, FAKE_PLACES * sizeof *l->moved);
    job_barrier(c);
    CHECK(tally_push_pull(c, "x", x.device, x.device, x.bytes, TALLY_UINT8, TALLY_SUM, &o, &op) == 0);
    job_expect(op, 0);
    CHECK(((uint8_t *)fake_cuda_data(x.device))[x.bytes - 1] == l->m.gpus);
    CHECK(tally_comm_close(c) == 0);
    unmake(&x);
    close_gpu(&g);
    return 0;
}

static void load_link(struct links *l, double *on, enum tly_inside_link_type type, int a, int b, double bytes)
{
    for (int i = 0; i < plan.links; i++)
        if (plan.link[i].type == type && plan.link[i].a == a && plan.link[i].b == b)
            on[i] += bytes;
}

/* The switches between a place and the one above it at which to stop (-1: the processor). */
static void load_switches(struct links *l, double *on, bool up, int parent, int stop, double bytes)
{
    for (; parent != stop; parent = l->m.sw[parent].parent)
        load_link(l, on, up ? TLY_LINK_SWITCH_UP : TLY_LINK_SWITCH_DOWN, parent, 0, bytes);
}

static bool is_above(const struct tly_machine *m, int top, int place)
{
    while (place >= 0 && place != top)
        place = m->sw[place].parent;
    return place == top;
}

/* What went from one GPU to another, or to the host (-1). */
static void load_path(struct links *l, double *on, int from, int to, double bytes)
{
    const struct tly_machine *m = &l->m;
    int top = -1;
    if (from >= 0 && to >= 0 && m->nvlink[from][to] > 0) {
        load_link(l, on, TLY_LINK_NVLINK, from, to, bytes);
        return;
    }
    if (from >= 0 && to >= 0 && m->gpu[from].nvswitch.bytes > 0 && m->gpu[to].nvswitch.bytes > 0) {
        load_link(l, on, TLY_LINK_NVSWITCH_TO, from, 0, bytes);
        load_link(l, on, TLY_LINK_NVSWITCH_OF, to, 0, bytes);
        return;
    }
    if (from >= 0 && to >= 0)
        for (top = m->gpu[from].parent; !is_above(m, top, m->gpu[to].parent); top = m->sw[top].parent)
            ;
    if (from >= 0) {
        load_link(l, on, TLY_LINK_GPU_UP, from, 0, bytes);
        load_switches(l, on, true, m->gpu[from].parent, top, bytes);
    }
    if (to >= 0) {
        load_link(l, on, TLY_LINK_GPU_DOWN, to, 0, bytes);
        load_switches(l, on, false, m->gpu[to].parent, top, bytes);
    }
}

/* What `tally topo` says of one machine alone. */
static void bytes_are_those_of_the_plan(void **state)
{
    static const char *const machines[] = {"pcie",   "dgx1",        "nvlink", "hgx",    "nested",
                                           "uneven", "workstation", "ports",  "virtual"};
    struct links *l = job_shared(sizeof *l);
    l->file = memfd_create("moved", 0);
    assert_int_equal(ftruncate(l->file, FAKE_PLACES * sizeof *l->moved), 0);
    l->moved = mmap(NULL, FAKE_PLACES * sizeof *l->moved, PROT_READ | PROT_WRITE, MAP_SHARED, l->file, 0);
    assert_ptr_not_equal(l->moved, MAP_FAILED);
    for (size_t i = 0; i < sizeof machines / sizeof *machines; i++) {
        const struct tly_inside_job of = {.bytes = 16 * SLOT};
        char why[256], group[32];
        assert_int_equal(load_machine(machines[i], &l->m, why, sizeof why), 0);
        assert_int_equal(tly_inside_plan(&l->m, &of, 0, &plan), 0);
        int each = l->m.gpus / plan.way.groups;
        for (int g = 0; g < l->m.gpus; g++) {
            assert_int_equal(plan.way.group[g], g / each);
            assert_true(plan.way.share[g] == 1.0 / each);
        }
        print_message("%s: groups of %d\n", machines[i], each);
        snprintf(group, sizeof group, "TALLY_GPU_GROUP=%d", each);
        struct job j = {
            .ranks = l->m.gpus, .machine = together, .main = move_bytes, .arg = l, .settings = {group}};
        job_run(&j);
        double *on = calloc((size_t)plan.links, sizeof *on);
        for (int a = -1; a < l->m.gpus; a++)
            for (int b = -1; b < l->m.gpus; b++)
                if (a != b)
                    load_path(l, on, a, b, (double)l->moved[a + 1][b + 1]);
        for (int k = 0; k < plan.links; k++) {
            const struct tly_inside_link *link = &plan.link[k];
            bool counted = link->type <= TLY_LINK_SWITCH_DOWN || link->type >= TLY_LINK_NVLINK;
            if (counted && on[k] != link->bytes)
                fail_msg("%s, link %d (type %d, %d to %d): %.0f bytes, the plan says %.0f", machines[i], k,
                         link->type, link->a, link->b, on[k], link->bytes);
        }
        free(on);
        tly_inside_finish(&plan);
    }
    munmap(l->moved, FAKE_PLACES * sizeof *l->moved);
    close(l->file);
}

/* --- the start -------------------------------------------------------------------------------------------- */

struct fault {
    const char *words[4]; /* of each rank */
    bool no_context;      /* of rank 1 */
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
                    .settings = {"TALLY_GPU_GROUP=2"}};
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
        "cuMemAlloc:2",      "cuMemHostRegister:801",  "cuIpcGetMemHandle:801", "cuMemcpyAsync:1",
        "cuMemcpyAsync:1:2", "cuIpcOpenMemHandle:801", "cuEventSynchronize:1"};
    const char *peers = "gpus=4 peers=0:1 peers=2:3", *none = "gpus=4";
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

/* Ranks that are no multiple of a group, groups that are no node of the tree, and several machines. */
static void jobs_without_groups(void **state)
{
    static const int apart[] = {0, 0, 1, 1};
    static const struct {
        const char *group;
        const int *machine;
    } cases[] = {{"TALLY_GPU_GROUP=8", together},
                 {"TALLY_GPU_GROUP=3", together},
                 {"TALLY_GPU_GROUP=2", apart}};
    const char *peers = "gpus=4 peers=0:1 peers=2:3";
    struct fault f = {.words = {peers, peers, peers, peers}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct job j = {.ranks = 4,
                        .machine = cases[i].machine,
                        .main = sum_once,
                        .arg = &f,
                        .settings = {cases[i].group}};
        job_start(&j);
        job_finish(&j);
        job_log_holds(&j, 0, "GPUs do not sum in groups of ");
        job_log_lacks(&j, 0, "GPUs in groups");
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
    open_gpu(&g, rank, "gpus=4 peers=0:1 peers=2:3");
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
    struct job j = {.ranks = 4, .machine = together, .main = mix_places, .settings = {"TALLY_GPU_GROUP=2"}};
    job_run(&j);
}

/* Rank 0 or 1 takes back what waits for the others, or is being summed; and a communicator follows another. */
static int cancel(int rank, void *arg)
{
    struct gpu g;
    struct tensor x[2];
    tally_op *op[2];
    open_gpu(&g, rank, "gpus=4 peers=0:1 peers=2:3");
    for (int t = 0; t < 2; t++)
        make(&x[t], 3 * SLOT);
    for (int turn = 0; turn < 2; turn++) {
        tally_comm *c = job_open();
        for (int step = 0; step < 10; step++) {
            struct tally_options o = on_gpu(&g);
            CHECK(cuStreamSynchronize(g.stream) == 0); /* what was cancelled has not waited for it */
            for (int t = 0; t < 2; t++) {
                memset(x[t].host, 1 + rank, x[t].bytes);
                upload(&g, &x[t]);
                CHECK(tally_push_pull(c, t ? "b" : "a", x[t].device, x[t].device, x[t].bytes, TALLY_UINT8,
                                      TALLY_SUM, &o, &op[t]) == 0);
            }
            if (rank == step % 2)
                CHECK(tally_op_cancel(op[1], "no more") == 0);
            for (int t = 0; t < 2; t++) {
                int err = tally_op_wait(op[t], -1);
                const uint8_t *data = fake_cuda_data(x[t].device);
                CHECK(err == 0 || (t == 1 && err == -ECANCELED));
                CHECK(err || (data[0] == 10 && memcmp(data, data + 1, x[t].bytes - 1) == 0));
                tally_op_free(op[t]);
            }
            job_barrier(c);
        }
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
    struct job j = {.ranks = 4, .machine = together, .main = cancel, .settings = {"TALLY_GPU_GROUP=2"}};
    job_run(&j);
}

/* Rank 3 has no more data: the others go through the service, which takes zeros for it. */
static int join(int rank, void *arg)
{
    struct gpu g;
    struct tensor x;
    tally_op *op;
    open_gpu(&g, rank, "gpus=4 peers=0:1 peers=2:3");
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
    struct job j = {.ranks = 4, .machine = together, .main = join, .settings = {"TALLY_GPU_GROUP=2"}};
    job_run(&j);
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

/* Until it fails. */
static int sum_until_it_fails(int rank, void *arg)
{
    const char *fault = arg;
    char words[128] = "gpus=4 peers=0:1 peers=2:3";
    struct tensor x;
    struct gpu g;
    tally_comm *c;
    int err = 0;
    if (rank == 1)
        snprintf(words + strlen(words), sizeof words - strlen(words), " fail=%s", fault);
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
    CHECK_HOLDS(tally_error(), "rank 1");
    tally_comm_close(c);
    return 0;
}

static void a_rank_is_killed_at_each_step(void **state)
{
    static const char *const calls[] = {
        "cuMemAlloc:-9:2",         "cuIpcGetMemHandle:-9",    "cuIpcOpenMemHandle:-9",
        "cuMemcpyAsync:-9:4",      "cuMemcpyAsync:-9:9",      "cuMemcpyAsync:-9:17",
        "cuMemcpyAsync:-9:30",     "cuLaunchKernel:-9",       "cuLaunchKernel:-9:10",
        "cuEventSynchronize:-9:5", "cuEventSynchronize:-9:6", "cuEventSynchronize:-9:40"};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        struct job j = {.ranks = 4,
                        .machine = together,
                        .main = sum_until_it_fails,
                        .arg = (void *)(uintptr_t)calls[i],
                        .settings = {"TALLY_GPU_GROUP=2"}};
        job_start(&j);
        for (int r = 0; r < 4; r++)
            if (job_wait_rank(&j, r) != (r == 1 ? 128 + SIGKILL : 0))
                fail_msg("%s: rank %d: %s", calls[i], r, job_log(&j, r));
        job_clear(&j);
    }
}

/* A failure of the GPU's ends the job, and names rank and call. */
static void the_driver_fails_midway(void **state)
{
    static const char *const calls[] = {"cuLaunchKernel:700:3", "cuMemcpyAsync:700:20",
                                        "cuEventSynchronize:719:20", "cuLaunchKernel:1:4",
                                        "cuEventRecord:2:30"};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        struct job j = {.ranks = 4,
                        .machine = together,
                        .main = sum_until_it_fails,
                        .arg = (void *)(uintptr_t)calls[i],
                        .settings = {"TALLY_GPU_GROUP=2"}};
        job_run(&j);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_group),
        cmocka_unit_test(several_groups),
        cmocka_unit_test(averages_do_not_overflow),
        cmocka_unit_test(many_in_other_orders),
        cmocka_unit_test(bytes_are_those_of_the_plan),
        cmocka_unit_test(the_host_sums_where_gpus_cannot),
        cmocka_unit_test(jobs_without_groups),
        cmocka_unit_test(tensors_on_the_host_of_some_ranks),
        cmocka_unit_test(operations_are_cancelled),
        cmocka_unit_test(a_rank_joins),
        cmocka_unit_test(a_rank_closes_early),
        cmocka_unit_test(a_rank_closes_late),
        cmocka_unit_test(a_rank_is_killed_at_each_step),
        cmocka_unit_test(the_driver_fails_midway),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
