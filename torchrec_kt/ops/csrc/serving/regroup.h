// What the implementations of the operators share: the rows of a plan, the checks of a call, types.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace torchrec_kt::serving {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;
using Ints = std::vector<int64_t>;

constexpr int64_t kMoveFields = 5;
constexpr int64_t kFbgemmFields = 6;

// Calls an operator of torch's that has no overloads.
template <class Result, class... Arguments>
Result call(const char* name, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(arguments)> stack{torch::stable::detail::from(arguments)...};
  STD_TORCH_CHECK(
      torch_call_dispatcher(name, "", stack.data(), TORCH_ABI_VERSION) == AOTI_TORCH_SUCCESS, name, " failed");
  return torch::stable::detail::to<Result>(stack[0]);
}

// --- plans -----------------------------------------------------------------------------------------

struct Move {
  int64_t in, out, in_offset, out_offset, length;
};

// The rows of a plan tensor.
struct Rows {
  const int32_t* data;
  int64_t count, stride, step;
};

// Rows that were checked: every one lies inside its tensors.
struct Moves {
  std::vector<std::vector<Move>> per_output;  // in the order stated, without those that move nothing
  Ints used;                                  // inputs, in order
};

inline Moves read_moves(const Rows& rows, const Ints& in_widths, const Ints& out_widths, bool transposed) {
  const auto inputs = static_cast<int64_t>(in_widths.size()), outputs = static_cast<int64_t>(out_widths.size());
  const int64_t in = transposed, out = 1 - in;
  Moves moves;
  moves.per_output.resize(out_widths.size());
  std::vector<bool> used(in_widths.size(), false);
  for (int64_t row = 0; row < rows.count; ++row) {
    const int32_t* field = rows.data + row * rows.stride;
    const Move move{
        field[in * rows.step], field[out * rows.step], field[(2 + in) * rows.step], field[(2 + out) * rows.step],
        field[4 * rows.step]};
    STD_TORCH_CHECK(
        0 <= move.in && move.in < inputs && 0 <= move.out && move.out < outputs,
        "row ", row, " of the plan moves columns from input ", move.in, " to output ", move.out, "; there are ",
        inputs, " inputs and ", outputs, " outputs");
    STD_TORCH_CHECK(
        move.length >= 0 && move.in_offset >= 0 && move.in_offset + move.length <= in_widths[move.in],
        "row ", row, " of the plan reads ", move.length, " columns from column ", move.in_offset, " of input ",
        move.in, ", which has ", in_widths[move.in], " columns");
    STD_TORCH_CHECK(
        move.out_offset >= 0 && move.out_offset + move.length <= out_widths[move.out],
        "row ", row, " of the plan writes ", move.length, " columns to column ", move.out_offset, " of output ",
        move.out, ", which has ", out_widths[move.out], " columns");
    if (move.length > 0) {
      used[move.in] = true;
      moves.per_output[move.out].push_back(move);
    }
  }
  for (size_t i = 0; i < used.size(); ++i) {
    if (used[i]) {
      moves.used.push_back(static_cast<int64_t>(i));
    }
  }
  return moves;
}

// Columns [start, start + length) of an output, with the same sources (input, offset) in the order in which
// they are summed; zeros where there is none.
struct Piece {
  int64_t start, length;
  std::vector<std::pair<int64_t, int64_t>> sources;
};

// Cuts [0, width) where the set of sources changes.
inline std::vector<Piece> cover(const std::vector<Move>& moves, int64_t width) {
  struct Border {
    std::vector<size_t> ends, starts;  // of moves
  };
  std::map<int64_t, Border> borders{{0, {}}, {width, {}}};
  for (size_t n = 0; n < moves.size(); ++n) {
    borders[moves[n].out_offset].starts.push_back(n);
    borders[moves[n].out_offset + moves[n].length].ends.push_back(n);
  }
  std::vector<Piece> pieces;
  std::set<size_t> active;
  for (auto at = borders.begin(), next = std::next(at); next != borders.end(); at = next++) {
    for (const size_t n : at->second.ends) active.erase(n);
    active.insert(at->second.starts.begin(), at->second.starts.end());
    Piece piece{at->first, next->first - at->first, {}};
    for (const size_t n : active) {
      piece.sources.emplace_back(moves[n].in, moves[n].in_offset + piece.start - moves[n].out_offset);
    }
    bool continues = !pieces.empty() && pieces.back().sources.size() == piece.sources.size();
    for (size_t s = 0; continues && s < piece.sources.size(); ++s) {
      const auto& [tensor, offset] = pieces.back().sources[s];
      continues = piece.sources[s] == std::pair{tensor, offset + pieces.back().length};
    }
    if (continues) {
      pieces.back().length += piece.length;
    } else {
      pieces.push_back(std::move(piece));
    }
  }
  return pieces;
}

// --- checks ----------------------------------------------------------------------------------------

inline std::string shape_of(const Tensor& value) {
  std::ostringstream text;
  text << "[";
  for (int64_t d = 0; d < value.dim(); ++d) {
    text << (d ? ", " : "") << value.size(d);
  }
  text << "]";
  return text.str();
}

// What can be said before the plan is read; the widths of the inputs.
inline Ints check_arguments(const Tensors& values, const Tensor& moves, const Ints& out_widths, int64_t key_dim) {
  STD_TORCH_CHECK(!values.empty(), "got no value tensors, so the batch size is unknown; pass at least one");
  STD_TORCH_CHECK(
      moves.scalar_type() == ScalarType::Int && moves.dim() == 2 &&
          (moves.size(1) == kMoveFields || moves.size(1) == kFbgemmFields),
      "the plan tensor has shape ", shape_of(moves), "; expected int32 of shape [moves, ", kMoveFields,
      "] or [moves, ", kFbgemmFields, "]");
  for (size_t t = 0; t < out_widths.size(); ++t) {
    STD_TORCH_CHECK(out_widths[t] >= 0, "the width of output ", t, " is ", out_widths[t], "; expected 0 or more");
  }
  Ints in_widths;
  for (const Tensor& value : values) {
    // An input without that dimension can only be one that no move names.
    const bool exists = -value.dim() <= key_dim && key_dim < value.dim();
    in_widths.push_back(exists ? value.size(key_dim < 0 ? key_dim + value.dim() : key_dim) : 0);
  }
  return in_widths;
}

// Of the inputs in use; the others may have any shape and device. Returns key_dim counted from the front.
inline int64_t check_values(const Tensors& values, const Ints& used, int64_t key_dim) {
  const int64_t reference = used.empty() ? 0 : used[0];
  const Tensor& first = values[reference];
  const int64_t dim = key_dim < 0 ? key_dim + first.dim() : key_dim;
  STD_TORCH_CHECK(
      0 <= dim && dim < first.dim(), "key_dim is ", key_dim, ", but values[", reference, "] has shape ",
      shape_of(first), "; expected a dimension that exists");
  for (const int64_t i : used) {
    bool agrees = values[i].dim() == first.dim();
    for (int64_t d = 0; agrees && d < first.dim(); ++d) {
      agrees = d == dim || values[i].size(d) == first.size(d);
    }
    STD_TORCH_CHECK(
        agrees, "values[", i, "] has shape ", shape_of(values[i]), ", values[", reference, "] has ", shape_of(first),
        "; they must agree in everything but dimension ", dim, ", which holds the columns");
    STD_TORCH_CHECK(
        values[i].device() == first.device(), "values[", i, "] is on another device than values[", reference,
        "]; move them to one device");
  }
  return dim;
}

// --- types -----------------------------------------------------------------------------------------

inline ScalarType promote(ScalarType a, ScalarType b) {
  return a == b ? a : call<ScalarType>("aten::promote_types", a, b);
}

// The outputs' type where none is given. That of all inputs, since it must not depend on the plan's data.
inline ScalarType default_type(const Tensors& values) {
  ScalarType type = values[0].scalar_type();
  for (const Tensor& value : values) {
    type = promote(type, value.scalar_type());
  }
  return type;
}

// The type in which columns are summed: float32 for anything narrower.
inline ScalarType accumulated(ScalarType type) {
  switch (type) {
    case ScalarType::Half:
    case ScalarType::BFloat16:
    case ScalarType::Float8_e4m3fn:
    case ScalarType::Float8_e4m3fnuz:
    case ScalarType::Float8_e5m2:
    case ScalarType::Float8_e5m2fnuz:
    case ScalarType::Float8_e8m0fnu:
      return ScalarType::Float;
    case ScalarType::ComplexHalf:
      return ScalarType::ComplexFloat;
    default:
      return type;
  }
}

// The type in which inputs are summed to outputs of `type`.
inline ScalarType sum_type(const Tensors& values, const Ints& used, ScalarType type) {
  ScalarType wide = accumulated(type);
  for (const int64_t i : used) {
    wide = promote(wide, accumulated(values[i].scalar_type()));
  }
  return wide;
}

// Columns of a value, packed and of a type; a view of the value where it is all that.
inline Tensor columns_of(const Tensor& value, int64_t dim, int64_t start, int64_t length, ScalarType type) {
  Tensor part = value;  // narrow() takes no constant
  return torch::stable::contiguous(torch::stable::to(torch::stable::narrow(part, dim, start, length), type));
}

// total += part, both on the CPU, packed and of the same type, which is one that accumulated() returns.
void add_on_cpu(Tensor& total, const Tensor& part);

// --- implementations ---------------------------------------------------------------------------------

// By the kernel of the device that this library was built with, see regroup_kernel.cpp.
Tensors regroup_by_kernel(
    const Tensors& values,
    const Tensor& moves,
    const Ints& out_widths,
    int64_t key_dim,
    std::optional<ScalarType> dtype,
    bool transposed);

// Whether the kernel is for tensors where this one is.
bool is_beside_kernel(const Tensor& value);

// The dispatch key of its device.
const char* kernel_key();

}  // namespace torchrec_kt::serving
