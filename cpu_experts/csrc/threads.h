// A few threads that share numbered subtasks with the caller.
//
// The caller is one of them and never waits for another to wake up: a worker that comes late finds less to do, or nothing. Each
// thread is dealt an even run of subtasks (neighbours in memory), takes them in order, and then takes from the others' runs.
// Workers look for more work for some microseconds, for one forward hands out several rounds; then they sleep, so that between
// forwards the cores belong to whoever else needs them.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace cpu_experts {

class Threads {
public:
    // Workers that cannot be started are done without.
    explicit Threads(int count);
    ~Threads();
    Threads(const Threads&) = delete;
    Threads& operator=(const Threads&) = delete;

    using Task = void (*)(void* state, int index, int thread);
    // Runs task(state, i, thread) for every i below `count`; returns when all are done. One caller at a time.
    void run(int count, Task task, void* state);

    int count() const { return count_; }
    bool of_this_process() const;  // false after a fork: a child has no workers

private:
    struct alignas(64) Run {
        std::atomic<int> next{0};
        int end = 0;
    };

    void work(int thread);
    void help(int thread);

    int count_;
    pid_t process_;
    std::unique_ptr<Run[]> runs_;
    Task task_ = nullptr;
    void* state_ = nullptr;
    alignas(64) std::atomic<uint32_t> round_{0};  // odd while a round is open
    alignas(64) std::atomic<uint32_t> inside_{0};
    alignas(64) std::atomic<uint32_t> asleep_{0};
    std::atomic<bool> stop_{false};
    std::unique_ptr<std::vector<std::thread>> workers_;
};

int usable_cores();

}  // namespace cpu_experts
