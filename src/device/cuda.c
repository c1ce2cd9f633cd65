/* cuda.c - device.h by CUDA's driver API.
 *
 * CALLS lists the driver's functions that are called, with the little of cuda.h that they need; NVIDIA keeps both.  The driver
 * is opened once in a process and stays. */
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "device/device.h"
#include "device/sums.h"

_Static_assert((int)TLY_DEVICE_INPUTS == TLY_FOLD_MAX, "a kernel is one fold");

/* --- the driver ------------------------------------------------------------------------------------------ */

typedef void *cuda_object;               /* a context, stream, event, module or function */
typedef unsigned long long cuda_address; /* CUdeviceptr */

/* Of cuda.h. */
enum {
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NO_DEVICE = 100,
    PEERS_UNSUPPORTED = 217,
    INVALID_HANDLE = 400,
    NOT_SUPPORTED = 801,
    CAPTURE_FIRST = 900,
    CAPTURE_LAST = 908,
    CAPTURE_RELAXED = 2,
    STREAM_NON_BLOCKING = 1,
    STREAM_PER_THREAD = 2, /* a handle */
    EVENT_BLOCKING = 1,
    EVENT_NO_TIMING = 2,
    REGISTER_PORTABLE = 1,
    REGISTER_MAPPED = 2,
    IPC_ENABLE_PEERS = 1,
};
enum { POINTER_TYPE = 2, POINTER_MANAGED = 8, POINTER_DEVICE = 9, TYPE_DEVICE = 2 };

/* F(name, the symbol of the version that is meant, arguments) */
#define CALLS(F) \
    F(cuInit, cuInit, (unsigned)) \
    F(cuGetErrorName, cuGetErrorName, (int, const char **)) \
    F(cuPointerGetAttributes, cuPointerGetAttributes, (unsigned, int *, void **, cuda_address)) \
    F(cuDeviceGet, cuDeviceGet, (int *, int)) \
    F(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, (cuda_object *, int)) \
    F(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, (int)) \
    F(cuCtxPushCurrent, cuCtxPushCurrent_v2, (cuda_object)) \
    F(cuCtxPopCurrent, cuCtxPopCurrent_v2, (cuda_object *)) \
    F(cuCtxGetDevice, cuCtxGetDevice, (int *)) \
    F(cuDeviceGetPCIBusId, cuDeviceGetPCIBusId, (char *, int, int)) \
    F(cuModuleLoadData, cuModuleLoadData, (cuda_object *, const void *)) \
    F(cuModuleUnload, cuModuleUnload, (cuda_object)) \
    F(cuModuleGetFunction, cuModuleGetFunction, (cuda_object *, cuda_object, const char *)) \
    F(cuMemAlloc, cuMemAlloc_v2, (cuda_address *, size_t)) \
    F(cuMemFree, cuMemFree_v2, (cuda_address)) \
    F(cuMemHostRegister, cuMemHostRegister_v2, (void *, size_t, unsigned)) \
    F(cuMemHostUnregister, cuMemHostUnregister, (void *)) \
    F(cuMemHostGetDevicePointer, cuMemHostGetDevicePointer_v2, (cuda_address *, void *, unsigned)) \
    F(cuIpcGetMemHandle, cuIpcGetMemHandle, (struct tly_device_ticket *, cuda_address)) \
    F(cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2, (cuda_address *, struct tly_device_ticket, unsigned)) \
    F(cuIpcCloseMemHandle, cuIpcCloseMemHandle, (cuda_address)) \
    F(cuStreamCreate, cuStreamCreate, (cuda_object *, unsigned)) \
    F(cuStreamDestroy, cuStreamDestroy_v2, (cuda_object)) \
    F(cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, (int *)) \
    F(cuStreamIsCapturing, cuStreamIsCapturing, (cuda_object, int *)) \
    F(cuStreamWaitEvent, cuStreamWaitEvent, (cuda_object, cuda_object, unsigned)) \
    F(cuMemcpyAsync, cuMemcpyAsync, (cuda_address, cuda_address, size_t, cuda_object)) \
    F(cuLaunchKernel, cuLaunchKernel, \
      (cuda_object, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, cuda_object, \
       void **, void **)) \
    F(cuEventCreate, cuEventCreate, (cuda_object *, unsigned)) \
    F(cuEventDestroy, cuEventDestroy_v2, (cuda_object)) \
    F(cuEventRecord, cuEventRecord, (cuda_object, cuda_object)) \
    F(cuEventSynchronize, cuEventSynchronize, (cuda_object))

#define CALL_FIELD(name, symbol, arguments) int(*name) arguments;
#define CALL_ROW(name, symbol, arguments) {#symbol, offsetof(struct cuda_driver, name)},

static struct cuda_driver {
    CALLS(CALL_FIELD)
} driver;

static const struct {
    const char *symbol;
    size_t at;
} calls[] = {CALLS(CALL_ROW)};

static const char *driver_missing; /* why there is no driver, or NULL */

static void cuda_load(void)
{
    static char why[256];
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(why, sizeof why, "%s", dlerror());
        driver_missing = why;
        return;
    }
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        void *found = dlsym(library, calls[i].symbol);
        memcpy((char *)&driver + calls[i].at, &found, sizeof found);
        if (!found) {
            snprintf(why, sizeof why, "libcuda.so.1 has no %s: install a newer driver", calls[i].symbol);
            driver_missing = why;
            return;
        }
    }
}

/* --- devices ------------------------------------------------------------------------------------------- */

struct tly_mark {
    cuda_object event;
    struct tly_mark *next; /* of those that are free */
};

struct tly_device {
    struct tly_device *next; /* of those that are open; devices_lock, as the next */
    int references;
    int number;
    int device; /* CUdevice */
    cuda_object context, lane[TLY_LANES];
    pthread_mutex_t lock; /* guards the rest, but for reads of `lost` */
    struct tly_mark *free_marks;
    cuda_object module, sums[TLY_DTYPE_COUNT]; /* kernels by enum tly_format; loaded by the first sum */
    char why[160];                             /* the first failure after which nothing works any more */
    atomic_bool lost;                          /* set (release) after that */
};

/* Does nothing in this process work on the GPU after this failure? */
static bool cuda_is_fatal(int code)
{
    switch (code) {
    case 4:   /* the driver is shutting down */
    case 214: /* uncorrectable errors of memory, NVLink */
    case 220:
    case 226:
    case 700: /* illegal address */
    case 702: /* time-out of a kernel */
    case 709: /* context destroyed */
    case 710: /* assertion of a kernel */
    case 810: /* MPS has ended this client */
    case 911: /* failure of a device that is not CUDA's */
        return true;
    default: /* what a kernel must not do, up to "launch failed" */
        return (code >= 714 && code <= 719) || code == 721;
    }
}

static int cuda_errno(int code)
{
    if (cuda_is_fatal(code))
        return ENODEV;
    switch (code) {
    case OUT_OF_MEMORY:
        return ENOMEM;
    case NO_DEVICE:
    case PEERS_UNSUPPORTED:
    case NOT_SUPPORTED:
        return ENOTSUP;
    case INVALID_VALUE:
    case INVALID_HANDLE:
        return EINVAL;
    default:
        return code >= CAPTURE_FIRST && code <= CAPTURE_LAST ? EINVAL : EIO;
    }
}

static pthread_mutex_t devices_lock = PTHREAD_MUTEX_INITIALIZER;
static struct tly_device *devices;

/* The number of the only GPU that is open; -1: there are several, or none. */
static int cuda_only(void)
{
    pthread_mutex_lock(&devices_lock);
    int number = devices && !devices->next ? devices->number : -1;
    pthread_mutex_unlock(&devices_lock);
    return number;
}

/* From now on all calls fail. */
static int cuda_lose(struct tly_device *d, const char *why)
{
    pthread_mutex_lock(&d->lock);
    if (!d->lost) {
        snprintf(d->why, sizeof d->why, "%s", why);
        atomic_store_explicit(&d->lost, true, memory_order_release);
    }
    pthread_mutex_unlock(&d->lock);
    return -ENODEV;
}

/* What a call has returned.  d: NULL in calls that belong to no GPU.  They fail, too, once the GPU in use has failed for good. */
static int cuda_check(struct tly_device *d, const char *call, int code)
{
    const char *name = NULL;
    char gpu[24] = "CUDA", why[sizeof d->why];
    if (!code)
        return 0;
    if (driver.cuGetErrorName(code, &name) || !name)
        name = "unknown error";
    bool fatal = cuda_is_fatal(code);
    int number = d ? d->number : fatal ? cuda_only() : -1;
    if (number >= 0)
        snprintf(gpu, sizeof gpu, "GPU %d", number);
    snprintf(why, sizeof why, "%s: %s failed: %s (%d)%s", gpu, call, name, code,
             fatal ? "; this process cannot use the GPU any more" : "");
    if (fatal && d) {
        cuda_lose(d, why);
        return tly_fail(ENODEV, "%s", d->why); /* or what was wrong before */
    }
    return tly_fail(cuda_errno(code), "%s", why);
}
#define CALL(d, name, ...) cuda_check(d, #name, driver.name(__VA_ARGS__))

/* *mode: for cuda_leave().  While a thread captures a stream into a graph, others may not wait or pin, unless they say that this
 * is no part of it. */
static int cuda_enter(struct tly_device *d, int *mode)
{
    *mode = CAPTURE_RELAXED;
    int err = CALL(d, cuThreadExchangeStreamCaptureMode, mode);
    if (!err && (err = CALL(d, cuCtxPushCurrent, d->context)) != 0)
        driver.cuThreadExchangeStreamCaptureMode(mode);
    return err;
}

/* Returns err. */
static int cuda_leave(int mode, int err)
{
    cuda_object top;
    driver.cuCtxPopCurrent(&top);
    driver.cuThreadExchangeStreamCaptureMode(&mode);
    return err;
}

/* 0, or what has been the matter since the device was lost. */
static int cuda_check_lost(struct tly_device *d)
{
    return atomic_load_explicit(&d->lost, memory_order_acquire) ? tly_fail(ENODEV, "%s", d->why) : 0;
}

/* The result of `work`, done in the device's context. */
#define WITHIN_EVEN_LOST(d, work) \
    ({ \
        int mode, within = cuda_enter(d, &mode); \
        within ? within : cuda_leave(mode, work); \
    })
#define WITHIN(d, work) \
    ({ \
        int lost = cuda_check_lost(d); \
        lost ? lost : WITHIN_EVEN_LOST(d, work); \
    })

static int cuda_start(struct tly_device *d)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, cuda_load);
    if (driver_missing)
        return tly_fail(ENOTSUP, "there is no NVIDIA driver that Tally can use: %s", driver_missing);
    return CALL(d, cuInit, 0);
}

static cuda_address cuda_address_of(const void *memory)
{
    return (cuda_address)(uintptr_t)memory;
}

/* One byte of memory. */
static int cuda_find(const void *at, int *number)
{
    unsigned type = 0, managed = 0;
    int on = -1, attributes[] = {POINTER_TYPE, POINTER_MANAGED, POINTER_DEVICE};
    void *values[] = {&type, &managed, &on};
    int err = CALL(NULL, cuPointerGetAttributes, 3, attributes, values, cuda_address_of(at));
    if (err)
        return err;
    if (managed)
        return tly_fail(EINVAL, "the memory at %p is managed by CUDA, which moves it; copy the tensor", at);
    if (type != TYPE_DEVICE)
        return tly_fail(EINVAL, "the memory at %p is not a GPU's: it is freed, or the host's", at);
    *number = on;
    return 0;
}

int tly_device_find(const void *memory, size_t bytes, int *number)
{
    int first, last, err = cuda_start(NULL);
    if (!err)
        err = cuda_find(memory, &first);
    if (!err)
        err = cuda_find((const char *)memory + (bytes ? bytes - 1 : 0), &last);
    if (err)
        return err;
    if (first != last)
        return tly_fail(EINVAL, "the memory at %p begins on GPU %d and ends on GPU %d", memory, first, last);
    *number = first;
    return 0;
}

int tly_device_current(int *number)
{
    int err = cuda_start(NULL);
    return err ? err : CALL(NULL, cuCtxGetDevice, number);
}

/* A process that uses no GPU must not start the driver, which takes time and memory. */
static bool cuda_has_context(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD), *context = NULL;
    int (*current)(void **) = NULL;
    if (library)
        *(void **)&current = dlsym(library, "cuCtxGetCurrent");
    bool has = current && current(&context) == 0 && context;
    if (library)
        dlclose(library);
    return has;
}

void tly_device_address(char out[TLY_DEVICE_ADDRESS])
{
    int number;
    out[0] = '\0';
    if (cuda_has_context() && tly_device_current(&number) == 0 &&
        CALL(NULL, cuDeviceGetPCIBusId, out, TLY_DEVICE_ADDRESS, number) != 0)
        out[0] = '\0';
}

/* Failures are ignored: after one that is fatal all calls fail.  No lane is waited for, because one may wait for a stream of the
 * application that is held for ever. */
static void cuda_destroy(struct tly_device *d)
{
    int mode = CAPTURE_RELAXED;
    bool within = d->context && driver.cuThreadExchangeStreamCaptureMode(&mode) == 0 &&
                  driver.cuCtxPushCurrent(d->context) == 0;
    if (within)
        for (int i = 0; i < TLY_LANES && d->lane[i]; i++)
            driver.cuStreamDestroy(d->lane[i]);
    for (struct tly_mark *m; (m = d->free_marks);) {
        d->free_marks = m->next;
        if (within)
            driver.cuEventDestroy(m->event);
        free(m);
    }
    if (within && d->module)
        driver.cuModuleUnload(d->module);
    if (within)
        cuda_leave(mode, 0);
    if (d->context)
        driver.cuDevicePrimaryCtxRelease(d->device);
    pthread_mutex_destroy(&d->lock);
    free(d);
}

/* The first of them that are missing, up to a number. */
static int cuda_create_lanes(struct tly_device *d, int to)
{
    int err = 0;
    for (int i = 0; i < to && !err; i++)
        if (!d->lane[i])
            err = WITHIN(d, CALL(d, cuStreamCreate, &d->lane[i], STREAM_NON_BLOCKING));
    return err;
}

static int cuda_create(int number, struct tly_device **out)
{
    struct tly_device *d = calloc(1, sizeof *d);
    if (!d)
        return tly_fail(ENOMEM, "no memory for GPU %d", number);
    d->number = number;
    pthread_mutex_init(&d->lock, NULL);
    int err = cuda_start(d);
    if (!err)
        err = CALL(d, cuDeviceGet, &d->device, number);
    if (!err)
        err = CALL(d, cuDevicePrimaryCtxRetain, &d->context, d->device);
    if (!err)
        err = cuda_create_lanes(d, TLY_LANE_GROUP);
    if (err)
        cuda_destroy(d);
    else
        *out = d;
    return err;
}

int tly_device_open(int number, struct tly_device **out)
{
    struct tly_device *d;
    int err = 0;
    pthread_mutex_lock(&devices_lock);
    for (d = devices; d && d->number != number; d = d->next)
        ;
    if (!d && !(err = cuda_create(number, &d))) {
        d->next = devices;
        devices = d;
    }
    if (!err) {
        d->references++;
        *out = d;
    }
    pthread_mutex_unlock(&devices_lock);
    return err;
}

int tly_device_add_lanes(struct tly_device *d)
{
    pthread_mutex_lock(&devices_lock);
    int err = cuda_create_lanes(d, TLY_LANES);
    pthread_mutex_unlock(&devices_lock);
    return err;
}

void tly_device_close(struct tly_device *d)
{
    struct tly_device **at = &devices;
    if (!d)
        return;
    pthread_mutex_lock(&devices_lock);
    if (--d->references == 0) {
        while (*at != d)
            at = &(*at)->next;
        *at = d->next;
        cuda_destroy(d);
    }
    pthread_mutex_unlock(&devices_lock);
}

/* --- memory -------------------------------------------------------------------------------------------- */

int tly_device_alloc(struct tly_device *d, size_t bytes, void **out)
{
    cuda_address address;
    int err = WITHIN(d, CALL(d, cuMemAlloc, &address, bytes));
    if (!err)
        *out = (void *)(uintptr_t)address;
    return err;
}

int tly_device_free(struct tly_device *d, void *memory)
{
    return WITHIN(d, CALL(d, cuMemFree, cuda_address_of(memory)));
}

int tly_device_register(struct tly_device *d, void *memory, size_t bytes)
{
    return WITHIN(d, CALL(d, cuMemHostRegister, memory, bytes, REGISTER_PORTABLE | REGISTER_MAPPED));
}

int tly_device_reach(struct tly_device *d, void *memory, void **out)
{
    cuda_address address;
    int err = WITHIN(d, CALL(d, cuMemHostGetDevicePointer, &address, memory, 0));
    if (!err)
        *out = (void *)(uintptr_t)address;
    return err;
}

int tly_device_unregister(struct tly_device *d, void *memory)
{
    return WITHIN(d, CALL(d, cuMemHostUnregister, memory));
}

int tly_device_export(struct tly_device *d, void *memory, struct tly_device_ticket *out)
{
    struct tly_device_ticket ticket;
    int err = WITHIN(d, CALL(d, cuIpcGetMemHandle, &ticket, cuda_address_of(memory)));
    if (!err)
        *out = ticket;
    return err;
}

int tly_device_map(struct tly_device *d, const struct tly_device_ticket *ticket, void **out)
{
    cuda_address address;
    int err = WITHIN(d, CALL(d, cuIpcOpenMemHandle, &address, *ticket, IPC_ENABLE_PEERS));
    if (!err)
        *out = (void *)(uintptr_t)address;
    return err;
}

int tly_device_unmap(struct tly_device *d, void *memory)
{
    return WITHIN(d, CALL(d, cuIpcCloseMemHandle, cuda_address_of(memory)));
}

/* --- order --------------------------------------------------------------------------------------------- */

/* In the device's context.  NULL, with *err. */
static struct tly_mark *cuda_take_mark(struct tly_device *d, int *err)
{
    pthread_mutex_lock(&d->lock);
    struct tly_mark *m = d->free_marks;
    if (m)
        d->free_marks = m->next;
    pthread_mutex_unlock(&d->lock);
    if (m)
        return m;
    m = calloc(1, sizeof *m);
    *err = m ? CALL(d, cuEventCreate, &m->event, EVENT_BLOCKING | EVENT_NO_TIMING)
             : tly_fail(ENOMEM, "GPU %d: no memory for an event", d->number);
    if (!*err)
        return m;
    free(m);
    return NULL;
}

void tly_device_unmark(struct tly_device *d, struct tly_mark *mark)
{
    if (!mark)
        return;
    pthread_mutex_lock(&d->lock);
    mark->next = d->free_marks;
    d->free_marks = mark;
    pthread_mutex_unlock(&d->lock);
}

/* A mark of the work so far in a stream. */
static int cuda_mark(struct tly_device *d, cuda_object stream, struct tly_mark **out)
{
    int err = 0;
    struct tly_mark *m = cuda_take_mark(d, &err);
    if (!err)
        err = CALL(d, cuEventRecord, m->event, stream);
    if (err)
        tly_device_unmark(d, m);
    else
        *out = m;
    return err;
}

/* Work goes on after the GPU has been given up. */
int tly_device_wait(struct tly_device *d, struct tly_mark *mark)
{
    char why[TLY_SENTENCE];
    int err = WITHIN_EVEN_LOST(d, CALL(d, cuEventSynchronize, mark->event));
    if (!err || err == -ENODEV)
        return err;
    snprintf(why, sizeof why, "%s", tly_error());
    if (WITHIN_EVEN_LOST(d, CALL(d, cuEventSynchronize, mark->event)) != 0)
        err = cuda_lose(d, why);
    return tly_fail(-err, "%s", why);
}

int tly_device_give_up(struct tly_device *d)
{
    char why[TLY_SENTENCE];
    snprintf(why, sizeof why,
             "GPU %d: cuEventSynchronize has not returned for %d s; this process cannot use the GPU any more",
             d->number, TLY_DEVICE_HANGS_S);
    cuda_lose(d, why);
    return tly_fail(ENODEV, "%s", d->why); /* or what was wrong before */
}

int tly_device_after(struct tly_device *d, enum tly_lane lane, struct tly_mark *mark)
{
    return WITHIN(d, CALL(d, cuStreamWaitEvent, d->lane[lane], mark->event, 0));
}

/* 0: the stream is not being captured. */
static int cuda_check_stream(struct tly_device *d, cuda_object stream)
{
    int capturing = 0, err = CALL(d, cuStreamIsCapturing, stream, &capturing);
    if (!err && capturing)
        err = tly_fail(EINVAL, "GPU %d: the stream is being captured into a graph; communicate outside of it",
                       d->number);
    return err;
}

static int cuda_mark_stream(struct tly_device *d, cuda_object stream, struct tly_mark **out)
{
    int err = cuda_check_stream(d, stream);
    if (err)
        return err;
    err = cuda_mark(d, stream, out);
    return err == -EINVAL
               ? tly_fail(EINVAL, "the stream is not one of GPU %d, where the tensor is", d->number)
               : err;
}

int tly_device_mark_stream(struct tly_device *d, void *stream, struct tly_mark **out)
{
    if ((uintptr_t)stream == STREAM_PER_THREAD)
        return tly_fail(
            EINVAL, "the stream is CU_STREAM_PER_THREAD, which is another one in each of Tally's threads; "
                    "give a stream of cuStreamCreate");
    return WITHIN(d, cuda_mark_stream(d, stream, out));
}

static int cuda_follow(struct tly_device *d, cuda_object stream, cuda_object lane)
{
    struct tly_mark *m = NULL;
    int err = cuda_check_stream(d, stream);
    if (!err)
        err = cuda_mark(d, lane, &m);
    if (!err)
        err = CALL(d, cuStreamWaitEvent, stream, m->event, 0);
    tly_device_unmark(d, m);
    return err;
}

int tly_device_follow(struct tly_device *d, void *stream, enum tly_lane lane)
{
    return WITHIN(d, cuda_follow(d, stream, d->lane[lane]));
}

/* --- work ---------------------------------------------------------------------------------------------- */

/* Mark what the stream was given, unless that failed (err).  Takes m.  Without a mark the work's end cannot be awaited: the stream
 * may wait for one of the application that is held for ever. */
static int cuda_finish(struct tly_device *d, cuda_object stream, struct tly_mark *m, int err,
                       struct tly_mark **out)
{
    if (!err && CALL(d, cuEventRecord, m->event, stream) != 0)
        err = cuda_lose(d, tly_error());
    if (err)
        tly_device_unmark(d, m);
    else
        *out = m;
    return err;
}

static int cuda_copy(struct tly_device *d, cuda_object stream, void *to, const void *from, size_t bytes,
                     struct tly_mark **out)
{
    int err = 0;
    struct tly_mark *m = cuda_take_mark(d, &err);
    if (!err)
        err = CALL(d, cuMemcpyAsync, cuda_address_of(to), cuda_address_of(from), bytes, stream);
    return cuda_finish(d, stream, m, err, out);
}

int tly_device_copy(struct tly_device *d, enum tly_lane lane, void *to, const void *from, size_t bytes,
                    struct tly_mark **out)
{
    return WITHIN(d, cuda_copy(d, d->lane[lane], to, from, bytes, out));
}

static const char ptx[] =
#include "device/sums_ptx.inc"
    ;

static const char *const kernels[TLY_DTYPE_COUNT] = {
    [TLY_F32] = "tly_sums_float",     [TLY_F16] = "tly_sums_float",    [TLY_BF16] = "tly_sums_float",
    [TLY_F64] = "tly_sums_double",    [TLY_S8] = "tly_sums_int8_t",    [TLY_U8] = "tly_sums_uint8_t",
    [TLY_BOOL8] = "tly_sums_uint8_t", [TLY_S16] = "tly_sums_int16_t",  [TLY_U16] = "tly_sums_uint16_t",
    [TLY_S32] = "tly_sums_int32_t",   [TLY_U32] = "tly_sums_uint32_t", [TLY_S64] = "tly_sums_int64_t",
    [TLY_U64] = "tly_sums_uint64_t",
};

/* In the device's context: have the driver translate the kernels, once. */
static int cuda_load_kernels(struct tly_device *d)
{
    static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;
    int err = 0;
    pthread_mutex_lock(&loading);
    if (!d->module)
        err = CALL(d, cuModuleLoadData, &d->module, ptx);
    for (int i = 0; i < TLY_DTYPE_COUNT && !err; i++)
        if (kernels[i] && !d->sums[i])
            err = CALL(d, cuModuleGetFunction, &d->sums[i], d->module, kernels[i]);
    pthread_mutex_unlock(&loading);
    return err;
}

enum { THREADS = 256, MOST_BLOCKS = 2048 };

static int cuda_sum(struct tly_device *d, cuda_object lane, struct tly_sums *s, struct tly_mark **out)
{
    uint64_t blocks = (s->count + THREADS - 1) / THREADS;
    unsigned grid = blocks < MOST_BLOCKS ? (unsigned)blocks : MOST_BLOCKS;
    void *arguments[] = {s};
    int err = cuda_load_kernels(d);
    struct tly_mark *m = err ? NULL : cuda_take_mark(d, &err);
    if (!err)
        err = CALL(d, cuLaunchKernel, d->sums[s->fold.from], grid, 1, 1, THREADS, 1, 1, 0, lane, arguments,
                   NULL);
    return cuda_finish(d, lane, m, err, out);
}

bool tly_device_sums(const struct tly_reduction *r)
{
    return r->op == TALLY_SUM || r->op == TALLY_AVERAGE;
}

int tly_device_sum(struct tly_device *d, enum tly_lane lane, const struct tly_reduction *r, int n,
                   const void *const input[], void *output, size_t count, struct tly_mark **out)
{
    struct tly_sums s = {.out = output};
    s.fold = tly_fold_of(r, &count);
    s.fold.n = n;
    s.count = count;
    memcpy(s.in, input, (size_t)n * sizeof *input);
    return WITHIN(d, cuda_sum(d, d->lane[lane], &s, out));
}
