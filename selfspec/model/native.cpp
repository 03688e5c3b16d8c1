// Products of a few rows with weights, and whole passes over a few tokens, for processors: what decoding spends its
// time on. Compiled on the machine that it runs on (`native.py`), for its vectors.
//
// Every output of a row is summed in one order, whatever other rows there are: a row gives the same bits alone and
// among others. Outputs are shared out among threads, in runs of eight; no sum is ever split.

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int V = 16;  // floats in a vector
#elif defined(__AVX__)
constexpr int V = 8;
#else
constexpr int V = 4;
#endif
constexpr int ROWS = V >= 16 ? 12 : 8;  // rows that a weight is read once for, as far as registers reach

typedef float floats __attribute__((vector_size(V * 4), aligned(4)));
typedef int32_t ints __attribute__((vector_size(V * 4), aligned(4)));
typedef uint16_t halves __attribute__((vector_size(V * 2), aligned(2)));
typedef int8_t bytes __attribute__((vector_size(V), aligned(1)));

enum Kind : int64_t { FLOAT32, BFLOAT16, INT8, INT4 };

// A weight [out, in]. INT8: values * scale, a scale for each output. INT4: (values - 8) * scale + zero, a scale and a
// zero for each `group` inputs; of 32 inputs, the first 16 are the low halves of 16 bytes, the others the high halves.
struct Weight {
    int64_t kind, out, in, group;
    const char *values;
    const uint16_t *scale, *zero;  // bfloat16
    const float *bias;             // or none
};

// A layer: RMSNorm and linears, the gated MLP with SiLU. No `qkv`, no `gate_up`: that sub-layer is bypassed.
struct Layer {
    const float *before_attention;
    const Weight *qkv, *o;
    const float *before_mlp;
    const Weight *gate_up, *down;
};

struct Pass {
    int64_t layers, hidden, heads, kv_heads, head_dim, intermediate;
    double eps;
    const Layer *layer;
    const float *norm;  // the last one
};

// Where a pass's tokens stand. `cos`, `sin` [positions, head_dim]; keys [layers, .., kv_heads, head_dim, stride] and
// values [layers, .., kv_heads, stride, head_dim] of one sequence. Token i sees the slots up to slots[i], or, with a
// `mask` [n, seen] of 0 and -inf, which is added to the scores, those of the first `seen`.
struct Place {
    int64_t n, seen, stride, each_layer;  // floats from a layer's keys to the next one's
    const int64_t *positions, *slots;
    const float *cos, *sin, *mask;
    float *keys, *values;
};

INLINE floats at(const float *p) { return *(const floats *)p; }
INLINE floats to_floats(ints x) { return __builtin_convertvector(x, floats); }
INLINE float bfloat16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
INLINE ints widened(const int8_t *p) {
#if defined(__AVX512F__)
    return (ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX2__)
    return (ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    return __builtin_convertvector(*(const bytes *)p, ints);
#endif
}
INLINE float total(floats a) {
    float t[V];
    memcpy(t, &a, sizeof t);
    for (int half = V / 2; half; half /= 2)
        for (int i = 0; i < half; i++) t[i] += t[i + half];
    return t[0];
}

// e^x, within 2 units in the last place; 0 below -87.
INLINE floats exponential(floats x) {
    ints none = x < -87.0f;
    x = x > 88.0f ? floats{} + 88.0f : x;
    x = none ? floats{} : x;
    floats n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;  // rounded
    floats r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    floats y = floats{} + 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    floats power = (floats)((__builtin_convertvector(n, ints) + 127) << 23);
    return none ? floats{} : y * power;
}

template <int K> INLINE int64_t row_bytes(int64_t in) {
    return K == FLOAT32 ? 4 * in : K == BFLOAT16 ? 2 * in : K == INT8 ? in : in / 2;
}

// V values of a weight's row from input k on.
template <int K> INLINE floats load(const char *row, int64_t k, const uint16_t *scale, const uint16_t *zero, int64_t group) {
    if constexpr (K == FLOAT32) return at((const float *)row + k);
    if constexpr (K == BFLOAT16) return (floats)(__builtin_convertvector(*(const halves *)((const uint16_t *)row + k), ints) << 16);
    if constexpr (K == INT8) return to_floats(widened((const int8_t *)row + k));
    int64_t within = k & 31;
    ints both = widened((const int8_t *)row + (k >> 5) * 16 + (within & 15));
    ints value = (both >> (within & 16 ? 4 : 0)) & 15;
    return to_floats(value) * bfloat16(scale[k / group]) + (bfloat16(zero[k / group]) - 8.0f * bfloat16(scale[k / group]));
}
template <int K> INLINE float load_one(const char *row, int64_t k) {
    if constexpr (K == FLOAT32) return ((const float *)row)[k];
    if constexpr (K == BFLOAT16) return bfloat16(((const uint16_t *)row)[k]);
    return ((const int8_t *)row)[k];  // INT4's inputs come by 32
}

// Outputs o to o + O of R rows.
template <int K, int R, int O>
INLINE void block(const Weight &w, int64_t o, const float *x, int64_t ldx, float *y, int64_t ldy, bool add) {
    const int64_t in = w.in, row = row_bytes<K>(in), groups = K == INT4 ? in / w.group : 0;
    const char *from = w.values + o * row;
    const uint16_t *scale = w.scale + (K == INT4 ? o * groups : o), *zero = w.zero + o * groups;
    floats a[R][O] = {};
    int64_t k = 0;
    for (; k + V <= in; k += V) {
        floats rows[R];
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) rows[r] = at(x + r * ldx + k);
#pragma GCC unroll 12
        for (int i = 0; i < O; i++) {
            floats b = load<K>(from + i * row, k, scale + i * groups, zero + i * groups, w.group);
            int64_t byte = row_bytes<K>(k);
            if ((byte & 63) == 0) __builtin_prefetch(from + (O + i) * row + byte);
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) a[r][i] += rows[r] * b;
        }
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < O; i++) {
            float sum = total(a[r][i]);
            if constexpr (K != INT4)
                for (int64_t j = k; j < in; j++) sum += x[r * ldx + j] * load_one<K>(from + i * row, j);
            if constexpr (K == INT8) sum *= bfloat16(scale[i]);
            if (w.bias) sum += w.bias[o + i];
            float *to = y + r * ldy + o + i;
            *to = add ? *to + sum : sum;
        }
}

template <int K, int R>
INLINE void outputs(const Weight &w, int64_t from, int64_t to, const float *x, int64_t ldx, float *y, int64_t ldy, bool add) {
    constexpr int O = V >= 16 ? (R <= 2 ? 8 : R <= 6 ? 4 : 2) : (R == 1 ? 8 : R == 2 ? 4 : R <= 4 ? 2 : 1);
    int64_t o = from;
    for (; o + O <= to; o += O) block<K, R, O>(w, o, x, ldx, y, ldy, add);
    for (; o < to; o++)
        for (int r = 0; r < R; r++) block<K, 1, 1>(w, o, x + r * ldx, ldx, y + r * ldy, ldy, add);
}

template <int K, int R>
INLINE void of_rows(int64_t rows, const Weight &w, int64_t from, int64_t to, const float *x, int64_t ldx, float *y, int64_t ldy, bool add) {
    if constexpr (R > 0) {
        if (rows == R) return outputs<K, R>(w, from, to, x, ldx, y, ldy, add);
        return of_rows<K, R - 1>(rows, w, from, to, x, ldx, y, ldy, add);
    }
}

template <int K>
static void part(const Weight &w, int64_t from, int64_t to, const float *x, int64_t ldx, float *y, int64_t ldy, int64_t rows, bool add) {
    int64_t times = (rows + ROWS - 1) / ROWS;
    for (; from < to; from += 64)  // so many outputs' weights stay near while all rows are multiplied with them
        for (int64_t i = 0, end = from + 64 < to ? from + 64 : to; i < times; i++) {
            int64_t first = rows * i / times, last = rows * (i + 1) / times;
            of_rows<K, ROWS>(last - first, w, from, end, x + first * ldx, ldx, y + first * ldy, ldy, add);
        }
}

static void multiply(const Weight &w, int64_t from, int64_t to, const float *x, int64_t ldx, float *y, int64_t ldy, int64_t rows, bool add) {
    switch (w.kind) {
        case FLOAT32: return part<FLOAT32>(w, from, to, x, ldx, y, ldy, rows, add);
        case BFLOAT16: return part<BFLOAT16>(w, from, to, x, ldx, y, ldy, rows, add);
        case INT8: return part<INT8>(w, from, to, x, ldx, y, ldy, rows, add);
        default: return part<INT4>(w, from, to, x, ldx, y, ldy, rows, add);
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

static void normed(const float *x, int64_t ldx, const float *weight, double eps, float *out, int64_t n, int64_t size) {
    for (int64_t r = 0; r < n; r++, x += ldx, out += size) {
        floats squares = {};
        for (int64_t k = 0; k < size; k += V) squares += at(x + k) * at(x + k);
        float by = (float)(1.0 / std::sqrt((double)total(squares) / size + eps));
        for (int64_t k = 0; k < size; k += V) *(floats *)(out + k) = at(x + k) * at(weight + k) * by;
    }
}

INLINE void turn(float *head, const float *cos, const float *sin, int64_t d) {  // `sin`'s first half is negative
    for (int64_t k = 0; k < d / 2; k += 1) {
        float low = head[k], high = head[k + d / 2];
        head[k] = low * cos[k] + high * sin[k];
        head[k + d / 2] = high * cos[k + d / 2] + low * sin[k + d / 2];
    }
}

// Scores of B vectors of slots from s on.
template <int B>
INLINE void score(const float *q, const float *keys, const float *mask, int64_t s, int64_t seen, int64_t stride, int64_t d, float *scores, floats &most) {
    floats a[B] = {};
    for (int64_t k = 0; k < d; k++)
        for (int i = 0; i < B; i++) a[i] += at(keys + k * stride + s + i * V) * q[k];
    ints lane;
    for (int i = 0; i < V; i++) lane[i] = i + (int)s;
    for (int i = 0; i < B; i++, lane += V) {
        if (mask)
            for (int j = 0; j < V && s + i * V + j < seen; j++) a[i][j] += mask[s + i * V + j];
        a[i] = lane < (int)seen ? a[i] : floats{} - INFINITY;
        *(floats *)(scores + s + i * V) = a[i];
        most = a[i] > most ? a[i] : most;
    }
}

// One query head `q` [d] over keys [d, stride] and values [stride, d] of `seen` slots, to `out` [d]. Beyond `seen` lie
// spare slots, which are read and not used.
static void attend(const float *q, const float *keys, const float *values, const float *mask, int64_t seen, int64_t stride, int64_t d, float *scores, float *out) {
    floats most = floats{} - INFINITY;
    int64_t s = 0;
    for (; s + 4 * V <= seen; s += 4 * V) score<4>(q, keys, mask, s, seen, stride, d, scores, most);
    for (; s < seen; s += V) score<1>(q, keys, mask, s, seen, stride, d, scores, most);
    float largest = most[0];
    for (int i = 1; i < V; i++) largest = most[i] > largest ? most[i] : largest;
    floats sums = {};
    for (s = 0; s < seen; s += V) {
        floats e = exponential(at(scores + s) - largest);
        *(floats *)(scores + s) = e;
        sums += e;
    }
    float by = 1.0f / total(sums);
    for (int64_t k = 0; k < d; k += 4 * V) {
        int vectors = d - k >= 4 * V ? 4 : (int)((d - k) / V);
        floats o[4] = {};
        for (s = 0; s < seen; s++)
            for (int i = 0; i < vectors; i++) o[i] += at(values + s * d + k + i * V) * scores[s];
        for (int i = 0; i < vectors; i++) *(floats *)(out + k + i * V) = o[i] * by;
    }
}

// What thread t does of a pass. Scratch by `scratch_floats`: what all share, then what is each thread's own.
static void run(const Pass &p, const Place &at_, float *stream, int64_t ld, float *shared, float *own, const Team &team) {
    const int64_t n = at_.n, d = p.head_dim, D = p.hidden, I = p.intermediate, stride = at_.stride;
    const int64_t heads = p.heads + 2 * p.kv_heads, width = heads * d, group = p.heads / p.kv_heads;
    float *qkv = shared, *mixed = qkv + n * width, *activated = mixed + n * p.heads * d, *scores = own + n * D;
    float *gate_up = activated + n * I;
    for (int64_t l = 0; l < p.layers; l++) {
        const Layer &layer = p.layer[l];
        float *keys = at_.keys + l * at_.each_layer, *values = at_.values + l * at_.each_layer;
        if (layer.qkv) {
            normed(stream, ld, layer.before_attention, p.eps, own, n, D);
            multiply(*layer.qkv, team.share(width, 8), team.end(width, 8), own, D, qkv, width, n, false);
            team.wait();
            for (int64_t i = team.t; i < n * heads; i += team.threads) {
                int64_t r = i / heads, h = i % heads, slot = at_.slots[r], pos = at_.positions[r];
                float *head = qkv + r * width + h * d;
                if (h < p.heads + p.kv_heads) turn(head, at_.cos + pos * d, at_.sin + pos * d, d);
                if (h >= p.heads + p.kv_heads)
                    memcpy(values + ((h - p.heads - p.kv_heads) * stride + slot) * d, head, d * 4);
                else if (h >= p.heads)
                    for (int64_t k = 0; k < d; k++) keys[((h - p.heads) * d + k) * stride + slot] = head[k];
            }
            team.wait();
            for (int64_t i = team.t; i < n * p.heads; i += team.threads) {
                int64_t r = i / p.heads, h = i % p.heads, of = h / group * stride * d;
                const float *mask = at_.mask ? at_.mask + r * at_.seen : nullptr;
                attend(qkv + r * width + h * d, keys + of, values + of, mask, mask ? at_.seen : at_.slots[r] + 1, stride, d, scores, mixed + (r * p.heads + h) * d);
            }
            team.wait();
            multiply(*layer.o, team.share(D, 8), team.end(D, 8), mixed, p.heads * d, stream, ld, n, true);
            team.wait();
        }
        if (layer.gate_up) {
            normed(stream, ld, layer.before_mlp, p.eps, own, n, D);
            int64_t from = team.share(I, 16), to = team.end(I, 16);
            multiply(*layer.gate_up, from, to, own, D, gate_up, 2 * I, n, false);
            multiply(*layer.gate_up, I + from, I + to, own, D, gate_up, 2 * I, n, false);
            for (int64_t r = 0; r < n; r++)
                for (int64_t k = from; k < to; k += V) {
                    floats gate = at(gate_up + r * 2 * I + k), up = at(gate_up + r * 2 * I + I + k);
                    *(floats *)(activated + r * I + k) = gate / (exponential(-gate) + 1.0f) * up;
                }
            team.wait();
            multiply(*layer.down, team.share(D, 8), team.end(D, 8), activated, I, stream, ld, n, true);
            team.wait();
        }
    }
}

extern "C" {

int64_t selfspec_vector() { return V; }

// y [rows, out] = x [rows, in] times the weight, with its bias; `add`: on top of what y is. ld: floats to the next row.
void selfspec_multiply(const Weight *w, const float *x, int64_t ldx, float *y, int64_t ldy, int64_t rows, int64_t add, int64_t threads) {
    if (threads < 2 || w->out * w->in < 1 << 14) return multiply(*w, 0, w->out, x, ldx, y, ldy, rows, add);
#pragma omp parallel num_threads(threads)
    {
        Team team;
        multiply(*w, team.share(w->out, 8), team.end(w->out, 8), x, ldx, y, ldy, rows, add);
    }
}

// Floats that `selfspec_pass` computes in: those that threads share, and those of each.
int64_t selfspec_shared(const Pass *p, int64_t n) {
    return n * ((p->heads + 2 * p->kv_heads) * p->head_dim + p->heads * p->head_dim + 3 * p->intermediate);
}
int64_t selfspec_own(const Pass *p, int64_t n, int64_t seen) { return n * p->hidden + (seen + V) / V * V + V; }

// Runs the stream [n, hidden] through the layers, in place; `out` [n, hidden]: what the last norm makes of it.
void selfspec_pass(const Pass *p, const Place *place, float *stream, int64_t ld, float *out, float *scratch, int64_t seen, int64_t threads) {
    float *owns = scratch + selfspec_shared(p, place->n);
    int64_t own = selfspec_own(p, place->n, seen);
    if (threads < 2) {
        run(*p, *place, stream, ld, scratch, owns, Team(0, 1));
    } else {
#pragma omp parallel num_threads(threads)
        {
            Team team;
            run(*p, *place, stream, ld, scratch, owns + team.t * own, team);
        }
    }
    normed(stream, ld, p->norm, p->eps, out, place->n, p->hidden);
}
}
