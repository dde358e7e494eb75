// The kernel on CUDA devices: shells that fill the position in, and what a launch needs.
#include <cuda_runtime_api.h>

#include <atomic>
#include <stdexcept>
#include <string>

#include "backend.h"
#include "kernel.h"
#include "shims.h"

namespace torchrec_kt {

template <class Kernel>
__global__ void __launch_bounds__(kThreads, 4) apply_map(const __grid_constant__ Params params) {
  run<Kernel>(params, blockIdx.x, threadIdx.x);
}

namespace backend {

namespace {

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw std::runtime_error(
        std::string("torchrec_kt: ") + what + " failed: " + cudaGetErrorName(status) + ", " +
        cudaGetErrorString(status));
  }
}

}  // namespace

const char* const kDispatchKey = "CUDA";

int64_t resident_threads(int32_t device) {
  constexpr int kDevices = 64;
  static std::atomic<int> processors[kDevices];
  std::atomic<int>* known = device >= 0 && device < kDevices ? &processors[device] : nullptr;
  int count = known ? known->load(std::memory_order_relaxed) : 0;
  if (count == 0) {
    check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "asking the device");
    if (known) known->store(count, std::memory_order_relaxed);
  }
  return int64_t{count} * 1024;  // at 64 registers a thread
}

void* current_stream(int32_t device) { return shims::current_cuda_stream(device); }

bool is_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status), "asking the stream");
  return status != cudaStreamCaptureStatusNone;
}

void wait(int32_t device) {
  const shims::DeviceGuard guard(device);
  check(cudaDeviceSynchronize(), "waiting for the device");
}

void launch(Element in, Element out, const Params& params, uint32_t blocks, void* stream) {
  with_kernel(in, out, [&](auto kernel) {
    apply_map<decltype(kernel)><<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  });
  check(cudaGetLastError(), "launching the kernel");
}

}  // namespace backend
}  // namespace torchrec_kt
