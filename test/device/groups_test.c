/* groups_test.c - jobs whose GPUs sum in groups, on a driver that is not there (fake_cuda/): bits, and bytes on each link. */
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
#include "test/device/groups.h"
#include "test/service/job.h"
#include "test/topo/machine_files.h"

#include <cmocka.h>

static const int two_by_four[MOST_RANKS] = {0, 0, 0, 0, 1, 1, 1, 1},
                 two_by_eight[MOST_RANKS] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1},
                 four_and_two[MOST_RANKS] = {0, 0, 0, 0, 1, 1};

/* Rank i has GPU i.  All GPUs of a machine reach each other. */
static void all_peers(char *words, size_t size, int gpus, const int machine[])
{
    snprintf(words, size, "gpus=%d ", gpus);
    for (int a = 0; a < gpus; a++)
        for (int b = 0; b < a; b++)
            if (machine[a] == machine[b])
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

struct sums {
    int ranks, steps;
    const int *machine;
    bool orders; /* ranks begin operations in different orders */
    int on_host; /* a rank whose tensors are on the host; 0: none */
    bool hidden; /* each rank sees its own GPU alone */
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
    const struct sums *plan = arg;
    struct tensor x[TENSORS];
    struct gpu g;
    char words[2048];
    all_peers(words, sizeof words, plan->ranks, plan->machine);
    if (plan->hidden)
        setenv("CUDA_VISIBLE_DEVICES", (const char[]){(char)('0' + rank), 0}, 1);
    open_gpu(&g, plan->hidden ? 0 : rank, words);
    tally_comm *c = job_open();
    bool on_host = plan->on_host && rank == plan->on_host;
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
            if (on_host)
                o.place = 0;
            o.prescale = kinds[t].prescale;
            o.postscale = kinds[t].postscale;
            fill(&x[t], rank, step, t);
            host[t] = memcpy(malloc(x[t].bytes), x[t].host, x[t].bytes);
            upload(&g, &x[t]);
            if (on_host)
                CHECK(cuStreamSynchronize(g.stream) == 0);
            uint8_t *at = on_host ? x[t].host : x[t].device;
            CHECK(tally_push_pull(c, name, at, at, kinds[t].count, kinds[t].dtype, kinds[t].op, &o, &op[t]) ==
                  0);
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
            const void *sum = on_host ? x[t].host : fake_cuda_data(x[t].device);
            CHECK(memcmp(sum, host[t], x[t].bytes) == 0);
            free(host[t]);
        }
    }
    CHECK(tally_comm_close(c) == 0);
    for (int t = 0; t < TENSORS; t++)
        unmake(&x[t]);
    close_gpu(&g);
    return 0;
}

static void run_plan(struct sums plan, const char *group)
{
    struct job j = {
        .ranks = plan.ranks, .machine = plan.machine, .main = sums, .arg = &plan, .settings = {group}};
    job_start(&j);
    job_finish(&j);
    job_log_holds(&j, 0, "GPUs in groups");
    job_clear(&j);
}

static void run(int ranks, const int *machine, const char *group, bool orders, int on_host)
{
    run_plan(
        (struct sums){.ranks = ranks, .steps = 2, .machine = machine, .orders = orders, .on_host = on_host},
        group);
}

static void one_group(void **state)
{
    run(2, together, "TALLY_GPU_GROUP=2", false, 0);
    run(4, together, "TALLY_GPU_GROUP=4", true, 0);
}

static void several_groups(void **state)
{
    run(4, together, "TALLY_GPU_GROUP=2", true, 0);
    run(6, together, "TALLY_GPU_GROUP=2", true, 0);
}

/* Each rank sees its own GPU alone, as number 0. */
static void gpus_are_hidden(void **state)
{
    run_plan((struct sums){.ranks = 4, .steps = 1, .machine = together, .hidden = true}, "TALLY_GPU_GROUP=2");
}

static void several_machines(void **state)
{
    run(4, two_by_two, "TALLY_GPU_GROUP=2", true, 0);
    run(8, two_by_four, "TALLY_GPU_GROUP=4", false, 0);
    run(8, two_by_four, "TALLY_GPU_GROUP=2", true, 0);
    run(6, four_and_two, "TALLY_GPU_GROUP=2", true, 0);
    run(16, two_by_eight, "TALLY_GPU_GROUP=4", true, 0);
}

static void tensors_on_the_host_of_one_rank(void **state)
{
    run(4, together, "TALLY_GPU_GROUP=4", true, 1);
    run(4, together, "TALLY_GPU_GROUP=2", true, 3);
    run(8, two_by_four, "TALLY_GPU_GROUP=4", true, 5);
    run(8, two_by_four, "TALLY_GPU_GROUP=2", true, 4);
}

/* The sum of all is more than float16 holds, and the average is not. */
static int average_large(int rank, void *arg)
{
    struct gpu g;
    struct tensor x;
    tally_op *op;
    open_gpu(&g, rank, pairs_of_gpus);
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
    open_gpu(&g, rank, pairs_of_gpus);
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
    run_both(sum_many);
}

/* --- bytes ------------------------------------------------------------------------------------------------ */

struct links {
    struct tly_machine m; /* each of so many: */
    int machines;
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
    const int ranks = l->machines * l->m.gpus, first = rank - rank % l->m.gpus;
    snprintf(words, sizeof words, "gpus=%d count=/proc/self/fd/%d ", ranks, l->file);
    for (int a = 0; a < l->m.gpus; a++) {
        snprintf(words + strlen(words), sizeof words - strlen(words), "pci=%d:%s ", first + a,
                 l->m.gpu[a].address);
        for (int b = 0; b < a; b++)
            if (reach(&l->m, a, b))
                snprintf(words + strlen(words), sizeof words - strlen(words), "peers=%d:%d ", first + a,
                         first + b);
    }
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
    CHECK(((uint8_t *)fake_cuda_data(x.device))[x.bytes - 1] == ranks);
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

/* What the network card's own copies put on a link. */
static double net_on(int link)
{
    double bytes = 0;
    for (int s = 0; s < plan.steps; s++)
        for (int i = 0; plan.step[s].verb == TLY_DO_EXCHANGE && i < plan.step[s].links; i++)
            bytes += plan.step[s].link[i] == link ? plan.step[s].bytes : 0;
    return bytes;
}

/* Checks that the bytes moved in machine `which` of the job are those of the plan. */
static void check_links(struct links *l, const char *name, int which)
{
    const int first = which * l->m.gpus;
    double *on = calloc((size_t)plan.links, sizeof *on);
    for (int a = -1; a < l->m.gpus; a++)
        for (int b = -1; b < l->m.gpus; b++)
            if (a != b)
                load_path(l, on, a, b,
                          (double)l->moved[a < 0 ? 0 : 1 + first + a][b < 0 ? 0 : 1 + first + b]);
    for (int k = 0; k < plan.links; k++) {
        const struct tly_inside_link *link = &plan.link[k];
        bool counted = link->type <= TLY_LINK_SWITCH_DOWN || link->type >= TLY_LINK_NVLINK;
        if (counted && on[k] != link->bytes - net_on(k))
            fail_msg("%s, machine %d, link %d (type %d, %d to %d): %.0f bytes, the plan says %.0f", name,
                     which, k, link->type, link->a, link->b, on[k], link->bytes);
    }
    free(on);
}

static bool has_links(const char *name)
{
    size_t length;
    char *text = machine_file(name, "links", &length);
    bool has = text != NULL;
    free(text);
    return has;
}

static void check_machine(struct links *l, const char *name, int machines)
{
    const struct tly_inside_job of = {.bytes = 32 * SLOT, .traffic = machines > 1};
    char why[256], topo[256], links[256], said[64];
    int machine[MOST_RANKS];
    assert_int_equal(load_machine(name, &l->m, why, sizeof why), 0);
    assert_int_equal(tly_inside_plan(&l->m, &of, 0, &plan), 0);
    int each = l->m.gpus / plan.way.groups;
    l->machines = machines;
    for (int i = 0; i < machines * l->m.gpus; i++)
        machine[i] = i / l->m.gpus;
    snprintf(said, sizeof said, each > 1 ? "GPUs in groups of %d" : "GPUs one by one", each);
    print_message("%d %s: %s\n", machines, name, said);
    snprintf(topo, sizeof topo, "TALLY_TOPO=" TLY_TEST_MACHINES "/%s.xml", name);
    snprintf(links, sizeof links, "TALLY_TOPO_LINKS=" TLY_TEST_MACHINES "/%s.links", name);
    struct job j = {.ranks = machines * l->m.gpus,
                    .machine = machine,
                    .main = move_bytes,
                    .arg = l,
                    .settings = {"TALLY_PART_BYTES=256K", topo, has_links(name) ? links : NULL}};
    job_start(&j);
    job_finish(&j);
    job_log_holds(&j, 0, said);
    job_clear(&j);
    for (int which = 0; which < machines; which++)
        check_links(l, name, which);
    tly_inside_finish(&plan);
}

/* What `tally topo` says. */
static void bytes_are_those_of_the_plan(void **state)
{
    static const char *const machines[] = {"pcie",   "dgx1",        "nvlink", "hgx",    "nested",
                                           "uneven", "workstation", "ports",  "virtual"};
    struct links *l = job_shared(sizeof *l);
    l->file = memfd_create("moved", 0);
    assert_int_equal(ftruncate(l->file, FAKE_PLACES * sizeof *l->moved), 0);
    l->moved = mmap(NULL, FAKE_PLACES * sizeof *l->moved, PROT_READ | PROT_WRITE, MAP_SHARED, l->file, 0);
    assert_ptr_not_equal(l->moved, MAP_FAILED);
    for (size_t i = 0; i < sizeof machines / sizeof *machines; i++)
        for (int count = 1; count <= 2; count++)
            check_machine(l, machines[i], count);
    munmap(l->moved, FAKE_PLACES * sizeof *l->moved);
    close(l->file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_group),
        cmocka_unit_test(several_groups),
        cmocka_unit_test(gpus_are_hidden),
        cmocka_unit_test(several_machines),
        cmocka_unit_test(tensors_on_the_host_of_one_rank),
        cmocka_unit_test(averages_do_not_overflow),
        cmocka_unit_test(many_in_other_orders),
        cmocka_unit_test(bytes_are_those_of_the_plan),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
