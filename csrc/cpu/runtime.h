// What a kernel gets from outside: threads and memory.
//
// The kernels are compiled once per instruction set, so they must not instantiate inline functions that other files share:
// the linker keeps one copy of those, perhaps the one with the newest instructions. Hence an abstract class here instead
// of std::function, std::atomic and std::vector.
#pragma once

#include <cstddef>
#include <cstdint>

namespace eformer {

// A loop body: call(data, chunk, worker).
struct Body {
  void (*call)(void* data, int64_t chunk, int64_t worker) = nullptr;
  void* data = nullptr;
};

class Runtime {
 public:
  // Threads that may take part in a loop; the `worker` a body sees is below this.
  virtual int64_t workers() const = 0;
  // Calls the body once for each chunk, in any order on any worker, and returns when all are done. `prepare` is called
  // before, on the calling thread, while the others wake up: for what takes microseconds.
  virtual void loop(int64_t chunks, Body body, Body prepare = {}) = 0;
  // Uninitialized memory aligned to 64 bytes, owned by the runtime, valid until the next call of `scratch`.
  virtual std::byte* scratch(size_t bytes) = 0;

 protected:
  ~Runtime() = default;
};

}  // namespace eformer
