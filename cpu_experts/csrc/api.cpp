// The C ABI: checks every argument, keeps the handles, lets no exception out.
#include <pthread.h>

#include <chrono>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <thread>

#include "cpu_experts.h"
#include "experts.h"

namespace {

using namespace cpu_experts;

thread_local char last_error[512] = "";
constexpr std::chrono::microseconds kLook{50};  // between two looks whether calls have ended

int32_t fail(cpu_experts_status status, const char* format, ...) __attribute__((format(printf, 2, 3)));

int32_t fail(cpu_experts_status status, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    return status;
}

struct Open {
    Layer layer;
    int threads;
    std::shared_ptr<Pool> pool;  // of this process; guarded by the registry's mutex
};

// Never destroyed: workers may outlive static destructors, and a handle may be closed after them.
struct Registry {
    std::mutex mutex;
    uint64_t next = 1;
    std::map<uint64_t, std::shared_ptr<Open>> open;
    std::map<int, std::weak_ptr<Pool>> pools;
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

// Under the mutex. After a fork the parent's pool is left alone, for its workers are not here, and its lock may be held.
std::shared_ptr<Pool> pool_of(Registry& r, int threads) {
    auto pool = r.pools[threads].lock();
    if (!pool || !pool->threads.of_this_process()) r.pools[threads] = pool = std::make_shared<Pool>(threads);
    return pool;
}

// nullptr if there is none; with a pool whose workers are here.
std::shared_ptr<Open> opened(uint64_t handle, std::shared_ptr<Pool>& pool) {
    std::lock_guard<std::mutex> hold(registry().mutex);
    auto found = registry().open.find(handle);
    if (found == registry().open.end()) return nullptr;
    auto& open = found->second;
    if (!open->pool->threads.of_this_process())  // anew: calls of the parent's threads that hold the other do not end here
        open = std::make_shared<Open>(Open{open->layer, open->threads, pool_of(registry(), open->threads)});
    pool = open->pool;
    return open;
}

template <class Body>
int32_t guarded(Body body) {
    try {
        return body();
    } catch (const std::bad_alloc&) {
        return fail(CPU_EXPERTS_NO_MEMORY, "out of memory");
    } catch (const std::exception& e) {
        return fail(CPU_EXPERTS_FAILED, "%s", e.what());
    } catch (...) {
        return fail(CPU_EXPERTS_FAILED, "unknown failure");
    }
}

bool aligned(const void* p, size_t to) { return reinterpret_cast<uintptr_t>(p) % to == 0; }

// A caller built with another header may hold less than would be read.
int32_t check_size(const char* what, int32_t found, size_t expected) {
    if (found == int32_t(expected)) return CPU_EXPERTS_OK;
    return fail(CPU_EXPERTS_INVALID, "%s: struct_bytes %d, must be %zu", what, found, expected);
}

int32_t check_inputs(const char* what, int32_t precision, int32_t inputs) {
    if (precision < 0 || precision >= kPrecisions) return fail(CPU_EXPERTS_INVALID, "%s: unknown precision %d", what, precision);
    int of = kFormats[precision].block_k;
    if (inputs % of) return fail(CPU_EXPERTS_INVALID, "%s: %d inputs, must be a multiple of %d", what, inputs, of);
    return CPU_EXPERTS_OK;
}

int32_t check(const cpu_experts_weights* w) {
    if (!w) return fail(CPU_EXPERTS_INVALID, "weights: null");
    if (int32_t status = check_size("weights", w->struct_bytes, sizeof *w)) return status;
    if (w->isa < 0 || w->isa > CPU_EXPERTS_AMX) return fail(CPU_EXPERTS_INVALID, "isa: unknown, %d", w->isa);
    constexpr int most = 1 << 16;  // of each dimension: sums of 32-bit integers and all sizes in bytes stay in range
    const int32_t sizes[] = {w->experts, w->model, w->width};
    const char* const names[] = {"experts", "model", "width"};
    for (int i = 0; i < 3; ++i) {
        if (sizes[i] < 1 || sizes[i] > most)
            return fail(CPU_EXPERTS_INVALID, "%s: %d, must be 1 to %d", names[i], sizes[i], most);
    }
    if (int32_t status = check_inputs("gate_up", w->gate_up_precision, w->model)) return status;
    if (int32_t status = check_inputs("down", w->down_precision, w->width)) return status;
    if (w->threads < 0 || w->threads > 1024) return fail(CPU_EXPERTS_INVALID, "threads: %d, must be 0 to 1024", w->threads);
    if (w->max_rows < 1 || w->max_rows > 1 << 20)
        return fail(CPU_EXPERTS_INVALID, "max_rows: %d, must be 1 to 2^20", w->max_rows);
    if (!w->gate_up || !w->down) return fail(CPU_EXPERTS_INVALID, "%s: null", w->gate_up ? "down" : "gate_up");
    if (!aligned(w->gate_up, kLine) || !aligned(w->down, kLine)) {
        return fail(CPU_EXPERTS_INVALID, "%s: not aligned to 64 bytes", aligned(w->gate_up, kLine) ? "down" : "gate_up");
    }
    return CPU_EXPERTS_OK;
}

int32_t check(const Layer& layer, const cpu_experts_batch* b) {
    if (!b) return fail(CPU_EXPERTS_INVALID, "batch: null");
    if (int32_t status = check_size("batch", b->struct_bytes, sizeof *b)) return status;
    int most = layer.max_rows() < CPU_EXPERTS_MAX_CHOSEN ? layer.max_rows() : CPU_EXPERTS_MAX_CHOSEN;
    if (b->tokens < 0) return fail(CPU_EXPERTS_INVALID, "tokens: %d, must not be negative", b->tokens);
    if (b->chosen < 1 || b->chosen > most) return fail(CPU_EXPERTS_INVALID, "chosen: %d, must be 1 to %d", b->chosen, most);
    const int32_t dtypes[] = {b->x_dtype, b->out_dtype};
    for (int32_t d : dtypes) {
        if (d != CPU_EXPERTS_F32 && d != CPU_EXPERTS_BFLOAT16) return fail(CPU_EXPERTS_INVALID, "dtype: unknown, %d", d);
    }
    if (b->tokens == 0) return CPU_EXPERTS_OK;
    const void* const pointers[] = {b->x, b->out, b->topk_ids, b->topk_weights};
    const size_t sizes[] = {b->x_dtype ? 2u : 4u, b->out_dtype ? 2u : 4u, 4, 4};
    const char* const names[] = {"x", "out", "topk_ids", "topk_weights"};
    for (int i = 0; i < 4; ++i) {
        if (!pointers[i]) return fail(CPU_EXPERTS_INVALID, "%s: null", names[i]);
        if (!aligned(pointers[i], sizes[i])) return fail(CPU_EXPERTS_INVALID, "%s: not aligned to %zu bytes", names[i], sizes[i]);
    }
    for (int64_t i = 0; i < int64_t(b->tokens) * b->chosen; ++i) {
        int t = int(i / b->chosen), k = int(i % b->chosen);
        if (b->topk_ids[i] < 0 || b->topk_ids[i] > layer.experts()) {
            return fail(CPU_EXPERTS_INVALID, "topk_ids[%d, %d]: %d, must be 0 to %d", t, k, b->topk_ids[i], layer.experts());
        }
        if (!std::isfinite(b->topk_weights[i])) return fail(CPU_EXPERTS_INVALID, "topk_weights[%d, %d]: not finite", t, k);
    }
    return CPU_EXPERTS_OK;
}

}  // namespace

int32_t cpu_experts_abi(void) { return CPU_EXPERTS_ABI; }

int32_t cpu_experts_best_isa(void) { return best_isa(); }

const char* cpu_experts_last_error(void) { return last_error; }

int32_t cpu_experts_open(const cpu_experts_weights* weights, uint64_t* handle) {
    return guarded([&]() -> int32_t {
        if (!handle) return fail(CPU_EXPERTS_INVALID, "handle: null");
        if (int32_t status = check(weights)) return status;
        const Kernels* kernels = kernels_of(Isa(weights->isa));
        if (!kernels) return fail(CPU_EXPERTS_UNSUPPORTED, "this processor lacks the instruction set asked for");
        Layer layer(*weights, *kernels);
        if (weights->gate_up_bytes != layer.gate_up_bytes() || weights->down_bytes != layer.down_bytes()) {
            return fail(CPU_EXPERTS_INVALID, "packed weights: %llu and %llu bytes, must be %zu and %zu",
                        static_cast<unsigned long long>(weights->gate_up_bytes),
                        static_cast<unsigned long long>(weights->down_bytes), layer.gate_up_bytes(), layer.down_bytes());
        }
        int threads = weights->threads ? weights->threads : usable_cores();
        std::shared_ptr<Pool> pool;
        {
            std::lock_guard<std::mutex> hold(registry().mutex);
            pool = pool_of(registry(), threads);
        }
        {
            std::lock_guard<std::mutex> busy(pool->busy);
            pool->reserve(layer.scratch_bytes(threads));
        }
        layer.spread(pool->threads);
        std::lock_guard<std::mutex> hold(registry().mutex);
        uint64_t id = registry().next++;
        registry().open[id] = std::make_shared<Open>(Open{layer, threads, std::move(pool)});
        *handle = id;
        return CPU_EXPERTS_OK;
    });
}

int32_t cpu_experts_check(uint64_t handle, const cpu_experts_batch* batch) {
    return guarded([&]() -> int32_t {
        std::shared_ptr<Pool> pool;
        auto open = opened(handle, pool);
        return open ? check(open->layer, batch) : fail(CPU_EXPERTS_CLOSED, "the layer is closed");
    });
}

int32_t cpu_experts_forward(uint64_t handle, const cpu_experts_batch* batch) {
    return guarded([&]() -> int32_t {
        std::shared_ptr<Pool> pool;
        auto open = opened(handle, pool);
        if (!open) return fail(CPU_EXPERTS_CLOSED, "the layer is closed");
        if (int32_t status = check(open->layer, batch)) return status;
        if (batch->tokens == 0) return CPU_EXPERTS_OK;
        std::lock_guard<std::mutex> busy(pool->busy);
        pool->reserve(open->layer.scratch_bytes(pool->threads.count()));  // held since opening, unless this is a forked child
        open->layer.forward(*pool, *batch);
        return CPU_EXPERTS_OK;
    });
}

int32_t cpu_experts_close(uint64_t handle) {
    return guarded([&]() -> int32_t {
        std::shared_ptr<Open> closed;  // ends after the lock: the last layer of a pool waits for its workers
        {
            std::lock_guard<std::mutex> hold(registry().mutex);
            auto found = registry().open.find(handle);
            if (found == registry().open.end()) return fail(CPU_EXPERTS_CLOSED, "the layer is closed");
            closed = std::move(found->second);
            registry().open.erase(found);
        }
        // Calls that run hold it, too, and read weights that are the caller's to free after the return.
        while (closed.use_count() > 1 && closed->pool->threads.of_this_process()) std::this_thread::sleep_for(kLook);
        return CPU_EXPERTS_OK;
    });
}
