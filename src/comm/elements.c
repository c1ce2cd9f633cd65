/* elements.c - the calls of tally.h about elements of memory, for which no communicator is needed. */
#include <errno.h>

#include "base/error.h"
#include "reduce/codec.h"
#include "reduce/reduce.h"
#include "tally/tally.h"

size_t tally_dtype_size(enum tally_dtype dtype)
{
    return tly_reduce_element_size((int)dtype);
}

int tally_add_norms(const float *a, const float *b, float *sum, size_t count, size_t chunk, float *norms)
{
    if (!chunk)
        return tly_fail(EINVAL, "chunk is 0: pass the elements of a chunk");
    if (count && (!a || !b || !sum || !norms))
        return tly_fail(EINVAL, "a NULL pointer for %zu elements: pass the address of their memory", count);
    tly_reduce_add_norms(a, b, sum, count, chunk, norms);
    return 0;
}

/* Find the codec and check `pointers`, of which there are `n`, for a tensor of `count` elements. */
static int elements_codec(enum tally_codec codec, uint32_t ranks, size_t count, int n,
                          const void *const pointers[], struct tly_codec *c)
{
    const char *why = NULL;
    int status = tly_codec_find((int)codec, ranks, c, &why);
    if (status < 0)
        return tly_fail(-status, "%u ranks: %s", ranks, why);
    for (int i = 0; count && i < n; i++)
        if (!pointers[i])
            return tly_fail(EINVAL, "a NULL pointer for %zu elements: pass the address of their memory",
                            count);
    return 0;
}

int tally_codec_words(enum tally_codec codec, uint32_t ranks, size_t count, enum tally_dtype *dtype,
                      size_t *words)
{
    struct tly_codec c;
    int status = elements_codec(codec, ranks, count, 0, NULL, &c);
    if (status < 0)
        return status;
    if (!dtype || !words)
        return tly_fail(EINVAL, "dtype or words is NULL: pass the addresses of the results");
    *dtype = c.dtype;
    *words = tly_codec_words(&c, count);
    return 0;
}

int tally_exponents(enum tally_codec codec, uint32_t ranks, const float *gradient, const float *error,
                    size_t count, uint8_t *exponents)
{
    struct tly_codec c;
    int status = elements_codec(codec, ranks, count, 3, (const void *[]){gradient, error, exponents}, &c);
    if (status == 0)
        tly_codec_exponents(&c, gradient, error, count, exponents);
    return status;
}

int tally_encode(enum tally_codec codec, uint32_t ranks, const float *gradient, float *error, size_t count,
                 const uint8_t *exponents, void *words, uint8_t *next)
{
    struct tly_codec c;
    int status =
        elements_codec(codec, ranks, count, 4, (const void *[]){gradient, error, exponents, words}, &c);
    if (status == 0)
        tly_codec_encode(&c, gradient, error, count, exponents, words, next);
    return status;
}

int tally_decode(enum tally_codec codec, uint32_t ranks, const void *words, const uint8_t *exponents,
                 const uint8_t *next, size_t count, uint32_t divisor, float *output)
{
    struct tly_codec c;
    int status = elements_codec(codec, ranks, count, 3, (const void *[]){words, exponents, output}, &c);
    if (status < 0)
        return status;
    if (divisor == 0 || divisor > 127)
        return tly_fail(EINVAL, "divisor %u: pass 1 for a sum, or the number of ranks for an average",
                        divisor);
    tly_codec_decode(&c, words, exponents, next, count, divisor, output);
    return 0;
}
