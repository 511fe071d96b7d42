// The tile instructions of AMX that the kernels use, as Intel documents them (Software Developer's Manual, volume 2:
// LDTILECFG, TILELOADD, TILESTORED, TILEZERO, TDPBF16PS, TDPBSSD). What is undefined there, or raises an exception, aborts.

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
#define __AMX_TILE__ 1
#define _tile_loadconfig model_loadconfig
#define _tile_release model_release
#define _tile_loadd model_loadd
#define _tile_stored model_stored
#define _tile_zero model_zero
#define _tile_dpbf16ps model_dpbf16ps
#define _tile_dpbssd model_dpbssd

namespace {

struct ModelTile {
    int rows = 0, bytes = 0;  // none: not configured
    uint32_t words[16][16];
};
thread_local ModelTile model_tiles[8];

inline ModelTile& model_tile(int number) {
    if (number < 0 || number > 7 || !model_tiles[number].rows) abort();
    return model_tiles[number];
}

inline void model_zero(int number) { memset(model_tile(number).words, 0, sizeof(ModelTile::words)); }

inline void model_release() {
    for (ModelTile& each : model_tiles) each = ModelTile();
}

inline void model_loadconfig(const void* shapes) {
    const uint8_t* bytes = (const uint8_t*)shapes;
    if (bytes[0] != 1 || bytes[1]) abort();
    for (int i = 2; i < 16; i++)
        if (bytes[i]) abort();
    for (int i = 0; i < 16; i++) {
        const int width = bytes[16 + 2 * i] | bytes[17 + 2 * i] << 8, rows = bytes[48 + i];
        if (i < 8 ? width > 64 || rows > 16 || !width != !rows : width || rows) abort();
        if (i >= 8 || !rows) continue;
        model_tiles[i].rows = rows, model_tiles[i].bytes = width;
        model_zero(i);
    }
}

inline void model_loadd(int number, const void* base, int64_t stride) {
    ModelTile& to = model_tile(number);
    model_zero(number);
    for (int row = 0; row < to.rows; row++) memcpy(to.words[row], (const char*)base + row * stride, to.bytes);
}

inline void model_stored(int number, void* base, int64_t stride) {
    const ModelTile& from = model_tile(number);
    for (int row = 0; row < from.rows; row++) memcpy((char*)base + row * stride, from.words[row], from.bytes);
}

// Subnormal numbers are zeros, as what goes in and as what comes out; the default rounding is to the nearest, even.
inline float model_flushed(uint32_t bits) {
    if (!(bits & 0x7f800000)) bits &= 0x80000000;
    float number;
    memcpy(&number, &bits, 4);
    return number;
}
inline float model_flushed(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    return model_flushed(bits);
}

inline void model_check(int sums, int a, int b) {
    ModelTile &to = model_tile(sums), &left = model_tile(a), &right = model_tile(b);
    if (sums == a || sums == b || a == b) abort();
    if (to.rows != left.rows || to.bytes != right.bytes || left.bytes != 4 * right.rows) abort();
}

inline void model_dpbssd(int sums, int a, int b) {
    model_check(sums, a, b);
    ModelTile &to = model_tile(sums), &left = model_tile(a), &right = model_tile(b);
    for (int m = 0; m < to.rows; m++)
        for (int n = 0; n < to.bytes / 4; n++)
            for (int k = 0; k < left.bytes; k++) {
                const uint32_t x = left.words[m][k / 4] >> 8 * (k % 4), y = right.words[k / 4][n] >> 8 * (k % 4);
                to.words[m][n] += (int8_t)x * (int8_t)y;
            }
}

inline void model_dpbf16ps(int sums, int a, int b) {
    model_check(sums, a, b);
    ModelTile &to = model_tile(sums), &left = model_tile(a), &right = model_tile(b);
    for (int m = 0; m < to.rows; m++)
        for (int n = 0; n < to.bytes / 4; n++) {
            float even = 0, odd = 0;
            for (int k = 0; k < left.bytes / 4; k++) {
                const uint32_t x = left.words[m][k], y = right.words[k][n];
                even = model_flushed(__builtin_fmaf(model_flushed(x << 16), model_flushed(y << 16), even));
                odd = model_flushed(
                    __builtin_fmaf(model_flushed(x & 0xffff0000), model_flushed(y & 0xffff0000), odd));
            }
            const float sum = model_flushed(model_flushed(to.words[m][n]) + model_flushed(even + odd));
            memcpy(&to.words[m][n], &sum, 4);
        }
}

}  // namespace
