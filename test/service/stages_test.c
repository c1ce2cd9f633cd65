/* stages_test.c - stages between a tensor and the network (comm/path/stage.h): whatever one does, when, and in which order, sums
 * are right, and what fails fails on all ranks.  The stages are later.c's.  stages_all_test.c has the other operations. */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>

#include "base/loop.h"
#include "comm/comm.h"
#include "comm/op/op.h"
#include "comm/op/part.h"
#include "job.h"
#include "later.h"

#include <cmocka.h>

/* A tensor has 30 parts; a sanitizer looks at each element that the ranks write and check. */
#define PART (UNDER_SANITIZER ? "TALLY_PART_BYTES=4K" : "TALLY_PART_BYTES=16K")
enum {
    TENSORS = UNDER_SANITIZER ? 2 : 4,
    COUNT = UNDER_SANITIZER ? 15000 : 60000,
    STEPS = UNDER_SANITIZER ? 4 : 12
};

struct board {
    atomic_int stage, steps;
    bool device, codec;
    bool alike; /* all ranks share one machine: no codec has a part unless the operation is diverted */
    int only;   /* the only rank that has the stages; -1: all have */
    bool drops; /* services have too little memory */
    bool early; /* a rank takes an operation back before it hears that all have begun it */
};

static const int pairs[] = {0, 0, 1, 1}, together[] = {0, 0, 0, 0};

/* Where the ranks of a job are, and the tallyd beside them. */
static const struct layout {
    int ranks, tallyds;
    const int *machine;
} layouts[] = {{2, 0}, {2, 1}, {4, 0, pairs}, {4, 1, pairs}, {3, 0, together}};
enum { LAYOUTS = sizeof layouts / sizeof *layouts };

/* Has this rank the stages? */
static bool staged(const struct board *b, int rank)
{
    return b->only < 0 || rank == b->only;
}

static tally_comm *join(const struct board *b, int rank)
{
    tally_comm *c;
    later_use(b->device && staged(b, rank), b->codec && staged(b, rank));
    CHECK(tally_comm_open(NULL, &c) == 0);
    return c;
}

static int64_t value(int rank, int step, int tensor, int i)
{
    return (rank + 1) * (1 + (i * 31 + tensor * 7 + step) % 1000);
}

static tally_op *submit(tally_comm *c, const char *name, int64_t *x, int step, int tensor)
{
    tally_op *op;
    int rank = tally_comm_rank(c);
    for (int i = 0; i < COUNT; i++)
        x[i] = value(rank, step, tensor, i);
    CHECK(tally_push_pull(c, name, x, x, COUNT, TALLY_INT64, TALLY_SUM, NULL, &op) == 0);
    return op;
}

static void check(tally_comm *c, tally_op *op, const int64_t *x, int step, int tensor)
{
    int ranks = tally_comm_size(c);
    int err = tally_op_wait(op, -1);
    if (err)
        fprintf(stderr, "%s\n", tally_op_error(op));
    CHECK(err == 0);
    tally_op_free(op);
    for (int i = 0; i < COUNT; i++)
        CHECK(x[i] == value(0, step, tensor, i) * ranks * (ranks + 1) / 2);
}

static void take_step(tally_comm *c, int step)
{
    static int64_t x[TENSORS][COUNT];
    tally_op *op[TENSORS];
    for (int t = 0; t < TENSORS; t++) {
        char name[8];
        snprintf(name, sizeof name, "t%d", t);
        op[t] = submit(c, name, x[t], step, t);
    }
    for (int t = 0; t < TENSORS; t++)
        check(c, op[t], x[t], step, t);
}

/* All is given back, and the stages have had something to do. */
static int leave(tally_comm *c, const struct board *b)
{
    const char *why;
    if (tally_comm_status(c, &why))
        fprintf(stderr, "%s\n", why);
    CHECK(tally_comm_status(c, NULL) == 0);
    job_barrier(c);
    bool has = staged(b, tally_comm_rank(c));
    CHECK(tally_comm_close(c) == 0);
    CHECK(later_device.begun == later_device.ended && later_codec.begun == later_codec.ended);
    CHECK(!later_device.count && !later_codec.count);
    CHECK(!b->device || !has || (later_device.out > 0 && later_device.disordered > 0));
    CHECK(!b->codec || !has || b->alike || later_codec.changed > 0);
    return 0;
}

static void run(struct job *j, struct board *b, bool device, bool codec)
{
    b->device = device;
    b->codec = codec;
    b->alike = j->machine == together;
    atomic_store(&b->stage, 0);
    j->arg = b;
    j->settings[0] = PART;
    job_start(j);
}

static void end(struct job *j)
{
    job_finish(j);
    job_clear(j);
}

/* --- sums ---------------------------------------------------------------------------------------- */

static unsigned long long slots_dropped(tally_comm *c)
{
    char *json;
    unsigned long long sum = 0, v;
    CHECK(tally_comm_report(c, 60000, &json) == 0);
    for (const char *at = json; (at = strstr(at, "\"slots_dropped\": ")); at++)
        if (sscanf(at + 17, "%llu", &v) == 1)
            sum += v;
    free(json);
    return sum;
}

static int sums(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = join(b, rank);
    int step = 0;
    for (; step < STEPS; step++)
        take_step(c, step);
    for (int8_t enough = !b->drops; !enough; step++) { /* until something has been dropped */
        tally_op *op;
        take_step(c, step);
        CHECK(step < 1000);
        int8_t dropped = rank == 0 && slots_dropped(c) > 0;
        CHECK(tally_push_pull(c, "dropped", &dropped, &enough, 1, TALLY_INT8, TALLY_MAX, NULL, &op) == 0);
        CHECK(tally_op_wait(op, -1) == 0);
        tally_op_free(op);
    }
    return leave(c, b);
}

static void test_sums(void **state)
{
    struct board *b = job_shared(sizeof *b);
    for (int i = 1; i < 12; i++) {
        struct job j = {.ranks = 2, .tallyds = i % 8 == 3, .main = sums};
        if (!(i & 3))
            continue;
        if (i & 12) {
            j.ranks = 4;
            j.machine = i & 8 ? together : pairs;
        }
        b->only = -1;
        run(&j, b, i & 1, i & 2);
        end(&j);
    }
}

/* Services with too little memory drop what they have and ask for it again. */
static void test_asked_again(void **state)
{
    struct board *b = job_shared(sizeof *b);
    b->only = -1;
    for (int i = 0; i < 2; i++) {
        struct job j = {.ranks = i ? 4 : 3, .tallyds = 1, .main = sums, .machine = i ? pairs : NULL};
        j.settings[1] = "TALLY_MEMORY=1K";
        j.settings[2] = "TALLY_WINDOW_PARTS=64";
        j.settings[3] = "TALLY_CREDIT_BYTES=1M";
        b->drops = true;
        run(&j, b, true, true);
        end(&j);
    }
}

/* --- services that die --------------------------------------------------------------------------- */

static int sums_on_and_on(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = join(b, rank);
    int8_t all = 0;
    for (int step = 0; !all; step++) {
        int8_t over = atomic_load(&b->stage) == 2;
        tally_op *op;
        take_step(c, step);
        if (rank == 0)
            atomic_fetch_add(&b->steps, 1);
        CHECK(tally_push_pull(c, "over", &over, &all, 1, TALLY_INT8, TALLY_MIN, NULL, &op) == 0);
        CHECK(tally_op_wait(op, -1) == 0);
        tally_op_free(op);
    }
    return leave(c, b);
}

static void test_redo(void **state)
{
    struct board *b = job_shared(sizeof *b);
    b->only = -1;
    for (int i = 0; i < 2; i++) {
        struct job j = {
            .ranks = i ? 4 : 2, .tallyds = 2, .main = sums_on_and_on, .machine = i ? pairs : NULL};
        atomic_store(&b->steps, 0);
        run(&j, b, true, true);
        for (int t = 0; t < 2; t++) {
            job_await(&b->steps, 2 + 4 * t);
            kill(j.tallyd_pid[t], SIGKILL);
            job_wait_tallyd(&j, t);
            j.tallyd_pid[t] = 0;
        }
        job_await(&b->steps, 12);
        atomic_store(&b->stage, 2);
        end(&j);
    }
}

/* --- what fails ---------------------------------------------------------------------------------- */

static int64_t spoiled[COUNT];

/* The operation fails on all ranks, and all goes on. */
static void fail_one(tally_comm *c, const char *name, const char *sentence)
{
    tally_op *op = submit(c, name, spoiled, 0, 0);
    int err = tally_op_wait(op, -1);
    if (!err || !strstr(tally_op_error(op), sentence))
        fprintf(stderr, "%d: %s\n", err, tally_op_error(op));
    CHECK(err < 0);
    CHECK_HOLDS(tally_op_error(op), sentence);
    tally_op_free(op);
}

static int stage_fails(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = join(b, rank);
    for (int part = 1; part < 28; part += UNDER_SANITIZER ? 9 : 3) {
        if (rank == 1)
            atomic_store(&later_device.fail_out, part);
        fail_one(c, "bad", "rank 1 has cancelled it: the stage fails on request");
        take_step(c, part);
    }
    if (rank == 1)
        atomic_store(&later_device.fail_begin, 0);
    fail_one(c, "worse", "rank 1 has cancelled it: the stage cannot begin");
    take_step(c, 1);
    return leave(c, b);
}

/* On its way back only its own rank has it; the others have their result. */
static int stage_fails_inward(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = join(b, rank);
    for (int part = 1; part < 28; part += 9) {
        if (rank == 1) {
            atomic_store(&later_device.fail_in, part);
            fail_one(c, "bad", "'bad': the stage fails on request");
        } else {
            check(c, submit(c, "bad", spoiled, 0, 0), spoiled, 0, 0);
        }
        take_step(c, part);
    }
    return leave(c, b);
}

/* Everywhere; and where one rank alone has a stage, before the team or the engine. */
static void run_all(int (*main)(int rank, void *arg))
{
    struct board *b = job_shared(sizeof *b);
    for (int i = 0; i < 2 * LAYOUTS; i++) {
        const struct layout *l = &layouts[i % LAYOUTS];
        struct job j = {.ranks = l->ranks, .tallyds = l->tallyds, .main = main, .machine = l->machine};
        b->only = i < LAYOUTS ? -1 : 1;
        run(&j, b, true, b->only < 0 && i % 2);
        end(&j);
    }
}

static void test_stage_fails(void **state)
{
    run_all(stage_fails);
}

static void test_stage_fails_inward(void **state)
{
    run_all(stage_fails_inward);
}

/* --- cancelled and refused ----------------------------------------------------------------------- */

static void await_begun(const struct later *l, int operations)
{
    for (int i = 0; l->begun < operations; i++) {
        CHECK(i < 60000);
        job_sleep_ms(1);
    }
}

/* While a rank's stage has all of it, or some of the others' has: the last comes late. */
static int cancelled(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = join(b, rank);
    int last = tally_comm_size(c) - 1;
    for (int round = 0; round < STEPS; round++) {
        int who = round % (last + 1);
        bool held = round % 3 != 0 && staged(b, who);
        if (rank == who && held)
            later_hold(&later_device, LATER_ALL);
        int before = later_device.begun;
        tally_op *op = submit(c, "bad", spoiled, 0, 0);
        if (rank == who) {
            if (held)
                await_begun(&later_device, before + 1);
            CHECK(tally_op_cancel(op, "a test") == 0);
        }
        int err = tally_op_wait(op, -1);
        CHECK(err == -ECANCELED || (err == 0 && !held)); /* all had begun it */
        if (err)
            CHECK_HOLDS(tally_op_error(op), "has cancelled it: a test");
        tally_op_free(op);
        if (rank == who)
            later_hold(&later_device, LATER_NONE);
        take_step(c, round);
    }
    return leave(c, b);
}

static int refused(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = join(b, rank);
    for (int round = 0; round < STEPS; round++) {
        char name[16];
        snprintf(name, sizeof name, "bad%d", round);
        if (rank == 0 && round % 2)
            later_hold(&later_device, LATER_ALL);
        if (rank == 1)
            CHECK(tally_refuse(c, name, TALLY_PUSH_PULL, NULL, "no memory") == 0);
        else if (rank == 0 && round % 2)
            job_sleep_ms(2); /* they have the verdict */
        if (rank == 0)
            later_hold(&later_device, LATER_NONE);
        if (rank != 1)
            fail_one(c, name, "rank 1 refuses: no memory");
        take_step(c, round);
    }
    return leave(c, b);
}

static void test_cancelled(void **state)
{
    run_all(cancelled);
}

static void test_refused(void **state)
{
    run_all(refused);
}

/* Until the stage has done so many parts, or has no more that it may do. */
static void await_work(atomic_int *done, int before, int parts)
{
    for (int i = 0; *done < before + parts && i < 20; i++)
        job_sleep_ms(1);
}

/* While a rank's stage has its first part alone, and others are on their way through it, out and back. */
static int cancelled_between(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = join(b, rank);
    struct later *l = b->codec ? &later_codec : &later_device;
    int size = tally_comm_size(c);
    for (int round = 0; round < 3 * STEPS; round++) {
        int who = round % size;
        int begun = l->begun, out = l->out;
        if (rank == who)
            later_hold(l, LATER_FIRST);
        tally_op *op = submit(c, "bad", spoiled, 0, 0);
        if (rank == who) {
            await_begun(l, begun + 1);
            await_work(&l->out, out, round % 24);
            CHECK(tally_op_cancel(op, "a test") == 0);
        }
        CHECK(tally_op_wait(op, -1) == -ECANCELED);
        CHECK_HOLDS(tally_op_error(op), "has cancelled it: a test");
        tally_op_free(op);
        later_hold(l, LATER_NONE);
        take_step(c, round);
    }
    return leave(c, b);
}

static void test_cancelled_between(void **state)
{
    struct board *b = job_shared(sizeof *b);
    b->only = -1;
    for (int i = 0; i < 5; i++) {
        const struct layout *l = &layouts[i / 2 * 2]; /* no codec has parts where all share one machine */
        struct job j = {.ranks = l->ranks, .main = cancelled_between, .machine = l->machine};
        run(&j, b, true, i % 2);
        end(&j);
    }
}

/* Until part 0 has come so far.  Returns with the loop's lock held. */
static void await_first(tally_comm *c, const tally_op *op, enum tly_part_state state)
{
    tly_loop_lock(&c->loop);
    while (!op->parts || op->parts[0].state != state) {
        tly_loop_unlock(&c->loop);
        job_sleep_ms(1);
        tly_loop_lock(&c->loop);
    }
}

/* The loop, whose lock is held, hears that the stage has failed when the operation has just been taken back. */
static void fail_and_cancel(tally_comm *c, tally_op *op, int part)
{
    atomic_store(&later_codec.fail_out, part);
    later_hold(&later_codec, LATER_NONE);
    while (later_codec.fail_out >= 0 || later_codec.busy)
        job_sleep_ms(1);
    op->reason = strdup("a test");
    tly_op_cancel(c, op);
    tly_op_drain_stages(c);
    tly_loop_unlock(&c->loop);
    tly_loop_wake(&c->loop);
}

/* A stage fails behind a first part that has been sent, of an operation that its rank has taken back: as long as home can
 * say so to all, the job goes on. */
static int cancelled_and_failed(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = join(b, rank);
    for (int round = 0; round < STEPS; round++) {
        tally_op *op;
        if (rank == 1) {
            int out = later_codec.out;
            later_hold(&later_codec, LATER_OTHERS);
            op = submit(c, "bad", spoiled, 0, 0);
            await_work(&later_codec.out, out, 1);
            job_sleep_ms(round);
            tly_loop_lock(&c->loop);
            fail_and_cancel(c, op, 1 + round);
            atomic_store(&b->stage, round + 1);
        } else {
            job_await(&b->stage, round + 1);
            op = submit(c, "bad", spoiled, 0, 0);
        }
        int err = tally_op_wait(op, -1);
        if (err != -ECANCELED)
            fprintf(stderr, "%d: %s\n", err, tally_op_error(op));
        CHECK(err == -ECANCELED);
        CHECK_HOLDS(tally_op_error(op), "rank 1 has cancelled it: a test");
        tally_op_free(op);
        take_step(c, round);
    }
    return leave(c, b);
}

/* ... but if all had begun it, they wait for what does not come.  Its rank knows that they have, or (early) hears it next. */
static int cancelled_too_late(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = join(b, rank);
    const char *why;
    tally_op *op;
    if (rank == 1) {
        later_hold(&later_codec, LATER_OTHERS);
        op = submit(c, "bad", spoiled, 0, 0);
        await_first(c, op, b->early ? PART_SENT : PART_LANDED);
        atomic_store(&b->stage, 1);
        if (b->early)
            job_await(&b->stage, 2);
        fail_and_cancel(c, op, 1);
    } else {
        job_await(&b->stage, b->early);
        op = submit(c, "bad", spoiled, 0, 0);
        await_first(c, op, PART_LANDED);
        tly_loop_unlock(&c->loop);
        if (b->early)
            atomic_store(&b->stage, 2);
    }
    CHECK(tally_op_wait(op, -1) < 0);
    tally_op_free(op);
    CHECK(tally_comm_status(c, &why) != 0);
    CHECK_HOLDS(why, "'bad': the stage fails on request");
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_cancelled_and_failed(void **state)
{
    struct board *b = job_shared(sizeof *b);
    b->only = -1;
    for (int i = 0; i < 3; i++) {
        /* A fast card: a rank that holds its loop's lock does not hold up its service. */
        struct job j = {.ranks = 2,
                        .main = i ? cancelled_too_late : cancelled_and_failed,
                        .settings = {[1] = "TALLY_BANDWIDTH=10G"}};
        b->early = i == 2;
        atomic_store(&b->stage, 0);
        run(&j, b, false, true);
        end(&j);
    }
}

/* A stage behind a team has failed: the others of the team have pushed what they were to, and the job ends. */
static int codec_fails(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = join(b, rank);
    const char *why;
    int err = 0;
    take_step(c, 0);
    job_barrier(c);                    /* or the failure meets another rank's step */
    for (int part = 1; !err; part++) { /* until one comes that this rank carries */
        CHECK(part < 28);
        if (rank == 1)
            atomic_store(&later_codec.fail_out, part);
        tally_op *op = NULL;
        /* A rank that submits late hears of it at once. */
        err = tally_push_pull(c, "bad", spoiled, spoiled, COUNT, TALLY_INT64, TALLY_SUM, NULL, &op);
        if (!err)
            err = tally_op_wait(op, -1);
        tally_op_free(op);
    }
    CHECK(tally_comm_status(c, &why) != 0);
    CHECK_HOLDS(why, "'bad': the stage fails on request");
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_stage_behind_a_team_fails(void **state)
{
    struct board *b = job_shared(sizeof *b);
    b->only = -1;
    struct job j = {.ranks = 4, .main = codec_fails, .machine = pairs};
    run(&j, b, false, true);
    end(&j);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_asked_again),
        cmocka_unit_test(test_redo),
        cmocka_unit_test(test_stage_fails),
        cmocka_unit_test(test_stage_fails_inward),
        cmocka_unit_test(test_cancelled),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_cancelled_between),
        cmocka_unit_test(test_cancelled_and_failed),
        cmocka_unit_test(test_stage_behind_a_team_fails),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
