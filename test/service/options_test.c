/* options_test.c - calls of programs that were compiled against another header than the library.  old_options and
 * newer_options are such headers' structs: kept, and made up. */
#include <errno.h>
#include <setjmp.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "job.h"

#include <cmocka.h>

struct old_options { /* of the first header that had groups */
    size_t size;
    int32_t priority;
    uint32_t ndim;
    const int64_t *shape;
    double prescale, postscale;
    uint32_t queued, space;
    void *tag;
    tally_group *group;
};

struct newer_options {
    struct tally_options known;
    uint64_t colour;
};

static tally_comm *open_comm(void)
{
    tally_comm *c;
    if (tally_comm_open(NULL, &c) != 0)
        fprintf(stderr, "open: %s\n", tally_error());
    return c;
}

/* The options where nothing may be read behind them. */
static void *at_the_end_of_memory(const void *options, size_t size)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    unsigned char *pages = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(pages != MAP_FAILED);
    CHECK(mprotect(pages + page, page, PROT_NONE) == 0);
    return memcpy(pages + page - size, options, size);
}

#define WELL(call) \
    do { \
        CHECK((call) == 0 && tally_op_wait(op, -1) == 0); \
        tally_op_free(op); \
    } while (0)

static int older(int rank, void *arg)
{
    tally_comm *c = open_comm();
    tally_group *pair = NULL;
    tally_op *op;
    CHECK(rank == 0 || tally_group_create(c, "pair", (const int[]){1, 2}, 2, &pair) == 0);
    struct old_options values = {.size = sizeof values, .priority = 3, .prescale = 2, .group = pair};
    const struct tally_options *o = at_the_end_of_memory(&values, sizeof values);
    if (rank > 0) { /* the group, and so all that stands before it, is taken from it */
        float x[2] = {(float)rank, 1}, y[2] = {0}, all[4] = {0};
        const size_t one[] = {1, 1};
        WELL(tally_push_pull(c, "sum", x, y, 2, TALLY_FLOAT32, TALLY_SUM, o, &op));
        CHECK(y[0] == 6 && y[1] == 4);
        WELL(tally_reduce_scatter(c, "piece", x, y, one, TALLY_FLOAT32, TALLY_SUM, o, &op));
        CHECK(y[0] == (rank == 1 ? 6 : 4));
        ((struct old_options *)(uintptr_t)o)->prescale = 0;
        WELL(tally_allgather(c, "g", x, 1, TALLY_FLOAT32, o, &op));
        WELL(tally_allgather_into(c, "i", x, all, 1, TALLY_FLOAT32, o, &op));
        CHECK(all[0] == 1 && all[1] == 2);
        WELL(tally_alltoall(c, "a", x, one, y, one, TALLY_FLOAT32, o, &op));
        CHECK(y[0] == 1 && y[1] == (rank == 1 ? 2 : 1));
        WELL(tally_gather(c, "root", x, 1, all, one, TALLY_FLOAT32, 0, o, &op));
        if (rank == 1) {
            WELL(tally_send(c, x, 1, TALLY_FLOAT32, 1, 7, o, &op));
            tally_refuse(c, "no", TALLY_BROADCAST, o, "the first of the pair has none");
        } else {
            WELL(tally_recv(c, y, 1, TALLY_FLOAT32, 0, 7, o, &op));
            CHECK(y[0] == 1);
            CHECK(tally_broadcast(c, "no", y, 1, TALLY_FLOAT32, 0, o, &op) == 0 && tally_op_wait(op, -1) < 0);
            CHECK_HOLDS(tally_op_error(op), "has none");
            tally_op_free(op);
        }
    }
    WELL(tally_join(c, NULL, &op));
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_an_older_header(void **state)
{
    struct job j = {.ranks = 3, .main = older};
    job_start(&j);
    job_finish(&j);
    job_clear(&j);
}

static int newer(int rank, void *arg)
{
    tally_comm *c = open_comm();
    struct newer_options o = {.known = {.size = sizeof o, .prescale = 3}};
    const struct tally_options *given = at_the_end_of_memory(&o, sizeof o);
    float x = 2, y = 0;
    size_t one[] = {1, 1};
    tally_op *op = NULL;
    WELL(tally_push_pull(c, "sum", &x, &y, 1, TALLY_FLOAT32, TALLY_SUM, given, &op));
    CHECK(y == 12);
    ((struct newer_options *)(uintptr_t)given)->colour = 1;
#define REFUSED(call) \
    op = NULL; \
    CHECK((call) == -EINVAL && !op); \
    CHECK_HOLDS(tally_error(), "knows no more")
    REFUSED(tally_push_pull(c, "sum", &x, &y, 1, TALLY_FLOAT32, TALLY_SUM, given, &op));
    REFUSED(tally_broadcast(c, "b", &x, 1, TALLY_FLOAT32, 0, given, &op));
    REFUSED(tally_allgather(c, "g", &x, 1, TALLY_FLOAT32, given, &op));
    REFUSED(tally_reduce_scatter(c, "s", &x, &y, one, TALLY_FLOAT32, TALLY_SUM, given, &op));
    REFUSED(tally_alltoall(c, "a", &x, one, &y, one, TALLY_FLOAT32, given, &op));
    REFUSED(tally_gather(c, "r", &x, 1, &y, one, TALLY_FLOAT32, 0, given, &op));
    REFUSED(tally_send(c, &x, 1, TALLY_FLOAT32, 1 - rank, 0, given, &op));
    REFUSED(tally_recv(c, &x, 1, TALLY_FLOAT32, 1 - rank, 0, given, &op));
    REFUSED(tally_barrier(c, NULL, given, &op));
    REFUSED(tally_join(c, given, &op));
    REFUSED(tally_refuse(c, "sum", TALLY_PUSH_PULL, given, "why"));
    struct tally_options own = {.size = sizeof own, .unused = ~0u}; /* was padding, where anything may be */
    WELL(tally_barrier(c, NULL, &own, &op));
    for (int i = 0; i < 3; i++) {
        own = (struct tally_options){.size = (const size_t[]){0, 8, SIZE_MAX}[i]};
        CHECK(tally_barrier(c, NULL, &own, &op) == -EINVAL);
        CHECK_HOLDS(tally_error(), "set it to sizeof(struct tally_options)");
    }
    WELL(tally_barrier(c, NULL, NULL, &op)); /* none of these counts as a call */
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_a_newer_header(void **state)
{
    struct job j = {.ranks = 2, .main = newer};
    job_start(&j);
    job_finish(&j);
    job_clear(&j);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_an_older_header),
        cmocka_unit_test(test_a_newer_header),
    };
    return cmocka_run_group_tests_name("options", tests, NULL, NULL);
}
