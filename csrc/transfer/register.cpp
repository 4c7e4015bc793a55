// megasetup._C.transfer: the pipeline over rows of (kind, weight, device copy or 0, host copy or 0, count).
#include "cpu/pool.h"
#include "gpu/cuda.h"
#include "python.h"
#include "transfer/arena.h"
#include "transfer/pipeline.h"

namespace py = pybind11;

namespace megasetup {
namespace {

std::unique_ptr<transfer::Pipeline> make_pipeline(int device, const py::buffer& buffer, int64_t chunk_elements) {
  const Rows rows(buffer, 5);
  std::vector<transfer::Row> list;
  list.reserve(static_cast<size_t>(rows.size()));
  for (int64_t row = 0; row < rows.size(); ++row) {
    list.push_back({rows.kind(row), rows.address<void>(row, 1), rows.address<void>(row, 2), rows.address<void>(row, 3),
                    rows.count(row)});
  }
  const py::gil_scoped_release release;
  return std::make_unique<transfer::Pipeline>(device, std::move(list), chunk_elements);
}

py::dict run(transfer::Pipeline& pipeline, uintptr_t stream) {
  transfer::Stats stats;
  bool finished = false;
  {
    const py::gil_scoped_release release;
    finished = pipeline.run(gpu::stream_of(stream), signal_raised, stats);
  }
  if (!finished) throw py::error_already_set();
  py::dict result;
  result["seconds"] = stats.seconds;
  result["device_seconds"] = stats.device_seconds;
  result["staged_elements"] = stats.staged_elements;
  result["staged_wire_bytes"] = stats.staged_wire_bytes;
  result["direct_elements"] = stats.direct_elements;
  result["direct_wire_bytes"] = stats.direct_wire_bytes;
  result["wire_bandwidth"] = pipeline.wire_bandwidth();
  result["threads"] = cpu::Pool::instance().num_threads();
  return result;
}

py::tuple compare(transfer::Pipeline& pipeline, uintptr_t stream) {
  std::vector<transfer::RowComparison> results;
  transfer::ComparisonStats stats;
  bool finished = false;
  {
    const py::gil_scoped_release release;
    finished = pipeline.compare(gpu::stream_of(stream), signal_raised, results, stats);
  }
  if (!finished) throw py::error_already_set();
  py::list list;
  for (const auto& result : results) list.append(py::make_tuple(to_python(result.device), to_python(result.host)));
  py::dict ways;
  ways["digested_elements"] = stats.digested_elements;
  ways["returned_elements"] = stats.returned_elements;
  ways["staged_elements"] = stats.staged_elements;
  return py::make_tuple(list, ways);
}

}  // namespace

void register_transfer(py::module_& module) {
  auto transfer_module = module.def_submodule("transfer", "The pipeline between GPU weights and their copies");
  py::class_<transfer::PinnedMemory, cpu::HostMemory>(transfer_module, "PinnedMemory", py::buffer_protocol())
      .def(py::init<size_t, int>(), py::arg("nbytes"), py::arg("device"))
      .def("pin", &transfer::PinnedMemory::pin, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("pinned", &transfer::PinnedMemory::pinned);
  py::class_<transfer::Pipeline>(transfer_module, "Pipeline")
      .def(py::init(&make_pipeline), py::arg("device"), py::arg("rows"), py::arg("chunk_elements"))
      .def("run", &run, py::arg("stream"))
      .def("compare", &compare, py::arg("stream"));
}

}  // namespace megasetup
