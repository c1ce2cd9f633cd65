/* trace.c - a ring of stamps, and how it becomes a file: stamps of one part in order, each two that belong
 * together a slice of time. */
#include "trace/trace.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"

_Static_assert(sizeof(struct tly_stamp) == 32, "two to a cache line");

enum { NO_PEER = 0xffff, NAME = 512 };

/* What lies between two moments. A moment that begins anew what has begun already (a part that was asked for
 * again) begins a second row of slices. */
static const struct span {
    enum tly_row row;
    enum tly_moment from, to;
} spans[] = {
    {TLY_ROW_OPERATION, TLY_AT_SUBMITTED, TLY_AT_DONE},  {TLY_ROW_QUEUE, TLY_AT_QUEUED, TLY_AT_ADMITTED},
    {TLY_ROW_LINE, TLY_AT_ADMITTED, TLY_AT_FIRST},       {TLY_ROW_SEND, TLY_AT_FIRST, TLY_AT_SENT},
    {TLY_ROW_WAIT, TLY_AT_SENT, TLY_AT_RESULT_FIRST},    {TLY_ROW_RESULT, TLY_AT_RESULT_FIRST, TLY_AT_LANDED},
    {TLY_ROW_GATHER, TLY_AT_OPENED, TLY_AT_GATHERED},    {TLY_ROW_SUM, TLY_AT_GATHERED, TLY_AT_SUMMED},
    {TLY_ROW_PUSH, TLY_AT_ARRIVING, TLY_AT_ARRIVED},     {TLY_ROW_ANSWER, TLY_AT_ANSWERING, TLY_AT_ANSWERED},
    {TLY_ROW_CHANGE, TLY_AT_PREPARED, TLY_AT_COMMITTED},
};

static bool trace_is_head(enum tly_moment s)
{
    return s == TLY_AT_SUBMITTED || s == TLY_AT_QUEUED || s == TLY_AT_OPENED || s == TLY_AT_ARRIVING ||
           s == TLY_AT_ANSWERING || s == TLY_AT_PREPARED;
}

/* The last moment of the chain that a moment belongs to. */
static enum tly_moment trace_chain_end(enum tly_moment s)
{
    return s <= TLY_AT_DONE       ? TLY_AT_DONE
           : s <= TLY_AT_LANDED   ? TLY_AT_LANDED
           : s <= TLY_AT_SUMMED   ? TLY_AT_SUMMED
           : s <= TLY_AT_ARRIVED  ? TLY_AT_ARRIVED
           : s <= TLY_AT_ANSWERED ? TLY_AT_ANSWERED
                                  : TLY_AT_COMMITTED;
}

/* All processes of one boot of a kernel have one monotonic clock, but for those in a time namespace of their own. */
static void trace_find_clock(char *out, size_t len)
{
    struct stat st = {0};
    char boot[40];
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (!f || !fgets(boot, sizeof boot, f))
        snprintf(boot, sizeof boot, "process %d", (int)getpid()); /* none that it knows to be another's */
    if (f)
        fclose(f);
    boot[strcspn(boot, "\n")] = '\0';
    stat("/proc/self/ns/time", &st);
    snprintf(out, len, "%s %llu", boot, (unsigned long long)st.st_ino);
}

struct tly_trace *tly_trace_create(const char *prefix, uint64_t bytes, const struct tly_process *who)
{
    struct tly_trace *t = calloc(1, sizeof *t);
    uint64_t room = 1024;
    char text[TLY_BYTES_TEXT];
    while (room * 2 * sizeof *t->ring <= bytes)
        room *= 2;
    if (t) {
        pthread_mutex_init(&t->lock, NULL);
        t->ring = malloc(room * sizeof *t->ring);
    }
    if (!t || !t->ring) {
        tly_warn("trace", "no trace of this process: no memory for %s (TALLY_TRACE_BYTES)",
                 tly_bytes_text(room * sizeof *t->ring, text));
        tly_trace_destroy(t);
        return NULL;
    }
    t->mask = room - 1;
    t->who = *who;
    t->who.from = tly_now();
    trace_find_clock(t->who.clock, sizeof t->who.clock);
    size_t len = strlen(prefix);
    if (len > 5 && strcmp(prefix + len - 5, ".json") == 0)
        len -= 5;
    const char *name = len && prefix[len - 1] == '/' ? "tally" : ""; /* a folder */
    char life[16] = "";
    if (who->service)
        snprintf(life, sizeof life, "-%08x", (unsigned)(who->incarnation >> 32));
    int n = snprintf(t->path, sizeof t->path, "%.*s%s.%08x.%s-%u%s.json", (int)len, prefix, name,
                     (unsigned)(who->start >> 32), who->service ? "service" : "rank", who->index, life);
    /* Now, not when the job has ended: the mistake can still be mended. */
    FILE *out = n < (int)sizeof t->path ? fopen(t->path, "we") : NULL;
    if (!out) {
        tly_warn("trace", "no trace of this process: cannot write %.600s: %s (TALLY_TRACE)", t->path,
                 n < (int)sizeof t->path ? strerror(errno) : "the name is too long");
        tly_trace_destroy(t);
        return NULL;
    }
    fclose(out);
    return t;
}

void tly_trace_destroy(struct tly_trace *t)
{
    if (!t)
        return;
    pthread_mutex_destroy(&t->lock);
    free(t->ring);
    free(t);
}

void tly_trace_put(struct tly_trace *t, const struct tly_stamp *s)
{
    pthread_mutex_lock(&t->lock);
    t->ring[t->count++ & t->mask] = *s;
    pthread_mutex_unlock(&t->lock);
}

#define ORDER(a, b) \
    if ((a) != (b)) \
    return (a) < (b) ? -1 : 1

/* By part, and within it by chain and time. */
static int trace_by_part(const void *x, const void *y)
{
    const struct tly_stamp *a = x, *b = y;
    ORDER(a->key, b->key);
    ORDER(a->round, b->round);
    ORDER(a->part, b->part);
    ORDER(a->peer, b->peer);
    ORDER(trace_chain_end(a->moment), trace_chain_end(b->moment));
    ORDER(a->at, b->at);
    ORDER(a->moment, b->moment);
    return 0;
}

static int trace_by_age(const void *x, const void *y)
{
    const struct tly_sample *a = x, *b = y;
    ORDER(a->at, b->at);
    return 0;
}

static bool trace_same_chain(const struct tly_stamp *a, const struct tly_stamp *b)
{
    return a->key == b->key && a->round == b->round && a->part == b->part && a->peer == b->peer &&
           trace_chain_end(a->moment) == trace_chain_end(b->moment);
}

/* Slices of the stamps of one chain; at[]: 0 where there is none. */
static int trace_add_slices(struct tly_process *p, const struct tly_stamp *s, const int64_t at[TLY_MOMENTS],
                            int64_t end)
{
    for (size_t i = 0; i < sizeof spans / sizeof *spans; i++) {
        int64_t from = at[spans[i].from], to = at[spans[i].to];
        bool open = from && !to;
        for (int later = spans[i].to + 1; open && later <= (int)trace_chain_end(spans[i].from); later++)
            open = !at[later]; /* else its end was overwritten */
        if (!from || (!to && !open) || (to && to < from))
            continue; /* a result may begin to come before the push has ended: nobody waited */
        struct tly_slice slice = {
            .from = from,
            .to = open ? (end > from ? end : from) : to,
            .key = s->key,
            .round = s->round,
            .part = s->part,
            .bytes = s->bytes,
            .peer = s->peer == NO_PEER ? TLY_NO_PEER : s->peer,
            .row = (uint8_t)spans[i].row,
            .open = open};
        if (tly_timeline_slice(p, &slice) != 0)
            return -ENOMEM;
    }
    return 0;
}

int64_t tly_trace_slices(struct tly_trace *t, int64_t end, struct tly_process *out)
{
    pthread_mutex_lock(&t->lock);
    uint64_t room = t->mask + 1, kept = t->count < room ? t->count : room;
    struct tly_stamp *sorted = malloc((kept ? kept : 1) * sizeof *sorted);
    if (sorted)
        memcpy(sorted, t->ring, kept * sizeof *sorted);
    out->lost = t->count - kept;
    pthread_mutex_unlock(&t->lock);
    if (!sorted)
        return -ENOMEM;
    size_t n = 0;
    int err = 0;
    for (uint64_t i = 0; i < kept && !err; i++) {
        struct tly_stamp s = sorted[i];
        if (s.moment == TLY_IN_FLIGHT)
            err = tly_timeline_sample(out, &(struct tly_sample){s.at, s.key});
        else
            sorted[n++] = s;
    }
    qsort(sorted, n, sizeof *sorted, trace_by_part);
    if (out->sample_count)
        qsort(out->samples, out->sample_count, sizeof *out->samples, trace_by_age);
    for (size_t i = 0; i < n && !err;) {
        int64_t at[TLY_MOMENTS] = {0};
        size_t first = i;
        for (; i < n && trace_same_chain(&sorted[first], &sorted[i]); i++) {
            int moment = sorted[i].moment;
            if (at[moment] && trace_is_head(moment))
                break;
            if (!at[moment])
                at[moment] = sorted[i].at;
        }
        err = trace_add_slices(out, &sorted[first], at, end);
    }
    free(sorted);
    return err ? err : (int64_t)kept;
}

/* Names of all tensors that the slices are of. */
static int trace_add_names(struct tly_timeline *t,
                           void (*name)(void *user, uint64_t key, char *out, size_t len), void *user)
{
    struct tly_process *p = &t->processes[0];
    char text[NAME];
    tly_process_sort(p, false);
    for (size_t i = 0; i < p->slice_count; i++) {
        const struct tly_slice *s = &p->slices[i];
        if (i && s[-1].key == s->key)
            continue;
        text[0] = '\0';
        name(user, s->key, text, sizeof text);
        if (text[0] && tly_timeline_name(t, s->key, text) != 0)
            return -ENOMEM;
    }
    return 0;
}

void tly_trace_write(struct tly_trace *t, void (*name)(void *user, uint64_t key, char *out, size_t len),
                     void *user)
{
    if (!t || t->written)
        return;
    t->written = true;
    struct tly_timeline line = {0};
    struct tly_process *p = tly_timeline_add(&line);
    int64_t kept = -ENOMEM;
    if (p) {
        *p = t->who;
        p->to = tly_now();
        kept = tly_trace_slices(t, p->to, p);
    }
    int err = kept < 0 ? (int)kept : 0;
    if (!err && name)
        err = trace_add_names(&line, name, user);
    FILE *out = err ? NULL : fopen(t->path, "we");
    if (!err && !out)
        err = -errno;
    if (!err)
        err = tly_timeline_write(out, &line);
    if (out && fclose(out) != 0 && (!err || err == -EIO))
        err = -errno;
    if (out && err &&
        truncate(t->path, 0) != 0) /* as if it had never been written: half of it is of no use */
        tly_debug("trace", "cannot empty %.600s: %s", t->path, strerror(errno));
    if (err)
        tly_warn("trace", "cannot write %.600s: %s", t->path, strerror(-err));
    else if (p->lost)
        tly_info("trace",
                 "%.600s holds the last %" PRId64 " stamps, %" PRIu64
                 " older ones are lost (TALLY_TRACE_BYTES)",
                 t->path, kept, p->lost);
    tly_timeline_finish(&line);
}
