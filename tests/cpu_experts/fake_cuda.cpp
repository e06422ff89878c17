// A stand-in for CUDA's driver: the functions that ffi_driver.h names, on host memory, with a thread a stream. It does not
// imitate the kernels: it reads their text and runs it, instruction by instruction, with C++'s atomics in place of PTX's, so that
// the protocol is tested as it stands and sanitizers see its races. Blocks run one after the other, threads of a block in turns
// from barrier to barrier. Whatever it does not know ends the process.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#ifdef FAKE_CUDA_FFI
#include "xla/ffi/api/c_api.h"
#endif

namespace {

[[noreturn]] void die(const std::string& words) {
    std::fprintf(stderr, "fake_cuda: %s\n", words.c_str());
    std::abort();
}

void must(bool holds, const std::string& words) {
    if (!holds) die(words);
}

std::string stripped(const std::string& s) {
    size_t a = s.find_first_not_of(" \t\n"), b = s.find_last_not_of(" \t\n");
    return a == std::string::npos ? "" : s.substr(a, b - a + 1);
}

// At commas outside of brackets.
std::vector<std::string> parts(const std::string& s) {
    std::vector<std::string> found;
    std::string part;
    int depth = 0;
    for (char c : s) {
        depth += (c == '{' || c == '[' || c == '(') - (c == '}' || c == ']' || c == ')');
        if (c == ',' && depth == 0) {
            found.push_back(stripped(part));
            part.clear();
        } else {
            part += c;
        }
    }
    if (!stripped(part).empty()) found.push_back(stripped(part));
    return found;
}

std::vector<std::string> words_of(const std::string& s) {
    std::istringstream in(s);
    std::vector<std::string> found;
    for (std::string w; in >> w;) found.push_back(w);
    return found;
}

// ---- what the text says

struct Instruction {
    std::string guard;               // a predicate's register, or none
    std::vector<std::string> op;     // by its dots
    std::vector<std::string> operands;
    bool has(const char* what) const {
        for (auto& part : op) {
            if (part == what) return true;
        }
        return false;
    }
    int bytes() const { return std::atoi(op.back().c_str() + 1) / 8; }
};

struct Routine {
    std::vector<std::string> inputs, outputs;   // registers of a function; parameters of a kernel
    std::map<std::string, size_t> parameters;   // where a kernel's lie, and how many bytes in all
    std::vector<size_t> parameter_bytes;
    std::map<std::string, size_t> shared;
    std::map<std::string, size_t> labels;
    std::vector<Instruction> body;
};

using Program = std::map<std::string, Routine>;

std::string between(const std::string& s, size_t from, char open, char close, size_t& end) {
    size_t a = s.find(open, from), b = s.find(close, a);
    must(a != std::string::npos && b != std::string::npos, "no brackets in " + s);
    end = b + 1;
    return s.substr(a + 1, b - a - 1);
}

// ".visible .entry name(...)" or ".func (...) name(...)"
std::string read_head(std::string head, Routine& r) {
    size_t entry = head.rfind(".entry"), function = head.rfind(".func"), end = 0;
    bool kernel = entry != std::string::npos;
    head = stripped(kernel ? head.substr(entry + 6) : head.substr(function + 5));
    if (head[0] == '(') {
        r.outputs.push_back(words_of(between(head, 0, '(', ')', end)).back());
        head = stripped(head.substr(end));
    }
    std::string name = stripped(head.substr(0, head.find('(')));
    size_t at = 0;
    for (auto& declared : parts(between(head, 0, '(', ')', end))) {
        std::string last = words_of(declared).back();
        size_t bracket = last.find('['), bytes = bracket == std::string::npos ? 8 : size_t(std::atoi(last.c_str() + bracket + 1));
        last = last.substr(0, bracket);
        r.inputs.push_back(last);
        if (kernel) {
            r.parameters[last] = at, r.parameter_bytes.push_back(bytes);
            at += bytes;
        }
    }
    return name;
}

void read_statement(std::string s, Routine& r) {
    s = stripped(s);
    if (s.empty() || s.rfind(".reg", 0) == 0) return;
    if (s.rfind(".shared", 0) == 0) {
        size_t at = 8 * r.shared.size();
        r.shared[words_of(s).back()] = at;
        return;
    }
    Instruction i;
    if (s[0] == '@') {
        size_t blank = s.find(' ');
        i.guard = s.substr(1, blank - 1);
        s = stripped(s.substr(blank));
    }
    size_t blank = s.find(' ');
    std::istringstream op(s.substr(0, blank));
    for (std::string part; std::getline(op, part, '.');) i.op.push_back(part);
    if (blank != std::string::npos) i.operands = parts(s.substr(blank));
    r.body.push_back(i);
}

Program read(const std::string& text) {
    std::string clean, line;
    std::istringstream lines(text);
    while (std::getline(lines, line)) clean += line.substr(0, line.find("//")) + "\n";
    Program program;
    std::string statement;
    Routine* in = nullptr;
    int depth = 0;
    for (char c : clean) {
        if (!in && c == '{') {
            Routine r;
            std::string name = read_head(statement, r);
            in = &(program[name] = r);
            statement.clear();
        } else if (in && c == '}' && depth == 0) {
            in = nullptr;
            statement.clear();
        } else if (in && c == ';') {
            read_statement(statement, *in);
            statement.clear();
        } else if (in && c == ':') {
            in->labels[stripped(statement)] = in->body.size();
            statement.clear();
        } else {
            depth += in ? (c == '{') - (c == '}') : 0;
            statement += c;
        }
    }
    return program;
}

// ---- running it

struct Place {
    unsigned thread, threads, block, blocks;
};

// Where a stream's kernels stop until they may go on: before they call a routine.
struct Stop {
    std::atomic<const char*> before{nullptr};
    std::atomic<bool> reached{false};
};
thread_local Stop* stop_here = nullptr;  // of the stream whose thread this is

struct Frame {
    const Routine* routine;
    size_t next = 0;
    std::map<std::string, uint64_t> registers = {};
    std::string result = {};  // the caller's register for it
};

class Thread {
public:
    Thread(const Program& program, const Routine& kernel, const uint8_t* parameters, uint8_t* shared, Place place)
        : program_(program), parameters_(parameters), shared_(shared), place_(place), kernel_(kernel) {
        frames_.push_back({&kernel});
    }
    // To the next barrier, or to the end: then false.
    bool run() {
        while (!frames_.empty()) {
            Frame& f = frames_.back();
            must(f.next < f.routine->body.size(), "a routine without ret");
            const Instruction& i = f.routine->body[f.next++];
            if (!i.guard.empty() && !f.registers.at(i.guard)) continue;
            if (i.op[0] == "bar") return true;
            step(i, f);
        }
        return false;
    }

private:
    uint64_t value(const std::string& name) {
        if (name == "%tid.x") return place_.thread;
        if (name == "%ntid.x") return place_.threads;
        if (name == "%ctaid.x") return place_.block;
        if (name == "%nctaid.x") return place_.blocks;
        if (name == "%globaltimer") return uint64_t(std::chrono::steady_clock::now().time_since_epoch().count());
        if (std::isdigit(name[0]) || name[0] == '-') return uint64_t(std::stoll(name, nullptr, 0));
        auto found = frames_.back().registers.find(name);
        must(found != frames_.back().registers.end(), "read before written: " + name);
        return found->second;
    }

    uint8_t* address(const std::string& operand) {
        std::string inside = operand.substr(1, operand.size() - 2);
        size_t plus = inside.find('+');
        std::string name = inside.substr(0, plus);
        size_t offset = plus == std::string::npos ? 0 : std::stoul(inside.substr(plus + 1));
        auto shared = kernel_.shared.find(name);
        if (shared != kernel_.shared.end()) return shared_ + shared->second + offset;
        auto parameter = kernel_.parameters.find(name);
        if (parameter != kernel_.parameters.end()) return const_cast<uint8_t*>(parameters_) + parameter->second + offset;
        return reinterpret_cast<uint8_t*>(value(name)) + offset;
    }

    static std::vector<std::string> registers(const std::string& operand) {
        return operand[0] == '{' ? parts(operand.substr(1, operand.size() - 2)) : std::vector<std::string>{operand};
    }

    // Words of eight bytes are flags, with their orders; all else is data, which a sanitizer is to see.
    static uint64_t load(const Instruction& i, const uint8_t* from, size_t bytes) {
        uint64_t read = 0;
        must(reinterpret_cast<uintptr_t>(from) % bytes == 0, "a load that is not aligned");
        if (bytes != 8) return std::memcpy(&read, from, bytes), read;
        auto* word = reinterpret_cast<const uint64_t*>(from);
        if (i.has("acquire")) return std::this_thread::yield(), __atomic_load_n(word, __ATOMIC_ACQUIRE);
        if (i.has("relaxed")) return __atomic_load_n(word, __ATOMIC_RELAXED);
        return *word;
    }

    static void store(const Instruction& i, uint8_t* to, uint64_t x, size_t bytes) {
        must(reinterpret_cast<uintptr_t>(to) % bytes == 0, "a store that is not aligned");
        auto* word = reinterpret_cast<uint64_t*>(to);
        if (bytes == 8 && i.has("release")) {
            __atomic_store_n(word, x, __ATOMIC_RELEASE);
        } else if (bytes == 8 && i.has("relaxed")) {
            __atomic_store_n(word, x, __ATOMIC_RELAXED);
        } else {
            std::memcpy(to, &x, bytes);
        }
    }

    void step(const Instruction& i, Frame& f) {
        const std::string& op = i.op[0];
        auto in = [&](size_t operand) { return value(i.operands.at(operand)); };
        auto set = [&](uint64_t x) { f.registers[i.operands[0]] = i.bytes() == 4 ? uint32_t(x) : x; };
        if (op == "ret") return leave();
        if (op == "call") return enter(i);
        if (op == "bra") {
            f.next = f.routine->labels.at(i.operands[0]);
        } else if (op == "ld") {
            auto to = registers(i.operands[0]);
            const uint8_t* from = address(i.operands[1]);
            must(reinterpret_cast<uintptr_t>(from) % (to.size() * size_t(i.bytes())) == 0, "a vector that is not aligned");
            for (size_t k = 0; k < to.size(); ++k) f.registers[to[k]] = load(i, from + k * size_t(i.bytes()), size_t(i.bytes()));
        } else if (op == "st") {
            auto from = registers(i.operands[1]);
            uint8_t* to = address(i.operands[0]);
            must(reinterpret_cast<uintptr_t>(to) % (from.size() * size_t(i.bytes())) == 0, "a vector that is not aligned");
            for (size_t k = 0; k < from.size(); ++k) store(i, to + k * size_t(i.bytes()), value(from[k]), size_t(i.bytes()));
        } else if (op == "atom") {
            must(i.has("add") && i.bytes() == 8, "an atom of another kind");
            set(__atomic_fetch_add(reinterpret_cast<uint64_t*>(address(i.operands[1])), in(2), __ATOMIC_RELAXED));
        } else if (op == "fence") {
            // loads are in order here
        } else if (op == "mov" || op == "cvt") {
            set(in(1));
        } else if (op == "add") {
            set(in(1) + in(2));
        } else if (op == "sub") {
            set(in(1) - in(2));
        } else if (op == "mul") {
            set(in(1) * in(2));
        } else if (op == "mad") {
            set(in(1) * in(2) + in(3));
        } else if (op == "and") {
            set(in(1) & in(2));
        } else if (op == "or") {
            set(in(1) | in(2));
        } else if (op == "shl") {
            set(in(1) << in(2));
        } else if (op == "selp") {
            set(in(3) ? in(1) : in(2));
        } else if (op == "setp") {
            uint64_t a = in(1), b = in(2);
            bool holds = i.has("eq") ? a == b : i.has("ne") ? a != b : i.has("ge") ? a >= b : i.has("lt") ? a < b : a <= b;
            must(i.has("eq") || i.has("ne") || i.has("ge") || i.has("lt") || i.has("le"), "a comparison of another kind");
            f.registers[i.operands[0]] = holds;
        } else {
            die("unknown instruction " + op);
        }
    }

    void enter(const Instruction& i) {
        bool results = i.operands[0][0] == '(';
        const Routine& to = program_.at(i.operands[results]);
        while (stop_here->before && i.operands[results] == stop_here->before.load()) {
            stop_here->reached = true;
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        auto given = parts(i.operands[1 + results].substr(1, i.operands[1 + results].size() - 2));
        must(given.size() == to.inputs.size() && results == !to.outputs.empty(), "a call with other arguments");
        Frame frame{&to};
        for (size_t k = 0; k < given.size(); ++k) frame.registers[to.inputs[k]] = value(given[k]);
        if (results) frame.result = i.operands[0].substr(1, i.operands[0].size() - 2);
        frames_.push_back(frame);
    }

    void leave() {
        Frame left = frames_.back();
        frames_.pop_back();
        if (!left.result.empty()) frames_.back().registers[left.result] = left.registers.at(left.routine->outputs[0]);
    }

    const Program& program_;
    const uint8_t* parameters_;
    uint8_t* shared_;
    Place place_;
    const Routine& kernel_;
    std::vector<Frame> frames_;
};

struct Kernel {
    std::shared_ptr<const Program> program;
    const Routine* routine;
};

struct Launch {
    Kernel kernel;
    unsigned blocks, threads;
    std::vector<uint8_t> parameters;

    void run() const {
        for (unsigned b = 0; b < blocks; ++b) {
            alignas(8) uint8_t shared[64] = {};
            std::vector<Thread> all;
            for (unsigned t = 0; t < threads; ++t) {
                all.emplace_back(*kernel.program, *kernel.routine, parameters.data(), shared, Place{t, threads, b, blocks});
            }
            for (size_t waiting = threads; waiting;) {
                waiting = 0;
                for (auto& thread : all) waiting += thread.run();
            }
        }
    }
};

class FakeStream {
public:
    FakeStream() : thread_([this] { work(); }) {}
    ~FakeStream() {
        {
            std::lock_guard<std::mutex> hold(mutex_);
            ends_ = true;
        }
        changed_.notify_all();
        thread_.join();
    }
    void push(std::function<void()> work) {
        std::lock_guard<std::mutex> hold(mutex_);
        if (capturing) return graph.push_back(std::move(work));
        queue_.push_back(std::move(work));
        changed_.notify_all();
    }
    void synchronize() {
        std::unique_lock<std::mutex> hold(mutex_);
        changed_.wait(hold, [this] { return queue_.empty(); });
    }
    void hold() {
        held_ = true;
        push([this] {
            while (held_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        });
    }
    void let_go() { held_ = false; }
    std::atomic<bool> capturing{false};
    std::vector<std::function<void()>> graph;
    Stop stop;

private:
    void work() {
        stop_here = &stop;
        std::unique_lock<std::mutex> hold(mutex_);
        for (;;) {
            changed_.wait(hold, [this] { return ends_ || !queue_.empty(); });
            if (queue_.empty()) return;
            auto& first = queue_.front();
            hold.unlock();
            first();
            hold.lock();
            queue_.pop_front();
            changed_.notify_all();
        }
    }
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> queue_;
    bool ends_ = false;
    std::atomic<bool> held_{false};
    std::thread thread_;
};

struct Device {
    std::mutex mutex;
    std::vector<FakeStream*> streams;
    std::map<void*, size_t> held;  // memory of either kind
    std::map<const void*, std::pair<size_t, unsigned>> registered;  // memory of others, with flags
    std::string refused;           // a function that fails
};

Device& device() {
    static auto* d = new Device;
    return *d;
}

thread_local int pushed = 0;

int asked(const char* function) {
    std::lock_guard<std::mutex> hold(device().mutex);
    return device().refused == function ? 2 : 0;
}

int allocate(const char* function, void** memory, size_t bytes) {
    if (int failed = asked(function)) return failed;
    must(pushed > 0, "no context is current");
    *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    std::memset(*memory, 0xA5, bytes);
    std::lock_guard<std::mutex> hold(device().mutex);
    device().held[*memory] = bytes;
    return 0;
}

int release(void* memory) {
    must(pushed > 0, "no context is current");
    std::lock_guard<std::mutex> hold(device().mutex);
    must(device().held.erase(memory) == 1, "freed what is not held");
    std::free(memory);
    return 0;
}

bool registered(const void* from, size_t bytes) {
    std::lock_guard<std::mutex> hold(device().mutex);
    auto after = device().registered.upper_bound(from);
    if (after == device().registered.begin()) return false;
    auto& [memory, what] = *std::prev(after);
    return static_cast<const uint8_t*>(from) + bytes <= static_cast<const uint8_t*>(memory) + what.first;
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

API int cuGetErrorString(int result, const char** words) {
    *words = result == 2 ? "out of memory" : "unknown";
    return 0;
}
API int cuStreamGetCtx(void*, void** context) {
    *context = &device();
    return asked("cuStreamGetCtx");
}
API int cuStreamIsCapturing(void* stream, int* whether) {
    *whether = static_cast<FakeStream*>(stream)->capturing;
    return 0;
}
API int cuThreadExchangeStreamCaptureMode(int* mode) {
    thread_local int held = 0;
    std::swap(*mode, held);
    return 0;
}
API int cuCtxPushCurrent_v2(void* context) {
    must(context == &device(), "another context");
    return ++pushed, 0;
}
API int cuCtxPopCurrent_v2(void** context) {
    must(--pushed >= 0, "popped what was not pushed");
    *context = &device();
    return 0;
}
API int cuCtxSynchronize() {
    std::vector<FakeStream*> streams;
    {
        std::lock_guard<std::mutex> hold(device().mutex);
        streams = device().streams;
    }
    for (auto* stream : streams) stream->synchronize();
    return 0;
}
API int cuMemHostAlloc(void** memory, size_t bytes, unsigned) { return allocate("cuMemHostAlloc", memory, bytes); }
API int cuMemHostGetDevicePointer_v2(unsigned long long* address, void* memory, unsigned) {
    *address = reinterpret_cast<unsigned long long>(memory);
    return 0;
}
API int cuMemFreeHost(void* memory) { return release(memory); }
API int cuMemAlloc_v2(unsigned long long* address, size_t bytes) {
    return allocate("cuMemAlloc", reinterpret_cast<void**>(address), bytes);
}
API int cuMemFree_v2(unsigned long long address) { return release(reinterpret_cast<void*>(address)); }
API int cuMemcpyHtoD_v2(unsigned long long to, const void* from, size_t bytes) {
    std::memcpy(reinterpret_cast<void*>(to), from, bytes);
    return 0;
}
API int cuModuleLoadData(void** module, const void* text) {
    *module = new std::shared_ptr<const Program>(new Program(read(static_cast<const char*>(text))));
    return asked("cuModuleLoadData");
}
API int cuModuleGetFunction(void** function, void* module, const char* name) {
    auto& program = *static_cast<std::shared_ptr<const Program>*>(module);
    must(program->count(name), std::string("no kernel ") + name);
    *function = new Kernel{program, &program->at(name)};
    return 0;
}
API int cuLaunchKernel(void* function, unsigned gx, unsigned, unsigned, unsigned bx, unsigned, unsigned, unsigned, void* stream,
                       void** arguments, void**) {
    if (int failed = asked("cuLaunchKernel")) return failed;
    Launch launch{*static_cast<Kernel*>(function), gx, bx, {}};
    for (size_t bytes : launch.kernel.routine->parameter_bytes) {
        auto* from = static_cast<uint8_t*>(*arguments++);
        launch.parameters.insert(launch.parameters.end(), from, from + bytes);
    }
    static_cast<FakeStream*>(stream)->push([launch] { launch.run(); });
    return 0;
}
API int cuStreamSynchronize(void* stream) {
    must(!static_cast<FakeStream*>(stream)->capturing, "a stream that is captured cannot be waited for");
    static_cast<FakeStream*>(stream)->synchronize();
    return asked("cuStreamSynchronize");
}
API int cuMemHostRegister_v2(void* memory, size_t bytes, unsigned flags) {
    if (int failed = asked("cuMemHostRegister")) return failed;
    must(pushed > 0, "no context is current");
    std::lock_guard<std::mutex> hold(device().mutex);
    must(device().registered.emplace(memory, std::make_pair(bytes, flags)).second, "registered twice");
    return 0;
}
API int cuMemHostUnregister(void* memory) {
    must(pushed > 0, "no context is current");
    std::lock_guard<std::mutex> hold(device().mutex);
    must(device().registered.erase(memory) == 1, "unregistered what is not registered");
    return 0;
}
API int cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from, size_t bytes, void* stream) {
    if (int failed = asked("cuMemcpyHtoDAsync")) return failed;
    bool pinned = registered(from, bytes);
    if (!pinned) {  // the driver reads it at once
        static_cast<FakeStream*>(stream)->synchronize();
        std::memcpy(reinterpret_cast<void*>(to), from, bytes);
        return 0;
    }
    static_cast<FakeStream*>(stream)->push([=] {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        must(registered(from, bytes), "copied from memory that is registered no longer");
        std::memcpy(reinterpret_cast<void*>(to), from, bytes);
    });
    return 0;
}
API int cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, size_t bytes, void* stream) {
    if (int failed = asked("cuMemcpyDtoDAsync")) return failed;
    static_cast<FakeStream*>(stream)->push([=] { std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes); });
    return 0;
}
API int cuMemcpyDtoHAsync_v2(void* to, unsigned long long from, size_t bytes, void* stream) {
    if (int failed = asked("cuMemcpyDtoHAsync")) return failed;
    static_cast<FakeStream*>(stream)->push([=] { std::memcpy(to, reinterpret_cast<void*>(from), bytes); });
    return 0;
}

// ---- for the tests

API void* fake_stream() {
    auto* stream = new FakeStream;
    std::lock_guard<std::mutex> hold(device().mutex);
    device().streams.push_back(stream);
    return stream;
}
API void fake_synchronize(void* stream) { static_cast<FakeStream*>(stream)->synchronize(); }
// What is launched in between waits.
API void fake_hold(void* stream) { static_cast<FakeStream*>(stream)->hold(); }
API void fake_let_go(void* stream) { static_cast<FakeStream*>(stream)->let_go(); }
// Kernels that are launched from now on, until it is nullptr; and whether one has come there.
API void fake_stop_before(void* stream, const char* routine) { static_cast<FakeStream*>(stream)->stop.before = routine; }
API bool fake_stopped(void* stream) { return static_cast<FakeStream*>(stream)->stop.reached; }
API void fake_capture(void* stream, int whether) { static_cast<FakeStream*>(stream)->capturing = whether; }
API void fake_replay(void* stream) {
    auto* s = static_cast<FakeStream*>(stream);
    for (auto& work : s->graph) s->push(work);
}
API void fake_refuse(const char* function) {
    std::lock_guard<std::mutex> hold(device().mutex);
    device().refused = function;
}
API size_t fake_held() {
    std::lock_guard<std::mutex> hold(device().mutex);
    size_t bytes = 0;
    for (auto& [memory, held] : device().held) bytes += held;
    return bytes;
}

// Bytes that are registered with all of these flags.
API size_t fake_registered(unsigned flags) {
    std::lock_guard<std::mutex> hold(device().mutex);
    size_t bytes = 0;
    for (auto& [memory, what] : device().registered) bytes += (what.second & flags) == flags ? what.first : 0;
    return bytes;
}

#ifdef FAKE_CUDA_FFI
// The GPU's handlers on XLA's CPU backend: with a stream of ours, whose work is waited for.

namespace {

XLA_FFI_Handler *submit_handler, *collect_handler, *fetch_handler;

XLA_FFI_Error* stream_of_this_thread(XLA_FFI_Stream_Get_Args* args) {
    thread_local void* stream = fake_stream();
    args->stream = stream;
    return nullptr;
}

XLA_FFI_Error* with_a_stream(XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame) {
    if (frame->extension_start || !frame->api) return handler(frame);  // it is asked what it is
    XLA_FFI_Api api = *frame->api;
    XLA_FFI_CallFrame copy = *frame;
    api.XLA_FFI_Stream_Get = stream_of_this_thread;
    copy.api = &api;
    XLA_FFI_Error* error = handler(&copy);
    XLA_FFI_Stream_Get_Args args{};
    stream_of_this_thread(&args);
    fake_synchronize(args.stream);
    return error;
}

}  // namespace

API void fake_handlers(XLA_FFI_Handler* submit, XLA_FFI_Handler* collect, XLA_FFI_Handler* fetch) {
    submit_handler = submit, collect_handler = collect, fetch_handler = fetch;
}
API XLA_FFI_Error* fake_submit(XLA_FFI_CallFrame* frame) { return with_a_stream(submit_handler, frame); }
API XLA_FFI_Error* fake_collect(XLA_FFI_CallFrame* frame) { return with_a_stream(collect_handler, frame); }
API XLA_FFI_Error* fake_fetch(XLA_FFI_CallFrame* frame) { return with_a_stream(fetch_handler, frame); }
#endif
