/* members.c - see members.h. */
#include "members.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/log.h"
#include "transport/address.h"

struct coordinated x;

/* Instead of libc's. */
int getpeername(int fd, struct sockaddr *to, socklen_t *len)
{
    struct sockaddr_storage a;
    if (!x.apart)
        return (int)syscall(SYS_getpeername, fd, to, len);
    tly_address_parse("192.0.2.1", 1000, &a);
    memcpy(to, &a, *len < sizeof a ? *len : sizeof a);
    *len = sizeof(struct sockaddr_in);
    return 0;
}

void post(struct member *m, int type, uint16_t flags, struct tly_writer *w)
{
    struct tly_frame f = {.type = (uint8_t)type, .flags = flags};
    tly_loop_lock(&x.loop);
    assert_int_equal(tly_outbox_post(&m->outbox, &f, w ? w->data : NULL, w ? w->len : 0, NULL), 0);
    tly_loop_unlock(&x.loop);
    if (w)
        free(w->data);
}

static void opened(void *user, struct tly_link *l)
{
    ((struct member *)user)->opened++;
}

static int header(void *user, struct tly_link *l, const struct tly_frame *f, struct tly_landing *land,
                  const char **why)
{
    land->control = true;
    return 0;
}

static void take_roster(struct member *m, struct tly_reader *r)
{
    tly_roster_finish(&m->roster);
    m->roster = (struct tly_roster){0};
    tly_roster_read(r, &m->roster);
}

static int frame(void *user, struct tly_link *l, const struct tly_frame *f, void *data, const char **why)
{
    struct member *m = user;
    struct tly_reader r = {data, f->payload, false};
    struct tly_writer w = {0};
    struct tly_frame answer = {.type = TLY_ROSTER, .flags = TLY_REQUEST};
    char door[64];
    switch (f->type) {
    case TLY_ROSTER: /* whose door it is shown opens to it: the nonce behind it is the door's name */
        tly_read_text(&r, door, sizeof door);
        tly_write64(&w, strtoull(door, NULL, 10));
        tly_outbox_post(&m->outbox, &answer, w.data, w.len, NULL);
        free(w.data);
        break;
    case TLY_INVITE:
        take_roster(m, &r);
        m->invited++;
        break;
    case TLY_PREPARE:
        take_roster(m, &r);
        m->prepared++;
        break;
    case TLY_COMMIT:
        m->rounds = f->payload ? tly_read32(&r) : 0;
        for (uint32_t n = m->rounds; n; n--) {
            tly_read64(&r);
            tly_read64(&r);
        }
        if (f->flags & TLY_LAST)
            take_roster(m, &r);
        m->committed += !f->payload || (f->flags & TLY_LAST);
        break;
    case TLY_GOODBYE:
        m->gone += f->payload > 0 && tly_read32(&r) < RANKS;
        m->ended += f->payload == 0;
        break;
    case TLY_PACE: {
        uint32_t was = m->slow.why;
        tly_currents_finish(&m->current);
        assert_int_equal(tly_slow_read(&r, &m->slow), 0);
        assert_int_equal(tly_currents_read(&r, &m->current), 0);
        assert_int_equal(tly_change_read(&r, &m->change), 0);
        m->judged += m->slow.why != was;
        m->told++;
        break;
    }
    case TLY_STATUS:
        tly_status_finish(&m->status);
        assert_int_equal(tly_status_read(&r, &m->status), 0);
        m->answered++;
        break;
    case TLY_VERDICT:
        tly_read32(&r);
        tly_read_text(&r, m->verdict, sizeof m->verdict);
        m->failed++;
        break;
    default:
        break;
    }
    return 0;
}

static bool next(void *user, struct tly_link *l, struct tly_outgoing *out)
{
    return tly_outbox_next(&((struct member *)user)->outbox, out, NULL);
}

static void closed(void *user, struct tly_link *l, int err, const char *why)
{
    struct member *m = user;
    m->closed++;
    tly_link_destroy(l);
    m->link = NULL;
}

void turn_until(const int *what, int value)
{
    for (int i = 0; *what < value; i++) {
        if (i >= 20000)
            fail_msg("in vain; the last verdict: %s", x.member[0].verdict);
        tly_loop_turn(&x.loop, 2);
    }
}

static bool is_rank(const struct member *m)
{
    return m->number < x.ranks;
}

static const struct tly_link_user calls = {
    .opened = opened, .header = header, .frame = frame, .next = next, .closed = closed};

struct member *knock(uint32_t i)
{
    struct member *m = &x.member[i];
    struct sockaddr_storage at;
    struct tly_endpoints to;
    struct tly_link_config c = {.user_calls = &calls, .user = m, .peer_name = "coordinator"};
    tly_roster_finish(&m->roster);
    tly_currents_finish(&m->current);
    tly_status_finish(&m->status);
    memset(m, 0, sizeof *m);
    tly_outbox_init(&m->outbox);
    m->number = i;
    c.identity.role = is_rank(m) ? TLY_ROLE_RANK : i == WATCHER ? TLY_ROLE_WATCHER : TLY_ROLE_TALLYD;
    c.identity.rank = is_rank(m) ? i : TLY_NO_RANK;
    memcpy(c.identity.job, x.place.job, sizeof x.place.job);
    memcpy(c.identity.secret, x.place.secret, sizeof x.place.secret);
    assert_int_equal(tly_address_parse("127.0.0.1", tly_coordinator_port(x.coordinator), &at), 0);
    tly_media_at(&at, &to);
    tly_loop_lock(&x.loop);
    assert_int_equal(tly_link_dial(&x.loop, &to, &c, &m->link), 0);
    tly_loop_unlock(&x.loop);
    return m;
}

struct member *enter(uint32_t i)
{
    struct member *m = knock(i);
    turn_until(&m->opened, 1);
    return m;
}

static void write_info(const struct member *m, struct tly_writer *w)
{
    struct tly_member_info info = {
        .role = is_rank(m) ? TLY_ROLE_RANK : TLY_ROLE_TALLYD,
        .rank = is_rank(m) ? m->number : TLY_NO_RANK,
        .size = is_rank(m) ? x.ranks : 0,
        .netns = x.contained ? m->number : 0,
        .nonce = 100 + m->number,
        .incarnation = 100 + m->number,
        .bandwidth = x.unknown ? 0 : x.bandwidth,
        .host = "host"};
    char where[40];
    snprintf(where, sizeof where, "%s%u:%u", x.bandwidth ? "10.0.0." : "127.0.0.",
             x.bandwidth ? m->number + 1 : 1, 1000 + m->number);
    tly_endpoints_add(&info.at, "tcp", where);
    snprintf(info.door, sizeof info.door, "%u", 100 + m->number);
    snprintf(info.host_id, sizeof info.host_id, "host %u", x.host[m->number]);
    tly_member_write(w, &info);
}

void announce(struct member *m)
{
    struct tly_writer w = {0};
    write_info(m, &w);
    post(m, TLY_ROSTER, 0, &w);
}

struct member *join(uint32_t i)
{
    struct member *m = enter(i);
    announce(m);
    return m;
}

void answer_ended(struct member *m, uint32_t number, uint32_t epoch, uint32_t from, uint32_t count,
                  uint32_t ended, bool last)
{
    struct tly_writer w = {0};
    tly_write32(&w, number);
    tly_write32(&w, count);
    tly_write32(&w, ended);
    for (uint32_t i = from; i < from + count; i++) {
        tly_write64(&w, 0x9e3779b97f4a7c15ull * (i + 1));
        tly_write32(&w, 1);
        tly_write32(&w, epoch);
    }
    assert_false(w.failed);
    post(m, TLY_BEGUN, last ? TLY_LAST : 0, &w);
}

void answer_in(struct member *m, uint32_t number, uint32_t epoch, uint32_t from, uint32_t count, bool last)
{
    answer_ended(m, number, epoch, from, count, 0, last);
}

void answer(struct member *m, uint32_t number, uint32_t from, uint32_t count, bool last)
{
    answer_in(m, number, 1, from, count, last);
}

uint32_t state_of(const struct member *teller, uint32_t member)
{
    for (uint32_t i = 0; i < teller->roster.service_count; i++)
        if (teller->roster.services[i].incarnation == 100 + member)
            return teller->roster.services[i].state;
    return TLY_SERVICE_GONE;
}

int set_up_with(const char *setting, const char *another)
{
    char why[256];
    struct sockaddr_storage at;
    tally_log_redirect(NULL, NULL);
    memset(&x, 0, sizeof x);
    x.ranks = RANKS;
    for (uint32_t i = 0; i < MEMBERS; i++)
        x.host[i] = i;
    snprintf(x.place.job, sizeof x.place.job, "j");
    tly_hello_secret(NULL, x.place.secret);
    assert_int_equal(
        tly_params_load(&x.params, (const char *const[]){setting, another, NULL}, why, sizeof why), 0);
    assert_int_equal(tly_loop_init(&x.loop), 0);
    assert_int_equal(tly_address_parse("127.0.0.1", 0, &at), 0);
    assert_int_equal(tly_coordinator_create(&x.place, &x.params, &at, -1, true, &x.coordinator), 0);
    return 0;
}

int set_up(void **state)
{
    return set_up_with("TALLY_SERVERS=1", NULL);
}

void leave(struct member *m)
{
    tly_loop_lock(&x.loop);
    tly_link_destroy(m->link);
    m->link = NULL;
    tly_loop_unlock(&x.loop);
}

void run(uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        join(i);
    for (uint32_t i = 0; i < count; i++) {
        turn_until(&x.member[i].invited, 1);
        post(&x.member[i], TLY_BEGUN, 0, NULL);
    }
    for (uint32_t i = 0; i < count; i++)
        turn_until(&x.member[i].committed, 1);
}

int start(void **state)
{
    if (set_up(state) != 0)
        return -1;
    run(FIRST + 1);
    return 0;
}

int tear_down(void **state)
{
    tly_loop_lock(&x.loop);
    for (int i = 0; i < MEMBERS; i++) {
        tly_link_destroy(x.member[i].link);
        if (x.member[i].outbox.letters.next)
            tly_outbox_finish(&x.member[i].outbox, NULL, NULL);
        tly_roster_finish(&x.member[i].roster);
        tly_currents_finish(&x.member[i].current);
        tly_status_finish(&x.member[i].status);
    }
    tly_loop_unlock(&x.loop);
    tly_coordinator_destroy(x.coordinator, 0);
    tly_loop_finish(&x.loop);
    tly_params_finish(&x.params);
    return 0;
}

struct tly_traffic sight(const struct member *m, enum seen seen, struct tly_traffic_line line[GUEST + 1])
{
    enum { ACTIVE_US = 400000 };
    uint32_t count = m->roster.service_count, first = m->roster.machine_count, tallyds = 0;
    for (uint32_t i = first; i < count; i++)
        tallyds += m->roster.services[i].state != TLY_SERVICE_GONE;
    for (uint32_t i = 0; i < count; i++) {
        bool gone = m->roster.services[i].state == TLY_SERVICE_GONE;
        bool held = i >= first && (seen == HELD || seen == STUCK);
        uint32_t busy = (i >= first && !held) || seen == FINE || seen == HALF ? ACTIVE_US
                        : seen == ALONE                                       ? 0
                                                                              : ACTIVE_US / 5;
        uint64_t bytes =
            i == m->number || gone         ? 0
            : seen == ALONE                ? (i >= first ? 4000000 / tallyds : 0)
            : seen == SLOW || seen == LATE ? (i >= first ? 4000000 / tallyds : 2000000)
            : seen == HALF                 ? (i >= first ? 10000000 / tallyds : 5000000)
            : seen == HELD                 ? (i >= first ? 10000000 / x.ranks / tallyds : 2000000)
            : seen == STUCK                ? (i >= first ? 10000 / x.ranks / tallyds : 2000000)
                                           : 18000000;
        uint32_t back = i >= first && seen == LATE ? busy / 2 : busy;
        line[i] = (struct tly_traffic_line){{bytes, busy}, {bytes, back}, held ? ACTIVE_US : busy};
    }
    return (struct tly_traffic){.epoch = m->roster.epoch,
                                .epochs = 1,
                                .period_us = ACTIVE_US,
                                .active_us = ACTIVE_US,
                                .moved = 4000000,
                                .count = count,
                                .line = line};
}

void report_in(struct member *m, uint32_t epoch, uint32_t epochs, enum seen seen)
{
    struct tly_traffic_line line[GUEST + 1];
    struct tly_traffic t = sight(m, seen, line);
    struct tly_writer w = {0};
    t.epoch = epoch;
    t.epochs = epochs;
    tly_traffic_write(&w, &t);
    assert_false(w.failed);
    post(m, TLY_PACE, 0, &w);
}

void report(struct member *m, uint32_t epoch, enum seen seen)
{
    report_in(m, epoch, 1, seen);
}

void some_report_until(uint32_t ranks, const int *what, int value, enum seen seen)
{
    for (int i = 0; *what < value; i++) {
        if (i >= 2000)
            fail_msg("in vain; the last verdict: %s", x.member[0].verdict);
        for (uint32_t rank = 0; rank < ranks; rank++)
            report(&x.member[rank], x.member[rank].roster.epoch, seen);
        for (int turn = 0; turn < 30; turn++)
            tly_loop_turn(&x.loop, 2);
    }
}

void report_until(const int *what, int value, enum seen seen)
{
    some_report_until(x.ranks, what, value, seen);
}

int start_apart_with(const char *setting)
{
    if (set_up_with("TALLY_SERVERS=1", setting) != 0)
        return -1;
    x.bandwidth = 800000000;
    run(FIRST + 1);
    return 0;
}

int start_apart(void **state)
{
    return start_apart_with(NULL);
}

int start_fixed(void **state)
{
    return start_apart_with("TALLY_REPLAN=0");
}

int start_measured(void **state)
{
    return start_apart_with("TALLY_MEASURED=host=800M");
}

void let_it_change(int nth)
{
    for (uint32_t i = 0; i < x.ranks; i++) {
        turn_until(&x.member[i].prepared, nth);
        answer(&x.member[i], x.member[i].roster.epoch, 0, 0, true);
    }
    for (uint32_t i = 0; i < x.ranks; i++)
        turn_until(&x.member[i].committed, nth + 1);
}

const struct tly_status *ask(void)
{
    struct member *m = x.member[WATCHER].link ? &x.member[WATCHER] : enter(WATCHER);
    int before = m->answered;
    post(m, TLY_STATUS, 0, NULL);
    turn_until(&m->answered, before + 1);
    return &m->status;
}

struct member *resume_without(uint32_t left, uint32_t i, uint32_t committed, enum tly_service_state tallyd)
{
    struct tly_roster_rank ranks[RANKS] = {{.machine = 0, .left = left == 0},
                                           {.machine = 1, .left = left == 1}};
    struct tly_roster_service services[GUEST + 1] = {0};
    uint32_t count = x.guest_rests ? GUEST + 1 : FIRST + 1;
    struct tly_roster roster = {
        .epoch = committed,
        .rank_count = RANKS,
        .machine_count = RANKS,
        .service_count = count,
        .standalone = 1,
        .part_bytes = 65536,
        .part_least = 65536,
        .part_most = 65536,
        .window_bytes = 1 << 20,
        .ranks = ranks,
        .services = services};
    struct tly_writer w = {0};
    struct member *m = x.member[i].link ? &x.member[i] : enter(i);
    for (uint32_t k = 0; k < count; k++) {
        uint64_t found = k == x.other ? x.found : 0, tried = k == x.other ? x.tried : 0;
        char where[40];
        snprintf(where, sizeof where, "%s%u:%u", x.bandwidth ? "10.0.0." : "127.0.0.",
                 x.bandwidth ? k + 1 : 1, 1000 + k);
        services[k] = (struct tly_roster_service){
            .role = k < RANKS ? TLY_ROLE_RANK : TLY_ROLE_TALLYD,
            .state = k < RANKS ? TLY_SERVICE_ACTIVE : tallyd,
            .rank = k < RANKS ? k : 0,
            .incarnation = 100 + k,
            .card = k,
            .bandwidth = found   ? found
                         : tried ? tried
                                 : x.bandwidth,
            .said = x.bandwidth,
            .tried = tried > 0,
            .sum_found = found,
            .rests = k == GUEST,
            .weight = k < RANKS || (k == FIRST && tallyd == TLY_SERVICE_ACTIVE),
            .host = "host"};
        tly_endpoints_add(&services[k].at, "tcp", where);
    }
    write_info(m, &w);
    tly_write64(&w, 77);
    tly_write32(&w, committed);
    tly_roster_write(&w, &roster);
    assert_false(w.failed);
    post(m, TLY_ROSTER, TLY_RESUMED, &w);
    return m;
}

void say_all(struct member *m)
{
    for (int turn = 0; turn < 20 || !tly_list_empty(&m->outbox.letters); turn++)
        tly_loop_turn(&x.loop, 2);
}

struct member *resume(uint32_t i, uint32_t committed, enum tly_service_state tallyd)
{
    return resume_without(TLY_NO_RANK, i, committed, tallyd);
}

uint32_t change_all(int nth)
{
    for (uint32_t i = 0; i < RANKS; i++) {
        turn_until(&x.member[i].prepared, nth);
        answer_in(&x.member[i], x.member[i].roster.epoch, 4, 0, 0, true);
    }
    for (uint32_t i = 0; i < RANKS; i++)
        turn_until(&x.member[i].committed, nth);
    return x.member[0].roster.epoch;
}

struct member *let_come(uint32_t number, int changes)
{
    struct member *guest = join(number);
    turn_until(&guest->invited, 1);
    post(guest, TLY_BEGUN, 0, NULL);
    for (uint32_t i = 0; i < RANKS; i++) {
        turn_until(&x.member[i].invited, number - FIRST + 1);
        answer(&x.member[i], x.member[i].roster.epoch, 0, 0, true);
    }
    let_it_change(changes + 1);
    return guest;
}

uint32_t let_first_leave(void)
{
    int before = x.member[0].prepared;
    post(&x.member[FIRST], TLY_GOODBYE, 0, NULL);
    turn_until(&x.member[0].prepared, before + 1);
    turn_until(&x.member[1].prepared, before + 1);
    return x.member[1].roster.epoch;
}
