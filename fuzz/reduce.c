/* reduce.c - every variant of src/reduce/ against the scalar one, bit for bit.
 *
 * The input's first 16 bytes choose type, operation, number of inputs, elements, offsets, grouping, factors,
 * whether inputs or result are partial sums and whether the result goes over an input; the rest, over and
 * over, is the data.  Guard bytes around the output must stay. */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"
#include "reduce/reduce.h"

enum { MOST_INPUTS = 80, MOST_BYTES = 6000, GUARD = 64, HEAD = 16 };

static const char *const variants[] = {"scalar", "avx2", "avx512", "neon"};

/* Bytes of the data from a place of its own for each input. */
static void spread(unsigned char *to, size_t bytes, const uint8_t *data, size_t size, size_t from)
{
    for (size_t i = 0; i < bytes; i++)
        to[i] = size ? data[(from + i) % size] : (unsigned char)(from * 31 + i * 7);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const double factors[] = {1, 1, 0.5, -3, 1.0 / 3, 1e-30, 1e30, 0};
    static unsigned char input[MOST_INPUTS][MOST_BYTES + GUARD], output[2][MOST_BYTES + 3 * GUARD];
    const void *in[MOST_INPUTS];
    int group_size[MOST_INPUTS], groups = 0;

    if (size < HEAD)
        return 0;
    struct tly_reduction r = {
        .dtype = data[0] % (TLY_DTYPE_COUNT + 1),
        .op = data[1] % (TLY_REDUCTION_COUNT + 1),
        .divisor = data[2] == 255 ? UINT32_MAX : data[2],
        .prescale = factors[data[3] % 8],
        .postscale = factors[data[3] / 8 % 8],
    };
    const char *why = NULL;
    if (tly_reduce_check(&r, &why) != 0) {
        if (!why)
            abort();
        return 0;
    }
    int n = 1 + data[4] % MOST_INPUTS;
    bool grouped = data[9] & 1;
    r.to_partial = !grouped && data[3] & 64;
    r.from_partials = !grouped && data[3] & 128;
    bool half = r.dtype == TALLY_FLOAT16 || r.dtype == TALLY_BFLOAT16; /* whose partial sums are float32 */
    size_t element = tly_reduce_element_size(r.dtype), partial = half ? sizeof(float) : element;
    size_t count = (data[5] | (size_t)data[6] << 8) % (MOST_BYTES / partial + 1);
    size_t bytes = count * (r.from_partials ? partial : element);
    size_t out_offset = GUARD + data[7] % GUARD;
    bool same_size = r.from_partials == r.to_partial || partial == element;
    int in_place = data[8] & 1 && same_size ? data[8] / 2 % n : -1;
    for (int lo = 0; grouped && lo < n; lo += group_size[groups++]) {
        group_size[groups] = 1 + (data[9] / 2 + data[10] * groups) % 12;
        if (group_size[groups] > n - lo)
            group_size[groups] = n - lo;
    }

    for (size_t v = 0; v < sizeof variants / sizeof *variants; v++) {
        if (tly_reduce_choose(variants[v]) != 0)
            continue;
        unsigned char *whole = output[v > 0], *out = whole + out_offset;
        memset(whole, 0xa5, sizeof output[0]);
        for (int j = 0; j < n; j++) {
            unsigned char *at = j == in_place ? out : input[j] + data[11 + j % 5] % GUARD;
            spread(at, bytes, data + HEAD, size - HEAD, (size_t)j * 101);
            in[j] = at;
        }
        if (grouped)
            tly_reduce_grouped(&r, groups, group_size, in, out, count);
        else
            tly_reduce(&r, n, in, out, count);
        if (v > 0 && memcmp(output[0], output[1], sizeof output[0]) != 0) {
            fprintf(stderr, "%s differs from scalar: type %d, operation %d, n %d, count %zu\n", variants[v],
                    r.dtype, r.op, n, count);
            abort();
        }
    }
    return 0;
}
