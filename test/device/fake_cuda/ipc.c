/* ipc.c - the fake driver's memory in other processes, which map it by its memfd. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "test/device/fake_cuda/fake.h"

union ipc_handle {
    unsigned char bytes[64];
    struct {
        pid_t pid;
        int serial, fd, gpu;
        size_t size;
    } of;
};

EXPORT int cuIpcGetMemHandle(union ipc_handle *out, unsigned long long at)
{
    ENTER("cuIpcGetMemHandle", true);
    struct fake_memory *m = fake_find((void *)(uintptr_t)at, 1);
    if (!m || m->kind != OWN)
        return fake_leave(INVALID_VALUE);
    memset(out, 0, sizeof *out);
    out->of.pid = getpid();
    out->of.serial = m->serial;
    out->of.fd = m->fd;
    out->of.gpu = m->gpu;
    out->of.size = m->bytes;
    return fake_leave(OK);
}

EXPORT int cuIpcOpenMemHandle_v2(unsigned long long *out, union ipc_handle h, unsigned flags)
{
    char path[64], link[96] = "", name[64];
    ENTER("cuIpcOpenMemHandle", true);
    struct fake_gpu *g = fake_gpu();
    if (h.of.pid == getpid())
        return fake_leave(INVALID_CONTEXT);
    /* CUDA gives the same address again, and counts.  Tally opens a handle once, so twice is a mistake. */
    if (fake_find_mapped(h.of.pid, h.of.serial))
        return fake_leave(ALREADY_MAPPED);
    if (h.of.gpu != g->number && (flags != 1 || !g->peers[h.of.gpu]))
        return fake_leave(PEERS_UNSUPPORTED);
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)h.of.pid, h.of.fd);
    fake_memory_name(name, h.of.pid, h.of.serial);
    int fd =
        readlink(path, link, sizeof link - 1) > 0 && strstr(link, name) ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return fake_leave(INVALID_HANDLE);
    struct fake_memory *m = fake_add(MAPPED, h.of.gpu, h.of.size);
    m->pid = h.of.pid;
    m->serial = h.of.serial;
    fake_show(m, fd);
    close(fd);
    *out = (uintptr_t)m->address;
    return fake_leave(OK);
}

static bool ipc_is_mapped(enum fake_kind kind)
{
    return kind == MAPPED;
}

EXPORT int cuIpcCloseMemHandle(unsigned long long at)
{
    ENTER("cuIpcCloseMemHandle", true);
    return fake_leave(fake_drop_at((void *)(uintptr_t)at, ipc_is_mapped, INVALID_VALUE));
}
