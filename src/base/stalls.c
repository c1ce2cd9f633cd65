/* stalls.c - what the application's threads wait for beside their own computing.
 *
 * The scheduler says of each thread for how long it ran and for how long it was runnable without a processor
 * (/proc/self/task/.../schedstat).  Threads of Tally's own do not count: the application does not wait for them while it
 * computes.  The kernel counts the pages that came from a disk.  Pressure-stall information says how long that took, but of the
 * whole machine, so a slow disk's time bounds it. */
#include "base/stalls.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/thread.h"

enum {
    FAULT_US = 100,        /* a page from a disk, until that is found, */
    SLOW_FAULT_US = 10000, /* and from a slow disk */
};

/* The first bytes of a small file, as text.  False: it cannot be read. */
static bool stalls_read_text(int folder, const char *path, char *out, size_t size)
{
    int fd = openat(folder, path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, out, size - 1);
    if (fd >= 0)
        close(fd);
    out[n > 0 ? n : 0] = '\0';
    return n > 0;
}

/* What a thread has run and waited since the last reading; NULL: it is new.  Where there was no room for all, one that seems
 * new may be old. */
static void stalls_add(struct tly_stalls *s, const struct tly_stalls_thread *was,
                       const struct tly_stalls_thread *now)
{
    bool same = was && now->run_us >= was->run_us && now->wait_us >= was->wait_us;
    if (!same && s->threads == TLY_STALLS_THREADS)
        return;
    s->run_us += now->run_us - (same ? was->run_us : 0);
    s->wait_us += now->wait_us - (same ? was->wait_us : 0);
}

static const struct tly_stalls_thread *stalls_find(const struct tly_stalls *s, int id)
{
    for (int i = 0; i < s->threads; i++)
        if (s->thread[i].id == id)
            return &s->thread[i];
    return NULL;
}

static void stalls_read_threads(struct tly_stalls *s)
{
    struct tly_stalls_thread thread[TLY_STALLS_THREADS];
    DIR *d = opendir("/proc/self/task");
    int n = 0;
    for (struct dirent *e; d && n < TLY_STALLS_THREADS && (e = readdir(d));) {
        char path[64], text[80], *rest;
        int id = atoi(e->d_name);
        snprintf(path, sizeof path, "%.20s/schedstat", e->d_name);
        if (id <= 0 || tly_thread_is_ours(id) || !stalls_read_text(dirfd(d), path, text, sizeof text))
            continue;
        thread[n].id = id;
        thread[n].run_us = strtoull(text, &rest, 10) / 1000;
        thread[n].wait_us = strtoull(rest, NULL, 10) / 1000;
        stalls_add(s, stalls_find(s, id), &thread[n]);
        n++;
    }
    if (d)
        closedir(d);
    memcpy(s->thread, thread, (size_t)n * sizeof *thread);
    s->threads = n;
}

static uint64_t stalls_grown(uint64_t before, uint64_t now)
{
    return now > before ? now - before : 0;
}

static uint64_t stalls_least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

void tly_stalls_weigh(struct tly_stalls *s, uint64_t disk_us)
{
    uint64_t faults = stalls_grown(s->disk_faults, s->faults);
    if (disk_us == s->disk_us)
        return;
    if (faults && s->disk_us) {
        s->fault_us = stalls_least(stalls_grown(s->disk_us, disk_us) / faults, SLOW_FAULT_US);
        s->fault_found = true;
    }
    s->disk_us = disk_us;
    s->disk_faults = s->faults;
}

void tly_stalls_read(struct tly_stalls *s)
{
    struct rusage u;
    char text[256];
    stalls_read_threads(s);
    if (!s->fault_found)
        s->fault_us = FAULT_US;
    if (getrusage(RUSAGE_SELF, &u) == 0)
        s->faults = (uint64_t)u.ru_majflt;
    if (stalls_read_text(AT_FDCWD, "/proc/pressure/io", text, sizeof text)) {
        const char *total = strstr(text, "total=");
        tly_stalls_weigh(s, total ? strtoull(total + strlen("total="), NULL, 10) : 0);
    }
}

struct tly_stalled tly_stalls_between(const struct tly_stalls *before, const struct tly_stalls *now,
                                      uint64_t own_us)
{
    uint64_t run = now->run_us - before->run_us, wait = now->wait_us - before->wait_us;
    /* Threads side by side wait side by side: then the same part of the time counts as of their demand. */
    double part = wait ? (double)wait / (double)(run + wait) : 0;
    uint64_t waited = stalls_least(wait, (uint64_t)(part * (double)own_us));
    uint64_t paged = stalls_grown(before->faults, now->faults) * now->fault_us;
    return (struct tly_stalled){waited, stalls_least(paged, own_us - waited)};
}
