/* device.h - memory of a GPU and work on it: copies, sums and their order, through CUDA's driver (libcuda.so.1).
 *
 * The driver is opened at run time, so building needs nothing of NVIDIA's.  A device works in the process's primary context,
 * which PyTorch uses too; the calling thread's own context is as before when a call returns.
 *
 * Work goes into lanes, which are streams of Tally's own.  A lane's work runs in order, that of two lanes in any order.  Calls
 * that give work return at once.  A mark stands for a lane's work so far.  Other lanes can wait for it on the GPU, and threads
 * on the host.
 *
 * Failures: -errno, with a sentence that names the GPU and the driver's call.  After some failures (an illegal address, a
 * lost GPU) nothing in this process works on the GPU any more: they and all later calls but tly_device_wait() return -ENODEV, with
 * the first sentence.
 *
 * Threads: all calls may come from any thread, at the same time.  No call after a fork in the child. */
#ifndef TLY_DEVICE_H
#define TLY_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "reduce/reduce.h"

struct tly_device;
struct tly_mark;

enum tly_lane {
    TLY_LANE_OUT,
    TLY_LANE_IN,
    /* of GPUs that sum in groups, a lane for each step (device/order.h), and four for the last one */
    TLY_LANE_GROUP,
    TLY_LANES = TLY_LANE_GROUP + 7
};

/* --- devices ------------------------------------------------------------------------------------------- */

/* The number of the GPU that holds these bytes.  -EINVAL: none does (the host's, or freed), several do, or the driver moves
 * them (managed memory).  -ENOTSUP: there is no driver, or it is too old. */
int tly_device_find(const void *memory, size_t bytes, int *number);

/* The number of the GPU in whose context this thread is.  -EIO: it is in none; -ENOTSUP as above. */
int tly_device_current(int *number);

/* The same GPU's address on the PCI bus, as 0000:3b:00.0; "" if this thread is in no context.  Starts no driver. */
enum { TLY_DEVICE_ADDRESS = 24 };
void tly_device_address(char out[TLY_DEVICE_ADDRESS]);

/* A process has one of each GPU, which is closed as often as it was opened.  -ENOTSUP as above. */
int tly_device_open(int number, struct tly_device **out);
/* Give the device the lanes from TLY_LANE_GROUP on, which it does not have before.  No work may be given meanwhile. */
int tly_device_add_lanes(struct tly_device *d);
/* Waits for nothing.  The last time, what it has allocated, registered, mapped or marked must have been given back, and no work
 * on such memory is left: a lane may only have waits for streams. */
void tly_device_close(struct tly_device *d);

/* --- memory -------------------------------------------------------------------------------------------- */

/* -ENOMEM. */
int tly_device_alloc(struct tly_device *d, size_t bytes, void **out);
/* No work may be using it. */
int tly_device_free(struct tly_device *d, void *memory);

/* Let GPUs copy from and to this memory of the host.  It begins and ends at a page.  -ENOMEM: it cannot be pinned. */
int tly_device_register(struct tly_device *d, void *memory, size_t bytes);
int tly_device_unregister(struct tly_device *d, void *memory);
/* The address by which kernels of this GPU use registered memory.  Some GPUs do not know the host's. */
int tly_device_reach(struct tly_device *d, void *memory, void **out);

/* A ticket for memory of tly_device_alloc, with which another process of this machine maps it. */
struct tly_device_ticket {
    uint8_t bytes[64];
};
int tly_device_export(struct tly_device *d, void *memory, struct tly_device_ticket *out);
/* -ENOTSUP: this GPU cannot read that one's memory. */
int tly_device_map(struct tly_device *d, const struct tly_device_ticket *ticket, void **out);
/* Before the other process frees it. */
int tly_device_unmap(struct tly_device *d, void *memory);

/* --- work ---------------------------------------------------------------------------------------------- */

/* Copy between a GPU's memory and registered memory, or within either, and mark it.  Where this fails nothing is copied, unless
 * the GPU counts as lost (-ENODEV) because the copy could not be marked. */
int tly_device_copy(struct tly_device *d, enum tly_lane lane, void *to, const void *from, size_t bytes,
                    struct tly_mark **out);

/* Sum as tly_reduce() does, with its bits, and mark it; 1 <= n <= TLY_DEVICE_INPUTS.  All memory is this GPU's, mapped, or
 * registered and of tly_device_reach().  tly_device_sums() says if it can. */
enum { TLY_DEVICE_INPUTS = 8 };
bool tly_device_sums(const struct tly_reduction *r);
int tly_device_sum(struct tly_device *d, enum tly_lane lane, const struct tly_reduction *r, int n,
                   const void *const input[], void *output, size_t count, struct tly_mark **out);

/* --- order --------------------------------------------------------------------------------------------- */

/* The work so far in a stream of the application, a CUstream (NULL: the legacy default stream).  -EINVAL: the stream is being
 * captured into a graph, or is CU_STREAM_PER_THREAD. */
int tly_device_mark_stream(struct tly_device *d, void *stream, struct tly_mark **out);
/* Sleep until the marked work has ended, also on a GPU that counts as lost.  -errno: it has failed, and uses no memory any more.  If
 * the driver cannot wait, even when asked twice, the GPU counts as lost (-ENODEV), and the work may go on. */
int tly_device_wait(struct tly_device *d, struct tly_mark *mark);
/* Longest wait for work that must end, in seconds; less than a silent rank is given. */
enum { TLY_DEVICE_HANGS_S = 3 };
/* A thread has been in tly_device_wait() for so long: the GPU counts as lost.  -ENODEV, with a sentence.  The work may still be
 * carried out, and that thread may stay there. */
int tly_device_give_up(struct tly_device *d);
/* The lane waits for it. */
int tly_device_after(struct tly_device *d, enum tly_lane lane, struct tly_mark *mark);
/* What this stream of the application is given from now on comes after the lane's work so far.  -EINVAL: the stream is being
 * captured into a graph. */
int tly_device_follow(struct tly_device *d, void *stream, enum tly_lane lane);
void tly_device_unmark(struct tly_device *d, struct tly_mark *mark);

#endif
