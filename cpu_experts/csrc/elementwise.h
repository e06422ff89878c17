// The arithmetic around the multiplications, in plain loops, included by each instruction set's file, vectorised with its flags.
// All is in an unnamed namespace, for an inline function that the files shared would be compiled with the flags of any of them.
#pragma once

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include <cfloat>
#include <cstring>

#include "gemm.h"

namespace cpu_experts {
namespace {

inline uint32_t bits_of(float x) {
    uint32_t b;
    std::memcpy(&b, &x, 4);
    return b;
}

inline float float_of(uint32_t b) {
    float x;
    std::memcpy(&x, &b, 4);
    return x;
}

inline float from_bf16(uint16_t b) { return float_of(uint32_t(b) << 16); }

// To nearest, ties to even; NaN stays NaN.
inline uint16_t to_bf16(float x) {
    uint32_t b = bits_of(x);
    uint32_t rounded = (b + 0x7FFF + ((b >> 16) & 1)) >> 16;
    return uint16_t(x == x ? rounded : (b >> 16) | 0x40);
}

constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the low bits

// Relative error below 2e-7 between -87 and 88, clamped outside: libm's is not vectorised without -ffast-math.
inline float exponential(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    float shifted = x * 1.44269504f + kMagic;
    float n = shifted - kMagic;
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * float_of((bits_of(shifted) - bits_of(kMagic) + 127) << 23);
}

inline float swiglu(float gate, float up) { return gate / (1.0f + exponential(-gate)) * up; }

inline float as_float(uint16_t bf16) { return from_bf16(bf16); }
inline float as_float(float x) { return x; }

inline void pack_bf16(const Source& from, int i, int rows, int steps, uint8_t* block) {
    constexpr int per = kLine / 2;
    for (int s = 0; s < steps; ++s) {
        auto* line = reinterpret_cast<uint16_t*>(block + (size_t(s) * rows + i) * kLine);
        int k = s * per, held = from.count - k < per ? from.count - k : per;
        if (from.bf16 && held > 0) {
            std::memcpy(line, static_cast<const uint16_t*>(from.values) + k, size_t(held) * 2);
        } else {
            const float* values = static_cast<const float*>(from.values) + k;
            for (int j = 0; j < held; ++j) line[j] = to_bf16(values[j]);
        }
        for (int j = held > 0 ? held : 0; j < per; ++j) line[j] = 0;
    }
}

inline float largest(const Source& from) {
    uint32_t most = 0;  // as bits, floats of one sign compare as integers: this vectorises, and NaN is the largest of all
    if (from.bf16) {
        const auto* values = static_cast<const uint16_t*>(from.values);
        for (int k = 0; k < from.count; ++k) {
            uint32_t b = uint32_t(values[k] & 0x7FFF) << 16;
            most = b > most ? b : most;
        }
    } else {
        const auto* values = static_cast<const uint32_t*>(from.values);
        for (int k = 0; k < from.count; ++k) {
            uint32_t b = values[k] & 0x7FFFFFFF;
            most = b > most ? b : most;
        }
    }
    return float_of(most);
}

template <class Number>
inline void codes_of(const Number* values, int count, float inverse, uint8_t* codes) {
    for (int j = 0; j < count; ++j) codes[j] = uint8_t(bits_of(as_float(values[j]) * inverse + kMagic) + 128);
}

// Codes are biased by 128: VNNI and AMX multiply unsigned by signed bytes, and weights take the bias back (Format, int8).
inline float pack_int8(const Source& from, int i, int rows, int steps, uint8_t* block) {
    float most = largest(from);
    bool finite = most <= FLT_MAX, zeros = most < 1e-36f;  // 127 / most would overflow
    float scale = zeros ? 1.0f : finite ? most / 127.0f : most;
    float inverse = zeros ? 0.0f : 127.0f / most;
    for (int s = 0; s < steps; ++s) {
        uint8_t* line = block + (size_t(s) * rows + i) * kLine;
        int k = s * kLine, held = from.count - k < kLine ? from.count - k : kLine;
        if (!finite) {
            std::memset(line, 129, kLine);  // a row that is not finite stays so, by its scale
        } else if (from.bf16) {
            codes_of(static_cast<const uint16_t*>(from.values) + k, held, inverse, line);
        } else {
            codes_of(static_cast<const float*>(from.values) + k, held, inverse, line);
        }
        for (int j = held > 0 ? held : 0; j < kLine; ++j) line[j] = 128;
    }
    return scale;
}

inline void swiglu_bf16(const float* c, int rows, int panel, uint8_t* block) {
    int k = panel * kTile;
    uint8_t* at = block + size_t(k / 32) * rows * kLine + size_t(k % 32) * 2;
    for (int i = 0; i < rows; ++i, c += kPanel, at += kLine) {
        auto* out = reinterpret_cast<uint16_t*>(at);
        for (int j = 0; j < kTile; ++j) out[j] = to_bf16(swiglu(c[j], c[kTile + j]));
    }
}

inline void swiglu_f32(const float* c, int rows, int panel, size_t width, float* out) {
    out += size_t(panel) * kTile;
    for (int i = 0; i < rows; ++i, c += kPanel, out += width) {
        for (int j = 0; j < kTile; ++j) out[j] = swiglu(c[j], c[kTile + j]);
    }
}

#ifdef __AVX512F__
// A line that is written past the caches is not read first.
inline void stream(const Sums& from, int rows, const Sums& to) {
    for (int m = 0; m < rows; ++m) {
        for (int n = 0; n < kPanel; n += 16) _mm512_stream_ps(to.row(m) + n, _mm512_loadu_ps(from.row(m) + n));
    }
    _mm_sfence();  // or who waits for this thread's subtasks might not see them
}
#endif

inline void put(const Sums& from, int rows, const Sums& to, [[maybe_unused]] bool many) {
#ifdef __AVX512F__
    if (many) return stream(from, rows, to);
#endif
    for (int m = 0; m < rows; ++m) std::memcpy(to.row(m), from.row(m), kPanel * sizeof(float));
}

inline void combine(const float* const* parts, const float* weights, int chosen, int model, void* out, bool bf16) {
    constexpr int strip = 64;  // held in registers or L1 while all parts are added
    for (int d = 0; d < model; d += strip) {
        float sum[strip] = {};
        int count = model - d < strip ? model - d : strip;
        for (int k = 0; k < chosen; ++k) {
            if (!parts[k]) continue;
            const float* part = parts[k] + d;
            for (int j = 0; j < count; ++j) sum[j] += weights[k] * part[j];
        }
        if (bf16) {
            for (int j = 0; j < count; ++j) static_cast<uint16_t*>(out)[d + j] = to_bf16(sum[j]);
        } else {
            std::memcpy(static_cast<float*>(out) + d, sum, size_t(count) * 4);
        }
    }
}

}  // namespace
}  // namespace cpu_experts
