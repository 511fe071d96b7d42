// Products of int8 rows with int8 weights, for CPUs with AVX512-VNNI, and the passes that make both.
//
// A row is quantised by its own largest number, a weight by the largest of its output channel; both are turned first
// (`narrow.py`). Sums of products are exact integers, so a row's result has the same bits whatever it is computed with.
//
// Weights lie in panels of 64 output channels: four numbers of each channel beside each other, as one instruction
// multiplies them. It takes one side as unsigned: weights are stored plus 128, and 128 times the sum of the row's
// numbers is taken off again.

#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include <vector>

namespace {

constexpr int LANES = 16, VECTORS = 4, PANEL = LANES * VECTORS, ROWS = 6, BLOCK = 240;

inline __m512 load(const uint16_t* from) {
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
}

inline __m512 load(const float* from) { return _mm512_loadu_ps(from); }

inline void store(uint16_t* to, __m512 numbers) {
    _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(numbers));
}

inline void store(float* to, __m512 numbers) { _mm512_storeu_ps(to, numbers); }

// Sums and differences of 64 numbers: those of vectors, and then of lanes.
inline void turn(__m512* x) {
    const __m512 swapped[2] = {_mm512_add_ps(x[0], x[1]), _mm512_sub_ps(x[0], x[1])};
    const __m512 others[2] = {_mm512_add_ps(x[2], x[3]), _mm512_sub_ps(x[2], x[3])};
    const __m512 eighth = _mm512_set1_ps(0.125f), one = _mm512_set1_ps(1.0f), less = _mm512_set1_ps(-1.0f);
    x[0] = _mm512_mul_ps(_mm512_add_ps(swapped[0], others[0]), eighth);
    x[1] = _mm512_mul_ps(_mm512_add_ps(swapped[1], others[1]), eighth);
    x[2] = _mm512_mul_ps(_mm512_sub_ps(swapped[0], others[0]), eighth);
    x[3] = _mm512_mul_ps(_mm512_sub_ps(swapped[1], others[1]), eighth);
    for (int v = 0; v < VECTORS; v++) {
        x[v] = _mm512_fmadd_ps(x[v], _mm512_mask_blend_ps(0xaaaa, one, less), _mm512_permute_ps(x[v], 0xb1));
        x[v] = _mm512_fmadd_ps(x[v], _mm512_mask_blend_ps(0xcccc, one, less), _mm512_permute_ps(x[v], 0x4e));
        x[v] = _mm512_fmadd_ps(x[v], _mm512_mask_blend_ps(0xf0f0, one, less), _mm512_shuffle_f32x4(x[v], x[v], 0xb1));
        x[v] = _mm512_fmadd_ps(x[v], _mm512_mask_blend_ps(0xff00, one, less), _mm512_shuffle_f32x4(x[v], x[v], 0x4e));
    }
}

// One row in float32, turned where its width allows that; the largest of its numbers.
template <class Number>
inline float turned(const Number* from, int64_t width, float* to) {
    __m512 most = _mm512_setzero_ps();
    if (width % PANEL)
        for (int64_t k = 0; k < width; k += LANES) {
            const __m512 x = load(from + k);
            _mm512_storeu_ps(to + k, x);
            most = _mm512_max_ps(most, _mm512_abs_ps(x));
        }
    else
        for (int64_t k = 0; k < width; k += PANEL) {
            __m512 x[VECTORS];
            for (int v = 0; v < VECTORS; v++) x[v] = load(from + k + LANES * v);
            turn(x);
            for (int v = 0; v < VECTORS; v++) {
                _mm512_storeu_ps(to + k + LANES * v, x[v]);
                most = _mm512_max_ps(most, _mm512_abs_ps(x[v]));
            }
        }
    return _mm512_reduce_max_ps(most);
}

inline __m512i rounded(const float* from, __m512 by) {
    return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(from), by));
}

inline __m512 steps(float largest) { return _mm512_set1_ps(largest > 0 ? 127.0f / largest : 0.0f); }

struct Quantised {
    int8_t* numbers;  // [rows, width]
    float* scales;    // [rows], what gives the rows back
    int32_t* sums;    // [rows], of the numbers
};

template <class Number>
void quantise(const Number* from, int64_t stride, int64_t rows, int64_t width, int64_t threads, const Quantised& to) {
#pragma omp parallel num_threads((int)threads)
    {
        std::vector<float> own(width);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            const float largest = turned(from + row * stride, width, own.data());
            const __m512 by = steps(largest);
            __m512i sum = _mm512_setzero_si512();
            for (int64_t k = 0; k < width; k += LANES) {
                const __m512i numbers = rounded(own.data() + k, by);
                sum = _mm512_add_epi32(sum, numbers);
                _mm_storeu_si128((__m128i*)(to.numbers + row * width + k), _mm512_cvtepi32_epi8(numbers));
            }
            to.scales[row] = largest / 127.0f;
            to.sums[row] = _mm512_reduce_add_epi32(sum);
        }
    }
}

// Weights [outputs, width] as panels; `scales` [outputs].
template <class Number>
void pack(const Number* from, int64_t outputs, int64_t width, int64_t threads, uint8_t* to, float* scales) {
#pragma omp parallel num_threads((int)threads)
    {
        std::vector<float> own(width);
#pragma omp for schedule(static)
        for (int64_t output = 0; output < outputs; output++) {
            const float largest = turned(from + output * width, width, own.data());
            const __m512 by = steps(largest);
            uint8_t* panel = to + output / PANEL * PANEL * width + 4 * (output % PANEL);
            for (int64_t k = 0; k < width; k += LANES) {
                alignas(16) uint32_t words[4];
                const __m512i numbers = _mm512_add_epi32(rounded(own.data() + k, by), _mm512_set1_epi32(128));
                _mm_store_si128((__m128i*)words, _mm512_cvtepi32_epi8(numbers));
                for (int i = 0; i < 4; i++) memcpy(panel + (k + 4 * i) * PANEL, words + i, 4);
            }
            scales[output] = largest / 127.0f;
        }
    }
}

// Adds the products of four unsigned and four signed bytes to each word. Compilers copy the sums of the intrinsic, and
// then have too few registers.
inline void add_products(__m512i& sum, __m512i bytes, __m512i others) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(bytes), "v"(others));
}

struct Sizes {  // int64 in Python
    int64_t rows, width, outputs, out_stride, threads;
};

// R rows with V vectors of a panel. Unrolled, so that all sums stay in registers.
template <int R, int V, class Number>
inline void tile(const Quantised& rows, const uint8_t* weights, const float* scales, const Sizes& n, int64_t row,
                 int64_t first, Number* out) {
    const int8_t* numbers = rows.numbers + row * n.width;
    weights += first * n.width;
    __m512i sum[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        const __m512i less = _mm512_set1_epi32(-128 * rows.sums[row + r]);
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
            memcpy(&word, numbers + r * n.width + k, 4);
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
void panel_rows(const Quantised& rows, const uint8_t* weights, const float* scales, const Sizes& n, int64_t row,
                int64_t end, int64_t first, Number* out) {
    for (; row + ROWS <= end; row += ROWS) tile<ROWS, V>(rows, weights, scales, n, row, first, out);
    for (; row < end; row++) tile<1, V>(rows, weights, scales, n, row, first, out);
}

template <class Number>
void multiply(const Quantised& rows, const uint8_t* weights, const float* scales, const Sizes& n, Number* out) {
    const int64_t blocks = (n.rows + BLOCK - 1) / BLOCK;
#pragma omp parallel for num_threads((int)n.threads) schedule(dynamic, 1)
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t row = block * BLOCK, end = row + BLOCK < n.rows ? row + BLOCK : n.rows;
        for (int64_t first = 0; first < n.outputs; first += PANEL) {
            const int64_t left = n.outputs - first;
            const auto some = left > 3 * LANES   ? panel_rows<4, Number>
                              : left > 2 * LANES ? panel_rows<3, Number>
                              : left > LANES     ? panel_rows<2, Number>
                                                 : panel_rows<1, Number>;
            some(rows, weights, scales, n, row, end, first, out);
        }
    }
}

}  // namespace

// Rows and weights: bfloat16 if `halves`, else float32, of a width that is a multiple of 16, as outputs are.
extern "C" void prefill_int8_quantise(const void* from, int64_t stride, int64_t rows, int64_t width, int64_t threads,
                                      int64_t halves, int8_t* numbers, float* scales, int32_t* sums) {
    const Quantised to = {numbers, scales, sums};
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

extern "C" void prefill_int8_product(int8_t* numbers, float* row_scales, int32_t* sums, const uint8_t* weights,
                                     const float* scales, const int64_t* sizes, int64_t halves, void* out) {
    const Quantised rows = {numbers, row_scales, sums};
    if (halves)
        multiply(rows, weights, scales, *(const Sizes*)sizes, (uint16_t*)out);
    else
        multiply(rows, weights, scales, *(const Sizes*)sizes, (float*)out);
}

#endif
