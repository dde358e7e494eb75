// Applies an encoded map to tensors: the function behind the operator _apply_map.
#pragma once

#include <cstdint>
#include <vector>

#include "encode.h"
#include "shims.h"

namespace torchrec_kt {

// The place of a type of torch's among those that the kernel adds and converts; -1 for others.
int64_t arithmetic_place(int32_t dtype);

// New outputs, in the order of the map. `map` is on the device of the tensors, `header` describes it; `cast`
// is the outputs' type as a place, or -1 for that of the tensors. Empty, before anything is allocated, where a
// tensor is not aligned as the map takes for granted. Throws before anything is launched.
std::vector<shims::Tensor> apply(
    const std::vector<shims::Tensor>& values, shims::Tensor map, Reader header, int64_t cast);

}  // namespace torchrec_kt
