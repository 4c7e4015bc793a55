// megasetup._C.gpu: the GPU kernels over rows of (kind, source, target, count), and whether a GPU can be used at all.
#include "gpu/convert.h"
#include "gpu/cuda.h"
#include "python.h"
#include "vectors.h"

namespace py = pybind11;

namespace megasetup {
namespace {

std::vector<gpu::Segment> segments_of(const py::buffer& buffer, int64_t weight_column) {
  const Rows rows(buffer, 4);
  std::vector<gpu::Segment> segments;
  segments.reserve(static_cast<size_t>(rows.size()));
  for (int64_t row = 0; row < rows.size(); ++row) {
    segments.push_back({rows.address<void>(row, weight_column), rows.address<void>(row, 3 - weight_column), 0,
                        rows.count(row), rows.kind(row)});
  }
  return segments;
}

std::string gpu_problem() {
  int devices = 0;
  const cudaError_t status = cudaGetDeviceCount(&devices);
  (void)cudaGetLastError();
  if (status == cudaSuccess && devices > 0) return "";
  if (status == cudaSuccess || status == cudaErrorNoDevice) return "no GPU is visible (see CUDA_VISIBLE_DEVICES)";
  int driver = 0;
  (void)cudaDriverGetVersion(&driver);
  if (driver == 0) return "no NVIDIA driver is installed";
  return std::string("the CUDA runtime cannot start: ") + cudaGetErrorString(status) + "; the driver supports CUDA " +
         std::to_string(driver / 1000) + "." + std::to_string(driver % 1000 / 10) + " and this build needs CUDA " +
         std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
}

}  // namespace

void register_gpu(py::module_& module) {
  module.def("gpu_problem", gpu_problem);
  auto gpu_module = module.def_submodule("gpu", "Kernels on GPU memory");
  gpu_module.def("widen", [](const py::buffer& rows, int device, uintptr_t stream) {
    const auto segments = segments_of(rows, 1);
    const py::gil_scoped_release release;
    const gpu::DeviceGuard guard(device);
    gpu::widen(segments, gpu::stream_of(stream));
  });
  // Targets back to back from `target` on, as the vectors' places say; on the framework's current stream.
  gpu_module.def("widen_vectors", [](const Vectors& vectors, uintptr_t target) {
    if (!vectors.on_gpu()) throw std::invalid_argument("vectors in host memory");
    std::vector<gpu::Segment> segments;
    segments.reserve(vectors.sources.size());
    for (size_t i = 0; i < vectors.sources.size(); ++i) {
      segments.push_back({vectors.sources[i], reinterpret_cast<void*>(target), 0, vectors.counts[i], vectors.kind});
      target += static_cast<uintptr_t>(vectors.places[i]) * sizeof(float);
    }
    void* stream = nullptr;
    if (vectors.api->current_work_stream(dlpack::kCuda, vectors.device.index, &stream) != 0) {
      throw py::error_already_set();
    }
    const py::gil_scoped_release release;
    const gpu::DeviceGuard guard(vectors.device.index);
    gpu::widen(segments, static_cast<cudaStream_t>(stream));
  });
  gpu_module.def("narrow", [](const py::buffer& rows, int device, uintptr_t stream) {
    const auto segments = segments_of(rows, 2);
    const py::gil_scoped_release release;
    const gpu::DeviceGuard guard(device);
    gpu::narrow(segments, gpu::stream_of(stream));
  });
  gpu_module.def("compare", [](const py::buffer& rows, int device, uintptr_t stream) {
    const auto segments = segments_of(rows, 1);
    std::vector<Comparison> results;
    {
      const py::gil_scoped_release release;
      const gpu::DeviceGuard guard(device);
      results = gpu::compare(segments, gpu::stream_of(stream));
    }
    py::list list;
    for (const Comparison& result : results) list.append(to_python(result));
    return list;
  });
}

}  // namespace megasetup
