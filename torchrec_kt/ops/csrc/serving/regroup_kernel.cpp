// torchrec_kt::regroup on the kernel, without Python: what ops/kernel.py and ops/moves.py do around it.
//
// A plan on the device is copied to the host once, a map is encoded and copied to the device once; a call
// after that copies nothing and waits for nothing.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <shared_mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../apply.h"
#include "../backend.h"
#include "../encode.h"
#include "regroup.h"

namespace torchrec_kt::serving {
namespace {

using torch::stable::detail::from;
using torch::stable::detail::to;

constexpr size_t kPlansRead = 64;
constexpr size_t kMapsKept = 64;
constexpr size_t kEncodingsKept = 256;  // of all maps, for every device and alignment that they meet

void refuse_in_capture(const Tensor& beside) {
  const int32_t device = beside.get_device_index();
  STD_TORCH_CHECK(
      !backend::is_capturing(backend::current_stream(device)),
      "torchrec_kt meets this plan, layout, batch alignment or device for the first time while a CUDA graph is "
      "captured, and has to copy its plan first; run the model once before capture");
}

// --- plans -----------------------------------------------------------------------------------------

using Content = std::shared_ptr<const std::string>;

Content content_of(const Tensor& moves) {
  if (!moves.is_cpu()) {
    refuse_in_capture(moves);
  }
  const Tensor rows = torch::stable::contiguous(
      torch::stable::to(moves, torch::stable::Device(torch::headeronly::DeviceType::CPU)));
  const auto* data = static_cast<const char*>(rows.const_data_ptr());
  return std::make_shared<const std::string>(data, static_cast<size_t>(rows.numel()) * sizeof(int32_t));
}

// The content of plan tensors on the device, each copied to the host once, which has to wait for the device.
class PlansRead {
 public:
  Content find(const Tensor& moves) {
    // What torch does not know of leaves no trace: a change of memory on the host, or of an inference tensor.
    if (!is_beside_kernel(moves) || call<bool>("aten::is_inference", moves)) {
      return content_of(moves);
    }
    const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(moves.const_data_ptr()));
    const Ints key{address, moves.size(0), moves.size(1), moves.stride(0), moves.stride(1)};
    const auto version = call<int64_t>("aten::_version", moves);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto found = kept_.find(key);
      if (found != kept_.end()) {
        const auto& [tensor, known_version, content] = found->second;
        // Memory that its tensor did not own, as an AOTInductor model's constants do not, can have become
        // that of another tensor, whose storage is another object.
        if (known_version == version && call<bool>("aten::is_set_to", tensor, moves)) {
          return content;
        }
      }
    }
    const Content content = content_of(moves);
    Tensor whole = moves;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (kept_.size() >= kPlansRead) {
      kept_.clear();
    }
    // A view, which keeps the storage and so its identity, whatever becomes of the tensor.
    kept_.insert_or_assign(
        key, std::tuple{torch::stable::narrow(whole, 0, 0, moves.size(0)), version, content});
    return content;
  }

 private:
  std::mutex mutex_;
  std::map<Ints, std::tuple<Tensor, int64_t, Content>> kept_;
};

// A plan for inputs of certain widths.
struct PlanMap {
  int64_t number;  // like that of no other map
  Ints used, out_widths;
  std::vector<std::vector<Piece>> outputs;
  size_t most_sources = 0;  // of any column
};

PlanMap make_map(
    const std::string& content, int64_t fields, const Ints& in_widths, const Ints& out_widths, bool transposed) {
  std::vector<int32_t> numbers(content.size() / sizeof(int32_t));
  if (!numbers.empty()) {
    std::memcpy(numbers.data(), content.data(), content.size());
  }
  const Rows rows{numbers.data(), static_cast<int64_t>(numbers.size()) / fields, fields, 1};
  const Moves moves = read_moves(rows, in_widths, out_widths, transposed);
  static std::atomic<int64_t> maps_made{0};
  PlanMap map{maps_made++, moves.used, out_widths, {}};
  for (size_t t = 0; t < out_widths.size(); ++t) {
    map.outputs.push_back(cover(moves.per_output[t], out_widths[t]));
    for (const Piece& piece : map.outputs.back()) {
      map.most_sources = std::max(map.most_sources, piece.sources.size());
    }
  }
  return map;
}

class Maps {
 public:
  std::shared_ptr<const PlanMap> find(
      const Tensor& moves, const Ints& in_widths, const Ints& out_widths, bool transposed) {
    const Content content = plans_.find(moves);
    const int64_t fields = moves.size(1);
    Key key{transposed, fields, in_widths, out_widths, *content};
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto found = kept_.find(key);
      if (found != kept_.end()) {
        return found->second;
      }
    }
    auto made = std::make_shared<const PlanMap>(make_map(*content, fields, in_widths, out_widths, transposed));
    const std::lock_guard<std::mutex> lock(mutex_);
    if (kept_.size() >= kMapsKept) {
      kept_.clear();
    }
    return kept_.emplace(std::move(key), std::move(made)).first->second;
  }

 private:
  using Key = std::tuple<bool, int64_t, Ints, Ints, std::string>;
  PlansRead plans_;
  std::mutex mutex_;
  std::map<Key, std::shared_ptr<const PlanMap>> kept_;
};

// --- calls -----------------------------------------------------------------------------------------

std::optional<ScalarType> part_of(ScalarType type) {
  switch (type) {
    case ScalarType::ComplexHalf: return ScalarType::Half;
    case ScalarType::ComplexFloat: return ScalarType::Float;
    case ScalarType::ComplexDouble: return ScalarType::Double;
    default: return std::nullopt;
  }
}

int32_t code_of(ScalarType type) { return static_cast<int32_t>(from(type)); }

int64_t place_of(ScalarType type) { return arithmetic_place(code_of(type)); }

int64_t bytes_of(ScalarType type) { return static_cast<int64_t>(aoti_torch_dtype_element_size(code_of(type))); }

// How the kernel serves a call.
struct Geometry {
  int64_t rows, inner;  // products of the dimensions before and behind the columns
  ScalarType common;    // of the inputs, once converted
  ScalarType in, out;   // as the kernel sees them: of the parts of complex numbers in sums and casts
  bool parts;
  int64_t scale;  // elements of a column in a row
  int max_log;    // log2 of the elements in the longest vector
};

// Nothing where the kernel is not for this call.
std::optional<Geometry> geometry_of(const Tensors& values, const PlanMap& map, int64_t dim, ScalarType type) {
  if (map.used.empty() || !is_beside_kernel(values[map.used[0]])) {
    return std::nullopt;
  }
  const Tensor& first = values[map.used[0]];
  Geometry result{1, 1, first.scalar_type(), type, type, false, 1, 0};
  for (int64_t d = 0; d < first.dim(); ++d) {
    if (d != dim) (d < dim ? result.rows : result.inner) *= first.size(d);
  }
  int64_t width = 0;  // not 0 in the end, since an input is used
  for (const int64_t columns : map.out_widths) {
    if (columns > kMaxPlainColumns - width) return std::nullopt;
    width += columns;
  }
  if (result.rows == 0 || result.inner == 0) return std::nullopt;
  if (result.inner > 1 && result.inner > kMaxColumns / width) return std::nullopt;

  bool mixed = false;
  for (const int64_t i : map.used) {
    mixed = mixed || values[i].scalar_type() != first.scalar_type();
  }
  const bool sums = map.most_sources > 1;
  if (mixed) {
    try {
      for (const int64_t i : map.used) result.common = promote(result.common, values[i].scalar_type());
      // Whole numbers beside halves are added and converted as they are, not as halves.
      if (sums || result.common != type) result.common = promote(accumulated(result.common), type);
    } catch (const std::exception&) {  // there is no such type, though there is one for the outputs
      return std::nullopt;
    }
  }
  result.in = result.common;
  if (sums || result.common != type) {
    const auto in_part = part_of(result.common), out_part = part_of(type);
    result.parts = in_part && out_part;
    if (result.parts) {
      result.in = *in_part;
      result.out = *out_part;
    }
    if (place_of(result.in) < 0 || place_of(result.out) < 0) return std::nullopt;
  }
  const int64_t longest = std::max(bytes_of(result.in), bytes_of(result.out));
  if (longest > 16 || (longest & (longest - 1))) return std::nullopt;
  while ((longest << (result.max_log + 1)) <= 16) ++result.max_log;
  result.scale = result.inner * (result.parts ? 2 : 1);

  // A launch reaches so many tensors, the output among them, once for each of their windows.
  if (map.most_sources > kMaxSlots - 1) {
    bool windows = false;
    for (const int64_t i : map.used) {
      windows = windows || values[i].size(dim) * result.scale > kWindow;
    }
    for (const auto& pieces : map.outputs) {
      for (const Piece& piece : pieces) {
        std::set<int64_t> tensors;
        for (const auto& source : piece.sources) tensors.insert(source.first);
        if ((windows ? piece.sources.size() : tensors.size()) > kMaxSlots - 1) return std::nullopt;
      }
    }
  }
  return result;
}

// --- encoded maps ----------------------------------------------------------------------------------

struct Encoding {
  Tensor map;  // on the device
  std::vector<int64_t> header;
};

// The map as encode() takes it: inputs that it does not use are left out, every column counts `scale` times.
Ints pieces_of(const PlanMap& map, int64_t scale) {
  std::map<int64_t, int64_t> place;
  for (const int64_t i : map.used) place.emplace(i, static_cast<int64_t>(place.size()));
  Ints numbers{static_cast<int64_t>(place.size()), static_cast<int64_t>(map.out_widths.size())};
  for (const int64_t width : map.out_widths) numbers.push_back(width * scale);
  for (size_t t = 0; t < map.outputs.size(); ++t) {
    for (const Piece& piece : map.outputs[t]) {
      const auto sources = static_cast<int64_t>(piece.sources.size());
      numbers.insert(
          numbers.end(), {static_cast<int64_t>(t), piece.start * scale, piece.length * scale, sources});
      for (const auto& [tensor, offset] : piece.sources) {
        numbers.insert(numbers.end(), {place.at(tensor), offset * scale});
      }
    }
  }
  return numbers;
}

Encoding encoded(const PlanMap& map, const Ints& logs, int64_t scale, int max_log, const Tensor& beside) {
  refuse_in_capture(beside);
  const Ints pieces = pieces_of(map, scale);
  Encoded made = encode(
      Reader(pieces.data(), pieces.size(), "pieces"), Reader(logs.data(), logs.size(), "alignment"), max_log);
  Tensor words = torch::stable::empty({static_cast<int64_t>(made.map.size())}, ScalarType::Int);
  std::memcpy(words.mutable_data_ptr(), made.map.data(), made.map.size() * sizeof(uint32_t));
  return {torch::stable::to(words, beside.device()), std::move(made.header)};
}

class Encodings {
 public:
  // Calls `use` with the encoding for tensors that are aligned to 2^log elements, outputs last; no log is greater
  // than that of the longest vector.
  template <class Use>
  Tensors with(
      const PlanMap& map, const Ints& logs, const Geometry& geometry, const Tensor& beside, const Use& use) {
    const Key key{map.number, beside.get_device_index(), geometry.scale, logs};
    while (true) {
      {
        const std::shared_lock<std::shared_mutex> lock(mutex_);
        const auto found = kept_.find(key);
        if (found != kept_.end()) return use(found->second);
      }
      Encoding made = encoded(map, logs, geometry.scale, geometry.max_log, beside);
      const std::unique_lock<std::shared_mutex> lock(mutex_);
      if (kept_.size() >= kEncodingsKept) clear();
      kept_.emplace(key, std::move(made));
    }
  }

 private:
  using Key = std::tuple<int64_t, int32_t, int64_t, Ints>;

  // Nobody launches anything while the lock is held alone. What was launched before, on any stream, may not have
  // read its map yet, and the memory would go to whoever asks next.
  void clear() {
    std::set<int32_t> devices;
    for (const auto& [key, encoding] : kept_) devices.insert(std::get<1>(key));
    for (const int32_t device : devices) backend::wait(device);
    kept_.clear();
  }

  std::shared_mutex mutex_;
  std::map<Key, Encoding> kept_;
};

// log2 of the elements to which rows at this address and stride are aligned.
int64_t log_of(int64_t address, int64_t row_stride, const Geometry& geometry) {
  const int64_t bits = address | (geometry.rows > 1 ? row_stride : 0);
  int64_t log = 0;
  while (log < geometry.max_log && !(bits >> log & 1)) ++log;
  return log;
}

// The inputs in use, [rows, columns], of one type that the kernel knows.
Tensors operands_of(const Tensors& values, const PlanMap& map, int64_t dim, const Geometry& geometry) {
  Tensors operands;
  for (const int64_t i : map.used) {
    Tensor value = values[i];
    if (value.scalar_type() != geometry.common) value = torch::stable::to(value, geometry.common);
    if (geometry.parts) value = call<Tensor>("aten::view_as_real", value);
    if (geometry.parts || values[i].dim() != 2 || dim != 1) {
      value = torch::stable::reshape(value, {geometry.rows, values[i].size(dim) * geometry.scale});
    }
    operands.push_back(std::move(value));
  }
  return operands;
}

Tensors run(const Tensors& values, const PlanMap& map, int64_t dim, const Geometry& geometry) {
  static auto* encodings = new Encodings;  // never freed: the device may be gone by then
  const Tensors operands = operands_of(values, map, dim, geometry);
  const int64_t cast = geometry.in == geometry.out ? -1 : place_of(geometry.out);

  const auto by_alignment = [&](const auto& log_of_input) {
    Ints logs;
    for (const Tensor& operand : operands) logs.push_back(log_of_input(operand));
    for (const int64_t width : map.out_widths) logs.push_back(log_of(0, width * geometry.scale, geometry));
    return encodings->with(map, logs, geometry, operands[0], [&](const Encoding& encoding) {
      std::vector<shims::Tensor> handles;
      for (const Tensor& operand : operands) handles.push_back(shims::take_tensor(from(operand)));
      Tensors outs;
      const Reader header(encoding.header.data(), encoding.header.size(), "header");
      for (shims::Tensor& out : apply(handles, shims::take_tensor(from(encoding.map)), header, cast)) {
        outs.push_back(to<Tensor>(out.release()));
      }
      return outs;
    });
  };
  // As newly allocated tensors are aligned; where a tensor isn't, as they are.
  Tensors outs = by_alignment([&](const Tensor& operand) { return log_of(0, operand.size(1), geometry); });
  if (outs.empty()) {
    outs = by_alignment([&](const Tensor& operand) {
      if (operand.stride(1) != 1) return int64_t{0};
      const auto address = reinterpret_cast<uintptr_t>(operand.const_data_ptr());
      return log_of(static_cast<int64_t>(address) / bytes_of(geometry.in), operand.stride(0), geometry);
    });
  }
  STD_TORCH_CHECK(outs.size() == map.out_widths.size(), "the kernel refuses tensors as they are aligned");

  if (geometry.parts || values[map.used[0]].dim() != 2 || dim != 1) {
    const Tensor& first = values[map.used[0]];
    for (size_t t = 0; t < outs.size(); ++t) {
      Ints shape(first.sizes().begin(), first.sizes().end());
      shape[dim] = map.out_widths[t];
      if (geometry.parts) {
        shape.push_back(2);
        outs[t] = call<Tensor>("aten::view_as_complex", torch::stable::view(outs[t], shape));
      } else {
        outs[t] = torch::stable::view(outs[t], shape);
      }
    }
  }
  return outs;
}

// --- where the kernel is not for a call --------------------------------------------------------------

// The sum of two tensors of one type that accumulated() returns.
Tensor sum_of(const Tensor& total, const Tensor& part) {
  switch (total.scalar_type()) {
    case ScalarType::Float:
    case ScalarType::Double:
    case ScalarType::ComplexFloat:
    case ScalarType::ComplexDouble:
      return torch::stable::subtract(total, part, -1.0);  // which, unlike addition, the stable ABI has
    default: {
      const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
      Tensor sum = torch::stable::to(total, cpu, /*non_blocking=*/false, /*copy=*/true);
      add_on_cpu(sum, torch::stable::to(part, cpu));
      return torch::stable::to(sum, total.device());
    }
  }
}

// Piece by piece.
Tensors run_without(const Tensors& values, const PlanMap& map, int64_t dim, ScalarType type) {
  const Tensor& first = values[map.used.empty() ? 0 : map.used[0]];
  const ScalarType wide = map.most_sources > 1 ? sum_type(values, map.used, type) : type;
  Ints shape(first.sizes().begin(), first.sizes().end());
  Tensors outs;
  for (size_t t = 0; t < map.outputs.size(); ++t) {
    shape[dim] = map.out_widths[t];
    Tensor out = torch::stable::new_zeros(first, shape, type);
    outs.push_back(out);
    if (out.numel() == 0) continue;
    for (const Piece& piece : map.outputs[t]) {
      if (piece.sources.empty()) continue;
      Tensor target = torch::stable::narrow(out, dim, piece.start, piece.length);
      const auto& [tensor, offset] = piece.sources[0];
      if (piece.sources.size() == 1) {
        Tensor value = values[tensor];
        torch::stable::copy_(target, torch::stable::narrow(value, dim, offset, piece.length));
        continue;
      }
      Tensor total = columns_of(values[tensor], dim, offset, piece.length, wide);
      for (size_t s = 1; s < piece.sources.size(); ++s) {
        total = sum_of(total, columns_of(values[piece.sources[s].first], dim, piece.sources[s].second, piece.length, wide));
      }
      torch::stable::copy_(target, total);
    }
  }
  return outs;
}

}  // namespace

const char* kernel_key() { return backend::kDispatchKey; }

bool is_beside_kernel(const Tensor& value) {
  static const bool on_host = std::strcmp(backend::kDispatchKey, "CPU") == 0;
  return on_host ? value.is_cpu() : value.is_cuda();
}

Tensors regroup_by_kernel(
    const Tensors& values,
    const Tensor& moves,
    const Ints& out_widths,
    int64_t key_dim,
    std::optional<ScalarType> dtype,
    bool transposed) {
  static auto* maps = new Maps;
  const Ints in_widths = check_arguments(values, moves, out_widths, key_dim);
  const std::shared_ptr<const PlanMap> map = maps->find(moves, in_widths, out_widths, transposed);
  const int64_t dim = check_values(values, map->used, key_dim);
  const ScalarType type = dtype ? *dtype : default_type(values);
  const std::optional<Geometry> geometry = geometry_of(values, *map, dim, type);
  return geometry ? run(values, *map, dim, *geometry) : run_without(values, *map, dim, type);
}

}  // namespace torchrec_kt::serving
