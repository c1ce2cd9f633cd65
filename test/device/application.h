/* application.h - CUDA's functions that an application calls beside Tally, as CUDA's own cuda.h declares them. */
#ifndef APPLICATION_H
#define APPLICATION_H

#include <stddef.h>

int cuCtxPopCurrent_v2(void **out);
int cuCtxPushCurrent_v2(void *context);
int cuDevicePrimaryCtxRelease_v2(int device);
int cuDevicePrimaryCtxRetain(void **out, int device);
int cuEventCreate(void **out, unsigned flags);
int cuEventDestroy_v2(void *event);
int cuEventQuery(void *event);
int cuEventRecord(void *event, void *stream);
int cuEventSynchronize(void *event);
int cuInit(unsigned flags);
int cuMemAllocManaged(unsigned long long *out, size_t bytes, unsigned flags);
int cuMemAlloc_v2(unsigned long long *out, size_t bytes);
int cuMemFree_v2(unsigned long long at);
int cuMemHostRegister_v2(void *at, size_t bytes, unsigned flags);
int cuMemHostUnregister(void *at);
int cuMemcpyAsync(unsigned long long to, unsigned long long from, size_t bytes, void *stream);
int cuStreamBeginCapture_v2(void *stream, int mode);
int cuStreamCreate(void **out, unsigned flags);
int cuStreamDestroy_v2(void *stream);
int cuStreamEndCapture(void *stream, void **graph);
int cuStreamSynchronize(void *stream);

#endif
