/* shared_takeover_test.c - a coordinator dies between its COMMITs while shares of shared tensors change.  The next one gives the
 * others that COMMIT, also if it has invited a guest since.  All ranks deal the parts alike, and every addition counts once. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/wait.h>

#include "comm/comm.h"
#include "job.h"
#include "shared.h"
#include "wire/pack.h"

#include <cmocka.h>

enum { COUNT = 30000, STEPS = 4, RANKS = 3, BEHIND = 1, LATE = 2 };

struct board {
    atomic_int begun, committed, created; /* ranks that have come so far */
    atomic_int stage;                     /* of the coordinator: */
#define DIES 1
#define COMES 2
    atomic_int met; /* ranks that have been invited to meet the guest */
    bool leaves;    /* the change: the tallyd leaves, or else another one comes */
    bool guest;     /* after the change another one comes, whom one rank has not met */
};

/* --- a COMMIT is lost ---------------------------------------------------------------------------- */

/* What this rank knew before. */
static struct {
    struct board *board;
    void (*prepare)(void *user, const struct tly_roster *next);
    void (*promised)(void *user, const struct tly_begun *round);
    void (*changed)(void *user, const struct tly_roster *roster);
    void (*invited)(void *user);
    struct tly_writer roster;
    uint32_t committed;
    atomic_bool lost;
} before;

static void lose_promise(void *comm, const struct tly_begun *round)
{
}

static void lose_roster(struct tly_member *m)
{
    struct tly_reader r = {before.roster.data, before.roster.len, false};
    tly_roster_finish(&m->roster);
    CHECK(tly_roster_read(&r, &m->roster) == 0);
}

static void lose_commit(void *comm, const struct tly_roster *roster)
{
    struct tly_member *m = &((tally_comm *)comm)->member;
    lose_roster(m);
    m->committed = before.committed;
    m->prepare = before.prepare;
    m->promised = before.promised;
    m->changed = before.changed;
    atomic_store(&before.lost, true);
}

static void prepare_to_lose(void *comm, const struct tly_roster *next)
{
    struct tly_member *m = &((tally_comm *)comm)->member;
    free(before.roster.data);
    before.roster = (struct tly_writer){0};
    tly_roster_write(&before.roster, &m->roster);
    CHECK(!before.roster.failed);
    before.committed = m->committed;
    before.prepare(comm, next);
}

static void lose_invitation(void *comm)
{
    lose_roster(&((tally_comm *)comm)->member);
    atomic_fetch_add(&before.board->met, 1);
}

static void note_invitation(void *comm)
{
    before.invited(comm);
    atomic_fetch_add(&before.board->met, 1);
}

/* This rank notes the next INVITE, or does not get it. */
static void await_invitation(tally_comm *c, struct board *b, bool lose)
{
    struct tly_member *m = &c->member;
    tly_loop_lock(&c->loop);
    before.board = b;
    before.invited = m->invited;
    m->invited = lose ? lose_invitation : note_invitation;
    tly_loop_unlock(&c->loop);
}

/* This rank answers the next PREPARE, and does not get its COMMIT. */
static void lose_the_next_commit(tally_comm *c)
{
    struct tly_member *m = &c->member;
    tly_loop_lock(&c->loop);
    before.prepare = m->prepare;
    before.promised = m->promised;
    before.changed = m->changed;
    m->prepare = prepare_to_lose;
    m->promised = lose_promise;
    m->changed = lose_commit;
    tly_loop_unlock(&c->loop);
}

/* --- the job ------------------------------------------------------------------------------------- */

static uint32_t epoch_of(tally_comm *c, int *sharing)
{
    tly_loop_lock(&c->loop);
    uint32_t number = c->epoch->number;
    *sharing = c->epoch->sharing;
    tly_loop_unlock(&c->loop);
    return number;
}

static void await_sharing(tally_comm *c, int services)
{
    for (int sharing = 0; sharing != services; epoch_of(c, &sharing))
        job_sleep_ms(2);
}

/* A create is in flight on two ranks as the split changes.  The third begins it after COMMIT, and it ends everywhere, also on the
 * rank that does not get the COMMIT. */
static int run_between(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = job_open();
    int64_t *first = shared_first(COUNT), *mine = shared_differences(rank, COUNT);
    tally_op *op;
    await_sharing(c, RANKS + 1);
    shared_create(c, "whole", first, COUNT, TALLY_INT64, 0);
    shared_add(c, "whole", mine);
    job_barrier(c);
    if (b->guest)
        await_invitation(c, b, rank == BEHIND);
    if (rank == BEHIND)
        lose_the_next_commit(c);
    if (rank == LATE) {
        await_sharing(c, b->leaves ? RANKS : RANKS + 2);
        atomic_fetch_add(&b->committed, 1);
        job_await(&b->stage, DIES);
    }
    CHECK(tally_shared_create(c, "new", first, COUNT, TALLY_INT64, 0, NULL, &op) == 0);
    atomic_fetch_add(&b->begun, 1);
    if (rank == BEHIND) {
        while (!atomic_load(&before.lost))
            job_sleep_ms(2);
        atomic_fetch_add(&b->committed, 1);
    }
    job_expect(op, 0);
    atomic_fetch_add(&b->created, 1);
    job_await(&b->stage, COMES);
    for (int step = 0; step < STEPS; step++) {
        shared_add(c, "new", mine);
        shared_add(c, "whole", mine);
    }
    job_barrier(c);
    shared_check(shared_read(c, "new"), RANKS, COUNT, STEPS);
    shared_check(shared_read(c, "whole"), RANKS, COUNT, STEPS + 1);
    job_barrier(c);
    CHECK(tally_comm_close(c) == 0);
    free(first);
    free(mine);
    return 0;
}

static void take_over(bool leaves, bool guest)
{
    struct board *b = job_shared(sizeof *b);
    b->leaves = leaves;
    b->guest = guest;
    struct job j = {.ranks = RANKS,
                    .tallyds = 1,
                    .main = run_between,
                    .arg = b,
                    .port = job_free_port(),
                    .settings = {"TALLY_REPLAN=0", "TALLY_TIMEOUT=60"}};
    setenv("TALLY_PART_BYTES", "16K", 1); /* the coordinator's as well */
    pid_t coordinator = job_start_coordinator(j.port);
    job_start(&j);
    job_await(&b->begun, RANKS - 1);
    job_sleep_ms(50); /* until the loops have begun the create */
    if (leaves) {
        kill(j.tallyd_pid[0], SIGTERM);
    } else {
        j.tallyds = 2;
        job_start_tallyd(&j, 1);
    }
    job_await(&b->committed, 2);
    if (guest) {
        j.tallyds = 2;
        job_start_tallyd(&j, 1);
        job_await(&b->met, RANKS);
    }
    kill(coordinator, SIGKILL);
    waitpid(coordinator, NULL, 0);
    atomic_store(&b->stage, DIES);
    if (!leaves) /* else what the tallyd had waits for another coordinator */
        job_await(&b->created, RANKS);
    coordinator = job_start_coordinator(j.port);
    atomic_store(&b->stage, COMES);
    for (int rank = 0; rank < RANKS; rank++)
        assert_int_equal(job_wait_rank(&j, rank), 0);
    job_clear(&j);
    kill(coordinator, SIGKILL);
    waitpid(coordinator, NULL, 0);
}

/* A create is in flight as the split changes, and has ended on all ranks as it changes again.  One rank does not get that second
 * COMMIT. */
static int run_ended(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = job_open();
    int64_t *first = shared_first(COUNT), *mine = shared_differences(rank, COUNT);
    tally_op *op;
    await_sharing(c, RANKS + 1);
    job_barrier(c);
    if (rank == LATE)
        await_sharing(c, RANKS + 2);
    CHECK(tally_shared_create(c, "new", first, COUNT, TALLY_INT64, 0, NULL, &op) == 0);
    atomic_fetch_add(&b->begun, 1);
    job_expect(op, 0);
    job_barrier(c);
    if (rank == BEHIND)
        lose_the_next_commit(c);
    atomic_fetch_add(&b->created, 1);
    if (rank == BEHIND)
        while (!atomic_load(&before.lost))
            job_sleep_ms(2);
    else
        await_sharing(c, RANKS + 1);
    atomic_fetch_add(&b->committed, 1);
    job_await(&b->stage, COMES);
    for (int step = 0; step < STEPS; step++)
        shared_add(c, "new", mine);
    job_barrier(c);
    shared_check(shared_read(c, "new"), RANKS, COUNT, STEPS);
    job_barrier(c);
    CHECK(tally_comm_close(c) == 0);
    free(first);
    free(mine);
    return 0;
}

static void test_the_split_changes_twice(void **state)
{
    struct board *b = job_shared(sizeof *b);
    struct job j = {.ranks = RANKS,
                    .tallyds = 1,
                    .main = run_ended,
                    .arg = b,
                    .port = job_free_port(),
                    .settings = {"TALLY_REPLAN=0", "TALLY_TIMEOUT=20"}};
    setenv("TALLY_PART_BYTES", "16K", 1);
    pid_t coordinator = job_start_coordinator(j.port);
    job_start(&j);
    job_await(&b->begun, RANKS - 1);
    job_sleep_ms(50); /* until the loops have begun the create */
    j.tallyds = 2;
    job_start_tallyd(&j, 1);
    job_await(&b->created, RANKS);
    kill(j.tallyd_pid[0], SIGKILL);
    job_await(&b->committed, RANKS);
    kill(coordinator, SIGKILL);
    waitpid(coordinator, NULL, 0);
    coordinator = job_start_coordinator(j.port);
    atomic_store(&b->stage, COMES);
    for (int rank = 0; rank < RANKS; rank++)
        assert_int_equal(job_wait_rank(&j, rank), 0);
    job_clear(&j);
    kill(coordinator, SIGKILL);
    waitpid(coordinator, NULL, 0);
}

static void test_a_tallyd_comes(void **state)
{
    take_over(false, false);
}

static void test_a_tallyd_leaves(void **state)
{
    take_over(true, false);
}

static void test_a_tallyd_leaves_and_a_guest_comes(void **state)
{
    take_over(true, true);
}

/* --- chaos --------------------------------------------------------------------------------------- */

enum { TENSORS = 6, LENGTH = 3000 };

/* Add to one tensor while others are created, and check all sums each time. */
static int run_chaos(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = job_open();
    int64_t *first = shared_first(COUNT), *mine = shared_differences(rank, COUNT);
    uint64_t random = (uint64_t)rank * 131 + 7;
    char name[16];
    int steps = 0;
    shared_create(c, "w", first, COUNT, TALLY_INT64, 2);
    for (int i = 0; i < TENSORS; i++) {
        tally_op *op;
        snprintf(name, sizeof name, "v%d", i);
        CHECK(tally_shared_create(c, name, first, LENGTH, TALLY_INT64, 0, NULL, &op) == 0);
        for (int step = 0; step < 8; step++, steps++) {
            shared_add(c, "w", mine);
            job_sleep_ms((int)(job_random(&random) % 4));
            atomic_fetch_add(&b->begun, 1);
        }
        job_expect(op, 0);
        shared_add(c, name, mine);
        job_barrier(c);
        shared_check(shared_read(c, name), RANKS, LENGTH, 1);
        shared_check(shared_read(c, "w"), RANKS, COUNT, steps);
        job_barrier(c);
    }
    atomic_store(&b->stage, DIES);
    CHECK(tally_comm_close(c) == 0);
    free(first);
    free(mine);
    return 0;
}

/* A tallyd dies, leaves or comes, or the coordinator dies, shortly after that too. */
static void disturb(struct job *j, pid_t *coordinator, uint64_t *random)
{
    uint64_t what = job_random(random) % 5;
    int t = (int)(job_random(random) % (uint64_t)j->tallyds);
    bool lives = j->tallyd_status[t] == -1 && kill(j->tallyd_pid[t], 0) == 0;
    if (what < 2 && lives)
        kill(j->tallyd_pid[t], what ? SIGTERM : SIGKILL);
    else if (what < 4 && j->tallyds < JOB_MOST_TALLYDS)
        job_start_tallyd(j, j->tallyds++);
    if (what == 4 || job_random(random) % 3 == 0) {
        job_sleep_ms((int)(job_random(random) % 20));
        kill(*coordinator, SIGKILL);
        waitpid(*coordinator, NULL, 0);
        job_sleep_ms((int)(job_random(random) % 50));
        *coordinator = job_start_coordinator(j->port);
    }
}

static void chaos(int seed)
{
    uint64_t random = (uint64_t)seed + 41;
    int machine[JOB_MOST_RANKS];
    struct board *b = job_shared(sizeof *b);
    struct job j = {.ranks = job_layout(seed % 2 ? "aab" : "abc", machine),
                    .machine = machine,
                    .tallyds = 2,
                    .main = run_chaos,
                    .arg = b,
                    .port = job_free_port(),
                    .settings = {"TALLY_PART_BYTES=16K", "TALLY_TIMEOUT=60"}};
    setenv("TALLY_PART_BYTES", "16K", 1);
    pid_t coordinator = job_start_coordinator(j.port);
    job_start(&j);
    for (int i = 1; atomic_load(&b->stage) != DIES && i < 20; i++) {
        for (int at = i * 7; atomic_load(&b->begun) < at && atomic_load(&b->stage) != DIES;)
            job_sleep_ms(1);
        disturb(&j, &coordinator, &random);
    }
    for (int rank = 0; rank < RANKS; rank++)
        assert_int_equal(job_wait_rank(&j, rank), 0);
    job_clear(&j);
    kill(coordinator, SIGKILL);
    waitpid(coordinator, NULL, 0);
}

static void test_chaos(void **state)
{
    for (int seed = 0; seed < 4; seed++)
        chaos(seed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_tallyd_comes),
        cmocka_unit_test(test_a_tallyd_leaves),
        cmocka_unit_test(test_a_tallyd_leaves_and_a_guest_comes),
        cmocka_unit_test(test_the_split_changes_twice),
        cmocka_unit_test(test_chaos),
    };
    return cmocka_run_group_tests_name("shared_takeover", tests, NULL, NULL);
}
