/* stages.c - which stage is at which place of the chain.  To add a stage: its file, and its line here. */
#include <errno.h>

#include "comm/path/chain.h"
#include "comm/path/stage.h"

static const struct tly_stage *stages[] = {[STAGE_DEVICE] = NULL,
                                           [STAGE_ENGINE] = &tly_stage_engine,
                                           [STAGE_TEAM] = &tly_stage_team,
                                           [STAGE_CODEC] = NULL,
                                           [STAGE_NET] = &tly_stage_net};

const struct tly_stage *tly_stage_at(int place)
{
    return stages[place];
}

bool tly_stage_follows(int place)
{
    while (--place > STAGE_TENSOR)
        if (stages[place])
            return true;
    return false;
}

int tly_stage_register(enum tly_stage_place place, const struct tly_stage *s)
{
    if (stages[place])
        return -EEXIST;
    stages[place] = s;
    return 0;
}
