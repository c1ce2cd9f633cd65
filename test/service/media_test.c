/* media_test.c - services over the media that tests have: sums of several rounds are what they are over any medium, and
 * what a medium completes late is forgotten in time. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "job.h"
#include "raw.h"
#include "reference.h"
#include "sum/internal.h"
#include "test/media/pair.h"
#include "test/media/testing.h"
#include "transport/tcp/tcp.h"

#include <cmocka.h>

static int end(void **state)
{
    raw_end();
    return 0;
}

/* Ordinary values of all sizes. */
static void fill(float *x, size_t count, uint64_t seed)
{
    for (size_t i = 0; i < count; i++)
        x[i] = ((float)(job_random(&seed) % 2000001) - 1e6f) * (job_random(&seed) % 2 ? 1e-6f : 3.0f);
}

/* What the ranks' values sum up to.  inputs: `ranks` arrays of `count`. */
static void expect(const float *const inputs[], int ranks, float *out, size_t count)
{
    const struct reference r = {.dtype = TALLY_FLOAT32,
                                .reduction = TALLY_SUM,
                                .ranks = ranks,
                                .prescale = 1,
                                .postscale = 1,
                                .groups = 1};
    reference_reduce(&r, (const void *const *)inputs, out, count);
}

static uint64_t rounds_open(void)
{
    struct tly_service_facts facts;
    tly_loop_lock(&raw.loop);
    tly_service_facts(raw.service, &facts);
    tly_loop_unlock(&raw.loop);
    return facts.rounds_open;
}

/* --- a medium that completes nothing until it is told to ------------------------------------------ */

static bool held;
static const struct tly_pair_conduct conduct = {.moved = UINT32_MAX, .held = &held};
static struct tly_medium holding;

static int dial(const struct tly_dial *d, struct tly_channel **out)
{
    return tly_pair_dial(&holding, &conduct, d, out);
}

static int listen_at(const struct tly_door_config *c, struct tly_door **out)
{
    return tly_pair_listen(&holding, c, out);
}

static int begin_holding(void **state)
{
    holding = tly_late;
    holding.dial = dial;
    holding.listen = listen_at;
    held = false;
    return raw_begin_over(&holding, 2, NULL);
}

/* A rank says that it has its answer while the service's medium has not completed that.  The round ends with the
 * completion: no frame need follow. */
static void test_confirmed_before_completed(void **state)
{
    static const float data[RAW_PART / 4];
    held = true;
    for (int rank = 0; rank < 2; rank++)
        raw_post(rank, raw_push(1, RAW_PART), data, sizeof data);
    for (int rank = 0; rank < 2; rank++)
        raw_until(&raw.rank[rank].results, 1);
    for (int rank = 0; rank < 2; rank++)
        raw_settle(rank); /* the question has told of the result */
    assert_int_equal(rounds_open(), 1);
    held = false;
    tly_loop_turn(&raw.loop, 0); /* completes all */
    assert_int_equal(rounds_open(), 0);
}

/* --- sums over each medium ------------------------------------------------------------------------ */

enum { RANKS = 3, ROUNDS = 24, PIECE = 16 << 10 };

/* A push in pieces. */
static void post_pieces(int rank, uint64_t key, const float *data, uint32_t length)
{
    struct tly_frame f = raw_push(key, length);
    do {
        uint32_t n = length - f.offset < PIECE ? length - f.offset : PIECE;
        f.flags = f.offset + n == length ? TLY_LAST : 0;
        raw_post(rank, f, (const uint8_t *)data + f.offset, n);
        f.offset += n;
    } while (f.offset < length);
}

/* Payloads of more than `moved` bytes stay where they are. */
static void sum_over(const struct tly_medium *medium, const char *threads, uint64_t seed, uint32_t moved)
{
    static float input[RANKS][RAW_PART / 4], want[RAW_PART / 4];
    const float *const inputs[RANKS] = {input[0], input[1], input[2]};
    const char *const settings[] = {threads, "TALLY_FRAGMENT_BYTES=8K", NULL};
    raw_begin_over(medium, RANKS, settings);
    for (int rank = RAW_COME; rank < RANKS; rank++)
        raw_enter(rank);
    for (int round = 1; round <= ROUNDS; round++) {
        size_t count = 1 + job_random(&seed) % (round % 3 ? 300 : RAW_PART / 4);
        for (int rank = 0; rank < RANKS; rank++) {
            fill(input[rank], count, seed + (uint64_t)rank);
            post_pieces(rank, (uint64_t)round, input[rank], 4 * (uint32_t)count);
        }
        expect(inputs, RANKS, want, count);
        for (int rank = 0; rank < RANKS; rank++) {
            raw_until(&raw.rank[rank].results, round);
            if (4 * count <= moved)
                assert_memory_equal(raw.rank[rank].result, want, 4 * count);
        }
    }
    for (int i = 0; rounds_open(); i++) {
        assert_true(i < 20000);
        tly_loop_turn(&raw.loop, 2);
    }
    raw_end();
}

static void test_sums(void **state)
{
    static const struct tly_faults delays = {.delay = 200};
    static const char *const threads[] = {"TALLY_SUM_THREADS=0", "TALLY_SUM_THREADS=2"};
    for (uint64_t i = 0; i < 6; i++) {
        tly_pair_seed((uint32_t)i);
        sum_over(&tly_late, threads[i % 2], i, UINT32_MAX);
        sum_over(&tly_null, threads[i % 2], i, 1024);
        sum_over(tly_fault_wrap(&tly_late, &delays, (uint32_t)i), threads[i % 2], i, UINT32_MAX);
        assert_true(tly_fault_count() > 0);
    }
}

/* --- whole jobs over a medium that loses, doubles and alters packets ------------------------------- */

enum { STEPS = 20, TENSORS = 3, MOST_COUNT = 60000 };

static struct {
    atomic_int happened;
} * shared;

static bool never(const struct tly_params *params)
{
    return false;
}

/* Connections to services break and are made again; those to the coordinator, which break only when a process dies, take
 * the plain medium.  No packet is cut short: over a stream that is only found when as many bytes have followed. */
static void use_faults(uint32_t seed)
{
    static const struct tly_faults faults = {
        .drop = 2,
        .duplicate = 2,
        .flip = 2,
        .spared = 16, /* the handshake */
        .most = 4,
        .apart = true};
    static struct tly_medium plain;
    static const struct tly_medium *media[3];
    plain = tly_tcp;
    plain.allowed = never; /* between ranks and services, which say what they may use */
    media[0] = tly_fault_wrap(&tly_tcp, &faults, seed);
    media[1] = &plain;
    tly_media = media;
}

static int work(int rank, void *arg)
{
    static float input[TENSORS][MOST_COUNT], output[TENSORS][MOST_COUNT], other[RANKS][MOST_COUNT],
        want[MOST_COUNT];
    const float *const inputs[RANKS] = {other[0], other[1], other[2]};
    uint64_t seed = *(const uint64_t *)arg;
    tally_comm *c;
    use_faults((uint32_t)(seed * RANKS) + (uint32_t)rank);
    CHECK(tally_comm_open(NULL, &c) == 0);
    for (uint64_t step = 0; step < STEPS; step++) {
        tally_op *op[TENSORS];
        size_t count[TENSORS];
        for (uint64_t i = 0; i < TENSORS; i++) {
            uint64_t s = seed * 1000 + step * TENSORS + i;
            char name[8] = {'t', (char)('0' + i)};
            count[i] = 1 + job_random(&s) % MOST_COUNT;
            fill(input[i], count[i], s + (uint64_t)rank);
            CHECK(tally_push_pull(c, name, input[i], output[i], count[i], TALLY_FLOAT32, TALLY_SUM, NULL,
                                  &op[i]) == 0);
        }
        for (uint64_t i = 0; i < TENSORS; i++) {
            uint64_t s = seed * 1000 + step * TENSORS + i;
            (void)job_random(&s);
            CHECK(tally_op_wait(op[i], -1) == 0);
            for (uint64_t r = 0; r < RANKS; r++)
                fill(other[r], count[i], s + r);
            expect(inputs, RANKS, want, count[i]);
            CHECK(memcmp(output[i], want, 4 * count[i]) == 0);
            tally_op_free(op[i]);
        }
    }
    CHECK(tally_comm_close(c) == 0);
    atomic_fetch_add(&shared->happened, (int)tly_fault_count());
    return 0;
}

static void test_whole_jobs(void **state)
{
    int broken = 0;
    shared = job_shared(sizeof *shared);
    for (uint64_t seed = 1; seed <= 4; seed++) {
        struct job j = {.ranks = RANKS,
                        .settings = {"TALLY_CHECKSUM=1", "TALLY_PART_BYTES=64K", "TALLY_FRAGMENT_BYTES=8K"},
                        .main = work,
                        .arg = &seed};
        job_start(&j);
        job_finish(&j);
        for (int i = 0; i < RANKS; i++)
            broken += strstr(job_log(&j, i), "closing the connection") != NULL;
        job_clear(&j);
    }
    assert_true(atomic_load(&shared->happened) > 0);
    assert_true(broken > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_whole_jobs),
        cmocka_unit_test_setup_teardown(test_confirmed_before_completed, begin_holding, end),
    };
    return cmocka_run_group_tests_name("media", tests, NULL, NULL);
}
