// Kernels for many pieces of device memory at once: copies of them, their digests, and both.
//
// kernels.ptx is made of this file by `python -m benchmarks.gpu.kernels --write`.

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned char u8;

// A part of a piece: `nbytes` at `from` that go to `to`.
struct Tile {
    const u8* from;
    u8* to;
    u64 nbytes;
};

struct alignas(16) Pair {
    u64 low, high;
};

// Eight bytes at any address, by loads of whole words that hold at least one of them.
__device__ __forceinline__ u64 word_at(const u8* at) {
    const u64 skip = (u64)at & 7;
    const u64* words = (const u64*)(at - skip);
    if (skip == 0) return words[0];
    return words[0] >> (8 * skip) | words[1] << (64 - 8 * skip);
}

extern "C" __global__ void torchrelay_copy(const Tile* tiles, u64 count) {
    const u64 width = blockDim.x;
    for (u64 number = blockIdx.x; number < count; number += gridDim.x) {
        const Tile tile = tiles[number];
        u64 head = -(u64)tile.to & 15;
        if (head > tile.nbytes) head = tile.nbytes;
        if (threadIdx.x < head) tile.to[threadIdx.x] = tile.from[threadIdx.x];
        const u8* from = tile.from + head;
        u8* to = tile.to + head;
        const u64 pairs = (tile.nbytes - head) / 16;
        if (((u64)from & 15) == 0) {
            const Pair* source = (const Pair*)from;
            Pair* target = (Pair*)to;
            u64 index = threadIdx.x;
            for (; index + 3 * width < pairs; index += 4 * width) {
                const Pair a = source[index], b = source[index + width];
                const Pair c = source[index + 2 * width], d = source[index + 3 * width];
                target[index] = a;
                target[index + width] = b;
                target[index + 2 * width] = c;
                target[index + 3 * width] = d;
            }
#pragma unroll 1
            for (; index < pairs; index += width) target[index] = source[index];
        } else {
            u64* target = (u64*)to;
            const u64 words = pairs * 2;
            u64 index = threadIdx.x;
            for (; index + 3 * width < words; index += 4 * width) {
                const u64 a = word_at(from + 8 * index), b = word_at(from + 8 * (index + width));
                const u64 c = word_at(from + 8 * (index + 2 * width));
                const u64 d = word_at(from + 8 * (index + 3 * width));
                target[index] = a;
                target[index + width] = b;
                target[index + 2 * width] = c;
                target[index + 3 * width] = d;
            }
#pragma unroll 1
            for (; index < words; index += width) target[index] = word_at(from + 8 * index);
        }
#pragma unroll 1
        for (u64 at = pairs * 16 + threadIdx.x; at < tile.nbytes - head; at += width)
            to[at] = from[at];
    }
}

// XXH3-128 with seed 0, as the xxhash library has it.
//
// A chunk is the bytes of its segments, one after the other. A segment ends at byte `end` of the
// chunk; byte `at` of the chunk lies at `base + at`, or is zero where `base` is 0. The segments of
// a chunk are `first` up to that of the next chunk. Its digest is 16 bytes in canonical order.
//
// Eight lanes take a chunk: one for each of the algorithm's accumulators. Where they also copy it,
// byte `at` goes to `to + at`, and what is hashed is read again from there: a second pass over the
// memory would cost half as much as the copy, and this one finds it in the device's cache.

struct Chunk {
    u64 first, nbytes;
};

struct Segment {
    const u8* base;
    u64 end;
    u8* to;
};

struct Hash {
    u64 low, high;
};

const u64 P1 = 0x9E3779B185EBCA87ull, P2 = 0xC2B2AE3D27D4EB4Full, P3 = 0x165667B19E3779F9ull;
const u64 P4 = 0x85EBCA77C2B2AE63ull, P5 = 0x27D4EB2F165667C5ull;
const u64 Q1 = 0x9E3779B1ull, Q2 = 0x85EBCA77ull, Q3 = 0xC2B2AE3Dull;  // those of 32 bits
const u64 MIX1 = 0x165667919E3779F9ull, MIX2 = 0x9FB21C651E98DF25ull;
const int SECRET_BYTES = 192, STRIPE = 64, STRIPES = 16, BLOCK = STRIPE * STRIPES;

__constant__ u64 SECRET[SECRET_BYTES / 8] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull,
    0x78e5c0cc4ee679cbull, 0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull,
    0xcb00c391bb52283cull, 0xa32e531b8b65d088ull, 0x4ef90da297486471ull, 0xd8acdea946ef1938ull,
    0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull, 0x647378d9c97e9fc8ull,
    0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull, 0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull,
    0xfca1477d58be162bull, 0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull,
};

__device__ __noinline__ u64 secret(int at) {
    const int skip = 8 * (at & 7);
    const u64 word = SECRET[at >> 3];
    return skip == 0 ? word : word >> skip | SECRET[(at >> 3) + 1] << (64 - skip);
}

__device__ u64 fold(u64 a, u64 b) { return a * b ^ __umul64hi(a, b); }

__device__ u64 avalanche(u64 h) {
    h = (h ^ h >> 37) * MIX1;
    return h ^ h >> 32;
}

__device__ u64 avalanche64(u64 h) {
    h = (h ^ h >> 33) * P2;
    h = (h ^ h >> 29) * P3;
    return h ^ h >> 32;
}

__device__ __noinline__ u64 swapped(u64 word) {
    u64 other = 0;
#pragma unroll 1
    for (int byte = 0; byte < 8; byte++) other = other << 8 | (word >> (8 * byte) & 255);
    return other;
}

// Where the bytes of a segment are hashed: where they lie, or where they have been copied to.
template <bool COPIED>
__device__ __forceinline__ const u8* hashed_at(const Segment* segment) {
    return COPIED ? segment->to : segment->base;
}

// The bytes [at, at + count) of a chunk as a number, wherever they lie. `segment` is the one that
// holds byte `at`, or one before it.
template <bool COPIED>
__device__ __noinline__ u64 gathered(const Segment* segment, u64 at, int count) {
    while (segment->end <= at) segment++;
    const u8* base = hashed_at<COPIED>(segment);
    if (count == 8 && at + 8 <= segment->end) return base ? word_at(base + at) : 0;
    u64 word = 0;
#pragma unroll 1
    for (int byte = 0; byte < count; byte++, at++) {
        while (segment->end <= at) segment++;
        base = hashed_at<COPIED>(segment);
        if (base) word |= (u64)base[at] << (8 * byte);
    }
    return word;
}

// The eight lanes that take a chunk.
__device__ __forceinline__ u32 group() { return 0xffu << (threadIdx.x & 24); }

// Copy the bytes [at, stop) of a chunk by eight lanes, each of which sees all of them afterwards.
__device__ __noinline__ void copied(const Segment* segment, u64 at, u64 stop, int lane) {
#pragma unroll 1
    for (at += lane; at < stop; at += 8) {
        while (segment->end <= at) segment++;
        if (segment->base) segment->to[at] = segment->base[at];
    }
    __syncwarp(group());
}

template <bool COPIED>
__device__ __noinline__ void mix(Hash& acc, const Segment* s, u64 one, u64 other, int key) {
    const u64 a = gathered<COPIED>(s, one, 8), b = gathered<COPIED>(s, one + 8, 8);
    const u64 c = gathered<COPIED>(s, other, 8), d = gathered<COPIED>(s, other + 8, 8);
    acc.low = (acc.low + fold(a ^ secret(key), b ^ secret(key + 8))) ^ (c + d);
    acc.high = (acc.high + fold(c ^ secret(key + 16), d ^ secret(key + 24))) ^ (a + b);
}

// Of at most 240 bytes, by one lane.
template <bool COPIED>
__device__ __noinline__ Hash short_hash(const Segment* s, u64 n) {
    if (n == 0)
        return {avalanche64(secret(64) ^ secret(72)), avalanche64(secret(80) ^ secret(88))};
    if (n <= 3) {
        const u32 a = gathered<COPIED>(s, 0, 1), b = gathered<COPIED>(s, n >> 1, 1);
        const u32 c = gathered<COPIED>(s, n - 1, 1);
        const u32 low = a << 16 | b << 24 | c | (u32)n << 8;
        const u32 other = swapped(low) >> 32;
        const u32 high = other << 13 | other >> 19;
        const u64 flip = secret(0), flop = secret(8);
        return {avalanche64(low ^ (u32)(flip ^ flip >> 32)),
                avalanche64(high ^ (u32)(flop ^ flop >> 32))};
    }
    if (n <= 8) {
        const u64 word = gathered<COPIED>(s, 0, 4) + (gathered<COPIED>(s, n - 4, 4) << 32);
        const u64 a = word ^ secret(16) ^ secret(24), b = P1 + (n << 2);
        u64 low = a * b, high = __umul64hi(a, b);
        high += low << 1;
        low ^= high >> 3;
        low = (low ^ low >> 35) * MIX2;
        return {low ^ low >> 28, avalanche(high)};
    }
    if (n <= 16) {
        const u64 first = gathered<COPIED>(s, 0, 8);
        u64 last = gathered<COPIED>(s, n - 8, 8);
        const u64 a = first ^ last ^ secret(32) ^ secret(40);
        u64 low = a * P1 + ((n - 1) << 54), high = __umul64hi(a, P1);
        last ^= secret(48) ^ secret(56);
        high += last + (u64)(u32)last * (Q2 - 1);
        low ^= swapped(high);
        return {avalanche(low * P2), avalanche(__umul64hi(low, P2) + high * P2)};
    }
    Hash acc = {n * P1, 0};
    if (n <= 128) {
#pragma unroll 1
        for (int round = (int)((n - 1) / 32); round >= 0; round--)
            mix<COPIED>(acc, s, 16 * round, n - 16 * (round + 1), 32 * round);
    } else {
#pragma unroll 1
        for (int at = 0; at < 128; at += 32) mix<COPIED>(acc, s, at, at + 16, at);
        acc = {avalanche(acc.low), avalanche(acc.high)};
#pragma unroll 1
        for (int at = 128; at + 32 <= n; at += 32) mix<COPIED>(acc, s, at, at + 16, at - 125);
        mix<COPIED>(acc, s, n - 16, n - 32, 103);
    }
    return {avalanche(acc.low + acc.high),
            0 - avalanche(acc.low * P1 + acc.high * P4 + n * P2)};
}

__device__ __forceinline__ u64 shuffled(u64 word, int other) {
    return __shfl_xor_sync(group(), word, other, 8);
}

__device__ __forceinline__ u64 accumulated(u64 acc, u64 word, u64 key) {
    const u64 keyed = word ^ key;
    return acc + (keyed & 0xffffffffu) * (keyed >> 32) + shuffled(word, 1);
}

// A word of device memory as all of the device sees it, not one of its processors.
__device__ __forceinline__ u64 word_of_device(const u8* at) {
#ifdef __CUDA_ARCH__
    u64 word;
    asm volatile("ld.global.cg.u64 %0, [%1];" : "=l"(word) : "l"(at) : "memory");
    return word;
#else
    return *(const volatile u64*)at;
#endif
}

// So many stripes from the one that has this lane's word at `at`, wherever they lie.
template <bool COPIED>
__device__ __noinline__ u64 stripes(const Segment* segment, u64 acc, u64 at, int count, int lane) {
#pragma unroll 1
    for (int k = 0; k < count; k++, at += STRIPE)
        acc = accumulated(acc, gathered<COPIED>(segment, at, 8), SECRET[k + lane]);
    return acc;
}

// Of more than 240 bytes, by eight lanes together.
template <bool COPIES>
__device__ Hash long_hash(const Segment* segment, u64 n, int lane, const u64* keys) {
    const u64 initial[8] = {Q3, P1, P2, P3, P4, Q2, P5, Q1};
    u64 acc = 0;
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (lane == i) acc = initial[i];
    const u64 blocks = (n - 1) / BLOCK, scramble = SECRET[STRIPES + lane];
    u64 at = 8 * lane;  // of this lane's word of the stripe
    Segment here = *segment;
    for (u64 block = 0; block < blocks; block++, at += BLOCK) {
        const u64 begin = block * BLOCK;
        while (here.end <= begin) here = *++segment;
        const u8* from = here.base + at;
        u8* to = COPIES ? here.to + at : (u8*)0;
        if (here.base && begin + BLOCK <= here.end && (((u64)from | (u64)to) & 7) == 0) {
            u64 words[STRIPES];
#pragma unroll
            for (int k = 0; k < STRIPES; k++) words[k] = *(const u64*)(from + STRIPE * k);
            if (COPIES) {
#pragma unroll
                for (int k = 0; k < STRIPES; k++) *(u64*)(to + STRIPE * k) = words[k];
#pragma unroll
                for (int k = 0; k < STRIPES; k++) words[k] = word_of_device(to + STRIPE * k);
            }
#pragma unroll
            for (int k = 0; k < STRIPES; k++) acc = accumulated(acc, words[k], keys[k]);
        } else {
            if (COPIES) copied(segment, begin, begin + BLOCK, lane);
            acc = stripes<COPIES>(segment, acc, at, STRIPES, lane);
        }
        acc = ((acc ^ acc >> 47) ^ scramble) * Q1;
    }
    if (COPIES) copied(segment, blocks * BLOCK, n, lane);
    acc = stripes<COPIES>(segment, acc, at, (int)((n - 1 - blocks * BLOCK) / STRIPE), lane);
    const u64 end = gathered<COPIES>(segment, n - STRIPE + 8 * lane, 8);
    acc = accumulated(acc, end, secret(SECRET_BYTES - STRIPE - 7 + 8 * lane));
    // Each even lane folds its accumulator with its neighbour's.
    const u64 next = shuffled(acc, 1);
    const int high = SECRET_BYTES - STRIPE - 11;
    Hash sum = {fold(acc ^ secret(11 + 8 * lane), next ^ secret(19 + 8 * lane)),
                fold(acc ^ secret(high + 8 * lane), next ^ secret(high + 8 + 8 * lane))};
    for (int other = 2; other < 8; other *= 2) {
        sum.low += shuffled(sum.low, other);
        sum.high += shuffled(sum.high, other);
    }
    return {avalanche(n * P1 + sum.low), avalanche(~(n * P2) + sum.high)};
}

template <bool COPIES>
__device__ __forceinline__ void hash_chunks(
    const Chunk* chunks, u64 count, const Segment* segments, u64* digests) {
    const int lane = threadIdx.x % 8;
    const u64 groups = (u64)gridDim.x * blockDim.x / 8;
    u64 keys[STRIPES];
#pragma unroll
    for (int k = 0; k < STRIPES; k++) keys[k] = SECRET[k + lane];
    for (u64 number = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / 8; number < count;
         number += groups) {
        const Chunk chunk = chunks[number];
        const Segment* segment = segments + chunk.first;
        Hash hash = {0, 0};
        if (chunk.nbytes > 240) {
            hash = long_hash<COPIES>(segment, chunk.nbytes, lane, keys);
        } else {
            if (COPIES) copied(segment, 0, chunk.nbytes, lane);
            if (lane == 0) hash = short_hash<COPIES>(segment, chunk.nbytes);
        }
        if (lane == 0) {
            digests[2 * number] = swapped(hash.high);
            digests[2 * number + 1] = swapped(hash.low);
        }
    }
}

extern "C" __global__ void torchrelay_xxh3_128(
    const Chunk* chunks, u64 count, const Segment* segments, u64* digests) {
    hash_chunks<false>(chunks, count, segments, digests);
}

extern "C" __global__ void torchrelay_copy_xxh3_128(
    const Chunk* chunks, u64 count, const Segment* segments, u64* digests) {
    hash_chunks<true>(chunks, count, segments, digests);
}
