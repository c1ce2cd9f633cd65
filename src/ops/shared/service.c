/* service.c - the rules of shared tensors: parameters that services keep (docs/why/shared.md).
 *
 * A create is a broadcast from rank 0, and the service keeps its data.  An addition and a read are rounds of one rank.  The service
 * applies an addition once, when all of it has come, and only answers one that its rank pushes again.  The answer is a copy of the
 * values.  The service makes it when no rank is too far behind. */
#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/text.h"
#include "ops/root.h"
#include "ops/rule.h"
#include "reduce/reduce.h"
#include "sum/internal.h"
#include "sum/kept.h"
#include "sum/members.h"
#include "sum/regain.h"
#include "sum/round.h"
#include "sum/session.h"
#include "sum/slot.h"
#include "sum/verdict.h"
#include "tally/tally.h"
#include "wire/kept.h"

/* --- create -------------------------------------------------------------------------------------- */

static const char *create_check(const struct tly_frame *f, const struct tly_members *who)
{
    bool sums = f->dtype == TALLY_FLOAT32 || f->dtype == TALLY_FLOAT64 || f->dtype == TALLY_INT32 ||
                f->dtype == TALLY_INT64;
    return sums && f->length && !f->group && !f->root
               ? NULL
               : "a create without elements, with a root or group, or of a "
                 "type other than float32, float64, int32 or int64";
}

static void shared_has_no_memory(struct tly_job *job, struct tly_round *r, const char *moved)
{
    char sentence[TLY_SENTENCE], part[TLY_BYTES_TEXT], room[TLY_BYTES_TEXT], kept[TLY_BYTES_TEXT];
    snprintf(
        sentence, sizeof sentence,
        "%s has no memory for a part of %s%s: it keeps %s of parameters and may keep %s more beside what "
        "sums need (TALLY_MEMORY)",
        job->name, tly_bytes_text(r->head.length, part), moved, tly_bytes_text(job->kept_bytes, kept),
        tly_bytes_text(tly_kept_room(job), room));
    tly_verdict_decide(job, r, ENOMEM, sentence);
}

/* All ranks agree: keep the part, or say why not. */
static void create_tell(struct tly_job *job, struct tly_round *r)
{
    struct tly_kept *s = tly_kept_find(job, &r->head);
    uint32_t givers = job->givers;
    if (!s || s->created != r->head.round)
        s = tly_kept_make(job, &r->head);
    if (!s || !tly_regain_has_memory(job, s))
        shared_has_no_memory(job, r, "");
    if (job->givers < givers) /* parts that an earlier create had left are gone */
        tly_regain_look(job);
}

static void create_keep(struct tly_job *job, const struct tly_round *r)
{
    struct tly_kept *s = tly_kept_find(job, &r->head);
    if (s && s->created == r->head.round && s->length == r->length)
        tly_regain_created(job, s, r->result);
}

const struct tly_rule tly_rule_shared_create = {
    .name = "shared_create",
    .givers = TLY_ROOT_GIVES,
    .check = create_check,
    .length = tly_root_length,
    .place = tly_root_place,
    .keep = create_keep,
    .tell = create_tell,
    .advance = tly_root_advance,
};

/* --- add and read -------------------------------------------------------------------------------- */

static const char *shared_check(const struct tly_frame *f, const struct tly_members *who)
{
    return who->count == 1 ? NULL : "a shared tensor's operation of several ranks";
}

static uint8_t *shared_place(const struct tly_round *r)
{
    return r->slots[r->head.rank].data;
}

/* The part is here, and has not moved since the push.  If it has, the rank takes the push back. */
static bool shared_may_start(struct tly_job *job, const struct tly_round *r)
{
    const struct tly_kept *s = tly_kept_find(job, &r->head);
    return !s || (s->state != KEPT_GATHERS && s->version.epoch <= r->head.epoch);
}

static bool shared_adds(const struct tly_round *r)
{
    return tly_rule_gives(r->rule, &r->head, r->head.rank);
}

/* Only an operation that moves its rank's clock waits. */
static uint32_t shared_behind(const struct tly_job *job, const struct tly_round *r, uint32_t rank)
{
    const struct tly_kept *s = r->kept;
    return s && (shared_adds(r) || r->head.op) ? tly_kept_behind(job, s, rank, s->rank[r->head.rank].clock)
                                               : 0;
}

static void shared_apply(const struct tly_job *job, const struct tly_round *r, struct tly_kept *s)
{
    const struct tly_slot *slot = &r->slots[r->head.rank];
    struct tly_kept_rank *rank = &s->rank[r->head.rank];
    if (shared_adds(r)) {
        const struct tly_reduction sum = {
            .dtype = s->dtype, .op = TALLY_SUM, .divisor = 1, .prescale = 1, .postscale = 1};
        const void *const inputs[] = {s->values, slot->data};
        tly_reduce(&sum, 2, inputs, s->values, s->length / tly_reduce_element_size(s->dtype));
        s->version.count++;
        tly_kept_log(job, s, "add rank %u round %u", r->head.rank, r->head.round);
    }
    rank->clock += shared_adds(r) || r->head.op;
    rank->last = r->head.round;
}

/* A rank that has left does not catch up, so what waits for it fails. */
static void shared_look_for_leavers(struct tly_job *job, struct tly_round *r)
{
    char sentence[TLY_SENTENCE];
    for (uint32_t i = 0; i < job->ranks; i++) {
        uint32_t steps = job->gone[i] ? shared_behind(job, r, i) : 0;
        if (!steps)
            continue;
        snprintf(sentence, sizeof sentence,
                 "rank %u has left the job without tally_join, and is %u addition%s too far behind", i, steps,
                 steps > 1 ? "s" : "");
        tly_verdict_decide(job, r, ESHUTDOWN, sentence);
        return;
    }
}

static void shared_tell(struct tly_job *job, struct tly_round *r)
{
    struct tly_kept *s = tly_kept_find(job, &r->head);
    if (!s || s->length != r->head.length || s->dtype != r->head.dtype) {
        tly_verdict_decide(job, r, EINVAL,
                           s ? "it was created with another type or size: use another name"
                             : "it was not created: all ranks call tally_shared_create first");
        return;
    }
    if (r->head.epoch < s->version.epoch)
        return;
    if (!tly_regain_has_memory(job, s)) {
        shared_has_no_memory(job, r, " that has moved to it");
        return;
    }
    if (!r->state && !(r->state = malloc(tly_state_bytes(job->ranks)))) {
        tly_verdict_decide(job, r, ENOMEM, "out of memory");
        return;
    }
    const struct tly_kept_rank *rank = &s->rank[r->head.rank];
    bool gathers = s->state == KEPT_GATHERS, follows = gathers || r->head.round > rank->last;
    if (r->head.epoch > s->version.epoch || (!gathers && r->head.round < rank->last) ||
        (follows && rank->open && rank->open != r)) {
        tly_verdict_decide(job, r, EPROTO,
                           "it came out of order, which only a fault in Tally can cause: please report it");
        return;
    }
    if (gathers) {
        tly_kept_open(s, r);
        return;
    }
    if (r->head.round > rank->last) /* the rank has taken back the operations between these two rounds */
        shared_apply(job, r, s);
    tly_kept_open(s, r);
    tly_window_give_back(job, r->head.rank, &r->slots[r->head.rank]);
    if (job->left)
        shared_look_for_leavers(job, r);
}

static void shared_advance(struct tly_job *job, struct tly_round *r, uint32_t from, uint32_t to)
{
    const struct tly_kept *s = tly_kept_find(job, &r->head);
    /* Only a faulty rank comes here: it says that it has some of a result whose part is not here. */
    if (!s || s->state != KEPT_HELD || s->length != r->head.length) {
        memset(r->result + from, 0, to - from);
        return;
    }
    memcpy(r->result + from, s->values + from, to - from);
    tly_kept_log(job, s, "get rank %u round %u", r->head.rank, r->head.round);
    if (r->state)
        tly_kept_write(job, s, r->state);
}

const struct tly_rule tly_rule_shared_add = {
    .name = "shared_add",
    .givers = TLY_ALL_GIVE,
    .groups = TLY_PAIRS,
    .check = shared_check,
    .length = tly_rule_part_length,
    .may_start = shared_may_start,
    .place = shared_place,
    .tell = shared_tell,
    .behind = shared_behind,
    .advance = shared_advance,
};

const struct tly_rule tly_rule_shared_read = {
    .name = "shared_read",
    .givers = TLY_NONE_GIVE,
    .groups = TLY_PAIRS,
    .check = shared_check,
    .length = tly_rule_part_length,
    .may_start = shared_may_start,
    .tell = shared_tell,
    .behind = shared_behind,
    .advance = shared_advance,
};
