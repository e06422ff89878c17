// Packed codes, in plain loops: what they stand for, and a panel of them as one of bf16. In an unnamed namespace, as
// elementwise.h.
#pragma once

#include "elementwise.h"

namespace cpu_experts {
namespace {

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
    uint32_t wide = exponent == 31 ? 255 : exponent + 112;  // infinite and NaN stay so
    return (h & 0x8000 ? -1.0f : 1.0f) * (exponent ? float_of(wide << 23 | mantissa << 13) : small);
}

// A value is scale * code - minimum. Formats without minima subtract nothing.
struct Scaled {
    float scale, minimum;
};

template <int kZero>
struct Int4Codes {
    static float value(int code) { return float(code - kZero); }
};

struct GroupedInt4 : Int4Codes<8> {
    static Scaled scaled(const Panel& p, int step, int n) {
        size_t group = size_t(step / p.group_steps);
        return {from_bf16(reinterpret_cast<const uint16_t*>(p.scales)[group * kPanel + size_t(n)]), 0};
    }
};

// What a panel holds in addition to its codes per eight steps, 256 inputs: float16s, then lines of one byte per output.
template <int kHalves, int kBytes>
struct BlockScales {
    static const uint8_t* at(const Panel& p, int step) { return p.scales + size_t(step / 8) * (2 * kHalves + kBytes) * kPanel; }
    static const uint8_t* half(const Panel& p, int step, int i, int n) { return at(p, step) + (i * kPanel + n) * 2; }
    static const uint8_t* byte(const Panel& p, int step, int i, int n) { return at(p, step) + (2 * kHalves + i) * kPanel + n; }
    static float half_value(const Panel& p, int step, int i, int n) {
        return from_half(*reinterpret_cast<const uint16_t*>(half(p, step, i, n)));
    }
};

struct Q4KCodes : Int4Codes<0>, BlockScales<2, 12> {
    // Of the later four steps, the low bits are in the last four bytes, the high ones above the earlier four's.
    static Scaled scaled(const Panel& p, int step, int n) {
        int i = step % 8, third = *byte(p, step, i < 4 ? 0 : 4 + i, n);
        int scale = i < 4 ? *byte(p, step, i, n) & 63 : (third & 15) | *byte(p, step, i - 4, n) >> 6 << 4;
        int minimum = i < 4 ? *byte(p, step, 4 + i, n) & 63 : third >> 4 | *byte(p, step, i, n) >> 6 << 4;
        return {half_value(p, step, 0, n) * float(scale), half_value(p, step, 1, n) * float(minimum)};
    }
};

template <class Codes>
void expand_int4(const Panel& p, int step, int steps, uint8_t* bf16, uint8_t*) {
    // [step][tile][quarter][n, 2]: nibble q is row 4 * quarter + q
    const auto* data = reinterpret_cast<const uint16_t*>(p.data) + size_t(step) * 256;
    auto* out = reinterpret_cast<uint16_t*>(bf16);
    for (int s = step; s < step + steps; ++s) {
        for (int tile = 0; tile < 2; ++tile, data += 128) {
            Scaled scaled[32];
            for (int j = 0; j < 32; ++j) scaled[j] = Codes::scaled(p, s, tile * kTile + j / 2);
            for (int row = 0; row < 16; ++row, out += 32) {
                const uint16_t* codes = data + row / 4 * 32;
                int shift = row % 4 * 4;
                for (int j = 0; j < 32; ++j) {
                    float value = Codes::value((codes[j] >> shift) & 15);
                    out[j] = to_bf16(value * scaled[j].scale - scaled[j].minimum);
                }
            }
        }
    }
}

// Bytes as they are packed.
struct WholeBytes {
    static constexpr int kCodeBytes = 512;
    static const uint8_t* bytes(const uint8_t* packed, uint8_t*) { return packed; }
};

struct Fp8Codes : WholeBytes {
    static float value(uint8_t code) { return from_e4m3(code); }
    static float scale(const Panel& p, int step, int, int n) {
        return reinterpret_cast<const float*>(p.scales)[step / p.group_steps * 2 + n / kTile];
    }
};

struct Q8Codes : WholeBytes {
    static float value(uint8_t code) { return from_q8(code); }
    static float scale(const Panel& p, int step, int, int n) {
        return from_half(reinterpret_cast<const uint16_t*>(p.scales)[size_t(step) * kPanel + size_t(n)]);
    }
};

struct Q6KCodes : BlockScales<1, 16> {
    static constexpr int kCodeBytes = 384;
    static float value(uint8_t code) { return float(code & 63) - 32.0f; }
    static float scale(const Panel& p, int step, int half, int n) {
        return half_value(p, step, 0, n) * float(int8_t(*byte(p, step, step % 8 * 2 + half, n)));
    }
    static const uint8_t* bytes(const uint8_t* packed, uint8_t* whole) {
        for (int line = 0; line < 8; ++line) {
            const uint8_t *low = packed + line / 2 * kLine, *high = packed + 256 + line / 4 * kLine;
            for (int j = 0; j < kLine; ++j) {
                int bits = (low[j] >> line % 2 * 4 & 15) | (high[j] >> line % 4 * 2 & 3) << 4;
                whole[line * kLine + j] = uint8_t(bits);
            }
        }
        return whole;
    }
};

template <class Codes, bool kScaled = true>
void expand_bytes(const Panel& p, int step, int steps, uint8_t* bf16, uint8_t*) {
    // [step][tile][pair of rows][quarter][row of the pair][4 outputs, 2]
    const uint8_t* data = p.data + size_t(step) * 2 * Codes::kCodeBytes;
    auto* out = reinterpret_cast<uint16_t*>(bf16);
    uint8_t whole[512];
    for (int s = step; s < step + steps; ++s) {
        for (int tile = 0; tile < 2; ++tile, data += Codes::kCodeBytes) {
            const uint8_t* bytes = Codes::bytes(data, whole);
            float scales[2][32];  // of the upper half's rows, of the lower's
            for (int j = 0; j < 64; ++j) {
                scales[j / 32][j % 32] = kScaled ? Codes::scale(p, s, j / 32, tile * kTile + j % 32 / 2) : 1.0f;
            }
            for (int row = 0; row < 16; ++row, out += 32) {
                const uint8_t* codes = bytes + row / 2 * 64 + row % 2 * 8;
                for (int j = 0; j < 32; ++j) out[j] = to_bf16(Codes::value(codes[j / 8 * 16 + j % 8]) * scales[row / 8][j]);
            }
        }
    }
}

template <class Codes>
void add_scaled(const Panel& p, int step, int rows, const Sums& from, const Sums& to) {
    for (int m = 0; m < rows; ++m) {
        for (int n = 0; n < kPanel; ++n) {
            float sum = Codes::scale(p, step, 0, n) * from.row(m)[n];
            to.row(m)[n] = step ? to.row(m)[n] + sum : sum;
        }
    }
}

}  // namespace
}  // namespace cpu_experts
