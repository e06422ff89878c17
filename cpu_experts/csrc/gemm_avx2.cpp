// Kernels for AVX2 and FMA. What is neither bf16 nor int8 is expanded to bf16 first: these cores are bound by arithmetic anyway.
#include <immintrin.h>

#include "expand.h"

namespace cpu_experts {
namespace {

inline uint32_t word(const uint8_t* at) {
    uint32_t w;
    std::memcpy(&w, at, 4);
    return w;
}

// M rows by one tile: 8 outputs' pairs are in 32 bytes; the pair's halves are floats once shifted or masked.
template <int M>
void bf16_tile(const Panel& p, int tile, const Rows& a, int row0, bool add, const Sums& c) {
    __m256 sum[M][2];
    for (int m = 0; m < M; ++m) {
        const float* at = c.row(row0 + m) + tile * kTile;
        for (int half = 0; half < 2; ++half) sum[m][half] = add ? _mm256_loadu_ps(at + half * 8) : _mm256_setzero_ps();
    }
    const __m256i high = _mm256_set1_epi32(int(0xFFFF0000));
    const uint8_t* w = p.data + tile * kTileBytes;
    const uint8_t* x = a.data + row0 * kLine;
    for (int s = 0; s < p.steps; ++s, w += 2 * kTileBytes, x += size_t(a.count) * kLine) {
        for (int row = 0; row < 16; ++row) {
            __m256 first[2], second[2];
            for (int half = 0; half < 2; ++half) {
                __m256i b = _mm256_load_si256(reinterpret_cast<const __m256i*>(w + row * kLine + half * 32));
                first[half] = _mm256_castsi256_ps(_mm256_slli_epi32(b, 16));
                second[half] = _mm256_castsi256_ps(_mm256_and_si256(b, high));
            }
#pragma GCC unroll 4
            for (int m = 0; m < M; ++m) {
                uint32_t pair = word(x + m * kLine + row * 4);
                __m256 even = _mm256_set1_ps(float_of(pair << 16)), odd = _mm256_set1_ps(float_of(pair & 0xFFFF0000));
                for (int half = 0; half < 2; ++half) {
                    sum[m][half] = _mm256_fmadd_ps(even, first[half], sum[m][half]);
                    sum[m][half] = _mm256_fmadd_ps(odd, second[half], sum[m][half]);
                }
            }
        }
    }
    for (int m = 0; m < M; ++m) {
        for (int half = 0; half < 2; ++half) _mm256_storeu_ps(c.row(row0 + m) + tile * kTile + half * 8, sum[m][half]);
    }
}

void slice_bf16(const Panel& p, const Rows& a, const Slice& slice, const Sums& c) {
    slice.conversion.all();
    for (int tile = 0; tile < 2; ++tile) {
        int m = 0;
        for (; m + 4 <= a.count; m += 4) bf16_tile<4>(p, tile, a, m, !slice.first, c);
        for (; m < a.count; ++m) bf16_tile<1>(p, tile, a, m, !slice.first, c);
    }
}

// Four outputs at a time, widened to 16 bits: maddubs adds two products in 16 bits, and they do not fit.
template <int M>
void int8_quarter(const Panel& p, int first, const Rows& a, int row0, const Slice& slice, const Sums& c) {
    __m256i sum[M];
    for (int m = 0; m < M; ++m) sum[m] = _mm256_setzero_si256();
    const uint8_t* w = p.data + first / kTile * kTileBytes + first % kTile * 4;
    const uint8_t* x = a.data + row0 * kLine;
    for (int s = 0; s < p.steps; ++s, w += 2 * kTileBytes, x += size_t(a.count) * kLine) {
        for (int r = 0; r < 16; ++r) {
            __m256i b = _mm256_cvtepi8_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(w + r * kLine)));
            for (int m = 0; m < M; ++m) {
                __m128i four = _mm_cvtepu8_epi16(_mm_cvtsi32_si128(int(word(x + m * kLine + r * 4))));
                sum[m] = _mm256_add_epi32(sum[m], _mm256_madd_epi16(b, _mm256_broadcastq_epi64(four)));
            }
        }
    }
    const auto* scales = reinterpret_cast<const float*>(p.scales) + first;
    const auto* bias = reinterpret_cast<const uint32_t*>(p.scales + kPanel * 4) + first;
    for (int m = 0; m < M; ++m) {
        alignas(32) uint32_t pairs[8];  // unsigned, to wrap: damaged weights may hold any bias
        _mm256_store_si256(reinterpret_cast<__m256i*>(pairs), sum[m]);
        for (int n = 0; n < 4; ++n) {
            float& to = c.row(row0 + m)[first + n];
            uint32_t sum = pairs[2 * n] + pairs[2 * n + 1] + (slice.first ? 0 : bits_of(to));
            to = slice.last ? float(int32_t(sum - bias[n])) * (a.scales[row0 + m] * scales[n]) : float_of(sum);
        }
    }
}

void slice_int8(const Panel& p, const Rows& a, const Slice& slice, const Sums& c) {
    for (int first = 0; first < kPanel; first += 4) {
        int m = 0;
        for (; m + 4 <= a.count; m += 4) int8_quarter<4>(p, first, a, m, slice, c);
        for (; m < a.count; ++m) int8_quarter<1>(p, first, a, m, slice, c);
    }
}

void block_bf16(const Panel& p, const Rows& a, const Sums& c) { slice_bf16(p, a, {}, c); }
void block_int8(const Panel& p, const Rows& a, const Sums& c) { slice_int8(p, a, {}, c); }

}  // namespace

const Kernels& avx2_kernels() {
    static const Kernels kernels = {
        {{block_bf16, block_bf16, slice_bf16, nullptr, 0},
         int8_path(block_int8, slice_int8),
         {nullptr, nullptr, slice_bf16, expand_int4<GroupedInt4>, 0},
         {nullptr, nullptr, slice_bf16, expand_int4<GroupedInt4>, 0},
         {nullptr, nullptr, slice_bf16, expand_bytes<Fp8Codes>, 0},
         {nullptr, nullptr, slice_bf16, expand_bytes<Q8Codes>, 0},
         {nullptr, nullptr, slice_bf16, expand_int4<Q4KCodes>, 0},
         {nullptr, nullptr, slice_bf16, expand_bytes<Q6KCodes>, 0}},
        pack_bf16,
        swiglu,
        put,
        settle,
        combine,
    };
    return kernels;
}

}  // namespace cpu_experts
