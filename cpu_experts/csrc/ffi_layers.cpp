#include "ffi_layers.h"

#include <pthread.h>

#include <climits>
#include <map>
#include <mutex>

namespace cpu_experts::ffi {
namespace {

// Never destroyed: programs may run until the process ends.
struct Registry {
    std::mutex mutex;
    uint64_t next = 1;
    std::map<uint64_t, cpu_experts_ffi_layer> layers;
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
    {
        std::lock_guard<std::mutex> hold(registry().mutex);
        auto at = registry().layers.find(call.layer);
        if (at == registry().layers.end()) return {CPU_EXPERTS_CLOSED, "the layer is closed"};
        layer = at->second;
    }
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
    registry().layers[number] = layer;
    return number;
}

void forget(uint64_t number) {
    std::lock_guard<std::mutex> hold(registry().mutex);
    registry().layers.erase(number);
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
