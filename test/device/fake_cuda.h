/* fake_cuda.h - what tests ask of the fake driver (fake_cuda/fake.h), beside CUDA's own functions. */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include <stddef.h>
#include <stdint.h>

/* Places from and to which bytes move: 0 is the host, 1 + i is GPU i. */
enum { FAKE_PLACES = 65 };

/* Where the bytes of an address are, for the test to read and write.  NULL: nowhere. */
void *fake_cuda_data(const void *address);
/* Bytes that copies and kernels have moved. */
uint64_t fake_cuda_moved(int from, int to);
/* Hold a stream's work back, or no longer.  NULL: all copies to GPUs. */
void fake_cuda_hold(void *stream, int held);
/* Hold kernels back, or no longer. */
void fake_cuda_hold_kernels(int held);
/* Carry out so many copies from GPUs to the host, and no more.  Negative: any number. */
void fake_cuda_read(int copies);
/* Allocate memory of two pieces, each of an even number of pages, that are freed one by one. */
int fake_cuda_expand(unsigned long long *out, size_t bytes);
/* From now on all calls fail with this code, also those that wait. */
void fake_cuda_lose(int code);
/* The most bytes of the host's memory that were registered at a time since the last call. */
uint64_t fake_cuda_pinned(void);
/* As the word fail= of FAKE_CUDA, without that; "": nothing fails any more. */
void fake_cuda_fail(const char *what);
/* How often the call that FAKE_CUDA lets fail has been made. */
int fake_cuda_calls(void);
/* Where in the host's memory the last copy from a GPU went. */
const void *fake_cuda_staged(void);
/* Can other processes map the memory at this address? */
int fake_cuda_is_shared(const void *at);
/* Counts memory, streams, events, modules and contexts that have not been given back. */
int fake_cuda_left(void);
/* Forget everything, and read FAKE_CUDA anew at the next cuInit. */
void fake_cuda_reset(void);

#endif
