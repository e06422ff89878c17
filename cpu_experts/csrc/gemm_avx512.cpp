// Kernels for AVX-512 with VNNI, BF16 and VBMI: for few rows of every format, and for many where there are no tiles.
//
// Each step of the K loop loads two lines of weights (one a tile) and multiplies them by one broadcast word of every row, so a
// panel is read once for up to 12 rows. Few rows are bound by memory; there the sums are split, or one row's two chains of
// dependent additions would set the pace.
#include <immintrin.h>

#include <array>
#include <utility>

#include "elementwise.h"
#include "prefetch.h"

namespace cpu_experts {
namespace {

inline __m512i load(const uint8_t* at) { return _mm512_load_si512(at); }

inline __m512i broadcast(const uint8_t* at) {
    int word;
    std::memcpy(&word, at, 4);
    return _mm512_set1_epi32(word);
}

constexpr int chains(int m) { return m <= 2 ? 4 : 1; }  // four for four rows spilled: half the speed

// --- bf16 and int8: the packed lines are what the instruction multiplies

struct Bf16 {
    using Sum = __m512;
    static constexpr size_t kMost = 12;  // rows a pass
    static Sum zero() { return _mm512_setzero_ps(); }
    static Sum add(Sum a, Sum b) { return _mm512_add_ps(a, b); }
    static Sum dot(Sum sum, __m512i x, __m512i w) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w); }
    static __m512 finish(Sum sum, const Panel&, int, float) { return sum; }
};

struct Int8 {
    using Sum = __m512i;
    static constexpr size_t kMost = 8;  // of 12 gcc spills some sums: 450 in place of 790 Gop/s on Zen 5
    static Sum zero() { return _mm512_setzero_si512(); }
    static Sum add(Sum a, Sum b) { return _mm512_add_epi32(a, b); }
    static Sum dot(Sum sum, __m512i x, __m512i w) { return _mm512_dpbusd_epi32(sum, x, w); }
    static __m512 finish(Sum sum, const Panel& p, int tile, float row_scale) {
        __m512 scale = _mm512_mul_ps(_mm512_loadu_ps(p.scales + tile * kLine), _mm512_set1_ps(row_scale));
        return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(sum, load(p.scales + (2 + tile) * kLine))), scale);
    }
};

template <class Kind, int M>
void plain_rows(const Panel& p, const Rows& a, int first, const Sums& c) {
    constexpr int C = chains(M);
    typename Kind::Sum sum[C][M][2];
    for (int i = 0; i < C; ++i) {
        for (int m = 0; m < M; ++m) sum[i][m][0] = sum[i][m][1] = Kind::zero();
    }
    const uint8_t* w = p.data;
    const uint8_t* x = a.data + size_t(first) * kLine;
    for (int s = 0; s < p.steps; ++s, w += 2 * kTileBytes, x += size_t(a.count) * kLine) {
#pragma GCC unroll 4
        for (int row = 0; row < 16; ++row) {
            prefetch(w + row * kLine);
            prefetch(w + kTileBytes + row * kLine);
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
            _mm512_storeu_ps(c.row(first + m) + tile * kTile, Kind::finish(sum[0][m][tile], p, tile, row_scale));
        }
    }
}

// --- codes of other formats: made bf16 in registers, exactly; scales multiply the sum of a group

struct Int4 {
    static constexpr int kCodeBytes = 256;
    __m512i values;  // -8 to 7 as bf16, twice: the lookup takes five bits, of which the fifth is the next code's
    Int4() {
        alignas(64) uint16_t table[32];
        for (int i = 0; i < 32; ++i) table[i] = to_bf16(float(i % 16 - 8));
        values = _mm512_load_si512(table);
    }
    // Rows 4 * quarter to 4 * quarter + 3 of a tile.
    void unpack(const uint8_t* codes, int quarter, __m512i* row) const {
        __m512i packed = load(codes + quarter * kLine);
        row[0] = _mm512_permutexvar_epi16(packed, values);
        row[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(packed, 4), values);
        row[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(packed, 8), values);
        row[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(packed, 12), values);
    }
    static __m512 scale(const Panel& p, int group, int tile) {
        const uint8_t* at = p.scales + (size_t(group) * kPanel + tile * kTile) * 2;
        __m512i wide = _mm512_cvtepu16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(at)));
        return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }
};

// A byte has a sign and one of 128 sizes: both bytes of each one's bf16 come from tables, denormals and NaN of E4M3 included.
template <class Kind>
struct Bytes {
    static constexpr int kCodeBytes = 512;
    __m512i low[2], high[2];
    Bytes() {
        alignas(64) uint8_t bytes[2][128];
        for (int i = 0; i < 128; ++i) {
            uint16_t b = to_bf16(Kind::value(uint8_t(i)));
            bytes[0][i] = uint8_t(b);
            bytes[1][i] = uint8_t(b >> 8);
        }
        for (int i = 0; i < 2; ++i) {
            low[i] = _mm512_load_si512(bytes[0] + 64 * i);
            high[i] = _mm512_load_si512(bytes[1] + 64 * i);
        }
    }
    void unpack(const uint8_t* codes, int quarter, __m512i* row) const {
        for (int i = 0; i < 2; ++i) {
            __m512i packed = load(codes + (quarter * 2 + i) * kLine);
            __m512i sign = _mm512_and_si512(packed, _mm512_set1_epi8(char(0x80)));
            __m512i l = _mm512_permutex2var_epi8(low[0], packed, low[1]);
            __m512i h = _mm512_or_si512(_mm512_permutex2var_epi8(high[0], packed, high[1]), sign);
            h = Kind::corrected(h, packed);
            row[2 * i] = _mm512_unpacklo_epi8(l, h);
            row[2 * i + 1] = _mm512_unpackhi_epi8(l, h);
        }
    }
    static __m512 scale(const Panel& p, int group, int tile) { return Kind::scales(p, group, tile); }
};

struct Fp8Bytes : Fp8Codes {
    static __m512i corrected(__m512i high, __m512i) { return high; }
    static __m512 scales(const Panel& p, int group, int tile) { return _mm512_set1_ps(scale(p, group, tile, 0)); }
};

struct Q8Bytes : Q8Codes {
    // -128, which the negative zero stands for, is 0xC300.
    static __m512i corrected(__m512i high, __m512i packed) {
        __mmask64 least = _mm512_cmpeq_epi8_mask(packed, _mm512_set1_epi8(char(0x80)));
        return _mm512_mask_mov_epi8(high, least, _mm512_set1_epi8(char(0xC3)));
    }
    static __m512 scales(const Panel& p, int group, int tile) {
        const uint8_t* at = p.scales + (size_t(group) * kPanel + size_t(tile * kTile)) * 2;
        return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(at)));
    }
};

using Fp8 = Bytes<Fp8Bytes>;
using Q8 = Bytes<Q8Bytes>;

// Tables are made once; a copy of them can stay in registers.
template <class Codes>
Codes tables() {
    static const Codes made;
    return made;
}

// One step of K: sums of M rows by two tiles, each in C parts.
template <class Codes, int M, int C>
__attribute__((always_inline)) inline void add_step(const Codes& codes, const uint8_t* w, const uint8_t* x,
                                                    __m512 (&sum)[C][M][2]) {
    for (int line = 0; line < 2 * Codes::kCodeBytes; line += kLine) prefetch(w + line);
#pragma GCC unroll 4
    for (int quarter = 0; quarter < 4; ++quarter) {
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
void grouped_rows(const Panel& p, const Rows& a, int first, const Sums& c) {
    const Codes codes = tables<Codes>();
    constexpr int C = chains(M) > 1 ? 2 : 1;
    __m512 total[M][2];
    for (int m = 0; m < M; ++m) total[m][0] = total[m][1] = _mm512_setzero_ps();
    const uint8_t* w = p.data;
    const uint8_t* x = a.data + size_t(first) * kLine;
    for (int group = 0; group * p.group_steps < p.steps; ++group) {
        __m512 sum[C][M][2];
        for (int i = 0; i < C; ++i) {
            for (int m = 0; m < M; ++m) sum[i][m][0] = sum[i][m][1] = _mm512_setzero_ps();
        }
        for (int s = 0; s < p.group_steps; ++s, w += 2 * Codes::kCodeBytes, x += size_t(a.count) * kLine) {
            add_step<Codes, M, C>(codes, w, x, sum);
        }
        for (int tile = 0; tile < 2; ++tile) {
            __m512 scale = Codes::scale(p, group, tile);
            for (int m = 0; m < M; ++m) {
                if (C == 2) sum[0][m][tile] = _mm512_add_ps(sum[0][m][tile], sum[C - 1][m][tile]);
                total[m][tile] = _mm512_fmadd_ps(scale, sum[0][m][tile], total[m][tile]);
            }
        }
    }
    for (int m = 0; m < M; ++m) {
        for (int tile = 0; tile < 2; ++tile) _mm512_storeu_ps(c.row(first + m) + tile * kTile, total[m][tile]);
    }
}

// --- any number of rows, in passes of nearly equal size

using RowsFn = void (*)(const Panel&, const Rows&, int first, const Sums&);

template <class Kind, size_t... M>
constexpr std::array<RowsFn, sizeof...(M)> plain_table(std::index_sequence<M...>) {
    return {plain_rows<Kind, int(M) + 1>...};
}

template <class Codes, size_t... M>
constexpr std::array<RowsFn, sizeof...(M)> grouped_table(std::index_sequence<M...>) {
    return {grouped_rows<Codes, int(M) + 1>...};
}

template <size_t N>
void in_passes(const std::array<RowsFn, N>& table, const Panel& p, const Rows& a, const Sums& c) {
    int passes = (a.count + int(N) - 1) / int(N);
    for (int i = 0, first = 0; i < passes; ++i) {
        int rows = (a.count - first + passes - i - 1) / (passes - i);
        table[size_t(rows) - 1](p, a, first, c);
        first += rows;
    }
}

template <class Kind>
void plain(const Panel& p, const Rows& a, const Sums& c) {
    static constexpr auto table = plain_table<Kind>(std::make_index_sequence<Kind::kMost>{});
    in_passes(table, p, a, c);
}

template <class Codes>
void grouped(const Panel& p, const Rows& a, const Sums& c) {
    static constexpr auto table = grouped_table<Codes>(std::make_index_sequence<6>{});
    in_passes(table, p, a, c);
}

// --- expanding a panel to bf16 for many rows: the scale is folded in, as 16 floats times 2 of each

inline __m512i scaled(__m512i row, __m512 scale) {
    __m512 even = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(row, 16)), scale);
    __m512 odd = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(row, _mm512_set1_epi32(int(0xFFFF0000)))), scale);
    // both halves rounded at once, then the odd ones moved up: (low 16 words: even, high 16: odd) -> pairs
    __m512i both = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
    alignas(64) static constexpr uint16_t pairs[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(pairs), both);
}

template <class Codes>
void expand(const Panel& p, uint8_t* bf16) {
    const Codes codes = tables<Codes>();
    const uint8_t* w = p.data;
    for (int s = 0; s < p.steps; ++s) {
        for (int tile = 0; tile < 2; ++tile, w += Codes::kCodeBytes) {
            __m512 scale = Codes::scale(p, s / p.group_steps, tile);
            for (int quarter = 0; quarter < 4; ++quarter, bf16 += 4 * kLine) {
                __m512i row[4];
                codes.unpack(w, quarter, row);
                for (int i = 0; i < 4; ++i) _mm512_store_si512(bf16 + i * kLine, scaled(row[i], scale));
            }
        }
    }
}

}  // namespace

const Kernels& avx512_kernels() {
    // Crossovers are measured on Zen 5: with 8 rows, unpacking in every pass is still faster than expanding; with 12 it is not.
    static const Kernels kernels = {
        {{plain<Bf16>, plain<Bf16>, nullptr, 0},
         {plain<Int8>, plain<Int8>, nullptr, 0},
         {grouped<Int4>, plain<Bf16>, expand<Int4>, 10},
         {grouped<Int4>, plain<Bf16>, expand<Int4>, 10},
         {grouped<Fp8>, plain<Bf16>, expand<Fp8>, 10},
         {grouped<Q8>, plain<Bf16>, expand<Q8>, 10}},
        pack_bf16,
        pack_int8,
        swiglu_bf16,
        swiglu_f32,
        combine,
    };
    return kernels;
}

}  // namespace cpu_experts
