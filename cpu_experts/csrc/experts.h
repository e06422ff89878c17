// One MoE layer over packed weights: rounds of subtasks that a pool of threads shares. Knows nothing of handles or statuses.
#pragma once

#include <memory>
#include <mutex>

#include "cpu_experts.h"
#include "gemm.h"
#include "threads.h"

namespace cpu_experts {

struct Free {
    void operator()(uint8_t* memory) const;
};

// Threads, and the scratch memory of the forward that runs on them: shared by all layers of as many threads, one at a time.
struct Pool {
    explicit Pool(int threads) : threads(threads) {}
    void reserve(size_t bytes);  // throws std::bad_alloc

    std::mutex busy;
    Threads threads;
    std::unique_ptr<uint8_t, Free> scratch;
    size_t held = 0;
};

class Layer {
public:
    Layer(const cpu_experts_weights& weights, const Kernels& kernels);
    size_t scratch_bytes(int threads) const;
    // What both packed matrices must take in all.
    size_t gate_up_bytes() const { return size_t(experts_) * size_t(gate_up_panels_) * gate_up_.panel_bytes; }
    size_t down_bytes() const { return size_t(experts_) * size_t(down_panels_) * down_.panel_bytes; }

    int experts() const { return experts_; }
    int max_rows() const { return max_rows_; }
    // Moves what a node's threads read to that node: its share of every expert's panels, in each matrix.
    void spread(const Threads& threads) const;
    void forward(Pool& pool, const cpu_experts_batch& batch) const;

private:
    friend struct Forward;

    const Kernels& kernels_;
    int experts_, model_, width_, max_rows_;
    Shape gate_up_, down_;
    int gate_up_panels_, down_panels_;
    const uint8_t *gate_up_data_, *down_data_;
};

}  // namespace cpu_experts
