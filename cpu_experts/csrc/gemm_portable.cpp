// Kernels in plain C++: the fallback everywhere, and what the others are tested against inside the library.
#include "expand.h"

namespace cpu_experts {
namespace {

void slice_bf16(const Panel& p, const Rows& a, const Slice& slice, const Sums& c) {
    slice.conversion.all();
    for (int m = 0; slice.first && m < a.count; ++m) std::memset(c.row(m), 0, kPanel * sizeof(float));
    const auto* w = reinterpret_cast<const uint16_t*>(p.data);
    for (int s = 0; s < p.steps; ++s) {
        const auto* x = reinterpret_cast<const uint16_t*>(a.data + size_t(s) * a.count * kLine);
        for (int tile = 0; tile < 2; ++tile, w += 512) {
            for (int m = 0; m < a.count; ++m) {
                float* sum = c.row(m) + tile * kTile;
                for (int row = 0; row < 16; ++row) {
                    float first = from_bf16(x[m * 32 + row * 2]), second = from_bf16(x[m * 32 + row * 2 + 1]);
                    for (int n = 0; n < kTile; ++n) {
                        sum[n] += first * from_bf16(w[row * 32 + n * 2]) + second * from_bf16(w[row * 32 + n * 2 + 1]);
                    }
                }
            }
        }
    }
}

void slice_int8(const Panel& p, const Rows& a, const Slice& slice, const Sums& c) {
    const auto* scales = reinterpret_cast<const float*>(p.scales);
    const auto* bias = reinterpret_cast<const int32_t*>(p.scales + kPanel * 4);
    for (int m = 0; m < a.count; ++m) {
        uint32_t sums[kPanel];  // unsigned, to wrap: damaged weights may hold any bias
        for (int n = 0; n < kPanel; ++n) sums[n] = slice.first ? 0u : bits_of(c.row(m)[n]);
        for (int s = 0; s < p.steps; ++s) {
            const uint8_t* x = a.data + (size_t(s) * a.count + m) * kLine;
            for (int n = 0; n < kPanel; ++n) {
                const auto* tile = p.data + (size_t(s) * 2 + n / kTile) * kTileBytes;
                const auto* w = reinterpret_cast<const int8_t*>(tile) + n % kTile * 4;
                int32_t sum = 0;
                for (int k = 0; k < 64; ++k) sum += int32_t(x[k]) * w[k / 4 * kLine + k % 4];
                sums[n] += uint32_t(sum);
            }
        }
        for (int n = 0; n < kPanel; ++n) {
            float scaled = float(int32_t(sums[n] - uint32_t(bias[n]))) * (a.scales[m] * scales[n]);
            c.row(m)[n] = slice.last ? scaled : float_of(sums[n]);
        }
    }
}

void block_bf16(const Panel& p, const Rows& a, const Sums& c) { slice_bf16(p, a, {}, c); }
void block_int8(const Panel& p, const Rows& a, const Sums& c) { slice_int8(p, a, {}, c); }

}  // namespace

const Kernels& portable_kernels() {
    static const Kernels kernels = {
        {{block_bf16, block_bf16, slice_bf16, nullptr, 0},
         int8_path(block_int8, slice_int8),
         {nullptr, nullptr, slice_bf16, expand_int4<GroupedInt4>, 0},
         {nullptr, nullptr, slice_bf16, expand_int4<GroupedInt4>, 0},
         {nullptr, nullptr, slice_bf16, expand_bytes<Fp8Codes>, 0, false, expand_bytes<Fp8Codes, false>, add_scaled<Fp8Codes>},
         {nullptr, nullptr, slice_bf16, expand_bytes<Q8Codes>, 0, false, expand_bytes<Q8Codes, false>, add_scaled<Q8Codes>},
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
