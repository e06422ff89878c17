// One layer's forward: each token's row is packed once; gate and up with SwiGLU, then down, of all experts; sums by weight.
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

// Rows, of those sorted by expert: whole blocks of one, so many as a subtask multiplies.
struct Group {
    int expert, first, end;
    int rows() const { return end - first; }
};

// Rows as a kernel takes them; of int8 with scales, and outliers where weights are narrowed.
struct PackedRows {
    uint8_t* lines;
    float* scales;
    Outliers* outliers;
};

// What a thread has to itself: memory for Slices, and a group's rows.
struct alignas(64) Own {
    uint8_t* slices;
    PackedRows rows;
    int group;  // whose rows these are, -1: nobody's
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
    int group_count = 0;
    // what is computed
    PackedRows x[3];   // each token's row, in each layout that one of its experts takes
    uint16_t* hidden;  // [rows, hidden_line] bf16
    float* parts;      // [rows, parts_line]
    size_t hidden_line, parts_line;
    Own* own;  // of each thread

    Forward(const Layer& l, const cpu_experts_batch& b, uint8_t* scratch, int threads, size_t* used = nullptr)
        : layer(l), batch(b) {
        auto rows = size_t(l.max_rows_);
        Cut cut(scratch);
        first_row = cut.take<int>(size_t(l.experts_) + 3);
        groups = cut.take<Group>(rows / kGroupRows + size_t(l.experts_));
        token_of = cut.take<int>(rows);
        row_of = cut.take<int>(rows);
        for (Layout as : {kBf16Rows, kInt8Rows, kFewRows}) {
            bool taken = layout(l.gate_up_, 1) == as || layout(l.gate_up_, int(kGroupRows)) == as;
            x[as] = packed_rows(cut, taken ? rows : 0, l.gate_up_.row_bytes);
        }
        hidden_line = size_t(l.gate_up_panels_) * kTile;
        hidden = cut.take<uint16_t>(rows * hidden_line);
        parts_line = size_t(l.down_panels_) * kPanel;
        parts = cut.take<float>(rows * parts_line);
        own = cut.take<Own>(size_t(threads));
        size_t held = rows < kGroupRows ? rows : kGroupRows, of_x = l.gate_up_.row_bytes, of_hidden = l.down_.row_bytes;
        for (int t = 0; t < threads; ++t) {
            auto* slices = cut.take<uint8_t>(Slices::kMemoryBytes);
            Own mine = {slices, packed_rows(cut, held, of_x > of_hidden ? of_x : of_hidden), -1};
            if (scratch) own[t] = mine;
        }
        if (used) *used = cut.used();
    }

    void run(Threads& threads) {
        sort();
        each<&Forward::pack_token>(threads, tokens);
        multiply_round<&Forward::gate_up>(threads, layer.gate_up_panels_, layer.gate_up_.panel_bytes);
        multiply_round<&Forward::down>(threads, layer.down_panels_, layer.down_.panel_bytes);
        each<&Forward::combine>(threads, (tokens + kCombined - 1) / kCombined);
    }

private:
    static constexpr int kCombined = 4;  // tokens a subtask
    static constexpr size_t kGroupRows = size_t(kBlock) * kSubtaskBlocks;

    // How the rows of an expert that has so many are laid out: as bf16, as int8, or as the kernel for few takes them.
    enum Layout { kBf16Rows, kInt8Rows, kFewRows };
    Layout layout(const Shape& weights, int rows) const {
        const Path& path = layer.kernels_.paths[weights.precision];
        if (path.pack_few && rows <= path.crossover) return kFewRows;
        return path.pack_int8 ? kInt8Rows : kBf16Rows;
    }
    bool narrows(const Shape& weights) const { return layer.kernels_.paths[weights.precision].narrows; }

    static PackedRows packed_rows(Cut& cut, size_t rows, size_t row_bytes) {
        auto* lines = cut.take<uint8_t>(rows * row_bytes);
        auto* scales = cut.take<float>(rows);
        return {lines, scales, cut.take<Outliers>(rows)};
    }

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

    // Subtasks are a group of rows by some neighbouring panels: with many rows as many as should share them, with few as many as
    // fit the L2, fewer where some thread would stay idle. Those of a node's share of the panels, of all experts, come before
    // those of the next one's.
    template <void (Forward::*Step)(int, int)>
    void multiply_round(Threads& threads, int panels, size_t panel_bytes) {
        panels_ = panels;
        many_ = first_row[layer.experts_] > group_count * kBlock;
        size_t most = many_ ? kSubtaskPanels : kSubtaskBytes / panel_bytes;
        panels_each_ = most < 1 ? 1 : most < kSubtaskPanels ? int(most) : kSubtaskPanels;
        while (group_count * cut_panels(threads) < 8 * threads.count() && panels_each_ > 1) --panels_each_;
        int begin[kMaxNodes + 1];
        for (int n = 0; n <= threads.nodes(); ++n) begin[n] = group_count * first_cut_[n];
        for (int t = 0; t < threads.count(); ++t) own[t].group = -1;
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

    // Its rows as numbered in `group`.
    Area area(int index, int& group) const {
        int n = 0;
        while (index >= group_count * first_cut_[n + 1]) ++n;
        index -= group_count * first_cut_[n];
        int cuts = first_cut_[n + 1] - first_cut_[n], end = first_panel_[n + 1];
        int first = first_panel_[n] + index % cuts * panels_each_;
        group = index / cuts;
        return {0, groups[group].rows(), first, first + panels_each_ < end ? first + panels_each_ : end};
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
        group_count = 0;
        for (int e = 0; e < experts; ++e) group(e);
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

    // As row `i` of the block of so many that begins with row `first`.
    void pack(const Source& from, int i, int first, int count, Layout as, const Shape& shape, const PackedRows& to) const {
        const Kernels& kernels = layer.kernels_;
        const Path& path = kernels.paths[shape.precision];
        uint8_t* block = to.lines + size_t(first) * shape.row_bytes;
        if (as == kInt8Rows) {
            Outliers* left_out = narrows(shape) ? to.outliers + first + i : nullptr;
            to.scales[first + i] = path.pack_int8(from, i, count, lines(as, shape), block, left_out);
        } else {
            (as == kFewRows ? path.pack_few : kernels.pack_bf16)(from, i, count, shape.steps, block);
        }
    }

    // Of a row.
    static int lines(Layout as, const Shape& shape) {
        return as == kInt8Rows ? (shape.steps * kFormats[shape.precision].step_k + kLine - 1) / kLine : shape.steps;
    }

    void pack_token(int t, int) {
        const Shape& shape = layer.gate_up_;
        bool bf16 = batch.x_dtype == CPU_EXPERTS_BFLOAT16, taken[3] = {};
        for (int k = 0; k < batch.chosen; ++k) {
            int e = ids(t)[k];
            if (e < layer.experts_) taken[layout(shape, first_row[e + 1] - first_row[e])] = true;
        }
        size_t at = size_t(token + t) * size_t(layer.model_) * (bf16 ? 2 : 4);
        Source row = {static_cast<const uint8_t*>(batch.x) + at, bf16, layer.model_};
        for (Layout as : {kBf16Rows, kInt8Rows, kFewRows}) {
            if (taken[as]) pack(row, 0, t, 1, as, shape, x[as]);
        }
    }

    void copy_token(int t, int i, int first, int count, Layout as, const PackedRows& to) const {
        const PackedRows& from = x[as];
        const Shape& shape = layer.gate_up_;
        const uint8_t* line = from.lines + size_t(t) * shape.row_bytes;
        uint8_t* block = to.lines + size_t(first) * shape.row_bytes;
        for (int s = 0; s < lines(as, shape); ++s, line += kLine) {
            std::memcpy(block + (size_t(s) * size_t(count) + size_t(i)) * kLine, line, kLine);
        }
        if (as == kInt8Rows) to.scales[first + i] = from.scales[t];
        if (as == kInt8Rows && narrows(shape)) to.outliers[first + i] = from.outliers[t];
    }

    // A group's rows come to the thread's own memory, where they stay for its next subtasks: lines that other cores have read take
    // three times as long to be written anew.
    template <class Put>
    void fetch(int group, Own& mine, Put put) const {
        if (mine.group == group) return;
        mine.group = group;
        const Group& g = groups[group];
        for (int first = 0; first < g.rows(); first += kBlock) {
            int count = g.rows() - first < kBlock ? g.rows() - first : kBlock;
            for (int i = 0; i < count; ++i) put(g.first + first + i, i, first, count);
        }
    }

    // `done(row, count, panel, sums)` takes what its `target` did not.
    template <class Put, class Target, class Done>
    void multiply(int index, int thread, const Shape& shape, const uint8_t* weights, Put put, Target target, Done done) {
        int group;
        Area at = area(index, group);
        const Group& g = groups[group];
        const Path& path = layer.kernels_.paths[shape.precision];
        Own& mine = own[thread];
        Layout as = layout(shape, g.rows());
        fetch(group, mine, [&](int row, int i, int first, int count) { put(row, i, first, count, as, mine.rows); });
        const PackedRows& x = mine.rows;
        Factors factors = {shape, weights + size_t(g.expert) * size_t(panels_) * shape.panel_bytes, x.lines,
                           as == kInt8Rows ? x.scales : nullptr, as == kInt8Rows && narrows(shape) ? x.outliers : nullptr};
        if (path.sliced(g.rows())) {
            Slices(factors, path, at, mine.slices).multiply([&](int row, int count, int panel, const Sums& c) {
                done(g.first + row, count, panel, c);
            });
            return;
        }
        bool few = path.few && g.rows() <= path.crossover;
        Rows rows = factors.block(0, g.rows(), 0);
        for (int p = at.first_panel; p < at.last_panel; ++p) {
            Sums sums = target(g.first, p);
            (few ? path.few : path.block)(factors.panel(p), rows, sums);
            done(g.first, rows.count, p, sums);
        }
    }

    void gate_up(int index, int thread) {
        Sums sums = {reinterpret_cast<float*>(own[thread].slices), kPanel};
        auto put = [&](int row, int i, int first, int count, Layout as, const PackedRows& to) {
            copy_token(token_of[row], i, first, count, as, to);
        };
        multiply(index, thread, layer.gate_up_, layer.gate_up_data_, put, [&](int, int) { return sums; },
                 [&](int row, int count, int panel, const Sums& c) {
                     layer.kernels_.swiglu(c.at, count, hidden_line, hidden + size_t(row) * hidden_line + size_t(panel) * kTile);
                 });
    }

    void down(int index, int thread) {
        auto target = [&](int row, int panel) {
            return Sums{parts + size_t(row) * parts_line + size_t(panel) * kPanel, parts_line};
        };
        auto put = [&](int row, int i, int first, int count, Layout as, const PackedRows& to) {
            pack({hidden + size_t(row) * hidden_line, true, layer.width_}, i, first, count, as, layer.down_, to);
        };
        multiply(index, thread, layer.down_, layer.down_data_, put, target,
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
