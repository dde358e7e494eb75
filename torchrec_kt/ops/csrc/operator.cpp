// The operators, boxed, on torch's stable ABI. Python defines their schemas and everything around
// them (see ops/_native.py):
//
//   _encode_map(Tensor pieces, Tensor alignment, int max_log) -> (Tensor map, Tensor header)   on the CPU
//   _apply_map(Tensor[] values, Tensor map, Tensor header, int cast) -> Tensor[]              on the device
//
// `cast` is the outputs' type as a place in kCasts, or -1 for that of the values.
#include <cstdio>
#include <cstring>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "backend.h"
#include "encode.h"
#include "launch.h"
#include "shims.h"

namespace torchrec_kt {
namespace {

using backend::Element;
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

// The types that the kernel can add and convert.
struct Arithmetic {
  Element element;
  int32_t dtype;
};

const std::vector<Arithmetic>& casts() {
  static const std::vector<Arithmetic> kCasts{
      {Element::kHalf, aoti_torch_dtype_float16()},
      {Element::kBFloat16, aoti_torch_dtype_bfloat16()},
      {Element::kFloat, aoti_torch_dtype_float32()},
      {Element::kDouble, aoti_torch_dtype_float64()}};
  return kCasts;
}

Element arithmetic_element(int32_t dtype) {
  for (const Arithmetic& type : casts()) {
    if (type.dtype == dtype) return type.element;
  }
  fail("sums and casts are for float16, bfloat16, float32 and float64 alone");
}

// A captured graph reads the map on every replay, so it must outlive whoever handed it in.
void keep_for_replay(Tensor map) {
  static std::mutex mutex;
  static auto* kept = new std::vector<Tensor>();  // never freed: the device may be gone by then
  static auto* addresses = new std::set<const char*>();
  const std::lock_guard<std::mutex> lock(mutex);
  if (addresses->insert(map.data()).second) kept->push_back(std::move(map));
}

// Empty where a tensor is not aligned as the map takes for granted.
std::vector<Tensor> apply(const std::vector<Tensor>& values, Tensor map, const Tensor& header_tensor, int64_t cast) {
  static const int32_t kInt32 = aoti_torch_dtype_int32();
  Reader reader = reader_of(header_tensor, "header");
  const Header header = read_header(reader);
  if (values.empty() || static_cast<int64_t>(values.size()) != header.n_in) {
    fail(
        "got " + std::to_string(values.size()) + " tensors; the map is for " + std::to_string(header.n_in) +
        " and needs at least one");
  }
  const int32_t device_type = values[0].device_type();
  const int32_t device = values[0].device_index();
  const int32_t in_dtype = values[0].dtype();
  if (map.dtype() != kInt32 || map.dim() != 1 || !map.is_contiguous() || map.numel() != header.map_words) {
    fail("the map must be a contiguous int32 tensor of one dimension, as long as its header says");
  }
  if (reinterpret_cast<uintptr_t>(map.data()) % 8 != 0) {
    fail("the map must start at a multiple of 8 bytes");
  }
  if (map.device_type() != device_type || map.device_index() != device) {
    fail("the map must be on the device of the tensors");
  }

  if (cast < -1 || cast >= static_cast<int64_t>(casts().size())) fail("no type has number " + std::to_string(cast));
  const int32_t dtype = cast < 0 ? in_dtype : casts()[static_cast<size_t>(cast)].dtype;
  Element in = Element::kBytes, out = Element::kBytes;
  if (in_dtype != dtype || header.has_sums) {
    in = arithmetic_element(in_dtype);
    out = arithmetic_element(dtype);
  }
  Shape shape;
  shape.in_bytes = static_cast<int>(aoti_torch_dtype_element_size(in_dtype));
  shape.out_bytes = static_cast<int>(aoti_torch_dtype_element_size(dtype));
  shape.rows = values[0].dim() == 2 ? values[0].sizes()[0] : 0;

  thread_local std::vector<TensorView> views;
  views.clear();
  bool aligned = true;
  for (int64_t i = 0; i < header.n_in; ++i) {
    const Tensor& value = values[static_cast<size_t>(i)];
    if (value.dim() != 2 || value.sizes()[0] != shape.rows || value.sizes()[1] < header.needed[i]) {
      fail(
          "tensor " + std::to_string(i) + " must be [" + std::to_string(shape.rows) + ", " +
          std::to_string(header.needed[i]) + " or more]");
    }
    if (value.dtype() != in_dtype || value.device_type() != device_type || value.device_index() != device) {
      fail("tensor " + std::to_string(i) + " differs from tensor 0 in type or device");
    }
    // The stride of a dimension of one can be any number.
    const int64_t row_stride = shape.rows == 1 ? 0 : value.strides()[0];
    views.push_back({value.data(), value.sizes()[1], row_stride, value.sizes()[1] == 1 ? 1 : value.strides()[1]});
    aligned = aligned && is_aligned(views.back(), shape.in_bytes, static_cast<int>(header.needed_log[i]));
  }
  if (!aligned && shape.rows > 0) return {};  // before anything is allocated

  std::optional<shims::DeviceGuard> guard;
  if (device_type != aoti_torch_device_type_cpu()) guard.emplace(device);
  std::vector<Tensor> outputs;
  outputs.reserve(static_cast<size_t>(header.n_out));
  for (int64_t t = 0; t < header.n_out; ++t) {
    const int64_t width = header.out_widths[t];
    outputs.push_back(Tensor::empty({shape.rows, width}, dtype, device_type, device));
    views.push_back({outputs.back().data(), width, shape.rows == 1 ? 0 : width, 1});
  }
  if (shape.rows == 0) return outputs;

  void* stream = backend::current_stream(device);
  shape.resident_threads = backend::resident_threads(device);
  const auto* words = reinterpret_cast<const uint32_t*>(map.data());
  const bool done = for_each_launch(
      reader, header, words, views.data(), shape,
      [&](const Params& params, uint32_t blocks) { backend::launch(in, out, params, blocks, stream); });
  if (!done) return {};
  if (backend::is_capturing(stream)) keep_for_replay(std::move(map));
  return outputs;
}

void apply_map(uint64_t* stack, uint64_t, uint64_t) {
  // All are owned here, so all are taken before anything can fail.
  const std::vector<Tensor> values = shims::take_tensors(stack[0]);
  Tensor map = shims::take_tensor(stack[1]);
  const Tensor header = shims::take_tensor(stack[2]);
  const auto cast = static_cast<int64_t>(stack[3]);
  stack[0] = shims::give_tensors(apply(values, std::move(map), header, cast));
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
