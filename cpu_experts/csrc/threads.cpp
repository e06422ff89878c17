#include "threads.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cfenv>
#include <chrono>
#include <climits>
#include <exception>

namespace cpu_experts {
namespace {

// Between two rounds of one forward the caller needs a few microseconds; a wake-up takes about fifty.
constexpr auto kLook = std::chrono::microseconds(50);

void pause() {
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// Waits until `done`, politely after a while: the thread waited for may need this core.
template <class Done>
bool look_for(Done done, std::chrono::steady_clock::duration time) {
    auto until = std::chrono::steady_clock::now() + time;
    do {
        for (int i = 0; i < 64; ++i) {
            if (done()) return true;
            pause();
        }
    } while (std::chrono::steady_clock::now() < until);
    return done();
}

// While it lives the thread rounds and treats tiny numbers as IEEE 754 says: XLA's threads take these for zeros, and whoever
// takes a subtask, its result must be the same.
class PlainArithmetic {
public:
    PlainArithmetic() { std::fegetenv(&before_), std::fesetenv(FE_DFL_ENV); }
    ~PlainArithmetic() { std::fesetenv(&before_); }
    PlainArithmetic(const PlainArithmetic&) = delete;
    PlainArithmetic& operator=(const PlainArithmetic&) = delete;

private:
    std::fenv_t before_;
};

}  // namespace

Threads::Threads(int count)
    : count_(count), process_(getpid()), runs_(new Run[size_t(count)]), workers_(new std::vector<std::thread>) {
    share_out(count > 1 ? usable_nodes() : std::vector<Node>(1));
    workers_->reserve(size_t(count - 1));
    try {
        for (int i = 1; i < count; ++i) workers_->emplace_back([this, i] { work(i); });
    } catch (const std::exception&) {
        // those that are started take the runs of those that are not
    }
}

// Threads are spread over the cores, node by node, at even distances; a node that gets none is left out.
void Threads::share_out(const std::vector<Node>& nodes) {
    int64_t cores = 0, before = 0;
    for (const Node& node : nodes) cores += CPU_COUNT(&node.cores);
    int first = 0;
    for (const Node& node : nodes) {
        before += CPU_COUNT(&node.cores);
        int last = nodes.size() == 1 ? count_ : int((before * count_ + cores - 1) / cores);
        if (last > first) shares_.push_back({node, first, last});
        first = last;
    }
}

const Threads::Share& Threads::share_of(int thread) const {
    size_t n = 0;
    while (thread >= shares_[n].last) ++n;
    return shares_[n];
}

int Threads::share(int count, int n) const {
    return n < nodes() ? int(int64_t(count) * shares_[size_t(n)].first / count_) : count;
}

Threads::~Threads() {
    if (!of_this_process()) {
        // A forked child has the objects of its parent's threads, but no threads: they can be neither joined nor detached.
        workers_.release();
        return;
    }
    stop_.store(true);
    round_.fetch_add(2);
    wake(round_);
    for (std::thread& worker : *workers_) worker.join();
}

bool Threads::of_this_process() const { return process_ == getpid(); }

void Threads::run(int count, Task task, void* state) {
    int begin[kMaxNodes + 1];
    for (int n = 0; n <= nodes(); ++n) begin[n] = share(count, n);
    run(begin, task, state);
}

void Threads::deal(const int* begin) {
    for (const Share& share : shares_) {
        int64_t first = *begin++, count = *begin - first, threads = share.last - share.first;
        for (int i = 0; i < threads; ++i) {
            Run& run = runs_[share.first + i];
            run.next.store(int(first + count * i / threads), std::memory_order_relaxed);
            run.end = int(first + count * (i + 1) / threads);
        }
    }
}

void Threads::run(const int* begin, Task task, void* state) {
    int count = begin[nodes()];
    PlainArithmetic plain;
    if (count <= 1 || workers_->empty()) {
        for (int i = 0; i < count; ++i) task(state, i, 0);
        return;
    }
    deal(begin);
    task_ = task, state_ = state;
    round_.fetch_add(1);
    if (asleep_.load()) wake(round_);
    help(0);
    // Closed before waiting: a worker counts itself in, then looks whether the round is still open, so after this none enters.
    round_.fetch_add(1);
    while (!look_for([this] { return inside_.load() == 0; }, kLook)) sched_yield();
}

void Threads::take(int from, int thread) {
    Run& run = runs_[from];
    for (;;) {
        if (run.next.load(std::memory_order_relaxed) >= run.end) break;
        int index = run.next.fetch_add(1, std::memory_order_relaxed);
        if (index >= run.end) break;
        task_(state_, index, thread);
    }
}

// Own run first, then the others' of this node, beginning with the next thread's, then those of the nodes after it.
void Threads::help(int thread) {
    const Share& own = share_of(thread);
    int threads = own.last - own.first;
    for (int i = 0; i < threads; ++i) take(own.first + (thread - own.first + i) % threads, thread);
    for (int i = own.last; i < own.first + count_; ++i) take(i % count_, thread);
}

void Threads::work(int thread) {
    PlainArithmetic plain;
    if (nodes() > 1) stay_on(share_of(thread).node);
    uint32_t seen = 0;
    while (!stop_.load()) {
        inside_.fetch_add(1);
        uint32_t round = round_.load();
        if (round & 1 && round != seen) {
            seen = round;
            help(thread);
        }
        inside_.fetch_sub(1);
        auto changed = [&] {
            uint32_t now = round_.load();
            return (now & 1 && now != seen) || stop_.load();
        };
        if (look_for(changed, kLook)) continue;
        asleep_.fetch_add(1);
        uint32_t now = round_.load();
        if (!changed()) sleep_while(round_, now);
        asleep_.fetch_sub(1);
    }
}

}  // namespace cpu_experts
