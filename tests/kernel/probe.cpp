// The encoder, the launcher and the kernel's body without torch, for test_encoding.py: every access is
// counted byte by byte instead of made.
#define TORCHREC_KT_OBSERVE
#include <algorithm>
#include <cstdio>
#include <exception>
#include <vector>

#include "backend.h"
#include "encode.h"
#include "kernel.h"
#include "launch.h"

namespace {

// The bytes watched, and how often each has been loaded or stored, if that is wanted. An access elsewhere is counted as outside.
struct Watched {
  uint64_t begin;
  uint64_t size;
  uint8_t* loads;
  uint8_t* stores;
  int64_t outside;
  int64_t misaligned;
} watched;

void count(uint8_t* counts, uint64_t address, int bytes) {
  watched.misaligned += address % static_cast<uint64_t>(bytes) != 0;
  for (uint64_t at = address; at < address + static_cast<uint64_t>(bytes); ++at) {
    if (at < watched.begin || at - watched.begin >= watched.size) {
      ++watched.outside;
    } else if (counts && counts[at - watched.begin] < 255) {
      ++counts[at - watched.begin];
    }
  }
}

torchrec_kt::Encoded encoded;

}  // namespace

namespace torchrec_kt {
void observe(const void* address, int bytes, bool store) {
  count(store ? watched.stores : watched.loads, reinterpret_cast<uint64_t>(address), bytes);
}
}  // namespace torchrec_kt

#define EXPORT extern "C" __attribute__((visibility("default")))

// Lengths of the map and the header, which take() then copies; false with a message where there are none.
EXPORT bool encode(
    const int64_t* pieces, int64_t n_pieces, const int64_t* alignment, int64_t n_alignment, int max_log, int64_t* sizes) {
  using torchrec_kt::Reader;
  try {
    encoded = torchrec_kt::encode(
        Reader(pieces, static_cast<size_t>(n_pieces), "pieces"),
        Reader(alignment, static_cast<size_t>(n_alignment), "alignment"), max_log);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return false;
  }
  sizes[0] = static_cast<int64_t>(encoded.map.size());
  sizes[1] = static_cast<int64_t>(encoded.header.size());
  return true;
}

EXPORT void take(uint32_t* map, int64_t* header) {
  std::copy(encoded.map.begin(), encoded.map.end(), map);
  std::copy(encoded.header.begin(), encoded.header.end(), header);
}

// Applies a map to tensors at addresses that need not exist. `tensors`: address, columns, row stride, column
// stride of each. Of every launch, the blocks below `blocks` and the last ones. Returns the number of
// launches, -1 for tensors not aligned as the map says, -2 for an exception.
EXPORT int64_t apply(
    const int64_t* header_words, int64_t n_header_words, const uint32_t* map, const int64_t* tensors, int64_t rows,
    int in, int out, int in_bytes, int out_bytes, int64_t resident_threads, uint32_t blocks, uint64_t begin,
    uint64_t size, uint8_t* loads, uint8_t* stores, int64_t* faults) {
  using namespace torchrec_kt;
  watched = {begin, size, loads, stores, 0, 0};
  int64_t launches = 0;
  try {
    Reader reader(header_words, static_cast<size_t>(n_header_words), "header");
    const Header header = read_header(reader);
    std::vector<TensorView> views;
    for (int64_t t = 0; t < header.n_in + header.n_out; ++t, tensors += 4) {
      views.push_back({reinterpret_cast<char*>(tensors[0]), tensors[1], tensors[2], tensors[3]});
    }
    const auto launch = [&](const Params& params, uint32_t n_blocks) {
      ++launches;
      backend::with_kernel(
          static_cast<backend::Element>(in), static_cast<backend::Element>(out), [&](auto kernel) {
            for (uint32_t block = 0; block < n_blocks; ++block) {
              if (block == blocks && n_blocks > 2 * blocks) block = n_blocks - blocks;
              for (uint32_t thread = 0; thread < kThreads; ++thread) run<decltype(kernel)>(params, block, thread);
            }
          });
    };
    const Shape shape{rows, in_bytes, out_bytes, resident_threads};
    if (!for_each_launch(reader, header, map, views.data(), shape, launch)) return -1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return -2;
  }
  faults[0] = watched.outside;
  faults[1] = watched.misaligned;
  return launches;
}

// The number of n for which the division by `count` is wrong, of some around each multiple of a step.
EXPORT int64_t wrong_quotients(uint32_t count, uint32_t step) {
  torchrec_kt::Segment segment{};
  segment.count = count;
  torchrec_kt::set_division(segment);
  int64_t wrong = 0;
  for (uint64_t n = 0; n < uint64_t{1} << 31; n += step) {
    // Where the quotient changes, an error shows first.
    const uint64_t multiple = n / count * count;
    for (const uint64_t near : {n, multiple, multiple + count - 1}) {
      if (near >= uint64_t{1} << 31) continue;
      wrong += torchrec_kt::divide(static_cast<uint32_t>(near), segment) != near / count;
    }
  }
  return wrong;
}

// Rows of a tile, and threads that it takes in all.
EXPORT uint32_t tile(int64_t rows, int64_t vectors, int64_t resident_threads) {
  return torchrec_kt::tile_rows(rows, vectors, resident_threads);
}
