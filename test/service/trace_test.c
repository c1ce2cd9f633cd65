/* trace_test.c - what a job that fails leaves of its timeline. */
#include <errno.h>
#include <glob.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>

#include "job.h"
#include "trace/timeline.h"

#include <cmocka.h>

/* One thread has a rank's loop and its service's: what this leaves for later comes too late. */
#define SLOW "TALLY_BANDWIDTH=500M"

struct board {
    atomic_int stage, services, stop;
};

static tally_op *submit(tally_comm *c, const char *name)
{
    static float x[100000];
    tally_op *op;
    CHECK(tally_push_pull(c, name, x, x, 100000, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
    return op;
}

/* Rank 1 does not take part in the second operation, and dies.  Rank 0 ends without closing anything. */
static int half_a_job(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c;
    CHECK(tally_comm_open(NULL, &c) == 0);
    tally_op *op = submit(c, "both");
    CHECK(tally_op_wait(op, -1) == 0);
    atomic_fetch_add(&b->stage, 1);
    if (rank == 1)
        for (;;)
            pause();
    op = submit(c, "one");
    CHECK(tally_op_wait(op, 100) == -ETIMEDOUT);
    atomic_fetch_add(&b->stage, 1);
    CHECK(tally_op_wait(op, -1) == -ECONNRESET);
    _exit(0);
}

/* Steps until all are told to stop. */
static int many_steps(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c;
    CHECK(tally_comm_open(NULL, &c) == 0);
    for (int64_t stop = 0; !stop; atomic_fetch_add(&b->stage, rank == 0)) {
        tally_op *large = submit(c, "large"), *op;
        stop = atomic_load(&b->stop);
        CHECK(tally_push_pull(c, "stop", &stop, &stop, 1, TALLY_INT64, TALLY_MAX, NULL, &op) == 0);
        CHECK(tally_op_wait(large, -1) == 0 && tally_op_wait(op, -1) == 0);
        tally_op_free(large);
        tally_op_free(op);
        atomic_store(&b->services, tally_comm_service_count(c));
    }
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

enum { LISTED = 2, LISTED_COUNT = 200000 };

/* A list whose first tensor is the most urgent, and then its last; parts are small and all credit is there. */
static int steps_of_a_list(int rank, void *arg)
{
    static const char *const names[LISTED] = {"first", "last"};
    static const uint64_t bytes[LISTED] = {LISTED_COUNT * 4, LISTED_COUNT * 4};
    static float x[LISTED][LISTED_COUNT];
    tally_comm *c;
    CHECK(tally_comm_open(NULL, &c) == 0);
    CHECK(tally_plan(c, 0, LISTED, names, bytes) == 0);
    for (int step = 0; step < 4; step++) {
        tally_op *op[LISTED];
        for (int i = 0; i < LISTED; i++) {
            struct tally_options o = {.size = sizeof o, .priority = step < 2 ? -i : i};
            CHECK(tally_push_pull(c, names[i], x[i], x[i], LISTED_COUNT, TALLY_FLOAT32, TALLY_SUM, &o,
                                  &op[i]) == 0);
        }
        for (int i = 0; i < LISTED; i++) {
            CHECK(tally_op_wait(op[i], -1) == 0);
            tally_op_free(op[i]);
        }
    }
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void await_services(struct board *b, int count)
{
    for (int i = 0; atomic_load(&b->services) != count; i++) {
        if (i > 60000)
            fail_msg("%d services, not %d", atomic_load(&b->services), count);
        job_sleep_ms(2);
    }
    job_await(&b->stage, atomic_load(&b->stage) + 5);
}

static struct tly_timeline read_files(const char *pattern, size_t count)
{
    struct tly_timeline t = {0};
    char why[256];
    glob_t found;
    assert_int_equal(glob(pattern, 0, NULL, &found), 0);
    assert_int_equal(found.gl_pathc, count);
    for (size_t i = 0; i < count; i++) {
        FILE *in = fopen(found.gl_pathv[i], "re");
        assert_non_null(in);
        if (tly_timeline_read(in, &t, why, sizeof why) != 0)
            fail_msg("%s %s", found.gl_pathv[i], why);
        fclose(in);
    }
    globfree(&found);
    return t;
}

static void leaves_what_was_open(const int *machine)
{
    struct board *b = job_shared(sizeof *b);
    char folder[] = "/tmp/trace-job-XXXXXX", setting[64], pattern[64], command[64];
    assert_non_null(mkdtemp(folder));
    snprintf(setting, sizeof setting, "TALLY_TRACE=%s/t", folder);
    struct job j = {
        .ranks = 2, .machine = machine, .main = half_a_job, .arg = b, .settings = {setting, SLOW}};
    job_start(&j);
    job_await(&b->stage, 3);
    kill(j.rank_pid[1], SIGKILL);
    assert_int_equal(job_wait_rank(&j, 0), 0);
    assert_int_equal(job_wait_rank(&j, 1), 128 + SIGKILL);
    snprintf(pattern, sizeof pattern, "%s/t.*.rank-0.json", folder);
    struct tly_timeline t = read_files(pattern, 1);
    struct tly_process *p = &t.processes[0];
    assert_int_equal(t.name_count, 2);
    size_t open = 0, ended = 0;
    for (size_t i = 0; i < p->slice_count; i++) {
        const struct tly_slice *s = &p->slices[i];
        bool first = s->key == t.names[0].key;
        const char *name = first ? t.names[0].name : t.names[1].name;
        assert_true(first || s->key == t.names[1].key);
        if (s->row != TLY_ROW_OPERATION)
            continue;
        assert_true(s->open == (strcmp(name, "one") == 0));
        open += s->open;
        ended += !s->open;
    }
    assert_true(open == 1 && ended == 1);
    tly_timeline_finish(&t);
    if (!machine) { /* else the service has had nothing to do */
        snprintf(pattern, sizeof pattern, "%s/t.*.service-0-*.json", folder);
        t = read_files(pattern, 1);
        assert_true(t.processes[0].slice_count > 0);
        tly_timeline_finish(&t);
    }
    snprintf(command, sizeof command, "rm -r %s", folder);
    assert_int_equal(system(command), 0);
    job_clear(&j);
}

static void test_a_failed_job_leaves_what_was_open(void **state)
{
    leaves_what_was_open(NULL);
}

static void test_so_it_does_in_shared_memory(void **state)
{
    leaves_what_was_open((int[]){0, 0});
}

/* One tallyd leaves and another gets its place: both have written what they did, and nothing of it is the other's. */
static void test_a_place_that_two_have_had(void **state)
{
    struct board *b = job_shared(sizeof *b);
    char folder[] = "/tmp/trace-job-XXXXXX", setting[64], pattern[64], command[64], why[256];
    assert_non_null(mkdtemp(folder));
    snprintf(setting, sizeof setting, "TALLY_TRACE=%s/t", folder);
    struct job j = {.ranks = 2, .tallyds = 1, .main = many_steps, .arg = b, .settings = {setting}};
    job_start(&j);
    await_services(b, 3);
    kill(j.tallyd_pid[0], SIGTERM);
    assert_int_equal(job_wait_tallyd(&j, 0), 0);
    await_services(b, 2);
    job_start_tallyd(&j, 0);
    await_services(b, 3);
    atomic_store(&b->stop, 1);
    job_finish(&j);
    snprintf(pattern, sizeof pattern, "%s/t.*.service-2-*.json", folder);
    struct tly_timeline t = read_files(pattern, 2);
    for (int i = 0; i < 2; i++)
        assert_true(t.processes[i].index == 2 && t.processes[i].slice_count > 0);
    assert_true(t.processes[0].incarnation != t.processes[1].incarnation);
    tly_timeline_finish(&t);
    snprintf(pattern, sizeof pattern, "%s/t.*.json", folder);
    t = read_files(pattern, 6);
    int64_t slack;
    size_t which;
    if (tly_timeline_merge(&t, &slack, &which, why, sizeof why) != 0)
        fail_msg("%zu %s", which, why);
    for (size_t i = 0; i < t.count; i++) /* they all have one clock */
        assert_true(llabs(t.processes[i].offset) <= t.processes[i].error);
    tly_timeline_finish(&t);
    snprintf(command, sizeof command, "rm -r %s", folder);
    assert_int_equal(system(command), 0);
    job_clear(&j);
}

static int by_end(const void *a, const void *b)
{
    int64_t x = ((const struct tly_slice *)a)->to, y = ((const struct tly_slice *)b)->to;
    return (x > y) - (x < y);
}

/* In the order in which a list's last tensors are the most urgent its parts go from the end, but for each tensor's first,
 * whose service says who does not come. */
static void test_a_list_goes_backwards(void **state)
{
    char folder[] = "/tmp/trace-job-XXXXXX", setting[64], pattern[64], command[64];
    assert_non_null(mkdtemp(folder));
    snprintf(setting, sizeof setting, "TALLY_TRACE=%s/t", folder);
    struct job j = {.ranks = 2,
                    .main = steps_of_a_list,
                    .settings = {setting, "TALLY_PART_BYTES=16K", "TALLY_CREDIT_BYTES=64M",
                                 "TALLY_WINDOW_PARTS=1000"}};
    job_start(&j);
    job_finish(&j);
    snprintf(pattern, sizeof pattern, "%s/t.*.rank-0.json", folder);
    struct tly_timeline t = read_files(pattern, 1);
    struct tly_process *p = &t.processes[0];
    int tensors = 0;
    qsort(p->slices, p->slice_count, sizeof *p->slices, by_end);
    for (uint32_t round = 1; round < 4; round += 2) /* each the second in its order */
        for (size_t n = 0; n < t.name_count; n++) {
            uint32_t count = 0, seen = 0;
            if (strcmp(t.names[n].name, "first") != 0 && strcmp(t.names[n].name, "last") != 0)
                continue;
            tensors++;
            for (size_t i = 0; i < p->slice_count; i++)
                count += p->slices[i].row == TLY_ROW_QUEUE && p->slices[i].key == t.names[n].key &&
                         p->slices[i].round == round;
            for (size_t i = 0; i < p->slice_count; i++) {
                const struct tly_slice *s = &p->slices[i];
                if (s->row == TLY_ROW_QUEUE && s->key == t.names[n].key && s->round == round) {
                    assert_int_equal(s->part, round == 1 || seen == 0 ? seen : count - seen);
                    seen++;
                }
            }
            assert_true(seen > 40);
        }
    assert_int_equal(tensors, 2 * LISTED);
    tly_timeline_finish(&t);
    snprintf(command, sizeof command, "rm -r %s", folder);
    assert_int_equal(system(command), 0);
    job_clear(&j);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_list_goes_backwards),
        cmocka_unit_test(test_a_place_that_two_have_had),
        cmocka_unit_test(test_a_failed_job_leaves_what_was_open),
        cmocka_unit_test(test_so_it_does_in_shared_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
