// Kernels for two versions of the same elements: which of them differ, and how many.
//
// changes.ptx is made of this file by `python -m benchmarks.gpu.kernels --write`.

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned char u8;

// A part of a field: `count` elements of two versions, and the bits that say which of them differ.
// The lowest bit of a byte is the first element. Parts begin with a byte of bits of their own.
struct Part {
    const u8* before;
    const u8* after;
    u8* bits;
    u64 count;
};

struct alignas(16) Quad {
    u32 words[4];
};

template <int SIZE>
__device__ __forceinline__ bool differ(const u8* a, const u8* b) {
#pragma unroll
    for (int byte = 0; byte < SIZE; byte++)
        if (a[byte] != b[byte]) return true;
    return false;
}

// The bits of eight elements of at least two bytes each, by loads of 16 bytes.
template <int SIZE>
__device__ __forceinline__ u32 bits_of(const Quad* a, const Quad* b) {
    u32 bits = 0;
#pragma unroll
    for (int quad = 0; quad < SIZE / 2; quad++) {
        const Quad x = a[quad], y = b[quad];
        u32 any = 0;
#pragma unroll
        for (int word = 0; word < 4; word++) {
            const u32 apart = x.words[word] ^ y.words[word];
            const int at = (16 * quad + 4 * word) / SIZE;
            if (SIZE == 2) {
                bits |= (u32)((apart & 0xffffu) != 0) << at | (u32)(apart >> 16 != 0) << (at + 1);
            } else {
                bits |= (u32)(apart != 0) << at;
            }
            any |= apart;
        }
    }
    return bits;
}

template <int SIZE>
__device__ __forceinline__ void find(const Part* parts, u64 count) {
    const u64 width = blockDim.x;
    for (u64 number = blockIdx.x; number < count; number += gridDim.x) {
        const Part part = parts[number];
        const u64 whole = part.count / 8;
        u64 index = threadIdx.x;
        if (SIZE > 1 && (((u64)part.before | (u64)part.after) & 15) == 0) {
            const Quad* before = (const Quad*)part.before;
            const Quad* after = (const Quad*)part.after;
            const u64 each = SIZE > 1 ? SIZE / 2 : 1;
            for (; index + 3 * width < whole; index += 4 * width) {
                u32 found[4];
#pragma unroll
                for (int turn = 0; turn < 4; turn++) {
                    const u64 at = (index + turn * width) * each;
                    found[turn] = bits_of<SIZE>(before + at, after + at);
                }
#pragma unroll
                for (int turn = 0; turn < 4; turn++)
                    part.bits[index + turn * width] = (u8)found[turn];
            }
#pragma unroll 1
            for (; index < whole; index += width)
                part.bits[index] = (u8)bits_of<SIZE>(before + index * each, after + index * each);
        } else if (SIZE == 1 && (((u64)part.before | (u64)part.after) & 7) == 0) {
            for (; index < whole; index += width) {
                const u64 apart = ((const u64*)part.before)[index] ^ ((const u64*)part.after)[index];
                u32 bits = 0;
#pragma unroll
                for (int byte = 0; byte < 8; byte++)
                    bits |= (u32)((apart >> (8 * byte) & 255) != 0) << byte;
                part.bits[index] = (u8)bits;
            }
        }
        // What is left: memory that is not aligned, and the last elements.
#pragma unroll 1
        for (; index < (part.count + 7) / 8; index += width) {
            u32 bits = 0;
#pragma unroll 1
            for (u64 at = 8 * index; at < 8 * index + 8 && at < part.count; at++)
                bits |= (u32)differ<SIZE>(part.before + at * SIZE, part.after + at * SIZE)
                        << (at - 8 * index);
            part.bits[index] = (u8)bits;
        }
    }
}

extern "C" __global__ void torchrelay_changes_1(const Part* p, u64 n) { find<1>(p, n); }
extern "C" __global__ void torchrelay_changes_2(const Part* p, u64 n) { find<2>(p, n); }
extern "C" __global__ void torchrelay_changes_4(const Part* p, u64 n) { find<4>(p, n); }
extern "C" __global__ void torchrelay_changes_8(const Part* p, u64 n) { find<8>(p, n); }
extern "C" __global__ void torchrelay_changes_16(const Part* p, u64 n) { find<16>(p, n); }

// Spans of SPAN bytes of bits are the unit of counting: a warp takes one.
const u32 SPAN = 1024, LANES = 32;

extern "C" __global__ void torchrelay_count(const u8* bits, u64 nbytes, u32* counts) {
    const u64 warps = (u64)gridDim.x * blockDim.x / LANES, lane = threadIdx.x % LANES;
    const u64 spans = (nbytes + SPAN - 1) / SPAN;
    for (u64 span = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / LANES; span < spans;
         span += warps) {
        u32 count = 0;
        const u64 begin = span * SPAN, end = begin + SPAN < nbytes ? begin + SPAN : nbytes;
        if (end - begin == SPAN) {
#pragma unroll
            for (u32 turn = 0; turn < SPAN / 4 / LANES; turn++)
                count += __popc(((const u32*)(bits + begin))[turn * LANES + lane]);
        } else {
#pragma unroll 1
            for (u64 at = begin + lane; at < end; at += LANES) count += __popc((u32)bits[at]);
        }
#pragma unroll
        for (int other = 16; other; other /= 2) count += __shfl_down_sync(~0u, count, other);
        if (lane == 0) counts[span] = count;
    }
}
