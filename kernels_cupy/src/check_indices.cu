// Checks an index list that lies on the device, by the rules of refimpl/indices.py, and turns it into page numbers.
//
// Any broken rule sets `fault`, and the copies that wait for this check move nothing. Which index it was is found out
// later, on the host, by the same rules: only the failing case pays for that.

#include "primitives.cuh"

struct CheckIndices {
  const void* indices;
  long long* pages;       // out: one number a page
  unsigned int* claimed;  // one bit a page of the pool, all clear; null: pages may repeat
  int* fault;             // out: 1 if any rule is broken, else left alone
  long long count, page_size, num_pages;
  int index_bytes;  // 4 or 8
  int unused;
};
static_assert(sizeof(CheckIndices) == 64, "mirrored in specs.py");

__device__ __forceinline__ long long read_index(const CheckIndices& a, long long i) {
  return a.index_bytes == 4 ? ((const int*)a.indices)[i] : ((const long long*)a.indices)[i];
}

__global__ void __launch_bounds__(1024) check_indices(const __grid_constant__ CheckIndices a) {
  long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < a.count; i += step) {
    long long inside = i % a.page_size, first = read_index(a, i - inside), page = first / a.page_size;
    bool good = first >= 0 && page < a.num_pages;
    good = good && first % a.page_size == 0 && read_index(a, i) == first + inside;
    if (good && inside == 0 && a.claimed) {
      unsigned int bit = 1u << (page % 32);
      good = !(claim(&a.claimed[page / 32], bit) & bit);
    }
    if (inside == 0) a.pages[i / a.page_size] = good ? page : 0;
    if (!good) *a.fault = 1;
  }
}
