// Counts what the kernel would ask memory for: walks the grid on the host, warp by warp, and watches every
// access instead of making it. Loaded by torchrec_kt/benchmark/traffic.py.
#define TORCHREC_KT_OBSERVE
#include <algorithm>
#include <cstdio>
#include <exception>
#include <iterator>
#include <vector>

#include "backend.h"
#include "kernel.h"
#include "launch.h"

namespace torchrec_kt {

namespace {

constexpr uint64_t kSector = 32;
constexpr uint32_t kWarp = 32;

struct Access {
  uint64_t address;
  int bytes;
  bool store;
};

std::vector<Access>* watching = nullptr;

struct Counts {
  int64_t threads;
  int64_t idle_threads;  // that move nothing
  int64_t load_bytes, store_bytes;
  int64_t load_requests, store_requests;  // instructions of a warp
  int64_t load_sectors, store_sectors;    // of 32 bytes, that those requests ask for
  int64_t load_needed, store_needed;      // sectors that the runs of bytes moved lie in, each counted once a warp
  int64_t map_bytes;                      // read by threads; lists of sums are not counted
};

int64_t distinct_sectors(std::vector<uint64_t>& sectors) {
  std::sort(sectors.begin(), sectors.end());
  return std::unique(sectors.begin(), sectors.end()) - sectors.begin();
}

void append_sectors(const Access& access, std::vector<uint64_t>& sectors) {
  for (uint64_t s = access.address / kSector; s <= (access.address + access.bytes - 1) / kSector; ++s) {
    sectors.push_back(s);
  }
}

template <class Kernel>
void count_warp(const Params& params, uint32_t block, uint32_t warp, Counts& counts) {
  std::vector<Access> lanes[kWarp];
  size_t longest = 0;
  for (uint32_t lane = 0; lane < kWarp; ++lane) {
    watching = &lanes[lane];
    run<Kernel>(params, block, warp * kWarp + lane);
    longest = std::max(longest, lanes[lane].size());
    ++counts.threads;
    counts.idle_threads += lanes[lane].empty();
    if (!lanes[lane].empty()) counts.map_bytes += 8;
  }
  std::vector<uint64_t> all[2];
  for (size_t step = 0; step < longest; ++step) {
    // Lanes run in step: the accesses of one place in the program are one request.
    std::vector<uint64_t> sectors[2];
    for (const std::vector<Access>& accesses : lanes) {
      if (step >= accesses.size()) continue;
      const Access& access = accesses[step];
      (access.store ? counts.store_bytes : counts.load_bytes) += access.bytes;
      append_sectors(access, sectors[access.store]);
      append_sectors(access, all[access.store]);
    }
    counts.load_requests += !sectors[0].empty();
    counts.store_requests += !sectors[1].empty();
    counts.load_sectors += distinct_sectors(sectors[0]);
    counts.store_sectors += distinct_sectors(sectors[1]);
  }
  counts.load_needed += distinct_sectors(all[0]);
  counts.store_needed += distinct_sectors(all[1]);
}

}  // namespace

void observe(const void* address, int bytes, bool store) {
  watching->push_back({reinterpret_cast<uint64_t>(address), bytes, store});
}

}  // namespace torchrec_kt

// Every `stride`-th block of the launches of a map. `pieces`, `alignment` and `max_log` are what `encode`
// takes; `widths` are the columns of each input, then each output, all rows being next to each other.
// Element types as in backend.h. Fills in `counts`, in the order of the fields above, and the bytes of the
// map last; returns how many, or -1.
extern "C" __attribute__((visibility("default"))) int count_traffic(
    const int64_t* pieces,
    int64_t n_pieces,
    const int64_t* alignment,
    int64_t n_tensors,
    int max_log,
    const int64_t* widths,
    int64_t rows,
    int in,
    int out,
    int in_bytes,
    int out_bytes,
    int64_t resident_threads,
    int64_t stride,
    int64_t* counts) {
  using namespace torchrec_kt;
  try {
    const Encoded encoded = encode(
        Reader(pieces, static_cast<size_t>(n_pieces), "pieces"),
        Reader(alignment, static_cast<size_t>(n_tensors), "alignment"),
        max_log);
    Reader reader(encoded.header.data(), encoded.header.size(), "header");
    const Header header = read_header(reader);
    std::vector<TensorView> views;
    for (int64_t t = 0; t < n_tensors; ++t) {  // far apart, and never read
      views.push_back({reinterpret_cast<char*>((t + 1) << 42), widths[t], widths[t], 1});
    }
    Counts total{};
    int64_t met = 0;
    const bool aligned = for_each_launch(
        reader, header, encoded.map.data(), views.data(), {rows, in_bytes, out_bytes, resident_threads},
        [&](const Params& params, uint32_t blocks) {
          backend::with_kernel(
              static_cast<backend::Element>(in), static_cast<backend::Element>(out), [&](auto kernel) {
                for (uint32_t block = 0; block < blocks; ++block) {
                  if (met++ % stride) continue;
                  for (uint32_t warp = 0; warp < kThreads / kWarp; ++warp) {
                    count_warp<decltype(kernel)>(params, block, warp, total);
                  }
                }
              });
        });
    if (!aligned) throw std::invalid_argument("the tensors are not aligned as the map takes for granted");
    const int64_t fields[] = {
        total.threads,       total.idle_threads,   total.load_bytes,   total.store_bytes,
        total.load_requests, total.store_requests, total.load_sectors, total.store_sectors,
        total.load_needed,   total.store_needed,   total.map_bytes,    int64_t{4} * header.map_words};
    std::copy(std::begin(fields), std::end(fields), counts);
    return static_cast<int>(std::size(fields));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "torchrec_kt: %s\n", error.what());
    return -1;
  }
}
