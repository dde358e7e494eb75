// Scores a batch with a saved model, without Python:
//
//   score [--library LIB.so]... [--device cuda] MODEL BATCH.pt
//
// MODEL is a TorchScript file (.pt), which is loaded onto the device, or an AOTInductor package (.pt2), which was
// compiled for it. BATCH.pt is a scripted module with one buffer per input of the model, in order. Prints one
// score a line. Libraries are loaded in the order given, before the model: they define the operators that it
// calls.

#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>

#include <dlfcn.h>

#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

void load_library(const std::string& path) {
  // Global, so that libraries find each other's symbols, as FBGEMM's do.
  if (dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    throw std::runtime_error("cannot load the library " + path + ": " + dlerror());
  }
}

std::vector<at::Tensor> read_batch(const std::string& path, at::Device device) {
  std::vector<at::Tensor> inputs;
  for (const at::Tensor& buffer : torch::jit::load(path, device).buffers(/*recurse=*/false)) {
    inputs.push_back(buffer);
  }
  return inputs;
}

// Models are loaded outside of the inference mode: a plan tensor made inside would be read from the device anew
// in every call.
at::Tensor score(const std::string& model, const std::vector<at::Tensor>& inputs, at::Device device) {
  if (model.size() > 4 && model.compare(model.size() - 4, 4, ".pt2") == 0) {
    torch::inductor::AOTIModelPackageLoader package(model);
    const c10::InferenceMode no_gradients;
    return package.run(inputs).at(0);
  }
  torch::jit::Module module = torch::jit::load(model, device);
  module.eval();
  const c10::InferenceMode no_gradients;
  return module.forward({inputs.begin(), inputs.end()}).toTensor();
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> libraries, files;
  std::string device = "cpu";
  for (int n = 1; n < argc; ++n) {
    const std::string argument = argv[n];
    if (argument == "--library" && n + 1 < argc) {
      libraries.emplace_back(argv[++n]);
    } else if (argument == "--device" && n + 1 < argc) {
      device = argv[++n];
    } else {
      files.push_back(argument);
    }
  }
  if (files.size() != 2 || files[0].rfind("--", 0) == 0) {
    std::fprintf(stderr, "usage: %s [--library LIB.so]... [--device cuda] MODEL.pt|MODEL.pt2 BATCH.pt\n", argv[0]);
    return 2;
  }
  try {
    for (const std::string& library : libraries) {
      load_library(library);
    }
    const at::Tensor found = score(files[0], read_batch(files[1], device), device);
    const at::Tensor scores = found.to(at::kCPU, at::kFloat).contiguous();
    for (int64_t n = 0; n < scores.numel(); ++n) {
      std::printf("%.9g\n", scores.const_data_ptr<float>()[n]);  // nine digits tell any two floats apart
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
  return 0;
}
