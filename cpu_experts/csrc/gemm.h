// What a kernel multiplies, and the table of kernels of each instruction set.
//
// Weights come in panels of 32 outputs: two tiles of 16, side by side in every K step (layout.py). In `gate_up` the first tile is
// gate's and the second up's, so that SwiGLU needs one panel only. Rows (tokens) come in blocks of up to 32, K step by K step:
// [step][row][64 bytes], with no rows added, whatever the count: AMX loads a tile of A from 64-byte lines that follow each other.
// (Row by row, 2048 columns of bf16 are 4 KiB apart, and the 16 rows of a tile fall into one set of the L1 cache.)
#pragma once

#include <cstddef>
#include <cstdint>

namespace cpu_experts {

constexpr int kTile = 16;
constexpr int kPanel = 2 * kTile;
constexpr int kBlock = 32;
constexpr int kLine = 64;
constexpr int kTileBytes = kTile * kLine;

enum Precision { kBf16, kInt8, kInt4G32, kInt4G128, kFp8Block, kQ8_0, kQ4_K, kQ6_K, kPrecisions };
enum Isa { kBest, kPortable, kAvx2, kAvx512, kAmx };

// How K is cut in one precision, and what a panel's two sections take.
struct Format {
    int step_k;       // values of K in a step: a row's 64 bytes
    int group_k;      // K is padded to a multiple of it
    int block_k;      // and must be one of this
    int tile_bytes;   // of one tile of one step, as packed
    int scale_bytes;  // of a group's scales; of a panel's where `per_panel`
    bool per_panel;
};

// clang-format off
constexpr Format kFormats[kPrecisions] = {
    {32, 32, 1, 1024, 0, true},       // bf16
    {64, 64, 1, 1024, 256, true},     // int8: 32 float scales, then 32 times 128 * (sum of the output's codes)
    {32, 32, 1, 256, 64, false},      // int4: 32 bfloat16 scales a group
    {32, 128, 1, 256, 64, false},
    {32, 128, 1, 512, 8, false},      // FP8: a float scale a tile and group
    {32, 32, 1, 512, 64, false},      // Q8_0: 32 float16 scales a group
    {32, 32, 256, 256, 64, false},    // Q4_K: in each block, of all 32 outputs, d, dmin and twelve bytes of scales and minima
    {32, 32, 256, 384, 72, false},    // Q6_K: the same, d and sixteen scales
};
// clang-format on

constexpr size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// One matrix of one precision with K inputs: sizes that both sides of the multiplication agree on.
struct Shape {
    Precision precision = kBf16;
    int steps = 0, group_steps = 0;
    size_t data_bytes = 0, panel_bytes = 0, row_bytes = 0;

    Shape() = default;
    Shape(Precision p, int k) : precision(p) {
        const Format& f = kFormats[p];
        size_t padded = round_up(k, f.group_k);
        steps = int(padded / f.step_k);
        group_steps = f.group_k / f.step_k;
        data_bytes = size_t(steps) * 2 * f.tile_bytes;
        size_t scales = f.per_panel ? f.scale_bytes : padded / f.group_k * f.scale_bytes;
        panel_bytes = data_bytes + round_up(scales, kLine);
        // An odd number of KiB: of blocks some 128 KiB apart one slice each would fall into the same sets of the L2.
        row_bytes = round_up(size_t(steps) * kLine + 1024, 2048) - 1024;
    }
};

struct Panel {
    const uint8_t* data;
    const uint8_t* scales;
    int steps, group_steps;
};

// A row's few numbers that are far larger than its others, next to which int8 would keep little of the others. In their place the
// row has zeros; their codes are as many times its scale as they are.
struct Outliers {
    static constexpr int kMost = 15;
    int count;
    struct {
        int32_t input, code;
    } at[kMost];
};

struct Rows {
    const uint8_t* data;  // one block
    int count;            // 1 to kBlock
    const float* scales;  // of each row of int8
    const Outliers* outliers = nullptr;
};

// `steps` of them from `first` on, which is a multiple of 8: no group or block is cut.
inline Panel slice_of(const Panel& p, Precision precision, int first, int steps) {
    const Format& f = kFormats[precision];
    size_t scales = f.per_panel ? 0 : size_t(first / p.group_steps) * size_t(f.scale_bytes);
    return {p.data + size_t(first) * 2 * size_t(f.tile_bytes), p.scales + scales, steps, p.group_steps};
}

// Where the 32 sums of each row go: `line` floats from one row to the next.
struct Sums {
    float* at;
    size_t line;
    float* row(int m) const { return at + size_t(m) * line; }
};

// What to prefetch: `each` lines per step, taken from `kStreams` parts that begin `apart` bytes from each other. Once `kStreams`
// lines are due, one line of each part is prefetched.
struct Ahead {
    static constexpr int kStreams = 8;
    const uint8_t* at = nullptr;
    size_t apart = 0;
    int each = 0, due = 0;
};

// So many steps of a panel of other codes from one on, as bf16, each value rounded after its scale, or as int8: then two steps
// become a line, an odd last one with zeros behind, and scales are as kInt8 has them: with step 0 made of all the panel's, and
// after them what the codes add up to so far; then their inverses.
using Convert = void (*)(const Panel&, int step, int steps, uint8_t* to, uint8_t* scales);
constexpr size_t kConvertedScaleBytes = size_t(kFormats[kInt8].scale_bytes) + 2 * kLine;

// What a slice's panel is yet to be made of.
struct Conversion {
    Convert convert = nullptr;  // nullptr: it is there
    Panel codes = {};
    int step = 0, steps = 0, each = 1;  // of the codes; `each` steps become one line
    uint8_t *to = nullptr, *scales = nullptr;
    bool once = false;  // nobody reads it after this slice's rows: it need not be whole at any time

    explicit operator bool() const { return convert; }
    void lines(int first, int count, uint8_t* at) const {
        int from = first * each, rest = steps - from;
        convert(codes, step + from, count * each < rest ? count * each : rest, at, scales);
    }
    void all() const {
        if (convert) convert(codes, step, steps, to, scales);
    }
};

// Some steps of K, of which panel and rows hold no others. Sums of all slices but the first are added to what is there; those of
// all but the last are for the next one only (of int8 they are int32).
struct Slice {
    bool first = true, last = true;
    bool configure = true, release = true;  // tiles: for rows of another count than before; with the last of a subtask
    Ahead weights, rows;
    Conversion conversion;
};

// sums = rows times the panel.
using Multiply = void (*)(const Panel&, const Rows&, const Sums&);
using MultiplySlice = void (*)(const Panel&, const Rows&, const Slice&, const Sums&);
// The sums of `rows` rows in the group that begins with `step`, of codes without scales: times these, they are added to those of
// the groups before.
using AddScaled = void (*)(const Panel&, int step, int rows, const Sums& from, const Sums& to);

// The outliers' products with such a panel, whose inputs begin with a row's line `first`, are added to what its slice gave.
using AddOutliers = void (*)(const Panel& int8, const Rows&, int first, bool last, const Sums&);

// A row of numbers to be laid out as (part of) a block.
struct Source {
    const void* values;
    bool bf16;  // else float
    int count;
};

// As row `i` of a block of `rows`, padded with zeros to the given number of lines.
using Pack = void (*)(const Source&, int i, int rows, int steps, uint8_t* block);

// Likewise as bytes; returns their scale. Without a place for outliers all are packed.
using PackInt8 = float (*)(const Source&, int i, int rows, int steps, uint8_t* block, Outliers*);

struct Path {
    Multiply few;         // up to `crossover` rows, straight from the packed codes
    Multiply block;       // of one block of up to `most` rows, likewise; nullptr: `slice` does
    MultiplySlice slice;  // of more
    Convert convert;      // what for; nullptr: the packed codes
    int crossover;
    bool narrows = false;              // `convert`: to int8, as rows are then; else to bf16
    Convert unpack = nullptr;          // a group's codes as they are, exactly: only for `block` of AMX
    AddScaled add_scaled = nullptr;    // its sums
    Convert convert_signed = nullptr;  // to int8 for rows with signs, which codes need no sums for
    Pack pack_few = nullptr;           // how `few` takes rows; nullptr: as the others
    PackInt8 pack_int8 = nullptr;      // how the others do; nullptr: as bf16
    AddOutliers add_outliers = nullptr;
    int most = kBlock;

    // Whether `slice` multiplies this number of rows of an expert.
    bool sliced(int rows) const { return !(few && rows <= crossover) && (rows > most || !block); }
};

struct Kernels {
    Path paths[kPrecisions];
    Pack pack_bf16;
    // silu(gate) * up of a panel's sums, in bf16: 16 numbers a row, `line` from one row to the next.
    void (*swiglu)(const float* sums, int rows, size_t line, uint16_t* out);
    // Stores sums, bypassing the caches if there are too many to stay there.
    void (*put)(const Sums& from, int rows, const Sums& to, bool many);
    void (*settle)();  // after many, before other threads are told
    // out[d] = sum over k, in order, of weights[k] * parts[k][d]; a part may be nullptr.
    void (*combine)(const float* const* parts, const float* weights, int chosen, int model, void* out, bool bf16);
};

const Kernels& portable_kernels();
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& amx_kernels();

Isa best_isa();
const Kernels* kernels_of(Isa isa);  // nullptr: not usable here

}  // namespace cpu_experts
