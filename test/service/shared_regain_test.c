/* shared_regain_test.c - ranks of the test's own say that parts of shared tensors come to a service.  It takes them over from
 * the right rank, and what makes no sense is refused. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include "job.h"
#include "raw.h"
#include "wire/frame.h"
#include "wire/kept.h"
#include "wire/pack.h"

#include <cmocka.h>

static uint32_t created; /* round of the create that words are about; 0: the first */

enum { KEY = 7, BYTES = 4096, RANKS = 3, STATE = TLY_STATE_LEAST + RANKS * TLY_STATE_RANK };

static int raw_set_up(void **state)
{
    int err = raw_begin(RANKS, NULL);
    raw_enter(2);
    return err;
}

static int raw_set_up_small(void **state)
{
    static const char *const settings[] = {"TALLY_MEMORY=1M", NULL};
    int err = raw_begin(RANKS, settings);
    raw_enter(2);
    return err;
}

/* A part is one fragment, however short. */
static int raw_set_up_fragments(void **state)
{
    static const char *const settings[] = {"TALLY_FRAGMENT_BYTES=4K", NULL};
    int err = raw_begin(RANKS, settings);
    raw_enter(2);
    return err;
}

static int raw_tear_down(void **state)
{
    raw_end();
    created = 0;
    return 0;
}

static float raw_data[RAW_PART / sizeof(float)];

/* About the part that has come here in this epoch. */
static struct tly_frame raw_word(int type, uint32_t epoch)
{
    struct tly_frame f = raw_push(KEY, BYTES);
    f.type = (uint8_t)type;
    f.flags = 0;
    f.kind = TLY_KEPT;
    f.round = created ? created : f.round;
    f.op = 0;
    f.epoch = epoch;
    return f;
}

static void have(int rank, uint32_t epoch, uint32_t since, uint64_t count)
{
    uint8_t version[TLY_VERSION_BYTES];
    tly_version_put(version, &(struct tly_version){since, count});
    raw_post(rank, raw_word(TLY_HAVE, epoch), version, since ? sizeof version : 0);
}

static void done(int rank, uint32_t epoch)
{
    raw_post(rank, (struct tly_frame){.type = TLY_DONE, .count = epoch}, NULL, 0);
}

/* The values, all `value`, and their state, in which rank i's last operation has the number last[i]. */
static void give_state(int rank, uint32_t epoch, const uint32_t last[RANKS])
{
    uint8_t at[STATE] = {0};
    struct tly_frame f = raw_word(TLY_HAVE, epoch);
    f.flags = TLY_MARK;
    for (uint32_t i = 0; i < RANKS; i++)
        tly_put32(at + TLY_STATE_LEAST + i * TLY_STATE_RANK, last[i]);
    raw_post(rank, f, at, sizeof at);
}

static void give_values(int rank, uint32_t epoch, float value, uint32_t from, uint32_t to)
{
    struct tly_frame f = raw_word(TLY_FINAL, epoch);
    for (size_t i = 0; i < BYTES / sizeof *raw_data; i++)
        raw_data[i] = value;
    f.offset = from;
    f.flags = to == BYTES ? TLY_LAST : 0;
    raw_post(rank, f, raw_data, to - from);
}

static void give(int rank, uint32_t epoch, float value, const uint32_t last[RANKS])
{
    give_state(rank, epoch, last);
    give_values(rank, epoch, value, 0, BYTES / 2);
    give_values(rank, epoch, value, BYTES / 2, BYTES);
}

static const uint32_t none[RANKS] = {0};

static struct tly_frame raw_operation(uint8_t kind, uint32_t rank, uint32_t round, uint32_t epoch)
{
    struct tly_frame f = raw_push(KEY, BYTES);
    f.kind = kind;
    f.op = 0;
    f.round = round;
    f.epoch = epoch;
    f.group = tly_pair(rank, rank);
    f.root = rank;
    if (kind == TALLY_SHARED_READ)
        f.flags = TLY_REQUEST;
    return f;
}

static void push(int rank, uint32_t round, uint32_t epoch, float value)
{
    for (size_t i = 0; i < BYTES / sizeof *raw_data; i++)
        raw_data[i] = value;
    raw_post(rank, raw_operation(TALLY_SHARED_ADD, (uint32_t)rank, round, epoch), raw_data, BYTES);
}

static void read_part(int rank, uint32_t round, uint32_t epoch)
{
    raw_post(rank, raw_operation(TALLY_SHARED_READ, (uint32_t)rank, round, epoch), NULL, 0);
}

static void expect(int rank, int results, float value)
{
    float got[BYTES / sizeof(float)];
    raw_until(&raw.rank[rank].results, results);
    memcpy(got, raw.rank[rank].result, sizeof got);
    for (size_t i = 0; i < BYTES / sizeof *got; i++)
        assert_float_equal(got[i], value, 0);
}

static void settle_all(void)
{
    for (int rank = 0; rank < RANKS; rank++)
        if (raw.rank[rank].link && !raw.rank[rank].closed)
            raw_settle(rank);
}

/* The part comes here in epoch 5, and rank `rank` holds the newest values. */
static void arrive(int rank, float value, const uint32_t last[RANKS])
{
    for (int i = 0; i < RANKS; i++) {
        have(i, 5, 2, i == rank ? 9 : 4);
        done(i, 5);
    }
    raw_until(&raw.rank[rank].finals, 1);
    give(rank, 5, value, last);
}

/* Nobody is asked before all have said what they hold.  Then the lowest holder of the highest version is. */
static void test_holder(void **state)
{
    have(0, 5, 2, 3);
    done(0, 5);
    have(1, 5, 3, 1);
    done(1, 5);
    done(2, 4); /* of an older epoch */
    have(2, 5, 3, 1);
    settle_all();
    assert_int_equal(raw.rank[0].finals + raw.rank[1].finals + raw.rank[2].finals, 0);
    done(2, 5);
    raw_until(&raw.rank[1].finals, 1);
    give(1, 5, 6, none);
    read_part(0, 1, 5);
    expect(0, 1, 6);
    settle_all();
    assert_int_equal(raw.rank[0].finals + raw.rank[1].finals + raw.rank[2].finals, 1);
}

/* Pushes wait for the values, and numbers say which of them these have. */
static void test_pending(void **state)
{
    static const uint32_t last[RANKS] = {4, 7, 0};
    have(0, 5, 2, 9);
    done(0, 5);
    push(0, 4, 5, 1); /* the values have it */
    have(1, 5, 2, 9);
    done(1, 5);
    push(1, 8, 5, 10);
    have(2, 5, 2, 9);
    done(2, 5);
    read_part(2, 1, 5);
    raw_until(&raw.rank[0].finals, 1);
    settle_all();
    assert_int_equal(raw.rank[0].results + raw.rank[1].results + raw.rank[2].results, 0);
    give(0, 5, 100, last);
    expect(1, 1, 110);
    raw_until(&raw.rank[0].results, 1);
    raw_until(&raw.rank[2].results, 1);
    read_part(2, 2, 5);
    expect(2, 2, 110);
}

/* The part comes here again before it has come: what ranks have said and sent before is void. */
static void test_moves_twice(void **state)
{
    arrive(0, 3, none);
    push(1, 1, 5, 1);
    expect(1, 1, 4);
    raw_settle(1);
    for (int i = 0; i < RANKS; i++) {
        have(i, 7, 5, 0);
        done(i, 7);
    }
    raw_until(&raw.rank[0].finals, 2);
    give_state(0, 7, none);
    give_values(0, 7, 50, 0, BYTES / 2);
    for (int i = 0; i < RANKS; i++) {
        have(i, 9, 5, i == 2);
        done(i, 9);
    }
    give_values(0, 7, 50, BYTES / 2, BYTES); /* of epoch 7 */
    raw_until(&raw.rank[2].finals, 1);
    push(1, 1, 9, 1);
    give(2, 9, 8, none);
    expect(1, 2, 9);
    have(0, 7, 5, 0); /* it was under way */
    push(2, 1, 7, 1);
    settle_all();
    read_part(0, 1, 9);
    expect(0, 1, 9);
    assert_int_equal(raw.rank[2].results, 0);
    assert_int_equal(raw.rank[0].closed + raw.rank[1].closed + raw.rank[2].closed, 0);
}

/* The giver's connection breaks: it is asked again over the next one, from the beginning. */
static void test_giver_breaks(void **state)
{
    for (int i = 0; i < RANKS; i++) {
        have(i, 5, 2, i == 1);
        done(i, 5);
    }
    raw_until(&raw.rank[1].finals, 1);
    give_state(1, 5, none);
    give_values(1, 5, 9, 0, BYTES / 2);
    raw_settle(1);
    raw_break(1);
    raw_enter(1);
    raw_settle(1);
    assert_int_equal(raw.rank[1].finals + raw.rank[0].finals, 0); /* of the new connection */
    have(1, 5, 2, 1);
    done(1, 5);
    raw_until(&raw.rank[1].finals, 1);
    give(1, 5, 8, none);
    read_part(0, 1, 5);
    expect(0, 1, 8);
}

/* The giver leaves the job: another one gives what it holds. */
static void test_giver_leaves(void **state)
{
    for (int i = 0; i < RANKS; i++) {
        have(i, 5, 2, 1);
        done(i, 5);
    }
    raw_until(&raw.rank[0].finals, 1);
    raw_post(0, (struct tly_frame){.type = TLY_GOODBYE}, NULL, 0);
    raw_until(&raw.rank[1].finals, 1);
    give(0, 5, 9, none); /* it was asked before that */
    give(1, 5, 8, none);
    read_part(2, 1, 5);
    expect(2, 1, 8);
    raw_settle(0);
}

/* A rank that has left, as the roster says, held nothing that others wait for. */
static void test_left_by_roster(void **state)
{
    for (int i = 0; i < 2; i++) {
        have(i, 5, 2, 0);
        done(i, 5);
    }
    settle_all();
    assert_int_equal(raw.rank[0].finals, 0);
    raw_left(2);
    raw_until(&raw.rank[0].finals, 1);
}

/* Another rank has ended a later create of the name while the giver sends its values of the first one. */
static void test_giver_is_late(void **state)
{
    uint8_t version[TLY_VERSION_BYTES];
    for (int i = 0; i < RANKS; i++) {
        have(i, 5, 2, i == 0);
        done(i, 5);
    }
    raw_until(&raw.rank[0].finals, 1);
    give_state(0, 5, none);
    raw_settle(0);
    tly_version_put(version, &(struct tly_version){2, 0});
    struct tly_frame f = raw_word(TLY_HAVE, 5);
    f.round = 2;
    raw_post(1, f, version, sizeof version);
    raw_settle(1);
    give_values(0, 5, 1, 0, BYTES);
    raw_settle(0);
}

/* Ranks that say DONE without a word of the part have given it up: it goes with the last. */
static void test_given_up(void **state)
{
    arrive(0, 3, none);
    read_part(0, 1, 5);
    expect(0, 1, 3);
    raw_settle(0);
    done(1, 6);
    have(2, 5, 2, 4); /* it is here still, for rank 2 */
    done(2, 6);
    done(0, 6);
    settle_all();
    read_part(2, 1, 5);
    expect(2, 1, 3);
    raw_settle(2);
    uint64_t before = raw.rank[2].facts.bytes_in_use;
    done(2, 8);
    settle_all();
    raw_settle(2);
    assert_true(raw.rank[2].facts.bytes_in_use < before);
    read_part(2, 2, 5);
    raw_until(&raw.rank[2].verdicts, 1); /* it was not created */
}

/* What a create that has failed has left goes, and words about it count for nothing. */
static void test_earlier_create(void **state)
{
    uint8_t version[TLY_VERSION_BYTES];
    tly_version_put(version, &(struct tly_version){2, 0});
    arrive(0, 3, none);
    raw_settle(0);
    for (int i = 0; i < RANKS; i++) {
        struct tly_frame f = raw_word(TLY_HAVE, 6);
        f.round = 2;
        raw_post(i, f, version, sizeof version);
        have(i, 5, 2, 4);
        done(i, 6);
    }
    raw_until(&raw.rank[0].finals, 2);
    created = 2;
    give(0, 6, 7, none);
    read_part(1, 3, 6);
    expect(1, 1, 7);
}

/* --- creates that lose their service ------------------------------------------------------------- */

static struct tly_frame raw_create(int rank, int type, uint32_t offset)
{
    struct tly_frame f = raw_word(type, 5);
    f.kind = TALLY_SHARED_CREATE;
    f.count = 5;
    f.rank = (uint32_t)rank;
    f.offset = offset;
    return f;
}

/* Rank 1 has half of the part, and rank 2 so many bytes.  Rank 0 gives the rest, and rank 1 its half before that. */
static void resume_create(uint32_t more)
{
    for (int i = 0; i < RANKS; i++) {
        have(i, 5, 0, 0);
        raw_post(i, raw_create(i, TLY_HAVE, i == 0 ? 0 : i == 1 ? BYTES / 2 : more), NULL, 0);
        done(i, 5);
    }
    raw_until(&raw.rank[1].finals, 1);
    for (size_t i = 0; i < BYTES / sizeof *raw_data; i++)
        raw_data[i] = 3;
    struct tly_frame f = raw_create(1, TLY_FINAL, 0);
    f.flags = TLY_LAST;
    raw_post(1, f, raw_data, BYTES / 2);
    raw_settle(1);
    raw_until(&raw.rank[0].again, 1);
    assert_int_equal(raw.rank[0].again_from, BYTES / 2);
    f = raw_create(0, TLY_PUSH, BYTES / 2);
    f.flags = TLY_LAST | TLY_RESUMED;
    raw_post(0, f, raw_data, BYTES / 2);
}

/* The service keeps all of the part. */
static void expect_created(void)
{
    raw_until(&raw.rank[1].results, 1);
    raw_until(&raw.rank[2].results, 1);
    push(2, 1, 5, 1);
    expect(2, 2, 4);
    read_part(0, 1, 5);
    expect(0, 2, 4); /* the first has been that of the create */
}

static void test_create_resumed(void **state)
{
    resume_create(0);
    expect_created();
}

/* No rank lacks the beginning, but the service does. */
static void test_create_half_there(void **state)
{
    resume_create(BYTES / 2);
    expect_created();
}

/* The values come before the last rank's request, which comes when another rank has said that it has nothing. */
static void test_create_asked_last(void **state)
{
    struct tly_frame f = raw_create(0, TLY_PUSH, 0);
    for (size_t i = 0; i < BYTES / sizeof *raw_data; i++)
        raw_data[i] = 3;
    f.flags = TLY_LAST;
    raw_post(0, f, raw_data, BYTES);
    have(1, 5, 0, 0);
    raw_post(1, raw_create(1, TLY_HAVE, 0), NULL, 0);
    done(1, 5);
    raw_settle(0);
    raw_settle(1);
    f = raw_create(2, TLY_PUSH, 0);
    f.flags = TLY_REQUEST;
    raw_post(2, f, NULL, 0);
    expect_created();
}

/* Rank 1 has all of the part, and the others none.  The words of rank 0 come around those of rank 1. */
static void interleave(void)
{
    have(2, 5, 0, 0); /* nobody has named values yet: it counts all the same */
    raw_settle(2);
    have(0, 5, 0, 0);
    raw_post(0, raw_create(0, TLY_HAVE, 0), NULL, 0);
    raw_settle(0);
    have(1, 5, 2, 0);
    struct tly_frame f = raw_create(1, TLY_HAVE, BYTES);
    f.flags = TLY_LAST;
    raw_post(1, f, NULL, 0);
    raw_settle(1);
    done(0, 5);
    done(1, 5);
    settle_all();
    raw_post(2, raw_create(2, TLY_HAVE, 0), NULL, 0);
    done(2, 5);
    raw_until(&raw.rank[1].finals, 1);
    for (size_t i = 0; i < BYTES / sizeof *raw_data; i++)
        raw_data[i] = 3;
    f = raw_create(1, TLY_FINAL, 0);
    f.flags = TLY_LAST;
    raw_post(1, f, raw_data, BYTES);
    raw_until(&raw.rank[2].results, 1);
}

/* Then the part moves on, and rank 0 learns that last: it is here until then. */
static void test_words_interleave(void **state)
{
    interleave();
    done(1, 6);
    done(2, 6);
    settle_all();
    assert_int_equal(raw.rank[1].finals, 1); /* the create has brought the values */
    read_part(0, 1, 5);
    expect(0, 2, 3); /* the first has been that of the create */
    raw_settle(0);
    uint64_t before = raw.rank[0].facts.bytes_in_use;
    done(0, 6);
    raw_settle(0);
    assert_true(raw.rank[0].facts.bytes_in_use < before);
}

/* Once the create has ended rank 1 leaves, and takes its values along. */
static void test_create_and_leave(void **state)
{
    interleave();
    raw_post(1, (struct tly_frame){.type = TLY_GOODBYE}, NULL, 0);
    push(2, 1, 5, 1);
    expect(2, 2, 4);
}

static struct tly_frame word_of(int type, uint32_t part)
{
    struct tly_frame f = raw_word(type, 5);
    f.key = KEY + part;
    return f;
}

/* Rank i has all of part `part`. */
static void have_all_of(int i, uint32_t part)
{
    uint8_t version[TLY_VERSION_BYTES];
    tly_version_put(version, &(struct tly_version){2, 0});
    raw_post(i, word_of(TLY_HAVE, part), version, sizeof version);
}

/* Ranks 0 and 1 have all of the part, and rank 2 has none of it.  All ranks have all of so many others.  Rank 0 is asked for the
 * rest of the create, and for the others.  Rank 2 leaves, so rank 0 is asked for the part's values as well. */
static void leave_a_create(uint32_t others)
{
    for (int i = 0; i < RANKS; i++) {
        struct tly_frame f = raw_create(i, TLY_HAVE, i < 2 ? BYTES : 0);
        f.flags = i < 2 ? TLY_LAST : 0;
        have(i, 5, i < 2 ? 2 : 0, 0);
        for (uint32_t part = 1; part <= others; part++)
            have_all_of(i, part);
        raw_post(i, f, NULL, 0);
        done(i, 5);
    }
    raw_until(&raw.rank[0].finals, (int)others + 1);
    raw_post(2, (struct tly_frame){.type = TLY_GOODBYE}, NULL, 0);
    raw_until(&raw.rank[0].finals, (int)others + 2);
}

static void end_create(void)
{
    struct tly_frame f = raw_create(0, TLY_FINAL, 0);
    for (size_t i = 0; i < BYTES / sizeof *raw_data; i++)
        raw_data[i] = 3;
    f.flags = TLY_LAST;
    raw_post(0, f, raw_data, BYTES);
    raw_settle(0);
    raw_settle(1);
}

/* Rank 1 adds 1 to the values, all 3, and gets them. */
static void add_to_created(void)
{
    int before = raw.rank[1].results;
    push(1, 1, 5, 1);
    expect(1, before + 1, 4);
}

static void expect_added(void)
{
    int before = raw.rank[0].results;
    read_part(0, 1, 5);
    expect(0, before + 1, 4);
}

/* The create ends before its rank has given the values, which are as good. */
static void test_create_ends_while_given(void **state)
{
    leave_a_create(0);
    end_create();
    add_to_created();
    give(0, 5, 3, none);
    raw_settle(0);
    expect_added();
}

/* The values come first, and an addition, which the create's end leaves alone. */
static void test_create_ends_after_given(void **state)
{
    leave_a_create(0);
    give(0, 5, 3, none);
    add_to_created();
    end_create();
    expect_added();
}

/* Two ranks say that the part is here.  For the third one it is not: another service may keep it, so nobody is asked. */
static void test_one_names_it_not(void **state)
{
    done(2, 5);
    raw_settle(2);
    for (int i = 0; i < 2; i++) {
        have(i, 5, 2, 4);
        done(i, 5);
    }
    settle_all();
    assert_int_equal(raw.rank[0].finals + raw.rank[1].finals, 0);
    have(2, 5, 2, 4);
    done(2, 5);
    raw_until(&raw.rank[0].finals, 1);
}

/* Rank 1 has begun another create of the name, and rank 0 still uses what the first one has made. */
static void test_later_create(void **state)
{
    arrive(0, 3, none);
    raw_settle(0);
    struct tly_frame f = raw_word(TLY_HAVE, 5);
    f.round = 2;
    raw_post(1, f, NULL, 0);
    raw_settle(1);
    read_part(0, 1, 5);
    expect(0, 1, 3);
}

/* The last of so many parts, for all of which there is no memory. */
enum { PARTS = 40 };

static struct tly_frame raw_last(struct tly_frame f)
{
    f.part = PARTS - 1;
    f.length = RAW_PART;
    return f;
}

/* Other parts go, and the last one is asked for. */
static void make_room(const uint8_t *version)
{
    for (int i = 0; i < RANKS; i++) {
        raw_post(i, raw_last(raw_word(TLY_HAVE, 5)), version, TLY_VERSION_BYTES);
        done(i, 6);
    }
    settle_all();
    raw_post(0, raw_last(raw_operation(TALLY_SHARED_READ, 0, 2, 5)), NULL, 0);
    raw_until(&raw.rank[0].finals, 1);
    uint8_t at[STATE] = {0};
    struct tly_frame f = raw_last(raw_word(TLY_HAVE, 5));
    f.flags = TLY_MARK;
    raw_post(0, f, at, sizeof at);
    for (size_t i = 0; i < RAW_PART / sizeof *raw_data; i++)
        raw_data[i] = 6;
    f = raw_last(raw_word(TLY_FINAL, 5));
    f.flags = TLY_LAST;
    raw_post(0, f, raw_data, RAW_PART);
    expect(0, 1, 6);
}

/* A create has failed on all ranks. */
static void cancel(uint32_t part)
{
    struct tly_frame f = word_of(TLY_CANCEL, part);
    f.kind = TALLY_SHARED_CREATE;
    for (int i = 0; i < RANKS; i++)
        raw_post(i, f, NULL, 0);
}

/* A create has failed on rank 0 before the others name their values here.  The part goes as they give it up, once all have said that
 * they have named all parts: rank 2 last. */
static void test_cancelled_before_named(void **state)
{
    struct tly_frame f = word_of(TLY_CANCEL, 0);
    f.kind = TALLY_SHARED_CREATE;
    have(0, 5, 0, 0);
    done(0, 5);
    raw_post(0, f, NULL, 0);
    raw_settle(0);
    uint64_t before = raw.rank[0].facts.bytes_in_use;
    have(1, 5, 2, 0);
    done(1, 5);
    raw_post(1, f, NULL, 0);
    raw_settle(1);
    assert_true(raw.rank[1].facts.bytes_in_use > before);
    have(2, 5, 0, 0);
    done(2, 5);
    raw_settle(2);
    assert_int_equal(raw.rank[2].facts.bytes_in_use, before);
    read_part(0, 1, 5);
    raw_until(&raw.rank[0].verdicts, 1); /* it was not created */
}

/* Rank 0 alone names the part of a create that has failed on all ranks, gives it up and leaves. */
static void test_given_up_by_a_leaver(void **state)
{
    struct tly_frame f = word_of(TLY_CANCEL, 0);
    f.kind = TALLY_SHARED_CREATE;
    raw_settle(1);
    uint64_t before = raw.rank[1].facts.bytes_in_use;
    for (int i = 1; i < RANKS; i++) {
        have_all_of(i, 1); /* it speaks */
        raw_post(i, f, NULL, 0);
        raw_settle(i);
    }
    uint64_t of_part = raw.rank[2].facts.bytes_in_use - before;
    have(0, 5, 2, 0);
    raw_post(0, f, NULL, 0);
    raw_post(0, (struct tly_frame){.type = TLY_GOODBYE}, NULL, 0);
    raw_settle(0);
    done(1, 5);
    raw_settle(1);
    done(2, 5);
    raw_until(&raw.rank[1].finals, 1);
    raw_settle(2);
    assert_int_equal(raw.rank[2].facts.bytes_in_use, before + of_part);
}

/* Three parts have come here, and rank i is the holder of part i.  Two of them are asked for at a time. */
static int three_parts(void)
{
    uint8_t version[TLY_VERSION_BYTES];
    for (int i = 0; i < RANKS; i++) {
        for (int part = 0; part < RANKS; part++) {
            tly_version_put(version, &(struct tly_version){2, i == part ? 9 : 4});
            raw_post(i, word_of(TLY_HAVE, (uint32_t)part), version, sizeof version);
        }
        done(i, 5);
    }
    settle_all();
    assert_int_equal(raw.rank[0].finals + raw.rank[1].finals + raw.rank[2].finals, 2);
    int left = 0;
    while (raw.rank[left].finals)
        left++;
    return left;
}

/* The creates of these two have failed, so they go, and the third one is asked for. */
static void test_cancelled(void **state)
{
    int left = three_parts();
    for (int part = 0; part < RANKS; part++)
        if (part != left)
            cancel((uint32_t)part);
    raw_until(&raw.rank[left].finals, 1);
}

/* A create ends while its values are asked for, and those of another part: the third part is asked for. */
static void test_created_while_given(void **state)
{
    leave_a_create(1);
    for (int i = 0; i < 2; i++) {
        for (uint32_t part = 0; part < RANKS; part++)
            have_all_of(i, part);
        done(i, 5);
    }
    settle_all();
    assert_int_equal(raw.rank[0].finals, 3);
    end_create();
    raw_until(&raw.rank[0].finals, 4);
}

/* One of these two is created anew. */
static void test_created_anew(void **state)
{
    int left = three_parts(), again = left ? 0 : 1;
    for (int i = 0; i < RANKS; i++) {
        struct tly_frame f = word_of(TLY_PUSH, (uint32_t)again);
        f.kind = TALLY_SHARED_CREATE;
        f.round = 2;
        f.flags = i ? TLY_REQUEST : TLY_LAST;
        raw_post(i, f, raw_data, i ? 0 : BYTES);
    }
    raw_until(&raw.rank[left].finals, 1);
}

/* Parts for which there is no memory are refused by each operation, not waited for, until there is some. */
static void test_no_memory(void **state)
{
    uint8_t version[TLY_VERSION_BYTES];
    tly_version_put(version, &(struct tly_version){2, 1});
    for (uint32_t part = 0; part < PARTS; part++) {
        struct tly_frame f = raw_word(TLY_HAVE, 5);
        f.part = part;
        f.length = RAW_PART;
        raw_post(0, f, version, sizeof version);
    }
    done(0, 5);
    raw_settle(0);
    assert_true(raw.rank[0].facts.bytes_in_use <= raw.rank[0].facts.memory_limit);
    raw_post(0, raw_last(raw_operation(TALLY_SHARED_READ, 0, 1, 5)), NULL, 0);
    raw_until(&raw.rank[0].verdicts, 1);
    assert_int_equal(raw.rank[0].verdict_err, ENOMEM);
    make_room(version);
}

/* A create is refused in that case, also if a rank has its values already. */
static void test_create_without_memory(void **state)
{
    uint8_t version[TLY_VERSION_BYTES];
    tly_version_put(version, &(struct tly_version){2, 0});
    for (uint32_t part = 0; part < PARTS; part++) {
        struct tly_frame f = raw_word(TLY_HAVE, 5);
        f.part = part;
        f.length = RAW_PART;
        raw_post(1, f, version, sizeof version);
    }
    for (int i = 0; i < RANKS; i++) {
        struct tly_frame f = raw_last(raw_create(i, TLY_HAVE, 0));
        f.flags = i == 1 ? TLY_LAST : 0;
        f.offset = i == 1 ? RAW_PART : 0;
        raw_post(i, f, NULL, 0);
        done(i, 5);
    }
    for (int i = 0; i < RANKS; i++) {
        raw_until(&raw.rank[i].verdicts, 1);
        assert_int_equal(raw.rank[i].verdict_err, ENOMEM);
    }
}

/* What no rank says ends its connection, and the others go on. */
static void wild(int rank, struct tly_frame f, uint32_t bytes)
{
    static const uint8_t zeros[BYTES];
    uint8_t payload[BYTES] = {0};
    tly_version_put(payload, &(struct tly_version){2, 1});
    raw_post(rank, f, f.type == TLY_FINAL ? zeros : payload, bytes);
    raw_until(&raw.rank[rank].closed, 1);
    raw_enter(rank);
}

static void test_wild(void **state)
{
    struct tly_frame f = raw_word(TLY_HAVE, 5);
    f.flags = TLY_MARK;
    for (int i = 0; i < RANKS; i++) {
        have(i, 5, 2, i == 1);
        done(i, 5);
    }
    raw_until(&raw.rank[1].finals, 1);
    wild(2, raw_word(TLY_FINAL, 5), BYTES); /* another was asked */
    wild(2, f, STATE);
    wild(2, raw_word(TLY_FINAL, 6), BYTES); /* of the future */
    have(2, 5, 2, 0);
    done(2, 5);
    wild(2, raw_word(TLY_HAVE, 1), TLY_VERSION_BYTES); /* it holds what is newer than where the part is */
    wild(2, raw_word(TLY_HAVE, 2), 1);
    wild(2, raw_word(TLY_HAVE, 0), 0);
    f = raw_word(TLY_HAVE, 5);
    f.rank = 1;
    wild(2, f, TLY_VERSION_BYTES);
    f = raw_word(TLY_HAVE, 5);
    f.length = BYTES / 2;
    wild(2, f, TLY_VERSION_BYTES);
    f = raw_word(TLY_HAVE, 5);
    f.length = 3;
    wild(2, f, TLY_VERSION_BYTES);
    f = raw_word(TLY_HAVE, 5);
    f.length = RAW_PART + 64;
    wild(2, f, TLY_VERSION_BYTES);
    f = raw_word(TLY_HAVE, 5);
    f.flags = TLY_MARK;
    wild(2, f, STATE - 1);
    wild(1, raw_word(TLY_FINAL, 5), BYTES); /* before their state */
    have(1, 5, 2, 1);
    done(1, 5);
    have(2, 5, 2, 0);
    done(2, 5);
    raw_until(&raw.rank[1].finals, 1);
    give_state(1, 5, none);
    f = raw_word(TLY_FINAL, 5);
    f.offset = BYTES / 2;
    wild(1, f, BYTES / 2); /* not from the beginning */
    have(1, 5, 2, 1);
    done(1, 5);
    raw_until(&raw.rank[1].finals, 1);
    give(1, 5, 4, none);
    read_part(0, 1, 5);
    expect(0, 1, 4);
}

/* The service has answered all words, or has closed the connection. */
static void settle_or_close(int rank)
{
    int before = raw.rank[rank].answers;
    if (!raw.rank[rank].closed)
        raw_post(rank, (struct tly_frame){.type = TLY_STATUS}, NULL, 0);
    while (raw.rank[rank].answers == before && !raw.rank[rank].closed)
        tly_loop_turn(&raw.loop, 2);
}

/* Random words about a few parts: whatever they say, nothing is lost of the service but their connections. */
static void test_random(void **state)
{
    static const uint8_t types[] = {TLY_HAVE, TLY_FINAL, TLY_DONE, TLY_CANCEL, TLY_PUSH, TLY_HAVE};
    uint64_t random = 5;
    uint8_t payload[BYTES];
    for (int i = 0; i < 4000; i++) {
        int rank = (int)(job_random(&random) % RANKS);
        if (raw.rank[rank].closed)
            raw_enter(rank);
        uint32_t epoch = (uint32_t)(job_random(&random) % 6), bytes = BYTES;
        struct tly_frame f = raw_word(types[job_random(&random) % sizeof types], epoch);
        f.part = (uint32_t)(job_random(&random) % 3);
        if (f.type == TLY_DONE)
            f = (struct tly_frame){.type = TLY_DONE, .count = epoch};
        if (f.type == TLY_PUSH || f.type == TLY_CANCEL) {
            f = raw_operation(TALLY_SHARED_ADD, (uint32_t)rank, (uint32_t)(job_random(&random) % 4), epoch);
            f.type = types[3 + job_random(&random) % 2];
        }
        if (f.type == TLY_HAVE) {
            f.flags = job_random(&random) % 3 ? 0 : TLY_MARK;
            bytes = f.flags ? STATE : job_random(&random) % 4 ? TLY_VERSION_BYTES : 0;
        }
        if (f.type == TLY_DONE || f.type == TLY_CANCEL)
            bytes = 0;
        for (uint32_t at = 0; at < bytes; at++)
            payload[at] = at < 1 || at > 11 ? (uint8_t)(job_random(&random) % 4) : 0;
        raw_post(rank, f, payload, bytes);
        if (i % 8 == 0)
            settle_or_close(rank);
    }
    for (int rank = 0; rank < RANKS; rank++) {
        settle_or_close(rank);
        if (raw.rank[rank].closed)
            raw_enter(rank);
        raw_settle(rank);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_holder, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_pending, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_moves_twice, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_giver_breaks, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_giver_leaves, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_left_by_roster, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_giver_is_late, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_given_up, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_earlier_create, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_create_resumed, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_create_half_there, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_create_asked_last, raw_set_up_fragments, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_create_and_leave, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_create_ends_while_given, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_create_ends_after_given, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_words_interleave, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_one_names_it_not, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_later_create, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_cancelled, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_cancelled_before_named, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_given_up_by_a_leaver, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_created_while_given, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_created_anew, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_no_memory, raw_set_up_small, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_create_without_memory, raw_set_up_small, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_wild, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_random, raw_set_up, raw_tear_down),
    };
    return cmocka_run_group_tests_name("shared_regain", tests, NULL, NULL);
}
