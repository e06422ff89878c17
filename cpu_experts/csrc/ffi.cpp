// The handlers that XLA calls, and the C ABI: what a program gives is checked here, and no exception gets out.
#include "xla/ffi/api/ffi.h"

#include <exception>
#include <optional>

#include "ffi_layers.h"

#define CPU_EXPERTS_HANDLER(name) extern "C" CPU_EXPERTS_API XLA_FFI_Error* name(XLA_FFI_CallFrame*)

CPU_EXPERTS_HANDLER(cpu_experts_ffi_forward);

namespace {

namespace xla_ffi = xla::ffi;
using namespace cpu_experts::ffi;
using xla_ffi::AnyBuffer;
using xla_ffi::DataType;
using xla_ffi::Error;
using xla_ffi::ErrorCode;

using Ids = xla_ffi::Buffer<DataType::S32, 2>;
using Weights = xla_ffi::Buffer<DataType::F32, 2>;

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

// The call that the arrays amount to, once their shapes and dtypes fit together.
Status read(uint64_t layer, const AnyBuffer& x, const Ids& ids, const Weights& weights, const AnyBuffer& y, Call& call) {
    auto rows = x.dimensions(), out = y.dimensions(), chosen = ids.dimensions();
    auto x_dtype = dtype_of(x.element_type()), out_dtype = dtype_of(y.element_type());
    if (!x_dtype || !out_dtype) return {CPU_EXPERTS_INVALID, "x and y: must be float32 or bfloat16"};
    if (rows.size() != 2 || out.size() != 2 || rows[0] != out[0] || rows[1] != out[1] || chosen[0] != rows[0] ||
        weights.dimensions()[0] != chosen[0] || weights.dimensions()[1] != chosen[1]) {
        return {CPU_EXPERTS_INVALID, "shapes must be x [n D], topk_ids [n K], topk_weights [n K], y [n D]"};
    }
    call = {layer, rows[0], chosen[1], rows[1], *x_dtype, *out_dtype};
    return {};
}

Error forward_now(uint64_t layer, AnyBuffer x, Ids ids, Weights weights, xla_ffi::Result<AnyBuffer> y) {
    return guarded([&]() -> Status {
        Call call{};
        if (Status failed = read(layer, x, ids, weights, *y, call)) return failed;
        return forward(call, x.untyped_data(), ids.typed_data(), weights.typed_data(), y->untyped_data());
    });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(cpu_experts_ffi_forward, forward_now,
                              xla_ffi::Ffi::Bind()
                                  .Attr<uint64_t>("layer")
                                  .Arg<AnyBuffer>()
                                  .Arg<Ids>()
                                  .Arg<Weights>()
                                  .Ret<AnyBuffer>());

int32_t cpu_experts_ffi_abi(void) { return CPU_EXPERTS_FFI_ABI; }

int32_t cpu_experts_ffi_api(void) { return 1000 * XLA_FFI_API_MAJOR + XLA_FFI_API_MINOR; }

uint64_t cpu_experts_ffi_know(const cpu_experts_ffi_layer* layer) {
    try {
        return layer && layer->struct_bytes == int32_t(sizeof *layer) ? know(*layer) : 0;
    } catch (...) {
        return 0;
    }
}

void cpu_experts_ffi_forget(uint64_t layer) { forget(layer); }
