// Attention over a forest in bfloat16 and float32, for CPUs with AVX512-BF16.
//
// A block is some consecutive queries of one node, those of all heads that share a K,V head beside each other: LANES
// rows. They lie along the lanes of the vectors. So the softmax needs no sums across lanes, keys are read where they
// are, and scores never leave the core: a tile of keys is scored, raised to powers of two, and multiplied with its
// values before the next one is looked at. Scores, maxima, sums and the output are float32.
//
// Short blocks that follow one another fill the lanes together: the tiles that all of them see are looked at once, and
// those of each block with the lanes of the others left as they are.
//
// A query's result has the same bits whatever it is computed with. Tiles begin at depths that are multiples of TILE,
// and a key's place in its tile follows from its depth, wherever it lies in memory. Lanes never meet, and a lane adds
// exactly nothing for keys that its query does not see.

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include <vector>

namespace {

constexpr int LANES = 64, VECTORS = LANES / 16, KEYS = 6, TILE = 48, WIDEST = 256, DIMS = 4;
constexpr float LOWEST = -1e30f;

struct Block {  // int64 in Python
    // Number in the chunk, and count; depth of the first query; its runs of keys are first:last; the depth up to which
    // it shares keys with the block before it, if it is computed with that one, else 0.
    int64_t query, rows, depth, first, last, shared;
};
struct Run {
    int64_t start, end, depth;  // of keys in the buffer; the depth of the first
};

// What is multiplied comes in words of 32 bits: a float32, or a pair of bfloat16.
struct Float32 {
    typedef float Number;
    static constexpr int PER_WORD = 1;
};
struct Bfloat16 {
    typedef uint16_t Number;
    static constexpr int PER_WORD = 2;
};

template <class Kind>
struct Scratch {
    alignas(64) uint32_t query[WIDEST / Kind::PER_WORD][LANES];
    alignas(64) float scores[TILE][LANES];
    alignas(64) uint32_t powers[TILE / Kind::PER_WORD][LANES];
    alignas(64) uint32_t values[TILE / Kind::PER_WORD][WIDEST];  // a word: one number of the values of a key or a pair
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

inline __m512 power_of_two(__m512 x) {  // within 2e-7 of it; 0 far below, 1 of 0
    x = _mm512_max_ps(x, _mm512_set1_ps(-160.0f));
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 part = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_set1_ps(1.32647268e-3f);
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(9.67151267e-3f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(5.55073374e-2f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(2.40222421e-1f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(6.93146978e-1f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, whole);
}

inline __m512 multiply_words(__m512 sum, __m512i a, __m512i b, Bfloat16) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

inline __m512 multiply_words(__m512 sum, __m512i a, __m512i b, Float32) {
    return _mm512_fmadd_ps((__m512)a, (__m512)b, sum);
}

// What brings products to scores; with a soft cap `scale` brings them to where a power of two is e^(2 score / cap).
template <bool CAPPED>
struct Factors {
    __m512 scale, cap;
};

inline __m512 scaled(__m512 score, const Factors<false>& by) { return _mm512_mul_ps(score, by.scale); }

inline __m512 scaled(__m512 score, const Factors<true>& by) {
    // tanh(x) = p / (p + 2) with p = e^2x - 1, which is computed without adding the 1: a score that is small beside the
    // cap is as exact as a large one. No p above 2^30 changes anything.
    score = _mm512_max_ps(_mm512_set1_ps(-160.0f), _mm512_min_ps(_mm512_set1_ps(30.0f), _mm512_mul_ps(score, by.scale)));
    const __m512 whole = _mm512_roundscale_ps(score, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 part = _mm512_sub_ps(score, whole);
    __m512 y = _mm512_set1_ps(1.54531629e-4f);  // (2^part - 1) / part within 1.3e-7 of it
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(1.33908634e-3f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(9.61808256e-3f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(5.55035711e-2f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(2.40226508e-1f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(6.93147188e-1f));
    const __m512 one = _mm512_set1_ps(1.0f), power = _mm512_scalef_ps(one, whole);
    const __m512 less = _mm512_fmadd_ps(_mm512_mul_ps(y, part), power, _mm512_sub_ps(power, one));
    return _mm512_div_ps(_mm512_mul_ps(by.cap, less), _mm512_add_ps(less, _mm512_set1_ps(2.0f)));
}

// Scores of KEYS keys for all lanes; the keys' rows are read as they are.
template <class Kind, bool CAPPED>
inline void score_keys(const typename Kind::Number* const* keys, int words, const Scratch<Kind>& own,
                       float (*scores)[LANES], const Factors<CAPPED>& by) {
    __m512 sum[KEYS][VECTORS];
    for (int k = 0; k < KEYS; k++)
        for (int v = 0; v < VECTORS; v++) sum[k][v] = _mm512_setzero_ps();
    for (int w = 0; w < words; w++) {
        __m512i query[VECTORS];
        for (int v = 0; v < VECTORS; v++) query[v] = _mm512_load_si512(&own.query[w][16 * v]);
        for (int k = 0; k < KEYS; k++) {
            int32_t word;
            memcpy(&word, keys[k] + Kind::PER_WORD * w, 4);
            const __m512i key = _mm512_set1_epi32(word);
            for (int v = 0; v < VECTORS; v++) sum[k][v] = multiply_words(sum[k][v], query[v], key, Kind());
        }
    }
    for (int k = 0; k < KEYS; k++)
        for (int v = 0; v < VECTORS; v++) _mm512_store_ps(&scores[k][16 * v], scaled(sum[k][v], by));
}

// The lanes that a tile is for: those of one block, or all.
struct Active {
    __mmask16 lanes[VECTORS];
    bool all;
    int64_t shallowest, deepest;  // depths of their queries
};

// The output of DIMS numbers of the values, for the active lanes, with another tile of so many words of keys.
template <class Kind>
inline void add_values(Scratch<Kind>& own, int first, int words, const Active& active) {
    __m512 sum[DIMS][VECTORS];
    for (int d = 0; d < DIMS; d++)
        for (int v = 0; v < VECTORS; v++) sum[d][v] = _mm512_load_ps(&own.out[first + d][16 * v]);
    for (int w = 0; w < words; w++) {
        __m512i power[VECTORS];
        for (int v = 0; v < VECTORS; v++) power[v] = _mm512_load_si512(&own.powers[w][16 * v]);
        for (int d = 0; d < DIMS; d++) {
            const __m512i value = _mm512_set1_epi32((int32_t)own.values[w][first + d]);
            for (int v = 0; v < VECTORS; v++) sum[d][v] = multiply_words(sum[d][v], power[v], value, Kind());
        }
    }
    if (active.all) {
        for (int d = 0; d < DIMS; d++)
            for (int v = 0; v < VECTORS; v++) _mm512_store_ps(&own.out[first + d][16 * v], sum[d][v]);
        return;
    }
    for (int d = 0; d < DIMS; d++)  // the power of another lane is 0, but the value may be no number
        for (int v = 0; v < VECTORS; v++)
            _mm512_mask_store_ps(&own.out[first + d][16 * v], active.lanes[v], sum[d][v]);
}

inline void store_powers(Scratch<Bfloat16>& own, int key, int lane, __m512 even, __m512 odd) {
    const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(even));
    const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(odd));
    _mm512_store_si512(&own.powers[key / 2][lane], _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}

inline void store_powers(Scratch<Float32>& own, int key, int lane, __m512 even, __m512 odd) {
    _mm512_store_ps(&own.powers[key][lane], even);
    _mm512_store_ps(&own.powers[key + 1][lane], odd);
}

// Rows `key` and `key + 1` of a tile's values; in bfloat16 number by number.
inline void store_values(Scratch<Bfloat16>& own, int key, const uint16_t* even, const uint16_t* odd, int width) {
    for (int d = 0; d < width; d += 16) {
        const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(even + d)));
        const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(odd + d)));
        _mm512_store_si512(&own.values[key / 2][d], _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
}

inline void store_values(Scratch<Float32>& own, int key, const float* even, const float* odd, int width) {
    memcpy(own.values[key], even, 4 * width);
    memcpy(own.values[key + 1], odd, 4 * width);
}

inline void store_output(uint16_t* to, __m512 numbers) {
    _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(numbers));
}

inline void store_output(float* to, __m512 numbers) { _mm512_storeu_ps(to, numbers); }

struct Sizes {  // int64 in Python
    int64_t heads, kv_heads, width, value_width, window;  // window 0: none
    int64_t query_head, query_token, key_head, key_token, value_head, value_token, out_head, out_token, lse_head;
};

// The keys of a tile that are there: numbers begin:count of it, and where each lies in the buffer.
struct Tile {
    int begin, count;
    int64_t at[TILE];
};

// The tile that begins at a depth, of the runs from `run` on, which moves along; none of its keys is at `end` or deeper.
inline void find_keys(Tile& tile, int64_t depth, int64_t end, const Run*& run) {
    tile.begin = run->depth > depth ? (int)(run->depth - depth) : 0;
    tile.count = (int)(end - depth < TILE ? end - depth : TILE);
    for (int k = tile.begin; k < tile.count;) {
        while (run->depth + run->end - run->start <= depth + k) run++;
        const int64_t left = run->depth + run->end - run->start - depth;
        const int64_t first = run->start + depth - run->depth;
        for (const int until = left < tile.count ? (int)left : tile.count; k < until; k++) tile.at[k] = first + k;
    }
}

// Blocks that are computed together.
struct Group {
    const Block *first, *last;
    int64_t query, rows, shared;  // of all their queries; the depth up to which they see the same keys
};

template <class Kind, class Number = typename Kind::Number>
void load_queries(const Group& block, int64_t kv_head, const Sizes& n, const Number* query, Scratch<Kind>& own) {
    const int groups = (int)(n.heads / n.kv_heads), rows = (int)block.rows, used = groups * rows;
    const int words = (int)n.width / Kind::PER_WORD;
    for (int lane = 0; lane < LANES; lane += 16)  // lane = head * rows + query
        for (int w = 0; w < words; w += 16) {
            const __mmask16 there = words - w >= 16 ? 0xffff : (__mmask16)((1u << (words - w)) - 1);
            __m512i part[16];
            for (int i = 0; i < 16; i++) {
                const int at = lane + i;
                if (at >= used) {
                    part[i] = _mm512_setzero_si512();
                    continue;
                }
                const int64_t head = kv_head * groups + at / rows, token = block.query + at % rows;
                const Number* row = query + head * n.query_head + token * n.query_token + Kind::PER_WORD * w;
                part[i] = _mm512_maskz_loadu_epi32(there, row);
            }
            transpose(part);
            for (int i = 0; i < 16 && w + i < words; i++) _mm512_store_si512(&own.query[w + i][lane], part[i]);
        }
}

// The softmax's running maximum and sum of each lane.
struct Running {
    __m512i number[VECTORS], depth[VECTORS];  // of the lane's query: its number in the group, its depth
    __m512 top[VECTORS], total[VECTORS];
};

// Scores of a tile that begins at a depth; those of keys that a lane's query does not see are -inf.
template <class Kind, bool CAPPED, class Number = typename Kind::Number>
void score_tile(const Tile& tile, int64_t depth, const Active& active, const Sizes& n, const Number* keys,
                const Running& lanes, Scratch<Kind>& own, const Factors<CAPPED>& by) {
    const __m512 nothing = _mm512_set1_ps(-__builtin_inff());
    const int first = tile.begin / KEYS * KEYS, padded = (tile.count + 1) / 2 * 2;
    for (int b = first; b < tile.count; b += KEYS) {
        const Number* some[KEYS];
        for (int k = 0; k < KEYS; k++) {
            const int at = b + k < tile.begin ? tile.begin : b + k < tile.count ? b + k : tile.count - 1;
            some[k] = keys + tile.at[at] * n.key_token;
        }
        score_keys<Kind>(some, (int)n.width / Kind::PER_WORD, own, own.scores + b, by);
    }
    for (int k = 0; k < tile.begin; k++)
        for (int v = 0; v < VECTORS; v++) _mm512_store_ps(&own.scores[k][16 * v], nothing);
    for (int k = tile.count; k < padded; k++)
        for (int v = 0; v < VECTORS; v++) _mm512_store_ps(&own.scores[k][16 * v], nothing);
    // Key k is the future of queries above it, and has left the window of those `window` below it.
    for (int k = tile.begin; k < tile.count; k++) {
        if (depth + k > active.shallowest) {
            const __m512i from = _mm512_set1_epi32((int32_t)(depth + k));
            for (int v = 0; v < VECTORS; v++)
                _mm512_mask_store_ps(&own.scores[k][16 * v], _mm512_cmplt_epi32_mask(lanes.depth[v], from), nothing);
        }
        if (n.window && depth + k + n.window <= active.deepest) {
            const __m512i from = _mm512_set1_epi32((int32_t)(depth + k + n.window));
            for (int v = 0; v < VECTORS; v++)
                _mm512_mask_store_ps(&own.scores[k][16 * v], _mm512_cmpge_epi32_mask(lanes.depth[v], from), nothing);
        }
    }
    if (!active.all)
        for (int k = tile.begin; k < tile.count; k++)
            for (int v = 0; v < VECTORS; v++)
                _mm512_mask_store_ps(&own.scores[k][16 * v], (__mmask16)~active.lanes[v], nothing);
}

// Powers of a tile's scores, less the maximum so far; what was summed before fades as the maximum rises.
template <class Kind>
void raise_tile(int count, int width, Running& lanes, Scratch<Kind>& own) {
    for (int v = 0; v < VECTORS; v++) {
        __m512 highest = lanes.top[v];
        for (int k = 0; k < count; k++) highest = _mm512_max_ps(highest, _mm512_load_ps(&own.scores[k][16 * v]));
        if (_mm512_cmp_ps_mask(highest, lanes.top[v], _CMP_GT_OQ)) {
            const __m512 fade = power_of_two(_mm512_sub_ps(lanes.top[v], highest));
            lanes.total[v] = _mm512_mul_ps(lanes.total[v], fade);
            for (int d = 0; d < width; d++)
                _mm512_store_ps(&own.out[d][16 * v], _mm512_mul_ps(_mm512_load_ps(&own.out[d][16 * v]), fade));
            lanes.top[v] = highest;
        }
        __m512 sum = _mm512_setzero_ps();
        for (int k = 0; k < count; k += 2) {
            const __m512 even = power_of_two(_mm512_sub_ps(_mm512_load_ps(&own.scores[k][16 * v]), highest));
            const __m512 odd = power_of_two(_mm512_sub_ps(_mm512_load_ps(&own.scores[k + 1][16 * v]), highest));
            sum = _mm512_add_ps(sum, _mm512_add_ps(even, odd));
            store_powers(own, k, 16 * v, even, odd);
        }
        lanes.total[v] = _mm512_add_ps(lanes.total[v], sum);
    }
}

template <class Kind, class Number = typename Kind::Number>
void write_group(const Group& block, int64_t kv_head, const Sizes& n, const Running& lanes, Number* out, float* lse,
                 Scratch<Kind>& own) {
    const int groups = (int)(n.heads / n.kv_heads), rows = (int)block.rows, used = groups * rows;
    const int width = (int)n.value_width;
    alignas(64) float sums[LANES], tops[LANES];
    for (int v = 0; v < VECTORS; v++) {
        const __m512 share = _mm512_div_ps(_mm512_set1_ps(1.0f), lanes.total[v]);
        for (int d = 0; d < width; d++)
            _mm512_store_ps(&own.out[d][16 * v], _mm512_mul_ps(_mm512_load_ps(&own.out[d][16 * v]), share));
        _mm512_store_ps(&sums[16 * v], lanes.total[v]);
        _mm512_store_ps(&tops[16 * v], lanes.top[v]);
    }
    for (int lane = 0; lane < used; lane += 16)
        for (int d = 0; d < width; d += 16) {
            __m512i part[16];
            for (int i = 0; i < 16; i++) part[i] = _mm512_load_si512(&own.out[d + i][lane]);
            transpose(part);
            for (int i = 0; i < 16 && lane + i < used; i++) {
                const int64_t head = kv_head * groups + (lane + i) / rows, token = block.query + (lane + i) % rows;
                store_output(out + head * n.out_head + token * n.out_token + d, (__m512)part[i]);
            }
        }
    for (int lane = 0; lane < used; lane++) {
        const int64_t head = kv_head * groups + lane / rows, token = block.query + lane % rows;
        lse[head * n.lse_head + token] = (tops[lane] + __builtin_log2f(sums[lane])) * 0.69314718f;
    }
}

// Attention of the active lanes over the tiles from a depth on, along these runs. No key is at `end` or deeper.
template <class Kind, bool CAPPED, class Number = typename Kind::Number>
void attend_tiles(int64_t depth, int64_t end, const Run* run, const Active& active, const Sizes& n, const Number* key,
                  const Number* value, Running& lanes, const Factors<CAPPED>& by, Scratch<Kind>& own) {
    const int width = (int)n.value_width;
    Tile tile;
    for (; depth < end; depth += TILE) {
        find_keys(tile, depth, end, run);
        score_tile<Kind>(tile, depth, active, n, key, lanes, own, by);
        const int padded = (tile.count + 1) / 2 * 2;
        raise_tile<Kind>(padded, width, lanes, own);
        for (int k = 0; k < padded; k += 2) {
            const int even = k < tile.begin ? tile.begin : k;
            const int odd = k + 1 < tile.begin ? tile.begin : k + 1 < tile.count ? k + 1 : tile.count - 1;
            store_values(own, k, value + tile.at[even] * n.value_token, value + tile.at[odd] * n.value_token, width);
        }
        for (int d = 0; d < width; d += DIMS) add_values<Kind>(own, d, padded / Kind::PER_WORD, active);
    }
}

template <class Kind, bool CAPPED, class Number = typename Kind::Number>
void attend_group(const Group& group, const Run* runs, int64_t kv_head, const Sizes& n, const Number* query,
                  const Number* key, const Number* value, Number* out, float* lse, const Factors<CAPPED>& by,
                  Scratch<Kind>& own) {
    const int rows = (int)group.rows, used = (int)(n.heads / n.kv_heads) * rows;
    key += kv_head * n.key_head;
    value += kv_head * n.value_head;
    load_queries<Kind>(group, kv_head, n, query, own);

    alignas(64) int32_t numbers[LANES], depths[LANES], by_number[LANES];
    Active active = {{0xffff, 0xffff, 0xffff, 0xffff}, true, INT64_MAX, 0};
    for (const Block* block = group.first; block < group.last; block++) {
        for (int i = 0; i < block->rows; i++) by_number[block->query - group.query + i] = (int32_t)(block->depth + i);
        if (block->depth < active.shallowest) active.shallowest = block->depth;
        if (block->depth + block->rows - 1 > active.deepest) active.deepest = block->depth + block->rows - 1;
    }
    for (int lane = 0; lane < LANES; lane++) {
        numbers[lane] = lane < used ? lane % rows : rows - 1;
        depths[lane] = by_number[numbers[lane]];
    }
    Running lanes;
    for (int v = 0; v < VECTORS; v++) {
        lanes.number[v] = _mm512_load_si512(&numbers[16 * v]);
        lanes.depth[v] = _mm512_load_si512(&depths[16 * v]);
        lanes.top[v] = _mm512_set1_ps(LOWEST);
        lanes.total[v] = _mm512_setzero_ps();
    }
    memset(own.out, 0, sizeof(float) * LANES * n.value_width);

    const int64_t shared = group.shared / TILE * TILE;  // the depth of the first tile that blocks do not have in common
    const Run* run = runs + group.first->first;
    if (shared) attend_tiles<Kind>(run->depth / TILE * TILE, shared, run, active, n, key, value, lanes, by, own);
    for (const Block* block = group.first; block < group.last; block++) {
        const int64_t from = block->query - group.query, after = block->depth + block->rows;
        active.all = block->rows == rows;
        active.shallowest = block->depth, active.deepest = after - 1;
        for (int v = 0; v < VECTORS; v++)
            active.lanes[v] = _mm512_cmpge_epi32_mask(lanes.number[v], _mm512_set1_epi32((int32_t)from)) &
                              _mm512_cmplt_epi32_mask(lanes.number[v], _mm512_set1_epi32((int32_t)(from + block->rows)));
        run = runs + block->first;
        const Run& last = runs[block->last - 1];
        const int64_t begin = run->depth / TILE * TILE, deepest = last.depth + last.end - last.start;
        attend_tiles<Kind>(begin > shared ? begin : shared, deepest < after ? deepest : after, run, active, n, key, value,
                           lanes, by, own);
    }
    write_group<Kind>(group, kv_head, n, lanes, out, lse, own);
}

template <class Kind, bool CAPPED, class Number = typename Kind::Number>
void attend(const void* query, const void* key, const void* value, void* out, float* lse, const int64_t* blocks,
            int64_t count, const int64_t* runs, const int64_t* sizes, int64_t threads, float factor, float cap) {
    const Sizes& n = *(const Sizes*)sizes;
    const Block *block = (const Block*)blocks, *end = block + count;
    std::vector<Group> groups;
    for (; block < end; block++) {
        if (!block->shared) {
            groups.push_back({block, block + 1, block->query, block->rows, 0});
            continue;
        }
        Group& group = groups.back();
        group.shared = group.last - group.first == 1 || block->shared < group.shared ? block->shared : group.shared;
        group.last++, group.rows += block->rows;
    }
    const int64_t units = (int64_t)groups.size() * n.kv_heads;
    const float scale = CAPPED ? 2 * factor / cap : factor;
    const Factors<CAPPED> by = {_mm512_set1_ps(scale), _mm512_set1_ps(cap * 1.44269504f)};
#pragma omp parallel num_threads((int)threads)
    {
        Scratch<Kind> own;
#pragma omp for schedule(dynamic, 1)
        for (int64_t unit = 0; unit < units; unit++)
            attend_group<Kind>(groups[unit / n.kv_heads], (const Run*)runs, unit % n.kv_heads, n,
                               (const Number*)query, (const Number*)key, (const Number*)value, (Number*)out, lse, by,
                               own);
    }
}

}  // namespace

// query, key, value, out: float32, or bfloat16 if `halves`, with the strides in `sizes`; lse: float32 [heads, tokens].
// `factor`: scale * log2(e). `cap`: the soft cap of scores; 0: none.
extern "C" void prefill_forest_attention(const void* query, const void* key, const void* value, void* out, float* lse,
                                         const int64_t* blocks, int64_t count, const int64_t* runs,
                                         const int64_t* sizes, int64_t threads, float factor, float cap,
                                         int64_t halves) {
    const auto plain = halves ? attend<Bfloat16, false> : attend<Float32, false>;
    const auto capped = halves ? attend<Bfloat16, true> : attend<Float32, true>;
    (cap > 0 ? capped : plain)(query, key, value, out, lse, blocks, count, runs, sizes, threads, factor, cap);
}
