// Attention over a forest in bfloat16 and float32, on CPUs.
//
// A block is some consecutive queries of one node, those of all heads that share a K,V head beside each other: LANES
// rows. They lie along the lanes of the vectors. So the softmax needs no sums across lanes, and scores never leave the
// core: a tile of keys is scored, raised to powers of two, and multiplied with its values before the next one is looked
// at. Scores, maxima, sums and the output are float32.
//
// Short blocks that follow one another fill the lanes together: the tiles that all of them see are looked at once, and
// those of each block with the lanes of the others left as they are. Groups of blocks that follow one another take
// turns with some tiles at a time, which are prepared once and stay in the core's second cache meanwhile.
//
// A query's result has the same bits whatever it is computed with. Tiles begin at depths that are multiples of TILE,
// and a key's place in its tile follows from its depth, wherever it lies in memory. Lanes never meet, and a lane adds
// exactly nothing for keys that its query does not see.
//
// Vectors are as wide as the processor's. What is multiplied comes in words of 32 bits: a float32, or a pair of
// bfloat16 where the processor has products of them (PAIRS). Elsewhere bfloat16 becomes float32 as it is loaded. With
// AMX, the products of pairs are those of tiles of 16 rows of 16 words.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif
#if defined(__AMX_BF16__) || defined(__AMXBF16__)  // GCC, and older Clang
#define WITH_AMX
#endif

namespace {

#if defined(__AVX512F__)
constexpr int WIDE = 16, KEYS = 6, ACROSS = 4;  // scores of so many keys for so many vectors at once
#elif defined(__AVX2__)
constexpr int WIDE = 8, KEYS = 6, ACROSS = 2;
#else
constexpr int WIDE = 4, KEYS = 6, ACROSS = 4;
#endif
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool PAIRS = true;
#else
constexpr bool PAIRS = false;
#endif
#if defined(WITH_AMX)
constexpr bool AMX = true;
#else
constexpr bool AMX = false;
#endif

constexpr int LANES = 64, VECTORS = LANES / WIDE, TILE = 96, DIMS = 4;
constexpr int TOGETHER = 8, PREPARED = 16, ROOM = 128 << 10;  // groups; tiles, and their bytes
constexpr float LOWEST = -1e30f;

typedef float Floats __attribute__((vector_size(4 * WIDE), may_alias));
typedef int32_t Words __attribute__((vector_size(4 * WIDE), may_alias));

struct Block {  // int64 in Python
    // Number in the chunk, and count; depth of the first query; its runs of keys are first:last; the depth up to which
    // it shares keys with the block before it, if it is computed with that one, else 0.
    int64_t query, rows, depth, first, last, shared;
};
struct Run {
    int64_t start, end, depth;  // of keys in the buffer; the depth of the first
};

// Numbers in a word; keys that are scored at once, and added at once; whether products are those of AMX.
struct Float32 {
    typedef float Number;
    static constexpr int PER_WORD = 1, SCORED = KEYS, ADDED = 2;
    static constexpr bool TILES = false, EXACT = true;
};
struct Bfloat16 {
    typedef uint16_t Number;
    static constexpr int PER_WORD = PAIRS ? 2 : 1, SCORED = AMX ? 32 : KEYS, ADDED = AMX ? 32 : 2;
    static constexpr bool TILES = AMX, EXACT = false;
};

template <class Kind>
inline int words_of(int64_t width) {  // of a row of numbers; tiles take 16 at a time
    const int words = (int)width / Kind::PER_WORD;
    return Kind::TILES ? (words + 15) / 16 * 16 : words;
}

inline Floats all(float x) { return x - Floats{}; }
inline Words all(int32_t x) { return x - Words{}; }

// The operations for which compilers' own vectors do not do.
#if defined(__AVX512F__)
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }  // b if one is no number
inline bool any_above(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
#elif defined(__AVX2__)
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline bool any_above(Floats a, Floats b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)); }
#elif defined(__ARM_NEON)
inline Floats multiply_add(Floats a, Floats b, Floats c) {
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
inline Floats larger(Floats a, Floats b) { return (Floats)vmaxq_f32((float32x4_t)a, (float32x4_t)b); }
inline bool any_above(Floats a, Floats b) { return vmaxvq_u32(vcgtq_f32((float32x4_t)a, (float32x4_t)b)); }
#endif
#if defined(__AVX512BF16__)
inline Floats multiply_halves(Words a, Words b, Floats sum) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
inline Floats multiply_halves(Words a, Words b, Floats sum) {
    return (Floats)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
#else
inline Floats multiply_halves(Words a, Words b, Floats sum) { return multiply_add((Floats)a, (Floats)b, sum); }
#endif

// Two powers rounded to bfloat16: halves up, which for them is the nearest.
inline Words pairs(Floats even, Floats odd) {
    return ((Words)even + 0x8000) >> 16 | (((Words)odd + 0x8000) & (int32_t)0xffff0000);
}

// The nearest whole number as the last bits of a float32, and as one; 2 to the power of it, times y.
constexpr float ROUND = 12582912;  // 1.5 * 2^23
inline Floats times_power(Floats y, Floats rounded) { return (Floats)((Words)y + ((Words)rounded << 23)); }

template <bool EXACT>
inline Floats power_of_two(Floats x) {  // within 1e-7 of it, or 3e-6; 0 far below, 1 of 0
    x = larger(all(-127.0f), x);        // of which the exponent is that of 0
    const Floats rounded = x + ROUND, part = x - (rounded - ROUND);
    Floats y;
    if (EXACT) {
        y = all(1.32546024e-3f);
        y = multiply_add(y, part, all(9.67199918e-3f));
        y = multiply_add(y, part, all(5.55077824e-2f));
        y = multiply_add(y, part, all(2.40222319e-1f));
        y = multiply_add(y, part, all(6.93146930e-1f));
    } else {
        y = all(9.58104707e-3f);
        y = multiply_add(y, part, all(5.59059710e-2f));
        y = multiply_add(y, part, all(2.40241461e-1f));
        y = multiply_add(y, part, all(6.93124328e-1f));
    }
    return times_power(multiply_add(y, part, all(1.0f)), rounded);
}

inline Floats multiply_words(Floats sum, Words a, Words b, Float32) { return multiply_add((Floats)a, (Floats)b, sum); }
inline Floats multiply_words(Floats sum, Words a, Words b, Bfloat16) { return multiply_halves(a, b, sum); }

// What brings products to scores; with a soft cap `scale` brings them to where a power of two is e^(2 score / cap).
template <bool CAPPED>
struct Factors {
    Floats scale, cap;
};

inline Floats scaled(Floats score, const Factors<false>& by) { return score * by.scale; }

inline Floats scaled(Floats score, const Factors<true>& by) {
    // tanh(x) = p / (p + 2) with p = e^2x - 1, which is computed without adding the 1: a score that is small beside the
    // cap is as exact as a large one. No p above 2^30 changes anything.
    score = larger(all(-126.0f), -larger(all(-30.0f), -score * by.scale));
    const Floats rounded = score + ROUND, part = score - (rounded - ROUND);
    Floats y = all(1.54531629e-4f);  // (2^part - 1) / part within 1.3e-7 of it
    y = multiply_add(y, part, all(1.33908634e-3f));
    y = multiply_add(y, part, all(9.61808256e-3f));
    y = multiply_add(y, part, all(5.55035711e-2f));
    y = multiply_add(y, part, all(2.40226508e-1f));
    y = multiply_add(y, part, all(6.93147188e-1f));
    const Floats power = times_power(all(1.0f), rounded);
    const Floats less = multiply_add(y * part, power, power - 1.0f);
    return by.cap * less / (less + 2.0f);
}

#if defined(WITH_AMX)
// Everything is in memory: GCC does not know that intrinsics of tiles read it.
inline void settle(const void* there) { __asm__ volatile("" : : "r"(there) : "memory"); }

// Products of 16 rows of words, with `step` words between them, and columns of words for all lanes. They are added to
// `sums` [16][LANES], or replace them. Tiles 0 to 3 are sums: as many as are needed to wait for none.
inline void multiply_tiles(const uint32_t* rows, int step, const uint32_t (*columns)[LANES], int words, float* sums,
                           bool add) {
    constexpr int LINE = 4 * LANES;
    settle(rows);
    if (add) {
        _tile_loadd(0, sums, LINE);
        _tile_loadd(1, sums + 16, LINE);
        _tile_loadd(2, sums + 32, LINE);
        _tile_loadd(3, sums + 48, LINE);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int w = 0; w < words; w += 16) {
        _tile_loadd(4, rows + w, 4 * step);
        _tile_loadd(5, columns[w], LINE);
        _tile_loadd(6, columns[w] + 16, LINE);
        _tile_loadd(7, columns[w] + 32, LINE);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(5, columns[w] + 48, LINE);
        _tile_dpbf16ps(1, 4, 6);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, sums, LINE);
    _tile_stored(1, sums + 16, LINE);
    _tile_stored(2, sums + 32, LINE);
    _tile_stored(3, sums + 48, LINE);
}
#endif

// Scores of KEYS keys for the lanes from one on.
template <class Kind, bool CAPPED>
inline void score_keys(const uint32_t* keys, const uint32_t* query, int words, int lane, float (*scores)[LANES],
                       const Factors<CAPPED>& by) {
    Floats sum[KEYS][ACROSS];
    for (int k = 0; k < KEYS; k++)
        for (int v = 0; v < ACROSS; v++) sum[k][v] = Floats{};
    for (int w = 0; w < words; w++) {
        Words some[ACROSS];
        for (int v = 0; v < ACROSS; v++) some[v] = *(const Words*)(query + w * LANES + lane + WIDE * v);
        for (int k = 0; k < KEYS; k++) {
            const Words key = all((int32_t)keys[k * words + w]);
            for (int v = 0; v < ACROSS; v++) sum[k][v] = multiply_words(sum[k][v], some[v], key, Kind());
        }
    }
    for (int k = 0; k < KEYS; k++)
        for (int v = 0; v < ACROSS; v++) *(Floats*)&scores[k][lane + WIDE * v] = scaled(sum[k][v], by);
}

// The lanes that a tile is for: those of one block, or all.
struct Active {
    Words lanes[VECTORS];
    bool all;
    int64_t shallowest, deepest;  // depths of their queries
};

// Powers of a tile's scores, less the highest so far, on their way: those of two keys for a vector of lanes at a time.
// They need other parts of the core than products, and go beside those of the tile before.
struct Rising {
    const float (*scores)[LANES];
    uint32_t (*powers)[LANES];
    Floats top[VECTORS], sum[VECTORS];
    int next, count;
};

template <class Kind>
inline void raise_next(Rising& to) {
    const int v = to.next % VECTORS, k = to.next / VECTORS * 2;
    to.next++;
    const Floats even = power_of_two<Kind::EXACT>(*(const Floats*)&to.scores[k][WIDE * v] - to.top[v]);
    const Floats odd = power_of_two<Kind::EXACT>(*(const Floats*)&to.scores[k + 1][WIDE * v] - to.top[v]);
    to.sum[v] += even + odd;
    if (Kind::PER_WORD == 2) {
        *(Words*)&to.powers[k / 2][WIDE * v] = pairs(even, odd);
    } else {
        *(Floats*)&to.powers[k][WIDE * v] = even;
        *(Floats*)&to.powers[k + 1][WIDE * v] = odd;
    }
}

// The output of DIMS numbers of the values, for the active lanes from one on, with a tile of so many words of keys.
// After each `step` words two keys of the next tile rise.
template <class Kind>
inline void add_values(const uint32_t* values, int width, const uint32_t (*powers)[LANES], int words, int lane,
                       float* out, const Active& active, Rising& rising, int step) {
    Floats sum[DIMS][ACROSS];
    for (int d = 0; d < DIMS; d++)
        for (int v = 0; v < ACROSS; v++) sum[d][v] = *(Floats*)(out + d * LANES + lane + WIDE * v);
    for (int w = 0; w < words;) {
        for (const int until = w + step < words ? w + step : words; w < until; w++) {
            Words power[ACROSS];
            for (int v = 0; v < ACROSS; v++) power[v] = *(const Words*)&powers[w][lane + WIDE * v];
            for (int d = 0; d < DIMS; d++) {
                const Words value = all((int32_t)values[w * width + d]);
                for (int v = 0; v < ACROSS; v++) sum[d][v] = multiply_words(sum[d][v], power[v], value, Kind());
            }
        }
        if (rising.next < rising.count) raise_next<Kind>(rising);
    }
    for (int d = 0; d < DIMS; d++)  // the power of another lane is 0, but the value may be no number
        for (int v = 0; v < ACROSS; v++) {
            Floats& to = *(Floats*)(out + d * LANES + lane + WIDE * v);
            to = active.all ? sum[d][v] : active.lanes[lane / WIDE + v] ? sum[d][v] : to;
        }
}

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

template <class Kind, class Number = typename Kind::Number>
inline void copy_words(uint32_t* to, const Number* from, int width) {
    for (int i = 0; i < width; i += 16)
        if (Kind::PER_WORD * sizeof(Number) == 4)
            memcpy(to + i / Kind::PER_WORD, from + i, 16 * sizeof(Number));
        else
            for (int j = i; j < i + 16; j++) to[j] = (uint32_t)from[j] << 16;
}

// A tile's keys as words, key by key, and its values; those of pairs of keys number by number. For AMX the words of a
// number follow one another.
struct Prepared {
    Tile tile;
    uint32_t *keys, *values;
};

template <class Kind, class Number = typename Kind::Number>
void prepare(Prepared& to, const Tile& tile, const Sizes& n, const Number* key, const Number* value) {
    const Tile& has = to.tile;
    // Another path's keys behind the last one, which complete a word or a tile, may be no numbers.
    const bool whole = tile.count % Kind::ADDED == 0;
    if (has.begin <= tile.begin && (has.count == tile.count || (has.count > tile.count && whole)) &&
        !memcmp(has.at + tile.begin, tile.at + tile.begin, sizeof(int64_t) * (tile.count - tile.begin)))
        return;
    to.tile = tile;
    const int width = (int)n.value_width, words = words_of<Kind>(n.width);
    // Numbers that are not there take those of one that is.
    for (int k = 0; k < tile.begin; k++) to.tile.at[k] = tile.at[tile.begin];
    const int count = (tile.count + Kind::SCORED - 1) / Kind::SCORED * Kind::SCORED;
    for (int k = tile.count; k < count; k++) to.tile.at[k] = tile.at[tile.count - 1];
    for (int k = 0; k < count; k++) {
        const Number* row = key + to.tile.at[k] * n.key_token;
        copy_words<Kind>(to.keys + k * words, row, (int)n.width);
        memset(to.keys + k * words + n.width / Kind::PER_WORD, 0, 4 * (words - n.width / Kind::PER_WORD));
        for (int i = 0; i < n.width; i += 64 / sizeof(Number)) __builtin_prefetch(row + TILE * n.key_token + i);
    }
    for (int k = 0; k < count; k += Kind::PER_WORD) {
        const Number* even = value + to.tile.at[k] * n.value_token;
        const Number* odd = value + to.tile.at[k + Kind::PER_WORD - 1] * n.value_token;
        for (int i = 0; i < width; i += 64 / sizeof(Number)) {
            __builtin_prefetch(even + TILE * n.value_token + i);
            if (Kind::PER_WORD == 2) __builtin_prefetch(odd + TILE * n.value_token + i);
        }
        uint32_t* row = to.values + k / Kind::PER_WORD * width;
        if (Kind::PER_WORD == 1)
            copy_words<Kind>(row, even, width);
        else
            for (int i = 0; i < width; i += 16) {
                uint32_t both[16];
                for (int j = 0; j < 16; j++) both[j] = (uint32_t)even[i + j] | (uint32_t)odd[i + j] << 16;
                if (Kind::TILES)
                    for (int j = 0; j < 16; j++) to.values[(i + j) * TILE / 2 + k / 2] = both[j];
                else
                    memcpy(row + i, both, 64);
            }
    }
}

// Blocks that are computed together.
struct Group {
    const Block *first, *last;
    int64_t query, rows, shared;  // of all their queries; the depth up to which they see the same keys
};

#if defined(__AVX512F__)
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
#endif

// `words` rows of 16, with `step` words between their starts, from 16 columns; a null one is of zeros.
inline void turn(const void* const* columns, int words, uint32_t* rows, int step) {
#if defined(__AVX512F__)
    const __mmask16 there = (__mmask16)((1u << words) - 1);
    __m512i part[16];
    for (int i = 0; i < 16; i++)
        part[i] = columns[i] ? _mm512_maskz_loadu_epi32(there, columns[i]) : _mm512_setzero_si512();
    transpose(part);
    for (int i = 0; i < words; i++) _mm512_store_si512(rows + i * step, part[i]);
#else
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < words; j++) rows[j * step + i] = columns[i] ? ((const uint32_t*)columns[i])[j] : 0;
#endif
}

// The softmax's running maximum and sum of each lane.
struct Running {
    Words number[VECTORS], depth[VECTORS];  // of the lane's query: its number in the group, its depth
    Floats top[VECTORS], total[VECTORS];
};

// A group on its way.
struct State {
    Running lanes;
    Active active;
    uint32_t* query;  // [words][LANES]
    float* out;       // [value width][LANES]
    const Run* run;
    int64_t depth, end;  // of the next tile; where those that all lanes see end
};

// Where the numbers of each lane of a group begin; lane = head * rows + query.
template <class Number>
inline void find_rows(const Group& group, int64_t kv_head, const Sizes& n, Number* from, int64_t head_step,
                      int64_t token_step, Number** rows) {
    const int64_t heads = n.heads / n.kv_heads;
    for (int64_t head = 0; head < heads; head++)
        for (int64_t i = 0; i < group.rows; i++)
            *rows++ = from + (kv_head * heads + head) * head_step + (group.query + i) * token_step;
}

// Asks for the numbers of the lanes of a group, so that reading or writing them waits for memory but once.
template <int WRITE, class Number>
inline void expect_rows(Number* const* rows, int64_t width) {
    for (int lane = 0; lane < LANES && rows[lane]; lane++)
        for (int i = 0; i < width; i += 64 / sizeof(Number)) __builtin_prefetch(rows[lane] + i, WRITE, 2);
}

template <class Kind, class Number = typename Kind::Number>
void load_queries(const Group& group, int64_t kv_head, const Sizes& n, const Number* query, uint32_t* to) {
    const int words = (int)n.width / Kind::PER_WORD;
    memset(to + words * LANES, 0, 4 * LANES * (words_of<Kind>(n.width) - words));
    const Number* rows[LANES] = {};
    find_rows(group, kv_head, n, query, n.query_head, n.query_token, rows);
    for (int lane = 0; lane < LANES; lane += 16)
        for (int w = 0; w < words; w += 16) {
            const int some = words - w < 16 ? words - w : 16;
            const void* columns[16];
            uint32_t widened[16][16];
            for (int i = 0; i < 16; i++) {
                const Number* row = rows[lane + i];
                columns[i] = row ? row + Kind::PER_WORD * w : row;
                if (!row || Kind::PER_WORD * sizeof(Number) == 4) continue;
                copy_words<Kind>(widened[i], row + w, 16);
                columns[i] = widened[i];
            }
            turn(columns, some, to + w * LANES + lane, LANES);
        }
}

struct Scratch {
    alignas(64) float scores[TILE][LANES];
    alignas(64) uint32_t powers[2][TILE][LANES];  // of a tile, and of the next one
};

// Scores of a tile that begins at a depth; those of keys that a lane's query does not see are -inf.
template <class Kind, bool CAPPED>
void score_tile(const Tile& tile, const uint32_t* keys, int64_t depth, const State& state, const Sizes& n, Scratch& own,
                const Factors<CAPPED>& by) {
    const Floats nothing = all(-__builtin_inff());
    const Active& active = state.active;
    const int words = words_of<Kind>(n.width), padded = (tile.count + Kind::ADDED - 1) / Kind::ADDED * Kind::ADDED;
    auto row = [&](int k, int v) -> Floats& { return *(Floats*)&own.scores[k][WIDE * v]; };
#if defined(WITH_AMX)
    for (int b = tile.begin / 16 * 16; Kind::TILES && b < tile.count; b += 16) {
        multiply_tiles(keys + b * words, words, (const uint32_t(*)[LANES])state.query, words, own.scores[b], false);
        for (int k = b; k < b + 16; k++)
            for (int v = 0; v < VECTORS; v++) row(k, v) = scaled(row(k, v), by);
    }
#endif
    for (int b = tile.begin / KEYS * KEYS; !Kind::TILES && b < tile.count; b += KEYS)
        for (int lane = 0; lane < LANES; lane += WIDE * ACROSS)
            score_keys<Kind>(keys + b * words, state.query, words, lane, own.scores + b, by);
    for (int k = 0; k < tile.begin; k++)
        for (int v = 0; v < VECTORS; v++) row(k, v) = nothing;
    for (int k = tile.count; k < padded; k++)
        for (int v = 0; v < VECTORS; v++) row(k, v) = nothing;
    // Key k is the future of queries above it, and has left the window of those `window` below it.
    for (int k = tile.begin; k < tile.count; k++) {
        if (depth + k > active.shallowest)
            for (int v = 0; v < VECTORS; v++)
                row(k, v) = state.lanes.depth[v] < (int32_t)(depth + k) ? nothing : row(k, v);
        if (n.window && depth + k + n.window <= active.deepest)
            for (int v = 0; v < VECTORS; v++)
                row(k, v) = state.lanes.depth[v] >= (int32_t)(depth + k + n.window) ? nothing : row(k, v);
    }
    if (!active.all)
        for (int k = tile.begin; k < tile.count; k++)
            for (int v = 0; v < VECTORS; v++) row(k, v) = active.lanes[v] ? row(k, v) : nothing;
}

// Makes a tile's scores ready to rise.
inline void find_highest(int count, const Running& lanes, Rising& to) {
    for (int v = 0; v < VECTORS; v++) to.top[v] = lanes.top[v], to.sum[v] = Floats{};
    for (int k = 0; k < count; k++)
        for (int v = 0; v < VECTORS; v++) to.top[v] = larger(to.top[v], *(const Floats*)&to.scores[k][WIDE * v]);
    to.next = 0, to.count = count / 2 * VECTORS;
}

// What was summed before fades as the maximum rises.
inline void fade(int width, const Rising& risen, State& state) {
    Running& lanes = state.lanes;
    for (int v = 0; v < VECTORS; v++) {
        if (any_above(risen.top[v], lanes.top[v])) {
            const Floats by = power_of_two<true>(lanes.top[v] - risen.top[v]);
            lanes.total[v] *= by;
            for (int d = 0; d < width; d++) *(Floats*)(state.out + d * LANES + WIDE * v) *= by;
            lanes.top[v] = risen.top[v];
        }
        lanes.total[v] += risen.sum[v];
    }
}

inline void store_rounded(float* to, const uint32_t* from) { memcpy(to, from, 64); }
inline void store_rounded(uint16_t* to, const uint32_t* from) {
    typedef uint16_t Halves __attribute__((vector_size(2 * WIDE), may_alias, aligned(2)));
    for (int i = 0; i < 16; i += WIDE) {
        const Words bits = *(const Words*)(from + i), nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        const Words number = (bits & 0x7fffffff) > 0x7f800000 ? all(0x7fc0) : nearest;
        *(Halves*)(to + i) = __builtin_convertvector(number, Halves);
    }
}

template <class Number>
void write_group(const Group& group, int64_t kv_head, const Sizes& n, const State& state, Number* out, float* lse) {
    const int width = (int)n.value_width;
    alignas(64) float sums[LANES], tops[LANES];
    Number* rows[LANES] = {};
    float* log_sums[LANES] = {};
    find_rows(group, kv_head, n, out, n.out_head, n.out_token, rows);
    find_rows(group, kv_head, n, lse, n.lse_head, 1, log_sums);
    expect_rows<1>(rows, width);
    for (int v = 0; v < VECTORS; v++) {
        const Floats share = all(1.0f) / state.lanes.total[v];
        for (int d = 0; d < width; d++) *(Floats*)(state.out + d * LANES + WIDE * v) *= share;
        *(Floats*)&sums[WIDE * v] = state.lanes.total[v];
        *(Floats*)&tops[WIDE * v] = state.lanes.top[v];
    }
    alignas(64) uint32_t turned[16][16];
    for (int lane = 0; lane < LANES && rows[lane]; lane += 16)
        for (int d = 0; d < width; d += 16) {
            const void* columns[16];
            for (int i = 0; i < 16; i++) columns[i] = state.out + (d + i) * LANES + lane;
            turn(columns, 16, turned[0], 16);
            for (int i = 0; i < 16 && rows[lane + i]; i++) store_rounded(rows[lane + i] + d, turned[i]);
        }
    for (int lane = 0; lane < LANES && rows[lane]; lane++)
        *log_sums[lane] = (tops[lane] + __builtin_log2f(sums[lane])) * 0.69314718f;
}

// Memory of a thread.
struct Room {
    Scratch scratch;
    State states[TOGETHER];
    Prepared prepared[PREPARED];
    int tiles;  // of them
    uint32_t* memory;

    Room(const Sizes& n, int64_t words, int per_word) {
        const int64_t query = words * LANES, out = n.value_width * LANES;
        const int64_t keys = words * TILE, values = n.value_width * TILE / per_word;
        const int64_t most = ROOM / 4 / (keys + values);
        tiles = (int)(most < 2 ? 2 : most < PREPARED ? most : PREPARED);
        memory = (uint32_t*)aligned_alloc(64, 4 * (TOGETHER * (query + out) + tiles * (keys + values)));
        uint32_t* at = memory;
        for (State& each : states) each.query = at, each.out = (float*)(at + query), at += query + out;
        for (int i = 0; i < tiles; i++) prepared[i].keys = at, prepared[i].values = at + keys, at += keys + values;
    }
    ~Room() { free(memory); }
};

// Attention of the active lanes over the tiles of these runs from a depth on. No key is at `end` or deeper.
template <class Kind, bool CAPPED, class Number = typename Kind::Number>
void attend_tiles(int64_t depth, int64_t until, int64_t end, const Run*& run, State& state, const Sizes& n,
                  const Number* key, const Number* value, const Factors<CAPPED>& by, Room& room) {
    const int width = (int)n.value_width, calls = width / DIMS * (VECTORS / ACROSS);
    const Prepared* before = nullptr;  // has its powers, and is to be added
    int words = 0, at = 0;
    Rising rising;
    rising.scores = room.scratch.scores;
    auto add = [&](int step) {
#if defined(WITH_AMX)
        for (int d = 0; Kind::TILES && d < width; d += 16) {
            float *sums = state.out + d * LANES, before_it[16 * LANES];
            if (!state.active.all) memcpy(before_it, sums, sizeof(before_it));
            multiply_tiles(before->values + d * TILE / 2, TILE / 2, room.scratch.powers[at], words, sums, true);
            for (int i = 0; i < 16 * LANES && !state.active.all; i += WIDE) {
                Floats& to = *(Floats*)(sums + i);
                Floats old;
                memcpy(&old, before_it + i, sizeof(old));
                to = state.active.lanes[i % LANES / WIDE] ? to : old;
            }
            for (int i = 0; i < 16 && rising.next < rising.count; i++) raise_next<Kind>(rising);
        }
#endif
        for (int d = 0; !Kind::TILES && d < width; d += DIMS)
            for (int lane = 0; lane < LANES; lane += WIDE * ACROSS)
                add_values<Kind>(before->values + d, width, room.scratch.powers[at], words, lane, state.out + d * LANES,
                                 state.active, rising, step);
    };
    for (; depth < until && depth < end; depth += TILE) {
        Tile tile;
        find_keys(tile, depth, end, run);
        Prepared& ready = room.prepared[depth / TILE % room.tiles];
        prepare<Kind>(ready, tile, n, key, value);
        score_tile<Kind>(tile, ready.keys, depth, state, n, room.scratch, by);
        const int padded = (tile.count + Kind::ADDED - 1) / Kind::ADDED * Kind::ADDED;
        rising.powers = room.scratch.powers[1 - at];
        find_highest(padded, state.lanes, rising);
        if (before) add(words * calls / rising.count > 1 ? words * calls / rising.count : 1);
        while (rising.next < rising.count) raise_next<Kind>(rising);
        fade(width, rising, state);
        before = &ready, words = padded / Kind::PER_WORD, at = 1 - at;
    }
    if (before) add(words);
}

template <class Kind, class Number = typename Kind::Number>
void begin_group(const Group& group, const Run* runs, int64_t kv_head, const Sizes& n, const Number* query, State& state) {
    const int rows = (int)group.rows, used = (int)(n.heads / n.kv_heads) * rows;
    load_queries<Kind>(group, kv_head, n, query, state.query);
    alignas(64) int32_t numbers[LANES], depths[LANES], by_number[LANES];
    Active& active = state.active;
    active.all = true, active.shallowest = INT64_MAX, active.deepest = 0;
    for (const Block* block = group.first; block < group.last; block++) {
        for (int i = 0; i < block->rows; i++) by_number[block->query - group.query + i] = (int32_t)(block->depth + i);
        if (block->depth < active.shallowest) active.shallowest = block->depth;
        if (block->depth + block->rows - 1 > active.deepest) active.deepest = block->depth + block->rows - 1;
    }
    for (int lane = 0, i = 0; lane < LANES; lane++, i = i + 1 < rows ? i + 1 : 0) {
        numbers[lane] = lane < used ? i : rows - 1;
        depths[lane] = by_number[numbers[lane]];
    }
    Running& lanes = state.lanes;
    for (int v = 0; v < VECTORS; v++) {
        lanes.number[v] = *(const Words*)&numbers[WIDE * v];
        lanes.depth[v] = *(const Words*)&depths[WIDE * v];
        lanes.top[v] = all(LOWEST);
        lanes.total[v] = Floats{};
    }
    memset(state.out, 0, sizeof(float) * LANES * n.value_width);
    state.run = runs + group.first->first;
    state.depth = state.run->depth / TILE * TILE;
    state.end = group.shared / TILE * TILE;  // the depth of the first tile that blocks do not have in common
    if (group.last - group.first == 1) {
        const Run& last = runs[group.first->last - 1];
        const int64_t deepest = last.depth + last.end - last.start, after = group.first->depth + rows;
        state.end = deepest < after ? deepest : after;
    }
}

template <class Kind, bool CAPPED, class Number = typename Kind::Number>
void attend_groups(const Group* groups, int count, const Run* runs, int64_t kv_head, const Sizes& n,
                   const Number* query, const Number* key, const Number* value, Number* out, float* lse,
                   const Factors<CAPPED>& by, Room& room) {
    key += kv_head * n.key_head;
    value += kv_head * n.value_head;
    for (int i = 0; i < room.tiles; i++) room.prepared[i].tile.count = -1;
    int64_t depth = INT64_MAX, end = 0;
    for (int g = 0; g < count; g++) {
        const Number* rows[LANES] = {};
        find_rows(groups[g], kv_head, n, query, n.query_head, n.query_token, rows);
        expect_rows<0>(rows, n.width);
    }
    for (int g = 0; g < count; g++) {
        State& state = room.states[g];
        begin_group<Kind>(groups[g], runs, kv_head, n, query, state);
        if (state.depth < depth) depth = state.depth;
        if (state.end > end) end = state.end;
    }
    const int64_t step = TILE * room.tiles;
    for (depth = depth / step * step; depth < end; depth += step)
        for (int g = count - 1; g >= 0; g--) {  // the last one sees most of a tile
            State& state = room.states[g];
            const int64_t from = state.depth > depth ? state.depth : depth;
            attend_tiles<Kind>(from, depth + step, state.end, state.run, state, n, key, value, by, room);
        }
    for (int g = 0; g < count; g++) {
        const Group& group = groups[g];
        State& state = room.states[g];
        const int64_t shared = state.end;
        Active& active = state.active;
        for (const Block* block = group.first; block < group.last && group.last - group.first > 1; block++) {
            const int64_t from = block->query - group.query, after = block->depth + block->rows;
            active.all = false;
            active.shallowest = block->depth, active.deepest = after - 1;
            for (int v = 0; v < VECTORS; v++)
                active.lanes[v] = (Words)(state.lanes.number[v] >= (int32_t)from) &
                                  (Words)(state.lanes.number[v] < (int32_t)(from + block->rows));
            const Run *run = runs + block->first, &last = runs[block->last - 1];
            const int64_t begin = run->depth / TILE * TILE, deepest = last.depth + last.end - last.start;
            attend_tiles<Kind>(begin > shared ? begin : shared, INT64_MAX, deepest < after ? deepest : after, run, state,
                               n, key, value, by, room);
        }
        write_group(group, kv_head, n, state, out, lse);
    }
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
    const int64_t all_groups = (int64_t)groups.size();
    const int64_t share = threads > 1 ? all_groups * n.kv_heads / (4 * threads) : TOGETHER;
    const int64_t together = share < 1 ? 1 : share < TOGETHER ? share : TOGETHER;
    const int64_t units = (all_groups + together - 1) / together * n.kv_heads;
    const float scale = CAPPED ? 2 * factor / cap : factor;
    const Factors<CAPPED> by = {all(scale), all(cap * 1.44269504f)};
#pragma omp parallel num_threads((int)threads)
    {
        Room room(n, words_of<Kind>(n.width), Kind::PER_WORD);
#if defined(WITH_AMX)
        struct {
            uint8_t palette = 1, from = 0, nothing[14] = {};
            uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } shapes;  // of the tiles
        settle(&shapes);
        _tile_loadconfig(&shapes);
#endif
#pragma omp for schedule(dynamic, 1)
        for (int64_t unit = 0; unit < units; unit++) {
            const int64_t at = unit / n.kv_heads * together, left = all_groups - at;
            attend_groups<Kind>(&groups[at], (int)(left < together ? left : together), (const Run*)runs,
                                unit % n.kv_heads, n, (const Number*)query, (const Number*)key, (const Number*)value,
                                (Number*)out, lse, by, room);
        }
#if defined(WITH_AMX)
        _tile_release();
#endif
    }
}

}  // namespace

// The instructions that were compiled in.
extern "C" const char* prefill_forest_form() {
#if defined(WITH_AMX)
    return "AMX";
#elif defined(__AVX512BF16__)
    return "AVX512-BF16";
#elif defined(__AVX512F__)
    return "AVX-512";
#elif defined(__AVX2__)
    return "AVX2";
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return "NEON with BF16";
#else
    return "NEON";
#endif
}

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
