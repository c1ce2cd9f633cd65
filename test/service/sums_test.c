/* sums_test.c - whole jobs, ranks and services over loopback: every result bit for bit what the contract says, on
 * every rank, and the same whatever the number of services, the size of parts and fragments, the order of arrival
 * and the application's floating-point mode.
 *
 * Each job works through the same list of operations, made from a seed: kinds, types, reductions, sizes, factors,
 * values.  One rank an operation compares with the reference, all ranks leave a hash of what they got, and the hashes
 * must agree over ranks and over jobs with the same ranks.  SERVICE_SOAK=N works through N lists.  Each part of the long
 * tests has lists of its own, and all of them have three of each kind. */
#include <errno.h>
#include <setjmp.h>
#include <string.h>
#ifdef __SSE2__
#include <xmmintrin.h>
#endif

#include "job.h"
#include "reference.h"

#include <cmocka.h>

enum { OPS = 48, BATCH = 8, MOST_OPS = 64 };

struct layout {
    const char *name;
    int ranks;
    const int *machine; /* NULL: each rank is one */
    int groups, groups_16;
    const int *group, *group_16; /* of sums: for all types, and for those of 16 bits */
};

struct operation {
    int kind, dtype, reduction, root, mode, space;
    size_t count;
    double prescale, postscale;
    bool in_place, unnamed;
};

struct run {
    const struct layout *layout;
    uint64_t seed;
    int ops;
    bool verify;
    bool huge; /* the list is one operation of 10^7 elements for each of a few types */
    bool expect_drops;
    uint64_t (*hash)[JOB_MOST_RANKS]; /* shared: [op][rank] */
};

/* --- the list ------------------------------------------------------------------------------------ */

static size_t random_count(uint64_t *s)
{
    static const size_t edges[] = {0,  1,   2,    15,   16,   17,   31,    63,   64,
                                   65, 127, 1023, 1024, 1025, 4095, 16384, 16385};
    switch (job_random(s) % 8) {
    case 0:
    case 1:
    case 2:
        return edges[job_random(s) % (sizeof edges / sizeof *edges)];
    case 3:
        return job_random(s) % (job_random(s) % 4 ? 60000 : 1000000);
    default:
        return job_random(s) % 5000;
    }
}

static struct operation make(const struct run *run, int index)
{
    uint64_t s = run->seed * 1000003 + (uint64_t)index;
    struct operation o = {.kind = TALLY_PUSH_PULL, .prescale = 1, .postscale = 1};
    int kind = (int)(job_random(&s) % 20);
    o.kind = kind < 14   ? TALLY_PUSH_PULL
             : kind < 16 ? TALLY_BROADCAST
             : kind < 19 ? TALLY_ALLGATHER
                         : TALLY_BARRIER;
    o.dtype = index % REFERENCE_DTYPES; /* each has its turn */
    o.reduction = (int)(job_random(&s) % 5);
    o.root = (int)(job_random(&s) % (unsigned)run->layout->ranks);
    o.mode = (int)(job_random(&s) % 4);
    o.space = job_random(&s) % 4 == 0 ? (int)(job_random(&s) % 256) : 0;
    o.count = random_count(&s);
    o.in_place = job_random(&s) % 2;
    o.unnamed = index % BATCH == 3 && o.kind != TALLY_BARRIER;
    static const double factors[] = {0.5, 3, -1.25, 1e-3, 1.0 / 3, 1e4, -1};
    if (o.kind == TALLY_PUSH_PULL && o.dtype != TALLY_BOOL) {
        if (job_random(&s) % 4 == 0)
            o.prescale = factors[job_random(&s) % 7];
        if (job_random(&s) % 4 == 0)
            o.postscale = factors[job_random(&s) % 7];
    }
    bool complex = o.dtype == TALLY_COMPLEX64 || o.dtype == TALLY_COMPLEX128;
    if (o.dtype == TALLY_BOOL && o.reduction == TALLY_AVERAGE)
        o.reduction = TALLY_SUM;
    if (complex && (o.reduction == TALLY_MIN || o.reduction == TALLY_MAX))
        o.reduction = TALLY_PRODUCT;
    if (run->huge)
        o = (struct operation){.kind = TALLY_PUSH_PULL,
                               .dtype = (int[]){TALLY_FLOAT32, TALLY_BFLOAT16, TALLY_INT8}[index],
                               .reduction = TALLY_SUM,
                               .prescale = 1,
                               .postscale = 1,
                               .mode = 1,
                               .in_place = index == 1,
                               .count = UNDER_SANITIZER ? 1000003 : 10000000};
    return o;
}

/* A value of each kind that goes wrong somewhere: zeros, subnormals, the largest, infinities, NaN. */
static uint64_t special(int dtype, uint64_t x)
{
    static const uint32_t f32[] = {0,          0x80000000, 1,          0x807fffff, 0x00800000, 0x7f7fffff,
                                   0xff7fffff, 0x7f800000, 0xff800000, 0x7fc00000, 0xffffffff, 0x7f800001,
                                   0x3f800000, 0xbf800000, 0x00400000, 0x33000000};
    static const uint64_t f64[] = {
        0,
        1ull << 63,
        1,
        0x800fffffffffffffull,
        0x0010000000000000ull,
        0x7fefffffffffffffull,
        0xffefffffffffffffull,
        0x7ff0000000000000ull,
        0xfff0000000000000ull,
        0x7ff8000000000000ull,
        ~0ull,
        0x7ff0000000000001ull,
        0x3ff0000000000000ull,
        0xbff0000000000000ull,
        0x0008000000000000ull,
        0x3ca0000000000000ull};
    static const uint16_t f16[] = {0,      0x8000, 1,      0x83ff, 0x0400, 0x7bff, 0xfbff, 0x7c00,
                                   0xfc00, 0x7e00, 0xffff, 0x7c01, 0x3c00, 0xbc00, 0x0200, 0x1000};
    int i = (int)(x % 16);
    switch (dtype) {
    case TALLY_FLOAT32:
        return f32[i];
    case TALLY_FLOAT64:
        return f64[i];
    case TALLY_FLOAT16:
        return f16[i];
    case TALLY_BFLOAT16:
        return f32[i] >> 16;
    default:
        return i % 4 == 0   ? 0
               : i % 4 == 1 ? ~0ull
               : i % 4 == 2 ? 1ull << (reference_element(dtype) * 8 - 1)
                            : x >> 4;
    }
}

/* Values of ordinary size: exponents near that of 1. */
static uint64_t ordinary(int dtype, uint64_t x)
{
    switch (dtype) {
    case TALLY_FLOAT32:
        return (x & 0x81ffffff) | (0x3c000000u + (uint32_t)(x >> 32 & 7) * 0x800000u);
    case TALLY_FLOAT64:
        return (x & 0x800fffffffffffffull) | (0x3fc + (x >> 52 & 7)) << 52;
    case TALLY_FLOAT16:
        return (x & 0x83ff) | (12 + (x >> 32 & 7)) << 10;
    case TALLY_BFLOAT16:
        return (x & 0x807f) | (0x7b + (x >> 32 & 7)) << 7;
    default:
        return x;
    }
}

static void *contribution(const struct run *run, const struct operation *o, int index, int rank, size_t count)
{
    bool complex = o->dtype == TALLY_COMPLEX64 || o->dtype == TALLY_COMPLEX128;
    int dtype = o->dtype == TALLY_COMPLEX64 ? TALLY_FLOAT32 : complex ? TALLY_FLOAT64 : o->dtype;
    size_t element = reference_element(dtype);
    count *= complex ? 2 : 1;
    uint8_t *data = malloc(count * element + 1);
    uint64_t s = run->seed * 7919 + (uint64_t)index * 64 + (uint64_t)rank;
    CHECK(data);
    for (size_t i = 0; i < count; i++) {
        uint64_t x = job_random(&s);
        if (o->mode == 0 || (o->mode == 3 && x % 11 == 0))
            x = special(dtype, x >> 8);
        else if (o->mode == 1 || o->mode == 3)
            x = ordinary(dtype, x);
        if (o->dtype == TALLY_BOOL && o->mode == 1)
            x &= 1;
        memcpy(data + i * element, &x, element);
    }
    return data;
}

static size_t gathered_count(const struct operation *o, int index, int rank)
{
    if (rank == index % 3)
        return 0;
    return (o->count % 5000 + (size_t)rank * 37) % 3001;
}

/* --- in the ranks -------------------------------------------------------------------------------- */

/* As torch.set_flush_denormal() leaves a process.  Threads inherit it. */
static void flush_subnormals(bool on)
{
#ifdef __SSE2__
    _mm_setcsr(on ? _mm_getcsr() | 0x8040 : _mm_getcsr() & ~0x8040u);
#else
    (void)on;
#endif
}

struct flight {
    struct operation o;
    tally_op *op;
    uint8_t *input, *output;
    size_t count;
    bool ended;
};

static void expect(const struct run *run, const struct operation *o, int index, uint8_t *out)
{
    const struct layout *l = run->layout;
    bool sixteen = o->dtype == TALLY_FLOAT16 || o->dtype == TALLY_BFLOAT16;
    struct reference r = {.dtype = o->dtype,
                          .reduction = o->reduction,
                          .ranks = l->ranks,
                          .prescale = o->prescale,
                          .postscale = o->postscale,
                          .groups = sixteen ? l->groups_16 : l->groups,
                          .group = sixteen ? l->group_16 : l->group};
    void *inputs[JOB_MOST_RANKS];
    for (int i = 0; i < l->ranks; i++)
        inputs[i] = contribution(run, o, index, i, o->count);
    reference_reduce(&r, (const void *const *)inputs, out, o->count);
    for (int i = 0; i < l->ranks; i++)
        free(inputs[i]);
}

static void compare(const struct operation *o, int index, const uint8_t *got, const uint8_t *want,
                    size_t count)
{
    size_t element = reference_element(o->dtype);
    for (size_t i = 0; i < count; i++) {
        if (memcmp(got + i * element, want + i * element, element) == 0)
            continue;
        uint64_t a = 0, b = 0;
        memcpy(&a, got + i * element, element);
        memcpy(&b, want + i * element, element);
        fprintf(stderr,
                "op %d: kind %d dtype %d reduction %d count %zu scales %g %g mode %d: element %zu is %llx, "
                "not %llx\n",
                index, o->kind, o->dtype, o->reduction, o->count, o->prescale, o->postscale, o->mode, i,
                (unsigned long long)a, (unsigned long long)b);
        CHECK(!"the bits of the reference");
    }
}

static void submit(const struct run *run, tally_comm *c, struct flight *f, int index, int rank, uint64_t *s,
                   bool queued)
{
    char name[64];
    snprintf(name, sizeof name, "tensor %d", index);
    const struct operation *o = &f->o;
    int64_t shape[2];
    struct tally_options opt = {.size = sizeof opt,
                                .priority = (int32_t)(job_random(s) % 7) - 3,
                                .prescale = o->prescale,
                                .postscale = o->postscale,
                                .space = (uint32_t)o->space,
                                .queued = queued && index % 2,
                                .tag = f};
    size_t element = reference_element(o->dtype);
    const char *n = o->unnamed ? NULL : name;
    f->count = o->kind == TALLY_ALLGATHER ? gathered_count(o, index, rank) : o->count;
    int err = 0;
    switch (o->kind) {
    case TALLY_PUSH_PULL:
        f->input = contribution(run, o, index, rank, f->count);
        f->output = o->in_place ? f->input : malloc(f->count * element + 1);
        if (!o->in_place)
            memset(f->output, 0xa5, f->count * element);
        err = tally_push_pull(c, n, f->input, f->output, f->count, (enum tally_dtype)o->dtype,
                              (enum tally_reduction)o->reduction, &opt, &f->op);
        break;
    case TALLY_BROADCAST:
        opt.prescale = opt.postscale = 0;
        f->output = f->input = contribution(run, o, index, rank, f->count);
        err = tally_broadcast(c, n, f->output, f->count, (enum tally_dtype)o->dtype, o->root, &opt, &f->op);
        break;
    case TALLY_ALLGATHER:
        opt.prescale = opt.postscale = 0;
        shape[0] = (int64_t)f->count;
        shape[1] = 3;
        opt.ndim = 2;
        opt.shape = shape;
        f->count *= 3;
        f->input = f->output = contribution(run, o, index, rank, f->count);
        err = tally_allgather(c, n, f->input, f->count, (enum tally_dtype)o->dtype, &opt, &f->op);
        break;
    default:
        opt.prescale = opt.postscale = 0;
        err = tally_barrier(c, n, &opt, &f->op);
    }
    CHECK(err == 0);
    if (queued) { /* from the beginning, or from now on */
        int watched = opt.queued ? 0 : tally_op_watch(f->op);
        CHECK(watched == 0 || watched == 1);
        CHECK(!watched || tally_op_poll(f->op));
        CHECK(tally_op_watch(f->op) == -EINVAL);
        f->ended = watched;
    }
}

static void check_gathered(const struct run *run, const struct operation *o, struct flight *f, int index,
                           int rank)
{
    const void *data;
    size_t bytes, element = reference_element(o->dtype), at = 0;
    const int64_t *dims;
    CHECK(tally_op_gathered(f->op, &data, &bytes, &dims) == 0);
    for (int r = 0; r < run->layout->ranks; r++) {
        size_t count = gathered_count(o, index, r);
        CHECK(dims[r] == (int64_t)count);
        CHECK(at + count * 3 * element <= bytes);
        if (run->verify) {
            uint8_t *want = contribution(run, o, index, r, count * 3);
            compare(o, index, (const uint8_t *)data + at, want, count * 3);
            free(want);
        }
        at += count * 3 * element;
    }
    CHECK(at == bytes);
    run->hash[index][rank] = job_hash(data, bytes);
}

static void finish(const struct run *run, struct flight *f, int index, int rank)
{
    const struct operation *o = &f->o;
    size_t bytes = f->count * reference_element(o->dtype);
    if (o->kind == TALLY_ALLGATHER) {
        check_gathered(run, o, f, index, rank);
    } else {
        run->hash[index][rank] = job_hash(f->output, o->kind == TALLY_BARRIER ? 0 : bytes);
        if (run->verify && index % run->layout->ranks == rank && o->kind != TALLY_BARRIER) {
            uint8_t *want = malloc(bytes + 1);
            CHECK(want);
            if (o->kind == TALLY_PUSH_PULL) {
                expect(run, o, index, want);
            } else {
                free(want);
                want = contribution(run, o, index, o->root, f->count);
            }
            compare(o, index, f->output, want, f->count);
            free(want);
        }
        /* Out of place, the input is only read. */
        if (f->input != f->output) {
            uint8_t *before = contribution(run, o, index, rank, f->count);
            CHECK(memcmp(before, f->input, bytes) == 0);
            free(before);
        }
    }
    tally_op_free(f->op);
    if (f->output != f->input)
        free(f->output);
    free(f->input);
}

static void await_batch(tally_comm *c, struct flight *flights, int n, bool queued, uint64_t *s)
{
    if (!queued) {
        for (int i = n - 1; i >= 0; i--) {
            while (job_random(s) % 2 && !tally_op_poll(flights[i].op))
                job_sleep_ms(1);
            CHECK(tally_op_wait(flights[i].op, -1) == 0);
        }
        return;
    }
    int left = 0;
    for (int i = 0; i < n; i++)
        left += !flights[i].ended;
    while (left) {
        struct tally_event e;
        CHECK(tally_comm_next(c, -1, &e) == 0);
        CHECK(e.kind == TALLY_EVENT_OP);
        struct flight *f = e.tag;
        CHECK(f >= flights && f < flights + n && e.op == f->op && !f->ended);
        CHECK(e.status == 0 && tally_op_poll(f->op) && tally_op_wait(f->op, 0) == 0);
        f->ended = true;
        left--;
    }
}

static int work(int rank, void *arg)
{
    const struct run *run = arg;
    tally_comm *c;
    uint64_t s = run->seed + (uint64_t)rank * 977;
    flush_subnormals(rank % 2 == 0);
    CHECK(tally_comm_open(NULL, &c) == 0);
    CHECK(tally_comm_rank(c) == rank && tally_comm_size(c) == run->layout->ranks);
    for (int first = 0; first < run->ops; first += BATCH) {
        struct flight flights[BATCH] = {0};
        int n = run->ops - first < BATCH ? run->ops - first : BATCH, order[BATCH];
        bool queued = first / BATCH % 2;
        for (int i = 0; i < n; i++) {
            flights[i].o = make(run, first + i);
            order[i] = i;
        }
        for (int i = n - 1; i > 0; i--) { /* each rank in an order of its own */
            int j = (int)(job_random(&s) % (unsigned)(i + 1)), t = order[i];
            order[i] = order[j];
            order[j] = t;
        }
        flush_subnormals(rank % 2 == 0);
        for (int i = 0; i < n; i++) {
            if (job_random(&s) % 8 == 0)
                job_sleep_ms((int)(job_random(&s) % 4));
            submit(run, c, &flights[order[i]], first + order[i], rank, &s, queued);
        }
        await_batch(c, flights, n, queued, &s);
        flush_subnormals(false);
        for (int i = 0; i < n; i++)
            finish(run, &flights[i], first + i, rank);
    }
    if (run->expect_drops) {
        char *json;
        CHECK(tally_comm_report(c, 20000, &json) == 0);
        CHECK(strstr(json, "\"slots_dropped\": ")); /* the one who has dropped says so to the test */
        fprintf(stderr, "report %s\n", json);
        free(json);
    }
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

/* --- the jobs ------------------------------------------------------------------------------------ */

static const int two_by_three[] = {0, 0, 0, 1, 1, 1}, four_two_two[] = {0, 0, 0, 0, 1, 1, 2, 2},
                 interleaved[] = {0, 1, 0, 1}, together[] = {0, 0, 0};
/* Machines of three are no nodes of the tree over six ranks (4 + 2); 4 + 2 + 2 are; neighbours must be. */
static const struct layout one = {"1 rank", 1, NULL, 1, 1, NULL, NULL},
                           two = {"2 ranks", 2, NULL, 1, 1, NULL, NULL},
                           three = {"3 ranks", 3, NULL, 1, 1, NULL, NULL},
                           five = {"5 ranks", 5, NULL, 1, 1, NULL, NULL},
                           local = {"3 ranks of one machine", 3, together, 1, 1, NULL, NULL},
                           leaves = {"2 machines x 3", 6, two_by_three, 2, 2, two_by_three, two_by_three},
                           nodes = {"4 + 2 + 2", 8, four_two_two, 1, 3, NULL, four_two_two},
                           mixed = {"0 1 0 1", 4, interleaved, 2, 2, interleaved, interleaved};

static void work_through(struct run *run, int tallyds, const char *const settings[])
{
    struct job j = {.ranks = run->layout->ranks,
                    .machine = run->layout->machine,
                    .tallyds = tallyds,
                    .main = work,
                    .arg = run};
    for (int i = 0; settings && settings[i]; i++)
        j.settings[i] = settings[i];
    memset(run->hash, 0, MOST_OPS * sizeof *run->hash);
    job_start(&j);
    job_finish(&j);
    for (int op = 0; op < run->ops; op++)
        for (int r = 0; r < j.ranks; r++) {
            assert_int_not_equal(run->hash[op][r], 0);
            if (run->hash[op][r] != run->hash[op][0])
                fail_msg("%s: operation %d differs between ranks 0 and %d", run->layout->name, op, r);
        }
    if (run->expect_drops) {
        const char *text = strstr(job_log(&j, 0), "report "), *at = text;
        unsigned long long dropped = 0, d;
        for (; at && (at = strstr(at, "\"slots_dropped\": ")); at++)
            if (sscanf(at, "\"slots_dropped\": %llu", &d) == 1)
                dropped += d;
        if (!dropped)
            fail_msg("nothing was dropped: %.2000s", text ? text : "no report");
    }
    job_clear(&j);
}

/* The same list under each of `variants`; the first one is compared with the reference. */
struct variant {
    int tallyds;
    const char *settings[6];
};

static void compare_variants(const struct layout *layout, uint64_t seed, int ops, const struct variant *v,
                             int count)
{
    if (job_long() > 0)
        seed += 10000 * (uint64_t)job_long();
    struct run run = {
        .layout = layout, .seed = seed, .ops = ops, .hash = job_shared(MOST_OPS * sizeof *run.hash)};
    uint64_t first[MOST_OPS];
    for (int i = 0; i < count; i++) {
        run.verify = i == 0;
        work_through(&run, v[i].tallyds, v[i].settings);
        for (int op = 0; op < ops; op++) {
            if (i == 0)
                first[op] = run.hash[op][0];
            else if (run.hash[op][0] != first[op])
                fail_msg("%s: operation %d gives other bits with variant %d", layout->name, op, i);
        }
    }
}

static int rounds(void)
{
    const char *soak = getenv("SERVICE_SOAK");
    return soak && atoi(soak) > 0 ? atoi(soak) : job_long() == JOB_ALL && !UNDER_SANITIZER ? 3 : 1;
}

static const struct variant variants[] = {
    {1, {0}},
    {0, {"TALLY_PART_BYTES=4096", "TALLY_FRAGMENT_BYTES=4096"}},
    {2, {"TALLY_PART_BYTES=65536", "TALLY_FRAGMENT_BYTES=8192", "TALLY_WINDOW_PARTS=1"}},
    {1, {"TALLY_PART_BYTES=4160", "TALLY_CREDIT_BYTES=4160", "TALLY_WINDOW_PARTS=2", "TALLY_CHECKSUM=1"}},
    {2, {"TALLY_SUM_THREADS=3", "TALLY_PART_BYTES=4M"}},
    {1, {"TALLY_PART_BYTES=4M", "TALLY_CHECKSUM=1"}},
};
enum { VARIANTS = sizeof variants / sizeof *variants };

static void test_two_ranks(void **state)
{
    for (int i = 0; i < rounds(); i++)
        compare_variants(&two, 100 + (uint64_t)i, OPS, variants, VARIANTS);
}

static void test_three_ranks(void **state)
{
    for (int i = 0; i < rounds(); i++)
        compare_variants(&three, 200 + (uint64_t)i, OPS, variants, UNDER_SANITIZER ? 2 : VARIANTS);
}

static void test_one_rank(void **state)
{
    compare_variants(&one, 300, OPS, variants, 2);
}

static void test_five_ranks(void **state)
{
    for (int i = 0; i < rounds(); i++)
        compare_variants(&five, 400 + (uint64_t)i, UNDER_SANITIZER ? 16 : OPS, variants + 2, 1);
}

static void test_ranks_of_one_machine(void **state)
{
    compare_variants(&local, 500, OPS, variants, 2);
}

static void test_machines_as_leaves(void **state)
{
    for (int i = 0; i < rounds(); i++) {
        compare_variants(&leaves, 600 + (uint64_t)i, UNDER_SANITIZER ? 24 : OPS, variants, 1);
        compare_variants(&mixed, 700 + (uint64_t)i, UNDER_SANITIZER ? 24 : OPS, variants, 1);
    }
}

static void test_machines_as_nodes(void **state)
{
    for (int i = 0; i < rounds(); i++)
        compare_variants(&nodes, 800 + (uint64_t)i, UNDER_SANITIZER ? 16 : OPS, variants + 1, 1);
}

static void test_ten_million(void **state)
{
    static const char *const threads[] = {"TALLY_SUM_THREADS=2", NULL};
    struct run run = {.layout = &two,
                      .seed = 9,
                      .ops = 3,
                      .verify = true,
                      .huge = true,
                      .hash = job_shared(MOST_OPS * sizeof *run.hash)};
    work_through(&run, 2, NULL);
    work_through(&run, 1, threads);
}

/* Too little memory at the services: they drop the youngest slots and ask again, and the sums stay right. */
static void test_little_memory(void **state)
{
    static const char *const tight[] = {"TALLY_PART_BYTES=4096", "TALLY_MEMORY=1K", "TALLY_WINDOW_PARTS=64",
                                        "TALLY_CREDIT_BYTES=1M", NULL};
    for (int i = 0; i < 10 * rounds(); i++) { /* what it looks for is rare */
        struct run run = {.layout = &three,
                          .seed = 1000 + (uint64_t)i,
                          .ops = OPS,
                          .verify = true,
                          .expect_drops = true,
                          .hash = job_shared(MOST_OPS * sizeof *run.hash)};
        work_through(&run, 1, tight);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_rank),
        cmocka_unit_test(test_two_ranks),
        cmocka_unit_test(test_three_ranks),
        cmocka_unit_test(test_five_ranks),
        cmocka_unit_test(test_ranks_of_one_machine),
        cmocka_unit_test(test_machines_as_leaves),
        cmocka_unit_test(test_machines_as_nodes),
        cmocka_unit_test(test_ten_million),
        cmocka_unit_test(test_little_memory),
    };
    return cmocka_run_group_tests_name("sums", tests, NULL, NULL);
}
