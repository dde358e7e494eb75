// The one file that names torch's C functions: the part of its stable ABI that this library calls, as
// torch 2.11 and later export it. Declared here rather than included, so that building needs no torch;
// a test compiles this file beside torch's own headers and so notices a difference.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

struct AtenTensorOpaque;
struct StableListOpaque;
struct TorchLibraryOpaque;
struct DeviceGuardOpaque;

extern "C" {
int32_t aoti_torch_get_data_ptr(AtenTensorOpaque*, void**);
int32_t aoti_torch_get_dim(AtenTensorOpaque*, int64_t*);
int32_t aoti_torch_get_numel(AtenTensorOpaque*, int64_t*);
int32_t aoti_torch_get_sizes(AtenTensorOpaque*, int64_t**);
int32_t aoti_torch_get_strides(AtenTensorOpaque*, int64_t**);
int32_t aoti_torch_get_dtype(AtenTensorOpaque*, int32_t*);
int32_t aoti_torch_get_device_type(AtenTensorOpaque*, int32_t*);
int32_t aoti_torch_get_device_index(AtenTensorOpaque*, int32_t*);
int32_t aoti_torch_empty_strided(
    int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, AtenTensorOpaque**);
int32_t aoti_torch_delete_tensor_object(AtenTensorOpaque*);

int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_float64();
int32_t aoti_torch_dtype_int32();
int32_t aoti_torch_dtype_int64();
size_t aoti_torch_dtype_element_size(int32_t);

int32_t aoti_torch_create_device_guard(int32_t, DeviceGuardOpaque**);
int32_t aoti_torch_delete_device_guard(DeviceGuardOpaque*);
// Only CUDA builds of torch have it.
int32_t aoti_torch_get_current_cuda_stream(int32_t, void**) __attribute__((weak));

int32_t aoti_torch_library_init_impl(const char*, const char*, const char*, uint32_t, TorchLibraryOpaque**);
int32_t torch_library_impl(
    TorchLibraryOpaque*, const char*, void (*)(uint64_t*, uint64_t, uint64_t), uint64_t);
int32_t torch_new_list_reserve_size(size_t, StableListOpaque**);
int32_t torch_list_size(StableListOpaque*, size_t*);
int32_t torch_list_get_item(StableListOpaque*, size_t, uint64_t*);
int32_t torch_list_push_back(StableListOpaque*, uint64_t);
int32_t torch_delete_list(StableListOpaque*);
}

namespace torchrec_kt::shims {

// The version of torch whose functions these are: 2.11.
constexpr uint64_t kAbiVersion = uint64_t{2} << 56 | uint64_t{11} << 48;

inline void check(int32_t status, const char* what) {
  if (status != 0) throw std::runtime_error(std::string("torch failed to ") + what);
}

// Owns a reference to a tensor.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(AtenTensorOpaque* handle) : handle_(handle) {}
  Tensor(Tensor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Tensor() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
  }

  // Contiguous and not initialised.
  static Tensor empty(const std::vector<int64_t>& sizes, int32_t dtype, int32_t device_type, int32_t device) {
    std::vector<int64_t> strides(sizes.size());
    int64_t step = 1;
    for (size_t d = sizes.size(); d-- > 0;) {
      strides[d] = step;
      if (d > 0 && sizes[d] > 1) step *= sizes[d];
    }
    AtenTensorOpaque* handle = nullptr;
    check(
        aoti_torch_empty_strided(
            static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype, device_type, device, &handle),
        "allocate a tensor");
    return Tensor(handle);
  }

  char* data() const {
    return static_cast<char*>(get<void*>(aoti_torch_get_data_ptr, "give a tensor's address"));
  }
  int64_t dim() const { return get<int64_t>(aoti_torch_get_dim, "give a tensor's rank"); }
  int64_t numel() const { return get<int64_t>(aoti_torch_get_numel, "give a tensor's size"); }
  const int64_t* sizes() const { return get<int64_t*>(aoti_torch_get_sizes, "give a tensor's shape"); }
  const int64_t* strides() const { return get<int64_t*>(aoti_torch_get_strides, "give a tensor's strides"); }
  int32_t dtype() const { return get<int32_t>(aoti_torch_get_dtype, "give a tensor's type"); }
  int32_t device_type() const { return get<int32_t>(aoti_torch_get_device_type, "give a tensor's device"); }
  int32_t device_index() const { return get<int32_t>(aoti_torch_get_device_index, "give a tensor's device"); }

  bool is_contiguous() const {
    int64_t step = 1;
    for (int64_t d = dim(); d-- > 0; step *= sizes()[d]) {
      if (sizes()[d] != 1 && strides()[d] != step) return false;
    }
    return true;
  }

  uint64_t release() { return reinterpret_cast<uint64_t>(std::exchange(handle_, nullptr)); }

 private:
  template <class T>
  T get(int32_t (*function)(AtenTensorOpaque*, T*), const char* what) const {
    T result{};
    check(function(handle_, &result), what);
    return result;
  }

  AtenTensorOpaque* handle_ = nullptr;
};

inline Tensor take_tensor(uint64_t value) { return Tensor(reinterpret_cast<AtenTensorOpaque*>(value)); }

inline std::vector<Tensor> take_tensors(uint64_t value) {
  struct List {
    StableListOpaque* handle;
    ~List() { torch_delete_list(handle); }
  } list{reinterpret_cast<StableListOpaque*>(value)};
  size_t size = 0;
  check(torch_list_size(list.handle, &size), "give the length of a list");
  std::vector<Tensor> tensors;
  tensors.reserve(size);
  for (size_t i = 0; i < size; ++i) {
    uint64_t item = 0;
    check(torch_list_get_item(list.handle, i, &item), "give an item of a list");
    tensors.push_back(take_tensor(item));
  }
  return tensors;
}

inline uint64_t give_tensors(std::vector<Tensor> tensors) {
  StableListOpaque* list = nullptr;
  check(torch_new_list_reserve_size(tensors.size(), &list), "make a list");
  for (Tensor& tensor : tensors) {
    if (torch_list_push_back(list, tensor.release()) != 0) {
      torch_delete_list(list);
      check(1, "append to a list");
    }
  }
  return reinterpret_cast<uint64_t>(list);
}

// Makes a device current for a scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t device) { check(aoti_torch_create_device_guard(device, &guard_), "switch devices"); }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  ~DeviceGuard() { aoti_torch_delete_device_guard(guard_); }

 private:
  DeviceGuardOpaque* guard_ = nullptr;
};

inline void* current_cuda_stream(int32_t device) {
  if (!aoti_torch_get_current_cuda_stream) {
    throw std::runtime_error("this build of torch has no CUDA streams; install a CUDA build");
  }
  void* stream = nullptr;
  check(aoti_torch_get_current_cuda_stream(device, &stream), "give the current stream");
  return stream;
}

// Registers implementations for one dispatch key while the library is loaded.
inline void implement(
    const char* key, const char* file, const std::vector<std::pair<const char*, void (*)(uint64_t*, uint64_t, uint64_t)>>& functions) {
  TorchLibraryOpaque* library = nullptr;
  check(aoti_torch_library_init_impl("torchrec_kt", key, file, 0, &library), "open an operator library");
  for (const auto& [name, function] : functions) {
    check(torch_library_impl(library, name, function, kAbiVersion), "register an operator");
  }
  // Kept: deleting it would take the implementations back.
}

}  // namespace torchrec_kt::shims
