// The kernel on the host, one thread after the other, for checks: the same body, the same launcher.
#include "backend.h"

#include <atomic>

namespace {
std::atomic<bool> capturing{false};
std::atomic<int64_t> waits{0};
std::atomic<int64_t> launches{0};
}  // namespace

// For checks: whether to act as while a graph is captured, how often the device was waited for, and launches.
extern "C" __attribute__((visibility("default"))) void torchrec_kt_host_capture(bool on) { capturing = on; }
extern "C" __attribute__((visibility("default"))) int64_t torchrec_kt_host_waits() { return waits; }
extern "C" __attribute__((visibility("default"))) int64_t torchrec_kt_host_launches() { return launches; }

namespace torchrec_kt::backend {

const char* const kDispatchKey = "CPU";

// Few, so that small cases, too, meet tiles of more than one length.
int64_t resident_threads(int32_t) { return 256; }

void* current_stream(int32_t) { return nullptr; }

bool is_capturing(void*) { return capturing; }

void wait(int32_t) { ++waits; }

void launch(Element in, Element out, const Params& params, uint32_t blocks, void*) {
  ++launches;
  with_kernel(in, out, [&](auto kernel) {
    for (uint32_t block = 0; block < blocks; ++block) {
      for (uint32_t thread = 0; thread < kThreads; ++thread) run<decltype(kernel)>(params, block, thread);
    }
  });
}

}  // namespace torchrec_kt::backend
