// The layers that programs name by number, and their forward as a status with words.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "ffi.h"

namespace cpu_experts::ffi {

struct Status {
    int32_t code = CPU_EXPERTS_OK;  // a cpu_experts_status
    std::string words = {};
    explicit operator bool() const { return code != CPU_EXPERTS_OK; }  // whether it is a failure
};

// One call's arrays, with the sizes that the program says they have.
struct Call {
    uint64_t layer;
    int64_t tokens, chosen, model;
    cpu_experts_dtype x_dtype, out_dtype;
};

uint64_t know(const cpu_experts_ffi_layer& layer);
// Returns once nobody holds it any more.
void forget(uint64_t number);
// A layer whose weights stay as long as this is held; nullptr if it is forgotten.
std::shared_ptr<const cpu_experts_ffi_layer> hold(uint64_t number);
// Whether the layer is there and would take the call's sizes.
Status check(const Call& call);
Status forward(const Call& call, const void* x, const int32_t* topk_ids, const float* topk_weights, void* out);

}  // namespace cpu_experts::ffi
