/* streams.c - the fake driver's streams, their work, and events: work is carried out when something waits for it. */
#include <stdlib.h>
#include <string.h>

#include "test/device/fake_cuda/fake.h"

enum { NON_BLOCKING = 1 };
enum { STREAM_LEGACY = 1, STREAM_PER_THREAD = 2 };

pthread_cond_t fake_changed = PTHREAD_COND_INITIALIZER;
static struct fake_stream *streams;
static struct fake_event *events;
static const void *staged; /* where in the host's memory the last copy from a GPU went */
static bool copies_held, kernels_held;
static int reads_left = -1; /* copies from GPUs to the host that may be carried out; negative: any number */

/* --- work --------------------------------------------------------------------------------------------------- */

static bool stream_overlap(struct fake_range a, struct fake_range b)
{
    return a.at < b.at + b.bytes && b.at < a.at + a.bytes;
}

static bool stream_uses(const struct fake_work *w, struct fake_range r)
{
    bool found = w->inputs && stream_overlap(w->out, r);
    for (int i = 0; i < w->inputs; i++)
        found |= stream_overlap(w->in[i], r);
    return found;
}

static bool stream_has_pending(const struct fake_stream *s, struct fake_range r)
{
    for (const struct fake_work *w = s->first; w; w = w->next)
        if (stream_uses(w, r))
            return true;
    return false;
}

bool fake_is_pending(struct fake_range r)
{
    for (const struct fake_stream *s = streams; s; s = s->next)
        if (stream_has_pending(s, r))
            return true;
    for (int i = 0; i < FAKE_GPUS; i++)
        if (stream_has_pending(&fake_gpus[i].by_default, r))
            return true;
    return false;
}

static void stream_force(struct fake_stream *s, uint64_t until);

static void stream_count(const void *from, int to, size_t bytes)
{
    __atomic_fetch_add(&fake_moved[from ? fake_place_of(from) : 0][to], bytes, __ATOMIC_RELAXED);
}

static void stream_move(const struct fake_stream *s, struct fake_work *w)
{
    if (w->what == COPY) {
        void *to = fake_data_of(w->out.at),
             *from = fake_data_of(w->in[0].at); /* they stay, for this work is pending */
        stream_count(w->in[0].at, fake_place_of(w->out.at), w->out.bytes);
        pthread_mutex_unlock(&fake_lock);
        memmove(to, from, w->out.bytes);
        pthread_mutex_lock(&fake_lock);
    } else if (w->what == SUM) {
        for (int i = 0; i < w->inputs; i++) {
            w->sums.in[i] = fake_data_of(w->in[i].at);
            stream_count(w->in[i].at, 1 + s->gpu, w->in[i].bytes);
        }
        w->sums.out = fake_data_of(w->out.at);
        w->kernel(w->sums);
        if (fake_place_of(w->out.at) != 1 + s->gpu)
            fake_moved[1 + s->gpu][fake_place_of(w->out.at)] += w->out.bytes;
    }
}

static void stream_carry_out(const struct fake_stream *s, struct fake_work *w)
{
    if (w->what == WAIT) {
        stream_force(w->other, w->until);
    } else if (w->what != CALL && !fake_fatal) {
        stream_move(s, w);
    } else if (!fake_fatal) {
        pthread_mutex_unlock(&fake_lock);
        w->function(w->argument);
        pthread_mutex_lock(&fake_lock);
    }
}

static bool stream_reads(const struct fake_work *w)
{
    return w->what == COPY && fake_place_of(w->in[0].at) && !fake_place_of(w->out.at);
}

static void stream_carry_out_next(struct fake_stream *s)
{
    struct fake_work *w = s->first;
    s->busy = true;
    reads_left -= reads_left > 0 && stream_reads(w);
    stream_carry_out(s, w);
    s->busy = false;
    s->first = w->next;
    if (!s->first)
        s->last = &s->first;
    s->done++;
    free(w);
    pthread_cond_broadcast(&fake_changed);
}

static bool stream_is_held(const struct fake_stream *s)
{
    return s->held || (copies_held && s->first->what == COPY && fake_place_of(s->first->out.at)) ||
           (kernels_held && s->first->what == SUM) || (!reads_left && stream_reads(s->first));
}

/* Carry out the first works of a stream, up to so many in all, and what they wait for. */
static void stream_force(struct fake_stream *s, uint64_t until)
{
    while (s->done < until)
        if (s->busy || (stream_is_held(s) && !fake_fatal))
            pthread_cond_wait(&fake_changed, &fake_lock);
        else
            stream_carry_out_next(s);
}

void fake_give(struct fake_stream *s, struct fake_work w)
{
    struct fake_work *own = malloc(sizeof w);
    bool in_place = false;
    if (!own)
        fake_die("no memory");
    for (int i = 0; i < w.inputs; i++)
        in_place |= stream_overlap(w.in[i], w.out);
    if (w.inputs && !(fake_set.silent && w.what == COPY) && !in_place && !fake_is_pending(w.out))
        memset(fake_data_of(w.out.at), FAKE_NOISE, w.out.bytes);
    *own = w;
    *s->last = own;
    s->last = &own->next;
    s->given++;
}

/* --- streams ------------------------------------------------------------------------------------------------ */

struct fake_stream *fake_stream_of(void *handle)
{
    if ((uintptr_t)handle == STREAM_PER_THREAD)
        fake_die("a stream is used that is another one in each thread");
    bool by_default = !handle || (uintptr_t)handle == STREAM_LEGACY;
    struct fake_stream *s = by_default ? &fake_gpu()->by_default : handle;
    if (s->gone)
        fake_die("a stream is used that has been destroyed");
    return s;
}

void fake_begin_stream(struct fake_stream *s, int gpu)
{
    *s = (struct fake_stream){.gpu = gpu};
    s->last = &s->first;
}

EXPORT int cuStreamCreate(void **out, unsigned flags)
{
    ENTER("cuStreamCreate", true);
    struct fake_stream *s = calloc(1, sizeof *s);
    if (!s)
        fake_die("no memory");
    fake_begin_stream(s, fake_gpu()->number);
    s->blocking = !(flags & NON_BLOCKING);
    s->next = streams;
    *out = streams = s;
    return fake_leave(OK);
}

EXPORT int cuStreamDestroy_v2(void *handle)
{
    ENTER("cuStreamDestroy", true);
    fake_stream_of(handle)->gone = true; /* its work goes on, and events may still name it */
    return fake_leave(OK);
}

EXPORT int cuStreamSynchronize(void *handle)
{
    ENTER("cuStreamSynchronize", true);
    struct fake_stream *s = fake_stream_of(handle);
    stream_force(s, s->given);
    return fake_leave(fake_fatal);
}

EXPORT int cuLaunchHostFunc(void *handle, void (*function)(void *), void *argument)
{
    ENTER("cuLaunchHostFunc", true);
    fake_give(fake_stream_of(handle),
              (struct fake_work){.what = CALL, .function = function, .argument = argument});
    return fake_leave(OK);
}

bool fake_any_captures(void)
{
    bool any = false;
    for (const struct fake_stream *s = streams; s; s = s->next)
        any |= s->capturing;
    return any;
}

/* Is a stream captured that waits for the default stream?  Then the graph would have that stream's work. */
static bool stream_default_is_captured(void)
{
    bool any = false;
    for (const struct fake_stream *s = streams; s; s = s->next)
        any |= s->capturing && s->blocking;
    return any;
}

EXPORT int cuStreamIsCapturing(void *handle, int *status)
{
    ENTER("cuStreamIsCapturing", true);
    struct fake_stream *s = fake_stream_of(handle);
    if (s == &fake_gpu()->by_default && stream_default_is_captured())
        return fake_leave(CAPTURED);
    *status = s->capturing;
    return fake_leave(OK);
}

EXPORT int cuStreamBeginCapture_v2(void *handle, int mode)
{
    ENTER("cuStreamBeginCapture", true);
    fake_stream_of(handle)->capturing = true;
    return fake_leave(OK);
}

EXPORT int cuStreamEndCapture(void *handle, void **graph)
{
    ENTER("cuStreamEndCapture", true);
    fake_stream_of(handle)->capturing = false;
    return fake_leave(OK);
}

EXPORT int cuMemcpyAsync(unsigned long long to, unsigned long long from, size_t bytes, void *handle)
{
    ENTER("cuMemcpyAsync", true);
    struct fake_stream *s = fake_stream_of(handle);
    struct fake_work w = {.what = COPY,
                          .in = {{(const uint8_t *)(uintptr_t)from, bytes}},
                          .out = {(const uint8_t *)(uintptr_t)to, bytes},
                          .inputs = 1};
    if (!fake_reaches(s->gpu, w.in[0]) || !fake_reaches(s->gpu, w.out))
        return fake_leave(INVALID_VALUE);
    int code = fake_place_of(w.out.at) ? fake_fault("copy-to-GPU") : OK;
    if (!fake_place_of(w.out.at))
        staged = w.out.at;
    if (!code)
        fake_give(s, w);
    return fake_leave(code);
}

/* --- events ------------------------------------------------------------------------------------------------- */

EXPORT int cuEventCreate(void **out, unsigned flags)
{
    ENTER("cuEventCreate", true);
    struct fake_event *e = calloc(1, sizeof *e);
    if (!e)
        fake_die("no memory");
    *e = (struct fake_event){.next = events, .gpu = fake_gpu()->number};
    *out = events = e;
    return fake_leave(OK);
}

EXPORT int cuEventDestroy_v2(void *handle)
{
    ENTER("cuEventDestroy", true);
    struct fake_event **at = &events;
    while (*at && *at != handle)
        at = &(*at)->next;
    if (!*at)
        fake_die("an event is destroyed that is none");
    *at = (*at)->next;
    free(handle);
    return fake_leave(OK);
}

EXPORT int cuEventRecord(void *handle, void *stream)
{
    ENTER("cuEventRecord", true);
    struct fake_event *e = handle;
    if (fake_stream_of(stream)->gpu != e->gpu)
        return fake_leave(INVALID_HANDLE);
    e->stream = fake_stream_of(stream);
    if (e->stream->capturing)
        fake_die("an event is recorded into a graph");
    e->until = e->stream->given;
    return fake_leave(OK);
}

EXPORT int cuStreamWaitEvent(void *stream, void *handle, unsigned flags)
{
    ENTER("cuStreamWaitEvent", true);
    struct fake_event *e = handle;
    if (e->stream)
        fake_give(fake_stream_of(stream),
                  (struct fake_work){.what = WAIT, .other = e->stream, .until = e->until});
    return fake_leave(OK);
}

EXPORT int cuEventQuery(void *handle)
{
    ENTER("cuEventQuery", true);
    struct fake_event *e = handle;
    return fake_leave(fake_fatal ? fake_fatal : e->stream && e->stream->done < e->until ? NOT_READY : OK);
}

EXPORT int cuEventSynchronize(void *handle)
{
    ENTER("cuEventSynchronize", true);
    struct fake_event *e = handle;
    if (e->stream)
        stream_force(e->stream, e->until);
    return fake_leave(fake_fatal);
}

/* --- for tests ---------------------------------------------------------------------------------------------- */

EXPORT void fake_cuda_hold(void *stream, int held)
{
    pthread_mutex_lock(&fake_lock);
    *(stream ? &((struct fake_stream *)stream)->held : &copies_held) = held;
    pthread_cond_broadcast(&fake_changed);
    pthread_mutex_unlock(&fake_lock);
}

EXPORT void fake_cuda_hold_kernels(int held)
{
    pthread_mutex_lock(&fake_lock);
    kernels_held = held;
    pthread_cond_broadcast(&fake_changed);
    pthread_mutex_unlock(&fake_lock);
}

EXPORT void fake_cuda_read(int copies)
{
    pthread_mutex_lock(&fake_lock);
    reads_left = copies;
    pthread_cond_broadcast(&fake_changed);
    pthread_mutex_unlock(&fake_lock);
}

EXPORT const void *fake_cuda_staged(void)
{
    pthread_mutex_lock(&fake_lock);
    const void *at = staged;
    pthread_mutex_unlock(&fake_lock);
    return at;
}

static void stream_forget(struct fake_stream *s)
{
    for (struct fake_work *w; (w = s->first);) {
        s->first = w->next;
        free(w);
    }
}

int fake_streams_left(void)
{
    int left = 0;
    for (struct fake_stream *s = streams; s; s = s->next)
        left += !s->gone;
    for (struct fake_event *e = events; e; e = e->next)
        left++;
    return left;
}

void fake_forget_streams(void)
{
    for (int i = 0; i < FAKE_GPUS; i++)
        stream_forget(&fake_gpus[i].by_default);
    for (struct fake_stream *s; (s = streams);) {
        streams = s->next;
        stream_forget(s);
        free(s);
    }
    for (struct fake_event *e; (e = events);) {
        events = e->next;
        free(e);
    }
    copies_held = kernels_held = false;
    reads_left = -1;
}
