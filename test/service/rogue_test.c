/* rogue_test.c - whole jobs whose tallyd is the test's own: it was admitted, and then says what no tallyd would.  The
 * ranks put it out with a word that says why, take no more memory for it than they may, and their sums are right.  Or it sums as
 * a tallyd does, and says what is stable only when it is asked. */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <sodium.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "base/clock.h"
#include "deaf.h"
#include "job.h"
#include "membership/member.h"
#include "shared.h"
#include "transport/address.h"
#include "wire/kept.h"

#include <cmocka.h>

enum {
    COUNT = 500,
    TENSORS = 16,
    STEPS = 20,
    MOST_GROWN = 96 << 20,
    LINGER_MS = 200,
    FIRST = 2, /* rounds */
    AT_ONCE = 2000,
    RETAINED = 64 << 10, /* TALLY_RETAIN_BYTES */
    PATIENCE_MS = 30000,
    PART = 64 << 10, /* and fewer parts of a shared tensor than this: */
    PARTS = 64,
    LENGTH = 20000, /* elements of it */
};

/* What it answers to an addition to a shared tensor. */
enum lie { TRUTH, SHORT_STATE, FOREIGN_STATE, NO_STATE };

struct rogue {
    struct tly_frame (*says)(uint64_t i); /* to each rank, again and again; NULL: nothing */
    size_t payload;
    uint64_t most;     /* so often to each, then it dies; 0: until it is put out */
    bool deaf;         /* and reads nothing more */
    bool refuses;      /* what it is home of, at first; then it dies */
    bool hasty;        /* asks for what it has, and answers at once; `most` times, then it dies */
    bool reticent;     /* it sums, and says what is stable only when it is asked */
    enum lie lie;      /* it keeps a shared tensor until the first addition */
    int made[2];       /* additions of each rank */
    atomic_int speaks; /* ranks are at work */
    atomic_int asked;  /* so often, what is stable */
};

struct voice {
    struct rogue *rogue;
    uint64_t said;
    struct tly_counts counts;
    struct tly_outbox outbox;
};

static bool admitted;
static int silent; /* ranks to which all has been said */
static int said;   /* in this turn of the loop, which has others to serve */

/* --- the rogue ----------------------------------------------------------------------------------- */

static void opened(void *user, struct tly_link *l)
{
}

static int header(void *user, struct tly_link *l, const struct tly_frame *f, struct tly_landing *land,
                  const char **why)
{
    const struct rogue *r = ((struct voice *)user)->rogue;
    land->control = r->hasty || r->reticent || r->lie;
    return 0;
}

/* A verdict as a service gives it: about the part as the first rank has described it, whose numbers of groups are not
 * those of the others. */
static void refuse(struct voice *v, const struct tly_frame *push)
{
    struct tly_frame f = {.type = TLY_VERDICT, .key = push->key, .round = push->round, .group = 4711};
    struct tly_writer w = {0};
    tly_write32(&w, EINVAL);
    tly_write_text(&w, "the rogue does not like it");
    CHECK(!w.failed && tly_outbox_post(&v->outbox, &f, w.data, w.len, NULL) == 0);
    free(w.data);
    silent += v->said++ == 0;
}

/* It asks for a part from some byte on, and gives the whole result while the part waits to be sent again. */
static void hurry(struct voice *v, const struct tly_frame *push, const float *data)
{
    struct tly_frame again = *push, result = *push;
    float sum[COUNT];
    if (push->type != TLY_PUSH || push->payload != sizeof sum || push->flags & TLY_RESUMED ||
        v->said == v->rogue->most)
        return;
    for (int i = 0; i < COUNT; i++)
        sum[i] = 2 * data[i] + (push->rank ? -1 : 1); /* what take_step() expects */
    again.type = TLY_AGAIN;
    again.flags = 0;
    again.offset = 64;
    result.type = TLY_RESULT;
    result.flags = TLY_LAST;
    CHECK(tly_outbox_post(&v->outbox, &again, NULL, 0, NULL) == 0);
    CHECK(tly_outbox_post(&v->outbox, &result, sum, sizeof sum, NULL) == 0);
    silent += ++v->said == v->rogue->most;
}

/* Both ranks give the same. */
static void sum_up(struct voice *v, struct tly_link *l, const struct tly_frame *push, const float *data)
{
    static float sum[TLY_MAX_FRAGMENT / sizeof(float)];
    struct tly_frame result = *push;
    CHECK(push->payload == push->length);
    for (uint32_t i = 0; i < push->length / sizeof *sum; i++)
        sum[i] = 2 * data[i];
    v->counts.accepted += tly_charge(push->length);
    tly_link_set_counts(l, &v->counts, 0);
    result.type = TLY_RESULT;
    result.flags = TLY_LAST;
    CHECK(tly_outbox_post(&v->outbox, &result, sum, push->length, NULL) == 0);
    v->said++;
}

static void tell_stable(struct voice *v, struct tly_link *l)
{
    atomic_fetch_add(&v->rogue->asked, 1);
    v->counts.stable = v->said;
    tly_link_set_counts(l, &v->counts, UINT32_MAX);
}

/* The create has come from both: rank 1 gets the values of rank 0. */
static void create(struct voice *v, const struct tly_frame *push, const void *data)
{
    static struct {
        struct voice *voice;
        struct tly_frame result;
    } of[PARTS][2];
    static uint8_t values[PARTS][PART];
    CHECK(push->part < PARTS && push->length <= PART && push->rank < 2);
    if (push->rank == 0)
        memcpy(values[push->part], data, push->length);
    of[push->part][push->rank].voice = v;
    of[push->part][push->rank].result = *push;
    for (int i = 0; i < 2 && of[push->part][!push->rank].voice; i++) {
        struct tly_frame f = of[push->part][i].result;
        f.type = TLY_RESULT;
        f.flags = TLY_LAST;
        f.length = i ? f.length : 0;
        CHECK(tly_outbox_post(&of[push->part][i].voice->outbox, &f, values[push->part], f.length, NULL) == 0);
        of[push->part][i].voice->said++;
    }
}

static void lie(struct voice *v, const struct tly_frame *push)
{
    uint8_t state[TLY_STATE_LEAST + 2 * TLY_STATE_RANK] = {0}, values[PART] = {0};
    struct tly_frame f = *push;
    uint32_t epoch = push->epoch + (v->rogue->lie == FOREIGN_STATE);
    tly_version_put(state, &(struct tly_version){epoch, 1});
    f.type = TLY_HAVE;
    f.flags = 0;
    f.offset = 0;
    if (v->rogue->lie != NO_STATE)
        CHECK(tly_outbox_post(&v->outbox, &f, state, sizeof state - (v->rogue->lie == SHORT_STATE), NULL) ==
              0);
    f.type = TLY_RESULT;
    f.flags = TLY_LAST;
    CHECK(tly_outbox_post(&v->outbox, &f, values, f.length, NULL) == 0);
}

static void keep(struct voice *v, struct tly_link *l, const struct tly_frame *f, const void *data)
{
    if (f->type == TLY_PUSH && f->kind == TALLY_SHARED_CREATE)
        create(v, f, data);
    if ((f->type == TLY_PUSH || f->type == TLY_HAVE) && f->kind == TALLY_SHARED_ADD)
        lie(v, f);
    v->counts.stable = v->said;
    tly_link_set_counts(l, &v->counts, UINT32_MAX);
}

static int frame(void *user, struct tly_link *l, const struct tly_frame *f, void *data, const char **why)
{
    struct voice *v = user;
    if (v->rogue->reticent && f->type == TLY_PUSH)
        sum_up(v, l, f, data);
    if (v->rogue->reticent && f->type == TLY_COUNTS && f->flags & TLY_REQUEST)
        tell_stable(v, l);
    if (v->rogue->lie)
        keep(v, l, f, data);
    if (v->rogue->hasty)
        hurry(v, f, data);
    if (v->rogue->refuses && f->type == TLY_PUSH && f->part == 0 && f->flags & TLY_LAST && f->round < FIRST)
        refuse(v, f);
    return 0;
}

static bool next(void *user, struct tly_link *l, struct tly_outgoing *out)
{
    static const uint8_t payload[512];
    struct voice *v = user;
    const struct rogue *r = v->rogue;
    if (tly_outbox_next(&v->outbox, out, NULL))
        return true;
    if (!r->says || !admitted || !atomic_load(&r->speaks) || (r->most && v->said == r->most) ||
        said == AT_ONCE)
        return false;
    said++;
    deaf = r->deaf;
    *out = (struct tly_outgoing){.frame = r->says(v->said++), .payload = payload, .stays = true};
    out->frame.payload = (uint32_t)r->payload;
    silent += v->said == r->most;
    return true;
}

static void closed(void *user, struct tly_link *l, int err, const char *why)
{
    struct voice *v = user;
    tly_link_destroy(l);
    tly_outbox_finish(&v->outbox, NULL, NULL);
    free(v);
}

struct door {
    struct rogue *rogue;
    struct tly_identity identity;
};

static int accepting(void *user, struct tly_link_config *config)
{
    static const struct tly_link_user calls = {

        .opened = opened, .header = header, .frame = frame, .next = next, .closed = closed};
    const struct door *d = user;
    struct voice *v = calloc(1, sizeof *v);
    CHECK(v);
    v->rogue = d->rogue;
    tly_outbox_init(&v->outbox);
    config->user_calls = &calls;
    config->user = v;
    config->identity = d->identity;
    return 0;
}

/* As tallyd's main(), with other words.  Ends when it is put out, or with the job. */
static int serve(struct rogue *rogue, int port)
{
    char coord[64], why[200];
    snprintf(coord, sizeof coord, "TALLY_COORD=127.0.0.1:%d", port);
    const char *const settings[] = {coord, "TALLY_HOST_ID=rogue", NULL};
    static struct tly_params params;
    static struct tly_place place;
    static struct tly_member member;
    static struct tly_loop loop;
    struct tly_listener *listener;
    struct sockaddr_storage at;
    CHECK(sodium_init() >= 0 && tly_params_load(&params, settings, why, sizeof why) == 0);
    CHECK(tly_place_find(&place, &params, false) == 0 && tly_loop_init(&loop) == 0);
    tly_member_init(&member, &loop, &place, &params, false);
    CHECK(tly_member_find(&member, -1) == 0 && tly_member_connect(&member, -1) == 0);
    CHECK(tly_member_service_address(&member, &at) == 0);
    struct door door = {rogue, member.identity};
    door.identity.role = TLY_ROLE_SERVICE;
    door.identity.rank = TLY_NO_RANK;
    const struct tly_listener_config listen = {
        .address = at, .by_address = true, .accepting = accepting, .user = &door};
    tly_loop_lock(&loop);
    CHECK(tly_listen(&loop, &listen, &listener) == 0);
    tly_loop_unlock(&loop);
    struct tly_endpoints endpoints;
    tly_listener_endpoints(listener, &endpoints);
    CHECK(tly_member_announce(&member, &endpoints, 4711, 1 << 30) == 0 && tly_member_begin(&member) == 0);
    admitted = true; /* before that it would be deaf to its own admission */
    for (; !member.left && member.state == TLY_MEMBER_RUNNING && silent < 2; said = 0)
        tly_loop_turn(&loop, 1);
    for (int64_t until = tly_now() + LINGER_MS * TLY_MS; silent == 2 && tly_now() < until;)
        tly_loop_turn(&loop, 1);
    if (silent == 2)
        return 0; /* without a word */
    bool put_out = member.state == TLY_MEMBER_OVER;
    return put_out != rogue->reticent ? 0 : 1;
}

/* --- the ranks ----------------------------------------------------------------------------------- */

/* Returns how many operations were refused. */
static int take_step(tally_comm *c, int step)
{
    static float x[TENSORS][COUNT];
    tally_op *op[TENSORS];
    int refused = 0;
    for (int t = 0; t < TENSORS; t++) {
        const char name[] = {'x', (char)('a' + t), '\0'};
        for (int i = 0; i < COUNT; i++)
            x[t][i] = (float)(i + step + t + tally_comm_rank(c));
        CHECK(tally_push_pull(c, name, x[t], x[t], COUNT, TALLY_FLOAT32, TALLY_SUM, NULL, &op[t]) == 0);
    }
    for (int t = 0; t < TENSORS; t++) {
        bool well = tally_op_wait(op[t], -1) == 0;
        for (int i = 0; i < COUNT && well; i++)
            CHECK(x[t][i] == (float)(2 * (i + step + t) + 1));
        if (!well)
            CHECK_HOLDS(tally_op_error(op[t]), "the rogue does not like it");
        refused += !well;
        tally_op_free(op[t]);
    }
    return refused;
}

/* What the rogue should sum waits until it is out. */
static int train(int rank, void *arg)
{
    struct rogue *rogue = arg;
    tally_comm *c;
    CHECK(tally_comm_open(NULL, &c) == 0);
    CHECK(tally_comm_service_count(c) == 3);
    size_t before = job_resident();
    atomic_store(&rogue->speaks, 1);
    int refused = 0;
    for (int step = 0; step < STEPS; step++)
        refused += take_step(c, step);
    CHECK(tally_comm_service_count(c) == 2);
    CHECK(rogue->refuses ? refused > 0 : refused == 0);
    CHECK(UNDER_SANITIZER || job_resident() < before + MOST_GROWN);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

/* Each addition counts once, whatever the rogue has answered. */
static int add(int rank, void *arg)
{
    struct rogue *rogue = arg;
    tally_comm *c;
    CHECK(tally_comm_open(NULL, &c) == 0);
    CHECK(tally_comm_service_count(c) == 3);
    int64_t *first = shared_first(LENGTH), *mine = shared_differences(rank, LENGTH);
    shared_create(c, "w", first, LENGTH, TALLY_INT64, 0);
    atomic_store(&rogue->speaks, 1);
    for (int step = 0; step < STEPS || tally_comm_service_count(c) == 3; step++) {
        shared_add(c, "w", mine);
        rogue->made[rank]++;
    }
    job_barrier(c);
    const int64_t *values = shared_read(c, "w");
    for (int i = 0; i < LENGTH; i++)
        CHECK(values[i] ==
              i + rogue->made[0] * shared_difference(0, i) + rogue->made[1] * shared_difference(1, i));
    job_barrier(c);
    CHECK(tally_comm_close(c) == 0);
    free(first);
    free(mine);
    return 0;
}

/* A job with this rogue, until both have ended well. */
static struct job run(const struct rogue *how, int (*ranks)(int rank, void *rogue))
{
    struct rogue *rogue = job_shared(sizeof *rogue);
    *rogue = *how;
    struct job j = {.ranks = 2,
                    .main = ranks,
                    .arg = rogue,
                    .port = job_free_port(),
                    .settings = {"TALLY_PART_BYTES=16K", "TALLY_SERVERS=1", "TALLY_RETAIN_BYTES=64K"}};
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        signal(SIGSEGV, SIG_DFL);
        _exit(serve(rogue, j.port));
    }
    job_start(&j);
    job_finish(&j);
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    return j;
}

static void meet_at(int (*ranks)(int rank, void *rogue), struct rogue how, const char *why)
{
    struct job j = run(&how, ranks);
    if (!strstr(job_log(&j, 1), why)) /* whoever notices it first has it put out */
        job_log_holds(&j, 0, why);
    job_log_holds(&j, 0, "is out:");
    job_clear(&j);
}

static void meet(struct rogue how, const char *why)
{
    meet_at(train, how, why);
}

/* What a rank may copy aside ends without a question, and what it may not with one. */
static int ask_once(int rank, void *rogue)
{
    static float x[64 * RETAINED / sizeof(float)];
    static const size_t counts[] = {RETAINED / sizeof *x, sizeof x / sizeof *x};
    tally_comm *c;
    CHECK(tally_comm_open(NULL, &c) == 0);
    CHECK(tally_comm_service_count(c) == 3);
    for (int k = 0; k < 2; k++) {
        tally_op *op;
        for (size_t i = 0; i < counts[k]; i++)
            x[i] = (float)(i % 1000);
        CHECK(tally_push_pull(c, k ? "long" : "short", x, x, counts[k], TALLY_FLOAT32, TALLY_SUM, NULL,
                              &op) == 0);
        CHECK(tally_op_wait(op, PATIENCE_MS) == 0);
        tally_op_free(op);
        for (size_t i = 0; i < counts[k]; i++)
            CHECK(x[i] == (float)(i % 1000 * 2));
    }
    CHECK(tally_comm_service_count(c) == 3);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

/* --- what it says -------------------------------------------------------------------------------- */

static struct tly_frame result_of_nothing(uint64_t i)
{
    return (struct tly_frame){
        .type = TLY_RESULT, .flags = TLY_LAST, .key = i, .length = 64, .kind = 99, .group = 4711};
}

static struct tly_frame verdict_on_nothing(uint64_t i)
{
    return (struct tly_frame){.type = TLY_VERDICT, .key = i, .length = 77, .kind = 99, .group = 4711};
}

static struct tly_frame question(uint64_t i)
{
    return (struct tly_frame){.type = TLY_SPEC, .key = i};
}

static struct tly_frame state_of_nothing(uint64_t i)
{
    return (struct tly_frame){.type = TLY_HAVE, .kind = TALLY_SHARED_ADD, .key = i, .length = 64};
}

static struct tly_frame final(uint64_t i)
{
    return (
        struct tly_frame){.type = TLY_FINAL, .flags = TLY_LAST, .kind = TLY_KEPT, .key = i, .length = 512};
}

static struct tly_frame push(uint64_t i)
{
    return (struct tly_frame){.type = TLY_PUSH, .flags = TLY_LAST, .key = i, .length = 512};
}

static void test_results_of_nothing(void **state)
{
    meet((struct rogue){.says = result_of_nothing}, "it keeps sending results that nobody has asked for");
}

static void test_verdicts_on_nothing(void **state)
{
    meet((struct rogue){.says = verdict_on_nothing, .payload = 512},
         "it keeps sending results that nobody has asked for");
}

static void test_asking_without_reading(void **state)
{
    meet((struct rogue){.says = question, .deaf = true}, "it keeps asking and reads no answers");
}

static void test_no_frame_for_a_rank(void **state)
{
    meet((struct rogue){.says = push, .payload = 512}, "a message that a rank does not take");
}

static void test_final_for_a_rank(void **state)
{
    meet((struct rogue){.says = final, .payload = 512}, "a message that a rank does not take");
}

static void test_states_of_nothing(void **state)
{
    meet((struct rogue){.says = state_of_nothing, .most = 100, .payload = 512}, "connection ended");
}

static void test_lies_about_a_shared_tensor(void **state)
{
    meet_at(add, (struct rogue){.lie = SHORT_STATE}, "a malformed state of a shared tensor");
    meet_at(add, (struct rogue){.lie = FOREIGN_STATE}, "a malformed state of a shared tensor");
    meet_at(add, (struct rogue){.lie = NO_STATE}, "values of a shared tensor without their state");
}

/* What it has left behind is not passed on to the others' harm. */
static void test_nonsense_before_it_dies(void **state)
{
    meet((struct rogue){.says = result_of_nothing, .most = 100}, "connection ended");
    meet((struct rogue){.says = verdict_on_nothing, .most = 100, .payload = 512}, "connection ended");
}

static void test_a_verdict_before_it_dies(void **state)
{
    meet((struct rogue){.refuses = true}, "connection ended");
}

static void test_answers_what_it_asks_for_again(void **state)
{
    meet((struct rogue){.hasty = true, .most = 20}, "connection ended");
}

static void test_says_what_is_stable_when_asked(void **state)
{
    struct job j = run(&(struct rogue){.reticent = true}, ask_once);
    const struct rogue *rogue = j.arg;
    assert_int_equal(atomic_load(&rogue->asked), j.ranks);
    job_clear(&j);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_says_what_is_stable_when_asked),
        cmocka_unit_test(test_answers_what_it_asks_for_again),
        cmocka_unit_test(test_results_of_nothing),
        cmocka_unit_test(test_verdicts_on_nothing),
        cmocka_unit_test(test_asking_without_reading),
        cmocka_unit_test(test_no_frame_for_a_rank),
        cmocka_unit_test(test_final_for_a_rank),
        cmocka_unit_test(test_states_of_nothing),
        cmocka_unit_test(test_lies_about_a_shared_tensor),
        cmocka_unit_test(test_nonsense_before_it_dies),
        cmocka_unit_test(test_a_verdict_before_it_dies),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
