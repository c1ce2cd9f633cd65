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

struct board {
    atomic_int stage;
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

static struct tly_timeline read_only_file(const char *pattern)
{
    struct tly_timeline t = {0};
    char why[256];
    glob_t found;
    assert_int_equal(glob(pattern, 0, NULL, &found), 0);
    assert_int_equal(found.gl_pathc, 1);
    FILE *in = fopen(found.gl_pathv[0], "re");
    assert_non_null(in);
    if (tly_timeline_read(in, &t, why, sizeof why) != 0)
        fail_msg("%s %s", found.gl_pathv[0], why);
    fclose(in);
    globfree(&found);
    return t;
}

static void test_a_failed_job_leaves_what_was_open(void **state)
{
    struct board *b = job_shared(sizeof *b);
    char folder[] = "/tmp/trace-job-XXXXXX", setting[64], pattern[64], command[64];
    assert_non_null(mkdtemp(folder));
    snprintf(setting, sizeof setting, "TALLY_TRACE=%s/t", folder);
    struct job j = {.ranks = 2, .main = half_a_job, .arg = b, .settings = {setting}};
    job_start(&j);
    job_await(&b->stage, 3);
    kill(j.rank_pid[1], SIGKILL);
    assert_int_equal(job_wait_rank(&j, 0), 0);
    assert_int_equal(job_wait_rank(&j, 1), 128 + SIGKILL);
    snprintf(pattern, sizeof pattern, "%s/t.*.rank-0.json", folder);
    struct tly_timeline t = read_only_file(pattern);
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
    snprintf(command, sizeof command, "rm -r %s", folder);
    assert_int_equal(system(command), 0);
    job_clear(&j);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_failed_job_leaves_what_was_open),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
