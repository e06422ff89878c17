// The GPU's side of ffi.py without XLA and without a GPU: the library's own rings and thread, on the driver that the first
// argument names (fake_cuda.cpp). Prints what holds; a program of its own, so that sanitizers see all of it.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "ffi_fetch.h"
#include "ffi_service.h"

namespace {

using namespace cpu_experts::ffi;

constexpr uint64_t kSecond = 1000000000, kPatience = 20 * kSecond;
int failures = 0;

void check(bool holds, const char* what) {
    if (holds) return;
    std::printf("FAILED: %s\n", what);
    ++failures;
}

bool says(const Status& status, const char* words) {
    bool found = status.words.find(words) != std::string::npos;
    if (!found) std::printf("said \"%s\", not \"%s\"\n", status.words.c_str(), words);
    return found;
}

// Until it holds, for a minute at most: where others have the cores, a thread comes when it can.
template <class Holds>
bool soon(Holds holds) {
    auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    while (!holds()) {
        if (std::chrono::steady_clock::now() > until) return false;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
}

// ---- layers: y = (handle + the chosen experts' ids by weight) x

std::atomic<bool> blocked{false};

const char* no_words() { return "this call failed"; }

int32_t multiply(uint64_t handle, const cpu_experts_batch* b) {
    while (blocked && b->tokens) std::this_thread::yield();
    int model = 40;
    for (int t = 0; t < b->tokens; ++t) {
        float factor = float(handle);
        for (int k = 0; k < b->chosen; ++k) {
            int id = b->topk_ids[t * b->chosen + k];
            if (id < 0) return CPU_EXPERTS_INVALID;
            factor += b->topk_weights[t * b->chosen + k] * float(id);
        }
        for (int i = t * model; i < (t + 1) * model; ++i) {
            static_cast<float*>(b->out)[i] = factor * static_cast<const float*>(b->x)[i];
        }
    }
    return 0;
}

// Some have weights, of 24 bytes and 8 an expert.
uint64_t layer_of(uint64_t handle, const std::vector<uint8_t>& weights = {}, bool read_only = false) {
    uint64_t gate_up = weights.size() / 4 * 3;
    return know({int32_t(sizeof(cpu_experts_ffi_layer)), 8, 40, read_only, handle, weights.data(), weights.data() + gate_up,
                 gate_up, weights.size() - gate_up, multiply, no_words});
}

struct Fake {
    explicit Fake(const char* path) : library(dlopen(path, RTLD_NOW)) {}
    template <class... Arguments>
    void call(const char* name, Arguments... arguments) const {
        reinterpret_cast<void (*)(Arguments...)>(dlsym(library, name))(arguments...);
    }
    void* stream() const { return reinterpret_cast<void* (*)()>(dlsym(library, "fake_stream"))(); }
    size_t registered(unsigned flags = 0) const {
        return reinterpret_cast<size_t (*)(unsigned)>(dlsym(library, "fake_registered"))(flags);
    }
    bool stopped(void* stream) const { return reinterpret_cast<bool (*)(void*)>(dlsym(library, "fake_stopped"))(stream); }
    size_t held() const { return reinterpret_cast<size_t (*)()>(dlsym(library, "fake_held"))(); }
    void* library;
};

// One call's arrays, "on the GPU"; x and y begin where 16 bytes do not.
struct Arrays {
    Arrays(uint64_t layer, int64_t tokens, float seed)
        : call{layer, tokens, 2, 40, CPU_EXPERTS_F32, CPU_EXPERTS_F32},
          x(size_t(tokens) * 40 + 1),
          y(x.size(), -1.f),
          weights(size_t(tokens) * 2, 0.5f),
          ids(size_t(tokens) * 2) {
        for (size_t i = 0; i < x.size(); ++i) x[i] = seed + float(i);
        for (size_t i = 0; i < ids.size(); ++i) ids[i] = int32_t(i % 8);
    }
    Status submit(void* stream, uint64_t patience = kPatience) {
        return cpu_experts::ffi::submit(stream, call, patience, x.data() + 1, ids.data(), weights.data(), &ticket);
    }
    Status collect(void* stream, uint64_t patience = kPatience) {
        return cpu_experts::ffi::collect(stream, call, patience, &ticket, y.data() + 1);
    }
    bool right(uint64_t handle) const {
        for (size_t i = 1; i < y.size(); ++i) {
            size_t t = (i - 1) / 40;
            if (y[i] != (float(handle) + 0.5f * float(ids[2 * t]) + 0.5f * float(ids[2 * t + 1])) * x[i]) return false;
        }
        return true;
    }
    bool nothing() const {
        for (size_t i = 1; i < y.size(); ++i) {
            if (!std::isnan(y[i])) return false;
        }
        return true;
    }

    Call call;
    std::vector<float> x, y, weights;
    std::vector<int32_t> ids;
    alignas(8) uint64_t ticket = ~uint64_t(0);
};

// ---- what must hold

void one_after_the_other(const Fake& fake) {
    void* stream = fake.stream();
    uint64_t layers[] = {layer_of(3), layer_of(5)};
    for (int i = 0; i < 60; ++i) {
        Arrays a(layers[i % 2], 1 + i % 3, float(i));
        check(!a.submit(stream) && !a.collect(stream), "a call is launched");
        fake.call("fake_synchronize", stream);
        check(a.right(i % 2 ? 5 : 3), "an answer is right");
    }
    check(!failure(), "nothing failed");
}

void several_under_way(const Fake& fake) {
    void* stream = fake.stream();
    uint64_t layer = layer_of(7);
    std::vector<Arrays> all;
    for (int i = 0; i < 16; ++i) all.emplace_back(layer, 2, float(100 * i));
    for (auto& a : all) check(!a.submit(stream), "submitted");
    for (size_t i = all.size(); i--;) check(!all[i].collect(stream), "collected");
    fake.call("fake_synchronize", stream);
    for (auto& a : all) check(a.right(7), "the last submitted collected first");
    check(!failure(), "nothing failed with all slots taken");
}

void one_too_many(const Fake& fake) {
    void* stream = fake.stream();
    uint64_t layer = layer_of(7);
    std::vector<Arrays> all;
    for (int i = 0; i < 17; ++i) all.emplace_back(layer, 2, float(i));
    fake.call("fake_hold", stream);  // until all are launched: who launches later might hear of the loss
    for (auto& a : all) check(!a.submit(stream), "submitted");
    for (auto& a : all) check(!a.collect(stream), "collected");
    fake.call("fake_let_go", stream);
    fake.call("fake_synchronize", stream);
    check(all[0].nothing(), "the first of too many is lost, and NaN");
    for (size_t i = 1; i < all.size(); ++i) check(all[i].right(7), "the others are right");
    check(says(failure(), "more than 16 calls"), "it is told");
}

// As another stream's calls may, between a collecting kernel's wait and its copy.
void taken_while_copied(const Fake& fake) {
    void *slow = fake.stream(), *fast = fake.stream();
    Arrays first(layer_of(7), 2, 1.f);
    first.submit(slow);
    fake.call("fake_synchronize", slow);
    fake.call("fake_stop_before", slow, "copy");
    check(!first.collect(slow) && soon([&] { return fake.stopped(slow); }), "it stops before it copies");
    for (int i = 0; i < 16; ++i) {
        Arrays other(layer_of(9), 2, float(100 + i));
        check(!other.submit(fast) && !other.collect(fast), "launched");
        fake.call("fake_synchronize", fast);
        check(other.right(9), "the others are right");
    }
    fake.call("fake_stop_before", slow, static_cast<const char*>(nullptr));
    fake.call("fake_synchronize", slow);
    check(first.nothing(), "no other call's answer");
    check(says(failure(), "more than 16 calls"), "it is told");
}

void never_collected(const Fake& fake) {
    void* stream = fake.stream();
    uint64_t layer = layer_of(2);
    for (int i = 0; i < 50; ++i) {
        Arrays forgotten(layer, 1, float(i)), a(layer, 1, float(-i));
        forgotten.submit(stream), a.submit(stream), a.collect(stream);
        fake.call("fake_synchronize", stream);
        check(a.right(2), "calls that are never collected do no harm");
    }
    check(!failure(), "nothing failed");
}

void failing(const Fake& fake) {
    void* stream = fake.stream();
    uint64_t layer = layer_of(2);
    Arrays bad(layer, 3, 1.f), good(layer, 3, 1.f);
    bad.ids[2] = -4;
    bad.submit(stream), fake.call("fake_synchronize", stream);
    bad.collect(stream), fake.call("fake_synchronize", stream);
    check(bad.nothing() || bad.y[1] == -1.f, "what failed is NaN, or was not collected any more");
    Status told = failure();
    if (bad.nothing()) check(says(told, "this call failed"), "it is told afterwards");
    good.submit(stream), good.collect(stream), fake.call("fake_synchronize", stream);
    check(good.right(2) && !failure(), "and the next is right");
    bad.submit(stream), fake.call("fake_synchronize", stream);
    Status heard;
    auto hears = [&] {
        heard = good.submit(stream), fake.call("fake_synchronize", stream);
        return bool(heard);
    };
    check(soon(hears) && says(heard, "this call failed"), "a later call hears of it");
}

void impatient(const Fake& fake) {
    void* stream = fake.stream();
    uint64_t layer = layer_of(4);
    Arrays a(layer, 1, 1.f), b(layer, 1, 2.f), c(layer, 1, 3.f);
    blocked = true;
    fake.call("fake_hold", stream);  // until both are launched: who launches later might hear of the first
    check(!a.submit(stream) && !a.collect(stream, kSecond / 50), "launched");
    check(!b.submit(stream) && !b.collect(stream), "launched too");
    auto start = std::chrono::steady_clock::now();
    fake.call("fake_let_go", stream);
    fake.call("fake_synchronize", stream);
    check(a.nothing() && b.nothing(), "who waits in vain gets NaN, and who comes after does not wait");
    check(std::chrono::steady_clock::now() - start < std::chrono::nanoseconds(kPatience), "nor long");
    check(says(failure(), "in vain"), "it is told");
    blocked = false;
    c.submit(stream), c.collect(stream), fake.call("fake_synchronize", stream);
    check(c.right(4) && !failure(), "once the host is back all is well");
}

void no_free_slot(const Fake& fake) {
    void* stream = fake.stream();
    uint64_t layer = layer_of(4);
    std::vector<Arrays> all;
    for (int i = 0; i < 18; ++i) all.emplace_back(layer, 4, float(i));
    blocked = true;
    fake.call("fake_hold", stream);  // until all are launched
    for (auto& a : all) check(!a.submit(stream, kSecond / 50), "submitted");
    fake.call("fake_let_go", stream);
    fake.call("fake_synchronize", stream);
    check(all[16].ticket == 0 && all[17].ticket == 0, "who finds no slot has no ticket");
    blocked = false;
    for (size_t i = 2; i < all.size(); ++i) {
        check(soon([&] { return !all[i].collect(stream); }), "collected, once it is told of who gave up");
    }
    fake.call("fake_synchronize", stream);
    check(all[16].nothing() && all[17].nothing(), "nor an answer");
    for (size_t i = 2; i < 16; ++i) check(all[i].right(4), "the others have theirs");
    auto goes_on = [&] {
        Arrays next(layer, 4, 9.f);
        bool launched = !next.submit(stream) && !next.collect(stream);
        fake.call("fake_synchronize", stream);
        return !failure() && launched && next.right(4);
    };
    check(soon(goes_on), "and it goes on");
}

void many_threads(const Fake& fake) {
    uint64_t layers[] = {layer_of(1), layer_of(2), layer_of(3)};
    std::vector<std::thread> threads;
    std::atomic<int> wrong{0}, begun{0};
    for (int t = 0; t < 3; ++t) {
        threads.emplace_back([&, t] {
            void* stream = fake.stream();
            for (int i = 0; i < 40; ++i) {
                // Within one turn of each other: a thread that sleeps for 16 calls of the others has lost its own.
                for (++begun; begun < 3 * (i + 1);) std::this_thread::yield();
                Arrays a(layers[t], 2, float(i)), b(layers[(t + 1) % 3], 2, float(i + t));
                a.submit(stream), b.submit(stream), b.collect(stream), a.collect(stream);
                fake.call("fake_synchronize", stream);
                wrong += !a.right(uint64_t(t) + 1) + !b.right(uint64_t(t + 1) % 3 + 1);
            }
        });
    }
    for (auto& thread : threads) thread.join();
    check(!wrong && !failure(), "threads with streams of their own");
}

void in_a_graph(const Fake& fake) {
    void* stream = fake.stream();
    uint64_t layer = layer_of(6);
    Arrays a(layer, 5, 1.f);
    fake.call("fake_capture", stream, 1);
    check(!a.submit(stream) && !a.collect(stream), "captured");
    fake.call("fake_capture", stream, 0);
    for (int i = 0; i < 30; ++i) {
        a.x[7] = float(i);
        fake.call("fake_replay", stream);
        if (i % 10 == 9) std::this_thread::sleep_for(std::chrono::milliseconds(60));  // the thread naps
        fake.call("fake_synchronize", stream);
        check(a.right(6), "replayed");
    }
    size_t held = fake.held();
    forget(layer), forget_rings(layer);
    check(fake.held() == held, "a graph's memory stays");
    fake.call("fake_replay", stream), fake.call("fake_synchronize", stream);
    check(a.nothing() && says(failure(), "the layer is closed"), "and its calls of a closed layer are NaN");
}

void forgotten(const Fake& fake) {
    void* stream = fake.stream();
    size_t before = fake.held();
    uint64_t layers[] = {layer_of(1), layer_of(2)};
    Arrays a(layers[0], 30, 1.f), b(layers[1], 30, 2.f);
    a.submit(stream), b.submit(stream), a.collect(stream), b.collect(stream), fake.call("fake_synchronize", stream);
    check(a.right(1) && b.right(2) && fake.held() > before, "memory is taken");
    forget(layers[0]), forget_rings(layers[0]);
    check(fake.held() > before, "and kept for the other layer");
    check(says(a.submit(stream), "the layer is closed"), "a closed layer is an error");
    b.submit(stream), b.collect(stream);
    forget(layers[1]), forget_rings(layers[1]);
    check(fake.held() == before, "and freed with that");
    check(b.right(2) || (b.nothing() && says(failure(), "the layer is closed")), "after what was under way");
    uint64_t again = layer_of(9);
    Arrays c(again, 30, 3.f);
    c.submit(stream), c.collect(stream), fake.call("fake_synchronize", stream);
    check(c.right(9), "and taken again");
}

void refused(const Fake& fake) {
    void* stream = fake.stream();
    uint64_t layer = layer_of(1);
    size_t before = fake.held();
    Arrays a(layer, 31, 1.f);
    for (const char* function : {"cuStreamGetCtx", "cuMemHostAlloc", "cuMemAlloc"}) {
        fake.call("fake_refuse", function);
        check(says(a.submit(stream), function), "a driver's failure is told");
    }
    check(fake.held() == before, "and nothing stays behind");
    fake.call("fake_refuse", "cuLaunchKernel");
    check(says(a.submit(stream), "cuLaunchKernel: out of memory"), "in its words");
    fake.call("fake_refuse", "");
    a.call.model = 41;
    check(says(a.submit(stream), "rows of 41, must be of 40"), "sizes are checked");
    a.call.model = 40;
    a.submit(stream), a.collect(stream), fake.call("fake_synchronize", stream);
    check(a.right(1), "and then it works");
}

struct Fetched {
    std::vector<uint8_t> gate_up = std::vector<uint8_t>(2 * 24), down = std::vector<uint8_t>(2 * 8);
    Copies copies{2, {gate_up.data(), down.data()}, {gate_up.size(), down.size()}};
    int32_t first = 3;

    Status from(uint64_t layer, void* stream) { return fetch(stream, layer, &first, copies); }
    bool right(const std::vector<uint8_t>& weights) const {
        const uint8_t* at = weights.data();
        return std::equal(gate_up.begin(), gate_up.end(), at + first * 24) &&
               std::equal(down.begin(), down.end(), at + 8 * 24 + first * 8);
    }
};

std::vector<uint8_t> some_weights() {
    std::vector<uint8_t> weights(8 * 32);
    for (size_t i = 0; i < weights.size(); ++i) weights[i] = uint8_t(i * 7 + 1);
    return weights;
}

void fetched(const Fake& fake) {
    void* stream = fake.stream();
    auto weights = some_weights();
    for (bool read_only : {false, true}) {
        uint64_t layer = layer_of(1, weights, read_only);
        Fetched a, b;
        check(!a.from(layer, stream) && !b.from(layer, stream), "fetched");
        size_t all = weights.size();
        check(fake.registered() == all && fake.registered(8) == (read_only ? all : 0), "from pinned memory");
        forget(layer), unpin(layer);  // the copies are under way
        check(!fake.registered() && a.right(weights) && b.right(weights), "which is theirs again once all is copied");
        check(says(a.from(layer, stream), "the layer is closed"), "and then the layer is closed");
    }
    uint64_t layer = layer_of(1, weights);
    Fetched a, bad;
    for (const char* function : {"cuStreamGetCtx", "cuMemcpyDtoHAsync", "cuStreamSynchronize", "cuMemcpyHtoDAsync"}) {
        fake.call("fake_refuse", function);
        check(says(bad.from(layer, stream), function), "a driver's failure is told");
    }
    forget(layer), unpin(layer);
    layer = layer_of(1, weights);
    fake.call("fake_refuse", "cuMemHostRegister");
    check(!a.from(layer, stream) && !fake.registered() && a.right(weights), "what cannot be pinned is copied all the same");
    fake.call("fake_refuse", "");
    bad.first = 7;
    check(says(bad.from(layer, stream), "2 experts from 7, must be some of 8"), "experts are checked");
    bad.first = 0, bad.copies.bytes[1] = 9;
    check(says(bad.from(layer, stream), "an array of 9 bytes, must be of 16"), "and sizes");
    fake.call("fake_capture", stream, 1);
    check(says(a.from(layer, stream), "in a graph"), "a graph cannot have it");
    fake.call("fake_capture", stream, 0);
    forget(layer), unpin(layer);
}

void fetched_while_forgotten(const Fake& fake) {
    auto weights = some_weights();
    std::atomic<int> wrong{0};
    for (int i = 0; i < 20; ++i) {
        uint64_t layer = layer_of(1, weights);
        std::vector<std::thread> threads;
        for (int t = 0; t < 2; ++t) {
            threads.emplace_back([&] {
                void* stream = fake.stream();
                for (int k = 0; k < 3; ++k) {
                    Fetched a;
                    Status failed = a.from(layer, stream);
                    fake.call("fake_synchronize", stream);
                    wrong += failed ? !says(failed, "the layer is closed") : !a.right(weights);
                }
            });
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(i));
        forget(layer), unpin(layer);
        wrong += fake.registered() != 0;
        for (auto& thread : threads) thread.join();
    }
    check(!wrong, "a fetch is right or an error, and nothing stays registered");
}

void in_a_fork(const Fake& fake) {
    void* stream = fake.stream();
    Arrays a(layer_of(1), 1, 1.f);
    a.submit(stream), a.collect(stream), fake.call("fake_synchronize", stream);
    pid_t child = fork();
    if (!child) {
        alarm(30);
        bool told = says(a.submit(stream), "fork") && says(a.collect(stream), "fork");
        forget(a.call.layer), unpin(a.call.layer), forget_rings(a.call.layer), stop();
        _exit(told && !failure() ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    check(!status, "a fork is told, and ends");
}

void idle(const Fake&) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    auto used = std::clock();
    std::this_thread::sleep_for(std::chrono::seconds(1));
    double share = double(std::clock() - used) / CLOCKS_PER_SEC;
    std::printf("an idle second costs %.1f ms of a core\n", share * 1e3);
    check(share < 0.1, "an idle thread costs no core");
}

void stopped(const Fake& fake) {
    void* stream = fake.stream();
    Arrays a(layer_of(1), 1, 1.f), b(layer_of(1), 1, 1.f);
    blocked = true;
    a.submit(stream), a.collect(stream);
    std::thread later([] {
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
        blocked = false;
    });
    stop();
    fake.call("fake_synchronize", stream);
    later.join();
    check(a.nothing() || a.right(1), "who waits when all ends gets what is there");
    check(says(b.submit(stream), "stopped"), "and then there are no calls");
    stop();
}

}  // namespace

int main(int, char** arguments) {
    if (Status failed = open_driver(arguments[1])) return std::puts(failed.words.c_str()), 2;
    check(!open_driver(arguments[1]) && says(open_driver("libm.so.6"), "already"), "one driver");
    Fake fake(arguments[1]);
    const std::pair<const char*, void (*)(const Fake&)> all[] = {
        {"one after the other", one_after_the_other}, {"several under way", several_under_way},
        {"one too many", one_too_many},               {"taken while copied", taken_while_copied},
        {"never collected", never_collected},
        {"failing", failing},                         {"impatient", impatient},
        {"no free slot", no_free_slot},               {"many threads", many_threads},
        {"in a graph", in_a_graph},                   {"forgotten", forgotten},
        {"refused", refused},                         {"fetched", fetched},
        {"fetched while forgotten", fetched_while_forgotten},
        {"in a fork", in_a_fork},                     {"idle", idle},
        {"stopped", stopped},
    };
    for (auto& [name, test] : all) {
        int before = failures;
        test(fake);
        std::printf("%s: %s\n", failures == before ? "ok" : "FAILED", name);
        std::fflush(stdout);
    }
    _exit(failures != 0);  // the fake's streams have threads
}
