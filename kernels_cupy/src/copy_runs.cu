// Executes a transfer plan: copies every run of every item of every layer, from either memory to the other.
//
// A unit of work is one piece of one run. Units are numbered so that neighbours lie next to each other in memory. Each
// group of `lanes` threads takes a few neighbours at a time, and keeps four loads in flight before the first store.

#include "primitives.cuh"

constexpr int MAX_STARTS = 112;  // layers of one launch: the struct must stay below the 4 KiB of a launch's arguments
constexpr int MAX_LOOPS = 3;     // token, head group, head
constexpr int IN_FLIGHT = 4;

// Host memory from `begin` to `end` has another address on the device: `alias` + (address - begin).
struct Registration {
  unsigned long long begin, end, alias;
};

// One end of the copy: where page 0 of each layer begins, and how to get from there to a run.
struct Side {
  unsigned long long starts[MAX_STARTS];
  const long long* items;             // page (or entry) numbers; null: 0, 1, 2, …
  const Registration* registrations;  // null: addresses are the device's own
  long long page;                     // bytes from one page to the next
  long long entries;                  // items of one page
  long long entry_bytes;              // bytes from one entry to the next
  long long steps[MAX_LOOPS];         // bytes of a step of each loop, outermost first
  long long registration_count;
};

struct CopyRuns {
  Side to, source;
  const int* fault;  // what the check of the index lists found; null: they were checked before
  long long starts, items;
  long long counts[MAX_LOOPS];
  long long run, piece;  // bytes; a piece is a multiple of the word
  int lanes;             // threads that share a piece: a power of two, at most 32
  int if_fault;          // run only when the check's verdict was this
  int items_outermost;   // 1: item after item, for memory that keeps a page together; 0: layer after layer
  int together;          // neighbouring units that a group takes in turn
};
static_assert(sizeof(CopyRuns) == 2 * (8 * MAX_STARTS + 72) + 80 && sizeof(CopyRuns) < 4096, "mirrored in specs.py");

// Which run, and which piece of it, a unit stands for.
struct Place {
  long long start, item, loops[MAX_LOOPS], piece;
};

// Divisions are what a short run costs most, and most bases are 1.
__device__ __forceinline__ long long digit(long long& number, long long base) {
  if (base == 1) return 0;
  long long rest = number / base, found = number - rest * base;
  number = rest;
  return found;
}

__device__ __forceinline__ Place place_of(long long unit, long long pieces, const CopyRuns& a) {
  Place at;
  at.piece = digit(unit, pieces);
#pragma unroll
  for (int i = MAX_LOOPS - 1; i >= 0; i--) at.loops[i] = digit(unit, a.counts[i]);
  if (a.items_outermost) {
    at.start = digit(unit, a.starts);
    at.item = unit;
  } else {
    at.item = digit(unit, a.items);
    at.start = unit;
  }
  return at;
}

__device__ __forceinline__ unsigned long long device_address(unsigned long long address, const Side& side) {
  for (long long i = 0; i < side.registration_count; i++) {
    Registration r = side.registrations[i];
    if (r.begin <= address && address < r.end) return r.alias + (address - r.begin);
  }
  return address;
}

__device__ __forceinline__ unsigned long long address_of(const Place& at, const Side& side) {
  long long page = side.items ? side.items[at.item] : at.item;
  long long entry = digit(page, side.entries);
  long long offset = page * side.page + entry * side.entry_bytes;
#pragma unroll
  for (int i = 0; i < MAX_LOOPS; i++) offset += at.loops[i] * side.steps[i];
  return device_address(side.starts[at.start] + offset, side);
}

template <class T>
__device__ __forceinline__ void copy_words(T* to, const T* source, long long words, int lane, int lanes) {
  for (long long i = lane; i < words; i += IN_FLIGHT * lanes) {
    T held[IN_FLIGHT];
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; k++)
      if (i + k * lanes < words) held[k] = load_once(source + i + k * lanes);
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; k++)
      if (i + k * lanes < words) store_once(to + i + k * lanes, held[k]);
  }
}

template <int BYTES> __global__ void __launch_bounds__(1024) copy_runs(const __grid_constant__ CopyRuns a) {
  using T = typename Word<BYTES>::type;
  if (a.fault && (*a.fault != 0) != a.if_fault) return;
  long long pieces = (a.run + a.piece - 1) / a.piece;
  long long units = a.starts * a.items * a.counts[0] * a.counts[1] * a.counts[2] * pieces;
  long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  long long groups = (long long)gridDim.x * blockDim.x / a.lanes;
  for (long long first = thread / a.lanes * a.together; first < units; first += groups * a.together) {
    long long end = first + a.together < units ? first + a.together : units;
    for (long long unit = first; unit < end; unit++) {
      Place at = place_of(unit, pieces, a);
      long long begin = at.piece * a.piece, left = a.run - begin;
      long long bytes = left < a.piece ? left : a.piece;
      T* to = (T*)(address_of(at, a.to) + begin);
      const T* source = (const T*)(address_of(at, a.source) + begin);
      copy_words(to, source, bytes / BYTES, (int)(thread % a.lanes), a.lanes);
    }
  }
}
