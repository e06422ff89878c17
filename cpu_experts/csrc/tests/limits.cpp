// What this machine can do, with as many threads as the argument says: reading memory, and multiplying from registers by the best
// instruction there is (nothing below AVX-512). Prints a line of JSON for every line it is given: benchmarks/cpu_experts.py
// interleaves that with what it times, and divides by it.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "gemm.h"

#ifdef __x86_64__
#include <immintrin.h>

namespace {

using Clock = std::chrono::steady_clock;

// How often a second all threads together do it, each for itself: a slow one does not keep the others from stealing its work.
double rate(int threads, const std::function<void(int)>& body) {
    std::vector<double> each(static_cast<size_t>(threads));
    std::vector<std::thread> all;
    for (int t = 0; t < threads; ++t) {
        all.emplace_back([&, t] {
            auto start = Clock::now();
            body(t);
            each[size_t(t)] = 1 / std::chrono::duration<double>(Clock::now() - start).count();
        });
    }
    for (auto& t : all) t.join();
    return std::accumulate(each.begin(), each.end(), 0.0);
}

__attribute__((target("avx512f"))) void read(const char* from, size_t bytes) {
    __m512i sum[4] = {};
    for (size_t i = 0; i < bytes; i += 256) {
        _mm_prefetch(from + i + 4096, _MM_HINT_T0);
        for (int j = 0; j < 4; ++j) sum[j] = _mm512_xor_si512(sum[j], _mm512_load_si512(from + i + 64 * j));
    }
    sum[0] = _mm512_xor_si512(_mm512_xor_si512(sum[0], sum[1]), _mm512_xor_si512(sum[2], sum[3]));
    volatile long long keep = _mm512_reduce_add_epi64(sum[0]);
    (void)keep;
}

constexpr int kRounds = 2000000;

__attribute__((target("avx512f,avx512bf16"))) void bf16_vectors() {
    __m512 sum[16] = {};
    for (int i = 0; i < kRounds; ++i) {
        for (int j = 0; j < 16; ++j) asm volatile("vdpbf16ps %%zmm30, %%zmm31, %0" : "+v"(sum[j]));
    }
}

__attribute__((target("avx512f,avx512vnni"))) void int8_vectors() {
    __m512i sum[16] = {};
    for (int i = 0; i < kRounds; ++i) {
        for (int j = 0; j < 16; ++j) asm volatile("vpdpbusd %%zmm30, %%zmm31, %0" : "+v"(sum[j]));
    }
}

struct alignas(64) Config {
    unsigned char palette = 1, rest[15] = {};
    unsigned short bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    unsigned char rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
const Config config;

// Four tiles of random numbers of bfloat16: zeros take less power, and the units run up to twice as fast with them.
struct alignas(64) Numbers {
    unsigned short at[4 * 512];
    Numbers() {
        unsigned state = 1;
        for (auto& x : at) {
            state = state * 1664525u + 1013904223u;
            x = static_cast<unsigned short>(0x3c00 | (state >> 16 & 0x83ff));
        }
    }
};

__attribute__((target("amx-tile,amx-bf16,amx-int8"))) void tiles(bool int8) {
    static const Numbers numbers;
    _tile_loadconfig(&config);
    _tile_loadd(0, numbers.at, 64);
    _tile_loadd(1, numbers.at + 512, 64);
    _tile_loadd(2, numbers.at + 1024, 64);
    _tile_loadd(3, numbers.at + 1536, 64);
    for (int i = 0; i < kRounds / 8; ++i) {
        if (int8) {
            _tile_dpbusd(4, 0, 2);
            _tile_dpbusd(5, 0, 3);
            _tile_dpbusd(6, 1, 2);
            _tile_dpbusd(7, 1, 3);
        } else {
            _tile_dpbf16ps(4, 0, 2);
            _tile_dpbf16ps(5, 0, 3);
            _tile_dpbf16ps(6, 1, 2);
            _tile_dpbf16ps(7, 1, 3);
        }
    }
    _tile_release();
}

}  // namespace

int main(int argc, char** argv) {
    using namespace cpu_experts;
    int threads = std::max(1, argc > 1 ? std::atoi(argv[1]) : 1);
    size_t each = (size_t(2) << 30) / size_t(threads) / 4096 * 4096;
    auto* memory = static_cast<char*>(std::aligned_alloc(size_t(2) << 20, size_t(2) << 30));
    if (!memory) return 1;
    madvise(memory, size_t(2) << 30, MADV_HUGEPAGE);
    rate(threads, [&](int t) { std::fill_n(memory + size_t(t) * each, each, char(1)); });
    bool amx = best_isa() == kAmx;
    double work = amx ? double(kRounds) / 8 * 4 * 16 * 16 * 64 : double(kRounds) * 16 * 64;  // operations of bf16; of int8 twice
    for (std::string line; std::getline(std::cin, line);) {
        if (best_isa() < kAvx512) {
            std::puts("{}"), std::fflush(stdout);
            continue;
        }
        double reads = rate(threads, [&](int t) { read(memory + size_t(t) * each, each); });
        double bf16 = rate(threads, [&](int) { amx ? tiles(false) : bf16_vectors(); });
        double int8 = rate(threads, [&](int) { amx ? tiles(true) : int8_vectors(); });
        std::printf("{\"read_GBps\": %.1f, \"bf16_TFLOPs\": %.3f, \"int8_TOPs\": %.3f}\n", double(each) * reads / 1e9,
                    work * bf16 / 1e12, 2 * work * int8 / 1e12);
        std::fflush(stdout);
    }
    std::free(memory);
}

#else
int main() {
    for (std::string line; std::getline(std::cin, line);) std::puts("{}"), std::fflush(stdout);
}
#endif
