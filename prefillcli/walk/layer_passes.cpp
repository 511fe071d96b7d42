// What stands between the products of a layer, in one pass over memory each, in bfloat16 and float32: RMS norms (with
// a residual addition before them), rotary encodings, and activations that are multiplied with other numbers.
//
// Rows are shared out among threads. Inside, all is float32. The order of additions is written out, in LANES sums, and
// compilers keep it: a row's result does not depend on other rows, on its place, or on the number of threads.

#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;
constexpr int64_t FEW = 16384;  // numbers that one thread computes alone
typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

inline Lanes all(float x) { return x - Lanes{}; }

inline Lanes load(const float* from) {
    Lanes found;
    memcpy(&found, from, sizeof found);
    return found;
}

inline Lanes load(const uint16_t* from) {
#ifdef __AVX512F__
    return (Lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
#else
    Halves found;
    memcpy(&found, from, sizeof found);
    return (Lanes)(__builtin_convertvector(found, Words) << 16);
#endif
}

inline void store(float* to, Lanes x) { memcpy(to, &x, sizeof x); }

inline void store(uint16_t* to, Lanes x) {
#ifdef __AVX512BF16__
    const __m256bh found = _mm512_cvtneps_pbh((__m512)x);
#else
    const Words bits = (Words)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const Words kept = (Words)(x == x);  // no number stays none
    const Halves found = __builtin_convertvector((kept & rounded) | (~kept & 0x7fc0), Halves);
#endif
    memcpy(to, &found, sizeof found);
}

inline Lanes rounded(Lanes x, const float*) { return x; }

inline Lanes rounded(Lanes x, const uint16_t*) {  // to bfloat16
    uint16_t own[LANES];
    store(own, x);
    return load(own);
}

inline Lanes times_and(Lanes x, Lanes y, Lanes z) {
#if defined(__FMA__) || defined(__aarch64__)
    for (int i = 0; i < LANES; i++) x[i] = __builtin_fmaf(x[i], y[i], z[i]);
    return x;
#else
    return x * y + z;
#endif
}

#ifdef __AVX512F__  // compilers take several instructions
inline Lanes smaller(Lanes x, Lanes y) { return (Lanes)_mm512_min_ps((__m512)x, (__m512)y); }
inline Lanes larger(Lanes x, Lanes y) { return (Lanes)_mm512_max_ps((__m512)x, (__m512)y); }
#else
inline Lanes smaller(Lanes x, Lanes y) { return x < y ? x : y; }
inline Lanes larger(Lanes x, Lanes y) { return x > y ? x : y; }
#endif

inline float sum(const Lanes& x) {
    float own[LANES];
    memcpy(own, &x, sizeof own);
    for (int step = LANES / 2; step; step /= 2)
        for (int i = 0; i < step; i++) own[i] += own[i + step];
    return own[0];
}

inline Lanes raised(Lanes x) {  // e^x within 3e-7 of it, where x is no further from 0 than 80; beyond, about that power
    x = smaller(larger(x * 1.44269504f, all(-120.0f)), all(120.0f));
    const Lanes shifted = x + 12582912.0f;  // 1.5 * 2^23: what is left is whole, and stands in the last bits
    const Lanes part = x - (shifted - 12582912.0f);
    Lanes y = all(1.32647268e-3f);
    y = times_and(y, part, all(9.67151267e-3f));
    y = times_and(y, part, all(5.55073374e-2f));
    y = times_and(y, part, all(2.40222421e-1f));
    y = times_and(y, part, all(6.93146978e-1f));
    y = times_and(y, part, all(1.0f));
    return (Lanes)((Ints)y + ((Ints)shifted << 23));
}

inline Lanes sigmoid(Lanes x) { return 1.0f / (1.0f + raised(-x)); }

struct Silu {
    static Lanes of(Lanes x) { return x * sigmoid(x); }
};

struct GeluTanh {  // x / 2 * (1 + tanh(z)) = x * sigmoid(2 z)
    static Lanes of(Lanes x) { return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x)); }
};

template <class Number, class Activation>
void gate(const Number* gates, const Number* others, Number* out, int64_t rows, int64_t width, int64_t apart,
          int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > FEW)
    for (int64_t row = 0; row < rows; row++) {
        const Number *own = gates + row * apart, *by = others + row * apart;
        for (int64_t i = 0; i < width; i += LANES) store(out + row * width + i, Activation::of(load(own + i)) * load(by + i));
    }
}

// A norm's weights, with what is added to each.
struct Norm {
    float added, epsilon;
    bool early;  // rounds before it multiplies with weights
};

template <class Number>
inline void norm_row(const Number* own, const Number* weights, Number* out, int64_t width, const Norm& how) {
    Lanes squares[4] = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= width; i += 4 * LANES)
        for (int k = 0; k < 4; k++) {
            const Lanes x = load(own + i + k * LANES);
            squares[k] = times_and(x, x, squares[k]);
        }
    for (; i < width; i += LANES) {
        const Lanes x = load(own + i);
        squares[0] = times_and(x, x, squares[0]);
    }
    const float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / width;
    const float by = 1.0f / __builtin_sqrtf(mean + how.epsilon);
    for (i = 0; i < width; i += LANES) {
        Lanes x = load(own + i) * by;
        if (how.early) x = rounded(x, own);
        store(out + i, x * (load(weights + i) + how.added));
    }
}

template <class Number>
void norm(const Number* rows, const Number* more, Number* sums, const Number* weights, Number* out, int64_t count,
          int64_t heads, int64_t apart, int64_t heads_apart, int64_t width, const Norm& how, int threads) {
#pragma omp parallel for num_threads(threads) if (count * heads * width > FEW)
    for (int64_t row = 0; row < count; row++)
        for (int64_t head = 0; head < heads; head++) {
            const Number* own = rows + row * apart + head * heads_apart;
            const int64_t at = (row * heads + head) * width;
            if (more) {
                for (int64_t i = 0; i < width; i += LANES) store(sums + at + i, load(own + i) + load(more + at + i));
                own = sums + at;
            }
            norm_row(own, weights, out + at, width, how);
        }
}

template <class Number>
void add(const Number* one, const Number* other, Number* out, int64_t count, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) if (count * width > FEW)
    for (int64_t row = 0; row < count; row++)
        for (int64_t i = row * width; i < (row + 1) * width; i += LANES) store(out + i, load(one + i) + load(other + i));
}

// A token's heads [heads, width], turned by its angles: x cos + (-second half, first half) sin.
template <class Number, class Angle>
inline void turn(const Number* heads, Number* out, int64_t count, int64_t apart, int64_t width, const Angle* cosines,
                 const Angle* sines) {
    const int64_t half = width / 2;
    for (int64_t head = 0; head < count; head++) {
        const Number* own = heads + head * apart;
        Number* to = out + head * width;
        for (int64_t i = 0; i < half; i += LANES) {
            const Lanes first = load(own + i), second = load(own + half + i);
            store(to + i, first * load(cosines + i) - second * load(sines + i));
            store(to + half + i, second * load(cosines + half + i) + first * load(sines + half + i));
        }
    }
}

struct Heads {
    int64_t count, token, head;  // and how far apart tokens and heads are
};

template <class Number>
void rotary(const Number* query, const Number* key, const Number* cosines, const Number* sines, Number* query_out,
            Number* key_out, int64_t tokens, int64_t width, const Heads& queries, const Heads& keys, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * (queries.count + keys.count) * width > FEW)
    for (int64_t t = 0; t < tokens; t++) {
        const Number *cosine = cosines + t * width, *sine = sines + t * width;
        turn(query + t * queries.token, query_out + t * queries.count * width, queries.count, queries.head, width, cosine, sine);
        turn(key + t * keys.token, key_out + t * keys.count * width, keys.count, keys.head, width, cosine, sine);
    }
}

}  // namespace

#define EACH_NUMBER(NAME, NUMBER)                                                                                      \
    extern "C" void prefill_gate_##NAME(const NUMBER* gates, const NUMBER* others, NUMBER* out, int64_t rows,          \
                                        int64_t width, int64_t apart, int64_t tanh, int64_t threads) {                 \
        (tanh ? gate<NUMBER, GeluTanh> : gate<NUMBER, Silu>)(gates, others, out, rows, width, apart, (int)threads);    \
    }                                                                                                                  \
    extern "C" void prefill_norm_##NAME(const NUMBER* rows, const NUMBER* more, NUMBER* sums, const NUMBER* weights,   \
                                        NUMBER* out, int64_t count, int64_t heads, int64_t apart, int64_t heads_apart, \
                                        int64_t width, float added, float epsilon, int64_t early, int64_t threads) {   \
        norm(rows, more, sums, weights, out, count, heads, apart, heads_apart, width, Norm{added, epsilon, early != 0},\
             (int)threads);                                                                                            \
    }                                                                                                                  \
    extern "C" void prefill_add_##NAME(const NUMBER* one, const NUMBER* other, NUMBER* out, int64_t count,             \
                                       int64_t width, int64_t threads) {                                               \
        add(one, other, out, count, width, (int)threads);                                                              \
    }                                                                                                                  \
    extern "C" void prefill_rotary_##NAME(const NUMBER* query, const NUMBER* key, const NUMBER* cosines,               \
                                          const NUMBER* sines, NUMBER* query_out, NUMBER* key_out, int64_t tokens,     \
                                          int64_t width, int64_t queries, int64_t query_token, int64_t query_head,     \
                                          int64_t keys, int64_t key_token, int64_t key_head, int64_t threads) {        \
        rotary(query, key, cosines, sines, query_out, key_out, tokens, width, Heads{queries, query_token, query_head}, \
               Heads{keys, key_token, key_head}, (int)threads);                                                        \
    }

EACH_NUMBER(float32, float)
EACH_NUMBER(bfloat16, uint16_t)
