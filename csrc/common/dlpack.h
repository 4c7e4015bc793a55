// The part of DLPack's C exchange interface (version 1.3 of https://github.com/dmlc/dlpack) that is used here: where a
// Python tensor's elements lie, asked of its framework by one C call. It is an interface between binaries, so that no
// header of the framework is needed, and none of its releases breaks it.
#pragma once

#include <cstdint>

namespace megasetup::dlpack {

struct Version {
  uint32_t major;
  uint32_t minor;
};

constexpr uint32_t kMajorVersion = 1;

enum DeviceType : int32_t { kCpu = 1, kCuda = 2 };
enum TypeCode : uint8_t { kFloat = 2, kBfloat = 4 };

struct Device {
  int32_t type;
  int32_t index;

  bool operator==(const Device&) const = default;
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;

  bool operator==(const DataType&) const = default;
};

struct Tensor {
  void* data;
  Device device;
  int32_t dimensions;
  DataType type;
  int64_t* shape;
  int64_t* strides;  // in elements
  uint64_t byte_offset;
};

struct ExchangeApi {
  Version version;
  void* previous;
  // Not used here; they hold the places of what is.
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object;
  void* managed_tensor_to_py_object;
  // Fills `out` with what `object` is, which stays valid as long as the object is unchanged. -1 with a Python error.
  int (*tensor_from_py_object)(void* object, Tensor* out);
  // The stream that the framework would launch on now. -1 with a Python error.
  int (*current_work_stream)(int32_t device_type, int32_t device_index, void** out);
};

// The name of the capsule that a tensor type's __dlpack_c_exchange_api__ is.
constexpr const char* kExchangeApiName = "dlpack_exchange_api";

}  // namespace megasetup::dlpack
