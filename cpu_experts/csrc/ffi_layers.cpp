#include "ffi_layers.h"

#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

namespace cpu_experts::ffi {
namespace {

constexpr std::chrono::microseconds kLook{50};  // between two looks whether a layer is still held

struct Known {
    std::shared_ptr<const cpu_experts_ffi_layer> layer;
    pid_t process;
};

// Never destroyed: programs may run until the process ends.
struct Registry {
    std::mutex mutex;
    uint64_t next = 1;
    std::map<uint64_t, Known> layers;
};

Registry& registry() {
    static auto* r = [] {
        static auto* made = new Registry;
        // A fork while another thread holds the mutex would leave it locked in the child.
        pthread_atfork([] { made->mutex.lock(); }, [] { made->mutex.unlock(); }, [] { made->mutex.unlock(); });
        return made;
    }();
    return *r;
}

Status found(const Call& call, cpu_experts_ffi_layer& layer) {
    auto held = hold(call.layer);
    if (!held) return {CPU_EXPERTS_CLOSED, "the layer is closed"};
    layer = *held;
    if (call.model != layer.model) {
        return {CPU_EXPERTS_INVALID, "x: rows of " + std::to_string(call.model) + ", must be of " + std::to_string(layer.model)};
    }
    if (call.tokens > INT_MAX || call.chosen > INT_MAX) return {CPU_EXPERTS_INVALID, "x or topk_ids: too large"};
    return {};
}

}  // namespace

uint64_t know(const cpu_experts_ffi_layer& layer) {
    std::lock_guard<std::mutex> hold(registry().mutex);
    uint64_t number = registry().next++;
    registry().layers[number] = {std::make_shared<const cpu_experts_ffi_layer>(layer), getpid()};
    return number;
}

std::shared_ptr<const cpu_experts_ffi_layer> hold(uint64_t number) {
    std::lock_guard<std::mutex> hold(registry().mutex);
    auto at = registry().layers.find(number);
    return at == registry().layers.end() ? nullptr : at->second.layer;
}

void forget(uint64_t number) {
    Known gone{};
    {
        std::lock_guard<std::mutex> hold(registry().mutex);
        auto at = registry().layers.find(number);
        if (at == registry().layers.end()) return;
        gone = std::move(at->second);
        registry().layers.erase(at);
    }
    // A fork's copy may be held by threads that are not here.
    while (gone.layer.use_count() > 1 && gone.process == getpid()) std::this_thread::sleep_for(kLook);
}

Status check(const Call& call) {
    Call none = call;
    none.tokens = 0;
    return forward(none, nullptr, nullptr, nullptr, nullptr);
}

Status forward(const Call& call, const void* x, const int32_t* topk_ids, const float* topk_weights, void* out) {
    cpu_experts_ffi_layer layer{};
    if (Status failed = found(call, layer)) return failed;
    cpu_experts_batch batch{};
    batch.struct_bytes = sizeof batch;
    batch.tokens = int32_t(call.tokens), batch.chosen = int32_t(call.chosen);
    batch.x_dtype = call.x_dtype, batch.out_dtype = call.out_dtype;
    batch.x = x, batch.topk_ids = topk_ids, batch.topk_weights = topk_weights, batch.out = out;
    int32_t code = layer.forward(layer.handle, &batch);
    if (code) return {code, layer.last_error()};
    return {};
}

}  // namespace cpu_experts::ffi
