/* raw.c - see raw.h. */
#include "raw.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sum/internal.h"
#include "transport/address.h"

#include <cmocka.h>

struct raw raw;

static void opened(void *user, struct tly_link *l)
{
    ((struct raw_rank *)user)->opened++;
}

static int header(void *user, struct tly_link *l, const struct tly_frame *f, struct tly_landing *land,
                  const char **why)
{
    land->control = true;
    return 0;
}

static int frame(void *user, struct tly_link *l, const struct tly_frame *f, void *data, const char **why)
{
    struct raw_rank *r = user;
    struct tly_reader reader = {data, f->payload, false};
    bool whole = f->type == TLY_RESULT && f->flags & TLY_LAST;
    if (f->type == TLY_RESULT && f->payload && f->offset < sizeof r->result) {
        size_t room = sizeof r->result - f->offset;
        memcpy(r->result + f->offset, data, f->payload < room ? f->payload : room);
    }
    r->landed += f->type == TLY_RESULT ? (int)f->payload : 0;
    if (f->type == TLY_STATUS && !f->key)
        tly_service_facts_read(&reader, &r->facts);
    if (f->type == TLY_AGAIN && !(f->flags & TLY_MARK)) {
        r->again_from = f->offset;
        if (r->again < RAW_ASKED)
            r->asked[r->again] = f->key;
    }
    uint64_t granted = tly_count_extend(r->granted, f->granted);
    r->granted = granted > r->granted ? granted : r->granted;
    r->results += whole;
    r->answers += f->type == TLY_STATUS && !f->key;
    if (f->type == TLY_VERDICT) {
        r->verdicts++;
        r->verdict_err = (int)tly_read32(&reader);
    }
    r->specs += f->type == TLY_SPEC;
    r->again += f->type == TLY_AGAIN && !(f->flags & TLY_MARK);
    r->finals += f->type == TLY_AGAIN && f->flags & TLY_MARK;
    r->done += f->type == TLY_DONE;
    if (f->type == TLY_VERDICT || whole) {
        const struct tly_counts counts = {.received = r->confirms_nothing ? 0 : ++r->received};
        tly_link_set_counts(l, &counts, 0);
    }
    return 0;
}

static bool next(void *user, struct tly_link *l, struct tly_outgoing *out)
{
    return tly_outbox_next(&((struct raw_rank *)user)->outbox, out, NULL);
}

static void closed(void *user, struct tly_link *l, int err, const char *why)
{
    struct raw_rank *r = user;
    r->closed++;
    r->err = err;
    snprintf(r->why, sizeof r->why, "%s", why);
    tly_link_destroy(l);
    r->link = NULL;
}

static const struct tly_link_user calls = {
    .opened = opened, .header = header, .frame = frame, .next = next, .closed = closed};

void raw_until(const int *what, int value)
{
    for (int i = 0; *what < value; i++) {
        assert_true(i < 20000);
        tly_loop_turn(&raw.loop, 2);
    }
}

void raw_post(int rank, struct tly_frame f, const void *data, size_t len)
{
    f.rank = f.rank ? f.rank : raw.rank[rank].number;
    tly_loop_lock(&raw.loop);
    assert_int_equal(tly_outbox_post(&raw.rank[rank].outbox, &f, data, len, NULL), 0);
    tly_loop_unlock(&raw.loop);
}

void raw_settle(int rank)
{
    int before = raw.rank[rank].answers;
    raw_post(rank, (struct tly_frame){.type = TLY_STATUS}, NULL, 0);
    raw_until(&raw.rank[rank].answers, before + 1);
}

void raw_connect(int rank, const struct tly_identity *job, uint32_t number, const struct tly_endpoints *to)
{
    struct raw_rank *r = &raw.rank[rank];
    struct tly_link_config c = {.user_calls = &calls,
                                .user = r,
                                .identity = *job,
                                .peer_name = "service",
                                .by_address = !raw.library};
    tly_outbox_finish(&r->outbox, NULL, NULL);
    memset(r, 0, sizeof *r);
    r->granted = RAW_WINDOW;
    tly_outbox_init(&r->outbox);
    c.identity.role = TLY_ROLE_RANK;
    c.identity.rank = r->number = number;
    tly_loop_lock(&raw.loop);
    assert_int_equal(tly_link_dial(&raw.loop, to, &c, &r->link), 0);
    tly_loop_unlock(&raw.loop);
}

void raw_enter(int rank)
{
    struct tly_endpoints to;
    tly_service_endpoints(raw.service, &to);
    raw_connect(rank, &raw.identity, (uint32_t)rank, &to);
    raw_until(&raw.rank[rank].opened, 1);
}

void raw_break(int rank)
{
    tly_loop_lock(&raw.loop);
    tly_link_destroy(raw.rank[rank].link);
    raw.rank[rank].link = NULL;
    tly_loop_unlock(&raw.loop);
}

void raw_begin_alone(const char *const *settings)
{
    char why[256];
    memset(&raw, 0, sizeof raw);
    for (int i = 0; i < RAW_MOST_RANKS; i++)
        tly_outbox_init(&raw.rank[i].outbox);
    assert_int_equal(tly_params_load(&raw.params, settings, why, sizeof why), 0);
    assert_int_equal(tly_loop_init(&raw.loop), 0);
}

static struct tly_roster roster; /* of the service's only epoch */
static struct tly_roster_rank ranks[RAW_MOST_RANKS];

/* machine NULL: each rank is one. */
static void start(struct tly_loop *loop, uint32_t count, const uint32_t *machine)
{
    static struct tly_roster_service services[RAW_MOST_RANKS];
    roster = (struct tly_roster){
        .epoch = 1,
        .rank_count = count,
        .machine_count = count,
        .service_count = count,
        .part_bytes = RAW_PART,
        .part_least = RAW_PART,
        .part_most = RAW_PART,
        .window_fixed = 1,
        .window_bytes = RAW_WINDOW,
        .ranks = ranks,
        .services = services};
    struct sockaddr_storage at;
    raw.identity =
        (struct tly_identity){.role = TLY_ROLE_SERVICE, .rank = TLY_NO_RANK, .incarnation = 7, .job = "j"};
    tly_hello_secret(NULL, raw.identity.secret);
    for (uint32_t i = 0; i < count; i++) {
        ranks[i] = (struct tly_roster_rank){.machine = machine ? machine[i] : i};
        services[i].weight = 1;
    }
    if (machine)
        roster.machine_count = roster.service_count = machine[count - 1] + 1;
    assert_int_equal(tly_address_parse("127.0.0.1", 0, &at), 0);
    assert_int_equal(tly_service_create(loop, &raw.params, &raw.identity, &at, &raw.service), 0);
    services[0].incarnation = tly_service_incarnation(raw.service);
    assert_int_equal(tly_service_begin(raw.service, &roster), 0);
    for (int i = 0; i < RAW_COME; i++)
        raw_enter(i);
}

int raw_begin(uint32_t count, const char *const *settings)
{
    return raw_begin_on(NULL, count, settings);
}

int raw_begin_on(const uint32_t *machine, uint32_t count, const char *const *settings)
{
    raw_begin_alone(settings);
    start(NULL, count, machine);
    return 0;
}

int raw_begin_over(const struct tly_medium *medium, uint32_t count, const char *const *settings)
{
    raw_begin_alone(settings);
    raw.library = tly_media;
    raw.only[0] = medium;
    tly_media = raw.only;
    start(&raw.loop, count, NULL);
    return 0;
}

void raw_left(uint32_t rank)
{
    struct tly_loop *loop = raw.service->job->loop;
    ranks[rank].left = 1;
    tly_loop_lock(loop);
    tly_service_change(raw.service, &roster);
    tly_loop_unlock(loop);
}

void raw_end(void)
{
    tly_loop_lock(&raw.loop);
    for (int i = 0; i < RAW_MOST_RANKS; i++) {
        tly_link_destroy(raw.rank[i].link);
        tly_outbox_finish(&raw.rank[i].outbox, NULL, NULL);
    }
    tly_loop_unlock(&raw.loop);
    tly_service_destroy(raw.service, 0);
    tly_loop_finish(&raw.loop);
    if (raw.library)
        tly_media = raw.library;
    tly_params_finish(&raw.params);
}

struct tly_frame raw_push(uint64_t key, uint32_t length)
{
    return (struct tly_frame){
        .type = TLY_PUSH,
        .flags = TLY_LAST,
        .key = key,
        .spec = 9,
        .count = length / 4,
        .kind = TALLY_PUSH_PULL,
        .dtype = TALLY_FLOAT32,
        .op = TALLY_SUM,
        .length = length,
        .prescale = 1,
        .postscale = 1};
}
