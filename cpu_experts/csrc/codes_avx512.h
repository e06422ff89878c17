// The codes of each format in registers, exactly, by AVX-512 with VBMI: as bf16, those of four bits as integers. Scales and minima
// are left to whoever multiplies.
#pragma once

#include <immintrin.h>

#include "expand.h"

namespace cpu_experts {
namespace {

inline __m512i load(const uint8_t* at) { return _mm512_load_si512(at); }

inline __m512i broadcast(const uint8_t* at) {
    int word;
    std::memcpy(&word, at, 4);
    return _mm512_set1_epi32(word);
}

constexpr int kNibbleBytes = 256;  // of a tile of four bits

struct NoMinima {
    static constexpr bool kMinima = false;
    static __m512 minimum(const Panel&, int, int) { return _mm512_setzero_ps(); }
};

template <class Kind>
struct Nibbles {
    __m512i values;  // of the 16 codes, twice: the lookup takes five bits, of which the fifth is the next code's
    Nibbles() {
        alignas(64) uint16_t table[32];
        for (int i = 0; i < 32; ++i) table[i] = Kind::word(i % 16);
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
};

// Sixteen outputs' numbers of a tile, as floats.
inline __m512 halves(const uint8_t* at) { return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(at))); }
inline __m128i sixteen(const uint8_t* at) { return _mm_load_si128(reinterpret_cast<const __m128i*>(at)); }

struct Int4 : NoMinima {
    static constexpr int kFirst = -8;  // what code 0 stands for
    static __m512 scale(const Panel& p, int step, int tile) {
        const uint8_t* at = p.scales + (size_t(step / p.group_steps) * kPanel + size_t(tile * kTile)) * 2;
        __m512i wide = _mm512_cvtepu16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(at)));
        return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }
};

struct Q4K {
    static constexpr int kFirst = 0;
    static constexpr bool kMinima = true;
    static __m512 scale(const Panel& p, int step, int tile) {
        int i = step % 8, n = tile * kTile;
        __m512i six = i < 4 ? bits(p, step, i, n, 63) : late(bits(p, step, 4 + i, n, 15), p, step, i - 4, n);
        return _mm512_mul_ps(halves(Q4KCodes::half(p, step, 0, n)), _mm512_cvtepi32_ps(six));
    }
    static __m512 minimum(const Panel& p, int step, int tile) {
        int i = step % 8, n = tile * kTile;
        __m512i six = bits(p, step, 4 + i, n, i < 4 ? 63 : 0xF0);
        if (i >= 4) six = late(_mm512_srli_epi32(six, 4), p, step, i, n);
        return _mm512_mul_ps(halves(Q4KCodes::half(p, step, 1, n)), _mm512_cvtepi32_ps(six));
    }

private:
    static __m512i bits(const Panel& p, int step, int i, int n, int mask) {
        return _mm512_and_si512(_mm512_cvtepu8_epi32(sixteen(Q4KCodes::byte(p, step, i, n))), _mm512_set1_epi32(mask));
    }
    static __m512i late(__m512i low, const Panel& p, int step, int i, int n) {
        return _mm512_or_si512(low, _mm512_srli_epi32(bits(p, step, i, n, 0xC0), 2));
    }
};

// What codes stand for, in 16 bits, to be multiplied by scales of 10 binary places.
template <class Codes>
struct Shifted {
    static uint16_t word(int code) { return uint16_t((Codes::kFirst + code) * 32); }
};

// A byte has a sign and one of 128 sizes: both bytes of each one's bf16 come from tables, denormals and NaN of E4M3 included.
template <class Kind>
struct Bytes {
    static constexpr int kParts = 1;  // of a step, by scales
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
    static __m512 scale(const Panel& p, int step, int, int tile) { return Kind::scales(p, step, tile); }
};

struct Fp8Bytes : Fp8Codes {
    static __m512i corrected(__m512i high, __m512i) { return high; }
    static __m512 scales(const Panel& p, int step, int tile) { return _mm512_set1_ps(scale(p, step, 0, tile * kTile)); }
};

struct Q8Bytes : Q8Codes {
    // -128, which the negative zero stands for, is 0xC300.
    static __m512i corrected(__m512i high, __m512i packed) {
        __mmask64 least = _mm512_cmpeq_epi8_mask(packed, _mm512_set1_epi8(char(0x80)));
        return _mm512_mask_mov_epi8(high, least, _mm512_set1_epi8(char(0xC3)));
    }
    static __m512 scales(const Panel& p, int step, int tile) {
        return halves(p.scales + (size_t(step) * kPanel + size_t(tile * kTile)) * 2);
    }
};

// Six bits: each byte of their bf16 comes from a table of 64, whose lookup takes no more bits than these.
struct Q6K {
    static constexpr int kCodeBytes = Q6KCodes::kCodeBytes, kParts = 2;
    __m512i low, high;
    Q6K() {
        alignas(64) uint8_t bytes[2][64];
        for (int i = 0; i < 64; ++i) {
            uint16_t b = to_bf16(Q6KCodes::value(uint8_t(i)));
            bytes[0][i] = uint8_t(b);
            bytes[1][i] = uint8_t(b >> 8);
        }
        low = _mm512_load_si512(bytes[0]), high = _mm512_load_si512(bytes[1]);
    }
    void unpack(const uint8_t* codes, int quarter, __m512i* row) const {
        const __m512i nibble = _mm512_set1_epi8(15);
        __m512i four = load(codes + quarter * kLine), two = load(codes + 256 + quarter / 2 * kLine);
        if (quarter % 2) two = _mm512_srli_epi16(two, 4);
        constexpr int choose = 0xCA;  // where the mask has ones the second, else the third
        __m512i first = _mm512_ternarylogic_epi32(nibble, four, _mm512_slli_epi16(two, 4), choose);
        __m512i second = _mm512_ternarylogic_epi32(nibble, _mm512_srli_epi16(four, 4), _mm512_slli_epi16(two, 2), choose);
        interleave(first, row);
        interleave(second, row + 2);
    }
    static __m512 scale(const Panel& p, int step, int part, int tile) {
        __m512i integers = _mm512_cvtepi8_epi32(sixteen(Q6KCodes::byte(p, step, step % 8 * 2 + part, tile * kTile)));
        return _mm512_mul_ps(halves(Q6KCodes::half(p, step, 0, tile * kTile)), _mm512_cvtepi32_ps(integers));
    }

private:
    void interleave(__m512i codes, __m512i* row) const {
        __m512i l = _mm512_permutexvar_epi8(codes, low), h = _mm512_permutexvar_epi8(codes, high);
        row[0] = _mm512_unpacklo_epi8(l, h);
        row[1] = _mm512_unpackhi_epi8(l, h);
    }
};

using Fp8 = Bytes<Fp8Bytes>;
using Q8 = Bytes<Q8Bytes>;

// Words of two rows (16 outputs by 2 inputs) as one of bytes (by 4): the lower of each.
inline __m512i lower_bytes(__m512i first, __m512i second) {
    alignas(64) static constexpr auto from = [] {
        struct Bytes {
            uint8_t at[64];
        } made{};
        for (int n = 0; n < 16; ++n) {
            for (int k = 0; k < 4; ++k) made.at[4 * n + k] = uint8_t(k / 2 * 64 + 4 * n + k % 2 * 2);
        }
        return made;
    }();
    return _mm512_permutex2var_epi8(first, load(from.at), second);
}

// Tables are made once; a copy of them can stay in registers.
template <class Codes>
Codes tables() {
    static const Codes made;
    return made;
}

}  // namespace
}  // namespace cpu_experts
