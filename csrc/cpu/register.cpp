// megasetup._C.cpu: the CPU kernels over rows of (kind, source, target, count), and the worker pool's settings.
#include "cpu/host_memory.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/pool.h"
#include "python.h"
#include "vectors.h"

namespace py = pybind11;

namespace megasetup {
namespace {

// The weight is the source of a widening and the target of a narrowing.
cpu::Segments segments_of(const py::buffer& buffer, int64_t weight_column) {
  const Rows rows(buffer, 4);
  std::vector<cpu::Segment> segments;
  segments.reserve(static_cast<size_t>(rows.size()));
  for (int64_t row = 0; row < rows.size(); ++row) {
    segments.push_back({rows.kind(row), rows.address<void>(row, weight_column),
                        rows.address<void>(row, 3 - weight_column), rows.count(row)});
  }
  return cpu::Segments(std::move(segments));
}

template <typename Work>
void without_gil(const Work& work) {
  bool finished = false;
  {
    const py::gil_scoped_release release;
    finished = work();
  }
  if (!finished) throw py::error_already_set();
}

}  // namespace

void register_cpu(py::module_& module) {
  auto cpu_module = module.def_submodule("cpu", "Kernels on host memory");
  cpu_module.def("widen", [](const py::buffer& rows) {
    const auto segments = segments_of(rows, 1);
    without_gil([&] { return cpu::widen(segments, signal_raised); });
  });
  cpu_module.def("narrow", [](const py::buffer& rows) {
    const auto segments = segments_of(rows, 2);
    without_gil([&] { return cpu::narrow(segments, signal_raised); });
  });
  module.def("set_data", &set_data, py::arg("tensors"), py::arg("values"));
  py::class_<Vectors>(module, "Vectors")
      .def_static("read", &read_vectors, py::arg("exchange_api"), py::arg("types"), py::arg("tensors"),
                  py::arg("alignment"))
      .def_readonly("counts", &Vectors::counts)
      .def_readonly("places", &Vectors::places)
      .def_readonly("total", &Vectors::total)
      .def_readonly("padded", &Vectors::padded)
      .def_property_readonly("on_gpu", &Vectors::on_gpu);
  cpu_module.def("widen_vectors", [](const Vectors& vectors, uintptr_t target) {
    if (vectors.on_gpu()) throw std::invalid_argument("vectors on a GPU");
    std::vector<cpu::Segment> segments;
    segments.reserve(vectors.sources.size());
    for (size_t i = 0; i < vectors.sources.size(); ++i) {
      segments.push_back({vectors.kind, vectors.sources[i], reinterpret_cast<void*>(target), vectors.counts[i]});
      target += static_cast<uintptr_t>(vectors.places[i]) * sizeof(float);
    }
    const cpu::Segments list(std::move(segments));
    without_gil([&] { return cpu::widen(list, signal_raised); });
  });
  cpu_module.def("compare", [](const py::buffer& rows) {
    const auto segments = segments_of(rows, 1);
    std::vector<Comparison> results;
    without_gil([&] { return cpu::compare(segments, results, signal_raised); });
    py::list list;
    for (const Comparison& result : results) list.append(to_python(result));
    return list;
  });
  // A buffer of bytes, which keeps the memory as long as anything was made of it.
  py::class_<cpu::HostMemory>(cpu_module, "HostMemory", py::buffer_protocol())
      .def(py::init<size_t>(), py::arg("nbytes"))
      .def("touch", [](cpu::HostMemory& memory, size_t begin,
                       size_t end) { without_gil([&] { return memory.touch(begin, end, signal_raised); }); })
      .def_property_readonly("nbytes", &cpu::HostMemory::size)
      .def_buffer([](cpu::HostMemory& memory) {
        return py::buffer_info(reinterpret_cast<unsigned char*>(memory.data()),
                               static_cast<py::ssize_t>(memory.size()));
      });
  cpu_module.def("num_threads", [] { return cpu::Pool::instance().num_threads(); });
  cpu_module.def("num_reading_threads", [] { return cpu::Pool::instance().num_threads(cpu::Use::kReading); });
  cpu_module.def("set_num_threads", [](int threads) {
    const py::gil_scoped_release release;
    cpu::Pool::instance().set_num_threads(threads);
  });
  cpu_module.def("use_default_threads", [] {
    const py::gil_scoped_release release;
    cpu::Pool::instance().use_default_threads();
  });
  cpu_module.def("instruction_set", [] { return cpu::kernels().name; });
  cpu_module.def("instruction_sets", cpu::kernel_names);
  cpu_module.def("set_instruction_set", cpu::set_kernels);
  // Workers must not outlive the interpreter's own teardown.
  py::module_::import("atexit").attr("register")(py::cpp_function([] {
    const py::gil_scoped_release release;
    cpu::Pool::instance().shutdown();
  }));
}

}  // namespace megasetup
