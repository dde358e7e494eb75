// What the operator needs of the place where the kernel runs: a device, or the host in checks.
#pragma once

#include <cstdint>

#include "kernel.h"

namespace torchrec_kt::backend {

// How the kernel sees an element. Copies need no more than its size.
enum class Element { kBytes, kHalf, kBFloat16, kFloat, kDouble };

extern const char* const kDispatchKey;
int64_t resident_threads(int32_t device);
void* current_stream(int32_t device);
// Whether what is launched now will run again, after this call's tensors are gone.
bool is_capturing(void* stream);
// Waits until everything that was launched on the device is done.
void wait(int32_t device);
void launch(Element in, Element out, const Params& params, uint32_t blocks, void* stream);

template <class In, class F>
void with_out(Element out, const F& f) {
  switch (out) {
    case Element::kHalf: return f(SumKernel<In, Half>{});
    case Element::kBFloat16: return f(SumKernel<In, BFloat16>{});
    case Element::kFloat: return f(SumKernel<In, float>{});
    default: return f(SumKernel<In, double>{});
  }
}

// Calls `f` with the kernel for the two types.
template <class F>
void with_kernel(Element in, Element out, const F& f) {
  switch (in) {
    case Element::kBytes: return f(CopyKernel{});
    case Element::kHalf: return with_out<Half>(out, f);
    case Element::kBFloat16: return with_out<BFloat16>(out, f);
    case Element::kFloat: return with_out<float>(out, f);
    default: return with_out<double>(out, f);
  }
}

}  // namespace torchrec_kt::backend
