// Copies many pieces of device memory in one launch, and sums up the words of each.
//
// A tile is a part of a piece: `nbytes` at `from` that go to `to`. The sum of a piece is that of its
// 64-bit words from its start, modulo 2^64, where bytes behind the last whole word count as numbers
// of their own. Tiles but the last of a piece have a multiple of 16 bytes.
//
// `what` is done with the tiles `first`, `first + every`, ...: 0 copies and sums up what is read, 1
// only sums up what is at `from`, 2 what is at `to`.
//
// copy_and_sum.ptx is made of this file by `python -m benchmarks.gpu.kernels`.

typedef unsigned long long u64;

struct Tile {
    const unsigned char* from;
    unsigned char* to;
    u64 nbytes;
    u64 piece;
};

struct alignas(16) Pair {
    u64 low, high;
};

__device__ u64 word_at(const unsigned char* at) {
    u64 word = 0;
    for (int byte = 7; byte >= 0; byte--) word = word << 8 | at[byte];
    return word;
}

extern "C" __global__ void torchrelay_copy_and_sum(
    const Tile* tiles, u64 count, u64* sums, u64 first, u64 every, u64 what) {
    const u64 width = blockDim.x;
    for (u64 number = first + blockIdx.x * every; number < count; number += gridDim.x * every) {
        Tile tile = tiles[number];
        if (what == 2) tile.from = tile.to;
        if (what != 0) tile.to = 0;
        u64 sum = 0, done = 0;
        if ((((u64)tile.from | (u64)tile.to) & 15) == 0) {
            const Pair* from = (const Pair*)tile.from;
            Pair* to = (Pair*)tile.to;
            const u64 pairs = tile.nbytes / 16;
            u64 index = threadIdx.x;
            for (; index + 3 * width < pairs; index += 4 * width) {
                const Pair a = from[index], b = from[index + width];
                const Pair c = from[index + 2 * width], d = from[index + 3 * width];
                if (to) {
                    to[index] = a;
                    to[index + width] = b;
                    to[index + 2 * width] = c;
                    to[index + 3 * width] = d;
                }
                sum += a.low + a.high + b.low + b.high + c.low + c.high + d.low + d.high;
            }
            for (; index < pairs; index += width) {
                const Pair a = from[index];
                if (to) to[index] = a;
                sum += a.low + a.high;
            }
            done = pairs * 16;
        }
        // What is not aligned, and what is left: words, then bytes.
        for (u64 at = done + threadIdx.x * 8; at + 8 <= tile.nbytes; at += width * 8) {
            if (tile.to)
                for (int byte = 0; byte < 8; byte++) tile.to[at + byte] = tile.from[at + byte];
            sum += word_at(tile.from + at);
        }
        const u64 tail = tile.nbytes & ~7ull;
        if (tail + threadIdx.x < tile.nbytes) {
            const unsigned char byte = tile.from[tail + threadIdx.x];
            if (tile.to) tile.to[tail + threadIdx.x] = byte;
            sum += byte;
        }
        if (sums) {
            for (int lane = 16; lane; lane /= 2) sum += __shfl_down_sync(~0u, sum, lane);
            if (threadIdx.x % 32 == 0 && sum) atomicAdd(sums + tile.piece, sum);
        }
    }
}
