// The operators, boxed, on torch's stable ABI. Python defines their schemas and everything around
// them (see ops/_native.py):
//
//   _encode_map(Tensor pieces, Tensor alignment, int max_log) -> (Tensor map, Tensor header)   on the CPU
//   _apply_map(Tensor[] values, Tensor map, Tensor header, int cast) -> Tensor[]              on the device
//
// `cast` is the outputs' type as a place, see apply.h, or -1 for that of the values.
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "apply.h"
#include "backend.h"
#include "encode.h"
#include "shims.h"

namespace torchrec_kt {
namespace {

using shims::Tensor;

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument("torchrec_kt: " + message); }

// A list of integers on the CPU.
Reader reader_of(const Tensor& tensor, const char* name) {
  static const int32_t kInt64 = aoti_torch_dtype_int64();
  static const int32_t kCpu = aoti_torch_device_type_cpu();
  if (tensor.dtype() != kInt64 || tensor.device_type() != kCpu || tensor.dim() != 1 || !tensor.is_contiguous()) {
    fail(std::string(name) + " must be a contiguous int64 tensor of one dimension on the CPU");
  }
  return Reader(reinterpret_cast<const int64_t*>(tensor.data()), static_cast<size_t>(tensor.numel()), name);
}

template <class T>
Tensor cpu_tensor(const std::vector<T>& values, int32_t dtype) {
  Tensor tensor = Tensor::empty({static_cast<int64_t>(values.size())}, dtype, aoti_torch_device_type_cpu(), 0);
  if (!values.empty()) std::memcpy(tensor.data(), values.data(), values.size() * sizeof(T));
  return tensor;
}

void encode_map(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor pieces = shims::take_tensor(stack[0]);
  const Tensor alignment = shims::take_tensor(stack[1]);
  const auto max_log = static_cast<int64_t>(stack[2]);
  if (max_log < 0 || max_log > 4) fail("max_log is " + std::to_string(max_log) + "; expected 0 to 4");
  const Encoded encoded =
      encode(reader_of(pieces, "pieces"), reader_of(alignment, "alignment"), static_cast<int>(max_log));
  Tensor map = cpu_tensor(encoded.map, aoti_torch_dtype_int32());
  Tensor header = cpu_tensor(encoded.header, aoti_torch_dtype_int64());
  stack[0] = map.release();
  stack[1] = header.release();
}

void apply_map(uint64_t* stack, uint64_t, uint64_t) {
  // All are owned here, so all are taken before anything can fail.
  const std::vector<Tensor> values = shims::take_tensors(stack[0]);
  Tensor map = shims::take_tensor(stack[1]);
  const Tensor header = shims::take_tensor(stack[2]);
  const auto cast = static_cast<int64_t>(stack[3]);
  stack[0] = shims::give_tensors(apply(values, std::move(map), reader_of(header, "header"), cast));
}

const bool registered = [] {
  try {
    shims::implement("CPU", __FILE__, {{"_encode_map", encode_map}});
    shims::implement(backend::kDispatchKey, __FILE__, {{"_apply_map", apply_map}});
    return true;
  } catch (const std::exception& error) {  // must not leave a static initialiser
    std::fprintf(stderr, "torchrec_kt: %s\n", error.what());
    return false;
  }
}();

}  // namespace
}  // namespace torchrec_kt
