/* stalls.h - what the application's threads wait for beside their own computing: processors, and memory on disk. */
#ifndef TLY_STALLS_H
#define TLY_STALLS_H

#include <stdbool.h>
#include <stdint.h>

enum { TLY_STALLS_THREADS = 64 };

/* Counted since the process began; figures never fall.  0: the kernel does not tell. */
struct tly_stalls {
    uint64_t run_us, wait_us; /* of threads that are not Tally's: on a processor; runnable, without one */
    struct tly_stalls_thread {
        int id;
        uint64_t run_us, wait_us;
    } thread[TLY_STALLS_THREADS]; /* at the last reading; a thread that ended since counts no longer */
    int threads;
    uint64_t faults;   /* pages of the process that came from a disk, */
    uint64_t fault_us; /* how long one takes: as found, which may be 0, or a guess until then */
    bool fault_found;
    uint64_t disk_us;     /* in which some process of the machine waited for a disk, */
    uint64_t disk_faults; /* and `faults` when that last changed */
};

/* Read anew; all zeros before the first time.  Costs a few system calls for each thread, of TLY_STALLS_THREADS at
 * most. */
void tly_stalls_read(struct tly_stalls *s);
/* Find from the machine's time, which the kernel counts every 2 s, how long a page takes. */
void tly_stalls_weigh(struct tly_stalls *s, uint64_t disk_us);

/* Parts of own_us, which the application took between two readings: no processor was free, memory came from a disk. */
struct tly_stalled {
    uint64_t waited_us, paged_us;
};
struct tly_stalled tly_stalls_between(const struct tly_stalls *before, const struct tly_stalls *now,
                                      uint64_t own_us);

#endif
