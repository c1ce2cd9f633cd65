/* fake_cuda.c - stands in for libcuda.so.1, in an order that is as bad as CUDA allows.
 *
 * Streams: work is carried out when something waits for it, and no earlier: cuEventSynchronize or
 * cuStreamSynchronize.  Only what it depends on is carried out.  So a copy reads its source as late as
 * possible, and what comes from the wrong stream is missing.  A test can hold a stream, as a long kernel would.
 *
 * Memory: an address of a GPU cannot be read by the host.  It has noise when it is allocated, and when a result is on its way to
 * it; it is gone after it is freed.  Copies want registered memory of the host, which CUDA only likes better.
 *
 * FAKE_CUDA is a list of words:
 *   gpus=N                 how many; CUDA_VISIBLE_DEVICES hides and orders them as in CUDA
 *   pinned=BYTES           how much of the host's memory can be registered
 *   unshared               memory that processes share cannot
 *   silent                 no noise where a copy is on its way to, which takes time
 *   fail=CALL:CODE[:N]     the N-th call of this name, or "copy-to-GPU", fails (1); -9: it kills the process
 *
 * What CUDA leaves undefined ends the process with a sentence.  `lock` guards everything; copies and functions that a stream
 * calls run without it, and meanwhile their stream is busy. */
#include "test/device/fake_cuda.h"

#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum { MOST_GPUS = FAKE_PLACES - 1, MOST_CALLS = 64, NOISE = 0xab };
enum { CAPTURE_RELAXED = 2 };
enum {
    KILLED = -9,
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURED = 906,
};

/* --- what there is ---------------------------------------------------------------------------------------- */

enum kind { HOST, OWN, MANAGED };

struct memory {
    struct memory *next;
    enum kind kind;
    int gpu;
    uint8_t *address, *data; /* the application's; ours */
    size_t bytes;
};

struct range {
    const uint8_t *at;
    size_t bytes;
};

struct stream {
    struct stream *next;
    int gpu;
    bool gone, capturing, held, busy;
    uint64_t given, done; /* works */
    struct work *first, **last;
};

struct work {
    struct work *next;
    enum { COPY, WAIT, CALL } what;
    struct range in, out; /* of the application's addresses */
    void (*function)(void *);
    void *argument;
    struct stream *other; /* WAIT for so many works of it */
    uint64_t until;
};

struct event {
    struct event *next;
    struct stream *stream; /* NULL: not recorded */
    uint64_t until;
    int gpu;
};

static struct gpu {
    int retained, number;
    struct stream by_default;
} gpus[MOST_GPUS];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER; /* a stream is busy or held no longer */
static struct memory *memories;
static struct stream *streams;
static struct event *events;
static int fatal, present, visible_count, visible[MOST_GPUS];
static bool started, unshared, silent, copies_held;
static size_t pinned, pinned_most, pinned_peak;
static struct {
    char call[40];
    int code, at, seen;
} failing;
static uint64_t moved[FAKE_PLACES][FAKE_PLACES];
static const void *staged;
static _Thread_local struct gpu *current[16];
static _Thread_local int depth, capture_mode;

static void die(const char *format, ...)
{
    va_list list;
    va_start(list, format);
    fprintf(stderr, "fake_cuda: ");
    vfprintf(stderr, format, list);
    fprintf(stderr, "\n");
    abort();
}

/* --- the settings ----------------------------------------------------------------------------------------- */

static void let_fail(const char *what)
{
    memset(&failing, 0, sizeof failing);
    failing.at = 1;
    sscanf(what, "%39[^:]:%d:%d", failing.call, &failing.code, &failing.at);
}

static void take(const char *word)
{
    if (strncmp(word, "fail=", 5) == 0) {
        let_fail(word + 5);
    } else if (strcmp(word, "unshared") == 0) {
        unshared = true;
    } else if (strcmp(word, "silent") == 0) {
        silent = true;
    } else if (sscanf(word, "gpus=%d", &present) != 1 && sscanf(word, "pinned=%zu", &pinned_most) != 1) {
        die("what is %s?", word);
    }
}

static void start(void)
{
    const char *list = getenv("FAKE_CUDA"), *order = getenv("CUDA_VISIBLE_DEVICES");
    char words[2048], *save = NULL;
    if (started)
        return;
    started = true;
    memset(gpus, 0, sizeof gpus);
    memset(moved, 0, sizeof moved);
    memset(&failing, 0, sizeof failing);
    fatal = present = 0;
    unshared = copies_held = silent = false;
    pinned_most = SIZE_MAX;
    snprintf(words, sizeof words, "%s", list ? list : "");
    for (char *w = strtok_r(words, " ", &save); w; w = strtok_r(NULL, " ", &save))
        take(w);
    for (int i = 0; i < MOST_GPUS; i++) {
        gpus[i].number = gpus[i].by_default.gpu = i;
        gpus[i].by_default.last = &gpus[i].by_default.first;
    }
    visible_count = 0;
    if (!order)
        for (; visible_count < present; visible_count++)
            visible[visible_count] = visible_count;
    for (char *end; order && *order; order = *end ? end + 1 : end)
        visible[visible_count++] = (int)strtol(order, &end, 10);
}

/* What a call of this name returns this time, beside what it does. */
static int fault(const char *call)
{
    if (strcmp(failing.call, call) != 0 || ++failing.seen != failing.at)
        return OK;
    if (failing.code == KILLED)
        kill(getpid(), SIGKILL);
    if (failing.code == ILLEGAL_ADDRESS || failing.code == 719)
        fatal = failing.code;
    return failing.code;
}

/* May this thread not make the call, because a stream is being captured? */
static bool is_unsafe(const char *call)
{
    static const char *const calls[] = {"cuMemAlloc",          "cuMemFree",          "cuMemHostRegister",
                                        "cuMemHostUnregister", "cuEventSynchronize", "cuEventQuery",
                                        "cuStreamSynchronize"};
    bool listed = false, any = false;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        listed |= strcmp(calls[i], call) == 0;
    for (const struct stream *s = streams; s; s = s->next)
        any |= s->capturing;
    return listed && any && capture_mode != CAPTURE_RELAXED;
}

/* Every call begins with this.  OK: the lock is held, until leave(). */
static int enter(const char *call, bool in_context)
{
    pthread_mutex_lock(&lock);
    int code = !started ? 3 : fatal ? fatal : in_context && !depth ? INVALID_CONTEXT : OK;
    if (!code)
        code = fault(call);
    if (!code && is_unsafe(call))
        code = CAPTURE_UNSUPPORTED;
    if (code)
        pthread_mutex_unlock(&lock);
    return code;
}

static int leave(int code)
{
    pthread_mutex_unlock(&lock);
    return code;
}

#define ENTER(call, in_context) \
    do { \
        int code = enter(call, in_context); \
        if (code) \
            return code; \
    } while (0)

/* --- memory ----------------------------------------------------------------------------------------------- */

static struct memory *find(const void *at, size_t bytes)
{
    const uint8_t *begin = at;
    for (struct memory *m = memories; m; m = m->next)
        if (begin >= m->address && begin < m->address + m->bytes &&
            bytes <= m->bytes - (size_t)(begin - m->address))
            return m;
    return NULL;
}

static uint8_t *data_of(const void *at)
{
    struct memory *m = find(at, 1);
    return m ? m->data + ((const uint8_t *)at - m->address) : NULL;
}

static bool overlap(struct range a, struct range b)
{
    return a.at < b.at + b.bytes && b.at < a.at + a.bytes;
}

static bool uses(const struct work *w, struct range r)
{
    return w->what == COPY && (overlap(w->in, r) || overlap(w->out, r));
}

static bool pending_in(const struct stream *s, struct range r)
{
    for (const struct work *w = s->first; w; w = w->next)
        if (uses(w, r))
            return true;
    return false;
}

/* Does work that has not been carried out read or write there? */
static bool is_pending(struct range r)
{
    for (const struct stream *s = streams; s; s = s->next)
        if (pending_in(s, r))
            return true;
    for (int i = 0; i < MOST_GPUS; i++)
        if (pending_in(&gpus[i].by_default, r))
            return true;
    return false;
}

static struct memory *add(enum kind kind, int gpu, size_t bytes)
{
    struct memory *m = calloc(1, sizeof *m);
    if (!m)
        die("no memory");
    *m = (struct memory){.next = memories, .kind = kind, .gpu = gpu, .bytes = bytes};
    return memories = m;
}

static void drop(struct memory *m)
{
    struct memory **at = &memories;
    while (*at != m)
        at = &(*at)->next;
    *at = m->next;
    if (m->kind == HOST) {
        pinned -= m->bytes;
    } else {
        munmap(m->data, m->bytes);
        if (m->address != m->data)
            munmap(m->address, m->bytes);
    }
    free(m);
}

/* The application's address is where nothing can be read. */
static struct memory *make(enum kind kind, size_t bytes)
{
    struct memory *m = add(kind, current[depth - 1]->number, bytes);
    m->data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    m->address = kind == MANAGED
                     ? m->data
                     : mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (m->data == MAP_FAILED || m->address == MAP_FAILED)
        die("cannot have %zu bytes", bytes);
    memset(m->data, NOISE, bytes);
    return m;
}

EXPORT int cuMemAlloc_v2(unsigned long long *out, size_t bytes)
{
    ENTER("cuMemAlloc", true);
    if (!bytes)
        return leave(INVALID_VALUE);
    *out = (uintptr_t)make(OWN, bytes)->address;
    return leave(OK);
}

/* Memory of two pieces that are mapped side by side, as PyTorch's expandable segments are. */
EXPORT int fake_cuda_expand(unsigned long long *out, size_t bytes)
{
    ENTER("cuMemMap", true);
    struct memory *first = make(OWN, bytes), *second = add(OWN, first->gpu, bytes / 2);
    first->bytes = bytes / 2;
    second->address = first->address + first->bytes;
    second->data = first->data + first->bytes;
    *out = (uintptr_t)first->address;
    return leave(OK);
}

EXPORT int cuMemAllocManaged(unsigned long long *out, size_t bytes, unsigned flags)
{
    ENTER("cuMemAllocManaged", true);
    *out = (uintptr_t)make(MANAGED, bytes)->address;
    return leave(OK);
}

static int drop_at(const void *at, bool (*of)(enum kind), int error)
{
    struct memory *m = find(at, 1);
    if (!m || m->address != at || !of(m->kind))
        return error;
    if (is_pending((struct range){m->address, m->bytes}))
        die("memory at %p is given back while work uses it", at);
    drop(m);
    return OK;
}

static bool is_own(enum kind kind)
{
    return kind == OWN || kind == MANAGED;
}

static bool is_host(enum kind kind)
{
    return kind == HOST;
}

EXPORT int cuMemFree_v2(unsigned long long at)
{
    ENTER("cuMemFree", true);
    return leave(drop_at((void *)(uintptr_t)at, is_own, INVALID_VALUE));
}

/* As the kernel lists it. */
EXPORT int fake_cuda_is_shared(const void *at)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[512], kind = 0;
    while (maps && !kind && fgets(line, sizeof line, maps)) {
        uintptr_t from, to;
        if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %*3c%c", &from, &to, &kind) != 3 ||
            (uintptr_t)at < from || (uintptr_t)at >= to)
            kind = 0;
    }
    if (maps)
        fclose(maps);
    return kind == 's';
}

EXPORT int cuMemHostRegister_v2(void *at, size_t bytes, unsigned flags)
{
    ENTER("cuMemHostRegister", true);
    if (!bytes || (uintptr_t)at % 4096 || bytes % 4096)
        return leave(INVALID_VALUE);
    if (find(at, 1) || find((uint8_t *)at + bytes - 1, 1))
        return leave(ALREADY_REGISTERED);
    if (bytes > pinned_most - pinned)
        return leave(OUT_OF_MEMORY);
    if (unshared && fake_cuda_is_shared(at))
        return leave(NOT_SUPPORTED);
    struct memory *m = add(HOST, -1, bytes);
    m->address = m->data = at;
    pinned += bytes;
    if (pinned > pinned_peak)
        pinned_peak = pinned;
    return leave(OK);
}

EXPORT int cuMemHostUnregister(void *at)
{
    ENTER("cuMemHostUnregister", true);
    return leave(drop_at(at, is_host, NOT_REGISTERED));
}

EXPORT int cuPointerGetAttributes(unsigned count, const int *attributes, void **values, unsigned long long at)
{
    ENTER("cuPointerGetAttributes", false);
    struct memory *m = find((void *)(uintptr_t)at, 1);
    for (unsigned i = 0; i < count; i++) {
        int ordinal = -2;
        for (int v = 0; m && v < visible_count; v++)
            if (visible[v] == m->gpu)
                ordinal = v;
        switch (attributes[i]) {
        case 2:
            *(unsigned *)values[i] = !m ? 0 : m->kind == HOST ? 1 : 2;
            break;
        case 8:
            *(unsigned *)values[i] = m && m->kind == MANAGED;
            break;
        case 9:
            *(int *)values[i] = ordinal;
            break;
        default:
            return leave(INVALID_VALUE);
        }
    }
    return leave(OK);
}

/* --- streams ------------------------------------------------------------------------------------------------ */

static int place_of(const void *at)
{
    struct memory *m = find(at, 1);
    return !m || m->kind == HOST ? 0 : 1 + m->gpu;
}

static void force(struct stream *s, uint64_t until);

/* Meanwhile the memory stays, for this work is pending. */
static void copy(const struct work *w)
{
    void *to = data_of(w->out.at), *from = data_of(w->in.at);
    moved[place_of(w->in.at)][place_of(w->out.at)] += w->out.bytes;
    pthread_mutex_unlock(&lock);
    memmove(to, from, w->out.bytes);
    pthread_mutex_lock(&lock);
}

static void carry_out(const struct work *w)
{
    if (w->what == WAIT) {
        force(w->other, w->until);
    } else if (w->what == COPY && !fatal) {
        copy(w);
    } else if (!fatal) {
        pthread_mutex_unlock(&lock);
        w->function(w->argument);
        pthread_mutex_lock(&lock);
    }
}

static void carry_out_next(struct stream *s)
{
    struct work *w = s->first;
    s->busy = true;
    carry_out(w);
    s->busy = false;
    s->first = w->next;
    if (!s->first)
        s->last = &s->first;
    s->done++;
    free(w);
    pthread_cond_broadcast(&changed);
}

static bool is_held(const struct stream *s)
{
    return s->held || (copies_held && s->first->what == COPY && place_of(s->first->out.at));
}

/* Carry out the first works of a stream, up to so many in all, and what they wait for. */
static void force(struct stream *s, uint64_t until)
{
    while (s->done < until)
        if (s->busy || (is_held(s) && !fatal))
            pthread_cond_wait(&changed, &lock);
        else
            carry_out_next(s);
}

static struct stream *stream_of(void *handle)
{
    return handle ? handle : &current[depth - 1]->by_default;
}

static void give(struct stream *s, struct work w)
{
    struct work *own = malloc(sizeof w);
    if (!own)
        die("no memory");
    if (w.what == COPY && !silent && !overlap(w.in, w.out) && !is_pending(w.out))
        memset(data_of(w.out.at), NOISE, w.out.bytes);
    *own = w;
    *s->last = own;
    s->last = &own->next;
    s->given++;
}

/* Can a GPU reach this memory?  Pieces of expandable memory lie side by side. */
static bool reaches(int gpu, struct range r)
{
    struct memory *m = find(r.at, 1);
    while (m && m->kind == OWN && m->gpu == gpu && r.at + r.bytes > m->address + m->bytes) {
        r.bytes -= (size_t)(m->address + m->bytes - r.at);
        r.at = m->address + m->bytes;
        m = find(r.at, 1);
    }
    return m && find(r.at, r.bytes) && (m->kind != OWN || m->gpu == gpu);
}

EXPORT int cuStreamCreate(void **out, unsigned flags)
{
    ENTER("cuStreamCreate", true);
    struct stream *s = calloc(1, sizeof *s);
    if (!s)
        die("no memory");
    *s = (struct stream){.next = streams, .gpu = current[depth - 1]->number};
    s->last = &s->first;
    *out = streams = s;
    return leave(OK);
}

EXPORT int cuStreamDestroy_v2(void *handle)
{
    ENTER("cuStreamDestroy", true);
    struct stream *s = handle;
    force(s, s->given);
    s->gone = true; /* events may still name it */
    return leave(OK);
}

EXPORT int cuStreamSynchronize(void *handle)
{
    ENTER("cuStreamSynchronize", true);
    struct stream *s = stream_of(handle);
    force(s, s->given);
    return leave(fatal);
}

EXPORT int cuLaunchHostFunc(void *handle, void (*function)(void *), void *argument)
{
    ENTER("cuLaunchHostFunc", true);
    give(stream_of(handle), (struct work){.what = CALL, .function = function, .argument = argument});
    return leave(OK);
}

EXPORT int cuStreamIsCapturing(void *handle, int *status)
{
    ENTER("cuStreamIsCapturing", true);
    bool any = false;
    for (struct stream *s = streams; s; s = s->next)
        any |= s->capturing;
    if (!handle && any)
        return leave(CAPTURED);
    *status = stream_of(handle)->capturing;
    return leave(OK);
}

EXPORT int cuThreadExchangeStreamCaptureMode(int *mode)
{
    ENTER("cuThreadExchangeStreamCaptureMode", false);
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return leave(OK);
}

EXPORT int cuStreamBeginCapture_v2(void *handle, int mode)
{
    ENTER("cuStreamBeginCapture", true);
    stream_of(handle)->capturing = true;
    return leave(OK);
}

EXPORT int cuStreamEndCapture(void *handle, void **graph)
{
    ENTER("cuStreamEndCapture", true);
    stream_of(handle)->capturing = false;
    return leave(OK);
}

EXPORT int cuMemcpyAsync(unsigned long long to, unsigned long long from, size_t bytes, void *handle)
{
    ENTER("cuMemcpyAsync", true);
    struct stream *s = stream_of(handle);
    struct work w = {.what = COPY,
                     .in = {(const uint8_t *)(uintptr_t)from, bytes},
                     .out = {(const uint8_t *)(uintptr_t)to, bytes}};
    if (!reaches(s->gpu, w.in) || !reaches(s->gpu, w.out))
        return leave(INVALID_VALUE);
    int code = place_of(w.out.at) ? fault("copy-to-GPU") : OK;
    if (!place_of(w.out.at))
        staged = w.out.at;
    if (!code)
        give(s, w);
    return leave(code);
}

/* --- events ------------------------------------------------------------------------------------------------- */

EXPORT int cuEventCreate(void **out, unsigned flags)
{
    ENTER("cuEventCreate", true);
    struct event *e = calloc(1, sizeof *e);
    if (!e)
        die("no memory");
    *e = (struct event){.next = events, .gpu = current[depth - 1]->number};
    *out = events = e;
    return leave(OK);
}

EXPORT int cuEventDestroy_v2(void *handle)
{
    ENTER("cuEventDestroy", true);
    struct event **at = &events;
    while (*at && *at != handle)
        at = &(*at)->next;
    if (!*at)
        die("an event is destroyed that is none");
    *at = (*at)->next;
    free(handle);
    return leave(OK);
}

EXPORT int cuEventRecord(void *handle, void *stream)
{
    ENTER("cuEventRecord", true);
    struct event *e = handle;
    if (stream_of(stream)->gpu != e->gpu)
        return leave(INVALID_HANDLE);
    e->stream = stream_of(stream);
    if (e->stream->capturing)
        die("an event is recorded into a graph");
    e->until = e->stream->given;
    return leave(OK);
}

EXPORT int cuStreamWaitEvent(void *stream, void *handle, unsigned flags)
{
    ENTER("cuStreamWaitEvent", true);
    struct event *e = handle;
    if (e->stream)
        give(stream_of(stream), (struct work){.what = WAIT, .other = e->stream, .until = e->until});
    return leave(OK);
}

EXPORT int cuEventQuery(void *handle)
{
    ENTER("cuEventQuery", true);
    struct event *e = handle;
    return leave(fatal ? fatal : e->stream && e->stream->done < e->until ? NOT_READY : OK);
}

EXPORT int cuEventSynchronize(void *handle)
{
    ENTER("cuEventSynchronize", true);
    struct event *e = handle;
    if (e->stream)
        force(e->stream, e->until);
    return leave(fatal);
}

/* --- devices and contexts ----------------------------------------------------------------------------------- */

EXPORT int cuInit(unsigned flags)
{
    pthread_mutex_lock(&lock);
    start();
    pthread_mutex_unlock(&lock);
    ENTER("cuInit", false);
    return leave(present ? OK : NO_DEVICE);
}

EXPORT int cuGetErrorName(int code, const char **out)
{
    *out = code == OUT_OF_MEMORY     ? "CUDA_ERROR_OUT_OF_MEMORY"
           : code == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                                     : NULL;
    return *out ? OK : INVALID_VALUE;
}

EXPORT int cuDeviceGet(int *out, int ordinal)
{
    ENTER("cuDeviceGet", false);
    if (ordinal < 0 || ordinal >= visible_count)
        return leave(INVALID_DEVICE);
    *out = ordinal;
    return leave(OK);
}

EXPORT int cuDevicePrimaryCtxRetain(void **out, int device)
{
    ENTER("cuDevicePrimaryCtxRetain", false);
    struct gpu *g = &gpus[visible[device]];
    g->retained++;
    *out = g;
    return leave(OK);
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int device)
{
    pthread_mutex_lock(&lock);
    if (--gpus[visible[device]].retained < 0)
        die("a context is released that nobody has");
    return leave(OK);
}

EXPORT int cuCtxPushCurrent_v2(void *context)
{
    ENTER("cuCtxPushCurrent", false);
    struct gpu *g = context;
    if (!g->retained || depth == sizeof current / sizeof *current)
        die("a context is used that nobody has, or too many are");
    current[depth++] = g;
    return leave(OK);
}

EXPORT int cuCtxPopCurrent_v2(void **out)
{
    pthread_mutex_lock(&lock);
    if (!depth)
        die("no context is current");
    *out = current[--depth];
    return leave(OK);
}

/* --- for tests ---------------------------------------------------------------------------------------------- */

EXPORT void *fake_cuda_data(const void *at)
{
    pthread_mutex_lock(&lock);
    void *data = data_of(at);
    pthread_mutex_unlock(&lock);
    return data;
}

EXPORT void fake_cuda_lose(int code)
{
    pthread_mutex_lock(&lock);
    fatal = code;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

EXPORT void fake_cuda_hold(void *stream, int held)
{
    pthread_mutex_lock(&lock);
    *(stream ? &((struct stream *)stream)->held : &copies_held) = held;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

EXPORT void fake_cuda_fail(const char *what)
{
    pthread_mutex_lock(&lock);
    let_fail(what);
    pthread_mutex_unlock(&lock);
}

EXPORT uint64_t fake_cuda_pinned(void)
{
    pthread_mutex_lock(&lock);
    uint64_t most = pinned_peak;
    pinned_peak = pinned;
    pthread_mutex_unlock(&lock);
    return most;
}

EXPORT uint64_t fake_cuda_moved(int from, int to)
{
    return moved[from][to];
}

EXPORT int fake_cuda_calls(void)
{
    return failing.seen;
}

EXPORT const void *fake_cuda_staged(void)
{
    pthread_mutex_lock(&lock);
    const void *at = staged;
    pthread_mutex_unlock(&lock);
    return at;
}

EXPORT int fake_cuda_left(void)
{
    int left = depth;
    for (struct memory *m = memories; m; m = m->next)
        left++;
    for (struct stream *s = streams; s; s = s->next)
        left += !s->gone;
    for (struct event *e = events; e; e = e->next)
        left++;
    for (int i = 0; i < MOST_GPUS; i++)
        left += gpus[i].retained;
    return left;
}

static void forget_works(struct stream *s)
{
    for (struct work *w; (w = s->first);) {
        s->first = w->next;
        free(w);
    }
}

EXPORT void fake_cuda_reset(void)
{
    while (memories)
        drop(memories);
    for (int i = 0; i < MOST_GPUS; i++)
        forget_works(&gpus[i].by_default);
    for (struct stream *s; (s = streams);) {
        streams = s->next;
        forget_works(s);
        free(s);
    }
    for (struct event *e; (e = events);) {
        events = e->next;
        free(e);
    }
    depth = 0;
    started = false;
}
