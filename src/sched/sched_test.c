/* sched_test.c - the scheduling core beside a model that knows only what has happened, and works out each answer from that
 * anew; and the cases that it is for. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "sched/sched.h"

#include <cmocka.h>

enum { QUEUES = 3, TASKS = 60, STREAMS = 150, STEPS = 400, EVENTS = 8 * STEPS, KB = 1024 };

/* A task as a user has it: around the core's own. */
struct user_task {
    struct tly_task task;
    int queue;
    struct user_task *next; /* is ready as soon as this one has started; NULL: none */
    bool brief;             /* is finished as soon as it has started */
};

/* --- the model ----------------------------------------------------------------------------------- */

enum event_kind { READY, CHOSEN, STARTED, FINISHED, RETRACTED, DROPPED, OPENED, GRANTED, CLOSED, CREDIT };

static struct {
    struct event {
        enum event_kind kind;
        int queue;
        struct user_task *task;
        uint64_t bytes;
    } event[EVENTS];
    int events;
} past;

static void happened(enum event_kind kind, int queue, struct user_task *task, uint64_t bytes)
{
    assert_true(past.events < EVENTS);
    past.event[past.events++] = (struct event){kind, queue, task, bytes};
}

static bool is_waiting(const struct user_task *t)
{
    for (int i = past.events; i-- > 0;)
        if (past.event[i].task == t)
            return past.event[i].kind == READY;
    return false;
}

/* The credit that the queues' tasks have: the largest one of a task since nothing waited in its queue, or since the scheduler
 * got another credit, of those that waited then and have come since. */
static uint64_t largest_credit(void)
{
    uint64_t largest = 0;
    for (int q = 0; q < QUEUES; q++) {
        const struct user_task *waiting[TASKS];
        uint64_t own[TASKS], of_queue = 0, now = 0;
        int count = 0;
        for (const struct event *e = past.event; e < past.event + past.events; e++) {
            if (e->kind == CREDIT) {
                now = of_queue = e->bytes;
                for (int i = 0; i < count; i++) {
                    own[i] = own[i] > now ? own[i] : 0;
                    of_queue = own[i] > of_queue ? own[i] : of_queue;
                }
            } else if (e->kind == READY && e->queue == q) {
                uint64_t credit = e->bytes ? e->bytes : now;
                of_queue = !count || credit > of_queue ? credit : of_queue;
                waiting[count] = e->task;
                own[count++] = e->bytes;
            } else if ((e->kind == STARTED || e->kind == DROPPED) && e->queue == q) {
                for (int i = 0; i < count; i++)
                    if (waiting[i] == e->task) {
                        waiting[i] = waiting[--count];
                        own[i] = own[count];
                        break;
                    }
            }
        }
        largest = count && of_queue > largest ? of_queue : largest;
    }
    return largest;
}

/* Where all that has happened leads. */
struct state {
    uint64_t pushed[QUEUES], granted[QUEUES], in_flight[QUEUES], all, opened;
    int waiting;
};

static void subtract(struct state *s, int queue, uint64_t bytes)
{
    s->in_flight[queue] -= bytes < s->in_flight[queue] ? bytes : s->in_flight[queue];
    s->all = s->in_flight[0] + s->in_flight[1] + s->in_flight[2];
}

static struct state replay(void)
{
    struct state s = {0};
    for (const struct event *e = past.event; e < past.event + past.events; e++) {
        switch (e->kind) {
        case CREDIT:
            break;
        case READY:
            if (!s.all && !s.waiting)
                s.opened = 0;
            s.waiting++;
            break;
        case DROPPED:
            s.waiting--;
            break;
        case CHOSEN: /* the first of a burst */
            s.opened = e->bytes / 4;
            break;
        case STARTED:
            s.waiting--;
            s.all += e->task->task.charge;
            s.in_flight[e->queue] += e->task->task.charge;
            s.pushed[e->queue] += e->task->task.bytes;
            break;
        case FINISHED:
            subtract(&s, e->queue, e->bytes);
            if (s.opened)
                s.opened += e->bytes;
            break;
        case RETRACTED:
            subtract(&s, e->queue, e->task->task.charge - e->bytes);
            if (!e->bytes)
                s.pushed[e->queue] -= e->task->task.bytes;
            break;
        case OPENED:
        case GRANTED:
            if (e->kind == OPENED || e->bytes > s.granted[e->queue])
                s.granted[e->queue] = e->bytes;
            break;
        case CLOSED:
            subtract(&s, e->queue, s.in_flight[e->queue]);
            s.pushed[e->queue] = s.granted[e->queue] = 0;
            break;
        }
    }
    return s;
}

/* The task that starts next, or NULL.  shut: some task waits for its window. */
static struct user_task *model_next(struct user_task *tasks, int count, bool *shut)
{
    struct state s = replay();
    struct user_task *best = NULL;
    *shut = false;
    for (int i = 0; i < count; i++) {
        struct user_task *t = &tasks[i];
        bool first = is_waiting(t);
        for (int j = 0; j < count && first; j++)
            first = tasks[j].queue != t->queue || !tly_before(tasks[j].task.order, t->task.order) ||
                    !is_waiting(&tasks[j]);
        if (!first)
            continue;
        if (s.pushed[t->queue] + t->task.bytes > s.granted[t->queue])
            *shut = true;
        else if (!best || tly_before(t->task.order, best->task.order))
            best = t;
    }
    uint64_t credit = largest_credit();
    if (best && !s.opened) {
        s.opened = credit / 4;
        happened(CHOSEN, 0, NULL, credit);
    }
    if (!best || !s.all)
        return best;
    if (!best->task.eager && s.opened < credit && s.all >= s.opened)
        return NULL;
    return s.all + best->task.charge <= credit ? best : NULL;
}

/* --- the core ------------------------------------------------------------------------------------ */

static struct tly_sched sched;
static struct tly_sched_queue queue[QUEUES];
static struct user_task *started[TASKS];
static int count_started;

static void start(struct tly_task *task)
{
    struct user_task *t = tly_list_entry(task, struct user_task, task);
    started[count_started++] = t;
    if (t->next)
        assert_int_equal(tly_sched_ready(&queue[t->next->queue], &t->next->task), 0);
    if (t->brief)
        tly_sched_finish(&queue[t->queue], t->task.charge);
}

static void begin(uint64_t credit)
{
    past.events = count_started = 0;
    tly_sched_init(&sched, credit);
    happened(CREDIT, 0, NULL, credit);
    for (int i = 0; i < QUEUES; i++)
        tly_sched_add(&sched, &queue[i]);
}

static void end(void)
{
    for (int i = 0; i < QUEUES; i++)
        tly_sched_remove(&queue[i]);
    assert_int_equal(sched.in_flight, 0);
    assert_true(tly_list_empty(&sched.queues));
}

static void make_ready(struct user_task *t)
{
    t->task.start = start;
    assert_int_equal(tly_sched_ready(&queue[t->queue], &t->task), 0);
    happened(READY, t->queue, t, t->task.credit);
}

/* Both go on as far as they can, and agree. */
static void run_both(struct user_task *tasks, int count)
{
    int before = count_started;
    tly_sched_run(&sched);
    struct user_task *t;
    bool shut;
    for (int i = before; (t = model_next(tasks, count, &shut)); i++) {
        assert_true(i < count_started);
        assert_ptr_equal(started[i], t);
        happened(STARTED, t->queue, t, 0);
        if (t->next)
            happened(READY, t->next->queue, t->next, t->next->task.credit);
        if (t->brief)
            happened(FINISHED, t->queue, NULL, t->task.charge);
        before = i + 1;
    }
    assert_int_equal(before, count_started);
    assert_int_equal(shut, sched.shut);
    struct state s = replay();
    assert_int_equal(s.all, sched.in_flight);
    for (int i = 0; i < QUEUES; i++)
        assert_int_equal(s.in_flight[i], queue[i].in_flight);
}

/* --- random streams ------------------------------------------------------------------------------ */

static uint64_t below(uint64_t n)
{
    return (uint64_t)rand() % n;
}

static void draw_tasks(struct user_task *tasks)
{
    memset(tasks, 0, TASKS * sizeof *tasks);
    for (int i = 0; i < TASKS; i++) {
        struct user_task *t = &tasks[i];
        t->queue = (int)below(QUEUES);
        t->task.order = (struct tly_rank_order){(int32_t)below(4) - 2, (uint64_t)i};
        t->task.bytes = below(4) ? 1 + below(8 * KB) : 256;
        t->task.charge = below(4) ? t->task.bytes : 256;
        t->task.credit = below(3) ? 0 : 1 + below(32 * KB);
        t->task.eager = !below(4);
        t->brief = !below(8);
        t->task.start = start;
        if (i > 0 && !below(6)) /* it is ready when the one before has started */
            tasks[i - 1].next = t;
    }
}

static bool is_third(struct tly_task *task, void *user)
{
    return task->order.sequence % 3 == *(uint64_t *)user;
}

static void drop_some(struct user_task *tasks, int q)
{
    uint64_t third = below(3);
    tly_sched_drop(&queue[q], is_third, &third);
    for (int i = 0; i < TASKS; i++)
        if (tasks[i].queue == q && is_waiting(&tasks[i]) && is_third(&tasks[i].task, &third))
            happened(DROPPED, q, &tasks[i], 0);
}

/* The task that was started last goes no further, if nothing has happened to its queue since. */
static void retract_last(void)
{
    const struct event *e = &past.event[past.events - 1];
    if (e->kind != STARTED)
        return;
    uint64_t sent = below(2) ? below(e->task->task.charge) : 0;
    tly_sched_retract(&queue[e->queue], &e->task->task, sent);
    happened(RETRACTED, e->queue, e->task, sent);
}

static void reopen(int q)
{
    uint64_t granted = below(3) ? below(16 * KB) : UINT64_MAX;
    tly_sched_close(&queue[q]);
    happened(CLOSED, q, NULL, 0);
    if (!below(3))
        return;
    tly_sched_open(&queue[q], granted);
    happened(OPENED, q, NULL, granted);
}

static void step(struct user_task *tasks, int *next)
{
    int q = (int)below(QUEUES);
    uint64_t bytes;
    switch (below(12)) {
    case 0:
        bytes = 1 + below(32 * KB);
        tly_sched_set_credit(&sched, bytes);
        happened(CREDIT, 0, NULL, bytes);
        break;
    case 1:
        reopen(q);
        break;
    case 2:
        drop_some(tasks, q);
        break;
    case 3:
        retract_last();
        break;
    case 4:
    case 5:
        bytes = queue[q].pushed + below(16 * KB);
        tly_sched_grant(&queue[q], bytes);
        happened(GRANTED, q, NULL, bytes);
        break;
    case 6:
    case 7:
    case 8:
        bytes = 1 + below(queue[q].in_flight + 512);
        tly_sched_finish(&queue[q], bytes);
        happened(FINISHED, q, NULL, bytes);
        break;
    default:
        if (*next < TASKS && (*next == 0 || tasks[*next - 1].next != &tasks[*next]))
            make_ready(&tasks[*next]);
        *next += *next < TASKS;
        break;
    }
}

static void test_against_the_model(void **state)
{
    int all = 0;
    for (unsigned seed = 1; seed <= STREAMS; seed++) {
        static struct user_task tasks[TASKS];
        int next = 0;
        srand(seed);
        draw_tasks(tasks);
        begin(1 + below(32 * KB));
        for (int i = 0; i < QUEUES; i++)
            reopen(i);
        for (int i = 0; i < STEPS; i++) {
            step(tasks, &next);
            if (below(3))
                run_both(tasks, TASKS);
        }
        all += count_started;
        end();
    }
    assert_in_range(all, STREAMS * TASKS / 3, STREAMS * TASKS);
}

/* --- cases --------------------------------------------------------------------------------------- */

static struct user_task task_of(int q, int32_t priority, uint64_t sequence, uint64_t bytes)
{
    return (struct user_task){
        .task = {.order = {priority, sequence}, .bytes = bytes, .charge = bytes, .start = start}, .queue = q};
}

static void assert_started(int count, struct user_task *last)
{
    tly_sched_run(&sched);
    assert_int_equal(count_started, count);
    assert_ptr_equal(started[count - 1], last);
}

/* The paper's example (section 4.2): tensors 1 to 4 come one by one, each more urgent than those before, and the credit is
 * two of them.  They go as 1, 2, 4, 3. */
static void test_the_papers_example(void **state)
{
    struct user_task t[5];
    begin(2 * KB);
    tly_sched_open(&queue[0], UINT64_MAX);
    for (int i = 1; i <= 4; i++) {
        t[i] = task_of(0, i, (uint64_t)i, KB);
        t[i].task.eager = true;
        make_ready(&t[i]);
        assert_started(i < 2 ? i : 2, &t[i < 2 ? i : 2]);
    }
    tly_sched_finish(&queue[0], KB);
    assert_started(3, &t[4]);
    tly_sched_finish(&queue[0], KB);
    assert_started(4, &t[3]);
    end();
}

static void make_some_ready(struct user_task *t, int count)
{
    for (int i = 0; i < count; i++) {
        tly_sched_open(&queue[i % 2], UINT64_MAX);
        t[i] = task_of(i % 2, 0, (uint64_t)i, KB);
        make_ready(&t[i]);
    }
}

/* A burst begins with a quarter of the credit. */
static void test_the_credit_opens(void **state)
{
    struct user_task t[8];
    begin(8 * KB);
    make_some_ready(t, 8);
    assert_started(2, &t[1]);
    tly_sched_finish(&queue[0], KB); /* one goes for that, and one for what it opens */
    assert_started(4, &t[3]);
    tly_sched_finish(&queue[1], KB);
    assert_started(6, &t[5]);
    end();
}

/* A task is a quarter of the credit here, so nothing is in flight when it is finished.  The next must not begin anew. */
static void test_the_credit_opens_though_nothing_is_in_flight_for_a_moment(void **state)
{
    struct user_task t[6];
    begin(4 * KB);
    make_some_ready(t, 6);
    assert_started(1, &t[0]);
    tly_sched_finish(&queue[0], KB);
    assert_started(3, &t[2]);
    tly_sched_finish(&queue[0], KB);
    tly_sched_finish(&queue[1], KB);
    assert_started(6, &t[5]);
    end();
}

/* A message's first frame announces the rest.  The rest must not wait until that has been answered. */
static void test_a_small_task_in_flight_does_not_hold_back_what_is_open(void **state)
{
    struct user_task t[3];
    begin(4 * KB);
    for (int i = 0; i < 3; i++) {
        tly_sched_open(&queue[0], UINT64_MAX);
        t[i] = task_of(0, 0, (uint64_t)i, i ? KB : 1);
        make_ready(&t[i]);
    }
    assert_started(2, &t[1]);
    end();
}

/* Tasks with less credit of their own need not wait until so little is in flight, while one with more waits. */
static void test_all_tasks_have_the_largest_credit_of_those_that_wait(void **state)
{
    enum { LARGE = 6, ALL = 12 };
    struct user_task t[ALL];
    begin(2 * KB);
    tly_sched_open(&queue[0], UINT64_MAX);
    for (int i = 0; i < ALL; i++) {
        t[i] = task_of(0, i / LARGE, (uint64_t)i, KB);
        t[i].task.eager = true;
        t[i].task.credit = i < LARGE ? 4 * KB : 0;
    }
    for (int i = 0; i < LARGE; i++)
        make_ready(&t[i]);
    assert_started(4, &t[3]);
    for (int i = LARGE; i < LARGE + 3; i++)
        make_ready(&t[i]); /* they are more urgent */
    tly_sched_finish(&queue[0], 3 * KB);
    assert_started(7, &t[LARGE + 2]);
    tly_sched_finish(&queue[0], 2 * KB);
    assert_started(9, &t[5]);
    for (int i = LARGE + 3; i < ALL; i++)
        make_ready(&t[i]);
    tly_sched_finish(&queue[0], 2 * KB);
    assert_started(9, &t[5]); /* their own 2 KB are in flight */
    tly_sched_finish(&queue[0], KB);
    assert_started(10, &t[LARGE + 3]);
    end();
}

static void test_the_credit_opens_anew_after_a_pause(void **state)
{
    struct user_task first[2], t[6];
    begin(4 * KB);
    make_some_ready(first, 2);
    assert_started(1, &first[0]);
    tly_sched_finish(&queue[0], KB);
    assert_started(2, &first[1]);
    tly_sched_finish(&queue[1], KB);
    make_some_ready(t, 6);
    assert_started(3, &t[0]);
    end();
}

static void test_a_full_window_is_passed_over(void **state)
{
    struct user_task t[] = {task_of(0, 1, 0, 2 * KB), task_of(1, 0, 1, KB), task_of(0, 0, 2, KB)};
    begin(64 * KB);
    tly_sched_open(&queue[0], KB);
    tly_sched_open(&queue[1], KB);
    for (int i = 0; i < 3; i++)
        make_ready(&t[i]);
    assert_started(1, &t[1]); /* the last would fit, but its own queue's first is before it */
    assert_true(sched.shut);
    tly_sched_grant(&queue[0], 3 * KB);
    assert_started(3, &t[2]);
    assert_false(sched.shut);
    end();
}

/* Another library's collectives: tasks to no service, which has no window; each is finished when its library says so.  They
 * share the credit with the parts of a rank, by priority. */
static void test_tasks_that_are_no_parts(void **state)
{
    struct user_task part[] = {task_of(0, 0, 0, KB), task_of(0, 0, 1, KB)};
    struct user_task urgent = task_of(2, 1, 2, 2 * KB), large = task_of(2, 0, 3, 100 * KB);
    begin(2 * KB);
    tly_sched_open(&queue[0], KB);
    tly_sched_open(&queue[2], UINT64_MAX);
    make_ready(&part[0]);
    assert_started(1, &part[0]);
    make_ready(&part[1]);
    make_ready(&large);
    make_ready(&urgent);
    assert_started(1, &part[0]); /* the credit does not last for the first of them */
    tly_sched_finish(&queue[0], KB);
    assert_started(2, &urgent);
    tly_sched_grant(&queue[0], 2 * KB);
    tly_sched_finish(&queue[2], urgent.task.charge);
    assert_started(3, &part[1]);
    tly_sched_finish(&queue[0], KB);
    assert_started(4, &large); /* larger than the credit: alone */
    tly_sched_finish(&queue[2], large.task.charge);
    end();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_the_model),
        cmocka_unit_test(test_the_papers_example),
        cmocka_unit_test(test_the_credit_opens),
        cmocka_unit_test(test_all_tasks_have_the_largest_credit_of_those_that_wait),
        cmocka_unit_test(test_the_credit_opens_though_nothing_is_in_flight_for_a_moment),
        cmocka_unit_test(test_a_small_task_in_flight_does_not_hold_back_what_is_open),
        cmocka_unit_test(test_the_credit_opens_anew_after_a_pause),
        cmocka_unit_test(test_a_full_window_is_passed_over),
        cmocka_unit_test(test_tasks_that_are_no_parts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
