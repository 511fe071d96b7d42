// Products of int8 rows with int8 weights, for CPUs with AVX2, AVX512-VNNI or AMX, and the passes that make both.
//
// A row is quantised by its own largest number, a weight by the largest of its output channel; both are turned first
// (`narrow.py`). Sums of products are exact integers, so a row's result has the same bits whatever it is computed with.
//
// Weights lie in panels of output channels: four numbers of each channel beside each other, as one instruction
// multiplies them. That of VNNI takes one side as unsigned: weights are stored plus 128, and 128 times the sum of the
// row's numbers is taken off again. Those of AMX multiply tiles of both.
//
// AVX2 adds the products of two unsigned and two signed bytes to a word of 16 bits (vpmaddubsw), and words to sums of
// 32 bits by a multiplication (vpmaddwd) that takes as long. So a word takes eight products before that. A row's numbers
// are up to LARGEST and stored plus that, so they have no sign; a channel's are so large that eight of them, and two,
// times LARGEST fit a word. What was added to the row is taken off each word by a number that lies with the weights;
// only then it must fit, as additions of words wrap around. For so little room a row and a channel have a scale for
// every PART inputs, of which the products are added in float32, in their order.

#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)
#define WITH_AVX512
#endif
#if defined(WITH_AVX512) || (defined(__AVX2__) && defined(__FMA__))

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <numeric>
#include <vector>

#if defined(WITH_AVX512) && (defined(__AMX_INT8__) || defined(__AMXINT8__))  // GCC, and older Clang
#define WITH_AMX
#endif

namespace {

// Rows that are multiplied together, output channels of a panel, and rows that a thread takes; inputs that share a
// scale, how large a row's numbers may be, and what is added to them and to weights where they are stored.
#if defined(WITH_AMX)
constexpr int ROWS = 32, PANEL = 32, BLOCK = 256, LARGEST = 127, ROW_SHIFT = 0, SHIFT = 0, PART = INT32_MAX;
#elif defined(WITH_AVX512)
constexpr int ROWS = 6, PANEL = 64, BLOCK = 240, LARGEST = 127, ROW_SHIFT = 0, SHIFT = 128, PART = INT32_MAX;
#else
constexpr int ROWS = 3, PANEL = 16, BLOCK = 240, LARGEST = 100, ROW_SHIFT = LARGEST, SHIFT = 0, PART = 128;
#endif
constexpr int TILE = 16, STEP = 64;  // rows of a tile of AMX, and bytes of each

#if defined(WITH_AVX512)
typedef __m512 Floats;
typedef __m512i Integers;
constexpr int LANES = 16;

inline Floats load(const uint16_t* from) {
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
}

inline Floats load(const float* from) { return _mm512_loadu_ps(from); }

inline void store(uint16_t* to, Floats numbers) {
    _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(numbers));
}

inline void store(float* to, Floats numbers) { _mm512_storeu_ps(to, numbers); }

inline void store(int32_t* to, Integers numbers) { _mm512_storeu_si512(to, numbers); }

inline void store_bytes(void* to, Integers numbers) {
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8(numbers));
}

inline Floats all(float x) { return _mm512_set1_ps(x); }

inline Floats larger(Floats most, Floats numbers) { return _mm512_max_ps(most, _mm512_abs_ps(numbers)); }

inline Integers rounded(Floats numbers) { return _mm512_cvtps_epi32(numbers); }

inline Floats real(Integers numbers) { return _mm512_cvtepi32_ps(numbers); }

inline Integers added(Integers one, Integers other) { return _mm512_add_epi32(one, other); }

inline Integers shifted(Integers numbers, int by) { return _mm512_add_epi32(numbers, _mm512_set1_epi32(by)); }

// Sums and differences of lanes.
inline Floats lanes_turned(Floats x) {
    const __m512 one = _mm512_set1_ps(1.0f), less = _mm512_set1_ps(-1.0f);
    x = _mm512_fmadd_ps(x, _mm512_mask_blend_ps(0xaaaa, one, less), _mm512_permute_ps(x, 0xb1));
    x = _mm512_fmadd_ps(x, _mm512_mask_blend_ps(0xcccc, one, less), _mm512_permute_ps(x, 0x4e));
    x = _mm512_fmadd_ps(x, _mm512_mask_blend_ps(0xf0f0, one, less), _mm512_shuffle_f32x4(x, x, 0xb1));
    return _mm512_fmadd_ps(x, _mm512_mask_blend_ps(0xff00, one, less), _mm512_shuffle_f32x4(x, x, 0x4e));
}
#else
typedef __m256 Floats;
typedef __m256i Integers;
constexpr int LANES = 8;

inline Floats load(const uint16_t* from) {
    return (__m256)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16);
}

inline Floats load(const float* from) { return _mm256_loadu_ps(from); }

inline Integers shifted(Integers numbers, int by) { return _mm256_add_epi32(numbers, _mm256_set1_epi32(by)); }

// The low halves of each.
inline __m128i halves(Integers numbers) {
    const __m256i kept = _mm256_and_si256(numbers, _mm256_set1_epi32(0xffff));
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(kept, kept), 0x08));
}

inline void store(uint16_t* to, Floats numbers) {  // to the nearest, of two the even one
    const __m256i bits = (__m256i)numbers;
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i near = _mm256_srli_epi32(_mm256_add_epi32(shifted(bits, 0x7fff), odd), 16);
    const __m256i none = (__m256i)_mm256_cmp_ps(numbers, numbers, _CMP_UNORD_Q);  // no number stays none
    _mm_storeu_si128((__m128i*)to, halves(_mm256_or_si256(near, _mm256_and_si256(none, _mm256_set1_epi32(0x7fc0)))));
}

inline void store(float* to, Floats numbers) { _mm256_storeu_ps(to, numbers); }

inline void store(int32_t* to, Integers numbers) { _mm256_storeu_si256((__m256i*)to, numbers); }

inline void store_bytes(void* to, Integers numbers) {  // the low ones
    const __m128i kept = _mm_and_si128(halves(numbers), _mm_set1_epi16(0xff));
    _mm_storel_epi64((__m128i*)to, _mm_packus_epi16(kept, kept));
}

inline Floats all(float x) { return _mm256_set1_ps(x); }

inline Floats larger(Floats most, Floats numbers) {
    return _mm256_max_ps(most, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), numbers));
}

inline Integers rounded(Floats numbers) { return _mm256_cvtps_epi32(numbers); }

inline Floats real(Integers numbers) { return _mm256_cvtepi32_ps(numbers); }

inline Integers added(Integers one, Integers other) { return _mm256_add_epi32(one, other); }

inline Floats lanes_turned(Floats x) {
    x = _mm256_fmadd_ps(x, _mm256_setr_ps(1, -1, 1, -1, 1, -1, 1, -1), _mm256_permute_ps(x, 0xb1));
    x = _mm256_fmadd_ps(x, _mm256_setr_ps(1, 1, -1, -1, 1, 1, -1, -1), _mm256_permute_ps(x, 0x4e));
    return _mm256_fmadd_ps(x, _mm256_setr_ps(1, 1, 1, 1, -1, -1, -1, -1), _mm256_permute2f128_ps(x, x, 1));
}
#endif

constexpr int TURNED = 64, VECTORS = TURNED / LANES;

// Sums and differences of 64 numbers: those of vectors, and then of lanes.
inline void turn(Floats* x) {
#pragma GCC unroll 3
    for (int half = 1; half < VECTORS; half *= 2)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++)
            if (!(v & half)) {
                const Floats other = x[v + half];
                x[v + half] = x[v] - other;
                x[v] = x[v] + other;
            }
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) x[v] = lanes_turned(x[v] * all(0.125f));
}

inline float highest(Floats numbers) {
    float own[LANES];
    store(own, numbers);
    return *std::max_element(own, own + LANES);
}

// Numbers of a row in float32, turned if it is; the largest of them.
template <class Number>
inline float turned(const Number* from, int64_t count, bool turns, float* to) {
    Floats most = all(0);
    if (!turns)
        for (int64_t k = 0; k < count; k += LANES) {
            const Floats x = load(from + k);
            store(to + k, x);
            most = larger(most, x);
        }
    else
        for (int64_t k = 0; k < count; k += TURNED) {
            Floats x[VECTORS];
            for (int v = 0; v < VECTORS; v++) x[v] = load(from + k + LANES * v);
            turn(x);
            for (int v = 0; v < VECTORS; v++) {
                store(to + k + LANES * v, x[v]);
                most = larger(most, x[v]);
            }
        }
    return highest(most);
}

struct Quantised {
    uint8_t* numbers;  // [rows, padded], plus ROW_SHIFT; there is memory for whole tiles of rows
    float* scales;     // [rows, parts], what gives the rows back
    int32_t* sums;     // [rows], of the numbers
    int64_t padded;
};

inline int64_t padded_to(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

inline int64_t parts_of(int64_t width) { return (width + PART - 1) / PART; }

// Calls with each part of a row: its number, first input and number of inputs, the turned numbers and their largest.
template <class Number, class Use>
inline void each_part(const Number* from, int64_t width, float* own, const Use& use) {
    for (int64_t part = 0; part < parts_of(width); part++) {
        const int64_t first = part * PART, count = std::min(width - first, (int64_t)PART);
        use(part, first, count, own, turned(from + first, count, width % TURNED == 0, own));
    }
}

// One row as small numbers, which are zeros from `width` on.
template <class Number>
inline void quantise_row(const Number* from, int64_t row, int64_t width, float* own, const Quantised& to) {
    Integers sum = rounded(all(0));
    uint8_t* numbers = to.numbers + row * to.padded;
    each_part(from, width, own, [&](int64_t part, int64_t first, int64_t count, const float* turned, float largest) {
        const Floats by = all(largest > 0 ? LARGEST / largest : 0.0f);
        for (int64_t k = 0; k < count; k += LANES) {
            const Integers some = rounded(load(turned + k) * by);
            sum = added(sum, some);
            store_bytes(numbers + first + k, shifted(some, ROW_SHIFT));
        }
        to.scales[row * parts_of(width) + part] = largest / LARGEST;
    });
    memset(numbers + width, ROW_SHIFT, to.padded - width);
    int32_t sums[LANES];
    store(sums, sum);
    to.sums[row] = (int32_t)std::accumulate(sums, sums + LANES, 0u);
}

#if defined(WITH_AMX)
// Everything is in memory: GCC does not know that intrinsics of tiles read it.
inline void settle(const void* there) { __asm__ volatile("" : : "r"(there) : "memory"); }

// Tiles of 16 rows of 64 bytes, during a thread's turn.
struct Tiles {
    Tiles() {
        struct {
            uint8_t palette = 1, from = 0, nothing[14] = {};
            uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } shapes;
        settle(&shapes);
        _tile_loadconfig(&shapes);
    }
    ~Tiles() { _tile_release(); }
};
#else
struct Tiles {};  // none
#endif

template <class Number>
void quantise(const Number* from, int64_t stride, int64_t rows, int64_t width, int64_t threads, const Quantised& to) {
#pragma omp parallel num_threads((int)threads)
    {
        std::vector<float> own(std::min(width, (int64_t)PART));
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++)
            quantise_row(from + row * stride, row, width, own.data(), to);
    }
}

#if defined(WITH_AVX512)
inline int64_t panel_bytes(int64_t width) { return PANEL * padded_to(width, STEP); }

// A part of an output channel, into its panel; what gives it back.
inline float pack_part(const float* from, float largest, int64_t output, int64_t width, uint8_t* panel) {
    const __m512 by = all(largest > 0 ? 127.0f / largest : 0.0f);
    panel += 4 * (output % PANEL);
    for (int64_t k = 0; k < width; k += LANES) {
        alignas(16) uint32_t words[4];
        store_bytes(words, shifted(rounded(load(from + k) * by), SHIFT));
        for (int i = 0; i < 4; i++) memcpy(panel + (k + 4 * i) * PANEL, words + i, 4);
    }
    return largest / 127.0f;
}
#else
// Inputs whose products two words of a channel take, four by four: two of each four are of one word. Their weights lie
// behind what is added to the words.
constexpr int GROUP = 16, WORD = GROUP / 2, GROUP_BYTES = PANEL * (4 + GROUP);

inline int64_t panel_bytes(int64_t width) { return width / GROUP * GROUP_BYTES; }

// How large two weights and those of a word may be together; rounding adds a half to each at most.
constexpr int MOST_OF_TWO = INT16_MAX / (2 * LARGEST) - 1, MOST = INT16_MAX / LARGEST - WORD / 2;

inline float pack_part(const float* from, float largest, int64_t output, int64_t width, uint8_t* panel) {
    float two = 0, word = 0;
    for (int64_t k = 0; k < width; k += GROUP)
        for (int half = 0; half < 4; half += 2) {
            float sum = 0;
            for (int64_t i = k + half; i < k + GROUP; i += 4) {
                const float own = fabsf(from[i]) + fabsf(from[i + 1]);
                two = std::max(two, own);
                sum += own;
            }
            word = std::max(word, sum);
        }
    const float step = std::max({largest / 127, two / MOST_OF_TWO, word / MOST});
    const Floats by = all(step > 0 ? 1 / step : 0.0f);
    for (int64_t k = 0; k < width; k += GROUP, panel += GROUP_BYTES) {
        int8_t numbers[GROUP];
        int16_t less[2] = {0, 0};
        for (int i = 0; i < GROUP; i += LANES) store_bytes(numbers + i, rounded(load(from + k + i) * by));
        for (int i = 0; i < GROUP; i++) less[i / 2 % 2] -= LARGEST * numbers[i];
        memcpy(panel + 4 * (output % PANEL), less, 4);
        for (int i = 0; i < GROUP; i += 4) memcpy(panel + (4 + i) * PANEL + 4 * (output % PANEL), numbers + i, 4);
    }
    return step;
}
#endif

// Weights [outputs, width] as panels, which are zeros where there are no such outputs and inputs; `scales` [parts,
// outputs].
template <class Number>
void pack(const Number* from, int64_t outputs, int64_t width, int64_t threads, uint8_t* to, float* scales) {
#pragma omp parallel num_threads((int)threads)
    {
        std::vector<float> own(std::min(width, (int64_t)PART));
#pragma omp for schedule(static)
        for (int64_t output = 0; output < outputs; output++) {
            uint8_t* panel = to + output / PANEL * panel_bytes(width);
            each_part(from + output * width, width, own.data(),
                      [&](int64_t part, int64_t first, int64_t count, const float* turned, float largest) {
                          uint8_t* to = panel + panel_bytes(first);
                          scales[part * outputs + output] = pack_part(turned, largest, output, count, to);
                      });
        }
    }
}

struct Sizes {  // int64 in Python
    int64_t rows, width, outputs, out_stride, threads;
};

#if defined(WITH_AMX)
// Two tiles of rows with two of weights.
template <class Number>
void panel_rows(const Quantised& rows, const uint8_t* weights, const float* scales, const Sizes& n, int64_t row,
                int64_t end, int64_t first, Number* out) {
    alignas(64) int32_t sums[ROWS][PANEL];
    for (; row < end; row += ROWS) {
        const uint8_t* numbers = rows.numbers + row * rows.padded;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = 0; k < rows.padded; k += STEP) {
            _tile_loadd(4, numbers + k, rows.padded);
            _tile_loadd(6, weights + k * PANEL, 4 * PANEL);
            _tile_loadd(5, numbers + TILE * rows.padded + k, rows.padded);
            _tile_loadd(7, weights + k * PANEL + STEP, 4 * PANEL);
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(1, 4, 7);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        }
        settle(sums);
        _tile_stored(0, sums[0], sizeof(sums[0]));
        _tile_stored(1, sums[0] + LANES, sizeof(sums[0]));
        _tile_stored(2, sums[TILE], sizeof(sums[0]));
        _tile_stored(3, sums[TILE] + LANES, sizeof(sums[0]));
        settle(sums);
        const int count = (int)(end - row < ROWS ? end - row : ROWS);
        for (int64_t v = 0; v < PANEL && first + v < n.outputs; v += LANES) {
            const __m512 own = _mm512_loadu_ps(scales + first + v);
            for (int r = 0; r < count; r++) {
                const __m512 by = _mm512_mul_ps(_mm512_set1_ps(rows.scales[row + r]), own);
                const __m512 sum = _mm512_cvtepi32_ps(_mm512_load_si512(sums[r] + v));
                store(out + (row + r) * n.out_stride + first + v, _mm512_mul_ps(sum, by));
            }
        }
    }
}
#elif defined(WITH_AVX512)
// Adds the products of four unsigned and four signed bytes to each word. Compilers copy the sums of the intrinsic, and
// then have too few registers.
inline void add_products(__m512i& sum, __m512i bytes, __m512i others) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(bytes), "v"(others));
}

// R rows with V vectors of a panel. Unrolled, so that all sums stay in registers.
template <int R, int V, class Number>
inline void tile(const Quantised& rows, const uint8_t* weights, const float* scales, const Sizes& n, int64_t row,
                 int64_t first, Number* out) {
    const uint8_t* numbers = rows.numbers + row * rows.padded;
    __m512i sum[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        const __m512i less = _mm512_set1_epi32(-SHIFT * rows.sums[row + r]);
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) sum[r][v] = less;
    }
    for (int64_t k = 0; k < n.width; k += 4) {
        __m512i weight[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) weight[v] = _mm512_loadu_si512(weights + k * PANEL + 64 * v);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            int32_t word;
            memcpy(&word, numbers + r * rows.padded + k, 4);
            const __m512i four = _mm512_set1_epi32(word);
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) add_products(sum[r][v], weight[v], four);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        const __m512 scale = _mm512_set1_ps(rows.scales[row + r]);
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
            const __m512 by = _mm512_mul_ps(scale, _mm512_loadu_ps(scales + first + LANES * v));
            store(out + (row + r) * n.out_stride + first + LANES * v, _mm512_mul_ps(_mm512_cvtepi32_ps(sum[r][v]), by));
        }
    }
}

template <int V, class Number>
void vector_rows(const Quantised& rows, const uint8_t* weights, const float* scales, const Sizes& n, int64_t row,
                 int64_t end, int64_t first, Number* out) {
    for (; row + ROWS <= end; row += ROWS) tile<ROWS, V>(rows, weights, scales, n, row, first, out);
    for (; row < end; row++) tile<1, V>(rows, weights, scales, n, row, first, out);
}

template <class Number>
void panel_rows(const Quantised& rows, const uint8_t* weights, const float* scales, const Sizes& n, int64_t row,
                int64_t end, int64_t first, Number* out) {
    const int64_t left = n.outputs - first;
    const auto some = left > 3 * LANES   ? vector_rows<4, Number>
                      : left > 2 * LANES ? vector_rows<3, Number>
                      : left > LANES     ? vector_rows<2, Number>
                                         : vector_rows<1, Number>;
    some(rows, weights, scales, n, row, end, first, out);
}
#else
// Multiplies two bytes of a row with two of a weight at a time. Compilers move additions of the intrinsics about, and
// then have too few registers.
inline __m256i products(__m256i numbers, __m256i weights) {
    __m256i found;
    __asm__("vpmaddubsw %2, %1, %0" : "=x"(found) : "x"(numbers), "x"(weights));
    return found;
}

inline void add_words(__m256i& words, __m256i others) { __asm__("vpaddw %1, %0, %0" : "+x"(words) : "x"(others)); }

// R rows with a panel. Unrolled, so that all sums stay in registers.
template <int R, class Number>
inline void tile(const Quantised& rows, const uint8_t* weights, const float* scales, const Sizes& n, int64_t row,
                 int64_t first, Number* out) {
    constexpr int V = PANEL / LANES;
    const uint8_t* numbers = rows.numbers + row * rows.padded;
    const auto vector = [&](int at) { return _mm256_loadu_si256((const __m256i*)weights + at); };
    const int64_t parts = parts_of(n.width);
    Floats total[R][V];
    for (int64_t part = 0; part < parts; part++) {
        const int64_t end = std::min(n.width, (part + 1) * PART);
        __m256i sum[R][V];
#pragma GCC unroll 8
        for (int i = 0; i < R * V; i++) sum[i / V][i % V] = _mm256_setzero_si256();
        for (int64_t k = part * PART; k < end; k += GROUP, weights += GROUP_BYTES) {
            __m256i words[R][V];
#pragma GCC unroll 8
            for (int s = 0; s < GROUP; s += 4) {
                const __m256i weight[V] = {vector((4 + s) / 4 * V), vector((4 + s) / 4 * V + 1)};
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    int32_t word;
                    memcpy(&word, numbers + r * rows.padded + k + s, 4);
                    const __m256i four = _mm256_set1_epi32(word);
#pragma GCC unroll 8
                    for (int v = 0; v < V; v++)
                        if (s)
                            add_words(words[r][v], products(four, weight[v]));
                        else
                            words[r][v] = products(four, weight[v]);
                }
            }
            __m256i minus;  // made anew: there is no register to keep it in
            __asm__ volatile("vpcmpeqw %0, %0, %0" : "=x"(minus));
            const __m256i less[V] = {vector(0), vector(1)};
#pragma GCC unroll 8
            for (int i = 0; i < R * V; i++) add_words(words[i / V][i % V], less[i % V]);
#pragma GCC unroll 8
            for (int i = 0; i < R * V; i++)
                __asm__("vpmaddwd %1, %0, %0" : "+x"(words[i / V][i % V]) : "x"(minus));
#pragma GCC unroll 8
            for (int i = 0; i < R * V; i++)
                __asm__("vpsubd %1, %0, %0" : "+x"(sum[i / V][i % V]) : "x"(words[i / V][i % V]));
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) {
                const Floats own = load(scales + part * n.outputs + first + LANES * v);
                const Floats found = real(sum[r][v]) * (all(rows.scales[(row + r) * parts + part]) * own);
                total[r][v] = part ? total[r][v] + found : found;
            }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) store(out + (row + r) * n.out_stride + first + LANES * v, total[r][v]);
}

template <class Number>
void panel_rows(const Quantised& rows, const uint8_t* weights, const float* scales, const Sizes& n, int64_t row,
                int64_t end, int64_t first, Number* out) {
    for (; row + ROWS <= end; row += ROWS) tile<ROWS>(rows, weights, scales, n, row, first, out);
    if (row + 2 == end) tile<2>(rows, weights, scales, n, row, first, out);
    if (row + 1 == end) tile<1>(rows, weights, scales, n, row, first, out);
}
#endif

template <class Number>
void multiply(const Quantised& rows, const uint8_t* weights, const float* scales, const Sizes& n, Number* out) {
    const int64_t blocks = (n.rows + BLOCK - 1) / BLOCK;
#pragma omp parallel num_threads((int)n.threads)
    {
        [[maybe_unused]] const Tiles tiles;
#pragma omp for schedule(dynamic, 1)
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t row = block * BLOCK, end = row + BLOCK < n.rows ? row + BLOCK : n.rows;
            for (int64_t first = 0; first < n.outputs; first += PANEL)
                panel_rows(rows, weights + first / PANEL * panel_bytes(n.width), scales, n, row, end, first, out);
        }
    }
}

}  // namespace

// The instructions that were compiled in.
extern "C" const char* prefill_int8_form() {
#if defined(WITH_AMX)
    return "AMX";
#elif defined(WITH_AVX512)
    return "AVX512-VNNI";
#else
    return "AVX2";
#endif
}

// The numbers of scales of a row.
extern "C" int64_t prefill_int8_parts(int64_t width) { return parts_of(width); }

// The bytes of weights [outputs, width] as panels.
extern "C" int64_t prefill_int8_bytes(int64_t outputs, int64_t width) {
    return padded_to(outputs, PANEL) / PANEL * panel_bytes(width);
}

// Rows and weights: bfloat16 if `halves`, else float32, of a width that is a multiple of 16, as outputs are. There is
// memory for multiples of 32 rows, of 64 numbers of a row and of 64 output channels.
extern "C" void prefill_int8_quantise(const void* from, int64_t stride, int64_t rows, int64_t width, int64_t threads,
                                      int64_t halves, uint8_t* numbers, float* scales, int32_t* sums) {
    const Quantised to = {numbers, scales, sums, padded_to(width, STEP)};
    if (halves)
        quantise((const uint16_t*)from, stride, rows, width, threads, to);
    else
        quantise((const float*)from, stride, rows, width, threads, to);
}

extern "C" void prefill_int8_pack(const void* from, int64_t outputs, int64_t width, int64_t threads, int64_t halves,
                                  uint8_t* to, float* scales) {
    if (halves)
        pack((const uint16_t*)from, outputs, width, threads, to, scales);
    else
        pack((const float*)from, outputs, width, threads, to, scales);
}

extern "C" void prefill_int8_product(uint8_t* numbers, float* row_scales, int32_t* sums, const uint8_t* weights,
                                     const float* scales, const int64_t* sizes, int64_t halves, void* out) {
    const int64_t width = ((const Sizes*)sizes)->width;
    const Quantised rows = {numbers, row_scales, sums, padded_to(width, STEP)};
    if (halves)
        multiply(rows, weights, scales, *(const Sizes*)sizes, (uint16_t*)out);
    else
        multiply(rows, weights, scales, *(const Sizes*)sizes, (float*)out);
}

#endif
