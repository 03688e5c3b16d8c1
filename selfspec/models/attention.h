// Attention of the queries that read one key head, over its slots in tiles. Part of `native.cpp`.
//
// A tile's keys and values stay near while all of these queries read them, six at once, and what is read after them is fetched
// meanwhile. Softmax goes from tile to tile (Milakov and Gimelshein, 1805.02867), but weights are relative to a power of two:
// one that grows changes no digit, so that tiles make no difference. Slots are summed one by one, or, of a bfloat16 cache where
// the processor multiplies pairs, two by two, a token of an even position with the one that follows it: those that a token does
// not see change nothing, so that it gives the same bits in a tree and in a chain, and alone and among others.
#pragma once

constexpr int QUERIES = 6;               // that read a vector of keys or values at once
constexpr int VECTORS = V == 8 ? 2 : 4;  // of values at once, as far as registers reach
constexpr int64_t MOST_QUERIES = 64;     // of one key head, whose scores are kept at once
constexpr int64_t SLOTS = 128;           // of a tile
constexpr int64_t ROUNDED_SLOTS = 64;    // of a block of int8 copies

// Floats that a query's scores of n slots are kept in: whole vectors, also beyond the last slot.
static int64_t score_floats(int64_t n) { return (n + V) / V * V + V; }
// The same of a tile, or of the slots that a mask shows, where these are more.
static int64_t tile_floats(const Place &place) {
    int64_t most = SLOTS;
    for (int64_t i = 0; i < place.segments; i++) {
        const Segment &one = place.segment[i];
        if (one.masks && one.kv_len + 1 - one.from > most) most = one.kv_len + 1 - one.from;
    }
    return score_floats(most);
}

constexpr float NO_POWER = -4e6f;  // of a query without weights

// A query head: `q` [d], what it sees, where its scores are kept, and where its output [d] goes. It sees slots from `first` up
// to `kv_len`, of those from `from` on what `mask` shows, its own `position` being the last. `cap`: as of a `Layer`.
// Where keys and values are multiplied in pairs, `q` and weights are bfloat16 numbers, one after the other from where the
// float32 ones would begin. `scores`: of the slots from `origin` on. A weight is e^score / 2^`power`. `sum`: of the weights,
// or, in pairs, the total of `pair_sums`, of which each has every V-th pair.
struct Query {
    const float *q, *mask;
    int64_t first, kv_len, from, position;
    float cap;
    float *scores, *out;
    int64_t origin;
    float power, sum;
    floats pair_sums;
};

// The slots that some queries see: from `first`, a multiple of `V`, up to `end`.
struct Span {
    int64_t first, end;
};

// What of a key head lies in one block after another: `keys` [d, stride] and `values` [stride, d] of the first block in
// memory, those of the next one `each` numbers later; the next head's `apart` later. Scales [stride] are those of int8 keys
// and values, else null.
template <typename T> struct Head {
    const T *keys, *values;
    const float *key_scales, *value_scales;
    const int64_t *blocks;
    int64_t stride, each, apart;
};

// The slots `from` to `to` in tiles, none of which is in two blocks: `first` to `end`. `from`: where a tile may begin.
struct Tile {
    int64_t to, stride, first, end;
    Tile(int64_t from, int64_t to, int64_t stride) : to(to), stride(stride), first(from), end(from) {}
    bool next() {
        first = end;
        end = (first / stride + 1) * stride;
        if (end > first + SLOTS) end = first + SLOTS;
        if (end > to) end = to;
        return first < to;
    }
    Tile following() const {
        Tile tile = *this;
        tile.next();
        return tile;
    }
};

// What is fetched while something else is multiplied: rows of `lines` cache lines, `stride` bytes apart. `left`: lines that are
// to be fetched, `each` at a step. `line`: the next one of `row`.
struct Coming {
    const char *row;
    int64_t stride, lines, left, each, line;
    inline __attribute__((always_inline)) void fetch() {
        for (int64_t i = 0; i < each && left > 0; i++, left--) {
            __builtin_prefetch(row + 64 * line, 0, 2);
            if (++line == lines) line = 0, row += stride;
        }
    }
};

INLINE floats at(const int8_t *p) { return to_floats(widened(p)); }

// Whether keys and values are multiplied in pairs: of a bfloat16 cache, and of a tile of it whose `Pair`s lie side by side.
enum Pair : uint32_t {};
#if defined(PAIRS)
template <typename T> constexpr bool in_pairs = std::is_same_v<T, uint16_t> || std::is_same_v<T, Pair>;
#else
template <typename T> constexpr bool in_pairs = false;
#endif

// Numbers of keys, or slots of values, that are multiplied between fetches.
template <typename T> constexpr int64_t STEPS = in_pairs<T> ? 16 : 8;

// V numbers of a vector and V of another, as pairs; no other: null.
INLINE floats paired(const uint16_t *low, const uint16_t *high) {
#if defined(PAIRS)
    const __m512i first = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)low));
    if (!high) return (floats)first;
    return (floats)_mm512_or_si512(first, _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)high)), 16));
#else
    return at(low) + at(high);  // never called
#endif
}
// V pairs of vectors that are `apart`.
INLINE floats pairs_at(const uint16_t *p, int64_t apart) { return paired(p, p + apart); }
INLINE floats pairs_at(const Pair *p, int64_t) { return at((const float *)p); }
// Adds pairs times a pair of two bfloat16 numbers.
INLINE floats added_pairs(floats pairs, uint32_t by, floats sum) {
#if defined(PAIRS)
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32((int)by));
#else
    return sum;  // never called
#endif
}
INLINE uint32_t pair_of(const float *numbers, int64_t i) {
    uint32_t pair;
    memcpy(&pair, (const uint16_t *)numbers + i, 4);
    return pair;
}
// Makes float32 numbers, of whole vectors, bfloat16 ones in place, each at half its distance from the beginning.
INLINE void rounded_in_place(float *numbers, int64_t from, int64_t to) {
#if defined(PAIRS)
    for (int64_t i = from; i < to; i += V)
        _mm256_storeu_si256((__m256i *)((uint16_t *)numbers + i), (__m256i)_mm512_cvtneps_pbh((__m512)at(numbers + i)));
#endif
}

// Scores of V slots from s on, -inf where the query does not see them. `lane`: their numbers.
static __attribute__((noinline)) floats seen(const Query &query, floats x, ints lane, int64_t s) {
    const int64_t to = s + V < query.kv_len ? s + V : query.kv_len;
    if (query.mask)
        for (int64_t l = s > query.from ? s : query.from; l < to; l++) x[l - s] += query.mask[l - query.from];
    return (lane < (int)query.kv_len) & (lane >= (int)query.first) ? x : floats{} - INFINITY;
}

// Scores of Q queries over B vectors of slots from s on, whose keys [d, stride] begin at `keys`, and their scales.
template <typename T, int Q, int B> INLINE void score(const Query *query, const T *keys, const float *scales, int64_t s, int64_t stride, int64_t d, Coming &coming) {
    Coming ahead = coming;
    floats a[Q][B] = {};
    for (int64_t k = 0; k < d;) {
        ahead.fetch();
        const int64_t end = k + STEPS<T> < d ? k + STEPS<T> : d;
        for (; k < end; k += in_pairs<T> ? 2 : 1) {
            const T *const row = keys + (std::is_same_v<T, Pair> ? k / 2 : k) * stride;
            floats key[B];
#pragma GCC unroll 4
            for (int i = 0; i < B; i++)
                if constexpr (in_pairs<T>)
                    key[i] = pairs_at(row + i * V, stride);
                else
                    key[i] = held(at(row + i * V));
#pragma GCC unroll 6
            for (int j = 0; j < Q; j++) {
                const floats by = in_pairs<T> ? floats{} : spread(query[j].q[k]);
#pragma GCC unroll 4
                for (int i = 0; i < B; i++)
                    if constexpr (in_pairs<T>)
                        a[j][i] = added_pairs(key[i], pair_of(query[j].q, k), a[j][i]);
                    else
                        a[j][i] = fused(key[i], by, a[j][i]);
            }
        }
    }
    coming = ahead;
    ints lane;
    for (int i = 0; i < V; i++) lane[i] = i + (int)s;
#pragma GCC unroll 6
    for (int j = 0; j < Q; j++) {
        const Query &one = query[j];
        const bool all = s >= one.first && s + B * V <= (one.mask && one.from < one.kv_len ? one.from : one.kv_len);
#pragma GCC unroll 4
        for (int i = 0; i < B; i++) {
            floats x = scales ? a[j][i] * at(scales + i * V) : a[j][i];
            if (one.cap) x = hyperbolic_tangent(x / one.cap) * one.cap;
            if (!all) x = seen(one, x, lane + i * V, s + i * V);
            *(floats *)(one.scores + s - one.origin + i * V) = x;
        }
    }
}

template <typename T, int Q> INLINE void scores_of(const Query *query, const T *keys, const float *scales, const Tile &tile, int64_t stride, int64_t d, Coming &coming) {
    constexpr int B = V < 16 ? 2 : 4;
    int64_t s = tile.first, i = 0;
    for (; s + B * V <= tile.end; s += B * V, i += B * V) score<T, Q, B>(query, keys + i, scales ? scales + i : nullptr, s, stride, d, coming);
    for (; s < tile.end; s += V, i += V) score<T, Q, 1>(query, keys + i, scales ? scales + i : nullptr, s, stride, d, coming);
}

// Adds to N vectors, from k on, of the Q queries' outputs what a tile's values, each `apart` from the next one, bring, and,
// if `summed`, to the queries' sums their weights.
template <typename T, int Q, int N, bool SCALED>
INLINE void mix(Query *query, const T *values, const float *scales, const Tile &tile, int64_t apart, int64_t k, bool summed, Coming &coming) {
    Coming ahead = coming;
    floats o[Q][N];
    float sum[Q];
    const int64_t origin = query->origin;
    for (int j = 0; j < Q; j++) {
        for (int i = 0; i < N; i++) o[j][i] = at(query[j].out + k + i * V);
        sum[j] = query[j].sum;
    }
    if constexpr (in_pairs<T>) {
        const auto add = [&](int64_t s, const floats(&value)[N]) {
#pragma GCC unroll 6
            for (int j = 0; j < Q; j++) {
                const uint32_t weights = pair_of(query[j].scores, s - origin);
#pragma GCC unroll 4
                for (int i = 0; i < N; i++) o[j][i] = added_pairs(value[i], weights, o[j][i]);
            }
        };
        const int64_t whole = tile.end - (std::is_same_v<T, Pair> ? 0 : (tile.end - tile.first) % 2);
        for (int64_t s = tile.first; s < whole;) {
            ahead.fetch();
            for (const int64_t end = s + STEPS<T> < whole ? s + STEPS<T> : whole; s < end; s += 2, values += std::is_same_v<T, Pair> ? apart : 2 * apart) {
                floats value[N];
#pragma GCC unroll 4
                for (int i = 0; i < N; i++) value[i] = pairs_at(values + i * V, apart);
                add(s, value);
            }
        }
        if constexpr (!std::is_same_v<T, Pair>)
            if (whole < tile.end) {
                floats value[N];
#pragma GCC unroll 4
                for (int i = 0; i < N; i++) value[i] = paired(values + i * V, nullptr);
                add(whole, value);
            }
    } else for (int64_t s = tile.first; s < tile.end;) {
        ahead.fetch();
        for (const int64_t end = s + STEPS<T> < tile.end ? s + STEPS<T> : tile.end; s < end; s++, values += apart) {
            floats value[N];
#pragma GCC unroll 4
            for (int i = 0; i < N; i++) value[i] = held(at(values + i * V));
#pragma GCC unroll 6
            for (int j = 0; j < Q; j++) {
                float weight = query[j].scores[s - origin];
                sum[j] += weight;
                if constexpr (SCALED) weight *= scales[s - tile.first];
                const floats by = spread(weight);
#pragma GCC unroll 4
                for (int i = 0; i < N; i++) o[j][i] = fused(value[i], by, o[j][i]);
            }
        }
    }
    for (int j = 0; j < Q; j++) {
        for (int i = 0; i < N; i++) *(floats *)(query[j].out + k + i * V) = o[j][i];
        if (summed) query[j].sum = sum[j];
    }
    coming = ahead;
}

// The same of all vectors of the outputs from k up to `end`.
template <typename T, int Q, bool SCALED>
INLINE void mixed_of(Query *query, const T *values, const float *scales, const Tile &tile, int64_t apart, int64_t k, int64_t end, Coming &coming) {
    bool summed = true;
    for (; k + VECTORS * V <= end; k += VECTORS * V, values += VECTORS * V, summed = false) mix<T, Q, VECTORS, SCALED>(query, values, scales, tile, apart, k, summed, coming);
    if constexpr (VECTORS > 2) {
        if (end - k == 3 * V) return mix<T, Q, 3, SCALED>(query, values, scales, tile, apart, k, summed, coming);
        if (end - k == 2 * V) return mix<T, Q, 2, SCALED>(query, values, scales, tile, apart, k, summed, coming);
    }
    if (end - k == V) mix<T, Q, 1, SCALED>(query, values, scales, tile, apart, k, summed, coming);
}

// The scores of n queries, six at once, over a tile whose keys [d, stride] and scales begin at `keys` and `scales`.
template <typename T>
static void scores_of_all(const Query *query, int64_t n, const T *keys, const float *scales, const Tile &tile, int64_t stride, int64_t d, Coming &coming) {
    for (int64_t j = 0; j < n; j += QUERIES) switch (n - j) {
            case 1: scores_of<T, 1>(query + j, keys, scales, tile, stride, d, coming); break;
            case 2: scores_of<T, 2>(query + j, keys, scales, tile, stride, d, coming); break;
            case 3: scores_of<T, 3>(query + j, keys, scales, tile, stride, d, coming); break;
            case 4: scores_of<T, 4>(query + j, keys, scales, tile, stride, d, coming); break;
            case 5: scores_of<T, 5>(query + j, keys, scales, tile, stride, d, coming); break;
            default: scores_of<T, 6>(query + j, keys, scales, tile, stride, d, coming);
        }
}
template <typename T, bool SCALED>
static void mixed_of_all(Query *query, int64_t n, const T *values, const float *scales, const Tile &tile, int64_t apart, int64_t k, int64_t end, Coming &coming) {
    for (int64_t j = 0; j < n; j += QUERIES) switch (n - j) {
            case 1: mixed_of<T, 1, SCALED>(query + j, values, scales, tile, apart, k, end, coming); break;
            case 2: mixed_of<T, 2, SCALED>(query + j, values, scales, tile, apart, k, end, coming); break;
            case 3: mixed_of<T, 3, SCALED>(query + j, values, scales, tile, apart, k, end, coming); break;
            case 4: mixed_of<T, 4, SCALED>(query + j, values, scales, tile, apart, k, end, coming); break;
            case 5: mixed_of<T, 5, SCALED>(query + j, values, scales, tile, apart, k, end, coming); break;
            default: mixed_of<T, 6, SCALED>(query + j, values, scales, tile, apart, k, end, coming);
        }
}

// Where a thread lays what more than `QUERIES` queries read, of int8 copies twice as many: a tile's keys or values, widened.
template <typename T> static float *near_tile(int64_t n, int64_t d) {
    static thread_local Kept kept;
    return n > (sizeof(T) == 1 ? 2 * QUERIES : QUERIES) ? (float *)kept.of(SLOTS * d * 4) : nullptr;
}

// A tile's keys, and its values' numbers k to `end`, to be fetched in about this many steps; nothing of a tile behind the last one.
template <typename T> INLINE Coming coming_keys(const Head<T> &head, int64_t d, const Tile &tile, int64_t steps) {
    if (tile.first >= tile.to) return {};
    const int64_t lines = ((tile.end - tile.first) * (int64_t)sizeof(T) + 63) / 64;
    const T *from = head.keys + head.blocks[tile.first / head.stride] * head.each + tile.first % head.stride;
    return {(const char *)from, head.stride * (int64_t)sizeof(T), lines, lines * d, (lines * d + steps) / (steps + 1), 0};
}
template <typename T> INLINE Coming coming_values(const Head<T> &head, int64_t d, const Tile &tile, int64_t k, int64_t end, int64_t steps) {
    if (tile.first >= tile.to) return {};
    const int64_t lines = ((end - k) * (int64_t)sizeof(T) + 63) / 64, rows = tile.end - tile.first;
    const T *from = head.values + head.blocks[tile.first / head.stride] * head.each + tile.first % head.stride * d + k;
    return {(const char *)from, d * (int64_t)sizeof(T), lines, lines * rows, (lines * rows + steps) / (steps + 1), 0};
}
// Steps in which n queries' scores of a tile are computed, and numbers k to `end` of what its values bring.
template <typename T> INLINE int64_t score_steps(int64_t n, int64_t d, const Tile &tile) {
    constexpr int64_t B = (V < 16 ? 2 : 4) * V;
    const int64_t slots = tile.end - tile.first;
    return (n + QUERIES - 1) / QUERIES * (slots / B + slots % B / V) * ((d + STEPS<T> - 1) / STEPS<T>);
}
template <typename T> INLINE int64_t mix_steps(int64_t n, const Tile &tile, int64_t k, int64_t end) {
    return (n + QUERIES - 1) / QUERIES * ((end - k + VECTORS * V - 1) / (VECTORS * V)) * ((tile.end - tile.first + STEPS<T> - 1) / STEPS<T>);
}

// Scores of n queries over a tile of one key head. `near`: of `near_tile`.
template <typename T> static void scored(const Query *query, int64_t n, const Head<T> &head, int64_t d, const Tile &tile, float *near, Coming coming) {
    const int64_t block = head.blocks[tile.first / head.stride] * head.each, slot = tile.first % head.stride;
    const T *keys = head.keys + block + slot;
    const float *scales = sizeof(T) == 1 ? head.key_scales + block / d + slot : nullptr;
    if (!near) return scores_of_all<T>(query, n, keys, scales, tile, head.stride, d, coming);
    if constexpr (in_pairs<T>) {
        for (int64_t k = 0; k < d; k += 2)
            for (int64_t s = 0; s < tile.end - tile.first; s += V) *(floats *)(near + k / 2 * SLOTS + s) = pairs_at(keys + k * head.stride + s, head.stride);
        return scores_of_all<Pair>(query, n, (const Pair *)near, scales, tile, SLOTS, d, coming);
    }
    for (int64_t k = 0; k < d; k++)
        for (int64_t s = 0; s < tile.end - tile.first; s += V) *(floats *)(near + k * SLOTS + s) = at(keys + k * head.stride + s);
    scores_of_all<float>(query, n, near, scales, tile, SLOTS, d, coming);
}

constexpr uint32_t ONES = 0x3f803f80;  // a pair of ones

// Adds the weights of slots `from` to `to`, if they are pairs, to a query's sums; other weights are added as they are mixed.
template <typename T> INLINE void summed_up(Query &query, int64_t from, int64_t to) {
#if defined(PAIRS)
    if constexpr (in_pairs<T>) {
        const uint16_t *const weights = (const uint16_t *)query.scores - query.origin;
        for (int64_t s = from / (2 * V) * (2 * V); s < to; s += 2 * V) {
            uint32_t mask = s < from ? 0xffff << (from - s) / 2 : 0xffff;
            if (to - s < 2 * V) mask &= (1 << (to - s + 1) / 2) - 1;
            query.pair_sums = added_pairs((floats)_mm512_maskz_loadu_epi32((__mmask16)mask, weights + s), ONES, query.pair_sums);
        }
    }
#endif
}

INLINE float largest_of(floats x) {
#if V == 16
    return _mm512_reduce_max_ps((__m512)x);
#else
    float largest = x[0];
    for (int i = 1; i < V; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
#endif
}

// Makes a query's scores of slots `from` to `to` weights: e^score / 2^`power`, `power` being whole, so that a larger one halves
// weights and what they are multiplied with some times, and changes no digit. Slots that it does not see get 0. Returns what the
// weights that were made before are to be multiplied with.
template <typename T> INLINE float weighed(Query &query, int64_t from, int64_t to) {
    float *const scores = query.scores - query.origin;
    floats most = floats{} - INFINITY;
    for (int64_t s = from; s < to; s += V) {
        const floats x = at(scores + s);
        most = x > most ? x : most;
    }
    float before = 1;
    const float power = exponent_of(floats{} + largest_of(most))[0];
    if (power > query.power) {
        before = scaled(floats{} + 1.0f, floats{} + (query.power - power))[0];
        query.power = power;
    }
    const floats least = floats{} + (query.power - 200.0f) * 0.6931472f;  // less would not be 0 times a power of two
    for (int64_t s = from; s < to; s += V) {
        floats x = at(scores + s);
        x = x > least ? x : least;
        const floats n = exponent_of(x);
        *(floats *)(scores + s) = scaled(exponential_beside(x, n), n - query.power);
    }
    if constexpr (in_pairs<T>) rounded_in_place(query.scores, from - query.origin, to - query.origin);
    return before;
}

#if defined(PAIRS)
// Adds to numbers k to `end` of a query's output what slots from `from` on bring, of which its mask shows some: these have the
// last positions up to its own, and are paired by them.
static void mixed_masked(Query &query, const Head<uint16_t> &head, int64_t d, int64_t from, int64_t k, int64_t end) {
    const auto seen = [&](int64_t s) { return s < query.from ? s >= query.first : query.mask[s - query.from] == 0; };
    const auto value = [&](int64_t s) { return head.values + head.blocks[s / head.stride] * head.each + s % head.stride * d; };
    int64_t count = 0;
    for (int64_t s = from; s < query.kv_len; s++) count += seen(s);
    int64_t position = query.position + 1 - count, before = -1;
    for (int64_t s = from; s < query.kv_len; s++) {
        if (!seen(s)) continue;
        const bool odd = position++ % 2;
        if (!odd && position <= query.position) {
            before = s;  // the next one completes the pair
            continue;
        }
        const uint16_t *const weights = (const uint16_t *)query.scores;
        const int64_t position_of_pair = (position - 1) / 2;
        const int64_t low = odd ? before : s;
        const uint32_t first = low < 0 ? 0 : weights[low - query.origin], second = odd ? weights[s - query.origin] : 0;
        const __m512i pair = _mm512_maskz_set1_epi32(1 << position_of_pair % V, (int)(first | second << 16));
        query.pair_sums = added_pairs((floats)pair, ONES, query.pair_sums);
        for (int64_t i = k; i < end; i += V) {
            const floats pairs = paired(value(low < 0 ? s : low) + i, odd ? value(s) + i : nullptr);
            *(floats *)(query.out + i) = added_pairs(pairs, first | second << 16, at(query.out + i));
        }
        before = -1;
    }
}
#endif

// Adds what a tile's values bring to numbers k to `end` of n queries' outputs. `near`: of `near_tile`.
template <typename T> static void mixed_up(Query *query, int64_t n, const Head<T> &head, int64_t d, const Tile &tile, float *near, int64_t k, int64_t end, Coming coming) {
    constexpr bool SCALED = sizeof(T) == 1;
    const int64_t block = head.blocks[tile.first / head.stride] * head.each, slot = tile.first % head.stride;
    const T *values = head.values + block + slot * d + k;
    const float *scales = SCALED ? head.value_scales + block / d + slot : nullptr;
    if (!near || sizeof(T) == 4) return mixed_of_all<T, SCALED>(query, n, values, scales, tile, d, k, end, coming);
    if constexpr (in_pairs<T>) {
        for (int64_t s = 0; s < tile.end - tile.first; s += 2) {
            const uint16_t *const from = values + s * d, *const next = s + 1 < tile.end - tile.first ? from + d : nullptr;
            for (int64_t i = 0; i < end - k; i += V) *(floats *)(near + s / 2 * (end - k) + i) = paired(from + i, next ? next + i : nullptr);
        }
        return mixed_of_all<Pair, false>(query, n, (const Pair *)near, scales, tile, end - k, k, end, coming);
    }
    for (int64_t s = 0; s < tile.end - tile.first; s++)
        for (int64_t i = 0; i < end - k; i += V) *(floats *)(near + s * (end - k) + i) = at(values + s * d + i);
    mixed_of_all<float, SCALED>(query, n, near, scales, tile, end - k, k, end, coming);
}

// Where the slots begin that are mixed by their positions: those of a mask, in pairs; else at the end of the span.
template <typename T> INLINE int64_t masked_from(const Query &query, const Span &span) {
    return in_pairs<T> && query.mask && query.from / 2 * 2 < span.end ? query.from / 2 * 2 : span.end;
}

// Numbers k to `end` of n queries' outputs, multiplied with a factor.
INLINE void multiplied(const Query &query, int64_t k, int64_t end, float by) {
    for (int64_t i = k; i < end; i += V) *(floats *)(query.out + i) = at(query.out + i) * by;
}
template <typename T> INLINE void divided(const Query &query, int64_t k, int64_t end) {
    const float sum = in_pairs<T> ? total(query.pair_sums) : query.sum;
    for (int64_t i = k; i < end; i += V) *(floats *)(query.out + i) = at(query.out + i) / sum;
}
INLINE void cleared(const Query &query, int64_t k, int64_t end) {
    for (int64_t i = k; i < end; i += V) *(floats *)(query.out + i) = floats{};
}

// Attention of n queries of one key head over a span, tile by tile. `scores`: `room` floats for each of them.
template <typename T> static void attended(Query *query, int64_t n, const Head<T> &head, int64_t d, const Span &span, float *scores, int64_t room) {
    float *const near = near_tile<T>(n, d);
    for (int64_t j = 0; j < n; j++) query[j].scores = scores + j * room, cleared(query[j], 0, d);
    const int64_t masked = masked_from<T>(*query, span);
    const auto weights = [&](int64_t from, int64_t to) {
        for (int64_t j = 0; j < n; j++) {
            const float before = weighed<T>(query[j], from, to);
            if (before != 1) {
                query[j].sum *= before;
                query[j].pair_sums *= before;
                multiplied(query[j], 0, d, before);
            }
        }
    };
    for (Tile tile(span.first, masked, head.stride); tile.next();) {
        for (int64_t j = 0; j < n; j++) query[j].origin = tile.first;
        scored(query, n, head, d, tile, near, coming_values(head, d, tile, 0, d, score_steps<T>(n, d, tile)));
        weights(tile.first, tile.end);
        for (int64_t j = 0; j < n; j++) summed_up<T>(query[j], tile.first, tile.end);
        mixed_up(query, n, head, d, tile, near, 0, d, coming_keys(head, d, tile.following(), mix_steps<T>(n, tile, 0, d)));
    }
#if defined(PAIRS)
    if constexpr (in_pairs<T>)
        if (masked < span.end) {
            const int64_t from = masked / V * V;  // scores are computed in whole vectors
            for (int64_t j = 0; j < n; j++) query[j].origin = from;
            for (Tile tile(from, span.end, head.stride); tile.next();) scored(query, n, head, d, tile, near, {});
            weights(from, span.end);
            for (int64_t j = 0; j < n; j++) mixed_masked(query[j], head, d, masked, 0, d);
        }
#endif
    for (int64_t j = 0; j < n; j++) divided<T>(query[j], 0, d);
}

// Queries `from` to `to` of one key head of a segment, whose first token is `first`, and what they see.
static Span queries_of(const Pass &p, const Layer &layer, const Place &place, const Segment &segment, int64_t head, int64_t first, int64_t from, int64_t to, const float *qkv, float *mixed, Query *query) {
    const int64_t d = p.head_dim, group = p.heads / p.kv_heads, width = (p.heads + 2 * p.kv_heads) * d;
    const int64_t window = place.spec[layer.spec].window;
    Span span = {segment.kv_len, 0};
    for (int64_t j = from; j < to; j++) {
        const int64_t i = j / group, r = first + i, h = head * group + j % group;
        const float *mask = segment.masks ? segment.masks[layer.spec] + i * (segment.kv_len - segment.from) : nullptr;
        const int64_t kv_len = mask ? segment.kv_len : place.slots[r] + 1;
        int64_t begin = window ? (mask ? place.positions[r] : place.slots[r]) + 1 - window : 0;
        begin = mask && begin > segment.from ? segment.from : begin;
        begin = begin > 0 ? begin : 0;
        query[j - from] = Query{qkv + r * width + head_offset(p, layer, h), mask, begin, kv_len, segment.from, place.positions[r], (float)layer.cap, nullptr, mixed + (r * p.heads + h) * d, 0, NO_POWER, 0, {}};
        span.first = begin < span.first ? begin : span.first;
        span.end = kv_len > span.end ? kv_len : span.end;
    }
    span.first -= span.first % V;
    return span;
}

// One key head of those that begin at `all`.
template <typename T> INLINE Head<T> head_of(const Head<T> &all, const Segment &segment, int64_t head, int64_t d) {
    Head<T> own = all;
    own.blocks = own.key_scales ? segment.rounded_blocks : segment.blocks;
    own.keys += head * own.apart;
    own.values += head * own.apart;
    if (own.key_scales) own.key_scales += head * own.apart / d, own.value_scales += head * own.apart / d;
    return own;
}

// Few queries of many slots: all threads share each head's slots, then its queries, then its outputs' numbers.
constexpr int64_t MANY_SLOTS = 512, FEW_QUERIES = 8;

static int64_t shared_score_floats(const Pass &p, const Place &place, int64_t threads) {
    const int64_t of_head = place.n * (p.heads / p.kv_heads);
    if (threads < 2 || place.segments != 1 || place.kv_len < MANY_SLOTS || of_head > MOST_QUERIES || p.kv_heads * of_head >= FEW_QUERIES * threads) return 0;
    return p.kv_heads * of_head * score_floats(place.kv_len);
}

template <typename T>
static void attention_together(const Pass &p, const Layer &layer, const Place &place, const float *qkv, const Head<T> &all, float *scores, float *mixed, const Team &team) {
    const Segment &segment = place.segment[0];
    const int64_t d = p.head_dim, n = place.n * (p.heads / p.kv_heads), room = score_floats(place.kv_len);
    float *const near = near_tile<T>(n, d);
    Query query[MOST_QUERIES];
    const auto queries = [&](int64_t head) {
        const Span span = queries_of(p, layer, place, segment, head, 0, 0, n, qkv, mixed, query);
        for (int64_t j = 0; j < n; j++) query[j].scores = scores + (head * n + j) * room;
        return span;
    };
    const Span span = queries(0);  // that of all heads
    const int64_t slots = (span.end - span.first + V - 1) / V * V;
    int64_t from = team.share(p.kv_heads * slots, V), to = team.end(p.kv_heads * slots, V);
    for (int64_t head = from / slots; from < to; head++) {
        const int64_t first = from - head * slots, last = to - head * slots < slots ? to - head * slots : slots, end = span.first + last;
        queries(head);
        const Head<T> own = head_of(all, segment, head, d);
        for (Tile tile(span.first + first, end < span.end ? end : span.end, own.stride); tile.next();)
            scored(query, n, own, d, tile, near, coming_keys(own, d, tile.following(), score_steps<T>(n, d, tile)));
        from += last - first;
    }
    team.wait();
    for (int64_t i = team.share(p.kv_heads * n, 1); i < team.end(p.kv_heads * n, 1); i++) {
        Query one{};
        one.scores = scores + i * room, one.power = NO_POWER;
        weighed<T>(one, span.first, span.end);
    }
    team.wait();
    from = team.share(p.kv_heads * d, V), to = team.end(p.kv_heads * d, V);
    for (int64_t head = from / d; from < to; head++) {
        const int64_t k = from - head * d, end = to - head * d < d ? to - head * d : d;
        queries(head);
        const Head<T> own = head_of(all, segment, head, d);
        const int64_t masked = masked_from<T>(*query, span);
        for (int64_t j = 0; j < n; j++) cleared(query[j], k, end), summed_up<T>(query[j], span.first, masked);
        for (Tile tile(span.first, masked, own.stride); tile.next();)
            mixed_up(query, n, own, d, tile, near, k, end, coming_values(own, d, tile.following(), k, end, mix_steps<T>(n, tile, k, end)));
#if defined(PAIRS)
        if constexpr (in_pairs<T>)
            for (int64_t j = 0; j < n && masked < span.end; j++) mixed_masked(query[j], own, d, masked, k, end);
#endif
        for (int64_t j = 0; j < n; j++) divided<T>(query[j], k, end);
        from += end - k;
    }
}

// Attention of queries `from` to `to` of one key head of a segment, whose first token is `first`. `scores`: as in `attended`.
template <typename T>
static void attend(const Pass &p, const Layer &layer, const Place &place, const Segment &segment, int64_t head, int64_t first, int64_t from, int64_t to, const float *qkv, const Head<T> &all, float *scores, int64_t room, float *mixed) {
    Query query[MOST_QUERIES];
    const Span span = queries_of(p, layer, place, segment, head, first, from, to, qkv, mixed, query);
    attended(query, to - from, head_of(all, segment, head, p.head_dim), p.head_dim, span, scores, room);
}

// This thread's share of attention, by what it takes: neighbours, of few segments and heads. What a query takes counts as its
// segment's slots, and something besides.
template <typename T>
static void attention(const Pass &p, const Layer &layer, const Place &place, const float *qkv, const Head<T> &head, float *scores, float *shared_scores, float *mixed, const Team &team) {
    if (shared_score_floats(p, place, team.threads)) return attention_together(p, layer, place, qkv, head, shared_scores, mixed, team);
    const int64_t window = place.spec[layer.spec].window, group = p.heads / p.kv_heads;
    const auto cost = [&](const Segment &segment) { return (window && window < segment.kv_len ? window : segment.kv_len) + 4 * V; };
    const int64_t room = tile_floats(place);
    int64_t all = 0, before = 0, first = 0;
    for (int64_t i = 0; i < place.segments; i++) all += place.segment[i].n * p.heads * cost(place.segment[i]);
    const int64_t begin = team.share(all, 1), end = team.end(all, 1);
    for (int64_t i = 0; i < place.segments && before < end; i++) {
        const Segment &segment = place.segment[i];
        const int64_t each = cost(segment), of_head = segment.n * group, queries = p.kv_heads * of_head;
        int64_t from = begin > before ? (begin - before + each - 1) / each : 0, to = (end - before + each - 1) / each;
        if (to > queries) to = queries;
        while (from < to) {
            const int64_t at = from % of_head;
            int64_t count = of_head - at < to - from ? of_head - at : to - from;
            if (count > MOST_QUERIES) count = MOST_QUERIES;
            attend<T>(p, layer, place, segment, from / of_head, first, at, at + count, qkv, head, scores, room, mixed);
            from += count;
        }
        before += queries * each;
        first += segment.n;
    }
}

// Rounds numbers to int8 with a scale that maps the largest of them, `most`, to 127.
INLINE floats scale_of(floats most) { return most > 1e-30f ? most * (1 / 127.0f) : floats{} + 1.0f; }
INLINE void round_to(int8_t *to, floats x, floats scale) {
    const floats nearest = (x / scale + 12582912.0f) - 12582912.0f;
    *(bytes *)to = __builtin_convertvector(__builtin_convertvector(nearest, ints), bytes);
}
INLINE floats absolute(floats x) { return (floats)((ints)x & 0x7fffffff); }

// Copies a head's keys [d, stride] in slots `from` to `to`, rounded outwards to whole vectors, to int8, a scale for each slot.
template <typename T>
static void round_keys(const T *keys, int64_t from, int64_t to, int64_t stride, int64_t d, const Head<int8_t> &head) {
    for (int64_t s = from / V * V; s < to; s += V) {
        floats most = {};
        for (int64_t k = 0; k < d; k++) {
            const floats x = absolute(at(keys + k * stride + s));
            most = x > most ? x : most;
        }
        const int64_t block = head.blocks[s / head.stride] * head.each, slot = s % head.stride;
        *(floats *)(head.key_scales + block / d + slot) = most = scale_of(most);
        for (int64_t k = 0; k < d; k++) round_to((int8_t *)head.keys + block + k * head.stride + slot, at(keys + k * stride + s), most);
    }
}
// The same of values [stride, d].
template <typename T>
static void round_values(const T *values, int64_t from, int64_t to, int64_t d, const Head<int8_t> &head) {
    for (int64_t s = from; s < to; s++) {
        floats most = {};
        for (int64_t k = 0; k < d; k += V) {
            const floats x = absolute(at(values + s * d + k));
            most = x > most ? x : most;
        }
        float largest = most[0];
        for (int i = 1; i < V; i++) largest = most[i] > largest ? most[i] : largest;
        most = scale_of(floats{} + largest);
        const int64_t block = head.blocks[s / head.stride] * head.each, slot = s % head.stride;
        *(float *)(head.value_scales + block / d + slot) = most[0];
        for (int64_t k = 0; k < d; k += V) round_to((int8_t *)head.values + block + slot * d + k, at(values + s * d + k), most);
    }
}
