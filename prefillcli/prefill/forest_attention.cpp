// Attention over a forest in bfloat16, for CPUs with AVX512-BF16.
//
// A block is some consecutive queries of one piece of a chunk, those of all heads that share a K,V head beside each
// other: LANES rows. They lie along the lanes of the vectors. So the softmax needs no sums across lanes, keys are read
// where they are, and scores never leave the core: a tile of keys is scored, raised to powers of two, and multiplied
// with its values before the next one is looked at. Scores, maxima, sums and the output are float32.

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace {

constexpr int LANES = 64, VECTORS = LANES / 16, KEYS = 6, TILE = 48, WIDEST = 256, DIMS = 4;
constexpr float LOWEST = -1e30f;

struct Block {  // int64 in Python
    int64_t query, rows, own, depth, first, last;  // number in the chunk and count; index in the buffer and depth of
};                                                 // the first query; its runs of keys are first:last
struct Run {
    int64_t start, end, depth;  // of keys in the buffer; the depth of the first
};

struct Scratch {
    alignas(64) uint32_t query[WIDEST / 2][LANES];  // pairs of numbers
    alignas(64) float scores[TILE][LANES];
    alignas(64) uint32_t powers[TILE / 2][LANES];  // of pairs of keys, bfloat16
    alignas(64) uint32_t values[TILE / 2][WIDEST];  // pairs of keys, number by number
    alignas(64) float out[WIDEST][LANES];
};

inline void transpose(__m512i* r) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}

inline __m512 power_of_two(__m512 x) {  // within 3e-7 of it; 0 far below
    x = _mm512_max_ps(x, _mm512_set1_ps(-127.0f));
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 part = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_set1_ps(1.3333558e-3f);
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(9.6181291e-3f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(5.5504109e-2f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(2.4022651e-1f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(6.9314718e-1f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, whole);
}

inline __m512 multiply_pairs(__m512 sum, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

// Scores of KEYS keys for all lanes; the keys' rows are read as they are.
inline void score_keys(const uint16_t* const* keys, int pairs, const Scratch& own, float (*scores)[LANES], __m512 scale) {
    __m512 sum[KEYS][VECTORS];
    for (int k = 0; k < KEYS; k++)
        for (int v = 0; v < VECTORS; v++) sum[k][v] = _mm512_setzero_ps();
    for (int p = 0; p < pairs; p++) {
        __m512i query[VECTORS];
        for (int v = 0; v < VECTORS; v++) query[v] = _mm512_load_si512(&own.query[p][16 * v]);
        for (int k = 0; k < KEYS; k++) {
            int32_t pair;
            memcpy(&pair, keys[k] + 2 * p, 4);
            const __m512i key = _mm512_set1_epi32(pair);
            for (int v = 0; v < VECTORS; v++) sum[k][v] = multiply_pairs(sum[k][v], query[v], key);
        }
    }
    for (int k = 0; k < KEYS; k++)
        for (int v = 0; v < VECTORS; v++) _mm512_store_ps(&scores[k][16 * v], _mm512_mul_ps(sum[k][v], scale));
}

// The output of DIMS numbers of the values, for all lanes, with another tile of `pairs` pairs of keys.
inline void add_values(Scratch& own, int first, int pairs) {
    __m512 sum[DIMS][VECTORS];
    for (int d = 0; d < DIMS; d++)
        for (int v = 0; v < VECTORS; v++) sum[d][v] = _mm512_load_ps(&own.out[first + d][16 * v]);
    for (int p = 0; p < pairs; p++) {
        __m512i power[VECTORS];
        for (int v = 0; v < VECTORS; v++) power[v] = _mm512_load_si512(&own.powers[p][16 * v]);
        for (int d = 0; d < DIMS; d++) {
            const __m512i value = _mm512_set1_epi32((int32_t)own.values[p][first + d]);
            for (int v = 0; v < VECTORS; v++) sum[d][v] = multiply_pairs(sum[d][v], power[v], value);
        }
    }
    for (int d = 0; d < DIMS; d++)
        for (int v = 0; v < VECTORS; v++) _mm512_store_ps(&own.out[first + d][16 * v], sum[d][v]);
}

// Rows k and k + 1 of the values, number by number.
inline void interleave(const uint16_t* even, const uint16_t* odd, int width, uint32_t* to) {
    for (int d = 0; d < width; d += 16) {
        const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(even + d)));
        const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(odd + d)));
        _mm512_store_si512(to + d, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
}

struct Sizes {  // int64 in Python
    int64_t heads, kv_heads, width, value_width, window;  // window 0: none
    int64_t query_head, query_token, key_head, key_token, value_head, value_token, out_head, out_token, lse_head;
};

void attend_block(const Block& block, const Run* runs, int64_t kv_head, const Sizes& n, const uint16_t* query,
                  const uint16_t* key, const uint16_t* value, uint16_t* out, float* lse, float factor, Scratch& own) {
    const int groups = (int)(n.heads / n.kv_heads), rows = (int)block.rows, used = groups * rows;
    const int pairs = (int)n.width / 2, width = (int)n.value_width;
    const uint16_t* first_key = key + kv_head * n.key_head;
    const uint16_t* first_value = value + kv_head * n.value_head;

    for (int lane = 0; lane < LANES; lane += 16)  // lane = head * rows + query
        for (int p = 0; p < pairs; p += 16) {
            const __mmask16 there = pairs - p >= 16 ? 0xffff : (__mmask16)((1u << (pairs - p)) - 1);
            __m512i part[16];
            for (int i = 0; i < 16; i++) {
                const int at = lane + i;
                if (at >= used) {
                    part[i] = _mm512_setzero_si512();
                    continue;
                }
                const int64_t head = kv_head * groups + at / rows, token = block.query + at % rows;
                part[i] = _mm512_maskz_loadu_epi32(there, query + head * n.query_head + token * n.query_token + 2 * p);
            }
            transpose(part);
            for (int i = 0; i < 16 && p + i < pairs; i++) _mm512_store_si512(&own.query[p + i][lane], part[i]);
        }

    alignas(64) int32_t numbers[LANES];
    for (int lane = 0; lane < LANES; lane++) numbers[lane] = lane < used ? lane % rows : rows - 1;
    __m512i number[VECTORS];
    __m512 top[VECTORS], total[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        number[v] = _mm512_load_si512(&numbers[16 * v]);
        top[v] = _mm512_set1_ps(LOWEST);
        total[v] = _mm512_setzero_ps();
    }
    memset(own.out, 0, sizeof(float) * LANES * width);

    const __m512 scale = _mm512_set1_ps(factor), nothing = _mm512_set1_ps(-__builtin_inff());
    for (int64_t r = block.first; r < block.last; r++) {
        const int64_t own_end = block.own + rows, end = runs[r].end < own_end ? runs[r].end : own_end;
        for (int64_t start = runs[r].start; start < end; start += TILE) {
            const int count = (int)(end - start < TILE ? end - start : TILE);
            const int blocks = (count + KEYS - 1) / KEYS, padded = (blocks * KEYS + 1) / 2 * 2;
            for (int b = 0; b < blocks; b++) {
                const uint16_t* keys[KEYS];
                for (int k = 0; k < KEYS; k++) {
                    const int at = KEYS * b + k < count ? KEYS * b + k : count - 1;
                    keys[k] = first_key + (start + at) * n.key_token;
                }
                score_keys(keys, pairs, own, own.scores + KEYS * b, scale);
            }
            for (int k = count; k < padded; k++)
                for (int v = 0; v < VECTORS; v++) _mm512_store_ps(&own.scores[k][16 * v], nothing);
            // Key k is the future of queries below `future + k`, and has left the window of those from `left + k` on.
            const int64_t future = start - block.own;
            const int64_t left = runs[r].depth + (start - runs[r].start) + n.window - block.depth;
            for (int k = 0; k < count; k++) {
                if (future + k > 0) {
                    const __m512i from = _mm512_set1_epi32((int32_t)(future + k));
                    for (int v = 0; v < VECTORS; v++)
                        _mm512_mask_store_ps(&own.scores[k][16 * v], _mm512_cmplt_epi32_mask(number[v], from), nothing);
                }
                if (n.window && left + k < rows) {
                    const __m512i from = _mm512_set1_epi32(left + k < 0 ? 0 : (int32_t)(left + k));
                    for (int v = 0; v < VECTORS; v++)
                        _mm512_mask_store_ps(&own.scores[k][16 * v], _mm512_cmpge_epi32_mask(number[v], from), nothing);
                }
            }
            for (int v = 0; v < VECTORS; v++) {
                __m512 highest = top[v];
                for (int k = 0; k < count; k++)
                    highest = _mm512_max_ps(highest, _mm512_load_ps(&own.scores[k][16 * v]));
                if (_mm512_cmp_ps_mask(highest, top[v], _CMP_GT_OQ)) {
                    const __m512 fade = power_of_two(_mm512_sub_ps(top[v], highest));
                    total[v] = _mm512_mul_ps(total[v], fade);
                    for (int d = 0; d < width; d++)
                        _mm512_store_ps(&own.out[d][16 * v], _mm512_mul_ps(_mm512_load_ps(&own.out[d][16 * v]), fade));
                    top[v] = highest;
                }
                __m512 sum = _mm512_setzero_ps();
                for (int k = 0; k < padded; k += 2) {
                    const __m512 low = power_of_two(_mm512_sub_ps(_mm512_load_ps(&own.scores[k][16 * v]), highest));
                    const __m512 high = power_of_two(_mm512_sub_ps(_mm512_load_ps(&own.scores[k + 1][16 * v]), highest));
                    sum = _mm512_add_ps(sum, _mm512_add_ps(low, high));
                    const __m512i even = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(low));
                    const __m512i odd = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(high));
                    _mm512_store_si512(&own.powers[k / 2][16 * v], _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
                }
                total[v] = _mm512_add_ps(total[v], sum);
            }
            for (int k = 0; k < padded; k += 2) {
                const uint16_t* even = first_value + (start + (k < count ? k : count - 1)) * n.value_token;
                const uint16_t* odd = first_value + (start + (k + 1 < count ? k + 1 : count - 1)) * n.value_token;
                interleave(even, odd, width, own.values[k / 2]);
            }
            for (int d = 0; d < width; d += DIMS) add_values(own, d, padded / 2);
        }
    }

    alignas(64) float sums[LANES], tops[LANES];
    for (int v = 0; v < VECTORS; v++) {
        const __m512 share = _mm512_div_ps(_mm512_set1_ps(1.0f), total[v]);
        for (int d = 0; d < width; d++)
            _mm512_store_ps(&own.out[d][16 * v], _mm512_mul_ps(_mm512_load_ps(&own.out[d][16 * v]), share));
        _mm512_store_ps(&sums[16 * v], total[v]);
        _mm512_store_ps(&tops[16 * v], top[v]);
    }
    for (int lane = 0; lane < used; lane += 16)
        for (int d = 0; d < width; d += 16) {
            __m512i part[16];
            for (int i = 0; i < 16; i++) part[i] = _mm512_load_si512(&own.out[d + i][lane]);
            transpose(part);
            for (int i = 0; i < 16 && lane + i < used; i++) {
                const int64_t head = kv_head * groups + (lane + i) / rows, token = block.query + (lane + i) % rows;
                _mm256_storeu_si256((__m256i*)(out + head * n.out_head + token * n.out_token + d),
                                    (__m256i)_mm512_cvtneps_pbh((__m512)part[i]));
            }
        }
    for (int lane = 0; lane < used; lane++) {
        const int64_t head = kv_head * groups + lane / rows, token = block.query + lane % rows;
        lse[head * n.lse_head + token] = (tops[lane] + __builtin_log2f(sums[lane])) * 0.69314718f;
    }
}

}  // namespace

// query, key, value, out: bfloat16 with the strides in `sizes`; lse: float32 [heads, tokens]. `factor`: scale * log2(e).
extern "C" void prefill_forest_attention(const void* query, const void* key, const void* value, void* out, float* lse,
                                         const int64_t* blocks, int64_t count, const int64_t* runs,
                                         const int64_t* sizes, int64_t threads, float factor) {
    const Sizes& n = *(const Sizes*)sizes;
    const int64_t units = count * n.kv_heads;
#pragma omp parallel num_threads((int)threads)
    {
        Scratch own;
#pragma omp for schedule(dynamic, 1)
        for (int64_t unit = 0; unit < units; unit++)
            attend_block(((const Block*)blocks)[unit / n.kv_heads], (const Run*)runs, unit % n.kv_heads, n,
                         (const uint16_t*)query, (const uint16_t*)key, (const uint16_t*)value, (uint16_t*)out, lse,
                         factor, own);
    }
}
