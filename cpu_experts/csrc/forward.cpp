// One layer's forward: rows are laid out as kernels take them; gate and up with SwiGLU, then down, of all experts; sums by weight.
#include <cstring>

#include "experts.h"
#include "slices.h"

namespace cpu_experts {
namespace {

// Of a subtask's weights, where experts have few rows.
constexpr size_t kSubtaskBytes = size_t(256) << 10;

// Cuts one piece of memory into arrays; without memory, adds up what they take.
class Cut {
public:
    explicit Cut(uint8_t* base) : base_(base) {}
    template <class T>
    T* take(size_t count) {
        T* at = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
        used_ += round_up(count * sizeof(T), kLine);
        return at;
    }
    size_t used() const { return used_; }

private:
    uint8_t* base_;
    size_t used_ = 0;
};

struct Block {
    int first, count, expert;  // rows, of those sorted by expert
};

// Whole blocks of one expert, as many as a subtask multiplies.
struct Group {
    int expert, first, end;
};

}  // namespace

// Of some tokens. Rows are (token, chosen expert) pairs, sorted by expert.
struct Forward {
    const Layer& layer;
    const cpu_experts_batch& batch;
    int token = 0, tokens = 0;  // the first, and how many

    // who goes where
    int* first_row;  // [X + 1] of each expert, and one beyond, for the id X
    int* token_of;   // [rows]
    int* row_of;     // [tokens K], -1 where there is none
    Group* groups;
    Block* blocks;
    int group_count = 0, block_count = 0;
    // what is computed
    uint8_t *x, *hidden;
    float *x_scales, *hidden_scales, *parts;
    uint16_t* hidden_values;  // bf16, of rows that are packed as a whole
    Outliers *x_outliers, *hidden_outliers;
    uint8_t* own;  // of each thread
    size_t hidden_line, parts_line;

    Forward(const Layer& l, const cpu_experts_batch& b, uint8_t* scratch, int threads, size_t* used = nullptr)
        : layer(l), batch(b) {
        auto rows = size_t(l.max_rows_);
        bool x_int8 = layout(l.gate_up_, kMany) == kInt8Rows, hidden_int8 = layout(l.down_, kMany) == kInt8Rows;
        Cut cut(scratch);
        first_row = cut.take<int>(size_t(l.experts_) + 3);
        groups = cut.take<Group>(rows / (kBlock * kSubtaskBlocks) + size_t(l.experts_));
        token_of = cut.take<int>(rows);
        row_of = cut.take<int>(rows);
        blocks = cut.take<Block>(rows / kBlock + size_t(l.experts_) + 1);
        x_scales = cut.take<float>(x_int8 ? rows : 0);
        hidden_scales = cut.take<float>(hidden_int8 ? rows : 0);
        x_outliers = cut.take<Outliers>(narrows(l.gate_up_) ? rows : 0);
        hidden_outliers = cut.take<Outliers>(narrows(l.down_) ? rows : 0);
        x = cut.take<uint8_t>(rows * l.gate_up_.row_bytes);
        hidden = cut.take<uint8_t>(rows * l.down_.row_bytes);
        hidden_line = size_t(l.gate_up_panels_) * kTile;
        hidden_values = cut.take<uint16_t>(hidden_int8 ? rows * hidden_line : 0);
        parts_line = size_t(l.down_panels_) * kPanel;
        parts = cut.take<float>(rows * parts_line);
        own = cut.take<uint8_t>(Slices::kMemoryBytes * size_t(threads));
        if (used) *used = cut.used();
    }

    void run(Threads& threads) {
        sort();
        each<&Forward::gather>(threads, block_count);
        multiply_round<&Forward::gate_up>(threads, layer.gate_up_panels_, layer.gate_up_.panel_bytes);
        if (packs_hidden(kMany)) each<&Forward::pack_hidden>(threads, block_count);
        multiply_round<&Forward::down>(threads, layer.down_panels_, layer.down_.panel_bytes);
        each<&Forward::combine>(threads, (tokens + kCombined - 1) / kCombined);
    }

private:
    static constexpr int kCombined = 4;  // tokens a subtask
    static constexpr int kMany = 1 << 30;
    static constexpr int kBf16Line = kLine / 2;  // numbers

    bool narrows(const Shape& weights) const { return layer.kernels_.paths[weights.precision].narrows; }
    // How the rows of an expert with this many rows are laid out: as bf16, as int8, or as the kernel for few takes them.
    enum Layout { kBf16Rows, kInt8Rows, kFewRows };
    Layout layout(const Shape& weights, int rows) const {
        const Path& path = layer.kernels_.paths[weights.precision];
        if (path.pack_few && rows <= path.crossover) return kFewRows;
        return path.pack_int8 ? kInt8Rows : kBf16Rows;
    }
    Layout layout(const Shape& weights, const Block& b) const {
        return layout(weights, first_row[b.expert + 1] - first_row[b.expert]);
    }
    // SwiGLU writes bf16 where it belongs; other layouts need a row as a whole.
    bool packs_hidden(int rows) const { return layout(layer.down_, rows) != kBf16Rows; }

    bool many_ = false;  // rows: most experts have several blocks
    int panels_ = 0, panels_each_ = 0;
    int first_panel_[kMaxNodes + 1], first_cut_[kMaxNodes + 1];  // of an expert, in each node's share

    template <void (Forward::*Step)(int, int)>
    static void call(void* self, int i, int thread) {
        (static_cast<Forward*>(self)->*Step)(i, thread);
    }

    template <void (Forward::*Step)(int, int)>
    void each(Threads& threads, int count) {
        threads.run(count, call<Step>, this);
    }

    // A subtask is a group of rows by some neighbouring panels: with many rows as many as should share them, with few as many as
    // fit the L2, fewer where a thread would stay idle. Subtasks of one NUMA node's panels, of all experts, come before those of the
    // next. On one node an expert's rows are packed and multiplied mostly by one thread (docs/design/cpu_experts.md says why).
    template <void (Forward::*Step)(int, int)>
    void multiply_round(Threads& threads, int panels, size_t panel_bytes) {
        panels_ = panels;
        many_ = first_row[layer.experts_] > group_count * kBlock;
        size_t most = many_ ? kSubtaskPanels : kSubtaskBytes / panel_bytes;
        panels_each_ = most < 1 ? 1 : most < kSubtaskPanels ? int(most) : kSubtaskPanels;
        while (group_count * cut_panels(threads) < 8 * threads.count() && panels_each_ > 1) --panels_each_;
        int begin[kMaxNodes + 1];
        for (int n = 0; n <= threads.nodes(); ++n) begin[n] = group_count * first_cut_[n];
        threads.run(begin, call<Step>, this);
    }

    // By `panels_each_`; returns how many subtasks a group of rows has.
    int cut_panels(const Threads& threads) {
        int cuts = 0, nodes = threads.nodes();
        for (int n = 0; n <= nodes; ++n) {
            first_panel_[n] = threads.share(panels_, n);
            first_cut_[n] = cuts += n ? (first_panel_[n] - first_panel_[n - 1] + panels_each_ - 1) / panels_each_ : 0;
        }
        return cuts;
    }

    // Of a subtask: whose rows and panels.
    Area area(int index, int& expert) const {
        int n = 0;
        while (index >= group_count * first_cut_[n + 1]) ++n;
        index -= group_count * first_cut_[n];
        int cuts = first_cut_[n + 1] - first_cut_[n], end = first_panel_[n + 1];
        int first = first_panel_[n] + index % cuts * panels_each_;
        const Group& rows = groups[index / cuts];
        expert = rows.expert;
        return {rows.first, rows.end, first, first + panels_each_ < end ? first + panels_each_ : end};
    }

    const int* ids(int t) const { return batch.topk_ids + size_t(token + t) * size_t(batch.chosen); }

    void sort() {
        int experts = layer.experts_, chosen = batch.chosen;
        std::memset(first_row, 0, size_t(experts + 3) * sizeof(int));
        int* next = first_row + 1;  // of each expert: counts, then where its rows begin, and once all are placed where they end
        for (int t = 0; t < tokens; ++t) {
            for (int k = 0; k < chosen; ++k) next[ids(t)[k] + 1] += ids(t)[k] < experts;
        }
        for (int e = 0; e < experts; ++e) next[e + 1] += next[e];
        for (int t = 0; t < tokens; ++t) {
            for (int k = 0; k < chosen; ++k) {
                int e = ids(t)[k], row = e < experts ? next[e]++ : -1;
                row_of[t * chosen + k] = row;
                if (row >= 0) token_of[row] = t;
            }
        }
        group_count = block_count = 0;
        for (int e = 0; e < experts; ++e) {
            int end = first_row[e + 1];
            for (int row = first_row[e]; row < end; row += kBlock) {
                blocks[block_count++] = {row, end - row < kBlock ? end - row : kBlock, e};
            }
            group(e);
        }
    }

    // Of nearly as many blocks each.
    void group(int expert) {
        int begin = first_row[expert], end = first_row[expert + 1];
        int held = (end - begin + kBlock - 1) / kBlock, parts = (held + kSubtaskBlocks - 1) / kSubtaskBlocks;
        for (int i = 0, block = 0; i < parts; ++i) {
            int next = block + (held - block) / (parts - i);
            groups[group_count++] = {expert, begin + block * kBlock, i + 1 < parts ? begin + next * kBlock : end};
            block = next;
        }
    }

    void pack(const Source& from, int i, const Block& b, const Shape& shape, uint8_t* to, float* scales, Outliers* outliers) {
        uint8_t* block = to + size_t(b.first) * shape.row_bytes;
        Layout as = layout(shape, b);
        if (as == kInt8Rows) {
            int lines = (shape.steps * kFormats[shape.precision].step_k + kLine - 1) / kLine;
            Outliers* left_out = narrows(shape) ? outliers + b.first + i : nullptr;
            scales[b.first + i] = layer.kernels_.paths[shape.precision].pack_int8(from, i, b.count, lines, block, left_out);
        } else {
            const Kernels& kernels = layer.kernels_;
            (as == kFewRows ? kernels.paths[shape.precision].pack_few : kernels.pack_bf16)(from, i, b.count, shape.steps, block);
        }
    }

    void gather(int index, int) {
        const Block& b = blocks[index];
        bool bf16 = batch.x_dtype == CPU_EXPERTS_BFLOAT16;
        for (int i = 0; i < b.count; ++i) {
            size_t at = size_t(token + token_of[b.first + i]) * size_t(layer.model_) * (bf16 ? 2 : 4);
            Source from{static_cast<const uint8_t*>(batch.x) + at, bf16, layer.model_};
            pack(from, i, b, layer.gate_up_, x, x_scales, x_outliers);
        }
        // SwiGLU writes whole tiles; what is between the last one and the end of the last step is padding.
        if (layout(layer.down_, b) == kBf16Rows) {
            const Shape& shape = layer.down_;
            size_t written = hidden_line * 2 / kLine;
            uint8_t* block = hidden + size_t(b.first) * shape.row_bytes;
            std::memset(block + written * size_t(b.count) * kLine, 0, (size_t(shape.steps) - written) * size_t(b.count) * kLine);
        }
    }

    void pack_hidden(int index, int) {
        const Block& b = blocks[index];
        if (layout(layer.down_, b) == kBf16Rows) return;
        for (int i = 0; i < b.count; ++i) {
            const uint16_t* values = hidden_values + size_t(b.first + i) * hidden_line;
            pack({values, true, layer.width_}, i, b, layer.down_, hidden, hidden_scales, hidden_outliers);
        }
    }

    // `done(row, count, panel, sums)` takes what its `target` did not.
    template <class Target, class Done>
    void multiply(int index, int thread, Factors factors, Target target, Done done) {
        int expert;
        Area at = area(index, expert);
        factors.weights += size_t(expert) * size_t(panels_) * factors.shape.panel_bytes;
        if (layout(factors.shape, at.rows()) != kInt8Rows) factors.scales = nullptr, factors.outliers = nullptr;
        if (!narrows(factors.shape)) factors.outliers = nullptr;
        const Path& path = layer.kernels_.paths[factors.shape.precision];
        if (path.sliced(at.rows())) {
            Slices(factors, path, at, own + Slices::kMemoryBytes * size_t(thread)).multiply(done);
            return;
        }
        bool few = path.few && at.rows() <= path.crossover;
        Rows rows = factors.block(at.first_row, at.rows(), 0);
        for (int p = at.first_panel; p < at.last_panel; ++p) {
            Sums sums = target(at.first_row, p);
            (few ? path.few : path.block)(factors.panel(p), rows, sums);
            done(at.first_row, rows.count, p, sums);
        }
    }

    void gate_up(int index, int thread) {
        auto* sums = reinterpret_cast<float*>(own + Slices::kMemoryBytes * size_t(thread));
        int expert;
        bool whole_rows = packs_hidden(area(index, expert).rows());
        auto target = [&](int, int) { return Sums{sums, kPanel}; };
        multiply(index, thread, {layer.gate_up_, layer.gate_up_data_, x, x_scales, x_outliers}, target,
                 [&](int row, int count, int panel, const Sums& c) {
                     int k = panel * kTile, line = k / kBf16Line * count;
                     auto* block = reinterpret_cast<uint16_t*>(hidden + size_t(row) * layer.down_.row_bytes);
                     if (whole_rows) {
                         layer.kernels_.swiglu(c.at, count, hidden_line, hidden_values + size_t(row) * hidden_line + k);
                     } else {
                         layer.kernels_.swiglu(c.at, count, kBf16Line, block + size_t(line) * kBf16Line + k % kBf16Line);
                     }
                 });
    }

    void down(int index, int thread) {
        auto target = [&](int row, int panel) {
            return Sums{parts + size_t(row) * parts_line + size_t(panel) * kPanel, parts_line};
        };
        multiply(index, thread, {layer.down_, layer.down_data_, hidden, hidden_scales, hidden_outliers}, target,
                 [&](int row, int count, int panel, const Sums& c) {
                     Sums to = target(row, panel);
                     if (c.at != to.at) layer.kernels_.put(c, count, to, many_);
                 });
        if (many_) layer.kernels_.settle();
    }

    // In the order of a token's choice, whichever thread computed what: the same bits at every run.
    void combine(int index, int) {
        int end = (index + 1) * kCombined < tokens ? (index + 1) * kCombined : tokens;
        for (int t = index * kCombined; t < end; ++t) {
            const float* from[CPU_EXPERTS_MAX_CHOSEN];
            for (int k = 0; k < batch.chosen; ++k) {
                int row = row_of[t * batch.chosen + k];
                from[k] = row < 0 ? nullptr : parts + size_t(row) * parts_line;
            }
            bool bf16 = batch.out_dtype == CPU_EXPERTS_BFLOAT16;
            uint8_t* out = static_cast<uint8_t*>(batch.out) + size_t(token + t) * size_t(layer.model_) * (bf16 ? 2 : 4);
            const float* weights = batch.topk_weights + size_t(token + t) * size_t(batch.chosen);
            layer.kernels_.combine(from, weights, batch.chosen, layer.model_, out, bf16);
        }
    }
};

size_t Layer::scratch_bytes(int threads) const {
    size_t used = 0;
    cpu_experts_batch none{};
    Forward(*this, none, nullptr, threads, &used);
    return used;
}

void Layer::forward(Pool& pool, const cpu_experts_batch& batch) const {
    Forward forward(*this, batch, pool.scratch.get(), pool.threads.count());
    int most = max_rows_ / batch.chosen, turns = (batch.tokens + most - 1) / most;
    for (int i = 0; i < turns; ++i) {
        forward.token = int(int64_t(batch.tokens) * i / turns);
        forward.tokens = int(int64_t(batch.tokens) * (i + 1) / turns) - forward.token;
        forward.run(pool.threads);
    }
}

}  // namespace cpu_experts
