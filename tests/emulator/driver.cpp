#include "driver.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "settings.h"
#include "stepped.h"

namespace emu {

Driver::Driver() {
  for (int ordinal = 0; ordinal < settings().devices; ++ordinal) {
    devices.push_back(std::make_unique<Device>(ordinal, SteppedMemory() != 0 ? SteppedMemory() : settings().memory));
    devices.back()->primary = contexts.Reserve();
    devices.back()->default_pool = devices.back()->current_pool = NewPool(*this, ordinal);
  }
}

Driver& driver() {
  static auto* const state = new Driver;
  return *state;
}

Device& DeviceAt(CUdevice ordinal) {
  auto& devices = driver().devices;
  Require(ordinal >= 0 && static_cast<std::size_t>(ordinal) < devices.size(), CUDA_ERROR_INVALID_DEVICE);
  return *devices[static_cast<std::size_t>(ordinal)];
}

CUresult DeviceGet(CUdevice* out, int ordinal) {
  Lock lock(global_mutex());
  Require(out != nullptr);
  *out = DeviceAt(ordinal).ordinal;
  return CUDA_SUCCESS;
}

CUresult DeviceGetCount(int* count) {
  Lock lock(global_mutex());
  Require(count != nullptr);
  *count = static_cast<int>(driver().devices.size());
  return CUDA_SUCCESS;
}

CUresult DeviceGetName(char* name, int size, CUdevice ordinal) {
  Lock lock(global_mutex());
  Require(name != nullptr && size > 0);
  DeviceAt(ordinal);
  const std::string text = "Emulated device";
  name[text.copy(name, static_cast<std::size_t>(size) - 1)] = '\0';
  return CUDA_SUCCESS;
}

CUresult DeviceTotalMem(size_t* bytes, CUdevice ordinal) {
  Lock lock(global_mutex());
  Require(bytes != nullptr);
  *bytes = DeviceAt(ordinal).total;
  return CUDA_SUCCESS;
}

CUresult DeviceGetUuid(CUuuid* uuid, CUdevice ordinal) {
  Lock lock(global_mutex());
  Require(uuid != nullptr);
  DeviceAt(ordinal);
  std::memcpy(uuid->bytes, "emulated device", sizeof uuid->bytes);
  uuid->bytes[sizeof uuid->bytes - 1] = static_cast<char>(ordinal);
  return CUDA_SUCCESS;
}

CUresult DeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  Lock lock(global_mutex());
  Require(can != nullptr);
  *can = DeviceAt(device).ordinal != DeviceAt(peer).ordinal ? 1 : 0;
  return CUDA_SUCCESS;
}

// What programs ask before they use memory; everything else is zero.
CUresult DeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice ordinal) {
  Lock lock(global_mutex());
  Require(value != nullptr);
  const Device& device = DeviceAt(ordinal);
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = 9;
      break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      *value = 132;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      *value = 1024;
      break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
      *value = 32;
      break;
    case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT:
      *value = 512;
      break;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
      *value = device.ordinal + 1;
      break;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
      *value = 1;
      break;
    default:
      *value = 0;
  }
  return CUDA_SUCCESS;
}

}  // namespace emu
