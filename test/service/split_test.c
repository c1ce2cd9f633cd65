/* split_test.c - whole jobs over machines that say different bandwidths: each service sums what the plan says, and
 * the splits that are there to compare with sum where they should. */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "job.h"

enum { PART = 4096, PARTS = 1400, MOST_SERVICES = 8 };

struct expectation {
    const char *bandwidth[JOB_MOST_RANKS]; /* of each rank's machine; NULL: not given */
    double share[MOST_SERVICES];           /* of each service */
    double seconds;                        /* predicted for 1 GB; 0: nothing can be */
    const char *says;                      /* rank 0's log; NULL: nothing in particular */
};

/* The i-th number with this name in the report; -1 if it is null. */
static double number(const char *json, const char *name, int i)
{
    char key[64];
    double v = -1;
    snprintf(key, sizeof key, "\"%s\": ", name);
    const char *at = strstr(json, key);
    for (; at && i > 0; i--)
        at = strstr(at + 1, key);
    CHECK(at);
    at += strlen(key);
    CHECK(strncmp(at, "null", 4) == 0 || sscanf(at, "%lf", &v) == 1);
    return v;
}

static int sums(int rank, void *arg)
{
    const struct expectation *e = arg;
    enum { COUNT = PART / 4 * PARTS };
    static float x[COUNT];
    char *json, host[16];
    tally_comm *c;
    tally_op *op;
    if (e->bandwidth[rank])
        setenv("TALLY_BANDWIDTH", e->bandwidth[rank], 1);
    snprintf(host, sizeof host, "m%d", rank);
    setenv("TALLY_HOST_ID", host, 1); /* what a job sets of this one and the next is for tallyd */
    setenv("TALLY_SUM_RATE", "", 1);
    CHECK(tally_comm_open(NULL, &c) == 0);
    for (int i = 0; i < COUNT; i++)
        x[i] = (float)rank;
    CHECK(tally_push_pull(c, "x", x, x, COUNT, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
    CHECK(tally_op_wait(op, -1) == 0);
    tally_op_free(op);
    int size = tally_comm_size(c);
    for (int i = 0; i < COUNT; i++)
        CHECK(x[i] == (float)(size * (size - 1) / 2));
    CHECK(tally_comm_report(c, 60000, &json) == 0);
    double predicted = number(json, "predicted_s_per_gb", 0);
    CHECK(e->seconds > 0 ? fabs(predicted - e->seconds) < 1e-4 * e->seconds : predicted == -1);
    for (int i = 0; i < tally_comm_service_count(c); i++) {
        /* The name is in no plan, its deal begins anywhere: two parts more or less. */
        double parts = number(json, "bytes_summed", i) / PART;
        if (fabs(parts - e->share[i] * PARTS) > 2) {
            fprintf(stderr, "service %d: %g parts, not %g\n%s\n", i, parts, e->share[i] * PARTS, json);
            CHECK(!"as planned");
        }
        CHECK(e->share[i] > 0 || parts == 0);
    }
    free(json);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static int opens_and_closes(int rank, void *arg)
{
    tally_comm *c;
    CHECK(tally_comm_open(NULL, &c) == 0);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void run(struct expectation e, struct job j)
{
    struct expectation *shared = job_shared(sizeof *shared);
    *shared = e;
    j.main = sums;
    j.arg = shared;
    job_start(&j);
    job_finish(&j);
    if (e.seconds > 0)
        job_log_holds(&j, 0, "at best");
    else
        job_log_lacks(&j, 0, "at best");
    if (e.says)
        job_log_holds(&j, 0, e.says);
    if (j.tallyds)
        job_log_lacks(&j, JOB_MOST_RANKS, "are too few for"); /* it takes no more than it may */
    job_clear(&j);
}

#define SETTINGS(...) \
    { \
        "TALLY_PART_BYTES=4K", "TALLY_FRAGMENT_BYTES=4K", __VA_ARGS__ \
    }

/* Of R = 3 ranks: (10 T - 1) + (10 T - 1) + 2 x 5 T / 3 = 1, T = 9 / 70: 2/7, 2/7, 3/14, 3/14.  The third machine
 * takes 1/5 for its own pushes: it sums nothing, and all wait for it: 8 s for 1 GB at 1 Gbit/s, a fifth at 5. */
static void machines_sum_by_bandwidth(void **state)
{
    run((struct expectation){.bandwidth = {"10G", "10G", "5G"},
                             .share = {2. / 7, 2. / 7, 0, 3. / 14, 3. / 14},
                             .seconds = 8. / 5},
        (struct job){.ranks = 3, .tallyds = 2, .settings = SETTINGS("TALLY_BANDWIDTH=5G")});
}

/* Eq. 1, 2: n^2 + kn - 2k = 20, each tallyd 2(n - 1), each machine n - k. */
static void machines_alike_sum_as_ever(void **state)
{
    static const double share[] = {0.1, 0.1, 0.1, 0.1, 0.3, 0.3};
    struct expectation e = {.seconds = 0};
    memcpy(e.share, share, sizeof share);
    run(e, (struct job){.ranks = 4, .tallyds = 2, .settings = SETTINGS(NULL)});
    e.seconds = 8. / 1 * 24 / 20; /* Eq. 6 */
    run(e, (struct job){.ranks = 4, .tallyds = 2, .settings = SETTINGS("TALLY_BANDWIDTH=1G")});
}

/* The first line says which tallyd do not make the job faster, also where no bandwidth is known. */
static void the_first_line_tells_of_spare_tallyd(void **state)
{
    static const struct {
        int ranks, tallyds;
        const char *says; /* NULL: all are of use */
    } cases[] = {{2, 1, "; 1 tallyd brings nothing: 2 machines are as fast alone"},
                 {3, 5, "; 2 of 5 tallyd bring nothing: 3 machines are as fast with 3"},
                 {3, 2, NULL}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct job j = {.ranks = cases[i].ranks,
                        .tallyds = cases[i].tallyds,
                        .main = opens_and_closes,
                        .settings = SETTINGS(NULL)};
        job_start(&j);
        job_finish(&j);
        if (cases[i].says)
            job_log_holds(&j, 0, cases[i].says);
        else
            job_log_lacks(&j, 0, "nothing");
        job_clear(&j);
    }
}

/* What rests on a figure that one measurement gave, and nothing confirms, is no advice. */
static void the_first_line_doubts_what_was_measured_once(void **state)
{
    char host[64] = "", once[100], twice[100];
    assert_int_equal(gethostname(host, sizeof host - 1), 0);
    snprintf(once, sizeof once, "TALLY_MEASURED=%s=1G?", host);
    snprintf(twice, sizeof twice, "TALLY_MEASURED=%s=1G", host);
    struct job j = {.ranks = 3, .tallyds = 5, .main = opens_and_closes, .settings = SETTINGS(once)};
    job_start(&j);
    job_finish(&j);
    job_log_holds(&j, 0, " Gbit/s; 8 cards were measured once and may carry more");
    job_log_lacks(&j, 0, "nothing");
    job_clear(&j);
    j = (struct job){.ranks = 3, .tallyds = 5, .main = opens_and_closes, .settings = SETTINGS(twice)};
    job_start(&j);
    job_finish(&j);
    job_log_holds(&j, 0, "; 2 of 5 tallyd bring nothing: ");
    job_log_lacks(&j, 0, "once");
    job_clear(&j);
}

/* The one of unknown bandwidth counts as one of 5G. */
static void an_unknown_machine_is_a_slow_one(void **state)
{
    run((struct expectation){.bandwidth = {"10G", NULL, "5G"}, .share = {1}},
        (struct job){.ranks = 3, .settings = SETTINGS(NULL)});
}

/* A tallyd on the host of the second of R = 3 ranks is behind its card, which carries 1 + (R - 2) X for both.  Cards alike
 * sum alike: a third each, and who share one half of that each. */
static void hosts_of_one_id_share_a_card(void **state)
{
    run((struct expectation){.share = {1. / 3, 1. / 6, 1. / 3, 1. / 6}, .seconds = 8 * 4. / 3},
        (struct job){.ranks = 3,
                     .tallyds = 1,
                     .settings = SETTINGS("TALLY_BANDWIDTH=1G", "TALLY_HOST_ID=m1")});
}

/* A service that adds slowly: n x / rate <= T.  Two tallyd of 10G, four machines of 10G: T of Eq. 6 would give each
 * tallyd 0.3; with 4G of inputs for each T = 4 (10 T - 1) / 2 + 2 T = 1, T = 3 / 22, and a tallyd gets T. */
static void slow_sums_get_less(void **state)
{
    const double t = 3. / 22, machine = (10 * t - 1) / 2;
    run((struct expectation){.bandwidth = {"10G", "10G", "10G", "10G"},
                             .share = {machine, machine, machine, machine, t, t},
                             .seconds = 8 * t},
        (struct job){.ranks = 4,
                     .tallyds = 2,
                     .settings = SETTINGS("TALLY_BANDWIDTH=10G", "TALLY_SUM_RATE=4G")});
}

static void a_tallyd_without_memory_sums_nothing(void **state)
{
    run(
        (struct expectation){
            .share = {1. / 3, 1. / 3, 1. / 3, 0},
            .says =
                "gets no share: it has 15.4 KB of memory, and parts of 3 ranks and a result take 16.4 KB"},
        (struct job){
            .ranks = 3, .tallyds = 1, .settings = SETTINGS(NULL), .tallyd_options = {"--memory", "15K"}});
}

/* ... and does not shorten the parts of the others: the longest have 512 KB. */
static void a_tallyd_without_memory_leaves_parts_as_long(void **state)
{
    run(
        (struct expectation){
            .share = {1. / 3, 1. / 3, 1. / 3, 0},
            .seconds = 8 * 4 / 3.,
            .says = "gets no share: it has 102 KB of memory, and parts of 3 ranks and a result take 2.1 MB"},
        (struct job){.ranks = 3,
                     .tallyds = 1,
                     .settings = {"TALLY_BANDWIDTH=1G"},
                     .tallyd_options = {"--memory", "100K"}});
}

static void splits_for_comparison(void **state)
{
    run((struct expectation){.share = {0.25, 0.25, 0.25, 0.25, 0}, .seconds = 8 * 6 / 4.},
        (struct job){.ranks = 4,
                     .tallyds = 1,
                     .settings = SETTINGS("TALLY_BANDWIDTH=1G", "TALLY_SPLIT=all-reduce")});
    run((struct expectation){.share = {0, 0, 0, 0.5, 0.5}, .seconds = 8 * 3 / 2.},
        (struct job){.ranks = 3,
                     .tallyds = 2,
                     .settings = SETTINGS("TALLY_BANDWIDTH=1G", "TALLY_SPLIT=server")});
}

/* The sum of 1, 2, .., size is right, whatever the split has become. */
static int sums_anyhow(int rank, void *arg)
{
    enum { COUNT = 100000 };
    static float x[COUNT];
    const double *predicted = arg;
    char *json;
    tally_comm *c;
    tally_op *op;
    CHECK(tally_comm_open(NULL, &c) == 0);
    int size = tally_comm_size(c);
    for (int i = 0; i < COUNT; i++)
        x[i] = (float)(rank + 1);
    CHECK(tally_push_pull(c, "x", x, x, COUNT, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
    CHECK(tally_op_wait(op, -1) == 0);
    tally_op_free(op);
    for (int i = 0; i < COUNT; i++)
        CHECK(x[i] == (float)(size * (size + 1) / 2));
    CHECK(tally_comm_report(c, 60000, &json) == 0);
    CHECK((number(json, "predicted_s_per_gb", 0) > 0) == (*predicted > 0));
    free(json);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

/* On one machine nothing is measured unless that is asked for; and then also what is said, but only what can be. */
static void cards_are_measured_where_that_makes_sense(void **state)
{
    static const struct {
        const char *setting;
        int ranks, tallyds;
        bool measured;
    } jobs[] = {{"TALLY_MEASURE=all", 3, 1, true},
                {"TALLY_MEASURE=all", 1, 0, false},
                {"TALLY_MEASURE=unknown", 3, 1, false},
                {"TALLY_MEASURE=off", 3, 1, false}};
    for (size_t i = 0; i < sizeof jobs / sizeof *jobs; i++) {
        double predicted = jobs[i].measured;
        struct job j = {.ranks = jobs[i].ranks,
                        .tallyds = jobs[i].tallyds,
                        .main = sums_anyhow,
                        .arg = &predicted,
                        .settings = {jobs[i].setting, NULL}};
        job_start(&j);
        job_finish(&j);
        (jobs[i].measured ? job_log_holds : job_log_lacks)(&j, 0, "network cards were measured: ");
        job_log_lacks(&j, 0, "could not be measured");
        job_clear(&j);
    }
}

static int cannot_open(int rank, void *arg)
{
    tally_comm *c = NULL;
    CHECK(tally_comm_open(NULL, &c) == -EINVAL && c == NULL);
    CHECK_HOLDS(tally_error(), arg);
    return 0;
}

static void server_without_tallyd(void **state)
{
    struct job j = {.ranks = 2,
                    .main = cannot_open,
                    .arg = "TALLY_SPLIT=server leaves the sums to tallyd, and there is none",
                    .settings = {"TALLY_SPLIT=server", NULL}};
    job_start(&j);
    job_finish(&j);
    job_clear(&j);
}

static void server_with_tallyd_without_memory(void **state)
{
    struct job j = {.ranks = 2,
                    .tallyds = 1,
                    .main = cannot_open,
                    .arg = "there is none with memory for them",
                    .settings = SETTINGS("TALLY_SPLIT=server"),
                    .tallyd_options = {"--memory", "11K"}};
    job_start(&j);
    for (int i = 0; i < j.ranks; i++)
        assert_int_equal(job_wait_rank(&j, i), 0);
    job_log_holds(&j, 0, "gets no share: it has 11.3 KB of memory");
    job_clear(&j);
}

static void nonsense_is_refused(void **state)
{
    static const char *const wrong[] = {"TALLY_BANDWIDTH=0", "TALLY_BANDWIDTH=fast", "TALLY_SUM_RATE=-1",
                                        "TALLY_SPLIT=none", "TALLY_MEASURE=often"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct job j = {.ranks = 1,
                        .main = cannot_open,
                        .arg = (void *)(uintptr_t)wrong[i],
                        .settings = {wrong[i], NULL}};
        job_start(&j);
        job_finish(&j);
        job_clear(&j);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(machines_sum_by_bandwidth),
        cmocka_unit_test(machines_alike_sum_as_ever),
        cmocka_unit_test(the_first_line_tells_of_spare_tallyd),
        cmocka_unit_test(the_first_line_doubts_what_was_measured_once),
        cmocka_unit_test(an_unknown_machine_is_a_slow_one),
        cmocka_unit_test(hosts_of_one_id_share_a_card),
        cmocka_unit_test(slow_sums_get_less),
        cmocka_unit_test(a_tallyd_without_memory_sums_nothing),
        cmocka_unit_test(a_tallyd_without_memory_leaves_parts_as_long),
        cmocka_unit_test(splits_for_comparison),
        cmocka_unit_test(cards_are_measured_where_that_makes_sense),
        cmocka_unit_test(server_without_tallyd),
        cmocka_unit_test(server_with_tallyd_without_memory),
        cmocka_unit_test(nonsense_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
