// AMX's tiles: as many outputs as a tile has lines, over as many inputs as a line has numbers. Part of `native.cpp`.
//
// A row is the sum of three parts of bfloat16 numbers, to float32's last bit. So products are exact, sums float32's, and 16
// rows take less than twice as long as one. No row of a tile changes what comes of another.
#pragma once

constexpr int64_t LINES = 16, PARTS = 3;
constexpr int64_t LINE = 32;             // inputs; of 4 bytes of a row's part each LINE / LINES
constexpr int64_t BLOCK_OF = 2 * LINES;  // outputs whose sums are in tiles at once

static bool tiles_allowed() {  // by Linux, which keeps tiles' state for those who ask
    static const bool allowed = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return allowed;
}

struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, none[14] = {};
    uint16_t bytes[16] = {};
    uint8_t lines[16] = {};
};

INLINE __m512i steps(int by) {  // 0, by, 2 * by, ..
    return _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32(by));
}

// 32 floats in parts of bfloat16, each the next eight bits of what is left.
INLINE void in_parts(const float *x, __m512i (&part)[PARTS]) {
    const __m512i upper = _mm512_add_epi32(_mm512_set1_epi32(0x00030001), steps(0x00040004));  // halves 1, 3, 5, ..
    const __m512 kept = _mm512_castsi512_ps(_mm512_set1_epi32((int)0xffff0000));
    __m512 low = _mm512_loadu_ps(x), high = _mm512_loadu_ps(x + V);
    for (int64_t p = 0; p < PARTS; p++) {
        part[p] = _mm512_permutex2var_epi16((__m512i)low, upper, (__m512i)high);
        low = _mm512_sub_ps(low, _mm512_and_ps(low, kept));
        high = _mm512_sub_ps(high, _mm512_and_ps(high, kept));
    }
}

// What rows are filled up to, so that they can be moved by fours.
INLINE int64_t filled(int64_t rows) { return rows == 1 ? 1 : (rows + 3) / 4 * 4; }

// Four rows of 16 numbers as 16 times four, each 4 `apart`.
INLINE void spread(const __m512i (&row)[4], uint32_t *out, int64_t apart) {
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i low = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
    for (int half = 0; half < 2; half++) {
        const __m512i at = _mm512_add_epi32(first, _mm512_set1_epi32(8 * half));
        const __m512i of_two = _mm512_permutex2var_epi32(row[0], at, row[1]), of_others = _mm512_permutex2var_epi32(row[2], at, row[3]);
        for (int quarter = 0; quarter < 2; quarter++, out += 4 * apart) {
            const __m512i four = _mm512_permutex2var_epi64(of_two, _mm512_add_epi64(low, _mm512_set1_epi64(4 * quarter)), of_others);
            _mm_storeu_si128((__m128i *)out, _mm512_castsi512_si128(four));
            _mm_storeu_si128((__m128i *)(out + apart), _mm512_extracti32x4_epi32(four, 1));
            _mm_storeu_si128((__m128i *)(out + 2 * apart), _mm512_extracti32x4_epi32(four, 2));
            _mm_storeu_si128((__m128i *)(out + 3 * apart), _mm512_extracti32x4_epi32(four, 3));
        }
    }
}

// Four numbers of four rows each, `apart`.
INLINE __m512i four_of(const float *from, int64_t apart) {
    __m512i found = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)from));
    found = _mm512_inserti32x4(found, _mm_loadu_si128((const __m128i *)(from + apart)), 1);
    found = _mm512_inserti32x4(found, _mm_loadu_si128((const __m128i *)(from + 2 * apart)), 2);
    return _mm512_inserti32x4(found, _mm_loadu_si128((const __m128i *)(from + 3 * apart)), 3);
}

// 16 numbers of four rows each, as four rows of 16.
INLINE void gathered(const floats (&four)[4], floats (&row)[4]) {
    const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    for (int r = 0; r < 4; r += 2) {
        const __m512i at = _mm512_add_epi32(first, _mm512_set1_epi32(r));
        const __m512 low = _mm512_permutex2var_ps((__m512)four[0], at, (__m512)four[1]), high = _mm512_permutex2var_ps((__m512)four[2], at, (__m512)four[3]);
        row[r] = (floats)_mm512_shuffle_f32x4(low, high, 0x44);
        row[r + 1] = (floats)_mm512_shuffle_f32x4(low, high, 0xee);
    }
}

// Rows [rows, in] in parts [in / LINE, PARTS, LINES, filled] of 4 bytes of neighbouring inputs each.
static void split(const float *x, int64_t ldx, int64_t rows, int64_t in, uint32_t *out) {
    const int64_t wide = filled(rows);
    for (int64_t r = 0; r < rows; r += 4) {
        const int64_t n = rows - r < 4 ? rows - r : 4;
        uint32_t *at = out + r;
        __m512i part[4][PARTS] = {};
        for (int64_t k = 0; k < in; k += LINE) {
            for (int64_t i = 0; i < n; i++) in_parts(x + (r + i) * ldx + k, part[i]);
            for (int64_t p = 0; p < PARTS; p++, at += LINES * wide)
                if (rows == 1) {
                    _mm512_storeu_si512(at, part[0][p]);
                } else {
                    const __m512i four[4] = {part[0][p], part[1][p], part[2][p], part[3][p]};
                    spread(four, at, wide);
                }
        }
    }
}

// Adds a block's outputs on, o the first, kept in `sums` [outputs, filled], to y.
INLINE void from_tiles(const Weight &w, int64_t o, int64_t outputs, const float *sums, float *y, int64_t ldy, int64_t rows, bool add) {
    const int64_t wide = filled(rows);
    for (int64_t i = 0; i < outputs; i += LINES) {
        floats bias = {};
        if (w.bias) bias = w.bias_kind == BFLOAT16 ? at((const uint16_t *)w.bias + o + i) : at((const float *)w.bias + o + i);
        for (int64_t r = 0; r < rows; r += 4) {
            const float *from = sums + i * wide + r;
            floats row[4];
            if (rows == 1) {
                row[0] = at(from);
            } else {
                floats four[4];
                for (int64_t q = 0; q < 4; q++) four[q] = (floats)four_of(from + 4 * q * wide, wide);
                gathered(four, row);
            }
            for (int64_t j = 0; j < 4 && r + j < rows; j++) {
                floats *const to = (floats *)(y + (r + j) * ldy + o + i);
                *to = add ? *to + (row[j] + bias) : row[j] + bias;
            }
        }
    }
}

// The sums of up to `BLOCK_OF` outputs, whose weights begin at `values`, with rows, filled up, in `parts`.
INLINE void block_of_tiles(const char *values, int64_t line, int64_t outputs, const uint32_t *parts, int64_t count, int64_t rows, float *sums) {
    const int64_t part = LINES * rows, by = 4 * rows;
    const bool two = outputs > LINES;
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t k = 0; k < count; k++, parts += PARTS * part, values += 64) {
        for (int64_t i = 0; i < BLOCK_OF; i++) _mm_prefetch(values + (BLOCK_OF + i) * line, _MM_HINT_T1);
        _tile_loadd(3, values, line);
        _tile_loadd(5, parts, by);
        _tile_loadd(6, parts + part, by);
        _tile_loadd(7, parts + 2 * part, by);
        if (two) _tile_loadd(4, values + LINES * line, line);
        _tile_dpbf16ps(0, 3, 5);
        if (two) _tile_dpbf16ps(1, 4, 5);
        _tile_dpbf16ps(0, 3, 6);
        if (two) _tile_dpbf16ps(1, 4, 6);
        _tile_dpbf16ps(0, 3, 7);
        if (two) _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, sums, by);
    _tile_stored(1, sums + part, by);
}

static void tiled(const Weight &w, int64_t from, int64_t to, const float *x, int64_t ldx, float *y, int64_t ldy, int64_t rows, bool add) {
    static thread_local Kept kept;
    const int64_t wide = filled(rows), count = w.in / LINE, of_parts = count * PARTS * LINES * wide, line = 64 * count, of_sums = BLOCK_OF * wide;
    uint32_t *const parts = (uint32_t *)kept.of((of_parts + 2 * of_sums) * 4);
    float *sums = (float *)(parts + of_parts), *before = sums + of_sums;  // of these outputs, of those before
    split(x, ldx, rows, w.in, parts);
    TileShapes shapes;
    for (int t = 0; t < 8; t++) shapes.lines[t] = LINES, shapes.bytes[t] = t == 3 || t == 4 ? 64 : 4 * wide;
    _tile_loadconfig(&shapes);
    int64_t outputs = 0;
    for (int64_t o = from; o < to; o += outputs) {
        const int64_t last = outputs;
        outputs = to - o < BLOCK_OF ? to - o : BLOCK_OF;
        block_of_tiles(w.values + o * line, line, outputs, parts, count, wide, sums);
        if (last) from_tiles(w, o - last, last, before, y, ldy, rows, add);  // they are in memory by now
        float *const these = sums;
        sums = before;
        before = these;
    }
    _tile_release();
    from_tiles(w, to - outputs, outputs, before, y, ldy, rows, add);
}

// FLOAT32 weights and more rows than few: both in parts, of whose products those below 2^-24 of the first are left out.
constexpr int64_t CHUNK = PARTS * LINES;     // lines of 64 bytes: 32 inputs of 16 outputs, or of 16 rows, in parts
constexpr int64_t HELD = 64, OF_ALL = 1536;  // outputs, and inputs of theirs, whose parts stay near
constexpr int64_t PIECE = 512;               // rows whose parts are made at once

INLINE void transpose(__m512i (&a)[LINES]) {
    __m512i b[LINES];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
            a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
        }
#pragma GCC unroll 16
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 16; j += 8) {
            b[i + j] = _mm512_shuffle_i32x4(a[i + j], a[i + j + 4], 0x88);
            b[i + j + 4] = _mm512_shuffle_i32x4(a[i + j], a[i + j + 4], 0xdd);
        }
#pragma GCC unroll 16
    for (int i = 0; i < 8; i++) {
        a[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
        a[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd);
    }
}

// Up to 16 rows [n, in] in parts [in / 32, PARTS, 16], each a line; `ACROSS`: parts transposed, by two inputs.
template <bool ACROSS> static void lines_in_parts(const float *x, int64_t ldx, int64_t n, int64_t in, __m512i *out) {
    for (int64_t k = 0; k < in; k += 32, out += CHUNK) {
        for (int64_t r = 0; r < n; r++) {
            __m512i part[PARTS];
            in_parts(x + r * ldx + k, part);
            for (int64_t p = 0; p < PARTS; p++) out[p * LINES + r] = part[p];
        }
        for (int64_t p = 0; p < PARTS && ACROSS; p++) {
            __m512i lines[LINES] = {};
            for (int64_t r = 0; r < n; r++) lines[r] = out[p * LINES + r];
            transpose(lines);
            for (int64_t r = 0; r < LINES; r++) out[p * LINES + r] = lines[r];
        }
    }
}

// Sums [2, 2, 16, 16] of 32 outputs with 32 rows, over `count` times 32 inputs; outputs' parts begin at `a`, and those of
// the last 16 `next_a` lines later; rows' at `b`. Every tile is loaded while others are multiplied.
INLINE void tiles_of_both(const __m512i *a, int64_t next_a, const __m512i *b, int64_t next_b, int64_t count, float *sums) {
#define MULTIPLY_AND_LOAD_ROWS(then) \
    _tile_dpbf16ps(0, 4, 6); \
    _tile_dpbf16ps(2, 5, 6); \
    _tile_loadd(6, (then), 64); \
    _tile_dpbf16ps(1, 4, 7); \
    _tile_dpbf16ps(3, 5, 7); \
    _tile_loadd(7, (then) + next_b, 64)
#define MULTIPLY_AND_LOAD_OUTPUTS(then) \
    _tile_dpbf16ps(0, 4, 6); \
    _tile_dpbf16ps(1, 4, 7); \
    _tile_loadd(4, (then), 64); \
    _tile_dpbf16ps(2, 5, 6); \
    _tile_dpbf16ps(3, 5, 7); \
    _tile_loadd(5, (then) + next_a, 64)
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, a, 64);
    _tile_loadd(5, a + next_a, 64);
    _tile_loadd(6, b + 2 * LINES, 64);
    _tile_loadd(7, b + 2 * LINES + next_b, 64);
    for (int64_t k = 0; k < count; k++) {  // the smallest products first
        MULTIPLY_AND_LOAD_ROWS(b + LINES);  // an output's first part, a row's last one
        MULTIPLY_AND_LOAD_OUTPUTS(a + LINES);
        MULTIPLY_AND_LOAD_ROWS(b);
        MULTIPLY_AND_LOAD_OUTPUTS(a + 2 * LINES);
        MULTIPLY_AND_LOAD_OUTPUTS(a);
        if (k + 1 < count) a += CHUNK, b += CHUNK;
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        _tile_loadd(6, b + 2 * LINES, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(4, a, 64);
        _tile_dpbf16ps(3, 5, 7);
        _tile_loadd(5, a + next_a, 64);
        _tile_loadd(7, b + 2 * LINES + next_b, 64);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
#undef MULTIPLY_AND_LOAD_ROWS
#undef MULTIPLY_AND_LOAD_OUTPUTS
}

// Rows' sums of 16 outputs, to y or on top of it.
INLINE void from_tile(const float *sums, float *y, int64_t ldy, int64_t rows, bool add) {
    __m512i lines[LINES];
    for (int64_t i = 0; i < LINES; i++) lines[i] = _mm512_loadu_si512(sums + i * LINES);
    transpose(lines);
    for (int64_t r = 0; r < rows && r < LINES; r++, y += ldy) *(floats *)y = add ? *(floats *)y + (floats)lines[r] : (floats)lines[r];
}

// y [rows, out] = rows in parts times outputs `from` to `to`.
static void many(const Weight &w, int64_t from, int64_t to, const __m512i *parts, float *y, int64_t ldy, int64_t rows) {
    static thread_local Kept kept;
    const int64_t most = (OF_ALL < w.in ? OF_ALL : w.in) / 32 * CHUNK, of_rows = w.in / 32 * CHUNK;
    __m512i *const weights = (__m512i *)kept.of((HELD / LINES * most + CHUNK * LINES) * 64);
    float *const sums = (float *)(weights + HELD / LINES * most);
    TileShapes shapes;
    for (int t = 0; t < 8; t++) shapes.lines[t] = LINES, shapes.bytes[t] = 64;
    _tile_loadconfig(&shapes);
    for (int64_t o = from; o < to; o += HELD)
        for (int64_t k = 0; k < w.in; k += OF_ALL) {
            const int64_t outputs = to - o < HELD ? to - o : HELD, reach = w.in - k < OF_ALL ? w.in - k : OF_ALL;
            for (int64_t i = 0; i < outputs; i += LINES)
                lines_in_parts<false>((const float *)w.values + (o + i) * w.in + k, w.in, LINES, reach, weights + i / LINES * most);
            for (int64_t r = 0; r < rows; r += 2 * LINES)
                for (int64_t i = 0; i < outputs; i += 2 * LINES) {
                    const bool more = i + LINES < outputs, other = r + LINES < rows;
                    tiles_of_both(weights + i / LINES * most, more ? most : 0, parts + r / LINES * of_rows + k / 32 * CHUNK, other ? of_rows : 0, reach / 32, sums);
                    for (int64_t t = 0; t < 4; t++) {
                        const int64_t row = r + t % 2 * LINES, output = i + t / 2 * LINES;
                        if (row < rows && output < outputs) from_tile(sums + t * 256, y + row * ldy + o + output, ldy, rows - row, k > 0);
                    }
                }
        }
    _tile_release();
}
