/* start_test.c - starting a job: who is missing, comes twice, brings another secret or other settings, finds the
 * address taken, comes too late.  Each gets an error that names what was waited for, and nobody hangs. */
#include <arpa/inet.h>
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <sodium.h>

#include "base/log.h"
#include "base/param.h"
#include "job.h"
#include "membership/coordinator.h"
#include "membership/place.h"

#include <cmocka.h>

/* What each rank sets before it opens, and what it must get. */
struct expectation {
    const char *set[JOB_MOST_RANKS]; /* "NAME=value" */
    int err[JOB_MOST_RANKS];
    const char *says[JOB_MOST_RANKS][2];
};

static int opens(int rank, void *arg)
{
    const struct expectation *e = arg;
    tally_comm *c = NULL;
    if (e->set[rank]) {
        char text[200];
        snprintf(text, sizeof text, "%s", e->set[rank]);
        char *eq = strchr(text, '=');
        *eq = '\0';
        setenv(text, eq + 1, 1);
    }
    int err = tally_comm_open(NULL, &c);
    fprintf(stderr, "open: %d %s\n", err, err ? tally_error() : "");
    CHECK(err == e->err[rank]);
    for (int i = 0; i < 2 && e->says[rank][i]; i++)
        CHECK_HOLDS(tally_error(), e->says[rank][i]);
    if (err) {
        CHECK(c == NULL);
        return 0;
    }
    tally_op *op;
    float x[100];
    for (int i = 0; i < 100; i++)
        x[i] = (float)(i + rank);
    CHECK(tally_push_pull(c, "x", x, x, 100, TALLY_FLOAT32, TALLY_MAX, NULL, &op) == 0);
    CHECK(tally_op_wait(op, -1) == 0);
    for (int i = 0; i < 100; i++)
        CHECK(x[i] == (float)(i + tally_comm_size(c) - 1));
    tally_op_free(op);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void run_job(struct job j)
{
    j.main = opens;
    job_start(&j);
    job_finish(&j);
    job_clear(&j);
}

/* --- secrets ------------------------------------------------------------------------------------- */

static void test_secret(void **state)
{
    struct expectation e = {{0}};
    run_job((struct job){
        .ranks = 3, .tallyds = 1, .arg = &e, .settings = {"TALLY_SECRET=sixteen bytes and more", NULL}});
}

static void test_wrong_secret(void **state)
{
    struct expectation e = {
        .set = {NULL, "TALLY_SECRET=another secret of this job"},
        .err = {-ETIMEDOUT, -EACCES, -ETIMEDOUT},
        .says = {{"rank 1 did not join"}, {"the job secret differs"}, {"rank 1 did not join"}}};
    struct job j = {.ranks = 3,
                    .arg = &e,
                    .main = opens,
                    .settings = {"TALLY_SECRET=sixteen bytes and more", "TALLY_JOIN_TIMEOUT=4"}};
    job_start(&j);
    job_finish(&j);
    job_log_holds(
        &j, 0,
        "was not let in: the job secret differs"); /* whom the others wait for comes, but as a stranger */
    job_clear(&j);
}

static void test_no_secret_here(void **state)
{
    struct expectation e = {.set = {NULL, "TALLY_SECRET="},
                            .err = {-ETIMEDOUT, -EACCES},
                            .says = {{"rank 1 did not join"}, {"the job secret differs"}}};
    run_job((struct job){.ranks = 2,
                         .arg = &e,
                         .settings = {"TALLY_SECRET=sixteen bytes and more", "TALLY_JOIN_TIMEOUT=3"}});
}

static void test_secret_needed(void **state)
{
    /* An address for documentation (RFC 5737): no machine's own. */
    struct expectation e = {.err = {-EACCES, -EACCES},
                            .says = {{"needs a secret"}, {"tally secret", "needs a secret"}}};
    run_job((struct job){.ranks = 2, .arg = &e, .settings = {"TALLY_COORD=192.0.2.1:29777"}});
}

static void test_short_secret(void **state)
{
    struct expectation e = {.err = {-EINVAL}, .says = {{"TALLY_SECRET", "16"}}};
    run_job((struct job){.ranks = 1, .arg = &e, .settings = {"TALLY_SECRET=fifteen bytes.."}});
}

/* It is refused, says why and gives up; the job goes on. */
static void test_tallyd_with_wrong_secret(void **state)
{
    struct expectation e = {{0}};
    struct job j = {.ranks = 2,
                    .start_first = 1,
                    .main = opens,
                    .arg = &e,
                    .settings = {"TALLY_SECRET=sixteen bytes and more"}};
    job_start(&j);
    struct job stranger = {.tallyds = 1,
                           .port = j.port,
                           .settings = {"TALLY_SECRET=a stranger's own secret"}};
    job_start(&stranger);
    assert_int_equal(job_wait_tallyd(&stranger, 0), 1);
    job_log_holds(&stranger, JOB_MOST_RANKS, "the job secret differs");
    job_clear(&stranger);
    job_start_rank(&j, 1);
    job_finish(&j);
    job_clear(&j);
}

/* --- who comes ----------------------------------------------------------------------------------- */

static void test_missing_rank(void **state)
{
    struct expectation e = {.err = {-ETIMEDOUT, -ETIMEDOUT},
                            .says = {{"rank 2, 3 did not join", "TALLY_JOIN_TIMEOUT"},
                                     {"rank 2, 3 did not join"}}};
    run_job((struct job){.ranks = 4, .start_first = 2, .arg = &e, .settings = {"TALLY_JOIN_TIMEOUT=1"}});
}

static void test_rank_twice(void **state)
{
    struct expectation e = {
        .set = {NULL, NULL, "RANK=1"},
        .err = {-EEXIST, -EEXIST, -EEXIST},
        .says = {{"rank 1 has come twice"}, {"rank 1 has come twice"}, {"rank 1 has come twice"}}};
    run_job((struct job){.ranks = 3, .arg = &e});
}

static void test_other_world_size(void **state)
{
    struct expectation e = {.set = {NULL, "WORLD_SIZE=3"},
                            .err = {-EPROTO, -EPROTO},
                            .says = {{"was started for", "ranks"}, {"was started for", "for 3"}}};
    run_job((struct job){.ranks = 2, .arg = &e});
}

static void test_other_settings(void **state)
{
    struct expectation e = {.set = {"TALLY_PART_BYTES=1048576", "TALLY_PART_BYTES=8192"},
                            .err = {-EPROTO, -EPROTO},
                            .says = {{"TALLY_PART_BYTES=8192", "TALLY_PART_BYTES=1048576"},
                                     {"TALLY_PART_BYTES=8192", "TALLY_PART_BYTES=1048576"}}};
    run_job((struct job){.ranks = 2, .arg = &e});
}

static int opens_as_another(int rank, void *arg)
{
    if (rank == 1)
        tly_release = "99.5.0";
    return opens(rank, arg);
}

static void test_other_release(void **state)
{
    /* A third could come after these two have ended, and would wait for the next start. */
    struct expectation e = {.err = {-EPROTO, -EPROTO},
                            .says = {{"Tally 99.5 ", "rank 1 on"}, {"Tally 99.5 ", "rank 1 on"}}};
    struct job j = {.ranks = 2, .main = opens_as_another, .arg = &e};
    job_start(&j);
    job_finish(&j);
    job_clear(&j);
}

static void test_other_checksum(void **state)
{
    struct expectation e = {.set = {"TALLY_CHECKSUM=1", "TALLY_CHECKSUM=0"},
                            .err = {-EPROTO, -EPROTO},
                            .says = {{"TALLY_CHECKSUM=1", "TALLY_CHECKSUM=0"},
                                     {"TALLY_CHECKSUM=1", "TALLY_CHECKSUM=0"}}};
    run_job((struct job){.ranks = 2, .arg = &e});
}

static void test_other_restart(void **state)
{
    struct expectation e = {.set = {"TORCHELASTIC_RESTART_COUNT=0", "TORCHELASTIC_RESTART_COUNT=1"},
                            .err = {-EPROTO, -EPROTO},
                            .says = {{"TORCHELASTIC_RESTART_COUNT"}, {"restart 0", "restart 1"}}};
    run_job((struct job){.ranks = 2, .arg = &e});
}

static void test_other_job(void **state)
{
    struct expectation e = {.set = {NULL, "TALLY_JOB=mine"},
                            .err = {-ETIMEDOUT, -ESTALE},
                            .says = {{"rank 1 did not join"}, {"'mine'", "TALLY_JOB"}}};
    run_job((struct job){.ranks = 2, .arg = &e, .settings = {"TALLY_JOIN_TIMEOUT=3"}});
}

static void test_bad_ranks(void **state)
{
    struct expectation e = {.set = {"RANK=5", "WORLD_SIZE="},
                            .err = {-EINVAL, -EINVAL},
                            .says = {{"RANK=5", "WORLD_SIZE=2"}, {"WORLD_SIZE is not"}}};
    run_job((struct job){.ranks = 2, .arg = &e});
}

/* --- addresses ----------------------------------------------------------------------------------- */

static void test_no_coordinator(void **state)
{
    struct expectation e = {
        .set = {"RANK=1"},
        .err = {-ETIMEDOUT},
        .says = {
            {"no coordinator at 127.0.0.1",
             "nothing listens at the port: is rank 0 started, and there? The address is from the store"}}};
    run_job((struct job){.ranks = 2,
                         .start_first = 1,
                         .arg = &e,
                         .settings = {"TALLY_JOIN_TIMEOUT=1", "TALLY_COORD_FROM=the store"}});
}

static void test_bad_address(void **state)
{
    struct expectation e = {.err = {-EINVAL}, .says = {{"TALLY_COORD=host:99999", "HOST"}}};
    run_job((struct job){.ranks = 1, .arg = &e, .settings = {"TALLY_COORD=host:99999"}});
}

/* Something else listens there, and speaks first. */
static void test_port_taken(void **state)
{
    struct expectation e = {.err = {-EADDRINUSE}, .says = {{"is in use", "TALLY_PORT"}}};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), port = job_free_port();
    struct sockaddr_in a = {.sin_family = AF_INET,
                            .sin_port = htons((uint16_t)port),
                            .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int)), 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(listen(fd, 16), 0);
    pid_t holder = fork();
    if (holder == 0) {
        static const char banner[] =
            "220 mail.example.org ESMTP, which has nothing at all to do with sums of gradients, "
            "and more than one header's worth of text\r\n";
        for (;;) {
            int guest = accept(fd, NULL, NULL);
            send(guest, banner, sizeof banner, MSG_NOSIGNAL);
            job_sleep_ms(100);
            close(guest);
        }
    }
    close(fd);
    struct job j = {.ranks = 2, .start_first = 1, .port = port, .main = opens, .arg = &e};
    job_start(&j);
    job_finish(&j);
    job_clear(&j);
    kill(holder, SIGKILL);
}

/* The coordinator of an earlier start holds the port, lets rank 0 in and dies: rank 0 takes its place. */
static void test_port_held_by_the_dying(void **state)
{
    struct expectation e = {{0}};
    struct job j = {.ranks = 2, .start_first = 1, .port = job_free_port(), .main = opens, .arg = &e};
    int ready[2];
    assert_int_equal(pipe(ready), 0);
    pid_t holder = fork();
    if (holder == 0) {
        struct tly_params p;
        struct tly_place place;
        struct tly_coordinator *c;
        char why[200];
        struct sockaddr_in a = {.sin_family = AF_INET,
                                .sin_port = htons((uint16_t)j.port),
                                .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        struct sockaddr_storage at = {0};
        memcpy(&at, &a, sizeof a);
        setenv("RANK", "0", 1);
        setenv("WORLD_SIZE", "2", 1);
        setenv("TALLY_COORD", "127.0.0.1", 1);
        if (sodium_init() < 0 || tly_params_load(&p, NULL, why, sizeof why) != 0 ||
            tly_place_find(&place, &p, true) != 0 ||
            tly_coordinator_create(&place, &p, &at, -1, false, &c) != 0)
            _exit(1);
        write(ready[1], "r", 1);
        job_sleep_ms(1500); /* by then rank 0 waits here for rank 1, if the machine is not too busy */
        _exit(0);
    }
    char r;
    close(ready[1]);
    assert_int_equal(read(ready[0], &r, 1), 1);
    close(ready[0]);
    job_start(&j);
    assert_int_equal(waitpid(holder, NULL, 0), holder); /* rank 1 must not meet the dying one, too */
    job_start_rank(&j, 1);
    job_finish(&j);
    job_clear(&j);
}

/* --- two communicators of a process -------------------------------------------------------------- */

/* Each rank opens a job of one, too. */
static int opens_another(int rank, void *arg)
{
    tally_comm *c = job_open(), *beside;
    char place[64];
    int port = 0;
    const char *const settings[] = {"TALLY_RANK=0/1", place, NULL};
    snprintf(place, sizeof place, "TALLY_COORD=127.0.0.1");
    CHECK(tally_comm_listen(settings, &port) == 0);
    snprintf(place, sizeof place, "TALLY_COORD=127.0.0.1:%d", port);
    CHECK(tally_comm_open(settings, &beside) == 0);
    CHECK(tally_comm_rank(beside) == 0);
    CHECK(tally_comm_close(beside) == 0);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

/* A process's lines have the rank of the communicator that it opened first. */
static void test_a_job_beside_leaves_the_rank_in_lines(void **state)
{
    struct job j = {.ranks = 2, .main = opens_another, .settings = {"TALLY_LOG=debug"}};
    job_start(&j);
    job_finish(&j);
    job_log_holds(&j, 1, "tally info rank 1 comm: Tally " TALLY_VERSION ": rank 0 of 1");
    job_log_lacks(&j, 1, " rank 0 comm:");
    job_clear(&j);
}

/* The next line of the log, which this communicator's queue gets. */
static void expect_line(tally_comm *c, const char *text)
{
    struct tally_event e;
    tly_warn("test", "%s", text);
    do
        CHECK(tally_comm_next(c, 10000, &e) == 0);
    while (e.kind != TALLY_EVENT_LOG || !strstr(e.text, "test: "));
    CHECK_HOLDS(e.text, text);
}

/* Both watch the log, and either ends first. */
static int watches_from_two(int rank, void *arg)
{
    tally_comm *c[2];
    char place[64];
    for (int first = 0; first < 2; first++) {
        for (int i = 0; i < 2; i++) {
            int port = 0;
            const char *const settings[] = {"TALLY_RANK=0/1", place, NULL};
            snprintf(place, sizeof place, "TALLY_COORD=127.0.0.1");
            CHECK(tally_comm_listen(settings, &port) == 0);
            snprintf(place, sizeof place, "TALLY_COORD=127.0.0.1:%d", port);
            CHECK(tally_comm_open(settings, &c[i]) == 0);
            CHECK(tally_comm_watch_log(c[i], 1) == 0);
        }
        expect_line(c[1], "to the one that came last");
        CHECK(tally_comm_close(c[first]) == 0);
        expect_line(c[1 - first], "to the one that is left");
        CHECK(tally_comm_watch_log(c[1 - first], 0) == 0);
        CHECK(tally_comm_close(c[1 - first]) == 0);
    }
    return 0;
}

static void test_a_job_beside_leaves_the_log_to_whoever_watches(void **state)
{
    struct job j = {.ranks = 1, .main = watches_from_two};
    job_start(&j);
    job_finish(&j);
    job_clear(&j);
}

/* --- tallyd -------------------------------------------------------------------------------------- */

static void test_missing_tallyd(void **state)
{
    struct expectation e = {{0}};
    struct job j = {.ranks = 2,
                    .tallyds = 1,
                    .main = opens,
                    .arg = &e,
                    .settings = {"TALLY_SERVERS=2", "TALLY_SERVERS_TIMEOUT=1"}};
    job_start(&j);
    job_finish(&j);
    job_log_holds(&j, 0, "only 1 of 2 tallyd are there");
    job_log_holds(&j, 0, ", 1 tallyd;");
    job_clear(&j);
}

/* A service that nobody needs any more goes when asked. */
/* Does the process catch SIGTERM by now? */
static bool catches_sigterm(pid_t pid)
{
    char path[40], line[200];
    unsigned long long caught = 0;
    snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    FILE *status = fopen(path, "r");
    assert_non_null(status);
    while (fgets(line, sizeof line, status) && sscanf(line, "SigCgt: %llx", &caught) != 1)
        ;
    fclose(status);
    return caught >> (SIGTERM - 1) & 1;
}

static void test_idle_tallyd_ends(void **state)
{
    struct job j = {.tallyds = 1};
    job_start(&j);
    while (!catches_sigterm(j.tallyd_pid[0]))
        job_sleep_ms(5);
    job_sleep_ms(100);
    kill(j.tallyd_pid[0], SIGTERM);
    assert_int_equal(job_wait_tallyd(&j, 0), 0);
    job_clear(&j);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_secret),
        cmocka_unit_test(test_wrong_secret),
        cmocka_unit_test(test_no_secret_here),
        cmocka_unit_test(test_secret_needed),
        cmocka_unit_test(test_short_secret),
        cmocka_unit_test(test_tallyd_with_wrong_secret),
        cmocka_unit_test(test_missing_rank),
        cmocka_unit_test(test_rank_twice),
        cmocka_unit_test(test_other_world_size),
        cmocka_unit_test(test_other_settings),
        cmocka_unit_test(test_other_release),
        cmocka_unit_test(test_other_checksum),
        cmocka_unit_test(test_other_restart),
        cmocka_unit_test(test_other_job),
        cmocka_unit_test(test_bad_ranks),
        cmocka_unit_test(test_no_coordinator),
        cmocka_unit_test(test_bad_address),
        cmocka_unit_test(test_port_taken),
        cmocka_unit_test(test_port_held_by_the_dying),
        cmocka_unit_test(test_a_job_beside_leaves_the_rank_in_lines),
        cmocka_unit_test(test_a_job_beside_leaves_the_log_to_whoever_watches),
        cmocka_unit_test(test_missing_tallyd),
        cmocka_unit_test(test_idle_tallyd_ends),
    };
    return cmocka_run_group_tests_name("start", tests, NULL, NULL);
}
