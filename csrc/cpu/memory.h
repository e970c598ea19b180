// The scratch space of a call is one piece of memory: sizes are added up first, then the pieces are handed out.
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime.h"

namespace eformer::EFORMER_ISA {

template <class T>
struct Slot {
  size_t offset;
  size_t stride;  // bytes from the piece of one worker to that of the next

  T* in(std::byte* base, int64_t worker = 0) const { return reinterpret_cast<T*>(base + offset + worker * stride); }
};

struct Layout {
  size_t bytes = 0;

  template <class T>
  Slot<T> add(int64_t count, int64_t workers = 1) {
    const size_t stride = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    const Slot<T> slot{bytes, stride};
    bytes += stride * static_cast<size_t>(workers);
    return slot;
  }
};

template <class Fn>
inline Body body_of(Fn& f) {
  return {[](void* data, int64_t chunk, int64_t worker) { (*static_cast<Fn*>(data))(chunk, worker); }, &f};
}

// f(chunk, worker) for each chunk, on the threads of the runtime.
template <class Fn>
inline void for_each(Runtime& runtime, int64_t chunks, Fn&& f) {
  runtime.loop(chunks, body_of(f));
}

// The same once `prepare(0, 0)` has returned, which takes microseconds and hides the time the threads need to wake up.
template <class Prepare, class Fn>
inline void prepare_for_each(Runtime& runtime, Prepare&& prepare, int64_t chunks, Fn&& f) {
  runtime.loop(chunks, body_of(f), body_of(prepare));
}

}  // namespace eformer::EFORMER_ISA
