/* traffic.c - fuzzes what ranks say of their traffic: whatever comes is refused, or can be, is the same again when written
 * and read, and makes no sample and no estimate that is not finite. */
#include "membership/traffic.h"

#include <math.h>
#include <string.h>

#include "fuzz.h"

enum { SERVICES = 4, RANKS = 3 };

static void is_finite(double x)
{
    require(isfinite(x) && x >= 0);
}

/* All ranks say this, again and again. */
static void plan_by(const struct tly_traffic *t)
{
    struct tly_roster_rank ranks[RANKS] = {{.machine = 0}, {.machine = 1}, {.machine = 2}};
    struct tly_roster_service services[SERVICES] = {
        {.card = 0, .weight = 1}, {.card = 1, .weight = 1}, {.card = 0}, {.card = 3, .weight = 2}};
    struct tly_roster r = {.rank_count = RANKS,
                           .machine_count = RANKS,
                           .service_count = SERVICES,
                           .ranks = ranks,
                           .services = services};
    const struct tly_traffic *of[RANKS] = {t, t, t};
    struct tly_replan_service s[SERVICES] = {
        {.active = true}, {.active = true}, {.active = true}, {.active = true}};
    struct tly_replan *replan;
    double goodput;
    require(tly_replan_create(false, &replan) == 0);
    for (int i = 0; i < SERVICES; i++) {
        s[i].machine = (struct tly_plan_machine){.ranks = i < RANKS, .card = services[i].card};
        s[i].weight = 1;
        s[i].spare = i == RANKS;
        require(tly_replan_place(replan, i, i % 2 ? 1e8 : 0, i == 1 ? 1e8 : 0, 0, false) == 0);
    }
    for (int step = 0; step < 40; step++) {
        tly_traffic_sum(&r, of, s, &goodput);
        is_finite(goodput);
        for (int i = 0; i < SERVICES; i++) {
            require(isnan(s[i].card.rate) ||
                    (s[i].card.busy >= 0 && s[i].card.busy <= 1 && s[i].card.rate >= 0));
            require(isnan(s[i].sums.rate) || (s[i].sums.busy <= 1 && isfinite(s[i].sums.rate)));
        }
        if (tly_replan_step(replan, SERVICES, s, goodput))
            tly_replan_begin(replan, true);
        for (int i = 0; i < SERVICES; i++) {
            is_finite(tly_replan_bandwidth(replan, i));
            is_finite(tly_replan_sum_rate(replan, i));
        }
    }
    tly_replan_destroy(replan);
}

/* Steps are finite figures, and the same when written and read. */
static void read_steps(const uint8_t *data, size_t size)
{
    struct tly_steps s, again;
    struct tly_own own = {0};
    struct tly_reader r = {data, size, false};
    struct tly_writer w = {0};
    if (tly_steps_read(&r, &s) != 0)
        return;
    tly_steps_write(&w, &s);
    require(!w.failed);
    struct tly_reader back = {w.data, w.len, false};
    require(tly_steps_read(&back, &again) == 0 && again.count == s.count && again.own_us == s.own_us &&
            again.waited_us == s.waited_us && again.paged_us == s.paged_us && again.us == s.us);
    free(w.data);
    const struct tly_own *of[2] = {&own, &own};
    struct tly_lateness late;
    for (int i = 0; i < TLY_LATE_ENOUGH; i++)
        tly_own_see(&own, &s);
    for (int i = 0; i < TLY_OWN_FIGURES; i++)
        is_finite(own.ring[i][0]);
    require(tly_late_find(2, of, NULL, &late) == 0); /* both alike */
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    read_steps(data, size);
    struct tly_traffic t, again;
    struct tly_reader r = {data, size, false};
    if (tly_traffic_read(&r, &t) != 0)
        return 0;
    require(t.active_us > 0 && t.count > 0 && t.count <= TLY_MAX_MACHINES);
    struct tly_writer w = {0};
    tly_traffic_write(&w, &t);
    require(!w.failed);
    struct tly_reader back = {w.data, w.len, false};
    require(tly_traffic_read(&back, &again) == 0 && again.count == t.count && again.moved == t.moved &&
            again.stale == t.stale && memcmp(again.line, t.line, t.count * sizeof *t.line) == 0);
    free(w.data);
    plan_by(&t);
    tly_traffic_finish(&again);
    tly_traffic_finish(&t);
    return 0;
}
