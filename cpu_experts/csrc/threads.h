// A few threads that share numbered subtasks with the caller.
//
// The caller is one of them and never waits for another to wake up: a worker that comes late finds less to do, or nothing. Each
// thread is dealt an even run of subtasks (neighbours in memory), takes them in order, and then takes from the others' runs.
// Workers look for more work for some microseconds, for one forward hands out several rounds; then they sleep, so that between
// forwards the cores belong to whoever else needs them.
//
// On a machine of several NUMA nodes, neighbouring threads share a node and stay on its cores, in proportion to how many it has.
// They take from each other's runs before they take from another node's. The caller counts for the first node and is left where
// it is, for it is not ours to move; as the others stay on their nodes, the core left over for it is one of the first's.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "topology.h"

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
    // The same, of subtasks of which those from begin[n] to begin[n + 1] are node n's.
    void run(const int* begin, Task task, void* state);

    int count() const { return count_; }
    int nodes() const { return int(shares_.size()); }
    const Node& node(int n) const { return shares_[size_t(n)].node; }
    // Where node n's share of `count` things begins: it has as many of them as of the threads. Of nodes() it is `count`.
    int share(int count, int n) const;
    bool of_this_process() const;  // false after a fork: a child has no workers

private:
    struct alignas(64) Run {
        std::atomic<int> next{0};
        int end = 0;
    };

    struct Share {
        Node node;
        int first = 0, last = 0;  // of the threads
    };

    void share_out(const std::vector<Node>& nodes);
    const Share& share_of(int thread) const;
    void deal(const int* begin);
    void work(int thread);
    void help(int thread);
    void take(int from, int thread);

    int count_;
    pid_t process_;
    std::vector<Share> shares_;
    std::unique_ptr<Run[]> runs_;
    Task task_ = nullptr;
    void* state_ = nullptr;
    alignas(64) std::atomic<uint32_t> round_{0};  // odd while a round is open
    alignas(64) std::atomic<uint32_t> inside_{0};
    alignas(64) std::atomic<uint32_t> asleep_{0};
    std::atomic<bool> stop_{false};
    std::unique_ptr<std::vector<std::thread>> workers_;
};

}  // namespace cpu_experts
