#include "experts.h"

#include <sys/mman.h>

#include <cstdlib>
#include <new>

namespace cpu_experts {
namespace {

constexpr size_t kHugePage = size_t(2) << 20;

int panels_of(int outputs) { return (outputs + kPanel - 1) / kPanel; }

// A matrix's bytes as pages: one with a border between nodes in it goes where its first byte belongs.
class Pages {
public:
    Pages(const uint8_t* data, size_t bytes)
        : data_(uintptr_t(data)), page_(page_bytes()),
          first_((data_ + page_ - 1) / page_ * page_), last_((data_ + bytes) / page_ * page_) {}
    // Within the pages that hold nothing else.
    uintptr_t at(size_t byte) const {
        uintptr_t page = (data_ + byte) / page_ * page_;
        return page < first_ ? first_ : page > last_ ? last_ : page;
    }

private:
    uintptr_t data_, page_, first_, last_;
};

void spread(const uint8_t* data, int experts, int panels, size_t panel_bytes, const Threads& threads) {
    size_t expert_bytes = size_t(panels) * panel_bytes;
    Pages pages(data, size_t(experts) * expert_bytes);
    for (int e = 0; e < experts; ++e) {
        size_t expert = size_t(e) * expert_bytes;
        auto border = [&](int n) { return pages.at(expert + size_t(threads.share(panels, n)) * panel_bytes); };
        for (int n = 0; n < threads.nodes(); ++n) move_to_node(border(n), border(n + 1), threads.node(n));
        forget_nodes(border(0), border(threads.nodes()));
    }
}

}  // namespace

void Free::operator()(uint8_t* memory) const { std::free(memory); }

void Pool::reserve(size_t bytes) {
    if (bytes <= held) return;
    bytes = round_up(bytes, kHugePage);
    auto* memory = static_cast<uint8_t*>(std::aligned_alloc(kHugePage, bytes));
    if (!memory) throw std::bad_alloc();
    madvise(memory, bytes, MADV_HUGEPAGE);
    scratch.reset(memory);
    held = bytes;
}

Layer::Layer(const cpu_experts_weights& w, const Kernels& kernels)
    : kernels_(kernels),
      experts_(w.experts),
      model_(w.model),
      width_(w.width),
      max_rows_(w.max_rows),
      gate_up_(Precision(w.gate_up_precision), w.model),
      down_(Precision(w.down_precision), w.width),
      gate_up_panels_((w.width + kTile - 1) / kTile),
      down_panels_(panels_of(w.model)),
      gate_up_data_(static_cast<const uint8_t*>(w.gate_up)),
      down_data_(static_cast<const uint8_t*>(w.down)) {}

void Layer::spread(const Threads& threads) const {
    if (threads.nodes() == 1) return;
    cpu_experts::spread(gate_up_data_, experts_, gate_up_panels_, gate_up_.panel_bytes, threads);
    cpu_experts::spread(down_data_, experts_, down_panels_, down_.panel_bytes, threads);
}

}  // namespace cpu_experts
