// The handlers that XLA calls, and the C ABI: what a program gives is checked here, and no exception gets out.
#include "xla/ffi/api/ffi.h"

#include <algorithm>
#include <exception>
#include <optional>

#include "ffi_fetch.h"
#include "ffi_service.h"

#define CPU_EXPERTS_HANDLER(name) extern "C" CPU_EXPERTS_API XLA_FFI_Error* name(XLA_FFI_CallFrame*)

CPU_EXPERTS_HANDLER(cpu_experts_ffi_forward);
CPU_EXPERTS_HANDLER(cpu_experts_ffi_submit);
CPU_EXPERTS_HANDLER(cpu_experts_ffi_collect);
CPU_EXPERTS_HANDLER(cpu_experts_ffi_fetch);
CPU_EXPERTS_HANDLER(cpu_experts_ffi_fetch_on_gpu);

namespace {

namespace xla_ffi = xla::ffi;
using namespace cpu_experts::ffi;
using xla_ffi::AnyBuffer;
using xla_ffi::DataType;
using xla_ffi::Error;
using xla_ffi::ErrorCode;

using Ids = xla_ffi::Buffer<DataType::S32, 2>;
using Weights = xla_ffi::Buffer<DataType::F32, 2>;
using Ticket = xla_ffi::Buffer<DataType::U32, 1>;
using Number = xla_ffi::Buffer<DataType::S32, 0>;
using Panels = xla_ffi::Buffer<DataType::U8, 3>;

thread_local std::string last_error;

Error told(const Status& status) {
    switch (status.code) {
        case CPU_EXPERTS_OK: return Error::Success();
        case CPU_EXPERTS_INVALID: return Error(ErrorCode::kInvalidArgument, status.words);
        case CPU_EXPERTS_UNSUPPORTED: return Error(ErrorCode::kUnimplemented, status.words);
        case CPU_EXPERTS_NO_MEMORY: return Error(ErrorCode::kResourceExhausted, status.words);
        case CPU_EXPERTS_CLOSED: return Error(ErrorCode::kFailedPrecondition, status.words);
        default: return Error(ErrorCode::kInternal, status.words);
    }
}

template <class Body>
Error guarded(Body body) {
    try {
        return told(body());
    } catch (const std::bad_alloc&) {
        return told({CPU_EXPERTS_NO_MEMORY, "out of memory"});
    } catch (const std::exception& e) {
        return told({CPU_EXPERTS_FAILED, e.what()});
    } catch (...) {
        return told({CPU_EXPERTS_FAILED, "unknown failure"});
    }
}

std::optional<cpu_experts_dtype> dtype_of(DataType type) {
    if (type == DataType::F32) return CPU_EXPERTS_F32;
    if (type == DataType::BF16) return CPU_EXPERTS_BFLOAT16;
    return std::nullopt;
}

bool same(AnyBuffer::Dimensions a, AnyBuffer::Dimensions b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); }

// The call that the arrays amount to, once their shapes and dtypes fit together.
Status read(uint64_t layer, const AnyBuffer& x, const Ids& ids, const Weights& weights, DataType out, Call& call) {
    auto x_dtype = dtype_of(x.element_type()), out_dtype = dtype_of(out);
    if (!x_dtype || !out_dtype) return {CPU_EXPERTS_INVALID, "x and y: must be float32 or bfloat16"};
    auto rows = x.dimensions(), chosen = ids.dimensions();
    if (rows.size() != 2 || chosen[0] != rows[0] || !same(chosen, weights.dimensions())) {
        return {CPU_EXPERTS_INVALID, "shapes: must be x [n D], topk_ids [n K], topk_weights [n K]"};
    }
    call = {layer, rows[0], chosen[1], rows[1], *x_dtype, *out_dtype};
    return {};
}

Error forward_now(uint64_t layer, AnyBuffer x, Ids ids, Weights weights, xla_ffi::Result<AnyBuffer> y) {
    return guarded([&]() -> Status {
        Call call{};
        if (Status failed = read(layer, x, ids, weights, y->element_type(), call)) return failed;
        if (!same(y->dimensions(), x.dimensions())) return {CPU_EXPERTS_INVALID, "y: must be of x's shape"};
        return forward(call, x.untyped_data(), ids.typed_data(), weights.typed_data(), y->untyped_data());
    });
}

// x is passed on: who reads it afterwards comes after the submission. XLA leaves it in place, except for a part of an array that
// is given without being taken out of it.
Status pass_on(Stream stream, const AnyBuffer& x, AnyBuffer& passed) {
    if (passed.size_bytes() != x.size_bytes()) return {CPU_EXPERTS_INVALID, "x: must be passed on as it is"};
    if (passed.untyped_data() == x.untyped_data() || !x.size_bytes()) return {};
    auto address = [](const AnyBuffer& a) { return Address(reinterpret_cast<uintptr_t>(a.untyped_data())); };
    int result = driver().MemcpyDtoDAsync(address(passed), address(x), x.size_bytes(), stream);
    return driver().said("cuMemcpyDtoDAsync", result);
}

Error submit_on(Stream stream, uint64_t layer, bool float32, uint64_t patience, AnyBuffer x, Ids ids, Weights weights,
                xla_ffi::Result<Ticket> ticket, xla_ffi::Result<AnyBuffer> passed) {
    return guarded([&]() -> Status {
        Call call{};
        if (Status failed = read(layer, x, ids, weights, float32 ? DataType::F32 : DataType::BF16, call)) return failed;
        if (ticket->element_count() != 2) return {CPU_EXPERTS_INVALID, "ticket: must be two words"};
        if (Status failed = pass_on(stream, x, *passed)) return failed;
        return submit(stream, call, patience, x.untyped_data(), ids.typed_data(), weights.typed_data(), ticket->typed_data());
    });
}

// Further arguments are what must have been computed before.
Error collect_on(Stream stream, uint64_t layer, bool x_float32, uint64_t chosen, uint64_t patience, Ticket ticket,
                 xla_ffi::RemainingArgs, xla_ffi::Result<AnyBuffer> y) {
    return guarded([&]() -> Status {
        auto rows = y->dimensions();
        auto dtype = dtype_of(y->element_type());
        if (rows.size() != 2 || !dtype) return {CPU_EXPERTS_INVALID, "y: must be [n D] in float32 or bfloat16"};
        if (ticket.element_count() != 2) return {CPU_EXPERTS_INVALID, "ticket: must be two words"};
        auto x_dtype = x_float32 ? CPU_EXPERTS_F32 : CPU_EXPERTS_BFLOAT16;
        Call call{layer, rows[0], int64_t(chosen), rows[1], x_dtype, *dtype};
        return collect(stream, call, patience, ticket.typed_data(), y->untyped_data());
    });
}

Status read(Panels& gate_up, Panels& down, Copies& copies) {
    int64_t count = gate_up.dimensions()[0];
    if (down.dimensions()[0] != count) return {CPU_EXPERTS_INVALID, "gate_up and down: must be of as many experts"};
    copies = {count, {gate_up.untyped_data(), down.untyped_data()}, {gate_up.size_bytes(), down.size_bytes()}};
    return {};
}

Error fetch_now(uint64_t layer, Number first, xla_ffi::Result<Panels> gate_up, xla_ffi::Result<Panels> down) {
    return guarded([&]() -> Status {
        Copies copies{};
        if (Status failed = read(*gate_up, *down, copies)) return failed;
        return fetch(layer, *first.typed_data(), copies);
    });
}

Error fetch_on(Stream stream, uint64_t layer, Number first, xla_ffi::Result<Panels> gate_up, xla_ffi::Result<Panels> down) {
    return guarded([&]() -> Status {
        Copies copies{};
        if (Status failed = read(*gate_up, *down, copies)) return failed;
        return fetch(stream, layer, first.typed_data(), copies);
    });
}

template <class Body>
int32_t status_of(Body body) {
    try {
        Status status = body();
        last_error = status.words;
        return status.code;
    } catch (...) {
        return CPU_EXPERTS_NO_MEMORY;
    }
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(cpu_experts_ffi_forward, forward_now,
                              xla_ffi::Ffi::Bind()
                                  .Attr<uint64_t>("layer")
                                  .Arg<AnyBuffer>()
                                  .Arg<Ids>()
                                  .Arg<Weights>()
                                  .Ret<AnyBuffer>());

// Both only launch a kernel, so they may be captured into a CUDA graph, a loop's body among them.
XLA_FFI_DEFINE_HANDLER_SYMBOL(cpu_experts_ffi_submit, submit_on,
                              xla_ffi::Ffi::Bind()
                                  .Ctx<xla_ffi::PlatformStream<Stream>>()
                                  .Attr<uint64_t>("layer")
                                  .Attr<bool>("float32")
                                  .Attr<uint64_t>("patience")
                                  .Arg<AnyBuffer>()
                                  .Arg<Ids>()
                                  .Arg<Weights>()
                                  .Ret<Ticket>()
                                  .Ret<AnyBuffer>(),
                              {xla_ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(cpu_experts_ffi_collect, collect_on,
                              xla_ffi::Ffi::Bind()
                                  .Ctx<xla_ffi::PlatformStream<Stream>>()
                                  .Attr<uint64_t>("layer")
                                  .Attr<bool>("x_float32")
                                  .Attr<uint64_t>("chosen")
                                  .Attr<uint64_t>("patience")
                                  .Arg<Ticket>()
                                  .RemainingArgs()
                                  .Ret<AnyBuffer>(),
                              {xla_ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(cpu_experts_ffi_fetch, fetch_now,
                              xla_ffi::Ffi::Bind().Attr<uint64_t>("layer").Arg<Number>().Ret<Panels>().Ret<Panels>());

// It waits for the stream, and its copies may not outlive the layer: no graph may have it.
XLA_FFI_DEFINE_HANDLER_SYMBOL(cpu_experts_ffi_fetch_on_gpu, fetch_on,
                              xla_ffi::Ffi::Bind()
                                  .Ctx<xla_ffi::PlatformStream<Stream>>()
                                  .Attr<uint64_t>("layer")
                                  .Arg<Number>()
                                  .Ret<Panels>()
                                  .Ret<Panels>());

int32_t cpu_experts_ffi_abi(void) { return CPU_EXPERTS_FFI_ABI; }

int32_t cpu_experts_ffi_api(void) { return 1000 * XLA_FFI_API_MAJOR + XLA_FFI_API_MINOR; }

uint64_t cpu_experts_ffi_know(const cpu_experts_ffi_layer* layer) {
    try {
        return layer && layer->struct_bytes == int32_t(sizeof *layer) ? know(*layer) : 0;
    } catch (...) {
        return 0;
    }
}

void cpu_experts_ffi_forget(uint64_t layer) {
    forget(layer);
    status_of([&]() -> Status { return unpin(layer), forget_rings(layer), Status{}; });
}

int32_t cpu_experts_ffi_open_driver(const char* path) {
    return status_of([&] { return open_driver(path); });
}

int32_t cpu_experts_ffi_failure(void) {
    return status_of([] { return failure(); });
}

void cpu_experts_ffi_stop(void) {
    status_of([]() -> Status { return stop(), Status{}; });
}

const char* cpu_experts_ffi_last_error(void) { return last_error.c_str(); }
