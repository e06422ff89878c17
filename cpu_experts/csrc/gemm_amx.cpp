// Kernels for AMX tiles, for more than a few rows; the few-row paths are AVX-512's, on the same packed weights. Codes of four bits
// become int8. Bytes whose scales are a group's go to the tiles as they are for up to 16 rows; for more they become bf16.
//
// Up to 32 rows by a panel: tiles 0 and 1 hold rows, 2 and 3 weights, 4 to 7 the four sums. Tiles have as many rows as there are,
// so nothing is read or written beyond the last one. Configured anew in every subtask at least, for the calling thread may have
// used tiles for something else in between, and released at its end.
#include "elementwise.h"
#include "prefetch.h"
#include "tiles.h"

namespace cpu_experts {
namespace {

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t line_bytes[16] = {};
    uint8_t rows[16] = {};

    constexpr TileConfig() = default;
    constexpr explicit TileConfig(int count) {
        int upper = count < kTile ? count : kTile, lower = count - upper;
        set(0, upper), set(1, lower), set(2, kTile), set(3, kTile);
        set(4, upper), set(5, upper), set(6, lower), set(7, lower);
    }
    constexpr void set(int tile, int n) {
        line_bytes[tile] = uint16_t(n ? kLine : 0);
        rows[tile] = uint8_t(n);
    }
};

// For every number of rows. Constants, for gcc 12 takes _tile_loadconfig to read no more than eight bytes of what it is given,
// and drops the stores to the rest.
struct Configs {
    TileConfig of[kBlock + 1];
    constexpr Configs() {
        for (int count = 1; count <= kBlock; ++count) of[count] = TileConfig(count);
    }
};

constexpr Configs configs;

struct Bf16 {
    static void upper() {
        _tile_dpbf16ps(4, 0, 2);
        _tile_dpbf16ps(5, 0, 3);
    }
    static void lower() {
        _tile_dpbf16ps(6, 1, 2);
        _tile_dpbf16ps(7, 1, 3);
    }
};

struct SignedInt8 {
    static void upper() {
        _tile_dpbssd(4, 0, 2);
        _tile_dpbssd(5, 0, 3);
    }
    static void lower() {
        _tile_dpbssd(6, 1, 2);
        _tile_dpbssd(7, 1, 3);
    }
};

struct Int8 {
    static void upper() {
        _tile_dpbusd(4, 0, 2);
        _tile_dpbusd(5, 0, 3);
    }
    static void lower() {
        _tile_dpbusd(6, 1, 2);
        _tile_dpbusd(7, 1, 3);
    }
};

void zero_sums(bool lower) {
    _tile_zero(4);
    _tile_zero(5);
    if (!lower) return;
    _tile_zero(6);
    _tile_zero(7);
}

void load_sums(bool lower, const Sums& c) {
    const long line = long(c.line * sizeof(float));
    _tile_loadd(4, c.at, line);
    _tile_loadd(5, c.at + kTile, line);
    if (!lower) return;
    _tile_loadd(6, c.row(kTile), line);
    _tile_loadd(7, c.row(kTile) + kTile, line);
}

void store_sums(bool lower, const Sums& c) {
    const long line = long(c.line * sizeof(float));
    _tile_stored(4, c.at, line);
    _tile_stored(5, c.at + kTile, line);
    if (!lower) return;
    _tile_stored(6, c.row(kTile), line);
    _tile_stored(7, c.row(kTile) + kTile, line);
}

// `ask` is called in every step. Rows pass by the L1, where short slices' weights stay.
template <class Kind, class Ask>
void add_steps(const Panel& p, const Rows& a, bool lower, Ask ask) {
    const uint8_t* w = p.data;
    const uint8_t* x = a.data;
    const size_t x_line = size_t(a.count) * kLine;
    if (!lower) {
        for (int s = 0; s < p.steps; ++s, w += 2 * kTileBytes, x += x_line) {
            _tile_stream_loadd(0, x, kLine);
            _tile_loadd(2, w, kLine);
            _tile_loadd(3, w + kTileBytes, kLine);
            ask();
            Kind::upper();
        }
        return;
    }
    for (int s = 0; s < p.steps; ++s, w += 2 * kTileBytes, x += x_line) {
        _tile_stream_loadd(0, x, kLine);
        _tile_loadd(2, w, kLine);
        _tile_loadd(3, w + kTileBytes, kLine);
        _tile_stream_loadd(1, x + kTileBytes, kLine);
        ask();
        Kind::upper();
        Kind::lower();
    }
}

// Lines that are converted at a time: few, so that converting the next overlaps with multiplying these.
constexpr int kPiece = 2;

template <class Kind>
void slice_sums(const Panel& p, const Rows& a, const Slice& slice, const Sums& c) {
    bool lower = a.count > kTile;
    Ahead weights = slice.weights, rows = slice.rows;
    if (slice.configure) _tile_loadconfig(&configs.of[a.count]);
    slice.first ? zero_sums(lower) : load_sums(lower, c);
    auto ask = [&] { prefetch(weights), prefetch(rows); };
    const Conversion& codes = slice.conversion;
    for (int line = 0; codes && line < p.steps; line += kPiece) {
        int count = p.steps - line < kPiece ? p.steps - line : kPiece;
        uint8_t* to = codes.to + (codes.once ? 0 : size_t(line) * 2 * kTileBytes);
        codes.lines(line, count, to);
        add_steps<Kind>({to, p.scales, count, 1}, {a.data + size_t(line) * size_t(a.count) * kLine, a.count, a.scales}, lower, ask);
    }
    if (!codes) add_steps<Kind>(p, a, lower, ask);
    store_sums(lower, c);
    if (slice.release) _tile_release();
}

// A block times codes as they are, a group at a time, whose sums leave the tiles to be scaled. Tiles wait for what was just stored,
// so a group is unpacked while the previous one is multiplied, and scaled after the next one. For 2 to 16 rows per expert: with
// more, expanding the codes to bf16 is faster (docs/design/cpu_experts.md).
template <Precision P>
void block_codes(const Panel& p, const Rows& a, const Sums& c) {
    const Path& codes = few_row_kernels().paths[P];
    constexpr int kMost = 4;  // steps of a group
    alignas(kLine) uint8_t weights[2][kMost * 2 * kTileBytes];
    alignas(kLine) float parts[2][kBlock * kPanel];
    const size_t step_bytes = 2 * size_t(kFormats[P].tile_bytes), x_step = size_t(a.count) * kLine;
    auto rows = [&](int step) { return Rows{a.data + size_t(step) * x_step, a.count, nullptr}; };
    auto unpack = [&](int step, int to) {
        const uint8_t* at = p.data + size_t(step) * step_bytes;
        for (size_t line = 0; line < size_t(p.group_steps) * step_bytes; line += kLine) prefetch(at + line);
        codes.unpack(p, step, p.group_steps, weights[to], nullptr);
    };
    bool lower = a.count > kTile;
    _tile_loadconfig(&configs.of[a.count]);
    unpack(0, 0);
    for (int step = 0, now = 0; step < p.steps; step += p.group_steps, now ^= 1) {
        if (step + p.group_steps < p.steps) unpack(step + p.group_steps, now ^ 1);
        zero_sums(lower);
        add_steps<Bf16>({weights[now], nullptr, p.group_steps, p.group_steps}, rows(step), lower, [] {});
        store_sums(lower, {parts[now], kPanel});
        int before = step - p.group_steps;
        if (before >= 0) codes.add_scaled(p, before, a.count, {parts[now ^ 1], kPanel}, c);
    }
    int last = p.steps - p.group_steps;
    codes.add_scaled(p, last, a.count, {parts[last / p.group_steps % 2], kPanel}, c);
    _tile_release();
}

void scale_int8(const Panel& p, const Rows& a, const Sums& c) {
    float scales[kPanel];
    uint32_t bias[kPanel];  // unsigned, to wrap: damaged weights may hold any bias
    std::memcpy(scales, p.scales, sizeof scales);
    std::memcpy(bias, p.scales + sizeof scales, sizeof bias);
    for (int m = 0; m < a.count; ++m) {
        float* sum = c.row(m);
        for (int n = 0; n < kPanel; ++n) sum[n] = float(int32_t(bits_of(sum[n]) - bias[n])) * (a.scales[m] * scales[n]);
    }
}

template <class Kind>
void slice_int8(const Panel& p, const Rows& a, const Slice& slice, const Sums& c) {
    slice_sums<Kind>(p, a, slice, c);
    if (slice.last) scale_int8(p, a, c);
}

template <Precision P>
void set_block(Kernels& kernels) {
    Path& path = kernels.paths[P];
    path.block = block_codes<P>, path.crossover = 1, path.most = kTile;
}

}  // namespace

const Kernels& amx_kernels() {
    static const Kernels kernels = [] {
        Kernels k = few_row_kernels();
        for (Path& path : k.paths) {
            path.slice = slice_sums<Bf16>;
            if (path.narrows) {
                path.slice = slice_int8<SignedInt8>, path.convert = path.convert_signed, path.pack_int8 = pack_int8<0>;
            }
            path.crossover = path.convert ? 8 : 4;
        }
        set_block<kFp8Block>(k), set_block<kQ8_0>(k);
        k.paths[kBf16].block = k.paths[kInt8].block = nullptr;
        k.paths[kInt8].slice = slice_int8<Int8>;
        return k;
    }();
    return kernels;
}

}  // namespace cpu_experts
