#include "ffi_ring.h"

#include <algorithm>
#include <map>
#include <new>

#include "ffi_kernels.h"

namespace cpu_experts::ffi {
namespace {

constexpr uint64_t kLine = 256;
// Calls under way: one a layer, one more where some experts are deferred by a layer, and as many again of another thread.
constexpr uint64_t kFewestSlots = 4, kMostSlots = 16;
constexpr uint64_t kManyBytes = uint64_t(8) << 20;  // of a ring, beyond which it has no more slots than it must
constexpr unsigned kMostThreads = 1024;
constexpr uint64_t kBytesABlock = 64 << 10;
constexpr unsigned kMostBlocks = 32;
constexpr unsigned kPortable = 1, kMapped = 2;
constexpr uint16_t kNaN = 0x7FC0;  // of bfloat16; two of them are one of float32

uint64_t round_up(uint64_t bytes, uint64_t to) { return (bytes + to - 1) / to * to; }
uint64_t size_of(cpu_experts_dtype dtype) { return dtype == CPU_EXPERTS_F32 ? 4 : 2; }

struct Kernels {
    Function submit = nullptr, collect = nullptr;
};

// Compiled by the driver, once a context. Never unloaded: a graph may hold them.
Status kernels(Context context, Kernels& found) {
    static auto* mutex = new std::mutex;
    static auto* known = new std::map<Context, Kernels>;
    std::lock_guard<std::mutex> hold(*mutex);
    Kernels& of = (*known)[context];
    const Driver& d = driver();
    if (!of.collect) {
        Module module = nullptr;
        if (auto failed = d.said("cuModuleLoadData", d.ModuleLoadData(&module, kKernels))) return failed;
        if (auto failed = d.said("cuModuleGetFunction", d.ModuleGetFunction(&of.submit, module, "cpu_experts_submit")))
            return failed;
        if (auto failed = d.said("cuModuleGetFunction", d.ModuleGetFunction(&of.collect, module, "cpu_experts_collect")))
            return failed;
    }
    found = of;
    return {};
}

}  // namespace

Ring::Ring(const Call& call) : call_(call) {
    Shared& s = shared_;
    s.x_bytes = uint64_t(call.tokens * call.model) * size_of(call.x_dtype);
    s.pair_bytes = uint64_t(call.tokens * call.chosen) * 4;
    s.y_bytes = uint64_t(call.tokens * call.model) * size_of(call.out_dtype);
    s.ids_at = round_up(s.x_bytes, kLine);
    s.weights_at = s.ids_at + round_up(s.pair_bytes, kLine);
    s.y_at = s.weights_at + round_up(s.pair_bytes, kLine);
    s.stride = s.y_at + round_up(s.y_bytes, kLine);
    uint64_t slots = kMostSlots;
    while (slots > kFewestSlots && slots * s.stride > kManyBytes) slots /= 2;
    s.mask = slots - 1;
    s.data = round_up(sizeof(Block) + slots * sizeof(Flags), kLine);
}

Status Ring::make(Context context, const Call& call, std::shared_ptr<Ring>& made) {
    std::shared_ptr<Ring> ring(new Ring(call));
    Kernels compiled;
    if (auto failed = kernels(context, compiled)) return failed;
    ring->submit_ = compiled.submit, ring->collect_ = compiled.collect;
    if (auto failed = ring->allocate()) return failed;
    made = std::move(ring);
    return {};
}

Status Ring::allocate() {
    const Driver& d = driver();
    uint64_t slots = shared_.mask + 1, own_bytes = 16 * (1 + slots);
    uint64_t bytes = shared_.data + std::max(slots * shared_.stride, own_bytes);
    void* memory = nullptr;
    if (auto failed = d.said("cuMemHostAlloc", d.MemHostAlloc(&memory, bytes, kPortable | kMapped))) return failed;
    block_ = new (memory) Block;
    for (uint64_t s = 0; s < slots; ++s) new (&block_->flags(s)) Flags;
    Address address = 0;
    if (auto failed = d.said("cuMemHostGetDevicePointer", d.MemHostGetDevicePointer(&address, memory, 0))) return failed;
    shared_.block = address;
    if (auto failed = d.said("cuMemAlloc", d.MemAlloc(&address, own_bytes))) return failed;
    shared_.own = address;
    // From pinned memory, for then it is done when the call returns, and no stream needs to be waited for.
    uint8_t* zeros = array(0, 0);
    std::fill_n(zeros, own_bytes, uint8_t(0));
    return d.said("cuMemcpyHtoD", d.MemcpyHtoD(address, zeros, own_bytes));
}

Ring::~Ring() {
    if (shared_.own) driver().MemFree(shared_.own);
    if (block_) driver().MemFreeHost(block_);
}

void Ring::retire() {
    std::lock_guard<std::mutex> hold(launching_);
    retired_ = true;
}

Status Ring::launch(Stream stream, Function kernel, unsigned blocks, uint64_t bytes, void** arguments) {
    const Driver& d = driver();
    std::lock_guard<std::mutex> hold(launching_);
    if (retired_) return {CPU_EXPERTS_CLOSED, "the layer is closed"};
    int capturing = 0;
    if (auto failed = d.said("cuStreamIsCapturing", d.StreamIsCapturing(stream, &capturing))) return failed;
    if (capturing) captured_ = true;
    auto threads = unsigned(std::clamp<uint64_t>(round_up(bytes / blocks / 16, 32), 32, kMostThreads));
    return d.said("cuLaunchKernel", d.LaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, nullptr));
}

Status Ring::submit(Stream stream, uint64_t layer, uint64_t patience, const void* x, const void* ids, const void* weights,
                    void* ticket) {
    Shared shared = shared_;
    shared.patience = patience;
    void* arguments[] = {&x, &ids, &weights, &ticket, &layer, &shared};
    return launch(stream, submit_, 1, shared.x_bytes, arguments);
}

Status Ring::collect(Stream stream, uint64_t patience, const void* ticket, void* y) {
    Shared shared = shared_;
    shared.patience = patience;
    void* arguments[] = {&ticket, &y, &shared};
    auto blocks = unsigned(std::clamp<uint64_t>(shared.y_bytes / kBytesABlock, 1, kMostBlocks));
    return launch(stream, collect_, blocks, shared.y_bytes, arguments);
}

Status Ring::answer(uint64_t slot, uint64_t layer) {
    if (!layer) return {CPU_EXPERTS_FAILED, "a GPU program gave up waiting for a free slot"};
    Call call = call_;
    call.layer = layer;
    return forward(call, array(slot, 0), reinterpret_cast<const int32_t*>(array(slot, shared_.ids_at)),
                   reinterpret_cast<const float*>(array(slot, shared_.weights_at)), array(slot, shared_.y_at));
}

bool Ring::serve(const std::function<void(Status)>& report) {
    uint64_t slot = next_ & shared_.mask;
    Flags& flags = block_->flags(slot);
    uint64_t submitted = flags.submitted.load(std::memory_order_acquire);
    if (submitted < next_) return false;
    // A later number than this slot's next: who had that one gave up before it was seen, and no one waits for it.
    if (submitted == next_) {
        Status failed = answer(slot, flags.layer.load(std::memory_order_relaxed));
        if (failed) std::fill_n(reinterpret_cast<uint16_t*>(array(slot, shared_.y_at)), shared_.y_bytes / 2, kNaN);
        report(std::move(failed));  // before the answer is there: who finds NaN can ask why
        flags.done.store(submitted, std::memory_order_release);
    }
    ++next_;
    return true;
}

Status Ring::complaint() {
    if (block_->gave_up.load(std::memory_order_relaxed) && block_->gave_up.exchange(0)) {
        return {CPU_EXPERTS_FAILED, "a GPU program waited in vain for the experts on the CPU; what it got is NaN"};
    }
    if (block_->lost.load(std::memory_order_relaxed) && block_->lost.exchange(0)) {
        return {CPU_EXPERTS_FAILED, "more than " + std::to_string(shared_.mask + 1) +
                                        " calls were under way on a GPU; what was collected too late is NaN"};
    }
    return {};
}

}  // namespace cpu_experts::ffi
