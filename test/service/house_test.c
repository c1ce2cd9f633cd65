/* house_test.c - two jobs in one house, with names and secrets of their own: neither sees, starves or ends the other. */
#include "sum/house.h"

#include <errno.h>
#include <netinet/in.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/thread.h"
#include "job.h"
#include "raw.h"
#include "sum/internal.h"
#include "transport/address.h"

#include <cmocka.h>

enum {
    JOBS = 2,
    RANKS = 2,
    WINDOW = 8,            /* parts that a rank may push and not be answered */
    RESERVED = RANKS + 1,  /* parts */
    MEMORY = 2 * RESERVED, /* parts */
};

static struct {
    struct tly_house *house;
    struct tly_identity identity[JOBS];
    struct tly_job *job[JOBS];
    struct tly_endpoints endpoints; /* of the house */
    uint32_t part;                  /* bytes */
    uint32_t window;                /* parts, of a job that begins */
    bool follows;                   /* the window of such a job suits its parts and the memory that is free */
    uint32_t cut;                   /* bytes: how the job cuts now; at most a part */
} t;

static const char *const settings[] = {"TALLY_MEMORY=384K", "TALLY_SUM_THREADS=2", NULL};
static const char *const much_memory[] = {"TALLY_MEMORY=6M", "TALLY_SUM_THREADS=2", NULL};

/* Where in raw.rank a rank of a job is. */
static int at(int job, int rank)
{
    return RANKS * job + rank;
}

static struct tly_frame push(uint64_t key)
{
    return raw_push(key, RAW_PART);
}

static void create(int job)
{
    assert_int_equal(tly_job_create(t.house, &raw.params, &t.identity[job], &t.job[job]), 0);
}

static void begin_job(int job)
{
    struct tly_roster_rank ranks[RANKS] = {{.machine = 0}, {.machine = 1}};
    struct tly_roster_service services[RANKS] = {
        {.weight = 1, .incarnation = tly_job_incarnation(t.job[job])}, {.weight = 1}};
    struct tly_roster roster = {
        .epoch = 1,
        .rank_count = RANKS,
        .machine_count = RANKS,
        .service_count = RANKS,
        .part_bytes = t.cut ? t.cut : t.part,
        .part_least = t.cut ? t.cut : t.part,
        .part_most = t.part,
        .window_fixed = !t.follows,
        .window_bytes = t.window * t.part,
        .ranks = ranks,
        .services = services};
    assert_int_equal(tly_job_begin(t.job[job], &roster), 0);
    for (int i = 0; i < RANKS; i++) {
        raw_connect(at(job, i), &t.identity[job], (uint32_t)i, &t.endpoints);
        raw_until(&raw.rank[at(job, i)].opened, 1);
    }
}

static int begin_with(const char *const *params)
{
    struct sockaddr_storage address;
    memset(&t, 0, sizeof t);
    t.part = RAW_PART;
    t.window = WINDOW;
    raw_begin_alone(params);
    assert_int_equal(tly_address_parse("127.0.0.1", 0, &address), 0);
    assert_int_equal(tly_house_create(NULL, &raw.params, &address, &t.house), 0);
    assert_int_equal(tly_house_start(t.house), 0);
    tly_house_endpoints(t.house, &t.endpoints);
    for (int i = 0; i < JOBS; i++) {
        char secret[] = "the secret of job 0";
        secret[sizeof secret - 2] = (char)('0' + i);
        t.identity[i] = (struct tly_identity){.role = TLY_ROLE_SERVICE,
                                              .rank = TLY_NO_RANK,
                                              .incarnation = 7 + (uint64_t)i,
                                              .job = {(char)('a' + i)}};
        tly_hello_secret(secret, t.identity[i].secret);
        create(i);
    }
    return 0;
}

static int begin(void **state)
{
    return begin_with(settings);
}

static int begin_large(void **state)
{
    return begin_with(much_memory);
}

static int end(void **state)
{
    for (int i = 0; i < JOBS; i++)
        tly_job_destroy(t.job[i]);
    tly_house_shut(t.house);
    tly_house_destroy(t.house);
    raw.service = NULL;
    raw_end();
    return 0;
}

static struct tly_service_facts facts(int job)
{
    struct tly_service_facts f;
    tly_loop_lock(t.job[job]->loop);
    tly_job_facts(t.job[job], &f);
    tly_loop_unlock(t.job[job]->loop);
    return f;
}

/* Each float of the part is `value`. */
static const float *data(float value)
{
    static float x[RAW_PART / 4];
    for (size_t i = 0; i < sizeof x / sizeof *x; i++)
        x[i] = value;
    return x;
}

static float result(int job, int rank)
{
    float x[2];
    memcpy(&x[0], raw.rank[at(job, rank)].result, 4);
    memcpy(&x[1], raw.rank[at(job, rank)].result + RAW_PART - 4, 4);
    assert_true(x[0] == x[1]);
    return x[0];
}

/* A round to which both ranks of a job come. */
static void sum(int job, uint64_t key, float value)
{
    int before[RANKS];
    for (int i = 0; i < RANKS; i++) {
        before[i] = raw.rank[at(job, i)].results;
        raw_post(at(job, i), push(key), data(value * (float)(i + 1)), RAW_PART);
    }
    for (int i = 0; i < RANKS; i++) {
        raw_until(&raw.rank[at(job, i)].results, before[i] + 1);
        assert_true(result(job, i) == 3 * value);
    }
}

/* Rank 0 of job 0 fills as much memory as it gets; rank 1 is late. */
static void fill(void)
{
    for (uint64_t key = 1; key <= WINDOW; key++)
        raw_post(at(0, 0), push(key), data((float)key), RAW_PART);
    raw_settle(at(0, 0));
}

/* Rank 1 comes: all ends, and nothing is lost.  What was dropped is asked for again. */
static void complete(void)
{
    int done[RANKS] = {0};
    for (uint64_t key = 1; key <= WINDOW; key++)
        raw_post(at(0, 1), push(key), data((float)key), RAW_PART);
    for (int turns = 0; raw.rank[at(0, 0)].results < WINDOW || raw.rank[at(0, 1)].results < WINDOW; turns++) {
        assert_true(turns < 20000);
        tly_loop_turn(&raw.loop, 2);
        for (int i = 0; i < RANKS; i++)
            for (const struct raw_rank *r = &raw.rank[at(0, i)]; done[i] < r->again; done[i]++) {
                assert_true(done[i] < RAW_ASKED);
                raw_post(at(0, i), push(r->asked[done[i]]), data((float)r->asked[done[i]]), RAW_PART);
            }
    }
}

static void test_same_names(void **state)
{
    begin_job(0);
    begin_job(1);
    raw_post(at(0, 0), push(5), data(1), RAW_PART);
    raw_settle(at(0, 0));
    sum(1, 5, 10); /* with the key and round that the other job waits for */
    assert_int_equal(raw.rank[at(0, 0)].results, 0);
    assert_int_equal(facts(0).rounds_open, 1);
    raw_post(at(0, 1), push(5), data(2), RAW_PART);
    raw_until(&raw.rank[at(0, 0)].results, 1);
    assert_true(result(0, 0) == 3);
    assert_int_equal(facts(0).parts_summed, 1);
    assert_int_equal(facts(1).parts_summed, 1);
}

/* A process serves one job after the other: each job's processor time is its own. */
static void test_processor_time_of_a_later_job(void **state)
{
    begin_job(0);
    for (uint64_t key = 1; tly_thread_cpu() < 1000000; key++)
        sum(0, key, 1);
    tly_job_destroy(t.job[1]);
    uint64_t before = tly_thread_cpu();
    create(1);
    uint64_t of_job = facts(1).cpu_us * 1000;
    assert_true(of_job <= tly_thread_cpu() - before);
}

static void turned_away(const struct tly_identity *as, int err)
{
    raw_connect(at(JOBS, 0), as, 0, &t.endpoints);
    raw_until(&raw.rank[at(JOBS, 0)].closed, 1);
    assert_int_equal(raw.rank[at(JOBS, 0)].opened, 0);
    assert_int_equal(raw.rank[at(JOBS, 0)].err, err);
}

static void test_strangers(void **state)
{
    char why[200];
    struct tly_identity as = t.identity[0];
    memcpy(as.secret, t.identity[1].secret, sizeof as.secret);
    turned_away(&as, EACCES); /* the wrong secret */
    snprintf(why, sizeof why, "%s", raw.rank[at(JOBS, 0)].why);
    as = t.identity[0];
    snprintf(as.job, sizeof as.job, "elsewhere");
    turned_away(&as, EACCES); /* an unknown job */
    assert_string_equal(raw.rank[at(JOBS, 0)].why, why);
    as = t.identity[0];
    as.incarnation++;
    turned_away(&as, ESTALE); /* it knows the secret, so it is told */
    as = t.identity[0];
    as.job[0] = '\0';
    turned_away(&as, EACCES); /* which of two jobs? */
}

/* --- strangers that speak by hand ----------------------------------------------------------------- */

/* A connection to the house over the network. */
static int knock(void)
{
    struct sockaddr_storage to;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0 && tly_endpoints_address(&t.endpoints, &to));
    assert_int_equal(connect(fd, (const struct sockaddr *)&to, tly_address_len(&to)), 0);
    return fd;
}

/* Message 1 of the handshake, from a peer that guesses the secret. */
static void say_first(int fd, struct tly_hello *h, const char *job, uint64_t incarnation)
{
    static const uint8_t zero[TLY_FRAME_KEY_BYTES];
    struct tly_identity me = {.role = TLY_ROLE_RANK, .incarnation = incarnation};
    const struct tly_frame f = {.type = TLY_HELLO, .payload = TLY_HELLO_BYTES};
    struct tly_context last;
    uint8_t packet[TLY_FRAME_BYTES + TLY_HELLO_BYTES], message[TLY_HELLO_BYTES];
    snprintf(me.job, sizeof me.job, "%s", job);
    tly_hello_secret("a guess at the secret", me.secret);
    tly_hello_init(h, &me, true);
    tly_hello_produce(h, message);
    tly_context_init(&last);
    uint32_t head = tly_frame_encode(&f, zero, &last, packet);
    memcpy(packet + head, message, sizeof message);
    assert_int_equal(send(fd, packet, head + sizeof message, MSG_NOSIGNAL), head + sizeof message);
}

/* Message 2. */
static void hear_second(int fd, uint8_t out[TLY_HELLO_BYTES])
{
    static const uint8_t zero[TLY_FRAME_KEY_BYTES];
    uint8_t head[TLY_FRAME_BYTES];
    struct tly_context last;
    struct tly_frame f;
    const char *why;
    tly_context_init(&last);
    assert_int_equal(recv(fd, head, TLY_FRAME_LEAST, MSG_WAITALL), TLY_FRAME_LEAST);
    uint32_t more = tly_frame_size(head) - TLY_FRAME_LEAST;
    assert_int_equal(recv(fd, head + TLY_FRAME_LEAST, more, MSG_WAITALL), more);
    assert_int_equal(tly_frame_decode(head, zero, 0, &last, &f, &why), 0);
    assert_int_equal(f.type, TLY_HELLO);
    assert_int_equal(f.payload, TLY_HELLO_BYTES);
    assert_int_equal(recv(fd, out, TLY_HELLO_BYTES, MSG_WAITALL), TLY_HELLO_BYTES);
}

/* The first two messages of a handshake with the house, of which the second is returned. */
static void shake(const char *job, uint64_t incarnation, uint8_t out[TLY_HELLO_BYTES])
{
    struct tly_hello h;
    int fd = knock();
    say_first(fd, &h, job, incarnation);
    hear_second(fd, out);
    assert_int_equal(tly_hello_consume(&h, out), -EACCES);
    close(fd);
}

static int lobby_size(void)
{
    int n = 0;
    tly_loop_lock(t.house->loop);
    for (const struct tly_list *at = t.house->lobby.next; at != &t.house->lobby; at = at->next)
        n++;
    tly_loop_unlock(t.house->loop);
    return n;
}

static bool has_ended(int fd)
{
    char byte;
    return recv(fd, &byte, 1, 0) <= 0; /* a reset, if something of it had not been read */
}

/* Connections that have proved nothing stay until the house is shut, also if the job that they have named ends. */
static void test_silent_strangers(void **state)
{
    uint8_t second[TLY_HELLO_BYTES];
    struct tly_hello h;
    char byte;
    int silent = knock(), named = knock(), other = knock();
    say_first(named, &h, t.identity[0].job, 0);
    hear_second(named, second);
    say_first(other, &h, t.identity[1].job, 0);
    hear_second(other, second);
    for (int i = 0; i < 20000 && lobby_size() < 3; i++)
        tly_loop_turn(&raw.loop, 2);
    assert_int_equal(lobby_size(), 3);
    tly_job_destroy(t.job[0]);
    t.job[0] = NULL;
    assert_int_equal(lobby_size(), 3); /* their ends would tell who has named a job that was here */
    assert_int_equal(recv(named, &byte, 1, MSG_DONTWAIT), -1);
    assert_int_equal(errno, EAGAIN);
    assert_int_equal(recv(silent, &byte, 1, MSG_DONTWAIT), -1);
    assert_int_equal(errno, EAGAIN);
    assert_int_equal(recv(other, &byte, 1, MSG_DONTWAIT), -1);
    assert_int_equal(errno, EAGAIN);
    tly_house_shut(t.house);
    assert_int_equal(lobby_size(), 0);
    assert_true(has_ended(silent) && has_ended(named) && has_ended(other));
    close(silent);
    close(named);
    close(other);
}

/* Message 2 is all that a stranger sees of the house.  It repeats for an unknown job what it repeats for a known one. */
static void test_decoy(void **state)
{
    enum { INCARNATION = 24, JOB = 32, NONCE = 128 }; /* wire/hello.c */
    static const char *const names[] = {"a", "elsewhere"};
    uint8_t second[2][2][TLY_HELLO_BYTES];
    for (int i = 0; i < 2; i++) {
        for (uint64_t k = 0; k < 2; k++)
            shake(names[i], 99 * k, second[i][k]); /* whatever start of the job it names */
        assert_memory_equal(second[i][0], second[i][1], NONCE);
        assert_memory_not_equal(second[i][0] + NONCE, second[i][1] + NONCE, 32);
        assert_string_equal((const char *)second[i][0] + JOB, names[i]);
    }
    assert_memory_equal(second[0][0], second[1][0], INCARNATION);
    assert_memory_not_equal(second[0][0] + INCARNATION, second[1][0] + INCARNATION, 8);
}

/* A job's late rank keeps it from what the other has reserved, and the other from nothing. */
static void test_late_rank(void **state)
{
    begin_job(0);
    begin_job(1);
    fill();
    assert_true(facts(0).bytes_in_use >= (MEMORY - RESERVED - 1) * RAW_PART);
    assert_true(facts(0).bytes_in_use <= (MEMORY - RESERVED) * RAW_PART);
    assert_true(facts(0).slots_dropped > 0);
    for (uint64_t key = 1; key <= 2 * WINDOW; key++)
        sum(1, key, (float)key);
    assert_int_equal(facts(1).slots_dropped, 0);
    assert_int_equal(raw.rank[at(0, 0)].results, 0);
    complete();
}

/* A job that begins while another has taken all memory gets what it reserves, and the other one's work still ends. */
static void test_late_job(void **state)
{
    begin_job(0);
    fill();
    assert_true(facts(0).bytes_in_use > RESERVED * RAW_PART);
    begin_job(1);
    assert_true(facts(0).bytes_in_use <= RESERVED * RAW_PART);
    for (uint64_t key = 1; key <= WINDOW; key++)
        sum(1, key, (float)key);
    complete();
    sum(1, 100, 7);
    assert_true(facts(0).bytes_peak <= facts(0).memory_limit);
}

/* A job has some of more results from before a loss than its own memory holds when another one begins.  It cannot give them
 * back, and yet its rounds end one after another. */
static void test_late_job_after_a_loss(void **state)
{
    enum { ROUNDS = 4, HAD = 1024 };
    uint64_t pushed[RANKS] = {0};
    int answered[RANKS] = {0};
    begin_job(0);
    for (uint64_t key = 1; key <= ROUNDS; key++)
        for (int i = 0; i < RANKS; i++) {
            struct tly_frame f = push(key);
            f.type = TLY_HAVE;
            f.flags = 0;
            f.offset = HAD;
            raw_post(at(0, i), f, NULL, 0);
        }
    for (int i = 0; i < RANKS; i++)
        raw_until(&raw.rank[at(0, i)].again, ROUNDS);
    assert_int_equal(facts(0).bytes_in_use, ROUNDS * RAW_PART);
    begin_job(1);
    for (int turns = 0; raw.rank[at(0, 0)].results < ROUNDS || raw.rank[at(0, 1)].results < ROUNDS; turns++) {
        assert_true(turns < 20000);
        tly_loop_turn(&raw.loop, 2);
        for (int i = 0; i < RANKS; i++) {
            struct raw_rank *r = &raw.rank[at(0, i)];
            assert_true(!r->closed && r->again <= RAW_ASKED);
            for (; answered[i] < r->again && pushed[i] + RAW_PART <= r->granted; answered[i]++) {
                struct tly_frame rest = push(r->asked[answered[i]]);
                rest.offset = HAD;
                rest.flags = TLY_LAST | TLY_RESUMED;
                raw_post(at(0, i), rest, data((float)(1 + i)), RAW_PART - HAD);
                pushed[i] += RAW_PART;
            }
        }
    }
    sum(1, 1, 7);
    assert_true(facts(0).bytes_peak <=
                (ROUNDS + RANKS) * RAW_PART); /* past the limit by no more than one round */
}

/* A job dies with pushes under way: its connections end, the other goes on, and all its memory is there again. */
static void test_death(void **state)
{
    begin_job(0);
    begin_job(1);
    fill();
    raw_post(at(1, 0), push(1), data(1), RAW_PART);
    raw_post(at(0, 1), push(1), data(1), RAW_PART / 2); /* breaks off */
    tly_job_destroy(t.job[0]);
    t.job[0] = NULL;
    for (int i = 0; i < RANKS; i++)
        raw_until(&raw.rank[at(0, i)].closed, 1);
    raw_post(at(1, 1), push(1), data(2), RAW_PART);
    raw_until(&raw.rank[at(1, 0)].results, 1);
    assert_true(result(1, 0) == 3);
    turned_away(&t.identity[0], EACCES);
    for (uint64_t key = 2; key <= 1 + WINDOW; key++) /* more than was its own */
        raw_post(at(1, 0), push(key), data((float)key), RAW_PART);
    raw_settle(at(1, 0));
    assert_true(facts(1).bytes_in_use > (MEMORY - RESERVED) * RAW_PART);
    create(0); /* another start of the job */
    assert_int_equal(raw.rank[at(1, 0)].closed + raw.rank[at(1, 1)].closed, 0);
    begin_job(0);
    sum(0, 1, 5);
}

/* A part that is large enough for the crew, in two fragments. */
static void push_large(int job, int rank, uint64_t key, float value)
{
    enum { FRAGMENT = TLY_MAX_FRAGMENT };
    static float x[FRAGMENT / 4];
    struct tly_frame f = raw_push(key, 2 * FRAGMENT);
    for (size_t i = 0; i < sizeof x / sizeof *x; i++)
        x[i] = value;
    f.flags = 0;
    raw_post(at(job, rank), f, x, FRAGMENT);
    f.flags = TLY_LAST;
    f.offset = FRAGMENT;
    raw_post(at(job, rank), f, x, FRAGMENT);
}

/* The crew sums for both jobs; the end of one takes its pieces out of the crew's hands. */
static void test_death_while_the_crew_sums(void **state)
{
    t.part = 2 * TLY_MAX_FRAGMENT;
    begin_job(0);
    begin_job(1);
    for (int i = 0; i < 20; i++) {
        for (int rank = 0; rank < RANKS; rank++) {
            push_large(0, rank, 1, 1);
            push_large(1, rank, 1 + (uint64_t)i, 2);
        }
        for (int k = 0; k < i % 4; k++)
            tly_loop_turn(&raw.loop, 1);
        tly_job_destroy(t.job[0]);
        t.job[0] = NULL;
        for (int rank = 0; rank < RANKS; rank++) {
            float x;
            raw_until(&raw.rank[at(1, rank)].results, i + 1);
            memcpy(&x, raw.rank[at(1, rank)].result, sizeof x);
            assert_true(x == 4);
            raw_until(&raw.rank[at(0, rank)].closed, 1);
        }
        create(0);
        begin_job(0);
    }
}

/* The window that a job has now, bytes. */
static uint64_t window(int job)
{
    tly_loop_lock(t.job[job]->loop);
    uint64_t bytes = t.job[job]->window_bytes;
    tly_loop_unlock(t.job[job]->loop);
    return bytes;
}

static void await_window(int job, uint64_t least, uint64_t most)
{
    for (int turns = 0; window(job) < least || window(job) > most; turns++) {
        assert_true(turns < 20000);
        tly_loop_turn(&raw.loop, 2);
    }
}

/* A job begins while another's windows are full.  Its own grows when that memory is free again. */
static void test_memory_that_is_free_again(void **state)
{
    enum { MANY = 60 };
    t.window = MANY;
    begin_job(0);
    for (uint64_t key = 1; key <= MANY; key++)
        raw_post(at(0, 0), push(key), data(1), RAW_PART);
    raw_settle(at(0, 0));
    assert_int_equal(facts(0).bytes_in_use, MANY * RAW_PART);
    t.window = 2;
    t.follows = true;
    begin_job(1);
    assert_true(window(1) <= (96 - MANY) * RAW_PART / 2 / (RANKS + 1));
    for (uint64_t key = 1; key <= MANY; key++)
        raw_post(at(0, 1), push(key), data(1), RAW_PART);
    raw_until(&raw.rank[at(0, 0)].results, MANY);
    raw_until(&raw.rank[at(0, 1)].results, MANY);
    await_window(1, (96 - RESERVED) * RAW_PART / 2 / (RANKS + 1), UINT64_MAX);
    raw_settle(at(1, 0));
    assert_int_equal(raw.rank[at(1, 0)].granted, window(1));
    sum(1, 1, 7);
}

/* The job is split over twice as many services: its window is half of the roster's. */
static void shrink(void)
{
    struct tly_roster_service services[2 * RANKS];
    for (size_t i = 0; i < sizeof services / sizeof *services; i++)
        services[i] = (struct tly_roster_service){.weight = 1};
    struct tly_roster next = {.service_count = 2 * RANKS, .part_bytes = t.cut, .services = services};
    tly_job_resize(t.job[0], &next);
    await_window(0, 1, WINDOW / 2 * RAW_PART);
}

/* Rank 1 pushes what rank 0 has pushed, part by part.  Nothing is granted to rank 0 until what it has unanswered fits into the
 * smaller window; then a part for each. */
static void answer_all(uint64_t first)
{
    for (uint64_t i = 1; i <= WINDOW; i++) {
        raw_post(at(0, 1), push(first + i), data(1), RAW_PART);
        raw_until(&raw.rank[at(0, 0)].results, raw.rank[at(0, 0)].results + 1);
        raw_settle(at(0, 0));
        assert_int_equal(raw.rank[at(0, 0)].granted, (i < WINDOW / 2 ? WINDOW : i + WINDOW / 2) * RAW_PART);
    }
}

static void test_a_window_below_the_first(void **state)
{
    t.cut = 2048; /* 512 of them over two services: the window of the roster */
    t.follows = true;
    begin_job(0);
    assert_int_equal(window(0), WINDOW * RAW_PART);
    for (uint64_t key = 1; key <= WINDOW; key++)
        raw_post(at(0, 0), push(key), data(1), RAW_PART);
    shrink();
    answer_all(0);
    /* A new connection begins with the roster's window. */
    raw_break(at(0, 0));
    raw_connect(at(0, 0), &t.identity[0], 0, &t.endpoints);
    raw_until(&raw.rank[at(0, 0)].opened, 1);
    for (uint64_t key = 1; key <= WINDOW; key++)
        raw_post(at(0, 0), push(100 + key), data(1), RAW_PART);
    raw_settle(at(0, 0));
    answer_all(100);
    assert_int_equal(raw.rank[at(0, 0)].closed, 0);
    for (uint64_t key = 1; key <= WINDOW / 2 + 1; key++) /* one too many */
        raw_post(at(0, 0), push(200 + key), data(1), RAW_PART);
    raw_until(&raw.rank[at(0, 0)].closed, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_same_names, begin, end),
        cmocka_unit_test_setup_teardown(test_processor_time_of_a_later_job, begin, end),
        cmocka_unit_test_setup_teardown(test_strangers, begin, end),
        cmocka_unit_test_setup_teardown(test_decoy, begin, end),
        cmocka_unit_test_setup_teardown(test_silent_strangers, begin, end),
        cmocka_unit_test_setup_teardown(test_late_rank, begin, end),
        cmocka_unit_test_setup_teardown(test_late_job, begin, end),
        cmocka_unit_test_setup_teardown(test_late_job_after_a_loss, begin, end),
        cmocka_unit_test_setup_teardown(test_memory_that_is_free_again, begin_large, end),
        cmocka_unit_test_setup_teardown(test_a_window_below_the_first, begin_large, end),
        cmocka_unit_test_setup_teardown(test_death, begin, end),
        cmocka_unit_test_setup_teardown(test_death_while_the_crew_sums, begin, end),
    };
    return cmocka_run_group_tests_name("house", tests, NULL, NULL);
}
