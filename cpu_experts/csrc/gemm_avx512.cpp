// Kernels for AVX-512 with VNNI, BF16 and VBMI: for few rows of every format, and for many where there are no tiles.
//
// Each step of the K loop loads two lines of weights (one a tile) and multiplies them by one broadcast word of every row, so a
// panel is read once for up to 12 rows. Few rows are bound by memory; there the sums are split, or one row's two chains of
// dependent additions would set the pace.
#include <immintrin.h>

#include <array>
#include <utility>

#include "nibbles_avx512.h"

namespace cpu_experts {
namespace {

constexpr int chains(int m) { return m <= 2 ? 4 : 1; }  // four for four rows spilled: half the speed

// --- bf16 and int8: the packed lines are what the instruction multiplies

struct Bf16 {
    using Sum = __m512;
    static constexpr size_t kMost = 12;  // rows a pass
    static Sum zero() { return _mm512_setzero_ps(); }
    static Sum add(Sum a, Sum b) { return _mm512_add_ps(a, b); }
    static Sum dot(Sum sum, __m512i x, __m512i w) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w); }
    static Sum earlier(__m512 sum) { return sum; }
    static __m512 later(Sum sum) { return sum; }
    static __m512 finish(Sum sum, const Panel&, int, float) { return sum; }
};

struct Int8 {
    using Sum = __m512i;
    static constexpr size_t kMost = 8;  // with 12, gcc spills some sums
    static Sum zero() { return _mm512_setzero_si512(); }
    static Sum add(Sum a, Sum b) { return _mm512_add_epi32(a, b); }
    static Sum dot(Sum sum, __m512i x, __m512i w) { return _mm512_dpbusd_epi32(sum, x, w); }
    static Sum earlier(__m512 sum) { return _mm512_castps_si512(sum); }
    static __m512 later(Sum sum) { return _mm512_castsi512_ps(sum); }
    static __m512 finish(Sum sum, const Panel& p, int tile, float row_scale) {
        __m512 scale = _mm512_mul_ps(_mm512_loadu_ps(p.scales + tile * kLine), _mm512_set1_ps(row_scale));
        return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(sum, load(p.scales + (2 + tile) * kLine))), scale);
    }
};

// No template for slices and another for all of K: a compiler takes long enough for one.
template <class Kind, int M>
void plain_rows(const Panel& p, const Rows& a, const Slice& slice, int first, const Sums& c) {
    constexpr int C = chains(M);
    typename Kind::Sum sum[C][M][2];
    for (int i = 0; i < C; ++i) {
        for (int m = 0; m < M; ++m) sum[i][m][0] = sum[i][m][1] = Kind::zero();
    }
    if (!slice.first) {
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) {
            const float* at = c.row(first + m);
            for (int tile = 0; tile < 2; ++tile) sum[0][m][tile] = Kind::earlier(_mm512_loadu_ps(at + tile * kTile));
        }
    }
    Ahead weights = slice.weights, rows = slice.rows;
    const uint8_t* w = p.data;
    const uint8_t* next = weights.at ? w : w + kAhead;  // what is prefetched already is not prefetched again
    const uint8_t* x = a.data + size_t(first) * kLine;
    for (int s = 0; s < p.steps; ++s, w += 2 * kTileBytes, next += 2 * kTileBytes, x += size_t(a.count) * kLine) {
        prefetch(weights), prefetch(rows);
#pragma GCC unroll 4
        for (int row = 0; row < 16; ++row) {
            prefetch(next + row * kLine, 0);
            prefetch(next + kTileBytes + row * kLine, 0);
            __m512i w0 = load(w + row * kLine), w1 = load(w + kTileBytes + row * kLine);
#pragma GCC unroll 12
            for (int m = 0; m < M; ++m) {
                __m512i word = broadcast(x + m * kLine + row * 4);
                auto& to = sum[row % C][m];
                to[0] = Kind::dot(to[0], word, w0);
                to[1] = Kind::dot(to[1], word, w1);
            }
        }
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
        for (int tile = 0; tile < 2; ++tile) {
            for (int i = 1; i < C; ++i) sum[0][m][tile] = Kind::add(sum[0][m][tile], sum[i][m][tile]);
            float row_scale = a.scales ? a.scales[first + m] : 1.0f;
            __m512 out = slice.last ? Kind::finish(sum[0][m][tile], p, tile, row_scale) : Kind::later(sum[0][m][tile]);
            _mm512_storeu_ps(c.row(first + m) + tile * kTile, out);
        }
    }
}

// --- codes of eight and six bits: scales multiply the sum of a group, or of both halves of a step where their scales differ

// A part of a step of K: sums of M rows by two tiles, each in C chains.
template <class Codes, int M, int C>
__attribute__((always_inline)) inline void add_step(const Codes& codes, const uint8_t* w, const uint8_t* x, int part,
                                                    __m512 (&sum)[C][M][2]) {
    constexpr int each = 2 * Codes::kCodeBytes / Codes::kParts, quarters = 4 / Codes::kParts;
    for (int line = part * each; line < (part + 1) * each; line += kLine) prefetch(w + line);
#pragma GCC unroll 4
    for (int quarter = part * quarters; quarter < (part + 1) * quarters; ++quarter) {
#pragma GCC unroll 2
        for (int tile = 0; tile < 2; ++tile) {
            __m512i row[4];
            codes.unpack(w + tile * Codes::kCodeBytes, quarter, row);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 8
                for (int m = 0; m < M; ++m) {
                    __m512i word = broadcast(x + m * kLine + (quarter * 4 + i) * 4);
                    __m512& to = sum[i % C][m][tile];
                    to = _mm512_dpbf16_ps(to, (__m512bh)word, (__m512bh)row[i]);
                }
            }
        }
    }
}

template <class Codes, int M>
void grouped_rows(const Panel& p, const Rows& a, const Slice&, int first, const Sums& c) {
    const Codes codes = tables<Codes>();
    constexpr int C = chains(M) > 1 ? 2 : 1;
    const size_t x_line = size_t(a.count) * kLine;
    __m512 total[M][2];
    for (int m = 0; m < M; ++m) total[m][0] = total[m][1] = _mm512_setzero_ps();
    const uint8_t* w = p.data;
    const uint8_t* x = a.data + size_t(first) * kLine;
    for (int step = 0; step < p.steps; step += p.group_steps) {
#pragma GCC unroll 2
        for (int part = 0; part < Codes::kParts; ++part) {
            __m512 sum[C][M][2];
            for (int i = 0; i < C; ++i) {
                for (int m = 0; m < M; ++m) sum[i][m][0] = sum[i][m][1] = _mm512_setzero_ps();
            }
            if (Codes::kParts > 1) {
                add_step<Codes, M, C>(codes, w, x, part, sum);
            } else {
                for (int s = 0; s < p.group_steps; ++s, w += 2 * Codes::kCodeBytes, x += x_line) {
                    add_step<Codes, M, C>(codes, w, x, 0, sum);
                }
            }
            for (int tile = 0; tile < 2; ++tile) {
                __m512 scale = Codes::scale(p, step, part, tile);
                for (int m = 0; m < M; ++m) {
                    if (C == 2) sum[0][m][tile] = _mm512_add_ps(sum[0][m][tile], sum[C - 1][m][tile]);
                    total[m][tile] = _mm512_fmadd_ps(scale, sum[0][m][tile], total[m][tile]);
                }
            }
        }
        if (Codes::kParts > 1) w += 2 * Codes::kCodeBytes, x += x_line;
    }
    for (int m = 0; m < M; ++m) {
        for (int tile = 0; tile < 2; ++tile) _mm512_storeu_ps(c.row(first + m) + tile * kTile, total[m][tile]);
    }
}

// --- any number of rows, in passes of nearly equal size

using RowsFn = void (*)(const Panel&, const Rows&, const Slice&, int first, const Sums&);

template <class Kind, size_t... M>
constexpr std::array<RowsFn, sizeof...(M)> plain_table(std::index_sequence<M...>) {
    return {plain_rows<Kind, int(M) + 1>...};
}

template <class Codes, size_t... M>
constexpr std::array<RowsFn, sizeof...(M)> grouped_table(std::index_sequence<M...>) {
    return {grouped_rows<Codes, int(M) + 1>...};
}

template <class Codes, size_t... M>
constexpr std::array<RowsFn, sizeof...(M)> nibble_table(std::index_sequence<M...>) {
    return {nibble_rows<Codes, int(M) + 1>...};
}

template <size_t N>
void in_passes(const std::array<RowsFn, N>& table, const Panel& p, const Rows& a, Slice slice, const Sums& c) {
    int passes = (a.count + int(N) - 1) / int(N);
    for (int i = 0, first = 0; i < passes; ++i) {
        int rows = (a.count - first + passes - i - 1) / (passes - i);
        table[size_t(rows) - 1](p, a, slice, first, c);
        first += rows;
        slice.weights = slice.rows = {};  // prefetched already
    }
}

template <class Kind>
void plain_slice(const Panel& p, const Rows& a, const Slice& slice, const Sums& c) {
    slice.conversion.all();
    static constexpr auto table = plain_table<Kind>(std::make_index_sequence<Kind::kMost>{});
    in_passes(table, p, a, slice, c);
}

template <class Kind>
void plain(const Panel& p, const Rows& a, const Sums& c) {
    plain_slice<Kind>(p, a, {}, c);
}

template <class Codes>
void grouped(const Panel& p, const Rows& a, const Sums& c) {
    static constexpr auto table = grouped_table<Codes>(std::make_index_sequence<6>{});
    in_passes(table, p, a, {}, c);
}

template <class Codes>
void nibbles(const Panel& p, const Rows& a, const Sums& c) {
    static constexpr auto table = nibble_table<Codes>(std::make_index_sequence<8>{});
    in_passes(table, p, a, {}, c);
}

// --- expanding a panel to bf16 for many rows: the scale is folded in, as 16 floats times 2 of each

inline __m512i scaled(__m512i row, __m512 scale) {
    __m512 even = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(row, 16)), scale);
    __m512i high = _mm512_and_si512(row, _mm512_set1_epi32(int(0xFFFF0000)));
    __m512 odd = _mm512_mul_ps(_mm512_castsi512_ps(high), scale);
    // both halves rounded at once, then the odd ones moved up: (low 16 words: even, high 16: odd) -> pairs
    __m512i both = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
    alignas(64) static constexpr uint16_t pairs[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(pairs), both);
}

template <class Codes, bool kScaled>
void expand(const Panel& p, int step, int steps, uint8_t* bf16, uint8_t*) {
    const Codes codes = tables<Codes>();
    const uint8_t* w = p.data + size_t(step) * 2 * Codes::kCodeBytes;
    for (int s = step; s < step + steps; ++s) {
        for (int tile = 0; tile < 2; ++tile, w += Codes::kCodeBytes) {
            for (int part = 0; part < Codes::kParts; ++part) {
                __m512 scale{};
                if (kScaled) scale = Codes::scale(p, s, part, tile);
                constexpr int quarters = 4 / Codes::kParts;
#pragma GCC unroll 4
                for (int i = 0; i < quarters; ++i, bf16 += 4 * kLine) {
                    __m512i row[4];
                    codes.unpack(w, part * quarters + i, row);
                    for (int j = 0; j < 4; ++j) {
                        _mm512_store_si512(bf16 + j * kLine, kScaled ? scaled(row[j], scale) : row[j]);
                    }
                }
            }
        }
    }
}

// --- codes of four bits as int8 for many rows: one scale per output instead of one per group

constexpr float kLargest = 126;  // of what the largest value becomes: product and minimum are rounded each

// Scales of all of K with their inverses, and no sums yet. Nothing is made of scales that are no numbers, whose outputs are none
// either (nor if a bfloat16 is so large that eight of it are none), or so small that they have no inverse: theirs is zero.
template <class Codes>
void int8_scales(const Panel& p, int tile, uint8_t* scales) {
    const __m512 first = _mm512_set1_ps(Codes::kFirst), last = _mm512_set1_ps(Codes::kFirst + 15);
    __m512i most = _mm512_setzero_si512();  // as bits, floats of one sign compare as integers, and NaN is the largest of all
    auto add = [&](__m512 number) { most = _mm512_max_epu32(most, _mm512_castps_si512(_mm512_abs_ps(number))); };
    for (int step = 0; step < p.steps; step += p.group_steps) {
        __m512 scale = Codes::scale(p, step, tile);
        if (Codes::kMinima) {
            __m512 minimum = Codes::minimum(p, step, tile);
            add(_mm512_sub_ps(_mm512_setzero_ps(), minimum));
            add(_mm512_fmsub_ps(last, scale, minimum));
        } else {
            add(_mm512_mul_ps(first, scale));
        }
    }
    __m512 scale = _mm512_mul_ps(_mm512_castsi512_ps(most), _mm512_set1_ps(1 / kLargest));
    __mmask16 usable = _mm512_cmp_ps_mask(scale, _mm512_set1_ps(1e-36f), _CMP_GE_OQ) &
                       _mm512_cmp_ps_mask(scale, _mm512_set1_ps(FLT_MAX), _CMP_LE_OQ);
    _mm512_storeu_ps(scales + tile * kLine, scale);
    _mm512_storeu_si512(scales + (2 + tile) * kLine, _mm512_setzero_si512());
    _mm512_storeu_ps(scales + (4 + tile) * kLine, _mm512_maskz_div_ps(usable, _mm512_set1_ps(1), scale));
}

// A group's numbers in units of the outputs' scales, twice each.
inline __m512i in_units(__m512 numbers, __m512 inverse, float times) {
    __m512 units = _mm512_mul_ps(_mm512_mul_ps(numbers, inverse), _mm512_set1_ps(times));
    __m512i words = _mm512_cvtps_epi32(units);  // what is no number becomes one whose lower half is zero
    return _mm512_ternarylogic_epi32(_mm512_set1_epi32(0xFFFF), words, _mm512_slli_epi32(words, 16), 0xCA);
}

// Of one tile of every step.
template <class Codes, bool kSums>
void narrow_tile(const Panel& p, int step, int steps, int tile, uint8_t* int8, uint8_t* scales) {
    const auto codes = tables<Nibbles<Shifted<Codes>>>();
    if (step == 0) int8_scales<Codes>(p, tile, scales);
    const __m512 inverse = _mm512_loadu_ps(scales + (4 + tile) * kLine);
    __m512i sum = _mm512_loadu_si512(scales + (2 + tile) * kLine), scale{}, minimum{};
    for (int s = 0; s < steps; ++s) {
        if (s % p.group_steps == 0) {
            scale = in_units(Codes::scale(p, step + s, tile), inverse, 1024);  // so that a product's upper half is of whole units
            if (Codes::kMinima) minimum = in_units(Codes::minimum(p, step + s, tile), inverse, 1);
        }
        const uint8_t* w = p.data + size_t(2 * (step + s) + tile) * kNibbleBytes;
        uint8_t* out = int8 + size_t(s / 2 * 2 + tile) * kTileBytes + s % 2 * (kTileBytes / 2);
        if (s % 2 == 0 && s + 1 == steps) std::memset(out + kTileBytes / 2, 0, kTileBytes / 2);
#pragma GCC unroll 4
        for (int quarter = 0; quarter < 4; ++quarter, out += 2 * kLine) {
            __m512i row[4];
            codes.unpack(w, quarter, row);
            for (int i = 0; i < 4; ++i) {
                row[i] = _mm512_mulhrs_epi16(row[i], scale);
                if (Codes::kMinima) row[i] = _mm512_sub_epi16(row[i], minimum);
            }
            for (int i = 0; i < 2; ++i) {
                __m512i line = lower_bytes(row[2 * i], row[2 * i + 1]);
                _mm512_store_si512(out + i * kLine, line);
                if (kSums) sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(char(128)), line);
            }
        }
    }
    _mm512_storeu_si512(scales + (2 + tile) * kLine, sum);
}

template <class Codes, bool kSums>
void narrow(const Panel& p, int step, int steps, uint8_t* int8, uint8_t* scales) {
    for (int tile = 0; tile < 2; ++tile) narrow_tile<Codes, kSums>(p, step, steps, tile, int8, scales);
}

void add_outliers(const Panel& p, const Rows& a, int first, bool last, const Sums& c) {
    for (int m = 0; m < a.count; ++m) {
        for (int i = 0; i < a.outliers[m].count; ++i) {
            int k = a.outliers[m].at[i].input - first * kLine;
            if (k < 0 || k >= p.steps * kLine) continue;
            const uint8_t* w = p.data + size_t(k / kLine) * 2 * kTileBytes + k % kLine / 4 * kLine;
            const __m128i shift = _mm_cvtsi32_si128(24 - k % 4 * 8);
            for (int tile = 0; tile < 2; ++tile) {
                __m512i codes = _mm512_srai_epi32(_mm512_sll_epi32(load(w + tile * kTileBytes), shift), 24);
                __m512i products = _mm512_mullo_epi32(codes, _mm512_set1_epi32(a.outliers[m].at[i].code));
                float* at = c.row(m) + tile * kTile;
                if (last) {
                    __m512 scale = _mm512_mul_ps(_mm512_loadu_ps(p.scales + tile * kLine), _mm512_set1_ps(a.scales[m]));
                    _mm512_storeu_ps(at, _mm512_fmadd_ps(_mm512_cvtepi32_ps(products), scale, _mm512_loadu_ps(at)));
                } else {
                    _mm512_storeu_si512(at, _mm512_add_epi32(_mm512_loadu_si512(at), products));
                }
            }
        }
    }
}

template <class Codes>
void add_group(const Panel& p, int step, int rows, const Sums& from, const Sums& to) {
    __m512 scale[2] = {Codes::scale(p, step, 0, 0), Codes::scale(p, step, 0, 1)};
    for (int m = 0; m < rows; ++m) {
        for (int tile = 0; tile < 2; ++tile) {
            float* at = to.row(m) + tile * kTile;
            __m512 sum = step ? _mm512_loadu_ps(at) : _mm512_setzero_ps();
            _mm512_storeu_ps(at, _mm512_fmadd_ps(scale[tile], _mm512_loadu_ps(from.row(m) + tile * kTile), sum));
        }
    }
}

// Measured on Zen 5 for eight and six bits: with 8 rows, unpacking in every pass is still faster than expanding to bf16; with 12 it
// is not.
constexpr int kCrossover = 10;

template <class Codes>
Path four_bits() {
    Path path{nibbles<Codes>, nullptr, plain_slice<Int8>, narrow<Codes, true>, kCrossover, true};
    path.convert_signed = narrow<Codes, false>;
    path.pack_few = pack_steps, path.pack_int8 = pack_int8<128>, path.add_outliers = add_outliers;
    return path;
}

}  // namespace

const Kernels& avx512_kernels() {
    static const Kernels kernels = {
        {{plain<Bf16>, plain<Bf16>, plain_slice<Bf16>, nullptr, 0},
         int8_path(plain<Int8>, plain_slice<Int8>),
         four_bits<Int4>(),
         four_bits<Int4>(),
         {grouped<Fp8>, nullptr, plain_slice<Bf16>, expand<Fp8, true>, kCrossover, false, expand<Fp8, false>, add_group<Fp8>},
         {grouped<Q8>, nullptr, plain_slice<Bf16>, expand<Q8, true>, kCrossover, false, expand<Q8, false>, add_group<Q8>},
         four_bits<Q4K>(),
         {grouped<Q6K>, nullptr, plain_slice<Bf16>, expand<Q6K, true>, kCrossover}},
        pack_bf16,
        swiglu,
        put,
        settle,
        combine,
    };
    return kernels;
}

}  // namespace cpu_experts
