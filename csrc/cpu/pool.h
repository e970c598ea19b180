// The runtime of a call: XLA's own threads, and memory that the calling thread keeps from call to call.
#pragma once

#include <atomic>
#include <memory>
#include <new>
#include <thread>

#include "runtime.h"
#include "xla/ffi/api/ffi.h"

namespace eformer {

// Memory of one thread, grown when needed. More than `kept` is given back at the end of the call that needed it.
class Scratch {
 public:
  static constexpr size_t kept = size_t{32} << 20;

  std::byte* reserve(size_t bytes) {
    if (bytes > size_) {
      memory_.reset();
      size_ = 0;
      memory_.reset(static_cast<std::byte*>(::operator new(bytes, alignment)));
      size_ = bytes;
    }
    return memory_.get();
  }

  void trim() {
    if (size_ > kept) {
      memory_.reset();
      size_ = 0;
    }
  }

  static Scratch& of_this_thread() {
    static thread_local Scratch scratch;
    return scratch;
  }

 private:
  static constexpr std::align_val_t alignment{64};
  struct Free {
    void operator()(std::byte* p) const { ::operator delete(p, alignment); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  size_t size_ = 0;
};

// Everything on the calling thread.
class Inline : public Runtime {
 public:
  Inline() = default;
  Inline(const Inline&) = delete;
  ~Inline() { Scratch::of_this_thread().trim(); }

  int64_t workers() const override { return 1; }
  void loop(int64_t chunks, Body body, Body prepare = {}) override {
    if (prepare.call) prepare.call(prepare.data, 0, 0);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) body.call(body.data, chunk, 0);
  }
  std::byte* scratch(size_t bytes) override { return Scratch::of_this_thread().reserve(bytes); }
};

// The calling thread and helpers from XLA's pool share the chunks. A pool that never gets round to its helpers costs speed
// only: the caller then does every chunk itself, and a late helper finds nothing left and touches nothing else.
class Pool final : public Inline {
 public:
  // At most `limit` threads; 0 means all of the pool.
  Pool(xla::ffi::ThreadPool& pool, int64_t limit) : pool_(pool) {
    const int64_t threads = limit == 1 ? 1 : pool.num_threads();
    workers_ = std::max<int64_t>(1, limit > 0 ? std::min(limit, threads) : threads);
  }

  int64_t workers() const override { return workers_; }

  void loop(int64_t chunks, Body body, Body prepare = {}) override {
    const int64_t helpers = std::min(workers_, chunks) - 1;
    if (helpers < 1) return Inline::loop(chunks, body, prepare);
    auto loop = std::make_shared<Loop>(chunks, helpers + 1, body);
    for (int64_t i = 0; i < helpers; ++i) pool_.Schedule([loop] { loop->help(); });
    if (prepare.call) prepare.call(prepare.data, 0, 0);
    loop->open.store(true, std::memory_order_release);
    loop->work();
    loop->wait();
  }

 private:
  // Each worker has a range of neighbouring chunks, so that it reads a long run of memory and what it asks for in advance
  // is for itself; whoever is done goes on in the ranges of the others.
  struct alignas(64) Range {
    std::atomic<int64_t> next;
    int64_t end;
  };

  struct Loop {
    Loop(int64_t chunks, int64_t workers, Body body)
        : chunks(chunks), workers(workers), body(body), ranges(std::make_unique<Range[]>(workers)) {
      for (int64_t i = 0; i < workers; ++i) {
        ranges[i].next = chunks * i / workers;
        ranges[i].end = chunks * (i + 1) / workers;
      }
    }

    void help() {
      await([this] { return open.load(std::memory_order_acquire); });
      work();
    }

    void work() {
      const int64_t worker = arrived.fetch_add(1, std::memory_order_relaxed);
      for (int64_t i = 0; i < workers; ++i) {
        Range& range = ranges[(worker + i) % workers];
        for (int64_t chunk; (chunk = range.next.fetch_add(1, std::memory_order_relaxed)) < range.end;) {
          body.call(body.data, chunk, worker);
          done.fetch_add(1, std::memory_order_release);
        }
      }
    }

    void wait() const {
      await([this] { return done.load(std::memory_order_acquire) == chunks; });
    }

    // What is awaited takes microseconds, hence no sleep; yielding lets the others finish on a crowded machine.
    template <class Ready>
    static void await(Ready&& ready) {
      for (int spins = 0; !ready(); ++spins) {
        if (spins > 1000) std::this_thread::yield();
      }
    }

    const int64_t chunks, workers;
    const Body body;
    const std::unique_ptr<Range[]> ranges;
    std::atomic<bool> open{false};
    std::atomic<int64_t> done{0}, arrived{0};
  };

  xla::ffi::ThreadPool& pool_;
  int64_t workers_;
};

}  // namespace eformer
