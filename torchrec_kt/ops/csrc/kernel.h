// The kernel's body: applies one block of a column map at an explicit position. No torch, no CUDA
// runtime: nvcc compiles it for devices, a C++ compiler for the host.
//
// A thread owns one vector of output columns. It looks its sources up once, in the map, and then
// walks down its rows with several independent loads in flight before the first store.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define TRKT_HD __host__ __device__ __forceinline__
#define TRKT_UNROLL _Pragma("unroll")
#define TRKT_NO_UNROLL _Pragma("unroll 1")
#else
#define TRKT_HD inline
#define TRKT_UNROLL
#define TRKT_NO_UNROLL
#endif

namespace torchrec_kt {

constexpr uint32_t kThreads = 256;  // per block
constexpr uint32_t kMaxSlots = 112;
constexpr uint32_t kMaxSegments = 15;  // 3 kinds x 5 vector lengths
constexpr uint32_t kSlotShift = 24;    // a reference is 8 bits of slot, 24 bits of vector index
constexpr uint32_t kOffsetMask = (1u << kSlotShift) - 1;
constexpr int64_t kWindow = int64_t{1} << kSlotShift;  // columns of a tensor that one slot reaches

// A window of up to 2^24 columns of one input or output.
struct Slot {
  char* data;
  int64_t row_stride;     // bytes
  int64_t column_stride;  // bytes; only vectors of one element heed it
  uint32_t columns;       // elements within reach
  int8_t load_log;        // log2 of the elements in the longest vector that may be read; -1: none
  int8_t store_log;       // the same for writing
  uint16_t unused;
};

enum Kind : uint8_t { kZero = 0, kCopy = 1, kSum = 2 };

// Vectors of one length and one kind of source: entries [begin, begin + count) of the map.
struct Segment {
  uint32_t begin;
  uint32_t count;
  uint32_t first_block;
  uint32_t multiplier;  // division by count, see divide()
  uint8_t shift;
  uint8_t log_elements;  // log2 of the elements in a vector
  Kind kind;
  uint8_t unused;
};

// Travels by value in the kernel's parameters, so that a call needs neither a copy to the device nor
// a pinned buffer that a captured graph would read again on replay. 4 KB, the limit of every toolkit.
struct Params {
  const uint32_t* map;  // of this launch: pairs (source, destination), then the lists of sums; 8-byte aligned
  uint32_t map_words;
  uint32_t n_slots;
  uint32_t n_segments;
  uint32_t tile_rows;
  uint8_t log_item_bytes;
  int64_t rows;
  Segment segments[kMaxSegments];
  Slot slots[kMaxSlots];
};
static_assert(sizeof(Params) <= 4096, "kernel parameters are limited to 4 KB");

// n / count for n < 2^31: the multiplier and shift come from the launcher.
TRKT_HD uint32_t divide(uint32_t n, const Segment& segment) {
  if (segment.count == 1) return n;
#if defined(__CUDA_ARCH__)
  return __umulhi(n, segment.multiplier) >> segment.shift;
#else
  return static_cast<uint32_t>((uint64_t{n} * segment.multiplier) >> 32) >> segment.shift;
#endif
}

// --- memory --------------------------------------------------------------------------------------

template <int kBytes>
struct alignas(kBytes) Bytes;
template <>
struct alignas(16) Bytes<16> {
  uint32_t x, y, z, w;
};
template <>
struct alignas(8) Bytes<8> {
  uint32_t x, y;
};
template <>
struct alignas(4) Bytes<4> {
  uint32_t x;
};
template <>
struct alignas(2) Bytes<2> {
  uint16_t x;
};
template <>
struct Bytes<1> {
  uint8_t x;
};

#if defined(TORCHREC_KT_OBSERVE)
// The host build can watch every access instead of making it; see count.cpp.
void observe(const void* address, int bytes, bool store);
#endif

template <int kBytes>
TRKT_HD Bytes<kBytes> load(const char* from) {
#if defined(TORCHREC_KT_OBSERVE)
  observe(from, kBytes, false);
  return Bytes<kBytes>{};
#else
  return *reinterpret_cast<const Bytes<kBytes>*>(from);
#endif
}

template <int kBytes>
TRKT_HD void store(char* to, [[maybe_unused]] const Bytes<kBytes>& value) {
#if defined(TORCHREC_KT_OBSERVE)
  observe(to, kBytes, true);
#else
  *reinterpret_cast<Bytes<kBytes>*>(to) = value;
#endif
}

// --- element types -------------------------------------------------------------------------------

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <class To, class From>
TRKT_HD To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "sizes differ");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

TRKT_HD float widen(float value) { return value; }
TRKT_HD double widen(double value) { return value; }
TRKT_HD float widen(BFloat16 value) { return bit_cast<float>(static_cast<uint32_t>(value.bits) << 16); }
TRKT_HD float widen(Half value) {
#if defined(__CUDA_ARCH__)
  return __half2float(bit_cast<__half>(value.bits));
#else
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t exponent = (value.bits >> 10) & 0x1fu;
  const uint32_t mantissa = value.bits & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  const uint32_t wide = exponent == 31 ? 0xffu : exponent + 112u;
  return bit_cast<float>(sign | (wide << 23) | (mantissa << 13));
#endif
}

template <class T>
struct Narrow;
template <>
struct Narrow<float> {
  static TRKT_HD float from(double value) { return static_cast<float>(value); }
};
template <>
struct Narrow<double> {
  static TRKT_HD double from(double value) { return value; }
};
template <>
struct Narrow<BFloat16> {
  static TRKT_HD BFloat16 from(float value) {  // to nearest, ties to even
    const uint32_t bits = bit_cast<uint32_t>(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return BFloat16{0x7fc0};
    return BFloat16{static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
  }
};
template <>
struct Narrow<Half> {
  static TRKT_HD Half from(float value) {
#if defined(__CUDA_ARCH__)
    return Half{bit_cast<uint16_t>(__float2half_rn(value))};
#else
    const uint32_t bits = bit_cast<uint32_t>(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return Half{static_cast<uint16_t>(sign | 0x7e00u)};
    if (magnitude >= 0x477ff000u) return Half{static_cast<uint16_t>(sign | 0x7c00u)};
    if (magnitude < 0x38800000u) {  // subnormal in half: adding 0.5 leaves the rounded mantissa
      const float shifted = bit_cast<float>(magnitude) + 0.5f;
      return Half{static_cast<uint16_t>(sign | (bit_cast<uint32_t>(shifted) - 0x3f000000u))};
    }
    const uint32_t rounded = magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u);
    return Half{static_cast<uint16_t>(sign | (rounded >> 13))};
#endif
  }
};

template <class In, class Out>
struct Accumulator {
  using type = float;
};
template <class Out>
struct Accumulator<double, Out> {
  using type = double;
};
template <class In>
struct Accumulator<In, double> {
  using type = double;
};
template <>
struct Accumulator<double, double> {
  using type = double;
};

// --- the walk down the rows -----------------------------------------------------------------------

// Where a thread's vector of one tensor starts, and how far the next row is.
struct Cursor {
  char* at;
  int64_t row_stride;
};

// False where the reference leaves the tensor, or the vector is not one for it, which no map of this
// library does: nothing is read or written then, whatever the map holds.
template <bool kStore>
TRKT_HD bool locate(
    const Params& params, int log_elements, int vector_bytes, uint32_t reference, int64_t row, Cursor& cursor) {
  const uint32_t index = reference >> kSlotShift;
  const uint32_t offset = reference & kOffsetMask;
  if (index >= params.n_slots) return false;
  const Slot& slot = params.slots[index];
  if (log_elements > (kStore ? slot.store_log : slot.load_log)) return false;
  if ((uint64_t{offset} + 1) << log_elements > slot.columns) return false;
  // Columns may be any distance from each other where a vector is a single one.
  const int64_t step = log_elements == 0 ? slot.column_stride : vector_bytes;
  cursor.row_stride = slot.row_stride;
  cursor.at = slot.data + (row * slot.row_stride + offset * step);
  return true;
}

template <int kBytes, int kRows, bool kGuarded>
TRKT_HD void copy_batch(Cursor& from, Cursor& to, int64_t left) {
  Bytes<kBytes> held[kRows];
  TRKT_UNROLL
  for (int i = 0; i < kRows; ++i) {
    if (!kGuarded || i < left) held[i] = load<kBytes>(from.at);
    from.at += from.row_stride;
  }
  TRKT_UNROLL
  for (int i = 0; i < kRows; ++i) {
    if (!kGuarded || i < left) store<kBytes>(to.at, held[i]);
    to.at += to.row_stride;
  }
}

template <int kBytes>
TRKT_HD void copy_rows(Cursor from, Cursor to, int64_t rows) {
  constexpr int kRows = 8;
  TRKT_NO_UNROLL
  for (; rows >= kRows; rows -= kRows) copy_batch<kBytes, kRows, false>(from, to, kRows);
  if (rows > 0) copy_batch<kBytes, kRows, true>(from, to, rows);
}

template <int kBytes>
TRKT_HD void zero_rows(Cursor to, int64_t rows) {
  for (; rows > 0; --rows, to.at += to.row_stride) store<kBytes>(to.at, Bytes<kBytes>{});
}

template <class T, int kElements>
TRKT_HD void unpack(const Bytes<kElements * static_cast<int>(sizeof(T))>& packed, T (&elements)[kElements]) {
  memcpy(elements, &packed, sizeof(elements));
}

// Sums of a first source and others, in this order; a cast where there are no others.
template <class In, class Out, int kElements>
TRKT_HD void sum_rows(
    const Params& params,
    int log_elements,
    uint32_t first,
    const uint32_t* others,
    uint32_t n_others,
    Cursor to,
    int64_t row,
    int64_t rows) {
  using Acc = typename Accumulator<In, Out>::type;
  constexpr int kInBytes = kElements * static_cast<int>(sizeof(In));
  constexpr int kOutBytes = kElements * static_cast<int>(sizeof(Out));
  constexpr int kWords = kElements * static_cast<int>(sizeof(Acc)) / 4;  // registers that a row's sum takes
  constexpr int kRows = kWords >= 8 ? 2 : (kWords >= 4 ? 4 : 8);
  TRKT_NO_UNROLL
  for (; rows > 0; rows -= kRows, row += kRows) {
    Acc sum[kRows][kElements];
    TRKT_NO_UNROLL
    for (uint32_t k = 0; k <= n_others; ++k) {
      Cursor from;
      if (!locate<false>(params, log_elements, kInBytes, k == 0 ? first : others[k - 1], row, from)) return;
      Bytes<kInBytes> held[kRows];
      TRKT_UNROLL
      for (int i = 0; i < kRows; ++i) {
        held[i] = Bytes<kInBytes>{};
        if (i < rows) held[i] = load<kInBytes>(from.at);
        from.at += from.row_stride;
      }
      TRKT_UNROLL
      for (int i = 0; i < kRows; ++i) {
        In elements[kElements];
        memcpy(elements, &held[i], sizeof(elements));
        TRKT_UNROLL
        for (int e = 0; e < kElements; ++e) {
          const Acc term = static_cast<Acc>(widen(elements[e]));
          sum[i][e] = k == 0 ? term : sum[i][e] + term;
        }
      }
    }
    TRKT_UNROLL
    for (int i = 0; i < kRows; ++i) {
      Out elements[kElements];
      TRKT_UNROLL
      for (int e = 0; e < kElements; ++e) elements[e] = Narrow<Out>::from(sum[i][e]);
      Bytes<kOutBytes> packed;
      memcpy(&packed, elements, sizeof(packed));
      if (i < rows) store<kOutBytes>(to.at, packed);
      to.at += to.row_stride;
    }
  }
}

// --- kernels: what happens to a vector, by its length -------------------------------------------------

struct Work {
  uint32_t source;
  uint32_t destination;
  Kind kind;
  int log_elements;
  int64_t row;
  int64_t rows;
};

// Moves bytes: any element type, no sums.
struct CopyKernel {
  template <int kBytes>
  static TRKT_HD void move(const Params& params, const Work& work) {
    Cursor to, from;
    if (!locate<true>(params, work.log_elements, kBytes, work.destination, work.row, to)) return;
    if (work.kind == kZero) {
      zero_rows<kBytes>(to, work.rows);
    } else if (locate<false>(params, work.log_elements, kBytes, work.source, work.row, from)) {
      copy_rows<kBytes>(from, to, work.rows);
    }
  }

  static TRKT_HD void run(const Params& params, const Work& work) {
    switch (work.log_elements + params.log_item_bytes) {
      case 0: return move<1>(params, work);
      case 1: return move<2>(params, work);
      case 2: return move<4>(params, work);
      case 3: return move<8>(params, work);
      case 4: return move<16>(params, work);
      default: return;
    }
  }
};

// Sums and casts: elements of type In to elements of type Out.
template <class In, class Out>
struct SumKernel {
  template <int kElements>
  static TRKT_HD void move(const Params& params, const Work& work) {
    constexpr int kInBytes = kElements * static_cast<int>(sizeof(In));
    constexpr int kOutBytes = kElements * static_cast<int>(sizeof(Out));
    if constexpr (kInBytes <= 16 && kOutBytes <= 16) {
      Cursor to;
      if (!locate<true>(params, work.log_elements, kOutBytes, work.destination, work.row, to)) return;
      if (work.kind == kZero) return zero_rows<kOutBytes>(to, work.rows);
      uint32_t first = work.source;
      const uint32_t* others = nullptr;
      uint32_t n_others = 0;
      if (work.kind == kSum) {  // the source is the place of a list: length, references
        const uint32_t place = work.source;
        if (place >= params.map_words || params.map_words - place < 2) return;
        const uint32_t* list = params.map + place;
        if (list[0] == 0 || list[0] >= params.map_words - place) return;
        first = list[1];
        others = list + 2;
        n_others = list[0] - 1;
      } else if constexpr (std::is_same<In, Out>::value) {
        Cursor from;
        if (locate<false>(params, work.log_elements, kInBytes, work.source, work.row, from)) {
          copy_rows<kOutBytes>(from, to, work.rows);
        }
        return;
      }
      sum_rows<In, Out, kElements>(params, work.log_elements, first, others, n_others, to, work.row, work.rows);
    }
  }

  static TRKT_HD void run(const Params& params, const Work& work) {
    switch (work.log_elements) {
      case 0: return move<1>(params, work);
      case 1: return move<2>(params, work);
      case 2: return move<4>(params, work);
      case 3: return move<8>(params, work);
      default: return;
    }
  }
};

// What thread `thread` of block `block` does.
template <class Kernel>
TRKT_HD void run(const Params& params, uint32_t block, uint32_t thread) {
  uint32_t s = 0;
  while (s + 1 < params.n_segments && block >= params.segments[s + 1].first_block) ++s;
  const Segment& segment = params.segments[s];
  // Consecutive threads take consecutive vectors, then the next tile of rows: no lane idles where a
  // row is narrower than a block.
  const uint32_t linear = (block - segment.first_block) * kThreads + thread;
  const uint32_t tile = divide(linear, segment);
  const uint32_t vector = linear - tile * segment.count;
  const int64_t row = int64_t{tile} * params.tile_rows;
  if (row >= params.rows) return;
  // Both words at once: the rest waits for them.
  const auto entry = reinterpret_cast<const Bytes<8>*>(params.map)[uint64_t{segment.begin} + vector];
  Work work;
  work.source = entry.x;
  work.destination = entry.y;
  work.log_elements = segment.log_elements;
  work.kind = segment.kind;
  work.row = row;
  work.rows = params.rows - row < params.tile_rows ? params.rows - row : int64_t{params.tile_rows};
  Kernel::run(params, work);
}

}  // namespace torchrec_kt
