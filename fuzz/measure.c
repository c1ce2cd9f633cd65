/* measure.c - fuzzes what is said while network cards are measured: whatever comes is refused, or within its limits and
 * the same again when written and read; and a survey takes it as an answer. */
#include "membership/measure.h"

#include <string.h>

#include "fuzz.h"

static void answer(const struct tly_measure *m)
{
    struct tly_roster_service services[3] = {{.card = 0}, {.card = 1}, {.card = 2}};
    struct tly_roster r = {.service_count = 3, .services = services};
    struct tly_survey *s;
    struct tly_measure meet;
    uint64_t rate;
    bool once;
    require(tly_survey_create(&r, false, &s) == 0 && s);
    for (int step = 0; step < 20 && tly_survey_next(s) != 0; step++)
        for (uint32_t i = 0; i < 3; i++) {
            tly_survey_meet(s, i, &meet);
            require(meet.count <= 2);
            tly_survey_counted(s, i, m);
        }
    require(tly_survey_next(s) == 0);
    tly_survey_end(s);
    for (uint32_t i = 0; i < 3; i++)
        require(tly_survey_result(s, i, &rate, &once) && rate <= TLY_MAX_RATE);
    tly_survey_destroy(s);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct tly_measure m, again;
    struct tly_reader r = {data, size, false};
    if (tly_measure_read(&r, &m) != 0)
        return 0;
    require(m.count <= TLY_MEASURE_MOST && m.round > 0);
    struct tly_writer w = {0};
    tly_measure_write(&w, &m);
    require(!w.failed);
    struct tly_reader back = {w.data, w.len, false};
    require(tly_measure_read(&back, &again) == 0 && memcmp(&m, &again, sizeof m) == 0);
    free(w.data);
    answer(&m);
    return 0;
}
