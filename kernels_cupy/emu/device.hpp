// A CUDA device made of one CPU core: every thread of a block is a fiber, blocks run one after another.
//
// Fibers switch at barriers only, in an order that the launch chooses; a barrier that some threads skip, or threads that
// wait at different ones, end the process with a message. There is no memory model, no PTX and no shared memory bank.

#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
static thread_local dim3 gridDim, blockDim, blockIdx, threadIdx;

namespace device {

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(64 * 1024);
  int line = 0;  // of the barrier at which it waits
  bool done = false;
};

static thread_local std::vector<Fiber> fibers;
static thread_local ucontext_t scheduler;
static thread_local const std::function<void()>* kernel;
static thread_local unsigned current;

[[noreturn]] inline void fail(const char* what) {
  fprintf(stderr, "emulated device: block %u: %s\n", blockIdx.x, what);
  abort();
}

inline void enter() {
  (*kernel)();
  fibers[current].done = true;
  swapcontext(&fibers[current].context, &scheduler);
}

inline void barrier(int line) {
  unsigned self = current;
  fibers[self].line = line;
  swapcontext(&fibers[self].context, &scheduler);
  threadIdx.x = self;
}

// Forward, backward, or shuffled by a seed: a missing barrier shows in one of them.
inline std::vector<unsigned> turns(unsigned threads, unsigned order) {
  std::vector<unsigned> turn(threads);
  std::iota(turn.begin(), turn.end(), 0u);
  if (order == 1) std::reverse(turn.begin(), turn.end());
  for (unsigned i = threads - 1, state = order; order > 1 && i > 0; i--) {
    state = state * 1664525u + 1013904223u;
    std::swap(turn[i], turn[(state >> 8) % (i + 1)]);
  }
  return turn;
}

// From one barrier to the next: every thread runs until it waits or ends, and all must do the same.
inline void run_block(const std::vector<unsigned>& turn) {
  for (;;) {
    unsigned waiting = 0;
    for (unsigned i : turn) {
      if (fibers[i].done) continue;
      current = i, threadIdx.x = i;
      swapcontext(&scheduler, &fibers[i].context);
      waiting += !fibers[i].done;
    }
    if (!waiting) return;
    if (waiting != turn.size()) fail("a barrier was not reached by all threads");
    for (Fiber& fiber : fibers)
      if (fiber.line != fibers[0].line) fail("threads wait at different barriers");
  }
}

inline void launch(unsigned blocks, unsigned threads, unsigned order, const std::function<void()>& body) {
  if (threads == 0 || threads > 1024) fail("a block has 1 to 1024 threads");
  gridDim = {blocks}, blockDim = {threads}, kernel = &body;
  fibers.resize(threads);
  std::vector<unsigned> turn = turns(threads, order);
  for (unsigned block = 0; block < blocks; block++) {
    blockIdx = {block};
    for (Fiber& fiber : fibers) {
      fiber.done = false;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data();
      fiber.context.uc_stack.ss_size = fiber.stack.size();
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, enter, 0);
    }
    run_block(turn);
  }
}

}  // namespace device

inline void __syncthreads(int line = __builtin_LINE()) { device::barrier(line); }
