// Few rows by codes of four bits, as bytes: a row's 32 numbers of a step become int8 with a scale of their own, and the codes
// only have to be taken apart. For one row that is half of the instructions that bf16 takes.
#pragma once

#include <array>

#include "codes_avx512.h"
#include "prefetch.h"

namespace cpu_experts {
namespace {

// A row's line of a step. One number that is far larger than the others is left out: bytes would keep little of the others.
struct alignas(kLine) StepLine {
    int8_t codes[32];  // in the order in which a panel's bytes hold them
    int32_t codes_sum;
    float scale, sum;    // what the numbers add up to, with the one left out
    int quarter, bits;   // where a panel's words have the code that one meets: how far up. -1: none is left out
    float left_out;
};

// Sixteen numbers from the k-th on, zeros behind the last.
inline __m512 sixteen_of(const Source& from, int k) {
    int held = from.count - k < 16 ? from.count - k : 16;
    auto mask = __mmask16(held > 0 ? (1u << held) - 1 : 0);
    if (!from.bf16) return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(from.values) + k);
    __m256i halves = _mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(from.values) + k);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

// Of the eight numbers of a quarter, the lower halves of a word's bytes hold four, the upper halves the other four.
constexpr uint8_t kNibbles[] = {0, 4, 1, 5, 2, 6, 3, 7};

inline __m256i in_codes_order(__m256i bytes) {
    alignas(32) static constexpr auto order = [] {
        std::array<uint8_t, 32> at{};
        for (size_t i = 0; i < 32; ++i) at[i] = uint8_t(i / 8 * 8 + kNibbles[i % 8]);
        return at;
    }();
    return _mm256_permutexvar_epi8(_mm256_load_si256(reinterpret_cast<const __m256i*>(order.data())), bytes);
}

inline float largest_of(__m512 low, __m512 high) {
    __m512i sizes = _mm512_max_epu32(_mm512_castps_si512(_mm512_abs_ps(low)), _mm512_castps_si512(_mm512_abs_ps(high)));
    return float_of(_mm512_reduce_max_epu32(sizes));
}

// If it is so much larger than the next. Takes it out of these.
inline void leave_out(__m512& low, __m512& high, float& most, StepLine& line) {
    constexpr float kFarther = 8;
    const __m512 size = _mm512_set1_ps(most);
    uint32_t at = _mm512_cmp_ps_mask(_mm512_abs_ps(low), size, _CMP_EQ_OQ) |
                  uint32_t(_mm512_cmp_ps_mask(_mm512_abs_ps(high), size, _CMP_EQ_OQ)) << 16;
    if (!at) return;
    at &= ~at + 1;
    auto others = __mmask16(~at), others_high = __mmask16(~at >> 16);
    __m512 rest_low = _mm512_maskz_mov_ps(others, low), rest_high = _mm512_maskz_mov_ps(others_high, high);
    float next = largest_of(rest_low, rest_high);
    if (!(most > kFarther * next)) return;
    line.left_out = _mm512_mask_reduce_add_ps(__mmask16(at), low) + _mm512_mask_reduce_add_ps(__mmask16(at >> 16), high);
    int k = __builtin_ctz(at), i = 0;
    while (kNibbles[i] != k % 8) ++i;
    line.quarter = k / 8, line.bits = i % 4 * 8 + i / 4 * 4;
    low = rest_low, high = rest_high, most = next;
}

// A number that is none makes the scale none.
inline void pack_steps(const Source& from, int i, int rows, int steps, uint8_t* block) {
    for (int s = 0; s < steps; ++s) {
        __m512 low = sixteen_of(from, s * 32), high = sixteen_of(from, s * 32 + 16);
        auto& line = *reinterpret_cast<StepLine*>(line_of(block, i, rows, s));
        line.left_out = 0, line.quarter = -1;
        float most = largest_of(low, high);
        bool finite = most <= FLT_MAX;
        if (finite && most >= 1e-36f) leave_out(low, high, most, line);
        bool zeros = most < 1e-36f;  // 127 / most would overflow
        __m512 inverse = _mm512_set1_ps(zeros || !finite ? 0 : 127.0f / most);
        __m512i codes[] = {_mm512_cvtps_epi32(_mm512_mul_ps(low, inverse)), _mm512_cvtps_epi32(_mm512_mul_ps(high, inverse))};
        if (!finite) codes[0] = codes[1] = _mm512_set1_epi32(1);
        __m256i bytes = _mm256_set_m128i(_mm512_cvtepi32_epi8(codes[1]), _mm512_cvtepi32_epi8(codes[0]));
        _mm256_store_si256(reinterpret_cast<__m256i*>(line.codes), in_codes_order(bytes));
        line.scale = zeros ? 0 : finite ? most / 127.0f : most;
        line.codes_sum = _mm512_reduce_add_epi32(_mm512_add_epi32(codes[0], codes[1]));
        line.sum = line.scale * float(line.codes_sum) + line.left_out;
    }
}

// One tile's 32 inputs of a step by M rows: sums of codes times what codes stand for.
template <class Codes, int M>
__attribute__((always_inline)) inline void add_nibbles(const uint8_t* w, const uint8_t* x, __m512i (&sum)[M]) {
    const __m512i half = _mm512_set1_epi8(15);
    for (int m = 0; m < M; ++m) {
        const auto& line = *reinterpret_cast<const StepLine*>(x + m * kLine);
        sum[m] = _mm512_set1_epi32(Codes::kFirst * line.codes_sum);
    }
#pragma GCC unroll 4
    for (int quarter = 0; quarter < 4; ++quarter) {
        __m512i packed = load(w + quarter * kLine);
        prefetch(w + quarter * kLine);
        __m512i lower = _mm512_and_si512(packed, half), upper = _mm512_and_si512(_mm512_srli_epi16(packed, 4), half);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
            const uint8_t* codes = x + m * kLine + quarter * 8;
            sum[m] = _mm512_dpbusd_epi32(sum[m], lower, broadcast(codes));
            sum[m] = _mm512_dpbusd_epi32(sum[m], upper, broadcast(codes + 4));
        }
    }
}

template <class Codes>
__m512 left_out(const uint8_t* w, const StepLine& line) {
    __m512i codes = _mm512_srl_epi32(load(w + line.quarter * kLine), _mm_cvtsi32_si128(line.bits));
    codes = _mm512_add_epi32(_mm512_and_si512(codes, _mm512_set1_epi32(15)), _mm512_set1_epi32(Codes::kFirst));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(codes), _mm512_set1_ps(line.left_out));
}

template <class Codes, int M>
void nibble_rows(const Panel& p, const Rows& a, const Slice&, int first, const Sums& c) {
    __m512 total[2][M];
    for (int m = 0; m < M; ++m) total[0][m] = total[1][m] = _mm512_setzero_ps();
    const uint8_t* w = p.data;
    const uint8_t* x = a.data + size_t(first) * kLine;
    for (int s = 0; s < p.steps; ++s, x += size_t(a.count) * kLine) {
#pragma GCC unroll 2
        for (int tile = 0; tile < 2; ++tile, w += kNibbleBytes) {
            __m512i sum[M];
            add_nibbles<Codes, M>(w, x, sum);
            __m512 scale = Codes::scale(p, s, tile), minimum{};
            if (Codes::kMinima) minimum = Codes::minimum(p, s, tile);
#pragma GCC unroll 8
            for (int m = 0; m < M; ++m) {
                const auto& line = *reinterpret_cast<const StepLine*>(x + m * kLine);
                __m512 products = _mm512_cvtepi32_ps(sum[m]), factor = _mm512_mul_ps(scale, _mm512_set1_ps(line.scale));
                total[tile][m] = _mm512_fmadd_ps(factor, products, total[tile][m]);
                if (line.quarter >= 0) total[tile][m] = _mm512_fmadd_ps(scale, left_out<Codes>(w, line), total[tile][m]);
                if (Codes::kMinima) total[tile][m] = _mm512_fnmadd_ps(minimum, _mm512_set1_ps(line.sum), total[tile][m]);
            }
        }
    }
    for (int m = 0; m < M; ++m) {
        for (int tile = 0; tile < 2; ++tile) _mm512_storeu_ps(c.row(first + m) + tile * kTile, total[tile][m]);
    }
}

}  // namespace
}  // namespace cpu_experts
