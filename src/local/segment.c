/* segment.c - shared memory and its allocator: blocks in order of place, the first that fits.  Tensors are few and
 * long-lived. */
#include "local/segment.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "base/error.h"
#include "base/fork.h"
#include "base/list.h"
#include "base/text.h"
#include "topo/topo.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

#define LEAST_BYTES (64ull << 20)
#define HUGE_PAGE (2ull << 20)
#define UNASKED (2ull << 20)      /* that may be taken before the cgroup is asked */
#define SLICE (4ull << 20)        /* of pages that are had before it is asked again */
#define MARGIN (16ull << 20)      /* for what others take meanwhile */
#define MOST_DIRTY (256ull << 20) /* staging that is given back keeps its pages up to so many bytes */

#ifndef HUGETLBFS_MAGIC
#define HUGETLBFS_MAGIC 0x958458f6
#endif

/* A stretch of a pool, or memory of this process alone. */
struct block {
    struct tly_list node;        /* in its segment's pool, by place; in `strays` */
    struct tly_segment *segment; /* NULL: a stray */
    uint8_t *at;
    uint64_t bytes;
    bool used, borrowed, dirty; /* dirty: it was borrowed, so all its pages are there, and not zero */
};

struct tly_segment {
    atomic_int references; /* who uses it, and each block in use */
    uint8_t *base;
    uint64_t bytes, head, dirty; /* dirty: bytes of free blocks that are; under `lock` */
    int fd;
    unsigned generation;    /* of forks */
    struct tly_list blocks; /* under `lock` */
    struct tly_list node;   /* in `segments` */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards all pools and the next two */
static struct tly_list segments = TLY_LIST_INIT(segments);
static struct tly_list strays = TLY_LIST_INIT(strays);

/* Another thread may have held it when this process was forked. */
static void segment_in_child(void)
{
    pthread_mutex_init(&lock, NULL);
}

static void segment_install(void)
{
    pthread_atfork(NULL, NULL, segment_in_child);
}

static pthread_once_t once = PTHREAD_ONCE_INIT;

static uint64_t segment_round_up(uint64_t x, uint64_t to)
{
    return (x + to - 1) / to * to;
}

/* --- the memory ---------------------------------------------------------------------------------- */

int tly_segment_map(int fd, uint64_t bytes, uint8_t **base)
{
    /* With mlockall(MCL_FUTURE) all its pages would be there at once: as much as the machine has.  Not so of what nobody may
     * read, and what is not locked may be read. */
    void *p = mmap(NULL, bytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (p != MAP_FAILED && (munlock(p, bytes) != 0 || mprotect(p, bytes, PROT_READ | PROT_WRITE) != 0)) {
        int err = errno;
        munmap(p, bytes);
        errno = err;
        p = MAP_FAILED;
    }
    if (p == MAP_FAILED)
        return tly_fail(errno, "cannot map %llu MB of shared memory: %s", (unsigned long long)bytes >> 20,
                        strerror(errno));
    madvise(p, bytes, MADV_DONTFORK);
    madvise(p, bytes, MADV_DONTDUMP);
    *base = p;
    return 0;
}

bool tly_segment_is_sound(int fd, uint64_t bytes)
{
    struct stat st;
    struct statfs fs;
    int seals = fcntl(fd, F_GET_SEALS);
    /* Of huge pages there may be none when one is touched. */
    return seals >= 0 && (seals & F_SEAL_SHRINK) && fstat(fd, &st) == 0 && (uint64_t)st.st_size >= bytes &&
           fstatfs(fd, &fs) == 0 && (unsigned long)fs.f_type != HUGETLBFS_MAGIC;
}

void tly_segment_unmap(uint8_t *base, uint64_t bytes)
{
    if (base)
        munmap(base, bytes);
}

/* As much as the machine has, or as limits allow: it costs nothing until it is used. */
static uint64_t segment_wanted_bytes(void)
{
    uint64_t bytes = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    struct rlimit file;
    /* Beyond this ftruncate() would send a signal. */
    if (getrlimit(RLIMIT_FSIZE, &file) == 0 && file.rlim_cur != RLIM_INFINITY && file.rlim_cur < bytes)
        bytes = file.rlim_cur;
    return bytes / HUGE_PAGE * HUGE_PAGE;
}

static int segment_too_much(uint64_t bytes)
{
    return tly_fail(ENOMEM, "no %llu MB of memory (the machine's, the cgroup's or ulimit's)",
                    (unsigned long long)bytes >> 20);
}

/* Beyond its limit the cgroup has somebody killed; to hear of it one must ask before.  Not each time for a little.
 * Asked for `more`; of the `whole` that the user wants `had` are there. */
static int segment_ask_cgroup(uint64_t more, uint64_t had, uint64_t whole)
{
    static atomic_ullong unasked;
    if (atomic_fetch_add(&unasked, more) + more < UNASKED)
        return 0;
    uint64_t room = tly_topo_memory("").room;
    if (room >= MARGIN && more <= room - MARGIN) {
        atomic_store(&unasked, 0);
        return 0;
    }
    return tly_fail(
        ENOMEM, "no %llu MB of memory: the cgroup's limit leaves %llu MB, and %llu MB are kept for others",
        (unsigned long long)(whole + (1 << 20) - 1) >> 20, (unsigned long long)(room + had) >> 20,
        MARGIN >> 20);
}

static int segment_populate_slice(int fd, uint8_t *base, uint8_t *at, uint64_t bytes)
{
    if (madvise(at, bytes, MADV_POPULATE_WRITE) == 0)
        return 0;
    if (errno != EINVAL)
        return segment_too_much(bytes);
    if (fd < 0) /* before Linux 5.14 */
        return 0;
    return posix_fallocate(fd, at - base, (off_t)bytes) == 0 ? 0 : segment_too_much(bytes);
}

/* Have all pages now: one that cannot be had later is a SIGBUS.  Other ranks do the same meanwhile, and all count
 * against the cgroup's limit. */
static int segment_populate(int fd, uint8_t *base, uint8_t *at, uint64_t bytes)
{
    if (bytes >= HUGE_PAGE)
        madvise(at, bytes, MADV_HUGEPAGE); /* where the machine gives them to shared memory */
    int err = 0;
    for (uint64_t done = 0; done < bytes && !err; done += SLICE) {
        uint64_t slice = bytes - done < SLICE ? bytes - done : SLICE;
        err = segment_ask_cgroup(slice, done, bytes);
        err = err ? err : segment_populate_slice(fd, base, at + done, slice);
    }
    return err;
}

int tly_segment_create(size_t head, struct tly_segment **segment)
{
    struct tly_segment *s = calloc(1, sizeof *s);
    struct block *all = calloc(1, sizeof *all);
    int err = -ENOMEM;
    pthread_once(&once, segment_install);
    if (s)
        s->fd = -1;
    if (!s || !all) {
        err = tly_fail(ENOMEM, "out of memory");
        goto fail;
    }
    s->head = segment_round_up(head, HUGE_PAGE);
    s->generation = tly_fork_generation();
    s->references = 1;
    s->fd = tly_fd_own(memfd_create("tally", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (s->fd < 0) {
        err = tly_fail(errno, "cannot make shared memory: %s", strerror(errno));
        goto fail;
    }
    uint64_t bytes = segment_wanted_bytes();
    if (bytes < LEAST_BYTES)
        err = tly_fail(ENOMEM, "a file of %llu MB is not allowed (ulimit -f)", LEAST_BYTES >> 20);
    for (; bytes >= LEAST_BYTES && err; bytes /= 2) {
        s->bytes = bytes / HUGE_PAGE * HUGE_PAGE;
        err = ftruncate(s->fd, (off_t)s->bytes) < 0
                  ? tly_fail(errno, "shared memory: %s", strerror(errno))
                  : tly_segment_map(s->fd, s->bytes, &s->base);
    }
    /* Its length is final: who maps it need not fear that it shrinks. */
    if (!err && fcntl(s->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0) {
        err = tly_fail(errno, "cannot seal shared memory: %s", strerror(errno));
        tly_segment_unmap(s->base, s->bytes);
    }
    /* Its pages are touched one by one: one that cannot be had then is a SIGBUS. */
    if (!err && segment_populate(s->fd, s->base, s->base, s->head) != 0) {
        char text[TLY_BYTES_TEXT];
        err = tly_fail(ENOMEM, "no memory for %s that ranks share", tly_bytes_text(s->head, text));
        tly_segment_unmap(s->base, s->bytes);
    }
    if (err)
        goto fail;
    tly_list_init(&s->blocks);
    *all = (struct block){.segment = s, .at = s->base + s->head, .bytes = s->bytes - s->head};
    tly_list_append(&s->blocks, &all->node);
    pthread_mutex_lock(&lock);
    tly_list_append(&segments, &s->node);
    pthread_mutex_unlock(&lock);
    *segment = s;
    return 0;
fail:
    if (s)
        tly_fd_close(s->fd);
    free(all);
    free(s);
    return err;
}

void tly_segment_ref(struct tly_segment *s)
{
    atomic_fetch_add_explicit(&s->references, 1, memory_order_relaxed);
}

void tly_segment_unref(struct tly_segment *s)
{
    /* acq_rel: who frees comes after all who have used it. */
    if (!s || atomic_fetch_sub_explicit(&s->references, 1, memory_order_acq_rel) != 1)
        return;
    pthread_mutex_lock(&lock);
    tly_list_remove(&s->node);
    pthread_mutex_unlock(&lock);
    while (!tly_list_empty(&s->blocks))
        free(tly_list_entry(tly_list_take(&s->blocks), struct block, node));
    tly_segment_unmap(s->base, s->bytes);
    tly_fd_close(s->fd);
    free(s);
}

uint8_t *tly_segment_base(const struct tly_segment *s)
{
    return s->base;
}
uint64_t tly_segment_bytes(const struct tly_segment *s)
{
    return s->bytes;
}
int tly_segment_fd(const struct tly_segment *s)
{
    return s->fd;
}

uint64_t tly_segment_place(const struct tly_segment *s, const void *p, uint64_t bytes)
{
    uint64_t at = (uint64_t)((const uint8_t *)p - s->base);
    return (const uint8_t *)p > s->base && at >= s->head && at <= s->bytes && bytes <= s->bytes - at ? at : 0;
}

/* --- the pool ------------------------------------------------------------------------------------ */

/* No page stays of it, and what it is read as is zero.  By the file, for locked pages cannot be given back by address. */
static void segment_wipe(const struct tly_segment *s, uint8_t *at, uint64_t bytes)
{
    if (fallocate(s->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at - s->base, (off_t)bytes) != 0)
        memset(at, 0, bytes);
}

/* The first stretch of at least so many bytes, dirty or not, cut to them; lock held.  NULL: none. */
static struct block *segment_take(struct tly_segment *s, uint64_t bytes, bool dirty)
{
    for (struct tly_list *n = s->blocks.next; n != &s->blocks; n = n->next) {
        struct block *b = tly_list_entry(n, struct block, node);
        if (b->used || b->bytes < bytes || b->dirty != dirty)
            continue;
        if (b->bytes > bytes) {
            struct block *rest = calloc(1, sizeof *rest);
            if (!rest)
                return NULL;
            *rest = (struct block){
                .segment = s, .at = b->at + bytes, .bytes = b->bytes - bytes, .dirty = b->dirty};
            tly_list_append(b->node.next, &rest->node); /* before the next one: behind b */
            b->bytes = bytes;
        }
        b->used = true;
        s->dirty -= dirty ? bytes : 0;
        tly_segment_ref(s);
        return b;
    }
    return NULL;
}

static void segment_merge_with_next(struct tly_segment *s, struct block *b)
{
    struct block *next = tly_list_entry(b->node.next, struct block, node);
    if (b->node.next == &s->blocks || b->used || next->used || b->dirty != next->dirty)
        return;
    b->bytes += next->bytes;
    tly_list_remove(&next->node);
    free(next);
}

/* What is free keeps no pages; lock held. */
static void segment_clean(struct tly_segment *s)
{
    for (struct tly_list *n = s->blocks.next; n != &s->blocks; n = n->next) {
        struct block *b = tly_list_entry(n, struct block, node);
        if (b->used)
            continue;
        if (b->dirty) {
            segment_wipe(s, b->at, b->bytes);
            s->dirty -= b->bytes;
        }
        b->dirty = false;
        struct block *before = tly_list_entry(n->prev, struct block, node);
        if (n->prev != &s->blocks && !before->used) {
            n = n->prev; /* which takes it in */
            segment_merge_with_next(s, before);
        }
    }
}

static void segment_give(struct block *b)
{
    struct tly_segment *s = b->segment;
    pthread_mutex_lock(&lock);
    bool keep = b->borrowed && s->dirty + b->bytes <= MOST_DIRTY;
    s->dirty += keep ? b->bytes : 0;
    pthread_mutex_unlock(&lock);
    if (!keep)
        segment_wipe(s, b->at, b->bytes);
    pthread_mutex_lock(&lock);
    b->dirty = keep;
    b->used = b->borrowed = false;
    segment_merge_with_next(s, b);
    if (b->node.prev != &s->blocks)
        segment_merge_with_next(s, tly_list_entry(b->node.prev, struct block, node));
    pthread_mutex_unlock(&lock);
    tly_segment_unref(s);
}

/* Is there room for so many pages more, if need be without those that nobody uses? */
static bool segment_has_room(struct tly_segment *s, uint64_t bytes)
{
    if (segment_ask_cgroup(bytes, 0, bytes) == 0)
        return true;
    pthread_mutex_lock(&lock);
    segment_clean(s);
    pthread_mutex_unlock(&lock);
    return segment_ask_cgroup(bytes, 0, bytes) == 0;
}

static int segment_alloc_shared(struct tly_segment *s, uint64_t bytes, bool borrowed, void **out)
{
    pthread_mutex_lock(&lock);
    struct block *b = segment_take(s, bytes, borrowed);
    b = b ? b : segment_take(s, bytes, false);
    if (!b) {
        segment_clean(s);
        b = segment_take(s, bytes, false);
    }
    if (b)
        b->borrowed = borrowed;
    pthread_mutex_unlock(&lock);
    if (!b) {
        char text[TLY_BYTES_TEXT];
        return tly_fail(ENOMEM, "%s are more than what is left of %llu MB of shared memory",
                        tly_bytes_text(bytes, text), (unsigned long long)s->bytes >> 20);
    }
    int err = 0;
    if (!b->dirty)
        err = segment_has_room(s, bytes) ? segment_populate(s->fd, s->base, b->at, bytes)
                                         : -ENOMEM; /* they say why */
    if (err) {
        b->borrowed = false;
        segment_give(b);
        return err;
    }
    *out = b->at;
    return 0;
}

static int segment_alloc_stray(uint64_t bytes, void **out)
{
    struct block *b = calloc(1, sizeof *b);
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int err = !b || p == MAP_FAILED ? segment_too_much(bytes) : segment_populate(-1, p, p, bytes);
    if (err) {
        if (p != MAP_FAILED)
            munmap(p, bytes);
        free(b);
        return err;
    }
    *b = (struct block){.at = p, .bytes = bytes, .used = true};
    pthread_mutex_lock(&lock);
    tly_list_append(&strays, &b->node);
    pthread_mutex_unlock(&lock);
    *out = p;
    return 0;
}

int tly_pool_alloc(struct tly_segment *s, size_t bytes, void **out)
{
    if (bytes > SIZE_MAX / 2)
        return segment_too_much(bytes);
    pthread_once(&once, segment_install);
    uint64_t whole = segment_round_up(bytes ? bytes : 1, bytes >= HUGE_PAGE ? HUGE_PAGE : TLY_PAGE);
    if (s && segment_alloc_shared(s, whole, false, out) == 0)
        return 0;
    int err = segment_ask_cgroup(bytes, 0, bytes);
    if (err)
        return err;
    return segment_alloc_stray(segment_round_up(bytes ? bytes : 1, TLY_PAGE), out);
}

int tly_pool_borrow(struct tly_segment *s, size_t bytes, void **out)
{
    return segment_alloc_shared(s, segment_round_up(bytes ? bytes : 1, TLY_PAGE), true, out);
}

static struct block *segment_find(const struct tly_list *blocks, const void *p)
{
    for (const struct tly_list *n = blocks->next; n != blocks; n = n->next) {
        struct block *b = tly_list_entry(n, struct block, node);
        if (b->at == p && b->used)
            return b;
    }
    return NULL;
}

int tly_pool_free(void *p)
{
    struct block *stray, *b = NULL;
    pthread_mutex_lock(&lock);
    stray = segment_find(&strays, p);
    if (stray)
        tly_list_remove(&stray->node);
    for (struct tly_list *n = segments.next; n != &segments && !stray && !b; n = n->next) {
        struct tly_segment *s = tly_list_entry(n, struct tly_segment, node);
        if ((uint8_t *)p >= s->base && (uint8_t *)p < s->base + s->bytes)
            b = s->generation == tly_fork_generation() ? segment_find(&s->blocks, p) : NULL;
    }
    pthread_mutex_unlock(&lock);
    if (b)
        segment_give(b);
    if (stray) {
        munmap(stray->at, stray->bytes);
        free(stray);
    }
    return b || stray ? 0 : -EINVAL;
}
