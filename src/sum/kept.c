/* kept.c - the table of shared tensors' parts: memory for their values, and how far each rank has come.
 *
 * Memory for a part's values is reserved in the job's quota, beside the least that rounds need.  The values stay until the job ends,
 * or until no rank needs the part (regain.c).  The rules of shared tensors change them (ops/shared/service.c). */
#include "sum/kept.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/map.h"
#include "base/slot.h"
#include "sum/internal.h"
#include "sum/members.h"
#include "sum/quota.h"
#include "sum/session.h"
#include "sum/slot.h"
#include "trace/timeline.h"
#include "wire/frame.h"
#include "wire/pack.h"

enum { MOST_KEPT = 1 << 20 }; /* parts of one job */

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
    tly_kept_forget_giver(job, s);
    if (s->values) {
        tly_quota_give(&job->quota, s->values, s->length);
        tly_quota_reserve(&job->quota, job->quota.reserved - bytes);
        job->kept_bytes -= bytes;
    }
    free(s);
}

uint64_t tly_kept_room(const struct tly_job *job)
{
    uint64_t most = tly_quota_most(&job->quota);
    return most > job->quota.reserved ? most - job->quota.reserved : 0;
}

static void kept_close_all(struct tly_job *job, struct tly_kept *s)
{
    for (uint32_t i = 0; i < job->ranks; i++)
        if (s->rank[i].open)
            tly_kept_close(s->rank[i].open);
}

void tly_kept_drop(struct tly_job *job, struct tly_kept *s)
{
    kept_close_all(job, s);
    tly_map_take(&job->kept, kept_id(&(struct tly_frame){.key = s->key, .part = s->part}));
    kept_destroy(job, s);
}

/* An earlier create of that name has failed, and may have left parts here: drop them. */
static void kept_drop_earlier(struct tly_job *job, const struct tly_frame *f)
{
    struct tly_kept *s, **earlier = malloc((job->kept.count + 1) * sizeof *earlier);
    size_t count = 0;
    tly_map_each(&job->kept, s) if (earlier && s->key == f->key && s->created < f->round) earlier[count++] =
        s;
    while (count--)
        tly_kept_drop(job, earlier[count]);
    free(earlier);
}

/* Reserve memory for the part's values, beside what rounds need.  False: there is none. */
static bool kept_take_memory(struct tly_job *job, struct tly_kept *s)
{
    uint64_t bytes = tly_slot_bytes(s->length);
    if (bytes > tly_kept_room(job))
        return false;
    tly_memory_reserve(job, job->quota.reserved + bytes);
    s->values = tly_memory_take_always(job, s->length);
    if (s->values)
        job->kept_bytes += bytes;
    else
        tly_quota_reserve(&job->quota, job->quota.reserved - bytes);
    return s->values != NULL;
}

/* Enter the part into the table, without values.  NULL: no memory, or the table is full. */
static struct tly_kept *kept_enter(struct tly_job *job, const struct tly_frame *f)
{
    struct tly_kept *s = calloc(1, sizeof *s + job->ranks * sizeof *s->rank);
    if (!s || tly_map_get(&job->kept, kept_id(f)) || job->kept.count >= MOST_KEPT ||
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
    s->version.epoch = f->epoch;
    s->joins = job->joins;
    s->giver = TLY_NO_PEER;
    for (uint32_t i = 0; i < job->ranks; i++) {
        s->rank[i].last = f->round;
        s->rank[i].named = job->by_rank[i] && job->by_rank[i]->speaks; /* maybe of this part too */
    }
    return s;
}

struct tly_kept *tly_kept_make(struct tly_job *job, const struct tly_frame *f)
{
    if (f->round)
        kept_drop_earlier(job, f);
    struct tly_kept *s = kept_enter(job, f);
    if (s && !kept_take_memory(job, s)) {
        tly_kept_drop(job, s);
        return NULL;
    }
    if (s)
        s->state = KEPT_GATHERS;
    return s;
}

struct tly_kept *tly_kept_expect(struct tly_job *job, const struct tly_frame *f)
{
    struct tly_kept *s = kept_enter(job, f);
    if (s)
        tly_kept_gather(job, s, f->epoch);
    return s;
}

void tly_kept_gather(struct tly_job *job, struct tly_kept *s, uint32_t epoch)
{
    kept_close_all(job, s); /* their ranks take them back, and push them again */
    tly_kept_forget_giver(job, s);
    s->version = (struct tly_version){epoch, 0};
    for (uint32_t i = 0; i < job->ranks; i++) {
        s->rank[i].had = (struct tly_version){0};
        s->rank[i].gave_up = false;
    }
    s->state = KEPT_NO_MEMORY;
    tly_kept_has_memory(job, s);
}

bool tly_kept_has_memory(struct tly_job *job, struct tly_kept *s)
{
    if (s->state == KEPT_NO_MEMORY && (s->values || kept_take_memory(job, s)))
        s->state = KEPT_GATHERS;
    return s->state != KEPT_NO_MEMORY;
}

void tly_kept_forget_giver(struct tly_job *job, struct tly_kept *s)
{
    job->givers -= s->giver != TLY_NO_PEER;
    s->giver = TLY_NO_PEER;
    s->filled = 0;
    free(s->coming);
    s->coming = NULL;
}

void tly_kept_write(const struct tly_job *job, const struct tly_kept *s, uint8_t *out)
{
    tly_version_put(out, &s->version);
    out = tly_put32(out + TLY_VERSION_BYTES, s->joins);
    for (uint32_t i = 0; i < job->ranks; i++)
        out = tly_put32(tly_put32(out, s->rank[i].last), s->rank[i].clock);
}

void tly_kept_read(const struct tly_job *job, struct tly_kept *s, const uint8_t *in)
{
    s->joins = tly_get32(in + TLY_VERSION_BYTES);
    bool past = s->joins < job->joins; /* all have joined since, so they are level */
    for (uint32_t i = 0; i < job->ranks; i++) {
        const uint8_t *at = in + TLY_STATE_LEAST + i * TLY_STATE_RANK;
        s->rank[i].last = tly_get32(at);
        s->rank[i].clock = past ? 0 : tly_get32(at + 4);
    }
    s->joins = past ? job->joins : s->joins;
}

uint32_t tly_kept_behind(const struct tly_job *job, const struct tly_kept *s, uint32_t rank, uint32_t clock)
{
    uint32_t enough = s->rank[rank].clock + s->staleness;
    return !s->staleness || s->state != KEPT_HELD || job->joined[rank].on || enough >= clock
               ? 0
               : clock - enough;
}

void tly_kept_level(struct tly_job *job, uint32_t joins)
{
    struct tly_kept *s;
    tly_map_each(&job->kept, s)
    {
        for (uint32_t i = 0; i < job->ranks && s->joins < joins; i++)
            s->rank[i].clock = 0;
        s->joins = s->joins < joins ? joins : s->joins;
    }
}

/* Each call writes its line to the file, which keeps it if the process is killed next. */
void tly_kept_log(const struct tly_job *job, const struct tly_kept *s, const char *format, ...)
{
    char path[1024];
    if (!job->params->shared_log)
        return;
    snprintf(path, sizeof path, "%s.%d", job->params->shared_log, (int)getpid());
    FILE *f = fopen(path, "ae");
    if (!f)
        return;
    fprintf(f, "%016" PRIx64 " part %u bytes %u version %u %" PRIu64 " ", s->key, s->part, s->length,
            s->version.epoch, s->version.count);
    va_list more;
    va_start(more, format);
    vfprintf(f, format, more);
    va_end(more);
    fputc('\n', f);
    fclose(f);
}

void tly_kept_finish(struct tly_job *job)
{
    struct tly_kept *s;
    tly_map_each(&job->kept, s) kept_destroy(job, s);
    tly_map_finish(&job->kept);
}
