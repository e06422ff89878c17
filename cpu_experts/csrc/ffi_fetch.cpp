#include "ffi_fetch.h"

#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace cpu_experts::ffi {
namespace {

constexpr unsigned kPortable = 1, kReadOnly = 8;

// A layer's weights as the driver knows them: pages that stay where they are are copied at the link's speed.
struct Pinned {
    Context by = nullptr;
    std::set<Context> users;
    std::vector<void*> memory;
    uint64_t mapped = 0;  // bytes of files
};

// Its mutex is held over calls of the driver: the thread that kernels may wait for never takes it.
struct Pins {
    std::mutex mutex;
    std::map<uint64_t, Pinned> layers;
    uint64_t mapped = 0;
    pid_t process = getpid();
};

Pins& pins() {
    static auto* p = new Pins;
    return *p;
}

// Pages of a file that are pinned cannot be given up by the system, which must go on with the rest.
uint64_t most_mapped() { return uint64_t(sysconf(_SC_PHYS_PAGES)) * uint64_t(sysconf(_SC_PAGESIZE)) / 2; }

// Once a layer. What cannot be pinned is copied all the same, by way of the driver's own memory.
void pin(Context context, uint64_t number, const cpu_experts_ffi_layer& layer) {
    Pins& all = pins();
    std::lock_guard<std::mutex> hold(all.mutex);
    Pinned& of = all.layers[number];
    of.users.insert(context);
    if (of.by) return;
    of.by = context;
    uint64_t mapped = layer.read_only ? layer.gate_up_bytes + layer.down_bytes : 0;
    if (mapped && all.mapped + mapped > most_mapped()) return;
    unsigned flags = kPortable | (layer.read_only ? kReadOnly : 0);
    const std::pair<const void*, uint64_t> parts[] = {{layer.gate_up, layer.gate_up_bytes}, {layer.down, layer.down_bytes}};
    for (auto [data, bytes] : parts) {
        auto* memory = const_cast<void*>(data);
        if (!driver().MemHostRegister(memory, bytes, flags)) of.memory.push_back(memory);
    }
    if (!of.memory.empty()) all.mapped += of.mapped = mapped;
}

Status closed() { return {CPU_EXPERTS_CLOSED, "the layer is closed"}; }

Status sources(const cpu_experts_ffi_layer& layer, int64_t first, const Copies& copies, const uint8_t* (&from)[2]) {
    if (first < 0 || copies.count < 1 || copies.count > layer.experts - first) {
        return {CPU_EXPERTS_INVALID, std::to_string(copies.count) + " experts from " + std::to_string(first) +
                                         ", must be some of " + std::to_string(layer.experts)};
    }
    const std::pair<const void*, uint64_t> parts[] = {{layer.gate_up, layer.gate_up_bytes}, {layer.down, layer.down_bytes}};
    for (int i = 0; i < 2; ++i) {
        uint64_t each = parts[i].second / uint64_t(layer.experts), bytes = each * uint64_t(copies.count);
        if (copies.bytes[i] != bytes) {
            return {CPU_EXPERTS_INVALID, "an array of " + std::to_string(copies.bytes[i]) + " bytes, must be of " +
                                             std::to_string(bytes)};
        }
        from[i] = static_cast<const uint8_t*>(parts[i].first) + each * uint64_t(first);
    }
    return {};
}

Status read_first(Stream stream, const int32_t* at, int32_t& first) {
    const Driver& d = driver();
    if (auto failed = d.said("cuMemcpyDtoHAsync", d.MemcpyDtoHAsync(&first, Address(at), sizeof first, stream))) return failed;
    return d.said("cuStreamSynchronize", d.StreamSynchronize(stream));
}

}  // namespace

Status fetch(uint64_t layer, int32_t first, const Copies& copies) {
    auto held = hold(layer);
    if (!held) return closed();
    const uint8_t* from[2];
    if (auto failed = sources(*held, first, copies, from)) return failed;
    for (int i = 0; i < 2; ++i) std::memcpy(copies.to[i], from[i], copies.bytes[i]);
    return {};
}

Status fetch(Stream stream, uint64_t layer, const int32_t* at, const Copies& copies) {
    const Driver& d = driver();
    if (pins().process != getpid()) return {CPU_EXPERTS_FAILED, "this process is a fork of the one that uses the GPU: spawn it"};
    auto held = hold(layer);
    if (!held) return closed();
    Context context = nullptr;
    if (auto failed = d.said("cuStreamGetCtx", d.StreamGetCtx(stream, &context))) return failed;
    Within within(context);
    if (within.status) return within.status;
    int capturing = 0, first = 0;
    if (auto failed = d.said("cuStreamIsCapturing", d.StreamIsCapturing(stream, &capturing))) return failed;
    if (capturing) return {CPU_EXPERTS_UNSUPPORTED, "experts cannot be fetched in a graph, which may outlive them"};
    if (auto failed = read_first(stream, at, first)) return failed;
    const uint8_t* from[2];
    if (auto failed = sources(*held, first, copies, from)) return failed;
    pin(context, layer, *held);
    for (int i = 0; i < 2; ++i) {
        int result = d.MemcpyHtoDAsync(Address(copies.to[i]), from[i], copies.bytes[i], stream);
        if (auto failed = d.said("cuMemcpyHtoDAsync", result)) return failed;
    }
    return {};
}

void unpin(uint64_t layer) {
    Pins& all = pins();
    if (all.process != getpid()) return;
    Pinned gone;
    {
        std::lock_guard<std::mutex> hold(all.mutex);
        auto at = all.layers.find(layer);
        if (at == all.layers.end()) return;
        gone = std::move(at->second);
        all.layers.erase(at);
        all.mapped -= gone.mapped;
    }
    for (Context context : gone.users) {
        Within within(context);
        if (!within.status) driver().CtxSynchronize();
    }
    Within within(gone.by);
    for (void* memory : gone.memory) {
        if (!within.status) driver().MemHostUnregister(memory);
    }
}

}  // namespace cpu_experts::ffi
