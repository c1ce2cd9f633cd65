/* enemy_test.c - a rank that was admitted and means ill: a service takes no nonsense from it and allocates no more for it
 * than it may, and the other rank is served all the same.  And crowds of strangers at the doors of a running job.
 *
 * The service runs in a thread of this process; the enemy speaks over a link of ours, and so can say what no rank would. */
#include <arpa/inet.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sodium.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "base/clock.h"
#include "base/log.h"
#include "deaf.h"
#include "job.h"
#include "raw.h"
#include "sum/internal.h"

#include <cmocka.h>

/* --- what the service says ------------------------------------------------------------------------- */

enum { BIG = TLY_MAX_CONTROL, IN_ANOTHERS_NAME = 1000, MOST_KEPT = 256 << 20 };

static pthread_mutex_t said_lock = PTHREAD_MUTEX_INITIALIZER;
static char said[4096]; /* by the service, last */

static void listen_to_log(void *user, enum tally_log_level level, const char *line)
{
    pthread_mutex_lock(&said_lock);
    snprintf(said, sizeof said, "%s", line);
    pthread_mutex_unlock(&said_lock);
}

static int set_up(void **state)
{
    tally_log_redirect(listen_to_log, NULL);
    return raw_begin(2, (const char *const[]){"TALLY_MEMORY=4M", NULL});
}

static int set_up_traced(void **state)
{
    tally_log_redirect(listen_to_log, NULL);
    return raw_begin(2, (const char *const[]){"TALLY_MEMORY=256M", "TALLY_TRACE=/tmp", NULL});
}

static int set_up_larger(void **state)
{
    tally_log_redirect(listen_to_log, NULL);
    return raw_begin(RAW_MOST_RANKS, (const char *const[]){"TALLY_MEMORY=4M", NULL});
}

/* Machines of one, two, one and one ranks. */
static int set_up_machines(void **state)
{
    static const uint32_t machine[] = {0, 1, 1, 2, 3};
    tally_log_redirect(listen_to_log, NULL);
    return raw_begin_on(machine, 5, (const char *const[]){"TALLY_MEMORY=4M", NULL});
}

static int tear_down(void **state)
{
    raw_end();
    tally_log_redirect(NULL, NULL);
    return 0;
}

/* The enemy, rank 1, has been shown the door for this; the other is answered, and he may even come again. */
static void thrown_out(const char *why)
{
    raw_until(&raw.rank[1].closed, 1);
    pthread_mutex_lock(&said_lock);
    bool right = strstr(said, why);
    if (!right)
        print_error("not \"%s\" but \"%s\"\n", why, said);
    said[0] = '\0';
    pthread_mutex_unlock(&said_lock);
    assert_true(right);
    int before = raw.rank[0].answers;
    raw_post(0, (struct tly_frame){.type = TLY_STATUS}, NULL, 0);
    raw_until(&raw.rank[0].answers, before + 1);
    assert_int_equal(raw.rank[0].closed, 0);
    raw_enter(1);
}

/* --- what an admitted rank may not do ------------------------------------------------------------ */

static void test_nonsense(void **state)
{
    static const uint8_t data[RAW_PART + 64];
    struct tly_frame f;
    uint32_t len = 1024;
    const struct {
        const char *why;
        struct tly_frame frame;
        uint32_t payload;
    } cases[] = {
#define CASE(why_, payload_, ...) \
    {.why = why_, .payload = payload_, .frame = ({ \
                                           f = raw_push(1, len); \
                                           (void)(__VA_ARGS__); \
                                           f; \
                                       })}
        CASE("a push in another's name", len, f.rank = IN_ANOTHERS_NAME),
        CASE("unknown group", len, f.group = 7),
        CASE("unknown group", len, f.group = tly_pair(0, 0)),
        CASE("unknown group", len, f.group = tly_pair(1, 4000)),
        CASE("a part larger than agreed", len, (f.flags = 0, f.length = RAW_PART + 64)),
        CASE("part too large", len, (f.flags = 0, f.length = 1u << 31)),
        CASE("fragment reaches past its part", len + 64, f.length = len),
        CASE("fragment reaches past its part", len, f.offset = 0xffffffc0),
        CASE("part at an odd place", len, f.place = 3),
        CASE("unknown kind, type or size", len, f.kind = 99),
        CASE("unknown kind, type or size", len, f.kind = 0),
        CASE("unknown kind, type or size", len, f.dtype = 200),
        CASE("unknown kind, type or size", len + 1, f.length = len + 1),
        CASE("reduction", len, f.op = 77),
        CASE("no such root", 0, (f.kind = TALLY_BROADCAST, f.root = 3000)),
        CASE("no such rank", len, f.root = TLY_MAX_RANKS),
        CASE("a request out of place", len, f.flags |= TLY_REQUEST),
        CASE("a request with data", len, (f.kind = TALLY_BROADCAST, f.flags |= TLY_REQUEST)),
        CASE("data where ranks only meet", len, f.kind = TALLY_BARRIER),
        CASE("a list of another size", len, f.kind = TALLY_ALLGATHER),
        CASE("a malformed error mark", 100, (f.flags |= TLY_MARK, f.part = 1, f.length = 0)),
        CASE("payload too large", 0, (f.type = TLY_SPEC, f.payload = BIG + 1)),
        CASE("a malformed list of ranks", 4, (f.type = TLY_GROUP, f.group = 1)),
        CASE("a malformed list of ranks", 4, (f.type = TLY_GROUP, f.group = 0)),
        CASE("a malformed list of ranks", len, (f.type = TLY_GROUP, f.group = tly_pair(0, 1))),
        CASE("a message that a service does not take", 0, f.type = TLY_RESULT),
        CASE("a message that a service does not take", 0, f.type = TLY_INVITE),
        CASE("a message that a service does not take", 0, f.type = TLY_COMMIT),
        CASE("a message that a service does not take", 0, f.type = TLY_MEASURE),
        CASE("a second handshake", 0, f.type = TLY_HELLO),
        CASE("unknown frame type", 0, f.type = 250),
#undef CASE
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct tly_frame sent = cases[i].frame;
        if (sent.payload > BIG) { /* the header alone says it */
            static uint8_t more[BIG + 1];
            raw_post(1, sent, more, sizeof more);
        } else {
            raw_post(1, sent, data, cases[i].payload);
        }
        thrown_out(cases[i].why);
    }
}

/* More than the window that was granted: in bytes, and in pushes without any. */
static void test_past_the_window(void **state)
{
    static const uint8_t data[RAW_PART];
    for (int empty = 0; empty <= 1; empty++) {
        for (uint32_t i = 0; i < (empty ? RAW_WINDOW / 256 : RAW_WINDOW / RAW_PART) + 1; i++)
            raw_post(1, raw_push((uint64_t)(1000 + 1000 * empty) + i, empty ? 0 : RAW_PART), data,
                     empty ? 0 : RAW_PART);
        thrown_out("a push past its window");
    }
}

static void test_a_torn_part(void **state)
{
    static const uint8_t data[4096];
    struct tly_frame f = raw_push(5, 8192);
    f.flags = 0;
    raw_post(1, f, data, 4096);
    f.offset = 6144; /* not where the first fragment ended */
    raw_post(1, f, data, 2048);
    thrown_out("data that does not continue where");
}

/* To have of a part's result what it never had room for, or to the middle of a block. */
static void test_a_have_that_does_not_fit(void **state)
{
    static const uint8_t data[1024];
    for (uint32_t odd = 0; odd <= 1; odd++) {
        struct tly_frame f = raw_push(70 + odd, sizeof data);
        int before = raw.rank[0].answers;
        raw_post(0, f, data, sizeof data);
        raw_post(0, (struct tly_frame){.type = TLY_STATUS}, NULL, 0);
        raw_until(&raw.rank[0].answers, before + 1); /* the push is there */
        f.type = TLY_HAVE;
        f.flags = 0;
        f.length = odd ? (uint32_t)sizeof data : RAW_PART;
        f.offset = odd ? 33 : RAW_PART;
        raw_post(1, f, NULL, 0);
        thrown_out("a count of received bytes that does not fit the tensor");
    }
}

/* What he makes the service keep is bounded: he goes on until he is shown the door, which he is before it is a million.
 * Every so often he waits for an answer, so that his window opens again. */
static void flood(struct tly_frame (*make)(uint32_t i), bool both, const char *why)
{
    struct raw_rank *r = &raw.rank[1];
    for (uint32_t i = 0; !r->closed; i++) {
        assert_true(i < 1000000);
        raw_post(1, make(i), NULL, 0);
        if (both)
            raw_post(0, make(i), NULL, 0);
        if (i % 100)
            continue;
        int before[RAW_COME] = {raw.rank[0].answers, r->answers};
        for (int k = !both; k < RAW_COME; k++)
            raw_post(k, (struct tly_frame){.type = TLY_STATUS}, NULL, 0);
        for (int turns = 0;
             !r->closed && (r->answers == before[1] || (both && raw.rank[0].answers == before[0])); turns++) {
            assert_true(turns < 60000);
            tly_loop_turn(&raw.loop, 2);
        }
    }
    thrown_out(why);
}

static struct tly_frame have_of_nothing(uint32_t i)
{
    struct tly_frame f = raw_push(1000 + i, 1024);
    f.type = TLY_HAVE;
    f.flags = 0;
    f.offset = 512;
    return f;
}

/* Of a group of him alone nobody else is missing. */
static struct tly_frame have_of_his_own(uint32_t i)
{
    struct tly_frame f = raw_push(1000 + i, RAW_PART);
    f.type = TLY_HAVE;
    f.flags = i % 2 ? TLY_LAST : 0;
    f.offset = i % 2 ? RAW_PART : 512;
    f.group = 1;
    return f;
}

static struct tly_frame mark_of_his_own(uint32_t i)
{
    struct tly_frame f = raw_push(1000 + i, 0);
    f.flags |= TLY_MARK;
    return f;
}

static struct tly_frame message_to_nobody(uint32_t i)
{
    struct tly_frame f = raw_push(1000 + i, 1024);
    f.kind = TALLY_MESSAGE;
    f.group = tly_pair(1, 0);
    f.root = 1;
    f.flags = TLY_OFFER;
    return f;
}

static struct tly_frame meeting(uint32_t i)
{
    struct tly_frame f = raw_push(1000 + i, 0);
    f.kind = TALLY_BARRIER;
    return f;
}

static void test_rounds_without_end(void **state)
{
    flood(have_of_nothing, false, "it has begun more operations than a rank may");
    raw_post(1, have_of_nothing(1), NULL,
             0); /* over another connection they are his still; but of what is there he may speak */
    raw_post(1, have_of_nothing(2000000), NULL, 0);
    thrown_out("it has begun more operations than a rank may");
}

static void test_rounds_of_his_own(void **state)
{
    uint8_t list[8];
    size_t before = job_resident();
    tly_put32(list, 1);
    tly_put32(list + 4, 1);
    raw_post(1, (struct tly_frame){.type = TLY_GROUP, .group = 1}, list, sizeof list);
    flood(have_of_his_own, false, "it has begun more operations than a rank may");
    raw_settle(0);
    const struct tly_service_facts *facts = &raw.rank[0].facts;
    assert_true(facts->bytes_peak <= facts->memory_limit + RAW_PART);
    assert_true(UNDER_SANITIZER || job_resident() - before < (size_t)MOST_KEPT);
}

static void test_marks_without_end(void **state)
{
    flood(mark_of_his_own, false, "it has begun more operations than a rank may");
}

static void test_messages_without_end(void **state)
{
    flood(message_to_nobody, false, "it has begun more operations than a rank may");
}

static void settle_or_end(void)
{
    struct raw_rank *r = &raw.rank[1];
    int before = r->answers;
    raw_settle(0);
    raw_post(1, (struct tly_frame){.type = TLY_STATUS}, NULL, 0);
    for (int turns = 0; !r->closed && r->answers == before; turns++) {
        assert_true(turns < 60000);
        tly_loop_turn(&raw.loop, 2);
    }
}

/* Both meet, from the i-th time on, as long as rank 1's window is open. */
static uint32_t meet(uint32_t i, uint32_t end, uint64_t *pushed)
{
    struct raw_rank *r = &raw.rank[1];
    for (; i < end; i++) {
        if (i % 100 == 0 || *pushed + 256 > r->granted)
            settle_or_end();
        if (r->closed || *pushed + 256 > r->granted)
            break;
        raw_post(1, meeting(i), NULL, 0);
        raw_post(0, meeting(i), NULL, 0);
        *pushed += 256;
    }
    return i;
}

/* All rounds end, but he does not say that he has their answers: they are kept for him.  One whose word is late has his
 * window shut until it comes; one who comes again and again without it is shown the door. */
static void test_nothing_confirmed(void **state)
{
    struct raw_rank *r = &raw.rank[1];
    uint64_t pushed = 0;
    r->confirms_nothing = true;
    uint32_t i = meet(0, 1000000, &pushed);
    assert_true(i < 1000000);
    assert_int_equal(r->closed, 0);
    r->confirms_nothing = false;
    r->received = (uint64_t)r->results;
    const struct tly_counts counts = {.received = r->received};
    tly_loop_lock(&raw.loop);
    tly_link_set_counts(r->link, &counts, 0);
    tly_loop_unlock(&raw.loop);
    settle_or_end();
    assert_int_equal(meet(i, i + 2000, &pushed), i + 2000);
    i += 2000;
    for (int times = 0; !r->closed; times++) {
        assert_true(times < 10);
        raw_break(1);
        raw_enter(1);
        r->confirms_nothing = true;
        pushed = 0;
        i = meet(i, i + 1000000, &pushed);
    }
    thrown_out("it confirms none of the results that it gets");
}

/* --- sums of machines that are none ---------------------------------------------------------------- */

static void tell_list(int rank, uint32_t number, const uint32_t *list, uint32_t count)
{
    uint8_t payload[4 + 4 * RAW_MOST_RANKS];
    tly_put32(payload, count);
    for (uint32_t i = 0; i < count && i < RAW_MOST_RANKS; i++)
        tly_put32(payload + 4 + 4 * (size_t)i, list[i]);
    raw_post(rank, (struct tly_frame){.type = TLY_GROUP, .group = number}, payload, 4 + 4 * (size_t)count);
}

/* A push says by its root that it is the sum of its machine's ranks, and of how many ranks all pushes are. */
static void test_false_sums(void **state)
{
    static const uint8_t data[1024];
    static const struct {
        uint32_t list[4], count, root;
    } cases[] = {{{0, 1, 3}, 3, 1}, /* of another number of ranks */
                 {{0, 1, 3}, 3, 4}, {{0, 1, 3}, 3, TLY_MAX_RANKS - 1},
                 {{1}, 1, 2},       {{1, 2}, 2, 1}, /* two ranks of a machine push the sum of both */
                 {{1, 2}, 2, 3},    {{0}, 0, 3},    /* all ranks do */
                 {{0}, 0, 5}};
    static const uint8_t kinds[] = {TALLY_PUSH_PULL, TALLY_REDUCE, TALLY_REDUCE_SCATTER};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (size_t k = 0; k < sizeof kinds; k++) {
            struct tly_frame f = raw_push(100 + i, sizeof data);
            f.kind = kinds[k];
            f.part = 1;
            f.root = cases[i].root;
            f.group = cases[i].count > 0;
            if (f.group)
                tell_list(1, 1, cases[i].list, cases[i].count);
            raw_post(1, f, data, sizeof data);
            thrown_out("a carried sum of too few or too many ranks");
        }
}

/* Ranks 1 and 2 are no node of the tree over four, so the sum goes along the tree over machines. */
static void test_machines_that_are_no_nodes(void **state)
{
    static const uint32_t list[] = {0, 1, 3};
    static float data[256];
    struct tly_frame f = raw_push(100, sizeof data);
    f.part = 1;
    f.op = TALLY_AVERAGE;
    f.group = 1;
    f.root = 3;
    raw_enter(3);
    for (int i = 0; i < 3; i++) {
        for (int k = 0; k < 256; k++)
            data[k] = (float)(k % 50 + (int)list[i]);
        tell_list((int)list[i], 1, list, 3);
        raw_post((int)list[i], f, data, sizeof data);
    }
    for (int i = 0; i < 3; i++) {
        raw_until(&raw.rank[list[i]].results, 1);
        for (int k = 0; k < 256; k++)
            assert_true(((float *)raw.rank[list[i]].result)[k] == (float)(3 * (k % 50) + 4) / 4);
    }
}

/* The i-th of many orders of the ranks, his own among them. */
static void list_group(uint32_t i, uint8_t list[4 + 4 * RAW_MOST_RANKS])
{
    uint32_t left[RAW_MOST_RANKS];
    for (uint32_t k = 0; k < RAW_MOST_RANKS; k++)
        left[k] = k;
    tly_put32(list, RAW_MOST_RANKS);
    for (uint32_t k = 0; k < RAW_MOST_RANKS; k++) {
        uint32_t at = i % (RAW_MOST_RANKS - k);
        i /= RAW_MOST_RANKS - k;
        tly_put32(list + 4 + 4 * (size_t)k, left[at]);
        memmove(left + at, left + at + 1, (RAW_MOST_RANKS - k - 1 - at) * sizeof *left);
    }
}

/* Over one connection after another, each with the same numbers and other lists. */
static void test_groups_without_end(void **state)
{
    enum { EACH = 1000, MOST = 8 * 7 * 6 * 5 * 4 * 3 * 2 };
    uint8_t list[4 + 4 * RAW_MOST_RANKS];
    for (uint32_t i = 0; !raw.rank[1].closed; i++) {
        assert_true(i < MOST);
        list_group(i, list);
        raw_post(1, (struct tly_frame){.type = TLY_GROUP, .group = 1 + i % EACH}, list, sizeof list);
        if (i % EACH != EACH - 1)
            continue;
        raw_post(1, (struct tly_frame){.type = TLY_STATUS}, NULL, 0);
        while (!raw.rank[1].closed && !raw.rank[1].answers)
            tly_loop_turn(&raw.loop, 2);
        if (raw.rank[1].closed)
            break;
        tly_loop_lock(&raw.loop);
        tly_link_destroy(raw.rank[1].link);
        tly_loop_unlock(&raw.loop);
        raw_enter(1);
    }
    thrown_out("more groups than a rank may have");
    list_group(0, list); /* what is known he may tell again */
    raw_post(1, (struct tly_frame){.type = TLY_GROUP, .group = 1}, list, sizeof list);
    raw_post(1, (struct tly_frame){.type = TLY_STATUS}, NULL, 0);
    raw_until(&raw.rank[1].answers, 1);
}

/* What he says he has got, and has not read, is kept until it is sent: he reads nothing, then all of it. */
static void test_confirmed_too_early(void **state)
{
    enum { ROUNDS = 1200 }; /* more than sockets take */
    static uint8_t data[RAW_PART];
    memset(data, 0, sizeof data);
    deaf = true;
    for (int i = 0; i < ROUNDS; i++) {
        for (int k = 0; k < RAW_COME; k++) {
            const struct tly_counts counts = {.received = 100000};
            raw.rank[k].confirms_nothing = true;
            tly_loop_lock(&raw.loop);
            tly_link_set_counts(raw.rank[k].link, &counts, 0);
            tly_loop_unlock(&raw.loop);
            raw_post(k, raw_push(1000 + (uint64_t)i, RAW_PART), data, RAW_PART);
        }
        for (uint64_t summed = 0; summed <= (uint64_t)i;) { /* his window is open again then */
            tly_loop_turn(&raw.loop, 2);
            struct tly_job *job = raw.service->job;
            tly_loop_lock(job->loop);
            summed = job->facts.parts_summed;
            tly_loop_unlock(job->loop);
        }
        assert_int_equal(raw.rank[0].closed + raw.rank[1].closed, 0);
    }
    deaf = false;
    for (int k = 0; k < RAW_COME; k++)
        raw_until(&raw.rank[k].results, ROUNDS);
}

/* What he has of a result is asked only over another connection than he had pushed over. */
static void test_says_what_it_has_unasked(void **state)
{
    static const uint8_t data[RAW_PART];
    struct tly_frame f = raw_push(900, RAW_PART);
    raw_post(1, f, data, RAW_PART / 2);
    f.type = TLY_HAVE;
    f.offset = RAW_PART - 64;
    raw_post(1, f, NULL, 0);
    thrown_out("a count of received bytes for data that it has sent over this connection");
}

/* He says that he has joined, and this of so many tensors: whose list he does not send, or sends. */
static void join(uint32_t joins, uint32_t on, uint32_t count, uint32_t sent, uint16_t flags)
{
    uint8_t list[12 + 12 * 2] = {0};
    tly_put32(list, joins);
    tly_put32(list + 4, on);
    tly_put32(list + 8, count);
    for (uint32_t i = 0; i < sent; i++)
        tly_put32(list + 12 + 12 * (size_t)i, 1000 + i);
    raw_post(1, (struct tly_frame){.type = TLY_JOINED, .flags = flags}, list, 12 + 12 * (size_t)sent);
}

static void test_malformed_joins(void **state)
{
    join(0, 2, 0, 0, TLY_LAST);
    thrown_out("a malformed join");
    join(0, 1, 2, 1, TLY_LAST);
    thrown_out("a malformed join");
    join(0, 1, 2, 2, TLY_LAST); /* tensors that it has submitted no time */
    thrown_out("a malformed join");
    raw_post(1, (struct tly_frame){.type = TLY_JOINED}, NULL, 0);
    thrown_out("a malformed join");
}

/* He has joined, and pushes nevertheless what is not in his list.  If the other comes later, the sum has his data; if the other
 * came before, it has its sum without them, and they are thrown away and never answered. */
static void test_pushes_though_he_has_joined(void **state)
{
    enum { LATE = 8 }; /* more than his window */
    static float ones[RAW_PART / 4];
    const float *sum = (const float *)raw.rank[0].result;
    struct raw_rank *r = &raw.rank[1];
    for (size_t i = 0; i < RAW_PART / 4; i++)
        ones[i] = 1;
    join(0, 1, 0, 0, TLY_LAST);
    raw_settle(1);
    raw_post(1, raw_push(1000, RAW_PART), ones, RAW_PART);
    raw_settle(1);
    raw_post(0, raw_push(1000, RAW_PART), ones, RAW_PART);
    raw_until(&raw.rank[0].results, 1);
    raw_until(&r->results, 1);
    assert_true(sum[0] == 2 && sum[RAW_PART / 4 - 1] == 2);
    raw.rank[0].confirms_nothing = true; /* the rounds stay */
    for (int i = 1; i <= LATE; i++) {
        raw_post(0, raw_push(1000 + (uint64_t)i, RAW_PART), ones, RAW_PART);
        raw_until(&raw.rank[0].results, 1 + i);
        assert_true(sum[0] == 1 && sum[RAW_PART / 4 - 1] == 1);
        raw_post(1, raw_push(1000 + (uint64_t)i, RAW_PART), ones, RAW_PART);
        raw_settle(1);
    }
    assert_int_equal(r->results, 1);
    assert_int_equal(r->closed, 0);
    assert_true(r->granted >= RAW_WINDOW + LATE * RAW_PART);
}

/* Questions about nothing have no answer and cost nothing. */
static void test_about_nothing(void **state)
{
    static const uint8_t text[BIG];
    for (int i = 0; i < 300; i++) {
        struct tly_frame f = raw_push((uint64_t)i, 0);
        f.flags = i % 2 ? TLY_REQUEST : 0;
        f.type = i % 3 == 0 ? TLY_CANCEL : i % 3 == 1 ? TLY_SPEC : TLY_STATUS;
        if (f.type == TLY_STATUS)
            f.flags = TLY_REQUEST;
        raw_post(1, f, text, f.type == TLY_SPEC && i < 30 ? sizeof text : 0);
    }
    raw_post(1, (struct tly_frame){.type = TLY_STATUS}, NULL, 0);
    raw_until(&raw.rank[1].answers, 1);
    assert_int_equal(raw.rank[1].answers, 1);
    assert_int_equal(raw.rank[1].closed, 0);
}

/* Who asks and asks and reads no answer is not remembered for ever: the answers fill the sockets, then the service's
 * memory; what waits there is bounded, and then he goes. */
static void ask_without_reading(int rank)
{
    struct raw_rank *r = &raw.rank[rank];
    size_t most = 0, before = job_resident();
    deaf = true;
    for (int i = 0; !r->closed; i++) {
        assert_true(i < 60000);
        tly_loop_lock(&raw.loop);
        bool more = tly_list_empty(&r->outbox.letters);
        for (int n = 0; n < 1000 && more; n++) {
            struct tly_frame f = {.type = TLY_STATUS, .rank = (uint32_t)rank};
            assert_int_equal(tly_outbox_post(&r->outbox, &f, NULL, 0, NULL), 0);
        }
        tly_loop_unlock(&raw.loop);
        tly_loop_turn(&raw.loop, 0);
        size_t now = job_resident();
        most = now > most ? now : most;
        job_sleep_ms(1);
    }
    deaf = false;
    assert_true(UNDER_SANITIZER || most - before < 4 * (size_t)TLY_MOST_LETTER_BYTES);
}

static void test_asking_without_reading(void **state)
{
    ask_without_reading(1);
    thrown_out("it keeps asking and reads no answers");
}

/* --- crowds of strangers ------------------------------------------------------------------------- */

struct board {
    atomic_int stage, stop, ports_known;
    int ports[8];
};

static int until_stopped(int rank, void *arg)
{
    struct board *b = arg;
    static float x_[50000];
    static int64_t stop;
    tally_comm *c;
    tally_op *op;
    CHECK(tally_comm_open(NULL, &c) == 0);
    if (rank == 0) {
        char *json;
        int n = 0;
        CHECK(tally_comm_report(c, 60000, &json) == 0);
        for (const char *at = json; (at = strstr(at, "\"port\": ")); at++)
            sscanf(at, "\"port\": %d", &b->ports[n++]);
        free(json);
        atomic_store(&b->ports_known, n);
    }
    do {
        for (int i = 0; i < 50000; i++)
            x_[i] = (float)rank;
        CHECK(tally_push_pull(c, "w", x_, x_, 50000, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
        CHECK(tally_op_wait(op, -1) == 0);
        tally_op_free(op);
        CHECK(x_[17] == 1);
        atomic_fetch_add(&b->stage, 1);
        stop = atomic_load(&b->stop);
        CHECK(tally_push_pull(c, "stop", &stop, &stop, 1, TALLY_INT64, TALLY_MAX, NULL, &op) == 0);
        CHECK(tally_op_wait(op, -1) == 0);
        tally_op_free(op);
    } while (!stop);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static int knock(int port)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    struct sockaddr_in a = {.sin_family = AF_INET,
                            .sin_port = htons((uint16_t)port),
                            .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (fd >= 0)
        connect(fd, (struct sockaddr *)&a, sizeof a);
    return fd;
}

static int count_descriptors(pid_t pid)
{
    char path[64];
    int n = 0;
    snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
    for (int fd = 0; fd < 20000; fd++) {
        char name[96], target[64];
        snprintf(name, sizeof name, "%s/%d", path, fd);
        n += readlink(name, target, sizeof target) > 0;
    }
    return n;
}

/* As a scanner that speaks HTTP. */
static void shout(int port)
{
    static const char text[200] = "GET / HTTP/1.1\r\nHost: tally\r\n\r\n";
    int fd = knock(port);
    send(fd, text, sizeof text, MSG_NOSIGNAL | MSG_DONTWAIT);
    close(fd);
}

/* 10,000 connections that stay half open or say a byte now and then, and scanners that come and go, silent or not: the job
 * goes on, keeps nothing of them, and does not fill its log with them. */
static void test_crowds(void **state)
{
    enum { CROWD = UNDER_SANITIZER ? 2000 : 10000, SCANS = UNDER_SANITIZER ? 200 : 2000 };
    struct board *b = job_shared(sizeof *b);
    struct job j = {.ranks = 2, .tallyds = 1, .main = until_stopped, .arg = b};
    struct rlimit limit;
    static int fd[CROWD];
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &limit), 0);
    struct rlimit raised = {limit.rlim_max, limit.rlim_max};
    setrlimit(RLIMIT_NOFILE, &raised);
    int crowd = limit.rlim_max > CROWD + 200 ? CROWD : (int)limit.rlim_max - 200;
    job_start(&j);
    job_await(&b->ports_known, 3);
    job_await(&b->stage, 4);
    int before = count_descriptors(j.tallyd_pid[0]);
    b->ports[3] = j.port;
    for (int i = 0; i < crowd; i++)
        fd[i] = knock(b->ports[i % 4]);
    for (int round = 0; round < 3; round++) {
        int stage = atomic_load(&b->stage);
        job_await(&b->stage, stage + 6);
        for (int i = round; i < crowd; i += 3)
            send(fd[i], "T", 1, MSG_NOSIGNAL | MSG_DONTWAIT);
        for (int i = 0; i < SCANS / 3; i++)
            i % 5 ? (void)close(knock(b->ports[i % 4])) : shout(b->ports[i / 5 % 4]);
    }
    for (int i = 0; i < crowd; i++)
        close(fd[i]);
    for (int i = 0; count_descriptors(j.tallyd_pid[0]) > before; i++) {
        assert_true(i < 3000);
        job_sleep_ms(20);
    }
    atomic_store(&b->stop, 1);
    job_finish(&j);
    for (int i = 0; i < 3; i++) { /* two ranks and the tallyd */
        int log = i < 2 ? i : JOB_MOST_RANKS;
        job_log_holds(&j, log, "did not get past the handshake");
        job_log_lacks(&j, log, "closing the connection");
    }
    job_clear(&j);
    setrlimit(RLIMIT_NOFILE, &limit);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_nonsense, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_a_have_that_does_not_fit, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_past_the_window, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_a_torn_part, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_rounds_without_end, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_rounds_of_his_own, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_marks_without_end, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_messages_without_end, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_nothing_confirmed, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_groups_without_end, set_up_larger, tear_down),
        cmocka_unit_test_setup_teardown(test_false_sums, set_up_machines, tear_down),
        cmocka_unit_test_setup_teardown(test_machines_that_are_no_nodes, set_up_machines, tear_down),
        cmocka_unit_test_setup_teardown(test_confirmed_too_early, set_up_traced, tear_down),
        cmocka_unit_test_setup_teardown(test_says_what_it_has_unasked, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_malformed_joins, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_pushes_though_he_has_joined, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_about_nothing, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_asking_without_reading, set_up, tear_down),
        cmocka_unit_test(test_crowds),
    };
    if (sodium_init() < 0)
        return 1;
    return cmocka_run_group_tests_name("enemy", tests, NULL, NULL);
}
