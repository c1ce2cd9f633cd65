/* joining_test.c - tally_join(): ranks without input count as zeros in all that the others sum, whatever the layout; all
 * else is refused; and once all have joined everything begins anew. */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>

#include "job.h"
#include "reference.h"

#include <cmocka.h>

enum { MOST = 120000, ROUNDS = 6 };

struct board {
    atomic_int stage;
    int ranks, tallyds;
    const int *machine;
    int groups;
    bool in_pool;
};

static tally_comm *open_comm(void)
{
    tally_comm *c;
    CHECK(tally_comm_open(NULL, &c) == 0);
    return c;
}

static void ends(tally_op *op, int expected)
{
    int err = tally_op_wait(op, -1);
    if (err != expected)
        fprintf(stderr, "%d, not %d: %s\n", err, expected, tally_op_error(op));
    CHECK(err == expected);
    tally_op_free(op);
}

static int join_all(tally_comm *c)
{
    tally_op *op;
    CHECK(tally_join(c, NULL, &op) == 0);
    int err = tally_op_wait(op, -1);
    if (err)
        fprintf(stderr, "join: %s\n", tally_op_error(op));
    CHECK(err == 0);
    int last = tally_op_source(op);
    tally_op_free(op);
    return last;
}

/* --- the bits ------------------------------------------------------------------------------------ */

struct kind {
    int dtype, reduction;
    size_t count, bytes;
    struct tally_options options;
};

static struct kind kind_of(int i)
{
    static const size_t counts[] = {1, 3000, 40000, MOST, 7, 16384};
    struct kind k = {.dtype = i % 10,
                     .reduction = (i * 7 + i / 10) % 8,
                     .count = counts[(i * 5 + i / 8) % 6]};
    if (k.reduction >= TALLY_BAND)
        k.reduction = i % 2 ? TALLY_AVERAGE : TALLY_SUM;
    if (k.dtype == TALLY_BOOL && k.reduction == TALLY_AVERAGE)
        k.reduction = TALLY_SUM;
    k.bytes = k.count * tally_dtype_size((enum tally_dtype)k.dtype);
    k.options = (struct tally_options){.size = sizeof k.options, .priority = i % 3};
    if (k.dtype != TALLY_BOOL && k.reduction < TALLY_BAND) {
        k.options.prescale = i % 4 ? 0 : 0.5;
        k.options.postscale = i % 3 ? 0 : 3;
    }
    return k;
}

/* What rank `rank` brings to operation i of a round; random bits, of which some are NaN, and zeros of both signs. */
static void fill(uint8_t *to, const struct kind *k, int rank, int i)
{
    uint64_t seed = (uint64_t)(i * 1000 + rank) + 1;
    for (size_t at = 0; at < k->bytes; at += 8) {
        uint64_t x = job_random(&seed);
        if (x % 5 == 0)
            x = 0x8000000080000000ull;
        memcpy(to + at, &x, k->bytes - at < 8 ? k->bytes - at : 8);
    }
    for (size_t at = 0; k->dtype == TALLY_BOOL && at < k->bytes; at++)
        to[at] &= 1;
}

static void expect(const struct board *b, const struct kind *k, int i, const int *steps, int step,
                   uint8_t *out)
{
    const void *inputs[JOB_MOST_RANKS];
    int each[JOB_MOST_RANKS];
    for (int rank = 0; rank < b->ranks; rank++) {
        uint8_t *in = calloc(1, k->bytes + 8);
        CHECK(in);
        if (step < steps[rank])
            fill(in, k, rank, i);
        inputs[rank] = in;
        each[rank] = b->machine ? b->machine[rank] : rank;
    }
    bool hops = (k->dtype == TALLY_FLOAT16 || k->dtype == TALLY_BFLOAT16) && b->machine && b->groups > 1;
    struct reference r = {.dtype = k->dtype,
                          .reduction = k->reduction,
                          .ranks = b->ranks,
                          .prescale = k->options.prescale != 0 ? k->options.prescale : 1,
                          .postscale = k->options.postscale != 0 ? k->options.postscale : 1,
                          .groups = hops ? b->groups : 1,
                          .group = hops ? each : NULL};
    reference_reduce(&r, inputs, out, k->count);
    for (int rank = 0; rank < b->ranks; rank++)
        free((void *)inputs[rank]);
}

/* Rank i of the n-th epoch does so many steps, each of a few operations. */
static int steps_of(int epoch, int rank, int ranks)
{
    return epoch == 2 ? ROUNDS : (rank * 5 + epoch * 3) % (ranks + 1) % ROUNDS;
}

static int train(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = open_comm();
    enum { EACH = 4 };
    for (int epoch = 0; epoch < 3; epoch++) {
        int steps[JOB_MOST_RANKS];
        for (int i = 0; i < b->ranks; i++)
            steps[i] = steps_of(epoch, i, b->ranks);
        for (int step = 0; step < steps[rank]; step++) {
            void *in[EACH];
            tally_op *op[EACH];
            for (int n = 0; n < EACH; n++) {
                int i = step * EACH + n + epoch * 100;
                struct kind k = kind_of(i);
                char name[16];
                snprintf(name, sizeof name, "t%d", n);
                if (b->in_pool)
                    CHECK(tally_alloc(c, k.bytes, &in[n]) == 0);
                else
                    CHECK((in[n] = malloc(k.bytes + 8)));
                fill(in[n], &k, rank, i);
                CHECK(
                    tally_push_pull(c, n % 2 ? name : NULL, in[n], in[n], k.count, (enum tally_dtype)k.dtype,
                                    (enum tally_reduction)k.reduction, &k.options, &op[n]) == 0);
            }
            for (int n = 0; n < EACH; n++) {
                int i = step * EACH + n + epoch * 100;
                struct kind k = kind_of(i);
                uint8_t *want = malloc(k.bytes + 8);
                ends(op[n], 0);
                expect(b, &k, i, steps, step, want);
                if (memcmp(want, in[n], k.bytes) != 0) {
                    fprintf(stderr, "epoch %d, step %d, operation %d of type %d, reduction %d, count %zu\n",
                            epoch, step, i, k.dtype, k.reduction, k.count);
                    CHECK(!"another sum");
                }
                free(want);
                if (b->in_pool)
                    CHECK(tally_free(in[n]) == 0);
                else
                    free(in[n]);
            }
            tally_op *meet;
            CHECK(tally_barrier(c, NULL, NULL, &meet) == 0);
            ends(meet, 0);
        }
        int last = join_all(c), most = 0;
        for (int i = 0; i < b->ranks; i++)
            most = steps[i] > most ? steps[i] : most;
        CHECK(steps[last] == most);
    }
    CHECK(tally_comm_status(c, NULL) == 0);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void run(const char *layout, int tallyds, bool in_pool)
{
    int machine[JOB_MOST_RANKS], groups = 0;
    bool own = false;
    struct board *b = job_shared(sizeof *b);
    b->ranks = (int)strlen(layout);
    for (int i = 0; i < b->ranks; i++) {
        machine[i] = layout[i] - 'a';
        groups = machine[i] >= groups ? machine[i] + 1 : groups;
    }
    own = groups == b->ranks;
    int *shared = job_shared(sizeof machine);
    memcpy(shared, machine, sizeof machine);
    b->machine = own ? NULL : shared;
    b->groups = groups;
    b->in_pool = in_pool;
    struct job j = {.ranks = b->ranks,
                    .tallyds = tallyds,
                    .machine = own ? NULL : machine,
                    .main = train,
                    .arg = b,
                    .settings = {"TALLY_PART_BYTES=64K"}};
    job_start(&j);
    job_finish(&j);
    job_clear(&j);
}

static void test_bits_of_machines(void **state)
{
    static const char *const layouts[] = {"a", "ab", "abc", "abcde"};
    for (int i = 0; i < 4; i++)
        for (int tallyds = 0; tallyds < 3; tallyds += 2)
            run(layouts[i], tallyds, false);
}

static void test_bits_in_shared_memory(void **state)
{
    for (int pool = 0; pool < 2; pool++) {
        run("aa", 0, pool);
        run("aaaa", 0, pool);
        run("aaaaa", 0, pool);
    }
}

static void test_bits_of_teams(void **state)
{
    for (int pool = 0; pool < 2; pool++)
        for (int tallyds = 0; tallyds < 2; tallyds++) {
            run("aabb", tallyds, pool);
            run("aaaabbbb", tallyds, pool);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_bits_of_machines),
                                       cmocka_unit_test(test_bits_in_shared_memory),
                                       cmocka_unit_test(test_bits_of_teams)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
