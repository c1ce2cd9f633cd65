/* types.c - the table of frame types: which ways each may go, and how long its payload may be.
 *
 * The link asks it for limits, and each receiver asks it for directions before it looks at a frame. */
#include "wire/frame.h"

enum {
    LINK = 0, /* no user of a link ever sees it */
    TO_RANK = 1 << TLY_SERVICE_TO_RANK,
    TO_SERVICE = 1 << TLY_RANK_TO_SERVICE,
    WATCHED = 1 << TLY_WATCHER_TO_SERVICE,
    OF_RANK = 1 << TLY_RANK_TO_COORDINATOR,
    OF_TALLYD = 1 << TLY_TALLYD_TO_COORDINATOR,
    OF_WATCHER = 1 << TLY_WATCHER_TO_COORDINATOR,
    OF_MEMBER = OF_RANK | OF_TALLYD,
    TO_MEMBER = 1 << TLY_COORDINATOR_TO_MEMBER,
    ALL = (1 << TLY_FRAME_WAYS) - 1,
};

struct types_rule {
    uint32_t ways; /* that it may go */
    uint32_t most; /* bytes of its payload */
};

static const struct types_rule rules[TLY_FRAME_TYPES] = {
    [TLY_HELLO] = {LINK, TLY_MAX_CONTROL},
    [TLY_ROSTER] = {OF_MEMBER | TO_MEMBER, TLY_MAX_CONTROL},
    [TLY_INVITE] = {TO_MEMBER, TLY_MAX_CONTROL},
    [TLY_PREPARE] = {TO_MEMBER, TLY_MAX_CONTROL},
    [TLY_BEGUN] = {OF_MEMBER, TLY_MAX_CONTROL},
    [TLY_COMMIT] = {TO_MEMBER, TLY_MAX_CONTROL},
    [TLY_COMPLAIN] = {OF_RANK, TLY_MAX_CONTROL},
    [TLY_PUSH] = {TO_SERVICE, TLY_MAX_FRAGMENT},
    [TLY_RESULT] = {TO_RANK, TLY_MAX_FRAGMENT},
    [TLY_SPEC] = {TO_RANK | TO_SERVICE, TLY_MAX_CONTROL},
    [TLY_VERDICT] = {TO_RANK | TO_MEMBER, TLY_MAX_CONTROL},
    [TLY_CANCEL] = {TO_SERVICE, TLY_MAX_CONTROL},
    [TLY_AGAIN] = {TO_RANK, TLY_MAX_CONTROL},
    [TLY_HAVE] = {TO_RANK | TO_SERVICE, TLY_MAX_CONTROL},
    [TLY_DONE] = {TO_RANK | TO_SERVICE, TLY_MAX_CONTROL},
    [TLY_FINAL] = {TO_SERVICE, TLY_MAX_FRAGMENT},
    [TLY_COUNTS] = {ALL, TLY_MAX_CONTROL},
    [TLY_BEAT] = {ALL, TLY_MAX_CONTROL},
    [TLY_STATUS] = {TO_RANK | TO_SERVICE | WATCHED | OF_WATCHER, TLY_MAX_CONTROL},
    [TLY_GOODBYE] = {ALL & ~(WATCHED | OF_WATCHER), TLY_MAX_CONTROL},
    [TLY_PACE] = {TO_RANK | TO_SERVICE | OF_RANK | TO_MEMBER, TLY_MAX_CONTROL},
    [TLY_GROUP] = {TO_SERVICE, TLY_MAX_CONTROL},
    [TLY_RETURN] = {LINK, TLY_MAX_CONTROL},
    [TLY_MEASURE] = {WATCHED | OF_MEMBER | TO_MEMBER, TLY_MAX_CONTROL},
    [TLY_JOINED] = {TO_SERVICE | OF_RANK | TO_MEMBER, TLY_MAX_CONTROL},
    [TLY_SETUP] = {LINK, TLY_MAX_CONTROL},
};

bool tly_frame_is_type(int type)
{
    return type > 0 && type < TLY_FRAME_TYPES;
}

bool tly_frame_goes(int type, enum tly_frame_way way)
{
    return tly_frame_is_type(type) && (rules[type].ways >> way & 1);
}

uint32_t tly_frame_most(int type)
{
    return tly_frame_is_type(type) ? rules[type].most : 0;
}
