/* memory.c - memory of the fake driver's GPUs, and of the host that is registered. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "test/device/fake_cuda/fake.h"

enum { REGISTER_MAPPED = 2 };

static struct fake_memory *memories;
static int serials;
static size_t pinned, pinned_peak;

/* --- where bytes are ---------------------------------------------------------------------------------------- */

struct fake_memory *fake_find(const void *at, size_t bytes)
{
    const uint8_t *begin = at;
    for (struct fake_memory *m = memories; m; m = m->next)
        if (begin >= m->address && begin < m->address + m->bytes &&
            bytes <= m->bytes - (size_t)(begin - m->address))
            return m;
    return NULL;
}

struct fake_memory *fake_find_mapped(pid_t pid, int serial)
{
    for (struct fake_memory *m = memories; m; m = m->next)
        if (m->kind == MAPPED && m->pid == pid && m->serial == serial)
            return m;
    return NULL;
}

uint8_t *fake_data_of(const void *at)
{
    struct fake_memory *m = fake_find(at, 1);
    return m ? m->data + ((const uint8_t *)at - m->address) : NULL;
}

int fake_place_of(const void *at)
{
    struct fake_memory *m = fake_find(at, 1);
    return !m || m->kind == HOST ? 0 : 1 + m->gpu;
}

/* Pieces of expandable memory lie side by side. */
bool fake_reaches(int gpu, struct fake_range r)
{
    struct fake_memory *m = fake_find(r.at, 1);
    while (m && m->kind == OWN && m->gpu == gpu && r.at + r.bytes > m->address + m->bytes) {
        r.bytes -= (size_t)(m->address + m->bytes - r.at);
        r.at = m->address + m->bytes;
        m = fake_find(r.at, 1);
    }
    return m && fake_find(r.at, r.bytes) && (m->kind != OWN || m->gpu == gpu);
}

bool fake_reaches_by_kernel(int gpu, struct fake_range *r)
{
    struct fake_memory *known = fake_find(r->at, 1);
    if (known)
        return known->kind != HOST && fake_reaches(gpu, *r);
    for (struct fake_memory *m = memories; m; m = m->next)
        if (m->kind == HOST && r->at >= m->reached && r->at < m->reached + m->bytes) {
            r->at = m->address + (r->at - m->reached);
            return fake_reaches(gpu, *r);
        }
    return false;
}

/* --- what there is ------------------------------------------------------------------------------------------ */

struct fake_memory *fake_add(enum fake_kind kind, int gpu, size_t bytes)
{
    struct fake_memory *m = calloc(1, sizeof *m);
    if (!m)
        fake_die("no memory");
    *m = (struct fake_memory){.next = memories, .kind = kind, .gpu = gpu, .bytes = bytes, .fd = -1};
    return memories = m;
}

static void memory_drop(struct fake_memory *m)
{
    struct fake_memory **at = &memories;
    while (*at != m)
        at = &(*at)->next;
    *at = m->next;
    if (m->kind == HOST) {
        pinned -= m->bytes;
        munmap(m->reached, m->bytes);
    } else {
        if (m->kind != MAPPED)
            memset(m->data, FAKE_NOISE, m->bytes);
        munmap(m->data, m->bytes);
        if (m->address != m->data)
            munmap(m->address, m->bytes);
    }
    if (m->fd >= 0)
        close(m->fd);
    free(m);
}

static void *memory_map(size_t bytes, int protection, int flags, int fd)
{
    void *at = mmap(NULL, bytes, protection, flags, fd, 0);
    if (at == MAP_FAILED)
        fake_die("cannot map %zu bytes", bytes);
    return at;
}

/* Addresses at which nothing can be read. */
static uint8_t *memory_take_addresses(size_t bytes)
{
    return memory_map(bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
}

void fake_show(struct fake_memory *m, int fd)
{
    m->data = memory_map(m->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd);
    m->address = m->kind == MANAGED ? m->data : memory_take_addresses(m->bytes);
}

void fake_memory_name(char name[64], pid_t pid, int serial)
{
    snprintf(name, 64, "fake-cuda-%d-%d-", (int)pid, serial);
}

static struct fake_memory *memory_make(enum fake_kind kind, size_t bytes)
{
    char name[64];
    struct fake_memory *m = fake_add(kind, fake_gpu()->number, bytes);
    m->serial = ++serials;
    fake_memory_name(name, getpid(), m->serial);
    m->fd = memfd_create(name, MFD_CLOEXEC);
    if (m->fd < 0 || ftruncate(m->fd, (off_t)bytes))
        fake_die("cannot have %zu bytes", bytes);
    fake_show(m, m->fd);
    memset(m->data, FAKE_NOISE, bytes);
    return m;
}

int fake_drop_at(const void *at, bool (*of)(enum fake_kind), int error)
{
    struct fake_memory *m = fake_find(at, 1);
    if (!m || m->address != at || !of(m->kind))
        return error;
    if (fake_is_pending((struct fake_range){m->address, m->bytes}))
        fake_die("memory at %p is given back while work uses it", at);
    memory_drop(m);
    return OK;
}

static bool memory_is_own(enum fake_kind kind)
{
    return kind == OWN || kind == MANAGED;
}

static bool memory_is_host(enum fake_kind kind)
{
    return kind == HOST;
}

/* --- the calls ---------------------------------------------------------------------------------------------- */

EXPORT int cuMemAlloc_v2(unsigned long long *out, size_t bytes)
{
    ENTER("cuMemAlloc", true);
    if (!bytes)
        return fake_leave(INVALID_VALUE);
    *out = (uintptr_t)memory_make(OWN, bytes)->address;
    return fake_leave(OK);
}

/* Memory of two pieces that are mapped side by side, as PyTorch's expandable segments are. */
EXPORT int fake_cuda_expand(unsigned long long *out, size_t bytes)
{
    ENTER("cuMemMap", true);
    struct fake_memory *first = memory_make(OWN, bytes), *second = fake_add(OWN, first->gpu, bytes / 2);
    first->bytes = bytes / 2;
    second->address = first->address + first->bytes;
    second->data = first->data + first->bytes;
    *out = (uintptr_t)first->address;
    return fake_leave(OK);
}

EXPORT int cuMemAllocManaged(unsigned long long *out, size_t bytes, unsigned flags)
{
    ENTER("cuMemAllocManaged", true);
    *out = (uintptr_t)memory_make(MANAGED, bytes)->address;
    return fake_leave(OK);
}

EXPORT int cuMemFree_v2(unsigned long long at)
{
    ENTER("cuMemFree", true);
    return fake_leave(fake_drop_at((void *)(uintptr_t)at, memory_is_own, INVALID_VALUE));
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
        return fake_leave(INVALID_VALUE);
    if (fake_find(at, 1) || fake_find((uint8_t *)at + bytes - 1, 1))
        return fake_leave(ALREADY_REGISTERED);
    if (bytes > fake_set.pinned - pinned)
        return fake_leave(OUT_OF_MEMORY);
    if (fake_set.unshared && fake_cuda_is_shared(at))
        return fake_leave(NOT_SUPPORTED);
    struct fake_memory *m = fake_add(HOST, -1, bytes);
    m->address = m->data = at;
    m->reached = memory_take_addresses(bytes);
    m->mapped = flags & REGISTER_MAPPED;
    pinned += bytes;
    if (pinned > pinned_peak)
        pinned_peak = pinned;
    return fake_leave(OK);
}

EXPORT int cuMemHostUnregister(void *at)
{
    ENTER("cuMemHostUnregister", true);
    return fake_leave(fake_drop_at(at, memory_is_host, NOT_REGISTERED));
}

EXPORT int cuMemHostGetDevicePointer_v2(unsigned long long *out, void *at, unsigned flags)
{
    ENTER("cuMemHostGetDevicePointer", true);
    struct fake_memory *m = fake_find(at, 1);
    if (!m || m->kind != HOST || !m->mapped || flags)
        return fake_leave(INVALID_VALUE);
    *out = (uintptr_t)(m->reached + ((uint8_t *)at - m->address));
    return fake_leave(OK);
}

EXPORT int cuPointerGetAttributes(unsigned count, const int *attributes, void **values, unsigned long long at)
{
    ENTER("cuPointerGetAttributes", false);
    struct fake_memory *m = fake_find((void *)(uintptr_t)at, 1);
    for (unsigned i = 0; i < count; i++) {
        switch (attributes[i]) {
        case 2:
            *(unsigned *)values[i] = !m ? 0 : m->kind == HOST ? 1 : 2;
            break;
        case 8:
            *(unsigned *)values[i] = m && m->kind == MANAGED;
            break;
        case 9:
            *(int *)values[i] = m ? fake_ordinal(m->gpu) : -2;
            break;
        default:
            return fake_leave(INVALID_VALUE);
        }
    }
    return fake_leave(OK);
}

/* --- for tests ---------------------------------------------------------------------------------------------- */

EXPORT void *fake_cuda_data(const void *at)
{
    pthread_mutex_lock(&fake_lock);
    void *data = fake_data_of(at);
    pthread_mutex_unlock(&fake_lock);
    return data;
}

EXPORT uint64_t fake_cuda_pinned(void)
{
    pthread_mutex_lock(&fake_lock);
    uint64_t most = pinned_peak;
    pinned_peak = pinned;
    pthread_mutex_unlock(&fake_lock);
    return most;
}

int fake_memory_left(void)
{
    int left = 0;
    for (struct fake_memory *m = memories; m; m = m->next)
        left++;
    return left;
}

void fake_forget_memory(void)
{
    while (memories)
        memory_drop(memories);
}
