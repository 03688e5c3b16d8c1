// Attention of the queries that read one key head, over its slots in tiles. Part of `native.cpp`.
//
// A tile's keys and values stay near while all of these queries read them, four at once. Slots are summed one by one, or, of
// a bfloat16 cache where the processor multiplies pairs, two by two, a token of an even position with the one that follows
// it: those that a token does not see change nothing, so that it gives the same bits in a tree and in a chain, and alone and
// among others.
#pragma once

constexpr int QUERIES = 4;            // that read a vector of keys or values at once
constexpr int64_t MOST_QUERIES = 16;  // of one key head, whose scores are kept at once
constexpr int64_t SHARED_QUERIES = 64;  // of one key head, at most, whose slots threads share
constexpr int64_t SLOTS = 128;          // of a tile
constexpr int64_t ROUNDED_SLOTS = 64;   // of a block of int8 copies

// Floats that a query's scores are kept in: whole vectors, also beyond the last slot.
static int64_t score_floats(const Place &place) { return (place.kv_len + V) / V * V + V; }

// A query head: `q` [d], what it sees, where its scores are kept, and where its output [d] goes. It sees slots from `first` up
// to `kv_len`, of those from `from` on what `mask` shows, its own `position` being the last. `cap`: as of a `Layer`.
// Where keys and values are multiplied in pairs, `q` and weights are bfloat16 numbers, one after the other from where the
// float32 ones would begin.
struct Query {
    const float *q, *mask;
    int64_t first, kv_len, from, position;
    float cap;
    float *scores, *out;
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
};

INLINE floats at(const int8_t *p) { return to_floats(widened(p)); }

// Whether keys and values are multiplied in pairs: of a bfloat16 cache, and of a tile of it whose `Pair`s lie side by side.
enum Pair : uint32_t {};
#if defined(PAIRS)
template <typename T> constexpr bool in_pairs = std::is_same_v<T, uint16_t> || std::is_same_v<T, Pair>;
#else
template <typename T> constexpr bool in_pairs = false;
#endif

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
template <typename T, int Q, int B> INLINE void score(const Query *query, const T *keys, const float *scales, int64_t s, int64_t stride, int64_t d) {
    floats a[Q][B] = {};
    for (int64_t k = 0; k < d; k += in_pairs<T> ? 2 : 1) {
        const T *const row = keys + (std::is_same_v<T, Pair> ? k / 2 : k) * stride;
        floats key[B];
#pragma GCC unroll 4
        for (int i = 0; i < B; i++)
            if constexpr (in_pairs<T>)
                key[i] = pairs_at(row + i * V, stride);
            else
                key[i] = held(at(row + i * V));
        if constexpr (sizeof(T) == 1)
            __builtin_prefetch(row + d * stride);  // of the next block
        else
            __builtin_prefetch(row + B * V);
        if constexpr (std::is_same_v<T, uint16_t> && in_pairs<T>) __builtin_prefetch(row + stride + B * V);
#pragma GCC unroll 4
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
    ints lane;
    for (int i = 0; i < V; i++) lane[i] = i + (int)s;
#pragma GCC unroll 4
    for (int j = 0; j < Q; j++) {
        const Query &one = query[j];
        const bool all = s >= one.first && s + B * V <= (one.mask && one.from < one.kv_len ? one.from : one.kv_len);
#pragma GCC unroll 4
        for (int i = 0; i < B; i++) {
            floats x = scales ? a[j][i] * at(scales + i * V) : a[j][i];
            if (one.cap) x = hyperbolic_tangent(x / one.cap) * one.cap;
            if (!all) x = seen(one, x, lane + i * V, s + i * V);
            *(floats *)(one.scores + s + i * V) = x;
        }
    }
}

template <typename T, int Q> INLINE void scores_of(const Query *query, const T *keys, const float *scales, const Tile &tile, int64_t stride, int64_t d) {
    constexpr int B = V < 16 ? 2 : 4;
    int64_t s = tile.first, i = 0;
    for (; s + B * V <= tile.end; s += B * V, i += B * V) score<T, Q, B>(query, keys + i, scales ? scales + i : nullptr, s, stride, d);
    for (; s < tile.end; s += V, i += V) score<T, Q, 1>(query, keys + i, scales ? scales + i : nullptr, s, stride, d);
}

// Adds to N vectors, from k on, of the Q queries' outputs what a tile's values, each `apart` from the next one, bring, and to
// `sums`, unless null, their weights.
template <typename T, int Q, int N, bool SCALED>
INLINE void mix(const Query *query, const T *values, const float *scales, const Tile &tile, int64_t apart, int64_t k, float *sums) {
    floats o[Q][N];
    float sum[Q];
    for (int j = 0; j < Q; j++) {
        for (int i = 0; i < N; i++) o[j][i] = at(query[j].out + k + i * V);
        sum[j] = sums ? sums[j] : 0;
    }
    if constexpr (in_pairs<T>) {
        const auto add = [&](int64_t s, const floats(&value)[N]) {
#pragma GCC unroll 4
            for (int j = 0; j < Q; j++) {
                const uint32_t weights = pair_of(query[j].scores, s);
                sum[j] += bfloat16(weights);
                sum[j] += bfloat16(weights >> 16);
#pragma GCC unroll 4
                for (int i = 0; i < N; i++) o[j][i] = added_pairs(value[i], weights, o[j][i]);
            }
        };
        const int64_t whole = tile.end - (std::is_same_v<T, Pair> ? 0 : (tile.end - tile.first) % 2);
        for (int64_t s = tile.first; s < whole; s += 2, values += std::is_same_v<T, Pair> ? apart : 2 * apart) {
            floats value[N];
#pragma GCC unroll 4
            for (int i = 0; i < N; i++) value[i] = pairs_at(values + i * V, apart);
            __builtin_prefetch(values + 32 * apart);
            if constexpr (!std::is_same_v<T, Pair>) __builtin_prefetch(values + 33 * apart);
            add(s, value);
        }
        if constexpr (!std::is_same_v<T, Pair>)
            if (whole < tile.end) {
                floats value[N];
#pragma GCC unroll 4
                for (int i = 0; i < N; i++) value[i] = paired(values + i * V, nullptr);
                add(whole, value);
            }
    } else for (int64_t s = tile.first; s < tile.end; s++, values += apart) {
        floats value[N];
#pragma GCC unroll 4
        for (int i = 0; i < N; i++) value[i] = held(at(values + i * V));
        __builtin_prefetch(values + 32 * apart);
#pragma GCC unroll 4
        for (int j = 0; j < Q; j++) {
            float weight = query[j].scores[s];
            sum[j] += weight;
            if constexpr (SCALED) weight *= scales[s - tile.first];
            const floats by = spread(weight);
#pragma GCC unroll 4
            for (int i = 0; i < N; i++) o[j][i] = fused(value[i], by, o[j][i]);
        }
    }
    for (int j = 0; j < Q; j++) {
        for (int i = 0; i < N; i++) *(floats *)(query[j].out + k + i * V) = o[j][i];
        if (sums) sums[j] = sum[j];
    }
}

// The same of all vectors of the outputs from k up to `end`.
template <typename T, int Q, bool SCALED>
INLINE void mixed_of(const Query *query, const T *values, const float *scales, const Tile &tile, int64_t apart, int64_t k, int64_t end, float *sums) {
    for (; k + 4 * V <= end; k += 4 * V, values += 4 * V, sums = nullptr) mix<T, Q, 4, SCALED>(query, values, scales, tile, apart, k, sums);
    if (end - k == 3 * V) return mix<T, Q, 3, SCALED>(query, values, scales, tile, apart, k, sums);
    if (end - k == 2 * V) return mix<T, Q, 2, SCALED>(query, values, scales, tile, apart, k, sums);
    if (end - k == V) mix<T, Q, 1, SCALED>(query, values, scales, tile, apart, k, sums);
}

// The scores of n queries, four at once, over a tile whose keys [d, stride] and scales begin at `keys` and `scales`.
template <typename T>
static void scores_of_all(const Query *query, int64_t n, const T *keys, const float *scales, const Tile &tile, int64_t stride, int64_t d) {
    for (int64_t j = 0; j < n; j += QUERIES) switch (n - j) {
            case 1: scores_of<T, 1>(query + j, keys, scales, tile, stride, d); break;
            case 2: scores_of<T, 2>(query + j, keys, scales, tile, stride, d); break;
            case 3: scores_of<T, 3>(query + j, keys, scales, tile, stride, d); break;
            default: scores_of<T, 4>(query + j, keys, scales, tile, stride, d);
        }
}
template <typename T, bool SCALED>
static void mixed_of_all(const Query *query, int64_t n, const T *values, const float *scales, const Tile &tile, int64_t apart, int64_t k, int64_t end, float *sums) {
    for (int64_t j = 0; j < n; j += QUERIES) switch (n - j) {
            case 1: mixed_of<T, 1, SCALED>(query + j, values, scales, tile, apart, k, end, sums + j); break;
            case 2: mixed_of<T, 2, SCALED>(query + j, values, scales, tile, apart, k, end, sums + j); break;
            case 3: mixed_of<T, 3, SCALED>(query + j, values, scales, tile, apart, k, end, sums + j); break;
            default: mixed_of<T, 4, SCALED>(query + j, values, scales, tile, apart, k, end, sums + j);
        }
}

// Where a thread lays what more than `QUERIES` queries read, of int8 copies thrice as many: a tile's keys or values, widened.
template <typename T> static float *near_tile(int64_t n, int64_t d) {
    static thread_local Kept kept;
    return n > (sizeof(T) == 1 ? 3 * QUERIES : QUERIES) ? (float *)kept.of(SLOTS * d * 4) : nullptr;
}

// Scores of n queries over slots `from` to `to` of one key head.
template <typename T> static void scored(const Query *query, int64_t n, const Head<T> &head, int64_t d, int64_t from, int64_t to) {
    float *const near = near_tile<T>(n, d);
    for (Tile tile(from, to, head.stride); tile.next();) {
        const int64_t block = head.blocks[tile.first / head.stride] * head.each, slot = tile.first % head.stride;
        const T *keys = head.keys + block + slot;
        const float *scales = sizeof(T) == 1 ? head.key_scales + block / d + slot : nullptr;
        if (!near) {
            scores_of_all<T>(query, n, keys, scales, tile, head.stride, d);
            continue;
        }
        if constexpr (in_pairs<T>) {
            for (int64_t k = 0; k < d; k += 2)
                for (int64_t s = 0; s < tile.end - tile.first; s += V) {
                    *(floats *)(near + k / 2 * SLOTS + s) = pairs_at(keys + k * head.stride + s, head.stride);
                    __builtin_prefetch(keys + k * head.stride + SLOTS + s, 0, 2);  // of the next tile, most often
                    __builtin_prefetch(keys + (k + 1) * head.stride + SLOTS + s, 0, 2);
                }
            scores_of_all<Pair>(query, n, (const Pair *)near, scales, tile, SLOTS, d);
            continue;
        }
        for (int64_t k = 0; k < d; k++) {
            if constexpr (sizeof(T) == 1) __builtin_prefetch(keys + (d + k) * head.stride, 0, 2);  // of the next block
            for (int64_t s = 0; s < tile.end - tile.first; s += V) {
                *(floats *)(near + k * SLOTS + s) = at(keys + k * head.stride + s);
                if constexpr (sizeof(T) > 1) __builtin_prefetch(keys + k * head.stride + SLOTS + s, 0, 2);  // of the next tile, most often
            }
        }
        scores_of_all<float>(query, n, near, scales, tile, SLOTS, d);
    }
}

// Makes a query's scores of a span's slots weights, whose sum is not 1 yet. Slots that it does not see get 0.
template <typename T> INLINE void weighed(float *scores, const Span &span) {
    floats most = floats{} - INFINITY;
    for (int64_t s = span.first; s < span.end; s += V) {
        const floats x = at(scores + s);
        most = x > most ? x : most;
    }
    float largest = most[0];
    for (int i = 1; i < V; i++) largest = most[i] > largest ? most[i] : largest;
    for (int64_t s = span.first; s < span.end; s += V) *(floats *)(scores + s) = exponential(at(scores + s) - largest);
    if constexpr (in_pairs<T>) rounded_in_place(scores, span.first, span.end);
}

#if defined(PAIRS)
// Adds to numbers k to `end` of a query's output what slots from `from` on bring, of which its mask shows some: these have the
// last positions up to its own, and are paired by them.
static void mixed_masked(const Query &query, const Head<uint16_t> &head, int64_t d, int64_t from, int64_t k, int64_t end, float &sum) {
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
        const int64_t low = odd ? before : s;
        const uint32_t first = low < 0 ? 0 : weights[low], second = odd ? weights[s] : 0;
        if (low >= 0) sum += bfloat16(first);
        if (odd) sum += bfloat16(second);
        for (int64_t i = k; i < end; i += V) {
            const floats pairs = paired(value(low < 0 ? s : low) + i, odd ? value(s) + i : nullptr);
            *(floats *)(query.out + i) = added_pairs(pairs, first | second << 16, at(query.out + i));
        }
        before = -1;
    }
}
#endif

// Numbers k to `end` of n queries' outputs. Slots beyond the span, spare ones too, are not read.
template <typename T> static void mixed_up(const Query *query, int64_t n, const Head<T> &head, int64_t d, const Span &span, int64_t k, int64_t end) {
    constexpr bool SCALED = sizeof(T) == 1;
    float *const near = sizeof(T) < 4 ? near_tile<T>(n, d) : nullptr;
    float sums[SHARED_QUERIES] = {};
    for (int64_t j = 0; j < n; j++)
        for (int64_t i = k; i < end; i += V) *(floats *)(query[j].out + i) = floats{};
    const int64_t masked = in_pairs<T> && query->mask && query->from / 2 * 2 < span.end ? query->from / 2 * 2 : span.end;
    for (Tile tile(span.first, masked, head.stride); tile.next();) {
        const int64_t block = head.blocks[tile.first / head.stride] * head.each, slot = tile.first % head.stride;
        const T *values = head.values + block + slot * d + k;
        const float *scales = SCALED ? head.value_scales + block / d + slot : nullptr;
        if (!near) {
            mixed_of_all<T, SCALED>(query, n, values, scales, tile, d, k, end, sums);
            continue;
        }
        if constexpr (in_pairs<T>) {
            for (int64_t s = 0; s < tile.end - tile.first; s += 2) {
                const uint16_t *const from = values + s * d, *const next = s + 1 < tile.end - tile.first ? from + d : nullptr;
                for (int64_t i = 0; i < end - k; i += V) *(floats *)(near + s / 2 * (end - k) + i) = paired(from + i, next ? next + i : nullptr);
            }
            mixed_of_all<Pair, false>(query, n, (const Pair *)near, scales, tile, end - k, k, end, sums);
            continue;
        }
        for (int64_t s = 0; s < tile.end - tile.first; s++) {
            for (int64_t i = 0; i < end - k; i += V) *(floats *)(near + s * (end - k) + i) = at(values + s * d + i);
            __builtin_prefetch(values + (s + ROUNDED_SLOTS) * d);
        }
        mixed_of_all<float, SCALED>(query, n, near, scales, tile, end - k, k, end, sums);
    }
#if defined(PAIRS)
    if constexpr (in_pairs<T>)
        for (int64_t j = 0; j < n && masked < span.end; j++) mixed_masked(query[j], head, d, masked, k, end, sums[j]);
#endif
    for (int64_t j = 0; j < n; j++)
        for (int64_t i = k; i < end; i += V) *(floats *)(query[j].out + i) = at(query[j].out + i) / sums[j];
}

// Queries `from` to `to` of one key head of a segment, whose first token is `first`, and what they see; `scores`: of the first
// of them.
static Span queries_of(const Pass &p, const Layer &layer, const Place &place, const Segment &segment, int64_t head, int64_t first, int64_t from, int64_t to, const float *qkv, float *scores, float *mixed, Query *query) {
    const int64_t d = p.head_dim, group = p.heads / p.kv_heads, width = (p.heads + 2 * p.kv_heads) * d, room = score_floats(place);
    const int64_t window = place.spec[layer.spec].window;
    Span span = {segment.kv_len, 0};
    for (int64_t j = from; j < to; j++) {
        const int64_t i = j / group, r = first + i, h = head * group + j % group;
        const float *mask = segment.masks ? segment.masks[layer.spec] + i * (segment.kv_len - segment.from) : nullptr;
        const int64_t kv_len = mask ? segment.kv_len : place.slots[r] + 1;
        int64_t begin = window ? (mask ? place.positions[r] : place.slots[r]) + 1 - window : 0;
        begin = mask && begin > segment.from ? segment.from : begin;
        begin = begin > 0 ? begin : 0;
        query[j - from] = Query{qkv + r * width + head_offset(p, layer, h), mask, begin, kv_len, segment.from, place.positions[r], (float)layer.cap, scores + (j - from) * room, mixed + (r * p.heads + h) * d};
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
constexpr int64_t MANY_SLOTS = 512;

static int64_t shared_score_floats(const Pass &p, const Place &place, int64_t threads) {
    const int64_t each = score_floats(place) * p.heads;
    if (threads < 2 || place.segments != 1 || place.kv_len < MANY_SLOTS || place.n * (p.heads / p.kv_heads) > SHARED_QUERIES) return 0;
    return place.n * each;
}

template <typename T>
static void attention_together(const Pass &p, const Layer &layer, const Place &place, const float *qkv, const Head<T> &all, float *scores, float *mixed, const Team &team) {
    const Segment &segment = place.segment[0];
    const int64_t d = p.head_dim, n = place.n * (p.heads / p.kv_heads), room = score_floats(place);
    Query query[SHARED_QUERIES];
    const auto queries = [&](int64_t head) { return queries_of(p, layer, place, segment, head, 0, 0, n, qkv, scores + head * n * room, mixed, query); };
    const Span span = queries(0);  // that of all heads
    const int64_t slots = (span.end - span.first + V - 1) / V * V;
    int64_t from = team.share(p.kv_heads * slots, V), to = team.end(p.kv_heads * slots, V);
    for (int64_t head = from / slots; from < to; head++) {
        const int64_t first = from - head * slots, last = to - head * slots < slots ? to - head * slots : slots, end = span.first + last;
        queries(head);
        scored(query, n, head_of(all, segment, head, d), d, span.first + first, end < span.end ? end : span.end);
        from += last - first;
    }
    team.wait();
    for (int64_t i = team.share(p.kv_heads * n, 1); i < team.end(p.kv_heads * n, 1); i++) weighed<T>(scores + i * room, span);
    team.wait();
    from = team.share(p.kv_heads * d, V), to = team.end(p.kv_heads * d, V);
    for (int64_t head = from / d; from < to; head++) {
        const int64_t k = from - head * d, end = to - head * d < d ? to - head * d : d;
        queries(head);
        mixed_up(query, n, head_of(all, segment, head, d), d, span, k, end);
        from += end - k;
    }
}

// Attention's share of a segment: key heads times the queries that read one at once, by number.
struct Shares {
    int64_t of_head, parts, each, items, cost;
    Shares(const Pass &p, const Segment &segment, int64_t window, int64_t most)
        : of_head(segment.n * (p.heads / p.kv_heads)), parts((of_head + most - 1) / most), each((of_head + parts - 1) / parts), items(p.kv_heads * parts) {
        cost = (window && window < segment.kv_len ? window : segment.kv_len) + 4 * V;
    }
};

// One of them: of the queries of the tokens from `first` on.
template <typename T>
static void attend_one(const Pass &p, const Layer &layer, const Place &place, const Segment &segment, const Shares &of, int64_t item, int64_t first, const float *qkv, const Head<T> &all, float *scores, float *mixed) {
    const int64_t d = p.head_dim, head = item / of.parts, from = item % of.parts * of.each, to = from + of.each < of.of_head ? from + of.each : of.of_head;
    Query query[MOST_QUERIES];
    const Span span = queries_of(p, layer, place, segment, head, first, from, to, qkv, scores, mixed, query);
    const Head<T> own = head_of(all, segment, head, d);
    scored(query, to - from, own, d, span.first, span.end);
    for (int64_t j = 0; j < to - from; j++) weighed<T>(query[j].scores, span);
    mixed_up(query, to - from, own, d, span, 0, d);
}

// This thread's share of attention, by what it takes: neighbours, of few segments and heads.
template <typename T>
static void attention(const Pass &p, const Layer &layer, const Place &place, const float *qkv, const Head<T> &head, float *scores, float *shared_scores, float *mixed, const Team &team) {
    if (shared_score_floats(p, place, team.threads)) return attention_together(p, layer, place, qkv, head, shared_scores, mixed, team);
    const int64_t window = place.spec[layer.spec].window;
    int64_t all = 0, before = 0, first = 0, each = place.n * p.heads / (2 * team.threads);
    each = each < 1 ? 1 : each > MOST_QUERIES ? MOST_QUERIES : each;
    for (int64_t i = 0; i < place.segments; i++) {
        const Shares of(p, place.segment[i], window, each);
        all += of.items * of.cost;
    }
    const int64_t begin = team.share(all, 1), end = team.end(all, 1);
    for (int64_t i = 0; i < place.segments && before < end; i++) {
        const Segment &segment = place.segment[i];
        const Shares of(p, segment, window, each);
        for (int64_t item = begin > before ? (begin - before + of.cost - 1) / of.cost : 0; item < of.items && before + item * of.cost < end; item++)
            attend_one<T>(p, layer, place, segment, of, item, first, qkv, head, scores, mixed);
        before += of.items * of.cost;
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
