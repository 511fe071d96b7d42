// Numbers of GGUF's blocks, in float32. They are those of the package `gguf`, bit for bit: the same products and sums in
// the same order, so nothing may be fused.
//
// The layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h

#include <stdint.h>
#include <string.h>

namespace {

inline float half(const uint8_t* from) {
    uint16_t bits;
    memcpy(&bits, from, 2);
    const uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff;
    uint32_t found = (rest << 13) + (112u << 23);
    float number;
    if (rest >= 0x7c00) found += 112u << 23;  // infinite, or no number
    memcpy(&number, &found, 4);
    if (rest < 0x400) number = (float)rest * 5.9604644775390625e-8f;  // 2 to the power of -24
    memcpy(&found, &number, 4);
    found |= sign;
    memcpy(&number, &found, 4);
    return number;
}

inline void halves_of_bytes(const uint8_t* from, int count, uint8_t* low, uint8_t* high) {
    for (int i = 0; i < count; i++) low[i] = from[i] & 15, high[i] = from[i] >> 4;
}

constexpr int8_t LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t FOUR_BITS[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

struct Q4_0 {
    static constexpr int KIND = 2, NUMBERS = 32, BYTES = 18;
    static void unpack(const uint8_t* from, float* to) {
        uint8_t q[32];
        const float d = half(from);
        halves_of_bytes(from + 2, 16, q, q + 16);
        for (int i = 0; i < 32; i++) to[i] = d * (float)((int)q[i] - 8);
    }
};

struct Q4_1 {
    static constexpr int KIND = 3, NUMBERS = 32, BYTES = 20;
    static void unpack(const uint8_t* from, float* to) {
        uint8_t q[32];
        const float d = half(from), m = half(from + 2);
        halves_of_bytes(from + 4, 16, q, q + 16);
        for (int i = 0; i < 32; i++) to[i] = d * (float)q[i] + m;
    }
};

inline void five_bits(const uint8_t* fifth, const uint8_t* from, uint8_t* q) {
    uint32_t bits;
    memcpy(&bits, fifth, 4);
    halves_of_bytes(from, 16, q, q + 16);
    for (int i = 0; i < 32; i++) q[i] |= (bits >> i & 1) << 4;
}

struct Q5_0 {
    static constexpr int KIND = 6, NUMBERS = 32, BYTES = 22;
    static void unpack(const uint8_t* from, float* to) {
        uint8_t q[32];
        const float d = half(from);
        five_bits(from + 2, from + 6, q);
        for (int i = 0; i < 32; i++) to[i] = d * (float)((int)q[i] - 16);
    }
};

struct Q5_1 {
    static constexpr int KIND = 7, NUMBERS = 32, BYTES = 24;
    static void unpack(const uint8_t* from, float* to) {
        uint8_t q[32];
        const float d = half(from), m = half(from + 2);
        five_bits(from + 4, from + 8, q);
        for (int i = 0; i < 32; i++) to[i] = d * (float)q[i] + m;
    }
};

struct Q8_0 {
    static constexpr int KIND = 8, NUMBERS = 32, BYTES = 34;
    static void unpack(const uint8_t* from, float* to) {
        const float d = half(from);
        for (int i = 0; i < 32; i++) to[i] = (float)(int8_t)from[2 + i] * d;
    }
};

struct Q2_K {
    static constexpr int KIND = 10, NUMBERS = 256, BYTES = 84;
    static void unpack(const uint8_t* from, float* to) {
        const float d = half(from + 80), least = half(from + 82);
        for (int part = 0; part < 16; part++) {  // of 16 numbers
            const float scale = d * (float)(from[part] & 15), less = least * (float)(from[part] >> 4);
            const uint8_t* q = from + 16 + part / 8 * 32 + part % 2 * 16;
            const int shift = part % 8 / 2 * 2;
            for (int i = 0; i < 16; i++) to[16 * part + i] = scale * (float)(q[i] >> shift & 3) - less;
        }
    }
};

struct Q3_K {
    static constexpr int KIND = 11, NUMBERS = 256, BYTES = 110;
    static void unpack(const uint8_t* from, float* to) {
        const uint8_t *masks = from, *scales = from + 96;
        const float d = half(from + 108);
        for (int part = 0; part < 16; part++) {
            const int low = part < 8 ? scales[part] & 15 : scales[part - 8] >> 4;
            const int high = scales[8 + part % 4] >> part / 4 * 2 & 3;
            const float scale = d * (float)((low | high << 4) - 32);
            const uint8_t *q = from + 32 + part / 8 * 32 + part % 2 * 16, *mask = masks + part % 2 * 16;
            const int shift = part % 8 / 2 * 2, bit = part / 2;
            for (int i = 0; i < 16; i++)
                to[16 * part + i] = scale * (float)((q[i] >> shift & 3) - ((mask[i] >> bit & 1) ? 0 : 4));
        }
    }
};

// The scale and the least number of each eighth of a block, in 6 bits each.
struct Eighths {
    float scale[8], least[8];

    explicit Eighths(const uint8_t* from) {
        const float d = half(from), m = half(from + 2);
        const uint8_t *low = from + 4, *middle = from + 8, *high = from + 12;
        for (int i = 0; i < 4; i++) {
            scale[i] = d * (float)(low[i] & 63);
            least[i] = m * (float)(middle[i] & 63);
            scale[4 + i] = d * (float)((high[i] & 15) | (low[i] >> 2 & 48));
            least[4 + i] = m * (float)(high[i] >> 4 | (middle[i] >> 2 & 48));
        }
    }
};

struct Q4_K {
    static constexpr int KIND = 12, NUMBERS = 256, BYTES = 144;
    static void unpack(const uint8_t* from, float* to) {
        const Eighths of(from);
        for (int pair = 0; pair < 4; pair++) {
            const uint8_t* q = from + 16 + 32 * pair;
            for (int i = 0; i < 32; i++) {
                to[64 * pair + i] = of.scale[2 * pair] * (float)(q[i] & 15) - of.least[2 * pair];
                to[64 * pair + 32 + i] = of.scale[2 * pair + 1] * (float)(q[i] >> 4) - of.least[2 * pair + 1];
            }
        }
    }
};

struct Q5_K {
    static constexpr int KIND = 13, NUMBERS = 256, BYTES = 176;
    static void unpack(const uint8_t* from, float* to) {
        const Eighths of(from);
        const uint8_t* fifth = from + 16;
        for (int part = 0; part < 8; part++) {
            const uint8_t* q = from + 48 + part / 2 * 32;
            const int shift = part % 2 * 4;
            for (int i = 0; i < 32; i++)
                to[32 * part + i] =
                    of.scale[part] * (float)((q[i] >> shift & 15) | (fifth[i] >> part & 1) << 4) - of.least[part];
        }
    }
};

struct Q6_K {
    static constexpr int KIND = 14, NUMBERS = 256, BYTES = 210;
    static void unpack(const uint8_t* from, float* to) {
        const float d = half(from + 208);
        for (int part = 0; part < 8; part++) {  // of 32 numbers, with a scale for each 16
            const uint8_t *low = from + part / 4 * 64 + part % 2 * 32, *high = from + 128 + part / 4 * 32;
            const int of_low = part % 4 / 2 * 4, of_high = part % 4 * 2;
            const float first = d * (float)(int8_t)from[192 + 2 * part], second = d * (float)(int8_t)from[193 + 2 * part];
            for (int i = 0; i < 32; i++) {
                const int q = ((low[i] >> of_low & 15) | (high[i] >> of_high & 3) << 4) - 32;
                to[32 * part + i] = (i < 16 ? first : second) * (float)q;
            }
        }
    }
};

struct IQ4_NL {
    static constexpr int KIND = 20, NUMBERS = 32, BYTES = 18;
    static void unpack(const uint8_t* from, float* to) {
        const float d = half(from);
        for (int i = 0; i < 16; i++) {
            to[i] = d * (float)LEVELS[from[2 + i] & 15];
            to[16 + i] = d * (float)LEVELS[from[2 + i] >> 4];
        }
    }
};

struct IQ4_XS {
    static constexpr int KIND = 23, NUMBERS = 256, BYTES = 136;
    static void unpack(const uint8_t* from, float* to) {
        const float d = half(from);
        uint16_t high;
        memcpy(&high, from + 2, 2);
        for (int part = 0; part < 8; part++) {
            const int low = from[4 + part / 2] >> part % 2 * 4 & 15;
            const float scale = d * (float)((low | (high >> 2 * part & 3) << 4) - 32);
            const uint8_t* q = from + 8 + 16 * part;
            for (int i = 0; i < 16; i++) {
                to[32 * part + i] = scale * (float)LEVELS[q[i] & 15];
                to[32 * part + 16 + i] = scale * (float)LEVELS[q[i] >> 4];
            }
        }
    }
};

struct MXFP4 {
    static constexpr int KIND = 39, NUMBERS = 32, BYTES = 17;
    static void unpack(const uint8_t* from, float* to) {
        const uint32_t bits = from[0] < 2 ? 0x00200000u << from[0] : (uint32_t)(from[0] - 1) << 23;
        float d;
        memcpy(&d, &bits, 4);
        for (int i = 0; i < 16; i++) {
            to[i] = d * (float)FOUR_BITS[from[1 + i] & 15];
            to[16 + i] = d * (float)FOUR_BITS[from[1 + i] >> 4];
        }
    }
};

template <class Kind>
bool unpacks(int64_t kind, const uint8_t* from, int64_t blocks, int64_t threads, float* to) {
    if (kind != Kind::KIND) return false;
#pragma omp parallel for num_threads((int)threads) schedule(static) if (threads > 1)
    for (int64_t block = 0; block < blocks; block++)
        Kind::unpack(from + block * Kind::BYTES, to + block * Kind::NUMBERS);
    return true;
}

template <class... Kinds>
bool any_unpacks(int64_t kind, const uint8_t* from, int64_t blocks, int64_t threads, float* to) {
    return (unpacks<Kinds>(kind, from, blocks, threads, to) || ...);
}

}  // namespace

// Writes the numbers of `blocks` blocks of a kind, as GGUF counts kinds. 0: there is no such kind here.
extern "C" int64_t prefill_unpack_blocks(int64_t kind, const uint8_t* from, int64_t blocks, int64_t threads, float* to) {
    return any_unpacks<Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4>(
        kind, from, blocks, threads, to);
}
