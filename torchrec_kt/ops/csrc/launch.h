// Launcher arithmetic: from an encoded map and the tensors of one call to kernel parameters and grid
// sizes. No torch, no CUDA runtime; the same on the device and in the host build.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "encode.h"
#include "kernel.h"

namespace torchrec_kt {

struct TensorView {  // of [rows, columns]
  char* data;
  int64_t columns;
  int64_t row_stride;     // elements
  int64_t column_stride;  // elements
};

// The first part of an encoded map's header; refers to the caller's memory.
struct Header {
  int64_t n_in;
  int64_t n_out;
  int64_t map_words;
  bool has_sums;
  const int64_t* out_widths;
  const int64_t* needed;      // columns of each input
  const int64_t* needed_log;  // and alignment, log2 of elements
};

inline Header read_header(Reader& reader) {
  Header header;
  header.n_in = reader.next(0, static_cast<int64_t>(reader.left()), "number of inputs");
  header.n_out = reader.next(0, static_cast<int64_t>(reader.left()), "number of outputs");
  header.map_words = reader.next(0, INT32_MAX, "size of the map");
  header.has_sums = reader.next(0, 1, "whether there are sums") != 0;
  header.out_widths = reader.take(static_cast<size_t>(header.n_out));
  header.needed = reader.take(static_cast<size_t>(header.n_in));
  header.needed_log = reader.take(0);
  for (int64_t i = 0; i < header.n_in; ++i) reader.next(0, 4, "alignment of an input");
  return header;
}

inline int log2_of(int64_t power) {
  int log = 0;
  while ((int64_t{1} << log) < power) ++log;
  return log;
}

// Whether vectors of 2^log_elements elements can be moved.
inline bool is_aligned(const TensorView& view, int item_bytes, int log_elements) {
  if (log_elements == 0) return true;
  const uint64_t mask = (uint64_t{1} << log_elements) * static_cast<uint64_t>(item_bytes) - 1;
  return view.column_stride == 1 && (reinterpret_cast<uintptr_t>(view.data) & mask) == 0 &&
      (static_cast<uint64_t>(view.row_stride) * static_cast<uint64_t>(item_bytes) & mask) == 0;
}

// What a call needs to know of the device.
struct Shape {
  int64_t rows;
  int in_bytes;   // of an element
  int out_bytes;
  int64_t resident_threads;  // how many threads the device holds at once
};

// Divides n < 2^31 by `count` as (n * multiplier) >> (32 + shift).
inline void set_division(Segment& segment) {
  if (segment.count == 1) {
    segment.multiplier = 0;
    segment.shift = 0;
    return;
  }
  const int log = log2_of(segment.count);
  segment.shift = static_cast<uint8_t>(log - 1);
  segment.multiplier =
      static_cast<uint32_t>(((uint64_t{1} << (31 + log)) + segment.count - 1) / segment.count);
}

// Rows that a thread walks: more where that leaves the device many times full, since the map is read once a
// walk; no more than that, since the last blocks leave a part of the device idle. And enough to keep the
// number of threads below what a launch can have.
inline uint32_t tile_rows(int64_t rows, int64_t vectors, int64_t resident_threads) {
  constexpr int64_t kStep = 8;
  constexpr int64_t kMost = 64;
  constexpr int64_t kWaves = 16;
  constexpr int64_t kMaxThreads = int64_t{1} << 30;
  const auto threads = [&](int64_t tile) { return vectors * ((rows + tile - 1) / tile); };
  int64_t tile = kStep;
  while (tile < kMost && threads(2 * tile) >= kWaves * resident_threads) tile *= 2;
  while (threads(tile) > kMaxThreads) tile *= 2;
  return static_cast<uint32_t>(tile);
}

// Fills the parameters of the next launch in and returns its number of blocks; -1 where a tensor is
// not aligned as the map takes for granted.
inline int64_t next_launch(
    Reader& reader,
    const Header& header,
    const uint32_t* map,
    const TensorView* tensors,
    const Shape& shape,
    Params& params) {
  const int64_t begin = 2 * reader.next(0, header.map_words / 2, "start of a launch's map");
  const int64_t words = reader.next(0, header.map_words - begin, "words of a launch's map");
  params.n_slots = static_cast<uint32_t>(reader.next(0, kMaxSlots, "slots of a launch"));
  params.n_segments = static_cast<uint32_t>(reader.next(0, kMaxSegments, "segments of a launch"));
  params.map = map + begin;
  params.map_words = static_cast<uint32_t>(words);
  params.rows = shape.rows;
  params.log_item_bytes = static_cast<uint8_t>(log2_of(shape.out_bytes));
  bool aligned = true;
  for (uint32_t s = 0; s < params.n_slots; ++s) {
    const int64_t tensor = reader.next(0, header.n_in + header.n_out - 1, "tensor of a slot");
    const int64_t window = reader.next(0, int64_t{1} << 32, "window of a slot");
    const int log = static_cast<int>(reader.next(0, 4, "alignment of a slot"));
    const TensorView& view = tensors[tensor];
    const int item_bytes = tensor < header.n_in ? shape.in_bytes : shape.out_bytes;
    aligned = aligned && is_aligned(view, item_bytes, log);
    const int64_t left = view.columns - window * kWindow;
    Slot& slot = params.slots[s];
    slot.columns = left <= 0 ? 0 : static_cast<uint32_t>(left < kWindow ? left : kWindow);
    slot.row_stride = view.row_stride * item_bytes;
    slot.column_stride = view.column_stride * item_bytes;
    slot.data = slot.columns ? view.data + window * kWindow * slot.column_stride : nullptr;
    slot.load_log = static_cast<int8_t>(tensor < header.n_in ? log : -1);
    slot.store_log = static_cast<int8_t>(tensor < header.n_in ? -1 : log);
    slot.unused = 0;
  }
  int64_t vectors = 0;
  for (uint32_t s = 0; s < params.n_segments; ++s) {
    Segment& segment = params.segments[s];
    segment.kind = static_cast<Kind>(reader.next(kZero, kSum, "kind of a segment"));
    segment.log_elements = static_cast<uint8_t>(reader.next(0, 4, "vector length of a segment"));
    segment.begin = static_cast<uint32_t>(reader.next(0, words / 2, "start of a segment"));
    segment.count = static_cast<uint32_t>(reader.next(1, words / 2 - segment.begin, "length of a segment"));
    segment.unused = 0;
    set_division(segment);
    vectors += segment.count;
  }
  // No outputs hold that many elements, so only a header that isn't theirs comes here.
  if (shape.rows > (int64_t{1} << 60) / std::max<int64_t>(vectors, 1)) {
    throw std::invalid_argument("header: more vectors than any tensor has");
  }
  params.tile_rows = tile_rows(shape.rows, vectors, shape.resident_threads);
  const int64_t tiles = (shape.rows + params.tile_rows - 1) / params.tile_rows;
  int64_t blocks = 0;
  for (uint32_t s = 0; s < params.n_segments; ++s) {
    Segment& segment = params.segments[s];
    segment.first_block = static_cast<uint32_t>(blocks);
    blocks += (segment.count * tiles + kThreads - 1) / kThreads;
  }
  return aligned ? blocks : -1;
}

// Calls `launch(params, blocks)` for each launch of the map. Returns false, before any launch, where a
// tensor is not aligned as the map takes for granted; throws before any launch where the header is
// not sound.
template <class Launch>
bool for_each_launch(
    Reader reader,
    const Header& header,
    const uint32_t* map,
    const TensorView* tensors,
    const Shape& shape,
    const Launch& launch) {
  const int64_t n_launches = reader.next(0, static_cast<int64_t>(reader.left()), "number of launches");
  Params params;
  // A single launch is checked by the time it is filled in; several are gone through once before.
  for (bool dry : {true, false}) {
    if (dry && n_launches <= 1) continue;
    Reader launches = reader;
    for (int64_t i = 0; i < n_launches; ++i) {
      const int64_t blocks = next_launch(launches, header, map, tensors, shape, params);
      if (blocks < 0) return false;
      if (blocks > 0 && !dry) launch(params, static_cast<uint32_t>(blocks));
    }
  }
  return true;
}

}  // namespace torchrec_kt
