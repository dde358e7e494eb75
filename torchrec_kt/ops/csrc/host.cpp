// The kernel on the host, one thread after the other, for checks: the same body, the same launcher.
#include "backend.h"

namespace torchrec_kt::backend {

const char* const kDispatchKey = "CPU";

// Few, so that small cases, too, meet tiles of more than one length.
int64_t resident_threads(int32_t) { return 256; }

void* current_stream(int32_t) { return nullptr; }

bool is_capturing(void*) { return false; }

void launch(Element in, Element out, const Params& params, uint32_t blocks, void*) {
  with_kernel(in, out, [&](auto kernel) {
    for (uint32_t block = 0; block < blocks; ++block) {
      for (uint32_t thread = 0; thread < kThreads; ++thread) run<decltype(kernel)>(params, block, thread);
    }
  });
}

}  // namespace torchrec_kt::backend
