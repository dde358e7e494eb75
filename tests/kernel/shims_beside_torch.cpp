// Compiles only where shims.h declares torch's functions as torch does.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include "shims.h"

static_assert(torchrec_kt::shims::kAbiVersion == TORCH_TARGET_VERSION, "another version than it is compiled for");
