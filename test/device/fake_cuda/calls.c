/* calls.c - how each call of the fake driver begins and ends: the lock, the settings and the faults. */
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "test/device/fake_cuda/fake.h"

pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;
struct fake_settings fake_set;
int fake_fatal;
uint64_t (*fake_moved)[FAKE_PLACES];
static bool calls_started;
static struct {
    char call[40];
    int code, at, times, seen;
} failing;

void fake_die(const char *format, ...)
{
    va_list list;
    va_start(list, format);
    fprintf(stderr, "fake_cuda: ");
    vfprintf(stderr, format, list);
    fprintf(stderr, "\n");
    abort();
}

/* --- the settings ------------------------------------------------------------------------------------------- */

static void calls_let_fail(const char *what)
{
    memset(&failing, 0, sizeof failing);
    failing.at = failing.times = 1;
    sscanf(what, "%39[^:]:%d:%d:%d", failing.call, &failing.code, &failing.at, &failing.times);
}

static void calls_take_word(const char *word)
{
    int a = 0, b = 0;
    char path[256], address[24];
    if (sscanf(word, "peers=%d:%d", &a, &b) == 2 && a < FAKE_GPUS && b < FAKE_GPUS) {
        fake_gpus[a].peers[b] = fake_gpus[b].peers[a] = true;
    } else if (sscanf(word, "pci=%d:%23s", &a, address) == 2 && a < FAKE_GPUS) {
        snprintf(fake_gpus[a].address, sizeof fake_gpus[a].address, "%s", address);
    } else if (sscanf(word, "count=%255s", path) == 1) {
        int fd = open(path, O_RDWR | O_CLOEXEC);
        fake_moved =
            fd < 0 ? MAP_FAILED
                   : mmap(NULL, FAKE_PLACES * sizeof *fake_moved, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (fake_moved == MAP_FAILED)
            fake_die("cannot count in %s", path);
        close(fd);
    } else if (strncmp(word, "fail=", 5) == 0) {
        calls_let_fail(word + 5);
    } else if (strcmp(word, "unshared") == 0) {
        fake_set.unshared = true;
    } else if (strcmp(word, "silent") == 0) {
        fake_set.silent = true;
    } else if (sscanf(word, "gpus=%d", &fake_set.present) != 1 &&
               sscanf(word, "pinned=%zu", &fake_set.pinned) != 1) {
        fake_die("what is %s?", word);
    }
}

static void calls_start(void)
{
    static uint64_t own[FAKE_PLACES][FAKE_PLACES];
    const char *list = getenv("FAKE_CUDA");
    char words[2048], *save = NULL;
    if (calls_started)
        return;
    calls_started = true;
    memset(fake_gpus, 0, sizeof fake_gpus);
    memset(own, 0, sizeof own);
    memset(&failing, 0, sizeof failing);
    fake_moved = own;
    fake_fatal = 0;
    fake_set = (struct fake_settings){.pinned = SIZE_MAX};
    snprintf(words, sizeof words, "%s", list ? list : "");
    for (char *w = strtok_r(words, " ", &save); w; w = strtok_r(NULL, " ", &save))
        calls_take_word(w);
    fake_show_gpus();
}

/* --- calls -------------------------------------------------------------------------------------------------- */

/* After these codes the process must be started anew, as cuda.h says of most.  After 4, 214, 220 and 709 the driver, the GPU or the
 * context is gone. */
static bool calls_lasts(int code)
{
    static const int lasting[] = {4,   214, 220, 226, 700, 702, 709, 710, 714,
                                  715, 716, 717, 718, 719, 721, 810, 911};
    bool lasts = false;
    for (size_t i = 0; i < sizeof lasting / sizeof *lasting; i++)
        lasts |= lasting[i] == code;
    return lasts;
}

int fake_fault(const char *call)
{
    if (strcmp(failing.call, call) != 0 || ++failing.seen < failing.at ||
        failing.seen - failing.at >= failing.times)
        return OK;
    if (failing.code == KILLED)
        kill(getpid(), SIGKILL);
    if (calls_lasts(failing.code))
        fake_fatal = failing.code;
    return failing.code;
}

/* May this thread not make the call, because a stream is being captured? */
static bool calls_is_unsafe(const char *call)
{
    static const char *const calls[] = {"cuMemAlloc",          "cuMemFree",          "cuMemHostRegister",
                                        "cuMemHostUnregister", "cuEventSynchronize", "cuEventQuery",
                                        "cuStreamSynchronize"};
    bool listed = false;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        listed |= strcmp(calls[i], call) == 0;
    return listed && fake_any_captures() && !fake_is_relaxed();
}

int fake_enter(const char *call, bool in_context)
{
    pthread_mutex_lock(&fake_lock);
    int code = !calls_started                     ? NOT_INITIALIZED
               : fake_fatal                       ? fake_fatal
               : in_context && !fake_in_context() ? INVALID_CONTEXT
                                                  : OK;
    if (!code)
        code = fake_fault(call);
    if (!code && calls_is_unsafe(call))
        code = CAPTURE_UNSUPPORTED;
    if (code)
        pthread_mutex_unlock(&fake_lock);
    return code;
}

int fake_leave(int code)
{
    pthread_mutex_unlock(&fake_lock);
    return code;
}

EXPORT int cuInit(unsigned flags)
{
    pthread_mutex_lock(&fake_lock);
    calls_start();
    pthread_mutex_unlock(&fake_lock);
    ENTER("cuInit", false);
    return fake_leave(fake_set.present ? OK : NO_DEVICE);
}

EXPORT int cuGetErrorName(int code, const char **out)
{
    *out = code == OUT_OF_MEMORY     ? "CUDA_ERROR_OUT_OF_MEMORY"
           : code == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                                     : NULL;
    return *out ? OK : INVALID_VALUE;
}

/* --- for tests ---------------------------------------------------------------------------------------------- */

EXPORT void fake_cuda_lose(int code)
{
    pthread_mutex_lock(&fake_lock);
    fake_fatal = code;
    pthread_cond_broadcast(&fake_changed);
    pthread_mutex_unlock(&fake_lock);
}

EXPORT void fake_cuda_fail(const char *what)
{
    pthread_mutex_lock(&fake_lock);
    calls_let_fail(what);
    pthread_mutex_unlock(&fake_lock);
}

EXPORT uint64_t fake_cuda_moved(int from, int to)
{
    return __atomic_load_n(&fake_moved[from][to], __ATOMIC_RELAXED);
}

EXPORT int fake_cuda_calls(void)
{
    pthread_mutex_lock(&fake_lock);
    int seen = failing.seen;
    pthread_mutex_unlock(&fake_lock);
    return seen;
}

EXPORT int fake_cuda_left(void)
{
    return fake_kernels_left() + fake_contexts_left() + fake_memory_left() + fake_streams_left();
}

EXPORT void fake_cuda_reset(void)
{
    fake_forget_memory();
    fake_forget_streams();
    fake_forget_kernels();
    fake_forget_contexts();
    calls_started = false;
}
