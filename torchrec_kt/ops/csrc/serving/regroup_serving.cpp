// The operators for processes without Python: their schemas, and implementations for CPU tensors.
//
// In a Python process `import torchrec_kt` defines the operators; a model server written in C++ loads
// this library instead, before it loads a model that calls them. Built on the LibTorch stable ABI, so
// one binary serves every torch from 2.11 on. Inference only: there is no gradient.
//
// CUDA: built with TORCHREC_KT_CUDA=ON, the library holds the CUDA kernel and regroup_kernel.cpp, which makes
// and keeps the maps for it, and is all that a server loads for models on the CPU and on GPUs. It also loads
// where there is no GPU and beside a CPU build of torch. Load models outside of c10::InferenceMode: plan tensors
// made inside are read anew in every call, which waits for the device.

#include <algorithm>
#include <array>
#include <complex>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "regroup.h"

namespace torchrec_kt::serving {
namespace {

using Names = std::vector<std::vector<std::string>>;
using Widths = std::vector<Ints>;

constexpr size_t kPlansKept = 64;

// --- maps ------------------------------------------------------------------------------------------

// Columns with several sources.
struct Sum {
  int64_t out;
  Piece piece;
};

// What to do for one call. Copies write the first source of every column that has one.
struct CopiesAndSums {
  std::vector<Move> copies;
  std::vector<Sum> sums;
  std::vector<bool> has_gap;  // per output
};

// Adjacent columns that stay adjacent are one copy.
void append(std::vector<Move>& copies, const Move& move) {
  if (!copies.empty()) {
    Move& last = copies.back();
    if (last.in == move.in && last.out == move.out && last.in_offset + last.length == move.in_offset &&
        last.out_offset + last.length == move.out_offset) {
      last.length += move.length;
      return;
    }
  }
  copies.push_back(move);
}

CopiesAndSums copies_and_sums(const Moves& moves, const Ints& out_widths) {
  CopiesAndSums map;
  for (size_t out = 0; out < out_widths.size(); ++out) {
    std::vector<Move> sorted = moves.per_output[out];
    std::stable_sort(sorted.begin(), sorted.end(), [](const Move& a, const Move& b) {
      return a.out_offset < b.out_offset;
    });
    int64_t end = 0;
    bool gap = false, overlap = false;
    for (const Move& move : sorted) {
      gap |= move.out_offset > end;
      overlap |= move.out_offset < end;
      end = std::max(end, move.out_offset + move.length);
    }
    map.has_gap.push_back(gap || end < out_widths[out]);
    if (!overlap) {
      for (const Move& move : sorted) {
        append(map.copies, move);
      }
      continue;
    }
    const auto place = static_cast<int64_t>(out);
    for (Piece& piece : cover(moves.per_output[out], out_widths[out])) {
      if (!piece.sources.empty()) {
        const auto [tensor, offset] = piece.sources[0];
        append(map.copies, {tensor, place, offset, piece.start, piece.length});
      }
      if (piece.sources.size() > 1) {
        map.sums.push_back({place, std::move(piece)});
      }
    }
  }
  return map;
}

// --- moving ----------------------------------------------------------------------------------------

struct Source {
  const char* data;
  int64_t row_bytes;
};

// The stride, in elements, of the rows that the dimensions before `dim` make up, if they have a common
// one and the dimensions from `dim` on are packed.
std::optional<int64_t> row_stride(const Tensor& value, int64_t dim) {
  int64_t packed = 1;
  for (int64_t d = value.dim() - 1; d >= dim; --d) {
    if (value.size(d) != 1 && value.stride(d) != packed) {
      return std::nullopt;
    }
    packed *= value.size(d);
  }
  std::optional<int64_t> stride, expected;
  for (int64_t d = dim - 1; d >= 0; --d) {
    if (value.size(d) == 1) {
      continue;
    }
    if (expected && value.stride(d) != *expected) {
      return std::nullopt;
    }
    stride = stride ? stride : value.stride(d);
    expected = value.stride(d) * value.size(d);
  }
  return stride.value_or(0);
}

template <class T>
void add(T* total, const T* part, int64_t count) {
  for (int64_t n = 0; n < count; ++n) {
    total[n] = static_cast<T>(total[n] + part[n]);
  }
}

template <>
void add<bool>(bool* total, const bool* part, int64_t count) {
  for (int64_t n = 0; n < count; ++n) {
    total[n] = total[n] || part[n];
  }
}

}  // namespace

void add_on_cpu(Tensor& total, const Tensor& part) {
  void* a = total.mutable_data_ptr();
  const void* b = part.const_data_ptr();
  const int64_t n = total.numel();
  switch (total.scalar_type()) {
#define TORCHREC_KT_CASE(type, ctype)                              \
  case ScalarType::type:                                           \
    return add(static_cast<ctype*>(a), static_cast<const ctype*>(b), n)
    TORCHREC_KT_CASE(Float, float);
    TORCHREC_KT_CASE(Double, double);
    TORCHREC_KT_CASE(ComplexFloat, std::complex<float>);
    TORCHREC_KT_CASE(ComplexDouble, std::complex<double>);
    TORCHREC_KT_CASE(Bool, bool);
    TORCHREC_KT_CASE(Char, int8_t);
    TORCHREC_KT_CASE(Short, int16_t);
    TORCHREC_KT_CASE(Int, int32_t);
    TORCHREC_KT_CASE(Long, int64_t);
    TORCHREC_KT_CASE(Byte, uint8_t);
    TORCHREC_KT_CASE(UInt16, uint16_t);
    TORCHREC_KT_CASE(UInt32, uint32_t);
    TORCHREC_KT_CASE(UInt64, uint64_t);
#undef TORCHREC_KT_CASE
    default:
      STD_TORCH_CHECK(false, "columns of this type cannot be summed; no two rows of the plan may overlap");
  }
}

namespace {

Tensors regroup_cpu(
    const Tensors& values,
    Tensor moves,
    const Ints& out_widths,
    int64_t key_dim,
    std::optional<ScalarType> dtype,
    bool transposed) {
  const Ints in_widths = check_arguments(values, moves, out_widths, key_dim);
  if (!moves.is_cpu()) {
    moves = torch::stable::to(moves, torch::stable::Device(torch::headeronly::DeviceType::CPU));
  }
  const Rows plan{moves.const_data_ptr<int32_t>(), moves.size(0), moves.stride(0), moves.stride(1)};
  const Moves checked = read_moves(plan, in_widths, out_widths, transposed);
  const CopiesAndSums map = copies_and_sums(checked, out_widths);
  const Ints& used = checked.used;
  const int64_t dim = check_values(values, used, key_dim);
  const Tensor& first = values[used.empty() ? 0 : used[0]];
  STD_TORCH_CHECK(
      first.is_cpu(), "the values are on a device that this library was not built for; with TORCHREC_KT_CUDA=ON it "
      "takes CUDA tensors, too");
  const ScalarType type = dtype ? *dtype : default_type(values);

  int64_t rows = 1, inner = 1;
  Ints shape;
  for (int64_t d = 0; d < first.dim(); ++d) {
    shape.push_back(first.size(d));
    (d < dim ? rows : inner) *= d == dim ? 1 : first.size(d);
  }
  Tensors outs;
  for (size_t t = 0; t < out_widths.size(); ++t) {
    shape[dim] = out_widths[t];
    outs.push_back(
        map.has_gap[t] ? torch::stable::new_zeros(first, shape, type)
                       : torch::stable::new_empty(first, shape, type));
  }

  // Casts, and inputs of other strides than rows of columns, take a copy first.
  Tensors ready = values;
  std::vector<Source> from(values.size(), Source{nullptr, 0});
  for (int64_t i : used) {
    if (ready[i].scalar_type() != type) {
      ready[i] = torch::stable::to(ready[i], type);
    }
    std::optional<int64_t> stride = row_stride(ready[i], dim);
    if (!stride) {
      ready[i] = torch::stable::contiguous(ready[i]);
      stride = row_stride(ready[i], dim);
    }
    from[i] = {
        static_cast<const char*>(ready[i].const_data_ptr()),
        *stride * static_cast<int64_t>(ready[i].element_size())};
  }
  const int64_t column_bytes = inner * static_cast<int64_t>(outs.empty() ? 0 : outs[0].element_size());
  struct Target {
    char* data;
    int64_t row_bytes;
  };
  std::vector<Target> to;
  int64_t bytes_a_row = 1;
  for (size_t t = 0; t < outs.size(); ++t) {
    to.push_back({static_cast<char*>(outs[t].mutable_data_ptr()), out_widths[t] * column_bytes});
    bytes_a_row += to.back().row_bytes;
  }
  const int64_t grain = std::max<int64_t>(1, (int64_t{1} << 16) / bytes_a_row);
  if (column_bytes > 0) {
    torch::stable::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        for (const Move& copy : map.copies) {
          std::memcpy(
              to[copy.out].data + row * to[copy.out].row_bytes + copy.out_offset * column_bytes,
              from[copy.in].data + row * from[copy.in].row_bytes + copy.in_offset * column_bytes,
              static_cast<size_t>(copy.length * column_bytes));
        }
      }
    });
  }

  if (!map.sums.empty()) {
    const ScalarType wide = sum_type(values, used, type);
    for (const auto& [out, piece] : map.sums) {
      const auto source = [&](size_t s) {
        return columns_of(values[piece.sources[s].first], dim, piece.sources[s].second, piece.length, wide);
      };
      Tensor total = torch::stable::clone(source(0));
      for (size_t s = 1; s < piece.sources.size(); ++s) {
        add_on_cpu(total, source(s));
      }
      Tensor target = torch::stable::narrow(outs[out], dim, piece.start, piece.length);
      torch::stable::copy_(target, total);
    }
  }
  return outs;
}

// --- plans by name ---------------------------------------------------------------------------------

struct Plan {
  std::vector<std::array<int32_t, kFbgemmFields>> rows;
  Ints in_widths, out_widths;
};

Plan build_plan(const Names& keys, const Widths& lengths, const Names& groups) {
  STD_TORCH_CHECK(
      keys.size() == lengths.size(), "got ", keys.size(), " lists of keys and ", lengths.size(),
      " lists of lengths; expected one each");
  struct Place {
    int64_t tensor, offset, width;
    bool repeated;
    int64_t last_use;
  };
  std::unordered_map<std::string, Place> places;
  Plan plan;
  for (size_t i = 0; i < keys.size(); ++i) {
    STD_TORCH_CHECK(
        keys[i].size() == lengths[i].size(), "input ", i, " has ", keys[i].size(), " keys but ", lengths[i].size(),
        " widths; expected one width per key");
    int64_t offset = 0;
    for (size_t k = 0; k < keys[i].size(); ++k) {
      const int64_t width = lengths[i][k];
      STD_TORCH_CHECK(width >= 0, "key '", keys[i][k], "' of input ", i, " has width ", width, "; expected 0 or more");
      auto [found, is_new] = places.try_emplace(keys[i][k], Place{static_cast<int64_t>(i), offset, width, false, -1});
      found->second.repeated |= !is_new;
      offset += width;
    }
    STD_TORCH_CHECK(offset <= INT32_MAX, "input ", i, " has ", offset, " columns; at most ", INT32_MAX, " are supported");
    plan.in_widths.push_back(offset);
  }
  int64_t uses = 0;
  for (const auto& group : groups) {
    uses += static_cast<int64_t>(group.size());
  }
  for (size_t g = 0; g < groups.size(); ++g) {
    int64_t offset = 0;
    for (const std::string& key : groups[g]) {
      const auto found = places.find(key);
      STD_TORCH_CHECK(found != places.end(), "group ", g, " names the key '", key, "', which no input holds");
      Place& place = found->second;
      STD_TORCH_CHECK(
          !place.repeated, "group ", g, " names the key '", key,
          "', which appears more than once in the inputs; it is not clear which one is meant");
      const auto row = static_cast<int64_t>(plan.rows.size());
      int64_t link = 0;
      if (place.last_use >= 0) {  // as FBGEMM links the uses of a key
        auto& before = plan.rows[place.last_use];
        before[5] = static_cast<int32_t>(before[5] == 0 ? row : -row);
        link = -uses;
      }
      place.last_use = row;
      plan.rows.push_back(
          {static_cast<int32_t>(place.tensor), static_cast<int32_t>(g), static_cast<int32_t>(place.offset),
           static_cast<int32_t>(offset), static_cast<int32_t>(place.width), static_cast<int32_t>(link)});
      offset += place.width;
      STD_TORCH_CHECK(offset <= INT32_MAX, "group ", g, " has more than ", INT32_MAX, " columns");
    }
    plan.out_widths.push_back(offset);
  }
  return plan;
}

Tensor cpu_int32(Ints shape, const int32_t* data, size_t count) {
  Tensor tensor = torch::stable::empty(shape, ScalarType::Int);
  if (count) {
    std::memcpy(tensor.mutable_data_ptr(), data, count * sizeof(int32_t));
  }
  return tensor;
}

Tensor rows_tensor(const Plan& plan) {
  return cpu_int32(
      {static_cast<int64_t>(plan.rows.size()), kFbgemmFields}, plan.rows.empty() ? nullptr : plan.rows[0].data(),
      plan.rows.size() * kFbgemmFields);
}

// The plans used last, with their tensors: the same object every time, for implementations that read
// a plan once for each tensor.
class Plans {
 public:
  std::pair<Tensor, Ints> find(const Names& keys, const Widths& lengths, const Names& groups) {
    std::string text;
    const auto write = [&text](const Names& names) {
      for (const auto& row : names) {
        for (const std::string& name : row) {
          text += std::to_string(name.size()) + ":" + name;
        }
        text += '/';
      }
      text += '\n';
    };
    write(keys);
    for (const Ints& row : lengths) {
      for (int64_t length : row) {
        text += std::to_string(length) + ",";
      }
      text += '/';
    }
    write(groups);
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = kept_.find(text);
    if (found != kept_.end()) {
      return found->second;
    }
    const Plan plan = build_plan(keys, lengths, groups);
    std::pair<Tensor, Ints> entry{rows_tensor(plan), plan.out_widths};
    if (order_.size() == kPlansKept) {
      kept_.erase(order_.front());
      order_.pop_front();
    }
    order_.push_back(text);
    return kept_.emplace(std::move(text), std::move(entry)).first->second;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::string, std::pair<Tensor, Ints>> kept_;
  std::deque<std::string> order_;
};

// --- operators ---------------------------------------------------------------------------------------

Tensors regroup_anywhere(
    const Tensors& values,
    const Tensor& moves,
    const Ints& out_widths,
    int64_t key_dim,
    std::optional<ScalarType> dtype,
    bool transposed) {
#if defined(TORCHREC_KT_KERNEL)
  if (std::any_of(values.begin(), values.end(), is_beside_kernel)) {
    return regroup_by_kernel(values, moves, out_widths, key_dim, dtype, transposed);
  }
#endif
  return regroup_cpu(values, moves, out_widths, key_dim, dtype, transposed);
}

Tensors regroup(Tensors values, Tensor moves, Ints out_widths, int64_t key_dim, std::optional<ScalarType> dtype) {
  return regroup_anywhere(values, moves, out_widths, key_dim, dtype, false);
}

Tensors regroup_transposed(
    Tensors values,
    Tensor moves,
    Ints out_widths,
    int64_t key_dim,
    std::optional<ScalarType> dtype) {
  return regroup_anywhere(values, moves, out_widths, key_dim, dtype, true);
}

Tensors regroup_by_keys(Tensors values, Names keys, Widths lengths, Names groups, int64_t key_dim) {
  static Plans* plans = new Plans;  // outlives whatever still runs at exit
  STD_TORCH_CHECK(
      values.size() == keys.size(), "got ", values.size(), " value tensors and ", keys.size(),
      " lists of keys; expected one list each");
  const auto [moves, out_widths] = plans->find(keys, lengths, groups);
  return regroup_anywhere(values, moves, out_widths, key_dim, std::nullopt, false);
}

void check_batches(const Tensors& values) {
  for (size_t i = 0; i < values.size(); ++i) {
    STD_TORCH_CHECK(
        values[i].dim() == 2, "values[", i, "] has shape ", shape_of(values[i]), "; expected [batch, width]");
  }
}

Tensors regroup_keyed_tensor(Tensors values, Names keys, Widths lengths, Names groups) {
  check_batches(values);
  return regroup_by_keys(std::move(values), std::move(keys), std::move(lengths), std::move(groups), 1);
}

Tensors permute_multi_embedding(
    Tensors values,
    Tensor permutes,
    Tensor in_shapes,
    Tensor out_shapes,
    Ints out_lengths) {
  check_batches(values);
  STD_TORCH_CHECK(
      permutes.dim() == 2 && permutes.size(1) == kFbgemmFields, "permutes has shape ", shape_of(permutes),
      "; expected int32 of shape [rows, ", kFbgemmFields, "]");
  STD_TORCH_CHECK(
      in_shapes.dim() == 1 && in_shapes.size(0) == static_cast<int64_t>(values.size()), "in_shapes has shape ",
      shape_of(in_shapes), "; expected [", values.size(), "]");
  STD_TORCH_CHECK(
      out_shapes.dim() == 1 && out_shapes.size(0) == static_cast<int64_t>(out_lengths.size()),
      "out_shapes has shape ", shape_of(out_shapes), "; expected [", out_lengths.size(), "]");
  return regroup_anywhere(values, permutes, out_lengths, 1, std::nullopt, false);
}

std::tuple<Tensor, Tensor, Tensor, Ints> kt_regroup_arguments(
    Tensor embs,
    Names keys,
    Widths lengths,
    Names groups) {
  const Plan plan = build_plan(keys, lengths, groups);
  const auto beside = [&embs](Tensor tensor) {
    return embs.is_cpu() ? tensor : torch::stable::to(tensor, embs.device());
  };
  const auto vector = [](const Ints& widths) {
    const std::vector<int32_t> narrow(widths.begin(), widths.end());
    return cpu_int32({static_cast<int64_t>(narrow.size())}, narrow.data(), narrow.size());
  };
  return {beside(rows_tensor(plan)), beside(vector(plan.in_widths)), beside(vector(plan.out_widths)), plan.out_widths};
}

// --- registration ----------------------------------------------------------------------------------

// Not by the usual macros: where the operators exist already, these would end the process.
bool register_operators() {
  using torch::stable::detail::StableLibrary;
  auto* schemas = new StableLibrary(StableLibrary::Kind::FRAGMENT, "torchrec_kt", nullptr, __FILE__, __LINE__);
  const char* arguments =
      "(Tensor[] values, Tensor moves, SymInt[] out_widths, int key_dim=1, ScalarType? dtype=None) -> Tensor[]";
  try {
    schemas->def((std::string("regroup") + arguments).c_str());
  } catch (const std::exception&) {
    std::fprintf(
        stderr,
        "torchrec_kt serving library: the operators are defined already, by the Python package or by another copy of "
        "this library; those stay in use and this library does nothing\n");
    delete schemas;
    return false;
  }
  schemas->def((std::string("regroup_transposed") + arguments).c_str());
  schemas->def(
      "regroup_by_keys(Tensor[] values, str[][] keys, int[][] lengths, str[][] groups, int key_dim=1) -> Tensor[]");
  schemas->def(
      "regroup_keyed_tensor(Tensor[] pooled_embs, str[][] keys, int[][] lengths, str[][] groups) -> Tensor[]");
  schemas->def(
      "permute_multi_embedding(Tensor[] pooled_embs, Tensor permutes, Tensor in_shapes, Tensor out_shapes, SymInt[] "
      "out_lengths) -> Tensor[]");
  schemas->def(
      "kt_regroup_arguments(Tensor embs, str[][] keys, int[][] lengths, str[][] groups) -> (Tensor, Tensor, Tensor, "
      "int[])");
  std::set<std::string> keys{"CPU"};
#if defined(TORCHREC_KT_KERNEL)
  keys.insert(kernel_key());
#endif
  for (const std::string& key : keys) {
    auto* device = new StableLibrary(StableLibrary::Kind::IMPL, "torchrec_kt", key.c_str(), __FILE__, __LINE__);
    device->impl("regroup", TORCH_BOX(&regroup));
    device->impl("regroup_transposed", TORCH_BOX(&regroup_transposed));
  }
  auto* any = new StableLibrary(
      StableLibrary::Kind::IMPL, "torchrec_kt", "CompositeExplicitAutograd", __FILE__, __LINE__);
  any->impl("regroup_by_keys", TORCH_BOX(&regroup_by_keys));
  any->impl("regroup_keyed_tensor", TORCH_BOX(&regroup_keyed_tensor));
  any->impl("permute_multi_embedding", TORCH_BOX(&permute_multi_embedding));
  any->impl("kt_regroup_arguments", TORCH_BOX(&kt_regroup_arguments));
  return true;
}

const bool registered = register_operators();

}  // namespace
}  // namespace torchrec_kt::serving
