/* shared.c - memfds, sealed. */
#include "base/shared.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/memfd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/fork.h"
#include "base/text.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

enum { HUGE_PAGE = 2 << 20, NO_SHRINKING = F_SEAL_SHRINK | F_SEAL_GROW };

/* A descriptor with all its pages, or -errno.  Pages that come with the first write could be missing then, and the
 * write would be a SIGBUS: here that is an error. */
static int shared_open_pages(uint64_t size, unsigned flags)
{
    int fd = tly_fd_own(memfd_create("tally", MFD_CLOEXEC | MFD_ALLOW_SEALING | flags));
    if (fd < 0)
        return -errno;
    int err = 0;
    struct rlimit file;
    /* Beyond this ftruncate() would send a signal. */
    if (getrlimit(RLIMIT_FSIZE, &file) == 0 && file.rlim_cur < size)
        err = EFBIG;
    else if (ftruncate(fd, (off_t)size) < 0)
        err = errno;
    while (!err && fallocate(fd, 0, 0, (off_t)size) < 0)
        if (errno != EINTR)
            err = errno;
    if (!err)
        return fd;
    tly_fd_close(fd);
    return -err;
}

static int shared_seal(int fd, bool writable)
{
    int seals = NO_SHRINKING;
    if (!writable && fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE) < 0 && errno != EINVAL)
        return -errno; /* EINVAL: before Linux 5.1; readers map it for reading all the same */
    return fcntl(fd, F_ADD_SEALS, seals | F_SEAL_SEAL) < 0 ? -errno : 0;
}

int tly_shared_create(uint64_t size, bool writable, struct tly_shared **out)
{
    struct tly_shared *s = calloc(1, sizeof *s);
    if (!s)
        return tly_fail(ENOMEM, "out of memory");
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    s->fd = -1;
    if (size >= HUGE_PAGE) {
        s->size = (size + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
        s->fd = shared_open_pages(s->size, MFD_HUGETLB | MFD_HUGE_2MB);
        s->huge = s->fd >= 0;
    }
    if (s->fd < 0) {
        s->size = size ? (size + page - 1) / page * page : page;
        s->fd = shared_open_pages(s->size, 0);
    }
    int err = s->fd < 0 ? -s->fd : 0;
    if (!err) {
        s->data = mmap(NULL, s->size, PROT_READ | PROT_WRITE, MAP_SHARED, s->fd, 0);
        err = s->data == MAP_FAILED ? errno : -shared_seal(s->fd, writable);
    }
    if (err) {
        char text[TLY_BYTES_TEXT];
        const char *limit =
            err == EMFILE || err == ENFILE   ? "the limit of open files"
            : err == EFBIG                   ? "the limit of a file's size (ulimit -f)"
            : err == ENOMEM || err == ENOSPC ? "the memory of the machine or its cgroup"
                                             : strerror(err);
        if (s->data && s->data != MAP_FAILED)
            munmap(s->data, s->size);
        tly_fd_close(s->fd < 0 ? -1 : s->fd);
        free(s);
        return tly_fail(err, "cannot share %s of memory: %s", tly_bytes_text(size, text), limit);
    }
    madvise(s->data, s->size, MADV_DONTFORK);
    if (!s->huge)
        madvise(s->data, s->size, MADV_HUGEPAGE); /* a wish */
    *out = s;
    return 0;
}

void tly_shared_destroy(struct tly_shared *s)
{
    if (!s)
        return;
    munmap(s->data, s->size);
    tly_fd_close(s->fd);
    free(s);
}

int tly_shared_map(int fd, bool writable, void **data, uint64_t *size)
{
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & NO_SHRINKING) != NO_SHRINKING || fstat(fd, &st) < 0 || st.st_size <= 0)
        return -EPROTO;
    void *at =
        mmap(NULL, (size_t)st.st_size, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED)
        return -errno;
    madvise(at, (size_t)st.st_size, MADV_DONTFORK);
    *data = at;
    *size = (uint64_t)st.st_size;
    return 0;
}
