/* crew_test.c - tasks that are taken back do not end, others do. */
#include "sum/crew.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <time.h>

#include <cmocka.h>

enum { TASKS = 6, THREADS = 2 };

static struct work {
    struct tly_crew_task task;
    int owner;
    atomic_bool ran;
    bool done;
} works[TASKS];

static atomic_int running;
static atomic_bool go;

static void pause_a_little(void)
{
    struct timespec t = {.tv_nsec = 1000000};
    nanosleep(&t, NULL);
}

static void work(struct tly_crew_task *t)
{
    atomic_fetch_add(&running, 1);
    while (!atomic_load(&go))
        pause_a_little();
    atomic_store(&tly_list_entry(t, struct work, task)->ran, true);
}

static void done(struct tly_crew_task *t)
{
    tly_list_entry(t, struct work, task)->done = true;
}

static bool is_of(const struct tly_crew_task *t, const void *owner)
{
    return ((const struct work *)tly_list_entry(t, const struct work, task))->owner == *(const int *)owner;
}

static void *let_go(void *arg)
{
    for (int i = 0; i < 20; i++)
        pause_a_little();
    atomic_store(&go, true);
    return NULL;
}

static void test_cancel(void **state)
{
    struct tly_loop loop;
    struct tly_crew crew;
    pthread_t thread;
    const int owner = 0;
    assert_int_equal(tly_loop_init(&loop), 0);
    assert_int_equal(tly_crew_start(&crew, &loop, THREADS, -1), 0);
    tly_loop_lock(&loop);
    for (int i = 0; i < TASKS; i++) { /* the threads begin one of each owner, and hold them */
        works[i] = (struct work){.task = {.work = work, .done = done}, .owner = i % 2};
        tly_list_init(&works[i].task.node);
        tly_crew_post(&crew, &works[i].task);
    }
    while (atomic_load(&running) < THREADS)
        pause_a_little();
    assert_int_equal(pthread_create(&thread, NULL, let_go, NULL), 0);
    tly_crew_cancel(&crew, is_of, &owner);
    assert_true(works[0].ran); /* it was waited for */
    tly_loop_unlock(&loop);
    pthread_join(thread, NULL);
    for (int i = 0; i < 20000 && !(works[1].done && works[3].done && works[5].done); i++)
        tly_loop_turn(&loop, 2);
    for (int i = 0; i < TASKS; i++) {
        assert_int_equal(works[i].done, works[i].owner != owner);
        assert_int_equal(works[i].ran, works[i].owner != owner || i == 0);
    }
    tly_loop_lock(&loop);
    tly_crew_stop(&crew);
    tly_loop_unlock(&loop);
    tly_loop_finish(&loop);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_cancel)};
    return cmocka_run_group_tests_name("crew", tests, NULL, NULL);
}
