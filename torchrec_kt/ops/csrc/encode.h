// From the pieces of a column map to what the kernel reads: entries for every vector of columns, and
// the launches that they are for. No torch. Runs on the host, once per map.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernel.h"

namespace torchrec_kt {

// Maps are not made for more columns than this, which would make them larger than what they move: of maps
// in which every column counts for several, for the dimensions behind it, and of all others. The same figures
// are in ops/kernel.py.
constexpr int64_t kMaxColumns = int64_t{1} << 22;
constexpr int64_t kMaxPlainColumns = int64_t{1} << 25;

// Reads a list of integers front to back; running out of them is an error, not a wild read.
class Reader {
 public:
  Reader(const int64_t* data, size_t size, const char* name) : at_(data), end_(data + size), name_(name) {}

  int64_t next() {
    if (at_ == end_) throw std::invalid_argument(std::string(name_) + " ends early");
    return *at_++;
  }

  // An integer within [low, high].
  int64_t next(int64_t low, int64_t high, const char* what) {
    const int64_t value = next();
    if (value < low || value > high) {
      throw std::invalid_argument(
          std::string(name_) + ": " + what + " is " + std::to_string(value) + "; expected " +
          std::to_string(low) + " to " + std::to_string(high));
    }
    return value;
  }

  // The next `count` integers, in place.
  const int64_t* take(size_t count) {
    if (left() < count) throw std::invalid_argument(std::string(name_) + " ends early");
    at_ += count;
    return at_ - count;
  }

  size_t left() const { return static_cast<size_t>(end_ - at_); }

 private:
  const int64_t* at_;
  const int64_t* end_;
  const char* name_;
};

// The encoded form is two lists of integers. The map goes to the device:
//
//   for each launch: (source, destination) for each vector, segment after segment; the lists of sums
//
// The header stays on the host:
//
//   n_in, n_out, map_words, has_sums, widths[n_out], needed columns[n_in], needed alignment[n_in] (log2 of
//   elements), n_launches, then, for each launch: map_begin (in pairs of words), map_words, n_slots, n_segments,
//     slots:    tensor (inputs first, then outputs), window, alignment (log2 of elements)
//     segments: kind, log2 of elements, begin, count
struct Encoded {
  std::vector<uint32_t> map;
  std::vector<int64_t> header;
};

class Encoder {
 public:
  Encoder(std::vector<int64_t> out_widths, int64_t n_in, std::vector<int64_t> alignment, int max_log)
      : out_widths_(std::move(out_widths)),
        n_in_(n_in),
        alignment_(std::move(alignment)),
        max_log_(max_log),
        needed_(static_cast<size_t>(n_in), 0),
        needed_log_(static_cast<size_t>(n_in), 0) {}

  // Columns [start, start + length) of output `out` come from `sources`, pairs (input, offset).
  void add(int64_t out, int64_t start, int64_t length, const std::vector<std::pair<int64_t, int64_t>>& sources) {
    for (const auto& [tensor, offset] : sources) {
      int64_t& needed = needed_[static_cast<size_t>(tensor)];
      needed = std::max(needed, offset + length);
    }
    // No part crosses a window, on any side.
    while (length > 0) {
      int64_t part = std::min(length, kWindow - start % kWindow);
      std::vector<std::pair<int64_t, int64_t>> from = sources;
      for (auto& [tensor, offset] : from) {
        offset += done_;
        part = std::min(part, kWindow - offset % kWindow);
      }
      add_part(out, start, part, from);
      start += part;
      length -= part;
      done_ += part;
    }
    done_ = 0;
  }

  Encoded finish() {
    close_launch();
    Encoded result;
    result.header = {
        n_in_, static_cast<int64_t>(out_widths_.size()), static_cast<int64_t>(map_.size()), has_sums_};
    result.header.insert(result.header.end(), out_widths_.begin(), out_widths_.end());
    result.header.insert(result.header.end(), needed_.begin(), needed_.end());
    result.header.insert(result.header.end(), needed_log_.begin(), needed_log_.end());
    result.header.push_back(n_launches_);
    result.header.insert(result.header.end(), launches_.begin(), launches_.end());
    result.map = std::move(map_);
    return result;
  }

 private:
  struct WindowOf {
    int64_t tensor;
    int64_t window;
    int log_needed;
  };
  static constexpr size_t kMaxWords = size_t{1} << 30;

  void add_part(
      int64_t out, int64_t start, int64_t length, const std::vector<std::pair<int64_t, int64_t>>& sources) {
    reserve_slots(out, start, sources);
    // The longest vector on which all sides agree, once the start is aligned.
    int log = std::min(max_log_, alignment_of(n_in_ + out));
    for (const auto& [tensor, offset] : sources) {
      log = std::min(log, alignment_of(tensor));
      while ((start - offset) & ((int64_t{1} << log) - 1)) --log;
    }
    const int to = find_slot(n_in_ + out, start / kWindow);
    std::vector<int> from;
    for (const auto& [tensor, offset] : sources) from.push_back(find_slot(tensor, offset / kWindow));

    const Kind kind = sources.empty() ? kZero : (sources.size() == 1 ? kCopy : kSum);
    has_sums_ = has_sums_ || kind == kSum;
    int longest = 0;
    for (int64_t done = 0; done < length;) {
      const int64_t at = start + done;
      int step = log;
      while ((at & ((int64_t{1} << step) - 1)) || done + (int64_t{1} << step) > length) --step;
      uint32_t source = 0;
      if (kind == kCopy) {
        source = reference(from[0], sources[0].second + done, step);
      } else if (kind == kSum) {
        source = static_cast<uint32_t>(lists_.size());
        lists_.push_back(static_cast<uint32_t>(sources.size()));
        for (size_t k = 0; k < from.size(); ++k) {
          lists_.push_back(reference(from[k], sources[k].second + done, step));
        }
      }
      lanes_[kind][step].push_back(source);
      lanes_[kind][step].push_back(reference(to, at, step));
      if ((words_ += 2 + (kind == kSum ? 1 + sources.size() : 0)) > kMaxWords) {
        throw std::length_error("the map takes more than " + std::to_string(kMaxWords) + " words");
      }
      longest = std::max(longest, step);
      done += int64_t{1} << step;
    }
    slots_[to].log_needed = std::max(slots_[to].log_needed, longest);
    for (const int slot : from) slots_[slot].log_needed = std::max(slots_[slot].log_needed, longest);
  }

  static uint32_t reference(int slot, int64_t column, int log) {
    return static_cast<uint32_t>(slot) << kSlotShift | static_cast<uint32_t>((column % kWindow) >> log);
  }

  int alignment_of(int64_t tensor) const {
    return static_cast<int>(alignment_[static_cast<size_t>(tensor)]);
  }

  int find_slot(int64_t tensor, int64_t window) const {
    // Found from the back: pieces that follow each other mostly share tensors.
    for (int s = static_cast<int>(slots_.size()) - 1; s >= 0; --s) {
      if (slots_[s].tensor == tensor && slots_[s].window == window) return s;
    }
    return -1;
  }

  void reserve_slots(int64_t out, int64_t start, const std::vector<std::pair<int64_t, int64_t>>& sources) {
    std::vector<std::pair<int64_t, int64_t>> wanted{{n_in_ + out, start / kWindow}};
    for (const auto& [tensor, offset] : sources) wanted.emplace_back(tensor, offset / kWindow);
    std::sort(wanted.begin(), wanted.end());
    wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
    if (wanted.size() > kMaxSlots) {
      throw std::length_error(
          "a column is the sum over " + std::to_string(wanted.size() - 1) + " tensors; a launch reaches " +
          std::to_string(kMaxSlots - 1));
    }
    size_t missing = 0;
    for (const auto& [tensor, window] : wanted) missing += find_slot(tensor, window) < 0;
    if (slots_.size() + missing > kMaxSlots) close_launch();
    for (const auto& [tensor, window] : wanted) {
      if (find_slot(tensor, window) < 0) slots_.push_back({tensor, window, 0});
    }
  }

  void close_launch() {
    if (slots_.empty()) return;
    const size_t begin = map_.size();
    std::vector<int64_t> segments;
    int64_t n_segments = 0;
    uint64_t vectors = 0;
    for (int kind = 0; kind < 3; ++kind) {
      for (int log = 0; log < 5; ++log) {
        const size_t count = lanes_[kind][log].size() / 2;
        if (count == 0) continue;
        const int64_t fields[] = {kind, log, static_cast<int64_t>(vectors), static_cast<int64_t>(count)};
        segments.insert(segments.end(), fields, fields + 4);
        vectors += count;
        ++n_segments;
      }
    }
    const uint64_t lists_begin = 2 * vectors;
    const uint64_t words = lists_begin + lists_.size();
    for (int kind = 0; kind < 3; ++kind) {
      for (int log = 0; log < 5; ++log) {
        std::vector<uint32_t>& entries = lanes_[kind][log];
        if (kind == kSum) {
          for (size_t i = 0; i < entries.size(); i += 2) entries[i] += static_cast<uint32_t>(lists_begin);
        }
        map_.insert(map_.end(), entries.begin(), entries.end());
        entries.clear();
      }
    }
    map_.insert(map_.end(), lists_.begin(), lists_.end());
    lists_.clear();
    if (map_.size() % 2) map_.push_back(0);  // entries are read as pairs of words
    const int64_t fields[] = {
        static_cast<int64_t>(begin / 2),
        static_cast<int64_t>(words),
        static_cast<int64_t>(slots_.size()),
        n_segments};
    launches_.insert(launches_.end(), fields, fields + 4);
    for (const WindowOf& slot : slots_) {
      launches_.push_back(slot.tensor);
      launches_.push_back(slot.window);
      launches_.push_back(slot.log_needed);
      if (slot.tensor < n_in_) {
        int64_t& log = needed_log_[static_cast<size_t>(slot.tensor)];
        log = std::max<int64_t>(log, slot.log_needed);
      }
    }
    launches_.insert(launches_.end(), segments.begin(), segments.end());
    slots_.clear();
    ++n_launches_;
  }

  std::vector<int64_t> out_widths_;
  int64_t n_in_;
  std::vector<int64_t> alignment_;
  int max_log_;
  std::vector<int64_t> needed_;
  std::vector<int64_t> needed_log_;
  size_t words_ = 0;
  int64_t done_ = 0;  // columns of the piece at hand that earlier parts have covered
  std::vector<WindowOf> slots_;
  std::vector<uint32_t> lanes_[3][5];  // entries by kind and length of vector
  std::vector<uint32_t> lists_;
  std::vector<uint32_t> map_;
  std::vector<int64_t> launches_;
  int64_t n_launches_ = 0;
  bool has_sums_ = false;
};

// `pieces`: n_in, n_out, widths[n_out], then for each piece: output, start, length, n_sources, and
// (input, offset) for each source. `alignment`: for each input, then each output, log2 of the elements
// to which its address and row stride are aligned. No vector is longer than 2^max_log elements.
inline Encoded encode(Reader pieces, Reader alignment, int max_log) {
  constexpr int64_t kMax = int64_t{1} << 56;
  const int64_t n_in = pieces.next(0, kMax, "number of inputs");
  const int64_t n_out = pieces.next(0, static_cast<int64_t>(pieces.left()), "number of outputs");
  if (n_in + n_out != static_cast<int64_t>(alignment.left())) {
    throw std::invalid_argument(
        "alignment has " + std::to_string(alignment.left()) + " entries; expected one for each of " +
        std::to_string(n_in) + " inputs and " + std::to_string(n_out) + " outputs");
  }
  std::vector<int64_t> widths, logs;
  for (int64_t t = 0; t < n_out; ++t) widths.push_back(pieces.next(0, kMax, "width of an output"));
  while (alignment.left()) logs.push_back(alignment.next(0, 4, "alignment"));
  Encoder encoder(widths, n_in, logs, max_log);
  std::vector<std::pair<int64_t, int64_t>> sources;
  while (pieces.left()) {
    const int64_t out = pieces.next(0, n_out - 1, "output");
    const int64_t width = widths[static_cast<size_t>(out)];
    const int64_t start = pieces.next(0, width, "start");
    const int64_t length = pieces.next(0, width - start, "length");
    int64_t n_sources = pieces.next(0, static_cast<int64_t>(pieces.left()), "number of sources");
    sources.clear();
    for (; n_sources > 0; --n_sources) {
      const int64_t tensor = pieces.next(0, n_in - 1, "input");
      sources.emplace_back(tensor, pieces.next(0, kMax, "offset"));
    }
    encoder.add(out, start, length, sources);
  }
  return encoder.finish();
}

}  // namespace torchrec_kt
