/* kept.c - the table of shared tensors' parts: memory for their values, and how far each rank has come.
 *
 * A part's values are reserved in the job's quota beside what its rounds need at least, and stay until the job ends.  What is
 * done to them is its rule's business (ops/shared/service.c). */
#include "sum/kept.h"

#include <stdlib.h>

#include "base/map.h"
#include "base/slot.h"
#include "sum/internal.h"
#include "sum/members.h"
#include "sum/quota.h"
#include "sum/session.h"
#include "sum/slot.h"
#include "wire/frame.h"

static uint64_t kept_id(const struct tly_frame *f)
{
    return tly_map_mix(f->key ^ tly_map_mix(f->part + 1ull));
}

struct tly_kept *tly_kept_find(const struct tly_job *job, const struct tly_frame *f)
{
    struct tly_kept *s = tly_map_get(&job->kept, kept_id(f));
    return s && s->key == f->key && s->part == f->part ? s : NULL;
}

static void kept_destroy(struct tly_job *job, struct tly_kept *s)
{
    uint64_t bytes = tly_slot_bytes(s->length);
    tly_quota_give(&job->quota, s->values, s->length);
    tly_quota_reserve(&job->quota, job->quota.reserved - bytes);
    job->kept_bytes -= bytes;
    free(s);
}

uint64_t tly_kept_room(const struct tly_job *job)
{
    uint64_t most = tly_quota_most(&job->quota);
    return most > job->quota.reserved ? most - job->quota.reserved : 0;
}

/* An earlier create of that name has failed somewhere, and left parts here. */
static void kept_drop_earlier(struct tly_job *job, const struct tly_frame *f)
{
    struct tly_kept *s, **earlier = malloc((job->kept.count + 1) * sizeof *earlier);
    size_t count = 0;
    tly_map_each(&job->kept, s) if (earlier && s->key == f->key && s->created < f->round) earlier[count++] =
        s;
    while (count--) {
        s = earlier[count];
        for (uint32_t i = 0; i < job->ranks; i++)
            if (s->rank[i].open)
                tly_kept_close(s->rank[i].open);
        tly_map_take(&job->kept, kept_id(&(struct tly_frame){.key = s->key, .part = s->part}));
        kept_destroy(job, s);
    }
    free(earlier);
}

struct tly_kept *tly_kept_make(struct tly_job *job, const struct tly_frame *f)
{
    uint64_t bytes = tly_slot_bytes(f->length);
    if (f->round)
        kept_drop_earlier(job, f);
    struct tly_kept *s = calloc(1, sizeof *s + job->ranks * sizeof *s->rank);
    if (!s || tly_map_get(&job->kept, kept_id(f)) || bytes > tly_kept_room(job) ||
        tly_map_put(&job->kept, kept_id(f), s) != 0) {
        free(s);
        return NULL;
    }
    s->key = f->key;
    s->part = f->part;
    s->length = f->length;
    s->created = f->round;
    s->dtype = f->dtype;
    s->staleness = f->op;
    for (uint32_t i = 0; i < job->ranks; i++)
        s->rank[i].last = f->round;
    job->kept_bytes += bytes;
    tly_memory_reserve(job, job->quota.reserved + bytes);
    s->values = tly_memory_take_always(job, s->length);
    if (s->values)
        return s;
    tly_map_take(&job->kept, kept_id(f));
    kept_destroy(job, s);
    return NULL;
}

uint32_t tly_kept_behind(const struct tly_job *job, const struct tly_kept *s, uint32_t rank, uint32_t clock)
{
    uint32_t enough = s->rank[rank].clock + s->staleness;
    return !s->staleness || job->joined[rank].on || enough >= clock ? 0 : clock - enough;
}

void tly_kept_level(struct tly_job *job)
{
    struct tly_kept *s;
    tly_map_each(&job->kept, s) for (uint32_t i = 0; i < job->ranks; i++) s->rank[i].clock = 0;
}

void tly_kept_finish(struct tly_job *job)
{
    struct tly_kept *s;
    tly_map_each(&job->kept, s) kept_destroy(job, s);
    tly_map_finish(&job->kept);
}
