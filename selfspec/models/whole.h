// Weights in few bits, times rows in whole numbers of 16 bits: what processors without tiles multiply in half the steps
// that floats take. Part of `native.cpp`.
//
// Of each `REACH` inputs of a row, the largest is 32767: the others are off by 2^-16 of it at most. Sums over as many
// inputs are exact, and those of all are float32's, in one order. Weights are read in vectors of 256 bits.
#pragma once

constexpr int64_t REACH = 2048, AT_ONCE = 32;  // inputs that share what they are scaled by; those that are read at once
constexpr int64_t TILE = 64, MOST_ROWS = 8;    // outputs whose weights stay near while all rows are multiplied with them

typedef float floats8 __attribute__((vector_size(32), aligned(4)));
typedef int32_t ints8 __attribute__((vector_size(32), aligned(4)));
typedef int16_t shorts16 __attribute__((vector_size(32), aligned(2)));

INLINE shorts16 at(const int16_t *p) { return *(const shorts16 *)p; }
INLINE floats8 eight(float x) { return floats8{} + x; }
INLINE floats8 eight_of(const uint16_t *p) { return (floats8)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16); }
INLINE floats8 fused8(floats8 a, floats8 b, floats8 c) { return (floats8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }

// The products of two and two neighbours, added to `sum`.
INLINE ints8 dot(shorts16 a, shorts16 b, ints8 sum) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return (ints8)_mm256_dpwssd_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#elif defined(__AVXVNNI__)
    return (ints8)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#else
    return sum + (ints8)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}

// Each vector's sum, in one order, whatever others there are.
template <int N> INLINE void totals(const floats8 (&a)[N], float *out) {
    int n = 0;
#pragma GCC unroll 2
    for (; n + 4 <= N; n += 4) {
        const __m256 a0 = (__m256)a[n], a1 = (__m256)a[n + 1], a2 = (__m256)a[n + 2], a3 = (__m256)a[n + 3];
        const __m256 two = _mm256_add_ps(_mm256_unpacklo_ps(a0, a1), _mm256_unpackhi_ps(a0, a1));
        const __m256 others = _mm256_add_ps(_mm256_unpacklo_ps(a2, a3), _mm256_unpackhi_ps(a2, a3));
        const __m256 four = _mm256_add_ps(_mm256_shuffle_ps(two, others, 0x44), _mm256_shuffle_ps(two, others, 0xee));
        _mm_storeu_ps(out + n, _mm_add_ps(_mm256_castps256_ps128(four), _mm256_extractf128_ps(four, 1)));
    }
#pragma GCC unroll 4
    for (; n < N; n++) {
        const __m256 half = _mm256_add_ps((__m256)a[n], _mm256_permute_ps((__m256)a[n], 0x4e));
        const __m256 all = _mm256_add_ps(half, _mm256_permute_ps(half, 0xb1));
        out[n] = _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
    }
}

// Rows [rows, in] as whole numbers [rows, wide]; each `REACH` of them times `back` [rows, times] are what they were.
// INT8: of each 32 the even ones come first. INT4: also what each group of inputs sums up to [rows, groups].
struct Whole {
    int64_t wide, times, groups;
    int16_t *values;
    float *back, *sum;
};

INLINE shorts16 in_order(__m256i a, __m256i b) { return (shorts16)_mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8); }

template <int K> INLINE void to_shorts(const __m256i (&x)[4], int16_t *to) {
    shorts16 *const out = (shorts16 *)to;
    if (K == INT4) {
        out[0] = in_order(x[0], x[1]);
        out[1] = in_order(x[2], x[3]);
        return;
    }
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256 a = (__m256)x[0], b = (__m256)x[1], c = (__m256)x[2], d = (__m256)x[3];
    const __m256i even = _mm256_packs_epi32((__m256i)_mm256_shuffle_ps(a, b, 0x88), (__m256i)_mm256_shuffle_ps(c, d, 0x88));
    const __m256i odd = _mm256_packs_epi32((__m256i)_mm256_shuffle_ps(a, b, 0xdd), (__m256i)_mm256_shuffle_ps(c, d, 0xdd));
    out[0] = (shorts16)_mm256_permutevar8x32_epi32(even, order);
    out[1] = (shorts16)_mm256_permutevar8x32_epi32(odd, order);
}

template <int K> static void to_whole(const Weight &w, const float *x, int64_t ldx, int64_t rows, const Whole &to) {
    for (int64_t r = 0; r < rows; r++, x += ldx) {
        int16_t *const values = to.values + r * to.wide;
        for (int64_t c = 0; c < to.times; c++) {
            const int64_t first = c * REACH, last = first + REACH < w.in ? first + REACH : w.in;
            float *const back = to.back + r * to.times + c;
            const float by = scaled_to(32767, x + first, last - first, back);
            int64_t k = first;
            for (; k + AT_ONCE <= last; k += AT_ONCE) {
                __m256i whole[4];
                for (int i = 0; i < 4; i++) whole[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + k + 8 * i), _mm256_set1_ps(by)));
                to_shorts<K>(whole, values + k);
            }
            for (; k < last; k++) values[k] = by ? (int16_t)std::lrintf(x[k] * by) : 0;
        }
        if constexpr (K == INT4)
            for (int64_t g = 0; g < to.groups; g++) {
                ints8 sum = {};
                for (int64_t k = g << w.group; k < (g + 1) << w.group; k += 16) sum = dot(at(values + k), shorts16{} + 1, sum);
                const floats8 lanes[1] = {__builtin_convertvector(sum, floats8)};
                totals<1>(lanes, to.sum + r * to.groups + g);
                to.sum[r * to.groups + g] *= to.back[r * to.times + (g << w.group) / REACH];
            }
    }
}

// Sums of outputs from `from` to `to` on to where they belong.
template <int K> INLINE void finish(const Weight &w, int64_t from, int64_t to, const float *sums, float *y, bool add) {
    int64_t o = from;
    for (; o + 8 <= to; o += 8, sums += 8) {
        floats8 sum = *(const floats8 *)sums;
        if (K == INT8) sum *= eight_of((const uint16_t *)w.scale + o);
        if (w.bias) sum += w.bias_kind == BFLOAT16 ? eight_of((const uint16_t *)w.bias + o) : *(const floats8 *)((const float *)w.bias + o);
        floats8 *const to = (floats8 *)(y + o);
        *to = add ? *to + sum : sum;
    }
    for (; o < to; o++, sums++) put(w, o, K == INT8 ? *sums * bfloat16(((const uint16_t *)w.scale)[o]) : *sums, y + o, add);
}

// Adds R rows' products with one output's weights, over inputs k to end, to their sums.
template <int R> INLINE void whole_sums(const char *weights, int64_t next, int64_t k, int64_t end, const int16_t *x, int64_t wide, ints8 (&a)[R]) {
    for (; k + AT_ONCE <= end; k += AT_ONCE) {
        const shorts16 both = at((const int16_t *)(weights + k)), even = (both << 8) >> 8, odd = both >> 8;
        if ((k & 63) == 0) __builtin_prefetch(weights + next + k);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            a[r] = dot(even, at(x + r * wide + k), a[r]);
            a[r] = dot(odd, at(x + r * wide + k + 16), a[r]);
        }
    }
}

// The same of halves, of the first `steps` of the group that begins at k, without its zero.
template <int R> INLINE void whole_sums_of_halves(const char *weights, int64_t next, int64_t k, int64_t steps, const int16_t *x, int64_t wide, ints8 (&a)[R]) {
#pragma GCC unroll 2
    for (int64_t step = 0; step < steps; step++, k += AT_ONCE) {
        const shorts16 both = (shorts16)_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(weights + k / 2)));
        const shorts16 low = both & 15, high = both >> 4;
        if ((k & 127) == 0) __builtin_prefetch(weights + next + k / 2);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            a[r] = dot(low, at(x + r * wide + k), a[r]);
            a[r] = dot(high, at(x + r * wide + k + 16), a[r]);
        }
    }
}
template <int R, int STEPS>  // to a group; 0: as many as `w` says
INLINE void whole_groups(const Weight &w, const char *weights, const uint32_t *grid, int64_t k, int64_t end, const int16_t *x, int64_t wide, floats8 (&out)[R]) {
    const int64_t steps = STEPS ? STEPS : (1 << w.group) / AT_ONCE;
    for (int64_t g = k >> w.group; k < end; g++, k += steps * AT_ONCE) {
        ints8 a[R] = {};
        whole_sums_of_halves<R>(weights, w.in / 2, k, steps, x, wide, a);
        const floats8 scale = (floats8)(ints8{} + (int32_t)(grid[g] << 16));
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) out[r] = fused8(__builtin_convertvector(a[r], floats8), scale, out[r]);
    }
}

// What INT4's zeros, less 8 times the scales, add to R rows' sums.
template <int R> INLINE void with_zeros(const uint32_t *grid, const float *sum, int64_t groups, floats8 (&a)[R]) {
    for (int64_t g = 0; g < groups; g += 8) {
        const __m256i some = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(groups - g)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
        const ints8 grids = (ints8)_mm256_maskload_epi32((const int *)(grid + g), some);
        const floats8 zero = fused8((floats8)(grids << 16), eight(-8), (floats8)(grids & (int32_t)0xffff0000));
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) a[r] = fused8((floats8)_mm256_maskload_ps(sum + r * groups + g, some), zero, a[r]);
    }
}

// What is left of `in`, of no whole `AT_ONCE`, for INT8: exact, too.
INLINE float rest_of(const Weight &w, const char *weights, const int16_t *x, float back) {
    int32_t sum = 0;
    for (int64_t k = w.in / AT_ONCE * AT_ONCE; k < w.in; k++) sum += (int32_t)x[k] * weights[k];
    return (float)sum * back;
}

// Sums, `TILE` apart, of R rows, the first of them `row`, with an output. One by one is as fast as several at once, and
// weights then come in one stream.
template <int K, int R> INLINE void whole_output(const Weight &w, int64_t output, const Whole &x, int64_t row, float *sums) {
    const char *const weights = w.values + output * row_bytes<K>(w.in);
    const uint32_t *const grid = (const uint32_t *)w.scale + output * x.groups;  // INT4's
    const int16_t *const values = x.values + row * x.wide;
    floats8 a[R] = {};
    for (int64_t c = 0; c < x.times; c++) {
        const int64_t k = c * REACH, end = k + REACH < w.in ? k + REACH : w.in;
        floats8 sum[R] = {};
        if constexpr (K == INT8) {
            ints8 whole[R] = {};
            whole_sums<R>(weights, w.in, k, end, values, x.wide, whole);
            for (int r = 0; r < R; r++) sum[r] = __builtin_convertvector(whole[r], floats8);
        } else if (R <= 4 && w.group == 6) {
            whole_groups<R, 2>(w, weights, grid, k, end, values, x.wide, sum);
        } else {
            whole_groups<R, 0>(w, weights, grid, k, end, values, x.wide, sum);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) a[r] = fused8(sum[r], eight(x.back[(row + r) * x.times + c]), a[r]);
    }
    if (K == INT4) with_zeros<R>(grid, x.sum + row * x.groups, x.groups, a);
    float found[R];
    totals<R>(a, found);
    for (int r = 0; r < R; r++) sums[r * TILE] = found[r];
    if (K == INT8 && w.in % AT_ONCE)
        for (int r = 0; r < R; r++) sums[r * TILE] += rest_of(w, weights, values + r * x.wide, x.back[(row + r + 1) * x.times - 1]);
}

// Outputs from `from` on, `TILE` at most, of R rows.
template <int K, int R> static void whole_outputs(const Weight &w, int64_t from, int64_t to, const Whole &x, int64_t row, float *y, int64_t ldy, bool add) {
    alignas(32) float sums[R * TILE];
    for (int64_t o = from; o < to; o++) whole_output<K, R>(w, o, x, row, sums + (o - from));
    for (int r = 0; r < R; r++, y += ldy) finish<K>(w, from, to, sums + r * TILE, y, add);
}

template <int K, int R> INLINE void whole_of_rows(int64_t rows, const Weight &w, int64_t from, int64_t to, const Whole &x, int64_t row, float *y, int64_t ldy, bool add) {
    if constexpr (R > 0) {
        if (rows == R) return whole_outputs<K, R>(w, from, to, x, row, y, ldy, add);
        return whole_of_rows<K, R - 1>(rows, w, from, to, x, row, y, ldy, add);
    }
}

template <int K>
static void in_whole(const Weight &w, int64_t from, int64_t to, const float *x, int64_t ldx, float *y, int64_t ldy, int64_t rows, bool add) {
    static thread_local Kept kept;
    Whole whole = {(w.in + AT_ONCE - 1) / AT_ONCE * AT_ONCE, (w.in + REACH - 1) / REACH, K == INT4 ? w.in >> w.group : 0};
    whole.values = (int16_t *)kept.of(rows * (whole.wide * 2 + (whole.times + whole.groups) * 4));
    whole.back = (float *)(whole.values + rows * whole.wide);
    whole.sum = whole.back + rows * whole.times;
    to_whole<K>(w, x, ldx, rows, whole);
    const int64_t times = (rows + MOST_ROWS - 1) / MOST_ROWS;
    for (; from < to; from += TILE)
        for (int64_t i = 0, end = from + TILE < to ? from + TILE : to; i < times; i++) {
            const int64_t first = rows * i / times, last = rows * (i + 1) / times;
            whole_of_rows<K, MOST_ROWS>(last - first, w, from, end, whole, first, y + first * ldy, ldy, add);
        }
}
