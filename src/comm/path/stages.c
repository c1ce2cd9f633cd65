/* stages.c - which stage is at which place of the chain.  To add a stage: its file, and its line here. */
#include "comm/path/chain.h"
#include "comm/path/stage.h"

const struct tly_stage *tly_stages[STAGE_NET + 1] = {
    [STAGE_DEVICE] = &tly_stage_device,
    [STAGE_ENGINE] = &tly_stage_engine,
    [STAGE_TEAM] = &tly_stage_team,
    [STAGE_CODEC] = NULL,
    [STAGE_NET] = &tly_stage_net};
unsigned tly_stages_between = 1u << STAGE_DEVICE | 1u << STAGE_ENGINE | 1u << STAGE_TEAM;

bool tly_stage_follows(int place)
{
    return tly_stages_between & ((1u << place) - 1);
}

void tly_stage_register(enum tly_stage_place place, const struct tly_stage *s)
{
    tly_stages[place] = s;
    tly_stages_between |= 1u << place;
}
