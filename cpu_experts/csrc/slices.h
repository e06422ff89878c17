// Several blocks of one expert's rows by several of its panels, slice by slice of K.
//
// Rows come from the L3 once a subtask and each weight comes from memory once, in even portions, while a panel's slice (64 KiB of
// bf16), the same slice of all blocks (384 rows: 768 KiB) and their sums (384 KiB) stay in an L2 of 2 MiB. A step of a block takes
// the tiles 64 cycles, in which 2 KiB of rows, 2 KiB of weights and 256 bytes of sums come from there. Slices that leave the
// weights in the L1 as well (16 steps, 8) load and store sums more often: on 16 AMX cores V3's layer takes 111 and 129 ms for
// 1,024 tokens, 107 with 32, and took 144 undivided.
#pragma once

#include "gemm.h"

namespace cpu_experts {

constexpr int kSliceSteps = 32;  // a multiple of 8: no group of any format is cut
constexpr int kSubtaskPanels = 8;
constexpr int kSubtaskBlocks = 12;

// One side of multiplications and the other.
struct Factors {
    const Shape& shape;
    const uint8_t* weights;  // of one expert
    const uint8_t* rows;     // of all, block by block
    const float* scales;     // of the rows, int8 only

    Panel panel(int p) const {
        const uint8_t* at = weights + size_t(p) * shape.panel_bytes;
        return {at, at + shape.data_bytes, shape.steps, shape.group_steps};
    }
    // From some step on.
    Rows block(int row, int count, int step) const {
        const uint8_t* at = rows + size_t(row) * shape.row_bytes + size_t(step) * size_t(count) * kLine;
        return {at, count, scales ? scales + row : nullptr};
    }
};

// From the first to before the last: rows from the first of a block on, and at most kSubtaskBlocks and kSubtaskPanels.
struct Area {
    int first_row, last_row, first_panel, last_panel;
    int rows() const { return last_row - first_row; }
    int blocks() const { return (rows() + kBlock - 1) / kBlock; }
    int panels() const { return last_panel - first_panel; }
    int block_rows(int row) const { return last_row - row < kBlock ? last_row - row : kBlock; }
};

class Slices {
public:
    static constexpr size_t kSums = size_t(kBlock) * kPanel;
    static constexpr size_t kExpandedBytes = size_t(kSliceSteps) * 2 * kTileBytes;
    static constexpr size_t kMemoryBytes = kSubtaskBlocks * kSubtaskPanels * kSums * sizeof(float) + kExpandedBytes;

    Slices(const Factors& factors, const Path& path, const Area& area, uint8_t* memory)
        : factors_(factors), path_(path), area_(area), expanded_(memory),
          sums_(reinterpret_cast<float*>(memory + kExpandedBytes)) {}

    // `done(row, count, panel, sums)` is called for every block and panel.
    template <class Done>
    void multiply(Done done) const {
        for (int i = 0; i < count(); ++i) {
            Part now = part(i);
            Panel panel = codes(now);
            if (path_.expand) {
                path_.expand(panel, expanded_);
                panel.data = expanded_;
            }
            for (int block = 0; block < area_.blocks(); ++block) {
                int row = area_.first_row + block * kBlock, rows = area_.block_rows(row);
                Sums sums{sums_ + size_t(block * area_.panels() + now.panel - area_.first_panel) * kSums, kPanel};
                path_.slice(panel, factors_.block(row, rows, now.step), slice(i, now, block, row), sums);
                if (now.step + now.steps == factors_.shape.steps) done(row, rows, now.panel, sums);
            }
        }
    }

private:
    struct Part {
        int panel, step, steps;
    };

    int in_k() const { return (factors_.shape.steps + kSliceSteps - 1) / kSliceSteps; }
    int count() const { return in_k() * area_.panels(); }

    // All panels in each slice, so that the rows' slice stays; of one block all slices of each panel, for it stays whole.
    Part part(int i) const {
        bool one = area_.blocks() == 1;
        int slice = one ? i % in_k() : i / area_.panels(), panel = one ? i / in_k() : i % area_.panels();
        return {area_.first_panel + panel, slice * kSliceSteps, steps(slice * kSliceSteps)};
    }
    int steps(int from) const {
        int rest = factors_.shape.steps - from;
        return rest < kSliceSteps ? rest : kSliceSteps;
    }
    Panel codes(const Part& p) const {
        return slice_of(factors_.panel(p.panel), factors_.shape.precision, p.step, p.steps);
    }

    // With what is asked for meanwhile: a share of the next part's weights with each block, of this block's next slice with each
    // panel.
    Slice slice(int i, const Part& now, int block, int row) const {
        int next = now.step + now.steps;
        Slice slice;
        slice.first = now.step == 0, slice.last = next == factors_.shape.steps;
        if (i + 1 < count()) {
            Panel codes = this->codes(part(i + 1));
            size_t bytes = size_t(codes.steps) * 2 * size_t(kFormats[factors_.shape.precision].tile_bytes);
            slice.weights = share(codes.data, bytes, block, area_.blocks(), now.steps);
        }
        if (area_.blocks() > 1 && !slice.last) {
            int rows = area_.block_rows(row);
            size_t bytes = size_t(steps(next)) * size_t(rows) * kLine;
            const uint8_t* at = factors_.block(row, rows, next).data;
            slice.rows = share(at, bytes, now.panel - area_.first_panel, area_.panels(), now.steps);
        }
        return slice;
    }

    // Share `i` of `shares`, to be asked for in so many steps.
    static Ahead share(const uint8_t* at, size_t bytes, int i, int shares, int steps) {
        size_t calls = size_t(shares) * size_t(steps), lines = (bytes / kLine + calls - 1) / calls;
        size_t first = size_t(i) * size_t(steps) * lines * kLine;
        return first < bytes ? Ahead{at + first, int(lines)} : Ahead{};
    }

    const Factors& factors_;
    const Path& path_;
    const Area& area_;
    uint8_t* expanded_;
    float* sums_;
};

}  // namespace cpu_experts
