/* contexts.c - the fake driver's GPUs, which of them this process sees, and their contexts. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "test/device/fake_cuda/fake.h"

enum { CAPTURE_RELAXED = 2 };

struct fake_gpu fake_gpus[FAKE_GPUS];
static int visible_count, visible[FAKE_GPUS];
static _Thread_local struct fake_gpu *current[16];
static _Thread_local int depth, capture_mode;

void fake_show_gpus(void)
{
    const char *order = getenv("CUDA_VISIBLE_DEVICES");
    for (int i = 0; i < FAKE_GPUS; i++) {
        fake_gpus[i].number = i;
        fake_begin_stream(&fake_gpus[i].by_default, i);
    }
    visible_count = 0;
    if (!order)
        for (; visible_count < fake_set.present; visible_count++)
            visible[visible_count] = visible_count;
    for (char *end; order && *order; order = *end ? end + 1 : end)
        visible[visible_count++] = (int)strtol(order, &end, 10);
}

int fake_ordinal(int gpu)
{
    for (int i = 0; i < visible_count; i++)
        if (visible[i] == gpu)
            return i;
    return -2;
}

bool fake_in_context(void)
{
    return depth;
}

struct fake_gpu *fake_gpu(void)
{
    return current[depth - 1];
}

bool fake_is_relaxed(void)
{
    return capture_mode == CAPTURE_RELAXED;
}

int fake_contexts_left(void)
{
    int left = depth;
    for (int i = 0; i < FAKE_GPUS; i++)
        left += fake_gpus[i].retained;
    return left;
}

void fake_forget_contexts(void)
{
    depth = 0;
}

EXPORT int cuDeviceGet(int *out, int ordinal)
{
    ENTER("cuDeviceGet", false);
    if (ordinal < 0 || ordinal >= visible_count)
        return fake_leave(INVALID_DEVICE);
    *out = ordinal;
    return fake_leave(OK);
}

EXPORT int cuDevicePrimaryCtxRetain(void **out, int device)
{
    ENTER("cuDevicePrimaryCtxRetain", false);
    struct fake_gpu *g = &fake_gpus[visible[device]];
    g->retained++;
    *out = g;
    return fake_leave(OK);
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int device)
{
    pthread_mutex_lock(&fake_lock);
    if (--fake_gpus[visible[device]].retained < 0)
        fake_die("a context is released that nobody has");
    return fake_leave(OK);
}

EXPORT int cuCtxPushCurrent_v2(void *context)
{
    ENTER("cuCtxPushCurrent", false);
    struct fake_gpu *g = context;
    if (!g->retained || depth == sizeof current / sizeof *current)
        fake_die("a context is used that nobody has, or too many are");
    current[depth++] = g;
    return fake_leave(OK);
}

EXPORT int cuCtxPopCurrent_v2(void **out)
{
    pthread_mutex_lock(&fake_lock);
    if (!depth)
        fake_die("no context is current");
    *out = current[--depth];
    return fake_leave(OK);
}

EXPORT int cuCtxGetCurrent(void **out)
{
    ENTER("cuCtxGetCurrent", false);
    *out = depth ? fake_gpu() : NULL;
    return fake_leave(OK);
}

EXPORT int cuCtxSetCurrent(void *context)
{
    ENTER("cuCtxSetCurrent", false);
    depth -= depth > 0;
    if (context)
        current[depth++] = context;
    return fake_leave(OK);
}

EXPORT int cuCtxGetDevice(int *device)
{
    ENTER("cuCtxGetDevice", true);
    *device = fake_ordinal(fake_gpu()->number);
    return fake_leave(OK);
}

EXPORT int cuDeviceGetPCIBusId(char *out, int bytes, int device)
{
    ENTER("cuDeviceGetPCIBusId", false);
    const struct fake_gpu *g = &fake_gpus[visible[device]];
    if (g->address[0])
        snprintf(out, (size_t)bytes, "%s", g->address);
    else
        snprintf(out, (size_t)bytes, "0000:%02X:00.0", 0x10 + g->number);
    return fake_leave(OK);
}

EXPORT int cuThreadExchangeStreamCaptureMode(int *mode)
{
    ENTER("cuThreadExchangeStreamCaptureMode", false);
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return fake_leave(OK);
}
