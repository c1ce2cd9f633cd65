/* types.c - the table of frame types: what each is called, who may get one, and how long its payload may be.
 *
 * The link asks it for limits, and each receiver asks it for directions before it looks at a frame. */
#include "wire/frame.h"

enum {
    LINK = 0, /* no user of a link ever sees it */
    WORKER = 1 << TLY_TO_WORKER,
    SERVICE = 1 << TLY_TO_SERVICE,
    COORDINATOR = 1 << TLY_TO_COORDINATOR,
    MEMBER = 1 << TLY_TO_MEMBER,
    ALL = WORKER | SERVICE | COORDINATOR | MEMBER,
};

struct rule {
    const char *name;
    uint32_t to;   /* who may get it */
    uint32_t most; /* bytes of its payload */
};

static const struct rule rules[TLY_FRAME_TYPES] = {
    [TLY_HELLO] = {"HELLO", LINK, TLY_MAX_CONTROL},
    [TLY_ROSTER] = {"ROSTER", COORDINATOR | MEMBER, TLY_MAX_CONTROL},
    [TLY_INVITE] = {"INVITE", MEMBER, TLY_MAX_CONTROL},
    [TLY_PREPARE] = {"PREPARE", MEMBER, TLY_MAX_CONTROL},
    [TLY_BEGUN] = {"BEGUN", COORDINATOR, TLY_MAX_CONTROL},
    [TLY_COMMIT] = {"COMMIT", MEMBER, TLY_MAX_CONTROL},
    [TLY_COMPLAIN] = {"COMPLAIN", COORDINATOR, TLY_MAX_CONTROL},
    [TLY_PUSH] = {"PUSH", SERVICE, TLY_MAX_FRAGMENT},
    [TLY_RESULT] = {"RESULT", WORKER, TLY_MAX_FRAGMENT},
    [TLY_SPEC] = {"SPEC", WORKER | SERVICE, TLY_MAX_CONTROL},
    [TLY_VERDICT] = {"VERDICT", WORKER | MEMBER, TLY_MAX_CONTROL},
    [TLY_CANCEL] = {"CANCEL", SERVICE, TLY_MAX_CONTROL},
    [TLY_AGAIN] = {"AGAIN", WORKER, TLY_MAX_CONTROL},
    [TLY_HAVE] = {"HAVE", SERVICE, TLY_MAX_CONTROL},
    [TLY_DONE] = {"DONE", WORKER | SERVICE, TLY_MAX_CONTROL},
    [TLY_FINAL] = {"FINAL", SERVICE, TLY_MAX_FRAGMENT},
    [TLY_COUNTS] = {"COUNTS", ALL, TLY_MAX_CONTROL},
    [TLY_BEAT] = {"BEAT", ALL, TLY_MAX_CONTROL},
    [TLY_STATUS] = {"STATUS", WORKER | SERVICE | COORDINATOR, TLY_MAX_CONTROL},
    [TLY_GOODBYE] = {"GOODBYE", ALL, TLY_MAX_CONTROL},
    [TLY_PACE] = {"PACE", ALL, TLY_MAX_CONTROL},
    [TLY_GROUP] = {"GROUP", SERVICE, TLY_MAX_CONTROL},
    [TLY_RETURN] = {"RETURN", LINK, TLY_MAX_CONTROL},
    [TLY_MEASURE] = {"MEASURE", SERVICE | COORDINATOR | MEMBER, TLY_MAX_CONTROL},
    [TLY_JOINED] = {"JOINED", SERVICE | COORDINATOR | MEMBER, TLY_MAX_CONTROL},
};

bool tly_frame_is_type(int type)
{
    return type > 0 && type < TLY_FRAME_TYPES;
}

bool tly_frame_goes_to(int type, enum tly_frame_to whom)
{
    return tly_frame_is_type(type) && (rules[type].to >> whom & 1);
}

uint32_t tly_frame_most(int type)
{
    return tly_frame_is_type(type) ? rules[type].most : 0;
}

const char *tly_frame_type_name(int type)
{
    return tly_frame_is_type(type) ? rules[type].name : "?";
}
