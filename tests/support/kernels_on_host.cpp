// The kernels of src/torchrelay/memory/gpu/kernels.cu on the CPU: eight threads are the lanes that take
// a chunk, and meet wherever lanes exchange words.

#include <barrier>
#include <thread>
#include <vector>

#define __device__ static
#define __global__
#define __constant__ static const
#define __forceinline__ inline
#define __noinline__

struct Index {
    unsigned x;
};
static thread_local Index threadIdx;
static Index blockDim{8}, blockIdx{0}, gridDim{1};
static std::barrier<> meeting(8);
static unsigned long long said[8];

static unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned __int128)a * b >> 64;
}

static unsigned long long __shfl_xor_sync(unsigned, unsigned long long word, int other, int) {
    said[threadIdx.x] = word;
    meeting.arrive_and_wait();
    const unsigned long long found = said[threadIdx.x ^ other];
    meeting.arrive_and_wait();
    return found;
}

static void __syncwarp(unsigned) { meeting.arrive_and_wait(); }

#include "kernels.cu"

extern "C" void hash_on_host(
    const Chunk* chunks, u64 count, const Segment* segments, u64* found, bool copies) {
    std::vector<std::thread> lanes;
    for (unsigned lane = 0; lane < 8; lane++)
        lanes.emplace_back([=] {
            threadIdx.x = lane;
            const auto kernel = copies ? torchrelay_copy_xxh3_128 : torchrelay_xxh3_128;
            kernel(chunks, count, segments, found);
        });
    for (auto& lane : lanes) lane.join();
}
