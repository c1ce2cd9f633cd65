/* fake_cuda.c - stands in for libcuda.so.1, in an order that is as bad as CUDA allows.
 *
 * Streams: work is carried out when something waits for it, and no earlier: cuEventSynchronize or
 * cuStreamSynchronize.  Only what it depends on is carried out.  So a copy reads its source as late as
 * possible, and what comes from the wrong stream is missing.  A test can hold a stream, as a long kernel would.
 *
 * Memory: an address of a GPU cannot be read by the host.  It has noise when it is allocated, when a result is on its way to
 * it, and after it is freed.  It lies in a memfd, so that other processes map it.  Copies want registered memory of the host,
 * which CUDA only likes better.
 *
 * FAKE_CUDA is a list of words:
 *   gpus=N                 how many; CUDA_VISIBLE_DEVICES hides and orders them as in CUDA
 *   peers=A:B              these GPUs read each other's memory
 *   pinned=BYTES           how much of the host's memory can be registered
 *   unshared               memory that processes share cannot
 *   silent                 no noise where a copy is on its way to, which takes time
 *   fail=CALL:CODE[:N[:M]] M calls (1) of this name, or "copy-to-GPU", fail from the N-th on (1); -9: kills the process
 *   count=FILE             bytes moved, a uint64_t [FAKE_PLACES][FAKE_PLACES] of all processes (fake_cuda.h)
 *
 * What CUDA leaves undefined ends the process with a sentence.  `lock` guards everything; copies and functions that a stream
 * calls run without it, and meanwhile their stream is busy. */
#include "test/device/fake_cuda.h"

#include <fcntl.h>
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

#include "device/sums.h"

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
    ALREADY_MAPPED = 208,
    PEERS_UNSUPPORTED = 217,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURED = 906,
};

/* --- what there is ---------------------------------------------------------------------------------------- */

enum kind { HOST, OWN, MAPPED, MANAGED };

struct memory {
    struct memory *next;
    enum kind kind;
    int gpu;
    uint8_t *address, *data; /* the application's; ours */
    size_t bytes;
    int fd, serial; /* OWN */
    pid_t pid;      /* MAPPED: whose it is, with its serial */
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
    enum { COPY, SUM, WAIT, CALL } what;
    struct range in[TLY_FOLD_MAX], out; /* of the application's addresses */
    int inputs;
    void (*kernel)(struct tly_sums);
    struct tly_sums sums;
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
    bool peers[MOST_GPUS];
} gpus[MOST_GPUS];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER; /* a stream is busy or held no longer */
static struct memory *memories;
static struct stream *streams;
static struct event *events;
static int modules, fatal, serials, present, visible_count, visible[MOST_GPUS];
static bool started, unshared, silent, copies_held;
static size_t pinned, pinned_most, pinned_peak;
static struct {
    char call[40];
    int code, at, times, seen;
} failing;
static uint64_t (*moved)[FAKE_PLACES];
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
    failing.at = failing.times = 1;
    sscanf(what, "%39[^:]:%d:%d:%d", failing.call, &failing.code, &failing.at, &failing.times);
}

static void take(const char *word)
{
    int a = 0, b = 0;
    char path[256];
    if (sscanf(word, "peers=%d:%d", &a, &b) == 2 && a < MOST_GPUS && b < MOST_GPUS) {
        gpus[a].peers[b] = gpus[b].peers[a] = true;
    } else if (sscanf(word, "count=%255s", path) == 1) {
        int fd = open(path, O_RDWR | O_CLOEXEC);
        moved = fd < 0 ? MAP_FAILED
                       : mmap(NULL, FAKE_PLACES * sizeof *moved, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (moved == MAP_FAILED)
            die("cannot count in %s", path);
        close(fd);
    } else if (strncmp(word, "fail=", 5) == 0) {
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
    static uint64_t own[FAKE_PLACES][FAKE_PLACES];
    const char *list = getenv("FAKE_CUDA"), *order = getenv("CUDA_VISIBLE_DEVICES");
    char words[2048], *save = NULL;
    if (started)
        return;
    started = true;
    memset(gpus, 0, sizeof gpus);
    memset(own, 0, sizeof own);
    memset(&failing, 0, sizeof failing);
    moved = own;
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
    if (strcmp(failing.call, call) != 0 || ++failing.seen < failing.at ||
        failing.seen - failing.at >= failing.times)
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
    bool found = w->inputs && overlap(w->out, r);
    for (int i = 0; i < w->inputs; i++)
        found |= overlap(w->in[i], r);
    return found;
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
    *m = (struct memory){.next = memories, .kind = kind, .gpu = gpu, .bytes = bytes, .fd = -1};
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
        if (m->kind != MAPPED)
            memset(m->data, NOISE, m->bytes);
        munmap(m->data, m->bytes);
        if (m->address != m->data)
            munmap(m->address, m->bytes);
    }
    if (m->fd >= 0)
        close(m->fd);
    free(m);
}

/* The application's address, where nothing can be read. */
static void show(struct memory *m, int fd)
{
    m->data = mmap(NULL, m->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    m->address = m->kind == MANAGED
                     ? m->data
                     : mmap(NULL, m->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (m->data == MAP_FAILED || m->address == MAP_FAILED)
        die("cannot map %zu bytes", m->bytes);
}

static void name_of(char name[64], pid_t pid, int serial)
{
    snprintf(name, 64, "fake-cuda-%d-%d-", (int)pid, serial);
}

static struct memory *make(enum kind kind, size_t bytes)
{
    char name[64];
    struct memory *m = add(kind, current[depth - 1]->number, bytes);
    m->serial = ++serials;
    name_of(name, getpid(), m->serial);
    m->fd = memfd_create(name, MFD_CLOEXEC);
    if (m->fd < 0 || ftruncate(m->fd, (off_t)bytes))
        die("cannot have %zu bytes", bytes);
    show(m, m->fd);
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

static bool is_mapped(enum kind kind)
{
    return kind == MAPPED;
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

/* --- memory of other processes ------------------------------------------------------------------------------ */

union handle {
    unsigned char bytes[64];
    struct {
        pid_t pid;
        int serial, fd, gpu;
        size_t size;
    } of;
};

EXPORT int cuIpcGetMemHandle(union handle *out, unsigned long long at)
{
    ENTER("cuIpcGetMemHandle", true);
    struct memory *m = find((void *)(uintptr_t)at, 1);
    if (!m || m->kind != OWN)
        return leave(INVALID_VALUE);
    memset(out, 0, sizeof *out);
    out->of.pid = getpid();
    out->of.serial = m->serial;
    out->of.fd = m->fd;
    out->of.gpu = m->gpu;
    out->of.size = m->bytes;
    return leave(OK);
}

EXPORT int cuIpcOpenMemHandle_v2(unsigned long long *out, union handle h, unsigned flags)
{
    char path[64], link[96] = "", name[64];
    ENTER("cuIpcOpenMemHandle", true);
    struct gpu *g = current[depth - 1];
    if (h.of.pid == getpid())
        return leave(INVALID_CONTEXT);
    for (struct memory *m = memories; m; m = m->next)
        if (m->kind == MAPPED && m->pid == h.of.pid && m->serial == h.of.serial)
            return leave(ALREADY_MAPPED);
    if (h.of.gpu != g->number && (flags != 1 || !g->peers[h.of.gpu]))
        return leave(PEERS_UNSUPPORTED);
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)h.of.pid, h.of.fd);
    name_of(name, h.of.pid, h.of.serial);
    int fd =
        readlink(path, link, sizeof link - 1) > 0 && strstr(link, name) ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return leave(INVALID_HANDLE);
    struct memory *m = add(MAPPED, h.of.gpu, h.of.size);
    m->pid = h.of.pid;
    m->serial = h.of.serial;
    show(m, fd);
    close(fd);
    *out = (uintptr_t)m->address;
    return leave(OK);
}

EXPORT int cuIpcCloseMemHandle(unsigned long long at)
{
    ENTER("cuIpcCloseMemHandle", true);
    return leave(drop_at((void *)(uintptr_t)at, is_mapped, INVALID_VALUE));
}

/* --- streams ------------------------------------------------------------------------------------------------ */

static int place_of(const void *at)
{
    struct memory *m = find(at, 1);
    return !m || m->kind == HOST ? 0 : 1 + m->gpu;
}

static void force(struct stream *s, uint64_t until);

static void count(const void *from, int to, size_t bytes)
{
    __atomic_fetch_add(&moved[from ? place_of(from) : 0][to], bytes, __ATOMIC_RELAXED);
}

static void move(const struct stream *s, struct work *w)
{
    if (w->what == COPY) {
        void *to = data_of(w->out.at), *from = data_of(w->in[0].at); /* they stay, for this work is pending */
        count(w->in[0].at, place_of(w->out.at), w->out.bytes);
        pthread_mutex_unlock(&lock);
        memmove(to, from, w->out.bytes);
        pthread_mutex_lock(&lock);
    } else if (w->what == SUM) {
        for (int i = 0; i < w->inputs; i++) {
            w->sums.in[i] = data_of(w->in[i].at);
            count(w->in[i].at, 1 + s->gpu, w->in[i].bytes);
        }
        w->sums.out = data_of(w->out.at);
        w->kernel(w->sums);
        if (place_of(w->out.at) != 1 + s->gpu)
            moved[1 + s->gpu][place_of(w->out.at)] += w->out.bytes;
    }
}

static void carry_out(const struct stream *s, struct work *w)
{
    if (w->what == WAIT) {
        force(w->other, w->until);
    } else if (w->what != CALL && !fatal) {
        move(s, w);
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
    carry_out(s, w);
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
    bool in_place = false;
    if (!own)
        die("no memory");
    for (int i = 0; i < w.inputs; i++)
        in_place |= overlap(w.in[i], w.out);
    if (w.inputs && !(silent && w.what == COPY) && !in_place && !is_pending(w.out))
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
                     .in = {{(const uint8_t *)(uintptr_t)from, bytes}},
                     .out = {(const uint8_t *)(uintptr_t)to, bytes},
                     .inputs = 1};
    if (!reaches(s->gpu, w.in[0]) || !reaches(s->gpu, w.out))
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

/* --- kernels ------------------------------------------------------------------------------------------------ */

#define DECLARE(T) void tly_sums_##T(struct tly_sums);
TLY_SUMS_TYPES(DECLARE)

#define NAMED(T) {"tly_sums_" #T, tly_sums_##T},
static const struct kernel {
    const char *name;
    void (*run)(struct tly_sums);
} kernels[] = {TLY_SUMS_TYPES(NAMED)};
enum { KERNELS = sizeof kernels / sizeof *kernels };

EXPORT int cuModuleLoadData(void **out, const void *image)
{
    ENTER("cuModuleLoadData", true);
    const char *ptx = image;
    for (size_t i = 0; i < KERNELS; i++) {
        char entry[64];
        snprintf(entry, sizeof entry, ".visible .entry %s(", kernels[i].name);
        if (!strstr(ptx, entry))
            die("the PTX has no %s", kernels[i].name);
    }
    modules++;
    *out = &modules;
    return leave(OK);
}

EXPORT int cuModuleUnload(void *module)
{
    ENTER("cuModuleUnload", true);
    modules--;
    return leave(OK);
}

EXPORT int cuModuleGetFunction(const void **out, void *module, const char *name)
{
    ENTER("cuModuleGetFunction", true);
    for (size_t i = 0; i < KERNELS; i++)
        if (strcmp(name, kernels[i].name) == 0) {
            *out = &kernels[i];
            return leave(OK);
        }
    return leave(NOT_FOUND);
}

EXPORT int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                          unsigned bz, unsigned shared, void *handle, void **arguments, void **extra)
{
    ENTER("cuLaunchKernel", true);
    struct stream *s = stream_of(handle);
    struct tly_sums *sums = arguments[0];
    if (!gx || gy != 1 || gz != 1 || !bx || bx > 1024 || by != 1 || bz != 1 || shared || extra)
        return leave(INVALID_VALUE);
    struct work w = {.what = SUM,
                     .out = {sums->out, sums->count * tly_format_size(sums->fold.to)},
                     .inputs = sums->fold.n,
                     .kernel = ((const struct kernel *)function)->run,
                     .sums = *sums};
    for (int i = 0; i < w.inputs; i++) {
        w.in[i] = (struct range){sums->in[i], sums->count * tly_format_size(sums->fold.from)};
        if (!reaches(s->gpu, w.in[i]))
            fatal = ILLEGAL_ADDRESS;
    }
    if (!reaches(s->gpu, w.out))
        fatal = ILLEGAL_ADDRESS;
    if (!fatal)
        give(s, w);
    return leave(OK); /* the next call says it */
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

EXPORT int cuCtxGetCurrent(void **out)
{
    ENTER("cuCtxGetCurrent", false);
    *out = depth ? current[depth - 1] : NULL;
    return leave(OK);
}

EXPORT int cuCtxSetCurrent(void *context)
{
    ENTER("cuCtxSetCurrent", false);
    depth -= depth > 0;
    if (context)
        current[depth++] = context;
    return leave(OK);
}

EXPORT int cuCtxGetDevice(int *device)
{
    ENTER("cuCtxGetDevice", true);
    for (int i = 0; i < visible_count; i++)
        if (visible[i] == current[depth - 1]->number)
            *device = i;
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
    int left = modules + depth;
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
    modules = depth = 0;
    started = false;
}
