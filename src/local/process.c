/* process.c - has another rank's process died, or only its main thread?  Of both the kernel says that they have no memory.
 *
 * A process that dies gives its memory back before it closes its sockets and before its pidfd tells of its end: a second or
 * more for each 5 GB.  But by then each of its threads is about to end, or is being killed, and /proc shows it. */
#include "local/process.h"

#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"

enum {
    DYING_MS = 1000, /* where threads cannot be seen: from the end of a process's memory to its own, mostly */
    LOOK_EVERY_MS = 1,
    ENDS = 4,        /* PF_EXITING of the kernel, which is set before the memory goes, */
    IS_DUMPED = 8,   /* and PF_POSTCOREDUMP, a little earlier */
    KILLED = 1 << 8, /* SIGKILL among the signals that wait for a thread */
};

enum tly_life tly_process_life(const char *stat)
{
    char state;
    unsigned flags;
    unsigned long long signals;
    const char *name_end = strrchr(stat, ')'); /* the name may hold anything */
    if (!name_end ||
        sscanf(name_end + 1,
               " %c %*s %*s %*s %*s %*s %u %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s "
               "%*s %*s %*s %*s %*s %*s %*s %llu",
               &state, &flags, &signals) != 3)
        return TLY_MAY_LIVE;
    if (flags & (ENDS | IS_DUMPED) || signals & KILLED)
        return TLY_DIES;
    /* One that runs may just have taken SIGKILL from there, and have said nothing yet. */
    return state == 'S' ? TLY_LIVES : TLY_MAY_LIVE;
}

/* So much of a file as there is room for.  False: there is none, or it cannot be read (errno). */
static bool process_read_text(const char *path, char *out, size_t len)
{
    FILE *f = fopen(path, "re");
    if (!f)
        return false;
    errno = 0;
    size_t n = fread(out, 1, len - 1, f);
    int err = errno;
    out[n] = '\0';
    fclose(f);
    errno = err;
    return n > 0;
}

/* Its number where this /proc was mounted: negative once it has gone, 0 if it cannot be seen there. */
static int process_number_of(int pidfd)
{
    char path[64], text[1024];
    int pid = 0;
    snprintf(path, sizeof path, "/proc/thread-self/fdinfo/%d", pidfd);
    const char *at = process_read_text(path, text, sizeof text) ? strstr(text, "\nPid:") : NULL;
    return at && sscanf(at, " Pid: %d", &pid) == 1 ? pid : 0;
}

/* Of the thread that is the most alive. */
static enum tly_life process_look(int pidfd)
{
    char path[300], text[1024];
    enum tly_life life = TLY_DIES;
    int pid = process_number_of(pidfd);
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *all = pid > 0 ? opendir(path) : NULL;
    if (!all)
        return pid < 0 ? TLY_DIES : TLY_MAY_LIVE;
    for (struct dirent *one; life != TLY_LIVES && (one = readdir(all));) {
        if (one->d_name[0] == '.')
            continue;
        snprintf(path, sizeof path, "/proc/%d/task/%s/stat", pid, one->d_name);
        enum tly_life its = TLY_MAY_LIVE;
        if (process_read_text(path, text, sizeof text))
            its = tly_process_life(text);
        else if (errno == ENOENT || errno == ESRCH)
            its = TLY_DIES;
        life = its > life ? its : life;
    }
    closedir(all);
    return life;
}

/* Signals may go to this thread, if it is the application's. */
static bool process_is_gone(int pidfd, int ms)
{
    struct pollfd gone = {.fd = pidfd, .events = POLLIN};
    int n;
    while ((n = poll(&gone, 1, ms)) < 0 && errno == EINTR)
        ;
    return n > 0;
}

bool tly_process_dies(int pidfd)
{
    return process_look(pidfd) == TLY_DIES || process_is_gone(pidfd, 0);
}

bool tly_process_has_died(int pidfd)
{
    int64_t patience = tly_now() + DYING_MS * TLY_MS;
    do {
        enum tly_life life = process_look(pidfd);
        if (life == TLY_DIES)
            return true;
        if (life == TLY_LIVES) /* unless what was seen has its number by now */
            return process_is_gone(pidfd, 0);
    } while (!process_is_gone(pidfd, LOOK_EVERY_MS) && tly_now() < patience);
    return process_is_gone(pidfd, 0);
}
