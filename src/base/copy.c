/* copy.c - a copy around the caches, by the streaming stores that each x86-64 processor has; elsewhere memcpy. */
#include "base/copy.h"

#include <stdint.h>
#include <string.h>
#if defined __x86_64__
#include <emmintrin.h>
#endif

enum { LINE = 64 };

/* Copies n bytes, which are whole lines.  `to` is aligned to a line. */
static void copy_lines(uint8_t *to, const uint8_t *from, size_t n)
{
#if defined __x86_64__
    for (size_t at = 0; at < n; at += sizeof(__m128i))
        _mm_stream_si128((__m128i *)(to + at), _mm_loadu_si128((const __m128i *)(from + at)));
    _mm_sfence(); /* a release store does not wait for streaming ones */
#else
    memcpy(to, from, n);
#endif
}

void tly_copy_streaming(void *to, const void *from, size_t n)
{
    uint8_t *out = to;
    const uint8_t *in = from;
    size_t head = -(uintptr_t)out % LINE;
    head = head < n ? head : n;
    size_t lines = (n - head) / LINE * LINE;
    memcpy(out, in, head);
    copy_lines(out + head, in + head, lines);
    memcpy(out + head + lines, in + head + lines, n - head - lines);
}
