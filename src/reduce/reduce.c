/* reduce.c - walks the tree of reduce.h in blocks and hands its nodes to the CPU's fold (fold.h). */
#include "reduce/reduce.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "reduce/fold.h"
#include "reduce/mode.h"

#if defined __x86_64__
#include <cpuid.h>
#include <xmmintrin.h>
#endif

/* --- variants --------------------------------------------------------------------------------------- */

#define VARIANT(name) \
    { \
#name, tly_fold_##name, tly_norm_##name, tly_code_peak_##name, tly_code_pack_##name, \
            tly_code_split_##name \
    }

static bool reduce_cpu_any(void)
{
    return true;
}

#if defined __x86_64__
static bool reduce_cpu_avx2(void)
{
    unsigned a, b, c, d; /* clang's builtin does not know F16C */
    return __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
static bool reduce_cpu_avx512(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

static const struct {
    struct tly_variant variant;
    bool (*works)(void);
} variants[] = {
/* the best first */
#if defined __x86_64__
    {VARIANT(avx512), reduce_cpu_avx512},
    {VARIANT(avx2), reduce_cpu_avx2},
#elif defined __aarch64__
    {VARIANT(neon), reduce_cpu_any},
#endif
    {VARIANT(scalar), reduce_cpu_any},
};

/* Chosen at the first call; it points at constant data, so relaxed order is enough. */
static _Atomic(const struct tly_variant *) chosen;

int tly_reduce_choose(const char *name)
{
    for (size_t i = 0; i < sizeof variants / sizeof *variants; i++)
        if ((!name || !strcmp(name, variants[i].variant.name)) && variants[i].works()) {
            atomic_store_explicit(&chosen, &variants[i].variant, memory_order_relaxed);
            return 0;
        }
    return -ENOTSUP;
}

const struct tly_variant *tly_reduce_kernels(void)
{
    const struct tly_variant *v = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (!v) {
        tly_reduce_choose(NULL);
        v = atomic_load_explicit(&chosen, memory_order_relaxed);
    }
    return v;
}

const char *tly_reduce_variant(void)
{
    return tly_reduce_kernels()->name;
}

/* --- what may be asked -------------------------------------------------------------------------------- */

size_t tly_reduce_element_size(int dtype)
{
    static const uint8_t size[TLY_DTYPE_COUNT] = {
        [TALLY_FLOAT32] = 4, [TALLY_FLOAT64] = 8, [TALLY_FLOAT16] = 2,   [TALLY_BFLOAT16] = 2,
        [TALLY_INT8] = 1,    [TALLY_UINT8] = 1,   [TALLY_INT16] = 2,     [TALLY_INT32] = 4,
        [TALLY_INT64] = 8,   [TALLY_BOOL] = 1,    [TALLY_COMPLEX64] = 8, [TALLY_COMPLEX128] = 16,
        [TALLY_UINT16] = 2,  [TALLY_UINT32] = 4,  [TALLY_UINT64] = 8,
    };
    return dtype >= 0 && dtype < TLY_DTYPE_COUNT ? size[dtype] : 0;
}

static bool reduce_is_half(int dtype)
{
    return dtype == TALLY_FLOAT16 || dtype == TALLY_BFLOAT16;
}

static bool reduce_is_complex(int dtype)
{
    return dtype == TALLY_COMPLEX64 || dtype == TALLY_COMPLEX128;
}

static int reduce_refuse(int error, const char *reason, const char **why)
{
    if (why)
        *why = reason;
    return error;
}

int tly_reduce_check(const struct tly_reduction *r, const char **why)
{
    int dtype = r->dtype, op = r->op;
    uint32_t divisor = r->divisor;
    bool complex = reduce_is_complex(dtype), real = dtype <= TALLY_BFLOAT16;
    bool bitwise = op == TALLY_BAND || op == TALLY_BOR || op == TALLY_BXOR;

    if (dtype >= TLY_DTYPE_COUNT)
        return reduce_refuse(-EINVAL, "unknown element type", why);
    if (op >= TLY_REDUCTION_COUNT)
        return reduce_refuse(-EINVAL, "unknown reduction", why);
    if (!isfinite(r->prescale) || !isfinite(r->postscale))
        return reduce_refuse(-EINVAL, "a scale factor is not finite", why);
    if (op == TALLY_AVERAGE && divisor == 0)
        return reduce_refuse(-EINVAL, "an average needs a divisor", why);
    if (dtype == TALLY_BOOL && op == TALLY_AVERAGE)
        return reduce_refuse(-ENOTSUP, "booleans have no average", why);
    if (dtype == TALLY_BOOL && (r->prescale != 1 || r->postscale != 1))
        return reduce_refuse(-ENOTSUP, "booleans cannot be scaled", why);
    if (bitwise && (real || complex))
        return reduce_refuse(-ENOTSUP, "bitwise reductions need integers or booleans", why);
    if (complex && op == TALLY_MIN)
        return reduce_refuse(-ENOTSUP, "complex numbers have no minimum", why);
    if (complex && op == TALLY_MAX)
        return reduce_refuse(-ENOTSUP, "complex numbers have no maximum", why);
    return 0;
}

/* --- the tree ------------------------------------------------------------------------------------------ */

/* Scratch for one level of rows of partials, or for more levels of shorter rows: 8^4 inputs need 3.  Rows are
 * long so that each input is read in long runs. */
enum { ROW_BYTES = 4096, SCRATCH_BYTES = TLY_FOLD_MAX * ROW_BYTES };

struct reduce_tree {
    struct tly_fold step; /* of the tree as a whole; n is unused */
    tly_fold_fn *fold;
    enum tly_format partial; /* how an unfinished sum is held */
    int leaves;
    const unsigned char *const *input;
    const unsigned char *const *next; /* the first input of the next leaf: leaves are met in order */
    struct reduce_tree *group; /* borrowed: makes a leaf of a group of inputs; NULL: inputs are leaves */
    const int *group_size;     /* of each leaf */
    const int *node_leaves;    /* of each input, where inputs are nodes of the tree; else NULL */
    const int *next_size;      /* the next of one of these */
    unsigned char *leaf_rows;  /* borrowed: where groups' sums go, SCRATCH_BYTES */
    size_t row_bytes;
    _Alignas(64) unsigned char scratch[SCRATCH_BYTES];
};

static void reduce_walk(struct reduce_tree *t, int level, int leaves, size_t at, size_t count, bool root,
                        void *out);

/* The next leaf's elements from `at` on: `count` of them. */
static const void *reduce_leaf(struct reduce_tree *t, int j, size_t at, size_t count)
{
    struct reduce_tree *g = t->group;
    int size = g ? *t->next_size++ : 1;
    const unsigned char *const *input = t->next;

    t->next += size;
    if (!g || (size == 1 && g->step.prescale == 1))
        return *input + at * tly_format_size(t->step.from);
    g->next = input;
    reduce_walk(g, 0, size, at, count, true, t->leaf_rows + (size_t)j * t->row_bytes);
    return t->leaf_rows + (size_t)j * t->row_bytes;
}

/* The root is finished and written in the tree's own format. */
static struct tly_fold reduce_step_of(const struct reduce_tree *t, bool root)
{
    struct tly_fold f = t->step;
    if (!root) {
        f.to = t->partial;
        f.stream = false;
        f.divisor = f.postscale = 1;
    }
    return f;
}

/* Reduce the next `leaves` leaves. */
static void reduce_walk(struct reduce_tree *t, int level, int leaves, size_t at, size_t count, bool root,
                        void *out)
{
    struct tly_fold f = reduce_step_of(t, root);
    const void *rows[TLY_FOLD_MAX];

    if (leaves <= TLY_FOLD_MAX) {
        for (f.n = 0; f.n < leaves; f.n++)
            rows[f.n] = reduce_leaf(t, f.n, at, count);
    } else {
        int part = TLY_FOLD_MAX;
        while (part * TLY_FOLD_MAX < leaves)
            part *= TLY_FOLD_MAX;
        for (f.n = 0; f.n * part < leaves; f.n++) {
            int rest = leaves - f.n * part;
            unsigned char *row = t->scratch + (size_t)(level * TLY_FOLD_MAX + f.n) * t->row_bytes;
            reduce_walk(t, level + 1, rest < part ? rest : part, at, count, false, row);
            rows[f.n] = row;
        }
        f.from = t->partial; /* rows of the scratch, in the first-level cache */
        f.ask = false;
        f.prescale = 1;
    }
    t->fold(&f, rows, out, count);
}

/* Leaves in each of a node's rows, but the last: the least power of two that cuts no input and gives few rows. */
static int reduce_row_leaves(const int *next_size, int leaves)
{
    int each = 1;
    while (each * TLY_FOLD_MAX < leaves)
        each *= 2;
    for (int left = leaves; left > 0; left -= *next_size++)
        while (each < *next_size)
            each *= 2;
    return each;
}

/* Reduce the next inputs, which are nodes with so many leaves in all.  scratch: where rows of this walk may begin. */
static void reduce_walk_nodes(struct reduce_tree *t, int leaves, size_t at, size_t count, bool root,
                              unsigned char *scratch, void *out)
{
    struct tly_fold f = reduce_step_of(t, root);
    const void *rows[TLY_FOLD_MAX];
    int each = reduce_row_leaves(t->next_size, leaves);

    for (f.n = 0; f.n * each < leaves; f.n++) {
        int rest = leaves - f.n * each, size = rest < each ? rest : each;
        if (*t->next_size == size) {
            rows[f.n] = *t->next++ + at * tly_format_size(t->partial);
            t->next_size++;
        } else {
            unsigned char *row = scratch;
            assert(size < leaves);
            scratch += t->row_bytes;
            reduce_walk_nodes(t, size, at, count, false, scratch, row);
            rows[f.n] = row;
        }
    }
    t->fold(&f, rows, out, count);
}

/* How long rows may be for a tree of so many leaves. */
static size_t reduce_row_bytes(int leaves)
{
    const int fold = TLY_FOLD_MAX;
    return leaves <= fold * fold ? ROW_BYTES : leaves <= fold * fold * fold ? ROW_BYTES / 2 : ROW_BYTES / 4;
}

/* Once at the end: it waits until the stores have reached memory. */
void tly_reduce_fence(void)
{
#if defined __x86_64__
    _mm_sfence();
#endif
}

/* The whole tree, in blocks. */
static void reduce_blocks(struct reduce_tree *t, unsigned char *out, size_t count)
{
    size_t size = tly_format_size(t->step.to);
    size_t block = t->row_bytes / tly_format_size(t->partial);
    for (size_t at = 0; at < count; at += block) {
        size_t now = count - at < block ? count - at : block;
        t->next = t->input;
        t->next_size = t->node_leaves ? t->node_leaves : t->group_size;
        if (t->node_leaves)
            reduce_walk_nodes(t, t->leaves, at, now, true, t->scratch, out + at * size);
        else
            reduce_walk(t, 0, t->leaves, at, now, true, out + at * size);
    }
    if (t->step.stream)
        tly_reduce_fence();
}

struct tly_fold tly_fold_of(const struct tly_reduction *r, size_t *count)
{
    enum tly_format format =
        r->dtype == TALLY_COMPLEX64    ? TLY_F32
        : r->dtype == TALLY_COMPLEX128 ? TLY_F64
                                       : (enum tly_format)r->dtype;
    int op = r->op == TALLY_AVERAGE ? TALLY_SUM : r->op;
    if (format == TLY_BOOL8) {
        if (op == TALLY_SUM || op == TALLY_MAX)
            op = TALLY_BOR;
        else if (op == TALLY_PRODUCT || op == TALLY_MIN)
            op = TALLY_BAND;
    }
    if (reduce_is_complex(r->dtype)) {
        *count *= 2;
        if (op == TALLY_PRODUCT)
            op = TLY_COMPLEX_PRODUCT;
    }
    enum tly_format partial = reduce_is_half(r->dtype) ? TLY_F32 : format;
    return (struct tly_fold){
        .from = r->from_partials ? partial : format,
        .to = r->to_partial ? partial : format,
        .op = op,
        .prescale = r->from_partials ? 1 : r->prescale,
        .postscale = r->to_partial ? 1 : r->postscale,
        .divisor = r->op == TALLY_AVERAGE && !r->to_partial ? r->divisor : 1,
    };
}

/* As tly_fold_of, with hints for the memory of so many leaves. */
static struct tly_fold reduce_step(const struct tly_reduction *r, int leaves, int inputs,
                                   const void *const input[], const void *output, size_t *count)
{
    struct tly_fold f = tly_fold_of(r, count);
    bool in_place = false;
    for (int j = 0; j < inputs; j++)
        in_place |= input[j] == output;
    size_t rows = (size_t)leaves + !in_place;
    f.ask = rows * *count * tly_format_size(f.from) >= TLY_FAR_BYTES;
    f.stream = f.ask && !in_place;
    return f;
}

static void reduce_plant(struct reduce_tree *t, const struct tly_reduction *r, int leaves, int inputs,
                         const void *const input[], const void *output, size_t *count)
{
    t->step = reduce_step(r, leaves, inputs, input, output, count);
    t->partial = reduce_is_half(r->dtype) ? TLY_F32 : t->step.from;
    t->fold = tly_reduce_kernels()->fold;
    t->leaves = leaves;
    t->row_bytes = reduce_row_bytes(leaves);
    t->input = (const unsigned char *const *)input;
    t->group = NULL;
    t->group_size = t->node_leaves = NULL;
}

/* So few numbers are summed before a fold of them is described. */
enum { FEW = 16 };

static bool reduce_is_few(const struct tly_reduction *r, int n, size_t count)
{
    return count <= FEW && n <= TLY_FOLD_MAX && r->dtype == TALLY_FLOAT32 && r->op == TALLY_SUM &&
           r->prescale == 1 && r->postscale == 1;
}

/* T of reduce.h for `width` numbers of each input, a constant: neighbours, then neighbours of those. */
static inline __attribute__((always_inline)) void reduce_sum_run(int n, const void *const input[],
                                                                 void *output, size_t at, size_t width)
{
    float x[TLY_FOLD_MAX][FEW];
    for (int j = 0; j < n; j++)
        memcpy(x[j], (const unsigned char *)input[j] + at * sizeof(float), width * sizeof(float));
    for (; n > 1; n = (n + 1) / 2)
        for (int j = 0; 2 * j < n; j++)
            for (size_t i = 0; i < width; i++)
                x[j][i] = 2 * j + 1 < n ? x[2 * j][i] + x[2 * j + 1][i] : x[2 * j][i];
    for (size_t i = 0; i < width; i++)
        x[0][i] = x[0][i] == x[0][i] ? x[0][i] : __builtin_nanf("");
    memcpy((unsigned char *)output + at * sizeof(float), x[0], width * sizeof(float));
}

static void reduce_sum_few(int n, const void *const input[], void *output, size_t count)
{
    assert(n >= 1);
    if (count == FEW)
        reduce_sum_run(n, input, output, 0, FEW);
    else
        for (size_t at = 0; at < count; at++)
            reduce_sum_run(n, input, output, at, 1);
}

void tly_reduce(const struct tly_reduction *r, int n, const void *const input[], void *output, size_t count)
{
    tly_mode saved = tly_mode_default();
    if (reduce_is_few(r, n, count)) {
        reduce_sum_few(n, input, output, count);
    } else if (n <= TLY_FOLD_MAX) { /* the tree is one fold of its inputs */
        struct tly_fold f = reduce_step(r, n, n, input, output, &count);
        f.n = n;
        tly_reduce_kernels()->fold(&f, input, output, count);
        if (f.stream)
            tly_reduce_fence();
    } else {
        struct reduce_tree t;
        reduce_plant(&t, r, n, n, input, output, &count);
        reduce_blocks(&t, output, count);
    }
    tly_mode_restore(saved);
}

void tly_reduce_grouped(const struct tly_reduction *r, int groups, const int group_size[],
                        const void *const input[], void *output, size_t count)
{
    struct reduce_tree t, group;
    _Alignas(64) unsigned char leaf_rows[SCRATCH_BYTES];
    tly_mode saved = tly_mode_default();
    size_t same = count;
    int inputs = 0, largest = 0;
    assert(!r->to_partial && !r->from_partials);
    for (int g = 0; g < groups; g++) {
        inputs += group_size[g];
        largest = group_size[g] > largest ? group_size[g] : largest;
    }
    reduce_plant(&t, r, groups, inputs, input, output, &count);
    reduce_plant(&group, r, largest, 0, input, output, &same);
    group.step.divisor = group.step.postscale = 1;
    group.step.stream = false;
    group.step.ask = t.step.ask;
    t.step.prescale = 1;
    t.group = &group;
    t.group_size = group_size;
    t.leaf_rows = leaf_rows;
    t.row_bytes = group.row_bytes = t.row_bytes < group.row_bytes ? t.row_bytes : group.row_bytes;
    reduce_blocks(&t, output, count);
    tly_mode_restore(saved);
}

void tly_reduce_nodes(const struct tly_reduction *r, int n, const int leaves[], const void *const input[],
                      void *output, size_t count)
{
    struct reduce_tree t;
    tly_mode saved = tly_mode_default();
    int all = 0;
    assert(r->from_partials);
    for (int j = 0; j < n; j++)
        all += leaves[j];
    reduce_plant(&t, r, n, n, input, output, &count);
    t.leaves = all;
    t.node_leaves = leaves;
    t.row_bytes = reduce_row_bytes(all * TLY_FOLD_MAX); /* narrow nodes, one in the other, take more rows */
    reduce_blocks(&t, output, count);
    tly_mode_restore(saved);
}

/* --- sums with norms ---------------------------------------------------------------------------------- */

/* A norm is NaN if and only if one of its elements is.  So a chunk without NaN needs no look at each element. */
static float reduce_replace_nans(float *sum, size_t count)
{
    for (size_t i = 0; i < count; i++)
        sum[i] = isnan(sum[i]) ? NAN : sum[i];
    return NAN;
}

/* Of one chunk.  Zeros behind its end change no lane. */
static float reduce_norm(const float *a, const float *b, float *sum, size_t count, bool ask, bool stream)
{
    float lanes[TLY_NORM_LANES] = {0}, row[3][TLY_NORM_LANES] = {0};
    size_t whole = count / TLY_NORM_LANES * TLY_NORM_LANES, left = (count - whole) * sizeof *a;
    tly_norm_fn *norm = tly_reduce_kernels()->norm;
    norm(a, b, sum, whole, lanes, ask, stream);
    if (left) {
        memcpy(row[0], a + whole, left);
        memcpy(row[1], b + whole, left);
        norm(row[0], row[1], row[2], TLY_NORM_LANES, lanes, false, false);
        memcpy(sum + whole, row[2], left);
    }
    for (int width = TLY_NORM_LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++)
            lanes[i] += lanes[i + width];
    return isnan(lanes[0]) ? reduce_replace_nans(sum, count) : lanes[0];
}

void tly_reduce_add_norms(const float *a, const float *b, float *sum, size_t count, size_t chunk,
                          float *norms)
{
    tly_mode saved = tly_mode_default();
    bool in_place = sum == a || sum == b;
    bool ask = (in_place ? 2 : 3) * count * sizeof *sum >= TLY_FAR_BYTES, stream = ask && !in_place;
    for (size_t at = 0; at < count; at += chunk)
        *norms++ =
            reduce_norm(a + at, b + at, sum + at, count - at < chunk ? count - at : chunk, ask, stream);
    if (stream)
        tly_reduce_fence();
    tly_mode_restore(saved);
}
