// Sums of rows' products with the weights of GGUF files, in blocks of 32 inputs. Part of `native.cpp`.
//
// A weight is what the file says in float32, rounded once; a row's products are summed as those of FLOAT32.
#pragma once

constexpr int64_t SUPER = 256;  // inputs that are decoded at once, and share a scale of scales

// What the low halves of bytes stand for.
INLINE floats low_halves(ints x) {
#if V == 16
    return (floats)_mm512_permutexvar_ps((__m512i)x, _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
#else
    return to_floats(x & 15);
#endif
}

// What the low halves of bytes stand for, times a scale, plus a zero, rounded once. `table`: `scaled_table` of both.
INLINE floats scaled_table(floats scale, floats zero) {
#if V == 16
    return fused((floats)_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), scale, zero);
#else
    return scale;
#endif
}
INLINE floats scaled_halves(ints x, floats table, floats scale, floats zero) {
#if V == 16
    return (floats)_mm512_permutexvar_ps((__m512i)x, (__m512)table);
#else
    return fused(low_halves(x), scale, zero);
#endif
}

// V of 16 values, from `first` on: the low halves of bytes, and above them the bits of `upper`, as far as there are such.
template <int K> INLINE floats values_of(ints x, const char *upper, int first) {
    constexpr int MORE = bits_of(K) - 4;
    if constexpr (MORE == 0) return low_halves(x);
    int32_t word = 0;
    memcpy(&word, upper, 2 * MORE);
#if V == 16
    if constexpr (MORE == 1) {
        const __m512 low = (__m512)low_halves(x);
        return (floats)_mm512_mask_add_ps(low, (__mmask16)word, low, _mm512_set1_ps(16));
    }
    const __m512i twos = _mm512_srlv_epi32(_mm512_set1_epi32(word), _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30));
    const __m512 high = _mm512_permutexvar_ps(twos, _mm512_setr_ps(-32, -16, 0, 16, -32, -16, 0, 16, -32, -16, 0, 16, -32, -16, 0, 16));
    return low_halves(x) + (floats)high;
#else
    ints by;
    for (int i = 0; i < V; i++) by[i] = MORE * (first + i);
    const ints high = (ints{} + word) >> by & ((1 << MORE) - 1);
    return to_floats(((x & 15) | high << 4) - (K == SUPER6 ? 32 : 0));
#endif
}

// Writes the scales of 256 inputs to `scale`, 16 of SUPER6; of the others 8, and then 8 zeros.
template <int K> INLINE void write_scales(const char *grid, float *scale) {
    uint16_t halves[2];
    memcpy(halves, grid, 4);
    const float first = float16(halves[0]), second = -float16(halves[1]);
    for (int i = 0; i < 16; i++) {
        if constexpr (K == SUPER6) scale[i] = first * (float)((const int8_t *)grid)[2 + i];
        else scale[i] = (i < 8 ? first : second) * (float)((const uint8_t *)grid)[4 + i];
    }
}

// Decodes `blocks` blocks of an output, 8 at most, to float32. `ahead`: bytes to what is decoded later.
template <int K> static void decode(const char *values, const char *grid, int64_t blocks, int64_t ahead, float *to) {
    constexpr int MORE = bits_of(K) - 4;
    constexpr int64_t STEP = row_bytes<K>(BLOCK);
    alignas(64) float scales[16];
    if constexpr (K != BLOCKS5) write_scales<K>(grid, scales);
    for (int64_t byte = 0; byte < blocks * STEP; byte += 64) __builtin_prefetch(values + ahead + byte);
    for (int64_t b = 0; b < blocks; b++, values += STEP, to += BLOCK) {
        floats low, high, zero = {};
        if constexpr (K == BLOCKS5) {
            const uint16_t *const of = (const uint16_t *)grid + 2 * b;
            low = high = floats{} + float16(of[0]);
            zero = floats{} + float16(of[1]);
        } else if constexpr (K == SUPER6) {
            low = floats{} + scales[2 * b];
            high = floats{} + scales[2 * b + 1];
        } else {
            low = high = floats{} + scales[b];
            zero = floats{} + scales[8 + b];
        }
        const floats table = scaled_table(low, zero);
        for (int j = 0; j < 16; j += V) {
            const ints bytes = widened((const int8_t *)values + j);
            if constexpr (MORE == 0) {
                *(floats *)(to + j) = scaled_halves(bytes, table, low, zero);
                *(floats *)(to + 16 + j) = scaled_halves(bytes >> 4, table, low, zero);
                continue;
            }
            const floats first = values_of<K>(bytes, values + 16, j), second = values_of<K>(bytes >> 4, values + 16 + 2 * MORE, j);
            *(floats *)(to + j) = K == SUPER6 ? first * low : fused(first, low, zero);
            *(floats *)(to + 16 + j) = K == SUPER6 ? second * high : fused(second, high, zero);
        }
    }
}

struct Decoder {
    int64_t bits, grid;  // `grid`: bytes of scales of 256 inputs
    void (*decode)(const char *values, const char *grid, int64_t blocks, int64_t ahead, float *to);
};

static Decoder decoder_of(int64_t kind) {
    switch (kind) {
        case BLOCKS5: return {bits_of(BLOCKS5), 32, decode<BLOCKS5>};
        case SUPER4: return {bits_of(SUPER4), 20, decode<SUPER4>};
        case SUPER5: return {bits_of(SUPER5), 20, decode<SUPER5>};
        default: return {bits_of(SUPER6), 18, decode<SUPER6>};
    }
}

// Adds R rows' products of one vector with O outputs' weights.
template <int R, int O> INLINE void add_products(const float *x, int64_t ldx, const floats (&weights)[O], floats (&a)[R][O]) {
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
        const floats of_row = held(at(x + r * ldx));
#pragma GCC unroll 12
        for (int i = 0; i < O; i++) a[r][i] = fused(of_row, weights[i], a[r][i]);
    }
}

// Adds R rows' products with O outputs from o on, decoded 256 inputs at a time. `SIDE`: as of `sums`.
template <int R, int O, bool SIDE>
INLINE void sums_of_decoded(const Weight &w, int64_t o, const float *x, int64_t ldx, floats (&a)[R][O]) {
    const Decoder decoder = decoder_of(w.kind);
    const int64_t row = w.in * decoder.bits / 8, line = w.in * decoder.grid / SUPER;
    const char *values = w.values + o * row, *grid = (const char *)w.scale + o * line;
    alignas(64) float decoded[O][SUPER];
    const int64_t step = SIDE ? R : 1, next = SIDE ? V : ldx;
    for (int64_t k = 0; k < w.in; k += SUPER, x += SUPER * step, values += SUPER * decoder.bits / 8, grid += decoder.grid) {
        const int64_t size = w.in - k < SUPER ? w.in - k : SUPER;
        for (int i = 0; i < O; i++) decoder.decode(values + i * row, grid + i * line, size / BLOCK, O * row, decoded[i]);
#pragma GCC unroll 2
        for (int64_t j = 0; j < size; j += V) {
            floats weights[O];
#pragma GCC unroll 12
            for (int i = 0; i < O; i++) weights[i] = at(decoded[i] + j);
            add_products<R, O>(x + j * step, next, weights, a);
        }
    }
}

// Adds R rows' products with O outputs from o on, of BLOCKS8 and BLOCKS4, decoded in registers.
template <int K, int R, int O>
INLINE void sums_of_blocks(const Weight &w, int64_t o, const float *x, int64_t ldx, floats (&a)[R][O]) {
    constexpr int NUMBERS = K == BLOCKS4 ? 2 : 1;  // of a block in `grid`
    const int64_t row = row_bytes<K>(w.in), blocks = w.in / BLOCK, step = row_bytes<K>(BLOCK);
    const char *from = w.values + o * row;
    const uint16_t *grid = (const uint16_t *)w.scale + o * blocks * NUMBERS;
    for (int64_t b = 0; b < blocks; b++) {
        floats scale[O], zero[O], table[O];
#pragma GCC unroll 12
        for (int i = 0; i < O; i++) {
            const uint16_t *const of = grid + (i * blocks + b) * NUMBERS;
            scale[i] = floats{} + float16(of[0]);
            if constexpr (K == BLOCKS4) {
                zero[i] = floats{} + float16(of[1]);
                table[i] = scaled_table(scale[i], zero[i]);
            }
            if ((b * step & 63) == 0) __builtin_prefetch(from + 2 * O * row + b * step * O + i * 64);  // in the order of memory
        }
        for (int j = 0; j < step; j += V) {
            const float *const of_rows = x + b * BLOCK + j;
            ints values[O];
            floats weights[O];
#pragma GCC unroll 12
            for (int i = 0; i < O; i++) {
                values[i] = widened((const int8_t *)from + i * row + b * step + j);
                weights[i] = K == BLOCKS8 ? to_floats(values[i]) * scale[i] : scaled_halves(values[i], table[i], scale[i], zero[i]);
            }
            add_products<R, O>(of_rows, ldx, weights, a);
            if constexpr (K == BLOCKS4) {
#pragma GCC unroll 12
                for (int i = 0; i < O; i++) weights[i] = scaled_halves(values[i] >> 4, table[i], scale[i], zero[i]);
                add_products<R, O>(of_rows + 16, ldx, weights, a);
            }
        }
    }
}
