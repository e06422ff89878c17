// The arithmetic around the multiplications, in plain loops, included by each instruction set's file, vectorised with its flags.
// All is in an unnamed namespace, for an inline function that the files shared would be compiled with the flags of any of them.
#pragma once

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
    bool finite = most <= 3.4e38f, zeros = most < 1e-36f;  // 127 / most would overflow
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

// Expanding by table, tile by tile: rows of 16 outputs x 2 values, as bf16 has them.
inline float int4_scale(const Panel& p, int group, int tile, int n) {
    return from_bf16(reinterpret_cast<const uint16_t*>(p.scales)[size_t(group) * kPanel + tile * kTile + n]);
}

inline void expand_int4(const Panel& p, uint8_t* bf16) {
    const auto* data = reinterpret_cast<const uint16_t*>(p.data);  // [step][tile][quarter][n, 2]: nibble q is row 4 * quarter + q
    auto* out = reinterpret_cast<uint16_t*>(bf16);
    for (int s = 0; s < p.steps; ++s) {
        for (int tile = 0; tile < 2; ++tile) {
            float scales[32];
            for (int j = 0; j < 32; ++j) scales[j] = int4_scale(p, s / p.group_steps, tile, j / 2);
            for (int row = 0; row < 16; ++row, out += 32) {
                const uint16_t* codes = data + row / 4 * 32;
                int shift = row % 4 * 4;
                for (int j = 0; j < 32; ++j) out[j] = to_bf16(float(int((codes[j] >> shift) & 15) - 8) * scales[j]);
            }
            data += 128;
        }
    }
}

inline float from_e4m3(uint8_t code) {
    uint32_t size = code & 0x7Fu;
    float small = float(int(size)) * 0.001953125f;  // no exponent: a mantissa of 2^-9s. No denormals, which a caller may have off
    float normal = float_of((size << 20) + (120u << 23));
    float value = size < 8 ? small : normal;
    return float_of(bits_of(size == 0x7F ? float_of(0x7FC00000) : value) | uint32_t(code & 0x80) << 24);
}

// A sign and seven bits of size; the negative zero is -128.
inline float from_q8(uint8_t code) {
    int size = code == 0x80 ? 128 : code & 0x7F;
    return float(code & 0x80 ? -size : size);
}

inline float from_half(uint16_t h) {
    uint32_t exponent = (h >> 10) & 31, mantissa = h & 1023;
    float small = float(int(mantissa)) * 5.9604644775390625e-8f;
    return (h & 0x8000 ? -1.0f : 1.0f) * (exponent ? float_of((exponent + 112) << 23 | mantissa << 13) : small);
}

struct Fp8Codes {
    static float value(uint8_t code) { return from_e4m3(code); }
    static float scale(const Panel& p, int group, int tile, int) {
        return reinterpret_cast<const float*>(p.scales)[group * 2 + tile];
    }
};

struct Q8Codes {
    static float value(uint8_t code) { return from_q8(code); }
    static float scale(const Panel& p, int group, int tile, int n) {
        return from_half(reinterpret_cast<const uint16_t*>(p.scales)[size_t(group) * kPanel + size_t(tile * kTile + n)]);
    }
};

template <class Codes>
void expand_bytes(const Panel& p, uint8_t* bf16) {
    const uint8_t* data = p.data;  // [step][tile][pair of rows][quarter][row of the pair][4 outputs, 2]
    auto* out = reinterpret_cast<uint16_t*>(bf16);
    for (int s = 0; s < p.steps; ++s) {
        for (int tile = 0; tile < 2; ++tile, data += 512) {
            float scales[32];
            for (int j = 0; j < 32; ++j) scales[j] = Codes::scale(p, s / p.group_steps, tile, j / 2);
            for (int row = 0; row < 16; ++row, out += 32) {
                const uint8_t* codes = data + row / 2 * 64 + row % 2 * 8;
                for (int j = 0; j < 32; ++j) out[j] = to_bf16(Codes::value(codes[j / 8 * 16 + j % 8]) * scales[j]);
            }
        }
    }
}

}  // namespace
}  // namespace cpu_experts
