/* fork.c - closing our descriptors in forked children.
 *
 * Every DataLoader with workers forks.  After fork() a child of a threaded process may take no lock and allocate nothing.
 * A bitmap of our descriptors, set and cleared with atomics, can be read there.  Only close() is called: shutdown() and
 * epoll_ctl() would reach the parent's sockets.  Handles remember the count of forks under which they were made, and
 * refuse in another process. */
#include "base/fork.h"

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

enum { MOST = 1 << 16, BITS = 8 * sizeof(unsigned long) };

/* A bit for each descriptor that is ours.  Set and cleared by any thread; read in the child, which has one. */
static atomic_ulong owned[MOST / BITS];
static unsigned generation;

static void fork_in_child(void)
{
    generation++;
    /* No locks, no shutdown(2), no epoll_ctl: the parent's sockets and epoll set must not notice. */
    for (unsigned i = 0; i < MOST / BITS; i++) {
        unsigned long bits = atomic_load_explicit(&owned[i], memory_order_relaxed);
        atomic_store_explicit(&owned[i], 0, memory_order_relaxed);
        for (; bits; bits &= bits - 1)
            close((int)(i * BITS + (unsigned)__builtin_ctzl(bits)));
    }
}

static void fork_install(void)
{
    pthread_atfork(NULL, NULL, fork_in_child);
}

static pthread_once_t once = PTHREAD_ONCE_INIT;

int tly_fd_own(int fd)
{
    pthread_once(&once, fork_install);
    if (fd >= 0 && fd < MOST)
        atomic_fetch_or_explicit(&owned[(unsigned)fd / BITS], 1ul << (unsigned)fd % BITS,
                                 memory_order_relaxed);
    return fd;
}

void tly_fd_disown(int fd)
{
    if (fd >= 0 && fd < MOST)
        atomic_fetch_and_explicit(&owned[(unsigned)fd / BITS], ~(1ul << (unsigned)fd % BITS),
                                  memory_order_relaxed);
}

void tly_fd_close(int fd)
{
    if (fd < 0)
        return;
    tly_fd_disown(fd);
    close(fd);
}

unsigned tly_fork_generation(void)
{
    return generation;
}
