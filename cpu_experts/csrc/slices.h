// Several blocks of one expert's rows by several of its panels, slice by slice of K.
//
// Rows come from the L3 once a subtask and each weight comes from memory once, in even portions, while a panel's slice and the
// next one's, the same slice of all blocks and, where K is cut, all their sums stay in an L2 of 2 MiB. A step of a block takes
// the tiles 64 cycles, in which 2 KiB of rows and 2 KiB of weights come from there. Slices that leave the weights in the L1 (8
// steps) load and store sums more often and are no faster; V3's layer undivided took 144 ms where slices of 32 steps took 107.
//
// On a core of an H200's machine a step takes 39 ns with all of it in the L2, its share of memory with three blocks 36, both 73:
// loads from the L2 and from memory wait for each other. With all of it in the L1 it takes 31, and 43 with memory's share, but
// no order of blocks and panels leaves both there. Of no use were: asking for every second or fourth line, into the L1, by
// loads, or for the rows, too; loads and products in another order. Where 16 cores multiply random numbers, a step takes 71 to
// 92 ns with no loads, for 28 to 33 on one core, and 145 with loads from the L2.
#pragma once

#include "gemm.h"

namespace cpu_experts {

constexpr int kSliceSteps = 64;  // at most; a multiple of 8: no group of any format is cut
constexpr size_t kSliceBytes = size_t(1408) << 10;  // that are in use at a time
constexpr int kSubtaskPanels = 8;
constexpr int kSubtaskBlocks = 12;

// One side of multiplications and the other.
struct Factors {
    const Shape& shape;
    const uint8_t* weights;  // of one expert
    const uint8_t* rows;     // of all, block by block
    const float* scales;     // of the rows, if they are int8
    const Outliers* outliers;

    Panel panel(int p) const {
        const uint8_t* at = weights + size_t(p) * shape.panel_bytes;
        return {at, at + shape.data_bytes, shape.steps, shape.group_steps};
    }
    // From some line of its rows on.
    Rows block(int row, int count, int line) const {
        const uint8_t* at = rows + size_t(row) * shape.row_bytes + size_t(line) * size_t(count) * kLine;
        return {at, count, scales ? scales + row : nullptr, outliers ? outliers + row : nullptr};
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
    static constexpr size_t kMemoryBytes =
        2 * kExpandedBytes + kSubtaskPanels * kNarrowScaleBytes + kSubtaskBlocks * kSubtaskPanels * kSums * sizeof(float);

    Slices(const Factors& factors, const Path& path, const Area& area, uint8_t* memory)
        : factors_(factors), path_(path), area_(area), expanded_(memory), scales_(memory + 2 * kExpandedBytes),
          sums_(reinterpret_cast<float*>(scales_ + kSubtaskPanels * kNarrowScaleBytes)), slice_lines_(even_lines()) {}

    // `done(row, count, panel, sums)` is called for every block and panel.
    template <class Done>
    void multiply(Done done) const {
        int configured = 0;
        for (int i = 0; i < count(); ++i) {
            Part now = part(i);
            Panel panel = operand(i, now);
            bool narrow_next = path_.narrows_beside && i + 1 < count();
            const Narrowing next = narrowing(narrow_next ? i + 1 : i);
            for (int block = 0; block < area_.blocks(); ++block) {
                int row = area_.first_row + block * kBlock, rows = area_.block_rows(row);
                Sums sums = this->sums(block, now.panel);
                Rows a = factors_.block(row, rows, lines(now.step));
                Slice slice = this->slice(i, now, block, row);
                slice.configure = rows != configured, configured = rows;
                if (narrow_next) slice.beside = share(next, block, lines(now.steps));
                slice.release = i + 1 == count() && block + 1 == area_.blocks();
                path_.slice(panel, a, slice, sums);
                if (a.outliers) path_.add_outliers(panel, a, lines(now.step), slice.last, sums);
                if (slice.last) done(row, rows, now.panel, sums);
            }
        }
    }

private:
    struct Part {
        int panel, step, steps;
    };

    // Of int8 a slice takes as many bytes as of bf16.
    int slice_steps() const { return path_.narrow ? 2 * slice_lines_ : slice_lines_; }

    // As few slices as the L2 has room for, the last one at most as long as the others.
    int even_lines() const {
        int all = lines(factors_.shape.steps), most = kSliceSteps;
        size_t sums = size_t(area_.blocks() * area_.panels()) * kSums * sizeof(float);
        size_t of_step = size_t(area_.blocks() + 2) * 2 * kTileBytes;  // of all blocks, this panel and the next
        if (size_t(most) * of_step + sums > kSliceBytes) most = int((kSliceBytes - sums) / of_step) / 8 * 8;
        int slices = (all + most - 1) / most;
        return int(round_up(size_t((all + slices - 1) / slices), 8));
    }

    // That a row has for so many steps.
    int lines(int steps) const { return path_.narrow ? (steps + 1) / 2 : steps; }

    int in_k() const { return (factors_.shape.steps + slice_steps() - 1) / slice_steps(); }
    int count() const { return in_k() * area_.panels(); }

    // All panels in each slice, so that the rows' slice stays; of one block all slices of each panel, for it stays whole.
    Part part(int i) const {
        bool one = area_.blocks() == 1;
        int slice = one ? i % in_k() : i / area_.panels(), panel = one ? i / in_k() : i % area_.panels();
        return {area_.first_panel + panel, slice * slice_steps(), steps(slice * slice_steps())};
    }
    int steps(int from) const {
        int rest = factors_.shape.steps - from;
        return rest < slice_steps() ? rest : slice_steps();
    }
    Panel codes(const Part& p) const {
        return slice_of(factors_.panel(p.panel), factors_.shape.precision, p.step, p.steps);
    }

    // A part's codes, to become int8 tile by tile.
    struct Narrowing {
        Panel whole;
        int step, tiles;
        uint8_t *int8, *scales;
        Narrow narrow;
        static void one(const void* self, int i) {
            const auto& n = *static_cast<const Narrowing*>(self);
            n.narrow(n.whole, n.step + i / 2 * 2, i % 2, n.int8 + size_t(i) * kTileBytes, n.scales);
        }
    };
    Narrowing narrowing(int i) const {
        Part p = part(i);
        uint8_t *int8 = expanded_ + size_t(i % 2) * kExpandedBytes,
                *scales = scales_ + size_t(p.panel - area_.first_panel) * kNarrowScaleBytes;
        return {factors_.panel(p.panel), p.step, 2 * lines(p.steps), int8, scales, path_.narrow};
    }
    Beside share(const Narrowing& next, int block, int steps) const {
        int first = next.tiles * block / area_.blocks(), last = next.tiles * (block + 1) / area_.blocks();
        return {Narrowing::one, &next, first, last, (last - first + steps - 1) / steps};
    }

    // As the kernel takes it.
    Panel operand(int i, const Part& p) const {
        if (path_.narrow) {
            const Narrowing now = narrowing(i);
            for (int t = 0; t < now.tiles && !(path_.narrows_beside && i); ++t) Narrowing::one(&now, t);
            return {now.int8, now.scales, lines(p.steps), 1};
        }
        Panel panel = codes(p);
        if (!path_.expand) return panel;
        path_.expand(panel, expanded_);
        return {expanded_, panel.scales, panel.steps, panel.group_steps};
    }

    // With what is asked for meanwhile: a share of the next part's weights with each block, of this block's next slice with each
    // panel.
    Slice slice(int i, const Part& now, int block, int row) const {
        int next = now.step + now.steps;
        Slice slice;
        slice.first = now.step == 0, slice.last = next == factors_.shape.steps;
        if (i + 1 < count() && !path_.narrows_beside) {
            Panel codes = this->codes(part(i + 1));
            size_t bytes = size_t(codes.steps) * 2 * size_t(kFormats[factors_.shape.precision].tile_bytes);
            slice.weights = share(codes.data, bytes, block, area_.blocks(), lines(now.steps));
        }
        if (area_.blocks() > 1 && !slice.last) {
            int rows = area_.block_rows(row);
            size_t bytes = size_t(lines(steps(next))) * size_t(rows) * kLine;
            const uint8_t* at = factors_.block(row, rows, lines(next)).data;
            slice.rows = share(at, bytes, now.panel - area_.first_panel, area_.panels(), lines(now.steps));
        }
        return slice;
    }

    // Share `i` of `shares`, to be asked for in so many steps.
    static Ahead share(const uint8_t* at, size_t bytes, int i, int shares, int steps) {
        size_t calls = size_t(shares) * size_t(steps), lines = (bytes / kLine + calls - 1) / calls;
        size_t first = size_t(i) * size_t(steps) * lines * kLine;
        return first < bytes ? Ahead{at + first, int(lines)} : Ahead{};
    }

    // Of a block and panel; one place will do for those that no other slice is added to.
    Sums sums(int block, int panel) const {
        size_t at = in_k() == 1 ? 0 : size_t(block * area_.panels() + panel - area_.first_panel);
        return {sums_ + at * kSums, kPanel};
    }

    const Factors& factors_;
    const Path& path_;
    const Area& area_;
    uint8_t *expanded_, *scales_;
    float* sums_;
    int slice_lines_;
};

}  // namespace cpu_experts
