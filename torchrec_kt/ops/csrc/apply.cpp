#include "apply.h"

#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>

#include "backend.h"
#include "launch.h"

namespace torchrec_kt {
namespace {

using backend::Element;
using shims::Tensor;

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument("torchrec_kt: " + message); }

// The types that the kernel can add and convert.
struct Arithmetic {
  Element element;
  int32_t dtype;
};

// In the order of _CASTS in ops/kernel.py.
const std::vector<Arithmetic>& casts() {
  static const std::vector<Arithmetic> kCasts{
      {Element::kHalf, aoti_torch_dtype_float16()},
      {Element::kBFloat16, aoti_torch_dtype_bfloat16()},
      {Element::kFloat, aoti_torch_dtype_float32()},
      {Element::kDouble, aoti_torch_dtype_float64()}};
  return kCasts;
}

Element arithmetic_element(int32_t dtype) {
  const int64_t place = arithmetic_place(dtype);
  if (place < 0) fail("sums and casts are for float16, bfloat16, float32 and float64 alone");
  return casts()[static_cast<size_t>(place)].element;
}

// A captured graph reads the map on every replay, so it must outlive whoever handed it in.
void keep_for_replay(Tensor map) {
  static std::mutex mutex;
  static auto* kept = new std::vector<Tensor>();  // never freed: the device may be gone by then
  static auto* addresses = new std::set<const char*>();
  const std::lock_guard<std::mutex> lock(mutex);
  if (addresses->insert(map.data()).second) kept->push_back(std::move(map));
}

}  // namespace

int64_t arithmetic_place(int32_t dtype) {
  const std::vector<Arithmetic>& types = casts();
  for (size_t n = 0; n < types.size(); ++n) {
    if (types[n].dtype == dtype) return static_cast<int64_t>(n);
  }
  return -1;
}

std::vector<Tensor> apply(const std::vector<Tensor>& values, Tensor map, Reader reader, int64_t cast) {
  static const int32_t kInt32 = aoti_torch_dtype_int32();
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

}  // namespace torchrec_kt
