/* shared_moves_test.c - shared tensors whose services die, leave, come and get other shares.  Parts go to other services, every
 * addition counts once, and what makes no sense is refused. */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>

#include "job.h"
#include "raw.h"
#include "shared.h"
#include "transport/transport.h"
#include "wire/frame.h"
#include "wire/kept.h"
#include "wire/pack.h"

#include <cmocka.h>

struct board {
    atomic_int stage, services; /* additions that have ended; as rank 0 sees it */
    atomic_bool enough;         /* stop, whatever `steps` says */
    int count, steps, losses, idle;
    uint32_t staleness;
    int made[JOB_MOST_RANKS]; /* additions of each rank */
};

/* All additions are in the values. */
static void check(const struct board *b, const int64_t *values, int ranks)
{
    for (int i = 0; i < b->count; i++) {
        int64_t wanted = i;
        for (int rank = 0; rank < ranks; rank++)
            wanted += b->made[rank] * shared_difference(rank, i);
        CHECK(values[i] == wanted);
    }
}

/* Add until all steps are made, whatever happens to services meanwhile. */
static int run_adding(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = job_open();
    int64_t *first = shared_first(b->count), *mine = shared_differences(rank, b->count), one = 1;
    uint64_t random = (uint64_t)rank * 131 + (uint64_t)b->steps;
    int lost = 0;
    shared_create(c, "w", first, (size_t)b->count, TALLY_INT64, b->staleness);
    shared_create(c, "small", first, 1, TALLY_INT64, 0);
    for (int step = 1; step <= b->steps && !atomic_load(&b->enough); step++) {
        tally_op *op;
        CHECK(tally_shared_add(c, "w", mine, NULL, &op) == 0);
        if (lost < b->losses && job_random(&random) % 4 == 0) {
            lost++;
            shared_lose_a_connection(&random);
        }
        const int64_t *now = shared_values_of(op);
        for (int i = 0; i < b->count; i += b->count / 50 + 1)
            CHECK(now[i] >= i + step * shared_difference(rank, i));
        shared_add(c, "small", &one);
        b->made[rank] = step;
        if (rank == 0)
            atomic_store(&b->services, tally_comm_service_count(c));
        atomic_fetch_add(&b->stage, 1);
        if (b->idle && step == b->steps / 2 &&
            rank % 2) /* all that happens until then finds this rank between operations */
            job_await(&b->stage, b->idle);
    }
    job_barrier(c);
    check(b, shared_read(c, "w"), tally_comm_size(c));
    int64_t all = 0;
    for (int i = 0; i < tally_comm_size(c); i++)
        all += b->made[i];
    CHECK(*shared_read(c, "small") == all);
    job_barrier(c);
    CHECK(tally_comm_close(c) == 0);
    free(first);
    free(mine);
    return 0;
}

static struct board *board_of(int count, int steps, uint32_t staleness)
{
    struct board *b = job_shared(sizeof *b);
    *b = (struct board){.count = count, .steps = steps, .staleness = staleness};
    return b;
}

static void end_ranks(struct job *j)
{
    for (int rank = 0; rank < j->ranks; rank++)
        assert_int_equal(job_wait_rank(j, rank), 0);
    job_clear(j);
}

static void await_services(struct board *b, int services)
{
    while (atomic_load(&b->services) != services)
        job_sleep_ms(2);
}

/* --- death --------------------------------------------------------------------------------------- */

/* Each of two tallyd dies, after so many additions: the second one may have parts of the first. */
static void test_death(void **state)
{
    static const int at[][2] = {{3, 4}, {10, 60}, {30, 31}};
    for (size_t i = 0; i < sizeof at / sizeof at[0]; i++) {
        struct board *b = board_of(60000, 40, i == 1 ? 2 : 0);
        struct job j = {
            .ranks = 3, .tallyds = 2, .main = run_adding, .arg = b, .settings = {"TALLY_PART_BYTES=32K"}};
        job_start(&j);
        for (int t = 0; t < 2; t++) {
            job_await(&b->stage, at[i][t]);
            kill(j.tallyd_pid[(i + (size_t)t) % 2], SIGKILL);
        }
        end_ranks(&j);
    }
}

/* Ranks 1 and 3 have nothing in flight while services die: they hold values all the same, and go on afterwards. */
static void test_death_between_operations(void **state)
{
    enum { STEPS = 20, KILL_AT = 4 * STEPS / 2 };
    struct board *b = board_of(50000, STEPS, 0);
    b->idle = 2 * STEPS / 2 + 2 * STEPS; /* rank 0 and 2 have made all steps */
    struct job j = {
        .ranks = 4, .tallyds = 2, .main = run_adding, .arg = b, .settings = {"TALLY_PART_BYTES=32K"}};
    job_start(&j);
    job_await(&b->stage, KILL_AT);
    kill(j.tallyd_pid[0], SIGKILL);
    job_await(&b->stage, b->idle);
    kill(j.tallyd_pid[1], SIGKILL);
    end_ranks(&j);
}

/* One that stands still is put out, and takes over its share anew when it comes again. */
static void test_stopped(void **state)
{
    struct board *b = board_of(40000, 1 << 20, 0);
    struct job j = {.ranks = 2,
                    .tallyds = 1,
                    .tallyd_stays = true,
                    .main = run_adding,
                    .arg = b,
                    .settings = {"TALLY_PART_BYTES=32K"}};
    job_start(&j);
    job_await(&b->stage, 20);
    kill(j.tallyd_pid[0], SIGSTOP);
    await_services(b, 2);
    kill(j.tallyd_pid[0], SIGCONT);
    await_services(b, 3);
    job_sleep_ms(50);
    atomic_store(&b->enough, true);
    end_ranks(&j);
}

/* --- leaving and coming -------------------------------------------------------------------------- */

static void test_drain(void **state)
{
    for (int staleness = 0; staleness < 3; staleness += 2) {
        struct board *b = board_of(60000, 60, (uint32_t)staleness);
        struct job j = {
            .ranks = 3, .tallyds = 2, .main = run_adding, .arg = b, .settings = {"TALLY_PART_BYTES=32K"}};
        job_start(&j);
        job_await(&b->stage, 20);
        kill(j.tallyd_pid[1], SIGTERM);
        assert_int_equal(job_wait_tallyd(&j, 1), 0);
        job_await(&b->stage, 100);
        kill(j.tallyd_pid[0], SIGTERM);
        end_ranks(&j);
    }
}

/* A tallyd that comes takes over its share.  It has additions in flight when it dies or leaves, and others take that over. */
static void test_come_and_go(void **state)
{
    struct board *b = board_of(60000, 1 << 20, 0);
    b->losses = 2;
    struct job j = {
        .ranks = 3, .main = run_adding, .arg = b, .settings = {"TALLY_PART_BYTES=32K", "TALLY_LOG=debug"}};
    job_start(&j);
    for (int i = 0; i < 3; i++) {
        await_services(b, 3);
        j.tallyds = i + 1;
        job_start_tallyd(&j, i);
        await_services(b, 4);
        job_sleep_ms(50);
        kill(j.tallyd_pid[i], i == 1 ? SIGTERM : SIGKILL);
    }
    await_services(b, 3);
    atomic_store(&b->enough, true);
    for (int rank = 0; rank < j.ranks; rank++)
        assert_int_equal(job_wait_rank(&j, rank), 0);
    const char *log = job_log(&j, 0); /* three have come, and three have gone */
    for (int i = 0; i < 6; i++) {
        log = strstr(log, "bytes of shared tensors go to other services");
        assert_non_null(log);
        log++;
    }
    job_clear(&j);
}

/* --- create -------------------------------------------------------------------------------------- */

enum { TENSORS = 60, LENGTH = 9000 };

/* Create tensors one after another, ranks at different times, and add to each as soon as it is there. */
static int run_creating(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = job_open();
    int64_t *first = shared_first(LENGTH), *mine = shared_differences(rank, LENGTH);
    uint64_t random = (uint64_t)(rank + 1) * 17;
    char name[16];
    for (int i = 0; i < TENSORS; i++) {
        snprintf(name, sizeof name, "w%d", i);
        if (job_random(&random) % 3 == 0)
            job_sleep_ms((int)(job_random(&random) % 12));
        shared_create(c, name, first, LENGTH, TALLY_INT64, 0);
        for (int step = 0; step <= i % 3; step++)
            shared_add(c, name, mine);
        if (rank == 0)
            atomic_store(&b->services, tally_comm_service_count(c));
        atomic_fetch_add(&b->stage, 1);
    }
    job_barrier(c);
    for (int i = 0; i < TENSORS; i++) {
        snprintf(name, sizeof name, "w%d", i);
        shared_check(shared_read(c, name), tally_comm_size(c), LENGTH, i % 3 + 1);
    }
    job_barrier(c);
    CHECK(tally_comm_close(c) == 0);
    free(first);
    free(mine);
    return 0;
}

/* Services come and go while creates are in flight on some ranks, have ended on others, and have not begun on others. */
static void test_creating(void **state)
{
    for (int seed = 0; seed < 4; seed++) {
        struct board *b = board_of(0, 0, 0);
        uint64_t random = (uint64_t)seed + 3;
        struct job j = {
            .ranks = 3, .tallyds = 2, .main = run_creating, .arg = b, .settings = {"TALLY_PART_BYTES=16K"}};
        job_start(&j);
        for (int i = 0; i < 4; i++) {
            job_await(&b->stage, (i + 1) * 35 + (int)(job_random(&random) % 15));
            if (i == 1)
                job_start_tallyd(&j, j.tallyds++);
            else
                kill(j.tallyd_pid[i == 3 ? 2 : i / 2], (seed + i) % 3 ? SIGKILL : SIGTERM);
        }
        end_ranks(&j);
    }
}

/* Another rank creates it long after its first rank, and a service of that split has died meanwhile. */
static int run_late(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = job_open();
    int64_t *first = shared_first(LENGTH), *mine = shared_differences(rank, LENGTH);
    int services = tally_comm_service_count(c);
    tally_op *op;
    if (rank == 2) {
        job_await(&b->stage, 1);
        while (tally_comm_service_count(c) == services)
            job_sleep_ms(2);
    }
    CHECK(tally_shared_create(c, "w", first, LENGTH, TALLY_INT64, 0, NULL, &op) == 0);
    if (rank == 0)
        atomic_store(&b->stage, 1);
    job_expect(op, 0);
    shared_add(c, "w", mine);
    atomic_fetch_add(&b->services, 1);
    job_await(&b->services, 3);
    atomic_fetch_add(&b->stage, rank == 0); /* now the other tallyd dies */
    while (tally_comm_service_count(c) != 3)
        job_sleep_ms(2);
    shared_add(c, "w", mine);
    job_barrier(c);
    shared_check(shared_read(c, "w"), tally_comm_size(c), LENGTH, 2);
    job_barrier(c);
    CHECK(tally_comm_close(c) == 0);
    free(first);
    free(mine);
    return 0;
}

static void test_late_create(void **state)
{
    struct board *b = board_of(0, 0, 0);
    struct job j = {
        .ranks = 3, .tallyds = 2, .main = run_late, .arg = b, .settings = {"TALLY_PART_BYTES=16K"}};
    job_start(&j);
    for (int t = 0; t < 2; t++) {
        job_await(&b->stage, 1 + t);
        job_sleep_ms(50);
        kill(j.tallyd_pid[t], SIGKILL);
    }
    end_ranks(&j);
}

/* --- memory -------------------------------------------------------------------------------------- */

/* A tallyd with much memory dies, and the ranks' services have none for its parts: the ranks hear how much is missing, and where. */
static int run_short(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = job_open();
    enum { COUNT = 380000 };
    int64_t *x = shared_first(COUNT);
    int err = 0;
    shared_create(c, "w", x, COUNT, TALLY_INT64, 0);
    while (!err) {
        tally_op *op;
        CHECK(tally_shared_add(c, "w", x, NULL, &op) == 0);
        err = tally_op_wait(op, -1);
        if (err) {
            CHECK_HOLDS(tally_op_error(op), "has no memory for a part of");
            CHECK_HOLDS(tally_op_error(op), "that has moved to it: it keeps");
            CHECK_HOLDS(tally_op_error(op), "(TALLY_MEMORY)");
        }
        tally_op_free(op);
        atomic_fetch_add(&b->stage, 1);
    }
    CHECK(err == -ENOMEM);
    job_barrier(c);
    CHECK(tally_comm_close(c) == 0);
    free(x);
    return 0;
}

static void test_short(void **state)
{
    struct board *b = board_of(0, 0, 0);
    struct job j = {.ranks = 2,
                    .tallyds = 1,
                    .main = run_short,
                    .arg = b,
                    .tallyd_options = {"--memory", "64M"},
                    .settings = {"TALLY_PART_BYTES=32K", "TALLY_MEMORY=1M", "TALLY_SPLIT=optimal"}};
    job_kill_tallyd(&j, &b->stage, 20);
}

/* --- chaos --------------------------------------------------------------------------------------- */

/* Services die, leave, come and stand still, connections break, and the sums are exact. */
static void chaos(int seed)
{
    uint64_t random = (uint64_t)seed + 77;
    struct board *b = board_of(40000, 120, seed % 3 ? 0 : 2);
    b->losses = 4;
    struct job j = {.ranks = 4,
                    .tallyds = 2 + seed % 2,
                    .main = run_adding,
                    .arg = b,
                    .settings = {"TALLY_PART_BYTES=16K", seed % 2 ? "TALLY_CHECKSUM=1" : "TALLY_MEMORY=4M"}};
    int tallyds = j.tallyds;
    job_start(&j);
    for (int i = 0; i < 6; i++) {
        job_await(&b->stage, 5 + i * 70 + (int)(job_random(&random) % 20));
        uint64_t what = job_random(&random) % 4;
        int t = (int)(job_random(&random) % (uint64_t)tallyds);
        bool lives = j.tallyd_status[t] == -1 && kill(j.tallyd_pid[t], 0) == 0;
        if (what == 0 && lives) {
            kill(j.tallyd_pid[t], SIGKILL);
        } else if (what == 1 && lives) {
            kill(j.tallyd_pid[t], SIGTERM);
        } else if (what == 2 && tallyds < JOB_MOST_TALLYDS) {
            j.tallyds = ++tallyds;
            job_start_tallyd(&j, tallyds - 1);
        } else {
            pid_t pid = lives && what == 3 ? j.tallyd_pid[t] : j.rank_pid[t % j.ranks];
            kill(pid, SIGSTOP);
            job_sleep_ms(20 + (int)(job_random(&random) % 200));
            kill(pid, SIGCONT);
        }
    }
    end_ranks(&j);
}

static void test_chaos(void **state)
{
    for (int seed = 0; seed < 8; seed++)
        chaos(seed);
}

/* --- frames -------------------------------------------------------------------------------------- */

enum { KEY = 7, BYTES = 1024, RANKS = 3, STATE = TLY_STATE_LEAST + RANKS * TLY_STATE_RANK };

static int raw_set_up(void **state)
{
    int err = raw_begin(RANKS, NULL);
    raw_enter(2);
    return err;
}

static int raw_set_up_small(void **state)
{
    static const char *const settings[] = {"TALLY_MEMORY=1M", NULL};
    int err = raw_begin(RANKS, settings);
    raw_enter(2);
    return err;
}

static int raw_tear_down(void **state)
{
    raw_end();
    return 0;
}

static float raw_data[RAW_PART / sizeof(float)];

/* About the part that has come here in this epoch. */
static struct tly_frame raw_word(int type, uint32_t epoch)
{
    struct tly_frame f = raw_push(KEY, BYTES);
    f.type = (uint8_t)type;
    f.flags = 0;
    f.kind = TLY_KEPT;
    f.op = 0;
    f.epoch = epoch;
    return f;
}

static void have(int rank, uint32_t epoch, uint32_t since, uint64_t count)
{
    uint8_t version[TLY_VERSION_BYTES];
    tly_version_put(version, &(struct tly_version){since, count});
    raw_post(rank, raw_word(TLY_HAVE, epoch), version, since ? sizeof version : 0);
}

static void done(int rank, uint32_t epoch)
{
    raw_post(rank, (struct tly_frame){.type = TLY_DONE, .count = epoch}, NULL, 0);
}

/* The values, all `value`, and their state, in which rank i's last operation has the number last[i]. */
static void give_state(int rank, uint32_t epoch, const uint32_t last[RANKS])
{
    uint8_t at[STATE] = {0};
    struct tly_frame f = raw_word(TLY_HAVE, epoch);
    f.flags = TLY_MARK;
    for (uint32_t i = 0; i < RANKS; i++)
        tly_put32(at + TLY_STATE_LEAST + i * TLY_STATE_RANK, last[i]);
    raw_post(rank, f, at, sizeof at);
}

static void give_values(int rank, uint32_t epoch, float value, uint32_t from, uint32_t to)
{
    struct tly_frame f = raw_word(TLY_FINAL, epoch);
    for (size_t i = 0; i < BYTES / sizeof *raw_data; i++)
        raw_data[i] = value;
    f.offset = from;
    f.flags = to == BYTES ? TLY_LAST : 0;
    raw_post(rank, f, raw_data, to - from);
}

static void give(int rank, uint32_t epoch, float value, const uint32_t last[RANKS])
{
    give_state(rank, epoch, last);
    give_values(rank, epoch, value, 0, BYTES / 2);
    give_values(rank, epoch, value, BYTES / 2, BYTES);
}

static const uint32_t none[RANKS] = {0};

static struct tly_frame raw_operation(uint8_t kind, uint32_t rank, uint32_t round, uint32_t epoch)
{
    struct tly_frame f = raw_push(KEY, BYTES);
    f.kind = kind;
    f.op = 0;
    f.round = round;
    f.epoch = epoch;
    f.group = tly_pair(rank, rank);
    f.root = rank;
    if (kind == TALLY_SHARED_READ)
        f.flags = TLY_REQUEST;
    return f;
}

static void push(int rank, uint32_t round, uint32_t epoch, float value)
{
    for (size_t i = 0; i < BYTES / sizeof *raw_data; i++)
        raw_data[i] = value;
    raw_post(rank, raw_operation(TALLY_SHARED_ADD, (uint32_t)rank, round, epoch), raw_data, BYTES);
}

static void read_part(int rank, uint32_t round, uint32_t epoch)
{
    raw_post(rank, raw_operation(TALLY_SHARED_READ, (uint32_t)rank, round, epoch), NULL, 0);
}

static void expect(int rank, int results, float value)
{
    float got[BYTES / sizeof(float)];
    raw_until(&raw.rank[rank].results, results);
    memcpy(got, raw.rank[rank].result, sizeof got);
    for (size_t i = 0; i < BYTES / sizeof *got; i++)
        assert_float_equal(got[i], value, 0);
}

static void settle_all(void)
{
    for (int rank = 0; rank < RANKS; rank++)
        if (raw.rank[rank].link && !raw.rank[rank].closed)
            raw_settle(rank);
}

/* The part comes here in epoch 5, and rank `rank` holds the newest values. */
static void arrive(int rank, float value, const uint32_t last[RANKS])
{
    for (int i = 0; i < RANKS; i++) {
        have(i, 5, 2, i == rank ? 9 : 4);
        done(i, 5);
    }
    raw_until(&raw.rank[rank].finals, 1);
    give(rank, 5, value, last);
}

/* Nobody is asked before all have said what they hold.  Then the lowest holder of the highest version is. */
static void test_holder(void **state)
{
    have(0, 5, 2, 3);
    done(0, 5);
    have(1, 5, 3, 1);
    done(1, 5);
    have(2, 5, 3, 1);
    settle_all();
    assert_int_equal(raw.rank[0].finals + raw.rank[1].finals + raw.rank[2].finals, 0);
    done(2, 4); /* of an older epoch */
    settle_all();
    assert_int_equal(raw.rank[0].finals + raw.rank[1].finals + raw.rank[2].finals, 0);
    done(2, 5);
    raw_until(&raw.rank[1].finals, 1);
    give(1, 5, 6, none);
    read_part(0, 1, 5);
    expect(0, 1, 6);
    settle_all();
    assert_int_equal(raw.rank[0].finals + raw.rank[1].finals + raw.rank[2].finals, 1);
}

/* Pushes wait for the values, and numbers say which of them these have. */
static void test_pending(void **state)
{
    static const uint32_t last[RANKS] = {4, 7, 0};
    have(0, 5, 2, 9);
    done(0, 5);
    push(0, 4, 5, 1); /* the values have it */
    have(1, 5, 2, 9);
    done(1, 5);
    push(1, 8, 5, 10);
    have(2, 5, 2, 9);
    done(2, 5);
    read_part(2, 1, 5);
    raw_until(&raw.rank[0].finals, 1);
    settle_all();
    assert_int_equal(raw.rank[0].results + raw.rank[1].results + raw.rank[2].results, 0);
    give(0, 5, 100, last);
    expect(1, 1, 110);
    raw_until(&raw.rank[0].results, 1);
    raw_until(&raw.rank[2].results, 1);
    read_part(2, 2, 5);
    expect(2, 2, 110);
}

/* The part comes here again before it has come: what ranks have said and sent before is void. */
static void test_moves_twice(void **state)
{
    arrive(0, 3, none);
    push(1, 1, 5, 1);
    expect(1, 1, 4);
    raw_settle(1);
    for (int i = 0; i < RANKS; i++) {
        have(i, 7, 5, 0);
        done(i, 7);
    }
    raw_until(&raw.rank[0].finals, 2);
    give_state(0, 7, none);
    give_values(0, 7, 50, 0, BYTES / 2);
    for (int i = 0; i < RANKS; i++) {
        have(i, 9, 5, i == 2);
        done(i, 9);
    }
    give_values(0, 7, 50, BYTES / 2, BYTES); /* of epoch 7 */
    raw_until(&raw.rank[2].finals, 1);
    push(1, 1, 9, 1);
    give(2, 9, 8, none);
    expect(1, 2, 9);
    have(0, 7, 5, 0); /* it was under way */
    push(2, 1, 7, 1);
    settle_all();
    read_part(0, 1, 9);
    expect(0, 1, 9);
    assert_int_equal(raw.rank[2].results, 0);
    assert_int_equal(raw.rank[0].closed + raw.rank[1].closed + raw.rank[2].closed, 0);
}

/* The giver's connection breaks: it is asked again over the next one, from the beginning. */
static void test_giver_breaks(void **state)
{
    for (int i = 0; i < RANKS; i++) {
        have(i, 5, 2, i == 1);
        done(i, 5);
    }
    raw_until(&raw.rank[1].finals, 1);
    give_state(1, 5, none);
    give_values(1, 5, 9, 0, BYTES / 2);
    raw_settle(1);
    raw_break(1);
    raw_enter(1);
    raw_settle(1);
    assert_int_equal(raw.rank[1].finals + raw.rank[0].finals, 0); /* of the new connection */
    have(1, 5, 2, 1);
    done(1, 5);
    raw_until(&raw.rank[1].finals, 1);
    give(1, 5, 8, none);
    read_part(0, 1, 5);
    expect(0, 1, 8);
}

/* The giver leaves the job: another one gives what it holds. */
static void test_giver_leaves(void **state)
{
    for (int i = 0; i < RANKS; i++) {
        have(i, 5, 2, 1);
        done(i, 5);
    }
    raw_until(&raw.rank[0].finals, 1);
    raw_post(0, (struct tly_frame){.type = TLY_GOODBYE}, NULL, 0);
    raw_until(&raw.rank[1].finals, 1);
    give(1, 5, 8, none);
    read_part(2, 1, 5);
    expect(2, 1, 8);
}

/* Ranks that say DONE without a word of the part have given it up: it goes with the last. */
static void test_given_up(void **state)
{
    arrive(0, 3, none);
    read_part(0, 1, 5);
    expect(0, 1, 3);
    raw_settle(0);
    done(1, 6);
    have(2, 5, 2, 4); /* it is here still, for rank 2 */
    done(2, 6);
    done(0, 6);
    settle_all();
    read_part(2, 1, 5);
    expect(2, 1, 3);
    raw_settle(2);
    uint64_t before = raw.rank[2].facts.bytes_in_use;
    done(2, 8);
    settle_all();
    raw_settle(2);
    assert_true(raw.rank[2].facts.bytes_in_use < before);
    read_part(2, 2, 5);
    raw_until(&raw.rank[2].verdicts, 1); /* it was not created */
}

/* What a create that has failed has left goes, and words about it count for nothing. */
static void test_earlier_create(void **state)
{
    uint8_t version[TLY_VERSION_BYTES];
    tly_version_put(version, &(struct tly_version){2, 0});
    arrive(0, 3, none);
    raw_settle(0);
    for (int i = 0; i < RANKS; i++) {
        struct tly_frame f = raw_word(TLY_HAVE, 6);
        f.round = 2;
        raw_post(i, f, version, sizeof version);
        have(i, 5, 2, 4);
        done(i, 6);
    }
    raw_until(&raw.rank[0].finals, 2);
    give(0, 6, 7, none);
    read_part(1, 3, 6);
    expect(1, 1, 7);
}

/* --- creates that lose their service ------------------------------------------------------------- */

static struct tly_frame raw_create(int rank, int type, uint32_t offset)
{
    struct tly_frame f = raw_word(type, 5);
    f.kind = TALLY_SHARED_CREATE;
    f.count = 5;
    f.rank = (uint32_t)rank;
    f.offset = offset;
    return f;
}

/* Rank 1 has half of the part, and rank 2 so many bytes.  Rank 0 gives the rest, and rank 1 its half before that. */
static void resume_create(uint32_t more)
{
    for (int i = 0; i < RANKS; i++) {
        have(i, 5, 0, 0);
        raw_post(i, raw_create(i, TLY_HAVE, i == 0 ? 0 : i == 1 ? BYTES / 2 : more), NULL, 0);
        done(i, 5);
    }
    raw_until(&raw.rank[1].finals, 1);
    for (size_t i = 0; i < BYTES / sizeof *raw_data; i++)
        raw_data[i] = 3;
    struct tly_frame f = raw_create(1, TLY_FINAL, 0);
    f.flags = TLY_LAST;
    raw_post(1, f, raw_data, BYTES / 2);
    raw_settle(1);
    raw_until(&raw.rank[0].again, 1);
    assert_int_equal(raw.rank[0].again_from, BYTES / 2);
    f = raw_create(0, TLY_PUSH, BYTES / 2);
    f.flags = TLY_LAST | TLY_RESUMED;
    raw_post(0, f, raw_data, BYTES / 2);
}

/* The service keeps all of the part. */
static void expect_created(void)
{
    raw_until(&raw.rank[1].results, 1);
    raw_until(&raw.rank[2].results, 1);
    push(2, 1, 5, 1);
    expect(2, 2, 4);
    read_part(0, 1, 5);
    expect(0, 2, 4); /* the first has been that of the create */
}

static void test_create_resumed(void **state)
{
    resume_create(0);
    expect_created();
}

/* No rank lacks the beginning, but the service does. */
static void test_create_half_there(void **state)
{
    resume_create(BYTES / 2);
    expect_created();
}

/* Parts for which there is no memory are refused by each operation, not waited for. */
static void test_no_memory(void **state)
{
    enum { PARTS = 40 };
    uint8_t version[TLY_VERSION_BYTES];
    tly_version_put(version, &(struct tly_version){2, 1});
    for (uint32_t part = 0; part < PARTS; part++) {
        struct tly_frame f = raw_word(TLY_HAVE, 5);
        f.part = part;
        f.length = RAW_PART;
        raw_post(0, f, version, sizeof version);
    }
    raw_settle(0);
    assert_true(raw.rank[0].facts.bytes_in_use <= raw.rank[0].facts.memory_limit);
    struct tly_frame f = raw_operation(TALLY_SHARED_READ, 0, 1, 5);
    f.part = PARTS - 1;
    f.length = RAW_PART;
    raw_post(0, f, NULL, 0);
    raw_until(&raw.rank[0].verdicts, 1);
    assert_int_equal(raw.rank[0].verdict_err, ENOMEM);
}

/* What no rank says ends its connection, and the others go on. */
static void wild(int rank, struct tly_frame f, uint32_t bytes)
{
    static const uint8_t zeros[BYTES];
    uint8_t payload[BYTES] = {0};
    tly_version_put(payload, &(struct tly_version){2, 1});
    raw_post(rank, f, f.type == TLY_FINAL ? zeros : payload, bytes);
    raw_until(&raw.rank[rank].closed, 1);
    raw_enter(rank);
}

static void test_wild(void **state)
{
    struct tly_frame f = raw_word(TLY_FINAL, 5);
    wild(2, f, BYTES); /* unknown */
    f = raw_word(TLY_HAVE, 5);
    f.flags = TLY_MARK;
    wild(2, f, STATE);
    for (int i = 0; i < RANKS; i++) {
        have(i, 5, 2, i == 1);
        done(i, 5);
    }
    raw_until(&raw.rank[1].finals, 1);
    wild(2, raw_word(TLY_FINAL, 5), BYTES); /* another was asked */
    wild(2, f, STATE);
    wild(2, raw_word(TLY_FINAL, 6), BYTES); /* of the future */
    have(2, 5, 2, 0);
    done(2, 5);
    wild(2, raw_word(TLY_HAVE, 1), TLY_VERSION_BYTES); /* it holds what is newer than where the part is */
    wild(2, raw_word(TLY_HAVE, 2), 1);
    wild(2, raw_word(TLY_HAVE, 0), 0);
    f = raw_word(TLY_HAVE, 5);
    f.rank = 1;
    wild(2, f, TLY_VERSION_BYTES);
    f = raw_word(TLY_HAVE, 5);
    f.length = BYTES / 2;
    wild(2, f, TLY_VERSION_BYTES);
    f = raw_word(TLY_HAVE, 5);
    f.length = 3;
    wild(2, f, TLY_VERSION_BYTES);
    f = raw_word(TLY_HAVE, 5);
    f.length = RAW_PART + 64;
    wild(2, f, TLY_VERSION_BYTES);
    f = raw_word(TLY_HAVE, 5);
    f.flags = TLY_MARK;
    wild(2, f, STATE - 1);
    wild(1, raw_word(TLY_FINAL, 5), BYTES); /* before their state */
    have(1, 5, 2, 1);
    done(1, 5);
    have(2, 5, 2, 0);
    done(2, 5);
    raw_until(&raw.rank[1].finals, 1);
    give_state(1, 5, none);
    f = raw_word(TLY_FINAL, 5);
    f.offset = BYTES / 2;
    wild(1, f, BYTES / 2); /* not from the beginning */
    have(1, 5, 2, 1);
    done(1, 5);
    raw_until(&raw.rank[1].finals, 1);
    give(1, 5, 4, none);
    read_part(0, 1, 5);
    expect(0, 1, 4);
}

/* Random words about a few parts: whatever they say, nothing is lost of the service but their connections. */
static void test_random(void **state)
{
    static const uint8_t types[] = {TLY_HAVE, TLY_FINAL, TLY_DONE, TLY_CANCEL, TLY_PUSH, TLY_HAVE};
    uint64_t random = 5;
    uint8_t payload[BYTES];
    for (int i = 0; i < 4000; i++) {
        int rank = (int)(job_random(&random) % RANKS);
        if (raw.rank[rank].closed)
            raw_enter(rank);
        uint32_t epoch = (uint32_t)(job_random(&random) % 6), bytes = BYTES;
        struct tly_frame f = raw_word(types[job_random(&random) % sizeof types], epoch);
        f.part = (uint32_t)(job_random(&random) % 3);
        if (f.type == TLY_DONE)
            f = (struct tly_frame){.type = TLY_DONE, .count = epoch};
        if (f.type == TLY_PUSH || f.type == TLY_CANCEL) {
            f = raw_operation(TALLY_SHARED_ADD, (uint32_t)rank, (uint32_t)(job_random(&random) % 4), epoch);
            f.type = types[3 + job_random(&random) % 2];
        }
        if (f.type == TLY_HAVE) {
            f.flags = job_random(&random) % 3 ? 0 : TLY_MARK;
            bytes = f.flags ? STATE : job_random(&random) % 4 ? TLY_VERSION_BYTES : 0;
        }
        if (f.type == TLY_DONE || f.type == TLY_CANCEL)
            bytes = 0;
        for (uint32_t at = 0; at < bytes; at++)
            payload[at] = at < 1 || at > 11 ? (uint8_t)(job_random(&random) % 4) : 0;
        raw_post(rank, f, payload, bytes);
        if (i % 8 == 0) {
            int before = raw.rank[rank].answers;
            raw_post(rank, (struct tly_frame){.type = TLY_STATUS}, NULL, 0);
            while (raw.rank[rank].answers == before && !raw.rank[rank].closed)
                tly_loop_turn(&raw.loop, 2);
        }
    }
    for (int rank = 0; rank < RANKS; rank++)
        if (raw.rank[rank].closed)
            raw_enter(rank);
    settle_all();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_death),
        cmocka_unit_test(test_death_between_operations),
        cmocka_unit_test(test_stopped),
        cmocka_unit_test(test_drain),
        cmocka_unit_test(test_come_and_go),
        cmocka_unit_test(test_creating),
        cmocka_unit_test(test_late_create),
        cmocka_unit_test(test_short),
        cmocka_unit_test(test_chaos),
        cmocka_unit_test_setup_teardown(test_holder, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_pending, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_moves_twice, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_giver_breaks, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_giver_leaves, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_given_up, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_earlier_create, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_create_resumed, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_create_half_there, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_no_memory, raw_set_up_small, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_wild, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_random, raw_set_up, raw_tear_down),
    };
    return cmocka_run_group_tests_name("shared_moves", tests, NULL, NULL);
}
