/* measure_test.c - counting, what is said, and what a survey finds on networks that are made up. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "membership/measure.h"

static int port_of(const struct tly_endpoints *at)
{
    char host[TLY_HOST_TEXT];
    return (int)tly_endpoints_host(at, host);
}

static void what_is_said_comes_back(void **state)
{
    for (uint32_t step = TLY_MEASURE_MEET; step <= TLY_MEASURE_COUNTED; step++) {
        bool lists = step == TLY_MEASURE_MEET || step == TLY_MEASURE_COUNTED;
        struct tly_measure m = {.step = step, .round = 3, .count = lists ? TLY_MEASURE_MOST : 0}, back;
        struct tly_writer w = {0};
        for (uint32_t i = 0; i < m.count && step == TLY_MEASURE_MEET; i++) {
            char where[40];
            snprintf(where, sizeof where, "10.0.0.%u:%u", i, 4000 + i);
            tly_endpoints_add(&m.to[i], "tcp", where);
            tly_endpoints_add(&m.to[i], "near", "by");
        }
        for (uint32_t i = 0; i < m.count && step == TLY_MEASURE_COUNTED; i++)
            m.rate[i] = i * 1000000007ull;
        tly_measure_write(&w, &m);
        struct tly_reader r = {w.data, w.len, false};
        assert_int_equal(tly_measure_read(&r, &back), 0);
        assert_memory_equal(&m, &back, sizeof m);
        for (size_t cut = 0; cut < w.len; cut++) {
            r = (struct tly_reader){w.data, cut, false};
            assert_int_equal(tly_measure_read(&r, &back), -EPROTO);
        }
        free(w.data);
    }
}

static void nonsense_is_refused(void **state)
{
    const struct tly_measure wrong[] = {
        {.step = TLY_MEASURE_COUNTED + 1, .round = 1},
        {.step = TLY_MEASURE_GO, .round = 0},
        {.step = TLY_MEASURE_MEET, .round = 1, .count = 1, .to[0] = {1, {{"no scheme"}}}},
        {.step = TLY_MEASURE_COUNTED, .round = 1, .count = 1, .rate[0] = TLY_MAX_RATE + 1},
        {.step = TLY_MEASURE_GO, .round = 1, .count = 1}};
    struct tly_measure back;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct tly_writer w = {0};
        tly_measure_write(&w, &wrong[i]);
        struct tly_reader r = {w.data, w.len, false};
        assert_int_equal(tly_measure_read(&r, &back), -EPROTO);
        free(w.data);
    }
    struct tly_writer w = {0};
    for (int i = 0; i < 100; i++)
        tly_write32(&w, 0 + (i == 1) + 8 * (i == 2)); /* MEET of 8 */
    struct tly_reader r = {w.data, w.len, false};
    assert_int_equal(tly_measure_read(&r, &back), -EPROTO);
    free(w.data);
}

/* Streams into one service, as its loop meters them. */
struct metered {
    struct tly_meter meter;
    struct tly_meter_flow flow[2];
    uint64_t bytes[2]; /* arrived */
    int told[2];
};

static void comes(struct metered *x, int i, uint32_t round, uint32_t streams, int64_t now)
{
    enum tly_meter_due due = tly_meter_take(&x->meter, &x->flow[i], round, streams, x->bytes[i], now);
    for (int j = 0; j < 2; j++) {
        if (due == TLY_METER_BEGINS)
            tly_meter_begin(&x->flow[j], x->bytes[j]);
        else if (due == TLY_METER_ENDS)
            tly_meter_end(&x->meter, &x->flow[j], x->bytes[j]);
        if (due || j == i)
            x->told[j] += tly_meter_tell(&x->meter, &x->flow[j]);
    }
}

/* Two streams of 300 and 100 bytes a us, after a burst; the second one's first bytes come late. */
static void what_meets_is_counted_over_one_time(void **state)
{
    struct metered x = {.bytes = {100000, 5000}};
    for (uint32_t round = 1; round <= 2; round++) {
        x.told[0] = x.told[1] = 0;
        for (int ms = 0; ms < 100; ms++) {
            int64_t now = (1000 * round + ms) * TLY_MS;
            x.bytes[0] += 300000;
            comes(&x, 0, round, 1, now);
            if (ms >= 5) {
                x.bytes[1] += 100000;
                comes(&x, 1, round, 1, now);
            }
            assert_int_equal(x.told[0], ms >= 15 + 20);
        }
        assert_int_equal(x.told[0], 1);
        assert_int_equal(x.told[1], 1);
        assert_int_equal(x.flow[0].rate, 300ull * 8 * 1000 * 1000);
        assert_in_range(x.flow[1].rate, 95ull * 8 * 1000 * 1000, 100ull * 8 * 1000 * 1000);
        x.bytes[0] += 1 << 20; /* what was left of the round */
    }
    /* No round: rounds count from 1, and a stream that has not begun one stands at 0. */
    struct metered idle = {.bytes = {0}};
    for (int ms = 0; ms < 200; ms++)
        assert_int_equal(tly_meter_take(&idle.meter, &idle.flow[0], 0, 1, 300000ull * ms,
                                        (1000 + ms) * TLY_MS),
                         TLY_METER_NOTHING);
    assert_false(tly_meter_tell(&idle.meter, &idle.flow[0]));
    /* The round before, still under way. */
    assert_int_equal(tly_meter_take(&x.meter, &x.flow[0], 1, 1, 1 << 30, 4000 * TLY_MS), TLY_METER_NOTHING);
}

/* A process that gets no processor reads late.  Bytes that came before the counting do not count, and the stream that is read
 * last loses none.  A sender that has stopped when the counting ends gets its rate, too. */
static void what_is_read_late_is_counted_in_time(void **state)
{
    struct metered x = {.bytes = {0}};
    for (int ms = 0; ms < 100; ms++) {
        x.bytes[0] += 80000;
        x.bytes[1] += ms < 80 ? 80000 : 0;
        if (ms % 20 == 0 || (ms >= 30 && ms < 35))
            comes(&x, 0, 1, 1, (1000 + ms) * TLY_MS);
        if (ms == 0 || ms == 14 || ms == 30)
            comes(&x, 1, 1, 1, (1000 + ms) * TLY_MS);
    }
    assert_int_equal(x.told[0] + x.told[1], 2);
    assert_int_equal(x.flow[0].rate, 80000 * 8000ull);
    assert_int_equal(x.flow[1].rate, 80000 * 8000ull);
}

/* How long: for so many bytes, also where these are one stream of several, and at most so long. */
static void slow_cards_are_counted_for_longer(void **state)
{
    static const struct {
        int bytes_a_ms, streams, ms;
    } cases[] = {{10000000, 1, 15 + 20}, {65536, 1, 15 + 32}, {16384, 4, 15 + 32}, {100, 7, 15 + 60}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct metered x = {.bytes = {0}};
        int ms = 0;
        for (; !x.told[0]; ms++) {
            x.bytes[0] = (uint64_t)(cases[i].bytes_a_ms * ms);
            comes(&x, 0, 1, (uint32_t)cases[i].streams, (1 + ms) * TLY_MS);
        }
        assert_int_equal(ms - 1, cases[i].ms);
        assert_int_equal(x.flow[0].rate, cases[i].bytes_a_ms * 8000ull);
    }
}

/* A network: what each card carries, one way and the other; streams share cards fairly (water filling). */
struct network {
    int count;
    const double *out, *in; /* Mbit/s */
};

static void carry(const struct network *n, int streams, const int *from, const int *to, double *rate)
{
    double out[16], in[16];
    bool done[64] = {false};
    for (int i = 0; i < n->count; i++) {
        out[i] = n->out[i];
        in[i] = n->in[i];
    }
    for (int left = streams; left > 0;) {
        double least = 1e18;
        int who = -1;
        for (int s = 0; s < streams; s++) {
            if (done[s])
                continue;
            int go = 0, come = 0;
            for (int t = 0; t < streams; t++) {
                go += !done[t] && from[t] == from[s];
                come += !done[t] && to[t] == to[s];
            }
            double share = out[from[s]] / go < in[to[s]] / come ? out[from[s]] / go : in[to[s]] / come;
            if (share < least) {
                least = share;
                who = s;
            }
        }
        rate[who] = least;
        out[from[who]] -= least;
        in[to[who]] -= least;
        done[who] = true;
        left--;
    }
}

/* In these rounds all cards carry only a part of what they do: processors are busy.  Until begin is 0. */
struct stall {
    uint32_t begin, end;
    double part;
};
static const struct stall *stalls;
static double carried(uint32_t round)
{
    for (const struct stall *x = stalls; x && x->begin; x++)
        if (round >= x->begin && round <= x->end)
            return x->part;
    return 1;
}

/* Services of that network, each with a card of its own; known[i]: what it says, or 0.  once[i]: as tly_survey_result(), or
 * NULL: nowhere. */
static void survey(const struct network *n, const double *known, bool all, const double *wants,
                   const bool *once)
{
    struct tly_roster_service services[16] = {0};
    struct tly_roster r = {.service_count = (uint32_t)n->count, .services = services};
    struct tly_survey *s;
    for (int i = 0; i < n->count; i++) {
        services[i].card = (uint32_t)i;
        char where[40];
        snprintf(where, sizeof where, "10.0.0.%d:%d", i, i);
        tly_endpoints_add(&services[i].at, "tcp", where);
        services[i].bandwidth = (uint64_t)(known[i] * 1e6);
    }
    assert_int_equal(tly_survey_create(&r, all, &s), 0);
    assert_non_null(s);
    for (uint32_t round; (round = tly_survey_next(s)) != 0;) {
        int from[64], to[64], streams = 0;
        double rate[64];
        struct tly_measure m[16];
        bool sends[16] = {false}, receives[16] = {false};
        for (int i = 0; i < n->count; i++) {
            assert_int_equal(tly_survey_card(s, (uint32_t)i), i);
            assert_true(tly_survey_stands(s, (uint32_t)i));
            tly_survey_meet(s, (uint32_t)i, &m[i]);
            for (uint32_t j = 0; j < m[i].count; j++) {
                from[streams] = i;
                to[streams++] = port_of(&m[i].to[j]);
                sends[i] = receives[to[streams - 1]] = true;
            }
        }
        /* Else acknowledgements would wait behind data, and slow streams down. */
        for (int i = 0; i < n->count; i++)
            assert_false(sends[i] && receives[i]);
        carry(n, streams, from, to, rate);
        for (int i = 0; i < streams; i++)
            rate[i] *= carried(round);
        for (int i = 0, at = 0; i < n->count; i++) {
            m[i].step = TLY_MEASURE_COUNTED;
            for (uint32_t j = 0; j < m[i].count; j++)
                m[i].rate[j] = (uint64_t)(rate[at++] * 1e6 + 0.5);
            tly_survey_counted(s, (uint32_t)i, &m[i]);
        }
    }
    tly_survey_end(s);
    for (int i = 0; i < n->count; i++) {
        uint64_t rate;
        bool doubtful, measured = tly_survey_result(s, (uint32_t)i, &rate, &doubtful);
        assert_int_equal(measured, all || known[i] == 0);
        assert_int_equal(doubtful, once && once[i]);
        assert_in_range(rate, (uint64_t)(wants[i] * 999e3), (uint64_t)(wants[i] * 1001e3));
    }
    tly_survey_destroy(s);
}

static const double unknown[16];

static void each_card_shows_what_it_carries(void **state)
{
    const double alike[] = {940, 940, 940, 940, 940}, unlike[] = {100, 200, 940, 100, 2500, 500};
    survey(&(struct network){5, alike, alike}, unknown, false, alike, NULL);
    /* The fastest up to what all others carry together. */
    survey(&(struct network){6, unlike, unlike}, unknown, false,
           (const double[]){100, 200, 940, 100, 1840, 500}, NULL);
    survey(&(struct network){2, unlike, unlike}, unknown, false, (const double[]){100, 100}, NULL);
    /* One way is slower: if it is much slower, it counts. */
    survey(&(struct network){5, alike, (const double[]){940, 940, 700, 940, 940}}, unknown, false, alike,
           NULL);
    survey(&(struct network){5, alike, (const double[]){940, 940, 300, 940, 940}}, unknown, false,
           (const double[]){940, 940, 300, 940, 940}, NULL);
    /* More than a group: seven others show the fast one. */
    const double many[] = {100, 100, 100, 100, 650, 100, 100, 100, 100, 100, 100, 100, 100, 100, 100, 50};
    survey(&(struct network){16, many, many}, unknown, false, many, NULL);
}

static void what_is_like_no_other_is_measured_again(void **state)
{
    const double cards[] = {940, 100, 940, 940, 940};
    stalls = (const struct stall[]){{7, 8, .64}, {0}}; /* both of the fourth card */
    survey(&(struct network){5, cards, cards}, unknown, false, cards, NULL);
    stalls = NULL;
}

/* Cards that are alike because what spoilt one has spoilt the other. */
static void what_one_time_says_of_two_is_measured_again(void **state)
{
    const double many[] = {480, 480, 480, 480, 480, 480, 480, 480, 480, 480, 480, 480, 480, 480, 480, 480};
    for (uint32_t round = 1; round < 16; round += 2) {
        stalls = (const struct stall[]){{round, round + 1, .64}, {0}};
        survey(&(struct network){16, many, many}, unknown, false, many, NULL);
    }
    stalls = NULL;
    /* Two cards have the same streams: if one direction is slow, it is looked at again. */
    stalls = (const struct stall[]){{2, 2, .6}, {0}};
    survey(&(struct network){2, many, many}, unknown, false, many, NULL);
    stalls = NULL;
}

/* A low figure that only one look has is said to be no more than that; a slow card is seen to be one twice. */
static void what_nothing_confirms_is_doubtful(void **state)
{
    const double cards[] = {940, 940, 940, 940, 940}, found[] = {940, 940, 0.6 * 940, 940, 940};
    stalls = (const struct stall[]){{5, 6, .6}, {11, 12, .3}, {0}};
    survey(&(struct network){5, cards, cards}, unknown, false, found,
           (const bool[]){false, false, true, false, false});
    const double pair[] = {480, 480};
    stalls = (const struct stall[]){{1, 1, .2}, {2, 2, .6}, {3, 4, .3}, {0}};
    survey(&(struct network){2, pair, pair}, unknown, false, (const double[]){0.3 * 480, 0.3 * 480},
           (const bool[]){true, true});
    stalls = NULL;
}

static void what_is_known_stays(void **state)
{
    const double cards[] = {940, 94, 940, 9400}, said[] = {1000, 100, 0, 0};
    survey(&(struct network){4, cards, cards}, said, false, (const double[]){1000, 100, 1000, 940 + 94 + 940},
           NULL);
    survey(&(struct network){4, cards, cards}, said, true, (const double[]){940, 94, 940, 940 + 94 + 940},
           NULL);
}

static void who_is_silent_has_no_part_any_more(void **state)
{
    struct tly_roster_service services[4] = {{.card = 0}, {.card = 1}, {.card = 2}, {.card = 3}};
    struct tly_roster r = {.service_count = 4, .services = services};
    struct tly_survey *s;
    struct tly_measure m;
    assert_int_equal(tly_survey_create(&r, false, &s), 0);
    assert_int_equal(tly_survey_next(s), 1);
    tly_survey_drop(s, 1);
    assert_int_equal(tly_survey_next(s), 2); /* the first one's way back */
    assert_true(tly_survey_meet(s, 0, &m));
    assert_int_equal(m.count, 2);
    for (uint32_t own = 3; own <= 4; own++) {
        assert_int_equal(tly_survey_next(s), own);
        for (uint32_t i = 0; i < 4; i++)
            assert_false(tly_survey_meet(s, i, &m));
    }
    assert_int_equal(tly_survey_next(s), 5);
    assert_false(tly_survey_meet(s, 1, &m));
    assert_true(tly_survey_meet(s, 0, &m));
    assert_int_equal(m.count, 1);
    assert_int_equal(tly_survey_next(s), 6);
    assert_true(tly_survey_meet(s, 2, &m));
    assert_int_equal(m.count, 2);
    tly_survey_destroy(s);
}

static void who_shares_a_card_is_one(void **state)
{
    struct tly_roster_service services[5] = {{.at = {1, {{"tcp:10.0.0.1:7"}}}, .card = 0},
                                             {.at = {1, {{"tcp:10.0.0.1:8"}}}, .card = 0, .bandwidth = 5},
                                             {.at = {1, {{"tcp:10.0.0.1:9"}}}, .card = 2},
                                             {.at = {1, {{"tcp:10.0.0.1:10"}}}, .card = 3},
                                             {.at = {1, {{"tcp:10.0.0.1:11"}}}, .card = 2}};
    struct tly_roster r = {.service_count = 5, .services = services};
    struct tly_survey *s;
    struct tly_measure m;
    uint64_t rate;
    bool once;
    assert_int_equal(tly_survey_create(&r, false, &s), 0);
    const uint32_t card[] = {0, 0, 1, 2, 1};
    const bool stands[] = {true, false, true, true, false};
    for (uint32_t i = 0; i < 5; i++) {
        assert_int_equal(tly_survey_card(s, i), card[i]);
        assert_int_equal(tly_survey_stands(s, i), stands[i]);
    }
    assert_int_equal(tly_survey_next(s), 1);
    assert_int_equal(tly_survey_next(s), 2);
    assert_true(tly_survey_meet(s, 1, &m)); /* the first in the middle, on the way back */
    assert_int_equal(m.count, 2);
    assert_int_equal(port_of(&m.to[0]), 7);
    assert_int_equal(port_of(&m.to[1]), 10);
    m.step = TLY_MEASURE_COUNTED;
    m.round = 7; /* another's answer */
    m.rate[0] = 1000;
    tly_survey_counted(s, 1, &m);
    tly_survey_end(s); /* time is up */
    assert_false(tly_survey_result(s, 0, &rate, &once));
    assert_int_equal(rate, 5);
    assert_true(tly_survey_result(s, 1, &rate, &once));
    assert_int_equal(rate, 0);
    tly_survey_destroy(s);
    /* All is known, or there is nobody to stream to. */
    services[2].bandwidth = services[3].bandwidth = 5;
    assert_int_equal(tly_survey_create(&r, false, &s), 0);
    assert_null(s);
    r.service_count = 2;
    assert_int_equal(tly_survey_create(&r, true, &s), 0);
    assert_null(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_said_comes_back),
        cmocka_unit_test(nonsense_is_refused),
        cmocka_unit_test(what_meets_is_counted_over_one_time),
        cmocka_unit_test(what_is_read_late_is_counted_in_time),
        cmocka_unit_test(slow_cards_are_counted_for_longer),
        cmocka_unit_test(each_card_shows_what_it_carries),
        cmocka_unit_test(what_is_like_no_other_is_measured_again),
        cmocka_unit_test(what_one_time_says_of_two_is_measured_again),
        cmocka_unit_test(what_nothing_confirms_is_doubtful),
        cmocka_unit_test(what_is_known_stays),
        cmocka_unit_test(who_is_silent_has_no_part_any_more),
        cmocka_unit_test(who_shares_a_card_is_one),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
