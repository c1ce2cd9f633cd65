/* messages_test.c - send, receive and probe: tags, order, sizes, receivers that are late, ranks that disagree. */
#include <errno.h>
#include <setjmp.h>
#include <string.h>

#include "job.h"

#include <cmocka.h>

/* LARGE is several parts, and offered first (TLY_KEPT_BYTES); a sanitizer looks at each element. */
enum { RANKS = 3, LARGE = UNDER_SANITIZER ? 280000 : 700000 };

static void sums_well(tally_comm *c, size_t count)
{
    float *x = malloc(count * sizeof *x);
    tally_op *op;
    CHECK(x);
    for (size_t i = 0; i < count; i++)
        x[i] = 1;
    CHECK(tally_push_pull(c, NULL, x, x, count, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0 &&
          job_ends(op) == 0);
    CHECK(x[0] == RANKS && x[count - 1] == RANKS);
    free(x);
}

static unsigned long long reported(tally_comm *c, const char *field)
{
    char *json, key[64];
    unsigned long long sum = 0, v;
    CHECK(tally_comm_report(c, 60000, &json) == 0);
    snprintf(key, sizeof key, "\"%s\": ", field);
    for (const char *at = json; (at = strstr(at, key)); at++)
        if (sscanf(at + strlen(key), "%llu", &v) == 1)
            sum += v;
    free(json);
    return sum;
}

static void fill(int32_t *x, size_t count, int seed)
{
    for (size_t i = 0; i < count; i++)
        x[i] = seed + (int32_t)i;
}

static void is_filled(const int32_t *x, size_t count, int seed)
{
    for (size_t i = 0; i < count; i++)
        CHECK(x[i] == seed + (int32_t)i);
}

/* All to all others at once, of all sizes; both ways, so that senders that waited for receivers would stand still. */
static int to_and_fro(int rank, void *arg)
{
    static const size_t sizes[] = {0, 1, 16384, 16385, 131072, LARGE};
    static int32_t out[6][LARGE], in[RANKS][6][LARGE];
    tally_comm *c = job_open();
    tally_op *op, *sent[RANKS][6], *received[RANKS][6];
    for (int round = 0; round < 2; round++) {
        for (int s = 0; s < 3; s++)
            for (int to = 0; to < RANKS; to++) {
                fill(out[s], sizes[s], rank * 100 + s);
                if (to != rank)
                    CHECK(tally_send(c, out[s], sizes[s], TALLY_INT32, to, 7, NULL, &op) == 0 &&
                          job_ends(op) == 0);
            }
        for (int s = 3; s < 6; s++) {
            fill(out[s], sizes[s], rank * 100 + s);
            for (int to = 0; to < RANKS; to++)
                if (to != rank)
                    CHECK(tally_send(c, out[s], sizes[s], TALLY_INT32, to, 7, NULL, &sent[to][s]) == 0);
        }
        for (int s = 0; s < 6; s++)
            for (int from = 0; from < RANKS; from++)
                if (from != rank)
                    CHECK(tally_recv(c, in[from][s], sizes[s], TALLY_INT32, from, 7, NULL,
                                     &received[from][s]) == 0);
        for (int from = 0; from < RANKS; from++)
            for (int s = 0; s < 6 && from != rank; s++) {
                CHECK(job_ends(received[from][s]) == 0);
                is_filled(in[from][s], sizes[s], from * 100 + s);
                CHECK(s < 3 || job_ends(sent[from][s]) == 0);
            }
    }
    job_leave(c);
    return 0;
}

static void test_to_and_fro(void **state)
{
    static const int machine[] = {0, 0, 1};
    job_run(&(struct job){.ranks = RANKS, .tallyds = 1, .main = to_and_fro});
    job_run(&(struct job){.ranks = RANKS, .machine = machine, .main = to_and_fro});
    job_run(&(struct job){.ranks = RANKS,
                          .settings = {"TALLY_MEMORY=32K", "TALLY_PART_BYTES=4K", "TALLY_WINDOW_PARTS=1"},
                          .main = to_and_fro});
}

/* Messages that nobody receives yet: sums go on, with a window of a part, and large ones take no memory. */
static int late_receiver(int rank, void *arg)
{
    enum { SENT = 20 };
    static int32_t x[SENT][LARGE], small[SENT][1000];
    tally_comm *c = job_open();
    tally_op *op, *big[SENT];
    for (int i = 0; i < SENT && rank == 0; i++) {
        fill(x[i], LARGE, i);
        fill(small[i], 1000, i);
        CHECK(tally_send(c, x[i], LARGE, TALLY_INT32, 1, 1, NULL, &big[i]) == 0);
        CHECK(tally_send(c, small[i], 1000, TALLY_INT32, 1, 2, NULL, &op) == 0 && job_ends(op) == 0);
        memset(small[i], 0, sizeof small[i]);
    }
    for (int i = 0; i < 5; i++)
        sums_well(c, LARGE);
    job_barrier(c);
    if (rank == 2) {
        int i = 0;
        while (reported(c, "bytes_in_use") > SENT * 8192) {
            CHECK(++i < 2000);
            job_sleep_ms(5);
        }
    }
    job_barrier(c);
    /* Received from the last to the first tag, and at one tag in order. */
    for (int i = 0; i < SENT && rank == 1; i++) {
        CHECK(tally_recv(c, small[0], 1000, TALLY_INT32, 0, 2, NULL, &op) == 0 && job_ends(op) == 0);
        is_filled(small[0], 1000, i);
    }
    for (int i = 0; i < SENT && rank == 1; i++) {
        CHECK(tally_recv(c, x[0], LARGE, TALLY_INT32, 0, 1, NULL, &op) == 0 && job_ends(op) == 0);
        is_filled(x[0], LARGE, i);
    }
    for (int i = 0; i < SENT && rank == 0; i++)
        CHECK(job_ends(big[i]) == 0);
    job_leave(c);
    return 0;
}

static void test_late_receiver(void **state)
{
    job_run(&(struct job){
        .ranks = RANKS, .settings = {"TALLY_PART_BYTES=64K", "TALLY_WINDOW_PARTS=1"}, .main = late_receiver});
}

static int from_any(int rank, void *arg)
{
    enum { EACH = 10 };
    tally_comm *c = job_open();
    const int ranks[] = {2, 1, 0};
    tally_group *g;
    tally_op *op;
    CHECK(tally_group_create(c, "turned", ranks, 3, &g) == 0);
    struct tally_options o = {.size = sizeof o, .group = g};
    static int32_t x[LARGE];
    for (int k = 0; k < 2; k++) {
        const struct tally_options *options = k ? &o : NULL;
        int to = k ? 1 : 0; /* rank 1's and rank 0's places */
        int me = k ? tally_group_rank(g) : rank;
        size_t count = k ? 10 : 16000;
        if (me != to)
            for (int i = 0; i < EACH; i++) {
                fill(x, count, me * 1000 + i);
                /* Another tag, and another group, are nobody's that looks for this one. */
                CHECK(tally_send(c, x, count, TALLY_INT32, to, 4, options, &op) == 0 && job_ends(op) == 0);
                CHECK(tally_send(c, x, count, TALLY_INT32, to, 3, options, &op) == 0 && job_ends(op) == 0);
            }
        else {
            int next[RANKS] = {0};
            for (int i = 0; i < 2 * EACH; i++) {
                CHECK(tally_probe(c, 3, options, &op) == 0 && tally_op_wait(op, -1) == 0);
                int from = tally_op_source(op);
                tally_op_free(op);
                CHECK(from >= 0 && from != to);
                CHECK(tally_recv(c, x, count, TALLY_INT32, from, 3, options, &op) == 0 && job_ends(op) == 0);
                is_filled(x, count, from * 1000 + next[from]++);
            }
            for (int i = 0; i < 2 * EACH; i++) {
                int from = i % 2 ? 2 : k ? 0 : 1;
                CHECK(tally_recv(c, x, count, TALLY_INT32, from, 4, options, &op) == 0 && job_ends(op) == 0);
                is_filled(x, count, from * 1000 + i / 2);
            }
        }
    }
    /* A probe that waits. */
    if (rank == 0) {
        CHECK(tally_probe(c, 9, NULL, &op) == 0);
        CHECK(tally_op_wait(op, 20) == -ETIMEDOUT && tally_op_source(op) == -EAGAIN);
    }
    sums_well(c, 10);
    if (rank == 2) {
        tally_op *sent;
        CHECK(tally_send(c, x, 1, TALLY_INT32, 0, 9, NULL, &sent) == 0 && job_ends(sent) == 0);
    }
    if (rank == 0) {
        CHECK(tally_op_wait(op, -1) == 0 && tally_op_source(op) == 2);
        tally_op_free(op);
        CHECK(tally_recv(c, x, 1, TALLY_INT32, 2, 9, NULL, &op) == 0 && job_ends(op) == 0);
    }
    job_leave(c);
    return 0;
}

static void test_from_any(void **state)
{
    job_run(&(struct job){.ranks = RANKS, .tallyds = 1, .main = from_any});
}

static int different_messages(int rank, void *arg)
{
    enum { MANY = 700000 };
    static int32_t x[MANY];
    tally_comm *c = job_open();
    tally_op *op = NULL;
    if (rank == 0)
        CHECK(tally_send(c, x, 10, TALLY_INT32, 1, 5, NULL, &op) == 0 && job_ends(op) == 0);
    if (rank == 1) {
        CHECK(tally_recv(c, x, 9, TALLY_INT32, 0, 5, NULL, &op) == 0 && tally_op_wait(op, -1) == -EINVAL);
        CHECK_HOLDS(tally_op_error(op), "message no. 1 from rank 0 to rank 1, tag 5: the ranks disagree: "
                                        "int32 [10] on rank 0, [9] on rank 1");
        tally_op_free(op);
    }
    if (rank == 0) {
        CHECK(tally_send(c, x, MANY, TALLY_INT32, 1, 6, NULL, &op) == 0 && tally_op_wait(op, -1) == -EINVAL);
        CHECK_HOLDS(tally_op_error(op), "message no. 1 from rank 0 to rank 1, tag 6: the ranks disagree: "
                                        "int32 [700000] on rank 0, float32 on rank 1");
        tally_op_free(op);
    }
    if (rank == 1) {
        CHECK(tally_recv(c, x, MANY, TALLY_FLOAT32, 0, 6, NULL, &op) == 0 && job_ends(op) == -EINVAL);
        CHECK(tally_recv(c, x, 1, TALLY_INT32, 1, 0, NULL, &op) == -EINVAL);
        CHECK_HOLDS(tally_error(), "rank 1 sends no messages to itself: copy the data instead");
        CHECK(tally_recv(c, x, 1, TALLY_INT32, RANKS, 0, NULL, &op) == -EINVAL);
        CHECK(tally_recv(c, NULL, 1, TALLY_INT32, 0, 0, NULL, &op) == -EINVAL);
        CHECK(tally_send(c, NULL, 1, TALLY_INT32, 0, 0, NULL, &op) == -EINVAL);
    }
    /* The next message is a message like any other. */
    if (rank == 0)
        CHECK(tally_send(c, x, 3, TALLY_INT32, 1, 6, NULL, &op) == 0 && job_ends(op) == 0);
    if (rank == 1)
        CHECK(tally_recv(c, x, 3, TALLY_INT32, 0, 6, NULL, &op) == 0 && job_ends(op) == 0);
    job_leave(c);
    return 0;
}

static void test_different_messages(void **state)
{
    struct job j = {.ranks = RANKS, .main = different_messages};
    job_start(&j);
    job_finish(&j);
    job_log_holds(&j, 0, "the ranks disagree"); /* of the small one its sender only warns */
    job_clear(&j);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_to_and_fro),
        cmocka_unit_test(test_late_receiver),
        cmocka_unit_test(test_from_any),
        cmocka_unit_test(test_different_messages),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
