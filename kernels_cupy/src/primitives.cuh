// Everything about the machine that a kernel needs, in one place: words, streaming loads and stores, atomics.
//
// With KV_EMULATED the same kernels are compiled as C++ for a CPU (emu/device.hpp stands in for the hardware).

#pragma once

#ifdef KV_EMULATED
#include "device.hpp"
#endif

// Widest words that memory moves in. Both addresses must be multiples of BYTES.
template <int BYTES> struct Word;
template <> struct Word<1> { using type = unsigned char; };
template <> struct Word<2> { using type = unsigned short; };
template <> struct Word<4> { using type = unsigned int; };
template <> struct Word<8> { using type = uint2; };
template <> struct Word<16> { using type = uint4; };

// Every byte is touched once: it should not push anything else out of the caches.
template <class T> __device__ __forceinline__ T load_once(const T* from) {
#ifdef KV_EMULATED
  return *from;
#else
  return __ldcs(from);
#endif
}

template <class T> __device__ __forceinline__ void store_once(T* to, T word) {
#ifdef KV_EMULATED
  *to = word;
#else
  __stcs(to, word);
#endif
}

// Set `bit` and return the word as it was: of all threads that claim a bit, one finds it clear.
__device__ __forceinline__ unsigned int claim(unsigned int* word, unsigned int bit) {
#ifdef KV_EMULATED
  unsigned int before = *word;
  *word = before | bit;
  return before;
#else
  return atomicOr(word, bit);
#endif
}
