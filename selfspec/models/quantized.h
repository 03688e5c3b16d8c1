// Products of int8 and int4 weights with rows quantised to int8. Part of `native.cpp`.
//
// A row has a scale for each `BLOCK` inputs, so that its largest value there is 127. Dot products of a block are exact
// integers; a row's blocks are summed in order, in float32: a row has the same bits alone and among others, and on every
// processor that rounds a * b + c once. Weights lie in tiles of `TILE` outputs, in the order in which they are read.
#pragma once

#if V == 16 && defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

constexpr int64_t TILE = 16;                // outputs of a tile
constexpr int64_t MOST_IN_ORDER = 1 << 15;  // bytes of two tiles: if they have more, the next two do not fit in the first-level cache
constexpr int PARTS_OF_TILE = TILE / LANES;
// Rows and tiles whose sums fit in registers. Two tiles, so that what is read of a row is multiplied twice.
constexpr int ROWS_AT_ONCE = LANES == 16 ? 6 : 2, TILES_AT_ONCE = LANES == 16 ? 2 : 1;

typedef float lane_floats __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t lane_ints __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint16_t lane_halves __attribute__((vector_size(LANES * 2), aligned(2)));

// Whether INT8 values are multiplied as unsigned numbers, 128 more than they are; the excess is subtracted once a block.
#if LANES == 16 || (LANES == 8 && ((defined(__AVX512VNNI__) && defined(__AVX512VL__)) || defined(__AVXVNNI__)))
constexpr bool UNSIGNED = true;
#elif LANES == 8 || (LANES == 4 && defined(__ARM_FEATURE_DOTPROD))
constexpr bool UNSIGNED = false;
#else
constexpr bool UNSIGNED = true;
#endif

INLINE lane_floats of_halves(const uint16_t *p) { return (lane_floats)(__builtin_convertvector(*(const lane_halves *)p, lane_ints) << 16); }
INLINE lane_floats fused_lanes(lane_floats a, lane_floats b, lane_floats c) {
#if LANES == 16
    return (lane_floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8 && defined(__FMA__)
    return (lane_floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif LANES == 4 && defined(__ARM_FEATURE_FMA)
    return (lane_floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// Adds the dot products of 4 weights of each output, unsigned bytes, with 4 signed bytes of a row. `K`: as INT4 they are
// at most 15; as INT8 they are 128 more than the values.
template <int K> INLINE lane_ints dot(lane_ints sum, lane_ints weights, int32_t row) {
#if LANES == 16
    return (lane_ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(row));
#elif LANES == 8 && defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return (lane_ints)_mm256_dpbusd_epi32((__m256i)sum, (__m256i)weights, _mm256_set1_epi32(row));
#elif LANES == 8 && defined(__AVXVNNI__)
    return (lane_ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, _mm256_set1_epi32(row));
#elif LANES == 8
    __m256i size = (__m256i)weights, signs = _mm256_set1_epi32(row);
    if (K == INT8) {  // sums of two products fit in 16 bits only if no size exceeds 127
        const __m256i values = _mm256_xor_si256(size, _mm256_set1_epi8((char)0x80));
        size = _mm256_abs_epi8(values);
        signs = _mm256_sign_epi8(signs, values);
    }
    return sum + (lane_ints)_mm256_madd_epi16(_mm256_maddubs_epi16(size, signs), _mm256_set1_epi16(1));
#elif defined(__ARM_FEATURE_DOTPROD)
    int8x16_t values = (int8x16_t)weights;
    if (K == INT8) values = veorq_s8(values, vdupq_n_s8((int8_t)0x80));
    return (lane_ints)vdotq_s32((int32x4_t)sum, values, vreinterpretq_s8_s32(vdupq_n_s32(row)));
#else
    for (int i = 0; i < 4; i++) sum += (weights >> 8 * i & 255) * (int8_t)(row >> 8 * i);
    return sum;
#endif
}

// Rows in int8 [rows, wide], padded with zeros to whole blocks; [rows, blocks]: the scale of each block, and the integer
// from which its dot products are counted; for INT4's zero points, what each group of its inputs adds up to [rows, groups].
struct Int8Rows {
    int64_t wide, blocks, groups;
    int8_t *values;
    float *scale, *sum;
    int32_t *start;
};

// Quantises a block of `size` inputs and returns the sum of its values; `by`: what its inputs are multiplied by.
INLINE int32_t to_int8(const float *x, int64_t size, float by, int8_t *to) {
    int32_t sum = 0;
#if V == 16
    if (size == BLOCK) {
        const __m512 scale = _mm512_set1_ps(by);
        const __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), scale)), b = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 16), scale));
        _mm_storeu_si128((__m128i *)to, _mm512_cvtsepi32_epi8(a));
        _mm_storeu_si128((__m128i *)(to + 16), _mm512_cvtsepi32_epi8(b));
        return _mm512_reduce_add_epi32(_mm512_add_epi32(a, b));
    }
#endif
    for (int64_t k = 0; k < BLOCK; k++) sum += to[k] = k < size && by ? (int8_t)std::lrintf(x[k] * by) : 0;
    return sum;
}

template <int K> static void quantize_rows(const Weight &w, const float *x, int64_t ldx, int64_t rows, const Int8Rows &to) {
    constexpr int32_t EXCESS = K == INT4 ? 8 : UNSIGNED ? 128 : 0;  // of the bytes that are multiplied, over the values
    for (int64_t r = 0; r < rows; r++, x += ldx) {
        for (int64_t g = 0; g < to.groups; g++) to.sum[r * to.groups + g] = 0;
        for (int64_t b = 0; b < to.blocks; b++) {
            const int64_t first = b * BLOCK, size = first + BLOCK < w.in ? BLOCK : w.in - first, i = r * to.blocks + b;
            const float by = scaled_to(127, x + first, size, to.scale + i);
            const int32_t sum = to_int8(x + first, size, by, to.values + r * to.wide + first);
            to.start[i] = -EXCESS * sum;
            if (K == INT4) to.sum[r * to.groups + (first >> w.group)] += to.scale[i] * (float)sum;
        }
    }
}

// The products of R rows, the first of them `row`, with the outputs of T tiles.
template <int K, int R, int T>
INLINE void multiply_tiles(const Weight &w, int64_t tile, const Int8Rows &x, int64_t row, lane_floats (&y)[R][T * PARTS_OF_TILE]) {
    constexpr int PARTS = T * PARTS_OF_TILE;
    constexpr int64_t BYTES = TILE * BLOCK / (K == INT4 ? 2 : 1);
    const int64_t each = x.blocks * BYTES, each_grid = K == INT4 ? (w.in >> w.group) * 2 * TILE : 0;
    const char *weights = w.values + tile * each;
    const uint16_t *grid = (const uint16_t *)w.scale + tile * each_grid;
    lane_floats scale[PARTS], zero[PARTS];
    const bool in_order = T > 1 && T * each <= MOST_IN_ORDER;  // fetches the next tiles one after the other; else each of these ahead
    const char *ahead = weights + T * each, *grid_ahead = (const char *)(grid + T * each_grid);
    for (int64_t b = 0; b < x.blocks; b++, weights += BYTES, ahead += T * BYTES) {
        if (K == INT4 && (b * BLOCK & ((1 << w.group) - 1)) == 0) {
            for (int t = 0; t < T; t++, grid_ahead += 64) __builtin_prefetch(grid_ahead, 0, 0);
            for (int p = 0; p < PARTS; p++) {
                const uint16_t *const of_part = grid + p / PARTS_OF_TILE * each_grid + p % PARTS_OF_TILE * LANES;
                scale[p] = of_halves(of_part);
                zero[p] = of_halves(of_part + TILE);
            }
            grid += 2 * TILE;
        }
        lane_ints a[R][PARTS];
        const int8_t *of_row[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            of_row[r] = x.values + (row + r) * x.wide + b * BLOCK;
            for (int p = 0; p < PARTS; p++) a[r][p] = lane_ints{} + x.start[(row + r) * x.blocks + b];
        }
#pragma GCC unroll 8
        for (int64_t line = 0; line < BYTES; line += 64) {
            for (int t = 0; t < T; t++) __builtin_prefetch(in_order ? ahead + line * T + t * 64 : weights + line + t * each + AHEAD, 0, 0);
            lane_ints bytes[PARTS];
            for (int p = 0; p < PARTS; p++)
                bytes[p] = *(const lane_ints *)(weights + line + p / PARTS_OF_TILE * each + p % PARTS_OF_TILE * LANES * 4);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                int32_t four[2];
                memcpy(four, of_row[r] + line / (K == INT4 ? 8 : 16), K == INT4 ? 8 : 4);
                for (int p = 0; p < PARTS; p++) {
                    a[r][p] = dot<K>(a[r][p], K == INT4 ? bytes[p] & 0x0f0f0f0f : bytes[p], four[0]);
                    if (K == INT4) a[r][p] = dot<K>(a[r][p], bytes[p] >> 4 & 0x0f0f0f0f, four[1]);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const int64_t i = (row + r) * x.blocks + b;
            for (int p = 0; p < PARTS; p++) {
                const lane_floats dots = __builtin_convertvector(a[r][p], lane_floats), of_block = lane_floats{} + x.scale[i];
                y[r][p] = fused_lanes(K == INT4 ? dots * of_block : dots, K == INT4 ? scale[p] : of_block, y[r][p]);
            }
        }
        if (K == INT4 && ((b + 1) * BLOCK & ((1 << w.group) - 1)) == 0)
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
                for (int p = 0; p < PARTS; p++) {
                    const lane_floats sum = lane_floats{} + x.sum[(row + r) * x.groups + (b * BLOCK >> w.group)];
                    y[r][p] = fused_lanes(sum, zero[p], y[r][p]);
                }
    }
}

// Writes outputs `from` to `to` of T tiles' R rows.
template <int K, int R, int T>
static void tiles_of_rows(const Weight &w, int64_t tile, int64_t from, int64_t to, const Int8Rows &x, int64_t row, float *y, int64_t ldy, bool add) {
    lane_floats sums[R][T * PARTS_OF_TILE] = {};
    multiply_tiles<K, R, T>(w, tile, x, row, sums);
    for (int i = 0; i < R * T; i++) {
        const int64_t first = (tile + i % T) * TILE;
        lane_floats *const of_tile = sums[i / T] + i % T * PARTS_OF_TILE;
        float *const of_row = y + i / T * ldy;
        if (K == INT8)
            for (int p = 0; p < PARTS_OF_TILE; p++) of_tile[p] *= of_halves((const uint16_t *)w.scale + first + p * LANES);
        if (from <= first && first + TILE <= to && !w.bias) {
            for (int p = 0; p < PARTS_OF_TILE; p++) {
                lane_floats *const out = (lane_floats *)(of_row + first + p * LANES);
                *out = add ? *out + of_tile[p] : of_tile[p];
            }
        } else {
            for (int64_t o = from > first ? from : first; o < to && o < first + TILE; o++)
                put(w, o, of_tile[(o - first) / LANES][(o - first) % LANES], of_row + o, add);
        }
    }
}

template <int K, int R, int T>
INLINE void tiles_of(int64_t rows, const Weight &w, int64_t tile, int64_t from, int64_t to, const Int8Rows &x, int64_t row, float *y, int64_t ldy, bool add) {
    if constexpr (R > 0) {
        if (rows == R) return tiles_of_rows<K, R, T>(w, tile, from, to, x, row, y, ldy, add);
        return tiles_of<K, R - 1, T>(rows, w, tile, from, to, x, row, y, ldy, add);
    }
}

// Writes outputs `from` to `to` of rows [rows, in], and those `apart` further, unless that is 0, from the same quantised rows.
template <int K>
static void quantized(const Weight &w, int64_t from, int64_t to, const float *x, int64_t ldx, float *y, int64_t ldy, int64_t rows, bool add, int64_t apart = 0) {
    if (from >= to) return;
    static thread_local Kept kept;
    const int64_t blocks = (w.in + BLOCK - 1) / BLOCK, wide = blocks * BLOCK, groups = K == INT4 ? w.in >> w.group : 0;
    Int8Rows in = {wide, blocks, groups, (int8_t *)kept.of(rows * (wide + 8 * blocks + 4 * groups))};
    in.scale = (float *)(in.values + rows * wide);
    in.sum = in.scale + rows * blocks;
    in.start = (int32_t *)(in.sum + rows * groups);
    quantize_rows<K>(w, x, ldx, rows, in);
    const int64_t times = (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    for (int64_t range = 0; range < (apart ? 2 : 1); range++, from += apart, to += apart)
        for (int64_t tile = from / TILE, tiles; tile * TILE < to; tile += tiles) {
            tiles = (tile + TILES_AT_ONCE) * TILE <= to ? TILES_AT_ONCE : 1;
            for (int64_t i = 0; i < times; i++) {  // the tiles' weights stay near
                const int64_t first = rows * i / times, n = rows * (i + 1) / times - first;
                const auto multiplied = tiles == 1 ? tiles_of<K, ROWS_AT_ONCE, 1> : tiles_of<K, ROWS_AT_ONCE, TILES_AT_ONCE>;
                multiplied(n, w, tile, from, to, in, first, y + first * ldy, ldy, add);
            }
        }
}

// The nearest integers of numbers below 2^22.
INLINE floats nearest(floats x) { return (x + 12582912.0f) - 12582912.0f; }
INLINE float rounded(float x) {  // to bfloat16
    uint16_t bits;
    keep(&bits, x);
    return bfloat16(bits);
}
INLINE floats least(floats a, floats b) { return b < a ? b : a; }
INLINE floats largest(floats a, floats b) { return b > a ? b : a; }

// The smallest and the largest of `size` weights.
template <typename T> INLINE void range_of(const T *x, int64_t size, float *low, float *high) {
    float smallest = INFINITY, most = -INFINITY;
    int64_t k = 0;
    if (size >= V) {
        floats lows = at(x), highs = lows;
        for (k = V; k + V <= size; k += V) lows = least(lows, at(x + k)), highs = largest(highs, at(x + k));
        for (int i = 0; i < V; i++) smallest = lows[i] < smallest ? lows[i] : smallest, most = highs[i] > most ? highs[i] : most;
    }
    for (; k < size; k++) {
        float value;
        if constexpr (sizeof(T) == 4) value = x[k];
        else value = bfloat16(x[k]);
        smallest = value < smallest ? value : smallest;
        most = value > most ? value : most;
    }
    *low = smallest, *high = most;
}

// Writes (x - first) / scale of `size` weights, rounded to the nearest integers from `low` to `high`, to bytes, plus `excess`.
template <typename T>
INLINE void to_bytes(const T *x, int64_t size, float first, float scale, float low, float high, int excess, uint8_t *to) {
    int64_t k = 0;
    for (; k + V <= size; k += V) {
        const floats value = largest(least(nearest((at(x + k) - first) / scale), floats{} + high), floats{} + low);
        const ints whole = __builtin_convertvector(value, ints) + excess;
        for (int i = 0; i < V; i++) to[k + i] = (uint8_t)whole[i];
    }
    for (; k < size; k++) {
        float value;
        if constexpr (sizeof(T) == 4) value = x[k];
        else value = bfloat16(x[k]);
        value = std::nearbyintf((value - first) / scale);
        value = value > high ? high : value < low ? low : value;
        to[k] = (uint8_t)((int)value + excess);
    }
}

// Quantises outputs of a weight [out, in], rounding to nearest, to a tile of INT8 or INT4 as `Weight` describes them.
template <int K, typename T>
static void quantize_tile(const T *weights, int64_t out, int64_t in, int64_t group, int64_t tile, char *values, uint16_t *scale) {
    static thread_local Kept kept;
    const int64_t wide = (in + BLOCK - 1) / BLOCK * BLOCK, groups = K == INT4 ? in >> group : 1, size = K == INT4 ? 1 << group : in;
    uint8_t *const bytes = (uint8_t *)kept.of(wide);
    uint32_t *const lines = (uint32_t *)(values + tile * TILE * wide / (K == INT4 ? 2 : 1));
    for (int64_t i = 0; i < TILE; i++) {
        const int64_t o = tile * TILE + i;
        memset(bytes, K == INT8 ? 128 : 0, wide);
        for (int64_t g = 0; g < groups; g++) {
            float low = 0, high = 0, step = 0, zero = 0;
            if (o < out) {
                const T *const x = weights + o * in + g * size;
                range_of(x, size, &low, &high);
                const float most = -low > high ? -low : high, exact = K == INT8 ? most / 127 : (high - low) / 15;
                step = rounded(exact < 1e-12f ? 1e-12f : exact);
                zero = rounded(low + 8 * step);
                if (K == INT8) to_bytes(x, size, 0, step, -127, 127, 128, bytes);
                else to_bytes(x, size, zero - 8 * step, step, 0, 15, 0, bytes + g * size);
            }
            if (K == INT8) keep(scale + tile * TILE + i, step);
            else keep(scale + ((tile * groups + g) * 2) * TILE + i, step), keep(scale + ((tile * groups + g) * 2 + 1) * TILE + i, zero);
        }
        for (int64_t k = 0; k < wide; k += K == INT4 ? 8 : 4) {
            uint32_t four[2];
            memcpy(four, bytes + k, K == INT4 ? 8 : 4);
            if (K == INT4) lines[k / 8 * TILE + i] = four[0] | four[1] << 4;
            else lines[k / 4 * TILE + i] = four[0];
        }
    }
}
