// Products of int8 rows with int8 weights, for CPUs with AVX512-VNNI or AMX, and the passes that make both.
//
// A row is quantised by its own largest number, a weight by the largest of its output channel; both are turned first
// (`narrow.py`). Sums of products are exact integers, so a row's result has the same bits whatever it is computed with.
//
// Weights lie in panels of output channels: four numbers of each channel beside each other, as one instruction
// multiplies them. That of VNNI takes one side as unsigned: weights are stored plus 128, and 128 times the sum of the
// row's numbers is taken off again. Those of AMX multiply tiles of both.

#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include <vector>

#if defined(__AMX_INT8__) || defined(__AMXINT8__)  // GCC, and older Clang
#define WITH_AMX
#endif

namespace {

constexpr int LANES = 16, VECTORS = 4, TURNED = LANES * VECTORS, ROWS = 6;
#if defined(WITH_AMX)
constexpr int PANEL = 32, BLOCK = 256, SHIFT = 0;
#else
constexpr int PANEL = 64, BLOCK = 240, SHIFT = 128;
#endif
constexpr int TILE = 16, STEP = 64;  // rows of a tile, and bytes of each

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
    if (width % TURNED)
        for (int64_t k = 0; k < width; k += LANES) {
            const __m512 x = load(from + k);
            _mm512_storeu_ps(to + k, x);
            most = _mm512_max_ps(most, _mm512_abs_ps(x));
        }
    else
        for (int64_t k = 0; k < width; k += TURNED) {
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
    int8_t* numbers;  // [rows, padded], zeros from `width` on; there is memory for whole tiles of rows
    float* scales;    // [rows], what gives the rows back
    int32_t* sums;    // [rows], of the numbers
    int64_t padded;
};

inline int64_t padded_to(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

// One row that was turned, as small numbers.
inline void quantise_row(const float* from, float largest, int64_t row, int64_t width, const Quantised& to) {
    const __m512 by = steps(largest);
    __m512i sum = _mm512_setzero_si512();
    int8_t* numbers = to.numbers + row * to.padded;
    for (int64_t k = 0; k < width; k += LANES) {
        const __m512i some = rounded(from + k, by);
        sum = _mm512_add_epi32(sum, some);
        _mm_storeu_si128((__m128i*)(numbers + k), _mm512_cvtepi32_epi8(some));
    }
    memset(numbers + width, 0, to.padded - width);
    to.scales[row] = largest / 127.0f;
    to.sums[row] = _mm512_reduce_add_epi32(sum);
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
#endif

template <class Number>
void quantise(const Number* from, int64_t stride, int64_t rows, int64_t width, int64_t threads, const Quantised& to) {
#pragma omp parallel num_threads((int)threads)
    {
        std::vector<float> own(width);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++)
            quantise_row(own.data(), turned(from + row * stride, width, own.data()), row, width, to);
    }
}

// Weights [outputs, width] as panels, which are zeros where there are no such outputs and inputs; `scales` [outputs].
template <class Number>
void pack(const Number* from, int64_t outputs, int64_t width, int64_t threads, uint8_t* to, float* scales) {
#pragma omp parallel num_threads((int)threads)
    {
        std::vector<float> own(width);
#pragma omp for schedule(static)
        for (int64_t output = 0; output < outputs; output++) {
            const float largest = turned(from + output * width, width, own.data());
            const __m512 by = steps(largest);
            uint8_t* panel = to + output / PANEL * PANEL * padded_to(width, STEP) + 4 * (output % PANEL);
            for (int64_t k = 0; k < width; k += LANES) {
                alignas(16) uint32_t words[4];
                const __m512i numbers = _mm512_add_epi32(rounded(own.data() + k, by), _mm512_set1_epi32(SHIFT));
                _mm_store_si128((__m128i*)words, _mm512_cvtepi32_epi8(numbers));
                for (int i = 0; i < 4; i++) memcpy(panel + (k + 4 * i) * PANEL, words + i, 4);
            }
            scales[output] = largest / 127.0f;
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
    alignas(64) int32_t sums[2 * TILE][PANEL];
    weights += first * rows.padded;
    for (; row < end; row += 2 * TILE) {
        const int8_t* numbers = rows.numbers + row * rows.padded;
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
        const int count = (int)(end - row < 2 * TILE ? end - row : 2 * TILE);
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
#else
struct Tiles {};  // none

// Adds the products of four unsigned and four signed bytes to each word. Compilers copy the sums of the intrinsic, and
// then have too few registers.
inline void add_products(__m512i& sum, __m512i bytes, __m512i others) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(bytes), "v"(others));
}

// R rows with V vectors of a panel. Unrolled, so that all sums stay in registers.
template <int R, int V, class Number>
inline void tile(const Quantised& rows, const uint8_t* weights, const float* scales, const Sizes& n, int64_t row,
                 int64_t first, Number* out) {
    const int8_t* numbers = rows.numbers + row * rows.padded;
    weights += first * rows.padded;
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
                panel_rows(rows, weights, scales, n, row, end, first, out);
        }
    }
}

}  // namespace

// The instructions that were compiled in.
extern "C" const char* prefill_int8_form() {
#if defined(WITH_AMX)
    return "AMX";
#else
    return "AVX512-VNNI";
#endif
}

// Rows and weights: bfloat16 if `halves`, else float32, of a width that is a multiple of 16, as outputs are. There is
// memory for multiples of 32 rows, of 64 numbers of a row and of 64 output channels.
extern "C" void prefill_int8_quantise(const void* from, int64_t stride, int64_t rows, int64_t width, int64_t threads,
                                      int64_t halves, int8_t* numbers, float* scales, int32_t* sums) {
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

extern "C" void prefill_int8_product(int8_t* numbers, float* row_scales, int32_t* sums, const uint8_t* weights,
                                     const float* scales, const int64_t* sizes, int64_t halves, void* out) {
    const int64_t width = ((const Sizes*)sizes)->width;
    const Quantised rows = {numbers, row_scales, sums, padded_to(width, STEP)};
    if (halves)
        multiply(rows, weights, scales, *(const Sizes*)sizes, (uint16_t*)out);
    else
        multiply(rows, weights, scales, *(const Sizes*)sizes, (float*)out);
}

#endif
