// The arithmetic around the multiplications, in plain loops, included by each instruction set's file, vectorised with its flags.
// All is in an unnamed namespace, for an inline function that the files shared would be compiled with the flags of any of them.
#pragma once

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include <math.h>

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

// Of (e^r - 1 - r) / r^2 between -0.35 and 0.35, highest power first.
constexpr float kExponential[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                  4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};

// Relative error below 2e-7 between -87 and 88, clamped outside: libm's is not vectorised without -ffast-math.
inline float exponential(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    float shifted = x * 1.44269504f + kMagic;
    float n = shifted - kMagic;
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = kExponential[0];
    for (int i = 1; i < 6; ++i) p = p * r + kExponential[i];
    p = p * r * r + r + 1.0f;
    return p * float_of((bits_of(shifted) - bits_of(kMagic) + 127) << 23);
}

#ifdef __AVX512F__
// The same. A NaN stays one: the second operand is returned.
inline __m512 exponential(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-87), _mm512_min_ps(_mm512_set1_ps(88), x));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(kExponential[0]);
    for (int i = 1; i < 6; ++i) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(kExponential[i]));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1)));
    return _mm512_scalef_ps(p, n);
}
#endif

inline float swiglu(float gate, float up) { return gate / (1.0f + exponential(-gate)) * up; }

inline float as_float(uint16_t bf16) { return from_bf16(bf16); }
inline float as_float(float x) { return x; }

// A row's in step `s`. (Asking for those of later steps beforehand gains nothing.)
inline uint8_t* line_of(uint8_t* block, int i, int rows, int s) {
    return block + (size_t(s) * size_t(rows) + size_t(i)) * kLine;
}

inline void pack_bf16(const Source& from, int i, int rows, int steps, uint8_t* block) {
    constexpr int per = kLine / 2;
    for (int s = 0; s < steps; ++s) {
        auto* line = reinterpret_cast<uint16_t*>(line_of(block, i, rows, s));
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

inline uint32_t size_bits(uint16_t bf16) { return uint32_t(bf16 & 0x7FFF) << 16; }
inline uint32_t size_bits(float x) { return bits_of(x) & 0x7FFFFFFF; }

// As bits, floats of one sign compare as integers: this vectorises, and NaN is the largest of all.
template <class Number>
inline float largest(const Number* values, int count) {
    uint32_t most = 0;
    for (int k = 0; k < count; ++k) most = size_bits(values[k]) > most ? size_bits(values[k]) : most;
    return float_of(most);
}

inline float size_of(float x) { return float_of(size_bits(x)); }

// Of the numbers within a limit.
struct Within {
    float squares, largest;
};

template <class Number>
inline Within within(const Number* values, int count, float limit) {
    constexpr int wide = 64;  // adjacent sums, so that each loop is vectorised
    const uint32_t most = bits_of(limit);
    float squares[wide] = {};
    uint32_t sizes[wide], largest = 0;
    for (int from = 0; from < count; from += wide) {
        int some = count - from < wide ? count - from : wide;
        for (int j = 0; j < some; ++j) sizes[j] = size_bits(values[from + j]);
        for (int j = some; j < wide; ++j) sizes[j] = 0;
        for (int j = 0; j < wide; ++j) sizes[j] = sizes[j] <= most ? sizes[j] : 0;
        for (int j = 0; j < wide; ++j) squares[j] += float_of(sizes[j]) * float_of(sizes[j]);
        for (int j = 0; j < wide; ++j) largest = sizes[j] > largest ? sizes[j] : largest;
    }
    float sum = 0;
    for (float each : squares) sum += each;
    return {sum, float_of(largest)};
}

// `take(k, x)` for every number beyond the limit.
template <class Number, class Take>
inline void each_beyond(const Number* values, int count, float limit, Take take) {
    constexpr int some = 64;
    for (int from = 0; from < count; from += some) {
        int to = from + some < count ? from + some : count;
        if (!(largest(values + from, to - from) > limit)) continue;
        for (int k = from; k < to; ++k) {
            if (size_of(as_float(values[k])) > limit) take(k, as_float(values[k]));
        }
    }
}

// What a row's scale is made of: ten times the root mean square of its numbers within that, unless more are beyond than are worth
// it: then of the largest within. Of a normal distribution none are, nor many of a short row, for they are in its mean.
constexpr float kFar = 10;

template <class Number>
inline float limit_of(const Number* values, int count, float most) {
    const float least = most / 4096;  // so that no sum of codes overflows
    Within kept = within(values, count, most);
    for (int turn = 0; turn < 4; ++turn) {
        float limit = kFar * sqrtf(kept.squares / float(count));
        limit = limit > least ? limit : least;
        if (!(limit < kept.largest)) break;
        int beyond = 0;
        each_beyond(values, count, limit, [&](int, float) { ++beyond; });
        if (beyond > Outliers::kMost) break;
        kept = within(values, count, limit);
    }
    return kept.largest > least ? kept.largest : least;
}

// Their places become zeros.
template <class Number>
inline void leave_out(const Number* values, int count, float limit, float inverse, uint8_t zero, uint8_t* row, size_t line,
                      Outliers& out) {
    each_beyond(values, count, limit, [&](int k, float x) {
        out.at[out.count++] = {k, int32_t(lrintf(x * inverse))};
        row[size_t(k / kLine) * line + size_t(k % kLine)] = zero;
    });
}

template <class Number>
inline void codes_of(const Number* values, int count, float inverse, uint8_t zero, uint8_t* codes) {
    for (int j = 0; j < count; ++j) codes[j] = uint8_t(bits_of(as_float(values[j]) * inverse + kMagic) + zero);
}

template <uint8_t kZero, class Number>
inline float row_codes(const Number* values, int count, int i, int rows, int steps, uint8_t* block, Outliers* left_out) {
    float most = largest(values, count), limit = most;
    bool finite = most <= FLT_MAX, zeros = most < 1e-36f;  // 127 / most would overflow
    if (left_out && finite && most > 1e-32f) limit = limit_of(values, count, most);
    float scale = zeros ? 1.0f : finite ? limit / 127.0f : most;
    float inverse = zeros ? 0.0f : 127.0f / limit;
    for (int s = 0; s < steps; ++s) {
        uint8_t* line = line_of(block, i, rows, s);
        int k = s * kLine, held = count - k < kLine ? count - k : kLine;
        if (finite) {
            codes_of(values + k, held, inverse, kZero, line);
        } else {
            std::memset(line, kZero + 1, kLine);  // a row that is not finite stays so, by its scale
        }
        for (int j = held > 0 ? held : 0; j < kLine; ++j) line[j] = kZero;
    }
    if (!left_out) return scale;
    left_out->count = 0;
    uint8_t* row = block + size_t(i) * kLine;
    if (limit < most) leave_out(values, count, limit, inverse, kZero, row, size_t(rows) * kLine, *left_out);
    return scale;
}

// VNNI, and AMX with packed int8, multiply unsigned by signed bytes: codes are biased by 128, and weights take the bias back
// (Format, int8).
template <uint8_t kZero = 128>
float pack_int8(const Source& from, int i, int rows, int steps, uint8_t* block, Outliers* left_out) {
    auto pack = [&](auto* values) { return row_codes<kZero>(values, from.count, i, rows, steps, block, left_out); };
    return from.bf16 ? pack(static_cast<const uint16_t*>(from.values)) : pack(static_cast<const float*>(from.values));
}

inline Path int8_path(Multiply all, MultiplySlice slice) {
    Path path{all, all, slice, nullptr, 0};
    path.pack_int8 = pack_int8;
    return path;
}

#ifdef __AVX512F__
// The loop below, except for rounding and denormals. From the loop gcc 12 makes two divisions of eight numbers each, also for
// those that were clamped.
inline void swiglu(const float* c, int rows, size_t line, uint16_t* out) {
    const __m512 one = _mm512_set1_ps(1), two = _mm512_set1_ps(2);
    for (int i = 0; i < rows; ++i, c += kPanel, out += line) {
        __m512 gate = _mm512_loadu_ps(c), up = _mm512_loadu_ps(c + kTile);
        __m512 d = _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), gate)));
        __m512 inverse = _mm512_rcp14_ps(d);
        inverse = _mm512_mul_ps(inverse, _mm512_fnmadd_ps(d, inverse, two));
        __m512 product = _mm512_mul_ps(_mm512_mul_ps(gate, inverse), up);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), (__m256i)_mm512_cvtneps_pbh(product));
    }
}
#else
// Sixteen numbers a row, `line` from one row to the next.
inline void swiglu(const float* c, int rows, size_t line, uint16_t* out) {
    for (int i = 0; i < rows; ++i, c += kPanel, out += line) {
        for (int j = 0; j < kTile; ++j) out[j] = to_bf16(swiglu(c[j], c[kTile + j]));
    }
}
#endif

#ifdef __AVX512F__
// A line that is written past the caches is not read first.
inline void stream(const Sums& from, int rows, const Sums& to) {
    for (int m = 0; m < rows; ++m) {
        for (int n = 0; n < kPanel; n += 16) _mm512_stream_ps(to.row(m) + n, _mm512_loadu_ps(from.row(m) + n));
    }
}
#endif

inline void put(const Sums& from, int rows, const Sums& to, [[maybe_unused]] bool many) {
#ifdef __AVX512F__
    if (many) return stream(from, rows, to);
#endif
    for (int m = 0; m < rows; ++m) std::memcpy(to.row(m), from.row(m), kPanel * sizeof(float));
}

inline void settle() {
#ifdef __AVX512F__
    _mm_sfence();
#endif
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
