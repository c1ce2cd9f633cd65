/* regain.c - parts of shared tensors that come to this service: its old service has died or left, or shares have changed.
 *
 * The ranks hold the values, and the old service is not asked (docs/why/shared.md).  With the COMMIT of epoch e each rank names the
 * parts that are at this service for it, with the version that it holds (HAVE), and says that these are all (DONE).
 *
 *   KEPT_GATHERS    The part is new here, or a HAVE names a newer epoch, and then what is here of it is void.  Pushes wait.  Once each
 *                   rank has named a version of the part in this epoch and said DONE, the service asks the lowest rank that holds
 *                   the highest version (AGAIN with MARK).
 *   KEPT_HELD       That rank has sent the state (HAVE with MARK) and the values (FINAL).  The version is (e, 0), and pushes go on.
 *   KEPT_NO_MEMORY  The part gathers, and there is no memory for its values.  Each operation fails until there is some.
 *
 * A rank that has no version of the part still needs the values of its create, and that round goes on here.  Its result is the
 * part's values: no rank can have added to them before.
 *
 * A few parts are asked for at a time, so what the rank has to send stays short.
 *
 * A rank that says DONE without naming a part has given it up, if the part was here as the rank began to speak.  So has one whose
 * create has failed (CANCEL).  The part goes once each rank has given it up or holds no version.  Ranks that have left count for
 * nothing. */
#include "sum/regain.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/map.h"
#include "reduce/reduce.h"
#include "sum/internal.h"
#include "sum/kept.h"
#include "sum/round.h"
#include "sum/session.h"
#include "trace/timeline.h"
#include "wire/frame.h"
#include "wire/kept.h"

enum { MOST_GIVERS = 2 }; /* parts that are asked for at a time */

/* --- asking -------------------------------------------------------------------------------------- */

static bool regain_all_hold(const struct tly_job *job, const struct tly_kept *s)
{
    for (uint32_t i = 0; i < job->ranks; i++) {
        const struct tly_session *p = job->by_rank[i];
        if (!job->gone[i] && (!p || p->done_epoch < s->version.epoch || !s->rank[i].had.epoch))
            return false;
    }
    return true;
}

/* Some rank of the job has given it up. */
static bool regain_is_given_up(const struct tly_job *job, const struct tly_kept *s)
{
    for (uint32_t i = 0; i < job->ranks; i++)
        if (!job->gone[i] && s->rank[i].gave_up)
            return true;
    return false;
}

/* The lowest rank that holds the highest version; TLY_NO_PEER: all ranks have left.  Each of the others holds one. */
static uint32_t regain_holder(const struct tly_job *job, const struct tly_kept *s)
{
    uint32_t holder = TLY_NO_PEER;
    for (uint32_t i = 0; i < job->ranks; i++) {
        const struct tly_version *had = &s->rank[i].had;
        if (!job->gone[i] && (holder == TLY_NO_PEER || tly_version_is_newer(had, &s->rank[holder].had)))
            holder = i;
    }
    return holder;
}

static void regain_ask(struct tly_job *job, struct tly_kept *s, uint32_t holder)
{
    struct tly_frame f = {.type = TLY_AGAIN,
                          .flags = TLY_MARK,
                          .kind = TLY_KEPT,
                          .key = s->key,
                          .part = s->part,
                          .length = s->length,
                          .epoch = s->version.epoch,
                          .round = s->created,
                          .rank = holder};
    s->giver = holder;
    job->givers++;
    tly_session_post(job->by_rank[holder], &f, NULL, 0, NULL);
}

void tly_regain_look(struct tly_job *job)
{
    struct tly_kept *s;
    tly_map_each(&job->kept, s)
    {
        if (job->givers >= MOST_GIVERS)
            return;
        /* A part that some rank has given up has moved on before its values came. */
        if (s->state != KEPT_GATHERS || s->giver != TLY_NO_PEER || regain_is_given_up(job, s) ||
            !regain_all_hold(job, s))
            continue;
        uint32_t holder = regain_holder(job, s);
        if (holder != TLY_NO_PEER)
            regain_ask(job, s, holder);
    }
}

bool tly_regain_has_memory(struct tly_job *job, struct tly_kept *s)
{
    bool lacked = s->state == KEPT_NO_MEMORY, has = tly_kept_has_memory(job, s);
    if (lacked && has)
        tly_regain_look(job); /* what ranks have said still holds: no operation has ended since */
    return has;
}

/* --- what ranks say ------------------------------------------------------------------------------ */

static void regain_give_up(struct tly_job *job, struct tly_kept *s, uint32_t rank)
{
    if (s->giver == rank)
        tly_kept_forget_giver(job, s); /* another part may be asked for */
    s->rank[rank].gave_up = true;
}

static const char *regain_malformed(const struct tly_job *job, const struct tly_session *p,
                                    const struct tly_frame *f)
{
    bool mark = f->flags & TLY_MARK;
    size_t element = tly_reduce_element_size(f->dtype);
    if (f->rank != p->rank)
        return "a word about a shared tensor in another's name";
    if (!f->epoch || !element || !f->length || f->length % element || f->length > job->part_most)
        return "a malformed part of a shared tensor";
    if (f->payload != (mark ? tly_state_bytes(job->ranks) : f->payload ? TLY_VERSION_BYTES : 0))
        return "a malformed version of a shared tensor";
    return NULL;
}

static bool regain_fits(const struct tly_kept *s, const struct tly_frame *f)
{
    return s->length == f->length && s->dtype == f->dtype && s->staleness == f->op;
}

/* Has this rank been asked for these values? */
static bool regain_is_giver(const struct tly_session *p, const struct tly_kept *s, const struct tly_frame *f)
{
    return s->state == KEPT_GATHERS && s->giver == p->rank && s->version.epoch == f->epoch &&
           s->length == f->length;
}

/* It was under way as the rank left, the part went or came here anew, or the create's end brought the values. */
static bool regain_is_void(const struct tly_session *p, const struct tly_kept *s, const struct tly_frame *f)
{
    return p->left || !s || s->created != f->round || f->epoch < s->version.epoch ||
           (s->state == KEPT_HELD && f->epoch == s->version.epoch);
}

static int regain_take_state(struct tly_session *p, struct tly_kept *s, const struct tly_frame *f,
                             const void *data, const char **why)
{
    if (regain_is_void(p, s, f))
        return 0;
    *why = "values of a shared tensor that nobody has asked for";
    if (!regain_is_giver(p, s, f) || s->coming)
        return -EPROTO;
    *why = "out of memory";
    s->coming = malloc(f->payload);
    if (!s->coming)
        return -ENOMEM;
    memcpy(s->coming, data, f->payload);
    return 0;
}

int tly_regain_have(struct tly_session *p, const struct tly_frame *f, const void *data, const char **why)
{
    struct tly_job *job = p->job;
    struct tly_kept *s = tly_kept_find(job, f);
    *why = regain_malformed(job, p, f);
    if (*why)
        return -EPROTO;
    if (f->flags & TLY_MARK)
        return regain_take_state(p, s, f, data, why);
    p->speaks = true;
    struct tly_version had = f->payload ? tly_version_get(data) : (struct tly_version){0};
    *why = "a version of a shared tensor from the future";
    if (had.epoch > f->epoch || (f->payload && !had.epoch))
        return -EPROTO;
    if (s && f->payload && s->created < f->round) {
        tly_kept_drop(job, s); /* all ranks have begun a later create of that name */
        s = NULL;
    }
    if (s ? s->created != f->round : !f->payload)
        return 0; /* its create has failed since, or has not ended yet */
    *why = "two sizes of one shared tensor";
    if (s && !regain_fits(s, f))
        return -EPROTO;
    *why = "out of memory";
    if (!s && !(s = tly_kept_expect(job, f)))
        return -ENOMEM;
    if (f->epoch > s->version.epoch)
        tly_kept_gather(job, s, f->epoch);
    if (f->epoch < s->version.epoch)
        return 0;
    struct tly_kept_rank *rank = &s->rank[p->rank];
    *why = "a version of a shared tensor that no service has given";
    if (s->state == KEPT_GATHERS && had.epoch == f->epoch)
        return -EPROTO;
    s->rank[p->rank].gave_up = false;
    rank->named = true;
    rank->had = had;
    return 0;
}

/* The part comes here, and the rank has named all parts since, but no version of this one. */
static bool regain_lacks(const struct tly_job *job, const struct tly_kept *s, uint32_t rank)
{
    const struct tly_session *p = job->by_rank[rank];
    return s->state != KEPT_HELD && p && p->done_epoch >= s->version.epoch && !s->rank[rank].had.epoch;
}

/* Each rank that is in the job has given it up or lacks it.  A rank that lacks it needs its create.  A rank that has given the
 * part up, perhaps before it left, has seen the create fail. */
static bool regain_is_nobodys(const struct tly_job *job, const struct tly_kept *s)
{
    bool given_up = false;
    for (uint32_t i = 0; i < job->ranks; i++) {
        given_up |= s->rank[i].gave_up;
        if (!job->gone[i] && !s->rank[i].gave_up && !regain_lacks(job, s, i))
            return false;
    }
    return given_up;
}

static void regain_drop_given_up(struct tly_job *job)
{
    struct tly_kept *s, **all = malloc((job->kept.count + 1) * sizeof *all);
    size_t count = 0;
    tly_map_each(&job->kept, s) if (all && regain_is_nobodys(job, s)) all[count++] = s;
    while (count--) /* without memory they stay until the next DONE */
        tly_kept_drop(job, all[count]);
    free(all);
}

void tly_regain_done(struct tly_session *p, uint32_t epoch)
{
    struct tly_job *job = p->job;
    struct tly_kept *s;
    p->speaks = false;
    tly_map_each(&job->kept, s)
    {
        struct tly_kept_rank *rank = &s->rank[p->rank];
        if (!rank->named && s->version.epoch <= epoch) /* else it may come back to this rank later */
            regain_give_up(job, s, p->rank);
        rank->named = false;
    }
    regain_drop_given_up(job);
    tly_regain_look(job);
}

void tly_regain_cancelled(struct tly_session *p, const struct tly_frame *f)
{
    struct tly_kept *s = tly_kept_find(p->job, f);
    if (!s || s->created != f->round)
        return;
    regain_give_up(p->job, s, p->rank);
    regain_drop_given_up(p->job);
    tly_regain_look(p->job);
}

/* --- the values ---------------------------------------------------------------------------------- */

static void regain_hold(struct tly_job *job, struct tly_kept *s)
{
    s->state = KEPT_HELD;
    tly_progress_kept(job, s);
    tly_progress_kept(job, s); /* the first turn has applied what had waited, and may have moved clocks */
}

static void regain_take(struct tly_job *job, struct tly_kept *s)
{
    struct tly_version taken = tly_version_get(s->coming);
    tly_kept_log(job, s, "take version %u %" PRIu64, taken.epoch, taken.count);
    tly_kept_read(job, s, s->coming);
    tly_kept_forget_giver(job, s);
    regain_hold(job, s);
    tly_regain_look(job);
}

void tly_regain_created(struct tly_job *job, struct tly_kept *s, const uint8_t *values)
{
    if (s->state != KEPT_GATHERS)
        return;
    memcpy(s->values, values, s->length);
    tly_kept_forget_giver(job, s);
    regain_hold(job, s);
    tly_regain_look(job);
}

int tly_regain_final(struct tly_session *p, const struct tly_frame *f, const void *data, const char **why)
{
    struct tly_job *job = p->job;
    struct tly_kept *s = tly_kept_find(job, f);
    if (regain_is_void(p, s, f))
        return 0;
    *why = "values of a shared tensor that nobody has asked for";
    if (!regain_is_giver(p, s, f) || !s->coming || f->offset != s->filled || !f->payload ||
        f->payload > s->length - s->filled)
        return -EPROTO;
    memcpy(s->values + s->filled, data, f->payload);
    s->filled += f->payload;
    if (s->filled == s->length)
        regain_take(job, s);
    return 0;
}

/* --- losses -------------------------------------------------------------------------------------- */

void tly_regain_detach(struct tly_session *p)
{
    struct tly_kept *s;
    tly_map_each(&p->job->kept, s)
    {
        s->rank[p->rank].named = false;
        if (s->giver == p->rank)
            tly_kept_forget_giver(p->job, s);
    }
}

void tly_regain_left(struct tly_job *job, uint32_t rank)
{
    struct tly_kept *s;
    tly_map_each(&job->kept, s)
    {
        if (s->giver == rank)
            tly_kept_forget_giver(job, s);
    }
    regain_drop_given_up(job);
    tly_regain_look(job);
}
