/* redo_test.c - what ranks and a service say to each other after a loss, at moments that whole jobs hit once in a thousand
 * times.  The ranks are links of the test's own. */
#include <dlfcn.h>
#include <pthread.h>
#include <setjmp.h>
#include <sodium.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "job.h"
#include "raw.h"
#include "wire/pack.h"

#include <cmocka.h>

enum { LENGTH = 4096, HAD = 1024 };

static int set_up(void **state)
{
    return raw_begin(3, (const char *const[]){"TALLY_FRAGMENT_BYTES=4K", NULL});
}

static int tear_down(void **state)
{
    raw_end();
    return 0;
}

static const void *floats(float value)
{
    static float x[RAW_PART / sizeof(float)];
    for (size_t i = 0; i < sizeof x / sizeof *x; i++)
        x[i] = value;
    return x;
}

static void check_result(int rank, uint32_t from, uint32_t to, float value)
{
    for (uint32_t at = from; at < to; at += sizeof value) {
        float got;
        memcpy(&got, raw.rank[rank].result + at, sizeof got);
        assert_float_equal(got, value, 0);
    }
}

/* A group of the first so many ranks. */
static void tell_group(int rank, uint32_t number, uint32_t count)
{
    uint8_t list[4 + 4 * RAW_MOST_RANKS];
    tly_put32(list, count);
    for (uint32_t i = 0; i < count; i++)
        tly_put32(list + 4 + 4 * (size_t)i, i);
    raw_post(rank, (struct tly_frame){.type = TLY_GROUP, .group = number}, list, 4 + 4 * (size_t)count);
}

static void post_part(int rank, struct tly_frame f, float value, uint32_t from, uint32_t to)
{
    f.offset = from;
    f.flags = to == f.length ? TLY_LAST : 0;
    raw_post(rank, f, floats(value), to - from);
}

static void say_have(int rank, struct tly_frame f, uint32_t have)
{
    f.type = TLY_HAVE;
    f.flags = 0;
    f.offset = have;
    raw_post(rank, f, NULL, 0);
}

static void say_done(int rank, uint16_t flags)
{
    raw_post(rank, (struct tly_frame){.type = TLY_DONE, .flags = flags, .count = 1}, NULL, 0);
}

static struct tly_frame push_in_group(uint64_t key, uint32_t length)
{
    struct tly_frame f = raw_push(key, length);
    f.group = 1;
    return f;
}

/* Nothing is kept once all have confirmed what they were told. */
static void check_empty(int ranks)
{
    for (int i = 0; i < ranks; i++)
        raw_settle(i);
    raw_settle(0);
    assert_int_equal(raw.rank[0].facts.bytes_in_use, 0);
    assert_int_equal(raw.rank[0].facts.rounds_open, 0);
}

/* Of one more result, which it has kept to itself. */
static void confirm(int rank)
{
    tly_loop_lock(&raw.loop);
    const struct tly_counts counts = {.received = ++raw.rank[rank].received};
    tly_link_set_counts(raw.rank[rank].link, &counts, 0);
    tly_loop_unlock(&raw.loop);
}

/* Two ranks sum two parts at once, each with a slot of its own. */
static void check_two_parts(uint64_t key)
{
    for (int rank = 0; rank < 2; rank++) {
        int before = raw.rank[rank].results;
        post_part(rank, push_in_group(key, RAW_PART), 1, 0, RAW_PART / 2);
        raw_settle(rank);
        raw.rank[rank].results = before;
    }
    for (int rank = 0; rank < 2; rank++)
        post_part(rank, push_in_group(key + 1, RAW_PART), 20, 0, RAW_PART);
    for (int rank = 0; rank < 2; rank++) {
        raw_until(&raw.rank[rank].results, 1);
        check_result(rank, RAW_PART / 2, RAW_PART, 40);
        raw.rank[rank].results = 0;
    }
    for (int rank = 0; rank < 2; rank++)
        post_part(rank, push_in_group(key, RAW_PART), 1, RAW_PART / 2, RAW_PART);
    for (int rank = 0; rank < 2; rank++) {
        raw_until(&raw.rank[rank].results, 1);
        check_result(rank, RAW_PART / 2, RAW_PART, 2);
        raw.rank[rank].results = 0;
    }
}

/* Rank 0 alone has some of a result, and is asked for it; its connection breaks before it answers.  Over the next one it is
 * asked again, for the result and for its input: rank 1 gets all of it. */
static void test_a_final_is_asked_for_again(void **state)
{
    struct tly_frame f = push_in_group(5, LENGTH);
    for (int i = 0; i < 2; i++)
        tell_group(i, 1, 2);
    say_have(0, f, HAD);
    say_done(0, 0);
    say_have(1, f, 0);
    say_done(1, 0);
    raw_until(&raw.rank[0].finals, 1);
    raw_break(0);
    raw_enter(0);
    tell_group(0, 1, 2);
    say_have(0, f, HAD);
    say_done(0, TLY_RESUMED);
    raw_until(&raw.rank[0].finals, 1);
    raw_until(&raw.rank[0].again, 1);
    assert_int_equal(raw.rank[0].again_from, HAD);
    struct tly_frame final = f;
    final.type = TLY_FINAL;
    post_part(0, final, 7, 0, HAD / 2);
    final.offset = HAD / 2;
    raw_post(0, final, floats(7), HAD / 2);
    for (int i = 0; i < 2; i++) {
        struct tly_frame rest = f;
        rest.offset = HAD;
        rest.flags = TLY_LAST | TLY_RESUMED;
        raw_post(i, rest, floats((float)(1 + i)), LENGTH - HAD);
    }
    raw_until(&raw.rank[1].results, 1);
    raw_until(&raw.rank[0].results, 1);
    check_result(1, 0, HAD, 7);
    for (int i = 0; i < 2; i++)
        check_result(i, HAD, LENGTH, 3);
    check_empty(2);
}

/* Half of a part is summed and sent, in the place of the first input, when a third rank disagrees about who takes part.  All
 * hear the verdict; the slot in which the result lay is given back once. */
static void test_a_refusal_during_a_stream(void **state)
{
    struct tly_frame f = push_in_group(6, RAW_PART), other = f;
    struct tly_writer w = {0};
    raw_enter(2);
    for (int i = 0; i < 2; i++) {
        tell_group(i, 1, 2);
        post_part(i, f, 1, 0, RAW_PART / 2);
    }
    for (int i = 0; i < 2; i++) {
        raw_until(&raw.rank[i].landed, RAW_PART / 2);
        assert_int_equal(raw.rank[i].results, 0);
    }
    tell_group(2, 2, 3);
    other.group = 2;
    other.spec = 10;
    post_part(2, other, 1, 0, RAW_PART);
    tly_write_text(&w, "what it means");
    for (int i = 0; i < 3; i++) {
        struct tly_frame spec = i == 2 ? other : f;
        raw_until(&raw.rank[i].specs, 1);
        spec.type = TLY_SPEC;
        spec.flags = 0;
        spec.length = 0;
        raw_post(i, spec, w.data, w.len);
    }
    free(w.data);
    for (int i = 0; i < 2; i++)
        post_part(i, f, 1, RAW_PART / 2, RAW_PART); /* they were at it */
    for (int i = 0; i < 3; i++)
        raw_until(&raw.rank[i].verdicts, 1);
    check_empty(3);
    check_two_parts(100);
    check_empty(2);
}

static int set_up_little(void **state)
{
    return raw_begin(2, (const char *const[]){"TALLY_FRAGMENT_BYTES=4K", "TALLY_MEMORY=192K", NULL});
}

/* Both have some of more results than there is memory for, with a slot for each rank: they end one after another. */
static void test_little_room_for_results(void **state)
{
    enum { ROUNDS = 4 };
    uint64_t pushed[2] = {0};
    int answered[2] = {0};
    for (uint64_t key = 0; key < ROUNDS; key++)
        for (int i = 0; i < 2; i++)
            say_have(i, raw_push(5 + key, RAW_PART), HAD);
    for (int turns = 0; raw.rank[0].results < ROUNDS || raw.rank[1].results < ROUNDS; turns++) {
        assert_true(turns < 20000);
        tly_loop_turn(&raw.loop, 2);
        for (int i = 0; i < 2; i++) {
            struct raw_rank *r = &raw.rank[i];
            assert_true(!r->closed && r->again <= RAW_ASKED);
            for (; answered[i] < r->again && pushed[i] + RAW_PART <= r->granted; answered[i]++) {
                struct tly_frame rest = raw_push(r->asked[answered[i]], RAW_PART);
                rest.offset = HAD;
                rest.flags = TLY_LAST | TLY_RESUMED;
                raw_post(i, rest, floats((float)(1 + i)), RAW_PART - HAD);
                pushed[i] += RAW_PART;
            }
        }
    }
    for (int i = 0; i < 2; i++)
        check_result(i, HAD, RAW_PART, 3);
    check_empty(2);
}

/* Half of a part is summed and sent when its ranks hear that the operation has failed, and take back the rest. */
static void test_taken_back_during_a_stream(void **state)
{
    for (int i = 0; i < 2; i++)
        tell_group(i, 1, 2);
    for (int i = 0; i < 4 * RAW_WINDOW / RAW_PART; i++) {
        struct tly_frame f = push_in_group(200 + (uint64_t)i, RAW_PART);
        for (int rank = 0; rank < 2; rank++)
            post_part(rank, f, 1, 0, i % 4 == 3 && rank ? RAW_PART : RAW_PART / 2);
        for (int rank = 0; rank < 2; rank++)
            raw_until(&raw.rank[rank].landed, (i + 1) * RAW_PART / 2);
        f.type = TLY_CANCEL;
        for (int rank = 0; rank < 2; rank++)
            raw_post(rank ^ (i & 1), f, NULL, 0);
        check_empty(2);
    }
    check_two_parts(300);
    check_empty(2);
}

/* Stands in front of libc's: while `slow` is set no sum of the crew's comes to its end. */
static atomic_bool slow;

int pthread_mutex_lock(pthread_mutex_t *m)
{
    static int (*_Atomic lock)(pthread_mutex_t * m);
    static _Thread_local int crew; /* 0: not known; -1: another */
    char name[16] = "";
    if (!lock)
        lock = (int (*)(pthread_mutex_t *))dlsym(RTLD_NEXT, "pthread_mutex_lock");
    if (!crew && atomic_load(&slow))
        crew = pthread_getname_np(pthread_self(), name, sizeof name) == 0 && !strcmp(name, "tally-crew")
                   ? 1
                   : -1;
    while (crew > 0 && atomic_load(&slow))
        sched_yield();
    return lock(m);
}

static int set_up_crew(void **state)
{
    return raw_begin(RAW_MOST_RANKS,
                     (const char *const[]){"TALLY_FRAGMENT_BYTES=4K", "TALLY_SUM_THREADS=1", NULL});
}

static int tear_down_crew(void **state)
{
    atomic_store(&slow, false);
    return tear_down(state);
}

/* All have pushed a part, of which the crew sums what there is; the first rank has pushed so much of it. */
static struct tly_frame push_to_crew(uint32_t first)
{
    struct tly_frame f = push_in_group(400, RAW_PART);
    atomic_store(&slow, true);
    for (int i = RAW_MOST_RANKS - 1; i >= 0; i--) {
        if (i >= RAW_COME)
            raw_enter(i);
        tell_group(i, 1, RAW_MOST_RANKS);
        post_part(i, f, 1, 0, i ? RAW_PART : first);
        raw_settle(i);
    }
    return f;
}

/* While the beginning is summed all take back the rest but one, whose rest comes then. */
static void test_taken_back_during_a_sum(void **state)
{
    struct tly_frame f = push_to_crew(RAW_PART / 4 * 3), back = f;
    back.type = TLY_CANCEL;
    for (int i = 1; i < RAW_MOST_RANKS; i++) {
        raw_post(i, back, NULL, 0);
        raw_settle(i);
    }
    post_part(0, f, 1, RAW_PART / 4 * 3, RAW_PART);
    raw_post(0, back, NULL, 0);
    raw_settle(0);
    atomic_store(&slow, false);
    for (int i = 0; i < 2000 && (i == 0 || raw.rank[0].facts.rounds_open); i++)
        raw_settle(0);
    check_empty(RAW_MOST_RANKS);
}

/* All of it is summed when a connection breaks whose rank does not want it any more. */
static void test_broken_during_a_sum(void **state)
{
    push_to_crew(RAW_PART);
    raw_break(0);
    raw_enter(0);
    say_done(0, TLY_RESUMED);
    raw_settle(0);
    atomic_store(&slow, false);
    for (int i = 0; i < RAW_MOST_RANKS; i++)
        raw_until(&raw.rank[i].results, 1);
    check_empty(RAW_MOST_RANKS);
}

/* A rank that has confirmed a result comes again and says that it has it: the service answers once more.  All others have
 * confirmed it, too, but what it answers is kept until that is confirmed. */
static void test_confirmed_before_the_break(void **state)
{
    struct tly_frame f = push_in_group(500, LENGTH);
    raw.rank[0].confirms_nothing = true;
    for (int i = 0; i < 2; i++) {
        tell_group(i, 1, 2);
        post_part(i, f, 1, 0, LENGTH);
    }
    for (int i = 0; i < 2; i++) {
        raw_until(&raw.rank[i].results, 1);
        raw_settle(i);
    }
    raw_break(1);
    raw_enter(1);
    raw.rank[1].confirms_nothing = true;
    tell_group(1, 1, 2);
    f.type = TLY_HAVE;
    f.flags = TLY_LAST | TLY_RESUMED;
    f.offset = LENGTH;
    raw_post(1, f, NULL, 0);
    say_done(1, TLY_RESUMED);
    raw_until(&raw.rank[1].results, 1);
    raw.rank[0].confirms_nothing = false;
    confirm(0);
    raw_settle(0);
    assert_int_not_equal(raw.rank[0].facts.bytes_in_use, 0);
    confirm(1);
    check_empty(2);
}

/* One rank has taken its push back when another's connection breaks, which says what it has and takes back its own, too: the round
 * goes, and with it what was to be sent of it. */
static void test_taken_back_around_a_break(void **state)
{
    struct tly_frame f = push_in_group(502, RAW_PART), back = f;
    back.type = TLY_CANCEL;
    for (int i = 0; i < 2; i++) {
        tell_group(i, 1, 2);
        post_part(i, f, 1, 0, RAW_PART / 2);
    }
    for (int i = 0; i < 2; i++)
        raw_until(&raw.rank[i].landed, RAW_PART / 2);
    raw_post(1, back, NULL, 0);
    raw_settle(1);
    raw_break(0);
    raw_enter(0);
    tell_group(0, 1, 2);
    say_have(0, f, RAW_PART / 2);
    raw_post(0, back, NULL, 0);
    say_done(0, TLY_RESUMED);
    check_empty(2);
    assert_int_equal(raw.rank[1].landed, RAW_PART / 2);
}

/* A rank refuses; the connection of another, which does not know it yet, breaks; the third comes late, and must hear of it. */
static void test_a_refusal_around_a_break(void **state)
{
    enum { LATE = 1, REFUSES = 2 };
    struct tly_frame f = raw_push(503, LENGTH), mark = f;
    struct tly_writer w = {0};
    raw_enter(REFUSES);
    mark.flags = TLY_LAST | TLY_MARK;
    mark.length = 0;
    mark.spec = 1;
    tly_write_text(&w, "it cannot");
    raw_post(REFUSES, mark, w.data, w.len);
    free(w.data);
    raw_until(&raw.rank[REFUSES].verdicts, 1);
    raw_settle(REFUSES);
    post_part(0, f, 1, 0, LENGTH);
    raw_break(0);
    raw_enter(0);
    post_part(0, f, 1, 0, LENGTH);
    raw_until(&raw.rank[0].verdicts, 1);
    raw_settle(0);
    raw_break(0);
    raw_enter(0);
    say_have(0, f, 0);
    say_done(0, TLY_RESUMED);
    raw_until(&raw.rank[0].verdicts, 1);
    for (int i = 0; i < 3; i++)
        raw_settle(i);
    assert_int_equal(raw.rank[0].results + raw.rank[LATE].results + raw.rank[REFUSES].results, 0);
    post_part(LATE, f, 1, 0, LENGTH);
    raw_until(&raw.rank[LATE].verdicts, 1);
    check_empty(3);
}

/* --- anything in any order ----------------------------------------------------------------------- */

enum { KEYS = 8, FEW_RANKS = 3, WORDS = 5000 };

static uint32_t a_number(uint64_t *state, uint32_t below)
{
    return (uint32_t)(job_random(state) % below);
}

/* Of the rounds that are talked about just now; one in four is a barrier. */
static struct tly_frame about(uint64_t base, uint32_t i)
{
    struct tly_frame f = raw_push(base + i, i % 4 == 3 ? 0 : RAW_PART);
    f.part = i % 2;
    f.kind = i % 4 == 3 ? TALLY_BARRIER : f.kind;
    return f;
}

static void say_text(int rank, struct tly_frame f, int type, uint16_t flags)
{
    struct tly_writer w = {0};
    f.type = (uint8_t)type;
    f.flags = flags;
    tly_write_text(&w, "no");
    raw_post(rank, f, w.data, w.len);
    free(w.data);
}

static void push_some(int rank, struct tly_frame f, uint32_t *pushed, uint64_t *dice)
{
    uint32_t from = *pushed, rest = f.length - from;
    if (from && !rest)
        return;
    *pushed = a_number(dice, 3) && rest > RAW_PART / 2 ? from + RAW_PART / 2 : f.length;
    if (f.length)
        post_part(rank, f, 1, from, *pushed);
    else
        raw_post(rank, f, NULL, 0);
}

static void come_again(int rank, uint64_t base, uint32_t *pushed, uint64_t *dice)
{
    raw_break(rank);
    raw_enter(rank);
    for (uint32_t i = 0; i < KEYS; i++) {
        struct tly_frame f = about(base, i);
        uint32_t quarters = a_number(dice, 4), how = a_number(dice, 12);
        f.type = TLY_HAVE;
        f.offset = quarters * (f.length / 4);
        f.flags = how < 2 ? TLY_LAST | TLY_RESUMED : how == 2 ? TLY_QUIET : 0;
        pushed[i] = f.length; /* unless it is asked */
        if (how < 8)
            raw_post(rank, f, NULL, 0);
    }
    if (a_number(dice, 4))
        say_done(rank, TLY_RESUMED);
}

/* What the service asked for last. */
static void push_again(int rank, uint64_t base)
{
    struct raw_rank *r = &raw.rank[rank];
    struct tly_frame f = about(base, (uint32_t)(r->asked[(r->again - 1) % RAW_ASKED] - base) % KEYS);
    f.offset = r->again_from;
    f.flags = TLY_LAST | TLY_RESUMED;
    if (f.offset <= f.length)
        raw_post(rank, f, floats(1), f.length - f.offset);
}

static void say_anything(int rank, uint64_t base, uint32_t *pushed, uint64_t *dice)
{
    struct raw_rank *r = &raw.rank[rank];
    uint32_t i = a_number(dice, KEYS), what = a_number(dice, 40);
    struct tly_frame f = about(base, i);
    r->confirms_nothing = a_number(dice, 4) == 0;
    f.spec = a_number(dice, 100) ? f.spec : 10;
    if (what < 20) {
        push_some(rank, f, &pushed[i], dice);
    } else if (what < 24) {
        f.type = TLY_CANCEL;
        raw_post(rank, f, NULL, 0);
        pushed[i] = 0;
    } else if (what < 26) {
        say_text(rank, f, TLY_CANCEL, TLY_MARK);
    } else if (what < 27) {
        f.length = f.part = 0;
        f.spec = 3;
        say_text(rank, f, f.type, TLY_LAST | TLY_MARK);
    } else if (what < 28) {
        f.length = 0;
        say_text(rank, f, TLY_SPEC, 0);
    } else if (what < 31) {
        come_again(rank, base, pushed, dice);
    } else if (what < 33) {
        confirm(rank);
    } else if (what < 36 && r->again) {
        push_again(rank, base);
    }
}

static void hush(void *user, enum tally_log_level level, const char *line)
{
}

/* Ranks say what may be said, at any time.  Some are thrown out for it; the service is as before for all others. */
static void anything(int ranks, uint64_t seed)
{
    uint32_t pushed[RAW_MOST_RANKS][KEYS] = {{0}};
    uint64_t base = 1000, dice = seed;
    tally_log_redirect(hush, NULL); /* why they are thrown out */
    for (int i = RAW_COME; i < ranks; i++)
        raw_enter(i);
    for (int word = 0; word < WORDS; word++) {
        int rank = (int)a_number(&dice, (uint32_t)ranks);
        if (word % 200 == 199 || !raw.rank[rank].link) {
            base += KEYS;
            memset(pushed, 0, sizeof pushed);
        }
        if (!raw.rank[rank].link)
            raw_enter(rank);
        say_anything(rank, base, pushed[rank], &dice);
        for (uint32_t turns = a_number(&dice, 3); turns > 1; turns--)
            tly_loop_turn(&raw.loop, 1);
    }
    for (int i = 0; i < ranks; i++) {
        raw_break(i);
        raw_enter(i);
        raw.rank[i].confirms_nothing = false;
        say_done(i, TLY_RESUMED);
    }
    for (int i = 0; i < ranks; i++)
        raw_settle(i);
    for (int i = 0; i < ranks; i++) {
        raw.rank[i].results = 0;
        post_part(i, raw_push(1, LENGTH), 1, 0, LENGTH);
    }
    for (int i = 0; i < ranks; i++) {
        raw_until(&raw.rank[i].results, 1);
        check_result(i, 0, LENGTH, (float)ranks);
    }
    tally_log_redirect(NULL, NULL);
}

/* SEED in the environment: another one. */
static uint64_t seed(uint64_t usual)
{
    const char *set = getenv("SEED");
    return set ? strtoull(set, NULL, 10) : usual;
}

static void test_anything(void **state)
{
    anything(FEW_RANKS, seed(1));
}

static void test_anything_while_it_sums(void **state)
{
    anything(RAW_MOST_RANKS, seed(2));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_a_final_is_asked_for_again, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_a_refusal_during_a_stream, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_taken_back_during_a_stream, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_taken_back_during_a_sum, set_up_crew, tear_down_crew),
        cmocka_unit_test_setup_teardown(test_broken_during_a_sum, set_up_crew, tear_down_crew),
        cmocka_unit_test_setup_teardown(test_confirmed_before_the_break, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_taken_back_around_a_break, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_a_refusal_around_a_break, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_little_room_for_results, set_up_little, tear_down),
        cmocka_unit_test_setup_teardown(test_anything, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_anything_while_it_sums, set_up_crew, tear_down_crew),
    };
    if (sodium_init() < 0)
        return 1;
    return cmocka_run_group_tests_name("redo", tests, NULL, NULL);
}
