#include "vectors.h"

#include <stdexcept>

namespace py = pybind11;

namespace megasetup {
namespace {

// Null where the framework speaks another version, or does not offer to read without taking part in ownership.
const dlpack::ExchangeApi* api_of(const py::handle& capsule) {
  const auto* api =
      static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::kExchangeApiName));
  if (api == nullptr) throw py::error_already_set();
  return api->version.major == dlpack::kMajorVersion && api->tensor_from_py_object != nullptr ? api : nullptr;
}

bool is_one_of(PyTypeObject* type, const py::tuple& types) {
  for (py::ssize_t i = 0; i < PyTuple_GET_SIZE(types.ptr()); ++i) {
    if (reinterpret_cast<PyObject*>(type) == PyTuple_GET_ITEM(types.ptr(), i)) return true;
  }
  return false;
}

bool readable(const dlpack::Tensor& tensor) {
  return tensor.dimensions == 1 && tensor.type.bits == 16 && tensor.type.lanes == 1 &&
         (tensor.type.code == dlpack::kBfloat || tensor.type.code == dlpack::kFloat) &&
         (tensor.device.type == dlpack::kCpu || tensor.device.type == dlpack::kCuda) &&
         (tensor.shape[0] <= 1 || tensor.strides[0] == 1);
}

bool is_list_or_tuple(const py::handle& object) { return PyList_Check(object.ptr()) || PyTuple_Check(object.ptr()); }

}  // namespace

std::unique_ptr<Vectors> read_vectors(const py::handle& exchange_api, const py::tuple& types, const py::handle& tensors,
                                      int64_t alignment) {
  if (alignment < 1) throw std::invalid_argument("the alignment is below 1");
  const dlpack::ExchangeApi* api = api_of(exchange_api);
  if (api == nullptr || !is_list_or_tuple(tensors)) return nullptr;
  const py::ssize_t size = PySequence_Fast_GET_SIZE(tensors.ptr());
  if (size == 0) return nullptr;
  auto vectors = std::make_unique<Vectors>();
  vectors->api = api;
  vectors->sources.reserve(static_cast<size_t>(size));
  vectors->counts.reserve(static_cast<size_t>(size));
  vectors->places.reserve(static_cast<size_t>(size));
  dlpack::DataType type{};
  for (py::ssize_t i = 0; i < size; ++i) {
    PyObject* object = PySequence_Fast_GET_ITEM(tensors.ptr(), i);
    if (!is_one_of(Py_TYPE(object), types)) return nullptr;
    dlpack::Tensor tensor{};
    if (api->tensor_from_py_object(object, &tensor) != 0) {
      PyErr_Clear();  // a device or a layout that has no address
      return nullptr;
    }
    if (i == 0) {
      type = tensor.type;
      vectors->device = tensor.device;
    }
    if (!readable(tensor) || tensor.type != type || tensor.device != vectors->device) return nullptr;
    const int64_t count = tensor.shape[0];
    if (tensor.data == nullptr && count > 0) return nullptr;  // its storage has been taken away
    const int64_t place = (count + alignment - 1) / alignment * alignment;
    vectors->sources.push_back(static_cast<const char*>(tensor.data) + tensor.byte_offset);
    vectors->counts.push_back(count);
    vectors->places.push_back(place);
    vectors->total += place;
    vectors->padded |= place != count;
  }
  vectors->kind = type.code == dlpack::kBfloat ? Kind::kWidenBf16 : Kind::kWidenFp16;
  return vectors;
}

void set_data(const py::handle& tensors, const py::handle& values) {
  if (!is_list_or_tuple(tensors) || !is_list_or_tuple(values))
    throw std::invalid_argument("lists or tuples are needed");
  const py::ssize_t size = PySequence_Fast_GET_SIZE(tensors.ptr());
  if (size != PySequence_Fast_GET_SIZE(values.ptr()))
    throw std::invalid_argument("as many values as tensors are needed");
  static PyObject* const name = PyUnicode_InternFromString("data");
  for (py::ssize_t i = 0; i < size; ++i) {
    PyObject* tensor = PySequence_Fast_GET_ITEM(tensors.ptr(), i);
    if (PyObject_SetAttr(tensor, name, PySequence_Fast_GET_ITEM(values.ptr(), i)) != 0) throw py::error_already_set();
  }
}

}  // namespace megasetup
