// A model of AMX's tiles, as Intel's manual describes them. Only what gemm_amx.cpp uses; arguments outside a tile's
// configuration abort, where the processor would fault.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace cpu_experts {
namespace {

struct Tile {
    int rows = 0, bytes = 0;
    alignas(64) uint8_t data[16][64] = {};
};

thread_local Tile tiles[8];

inline void must(bool holds) {
    if (!holds) std::abort();
}

inline void _tile_loadconfig(const void* config) {
    const auto* bytes = static_cast<const uint8_t*>(config);
    must(bytes[0] == 1);
    for (int t = 0; t < 8; ++t) {
        uint16_t line;
        std::memcpy(&line, bytes + 16 + 2 * t, 2);
        tiles[t] = Tile{};
        tiles[t].rows = bytes[48 + t], tiles[t].bytes = line;
        must(tiles[t].rows <= 16 && line <= 64 && (tiles[t].rows == 0) == (line == 0));
    }
}

inline void _tile_release() {
    for (Tile& t : tiles) t = Tile{};
}

inline void _tile_zero(int t) {
    must(tiles[t].rows > 0);
    std::memset(tiles[t].data, 0, sizeof tiles[t].data);
}

inline void _tile_loadd(int t, const void* from, long stride) {
    must(tiles[t].rows > 0);
    for (int r = 0; r < tiles[t].rows; ++r) {
        const auto* line = static_cast<const uint8_t*>(from) + r * stride;
        for (int b = 0; b < tiles[t].bytes; ++b) tiles[t].data[r][b] = line[b];  // no memcpy: a sanitizer sees each byte
    }
}

inline void _tile_stream_loadd(int t, const void* from, long stride) { _tile_loadd(t, from, stride); }

inline void _tile_stored(int t, void* to, long stride) {
    must(tiles[t].rows > 0);
    for (int r = 0; r < tiles[t].rows; ++r) {
        auto* line = static_cast<uint8_t*>(to) + r * stride;
        for (int b = 0; b < tiles[t].bytes; ++b) line[b] = tiles[t].data[r][b];
    }
}

inline void same_shape(int c, int a, int b) {
    must(tiles[c].rows == tiles[a].rows && tiles[a].rows > 0);
    must(tiles[a].bytes == tiles[b].rows * 4 && tiles[c].bytes == tiles[b].bytes);
}

template <class Number>
Number& at(int t, int row, int n) {
    return reinterpret_cast<Number*>(tiles[t].data[row])[n];
}

inline float widened(uint16_t b) {
    uint32_t bits = uint32_t(b) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline void _tile_dpbf16ps(int c, int a, int b) {
    same_shape(c, a, b);
    for (int m = 0; m < tiles[c].rows; ++m) {
        for (int k = 0; k < tiles[b].rows; ++k) {
            for (int n = 0; n < tiles[c].bytes / 4; ++n) {
                for (int i = 0; i < 2; ++i) {
                    at<float>(c, m, n) += widened(at<uint16_t>(a, m, 2 * k + i)) * widened(at<uint16_t>(b, k, 2 * n + i));
                }
            }
        }
    }
}

template <class Row>
void add_bytes(int c, int a, int b) {
    same_shape(c, a, b);
    for (int m = 0; m < tiles[c].rows; ++m) {
        for (int k = 0; k < tiles[b].rows; ++k) {
            for (int n = 0; n < tiles[c].bytes / 4; ++n) {
                for (int i = 0; i < 4; ++i)
                    at<int32_t>(c, m, n) += int32_t(at<Row>(a, m, 4 * k + i)) * at<int8_t>(b, k, 4 * n + i);
            }
        }
    }
}

inline void _tile_dpbusd(int c, int a, int b) { add_bytes<uint8_t>(c, a, b); }
inline void _tile_dpbssd(int c, int a, int b) { add_bytes<int8_t>(c, a, b); }

}  // namespace
}  // namespace cpu_experts
