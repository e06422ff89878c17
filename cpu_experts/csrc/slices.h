// Blocks of one expert's rows times several of its panels, slice by slice of K: rows and sums stay in the L2, weights are read
// from memory once, prefetched in eight places. Why these sizes, and what was tried: docs/design/cpu_experts.md.
#pragma once

#include "gemm.h"

namespace cpu_experts {

constexpr int kSliceSteps = 64;  // at most; a multiple of 8: no group of any format is cut
constexpr int kShortSteps = 16, kManyBlocks = 6;  // with kManyBlocks blocks, if nothing is converted: the weights stay in the L1
constexpr size_t kSliceBytes = size_t(1408) << 10;  // in use at a time; half of it is no faster on Zen 5, whose L2 is one of 1 MiB
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
    static constexpr size_t kConvertedBytes = size_t(kSliceSteps) * 2 * kTileBytes;
    static constexpr size_t kMemoryBytes =
        kConvertedBytes + kSubtaskPanels * kConvertedScaleBytes + kSubtaskBlocks * kSubtaskPanels * kSums * sizeof(float);

    Slices(const Factors& factors, const Path& path, const Area& area, uint8_t* memory)
        : factors_(factors), path_(path), area_(area), converted_(memory), scales_(memory + kConvertedBytes),
          sums_(reinterpret_cast<float*>(scales_ + kSubtaskPanels * kConvertedScaleBytes)), slice_lines_(even_lines()) {
        for (int i = 0; factors.outliers && i < area.rows(); ++i) {
            if (factors.outliers[area.first_row + i].count) with_outliers_ |= 1u << i / kBlock;
        }
    }

    // `done(row, count, panel, sums)` is called for every block and panel.
    template <class Done>
    void multiply(Done done) const {
        int configured = 0;
        for (int i = 0; i < count(); ++i) {
            Part now = part(i);
            Panel panel = operand(now);
            for (int block = 0; block < area_.blocks(); ++block) {
                int row = area_.first_row + block * kBlock, rows = area_.block_rows(row);
                Sums sums = this->sums(block, now.panel);
                Rows a = factors_.block(row, rows, lines(now.step));
                Slice slice = this->slice(i, now, block, row);
                slice.configure = rows != configured, configured = rows;
                if (block == 0) slice.conversion = conversion(now);
                slice.release = i + 1 == count() && block + 1 == area_.blocks();
                path_.slice(panel, a, slice, sums);
                if (with_outliers_ >> block & 1) path_.add_outliers(panel, a, lines(now.step), slice.last, sums);
                if (slice.last) done(row, rows, now.panel, sums);
            }
        }
    }

private:
    struct Part {
        int panel, step, steps;
    };

    // Of int8 a slice takes as many bytes as of bf16.
    int slice_steps() const { return path_.narrows ? 2 * slice_lines_ : slice_lines_; }

    // As few slices as the L2 has room for, the last one at most as long as the others. Not by how many panels there are: that goes
    // by how many threads there are, and sums of other slices would have other bits.
    int even_lines() const {
        int all = lines(factors_.shape.steps), most = area_.blocks() < kManyBlocks || path_.convert ? kSliceSteps : kShortSteps;
        size_t sums = size_t(area_.blocks() * kSubtaskPanels) * kSums * sizeof(float);
        size_t of_step = size_t(area_.blocks() + 2) * 2 * kTileBytes;  // of all blocks, this panel and the next
        if (size_t(most) * of_step + sums > kSliceBytes) most = int((kSliceBytes - sums) / of_step) / 8 * 8;
        int slices = (all + most - 1) / most;
        return int(round_up(size_t((all + slices - 1) / slices), 8));
    }

    // Lines of a row for `steps` steps.
    int lines(int steps) const { return path_.narrows ? (steps + 1) / 2 : steps; }

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

    // As the kernel takes it, or where it is to be.
    Panel operand(const Part& p) const {
        if (!path_.convert) return codes(p);
        return {converted_, path_.narrows ? scales(p) : nullptr, lines(p.steps), 1};
    }
    Conversion conversion(const Part& p) const {
        Panel whole = factors_.panel(p.panel);
        return {path_.convert, whole, p.step, p.steps, path_.narrows ? 2 : 1, converted_, scales(p),
                area_.blocks() == 1 && !with_outliers_};
    }
    uint8_t* scales(const Part& p) const { return scales_ + size_t(p.panel - area_.first_panel) * kConvertedScaleBytes; }

    // With what is prefetched meanwhile: a share of the next part's weights with each block, of this block's next slice with each
    // panel.
    Slice slice(int i, const Part& now, int block, int row) const {
        int next = now.step + now.steps;
        Slice slice;
        slice.first = now.step == 0, slice.last = next == factors_.shape.steps;
        // after the last part what is next in memory, most often the same thread's next subtask
        Panel codes = this->codes(i + 1 < count() ? part(i + 1) : Part{area_.last_panel, 0, steps(0)});
        size_t bytes = size_t(codes.steps) * 2 * size_t(kFormats[factors_.shape.precision].tile_bytes);
        if (in_k() == 1) bytes = factors_.shape.panel_bytes;
        slice.weights = share(codes.data, bytes, block, area_.blocks(), lines(now.steps));
        if (area_.blocks() > 1 && !slice.last) {
            int rows = area_.block_rows(row);
            size_t of_rows = size_t(lines(steps(next))) * size_t(rows) * kLine;
            const uint8_t* at = factors_.block(row, rows, lines(next)).data;
            slice.rows = share(at, of_rows, now.panel - area_.first_panel, area_.panels(), lines(now.steps));
        }
        return slice;
    }

    // Share `i` of `shares`, to be prefetched in `steps` steps.
    static Ahead share(const uint8_t* at, size_t bytes, int i, int shares, int steps) {
        size_t calls = size_t(shares) * size_t(steps), each = (bytes / kLine + calls - 1) / calls;
        size_t apart = round_up(bytes / Ahead::kStreams, kLine), asked = size_t(i) * size_t(steps) * each / Ahead::kStreams * kLine;
        return asked < apart ? Ahead{at + asked, apart, int(each)} : Ahead{};
    }

    // Of a block and panel; one place will do for those that no other slice is added to.
    Sums sums(int block, int panel) const {
        size_t at = in_k() == 1 ? 0 : size_t(block * area_.panels() + panel - area_.first_panel);
        return {sums_ + at * kSums, kPanel};
    }

    const Factors& factors_;
    const Path& path_;
    const Area& area_;
    uint8_t *converted_, *scales_;
    float* sums_;
    int slice_lines_;
    uint32_t with_outliers_ = 0;  // a bit a block
};
static_assert(kSubtaskBlocks <= 32, "a bit each");

}  // namespace cpu_experts
