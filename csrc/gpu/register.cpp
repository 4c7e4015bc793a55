// megasetup._C.gpu: the GPU kernels over rows of (kind, source, target, count), and whether a GPU can be used at all.
#include "gpu/convert.h"
#include "gpu/cuda.h"
#include "python.h"

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
  // Addresses and counts instead of rows, targets back to back from `target` on, each start rounded up to `alignment`
  // elements: for many tiny tensors the making of rows in Python would take longer than the launch.
  gpu_module.def("widen_into",
                 [](int64_t kind, const std::vector<uintptr_t>& sources, const std::vector<int64_t>& counts,
                    uintptr_t target, int64_t alignment, int device, uintptr_t stream) {
                   if (kind < 0 || kind >= kKinds || sources.size() != counts.size() || alignment < 1) {
                     throw std::invalid_argument("kind, addresses, counts and alignment do not go together");
                   }
                   std::vector<gpu::Segment> segments;
                   segments.reserve(sources.size());
                   for (size_t i = 0; i < sources.size(); ++i) {
                     const auto bytes = static_cast<uintptr_t>((counts[i] + alignment - 1) / alignment * alignment *
                                                               copy_bytes(static_cast<Kind>(kind)));
                     segments.push_back({reinterpret_cast<void*>(sources[i]), reinterpret_cast<void*>(target), 0,
                                         counts[i], static_cast<Kind>(kind)});
                     target += bytes;
                   }
                   const py::gil_scoped_release release;
                   const gpu::DeviceGuard guard(device);
                   gpu::widen(segments, gpu::stream_of(stream));
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
