// The C functions that Python calls to move bytes between memory and files (zeroshard/nvme/native.py).
//
// A plain C interface, loaded with ctypes, as that of the host kernels: csrc/library.cpp says why. Rejected: libaio, whose
// headers have to be there at installation, and a thread of Python's for each request, which wakes too late for a disk of
// several GB/s.
#include <cstdint>

#include "transfer.hpp"

#define ZEROSHARD_API extern "C" __attribute__((visibility("default")))

using zeroshard::Engine;
using zeroshard::Transfer;

ZEROSHARD_API std::int32_t zeroshard_disk_version() { return 1; }

// Null where the system does not have this kind: 0 is io_uring, 1 threads.
ZEROSHARD_API void* zeroshard_disk_open(std::int32_t kind, std::int32_t depth) {
  return kind == 0 ? zeroshard::make_ring_engine(depth) : zeroshard::make_thread_engine(depth);
}

ZEROSHARD_API void* zeroshard_disk_submit(void* engine, std::int32_t write, std::int32_t file, std::int64_t offset,
                                          void* at, std::int64_t nbytes) {
  return static_cast<Engine*>(engine)->submit(write != 0, file, offset, static_cast<char*>(at), nbytes);
}

ZEROSHARD_API std::int32_t zeroshard_disk_wait(void* engine, void* transfer, double seconds) {
  return static_cast<Engine*>(engine)->wait(static_cast<Transfer*>(transfer), seconds);
}

// What the kernel still writes to stays: an engine that does not end in time is left as it is.
ZEROSHARD_API std::int32_t zeroshard_disk_close(void* engine, double seconds) {
  Engine* open = static_cast<Engine*>(engine);
  if (!open->stop(seconds)) return 0;
  delete open;
  return 1;
}
