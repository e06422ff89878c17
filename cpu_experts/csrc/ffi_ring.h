// The memory through which calls of one size go between a GPU and the host, and the two kernels' launches.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>

#include "ffi_driver.h"

namespace cpu_experts::ffi {

// Of one slot. The GPU writes the first line, the host the second.
struct alignas(128) Flags {
    std::atomic<uint64_t> submitted{0}, layer{0};
    alignas(64) std::atomic<uint64_t> done{0};
};

// At the beginning of the host's memory; the slots' flags follow it, and then their arrays. ffi_kernels.h states the offsets.
struct alignas(128) Block {
    std::atomic<uint64_t> stop{0}, gave_up{0}, lost{0};
    Flags& flags(uint64_t slot) { return reinterpret_cast<Flags*>(this + 1)[slot]; }
};

// What both kernels are given of a ring: addresses as the GPU has them, sizes and offsets in bytes.
struct Shared {
    uint64_t block, own;
    uint64_t mask;          // slots - 1; slots are a power of two
    uint64_t data, stride;  // the first slot's arrays in the block, and the distance to the next slot's
    uint64_t ids_at, weights_at, y_at;
    uint64_t x_bytes, pair_bytes, y_bytes;
    uint64_t patience;  // nanoseconds that a kernel waits for the host
};
static_assert(sizeof(Block) == 128 && sizeof(Flags) == 128 && sizeof(Shared) == 96, "as ffi_kernels.h has them");

class Ring {
public:
    // In that context, which is current; the call's layer does not matter.
    static Status make(Context context, const Call& call, std::shared_ptr<Ring>& made);
    // Once no kernel of it runs any more, in its context.
    ~Ring();
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    // Launches on a stream of the ring's context; pointers are the GPU's.
    Status submit(Stream stream, uint64_t layer, uint64_t patience, const void* x, const void* ids, const void* weights,
                  void* ticket);
    Status collect(Stream stream, uint64_t patience, const void* ticket, void* y);
    // Whether a graph holds its kernels, and may launch them whenever it likes.
    bool captured() const { return captured_; }
    // No more launches from here on.
    void retire();

    // Answers the next call, if there is one. What went wrong with it is also in the answer: NaN. On one thread only.
    bool serve(const std::function<void(Status)>& report);
    // From now on kernels do not wait for what is not there yet.
    void stop() { block_->stop.store(1, std::memory_order_release); }
    // What a kernel complained of since this was last asked.
    Status complaint();

private:
    explicit Ring(const Call& call);
    Status allocate();
    Status launch(Stream stream, Function kernel, unsigned blocks, uint64_t bytes, void** arguments);
    Status answer(uint64_t slot, uint64_t layer);
    uint8_t* array(uint64_t slot, uint64_t at) {
        return reinterpret_cast<uint8_t*>(block_) + shared_.data + slot * shared_.stride + at;
    }

    Call call_;
    Shared shared_{};
    Function submit_ = nullptr, collect_ = nullptr;
    Block* block_ = nullptr;
    std::mutex launching_;
    bool retired_ = false;  // guarded by it
    std::atomic<bool> captured_{false};
    uint64_t next_ = 1;  // the number that serve() looks for
};

}  // namespace cpu_experts::ffi
