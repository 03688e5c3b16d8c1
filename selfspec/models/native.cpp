// Products of a few rows with weights, and whole passes over tokens of one or several sequences, for processors: what
// decoding spends its time on. Compiled on the machine that it runs on (`native.py`), for its vectors.
//
// Every output of a row is summed in one order, whatever other rows there are: a row gives the same bits alone and
// among others, in a pass too. Outputs are shared out among threads, in runs of 16; no sum is ever split.

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_FMA)
#include <arm_neon.h>
#endif
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define TILES
#endif

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__) && defined(__AVX512DQ__)
#define V 16  // floats in a vector
#elif defined(__AVX__)
#define V 8
#else
#define V 4
#endif
constexpr int ROWS = V >= 16 ? 12 : 8;  // rows that a weight is read once for, as far as registers reach
constexpr int MANY = 8;                  // of many rows: fewer stay nearer, while other weights are read
constexpr int PACKED = V >= 8 ? 6 : 0;   // rows that are laid side by side first, where vectors are long
constexpr int ONCE = 12;                 // such rows that a weight is read once for, where it is not fetched beforehand
constexpr int64_t AHEAD = 4096;          // bytes from weights that are multiplied to those that are prefetched: of rows, at least

typedef float floats __attribute__((vector_size(V * 4), aligned(4)));
typedef int32_t ints __attribute__((vector_size(V * 4), aligned(4)));
typedef uint16_t halves __attribute__((vector_size(V * 2), aligned(2)));
typedef int8_t bytes __attribute__((vector_size(V), aligned(1)));

#if V == 16 && defined(__AVX512BF16__) && defined(__AVX512BW__)
#define PAIRS  // the processor multiplies pairs of bfloat16 numbers with pairs, and adds to float32 sums
#endif

enum Kind : int64_t { FLOAT32, BFLOAT16, INT8, INT4, BLOCKS8, BLOCKS4, BLOCKS5, SUPER4, SUPER5, SUPER6, JOINED, STORED_BFLOAT16 = 16, FLOAT16 };

constexpr int PAIRED = 32;  // BFLOAT16 whose inputs are rounded to bfloat16 first, as a bfloat16 model's are: in templates only

// A weight [out, in]. STORED_BFLOAT16 and FLOAT16: of a float32 model whose weights they hold exactly; sums have the bits
// that those of FLOAT32 have.
//
// BLOCKS8, BLOCKS4 and BLOCKS5, as GGUF files hold them: values * scale, and values * scale + zero, for each output and 32
// inputs, scales and zeros float16, the scale first. Of 32 inputs, the low four bits of the first 16 are the low halves of
// 16 bytes, those of the others the high halves; 4 bytes with their fifth bits follow, the first input's lowest.
//
// SUPER4, SUPER5 and SUPER6: the same values, 6 bits with 8 bytes of their upper two bits. For each output and 256 inputs,
// `scale` holds of SUPER4 and SUPER5 two float16, a scale of scales and one of zeros, and for each 32 inputs a byte's scale,
// then a byte's zero, which is subtracted; of SUPER6 a float16 and a signed byte's scale for each 16 inputs, of values - 32.
//
// JOINED: `group` weights at `values`, whose outputs follow one another; each has a bias of its own.
//
// INT8 and INT4 in tiles of 16 outputs, padded with zeros. INT8: (bytes - 128) * scale, a bfloat16 for each output; of a
// tile, 4 inputs of each output, then the next 4, up to a multiple of 32 inputs. INT4: (values - 8) * scale + zero; of a
// tile, 8 inputs of each output as 4 bytes, of which the low halves are the first 4 inputs; for 2^group inputs the 16
// scales, then the 16 zeros, each bfloat16.
struct Weight {
    int64_t kind, out, in, group, bias_kind;  // the bias is FLOAT32 or BFLOAT16
    const char *values;
    const void *scale, *bias;  // no bias: null
};

enum NormKind : int64_t { NO_NORM, RMS, LAYER };  // RMSNorm, LayerNorm

// A norm of vectors of `size` numbers. `weight`, plus `plus`, and `bias` (none: null) are of the pass's kind.
struct Norm {
    int64_t kind, size;
    double eps, plus;
    const void *weight, *bias;
};

// A sub-layer: `factor` times `after` of the product of `onto` is added to the stream; `into` reads the stream by way of
// `before`. No `onto`: the sub-layer is skipped. No `into`: `onto` reads what `into` would read.
struct SubLayer {
    const Weight *into, *onto;
    Norm before, after;
    double factor;
};

enum Activation : int64_t { LINEAR, SILU, GELU, GELU_TANH };

// A layer. `spec`: which `Spec` of the place its attention has. `queries`, `keys`: norms of each head, or, as large as all of
// them, of all heads. `apart`: queries, keys and values follow one another head by head, and not all heads of each. Scores s
// are `cap` * tanh(s / `cap`), unless that is 0. `gated`: `mlp.into` has gates, activated, which multiply as many other
// outputs; else all are activated. `parallel`: the MLP reads the layer's input, and not what attention adds to it.
struct Layer {
    SubLayer attention, mlp;
    Norm queries, keys;
    double cap;
    int64_t spec, apart, activation, gated, parallel;
};

struct Pass {
    int64_t kind;  // of norms' weights and of the cache: FLOAT32 or BFLOAT16; all else is computed in float32
    int64_t layers, hidden, heads, kv_heads, head_dim, intermediate;  // `intermediate`: the most inputs of an MLP's `onto`
    double scaling;  // of queries
    const Layer *layer;
    Norm norm;  // the last one
};

// What attention of some layers has in common: `cos` and `sin` [positions, head_dim], of which the first `rotary_dim` numbers
// turn, in pairs of neighbours (`interleaved`) or of two halves; a token sees the last `window` positions, its own one among
// them (0: all).
struct Spec {
    const float *cos, *sin;
    int64_t rotary_dim, interleaved, window;
};

// `n` tokens of one sequence. Its slots lie in blocks of `Place::stride`, whose numbers are in `blocks`. A token sees the
// slots up to its own, or, with `masks`, for each `Spec` one [n, kv_len - from] of 0 and -inf, which is added to scores, all
// those before `from`, and of those from there on what it shows. A window hides slots by their numbers: with masks, which tell
// of it themselves, only those before `from`. No slot from `kv_len` on is visible. In all layers whose attention runs, the slots
// before `rounded` have int8 copies already, in blocks of `ROUNDED_SLOTS` whose numbers are in `rounded_blocks`, counted through
// a key head: of a static cache, whose rows are one block each.
struct Segment {
    int64_t n, kv_len, from, rounded;
    const int64_t *blocks, *rounded_blocks;
    const float *const *masks;
};

// Where a pass's `n` tokens stand, those of a segment one after the other. Keys
// [layers, blocks, kv_heads, head_dim, stride] and values [layers, blocks, kv_heads, stride, head_dim]. `kv_len`: the most
// that a segment has. The int8 copies of keys [layers, rows, kv_heads, rounded_blocks, head_dim, ROUNDED_SLOTS], of values the
// last two the other way round, and their scales [layers, rows, kv_heads, rounded_blocks, ROUNDED_SLOTS].
struct Place {
    int64_t n, kv_len, stride, each_layer;  // numbers from a layer's keys to the next one's
    int64_t segments;
    const Segment *segment;
    const int64_t *positions, *slots;
    const Spec *spec;
    void *keys, *values;
    int8_t *rounded_keys, *rounded_values;
    float *key_scales, *value_scales;
    // Whether attention reads the int8 copies; numbers from a layer's to the next one's; blocks of a head.
    int64_t rounded, each_rounded, rounded_blocks;
    int64_t num_captured;  // residual streams to copy, each [n, hidden], one after the other to `captured`
    const int64_t *captured_layers;  // the layers whose input each of them is
    float *captured;
};

INLINE floats at(const float *p) { return *(const floats *)p; }
INLINE floats at(const uint16_t *p) {
#if V == 16  // asked for, as compilers widen in two halves otherwise
    return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif V == 8 && defined(__AVX2__)
    return (floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    return (floats)(__builtin_convertvector(*(const halves *)p, ints) << 16);
#endif
}
INLINE void keep(float *p, float x) { *p = x; }
INLINE void keep(uint16_t *p, float x) {  // to the nearest, the even one of two
    uint32_t bits;
    memcpy(&bits, &x, 4);
    *p = x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
// a * b + c, rounded once where the processor can: asked for, as compilers decide by the code around it otherwise.
INLINE floats fused(floats a, floats b, floats c) {
#if V == 16
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif V == 8 && defined(__FMA__)
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif V == 4 && defined(__ARM_FEATURE_FMA)
    return (floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}
// In a register, for all that reads it: compilers read it from memory for each of its products otherwise.
INLINE floats held(floats x) {
#if V == 16
    asm("" : "+v"(x));
#elif V == 8
    asm("" : "+x"(x));
#endif
    return x;
}
// A number V times: asked for, as compilers add it to zeros otherwise.
INLINE floats spread(float x) {
#if V == 16
    return (floats)_mm512_set1_ps(x);
#elif V == 8
    return (floats)_mm256_set1_ps(x);
#else
    return floats{} + x;
#endif
}
INLINE floats to_floats(ints x) { return __builtin_convertvector(x, floats); }
INLINE float bfloat16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
INLINE float float16(uint16_t x) {
#if defined(__F16C__)
    return _cvtsh_ss(x);
#else
    uint32_t bits = (uint32_t)(x & 0x7fff) << 13, sign = (uint32_t)(x & 0x8000) << 16;
    float f;
    memcpy(&f, &bits, 4);
    f *= 0x1p112f;  // what its exponent is further from 0 than float32's: subnormal numbers come out right, too
    memcpy(&bits, &f, 4);
    bits |= sign;
    memcpy(&f, &bits, 4);
    return f;
#endif
}
INLINE floats at_float16(const uint16_t *p) {
#if V == 16
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif V == 8 && defined(__F16C__)
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif V == 4 && defined(__aarch64__)
    return (floats)vcvt_f32_f16(vld1_f16((const float16_t *)p));
#else
    floats x;
    for (int i = 0; i < V; i++) x[i] = float16(p[i]);
    return x;
#endif
}
INLINE ints widened(const int8_t *p) {
#if V == 16
    return (ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX2__)
    return (ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    return __builtin_convertvector(*(const bytes *)p, ints);
#endif
}
#if V > 4
INLINE float total8(__m256 a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
#endif
INLINE float total(floats a) {  // of both halves, of theirs, and so on, on every processor
#if V == 16
    return total8(_mm256_add_ps(_mm512_castps512_ps256((__m512)a), _mm512_extractf32x8_ps((__m512)a, 1)));
#elif V == 8
    return total8((__m256)a);
#else
    return (a[0] + a[2]) + (a[1] + a[3]);
#endif
}

// What `total` gives of each of R times O vectors, the same bits, several at once.
template <int R, int O> INLINE void totals(const floats (&a)[R][O], float (&out)[R * O]) {
    constexpr int N = R * O;
    int n = 0;
#define NTH(n) a[(n) / O][(n) % O]
#if V == 16
#define HALVES(n) _mm512_add_ps(_mm512_shuffle_f32x4((__m512)NTH(n), (__m512)NTH(n + 1), 0x44), _mm512_shuffle_f32x4((__m512)NTH(n), (__m512)NTH(n + 1), 0xee))
#pragma GCC unroll 2
    for (; n + 16 <= N; n += 16) {
        __m512 x[4], y[2];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const __m512 p = HALVES(n + 4 * i), q = HALVES(n + 4 * i + 2);
            x[i] = _mm512_add_ps(_mm512_shuffle_f32x4(p, q, 0x88), _mm512_shuffle_f32x4(p, q, 0xdd));
        }
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            const __m512d p = (__m512d)x[2 * i], q = (__m512d)x[2 * i + 1];
            y[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(p, q), (__m512)_mm512_unpackhi_pd(p, q));
        }
        const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(y[0], y[1], 0x88), _mm512_shuffle_ps(y[0], y[1], 0xdd));
        _mm512_storeu_ps(out + n, _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), all));
    }
#pragma GCC unroll 4
    for (; n + 4 <= N; n += 4) {
        const __m512 p = HALVES(n), q = HALVES(n + 2);
        __m512 x = _mm512_add_ps(_mm512_shuffle_f32x4(p, q, 0x88), _mm512_shuffle_f32x4(p, q, 0xdd));
        x = _mm512_add_ps(x, _mm512_permute_ps(x, 0x4e));
        x = _mm512_add_ps(x, _mm512_permute_ps(x, 0xb1));
        _mm_storeu_ps(out + n, _mm512_castps512_ps128(_mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12), x)));
    }
#undef HALVES
#elif V == 8
#pragma GCC unroll 4
    for (; n + 4 <= N; n += 4) {
        const __m256 a0 = (__m256)NTH(n), a1 = (__m256)NTH(n + 1), a2 = (__m256)NTH(n + 2), a3 = (__m256)NTH(n + 3);
        const __m256 p = _mm256_add_ps(_mm256_permute2f128_ps(a0, a1, 0x20), _mm256_permute2f128_ps(a0, a1, 0x31));
        const __m256 q = _mm256_add_ps(_mm256_permute2f128_ps(a2, a3, 0x20), _mm256_permute2f128_ps(a2, a3, 0x31));
        const __m256 x = _mm256_add_ps((__m256)_mm256_unpacklo_pd((__m256d)p, (__m256d)q), (__m256)_mm256_unpackhi_pd((__m256d)p, (__m256d)q));
        const __m256 all = _mm256_add_ps(x, _mm256_permute_ps(x, 0xb1));  // of 0 and 2, each twice, then of 1 and 3
        _mm_storeu_ps(out + n, _mm_unpacklo_ps(_mm_shuffle_ps(_mm256_castps256_ps128(all), _mm256_castps256_ps128(all), 0x08), _mm_shuffle_ps(_mm256_extractf128_ps(all, 1), _mm256_extractf128_ps(all, 1), 0x08)));
    }
#endif
#pragma GCC unroll 12
    for (; n < N; n++) out[n] = total(NTH(n));
#undef NTH
}

// e^x = y 2^n: the whole number n, and y for it, between the roots of 1/2 and 2.
INLINE floats exponent_of(floats x) { return fused(x, floats{} + 1.44269504088896341f, floats{} + 12582912.0f) - 12582912.0f; }
INLINE floats exponential_beside(floats x, floats n) {
    floats r = fused(n, floats{} - 0.693359375f, x);
    r = fused(n, floats{} + 2.12194440e-4f, r);
    floats y = floats{} + 1.9875691500e-4f;
    y = fused(y, r, floats{} + 1.3981999507e-3f);
    y = fused(y, r, floats{} + 8.3334519073e-3f);
    y = fused(y, r, floats{} + 4.1665795894e-2f);
    y = fused(y, r, floats{} + 1.6666665459e-1f);
    y = fused(y, r, floats{} + 5.0000001201e-1f);
    return fused(y * r, r, r) + 1.0f;
}
// y times 2^n, of a whole n up to 127; 0 below 2^-126, or less.
INLINE floats scaled(floats y, floats n) {
#if V == 16
    return (floats)_mm512_scalef_ps((__m512)y, (__m512)n);
#else
    const ints power = __builtin_convertvector(n, ints) + 127;
    return y * (floats)((power > 0 ? power : ints{}) << 23);
#endif
}

// e^x, within 2 units in the last place; 0 below -87.
INLINE floats exponential(floats x) {
    const ints none = x < -87.0f;
    x = x > 88.0f ? floats{} + 88.0f : x;
    x = none ? floats{} : x;
    const floats n = exponent_of(x);
    return none ? floats{} : scaled(exponential_beside(x, n), n);
}

// tanh x, within 2 units in the last place.
INLINE floats hyperbolic_tangent(floats x) {
    const floats square = x * x, size = (floats)((ints)x & 0x7fffffff), large = 1.0f - 2.0f / (exponential(2.0f * size) + 1.0f);
    floats y = floats{} - 5.70498872745e-3f;
    y = fused(y, square, floats{} + 2.06390887954e-2f);
    y = fused(y, square, floats{} - 5.37397155531e-2f);
    y = fused(y, square, floats{} + 1.33314422036e-1f);
    y = fused(y, square, floats{} - 3.33332819422e-1f);
    return size < 0.625f ? fused(y * square, x, x) : x < 0.0f ? -large : large;
}

// The share of x that GELU leaves: (1 + erf(x / sqrt 2)) / 2 (Numerical Recipes, `erfcc`: 1.2e-7 of it).
INLINE floats normal_distribution(floats x) {
    const floats z = (floats)((ints)x & 0x7fffffff) * 0.70710678118654752f, t = 1.0f / (1.0f + 0.5f * z);
    constexpr float SERIES[] = {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f, 0.09678418f, 0.37409196f, 1.00002368f, -1.26551223f};
    floats y = floats{} + 0.17087277f;
    for (const float factor : SERIES) y = fused(y, t, floats{} + factor);
    y = 0.5f * t * exponential(y - z * z);
    return x < 0.0f ? y : 1.0f - y;
}

INLINE floats activated_by(int64_t activation, floats x) {
    if (activation == LINEAR) return x;
    if (activation == GELU) return x * normal_distribution(x);
    // (1 + tanh u) / 2 is 1 / (1 + exp(-2 u))
    const floats u = activation == SILU ? x : 1.5957691216057308f * fused(x * x * x, floats{} + 0.044715f, x);
    return x / (exponential(-u) + 1.0f);
}

constexpr int64_t BLOCK = 32;  // inputs of a block: of INT8's rows, and of what GGUF files hold
constexpr bool grouped(int kind) { return kind >= BLOCKS8 && kind <= SUPER6; }
constexpr int bits_of(int kind) {
    return kind == BLOCKS8 ? 8 : kind == SUPER6 ? 6 : kind == BLOCKS5 || kind == SUPER5 ? 5 : 4;
}

template <int K> constexpr int64_t row_bytes(int64_t in) {
    return K == FLOAT32 ? 4 * in : K == BFLOAT16 || K == FLOAT16 || K == PAIRED ? 2 * in : in * bits_of(K) / 8;
}

// Whether weights are fetched from far ahead while others are multiplied. Rows then take turns, `PACKED` at most in each, and each
// turn loads the weights anew, which short vectors do too slowly where they convert numbers as well.
template <int K> constexpr bool fetches() { return PACKED > 0 && !grouped(K) && (V >= 16 || K == FLOAT32); }

// V values of a weight's row from input k on, of FLOAT32 or BFLOAT16.
template <int K> INLINE floats load(const char *row, int64_t k) {
    if constexpr (K == FLOAT32) return at((const float *)row + k);
    if constexpr (K == FLOAT16) return at_float16((const uint16_t *)row + k);
    return at((const uint16_t *)row + k);
}
template <int K> INLINE float load_one(const char *row, int64_t k) {
    if constexpr (K == FLOAT32) return ((const float *)row)[k];
    if constexpr (K == FLOAT16) return float16(((const uint16_t *)row)[k]);
    return bfloat16(((const uint16_t *)row)[k]);
}

// Weights that are fetched while others are multiplied: at each step of the inputs, bytes from `from` on, in the order of
// memory. It is read a fifth faster so than the weights of several outputs side by side. Of an output, the weights of the inputs
// that are multiplied at once end at `end`; those of the next output begin `skip` bytes later, and end `row` bytes later.
// `step`: bytes that each of several turns fetches.
struct Ahead {
    const char *from, *end;
    int64_t row, skip, step;
};

// What a step fetches: what comes some KB later, into the first-level cache alone (SOON); or what comes after all turns, into the
// second, as the first has room only for what is multiplied now: a step's bytes (ALL), or this turn's share of them (SHARE).
enum Fetch { SOON, ALL, SHARE };

// Fetches for a step that multiplies `BYTES` of weights.
template <int BYTES, Fetch FETCH> INLINE void fetch(Ahead &ahead) {
    if constexpr (FETCH == ALL) {
#pragma GCC unroll 8
        for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(ahead.from + i, 0, 2);
        ahead.from += BYTES;
    } else if constexpr (FETCH == SOON) {
#pragma GCC unroll 8
        for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(ahead.from + i, 0, 0);
        ahead.from += BYTES;
        if (ahead.from >= ahead.end) ahead.from += ahead.skip, ahead.end += ahead.row;
    } else {
        __builtin_prefetch(ahead.from, 0, 2);
        if (ahead.step > 64) __builtin_prefetch(ahead.from + 64, 0, 2);
        ahead.from += ahead.step;
    }
}

// Adds products of inputs k to `end` of R rows with the weights of O outputs from `from` on, each `row` bytes after the one
// before. `SIDE`: a vector of each of the rows, then the next ones, lie side by side in `x`. Returns the inputs done.
template <int K, int R, int O, bool SIDE, Fetch FETCH>
INLINE int64_t sums(const char *from, int64_t row, const float *x, int64_t ldx, int64_t k, int64_t end, Ahead ahead, floats (&a)[R][O]) {
    for (; k + V <= end; k += V) {
        floats weights[O];
#pragma GCC unroll 12
        for (int i = 0; i < O; i++) weights[i] = load<K>(from + i * row, k);
        fetch<O * (int)row_bytes<K>(V), FETCH>(ahead);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const float *const from_row = SIDE ? x + k * R + r * V : x + r * ldx + k;
            const floats of_row = R > 2 ? held(at(from_row)) : at(from_row);
#pragma GCC unroll 12
            for (int i = 0; i < O; i++) a[r][i] = fused(of_row, weights[i], a[r][i]);
        }
    }
    return k;
}

#if defined(PAIRS)
// The same of PAIRED weights, with `in` inputs; rows in bfloat16 lie side by side in vectors of 2 V numbers.
template <int R, int O, Fetch FETCH>
INLINE void sums_of_pairs(const char *from, int64_t row, const uint16_t *x, int64_t k, int64_t end, int64_t in, Ahead ahead, floats (&a)[R][O]) {
    for (; k < end; k += 2 * V) {
        __m512i weights[O];
        const __mmask32 some = in - k < 2 * V ? (1u << (in - k)) - 1 : ~0u;
#pragma GCC unroll 12
        for (int i = 0; i < O; i++) {
            const char *const at = from + i * row + 2 * k;
            weights[i] = some == ~0u ? _mm512_loadu_si512(at) : _mm512_maskz_loadu_epi16(some, at);
        }
        fetch<O * (int)row_bytes<PAIRED>(2 * V), FETCH>(ahead);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const __m512i of_row = (__m512i)held((floats)_mm512_loadu_si512(x + k * R + r * 2 * V));
#pragma GCC unroll 12
            for (int i = 0; i < O; i++) a[r][i] = (floats)_mm512_dpbf16_ps((__m512)a[r][i], (__m512bh)of_row, (__m512bh)weights[i]);
        }
    }
}
#endif
#include "gguf_blocks.h"

INLINE float bias_of(const Weight &w, int64_t output) {
    return w.bias_kind == BFLOAT16 ? bfloat16(((const uint16_t *)w.bias)[output]) : ((const float *)w.bias)[output];
}

// An output's sum, with its bias, to where it belongs.
INLINE void put(const Weight &w, int64_t output, float sum, float *to, bool add) {
    if (w.bias) sum += bias_of(w, output);
    *to = add ? *to + sum : sum;
}

// The sums of `rows` rows, R at most, with O outputs from o on, with their biases, to where they belong.
template <int R, int O> INLINE void put_all(const Weight &w, int64_t o, int64_t rows, const float (&sums)[R * O], float *y, int64_t ldy, bool add) {
    float bias[O] = {};
    if (w.bias)
        for (int i = 0; i < O; i++) bias[i] = bias_of(w, o + i);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
        if (r >= rows) break;
        float *const to = y + r * ldy + o;
        typedef float some __attribute__((vector_size(O == 4 ? 16 : 4), aligned(4)));
#pragma GCC unroll 4
        for (int i = 0; i < O; i += sizeof(some) / 4) {
            some sum = *(const some *)(sums + r * O + i);
            if (w.bias) sum += *(const some *)(bias + i);
            *(some *)(to + i) = add ? *(const some *)(to + i) + sum : sum;
        }
    }
}

// What a block of products is of: `n` rows, which lie side by side in `side` too where `part` lays them so, filled up as `room`
// says, and the inputs that it covers. Sums of fewer than all inputs are kept in `sums`, and go on from there. All rows are multiplied with
// the same weights in `turns` turns, of which this is number `turn`; each fetches its share of the weights `next` bytes after
// those, if that is not 0. `after`: the weights that follow these outputs and inputs, to be prefetched; it may lie past the end.
struct Rows {
    int64_t n;
    const float *x;
    int64_t ldx;
    const void *side;
    int64_t from, to;
    bool last;
    floats *sums;
    int64_t turn, turns, next;
    const char *after;
};

template <bool SIDE> INLINE const float *rows_at(const Rows &rows) { return SIDE ? (const float *)rows.side : rows.x; }

// The sums of R rows with O outputs over the inputs that `rows` covers. Returns the inputs done.
template <int K, int R, int O, bool SIDE, Fetch FETCH>
INLINE int64_t sums_of_inputs(const Weight &w, const char *from, int64_t row, const Rows &rows, Ahead ahead, floats (&a)[R][O]) {
#if defined(PAIRS)
    if constexpr (K == PAIRED) {
        sums_of_pairs<R, O, FETCH>(from, row, (const uint16_t *)rows.side, rows.from, rows.to, w.in, ahead, a);
        return w.in;
    }
#endif
    return sums<K, R, O, SIDE, FETCH>(from, row, rows_at<SIDE>(rows), rows.ldx, rows.from, rows.to, ahead, a);
}

// Outputs o to o + O of R rows, of outputs up to `to`.
template <int K, int R, int O, bool SIDE>
INLINE void block(const Weight &w, int64_t o, int64_t to, const Rows &rows, floats *kept, float *y, int64_t ldy, bool add) {
    const int64_t row = row_bytes<K>(w.in);
    const char *from = w.values + o * row;
    floats a[R][O] = {};
    int64_t k = w.in;
    constexpr bool IN_PARTS = SIDE && !grouped(K), FETCHES = SIDE && fetches<K>() && O > 1;
    if (IN_PARTS && rows.from > 0) {  // one by one, as compilers keep what `memcpy` reads in memory
#pragma GCC unroll 24
        for (int i = 0; i < R * O; i++) a[i / O][i % O] = kept[i];
    }
    if constexpr (K == SUPER4)
        sums_of_decoded<R, O, SIDE>(w, o, rows_at<SIDE>(rows), rows.ldx, a);
    else if constexpr (grouped(K))
        sums_of_blocks<K, R, O>(w, o, rows_at<SIDE>(rows), rows.ldx, a);
    else if (FETCHES && rows.next) {
        constexpr int STEP = K == PAIRED ? 2 * V : V;
        const int64_t step = O * row_bytes<K>(STEP) / rows.turns;
        const Ahead ahead = {from + rows.next + O * row * rows.turn / rows.turns + rows.from / STEP * step, nullptr, 0, 0, step};
        k = rows.turns > 1 ? sums_of_inputs<K, R, O, SIDE, SHARE>(w, from, row, rows, ahead, a)
                           : sums_of_inputs<K, R, O, SIDE, ALL>(w, from, row, rows, ahead, a);
    } else {
        constexpr int64_t LEAST = O > 2 ? AHEAD : 2 * AHEAD;  // the step of fewer outputs takes less time
        const int64_t piece = row_bytes<K>(rows.to - rows.from), other = o + O * (1 + LEAST / (O * piece + 1));
        const char *const next = other < to ? w.values + other * row + row_bytes<K>(rows.from) : rows.after + (other - to) * row;
        k = sums_of_inputs<K, R, O, SIDE, SOON>(w, from, row, rows, {next, next + piece, row, row - piece, 0}, a);
    }
    if (IN_PARTS && !rows.last) {
#pragma GCC unroll 24
        for (int i = 0; i < R * O; i++) kept[i] = a[i / O][i % O];
        return;
    }
    float sums_of[R * O];
    totals<R, O>(a, sums_of);
    if constexpr (!grouped(K) && K != PAIRED)
        for (; k < w.in; k++)
            for (int r = 0; r < rows.n; r++)
                for (int i = 0; i < O; i++) sums_of[r * O + i] += rows.x[r * rows.ldx + k] * load_one<K>(from + i * row, k);
    put_all<R, O>(w, o, rows.n, sums_of, y, ldy, add);
}

// Outputs of R rows that are multiplied at once.
template <int R, bool SIDE> constexpr int outputs_at_once() {
    if (SIDE) return R <= PACKED ? (V >= 16 || R <= 2 ? 4 : 2) : V < 16 ? 1 : 3;
    if (V >= 16) return R <= 6 ? 4 : 2;
    return R == 1 ? 8 : R == 2 ? 4 : R <= 4 ? 2 : 1;
}

template <int K, int R, bool SIDE>
INLINE void outputs(const Weight &w, int64_t from, int64_t to, const Rows &rows, float *y, int64_t ldy, bool add) {
    constexpr int O = outputs_at_once<R, SIDE>();
    int64_t o = from;
    for (; o + O <= to; o += O) block<K, R, O, SIDE>(w, o, to, rows, rows.sums + (o - from) * R, y, ldy, add);
    for (; o < to; o++) block<K, R, 1, SIDE>(w, o, to, rows, rows.sums + (o - from) * R, y, ldy, add);
}

// Rows that lie side by side for `rows` rows of a turn: where long vectors make further rows nearly free, the compiler makes no
// code of its own for each number. A single row gets an empty one beside it: weights then come up to a tenth faster.
constexpr int room(int64_t rows) { return V >= 16 && rows == 1 ? 2 : V < 16 || rows <= PACKED ? rows : MANY; }

// The same of as many rows as there are, R at most.
template <int K, int R, bool SIDE>
INLINE void of_rows(const Weight &w, int64_t from, int64_t to, const Rows &rows, float *y, int64_t ldy, bool add) {
    if constexpr (R > 0) {
        if ((SIDE ? room(rows.n) : rows.n) == R) return outputs<K, R, SIDE>(w, from, to, rows, y, ldy, add);
        constexpr int FEWER = !SIDE || V < 16 || R <= PACKED ? R - 1 : PACKED;
        return of_rows<K, FEWER, SIDE>(w, from, to, rows, y, ldy, add);
    }
}

// Where a thread keeps what it makes of rows.
struct Kept {
    char *data = nullptr;
    size_t size = 0;
    ~Kept() { free(data); }
    char *of(size_t bytes) {
        if (bytes > size) {
            free(data);
            data = (char *)aligned_alloc(64, size = (bytes + 4095) / 4096 * 4096);
        }
        return data;
    }
};

// The first whole vectors of rows [rows, in], side by side, and zeros to fill them up to `room`.
static void lay_side_by_side(const float *x, int64_t ldx, int64_t rows, int64_t in, float *to) {
    for (int64_t k = 0; k + V <= in; k += V)
        for (int64_t r = 0; r < room(rows); r++, to += V) *(floats *)to = r < rows ? at(x + r * ldx + k) : floats{};
}
#if defined(PAIRS)
// All of them, rounded to bfloat16, the last vector filled up with zeros.
static void lay_side_by_side(const float *x, int64_t ldx, int64_t rows, int64_t in, uint16_t *to) {
    const int64_t width = 2 * V * room(rows);
    memset(to, 0, (in + 2 * V - 1) / (2 * V) * width * 2);
    for (int64_t k = 0; k < in; k += V, to += k % (2 * V) ? 0 : width)
        for (int64_t r = 0; r < rows; r++) {
            const __mmask16 some = in - k < V ? (1u << (in - k)) - 1 : ~0u;
            const __m256bh halves = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(some, x + r * ldx + k));
            _mm256_storeu_si256((__m256i *)(to + r * 2 * V + k % (2 * V)), (__m256i)halves);
        }
}
#endif

constexpr int64_t MOST_TURNS = 8;           // in which short vectors share in fetching
constexpr int64_t NEAREST_BYTES = 7 << 12;  // of rows side by side that are multiplied at once with as much of weights

template <int K>
static void part(const Weight &w, int64_t from, int64_t to, const float *x, int64_t ldx, float *y, int64_t ldy, int64_t rows, bool add) {
    if (from >= to) return;
    constexpr bool SIDES = PACKED > 0 && (K == SUPER4 || !grouped(K));
    constexpr int FEW = fetches<K>() ? 0 : SIDES ? 2 : ROWS;  // that are read where they are
    using Number = std::conditional_t<K == PAIRED, uint16_t, float>;
    const bool beside = SIDES && rows > FEW, in_parts = beside && !grouped(K);
    constexpr int MOST = fetches<K>() ? PACKED : K == SUPER4 && V >= 16 ? MANY : ONCE, STEP = K == PAIRED ? 2 * V : V;
    const int64_t at_once = beside ? (rows <= MOST || K == SUPER4 ? MOST : PACKED) : rows > 2 * ROWS ? MANY : ROWS;
    const int64_t times = (rows + at_once - 1) / at_once, in = (K == PAIRED ? w.in + STEP - 1 : w.in) / STEP * STEP;
    const int64_t each = room((rows + times - 1) / times) * in, row = row_bytes<K>(w.in);  // numbers of rows side by side
    // Of more turns, the shares of a short step's bytes are too small.
    const bool far = fetches<K>() && (V >= 16 || times <= MOST_TURNS);
    int64_t near = 64, parts = 1;  // outputs whose weights stay near while all rows are multiplied with them; parts of inputs
    Number *side = nullptr;
    floats *kept_sums = nullptr;
    if (beside) {
        if (in_parts) parts = 1 + each * (int64_t)sizeof(Number) / (NEAREST_BYTES + 1);
        const int64_t near_bytes = far ? 1 << 17 : 1 << 18;  // of weights, while others are fetched or rows take turns
        near = far || times > 1 ? near_bytes / (row ? row : 1) / 4 * 4 : to - from;
        near = near < 4 ? 4 : parts > 1 && near > 24 ? 24 : near;
        if (near < to - from) near = ((to - from) / ((to - from + near - 1) / near) + 3) / 4 * 4;  // as many each time
        static thread_local Kept kept;
        const int64_t bytes = (times * each * (int64_t)sizeof(Number) + 63) / 64 * 64;
        side = (Number *)kept.of(bytes + (parts > 1 ? near * room(at_once) * sizeof(floats) : 0));
        kept_sums = (floats *)((char *)side + bytes);
        for (int64_t i = 0; i < times; i++) {
            const int64_t first = rows * i / times, last = rows * (i + 1) / times;
            lay_side_by_side(x + first * ldx, ldx, last - first, w.in, side + i * each);
        }
    }
    for (; from < to; from += near)
        for (int64_t i = 0, end = from + near < to ? from + near : to; i < times; i++) {
            const int64_t first = rows * i / times, n = rows * (i + 1) / times - first, next = far && end < to ? near * row : 0;
            Rows these = {n, x + first * ldx, ldx, side + i * each, 0, in, true, kept_sums, i, times, next, w.values + end * row};
            float *const out = y + first * ldy;
            if (!beside) {
                of_rows<K, FEW, false>(w, from, end, these, out, ldy, add);
                continue;
            }
            for (int64_t p = 0; p < parts; p++) {
                these.from = in / STEP * p / parts * STEP;
                these.to = in / STEP * (p + 1) / parts * STEP;
                these.last = p + 1 == parts;
                these.after = w.values + (these.last ? end * row : from * row + row_bytes<K>(these.to));
                of_rows<K, SIDES ? MOST : 0, true>(w, from, end, these, out, ldy, add);
            }
        }
}

// What numbers are multiplied with so that the largest of them is `most`; `back`: what undoes it, which is no number
// where one of them is none.
INLINE float scaled_to(float most, const float *x, int64_t size, float *back) {
    ints largest = {};
    int64_t k = 0;
    for (; k + V <= size; k += V) {
        const ints bits = (ints)at(x + k) & 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    int32_t bits = 0;
    for (int i = 0; i < V; i++) bits = largest[i] > bits ? largest[i] : bits;
    for (; k < size; k++) {
        int32_t other;
        memcpy(&other, x + k, 4);
        bits = (other & 0x7fffffff) > bits ? other & 0x7fffffff : bits;
    }
    float largest_of_all;
    memcpy(&largest_of_all, &bits, 4);
    const bool some = largest_of_all > 1e-30f && largest_of_all < INFINITY;
    *back = some ? largest_of_all / most : bits < 0x7f800000 ? 0 : NAN;
    return some ? most / largest_of_all : 0;
}

#if defined(TILES)
#include "tiles.h"
#endif
#include "quantized.h"

constexpr int64_t NEAR = 512;  // outputs whose weights stay near while more rows than a tile has are multiplied

// BFLOAT16 by tiles where there are such, but for outputs and inputs that fill none.
static void by_tiles(const Weight &w, int64_t from, int64_t to, const float *x, int64_t ldx, float *y, int64_t ldy, int64_t rows, bool add) {
#if defined(TILES)
    if (w.in % LINE == 0 && rows >= 1 && tiles_allowed()) {
        const int64_t whole = from + (to - from) / LINES * LINES;
        for (int64_t end; from < whole; from = end) {
            end = rows > LINES && whole - from > NEAR ? from + NEAR : whole;
            for (int64_t r = 0; r < rows; r += LINES)
                tiled(w, from, end, x + r * ldx, ldx, y + r * ldy, ldy, rows - r < LINES ? rows - r : LINES, add);
        }
    }
#endif
#if defined(PAIRS)
    part<PAIRED>(w, from, to, x, ldx, y, ldy, rows, add);
#else
    part<BFLOAT16>(w, from, to, x, ldx, y, ldy, rows, add);
#endif
}

static void multiply(const Weight &w, int64_t from, int64_t to, const float *x, int64_t ldx, float *y, int64_t ldy, int64_t rows, bool add);

static void joined(const Weight &w, int64_t from, int64_t to, const float *x, int64_t ldx, float *y, int64_t ldy, int64_t rows, bool add) {
    const Weight *const parts = (const Weight *)w.values;
    for (int64_t i = 0, first = 0; i < w.group; first += parts[i++].out) {
        const int64_t begin = from > first ? from - first : 0, end = to - first < parts[i].out ? to - first : parts[i].out;
        if (begin < end) multiply(parts[i], begin, end, x, ldx, y + first, ldy, rows, add);
    }
}

constexpr int64_t MOST_AT_ONCE = 512;  // rows: each thread keeps what it makes of all that are multiplied at once

static void multiply(const Weight &w, int64_t from, int64_t to, const float *x, int64_t ldx, float *y, int64_t ldy, int64_t rows, bool add) {
    for (; rows > MOST_AT_ONCE; rows -= MOST_AT_ONCE, x += MOST_AT_ONCE * ldx, y += MOST_AT_ONCE * ldy)
        multiply(w, from, to, x, ldx, y, ldy, MOST_AT_ONCE, add);
    if (rows < 1) return;
    switch (w.kind) {
        case FLOAT32: return part<FLOAT32>(w, from, to, x, ldx, y, ldy, rows, add);
        case BFLOAT16: return by_tiles(w, from, to, x, ldx, y, ldy, rows, add);
        case INT8: return quantized<INT8>(w, from, to, x, ldx, y, ldy, rows, add);
        case INT4: return quantized<INT4>(w, from, to, x, ldx, y, ldy, rows, add);
        case BLOCKS8: return part<BLOCKS8>(w, from, to, x, ldx, y, ldy, rows, add);
        case BLOCKS5:
        case SUPER4:
        case SUPER5:
        case SUPER6: return part<SUPER4>(w, from, to, x, ldx, y, ldy, rows, add);  // one function for all
        case JOINED: return joined(w, from, to, x, ldx, y, ldy, rows, add);
        case STORED_BFLOAT16: return part<BFLOAT16>(w, from, to, x, ldx, y, ldy, rows, add);  // by no tiles, as FLOAT32
        case FLOAT16: return part<FLOAT16>(w, from, to, x, ldx, y, ldy, rows, add);
        default: return part<BLOCKS4>(w, from, to, x, ldx, y, ldy, rows, add);
    }
}

// The threads that compute together, of which this is one.
struct Team {
    int64_t t, threads;
    Team(int64_t t, int64_t threads) : t(t), threads(threads) {}
#if defined(_OPENMP)
    Team() : t(omp_get_thread_num()), threads(omp_get_num_threads()) {}
#else
    Team() : t(0), threads(1) {}
#endif
    // Where this thread's share of `size` things, in runs of `by`, begins and ends.
    int64_t share(int64_t size, int64_t by) const { return before(t, size, by); }
    int64_t end(int64_t size, int64_t by) const { return before(t + 1, size, by); }
    void wait() const {
        if (threads > 1) {
#pragma omp barrier
        }
    }

private:
    int64_t before(int64_t other, int64_t size, int64_t by) const {
        int64_t at = (size + by - 1) / by * other / threads * by;
        return at < size ? at : size;
    }
};

// What a norm needs to know of a vector.
struct Moments {
    float mean, by;
};
INLINE Moments moments(const Norm &norm, const float *x) {
    if (norm.kind == NO_NORM) return {0, 1};
    floats sum = {}, squares = {};
    if (norm.kind == LAYER)
        for (int64_t k = 0; k < norm.size; k += V) sum += at(x + k);
    const float mean = total(sum) / norm.size;
    for (int64_t k = 0; k < norm.size; k += V) {
        const floats off = at(x + k) - mean;
        squares = fused(off, off, squares);
    }
    return {mean, (float)(1.0 / std::sqrt((double)total(squares) / norm.size + norm.eps))};
}

// Numbers k to k + V of a vector normalised.
template <typename T> INLINE floats normed_at(const Norm &norm, const Moments &of, const float *x, int64_t k) {
    if (norm.kind == NO_NORM) return at(x + k);
    const floats y = (at(x + k) - of.mean) * (at((const T *)norm.weight + k) + (float)norm.plus) * of.by;
    return norm.bias ? y + at((const T *)norm.bias + k) : y;
}

template <typename T> static void normed(const Norm &norm, const float *x, float *out, int64_t n, int64_t size) {
    for (int64_t r = 0; r < n; r++, x += size, out += size) {
        const Moments of = moments(norm, x);
        for (int64_t k = 0; k < size; k += V) *(floats *)(out + k) = normed_at<T>(norm, of, x, k);
    }
}

INLINE void turn(float *head, const Spec &spec, int64_t position, int64_t d) {  // `sin` is negative in a pair's first number
    const float *const cos = spec.cos + position * d, *const sin = spec.sin + position * d;
    const int64_t turning = spec.rotary_dim, half = turning / 2;
    int64_t k = 0;
    if (spec.interleaved) {
        for (; k < turning; k += 2) {
            const float first = head[k], second = head[k + 1];
            head[k] = first * cos[k] + second * sin[k];
            head[k + 1] = second * cos[k + 1] + first * sin[k + 1];
        }
    } else {
        for (; k + V <= half; k += V) {
            floats low = at(head + k), high = at(head + half + k);
            *(floats *)(head + k) = fused(low, at(cos + k), high * at(sin + k));
            *(floats *)(head + half + k) = fused(high, at(cos + half + k), low * at(sin + half + k));
        }
        for (; k < half; k++) {
            float low = head[k], high = head[half + k];
            head[k] = low * cos[k] + high * sin[k];
            head[half + k] = high * cos[half + k] + low * sin[half + k];
        }
    }
    for (k = turning; k < d; k++) head[k] *= cos[k];
}

// Where a head's numbers begin among a row's queries, keys and values: query heads first, then key heads, then value heads.
INLINE int64_t head_offset(const Pass &p, const Layer &layer, int64_t h) {
    return (layer.apart ? h % p.heads * 3 + h / p.heads : h) * p.head_dim;
}

#include "attention.h"

// Normalises and turns a head's queries or keys of all tokens, scales queries, and writes keys and values to the cache;
// `Place::rounded`: in int8 too, with those before them that have no int8 copy yet. `joint`: of all queries, then of all keys of
// each token, where a norm is of all heads.
template <typename T>
static void place_head(const Pass &p, const Layer &layer, const Place &place, int64_t h, const Moments *joint, float *qkv, T *keys, T *values, const Head<int8_t> &rounded) {
    const int64_t d = p.head_dim, width = (p.heads + 2 * p.kv_heads) * d, stride = place.stride;
    const bool is_query = h < p.heads, is_value = h >= p.heads + p.kv_heads;
    Norm norm = is_query ? layer.queries : layer.keys;
    const bool by_head = norm.size == d;
    if (!by_head) norm.weight = (const T *)norm.weight + (is_query ? h : h - p.heads) * d;
    for (int64_t i = 0, r = 0; i < place.segments; i++)
        for (const int64_t end = r + place.segment[i].n; r < end; r++) {
            const int64_t slot = place.slots[r] % stride, block = place.segment[i].blocks[place.slots[r] / stride] * p.kv_heads;
            float *head = qkv + r * width + head_offset(p, layer, h);
            if (!is_value) {
                if (norm.kind) {
                    const Moments of = by_head ? moments(norm, head) : joint[2 * r + !is_query];
                    for (int64_t k = 0; k < d; k += V) *(floats *)(head + k) = normed_at<T>(norm, of, head, k);
                }
                turn(head, place.spec[layer.spec], place.positions[r], d);
            }
            if (is_query) {
                for (int64_t k = 0; k < d; k++) head[k] *= (float)p.scaling;
                if (in_pairs<T> && !place.rounded) rounded_in_place(head, 0, d);
            } else if (!is_value) {
                T *to = keys + (block + h - p.heads) * d * stride + slot;
                for (int64_t k = 0; k < d; k++) keep(to + k * stride, head[k]);
            } else {
                T *to = values + ((block + h - p.heads - p.kv_heads) * stride + slot) * d;
                for (int64_t k = 0; k < d; k++) keep(to + k, head[k]);
            }
        }
    if (!place.rounded || h < p.heads) return;
    const int64_t kv_head = (h - p.heads) % p.kv_heads;
    for (int64_t i = 0; i < place.segments; i++) {
        const Segment &segment = place.segment[i];
        const int64_t at = (segment.blocks[0] * p.kv_heads + kv_head) * stride * d;
        const Head<int8_t> to = head_of(rounded, segment, kv_head, d);
        if (!is_value)
            round_keys(keys + at, segment.rounded, segment.kv_len, stride, d, to);
        else
            round_values(values + at, segment.rounded, segment.kv_len, d, to);
    }
}

// Outputs `from` to `to` of rows, and those `apart` further. Rows that are quantised for the product are quantised once.
static void multiply_twice(const Weight &w, int64_t from, int64_t to, int64_t apart, const float *x, int64_t ldx, float *y, int64_t ldy, int64_t rows) {
    if (w.kind == INT8 && rows <= MOST_AT_ONCE) return quantized<INT8>(w, from, to, x, ldx, y, ldy, rows, false, apart);
    if (w.kind == INT4 && rows <= MOST_AT_ONCE) return quantized<INT4>(w, from, to, x, ldx, y, ldy, rows, false, apart);
    multiply(w, from, to, x, ldx, y, ldy, rows, false);
    multiply(w, apart + from, apart + to, x, ldx, y, ldy, rows, false);
}

// Adds a sub-layer's product with rows x [n, in] to the stream; `out` [n, hidden]: where it is kept before.
template <typename T>
static void add_product(const SubLayer &part, const float *x, float *stream, float *out, int64_t n, int64_t D, const Team &team) {
    const Weight &w = *part.onto;
    const int64_t from = team.share(D, 16), to = team.end(D, 16);
    if (part.after.kind == NO_NORM && part.factor == 1) {
        multiply(w, from, to, x, w.in, stream, D, n, true);
    } else {
        multiply(w, from, to, x, w.in, out, D, n, false);
        if (part.after.kind) team.wait();
        for (int64_t r = 0; r < n; r++) {
            const Moments of = moments(part.after, out + r * D);
            for (int64_t k = from; k < to; k += V)
                *(floats *)(stream + r * D + k) = at(stream + r * D + k) + normed_at<T>(part.after, of, out + r * D, k) * (float)part.factor;
        }
    }
    team.wait();
}

// What thread t does of a pass. `shared`, `own`: what it computes in.
template <typename T>
static void run(const Pass &p, const Place &place, float *stream, float *shared, float *own, const Team &team) {
    const int64_t n = place.n, d = p.head_dim, D = p.hidden;
    const int64_t heads = p.heads + 2 * p.kv_heads, width = heads * d;
    float *qkv = shared, *mixed = qkv + n * width, *activated = mixed + n * p.heads * d, *gate_up = activated + n * p.intermediate;
    float *out = gate_up + 2 * n * p.intermediate, *shared_scores = out + n * D, *of_mlp = own + n * D, *scores = of_mlp + n * D;
    for (int64_t l = 0; l < p.layers; l++) {
        for (int64_t k = 0; k < place.num_captured; k++)
            if (place.captured_layers[k] == l)
                for (int64_t i = team.share(n * D, 16); i < team.end(n * D, 16); i++) place.captured[k * n * D + i] = stream[i];
        const Layer &layer = p.layer[l];
        T *keys = (T *)place.keys + l * place.each_layer, *values = (T *)place.values + l * place.each_layer;
        const int64_t of_layer = l * place.each_rounded;
        const Head<int8_t> rounded = {place.rounded_keys + of_layer, place.rounded_values + of_layer, place.key_scales + of_layer / d, place.value_scales + of_layer / d, nullptr, ROUNDED_SLOTS, ROUNDED_SLOTS * d, place.rounded_blocks * ROUNDED_SLOTS * d};
        if (layer.parallel) normed<T>(layer.mlp.before, stream, of_mlp, n, D);
        if (layer.attention.onto) {
            normed<T>(layer.attention.before, stream, own, n, D);
            multiply(*layer.attention.into, team.share(width, 16), team.end(width, 16), own, D, qkv, width, n, false);
            team.wait();
            Moments *const joint = (Moments *)own;  // [n, 2]
            if (layer.queries.size > d || layer.keys.size > d) {
                for (int64_t r = 0; r < n; r++) {
                    joint[2 * r] = moments(layer.queries, qkv + r * width);
                    joint[2 * r + 1] = moments(layer.keys, qkv + r * width + p.heads * d);
                }
                team.wait();
            }
            for (int64_t h = team.share(heads, 1); h < team.end(heads, 1); h++) place_head<T>(p, layer, place, h, joint, qkv, keys, values, rounded);
            team.wait();
            if (place.rounded)
                attention<int8_t>(p, layer, place, qkv, rounded, scores, shared_scores, mixed, team);
            else
                attention<T>(p, layer, place, qkv, {keys, values, nullptr, nullptr, nullptr, place.stride, p.kv_heads * place.stride * d, place.stride * d}, scores, shared_scores, mixed, team);
            team.wait();
            add_product<T>(layer.attention, mixed, stream, out, n, D, team);
        }
        if (layer.mlp.onto) {
            const float *x = layer.parallel ? of_mlp : own;
            if (!layer.parallel) normed<T>(layer.mlp.before, stream, own, n, D);
            if (layer.mlp.into) {
                const int64_t I = layer.mlp.onto->in, from = team.share(I, 16), to = team.end(I, 16);
                float *const first = layer.gated ? gate_up : activated;
                const int64_t ld = layer.gated ? 2 * I : I;
                if (layer.gated)
                    multiply_twice(*layer.mlp.into, from, to, I, x, D, first, ld, n);
                else
                    multiply(*layer.mlp.into, from, to, x, D, first, ld, n, false);
                for (int64_t r = 0; r < n; r++)
                    for (int64_t k = from; k < to; k += V) {
                        const floats y = activated_by(layer.activation, at(first + r * ld + k));
                        *(floats *)(activated + r * I + k) = layer.gated ? y * at(first + r * ld + I + k) : y;
                    }
                x = activated;
            }
            team.wait();  // for what others read of the stream, too
            add_product<T>(layer.mlp, x, stream, out, n, D, team);
        }
    }
}

// Floats that a pass computes in: those that threads share, and those of each.
static int64_t shared_floats(const Pass &p, const Place &place, int64_t threads) {
    return place.n * (2 * (p.heads + p.kv_heads) * p.head_dim + 3 * p.intermediate + p.hidden) + shared_score_floats(p, place, threads);
}
static int64_t own_floats(const Pass &p, const Place &place) { return 2 * place.n * p.hidden + MOST_QUERIES * tile_floats(place); }

template <typename T>
static void pass(const Pass &p, const Place &place, float *stream, float *out, float *scratch, int64_t threads) {
    float *owns = scratch + shared_floats(p, place, threads);
    if (threads < 2) {
        run<T>(p, place, stream, scratch, owns, Team(0, 1));
    } else {
#pragma omp parallel num_threads(threads)
        {
            Team team;
            run<T>(p, place, stream, scratch, owns + team.t * own_floats(p, place), team);
        }
    }
    if (out) normed<T>(p.norm, stream, out, place.n, p.hidden);
}

#if defined(TILES)
static int64_t many_by_tiles(const Weight *w, const float *x, int64_t ldx, float *y, int64_t ldy, int64_t rows, int64_t threads) {
    const int64_t of_rows = w->in / 32 * CHUNK, room = rows < PIECE ? rows : PIECE;
    __m512i *const parts = (__m512i *)aligned_alloc(64, (room + LINES - 1) / LINES * of_rows * 64);
    if (!parts) return 0;
#pragma omp parallel num_threads(threads)
    {
        Team team;
        for (int64_t first = 0; first < rows; first += PIECE) {
            const int64_t n = rows - first < PIECE ? rows - first : PIECE;
            for (int64_t r = team.share(n, LINES); r < team.end(n, LINES); r += LINES)
                lines_in_parts<true>(x + (first + r) * ldx, ldx, n - r < LINES ? n - r : LINES, w->in, parts + r / LINES * of_rows);
            team.wait();
            many(*w, team.share(w->out, LINES), team.end(w->out, LINES), parts, y + first * ldy, ldy, n);
            team.wait();
        }
    }
    free(parts);
    return 1;
}
#endif

extern "C" {

int64_t selfspec_vector() { return V; }

// Whether long vectors, and no tiles, multiply many rows with weights of `kind`, FLOAT32, BFLOAT16, INT8 or INT4, as fast as
// any kernel. Rows are then rounded to bfloat16 before they are multiplied with BFLOAT16.
int64_t selfspec_many_by_vectors(int64_t kind) {
#if defined(TILES)
    if (tiles_allowed()) return 0;
#endif
    if (kind == INT8 || kind == INT4) return LANES == 16;
#if defined(PAIRS)
    return 1;
#else
    return V >= 16 && kind == FLOAT32;
#endif
}

// y [rows, out] = x [rows, in] times the weight, with its bias; `add`: on top of what y is. ld: floats to the next row.
void selfspec_multiply(const Weight *w, const float *x, int64_t ldx, float *y, int64_t ldy, int64_t rows, int64_t add, int64_t threads) {
    if (threads < 2 || w->out * w->in < 1 << 14) return multiply(*w, 0, w->out, x, ldx, y, ldy, rows, add);
#pragma omp parallel num_threads(threads)
    {
        Team team;
        multiply(*w, team.share(w->out, 16), team.end(w->out, 16), x, ldx, y, ldy, rows, add);
    }
}

// y [rows, out] = x [rows, in] times a weight of a float32 model, without its bias: by tiles, which only FLOAT32 has, or by
// long vectors; 0, and nothing done, where there are neither.
int64_t selfspec_multiply_many(const Weight *w, const float *x, int64_t ldx, float *y, int64_t ldy, int64_t rows, int64_t threads) {
    if (w->kind != FLOAT32 && w->kind != STORED_BFLOAT16 && w->kind != FLOAT16) return 0;
#if defined(TILES)
    if (w->in % 32 == 0 && w->out % LINES == 0 && tiles_allowed())
        return w->kind == FLOAT32 ? many_by_tiles(w, x, ldx, y, ldy, rows, threads) : 0;
#endif
#if V >= 16
    Weight without = *w;
    without.bias = nullptr;
    selfspec_multiply(&without, x, ldx, y, ldy, rows, 0, threads);
    return 1;
#else
    return 0;
#endif
}

// Quantises a weight [out, in] of `from`, FLOAT32 or BFLOAT16, to `kind`, INT8 or INT4, rounding to nearest, as `Weight`
// describes them. `group`: as of a `Weight`.
void selfspec_quantize(int64_t from, int64_t kind, const void *weights, int64_t out, int64_t in, int64_t group, char *values, void *scale, int64_t threads) {
#pragma omp parallel num_threads(threads)
    {
        Team team;
        const int64_t tiles = (out + TILE - 1) / TILE;
        for (int64_t tile = team.share(tiles, 1); tile < team.end(tiles, 1); tile++) {
            uint16_t *const scales = (uint16_t *)scale;
            if (from == FLOAT32 && kind == INT8) quantize_tile<INT8>((const float *)weights, out, in, group, tile, values, scales);
            if (from == FLOAT32 && kind == INT4) quantize_tile<INT4>((const float *)weights, out, in, group, tile, values, scales);
            if (from == BFLOAT16 && kind == INT8) quantize_tile<INT8>((const uint16_t *)weights, out, in, group, tile, values, scales);
            if (from == BFLOAT16 && kind == INT4) quantize_tile<INT4>((const uint16_t *)weights, out, in, group, tile, values, scales);
        }
    }
}

// Floats of scratch that `selfspec_pass` computes in.
int64_t selfspec_scratch(const Pass *p, const Place *place, int64_t threads) {
    return shared_floats(*p, *place, threads) + threads * own_floats(*p, *place);
}

// Runs the stream [n, hidden] through the layers, in place; `out` [n, hidden], unless null: what the last norm makes of it.
void selfspec_pass(const Pass *p, const Place *place, float *stream, float *out, float *scratch, int64_t threads) {
    if (p->kind == BFLOAT16)
        pass<uint16_t>(*p, *place, stream, out, scratch, threads);
    else
        pass<float>(*p, *place, stream, out, scratch, threads);
}
}
