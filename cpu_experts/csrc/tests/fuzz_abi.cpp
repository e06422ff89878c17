// A fuzzer of the C ABI: bytes become calls in any order, of fields that fit and fields that do not. libFuzzer keeps bytes that
// reach new code, and AddressSanitizer sees what is touched outside a buffer: each is as long as the library was told, no longer.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "cpu_experts.h"
#include "gemm.h"

namespace {

using namespace cpu_experts;

constexpr size_t kMost = size_t(1) << 18;  // bytes of a buffer: with small ones more calls are tried
constexpr size_t kCalls = 24;

void expect(bool so, const char* what) {
    if (so) return;
    std::fprintf(stderr, "not so: %s (%s)\n", what, cpu_experts_last_error());
    std::abort();
}

class Bytes {
public:
    Bytes(const uint8_t* data, size_t size) : data_(data), left_(size) {}
    bool empty() const { return left_ == 0; }
    template <class T>
    T take() {
        T value{};
        size_t count = std::min(left_, sizeof value);
        std::memcpy(&value, data_, count);
        data_ += count, left_ -= count;
        return value;
    }
    int below(int end) { return take<uint8_t>() % end; }
    bool rarely() { return take<uint8_t>() >= 250; }
    // Mostly as it fits; else a neighbour of that, or any number.
    template <class T>
    T field(T fitting) {
        if (!rarely()) return fitting;
        return below(2) ? take<T>() : T(uint64_t(fitting) + uint64_t(below(3)) - 1);
    }

private:
    const uint8_t* data_;
    size_t left_;
};

struct Free {
    void operator()(uint8_t* memory) const { std::free(memory); }
};
using Buffer = std::unique_ptr<uint8_t, Free>;

// Of random bytes, which as numbers are all there are: infinite, NaN, denormal.
Buffer buffer(size_t bytes, uint32_t seed) {
    void* memory = nullptr;
    if (posix_memalign(&memory, kLine, bytes)) std::abort();
    auto* at = static_cast<uint8_t*>(memory);
    for (size_t i = 0; i < bytes; ++i) at[i] = uint8_t((seed = seed * 1664525 + 1013904223) >> 24);
    return Buffer(at);
}

struct Opened {
    uint64_t handle = 0;
    bool open = false;
    int experts = 0, model = 0;
    Buffer gate_up, down;
};

// What both matrices take, by the header's words rather than the library's: 0 where it takes no such sizes.
uint64_t bytes_of(const cpu_experts_weights& w, bool gate_up) {
    int precision = gate_up ? w.gate_up_precision : w.down_precision, inputs = gate_up ? w.model : w.width;
    auto possible = [](int size) { return size >= 1 && size <= 1 << 16; };
    if (precision < 0 || precision >= kPrecisions || !possible(inputs) || !possible(w.experts)) return 0;
    int64_t panels = gate_up ? (int64_t(w.width) + kTile - 1) / kTile : (int64_t(w.model) + kPanel - 1) / kPanel;
    return uint64_t(w.experts) * uint64_t(std::max(panels, int64_t(0))) * Shape(Precision(precision), inputs).panel_bytes;
}

cpu_experts_weights random_weights(Bytes& bytes) {
    const int sizes[] = {1, 16, 31, 32, 33, 64, 100, 130};
    cpu_experts_weights w{};
    w.struct_bytes = bytes.field(int32_t(sizeof w));
    w.gate_up_precision = bytes.field(bytes.below(kPrecisions));
    w.down_precision = bytes.field(bytes.below(2) ? w.gate_up_precision : bytes.below(kPrecisions));
    bool blocks = bytes.below(2);
    w.experts = bytes.field(1 + bytes.below(4));
    w.model = bytes.field(blocks ? 256 : sizes[bytes.below(8)]);
    w.width = bytes.field(blocks ? 256 : sizes[bytes.below(8)]);
    w.threads = bytes.field(1 + bytes.below(3));
    if (w.threads > 8 && w.threads <= 1024) w.threads = 8;  // more are slow to start
    w.isa = bytes.field(bytes.below(5));
    w.max_rows = bytes.field(1 + bytes.below(100));
    return w;
}

// Where a matrix is too large to be there, its bytes are not what they should be, and the library must say so.
Buffer give(Bytes& bytes, const cpu_experts_weights& w, bool gate_up, const void** pointer, uint64_t* size) {
    uint64_t needed = bytes_of(w, gate_up);
    *size = bytes.field(needed);
    if (*size == needed && needed > kMost) *size += 64;
    Buffer memory = buffer(size_t(std::min<uint64_t>(*size, kMost)), bytes.take<uint32_t>());
    *pointer = bytes.rarely() ? nullptr : memory.get() + (bytes.rarely() ? 2 : 0);
    return memory;
}

void open(Bytes& bytes, std::vector<Opened>& layers) {
    cpu_experts_weights w = random_weights(bytes);
    Opened layer;
    layer.gate_up = give(bytes, w, true, &w.gate_up, &w.gate_up_bytes);
    layer.down = give(bytes, w, false, &w.down, &w.down_bytes);
    uint64_t handle = 77;
    bool nothing = bytes.rarely(), nowhere = bytes.rarely();
    int32_t status = cpu_experts_open(nothing ? nullptr : &w, nowhere ? nullptr : &handle);
    if (status) {
        expect(handle == 77, "a refused opening gives no handle");
        expect(status <= CPU_EXPERTS_NO_MEMORY, "an opening that fails says why");
        return;
    }
    expect(!nothing && !nowhere, "what is null is refused");
    expect(w.gate_up_bytes == bytes_of(w, true) && w.down_bytes == bytes_of(w, false), "other sizes are refused");
    expect(w.gate_up_bytes <= kMost && w.down_bytes <= kMost, "all of the weights are there");
    layer.handle = handle, layer.open = true, layer.experts = w.experts, layer.model = w.model;
    layers.push_back(std::move(layer));
}

struct Arrays {
    Buffer x, ids, weights, out;
};

// Ids and weights that are mostly good.
void fill(Bytes& bytes, const Arrays& arrays, size_t chosen, int experts) {
    auto* ids = reinterpret_cast<int32_t*>(arrays.ids.get());
    auto* weights = reinterpret_cast<float*>(arrays.weights.get());
    for (size_t i = 0; i < chosen; ++i) {
        ids[i] = int32_t(uint32_t(ids[i]) % uint32_t(experts + 1));
        weights[i] = float(i % 7) - 3;
    }
    if (chosen == 0 || !bytes.rarely()) return;
    ids[bytes.take<uint32_t>() % chosen] = bytes.field(experts);
    weights[bytes.take<uint32_t>() % chosen] = bytes.take<float>();
}

// As long as the batch says, unless it says more than there can be: then they are null.
Arrays arrays_of(Bytes& bytes, cpu_experts_batch& b, const Opened& layer, size_t* out_bytes) {
    size_t tokens = size_t(std::clamp(b.tokens, 0, 512)), chosen = size_t(std::clamp(b.chosen, 0, CPU_EXPERTS_MAX_CHOSEN));
    size_t line = tokens * size_t(layer.model);
    *out_bytes = line * (b.out_dtype == CPU_EXPERTS_BFLOAT16 ? 2 : 4);
    auto seed = bytes.take<uint32_t>();
    Arrays arrays{buffer(line * (b.x_dtype == CPU_EXPERTS_BFLOAT16 ? 2 : 4), seed), buffer(tokens * chosen * 4, seed + 1),
                  buffer(tokens * chosen * 4, seed + 2), buffer(*out_bytes, seed + 3)};
    fill(bytes, arrays, tokens * chosen, layer.experts);
    if (b.tokens > 512) return arrays;
    b.x = bytes.rarely() ? nullptr : arrays.x.get();
    b.topk_ids = bytes.rarely() ? nullptr : reinterpret_cast<int32_t*>(arrays.ids.get());
    b.topk_weights = bytes.rarely() ? nullptr : reinterpret_cast<float*>(arrays.weights.get());
    b.out = bytes.rarely() ? nullptr : arrays.out.get();
    return arrays;
}

void forward(Bytes& bytes, const Opened& layer) {
    cpu_experts_batch b{};
    b.struct_bytes = bytes.field(int32_t(sizeof b));
    b.tokens = bytes.field(bytes.below(4) ? bytes.below(8) : bytes.below(60));
    b.chosen = bytes.field(1 + bytes.below(4));
    b.x_dtype = bytes.field(bytes.below(2));
    b.out_dtype = bytes.field(bytes.below(2));
    size_t out_bytes = 0;
    Arrays arrays = arrays_of(bytes, b, layer, &out_bytes);
    std::vector<uint8_t> before(arrays.out.get(), arrays.out.get() + out_bytes);
    auto untouched = [&] { return std::equal(before.begin(), before.end(), arrays.out.get()); };
    const cpu_experts_batch* given = bytes.rarely() ? nullptr : &b;
    int32_t said = cpu_experts_check(layer.handle, given);
    expect(untouched(), "a check writes nothing");
    int32_t status = cpu_experts_forward(layer.handle, given);
    expect(status == said, "forward does what check says");
    expect(!status || untouched(), "what is refused is not written");
    expect(layer.open == (status != CPU_EXPERTS_CLOSED), "a closed layer is closed, an open one is not");
    if (status || bytes.below(4)) return;
    std::vector<uint8_t> first(arrays.out.get(), arrays.out.get() + out_bytes);
    cpu_experts_forward(layer.handle, given);
    expect(std::equal(first.begin(), first.end(), arrays.out.get()), "the same arguments give the same bits");
}

void close(Opened& layer) {
    expect(cpu_experts_close(layer.handle) == (layer.open ? CPU_EXPERTS_OK : CPU_EXPERTS_CLOSED), "a layer closes once");
    layer.open = false;
    layer.gate_up.reset(), layer.down.reset();  // whoever still reads them is seen
}

// A handle that is none: of the next layer, of no layer yet, or anything.
void unknown(Bytes& bytes, const std::vector<Opened>& layers) {
    uint64_t handle = bytes.below(2) ? bytes.take<uint64_t>() : layers.empty() ? 0 : layers.back().handle + 1;
    for (const Opened& layer : layers) {
        if (layer.handle == handle) return;
    }
    expect(cpu_experts_check(handle, nullptr) == CPU_EXPERTS_CLOSED, "an unknown handle cannot be checked");
    expect(cpu_experts_forward(handle, nullptr) == CPU_EXPERTS_CLOSED, "an unknown handle cannot run");
    expect(cpu_experts_close(handle) == CPU_EXPERTS_CLOSED, "an unknown handle cannot be closed");
}

}  // namespace

// Scratch of 2^20 rows may be more than there is: that is a status, too.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    Bytes bytes(data, size);
    std::vector<Opened> layers;
    for (size_t i = 0; i < kCalls && !bytes.empty(); ++i) {
        int call = bytes.below(8);
        if (layers.empty() || call < 2) {
            open(bytes, layers);
        } else if (call == 2) {
            close(layers[size_t(bytes.below(int(layers.size())))]);
        } else if (call == 3) {
            unknown(bytes, layers);
        } else {
            forward(bytes, layers[size_t(bytes.below(int(layers.size())))]);
        }
    }
    for (Opened& layer : layers) {
        if (layer.open) close(layer);
    }
    return 0;
}
