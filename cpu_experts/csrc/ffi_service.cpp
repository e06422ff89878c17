#include "ffi_service.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <map>
#include <new>
#include <set>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace cpu_experts::ffi {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::nanoseconds;

constexpr auto kSpin = std::chrono::milliseconds(3);
constexpr auto kYield = std::chrono::milliseconds(20);
constexpr nanoseconds kLongestNap = std::chrono::milliseconds(5);
constexpr int kNapShare = 64;  // of the time without calls: what a nap may add to it

using Key = std::tuple<Context, int64_t, int64_t, int64_t, int, int>;

Key key_of(Context context, const Call& c) {
    return {context, c.tokens, c.chosen, c.model, int(c.x_dtype), int(c.out_dtype)};
}

struct Used {
    std::shared_ptr<Ring> ring;
    std::set<uint64_t> layers;
};

class Service {
public:
    Status find(Context context, const Call& call, std::shared_ptr<Ring>& found);
    void forget(uint64_t layer);
    Status failure();
    Status failure_of(Ring& ring) { return report(ring.complaint()), take(); }
    void stop();
    void wake();
    bool of_this_process() const { return !process_ || process_ == getpid(); }

private:
    Status add(const Key& key, uint64_t layer, std::shared_ptr<Ring>& ring);
    Status start();
    void free(Context context, std::shared_ptr<Ring> ring);
    void changed();
    void work();
    bool answer(std::vector<std::shared_ptr<Ring>>& rings);
    void rest(nanoseconds idle, uint32_t calls);
    void report(Status status);
    Status take();

    // Held for moments only, and never over a call of the driver: that may wait for a kernel that waits for the thread.
    std::mutex mutex_;
    std::map<Key, Used> rings_;
    std::vector<std::shared_ptr<Ring>> served_;
    std::mutex failing_;
    Status failure_;
    std::atomic<bool> failed_{false};

    std::atomic<uint64_t> changes_{0}, seen_{0};  // of served_
    std::atomic<uint32_t> calls_{0};
    std::atomic<bool> napping_{false}, stopped_{false};
    std::unique_ptr<std::thread> thread_;
    std::atomic<pid_t> process_{0};
};

// Never destroyed: its thread is stopped by who ends the process, or ends with it.
Service& service() {
    static auto* s = new Service;
    return *s;
}

Status Service::find(Context context, const Call& call, std::shared_ptr<Ring>& found) {
    Key key = key_of(context, call);
    {
        std::lock_guard<std::mutex> hold(mutex_);
        if (stopped_) return {CPU_EXPERTS_CLOSED, "the thread that answers GPU programs is stopped: the process ends"};
        auto at = rings_.find(key);
        if (at != rings_.end()) {
            at->second.layers.insert(call.layer);
            found = at->second.ring;
            return {};
        }
    }
    if (auto failed = Ring::make(context, call, found)) return failed;
    return add(key, call.layer, found);
}

Status Service::add(const Key& key, uint64_t layer, std::shared_ptr<Ring>& ring) {
    std::lock_guard<std::mutex> hold(mutex_);
    if (auto failed = start()) return failed;
    Used& used = rings_[key];
    if (!used.ring) {
        used.ring = ring;
        served_.push_back(ring);
        if (stopped_) ring->stop();
        changed();
    }
    used.layers.insert(layer);
    ring = used.ring;  // another thread's, if that was faster
    return {};
}

Status Service::start() {
    if (thread_) return {};
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // Ctrl-C is for Python's threads
    Status failed;
    try {
        thread_.reset(new std::thread([this] { work(); }));
        process_ = getpid();
    } catch (const std::system_error& e) {
        failed = {CPU_EXPERTS_FAILED, std::string("the thread that answers GPU programs cannot be started: ") + e.what()};
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return failed;
}

void Service::changed() {
    changes_.fetch_add(1);
    wake();
}

void Service::forget(uint64_t layer) {
    std::vector<std::pair<Context, std::shared_ptr<Ring>>> unused;
    {
        std::lock_guard<std::mutex> hold(mutex_);
        for (auto at = rings_.begin(); at != rings_.end();) {
            Used& used = at->second;
            bool last = used.layers.erase(layer) && used.layers.empty();
            if (last && !used.ring->captured()) {
                unused.emplace_back(std::get<0>(at->first), std::move(used.ring));
                at = rings_.erase(at);
            } else {
                ++at;
            }
        }
    }
    for (auto& [context, ring] : unused) free(context, std::move(ring));
}

// Its last kernels are still answered. Where they cannot be waited for its memory stays.
void Service::free(Context context, std::shared_ptr<Ring> ring) {
    ring->retire();
    Within within(context);
    if (within.status || ring->captured() || driver().CtxSynchronize()) return;
    uint64_t change;
    {
        std::lock_guard<std::mutex> hold(mutex_);
        served_.erase(std::remove(served_.begin(), served_.end(), ring), served_.end());
        changed();
        change = changes_;
    }
    while (seen_ < change && !stopped_) sched_yield();
    ring.reset();  // in its context
}

void Service::report(Status status) {
    if (!status) return;
    std::lock_guard<std::mutex> hold(failing_);
    if (!failure_) failure_ = std::move(status);
    failed_ = true;
}

Status Service::take() {
    if (!failed_) return {};
    std::lock_guard<std::mutex> hold(failing_);
    failed_ = false;
    return std::exchange(failure_, {});
}

Status Service::failure() {
    std::vector<std::shared_ptr<Ring>> rings;
    {
        std::lock_guard<std::mutex> hold(mutex_);
        rings = served_;
    }
    for (auto& ring : rings) report(ring->complaint());
    return take();
}

void Service::stop() {
    {
        std::lock_guard<std::mutex> hold(mutex_);
        stopped_ = true;
        for (auto& ring : served_) ring->stop();
    }
    wake();
    if (thread_ && thread_->joinable()) thread_->join();
}

void Service::wake() {
    calls_.fetch_add(1);
    if (napping_) syscall(SYS_futex, reinterpret_cast<uint32_t*>(&calls_), FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

void Service::work() {
    pthread_setname_np(pthread_self(), "cpu_experts");
    std::vector<std::shared_ptr<Ring>> rings;
    auto last = Clock::now();
    for (uint32_t calls = 0; !stopped_;) {
        bool busy = calls != calls_;
        calls = calls_;
        try {
            busy |= answer(rings);
        } catch (const std::bad_alloc&) {
            // What was not answered is looked at again: there may be memory then, and who waits does not wait for ever.
        }
        auto now = Clock::now();
        if (busy) {
            last = now;
        } else {
            rest(now - last, calls);
        }
    }
}

// Whether there was a call.
bool Service::answer(std::vector<std::shared_ptr<Ring>>& rings) {
    if (uint64_t changes = changes_; changes != seen_) {
        std::lock_guard<std::mutex> hold(mutex_);
        rings = served_;
        seen_ = changes;
    }
    bool any = false;
    for (auto& ring : rings) {
        if (!ring->serve([this](Status failed) { report(std::move(failed)); })) continue;
        any = true;
        report(ring->complaint());
    }
    return any;
}

void Service::rest(nanoseconds idle, uint32_t calls) {
    if (idle < kSpin) {
#ifdef __x86_64__
        __builtin_ia32_pause();
#endif
        return;
    }
    if (idle < kYield) {
        sched_yield();
        return;
    }
    nanoseconds nap = std::min(idle / kNapShare, kLongestNap);
    timespec time{0, long(nap.count())};
    napping_ = true;
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&calls_), FUTEX_WAIT_PRIVATE, calls, &time, nullptr, 0);
    napping_ = false;
}

Status here(Stream stream, Context& context) {
    if (!service().of_this_process()) {
        return {CPU_EXPERTS_FAILED, "this process is a fork of the one whose thread answers GPU programs: spawn it instead"};
    }
    return driver().said("cuStreamGetCtx", driver().StreamGetCtx(stream, &context));
}

// The ring of a call, in whose context `use` then launches; unless a call failed that nobody has heard of.
template <class Use>
Status on_ring(Stream stream, const Call& call, Use use) {
    Context context = nullptr;
    if (auto failed = here(stream, context)) return failed;
    if (auto failed = check(call)) return failed;
    Within within(context);
    if (within.status) return within.status;
    std::shared_ptr<Ring> ring;
    if (auto failed = service().find(context, call, ring)) return failed;
    if (auto failed = service().failure_of(*ring)) return failed;
    service().wake();
    return use(*ring);
}

}  // namespace

Status submit(Stream stream, const Call& call, uint64_t patience, const void* x, const void* ids, const void* weights,
              void* ticket) {
    return on_ring(stream, call,
                   [&](Ring& ring) { return ring.submit(stream, call.layer, patience, x, ids, weights, ticket); });
}

Status collect(Stream stream, const Call& call, uint64_t patience, const void* ticket, void* y) {
    return on_ring(stream, call, [&](Ring& ring) { return ring.collect(stream, patience, ticket, y); });
}

void forget_rings(uint64_t layer) {
    if (service().of_this_process()) service().forget(layer);
}

Status failure() { return service().of_this_process() ? service().failure() : Status{}; }

void stop() {
    if (service().of_this_process()) service().stop();
}

}  // namespace cpu_experts::ffi
