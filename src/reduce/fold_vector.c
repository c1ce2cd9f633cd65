/* fold_vector.c - the fold for vector instructions (see fold.h), compiled once for each variant:
 * TLY_FOLD names the function, TLY_VECTOR is the bytes of a vector.
 *
 * The compiler's vectors do what C's operators can say; vector.h has the few steps that need an
 * instruction by name.  Functions marked INLINE are templates: formats, operation and number of rows
 * are constants where they are called, and of each combination one loop remains.  Elements before the first
 * aligned store and behind the last whole vector are left to the reference, whose results are the same by
 * contract, and so are integers that are scaled or divided. */
#include <assert.h>

#include "reduce/fold.h"
#include "reduce/vector.h"

/* A vector of complex numbers with its lanes exchanged within each: even lanes become lane `e` of their pair,
 * odd ones lane `o`. */
#if TLY_VECTOR == 64
#define PAIRS_D(e, o) e, o, 2 + e, 2 + o, 4 + e, 4 + o, 6 + e, 6 + o
#define PAIRS_F(e, o) PAIRS_D(e, o), 8 + e, 8 + o, 10 + e, 10 + o, 12 + e, 12 + o, 14 + e, 14 + o
#elif TLY_VECTOR == 32
#define PAIRS_D(e, o) e, o, 2 + e, 2 + o
#define PAIRS_F(e, o) PAIRS_D(e, o), 4 + e, 4 + o, 6 + e, 6 + o
#else
#define PAIRS_D(e, o) e, o
#define PAIRS_F(e, o) PAIRS_D(e, o), 2 + e, 2 + o
#endif
#ifdef __clang__
#define EXCHANGE(V, BITS, x, e, o) __builtin_shufflevector(x, x, PAIRS_##V(e, o))
#else
#define EXCHANGE(V, BITS, x, e, o) __builtin_shuffle(x, (BITS){PAIRS_##V(e, o)})
#endif

/* What a loop is compiled for, and the factors it was called with. */
struct how {
    enum tly_format from, to;
    int op;
    bool scaled;
    bool stream;
    bool ask;
    double prescale, divisor, postscale;
};

/* --- load, combine and store of each type of accumulation ------------------------------------------- */

INLINE F load_F(struct how h, const unsigned char *in, size_t i)
{
    F x;
    if (h.from == TLY_F32)
        x = *(const F_memory *)(in + 4 * i);
    else if (h.from == TLY_F16)
        x = widen(*(const HALF_memory *)(in + 2 * i));
    else
        x = (F)(spread(*(const HALF_memory *)(in + 2 * i)) << 16);
    return h.scaled ? x * (float)h.prescale : x;
}

INLINE void store_F(struct how h, F x, unsigned char *out, size_t i)
{
    if (h.scaled && h.divisor != 1)
        x /= (float)h.divisor;
    if (h.scaled)
        x *= (float)h.postscale;
    /* NOLINTNEXTLINE(misc-redundant-expression): only a NaN differs from itself */
    W nan = (W)(x != x), bits = ((W)x & ~nan) | (nan & 0x7fc00000);
    if (h.to == TLY_F32)
        put_whole(out + 4 * i, bits, h.stream);
    else if (h.to == TLY_F16)
        put_half(out + 2 * i, narrow((F)bits), h.stream);
    else
        put_half(out + 2 * i, squeeze((bits + 0x7fff + (bits >> 16 & 1)) >> 16), h.stream);
}

INLINE D load_D(struct how h, const unsigned char *in, size_t i)
{
    D x = *(const D_memory *)(in + 8 * i);
    return h.scaled ? x * h.prescale : x;
}

INLINE void store_D(struct how h, D x, unsigned char *out, size_t i)
{
    if (h.scaled && h.divisor != 1)
        x /= h.divisor;
    if (h.scaled)
        x *= h.postscale;
    Q nan = (Q)(x != x); /* NOLINT(misc-redundant-expression) */
    put_whole(out + 8 * i, (W)(((Q)x & ~nan) | (nan & 0x7ff8000000000000)), h.stream);
}

/* The product's real lanes are a difference: there a sign is changed, which rounds nothing. */
#define FLOAT_COMBINE(V, BITS, SIGN) \
    INLINE V multiply_##V(V a, V b) \
    { \
        BITS odd = (BITS){PAIRS_##V(0, 1)} & 1; \
        V straight = EXCHANGE(V, BITS, a, 0, 0) * b; \
        V crossed = EXCHANGE(V, BITS, a, 1, 1) * EXCHANGE(V, BITS, b, 1, 0); \
        return straight + (V)((BITS)crossed ^ ((odd ^ 1) * (SIGN))); \
    } \
    INLINE V combine_##V(struct how h, V a, V b) \
    { \
        if (h.op == TLY_COMPLEX_PRODUCT) \
            return multiply_##V(a, b); \
        if (h.op == TALLY_SUM) \
            return a + b; \
        if (h.op == TALLY_PRODUCT) \
            return a * b; \
        BITS take = (BITS)(h.op == TALLY_MIN ? b < a : b > a) | (BITS)(b != b); \
        return (V)(((BITS)b & take) | ((BITS)a & ~take)); \
    }
FLOAT_COMBINE(F, W, 0x80000000)
FLOAT_COMBINE(D, Q, 0x8000000000000000)

INLINE bool is_unsigned(enum tly_format format)
{
    return format == TLY_U8 || format == TLY_U16 || format == TLY_U32 || format == TLY_U64;
}

#define INTEGER(V, SIGNED) \
    INLINE V load_##V(struct how h, const unsigned char *in, size_t i) \
    { \
        V x = *(const V##_memory *)(in + sizeof(x[0]) * i); \
        return h.from == TLY_BOOL8 ? (V)(x != 0) & 1 : x; \
    } \
    INLINE void store_##V(struct how h, V x, unsigned char *out, size_t i) \
    { \
        put_whole(out + sizeof(x[0]) * i, (W)x, h.stream); \
    } \
    INLINE V combine_##V(struct how h, V a, V b) \
    { \
        V less; \
        switch (h.op) { \
        case TALLY_SUM: \
            return a + b; \
        case TALLY_PRODUCT: \
            return a * b; \
        case TALLY_BAND: \
            return a & b; \
        case TALLY_BOR: \
            return a | b; \
        case TALLY_BXOR: \
            return a ^ b; \
        default: \
            less = is_unsigned(h.from) ? (V)(a < b) : (V)((SIGNED)a < (SIGNED)b); \
            return h.op == TALLY_MIN ? (a & less) | (b & ~less) : (b & less) | (a & ~less); \
        } \
    }
INTEGER(B, SB)
INTEGER(H, SH)
INTEGER(W, SW)
INTEGER(Q, SQ)

/* --- the tree ------------------------------------------------------------------------------------------- */

/* tree_V is T of reduce.h for up to 8 rows, unrolled by the constant n.  Blocks are of 512 bytes, of 256 where
 * an element has two: these are widened, and so take as many steps.  Under sanitizers (TLY_ROLLED) n stays a variable:
 * they check the same loads, and the compiler has a fifth of the work. */
#ifdef TLY_ROLLED
#define LOOPS(V) loop_##V(h, n, in, out, count);
#else
#define ROWS(V, n) \
    case n: \
        loop_##V(h, n, in, out, count); \
        break
#define LOOPS(V) \
    switch (n) { \
        ROWS(V, 1); \
        ROWS(V, 2); \
        ROWS(V, 3); \
        ROWS(V, 4); \
        ROWS(V, 5); \
        ROWS(V, 6); \
        ROWS(V, 7); \
        ROWS(V, 8); \
    }
#endif
#define TREE(V) \
    INLINE V pair_##V(struct how h, int n, const unsigned char *const in[], size_t i) \
    { \
        V a = load_##V(h, in[0], i); \
        return n == 1 ? a : combine_##V(h, a, load_##V(h, in[1], i)); \
    } \
    INLINE V quad_##V(struct how h, int n, const unsigned char *const in[], size_t i) \
    { \
        return n <= 2 ? pair_##V(h, n, in, i) \
                      : combine_##V(h, pair_##V(h, 2, in, i), pair_##V(h, n - 2, in + 2, i)); \
    } \
    INLINE V tree_##V(struct how h, int n, const unsigned char *const in[], size_t i) \
    { \
        return n <= 4 ? quad_##V(h, n, in, i) \
                      : combine_##V(h, quad_##V(h, 4, in, i), quad_##V(h, n - 4, in + 4, i)); \
    } \
    INLINE void loop_##V(struct how h, int n, const void *const in[], unsigned char *out, size_t count) \
    { \
        const unsigned char *row[TLY_FOLD_MAX] = {0}; \
        for (int j = 0; j < n; j++) \
            row[j] = in[j]; \
        const size_t size = tly_format_size(h.from), block = size == 2 ? 128 : 512 / size; \
        for (size_t i = 0, end; i < count;) { \
            end = h.ask && count - i > block ? i + block : count; \
            if (h.ask) \
                ask(row, n, i, block, size); \
            for (; i < end; i += sizeof(V) / sizeof((V){0}[0])) \
                store_##V(h, tree_##V(h, n, row, i), out, i); \
        } \
    } \
    INLINE void fold_##V(struct how h, int n, const void *const in[], unsigned char *out, size_t count) \
    { \
        LOOPS(V) \
    }
TREE(F)
TREE(D)
TREE(B)
TREE(H)
TREE(W)
TREE(Q)

/* --- from what is asked to the loop that does it -------------------------------------------------------- */

INLINE struct how how(const struct tly_fold *f, enum tly_format from, enum tly_format to, int op, bool scaled)
{
    return (struct how){from, to, op, scaled, f->stream, f->ask, f->prescale, f->divisor, f->postscale};
}

#define ARGUMENTS const struct tly_fold *f, const void *const in[], unsigned char *out, size_t count

/* The loops of one operation.  All in one function would take a compiler with sanitizers several times as long. */
#define OP(name, V, from, to, op, scaled) \
    static __attribute__((noinline)) void name(ARGUMENTS) \
    { \
        fold_##V(how(f, from, to, op, scaled), f->n, in, out, count); \
    }
#define CASE(op, name) \
    case op: \
        name(f, in, out, count); \
        break

/* Scaled sums have loops of their own; the rarer reductions always multiply: by 1 that changes nothing but
 * NaNs, which are stored as the canonical one anyway. */
#define FLOATS(name, V, from, to) \
    OP(name##_sum, V, from, to, TALLY_SUM, false) \
    OP(name##_scaled_sum, V, from, to, TALLY_SUM, true) \
    OP(name##_product, V, from, to, TALLY_PRODUCT, true) \
    OP(name##_min, V, from, to, TALLY_MIN, true) \
    OP(name##_max, V, from, to, TALLY_MAX, true) \
    static void name(ARGUMENTS) \
    { \
        switch (f->op) { \
            CASE(TALLY_PRODUCT, name##_product); \
            CASE(TALLY_MIN, name##_min); \
            CASE(TALLY_MAX, name##_max); \
        case TALLY_SUM: \
            if (f->prescale != 1 || f->divisor != 1 || f->postscale != 1) \
                name##_scaled_sum(f, in, out, count); \
            else \
                name##_sum(f, in, out, count); \
        } \
    }
FLOATS(f32, F, TLY_F32, TLY_F32)
FLOATS(f64, D, TLY_F64, TLY_F64)
FLOATS(f16, F, TLY_F16, TLY_F16)
FLOATS(f16_partial, F, TLY_F16, TLY_F32)
FLOATS(partial_f16, F, TLY_F32, TLY_F16)
FLOATS(bf16, F, TLY_BF16, TLY_BF16)
FLOATS(bf16_partial, F, TLY_BF16, TLY_F32)
FLOATS(partial_bf16, F, TLY_F32, TLY_BF16)

#define INTEGERS(name, V, format) \
    OP(name##_sum, V, format, format, TALLY_SUM, false) \
    OP(name##_product, V, format, format, TALLY_PRODUCT, false) \
    OP(name##_min, V, format, format, TALLY_MIN, false) \
    OP(name##_max, V, format, format, TALLY_MAX, false) \
    static void name(ARGUMENTS) \
    { \
        switch (f->op) { \
            CASE(TALLY_SUM, name##_sum); \
            CASE(TALLY_PRODUCT, name##_product); \
            CASE(TALLY_MIN, name##_min); \
            CASE(TALLY_MAX, name##_max); \
        } \
    }
INTEGERS(s8, B, TLY_S8)
INTEGERS(u8, B, TLY_U8)
INTEGERS(s16, H, TLY_S16)
INTEGERS(s32, W, TLY_S32)
INTEGERS(s64, Q, TLY_S64)
INTEGERS(u16, H, TLY_U16)
INTEGERS(u32, W, TLY_U32)
INTEGERS(u64, Q, TLY_U64)

OP(c64, F, TLY_F32, TLY_F32, TLY_COMPLEX_PRODUCT, true)
OP(c128, D, TLY_F64, TLY_F64, TLY_COMPLEX_PRODUCT, true)

#define BITS(name, format) \
    OP(name##_and, B, format, format, TALLY_BAND, false) \
    OP(name##_or, B, format, format, TALLY_BOR, false) \
    OP(name##_xor, B, format, format, TALLY_BXOR, false) \
    static void name(ARGUMENTS) \
    { \
        switch (f->op) { \
            CASE(TALLY_BAND, name##_and); \
            CASE(TALLY_BOR, name##_or); \
            CASE(TALLY_BXOR, name##_xor); \
        } \
    }
BITS(bits, TLY_S8)
BITS(booleans, TLY_BOOL8)

typedef void whole_fn(ARGUMENTS);

static void whole(ARGUMENTS)
{
    static whole_fn *const same[] = {
        [TLY_F32] = f32, [TLY_F64] = f64, [TLY_F16] = f16, [TLY_BF16] = bf16, [TLY_S8] = s8,
        [TLY_U8] = u8,   [TLY_S16] = s16, [TLY_S32] = s32, [TLY_S64] = s64,   [TLY_BOOL8] = booleans,
        [TLY_U16] = u16, [TLY_U32] = u32, [TLY_U64] = u64};

    if (f->op == TLY_COMPLEX_PRODUCT)
        (f->from == TLY_F32 ? c64 : c128)(f, in, out, count);
    else if (f->from != f->to && f->to == TLY_F32)
        (f->from == TLY_F16 ? f16_partial : bf16_partial)(f, in, out, count);
    else if (f->from != f->to)
        (f->to == TLY_F16 ? partial_f16 : partial_bf16)(f, in, out, count);
    else if (f->op >= TALLY_BAND && f->from != TLY_BOOL8) /* whatever the integers, these are bytes */
        bits(f, in, out, count * tly_format_size(f->from));
    else
        same[f->from](f, in, out, count);
}

void TLY_FOLD(const struct tly_fold *given, const void *const in[], void *out, size_t count)
{
    struct tly_fold cached;
    const struct tly_fold *f = given; /* to copy what was just written takes as long as a short sum */
    size_t from = tly_format_size(f->from), to = tly_format_size(f->to), head = 0;
    size_t unit = f->op == TLY_COMPLEX_PRODUCT ? 2 * to : to; /* what the head must not cut in two */
    bool half = f->from == TLY_F16 || f->from == TLY_BF16 || f->from != f->to;
    size_t lanes = TLY_VECTOR / (half ? sizeof(float) : from);
    const void *part[TLY_FOLD_MAX];

    const int n = f->n;
    assert(n >= 1 && n <= TLY_FOLD_MAX);
    if (count < lanes || (f->from >= TLY_S8 && (f->prescale != 1 || f->divisor != 1 || f->postscale != 1))) {
        tly_fold_scalar(f, in, out, count);
        return;
    }
    if (!f->stream && count % lanes == 0) {
        whole(f, in, out, count);
        return;
    }
    if (f->stream && (uintptr_t)out % unit != 0) {
        cached = *f;
        cached.stream = false;
        f = &cached;
    }
    if (f->stream)
        head = -(uintptr_t)out % TLY_VECTOR / to;
    if (head > count)
        head = count;
    size_t body = (count - head) / lanes * lanes;

    if (head > 0)
        tly_fold_scalar(f, in, out, head);
    for (int j = 0; j < n; j++)
        part[j] = (const unsigned char *)in[j] + head * from;
    whole(f, part, (unsigned char *)out + head * to, body);
    if (head + body == count)
        return;
    for (int j = 0; j < n; j++)
        part[j] = (const unsigned char *)part[j] + body * from;
    tly_fold_scalar(f, part, (unsigned char *)out + (head + body) * to, count - head - body);
}
